"""Log-likelihood of a dense HMM from logits; log-probabilities of emissions and their gradient are never stored.

Emissions are the largest matrices of a model, and a batch has few of their columns. Requires Triton.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hmmlm.ops.common import NEG_INF, Carry, Scan, capturing, product_dtype, without_autocast
from hmmlm.ops.scan import triton as kernels
from hmmlm.ops.scan.api import unsupported
from hmmlm.ops.scan.kernel_chain import KernelChain, KernelForward
from hmmlm.ops.scan.problem import Evidence, Parameters
from hmmlm.ops.softmax_adamw import GradientNorm, LogitGradient


class SoftmaxScan(NamedTuple):
    """Result of `softmax_scan`, and what its gradient is computed from."""

    scan: Scan  # detached
    chain: KernelChain
    forward: KernelForward

    def gradient(self, weight: Tensor) -> tuple[Tensor, Tensor, LogitGradient, GradientNorm]:
        """Return the gradient of Σ weight · log p(x) in the logits of start, transition and emissions, and its norm.

        Suspect and impossible sequences do not contribute.
        """
        log_likelihood, _, suspect, _ = self.scan
        # An impossible sequence has no mass, and is suspect inside a CUDA graph.
        ignored = log_likelihood == NEG_INF if suspect is None else suspect
        with without_autocast(weight):
            return kernels.accumulate_words(self.chain, self.forward, weight.masked_fill(ignored, 0.0))


def softmax_scan(logits: Parameters, evidence: Evidence) -> SoftmaxScan | None:
    """Compute log p(x) [B] as `scan` does, for log-probabilities that are the log-softmax of the rows of `logits`.

    None if the kernels do not support the problem, or if a sequence has to be recomputed in log space: use `scan`.
    """
    given = Parameters(*(part.detach() for part in logits))
    if unsupported(given, evidence) or not given.log_emission.is_contiguous():
        return None
    products = product_dtype(given.log_start)  # autocast's
    with without_autocast(given.log_start):
        chain = kernels.make_chain(given, evidence, products, normalized=False)
        result = kernels.forward(chain, keep=True)
        if capturing(result.suspect):
            carry = torch.where(result.suspect[:, None], chain.start.log().double(), result.carry)
            return SoftmaxScan(Scan(result.log_likelihood, Carry(carry), result.suspect), chain, result)
        exact = Parameters(*(part.log_softmax(-1) for part in given))
        if bool(kernels.find_suspect(exact, chain, result).any()):
            return None
    return SoftmaxScan(Scan(result.log_likelihood, Carry(result.carry)), chain, result)
