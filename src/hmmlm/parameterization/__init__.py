"""θ → distributional parameters (π, A, O): every way of making them behind one interface."""

from hmmlm.parameterization.base import Parameterization
from hmmlm.parameterization.blocked import BlockedNeural
from hmmlm.parameterization.scalar import Scalar

__all__ = ["BlockedNeural", "Parameterization", "Scalar"]
