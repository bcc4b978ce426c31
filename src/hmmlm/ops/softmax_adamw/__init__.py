"""AdamW on the logits [Z, V] of softmax rows, from a gradient that is not stored as a matrix.

`naive` has the gradient as a matrix; `triton` computes its norm and takes the step in one pass over logits and moments.
"""

from hmmlm.ops.softmax_adamw.naive import GradientNorm, LogitGradient

__all__ = ["GradientNorm", "LogitGradient"]
