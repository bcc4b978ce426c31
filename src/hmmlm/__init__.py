"""Hidden Markov language models, exact and large."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hmmlm import emissions, transitions
    from hmmlm.checks import padded
    from hmmlm.cli.python import train
    from hmmlm.constrain.automaton import Automaton
    from hmmlm.constrain.constraint import Constraint
    from hmmlm.constrain.guide import Guide
    from hmmlm.constrain.particles import Particles, sample_particles
    from hmmlm.constrain.steering import Steering
    from hmmlm.device import set_threads
    from hmmlm.errors import InputError, InputWarning
    from hmmlm.explorer.notebook import Display
    from hmmlm.hmm import HMM, Carry, Counts, Filtered
    from hmmlm.lm.ctrlg import save_ctrlg
    from hmmlm.lm.lm import LanguageModel
    from hmmlm.lm.mixture import MixtureModel
    from hmmlm.runs.loading import load
    from hmmlm.training.run import distill

__version__ = "0.3.0"

_MODULES = {
    "checks": "padded",
    "device": "set_threads",
    "errors": "InputError InputWarning",
    "explorer.notebook": "Display",
    "hmm": "HMM Carry Counts Filtered",
    "constrain.automaton": "Automaton",
    "constrain.guide": "Guide",
    "cli.python": "train",
    "training.run": "distill",
    "runs.loading": "load",
    "constrain.constraint": "Constraint",
    "lm.ctrlg": "save_ctrlg",
    "lm.lm": "LanguageModel",
    "lm.mixture": "MixtureModel",
    "constrain.particles": "Particles sample_particles",
    "constrain.steering": "Steering",
}
_MODULE_OF = {name: f"hmmlm.{module}" for module, names in _MODULES.items() for name in names.split()}
__all__ = [
    "HMM", "Automaton", "Carry", "Constraint", "Counts", "Display", "Filtered", "Guide", "InputError", "InputWarning",
    "LanguageModel", "MixtureModel", "Particles", "Steering", "__version__", "distill", "emissions", "load", "padded",
    "sample_particles", "save_ctrlg", "set_threads", "train", "transitions",
]  # fmt: skip


def __getattr__(name: str) -> Any:  # torch is imported on first use, so that `hmmlm --help` is fast
    from importlib import import_module

    if name in ("emissions", "transitions"):
        return import_module(f"hmmlm.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'hmmlm' has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
