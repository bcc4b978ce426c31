"""The panel of states: a map, a search by word, and a page for each state."""

from __future__ import annotations

from itertools import islice
from typing import Annotated, Any

from pydantic import Field

from hmmlm.errors import InputError
from hmmlm.explorer.explorer import Explorer
from hmmlm.explorer.query import Count, Query
from hmmlm.explorer.tokens import display
from hmmlm.report.contexts import find_passages

NEIGHBOURS, WORDS, PASSAGES = 8, 16, 6
SUGGESTIONS = 8


class MapQuery(Query):
    """No fields."""


class SearchQuery(Query):
    word: Annotated[str, Field(min_length=1, max_length=100)]
    """A word of the vocabulary."""
    top: Count = 20
    """Number of states."""


class StateQuery(Query):
    state: Annotated[int, Field(ge=0, le=2**31)]
    """A state."""


def state_map(explorer: Explorer, query: MapQuery) -> dict[str, Any]:
    """Return the states with the largest share as points in the unit square; ready is false until it is computed."""
    answer = {"ready": False, "total": explorer.lm.hmm.num_states, "exact": explorer.index.exact, "states": []}
    if not explorer.layout.done():
        return answer
    states, points = explorer.layout.result()
    words, share = explorer.index.words(states), explorer.index.share
    rows = [
        [state, round(x, 4), round(y, 4), float(share[state]), " ".join(words[state][:3])]
        for state, (x, y) in zip(states, points.tolist(), strict=True)
    ]
    return answer | {"ready": True, "states": rows}


def search(explorer: Explorer, query: SearchQuery) -> dict[str, Any]:
    """Return the states that emit a word in a long text, with p(state | word), and words of the vocabulary like it."""
    lm, index, word = explorer.lm, explorer.index, query.word.strip()
    try:
        found = index.states_of_word(lm.token_id(word), query.top)
        problem = None
    except InputError as error:
        found, problem = [], str(error)
    like = (name for name in explorer.vocabulary if name != word and name.lower().startswith(word.lower()))
    return {
        "states": [_brief(explorer, state, p) for state, p in found],
        "problem": problem,
        "suggestions": list(islice(like, SUGGESTIONS)),
    }


def state_page(explorer: Explorer, query: StateQuery) -> dict[str, Any]:
    """Return a state's share and rank, most telling words, neighbours with probabilities, and likely next words."""
    index, tokenizer, state = explorer.index, explorer.lm.tokenizer, explorer.index.check(query.state)
    by_rank = index.order
    rank = int((by_rank == state).nonzero()[0])
    return {
        "state": state,
        "share": float(index.share[state]),
        "exact": index.exact,
        "rank": rank + 1,
        "previous": int(by_rank[rank - 1]) if rank else None,
        "next": int(by_rank[rank + 1]) if rank + 1 < len(by_rank) else None,
        "words": [
            {"text": display(tokenizer, token), "p": p, "lift": lift}
            for token, p, lift in index.emissions(state, WORDS)
        ],
        "before": [_brief(explorer, other, p) for other, p in index.predecessors(state, NEIGHBOURS)],
        "after": [_brief(explorer, other, p) for other, p in index.successors(state, NEIGHBOURS)],
        "says_next": [{"text": display(tokenizer, token), "p": p} for token, p in index.next_words(state, NEIGHBOURS)],
    }


def passages(explorer: Explorer, query: StateQuery) -> dict[str, Any]:
    """Return passages of the training text where the posterior of a state is highest."""
    state, text, tokenizer = explorer.index.check(query.state), explorer.text, explorer.lm.tokenizer
    if text is None:
        return {"passages": [], "problem": "the training text is not here: explore the folder of a run to see passages"}
    rows = []
    for (tokens, position), p in find_passages(explorer.lm, text, state, PASSAGES):
        before, after = (
            " ".join(tokenizer.decode(part).split()) for part in (tokens[:position], tokens[position + 1 :])
        )
        rows.append({"before": before, "word": display(tokenizer, tokens[position]), "after": after, "p": p})
    return {"passages": rows, "problem": None}


def _brief(explorer: Explorer, state: int, p: float) -> dict[str, Any]:
    """Return a state of a list: its probability there, its share and its most telling words."""
    words = explorer.index.words([state])[state]
    return {"state": state, "p": p, "share": float(explorer.index.share[state]), "words": words}
