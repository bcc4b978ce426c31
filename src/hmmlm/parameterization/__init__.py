"""θ → distributional parameters (π, A, O): every way of making them behind one interface."""

from hmmlm.parameterization.base import Parameterization
from hmmlm.parameterization.blocked import BlockedNeural
from hmmlm.parameterization.blocked_scalar import BlockedScalar
from hmmlm.parameterization.scalar import Scalar

__all__ = ["BlockedNeural", "BlockedScalar", "Parameterization", "Scalar"]
