"""Hidden Markov language models, exact and large."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hmmlm import emissions, transitions
    from hmmlm.checks import padded
    from hmmlm.constrain.automaton import Automaton
    from hmmlm.constrain.guide import Guide
    from hmmlm.constrain.particles import sample_particles
    from hmmlm.constrain.steering import Steering
    from hmmlm.device import set_threads
    from hmmlm.errors import InputError, InputWarning
    from hmmlm.explorer.notebook import Display
    from hmmlm.hmm import HMM, Carry, Counts, Filtered
    from hmmlm.learning.run import distill, train
    from hmmlm.lm.control import save_control
    from hmmlm.lm.lm import LanguageModel
    from hmmlm.lm.mixture import MixtureModel
    from hmmlm.runs.loading import load

__version__ = "0.2.0"

_MODULES = {
    "HMM": "hmmlm.hmm",
    "Automaton": "hmmlm.constrain.automaton",
    "Carry": "hmmlm.hmm",
    "Counts": "hmmlm.hmm",
    "Display": "hmmlm.explorer.notebook",
    "Filtered": "hmmlm.hmm",
    "Guide": "hmmlm.constrain.guide",
    "InputError": "hmmlm.errors",
    "InputWarning": "hmmlm.errors",
    "LanguageModel": "hmmlm.lm.lm",
    "Steering": "hmmlm.constrain.steering",
    "distill": "hmmlm.learning.run",
    "MixtureModel": "hmmlm.lm.mixture",
    "load": "hmmlm.runs.loading",
    "padded": "hmmlm.checks",
    "sample_particles": "hmmlm.constrain.particles",
    "save_control": "hmmlm.lm.control",
    "set_threads": "hmmlm.device",
    "train": "hmmlm.learning.run",
}
__all__ = [
    "HMM",
    "Automaton",
    "Carry",
    "Counts",
    "Display",
    "Filtered",
    "Guide",
    "InputError",
    "InputWarning",
    "LanguageModel",
    "MixtureModel",
    "Steering",
    "__version__",
    "distill",
    "emissions",
    "load",
    "padded",
    "sample_particles",
    "save_control",
    "set_threads",
    "train",
    "transitions",
]


def __getattr__(name: str) -> Any:  # torch is imported on first use, so that `hmmlm --help` is fast
    from importlib import import_module

    if name in ("emissions", "transitions"):
        return import_module(f"hmmlm.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module 'hmmlm' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
