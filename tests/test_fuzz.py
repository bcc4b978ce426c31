"""Every query of random models against the enumeration of all paths in extended precision.

`make fuzz SEED=1 COUNT=2000` runs more models than the few hundred here.
"""

from typing import Any

import pytest
from helpers.fuzz import EMISSIONS, KINDS, TRANSITIONS, Fuzz, UnionFuzz, campaign

from hmmlm import emissions, transitions
from hmmlm.ops.common import Impl, installed

COUNT = 300


def parts(count: int) -> list[Any]:
    """Return the first seed of each 50 models; `make quick` has half of them."""
    return [
        pytest.param(first, marks=[pytest.mark.slow] if first >= count / 2 else []) for first in range(0, count, 50)
    ]


@pytest.mark.parametrize("first", parts(COUNT))
def test_answers_of_random_models_agree_with_enumeration(first: int) -> None:
    right, wrong = campaign(range(first, first + 50))
    assert not wrong, "\n".join(wrong)
    assert right.total() > 2500


@pytest.mark.parametrize("first", parts(100))
def test_answers_of_random_unions_agree_with_enumeration(first: int) -> None:
    right, wrong = campaign(range(first, first + 50), kind=UnionFuzz)
    assert not wrong, "\n".join(wrong)
    assert right.total() > 3000


@pytest.mark.parametrize("impl", ["compiled", "parallel"])
def test_answers_of_single_implementations_agree_with_enumeration(impl: Impl) -> None:
    if impl == "compiled" and not installed("numba"):
        pytest.skip("numba is not installed")
    right, wrong = campaign(range(COUNT, COUNT + 60), impl=impl)
    assert not wrong, "\n".join(wrong)
    assert right.total() > 2500


def test_the_models_cover_all_pairs_of_kinds_both_dtypes_and_the_smallest_sizes() -> None:
    models = [Fuzz(seed) for seed in range(COUNT)]
    kinds = {(fuzz.hmm.kind, fuzz.dtype, fuzz.impl) for fuzz in models}
    assert len(kinds) == len(KINDS) * 2 * 3
    assert {fuzz.hmm.num_states for fuzz in models} >= {1, 2, 3, 4, 6}
    assert {fuzz.hmm.vocab_size for fuzz in models} >= {1, 2, 3, 4}
    assert {fuzz.batch.tokens.shape[1] for fuzz in models} >= {1, 2, 8}


def test_every_kind_is_drawn() -> None:
    assert TRANSITIONS.keys() == set(transitions.KINDS.values())
    assert EMISSIONS.keys() == set(emissions.KINDS.values())


def test_unions_are_of_any_kinds() -> None:
    unions = [UnionFuzz(seed).hmm for seed in range(100)]
    pairs = {frozenset(part.kind for part in union.components) for union in unions}
    assert len(pairs) >= 10 and {len(union.components) for union in unions} == {1, 2, 3}
