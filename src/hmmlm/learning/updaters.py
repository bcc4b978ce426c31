"""Two ways to learn from a batch behind one interface: AdamW from gradients, Baum-Welch from expected counts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from hmmlm.data.batches import Batch
from hmmlm.hmm import HMM, AnyHMM, BlockedHMM, Carry
from hmmlm.hmm.blocked import BlockedScan, last_states
from hmmlm.initialization.lvd import joint_log_likelihood
from hmmlm.learning.baum_welch import RunningCounts, batches_per_update, maximise
from hmmlm.learning.checkpoint import load_tensors
from hmmlm.learning.config import OptimizerConfig
from hmmlm.learning.evaluate import State
from hmmlm.learning.graphs import GraphedStep
from hmmlm.ops.results import Scan
from hmmlm.parameterization import Parameterization


class Step(NamedTuple):
    """Where in the run a batch stands, and the schedule's factor for it."""

    epoch: int
    batch: int
    """Its number in the epoch."""
    steps_per_epoch: int
    factor: float


class Updater(Protocol):
    """Learns from one batch at a time; never reads a value back from the device."""

    peak: float
    """Rate (or α) that the schedule's factor multiplies."""

    def step(self, batch: Batch, initial: State, tokens: int, step: Step, labels: Tensor | None = None) -> Any:
        """Learn from a batch that starts from `initial`; the scan is that of the parameters before the update.

        With `labels` [B,T], states, it is learnt from P(O, S): both are its log-likelihood and where the labels end.
        """

    def forget(self) -> None:
        """Whatever was recorded of earlier steps: which parameters are learnt has changed."""

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint keeps, beside `scalars`."""

    def scalars(self) -> dict[str, Any]: ...

    def load(self, where: Path, tensors: Mapping[str, Tensor], prefix: str, scalars: Mapping[str, Any]) -> None:
        """Continue from a checkpoint."""


class Carried:
    """What a batch starts from, as it is: of tensors given to a module, Fabric would round floats to bfloat16."""

    def __init__(self, state: State) -> None:
        self.state = state


class Likelihood(nn.Module):
    """θ → distributional parameters → log-likelihood [B] and filtered distribution [B,Z] of a batch.

    With `labels` the likelihood is the joint one of tokens and states, of the whole model: states are not dropped.
    """

    def __init__(self, parameterization: Parameterization) -> None:
        super().__init__()
        self.parameterization = parameterization

    def forward(self, batch: Batch, carried: Carried, labels: Tensor | None = None) -> Any:
        if labels is not None:
            return joint_scan(self.parameterization(), batch, carried.state, labels)
        return self.parameterization.scan(batch.tokens, batch.lengths, carried.state, batch.restart)


def joint_scan(hmm: AnyHMM, batch: Batch, initial: State, labels: Tensor) -> Scan | BlockedScan:
    """log P(O, S) [B] of a batch, and the last labels as filtered distributions, which the next window starts from."""
    before = None
    if isinstance(initial, Carry):
        before = initial.states.gather(1, initial.probs.argmax(1, keepdim=True))[:, 0]
    elif initial is not None:
        before = initial.argmax(1)
    log_likelihood = joint_log_likelihood(hmm, batch.tokens, labels, batch.restart, before)
    last = labels[:, -1:] if batch.lengths is None else labels.gather(1, batch.lengths[:, None] - 1)
    if isinstance(hmm, BlockedHMM):
        states = last_states(batch.tokens, batch.lengths, hmm.factors.block_of_word, _by_block(hmm))
        return BlockedScan(log_likelihood, Carry((states == last).to(hmm.dtype), states))
    return Scan(log_likelihood, torch.zeros(len(last), hmm.states, device=last.device).scatter_(1, last, 1.0))


def _by_block(hmm: BlockedHMM) -> Tensor:
    return torch.arange(hmm.states, device=hmm.device).view(-1, hmm.factors.states_per_block)


class AdamW:
    """Decoupled weight decay Adam on the mean negative log-likelihood a token, gradient norm clipped."""

    def __init__(self, fabric: Fabric, parameterization: Parameterization, config: OptimizerConfig) -> None:
        self.fabric, self.parameterization = fabric, parameterization
        self.peak, self.clip = config.rate, config.clip
        self.on_gpu = on_gpu = fabric.device.type == "cuda"
        self.graphable = on_gpu and all(getattr(module, "graphable", True) for module in parameterization.modules())
        parameterization.to(fabric.device)
        # A tensor, because a CUDA graph would freeze a number.
        self.rate = torch.tensor(config.rate, device=fabric.device)
        self.inner = torch.optim.AdamW(
            parameterization.parameters(),
            lr=self.rate if on_gpu else config.rate, betas=config.betas, eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,  # one pass over parameters of size Z×V instead of eight
            capturable=on_gpu,
        )  # fmt: skip
        self.objective, self.optimizer = fabric.setup(Likelihood(parameterization), self.inner)
        self.forget()

    def forget(self) -> None:
        self.graphed = GraphedStep(self.learn) if self.graphable else None

    def step(self, batch: Batch, initial: State, tokens: int, step: Step, labels: Tensor | None = None) -> Any:
        rate = self.peak * step.factor
        if self.on_gpu:
            self.rate.fill_(rate)
        else:
            self.inner.param_groups[0]["lr"] = rate
        # a step with labels is not recorded: there are few, and the teacher takes far longer
        if self.graphed is not None and labels is None:
            result = self.graphed(batch, initial)
            if result is not None:
                return result
        return self.learn(batch, initial, labels)

    def learn(self, batch: Batch, initial: State, labels: Tensor | None = None) -> Any:
        """Everything a step does on the device."""
        # Tokens are counted where the batch is, without waiting: padding is −1.
        tokens = (batch.tokens >= 0).sum()
        result = self.objective(batch, Carried(initial), labels)
        self.fabric.backward(-result.log_likelihood.sum() / tokens)
        if self.clip:
            # without the check for finite norms, which would wait for the device: the trainer checks the loss
            self.fabric.clip_gradients(self.objective, self.optimizer, max_norm=self.clip, error_if_nonfinite=False)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return result._replace(log_likelihood=result.log_likelihood.detach())

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.parameterization.named_parameters())

    def tensors(self) -> dict[str, Tensor]:
        return {f"{name}.{key}": t for name, p in self._named() for key, t in self.inner.state[p].items()}

    def scalars(self) -> dict[str, Any]:
        """Parameters that no step has changed yet: those that are frozen have no state either."""
        return {"unseen": [name for name, p in self._named() if not self.inner.state[p]]}

    def load(self, where: Path, tensors: Mapping[str, Tensor], prefix: str, scalars: Mapping[str, Any]) -> None:
        if not any(name.startswith(prefix) for name in tensors):
            return  # saved before the first step
        state: dict[int, dict[str, Tensor]] = {}
        for i, (name, parameter) in enumerate(self._named()):
            if name in scalars.get("unseen", ()):
                continue
            state[i] = {"step": torch.zeros(()), "exp_avg": torch.zeros_like(parameter, device="cpu")}
            state[i]["exp_avg_sq"] = torch.zeros_like(state[i]["exp_avg"])
            load_tensors(where, tensors, f"{prefix}{name}.", state[i])
        self.inner.load_state_dict({"state": state, "param_groups": self.inner.state_dict()["param_groups"]})
        if self.on_gpu:  # loading made a copy of it
            self.inner.param_groups[0]["lr"] = self.rate


class Counted(NamedTuple):
    """The scan of a batch, and the model whose expected counts were taken."""

    scan: Scan
    hmm: HMM


class BaumWelch:
    """Expected counts added up over a number of batches, then one M step."""

    def __init__(self, fabric: Fabric, parameterization: Parameterization, config: OptimizerConfig) -> None:
        self.fabric, self.config = fabric, config.baum_welch
        self.peak = self.config.step
        self.parameterization = parameterization.to(fabric.device)
        self.counts = RunningCounts(
            parameterization.states, parameterization.vocab_size, self.config.momentum, fabric.device
        )
        self.forget()

    def forget(self) -> None:
        self.graphed = GraphedStep(self.count) if self.fabric.device.type == "cuda" else None

    def step(self, batch: Batch, initial: State, tokens: int, step: Step, labels: Tensor | None = None) -> Scan:
        counted = self.graphed(batch, initial) if self.graphed is not None and labels is None else None
        if counted is None:
            counted = self.count(batch, initial, labels)
        if self._update_is_due(step):
            rate = self.peak * step.factor
            with torch.no_grad():
                new = maximise(
                    **self.counts.take(), current=counted.hmm, pseudocount=self.config.pseudocount, step=rate
                )
                self.parameterization.assign(new)
        return counted.scan

    def count(self, batch: Batch, initial: State, labels: Tensor | None = None) -> Counted:
        """The E step of a batch, added to the counts."""
        with torch.no_grad():
            hmm = self.parameterization()
        assert isinstance(hmm, HMM) and not isinstance(initial, Carry)  # only a dense HMM can be assigned
        parameters = [p.requires_grad_() for p in hmm.parameters]
        result: Any
        if labels is not None:
            result = joint_scan(hmm, batch, initial, labels)
        else:
            with self.fabric.autocast():
                result = hmm.scan(batch.tokens, batch.lengths, initial, batch.restart)
        log_likelihood = self.parameterization.trusted(result)
        # the gradient with respect to log-probabilities is the expected counts; this way the scan is done once
        counts = torch.autograd.grad(log_likelihood.sum(), parameters)
        with torch.no_grad():
            self.counts.add(*counts)
        return Counted(Scan(log_likelihood.detach(), result.final), hmm)

    def _update_is_due(self, step: Step) -> bool:
        """Updates never span epochs, so that their sizes can grow from one epoch to the next."""
        config, done = self.config, step.batch + 1
        size = batches_per_update(
            config.accumulate, config.growth, config.full_batch, step.epoch, step.steps_per_epoch
        )
        return done % size == 0 or done == step.steps_per_epoch

    def tensors(self) -> dict[str, Tensor]:
        return dict(self.counts.tensors())

    def scalars(self) -> dict[str, Any]:
        return {"updates": self.counts.updates}

    def load(self, where: Path, tensors: Mapping[str, Tensor], prefix: str, scalars: Mapping[str, Any]) -> None:
        load_tensors(where, tensors, prefix, self.tensors())
        self.counts.updates = int(scalars["updates"])


def make_updater(fabric: Fabric, parameterization: Parameterization, config: OptimizerConfig) -> Updater:
    """The updater a configuration asks for; moves the parameterization to the device."""
    if config.kind == "baum-welch":
        return BaumWelch(fabric, parameterization, config)
    return AdamW(fabric, parameterization, config)
