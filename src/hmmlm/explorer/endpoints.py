"""The JSON endpoints: one for each panel or part of one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from pydantic import ValidationError

from hmmlm.errors import InputError
from hmmlm.explorer import comparison, generation, run, sentence, states
from hmmlm.explorer.explorer import Explorer
from hmmlm.explorer.query import Query


class Endpoint(NamedTuple):
    """A kind of request and the function that answers it."""

    query: type[Query]
    answer: Callable[[Explorer, Any], dict[str, Any]]


ENDPOINTS = {
    "model": Endpoint(run.ModelQuery, run.model),
    "sentence": Endpoint(sentence.SentenceQuery, sentence.sentence),
    "blank": Endpoint(sentence.BlankQuery, sentence.blank),
    "map": Endpoint(states.MapQuery, states.state_map),
    "search": Endpoint(states.SearchQuery, states.search),
    "state": Endpoint(states.StateQuery, states.state_page),
    "passages": Endpoint(states.StateQuery, states.passages),
    "generate": Endpoint(generation.GenerateQuery, generation.generate),
    "fill": Endpoint(generation.FillQuery, generation.fill),
    "compare": Endpoint(comparison.CompareQuery, comparison.compare),
    "run": Endpoint(run.RunQuery, run.run),
}


def answer(explorer: Explorer, name: str, fields: Any) -> dict[str, Any]:
    """Return the answer of an endpoint to the fields of a request, as JSON values.

    Raises:
        InputError: if the endpoint does not exist, or the request is not one of it.
    """
    if name not in ENDPOINTS:
        raise InputError(f"there is no endpoint {name!r}: use {', '.join(ENDPOINTS)}")
    endpoint = ENDPOINTS[name]
    try:
        query = endpoint.query.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the request"
        raise InputError(f"{where}: {first['msg']}") from None
    return _finite(endpoint.answer(explorer, query))


def _finite(value: Any) -> Any:
    """Replace infinity and NaN, which JSON lacks, by None."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
