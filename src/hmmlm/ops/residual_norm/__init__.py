"""Residual network of Chiu & Rush (2020): LN(ReLU(D W2ᵀ + b2) + D) with D = ReLU(E W1ᵀ + b1).

`impl`: "naive" composes PyTorch operations, on any device and in any dtype, with optional dropout; "triton" (CUDA)
uses PyTorch for the linear layers and fuses the rest in one forward and two backward kernels; "auto" selects the
fastest that supports the problem.
"""

from hmmlm.ops.residual_norm.api import ResidualImpl, residual_norm

__all__ = ["ResidualImpl", "residual_norm"]
