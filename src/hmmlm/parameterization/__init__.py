"""θ → distributional parameters (π, A, O): every way of making them behind one interface."""

from hmmlm.parameterization.base import Parameterization
from hmmlm.parameterization.blocked import BlockedNeural
from hmmlm.parameterization.blocked_base import Blocked
from hmmlm.parameterization.blocked_factored import BlockedFactored
from hmmlm.parameterization.blocked_scalar import BlockedScalar
from hmmlm.parameterization.capacity import fit_width, make_dense
from hmmlm.parameterization.dense_networks import CHIU_RUSH_2020, CHIU_RUSH_2025, MlpForm
from hmmlm.parameterization.factored import Factored
from hmmlm.parameterization.scalar import Scalar
from hmmlm.parameterization.uniform import UniformNeural

__all__ = [
    "CHIU_RUSH_2020", "CHIU_RUSH_2025", "Blocked", "BlockedFactored", "BlockedNeural", "BlockedScalar", "Factored",
    "MlpForm", "Parameterization", "Scalar", "UniformNeural", "fit_width", "make_dense",
]
