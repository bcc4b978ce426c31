"""Dense HMM: log-likelihood, its gradient and the final filtered distribution.

`impl`: "naive" computes in log space, "scaled" with scaled probabilities, "compiled" the same in CPU loops (numba,
for up to hundreds of states), "triton" the same in GPU kernels; "auto" selects the fastest that supports the problem.
Parameters are log-probabilities (start [Z], transition [Z, Z], emission [Z, V]).
"""

from hmmlm.ops.scan.api import expected_counts, path_loops_pay, scan
from hmmlm.ops.scan.problem import Evidence, Parameters

__all__ = ["Evidence", "Parameters", "expected_counts", "path_loops_pay", "scan"]
