"""Read and write the classic Brown tool's `paths` files: a line `bit string <TAB> word <TAB> count` per word."""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hmmlm.errors import InputError
from hmmlm.structure.brown import BrownClustering

_LINE = re.compile(r"([01]+)\t([^\t]+)\t([0-9]+)")


def read_paths(file: str | Path, words: Sequence[str]) -> BrownClustering:
    """Return the clusters of a vocabulary from a `paths` file; `words` is the vocabulary in the order of its ids.

    Clusters are numbered by their bit strings in lexicographic order, the order in which the tool writes them. Words
    that the file lacks have cluster −1 (see `BrownClustering.with_unseen_placed`). Words that the vocabulary lacks are
    an error.
    """
    ids = {word: index for index, word in enumerate(words)}
    path_of: dict[str, str] = {}
    counts = np.zeros(len(words), dtype=np.int64)
    foreign: list[str] = []
    try:
        # Only \n ends a line: words may contain other characters that Python treats as line ends.
        lines = Path(file).read_bytes().decode("utf-8").split("\n")
    except OSError as error:
        raise InputError(f"{file}: cannot read this paths file: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{file}: not UTF-8 text at byte {error.start}: give a paths file") from error
    if lines[-1] == "":
        lines.pop()
    for number, line in enumerate(lines, start=1):
        match = _LINE.fullmatch(line.removesuffix("\r"))
        if match is None:
            raise InputError(f"{file}, line {number}: expected 'bits<TAB>word<TAB>count', found {line[:80]!r}")
        path, word, count = match.groups()
        if word in path_of:
            raise InputError(f"{file}, line {number}: word {word!r} occurs twice; give each word one line")
        path_of[word] = path
        if word in ids:
            counts[ids[word]] = int(count)
        else:
            foreign.append(word)
    if foreign:
        named = ", ".join(repr(word) for word in foreign[:5])
        raise InputError(
            f"{file}: {len(foreign)} of {len(path_of)} words are not in the vocabulary of {len(words)} words "
            f"({named}{', …' if len(foreign) > 5 else ''}); cluster the text with this vocabulary"
        )
    if not path_of:
        raise InputError(f"{file}: the file has no clusters; write one line per word")
    paths = sorted(set(path_of.values()))
    number_of = {path: number for number, path in enumerate(paths)}
    cluster = np.full(len(words), -1)
    for word, path in path_of.items():
        cluster[ids[word]] = number_of[path]
    return BrownClustering(cluster=cluster, paths=tuple(paths), counts=counts)


def write_paths(file: str | Path, clustering: BrownClustering, words: Sequence[str]) -> None:
    """Write a `paths` file: clusters in path order, each with its words by increasing count; unseen words left out."""
    if len(words) != len(clustering.cluster):
        raise InputError(
            f"the clusters belong to another vocabulary: {len(clustering.cluster)} words are clustered, "
            f"the vocabulary has {len(words)}; give the vocabulary of the clustered text"
        )
    order = np.lexsort((clustering.counts, clustering.cluster))
    lines = []
    for index in order[clustering.cluster[order] >= 0].tolist():
        word = words[index]
        if not word or "\t" in word or "\n" in word:
            raise InputError(
                f"word {index} ({word!r}) cannot be in a paths file: it is empty or has a tab or line break"
            )
        lines.append(f"{clustering.paths[clustering.cluster[index]]}\t{word}\t{clustering.counts[index]}\n")
    Path(file).write_bytes("".join(lines).encode("utf-8"))
