"""Which implementation of an operation computes."""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from torch import Tensor

from hmmlm.errors import InputError


def kernels(op: str, impl: str, reference: Tensor, lacking: str = "") -> ModuleType:
    """The module torch.py or triton.py of an op; `lacking` names what rules its triton kernels out here, if anything.

    "auto" is triton on CUDA where it is installed (it comes with torch there) and nothing is lacking.
    """
    if impl == "auto":
        impl = "triton" if reference.is_cuda and not lacking and find_spec("triton") else "torch"
    if impl not in ("torch", "triton"):
        raise InputError(f"{op}: impl {impl!r} is unknown: use auto, naive, torch or triton")
    if impl == "triton" and lacking:
        raise InputError(f"{op}: the triton kernels have no {lacking}: use impl='torch'")
    return import_module(f"hmmlm.ops.{op}.{impl}")
