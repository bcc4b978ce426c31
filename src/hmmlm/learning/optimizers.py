"""Optimizers: AdamW on the mean negative log-likelihood per token, and the M step of Baum-Welch.

A mini-batch update of Baum-Welch is θ ← α θ_new + (1 − α) θ from a running average of expected counts. With the counts
of a whole corpus and no pseudocounts, an update never lowers its likelihood, for any α in (0, 1]: the expected
complete log-likelihood is concave in the probabilities, so every point between θ and its maximum is better than θ.
(Over streams this holds except at window boundaries, since a window's posterior does not see later windows.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hmmlm.config.sections import AdamWConfig
from hmmlm.data.batches import Batch
from hmmlm.distributed.ranks import world
from hmmlm.ops.maximize_rows import maximize_rows
from hmmlm.runs.checkpoint import load_tensors


class Optimizer(Protocol):
    """What takes the update of a step, and what a checkpoint stores of it."""

    def set_lr(self, lr: float) -> None:
        """Set the rate (α of Baum-Welch) of the next update."""

    def collect(self) -> None:
        """Move what each of several processes has of its own to rank 0, before a checkpoint."""

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return tensors and JSON values."""

    def load(self, folder: Path, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, from the checkpoint in `folder`; tensors are named "optimizer.…"."""

    def advice(self, lr: float) -> str:
        """Return what to change if training diverges at this rate."""


class AdamW:
    """AdamW on the mean negative log-likelihood per token, with the gradient norm clipped.

    Of several processes, each computes the gradient of its rows of a batch; all take the step of the sum.
    """

    def __init__(self, module: nn.Module, config: AdamWConfig, device: torch.device, decay_all: bool) -> None:
        """`decay_all`: weight decay on every parameter; otherwise on matrices only."""
        self.module, self.max_grad_norm, self.on_gpu = module, config.max_grad_norm, device.type == "cuda"
        # A tensor, because a CUDA graph would freeze a number.
        self.lr = torch.tensor(config.lr, device=device)
        parameters = list(module.parameters())
        groups: list[dict[str, Any]] = [{"params": parameters, "weight_decay": config.weight_decay}]
        if not decay_all:
            groups = [
                {"params": [p for p in parameters if p.dim() > 1], "weight_decay": config.weight_decay},
                {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
            ]
        self.optimizer = torch.optim.AdamW(
            groups,
            lr=self.lr if self.on_gpu else config.lr,
            betas=config.betas,
            eps=config.eps,
            fused=True,  # one pass over parameters of size Z×V instead of eight
            capturable=self.on_gpu,
        )

    def set_lr(self, lr: float) -> None:
        if self.on_gpu:
            self.lr.fill_(lr)
        else:
            for group in self.optimizer.param_groups:
                group["lr"] = lr

    def update(self, log_likelihood: Tensor, batch: Batch) -> None:
        """Take one step from the log-likelihoods [B] of a batch."""
        log_likelihood.backward(loss_gradient(log_likelihood, batch))
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        world().sum_(gradients)
        # Not checking for finite norms, which would wait for the device: the training loop checks the loss.
        norm = torch.nn.utils.get_total_norm(gradients)
        self.step(((norm + 1e-6) / self.max_grad_norm).clamp_(min=1.0) if self.max_grad_norm else None)
        self.optimizer.zero_grad()

    def step(self, divisor: Tensor | None) -> None:
        """Take the step of all parameters that have a gradient, which is divided by a number [], if there is one."""
        # The kernel divides, so that clipping takes no pass over the gradients of its own. It reads a float32.
        self.optimizer.grad_scale = None if divisor is None else divisor.float()  # type: ignore[attr-defined]
        self.optimizer.step()

    def collect(self) -> None:
        """Moments are the same in all processes."""

    def advice(self, lr: float) -> str:
        return f"lower optimizer.lr (now {lr:.3g}) or optimizer.max_grad_norm, or lengthen the warm-up"

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the moments of each parameter, and the parameters that no step has changed yet (frozen ones)."""
        named, state = list(self.module.named_parameters()), self.optimizer.state
        tensors = {f"{name}.{key}": value for name, p in named for key, value in state[p].items()}
        return tensors, {"unseen": [name for name, p in named if not state[p]]}

    def load(self, folder: Path, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, from the checkpoint in `folder`."""
        state: dict[int, dict[str, Tensor]] = {}
        ordered = [p for group in self.optimizer.param_groups for p in group["params"]]
        index = {id(p): i for i, p in enumerate(ordered)}
        for name, parameter in self.module.named_parameters():
            if name in values["unseen"]:
                continue
            moments = {"step": torch.zeros((), dtype=torch.float32)}
            moments |= {name: torch.zeros_like(parameter, device="cpu") for name in ("exp_avg", "exp_avg_sq")}
            load_tensors(folder, tensors, f"optimizer.{name}.", moments)
            state[index[id(parameter)]] = moments
        self.optimizer.load_state_dict({"state": state, "param_groups": self.optimizer.state_dict()["param_groups"]})
        if self.on_gpu:  # loading made a copy of it
            for group in self.optimizer.param_groups:
                group["lr"] = self.lr


def loss_gradient(log_likelihood: Tensor, batch: Batch) -> Tensor:
    """Return the gradient of the loss, −Σ log p / tokens, in the log-likelihoods [B] of a batch."""
    # Without the kernels that would compute the loss itself.
    if batch.whole is not None:
        return torch.full_like(log_likelihood, -1 / batch.whole.tokens)
    if batch.lengths is None:  # every row is full
        return torch.full_like(log_likelihood, -1 / batch.tokens.numel())
    return torch.ones_like(log_likelihood) / -(batch.tokens >= 0).sum()  # counted on the device, without waiting


@torch.no_grad()
def maximize(
    counts: Mapping[str, Tensor],
    current: Mapping[str, Tensor],
    pseudocount: float = 0.0,
    step: float = 1.0,
    out: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Take the M step of each table from its expected counts, `step` of the way: α θ_new + (1 − α) θ, as probabilities.

    A row without any count (a state never visited) keeps its current distribution.

    Args:
        out: where to write the result.
    """
    return {
        name: maximize_rows(counts[name], log_probs, pseudocount, step, None if out is None else out[name].data)
        for name, log_probs in current.items()
    }


class RunningCounts:
    """The sum of expected counts for one update, and its running average over updates (momentum).

    Of several processes, each adds the counts of its rows of a batch; they are summed for an update.
    """

    def __init__(self, tables: Mapping[str, Tensor], momentum: float) -> None:
        """Create counts of the shapes of `tables`, on their device."""
        self.momentum, self.lr = momentum, 1.0
        self.sum = {name: torch.zeros_like(table.data) for name, table in tables.items()}
        self.mean = {name: torch.zeros_like(table.data) for name, table in tables.items()} if momentum else {}
        self.updates = 0

    def set_lr(self, lr: float) -> None:
        self.lr = lr

    def add(self, *counts: Tensor) -> None:
        """Add a batch's counts, in the order of the tables."""
        for total, own in zip(self.sum.values(), counts, strict=True):
            total += own

    @contextmanager
    def take(self) -> Iterator[dict[str, Tensor]]:
        """Yield the counts for an update, and then start the next sum.

        The average is divided by 1 − momentum^updates, so that pseudocounts do not dominate the first updates.
        """
        self.updates += 1
        world().sum_(self.sum.values())
        if self.momentum:
            for name, mean in self.mean.items():
                mean.lerp_(self.sum[name], 1 - self.momentum)
            correction = 1 - self.momentum**self.updates
            yield {name: mean / correction for name, mean in self.mean.items()}
        else:
            yield self.sum
        for total in self.sum.values():
            total.zero_()

    def collect(self) -> None:
        """Move the counts of all processes to rank 0, whose sum is then that of all, as one process would have it."""
        world().sum_(self.sum.values())
        world().keep_in_first(self.sum.values())

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the counts and the number of updates, as a checkpoint stores them."""
        sums = {f"sum.{name}": tensor for name, tensor in self.sum.items()}
        return sums | {f"mean.{name}": tensor for name, tensor in self.mean.items()}, {"updates": self.updates}

    def load(self, folder: Path, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, from the checkpoint in `folder`."""
        load_tensors(folder, tensors, "optimizer.", self.state_dict()[0])
        self.updates = int(values["updates"])
        world().keep_in_first(self.sum.values())

    def advice(self, lr: float) -> str:
        return "set optimizer.pseudocount above 0, or lower optimizer.step"
