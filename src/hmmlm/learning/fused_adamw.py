"""AdamW for a dense HMM on a GPU, without matrices of log-probabilities and gradients of emissions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hmmlm.data.batches import Batch
from hmmlm.distributed.ranks import world
from hmmlm.hmm import Carry
from hmmlm.learning.evaluate import select_carry
from hmmlm.learning.graph import GraphedStep
from hmmlm.learning.learners import AdamWLearner, HmmLearner, StepOutput, sum_log_likelihood
from hmmlm.learning.optimizers import Optimizer, loss_gradient
from hmmlm.models.base import restart_lost
from hmmlm.models.scalar import Scalar
from hmmlm.ops.common import capturing, installed
from hmmlm.ops.graph import side_by_side
from hmmlm.ops.scan import Evidence, Parameters
from hmmlm.ops.softmax_adamw import Moments, Settings

if TYPE_CHECKING:
    from hmmlm.ops.scan.softmax import SoftmaxScan


def fuse(learner: HmmLearner) -> HmmLearner | FusedAdamWLearner:
    """Return a learner that takes the same steps in fused kernels where they serve, otherwise `learner` itself."""
    on_gpu = learner.device.type == "cuda" and installed("triton") and world().count == 1
    if on_gpu and isinstance(learner, AdamWLearner) and isinstance(learner.model, Scalar):
        return FusedAdamWLearner(learner)
    return learner


class FusedAdamWLearner:
    """Takes the steps of an `AdamWLearner` in fused kernels, and leaves to it the batches that they do not support.

    Parameters and moments are those of the plain learner, so checkpoints are the same.
    """

    def __init__(self, plain: AdamWLearner) -> None:
        assert isinstance(plain.model, Scalar)
        self.plain, self.model, self.device, self.peak_lr = plain, plain.model, plain.device, plain.peak_lr
        self.optimizer: Optimizer = plain.optimizer
        self.evaluate, self.export, self.skipped = plain.evaluate, plain.export, plain.skipped
        self.parameters, self.carry_tensors, self.load_carry = plain.parameters, plain.carry_tensors, plain.load_carry
        self.compiled = False  # the kernels, which a CUDA graph must not compile
        self.reset_graph()

    def reset_graph(self) -> None:
        self.graphed = GraphedStep(self.learn, self.device) if self.plain.graphable else None

    def step(self, batch: Batch, carry: Carry | None, lr: float) -> StepOutput:
        self.optimizer.set_lr(lr)
        carry = select_carry(batch, carry)
        output: StepOutput | None = None if self.graphed is None else self.graphed(batch, carry)
        return self.learn(batch.to(self.device), carry) if output is None else output

    def learn(self, batch: Batch, carry: Carry | None) -> StepOutput:
        """Do everything a step does on the device; this is what a CUDA graph records."""
        found = self.scan(batch, carry)
        if found is None:
            return self.plain.learn(batch, carry)
        self.compiled = True
        log_likelihood = self.model.drop_underflowed(found.scan).log_likelihood
        self.update(found, loss_gradient(log_likelihood, batch))
        return StepOutput(sum_log_likelihood(log_likelihood, batch), found.scan.carry)

    def scan(self, batch: Batch, carry: Carry | None) -> SoftmaxScan | None:
        """Compute the log-likelihood of a batch; None if the plain learner has to."""
        from hmmlm.ops.scan.softmax import softmax_scan  # requires Triton

        logits = Parameters(self.model.start, self.model.transition, self.model.emission)
        words_alone = batch.labels is None and batch.next_words is None
        compiles = capturing(batch.tokens) and not self.compiled
        if compiles or not words_alone or not all(table.requires_grad for table in logits):
            return None
        initial, restart = None if carry is None else carry.log_probs, restart_lost(batch.restart, carry, batch.tokens)
        with self.plain.fabric.autocast():
            return softmax_scan(logits, Evidence(batch.tokens, batch.lengths, initial, restart))

    def update(self, found: SoftmaxScan, weight: Tensor) -> None:
        """Take the step of all parameters from the gradient of the loss in the log-likelihoods [B].

        Emissions are most of a model. The rest is small, and its kernels fill little of a GPU: they run beside.
        """
        from hmmlm.ops.softmax_adamw import triton as kernels  # requires Triton

        adamw, logits = self.plain.optimizer, self.model.emission
        self.model.start.grad, self.model.transition.grad, gradient, norm = found.gradient(weight)
        state, (group,) = adamw.optimizer.state[logits], adamw.optimizer.param_groups
        if not state:  # as torch's optimizer creates it
            state["step"] = torch.zeros((), dtype=torch.float32, device=logits.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(logits), torch.zeros_like(logits)
        moments = Moments(state["step"], state["exp_avg"], state["exp_avg_sq"])
        settings = Settings(group["betas"], group["eps"], group["weight_decay"], adamw.max_grad_norm)
        _, plan = kernels.plan_step(gradient, norm, moments, settings, adamw.lr)
        side_by_side(
            logits.device,
            lambda: kernels.update(logits.detach(), gradient, moments, settings, plan),
            lambda: adamw.step(plan[0].reciprocal() if adamw.max_grad_norm else None),
        )
        adamw.optimizer.zero_grad()
