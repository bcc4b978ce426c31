"""The studies: which runs make up each table and figure of the papers, and what the papers report for them."""

from hmmlm.experiments.catalogue.chiu2020 import CHIU2020
from hmmlm.experiments.catalogue.initialization import INITIALIZATION
from hmmlm.experiments.catalogue.lee2025 import REPARAMETERIZATION
from hmmlm.experiments.catalogue.run import Run

STUDIES: dict[str, list[Run]] = {**CHIU2020, **REPARAMETERIZATION, **INITIALIZATION}
