"""The filter over one long sequence beside that of the dense model, and beside the steps in log space."""

from collections.abc import Iterator

import pytest
import torch
from helpers.oracle import random_blocked_hmm

from hmmlm.ops import pieces
from hmmlm.scan import blocked_stream
from hmmlm.scan.recursions import run_filter, sort_batch
from hmmlm.scan.steps import add_step

WORDS, STEPS, K = 9, 50, 4
TEXT = torch.randint(WORDS, (1, STEPS), generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=["table", "tiles"], autouse=True)
def computed(request: pytest.FixtureRequest) -> Iterator[None]:
    """Keep the transition matrix, or compute tiles of it; read the text in pieces of ten words, or of seven."""
    with pieces.limit({"table": 10, "tiles": 7}[request.param] * K**2):
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("zeros", [0.0, 0.5])
@pytest.mark.parametrize("sharpness", [1.0, 300.0])
def test_a_stream_is_filtered_as_by_the_dense_model(dtype: torch.dtype, zeros: float, sharpness: float) -> None:
    hmm = random_blocked_hmm(3, K, WORDS, seed=0, sharpness=sharpness, zeros=zeros).to(dtype)
    want = hmm.to(torch.float64).dense()
    got = hmm.token_log_probs(TEXT)
    torch.testing.assert_close(got.double(), want.token_log_probs(TEXT), rtol=1e-4, atol=1e-4)
    probs = want.filter(TEXT).probs
    torch.testing.assert_close(hmm.filter(TEXT).probs.double(), probs, rtol=1e-3, atol=1e-5)


def test_only_what_underflow_may_have_changed_is_computed_in_log_space(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = list[int]()

    def counting(*arguments: object) -> None:
        counted.append(1)
        add_step(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(blocked_stream, "add_step", counting)
    for sharpness, least, most in ((1.0, 1, 1), (300.0, 2, STEPS)):
        counted.clear()
        hmm = random_blocked_hmm(3, K, WORDS, seed=0, sharpness=sharpness).to(torch.float32)
        lattice = run_filter(hmm, sort_batch(hmm, TEXT, None))
        assert len(lattice.filtered) == len(lattice.supports) == len(lattice.scores) == STEPS
        assert least <= len(counted) <= most


def test_nothing_is_possible_after_an_impossible_word() -> None:
    hmm = random_blocked_hmm(3, K, WORDS, seed=1)
    hmm.emission.log_probs[2] = -torch.inf
    place = TEXT[0].tolist().index(2)
    found = hmm.token_log_probs(TEXT)[0]
    assert bool(found[:place].isfinite().all()) and bool((found[place:] == -torch.inf).all())


def test_a_window_continues_from_what_came_before() -> None:
    hmm = random_blocked_hmm(3, K, WORDS, seed=1)
    first, rest = TEXT[:, :20], TEXT[:, 20:]
    together = hmm.token_log_probs(TEXT)
    after = hmm.token_log_probs(rest, carry=hmm.filter(first).carry)
    torch.testing.assert_close(after, together[:, 20:])
