"""Sections of a configuration that do not depend on the model: text, batches, optimizer, schedule, training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from hmmlm.section import (
    MAX_TOKENS,
    MAX_VOCABULARY,
    DeviceCount,
    Fraction,
    Momentum,
    Pseudocount,
    Section,
    Seed,
    TokenCount,
)

# --- text ---


class TextConfig(Section):
    """How a text file becomes examples."""

    unit: Literal["line", "paragraph", "document"] = "line"
    """line: every line is an example; paragraph: wrapped lines are joined, up to a blank line; document: the same, and
    whole documents are held out, which two blank lines separate (or a folder has, one per file). Named corpora have
    their own."""


# --- tokenizer ---

VocabularySize = Annotated[int, Field(gt=0, le=MAX_VOCABULARY)]


class WordTokenizerConfig(Section):
    """A vocabulary of whole words."""

    kind: Literal["word"] = "word"
    vocab_size: VocabularySize = 10_000
    """Maximum vocabulary size; rarer words become <unk>."""
    min_count: TokenCount | None = None
    """Words that occur less often in the training text become <unk>. None: 2, so that the model learns where unknown
    words occur; 1 if the text has <unk> itself, as PTB and WikiText do."""
    split: Literal["whitespace", "words"] = "words"
    """words: split off punctuation; whitespace: the text is tokenized already, as PTB and WikiText are."""
    lowercase: bool = False
    """Lowercase the text first."""


class BpeTokenizerConfig(Section):
    """A byte-level BPE, trained on the training text."""

    kind: Literal["bpe"] = "bpe"
    vocab_size: VocabularySize = 10_000
    """Vocabulary size."""


class FileTokenizerConfig(Section):
    """An existing tokenizer."""

    kind: Literal["file"] = "file"
    file: Path
    """A Hugging Face tokenizer.json, a sentencepiece .model, a saved word vocabulary, or a name on the Hugging Face hub
    (gpt2, owner/name)."""


CORPUS_WORDS: dict[str, dict[str, Any]] = {
    "ptb": {"split": "whitespace", "vocab_size": 10_000},
    "wikitext-2": {"split": "whitespace", "vocab_size": 33_278},
}
"""Settings of a word vocabulary that named corpora bring: they are tokenized already, and have <unk> of their own."""

TokenizerConfig = Annotated[WordTokenizerConfig | BpeTokenizerConfig | FileTokenizerConfig, Field(discriminator="kind")]

# --- batches ---

BatchSide = Annotated[int, Field(gt=0, le=2**20)]


class BatchConfig(Section):
    """How tokens become batches."""

    batch_size: BatchSide = 64
    """Sequences per batch."""
    length: BatchSide = 32
    """Tokens per sequence in one batch."""
    shuffle: bool = True
    """Shuffle every epoch: documents before they are cut into streams, or chunks."""


class StreamConfig(BatchConfig):
    """Contiguous streams read in windows, with a carry from each to the next (Chiu & Rush)."""

    kind: Literal["stream"] = "stream"
    # A line is an example of its own: a text means the same in `hmmlm eval`, in lm.score and in training.
    reset_at_eos: bool = True
    """In training, restart the chain from the start distribution after every <eos>."""
    eval_reset_at_eos: bool = True
    """The same in evaluation."""


class ChunkConfig(BatchConfig):
    """Disjoint chunks, each from the start distribution (Lee & Berg-Kirkpatrick)."""

    kind: Literal["chunks"] = "chunks"


BatchesConfig = Annotated[StreamConfig | ChunkConfig, Field(discriminator="kind")]

# --- optimizer ---


class AdamWConfig(Section):
    """Gradients of the mean negative log-likelihood per token."""

    kind: Literal["adamw"] = "adamw"
    lr: Annotated[float, Field(ge=1e-12, le=1_000)] = 0.01
    """Peak learning rate. The default depends on the model family."""
    betas: tuple[Momentum, Momentum] = (0.9, 0.95)
    """Decay of the running means of gradient and squared gradient."""
    eps: Annotated[float, Field(ge=1e-30, le=1)] = 1e-8
    """Added to the denominator. The default depends on the model family."""
    weight_decay: Annotated[float, Field(ge=0, le=1_000)] = 0.0
    """Decoupled weight decay. The default depends on the model family."""
    max_grad_norm: Annotated[float, Field(ge=0, le=1e6)] = 1.0
    """Maximum norm of the whole gradient; 0: no clipping."""


class BaumWelchConfig(Section):
    """Expectation maximization: expected counts instead of gradients (scalar models without blocks)."""

    kind: Literal["baum-welch"] = "baum-welch"
    full_batch: bool = False
    """One update per epoch from all of its counts, which never lowers the likelihood of the training chunks; otherwise
    one per batch. Full batches have other defaults: step 1, pseudocount 0 and a constant schedule."""
    step: Annotated[float, Field(ge=1e-12, le=1)] = 0.1
    """α in θ ← α θ_new + (1 − α) θ; multiplied by the schedule."""
    pseudocount: Pseudocount = 1e-4
    """Added to every expected count before normalizing; keeps words unseen in a mini-batch possible."""
    momentum: Momentum = 0.0
    """Fraction of the past kept in a running average of the expected counts; 0: counts of the last update only."""


OptimizerConfig = Annotated[AdamWConfig | BaumWelchConfig, Field(discriminator="kind")]

# --- schedule ---


class WarmupConfig(Section):
    """A linear rise of the rate to its peak."""

    warmup: Annotated[float, Field(ge=0, le=MAX_TOKENS)] = 0.05
    """Linear warm-up: below 1 a fraction of all training tokens, otherwise a number of tokens; 0: none."""


class ConstantConfig(WarmupConfig):
    """The peak rate throughout."""

    kind: Literal["constant"] = "constant"


class CosineConfig(WarmupConfig):
    """Cosine decay to a fraction of the peak."""

    kind: Literal["cosine"] = "cosine"
    final_fraction: Fraction = 0.1
    """Final rate as a fraction of the peak."""


class PlateauConfig(WarmupConfig):
    """Division of the rate when validation stops improving."""

    kind: Literal["plateau"] = "plateau"
    factor: Annotated[float, Field(gt=1, le=1e6)] = 4.0
    """Divisor of the rate."""
    patience: Annotated[int, Field(gt=0, le=1_000_000)] = 8
    """Validation checks without a new best before a division."""


ScheduleConfig = Annotated[ConstantConfig | CosineConfig | PlateauConfig, Field(discriminator="kind")]

# --- training ---


class TrainConfig(Section):
    """Duration, device, and what is saved."""

    # The best validation check is kept, so that too many epochs cost time, not quality.
    epochs: Annotated[int, Field(gt=0, le=1_000_000)] | None = 8
    """Passes over the training text; None: until `max_tokens`."""
    max_tokens: TokenCount | None = None
    """Maximum number of training tokens; training ends at the first of the two limits."""
    seed: Seed = 0
    """Seed of the initial parameters and of the shuffling."""
    precision: Literal["32-true", "bf16-mixed"] = "32-true"
    """bf16-mixed: bfloat16 products, float32 parameters and sums."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU if there is one."""
    devices: DeviceCount = 1
    """Processes on this machine that share the sequences of a batch, each with a GPU, or with a part of the CPU's
    cores. torchrun, which also starts processes on several machines, sets their number itself."""
    checks_per_epoch: Annotated[int, Field(gt=0, le=1_000)] = 1
    """Validation checks per epoch, evenly spaced, the last at its end."""
    log_every: Annotated[int, Field(gt=0, le=100_000)] = 20
    """Steps between two records of the loss."""
    checkpoint_every: Annotated[int, Field(gt=0, le=1_000_000_000)] = 1000
    """Steps between two checkpoints (one is also written at every validation check)."""
    tensorboard: bool = True
    """Write TensorBoard events beside the JSON-lines history."""

    @model_validator(mode="after")
    def _ends(self) -> TrainConfig:
        if self.epochs is None and self.max_tokens is None:
            raise ValueError("give `epochs` or `max_tokens`, or the run never ends")
        return self


class HmmTrainConfig(TrainConfig):
    """The same, with several starts."""

    restarts: Annotated[int, Field(gt=0, le=1_000)] = 1
    """Starts, with the seeds seed, seed + 1, …: each is trained for an eighth of the run, at least an epoch; the best
    on the validation text is trained to the end."""
