"""Checks that every kind of teacher makes."""

from __future__ import annotations

from hmmlm.errors import InputError


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
