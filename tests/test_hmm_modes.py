"""Queries answer alike under inference_mode, no_grad, autocast, another default dtype and torch.compile."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from helpers.oracle import random_blocked_hmm, random_hmm
from torch import Tensor

from hmmlm import InputError
from hmmlm.hmm import HMM

TOKENS = torch.randint(5, (3, 9), generator=torch.Generator().manual_seed(0))
LENGTHS = torch.tensor([9, 4, 1])
QUERIES: dict[str, Callable[[Any], Any]] = {
    "filter": lambda hmm: hmm.filter(TOKENS, LENGTHS).probs,
    "token_log_probs": lambda hmm: hmm.token_log_probs(TOKENS, LENGTHS),
    "posterior": lambda hmm: hmm.posterior(TOKENS, LENGTHS),
    "viterbi": lambda hmm: hmm.viterbi(TOKENS, LENGTHS)[1],
    "entropy": lambda hmm: hmm.entropy(TOKENS, LENGTHS),
    "infill": lambda hmm: hmm.infill(TOKENS, LENGTHS),
    "infill_blanks": lambda hmm: hmm.infill_blanks([[1, -1, 2]], 0),
    "next_token": lambda hmm: hmm.next_token(TOKENS, LENGTHS),
    "expected_counts": lambda hmm: hmm.expected_counts(TOKENS, LENGTHS).transition,
    "advance": lambda hmm: hmm.advance(hmm.begin(), 1),
}


@contextmanager
def default_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "default float64": default_float64,
}


def make(kind: str) -> HMM:
    dense = HMM.from_probs(*random_hmm(4, 5, seed=1)).to(torch.float32)
    blocked = random_blocked_hmm(2, 3, 5, seed=2).to(torch.float32)
    return {"dense": dense, "blocked": blocked, "union": HMM.union([dense, blocked])}[kind]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["dense", "blocked", "union"])
def test_answers_do_not_depend_on_the_mode(kind: str, mode: str) -> None:
    hmm = make(kind)
    for name, query in QUERIES.items():
        want: Tensor = query(hmm)
        with MODES[mode]():
            inside, made = query(hmm), make(kind)
            got = query(made)
        for found in (inside, got, query(made)):  # also of a model that was made there, used outside
            torch.testing.assert_close(found.to_dense(), want.to_dense(), msg=f"{name}: {found} should be {want}")


@pytest.mark.parametrize("kind", ["dense", "blocked", "union"])
def test_the_likelihood_and_its_gradient_do_not_depend_on_inference_mode(kind: str) -> None:
    hmm = make(kind)
    want = hmm.log_likelihood(TOKENS, LENGTHS)
    with torch.inference_mode():
        torch.testing.assert_close(hmm.log_likelihood(TOKENS, LENGTHS), want)
        torch.testing.assert_close(hmm.scan(TOKENS, LENGTHS).log_likelihood, want)
        made = make(kind)
    torch.testing.assert_close(made.log_likelihood(TOKENS, LENGTHS), want)


@pytest.mark.slow  # the compiler is imported
@pytest.mark.parametrize("kind", ["dense", "blocked", "union"])
def test_compiled_functions_leave_queries_alone(kind: str) -> None:
    hmm = make(kind)
    want = hmm.log_likelihood(TOKENS, LENGTHS)
    torch.testing.assert_close(torch.compile(hmm.log_likelihood)(TOKENS, LENGTHS), want)
    twice = torch.compile(lambda tokens: 2 * hmm.posterior(tokens, LENGTHS))
    torch.testing.assert_close(twice(TOKENS), 2 * hmm.posterior(TOKENS, LENGTHS))


@pytest.mark.parametrize("number", range(3))
def test_parameters_that_are_not_numbers_are_refused(number: int) -> None:
    values = list(make("dense").tensors().values())
    values[number] = values[number].clone()
    values[number].view(-1)[1] = torch.nan
    name = ("log_start", "transition.log_probs", "emission.log_probs")[number]
    with pytest.raises(InputError, match=f"{name} contains NaN: the model is broken"):
        HMM(*values)


@pytest.mark.parametrize("lengths", [torch.tensor([9, 4, 1], dtype=torch.complex64), [9, 4, 1.5]])
def test_lengths_that_are_not_integers_are_refused(lengths: Any) -> None:
    with pytest.raises(InputError, match="lengths must be integers, not"):
        make("dense").log_likelihood(TOKENS, lengths)
