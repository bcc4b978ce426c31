"""The most likely path."""

# This file must not import the library torch: the name belongs to the module torch.py beside it.
from hmmlm.ops.viterbi.queries import viterbi

__all__ = ["viterbi"]
