"""Checks that every kind of teacher makes."""

from __future__ import annotations

from pathlib import Path

from hmmlm.errors import InputError, require


def find_teacher(name: str, gguf_file: str | None = None) -> tuple[str, str | None]:
    """Return the folder or hub name and the GGUF file in it, if any; raise an InputError if a path does not exist."""
    path = Path(name)
    if gguf_file is None and path.suffix == ".gguf" and (path.is_file() or not path.parent.is_dir()):
        name, gguf_file = str(path.parent), path.name
        path = path.parent
    is_path = path.is_absolute() or name.startswith(".") or name.count("/") > 1 or path.exists()
    if not path.is_dir() and (is_path or (name.count("/") == 1 and path.parent.is_dir())):
        raise InputError(f"no teacher at {name}: give a folder, a .gguf file or a name on the hub")
    if gguf_file is not None and path.is_dir() and not (path / gguf_file).is_file():
        raise InputError(f"no file {gguf_file} in the teacher folder {path}: give the name of a file in it")
    return name, gguf_file


def require_readers(name: str, gguf_file: str | None = None) -> None:
    """Raise an InputError unless a teacher of Hugging Face may exist, and the packages that read it are installed."""
    found, gguf_file = find_teacher(name, gguf_file)
    here = Path(found).is_dir()
    reader = f"the teacher {name}" if here else f"there is no folder {name}, and a teacher on the hub"
    require("teacher", "transformers", *(["gguf", "accelerate"] if gguf_file else []), reader=reader)


def layer_index(layer: int, layers: int) -> int:
    """Return `layer` as an index from 0 (token embeddings) to `layers` (last layer); −1 is the last layer."""
    if not -layers - 1 <= layer <= layers:
        raise InputError(
            f"the teacher has no layer {layer}: 0 is its token embeddings, 1 to {layers} its layers, -1 the last"
        )
    return layer if layer >= 0 else layers + 1 + layer


def check_vocabulary(name: str, tokens: int, rows: int) -> None:
    """Raise an InputError if a tokenizer has more `tokens` than the network's embedding table has `rows`."""
    if tokens > rows:
        raise InputError(
            f"the tokenizer of the teacher {name} has {tokens} tokens and its network only {rows}: use the tokenizer "
            "that the network was trained with"
        )
