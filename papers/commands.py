"""The command lines that make a run today, from the repository root."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from papers.settings import configuration, flags, identity, planned_settings
from papers.study import NGRAM, Combination, StudyRun

PARTS, TEACHER, TOKENS = "parts/{}", "runs/teacher", "tokens"
"""Folders of models to combine, of a teacher, and of token files."""


def command(run: StudyRun) -> str:
    """Return the command line that makes the same run from the repository root, that of its teacher first."""
    return " && ".join(shlex.join(["hmmlm", *words]) for words in commands(run))


def commands(run: StudyRun) -> Iterator[list[str]]:
    """Yield the arguments of the commands that make a run, in order."""
    if run.row.combine is not None:
        yield from _combined(run, run.row.combine)
    elif run.row.recipe == NGRAM:
        yield from _counted(run)
    elif run.row.teacher is not None:
        teacher, student = trainings(run)
        yield [*next(commands(teacher)), "--out", TEACHER]
        yield from commands(student)
    else:
        words, settings = flags(run)
        yield [*words, *_options(settings)]


def trainings(run: StudyRun) -> list[StudyRun]:
    """Return the runs that are trained for a run, each once: teachers before the models that read them."""
    found = list[StudyRun]()
    for part in parts_of(run):
        if part.row.teacher is not None:
            settings = {**part.row.settings, "next_words.teacher": TEACHER}
            found += [teacher_of(part), StudyRun(replace(part.row, teacher=None, settings=settings), part.seed)]
        else:
            found.append(part)
    return list({identity(each): each for each in found}.values())


def teacher_of(run: StudyRun) -> StudyRun:
    """Return the run of a row's teacher."""
    assert run.row.teacher is not None
    return StudyRun(run.row.teacher, run.row.teacher.seeds[0])


def parts_of(run: StudyRun) -> list[StudyRun]:
    """Return the training runs of a run: itself, or those of the models that it combines, with its settings."""
    if run.row.combine is None:
        return [run]
    rows = [replace(row, settings={**row.settings, **run.row.settings}) for row in run.row.combine.parts]
    return [StudyRun(row, run.seed) for row in rows]


def counted(combination: Combination) -> dict[str, Any]:
    """Return the options of `hmmlm mix` for what is counted beside the models."""
    return {"ngram": combination.ngram, "cache": combination.cache, "recent": combination.recent}


def _combined(run: StudyRun, combination: Combination) -> Iterator[list[str]]:
    """Yield the commands of a combination: train its parts, combine them, evaluate the result."""
    parts, teachers = parts_of(run), list[list[str]]()
    for i, part in enumerate(parts, 1):
        *before, last = commands(part)
        yield from (words for words in before if words not in teachers)  # a teacher of several parts is trained once
        teachers += before
        yield [*last, "--out", PARTS.format(i)]
    folders = [PARTS.format(i) for i in range(1, len(parts) + 1)]
    if combination.mixed == "sequence":
        yield ["join", *folders, "--out", "combined"]
    else:
        counts = [text for name, value in counted(combination).items() if value for text in (f"--{name}", str(value))]
        yield ["mix", *folders, *counts, "--out", "combined"]
    yield ["eval", "combined", "--data", PARTS.format(1), "--splits", "valid,test"]


def _counted(run: StudyRun) -> Iterator[list[str]]:
    """Yield the commands that count an n-gram: the token files, then the n-gram."""
    from papers.ngrams import NgramConfig  # here: it imports torch, which lists of commands need not

    config = configuration(run)
    assert isinstance(config, NgramConfig)
    plain, (_, settings) = planned_settings(NGRAM, {"data": config.data}), flags(run)
    tokenizer = {name: value for name, value in settings.items() if name.startswith("tokenizer.")}
    changed = {name: value for name, value in tokenizer.items() if plain.get(name) != value}
    yield ["data", config.data, "--out", TOKENS, *_options(changed)]
    yield ["ngram", TOKENS, *_options({"order": config.order, "reset_at_eos": config.reset_at_eos})]


def _options(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield settings as options; switches are --section.name and --no-section.name."""
    for name, value in settings.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{option}" if value else f"--no-{option}"
        else:
            yield f"--{option}"
            yield f"[{','.join(map(_text, value))}]" if isinstance(value, (list, tuple)) else _text(value)


def _text(value: Any) -> str:
    """Return a value as it is written on the command line, 5000000 instead of 5000000.0."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() and value < 1e15 else str(value)
