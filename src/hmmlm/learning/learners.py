"""Learners: what one training loop can train, each with its step, its evaluation and its state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from hmmlm.config.sections import AdamWConfig, BaumWelchConfig
from hmmlm.data.batches import Batch
from hmmlm.data.tokenizers import Tokenizer
from hmmlm.distributed.ranks import world
from hmmlm.hmm import HMM, Carry, Scan
from hmmlm.hmm.labels import with_labels
from hmmlm.learning.evaluate import Evaluation, evaluate, select_carry
from hmmlm.learning.graph import GraphedStep
from hmmlm.learning.optimizers import AdamW, Optimizer, RunningCounts, maximize
from hmmlm.lm.lm import LanguageModel
from hmmlm.lm.scoring import perplexity
from hmmlm.models.base import FactoredBlockedModel, Model, TableModel
from hmmlm.scan.likelihood import joint_scan

if TYPE_CHECKING:
    from lightning_fabric import Fabric

AnyCarry = TypeVar("AnyCarry")
Hidden = tuple[Tensor, ...]
"""What a recurrent network carries from one window to the next, a row per sequence."""


class StepOutput(NamedTuple):
    """Output of a step, of the parameters before the update; on the device."""

    log_likelihood: Tensor  # [] float64, of P(O), or of P(O, S) for a batch with labels
    carry: Any
    log_probs: Mapping[str, Tensor] | None = None  # of the E step of Baum-Welch


class Learner(Protocol[AnyCarry]):
    """Trains on one batch at a time, without reading a value back from the device."""

    device: torch.device
    peak_lr: float
    """The rate (or α of Baum-Welch) that the schedule multiplies."""

    @property
    def optimizer(self) -> Optimizer:
        """Whatever a checkpoint has to store besides parameters and carry."""

    def step(self, batch: Batch, carry: AnyCarry | None, lr: float) -> StepOutput:
        """Learn from a batch, which is still on the CPU; one with labels is learned from P(O, S)."""

    def evaluate(self, batches: Iterable[Batch], on_batch: Callable[[int], None]) -> Evaluation:
        """Score batches with the present parameters."""

    def export(self, folder: Path) -> None:
        """Write the model for use into a folder."""

    def parameters(self) -> dict[str, Tensor]:
        """Return the parameters by name, as a checkpoint stores them; loading copies into these tensors."""

    def carry_tensors(self, carry: AnyCarry | None) -> dict[str, Tensor]:
        """Return a carry by name, as a checkpoint stores it: a row per sequence."""

    def load_carry(self, tensors: Mapping[str, Tensor]) -> AnyCarry | None:
        """Restore a carry; None if there are no tensors."""

    def reset_graph(self) -> None:
        """Discard the recorded step: which parameters are trained has changed."""

    def skipped(self) -> int:
        """Return how many sequences were dropped so far because their mass underflowed inside a CUDA graph."""


def count_parameters(learner: Learner[Any]) -> int:
    """Return the number of parameters."""
    return sum(parameter.numel() for parameter in learner.parameters().values())


def mask_padding(log_likelihood: Tensor, batch: Batch) -> Tensor:
    """Return log-likelihoods [B]; those of padding are 0 without a gradient, possible or not."""
    return log_likelihood.nan_to_num(neginf=0.0) * 0.0 if batch.is_padding else log_likelihood


def sum_log_likelihood(log_likelihood: Tensor, batch: Batch) -> Tensor:
    """Return the sum [] of log-likelihoods [B] without padding, in float64."""
    return mask_padding(log_likelihood.detach(), batch).sum(dtype=torch.float64)


def scan_labels(hmm: HMM, batch: Batch, carry: Carry | None) -> Scan:
    """Compute log P(O, S) [B] of a batch with labels; summed over the states that are unknown."""
    tokens, labels, lengths, restart = batch.tokens, batch.labels, batch.lengths, batch.restart
    assert labels is not None
    if not batch.some_unknown:
        return joint_scan(hmm, tokens, labels, lengths, carry, restart)
    given = with_labels(hmm, tokens, lengths, labels)
    scan: Scan = given.hmm.scan(given.tokens, lengths, carry, restart, exact_carry=False)
    return scan


@contextmanager
def fork_rng(device: torch.device, per_rank: bool) -> Iterator[None]:
    """Draw random numbers from a generator of a seed that all ranks draw, as the rows of some are more than of others.

    Their own generators remain equal, so that a checkpoint stores one of them. A single process keeps its generator.

    Args:
        per_rank: whether the numbers differ between ranks, such as dropout masks of their rows.
    """
    if world().count == 1:
        yield
        return
    seed = int(torch.randint(2**62, ()))
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed + world().rank if per_rank else seed)
        yield


class HmmLearner(ABC):
    """A hidden Markov model; subclasses add the optimizer."""

    optimizer: Optimizer

    def __init__(
        self, fabric: Fabric, model: Model, tokenizer: Tokenizer, config: dict[str, Any], peak_lr: float
    ) -> None:
        self.fabric, self.device, self.peak_lr = fabric, fabric.device, peak_lr
        self.model, self.tokenizer, self.config = model.to(fabric.device), tokenizer, config
        self.reset_graph()

    def step(self, batch: Batch, carry: Carry | None, lr: float) -> StepOutput:
        """Learn from a batch: `learn`, replayed from a CUDA graph if the batch fits it."""
        self.optimizer.set_lr(lr)
        carry = select_carry(batch, carry)
        result: StepOutput | None = None if self.graphed is None else self.graphed(batch, carry)
        if result is not None:
            return result
        # All ranks drop the same states.
        with fork_rng(self.device, per_rank=False) if self.model.draws_for_rows else nullcontext():
            return self.learn(batch.to(self.device), carry)

    @abstractmethod
    def learn(self, batch: Batch, carry: Carry | None) -> StepOutput:
        """Do everything a step does on the device; this is what a CUDA graph records."""

    @property
    def graphable(self) -> bool:
        """Whether a step can be recorded as a CUDA graph; one that sums over processes is not."""
        alone = world().count == 1
        return alone and self.device.type == "cuda" and all(getattr(m, "graphable", True) for m in self.model.modules())

    def reset_graph(self) -> None:
        self.graphed = GraphedStep(self.learn, self.device) if self.graphable else None

    @torch.no_grad()
    def hmm(self) -> HMM:
        """Return the HMM of the present parameters, detached, without anything that is for training only."""
        self.model.eval()
        with self.fabric.autocast():
            hmm: HMM = self.model()
        self.model.train()
        return hmm

    def evaluate(self, batches: Iterable[Batch], on_batch: Callable[[int], None]) -> Evaluation:
        return evaluate(self.hmm(), batches, on_batch)

    def export(self, folder: Path) -> None:
        LanguageModel(self.hmm(), self.tokenizer, self.config).save(folder)

    def parameters(self) -> dict[str, Tensor]:
        return self.model.state_dict()

    def carry_tensors(self, carry: Carry | None) -> dict[str, Tensor]:
        return {} if carry is None else carry.tensors()

    def load_carry(self, tensors: Mapping[str, Tensor]) -> Carry | None:
        return Carry(**{name: value.to(self.device) for name, value in tensors.items()}) if tensors else None

    def skipped(self) -> int:
        return int(self.model.skipped)


class AdamWLearner(HmmLearner):
    """A hidden Markov model trained by gradients."""

    def __init__(
        self,
        fabric: Fabric,
        model: Model,
        tokenizer: Tokenizer,
        config: dict[str, Any],
        optimizer: AdamWConfig,
        next_word_weight: float = 0.0,
    ) -> None:
        """`next_word_weight`: weight of the words that a teacher drew, for batches that have them."""
        super().__init__(fabric, model, tokenizer, config, optimizer.lr)
        self.next_word_weight = next_word_weight
        self.optimizer: AdamW = AdamW(self.model, optimizer, self.device, decay_all=True)

    def learn(self, batch: Batch, carry: Carry | None) -> StepOutput:
        with self.fabric.autocast():
            if batch.labels is not None:  # the whole model: states are not dropped
                result = scan_labels(self.model(), batch, carry)
            elif batch.next_words is not None:
                assert isinstance(self.model, FactoredBlockedModel)  # the configuration was validated
                result = self.model.scan(batch.tokens, batch.lengths, carry, batch.restart, batch.next_words)
            else:
                result = self.model.scan(batch.tokens, batch.lengths, carry, batch.restart)
        objective = result.log_likelihood
        if result.next_word_score is not None:
            objective = torch.lerp(objective, result.next_word_score, self.next_word_weight)
        self.optimizer.update(mask_padding(objective, batch), batch)
        return StepOutput(sum_log_likelihood(result.log_likelihood, batch), result.carry)


class BaumWelchLearner(HmmLearner):
    """A hidden Markov model trained by expectation maximization: expected counts, then one M step."""

    def __init__(
        self, fabric: Fabric, model: Model, tokenizer: Tokenizer, config: dict[str, Any], optimizer: BaumWelchConfig
    ) -> None:
        super().__init__(fabric, model, tokenizer, config, optimizer.step)
        assert isinstance(self.model, TableModel)  # the configuration was validated
        self.model: TableModel
        self.settings = optimizer
        self.optimizer: RunningCounts = RunningCounts(self.model.logits, optimizer.momentum)

    def step(self, batch: Batch, carry: Carry | None, lr: float) -> StepOutput:
        result = super().step(batch, carry, lr)
        if batch.last or not self.settings.full_batch:
            assert result.log_probs is not None
            with self.optimizer.take() as counts:
                maximize(counts, result.log_probs, self.settings.pseudocount, self.optimizer.lr, self.model.logits)
        return result

    def learn(self, batch: Batch, carry: Carry | None) -> StepOutput:
        """Add the expected counts of a batch: the gradient with respect to its log-probabilities."""
        with torch.no_grad():
            leaves = self.model.log_probs()
        for log_probs in leaves.values():
            log_probs.requires_grad_()
        with self.fabric.autocast():
            hmm = self.model.make_hmm(leaves)
            if batch.labels is None:
                scan = self.model.drop_underflowed(
                    hmm.scan(batch.tokens, batch.lengths, carry, batch.restart, exact_carry=False)
                )
            else:
                scan = scan_labels(hmm, batch, carry)
        counts = torch.autograd.grad(mask_padding(scan.log_likelihood, batch).sum(), list(leaves.values()))
        with torch.no_grad():
            self.optimizer.add(*counts)
        return StepOutput(sum_log_likelihood(scan.log_likelihood, batch), scan.carry, leaves)


AnyNetwork = TypeVar("AnyNetwork", bound=nn.Module)


class NetworkLearner(Generic[AnyNetwork]):
    """A neural language model trained by gradients: a teacher or a baseline."""

    def __init__(self, fabric: Fabric, network: AnyNetwork, tokenizer: Tokenizer, optimizer: AdamWConfig) -> None:
        self.fabric, self.device, self.peak_lr = fabric, fabric.device, optimizer.lr
        self.network, self.tokenizer = network.to(fabric.device), tokenizer
        self.optimizer = AdamW(self.network, optimizer, self.device, decay_all=False)

    def _score(self, batch: Batch, hidden: Hidden | None) -> tuple[Tensor, Hidden | None]:
        with self.fabric.autocast():
            return self.network.score(batch.tokens, hidden if batch.carry else None)  # type: ignore[operator, no-any-return]

    def step(self, batch: Batch, carry: Hidden | None, lr: float) -> StepOutput:
        self.optimizer.set_lr(lr)
        batch = batch.to(self.device)
        with fork_rng(self.device, per_rank=True):
            scores, hidden = self._score(batch, carry)
        self.optimizer.update(mask_padding(scores, batch), batch)
        return StepOutput(sum_log_likelihood(scores, batch), hidden)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch], on_batch: Callable[[int], None]) -> Evaluation:
        log_likelihood, tokens, hidden, shared = 0.0, 0, None, False
        self.network.eval()
        try:
            for given in batches:
                scores, hidden = self._score(given.to(self.device), hidden)
                log_likelihood += float(sum_log_likelihood(scores, given))
                tokens, shared = tokens + given.whole_tokens(), given.whole is not None
                on_batch(given.whole_tokens())
        finally:
            self.network.train()
        if shared:
            (log_likelihood,) = world().sum_numbers([log_likelihood])
        return Evaluation(perplexity(log_likelihood, tokens), tokens, log_likelihood)

    def export(self, folder: Path) -> None:
        self.network.save(folder, self.tokenizer)  # type: ignore[operator]

    def parameters(self) -> dict[str, Tensor]:
        return self.network.state_dict()

    def carry_tensors(self, carry: Hidden | None) -> dict[str, Tensor]:
        return {str(i): part for i, part in enumerate(carry or ())}

    def load_carry(self, tensors: Mapping[str, Tensor]) -> Hidden | None:
        return tuple(tensors[str(i)].to(self.device) for i in range(len(tensors))) or None

    def reset_graph(self) -> None:
        """Steps of networks are not recorded."""

    def skipped(self) -> int:
        return 0
