"""A saved model, trained on: the components of a union with their weights, by their own tables and factors."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from hmmlm.data.hmmfolder import load_hmm
from hmmlm.data.modelfolder import MODEL, find_model
from hmmlm.data.tokenizers import Tokenizer
from hmmlm.emissions import Blocked
from hmmlm.errors import InputError
from hmmlm.hmm import HMM, Carry, Scan
from hmmlm.hmm.hmm import side_by_side
from hmmlm.models.base import FactoredBlockedModel, Features, Model, ModelConfig, restart_lost
from hmmlm.models.scalar import Scalar, log_softmax_in_blocks
from hmmlm.scan.composition import map_tensors, matrices
from hmmlm.scan.union_scan import scan_components
from hmmlm.section import Fraction, ModelSize, States
from hmmlm.structure.blocks import Blocks
from hmmlm.transitions import Factored

_LEAST = -40.0  # log-probabilities below this, zero among them, start here: they can be learned again


class UnionConfig(ModelConfig):
    """The models of a union, trained on together with its weights; also a single saved model."""

    kind: Literal["union"] = "union"
    joined: Path
    """A model of `hmmlm join`, or any saved model: the tables or factors of its probabilities are the parameters."""
    num_states: States = 1
    """Not used: the number of states is that of the saved model."""
    dropout: Fraction = 0.0
    """State dropout of components with blocks: the fraction of each block's states left out of a batch."""

    optimizer_defaults: ClassVar[dict[str, Any]] = {"lr": 0.0003, "weight_decay": 0.0}

    @property
    def distillable(self) -> bool:
        return False

    def check_files(self) -> None:
        find_model(self.joined)

    def size(self, words: int) -> ModelSize:
        return ModelSize((find_model(self.joined) / MODEL).stat().st_size // 4, 0)

    def build(self, vocabulary: Tokenizer, block_of_word: Tensor | None, seed: int, device: torch.device) -> Model:
        (folder, _, _, tokenizer), hmm = load_hmm(self.joined)
        if tokenizer.fingerprint() != vocabulary.fingerprint():
            raise InputError(f"model.joined: {folder} has another vocabulary than the text: train on its token files")
        return Union(hmm, self.dropout)


class Union(Model):
    """The components of a union as modules, and logits of their weights."""

    graphable = False  # batches are cut at restarts, into as many sequences as there are

    def __init__(self, hmm: HMM, dropout: float = 0.0) -> None:
        super().__init__(hmm.num_states, hmm.vocab_size)
        self.components = nn.ModuleList(_module(component.to(torch.float32), dropout) for component in hmm.components)
        self.weights = nn.Parameter(hmm.log_weights.float().clamp(min=_LEAST))

    def _models(self) -> list[Model]:
        return [component for component in self.components if isinstance(component, Model)]

    def forward(self) -> HMM:
        parts, log_weights = [component() for component in self._models()], self.weights.log_softmax(0)
        starts = [weight + part.log_start for weight, part in zip(log_weights, parts, strict=True)]
        return side_by_side(torch.cat(starts), parts)

    def scan(
        self, tokens: Tensor, lengths: Tensor | None = None, carry: Carry | None = None, restart: Tensor | None = None
    ) -> Scan:
        models, log_weights = self._models(), self.weights.log_softmax(0)
        sizes = [model.num_states for model in models]
        restart = restart_lost(restart, carry, tokens)
        scans = [model.scan for model in models]
        return scan_components(scans, sizes, log_weights, tokens, lengths, carry, restart)


class FreeFactors(FactoredBlockedModel):
    """The factors u and w [Z, h] of a blocked HMM and its start [Z] and emission [V, k] as parameters."""

    def __init__(self, hmm: HMM, dropout: float) -> None:
        transition, emission = hmm.transition, hmm.emission
        assert isinstance(transition, Factored) and isinstance(emission, Blocked)
        super().__init__(Blocks(emission.block_of_word, emission.num_blocks, emission.width), dropout)
        self.u, self.w = nn.Parameter(transition.u.clone()), nn.Parameter(transition.w.clone())
        self.start = nn.Parameter(hmm.log_start.clamp(min=_LEAST))
        self.emission = nn.Parameter(emission.log_probs.clamp(min=_LEAST))

    def features_of(self, states: Tensor | None, carried: Tensor | None = None) -> tuple[Features, Tensor | None]:
        log_emission = log_softmax_in_blocks(self.emission, self.blocks)
        u, w, start = list[Tensor]([self.u, self.w, self.start])
        if states is not None:
            u, w, start = (values.index_select(0, states) for values in (u, w, start))
            kept = states.view(self.blocks.num_blocks, -1) % self.blocks.states_per_block
            log_emission = log_emission.gather(1, kept.index_select(0, self.blocks.block_of_word))
        left = None if carried is None else self.u.index_select(0, carried)
        return Features(self.blocks.block_of_word, u, w, start.log_softmax(0), log_emission), left


def _module(hmm: HMM, dropout: float) -> Model:
    """Return the module whose HMM is a component."""
    if isinstance(hmm.transition, Factored) and isinstance(hmm.emission, Blocked):
        return FreeFactors(hmm, dropout)
    if matrices(hmm) is None:
        raise InputError(
            f"a {hmm.kind} model cannot be trained on: only dense × categorical and factored × blocked ones"
        )
    model = Scalar(hmm.num_states, hmm.vocab_size, scale=0.0)
    model.assign(map_tensors(hmm, lambda values: values.clamp(min=_LEAST)))
    return model
