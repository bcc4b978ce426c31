"""Exact inference in a dense HMM: likelihood, filtering, posteriors, expected counts, entropy.

`impl`: "naive" is log space throughout, "torch" scaled probabilities, "triton" these as GPU kernels; "auto" picks the
fastest that fits. All take parameters as log-probabilities (start [Z], transition [Z, Z], emission [Z, V]) and evidence
as tokens [B, T] with −1 for missing, lengths [B], the filtered distribution before the window (initial [B, Z]) and
restarts [B, T].
"""

# This file must not import the library torch: the name belongs to the module torch.py beside it.
from hmmlm.ops.results import Counts, Filtered, Scan
from hmmlm.ops.scan.naive import Evidence, Parameters
from hmmlm.ops.scan.queries import Impl, entropy, expected_counts, filter_states, posterior, scan, surroundings

__all__ = [
    "Counts", "Evidence", "Filtered", "Impl", "Parameters", "Scan",
    "entropy", "expected_counts", "filter_states", "posterior", "scan", "surroundings",
]
