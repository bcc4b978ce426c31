"""Which implementation finds the most likely path."""

import torch
from torch import Tensor

from hmmlm.ops.scan import Evidence, Impl, Parameters
from hmmlm.ops.viterbi import naive
from hmmlm.ops.viterbi import torch as fast


@torch.no_grad()
def viterbi(parameters: Parameters, evidence: Evidence, impl: Impl = "auto") -> tuple[Tensor, Tensor]:
    """argmax_z p(z, x) [B, T] (−1 beyond a length) and its log-probability [B]; −inf if no path is possible."""
    return naive.viterbi(parameters, evidence) if impl == "naive" else fast.viterbi(parameters, evidence)
