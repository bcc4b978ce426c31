"""AdamW for hidden Markov models and neural networks, on the CPU and inside CUDA graphs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hmmlm.config.sections import AdamWConfig
from hmmlm.data.batches import Batch
from hmmlm.distributed.ranks import world
from hmmlm.runs.checkpoint import load_tensors


class AdamW:
    """AdamW on the mean negative log-likelihood per token, with the gradient norm clipped.

    Of several processes, each computes the gradient of its rows of a batch; all take the step of the sum.
    """

    def __init__(self, module: nn.Module, config: AdamWConfig, device: torch.device, decay_all: bool) -> None:
        """`decay_all`: weight decay on every parameter; otherwise on matrices only."""
        self.module, self.clip, self.on_gpu = module, config.clip, device.type == "cuda"
        # A tensor, because a CUDA graph would freeze a number.
        self.rate = torch.tensor(config.rate, device=device)
        parameters = list(module.parameters())
        groups: list[dict[str, Any]] = [{"params": parameters, "weight_decay": config.weight_decay}]
        if not decay_all:
            groups = [
                {"params": [p for p in parameters if p.dim() > 1], "weight_decay": config.weight_decay},
                {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
            ]
        self.optimizer = torch.optim.AdamW(
            groups,
            lr=self.rate if self.on_gpu else config.rate,
            betas=config.betas,
            eps=config.eps,
            fused=True,  # one pass over parameters of size Z×V instead of eight
            capturable=self.on_gpu,
        )

    def set_rate(self, rate: float) -> None:
        if self.on_gpu:
            self.rate.fill_(rate)
        else:
            for group in self.optimizer.param_groups:
                group["lr"] = rate

    def update(self, log_likelihood: Tensor, batch: Batch) -> None:
        """Take one step from the log-likelihoods [B] of a batch."""
        log_likelihood.backward(loss_gradient(log_likelihood, batch))
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        world().sum_(gradients)
        # Not checking for finite norms, which would wait for the device: the training loop checks the loss.
        norm = torch.nn.utils.get_total_norm(gradients)
        self.step(((norm + 1e-6) / self.clip).clamp_(min=1.0) if self.clip else None)
        self.optimizer.zero_grad()

    def step(self, divisor: Tensor | None) -> None:
        """Take the step of all parameters that have a gradient, which is divided by a number [], if there is one."""
        # The kernel divides, so that clipping takes no pass over the gradients of its own. It reads a float32.
        self.optimizer.grad_scale = None if divisor is None else divisor.float()  # type: ignore[attr-defined]
        self.optimizer.step()

    def collect(self) -> None:
        """Moments are the same in all processes."""

    def advice(self, rate: float) -> str:
        return f"lower optimizer.rate (now {rate:.3g}) or optimizer.clip, or lengthen the warm-up"

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
            moments = {
                "step": torch.zeros((), dtype=torch.float32),
                "exp_avg": torch.zeros_like(parameter, device="cpu"),
            }
            moments["exp_avg_sq"] = torch.zeros_like(moments["exp_avg"])
            load_tensors(folder, tensors, f"optimizer.{name}.", moments)
            state[index[id(parameter)]] = moments
        self.optimizer.load_state_dict({"state": state, "param_groups": self.optimizer.state_dict()["param_groups"]})
        if self.on_gpu:  # loading made a copy of it
            for group in self.optimizer.param_groups:
                group["lr"] = self.rate


def loss_gradient(log_likelihood: Tensor, batch: Batch) -> Tensor:
    """Return the gradient of the loss, −Σ log p / tokens, in the log-likelihoods [B] of a batch."""
    # Without the kernels that would compute the loss itself.
    if batch.whole is not None:
        return torch.full_like(log_likelihood, -1 / batch.whole.tokens)
    if batch.lengths is None:  # every row is full
        return torch.full_like(log_likelihood, -1 / batch.tokens.numel())
    return torch.ones_like(log_likelihood) / -(batch.tokens >= 0).sum()  # counted on the device, without waiting
