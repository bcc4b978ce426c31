"""Tests of `hmmlm.restarts`."""

import math

import pytest

from hmmlm.restarts import best_of


@pytest.mark.parametrize(
    ("scores", "best"),
    [
        ([2.0, 3.0, 3.0], 8),
        ([math.nan, -math.inf, -5.0], 9),
        ([1.0, math.nan, 0.0], 7),
        ([math.nan, math.nan, math.nan], 7),
    ],
)
def test_the_first_of_the_highest_scores_wins_and_nan_loses(scores, best):
    tried = []

    def attempt(seed):
        tried.append(seed)
        return seed

    assert best_of(attempt, lambda seed: scores[seed - 7], restarts=3, seed=7) == best
    assert tried == [7, 8, 9]
