"""Saved models by their folder, as "latest", or by their name on the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

import torch

from hmmlm.arguments import check_type
from hmmlm.data.modelfolder import as_folder
from hmmlm.lm.hub import fetch_model
from hmmlm.lm.lm import LanguageModel
from hmmlm.lm.mixture import MixtureModel, load_text_model
from hmmlm.runs.folders import find_run


def load(
    path: str | Path, device: str | torch.device = "auto", revision: str | None = None
) -> LanguageModel | MixtureModel:
    """Return a saved model: a `MixtureModel` if `hmmlm mix` wrote it, a `LanguageModel` otherwise.

    Args:
        path: the folder of a model (one of Ctrl-G too, with the file of its tokenizer) or of a training run, whose best
            model is returned; "latest", the newest run in runs/; or a name on the Hugging Face hub, owner/name.
        device: "auto" (a GPU if there is one), "cpu", "cuda", or a torch.device.
        revision: a branch, tag or commit on the hub.
    """
    check_type("revision", revision, str | None)
    return load_text_model(fetch_model(find_run(as_folder(path)), revision), device)
