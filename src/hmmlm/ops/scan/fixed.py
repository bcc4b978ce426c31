"""The filter of a model that does not change, on a GPU, without a look at the result: what a CUDA graph can record.

What depends on the model alone is computed once. Where `suspect`, the bound of `scaled.suspect_by_ratio`, is true, the
caller has to run `scan`, which finds the sequences that underflow may have changed and recomputes them in log space.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from hmmlm.ops.common import Impl, capturing, without_autocast
from hmmlm.ops.scan.api import choose_recursions
from hmmlm.ops.scan.problem import Evidence, Parameters
from hmmlm.ops.scan.scaled import log_column_ratio
from hmmlm.ops.underflow import FLOOR, least_sum


class FixedModel(NamedTuple):
    """A model, prepared for the filter: its emissions by word, so that a step reads those of a token in one piece."""

    start: Tensor  # [Z] probabilities
    transition: Tensor  # [Z, Z] probabilities, in the dtype of products
    scores: Tensor  # [V+1, Z] log p(word | z); the first row is of a missing token
    log_peak: Tensor  # [V+1] maximum of scores over states
    least_scale: float  # a step with a smaller one is suspect
    least_prediction: float  # of a state, below which it may have lost its share


class FixedResult(NamedTuple):
    """Result of the filter."""

    log_likelihood: Tensor  # [B]
    carry: Tensor  # [B, Z] log p(z | x) of the last token, in float64
    suspect: Tensor  # [] bool: underflow may matter for a sequence
    suspect_carry: Tensor  # [] bool: a state of a carry may have lost its share


def serves(parameters: Parameters, evidence: Evidence, products: torch.dtype, impl: Impl) -> bool:
    """Return whether `filter_fixed` can take the place of `scan`: the kernels serve, and nothing needs a gradient."""
    learned = torch.is_grad_enabled() and any(value.requires_grad for value in parameters)
    if learned or capturing(evidence.tokens) or impl not in ("auto", "triton"):
        return False
    return choose_recursions(parameters, evidence, products, impl).__name__.endswith(".triton")


def prepare(parameters: Parameters, products: torch.dtype) -> FixedModel | None:
    """Prepare a model; None if its transitions differ so much that every result would be suspect."""
    from hmmlm.ops.scan.kernel_chain import scores_by_word, transition_probs

    states, dtype = len(parameters.log_start), parameters.log_start.dtype
    log_least = math.log(least_sum(states, dtype, FLOOR[dtype])) + float(log_column_ratio(parameters.log_transition))
    if not log_least < 0:  # a scale is at most 1; NaN: the model is broken, which `scan` reports
        return None
    transition = transition_probs(parameters.log_transition, products)
    scores, log_peak = scores_by_word(parameters.log_emission)
    least = least_sum(states, dtype, FLOOR[dtype])
    return FixedModel(parameters.log_start.exp(), transition, scores, log_peak, math.exp(log_least), least)


def filter_fixed(model: FixedModel, evidence: Evidence) -> FixedResult:
    """Run the filter without synchronizing with the device."""
    from hmmlm.ops.scan import triton
    from hmmlm.ops.scan.kernel_chain import index_chain

    with without_autocast(evidence.tokens):
        chain = index_chain(model.start, model.transition, model.scores, model.log_peak, evidence)
        result = triton.forward(chain, keep=False)
        suspect = ~(result.scale.amin() >= model.least_scale)  # True for NaN
        suspect_carry = ~(result.predicted[-1].amin() >= model.least_prediction)
    return FixedResult(result.log_likelihood, result.carry, suspect, suspect_carry)
