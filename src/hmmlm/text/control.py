"""The model folders of libraries for controlled generation (Ctrl-G, GeLaTo)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hmmlm.data.files import read_json
from hmmlm.data.modelfolder import CONFIG, MODEL, read_tensors, require_tensors, write_folder
from hmmlm.errors import InputError
from hmmlm.hmm import HMM, HiddenMarkovModel


def save_control(hmm: HiddenMarkovModel, path: str | Path, eos_token_id: int) -> None:
    """Write `alpha_exp` [Z, Z] transition probabilities, `beta` [Z, V] log-emissions and `gamma` [Z] log-start."""
    dense: HMM = hmm.dense()
    tensors = {"alpha_exp": dense.log_transition.exp(), "beta": dense.log_emission, "gamma": dense.log_start}
    header = {"hidden_states": hmm.states, "vocab_size": hmm.vocab_size, "eos_token_id": eos_token_id}
    write_folder(Path(path), tensors, header, {"format": "pt"})


def load_control(path: str | Path) -> tuple[HMM, dict[str, Any]]:
    """Return the HMM in a folder of this layout, and its header (hidden_states, vocab_size, eos_token_id)."""
    folder = Path(path)
    header = read_json(folder / CONFIG)
    tensors, _ = read_tensors(folder / MODEL)
    states, words = header.get("hidden_states"), header.get("vocab_size")
    require_tensors(
        folder / MODEL, tensors, {"alpha_exp": [states, states], "beta": [states, words], "gamma": [states]}
    )
    hmm = HMM(tensors["gamma"], tensors["alpha_exp"].log(), tensors["beta"])
    try:
        hmm.validate()
    except InputError as error:
        raise InputError(f"{folder / MODEL}: {error}") from None
    return hmm, header
