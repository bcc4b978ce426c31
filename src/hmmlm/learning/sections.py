"""The sections of a run's configuration: one model a concern, a line of doc under each field (also the help of the
command line)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from hmmlm.learning.config_base import Fraction, Momentum, Section
from hmmlm.learning.config_initialization import InitializationConfig


class TokenizerConfig(Section):
    """How text becomes tokens."""

    kind: Literal["word", "bpe", "file"] = "word"
    """word: a vocabulary of whole words; bpe: train a byte-level BPE; file: load `file` as it is."""
    file: Path | None = None
    """An existing tokenizer: a Hugging Face tokenizer.json, a sentencepiece .model, or a saved word vocabulary."""
    vocab_size: PositiveInt = 10_000
    """Most tokens in a vocabulary that is made here; rarer words become <unk>."""
    min_count: PositiveInt | None = None
    """Words seen fewer times than this in the training text become <unk> (word only). None: twice, so that the model
    learns where unknown words stand; once where the text has <unk> itself, as PTB and WikiText do."""
    split: Literal["whitespace", "words"] = "words"
    """whitespace: the text is tokenised already, as PTB and WikiText are; words: split off punctuation (word only)."""
    lowercase: bool = False
    """Lowercase the text first (word only)."""

    @model_validator(mode="after")
    def _file_goes_with_kind(self) -> TokenizerConfig:
        if self.kind == "file" and self.file is None:
            raise ValueError("kind = 'file' needs `file`: the path of the tokenizer")
        if self.kind != "file" and self.file is not None:
            raise ValueError(f"`file` is only read with kind = 'file', and kind is {self.kind!r}")
        return self


class BatchConfig(Section):
    """How tokens become batches."""

    kind: Literal["stream", "chunks"] = "stream"
    """stream: contiguous windows with carried state (Chiu & Rush); chunks: disjoint, each from the start
    distribution (Lee & Berg-Kirkpatrick)."""
    batch_size: PositiveInt = 16
    """Sequences side by side."""
    length: PositiveInt = 32
    """Tokens a sequence in one batch."""
    shuffle: bool = True
    """Shuffle every epoch: examples before they are laid into streams, or chunks."""
    reset_at_eos: bool = False
    """In training, restart the chain from the start distribution after every <eos> (stream only)."""
    eval_reset_at_eos: bool = False
    """The same in evaluation (stream only)."""


DENSE_FIELDS = {
    ("linear", "mlp", "transformer"): (
        "split", "factor_start", "factor_transition", "factor_emission", "init", "capacity"
    ),
    ("mlp", "transformer"): ("mono", "layers"), ("mlp",): ("skip", "relu", "norm"), ("transformer",): ("heads",),
}  # fmt: skip
"""Which parameterizations a field of the model is for; with others it must keep its default."""


class ModelConfig(Section):
    """The hidden Markov model and how its parameters are made."""

    states: PositiveInt = 256
    """Number of hidden states."""
    parameterization: Literal["scalar", "neural", "linear", "mlp", "transformer"] = "scalar"
    """scalar: one logit a probability; neural: networks on state embeddings (Chiu & Rush); linear, mlp, transformer:
    low-rank factors, from tables or networks (Lee & Berg-Kirkpatrick; dense, and linear and mlp with blocks too)."""
    scale: NonNegativeFloat = 1.0
    """Standard deviation of the initial logits (scalar, and what is not factored in dense)."""
    structure: Literal["none", "brown", "uniform"] = "none"
    """none: every state may emit every word; brown: each state the words of one Brown cluster; uniform: each word is
    emitted by states drawn at random for it (neural)."""
    blocks: PositiveInt = 128
    """Clusters of words, each with states / blocks states (brown)."""
    clusters: Path | None = None
    """A `paths` file of the classic clustering tool to use; None: the training text is clustered here (brown)."""
    exchange_passes: NonNegativeInt = 0
    """Passes of moving single words to better clusters after clustering (brown)."""
    states_per_word: PositiveInt = 128
    """States that may emit a word (uniform)."""
    hidden: PositiveInt = 256
    """Size of embeddings and networks (neural, dense)."""
    form: Literal["code", "paper"] = "code"
    """code: networks as released, the incoming side is the bare embedding; paper: as printed (neural)."""
    dropout: Fraction = 0.5
    """State dropout: the share of states, in each block alike, left out of a batch (neural, or brown)."""
    factored: bool = False
    """Half of each state embedding is shared by its block (neural)."""
    network_dropout: Fraction = 0.0
    """Dropout inside the networks (neural)."""
    split: bool = True
    """A table of state embeddings for each role, not one for all; with linear: ablation B, not A (dense)."""
    factor_start: bool = True
    """The start logits are a product of factors, not free (dense)."""
    factor_transition: bool = True
    """The same for the transition logits (dense)."""
    factor_emission: bool = True
    """The same for the emission logits (dense)."""
    init: Literal["unit", "normal"] = "unit"
    """unit: factors drawn so that logits have variance 1; normal: tables from N(0, 1), as released (dense)."""
    capacity: PositiveInt | None = None
    """Parameters in all, nearly: `hidden`, and the depth of transformers, follow from it (dense)."""
    mono: bool = False
    """One network for all roles instead of one for each (mlp, transformer)."""
    layers: PositiveInt | None = None
    """Linear layers, or blocks, of each network; None: 2, and more for transformers of a `capacity` above 2^22 (mlp,
    transformer)."""
    skip: Literal["none", "activation", "layer"] = "activation"
    """Added to the result of layers after the first: nothing, the input of the ReLU, or that of the layer (mlp)."""
    relu: bool = True
    """A ReLU after every linear layer (mlp)."""
    norm: bool = True
    """A LayerNorm after every layer but the first, or after the only one (mlp)."""
    heads: PositiveInt | None = None
    """Attention heads; None: of at least 64 dimensions each (transformer)."""

    @model_validator(mode="after")
    def _structure_fits(self) -> ModelConfig:
        if self.structure == "brown" and self.states % self.blocks:
            raise ValueError(f"states ({self.states}) must be a multiple of blocks ({self.blocks})")
        if self.structure == "uniform":
            if self.parameterization != "neural":
                raise ValueError("structure = 'uniform' is for parameterization = 'neural' only")
            if self.factored:
                raise ValueError("factored = true needs blocks, which structure = 'uniform' has not: set it to false")
            if self.states_per_word > self.states:
                raise ValueError(f"states_per_word ({self.states_per_word}) must be at most states ({self.states})")
        return self

    @model_validator(mode="after")
    def _dense_fits(self) -> ModelConfig:
        for kinds, names in DENSE_FIELDS.items():
            for name in names if self.parameterization not in kinds else ():
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(
                        f"{name} is for parameterization {' or '.join(map(repr, kinds))}, and it is "
                        f"{self.parameterization!r}: leave {name} out"
                    )
        if self.parameterization not in ("linear", "mlp", "transformer"):
            return self
        if self.structure != "none" and self.parameterization == "transformer":
            raise ValueError("a transformer looks at all states at once: set structure to 'none', or use linear or mlp")
        if self.structure != "none" and not (self.factor_start and self.factor_transition and self.factor_emission):
            raise ValueError(
                "a blocked model is factored throughout: leave out factor_start, factor_transition and factor_emission"
            )
        if self.capacity is not None and self.hidden != type(self).model_fields["hidden"].default:
            raise ValueError(f"hidden follows from capacity: leave out hidden = {self.hidden}, or capacity")
        if self.heads is not None and self.capacity is None and self.hidden % self.heads:
            raise ValueError(f"hidden ({self.hidden}) must be a multiple of heads ({self.heads})")
        if self.parameterization == "mlp":
            from hmmlm.parameterization import MlpForm  # here, because it brings torch along

            MlpForm(self.layers or 2, self.skip, self.relu, self.norm)  # says what does not go together
        return self


class BaumWelchConfig(Section):
    """Expectation maximisation: expected counts instead of gradients."""

    full_batch: bool = True
    """One update an epoch from all of its counts, which never lowers the likelihood of the training chunks; otherwise
    one every `accumulate` batches."""
    step: Annotated[float, Field(gt=0, le=1)] = 1.0
    """α in θ ← α θ_new + (1 − α) θ; the schedule multiplies it."""
    accumulate: PositiveInt = 1
    """Batches whose counts are added up for one update (at first, if `growth` is above 1)."""
    growth: Annotated[float, Field(ge=1)] = 1.0
    """After each epoch, multiply `accumulate` by this: growing batches."""
    pseudocount: NonNegativeFloat = 0.0
    """Added to every expected count before normalising; keeps words unseen in a mini-batch possible."""
    momentum: Momentum = 0.0
    """Share of the past counts kept in a running average of the expected counts; 0 uses the last update's alone."""


class OptimizerConfig(Section):
    """How parameters are updated."""

    kind: Literal["adamw", "baum-welch"] = "adamw"
    """adamw: gradients of the mean negative log-likelihood a token; baum-welch: expected counts, see `baum-welch`."""
    rate: PositiveFloat = 0.1
    """Peak learning rate (adamw)."""
    betas: tuple[Momentum, Momentum] = (0.9, 0.95)
    """Decay of the running means of gradient and squared gradient (adamw)."""
    eps: PositiveFloat = 1e-8
    """Added to the denominator (adamw)."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay (adamw); on the logits of a scalar model it costs a lot, see the results."""
    clip: NonNegativeFloat = 1.0
    """Largest norm of the whole gradient (adamw); 0 does not clip."""
    baum_welch: BaumWelchConfig = BaumWelchConfig()


class ScheduleConfig(Section):
    """How the learning rate (adamw) or the step (baum-welch) changes."""

    kind: Literal["constant", "cosine", "plateau"] = "constant"
    """constant; cosine: down to `final_fraction` of the peak; plateau: divided by `factor` when validation stops
    improving."""
    warmup_tokens: NonNegativeInt = 0
    """Tokens over which the rate first rises linearly to its peak (any kind)."""
    warmup_fraction: Fraction = 0.0
    """The same as a fraction of all training tokens; give one of the two."""
    final_fraction: Fraction = 0.1
    """Where cosine ends, as a fraction of the peak."""
    factor: Annotated[float, Field(gt=1)] = 4.0
    """What plateau divides the rate by."""
    patience: PositiveInt = 8
    """Validation checks without a new best after which plateau divides."""

    @model_validator(mode="after")
    def _one_warmup(self) -> ScheduleConfig:
        if self.warmup_tokens and self.warmup_fraction:
            raise ValueError("give `warmup_tokens` or `warmup_fraction`, not both")
        return self


class TrainConfig(Section):
    """How long, where, and what is kept."""

    epochs: PositiveInt | None = 10
    """Passes over the training text; None: until `max_tokens`."""
    max_tokens: PositiveInt | None = None
    """Stop after this many training tokens, whichever of the two comes first."""
    seed: NonNegativeInt = 0
    """Of the initial parameters and of the shuffling."""
    precision: Literal["32-true", "bf16-mixed"] = "32-true"
    """bf16-mixed: bfloat16 products, float32 parameters and sums."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU where there is one."""
    checks_per_epoch: PositiveInt = 1
    """Validation checks an epoch, evenly spaced, the last at its end."""
    log_every: PositiveInt = 20
    """Steps between two readings of the loss (history, progress and the check that it is finite)."""
    checkpoint_every: PositiveInt = 1000
    """Steps between two checkpoints to resume from (one is also written at every validation check)."""
    tensorboard: bool = True
    """Write TensorBoard events beside the JSON-lines history."""

    @model_validator(mode="after")
    def _ends(self) -> TrainConfig:
        if self.epochs is None and self.max_tokens is None:
            raise ValueError("give `epochs` or `max_tokens`, or the run never ends")
        return self


class RunConfig(Section):
    """Everything a training run needs to be done again."""

    data: str = "embedded"
    """Corpus: a name (embedded, ptb, wikitext-2), a text file, a folder with train, valid and test files, or one that
    `hmmlm data` made, whose token files and tokenizer are then used."""
    data_folder: Path | None = None
    """Where named corpora lie; None: $HMMLM_DATA or the cache folder, where they are downloaded to if missing."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    batches: BatchConfig = BatchConfig()
    model: ModelConfig = ModelConfig()
    initialization: InitializationConfig = InitializationConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    train: TrainConfig = TrainConfig()

    @model_validator(mode="after")
    def _parts_fit(self) -> RunConfig:
        if self.optimizer.kind == "baum-welch" and (self.model.parameterization, self.model.structure) != (
            "scalar", "none"
        ):
            raise ValueError(
                "optimizer.kind = 'baum-welch' needs model.parameterization = 'scalar' and model.structure = 'none'"
            )
        return self

    @model_validator(mode="after")
    def _initialization_fits(self) -> RunConfig:
        start, model = self.initialization, self.model
        if start.kind != "none" and model.structure == "uniform":
            raise ValueError("initialization.kind = 'none' is all there is for model.structure = 'uniform'")
        if start.kind == "counts" and (model.parameterization, model.structure) != ("scalar", "none"):
            raise ValueError(
                "initialization.kind = 'counts' needs model.parameterization = 'scalar' and model.structure = 'none': "
                "use 'lvd'"
            )
        if start.network != "own" and (model.parameterization != "transformer" or not model.mono or model.split):
            raise ValueError(
                f"initialization.network = {start.network!r} needs model.parameterization = 'transformer', "
                "model.mono = true and model.split = false"
            )
        dense = model.parameterization in ("linear", "mlp", "transformer") and model.structure == "none"
        if (start.centroids or start.head) and not dense:
            raise ValueError(
                "initialization.centroids and .head need model.parameterization = 'linear', 'mlp' or 'transformer' and "
                "model.structure = 'none'"
            )
        if start.head and not model.factor_emission:
            raise ValueError("initialization.head needs model.factor_emission = true")
        if start.kind != "none" and start.kmeans.tokens < model.states:
            raise ValueError(
                f"initialization.kmeans.tokens ({start.kmeans.tokens}) must be at least model.states ({model.states})"
            )
        return self
