"""The default corpus: the English documentation that CPython includes.

It consists of the language reference in `pydoc_data.topics` and the docstrings of the standard library, which is parsed
with `ast`, never imported. Paragraphs are documents. Code, doctests, grammars, tables and headings are left out, and
paragraphs that mostly repeat phrases of earlier ones, as an n-gram would only have to remember them.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from pydoc_data import topics

from hmmlm.data.text import held_out
from hmmlm.errors import InputError

_SKIPPED = frozenset(
    ["test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "turtledemo", "__pycache__", "_bundled"]
)
_RULE = re.compile(r"[-=~^*+_#.|\s]{3,}$")
_CODE = re.compile(
    r">>>|\.\.\. |\.\. |::=|-> |[$%#|@:]"  # prompts, directives, grammars, comments, tables, field lists
    r"|(def|class|import|from|print|return|if|for|while|with|try|except|raise)\b.*[:()=]"
    r"|[\w.]+\(.*\)(\s*->.*)?:?$"  # a signature
    r"|[\w.\[\]'\"]+\s*[-+*/|&]?=\s"  # an assignment
)
_BULLET = re.compile(r"([*+o•-]|\(?\d+[.)]|\([a-z]\))\s+")
_MARKUP = [
    (re.compile(r":[a-zA-Z:]+:`~?([^`]*)`"), r"\1"),  # :class:`Foo`
    (re.compile(r"`+_?([^`\s][^`]*?)[`']+_?"), r"\1"),
    (re.compile(r"(?<!\w)(\*{1,2})(\w[^*]*)\1(?!\w)"), r"\2"),  # *emphasis*, **PEP 8**
    (re.compile(r'"([\w.()]+)"'), r"\1"),  # the language reference quotes code
    (re.compile(r"\s*\[\d+\]"), ""),  # footnotes
    (re.compile(r"::$"), ":"),
]
_PROSE_WORD = re.compile(r"[\"'(“‘]*[A-Za-z]+(?:['’-][A-Za-z]+)*[\"')”’]*[,.;:!?]?[\"')”’]*$")
_FEWEST_WORDS = 5
_PHRASE = 3
"""Words of a phrase that a paragraph may repeat."""
_REPEATED_SHARE = 0.3
_PROSE_SHARE = 0.8


@cache
def embedded_corpus() -> dict[str, list[str]]:
    """Return the paragraphs of train (90%), valid (5%) and test (5%), split by the hash of a paragraph."""
    splits: dict[str, list[str]] = {"train": [], "valid": [], "test": []}
    seen: set[tuple[str, ...]] = set()
    for text in _texts():
        for paragraph in _paragraphs(text):
            key = paragraph.lower()
            words = re.findall(r"\w+|[^\w\s]", key)
            phrases = {tuple(words[i : i + _PHRASE]) for i in range(len(words) - _PHRASE + 1)}
            if len(phrases & seen) <= _REPEATED_SHARE * len(phrases):
                splits[held_out(key)].append(paragraph)
            seen |= phrases
    if not all(splits.values()):
        raise InputError("this Python has no documentation to train on: give a text with --data")
    return splits


def _texts() -> Iterator[str]:
    """Yield the topics of the language reference, then the docstrings of the standard library."""
    yield from (text for _, text in sorted(topics.topics.items()))
    for folder, inner, files in os.walk(sysconfig.get_path("stdlib")):
        inner[:] = sorted(set(inner) - _SKIPPED)
        for file in sorted(files):
            if file.endswith(".py"):
                yield from _docstrings(Path(folder, file))


def _docstrings(path: Path) -> Iterator[str]:
    """Yield the docstrings of a module; none if it cannot be parsed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in the standard library do not concern the user
            module = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return
    waiting: list[ast.AST] = [module]
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text:
                yield text
        # Only statements: expressions have no docstrings and are most of the tree.
        waiting.extend(child for name in ("body", "orelse", "handlers") for child in _list(node, name))


def _list(node: ast.AST, name: str) -> list[ast.AST]:
    value = getattr(node, name, ())
    return value if isinstance(value, list) else []


def _paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of prose in a docstring or topic."""
    for lines in _blocks(inspect.cleandoc(text).splitlines()):
        paragraph = _clean(" ".join(lines))
        if _is_prose(paragraph):
            yield paragraph


def _blocks(lines: Iterable[str]) -> Iterator[list[str]]:
    """Yield runs of prose lines; a blank line, a bullet, a rule or a line of code ends a run."""
    block: list[str] = []
    for line in [*lines, ""]:
        stripped = line.strip()
        bullet = _BULLET.match(stripped)
        if _RULE.match(stripped) and block:
            block.pop()  # the heading that the rule underlines
        if not stripped or bullet or _RULE.match(stripped) or _CODE.match(stripped):
            if block:
                yield block
            block = [stripped[bullet.end() :]] if bullet else []
        else:
            block.append(stripped)


def _clean(text: str) -> str:
    """Normalize white space and remove markup."""
    text = " ".join(text.split())
    for pattern, replacement in _MARKUP:
        text = pattern.sub(replacement, text)
    return text


def _is_prose(text: str) -> bool:
    """Return whether a text starts and ends like a sentence and consists mostly of plain words."""
    words = text.split()
    if len(words) < _FEWEST_WORDS or text[-1] not in ".!?:)" or not text.lstrip("\"'(“")[:1].isupper():
        return False
    return sum(_PROSE_WORD.match(word) is not None for word in words) >= _PROSE_SHARE * len(words)
