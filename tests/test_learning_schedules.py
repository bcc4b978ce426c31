"""Learning-rate schedules by their exact values, and the division of the rate on plateaus."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hmmlm.config.sections import ConstantConfig, CosineConfig, PlateauConfig
from hmmlm.learning.schedules import Plateau, lr_factor


def test_constant_with_and_without_warmup() -> None:
    assert lr_factor(ConstantConfig(warmup=0), 1, 100) == 1.0
    config = ConstantConfig(warmup=40)
    assert [lr_factor(config, tokens, 100) for tokens in (10, 20, 40, 41, 100)] == [0.25, 0.5, 1.0, 1.0, 1.0]


def test_warmup_below_one_is_a_fraction_of_the_run_and_otherwise_tokens() -> None:
    fraction, tokens = ConstantConfig(warmup=0.4), ConstantConfig(warmup=1)
    assert [lr_factor(fraction, done, 100) for done in (10, 20, 40)] == [0.25, 0.5, 1.0]
    assert lr_factor(tokens, 1, 100) == 1.0


def test_cosine_values() -> None:
    config = CosineConfig(warmup=0.2, final_fraction=0.1)
    expected = {100: 0.5, 200: 1.0, 400: 0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2, 600: 0.55, 1000: 0.1, 1200: 0.1}
    for tokens, factor in expected.items():
        assert lr_factor(config, tokens, 1000) == pytest.approx(factor, abs=1e-12)


def test_warmup_longer_than_the_run_never_divides_by_zero() -> None:
    config = CosineConfig(warmup=100)
    assert lr_factor(config, 100, 100) == 1.0
    assert lr_factor(config, 50, 80) == 0.5


@given(st.integers(1, 10_000), st.integers(1, 10_000), st.floats(0, 1, exclude_max=True), st.floats(0, 1))
def test_cosine_stays_within_its_bounds_and_falls(tokens: int, total: int, warmup: float, final: float) -> None:
    config = CosineConfig(warmup=warmup, final_fraction=final)
    here, later = lr_factor(config, tokens, total), lr_factor(config, tokens + 1, total)
    assert 0 < here <= 1 + 1e-12 or final == 0
    if tokens >= warmup * total:
        assert final - 1e-12 <= later <= here + 1e-12


def test_plateau_divides_after_patience_checks_without_a_best() -> None:
    plateau = Plateau(PlateauConfig(factor=4, patience=2))
    factors = []
    for loss in (3.0, 2.0, 2.0, 2.5, 1.9, 1.9, 1.9, 1.9, 1.9):
        plateau.check(loss)
        factors.append(plateau.factor)
    assert factors == [1, 1, 1, 1 / 4, 1 / 4, 1 / 4, 1 / 16, 1 / 16, 1 / 64]


def test_other_kinds_never_divide() -> None:
    for config in (ConstantConfig(), CosineConfig()):
        plateau = Plateau(config)
        for _ in range(PlateauConfig().patience + 2):
            plateau.check(1.0)
        assert plateau.factor == 1.0


def test_two_losses_far_above_the_best_in_a_row_halve_the_rate_three_times_at_most() -> None:
    plateau, bad = Plateau(CosineConfig()), 1.0 + math.log(1.6)
    diverges = [plateau.check(loss) for loss in (1.0, bad, 1.0 + math.log(1.4), bad, bad)]
    assert diverges == [False, False, False, False, True] and plateau.factor == 0.5
    assert [plateau.check(bad) for _ in range(6)] == [False, True, False, True, False, False]
    assert plateau.factor == 0.125


@pytest.mark.parametrize("losses", [[], [math.inf], [2.0, 3.0, 3.0, 3.0]])
def test_plateau_state_round_trip(losses: list[float]) -> None:
    config = PlateauConfig(patience=2)
    before, after = Plateau(config), Plateau(config)
    for loss in losses:
        before.check(loss)
    after.load(before.state_dict())
    assert after == before
    assert all(math.isfinite(value) for value in before.state_dict().values())
