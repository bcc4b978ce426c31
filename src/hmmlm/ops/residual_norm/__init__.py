"""The residual network of Chiu & Rush 2020, LN(ReLU(D W2ᵀ + b2) + D) with D = ReLU(E W1ᵀ + b1).

`impl`: "naive" is the composition, on any device and in any dtype, with dropout inside; "triton" (CUDA) leaves the
linear layers to the framework and does what lies between and after them in a kernel forward and two backward; "auto"
picks the fastest that fits.
"""

from hmmlm.ops.residual_norm.function import Impl, residual_norm

__all__ = ["Impl", "residual_norm"]
