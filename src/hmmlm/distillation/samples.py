"""A folder of texts sampled from a language model, as token files that training reads.

Texts are sampled in shards, each with a seed of its own and written whole, so that interrupted sampling resumes with
the same tokens. When all are there, they become train, valid and test files in the layout of `hmmlm data`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np

from hmmlm.data.corpora import SPLITS
from hmmlm.data.files import replacing
from hmmlm.data.text import read_documents
from hmmlm.data.tokenfile import TokenFile, write_tokens
from hmmlm.distillation.cache import content_name, teacher_facts
from hmmlm.errors import InputError
from hmmlm.teachers.sampling import SampledText, TextSampler
from hmmlm.terminal import counted

SETTINGS = "distill.json"
"""File with what is sampled; it is there before the first sample."""
DEFAULT_LENGTH = 256
HOLD_OUT = {"valid": 0, "test": 1}
HOLD_OUT_EVERY = 20
"""Of this many texts, one is for validation and one for test."""


@dataclass(frozen=True)
class SamplePlan:
    """What is sampled; the same plan gives the same tokens on the same machine."""

    tokens: int
    """As many are sampled, and the rest of the last text."""
    length: int
    """Maximum number of tokens of a text."""
    shard_texts: int
    """Texts that are sampled at once, at most."""
    seed: int


@dataclass(frozen=True)
class SampleFolder:
    """The folder of the samples of one model: shards/ while texts are sampled, then data/ and tokenizer/."""

    path: Path

    @property
    def complete(self) -> bool:
        return (self.path / "data" / "train.json").exists()

    @property
    def prompts(self) -> Path:
        return self.path / "prompts.txt"

    def read_prompts(self) -> list[str]:
        """Return the prompts that texts continue; an empty one if they begin with the beginning-of-text token."""
        return read_prompts(self.prompts) if self.prompts.exists() else [""]

    def log_probs(self, split: str) -> np.ndarray:
        """Return the model's own log-probabilities [N] of the tokens of a held-out split."""
        found: np.ndarray = np.load(self.path / "data" / f"{split}.npy")
        return found

    def fill(
        self, sampler: TextSampler, plan: SamplePlan, on_tokens: Callable[[int], None], on_resume: Callable[[int], None]
    ) -> None:
        """Sample the shards that are missing and write the token files; `on_resume` gets the tokens that exist."""
        facts = content_name(teacher_facts(sampler.name), plan.length, plan.shard_texts, plan.seed)
        prompts = [sampler.encode_prompt(line) for line in self.read_prompts()]
        fingerprint = sampler.student_tokenizer(sampler.eos).fingerprint()
        shards: list[Path] = []
        total = documents = 0
        for number in count():
            if total >= plan.tokens:
                break
            path = self.path / "shards" / f"{number:05}"
            if path.with_suffix(".json").exists():
                shard = TokenFile.open(path, fingerprint)
                if shard.source != facts:
                    raise InputError(
                        f"{shard.name} was sampled from another version of {sampler.name}: put that model back, or "
                        "distill into another folder"
                    )
                on_resume(len(shard))
            else:
                rng, left = np.random.default_rng([plan.seed, number]), plan.tokens - total
                # By their mean length, and a few more: a further shard of some texts would take as long as a whole one.
                needed = -(-21 * left * documents // (20 * total)) if total else -(-left // plan.length)
                fewest = HOLD_OUT_EVERY - documents  # so that some are held out
                size = min(plan.shard_texts, max(needed, fewest))
                chosen = [prompts[i] for i in rng.integers(len(prompts), size=size)]
                texts = sampler.sample(chosen, plan.length, int(rng.integers(1 << 62)), on_tokens)
                kept = int(np.searchsorted(np.cumsum([len(text.tokens) for text in texts]), left)) + 1
                shard = _write_shard(path, texts[: max(kept, fewest)], sampler.vocab_size, fingerprint, facts)
            shards.append(path)
            total, documents = total + len(shard), documents + len(shard.documents) - 1
        self._merge(sampler, shards)
        shutil.rmtree(self.path / "shards")

    def _merge(self, sampler: TextSampler, shards: Sequence[Path]) -> None:
        """Write the texts of all shards as train, valid and test files.

        Texts end with the end token that the model uses most; others, of which it may have several, become that one.
        """
        texts, log_probs = _read_shards(shards)
        last = np.array([text[-1] for text in texts])
        uses = [int(np.count_nonzero(last == end)) for end in sampler.ends]
        eos = sampler.ends[int(np.argmax(uses))]
        for text in texts:
            text[-1] = eos if text[-1] in sampler.ends else text[-1]
        tokenizer = sampler.student_tokenizer(eos)
        shutil.rmtree(self.path / "tokenizer", ignore_errors=True)
        tokenizer.save(self.path / "tokenizer")
        turn = np.arange(len(texts)) % HOLD_OUT_EVERY
        for split in sorted(SPLITS, key="train".__eq__):  # train is last: with it, the folder is complete
            chosen = np.flatnonzero(turn == HOLD_OUT[split] if split in HOLD_OUT else turn >= len(HOLD_OUT))
            if split in HOLD_OUT:
                _write_array(self.path / "data" / f"{split}.npy", np.concatenate([log_probs[i] for i in chosen]))
            size = sum(len(tokenizer.decode(texts[i].tolist()).encode()) for i in chosen)
            source = content_name([shard.name for shard in shards], split)
            write_tokens(
                self.path / "data" / split,
                (texts[i] for i in chosen),
                tokenizer.vocab_size,
                tokenizer.fingerprint(),
                source,
                lambda size=size: size,  # type: ignore[misc]
            )


def read_prompts(path: Path) -> list[str]:
    """Return the prompts in a file, one per line."""
    if not path.is_file():
        raise InputError(f"no file of prompts {path}: give one with a prompt per line")
    return list(read_documents(path))


def fitting_length(sampler: TextSampler, prompts: Sequence[str], length: int | None) -> int:
    """Return `length`, or if it is None the default, as far as the context has room for it after every prompt.

    Raise an InputError that names the longest prompt if a given length does not fit.
    """
    encoded = [sampler.encode_prompt(prompt) for prompt in prompts]
    longest = max(range(len(encoded)), key=lambda i: len(encoded[i]))
    room = sampler.context - len(encoded[longest])
    if room < (length or 2):
        raise InputError(
            f"prompt {longest + 1} has {counted(len(encoded[longest]), 'token')}, which with {length or 2} more exceed "
            f"the context of {sampler.name} ({sampler.context}): shorten it, or lower --length"
        )
    return length or min(DEFAULT_LENGTH, room)


def _write_shard(path: Path, texts: Sequence[SampledText], vocab_size: int, fingerprint: str, facts: str) -> TokenFile:
    _write_array(path.with_suffix(".npy"), np.concatenate([text.log_probs for text in texts]))
    return write_tokens(path, (text.tokens for text in texts), vocab_size, fingerprint, facts)


def _write_array(path: Path, values: np.ndarray) -> None:
    with replacing(path) as (temporary,), temporary.open("wb") as file:
        np.save(file, values.astype(np.float32))


def _read_shards(shards: Sequence[Path]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the tokens and the log-probabilities of every text."""
    texts: list[np.ndarray] = []
    log_probs: list[np.ndarray] = []
    for path in shards:
        shard = TokenFile.open(path)
        cuts = np.asarray(shard.documents[1:-1])
        texts += np.split(np.array(shard.tokens, dtype=np.int64), cuts)
        log_probs += np.split(np.load(path.with_suffix(".npy")), cuts)
    return texts, log_probs
