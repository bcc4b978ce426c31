"""The panel of generation: samples with their states, constraints followed token by token, and blanks to fill."""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Sequence
from dataclasses import fields
from itertools import chain
from typing import Annotated, Any

import torch
from pydantic import Field

from hmmlm.constrain.constraint import Constraint
from hmmlm.errors import InputError, InputWarning
from hmmlm.explorer.explorer import Explorer
from hmmlm.explorer.query import Count, Query, Text
from hmmlm.explorer.tokens import described
from hmmlm.lm.generation import SamplingOptions, collect, sample_accepted, sample_continuations
from hmmlm.lm.lm import LanguageModel
from hmmlm.terminal import counted

MAX_WORK = 2**33  # states² × tokens of a constraint on a CPU: about ten seconds
MAX_PREDICTED = 2**21  # states × new tokens that are drawn from predictive distributions on a CPU: the same
CONSTRAINT_CHARACTERS = 4_000


class GenerateQuery(Query):
    prompt: Text = ""
    """What the samples start with."""
    num_samples: Annotated[int, Field(ge=1, le=8)] = 3
    """Number of samples."""
    max_new_tokens: Annotated[int, Field(ge=1, le=200)] = 40
    """Maximum number of tokens of a sample."""
    temperature: Annotated[float, Field(ge=0, le=10)] = 1.0
    """Below 1: likely words become more likely; 0: always the most likely."""
    top_k: Annotated[int, Field(ge=1)] | None = None
    """Sample among the k most likely words only."""
    seed: Annotated[int, Field(ge=0, lt=2**53)] | None = None
    """Sample i uses seed + i; null: chosen at random, and returned."""
    allow_unk: bool = True
    """Whether `<unk>` may be sampled."""
    constraints: dict[str, Any] = Field(default_factory=dict)
    """Arguments of `LanguageModel.guide` by name: {"must": ["a list"], "never": ["None"]}."""


class FillQuery(Query):
    text: Text
    """Lines of text; `___` is a blank."""
    top: Count = 8
    """Words per blank."""
    allow_unk: bool = True
    """Whether `<unk>` may fill a blank."""


def constraint_kinds() -> dict[str, str]:
    """Return the constraints that the page offers: name → "list" (of phrases), "bounds" ([least, most]) or "text".

    They are the fields of `Constraint` that can be written as JSON.
    """
    kinds = {}
    for field in fields(Constraint):
        if field.default == ():
            kinds[field.name] = "list"
        elif field.default == (None, None):
            kinds[field.name] = "bounds"
        elif isinstance(field.default, str) or "str" in str(field.type):
            kinds[field.name] = "text"
    return kinds


@torch.no_grad()
def generate(explorer: Explorer, query: GenerateQuery) -> dict[str, Any]:
    """Return samples: tokens with surprisal, a state path drawn given the tokens, and log p(constraint) in nats.

    Tokens and path together are a sample of the model. log p(constraint) is that of satisfying it in the end, before
    the first new token (`log_prob_accept`) and after each (`log_prob_accept` of the token).
    """
    lm, eos = explorer.lm, explorer.lm.tokenizer.eos_id
    seed = secrets.randbelow(2**32) if query.seed is None else query.seed
    options = SamplingOptions(query.max_new_tokens, query.temperature, query.top_k, seed, query.num_samples)
    given = lm.encode(query.prompt)[: None if query.prompt.endswith("\n") else -1]
    constraints = chosen_constraints(lm, query)
    log_prob_accept: float | None = None
    log_probs_accept: Sequence[list[float] | None] = [None] * query.num_samples
    if constraints:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", InputWarning)  # unknown words of the prompt are marked on the page
            guide, position = lm.guide(
                max_new_tokens=query.max_new_tokens, prompt=query.prompt, allow_unk=query.allow_unk, **constraints
            )
        added = collect(sample_accepted(guide, position, eos, options))
    else:
        excluded = None if query.allow_unk else lm.tokenizer.unk_id
        _check_predicted(lm, query, excluded)
        added = collect(sample_continuations(lm.hmm, lm.context(given), eos, options, excluded, lm.chunk))
    ended = [[*tokens, *([eos] if len(tokens) < query.max_new_tokens else [])] for tokens in added]
    if constraints:
        log_prob_accept, log_probs_accept = (
            guide.log_prob_accept(position),
            guide.log_probs_accept_along(position, lm.context(given), ended),
        )
    texts = [[*given, *new] for new in ended]
    log_probs, paths = lm.token_log_probs(texts), _draw_paths(lm, texts, seed)
    samples = [
        _described(explorer, text, len(given), path, scores.tolist(), after)
        for text, path, scores, after in zip(texts, paths, log_probs, log_probs_accept, strict=True)
    ]
    states = {state for sample in samples for token in sample["tokens"] for state in [token["state"]]}
    labels = {str(state): words for state, words in explorer.index.words(sorted(states)).items()}
    return {"seed": seed, "log_prob_accept": log_prob_accept, "samples": samples, "states": labels}


def chosen_constraints(lm: LanguageModel, query: GenerateQuery) -> dict[str, Any]:
    """Return the constraints of a request; raise an InputError if one is not known or would take too long."""
    names = constraint_kinds()
    for name, value in query.constraints.items():
        if name not in names:
            raise InputError(f"there is no constraint {name!r}: use {', '.join(names)}")
        if len(str(value)) > CONSTRAINT_CHARACTERS:
            raise InputError(f"the constraint {name} has more than {CONSTRAINT_CHARACTERS:,} characters")
    chosen = {name: value for name, value in query.constraints.items() if value not in (None, "", [])}
    work = lm.hmm.num_states**2 * query.max_new_tokens
    if chosen and work > MAX_WORK and lm.hmm.device.type == "cpu":
        raise InputError(
            f"a constraint on {counted(query.max_new_tokens, 'token')} of a model with {lm.hmm.num_states:,} states "
            "takes too long here: use fewer tokens, a GPU, or `hmmlm sample --must`"
        )
    return chosen


def _check_predicted(lm: LanguageModel, query: GenerateQuery, excluded: int | None) -> None:
    """Raise an InputError if samples would take too long: only those of the model itself need no sum over states."""
    plain = query.temperature == 1 and query.top_k is None and excluded is None
    work = query.num_samples * query.max_new_tokens * lm.hmm.num_states
    if not plain and work > MAX_PREDICTED and lm.hmm.device.type == "cpu":
        raise InputError(
            f"{counted(query.num_samples, 'sample')} of {counted(query.max_new_tokens, 'token')} of a model with "
            f"{lm.hmm.num_states:,} states take too long here: use temperature 1, all words and <unk>, or fewer tokens"
        )


def _draw_paths(lm: LanguageModel, texts: Sequence[list[int]], seed: int) -> list[list[int]]:
    """Draw the states of each text given its tokens."""
    parts = [lm.sequences(text) for text in texts]
    generator = torch.Generator(lm.hmm.device).manual_seed(seed)
    drawn = iter(lm.hmm.posterior_sample(list(chain(*parts)), generator=generator)[0].tolist())
    return [[state for part in each for state in next(drawn)[: len(part)]] for each in parts]


def _described(
    explorer: Explorer,
    tokens: list[int],
    given: int,
    path: list[int],
    log_probs: list[float],
    log_probs_accept: list[float] | None,
) -> dict[str, Any]:
    """Return a sample as JSON values: its tokens with their log-probabilities, and log p(constraint) after new ones."""
    tokenizer = explorer.lm.tokenizer
    rows = []
    for i, (token, log_prob, state) in enumerate(zip(tokens, log_probs, path, strict=True)):
        shown = described(tokenizer, token, tokens[i - 1] if i else None, log_prob)
        rows.append(shown | {"state": state, "new": i >= given, "log_prob_accept": None})
    for row, log_prob_accept in zip(rows[given:], log_probs_accept or [], strict=False):
        row["log_prob_accept"] = log_prob_accept
    return {"text": tokenizer.decode(tokens).removesuffix("\n"), "tokens": rows}


def fill(explorer: Explorer, query: FillQuery) -> dict[str, Any]:
    """Return the most likely words of every blank, given everything else in the text; other blanks are summed over."""
    found = explorer.lm.infill(query.text, query.top, query.allow_unk)
    return {"blanks": [[{"text": word, "p": p} for word, p in words] for words in found]}
