"""From text to what training reads: a tokenizer, token files and word blocks, stored in the run's folder."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor

from hmmlm.config.defaults import TextSize
from hmmlm.config.explain import explain
from hmmlm.config.initialization import BigramConfig
from hmmlm.config.run import RunConfig
from hmmlm.config.sections import (
    BatchConfig,
    BatchesConfig,
    ChunkConfig,
    FileTokenizerConfig,
    StreamConfig,
    TextConfig,
)
from hmmlm.config.training import AnyConfig, TrainingConfig
from hmmlm.data.batches import ALL_ROWS, Batches, ChunkBatches, Share, StreamBatches
from hmmlm.data.corpora import NAMES, SPLITS, Documents, LabelledLine, encode_documents, load_text, notices
from hmmlm.data.files import link_or_copy, parse_json, read_json, replacing, require_like, write_bytes
from hmmlm.data.shards import count_parts, encode_parts
from hmmlm.data.tokenfile import TokenFile, unknown_fraction
from hmmlm.data.tokenizers import Tokenizer, find_tokenizer, load_tokenizer
from hmmlm.data.words import Split
from hmmlm.device import total_memory
from hmmlm.distillation.samples import SETTINGS
from hmmlm.errors import InputError
from hmmlm.models.base import BlockedConfig
from hmmlm.runs.folders import BLOCKS
from hmmlm.runs.progress import Progress
from hmmlm.section import ModelSize
from hmmlm.structure.brown import BrownClustering, brown_clusters
from hmmlm.structure.paths import read_paths
from hmmlm.terminal import counted
from hmmlm.training.tokenizers import make_tokenizer

MAX_IN_SMALL_TEXT = 1_024  # states per block, where a text has too few words for the blocks: a step takes its square
MAX_SHARED = 128  # blocks of several words, beside those of single ones
MAX_CLUSTERS = 4_096  # the time of clustering grows with their square
MIN_STREAM_TOKENS = 2_000  # of a stream in evaluation that carries through <eos>: each starts without context

Item = TypeVar("Item")


@dataclass(frozen=True)
class Prepared:
    """What a run trains and validates on."""

    tokenizer: Tokenizer
    tokens: dict[str, TokenFile]
    """train, valid and test."""
    block_of_word: Tensor | None = None
    """[V], if the model's emissions are blocked."""


def is_prepared(folder: Path) -> bool:
    """Return whether a folder has token files, of a run or of `hmmlm data`."""
    return (folder / "data" / "train.json").exists()


def check_data(config: TrainingConfig) -> None:
    """Raise an InputError if a text or its tokenizer is missing or visibly wrong; named corpora are not looked up."""
    if is_prepared(Path(config.data)):
        return
    if (Path(config.data) / SETTINGS).exists():
        raise InputError(f"{config.data} has no samples yet: continue with `hmmlm distill --resume` and its run")
    if config.data not in NAMES:
        load_text(config.data, unit=config.text.unit)
    if isinstance(config.tokenizer, FileTokenizerConfig):
        find_tokenizer(config.tokenizer.file)


def with_actual_text(config: AnyConfig, saved: AnyConfig | None) -> AnyConfig:
    """Return the configuration with the tokenizer and the unit that are really used: those of existing token files.

    `saved`: the configuration of the run that is resumed, whose token files may be gone.
    """
    folder = Path(config.data)
    actual = FileTokenizerConfig(file=folder / "tokenizer")
    if saved is not None and saved.tokenizer == actual:
        return config.model_copy(update={"tokenizer": actual, "text": saved.text})
    if is_prepared(folder):
        text = TextConfig.model_validate({"unit": TokenFile.open(folder / "data" / "train").unit})
        return config.model_copy(update={"tokenizer": actual, "text": text})
    return config


def find_data(config: TrainingConfig) -> Mapping[str, Documents] | Path:
    """Return the splits of a text, or the folder itself if it has token files."""
    folder, labels = Path(config.data), getattr(config, "labels", None)
    if is_prepared(folder):
        if labels is not None:
            raise InputError(f"labels are of the lines of a text, and {folder} has token files: give --data the text")
        return folder
    return load_text(config.data, folder=config.data_folder, download=True, unit=config.text.unit, labels=labels)


def write_labels(documents: Documents, tokenizer: Tokenizer, num_states: int, path: Path) -> None:
    """Write the state of each token of a text with labels, −1 where it is unknown."""
    states = list[int]()
    for document in documents:
        assert isinstance(document, LabelledLine)
        names, tokens = document.labels.split(), tokenizer.encode(document[0])
        if len(names) != len(tokens):
            shown = " ".join(map(tokenizer.token, tokens))
            raise InputError(
                f"{document.where}: {counted(len(names), 'label')} for {counted(len(tokens), 'token')} "
                f"({shown:.60}): give one for each, _ where the state is unknown"
            )
        for name in names:
            if name != "_" and not (name.isdecimal() and int(name) < num_states):
                raise InputError(
                    f"{document.where}: {name!r:.20} is no label: "
                    f"give the number of a state, 0 to {num_states - 1}, or _"
                )
        states += [*(-1 if name == "_" else int(name) for name in names), -1]  # of <eos>
    with replacing(path) as (temporary,), temporary.open("wb") as file:
        np.save(file, np.array(states, np.int32))


def prepare(
    config: TrainingConfig,
    source: Mapping[str, Documents] | Path,
    run: Path,
    progress: Progress,
    workers: int | None = None,
    max_unknown: float = 0.2,
) -> Prepared:
    """Write run/tokenizer and run/data, from a folder of token files or from a text.

    `workers`: processes that read a text at the same time; what they have written before is kept. None: this one alone.
    `max_unknown`: fraction of the held-out words of a text above which its tokenizer is refused.
    """
    if workers is None:
        shutil.rmtree(run / "tokenizer", ignore_errors=True)  # of an earlier start without a checkpoint
    if isinstance(source, Path):
        progress.note(
            f"using the token files and the tokenizer of {source}; [text] and [tokenizer] settings have no effect"
        )
        for part in ("tokenizer", "data"):
            link_or_copy(source / part, run / part)
        try:
            opened = reopen(run)
        except InputError:
            reopen(source)  # the message names the user's file, not the copy
            raise
        tokenizer, tokens = opened.tokenizer, opened.tokens
    elif workers is None:
        tokenizer, tokens = _encode(config, source, run, progress)
    else:
        tokenizer, tokens = _encode_in_parts(config, source, run, progress, workers)
    unknown = unknown_fraction(tokens["valid"], tokenizer.unk_id, tokenizer.eos_id)
    if unknown > max_unknown and not isinstance(source, Path):
        raise InputError(
            f"{unknown:.0%} of the held-out words would be unknown to the {tokenizer.vocab_size:,} tokens of this "
            "tokenizer: use --tokenizer.kind bpe, or auto, which chooses by the text"
        )
    return Prepared(tokenizer, tokens)


def text_size(data: Prepared) -> TextSize:
    """Return what the settings that follow from a text depend on."""
    train, eos = data.tokens["train"], data.tokenizer.eos_id
    return TextSize(data.tokenizer.vocab_size, len(train), int(train.word_counts()[eos]))


def add_blocks(config: RunConfig, data: Prepared, run: Path, progress: Progress) -> Prepared:
    """Return the data with the word blocks of the model, if it has blocks; they are written to run/blocks.json."""
    model = config.model
    if not isinstance(model, BlockedConfig) or not model.blocks:
        return data
    if isinstance(config.initialization, BigramConfig) and model.clusters is None:
        blocks = word_blocks(data.tokens["train"], model.blocks, progress)
    else:
        blocks = make_blocks(model, data.tokenizer, data.tokens["train"], progress)
    write_bytes(run / BLOCKS, json.dumps(blocks).encode())
    return replace(data, block_of_word=torch.tensor(blocks))


def _encode(
    config: TrainingConfig, splits: Mapping[str, Documents], run: Path, progress: Progress
) -> tuple[Tokenizer, dict[str, TokenFile]]:
    progress.note(" ".join(filter(None, [f"reading {config.data}", splits["train"].note])))

    for notice in notices(config.data, splits):
        progress.note(notice)
    tokenizer = make_tokenizer(config.tokenizer, splits, progress)
    tokenizer.save(run / "tokenizer")
    tokens = {}
    for split, documents in splits.items():
        with progress.phase(f"encoding {split}", unit="documents") as phase:
            tracked = replace(documents, read=partial(_track, documents, phase.advance))
            tokens[split] = encode_documents(tracked, tokenizer, run / "data" / split)
    return tokenizer, tokens


def _encode_in_parts(
    config: TrainingConfig, splits: Mapping[str, Documents], run: Path, progress: Progress, workers: int
) -> tuple[Tokenizer, dict[str, TokenFile]]:
    progress.note(" ".join(filter(None, [f"reading {config.data}", splits["train"].note])))
    counts = run / ".tokenizer.parts"
    if not any((run / "tokenizer").glob("tokenizer.*")):

        def count(split: Split, lowercase: bool) -> Counter[str]:
            with progress.phase("tokenizer", len(splits["train"].divide()), unit="parts") as phase:
                return count_parts(splits["train"], split, lowercase, counts, workers, phase.advance)

        make_tokenizer(config.tokenizer, splits, progress, count).save(run / "tokenizer")
    shutil.rmtree(counts, ignore_errors=True)
    tokens = {}
    for split, documents in splits.items():
        with progress.phase(f"encoding {split}", len(documents.divide()), unit="parts") as phase:
            tokens[split] = encode_parts(documents, run / "tokenizer", run / "data" / split, workers, phase.advance)
    return load_tokenizer(run / "tokenizer"), tokens


def text_digests(run: Path) -> dict[str, str]:
    """Return the digests of the token files that exist, by split."""
    headers = {split: run / "data" / f"{split}.json" for split in SPLITS}
    return {split: str(read_json(header).get("digest")) for split, header in headers.items() if header.exists()}


def reopen(run: Path) -> Prepared:
    """Open what `prepare` wrote; the text itself is no longer needed."""
    tokenizer = load_tokenizer(run / "tokenizer")
    fingerprint = tokenizer.fingerprint()
    tokens = {split: TokenFile.open(run / "data" / split, fingerprint) for split in SPLITS}
    for file in tokens.values():
        if file.vocab_size != tokenizer.vocab_size:
            raise InputError(
                f"{file.name} has a vocabulary of {file.vocab_size} tokens, {run / 'tokenizer'} one of "
                f"{tokenizer.vocab_size}: prepare the text again"
            )
    return Prepared(tokenizer, tokens, _read_blocks(run / BLOCKS, tokenizer.vocab_size))


def _read_blocks(path: Path, vocab_size: int) -> Tensor | None:
    """Return the block of each word [V], if the run has blocks."""
    if not path.exists():
        return None
    blocks = parse_json(path)
    require_like(path, blocks, [0], "the list of blocks")
    if len(blocks) != vocab_size:
        raise InputError(f"{path} has blocks of {len(blocks)} words, the tokenizer has {vocab_size}: it is damaged")
    return torch.tensor(blocks)


def check_batch_size(batches: BatchConfig, processes: int) -> None:
    """Raise an InputError if a batch has fewer sequences than there are processes."""
    if batches.batch_size < processes:
        raise InputError(
            f"batches.batch_size is {batches.batch_size}, fewer than the {processes} processes of this run, and each "
            "trains on at least one sequence of a batch: set --batches.batch-size to a multiple of their number, or "
            "start fewer processes"
        )


def check_memory(size: ModelSize, optimizer: str, device: torch.device) -> None:
    """Raise an InputError if training holds more than the memory of the device.

    A lower bound: parameters, with AdamW also gradients and two moments; and probabilities with their gradients or
    expected counts.
    """
    copies = 4 if optimizer == "adamw" else 1
    needed = 4 * (copies * size.parameters + 2 * size.probabilities)
    available = total_memory(device)
    if needed > available:
        where = "the GPU" if device.type == "cuda" else "this machine"
        raise InputError(
            f"training this model takes at least {needed / 1e9:,.0f} GB, and {where} has {available / 1e9:,.0f} GB: "
            "use fewer states (--model.num-states), more blocks (--model.blocks), a narrower network (--model.hidden) "
            "or a smaller vocabulary (--tokenizer.vocab-size)"
        )


def make_batches(config: TrainingConfig, data: Prepared, split: str, share: Share = ALL_ROWS) -> Batches:
    """Return the batches of a split: training is shuffled if configured, evaluation reads in order."""
    if split != "train":
        return evaluation_batches(config.batches, data.tokens[split], data.tokenizer.eos_id, share)
    batches, tokens, seed = config.batches, data.tokens[split], config.train.seed
    if isinstance(batches, ChunkConfig):
        return ChunkBatches(tokens, batches.batch_size, batches.length, shuffle=batches.shuffle, seed=seed, share=share)
    return StreamBatches(
        tokens,
        batches.batch_size,
        batches.length,
        shuffle=batches.shuffle,
        reset_at_eos=batches.reset_at_eos,
        eos_id=data.tokenizer.eos_id,
        seed=seed,
        share=share,
    )


def evaluation_batches(
    config: BatchesConfig,
    tokens: TokenFile,
    eos_id: int,
    share: Share = ALL_ROWS,
    min_stream_tokens: int = MIN_STREAM_TOKENS,
) -> Batches:
    """Return the batches in which a text is evaluated.

    The result should not depend on the number of streams: they are cut between examples or, where the carry runs
    through these, have at least `min_stream_tokens` tokens each.
    """
    if isinstance(config, ChunkConfig):
        return ChunkBatches(tokens, config.batch_size, config.length, shuffle=False, seed=0, share=share)
    reset = config.eval_reset_at_eos
    size = max(1, min(config.batch_size, len(tokens) // (1 if reset else min_stream_tokens)))
    return StreamBatches(
        tokens, size, config.length, shuffle=False, reset_at_eos=reset, eos_id=eos_id, seed=0, whole=reset, share=share
    )


def trained_batches(training: Mapping[str, Any]) -> BatchesConfig:
    """Return the batches section of the configuration that a saved model was trained with, of any version."""
    values = training.get("batches", {})
    # A model without a configuration continues through <eos>, as `LanguageModel.restarts` has it.
    kind: type[BatchConfig] = StreamConfig
    defaults = {"reset_at_eos": False, "eval_reset_at_eos": False}
    if values.get("kind") == "chunks":
        kind = ChunkConfig
    given = {name: value for name, value in {**defaults, **values}.items() if name in kind.model_fields}
    try:
        return kind.model_validate(given)  # type: ignore[return-value]
    except ValidationError as error:
        raise InputError(f"the training configuration of the model: batches.{explain(kind, error)}") from None


def make_blocks(config: BlockedConfig, tokenizer: Tokenizer, train: TokenFile, progress: Progress) -> list[int]:
    """Return the block of each word: from a `paths` file, or by clustering the training text."""
    if config.clusters is not None:
        vocabulary = [tokenizer.token(i) for i in range(tokenizer.vocab_size)]
        clustering = read_paths(config.clusters, vocabulary)
    else:
        words, blocks = count_words(train), count_blocks(config, train)
        most = min(config.blocks, max(1, words // 2))
        if blocks < config.blocks and config.num_states // blocks > MAX_IN_SMALL_TEXT:
            raise InputError(
                f"model.blocks is {config.blocks:,}, but the training text has {words:,} different words: set it to "
                f"{most:,} or less, and use fewer states"
            )
        if blocks < config.blocks:
            progress.note(
                f"the training text has {words:,} different words: {blocks} blocks of {config.num_states // blocks} "
                f"states instead of {config.blocks:,} blocks"
            )
        if blocks > MAX_CLUSTERS:
            raise InputError(
                f"model.blocks is {config.blocks:,}: clustering words into more than {MAX_CLUSTERS:,} takes hours; use "
                "fewer, or give clusters of your own with model.clusters"
            )
        clustering = cluster_words(train, blocks, config.exchange_passes, progress)
    found = len(clustering.paths)
    if config.clusters is not None and found != config.blocks:
        raise InputError(
            f"model.blocks is {config.blocks}, but {config.clusters} has {found} clusters: set it to {found}"
        )
    return [int(cluster) for cluster in clustering.with_unseen_placed()]


def word_blocks(train: TokenFile, blocks: int, progress: Progress) -> list[int]:
    """Return blocks of single words, the most frequent ones, and a few blocks of all others, by Brown clusters."""
    counts = train.word_counts()
    if blocks > len(counts):
        raise InputError(f"model.blocks is {blocks:,}, but the vocabulary has {len(counts):,} words: set it to that")
    shared = max(1, min(MAX_SHARED, blocks // 4)) if blocks < len(counts) else 0
    order = np.argsort(-counts, kind="stable")
    block_of_word = np.empty(len(counts), dtype=np.int64)
    block_of_word[order[: blocks - shared]] = np.arange(blocks - shared)
    if shared:
        rare = order[blocks - shared :]
        cluster = cluster_words(train, shared, 0, progress).with_unseen_placed()
        parts = np.array_split(rare[np.argsort(cluster[rare], kind="stable")], shared)  # in the order of the tree
        for block, words in enumerate(parts, blocks - shared):
            block_of_word[words] = block
    return [int(block) for block in block_of_word]


def count_blocks(config: BlockedConfig, train: TokenFile) -> int:
    """Return the number of blocks for a text: as configured, or fewer if it has fewer than two words for each."""
    most = min(config.blocks, max(1, count_words(train) // 2))
    return next(count for count in range(most, 0, -1) if config.num_states % count == 0)


def count_words(tokens: TokenFile) -> int:
    """Return the number of different words of a text."""
    return int(np.count_nonzero(tokens.word_counts()))


def cluster_words(train: TokenFile, clusters: int, exchange_passes: int, progress: Progress) -> BrownClustering:
    """Return Brown clusters of a token file's words."""
    with progress.phase(f"clustering into {clusters}", count_words(train), unit="words") as phase:
        return brown_clusters(
            train.tokens,
            train.vocab_size,
            clusters,
            documents=train.documents[:-1],
            exchange_passes=exchange_passes,
            on_word=phase.advance,
        )


def _track(items: Iterable[Item], advance: Callable[[int], None]) -> Iterator[Item]:
    for item in items:
        yield item
        advance(1)
