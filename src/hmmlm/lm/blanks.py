"""Blanks of a text: its tokens with missing ones, and tokens as a reader sees them."""

import re

from hmmlm.data.tokenizers import Tokenizer

_BLANK = re.compile(r"(?<!\w)_{3,}(?!\w)", re.ASCII)  # not inside a word: identifiers may contain three underscores


def encode_blanks(tokenizer: Tokenizer, line: str) -> list[int]:
    """Return the tokens of a line, −1 for each blank."""
    if tokenizer.kind == "char":  # a blank is one character, anywhere
        before, *behind = map(tokenizer.encode, re.split("_{3,}", line))
        return [*before, *(token for part in behind for token in (-1, *part))]
    first, *others = _BLANK.split(line)
    tokens = tokenizer.encode(first.rstrip())
    for part in map(str.rstrip, others):
        after = tokenizer.encode(part)
        if tokenizer.kind != "word":  # subword tokens differ at the beginning of a text
            word, both = tokenizer.encode("a"), tokenizer.encode("a" + part)
            after = both[len(word) :] if both[: len(word)] == word else after
        tokens += [-1, *after]
    return tokens


def readable_token(tokenizer: Tokenizer, token: int, inside: bool) -> str:
    """Return a token as a reader sees it: a word or its first part, or "…" and what continues a word.

    Args:
        inside: whether it is not at the start of a line.
    """
    text = tokenizer.token(token)
    if tokenizer.kind in ("word", "char") or token in (tokenizer.eos_id, tokenizer.unk_id):
        return text
    starts = not inside or text.startswith("▁") or not text[:1].isalnum()
    return (text.removeprefix("▁") or text) if starts else f"…{text}"
