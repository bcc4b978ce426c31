"""Hidden Markov language models, exact and large."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hmmlm.errors import InputError
    from hmmlm.hmm import HMM, BlockedHMM, Counts, Filtered
    from hmmlm.hmm.automaton import Automaton
    from hmmlm.hmm.constraints import Guide
    from hmmlm.text.lm import LanguageModel, load
    from hmmlm.text.steering import Steering

__version__ = "0.2.0"

_MODULES = {
    "HMM": "hmmlm.hmm",
    "Automaton": "hmmlm.hmm.automaton",
    "BlockedHMM": "hmmlm.hmm",
    "Counts": "hmmlm.hmm",
    "Filtered": "hmmlm.hmm",
    "Guide": "hmmlm.hmm.constraints",
    "InputError": "hmmlm.errors",
    "LanguageModel": "hmmlm.text.lm",
    "Steering": "hmmlm.text.steering",
    "load": "hmmlm.text.lm",
}
__all__ = [
    "HMM",
    "Automaton",
    "BlockedHMM",
    "Counts",
    "Filtered",
    "Guide",
    "InputError",
    "LanguageModel",
    "Steering",
    "__version__",
    "load",
]


def __getattr__(name: str) -> Any:  # torch is imported on first use, so that `hmmlm --help` is fast
    if name not in _MODULES:
        raise AttributeError(f"module 'hmmlm' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
