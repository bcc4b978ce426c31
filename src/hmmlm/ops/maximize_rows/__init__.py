"""The M step of Baum-Welch for the rows of a matrix.

`impl`: "naive" is a sequence of tensor operations, "triton" one kernel on a GPU; "auto" selects the fastest that
supports the problem.
"""

from hmmlm.ops.maximize_rows.api import maximize_rows

__all__ = ["maximize_rows"]
