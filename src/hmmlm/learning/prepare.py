"""From text to what training reads: a tokenizer, token files and word clusters, kept in the run's folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from hmmlm.data.batches import ChunkBatches, StreamBatches
from hmmlm.data.corpora import SPLITS, Documents, encode_documents, load_text
from hmmlm.data.files import link_or_copy, read_bytes, write_bytes
from hmmlm.data.tokenfile import TokenFile
from hmmlm.data.tokenizer import HuggingFaceTokenizer, Tokenizer, WordTokenizer, load_tokenizer
from hmmlm.errors import InputError
from hmmlm.learning.config import ModelConfig, RunConfig, TokenizerConfig
from hmmlm.learning.progress import Progress
from hmmlm.parameterization import (
    BlockedFactored,
    BlockedNeural,
    BlockedScalar,
    Parameterization,
    Scalar,
    UniformNeural,
    make_dense,
)
from hmmlm.structure.blocks import Blocks, UniformSubsets
from hmmlm.structure.brown import BrownClustering, brown_clusters
from hmmlm.structure.paths import read_paths

CLUSTERS = "clusters.json"
FEWEST_TOKENS = 2_000  # of a stream in evaluation, where the state is carried through: each begins without context

Item = TypeVar("Item")


@dataclass(frozen=True)
class Prepared:
    """What a run trains and validates on."""

    tokenizer: Tokenizer
    tokens: dict[str, TokenFile]
    """train, valid and test."""
    clusters: list[int] | None = None
    """Block of each word, if the model's emissions are blocked."""


def is_prepared(folder: Path) -> bool:
    """Whether there are token files in it, of a run or of `hmmlm data`."""
    return (folder / "data" / "train.json").exists()


def with_real_tokenizer(config: RunConfig, saved: RunConfig | None) -> RunConfig:
    """Where there are token files already (or were, for a run that was `saved`), their tokenizer: that is what is used,
    whatever was asked for."""
    file = Path(config.data) / "tokenizer"
    if is_prepared(Path(config.data)) or (saved is not None and saved.tokenizer.file == file):
        return config.model_copy(update={"tokenizer": TokenizerConfig(kind="file", file=file)})
    return config


def find_data(config: RunConfig) -> Mapping[str, Documents] | Path:
    """What a run is made from: the splits of a text, or the folder itself where `hmmlm data` has made one."""
    folder = Path(config.data)
    if is_prepared(folder):
        return folder
    return load_text(config.data, folder=config.data_folder, download=True)


def prepare(config: RunConfig, source: Mapping[str, Documents] | Path, run: Path, progress: Progress) -> Prepared:
    """Into run/tokenizer and run/data: those of a prepared folder, or of a text, whose tokenizer is made first."""
    shutil.rmtree(run / "tokenizer", ignore_errors=True)  # of an earlier start that came to no checkpoint
    if isinstance(source, Path):
        progress.note(f"token files of {source}, and their tokenizer: settings of [tokenizer] do not matter")
        for part in ("tokenizer", "data"):
            link_or_copy(source / part, run / part)
        opened = reopen(run)
        tokenizer, tokens = opened.tokenizer, opened.tokens
    else:
        tokenizer, tokens = _encode(config, source, run, progress)
    clusters = None
    if config.model.structure == "brown":
        clusters = make_clusters(config.model, tokenizer, tokens["train"], progress)
        write_bytes(run / CLUSTERS, json.dumps(clusters).encode())
    return Prepared(tokenizer, tokens, clusters)


def _encode(
    config: RunConfig, splits: Mapping[str, Documents], run: Path, progress: Progress
) -> tuple[Tokenizer, dict[str, TokenFile]]:
    progress.note(f"reading {config.data}")
    with progress.phase("tokenizer", unit="lines") as phase:
        lines = (line for document in splits["train"] for line in document)
        tokenizer = make_tokenizer(config.tokenizer, _counted(lines, phase.advance))
    tokenizer.save(run / "tokenizer")
    tokens = {}
    for split, documents in splits.items():
        with progress.phase(f"encoding {split}", unit="documents") as phase:
            counted = Documents(documents.source, partial(_counted, documents, phase.advance))
            tokens[split] = encode_documents(counted, tokenizer, run / "data" / split)
    return tokenizer, tokens


def reopen(run: Path) -> Prepared:
    """What `prepare` made, for a run that resumes: the text itself is not needed any more."""
    tokenizer = load_tokenizer(run / "tokenizer")
    fingerprint = tokenizer.fingerprint()
    tokens = {split: TokenFile.open(run / "data" / split, fingerprint) for split in SPLITS}
    clusters = json.loads(read_bytes(run / CLUSTERS)) if (run / CLUSTERS).exists() else None
    return Prepared(tokenizer, tokens, clusters)


def make_batches(config: RunConfig, data: Prepared, split: str) -> StreamBatches | ChunkBatches:
    """Batches of a split: training is shuffled if so configured, evaluation reads in order.

    What evaluation finds should not depend on how many streams it reads side by side: they are cut between examples or,
    where the state is carried through those, are few in a short text.
    """
    batches, tokens, training = config.batches, data.tokens[split], split == "train"
    size, shuffle, seed = batches.batch_size, batches.shuffle and training, config.train.seed
    if batches.kind == "chunks":
        return ChunkBatches(tokens, size, batches.length, shuffle=shuffle, drop_last=False, seed=seed)
    reset = batches.reset_at_eos if training else batches.eval_reset_at_eos
    if not training:
        size = max(1, min(size, len(tokens) // (1 if reset else FEWEST_TOKENS)))
    return StreamBatches(
        tokens, size, batches.length, shuffle=shuffle, reset_at_eos=reset, eos_id=data.tokenizer.eos_id, seed=seed,
        whole=reset and not training,
    )  # fmt: skip


def make_clusters(config: ModelConfig, tokenizer: Tokenizer, train: TokenFile, progress: Progress) -> list[int]:
    """The block of each word: from a `paths` file, or by clustering the training text."""
    if config.clusters is not None:
        words = [tokenizer.token(i) for i in range(tokenizer.vocab_size)]
        clustering = read_paths(config.clusters, words)
    else:
        progress.note(f"clustering {tokenizer.vocab_size:,} words into {config.blocks}")
        clustering = cluster_words(train, config.blocks, config.exchange_passes)
    found = len(clustering.paths)
    if found != config.blocks:
        source = config.clusters or "the training text"
        raise InputError(f"model.blocks is {config.blocks}, but {source} gives {found} clusters: set it to {found}")
    return [int(cluster) for cluster in clustering.with_unseen_placed()]


def cluster_words(train: TokenFile, clusters: int, exchange_passes: int = 0) -> BrownClustering:
    """Brown clusters of a token file's words."""
    return brown_clusters(
        np.asarray(train.tokens, dtype=np.int64), train.vocab_size, clusters, documents=train.documents[:-1],
        exchange_passes=exchange_passes,
    )


def make_parameterization(config: ModelConfig, data: Prepared, seed: int) -> Parameterization:
    """New parameters, drawn on the CPU, alike on every device."""
    words, generator = data.tokenizer.vocab_size, torch.Generator().manual_seed(seed)
    if config.structure == "uniform":
        return UniformNeural(
            UniformSubsets.sample(words, config.states, config.states_per_word, seed=seed), hidden=config.hidden,
            form=config.form, dropout=config.dropout, network_dropout=config.network_dropout, generator=generator,
        )  # fmt: skip
    if config.parameterization == "scalar" and data.clusters is None:
        return Scalar(config.states, words, config.scale, generator)
    clusters = torch.tensor([0] * words if data.clusters is None else data.clusters)
    blocks = Blocks.from_clusters(clusters, config.states, vocab_size=words)
    if config.parameterization in ("linear", "mlp", "transformer"):
        dense = make_dense(
            config.parameterization, config.states, words, hidden=config.hidden, capacity=config.capacity,
            layers=config.layers, heads=config.heads, skip=config.skip, relu=config.relu, norm=config.norm,
            split=config.split, mono=config.mono, start=config.factor_start, transition=config.factor_transition,
            emission=config.factor_emission, initial=config.init, scale=config.scale, generator=generator,
        )  # fmt: skip
        return dense if data.clusters is None else BlockedFactored(blocks, dense, config.dropout)
    if config.parameterization == "scalar":
        return BlockedScalar(blocks, config.dropout, config.scale, generator)
    return BlockedNeural(
        blocks, hidden=config.hidden, form=config.form, dropout=config.dropout, factored=config.factored,
        network_dropout=config.network_dropout, generator=generator,
    )  # fmt: skip


def make_tokenizer(config: TokenizerConfig, lines: Iterable[str]) -> Tokenizer:
    """The tokenizer a configuration asks for; `lines` are those of the training text."""
    if config.kind == "file":
        assert config.file is not None  # the configuration was validated
        return load_tokenizer(config.file)
    if config.kind == "bpe":
        return HuggingFaceTokenizer.train(lines, config.vocab_size)
    return WordTokenizer.train(
        lines, config.vocab_size, config.min_count, split=config.split, lowercase=config.lowercase
    )


def _counted(items: Iterable[Item], advance: Callable[[int], None]) -> Iterator[Item]:
    for item in items:
        yield item
        advance(1)
