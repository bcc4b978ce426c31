"""The layout of the Hugging Face hub: a model folder with a model card, by path or by name."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hmmlm.data.files import RESULTS, read_json
from hmmlm.data.modelfolder import CONFIG, MODEL, TOKENIZER_FILES
from hmmlm.errors import InputError

if TYPE_CHECKING:
    from hmmlm.lm.lm import LanguageModel

CARD = "README.md"
"""The file of the model card."""
_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")  # "owner/name"
_TIMEOUT_S = 10.0
_SPLITS = ("valid", "test")


def fetch_model(path: Path, revision: str | None = None) -> Path:
    """Return the folder `path`, or else that of the model of this name on the hub, downloaded unless it is cached."""
    name = path.as_posix()
    if path.parent.exists() or not _NAME.fullmatch(name):  # what is missing in a folder is no name
        return path
    try:
        import huggingface_hub as hub
    except ImportError:
        raise InputError(
            f"no model at {name}: the folder does not exist, and huggingface_hub, which reads the hub, is not "
            "installed: pip install huggingface_hub"
        ) from None
    files: dict[str, Any] = {"revision": revision, "allow_patterns": [CONFIG, MODEL, *TOKENIZER_FILES, CARD]}
    try:
        hub.model_info(name, revision=revision, timeout=_TIMEOUT_S)  # fails at once, where a download retries
        return Path(hub.snapshot_download(name, **files))
    except Exception as error:  # of huggingface_hub or of its HTTP library: no common class
        reason = (str(error).splitlines() or [type(error).__name__])[0]
    try:
        return Path(hub.snapshot_download(name, local_files_only=True, **files))
    except Exception:
        raise InputError(
            f"no model {name}: there is no such folder, it is not in the cache of the Hugging Face hub, and the hub "
            f"does not supply it ({reason}): check the name and the connection"
        ) from None


def model_card(lm: LanguageModel, results: str | Path | None = None) -> str:
    """Return the model card of a model: what it is, how it was trained, how well it does, how to use it.

    Args:
        results: the `results.json` of its training run; without it, the one in the folder that the model was loaded
            from, if there is one.
    """
    front = {
        "library_name": "hmmlm",
        "pipeline_tag": "text-generation",
        "license": "unknown",
        "tags": ["hmm", "hidden-markov-model"],
    }
    if results is None and lm.folder is not None and (lm.folder / RESULTS).is_file():
        results = lm.folder / RESULTS
    figures = None if results is None else _read_figures(Path(results))
    sections = [
        "---\n" + "".join(f"{name}: {json.dumps(value)}\n" for name, value in front.items()) + "---",
        "# A hidden Markov language model",
        "Trained with `hmmlm`. It answers every query exactly: the probability of a text, the posterior over its "
        "states, the distribution of a missing word, samples that satisfy a constraint.",
        _table(("", ""), _facts(lm)),
        *(["## Training", _table(("setting", "value"), _settings(lm.config))] if lm.config else []),
        *(["## Results", _results(figures)] if figures is not None else []),
        "## Use",
        "```python\nimport hmmlm\n\n"
        'lm = hmmlm.load("owner/name")  # this folder, or its name on the hub\n'
        'lm.perplexity(["a line of text"])\nlm.generate("the", max_new_tokens=20, seed=1)\n```',
        "## Limits",
        *_limits(lm),
        "## Licence",
        "Not chosen yet: set `license` at the top of this file. That of the training text may restrict the choice.",
    ]
    return "\n\n".join(sections) + "\n"


def _facts(lm: LanguageModel) -> list[tuple[str, object]]:
    tensors = lm.hmm.tensors().values()
    return [
        ("states", f"{lm.hmm.num_states:,}"),
        ("kind", lm.hmm.kind),
        ("parameters", f"{sum(value.numel() for value in tensors if value.is_floating_point()):,}"),
        ("tokenizer", f"{lm.tokenizer.kind}, {lm.tokenizer.vocab_size:,} tokens"),
    ]


def _settings(config: Mapping[str, Any]) -> list[tuple[str, object]]:
    """Return the settings of a training configuration by name; of an absolute path, only its last part.

    The settings of a distillation without a teacher had no effect, and are left out.
    """
    rows: list[tuple[str, object]] = []
    for name, value in config.items():
        if isinstance(value, Mapping):
            if value.get("teacher", "given") is not None:
                rows += [(f"{name}.{inner}", each) for inner, each in _settings(value)]
        elif value is not None:
            rows.append((name, Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value))
    return rows


def _results(figures: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [(name, *(f"{each[split]['perplexity']:.1f}" for split in _SPLITS)) for name, each in figures.items()]
    unknown = float(figures["model"]["test"]["unknown_share"])
    return _table(("perplexity", *_SPLITS), rows) + f"\n\n{unknown:.1%} of the test words are unknown."


def _limits(lm: LanguageModel) -> list[str]:
    sentences = ["An HMM remembers one state: texts of several lines are not coherent, and it follows no instructions."]
    if lm.tokenizer.kind == "word":
        sentences.append(
            "The vocabulary is closed: every other word is `<unk>`. Compare perplexities only with models of the same "
            "vocabulary."
        )
    return sentences


def _table(head: tuple[object, ...], rows: list[Any]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(value) for value in line) + " |" for line in lines)


def _cell(value: object) -> str:
    return re.sub(r"\s+", " ", str(value)).replace("|", "\\|").replace("<", "&lt;")


def _read_figures(path: Path) -> dict[str, Any]:
    figures = read_json(path)
    try:
        _results(figures)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise InputError(f"{path} is not the results.json of a training run: give that file") from None
    return figures
