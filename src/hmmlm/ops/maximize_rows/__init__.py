"""The M step of Baum-Welch for the rows of a matrix: tensor operations, or one kernel on a GPU."""

from hmmlm.ops.maximize_rows.api import maximize_rows

__all__ = ["maximize_rows"]
