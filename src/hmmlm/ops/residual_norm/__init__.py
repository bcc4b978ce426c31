"""Residual network of Chiu & Rush (2020): LN(ReLU(D W2ᵀ + b2) + D) with D = ReLU(E W1ᵀ + b1).

A composition of PyTorch operations, on any device and in any dtype, with optional dropout. With the Triton kernels
PyTorch computes the linear layers, and one forward and two backward kernels the rest.
"""

from hmmlm.ops.residual_norm.api import residual_norm

__all__ = ["residual_norm"]
