"""The panel of two models: the surprisal of each token of a text under both."""

from __future__ import annotations

from typing import Any

from hmmlm.explorer.explorer import Explorer, Scorer, model_scorer
from hmmlm.explorer.query import Query, Text
from hmmlm.explorer.tokens import bits, described
from hmmlm.lm.scoring import perplexity

MAX_TOKENS = 2_000


class CompareQuery(Query):
    text: Text
    """Lines of text."""


def compare(explorer: Explorer, query: CompareQuery) -> dict[str, Any]:
    """Return the surprisal of every token under both models, in bits; aligned: both have the same tokens."""
    if not explorer.second.done():
        return {"ready": False, "models": [], "aligned": False}
    first, second = model_scorer(explorer.lm, explorer.name), explorer.second.result()
    models = [_scored(first, query.text), _scored(second, query.text)]
    aligned = first.tokenizer.fingerprint() == second.tokenizer.fingerprint()
    return {"ready": True, "models": models, "aligned": aligned}


def _scored(model: Scorer, text: str) -> dict[str, Any]:
    """Return a model's tokens of a text with their surprisal, and figures of all of them."""
    whole = model.encode(text)
    tokens = whole[:MAX_TOKENS]
    log_probs = model.log_probs(tokens)
    total = bits(sum(log_probs))
    size = len(text.encode()) + 1  # the last line break
    return {
        "name": model.name,
        "tokens": [
            described(model.tokenizer, token, tokens[i - 1] if i else None, log_prob)
            for i, (token, log_prob) in enumerate(zip(tokens, log_probs, strict=True))
        ],
        "omitted": len(whole) - len(tokens),
        "bits": total,
        "perplexity": None if total is None else perplexity(sum(log_probs), len(tokens)),
        "bits_per_byte": None if total is None or len(whole) > len(tokens) else total / size,
    }
