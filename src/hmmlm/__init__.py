"""Hidden Markov language models, exact and large."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hmmlm.errors import InputError
    from hmmlm.hmm import HMM, BlockedHMM, Counts, Filtered
    from hmmlm.hmm.automaton import Automaton
    from hmmlm.hmm.constraints import Guide
    from hmmlm.lm import LanguageModel, load
    from hmmlm.steering import Steering

__version__ = "0.1.0"
__all__ = [
    "HMM", "Automaton", "BlockedHMM", "Counts", "Filtered", "Guide", "InputError", "LanguageModel", "Steering",
    "__version__", "load",
]  # fmt: skip

_HOMES = {
    "HMM": "hmmlm.hmm", "BlockedHMM": "hmmlm.hmm", "Counts": "hmmlm.hmm", "Filtered": "hmmlm.hmm",
    "Automaton": "hmmlm.hmm.automaton", "Guide": "hmmlm.hmm.constraints",
    "InputError": "hmmlm.errors", "LanguageModel": "hmmlm.lm", "load": "hmmlm.lm",
    "Steering": "hmmlm.steering",
}


def __getattr__(name: str) -> Any:  # torch is loaded on first use, so that `hmmlm --help` answers at once
    if name not in _HOMES:
        raise AttributeError(f"module 'hmmlm' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
