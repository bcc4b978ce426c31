"""The model folders of libraries for controlled generation (Ctrl-G, GeLaTo)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hmmlm.arguments import check_arguments, describe
from hmmlm.data.files import read_json
from hmmlm.data.modelfolder import CONFIG, MODEL, as_folder, require_dtype, require_size, require_tensors, write_folder
from hmmlm.data.tensorfiles import read_tensors
from hmmlm.data.tokenizers import Tokenizer, load_tokenizer
from hmmlm.errors import InputError
from hmmlm.hmm import HMM
from hmmlm.numerics.distributions import check_distributions


@check_arguments
def save_ctrlg(hmm: HMM, path: str | Path, eos_token_id: int, tokenizer: Tokenizer | None = None) -> None:
    """Write `alpha_exp` [Z, Z] transition probabilities, `beta` [Z, V] log-emissions and `gamma` [Z] log-start.

    With the tokenizer's file, which those libraries ignore, `hmmlm.load` reads the folder.
    """
    if eos_token_id not in range(hmm.vocab_size) or (tokenizer is not None and eos_token_id != tokenizer.eos_id):
        own = f"from 0 to {hmm.vocab_size - 1}" if tokenizer is None else f"{tokenizer.eos_id}, that of the tokenizer"
        raise InputError(f"eos_token_id is {describe(eos_token_id)}: give {own}")
    if tokenizer is not None and tokenizer.vocab_size != hmm.vocab_size:
        raise InputError(
            f"the tokenizer has {tokenizer.vocab_size} words and the model has {hmm.vocab_size}: give its own tokenizer"
        )
    tensors = {"alpha_exp": hmm.transition.dense().exp(), "beta": hmm.emission.dense(), "gamma": hmm.log_start}
    header = {"hidden_states": hmm.num_states, "vocab_size": hmm.vocab_size, "eos_token_id": eos_token_id}
    write_folder(as_folder(path), tensors, header, {"format": "pt"}, tokenizer)


def is_ctrlg_folder(path: Path) -> bool:
    """Return whether a folder has this layout."""
    if not (path / CONFIG).is_file() or not (path / MODEL).is_file():
        return False
    header = read_json(path / CONFIG)
    return "format" not in header and "hidden_states" in header and "eos_token_id" in header


def load_ctrlg(path: str | Path) -> tuple[HMM, dict[str, Any]]:
    """Return the HMM in a folder of this layout, and its header (hidden_states, vocab_size, eos_token_id)."""
    folder = Path(path)
    header = read_json(folder / CONFIG)
    file = folder / MODEL
    tensors, _ = read_tensors(file)
    states, words = (require_size(folder / CONFIG, header, name) for name in ("hidden_states", "vocab_size"))
    shapes = {"alpha_exp": [states, states], "beta": [states, words], "gamma": [states]}
    require_tensors(file, tensors, shapes)
    require_dtype(file, tensors, list(shapes), torch.float32, torch.float64)
    logs = {"gamma": tensors["gamma"], "alpha_exp": tensors["alpha_exp"].log(), "beta": tensors["beta"]}
    for name, log_probs in logs.items():
        check_distributions(log_probs, f"{file}: {name}")
    return HMM(logs["gamma"], logs["alpha_exp"], logs["beta"]), header


def ctrlg_tokenizer(folder: Path, eos_token_id: object) -> Tokenizer:
    """Return the tokenizer in a folder of Ctrl-G; raise an InputError if its end of text is another token."""
    tokenizer = load_tokenizer(folder)
    if tokenizer.eos_id != eos_token_id:
        raise InputError(
            f"{folder}: eos_token_id is {eos_token_id!r:.40}, but {tokenizer.eos_id} in the tokenizer there: copy the "
            "tokenizer's file of the model that was distilled"
        )
    return tokenizer
