"""The HMM: its implementations, its parameters as arrays, and a message for every bad input."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.oracle import random_blocked_hmm, random_hmm, single_block

import hmmlm
from hmmlm import HMM, InputError, padded
from hmmlm.ops.common import Carry
from hmmlm.scan.composition import map_tensors


def test_kernels_without_a_gpu_are_named() -> None:
    hmm = HMM.from_probs(START, TRANSITION, EMISSION, impl="triton")
    with pytest.raises(hmmlm.InputError, match=r"scan: impl='triton' needs .*: use impl='scaled'"):
        hmm.log_likelihood([[0, 1]])


def test_implementations_of_two_matrices_are_for_no_other_model() -> None:
    hmm = single_block(HMM.from_probs(*random_hmm(3, 4, seed=11)))
    for impl in ("compiled", "parallel", "triton"):
        hmm.impl = impl  # type: ignore[assignment]
        with pytest.raises(
            hmmlm.InputError, match=f"impl='{impl}' is for a model of two matrices, and the model is factored × blocked"
        ):
            hmm.log_likelihood([[0, 1]])


def test_the_choice_of_an_implementation_is_explained() -> None:
    dense = HMM.from_probs(*random_hmm(3, 4, seed=11), impl="naive")
    chosen, refused = dense.implementation([[0, 1]])
    assert chosen == "naive" and refused == {"components": "the model is no union"}
    blocked = single_block(dense)
    chosen, refused = blocked.implementation([[0, 1]])
    assert chosen == "tiles" and refused["scaled"] == "the model is factored × blocked"
    blocked = map_tensors(blocked, lambda values: values.clone().requires_grad_())
    chosen, refused = blocked.implementation([[0, 1]])
    assert chosen == "generic" and refused["tiles"] == "it has no gradient"
    assert refused["blocked"] == "needs tensors on a GPU, not on cpu"


def test_an_unknown_implementation_is_named() -> None:
    with pytest.raises(hmmlm.InputError, match=r"impl must be one of 'auto', 'naive', 'scaled', .*, not 'cuda'"):
        HMM.from_probs(START, TRANSITION, EMISSION, impl="cuda")  # type: ignore[arg-type]


def test_from_probs_takes_lists_arrays_and_tensors() -> None:
    start, transition, emission = random_hmm(2, 3, seed=15)
    tokens = torch.tensor([[0, 2, 1]])
    reference = HMM.from_probs(start, transition, emission).log_likelihood(tokens)
    for form in (np.asarray, lambda p: p.tolist(), lambda p: p.float()):
        hmm = HMM.from_probs(form(start), form(transition), form(emission))
        torch.testing.assert_close(hmm.log_likelihood(tokens).double(), reference, rtol=1e-5, atol=0)


START, TRANSITION, EMISSION = [0.5, 0.5], [[0.5, 0.5], [0.5, 0.5]], [[0.1, 0.2, 0.7], [0.3, 0.3, 0.4]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0.5, 0.4], TRANSITION, EMISSION), r"start sums to 0\.9.*normalize"),
        ((START, [[0.5, 0.5], [0.5, 0.6]], EMISSION), r"transition row 1 sums to 1\.1"),
        ((START, TRANSITION, [[0.1, 0.2, 0.7], [0.3, 0.3, 0.3]]), r"emission row 1 sums to 0\.9"),
        (([1.5, -0.5], TRANSITION, EMISSION), r"start contains negative"),
        (([math.nan, 1.0], TRANSITION, EMISSION), r"start contains .*NaN"),
        ((START, [[1.0], [1.0]], EMISSION), r"transition.log_probs must have shape \[2, 2\], not \[2, 1\]"),
        (
            (START, TRANSITION, [[1.0]]),
            "log_start has 2 states, the transition 2 and the emission 1: give all three the same",
        ),
        (([[0.5, 0.5]], TRANSITION, EMISSION), r"log_start must have shape \[states\]"),
        ((START, [[0.5, 0.5], [0.5]], EMISSION), r"transition must be a tensor, an array or equally long lists"),
    ],
)
def test_bad_parameters_are_named(arguments: tuple, message: str) -> None:
    with pytest.raises(hmmlm.InputError, match=message):
        HMM.from_probs(*arguments)


@pytest.mark.parametrize(
    ("tokens", "lengths", "message"),
    [
        ([[0, 1, 3]], None, r"token 3 in sequence 0 at position 2 is outside the vocabulary of size 3"),
        ([[0, -2, 1]], None, r"token -2 in sequence 0 at position 1"),
        ([[0.0, 1.0]], None, r"tokens must be integers, not float32"),
        ([0, 1, 2], None, r"shape \[sequences, positions\], not \[3\]; for one sequence use tokens\[None\]"),
        ([[]], None, r"empty"),
        ([[0, 1]], [3], r"length 3 of sequence 0 is not between 1 and 2"),
        ([[0, 1]], [0], r"length 0 of sequence 0"),
        ([[0, 1]], [1, 1], r"lengths must have shape \[1\], one per sequence, not \[2\]"),
        ([[0, 1]], [1.0], r"lengths must be integers"),
        ([[0, 1]], [1 + 0j], r"lengths must be integers, not"),
    ],
)
def test_bad_tokens_are_named(tokens: list, lengths: list | None, message: str) -> None:
    hmm = HMM.from_probs(START, TRANSITION, EMISSION)
    with pytest.raises(hmmlm.InputError, match=message):
        hmm.log_likelihood(torch.tensor(tokens), None if lengths is None else torch.tensor(lengths))


@pytest.mark.parametrize(
    ("carry", "message"),
    [
        ([[0.5, 0.5]], r"carry must be that of another window \(`filter\(…\).carry`\), not \[\[0.5, 0.5\]\]"),
        (Carry(torch.tensor([0.5, 0.5]).log()), r"carry.log_probs must have shape \[2, 2\], not \[2\]"),
        (Carry(torch.tensor([[-math.inf, 0.0], [math.nan, 0.0]])), "carry.log_probs row 1 contains NaN"),
        (Carry(torch.tensor([[0.5, 0.5], [0.5, 0.4]]).log()), r"carry.log_probs row 1 sums to 0\.9, not to one"),
        (Carry(torch.zeros(2, 1), torch.tensor([[0], [2]])), r"carry.states must .* numbers from 0 to 1"),
        (Carry(torch.ones(2, 2).long()), r"carry.log_probs must have shape \[2, 2\]"),
    ],
)
@pytest.mark.parametrize("kind", ["dense", "blocked"])
def test_a_bad_carry_is_named(kind: str, carry: Any, message: str) -> None:
    dense = HMM.from_probs(START, TRANSITION, EMISSION)
    hmm = dense if kind == "dense" else single_block(dense)
    with pytest.raises(hmmlm.InputError, match=message):
        hmm.filter([[0, 1], [2, 2]], carry=carry)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_carry_may_be_rounded_to_float32(dtype: torch.dtype) -> None:
    """Its sum is one to the precision of float32, whatever the dtype of the model."""
    hmm = HMM.from_probs(*random_hmm(50, 4, seed=3)).to(dtype)
    carry = hmm.filter([[0, 1]]).carry
    rounded = Carry(carry.log_probs.float() + 3e-5)
    exact = hmm.filter([[2]], carry=carry)
    torch.testing.assert_close(hmm.filter([[2]], carry=rounded).probs, exact.probs, rtol=1e-3, atol=1e-6)


def test_parameters_that_are_not_tensors_of_one_dtype_are_named() -> None:
    hmm = HMM.from_probs(START, TRANSITION, EMISSION)
    with pytest.raises(hmmlm.InputError, match="share one dtype"):
        HMM(hmm.log_start.double(), hmm.transition, hmm.emission)
    with pytest.raises(hmmlm.InputError, match="from_probs takes arrays"):
        HMM(np.zeros(2), hmm.transition, hmm.emission)  # type: ignore[arg-type]


TINY = [[1.0, 1e-300], [1.0, 1e-300]]


@pytest.mark.parametrize(
    ("arguments", "dtype"),
    [
        (([1, 0], TRANSITION, TINY), torch.float32),
        ((np.array([1.0, 0.0]), TRANSITION, TINY), torch.float64),
        (([1, 0], torch.tensor(TRANSITION), TINY), torch.float32),
        (([1, 0], TRANSITION, np.array(TINY)), torch.float64),
        (([1, 0], np.array(TRANSITION, dtype=np.float32), TINY), torch.float32),
    ],
)
def test_probabilities_below_float32_in_lists_and_arrays_are_not_zero(arguments: tuple, dtype: torch.dtype) -> None:
    hmm = HMM.from_probs(*arguments)
    assert hmm.dtype == dtype
    want = torch.tensor([2 * math.log(1e-300)], dtype=dtype)
    torch.testing.assert_close(hmm.log_likelihood([[1, 0, 1]]), want)


def test_lists_and_arrays_are_read_in_float64_and_tensors_in_their_own_dtype() -> None:
    third = [[1 / 3, 2 / 3], [2 / 3, 1 / 3]]
    hmm = HMM.from_probs(torch.tensor([0.5, 0.5]), third, np.array(third))
    assert torch.equal(hmm.transition.log_probs, torch.tensor(third, dtype=torch.float64).log())
    assert torch.equal(hmm.log_start, torch.tensor([0.5, 0.5]).log().double())
    narrow = HMM.from_probs(*(torch.tensor(p) for p in ([0.5, 0.5], third, third)))
    assert torch.equal(narrow.transition.log_probs, torch.tensor(third).log())


@pytest.mark.parametrize("tokens", [[[]], [], torch.zeros(0, 3, dtype=torch.int64), np.zeros((2, 0))])
def test_empty_tokens_are_named(tokens: object) -> None:
    with pytest.raises(hmmlm.InputError, match=r"tokens of shape \[.*\] are empty: at least one token is needed"):
        HMM.from_probs(START, TRANSITION, EMISSION).log_likelihood(tokens)  # type: ignore[arg-type]


def test_validate_checks_what_the_constructor_does_not() -> None:
    hmm = HMM(torch.zeros(2), torch.tensor(TRANSITION).log(), torch.tensor(EMISSION).log())
    with pytest.raises(hmmlm.InputError, match="start sums to 2"):
        hmm.validate()


@pytest.mark.parametrize("number", range(3))
def test_parameters_that_are_not_numbers_are_refused(number: int) -> None:
    values = list(HMM.random(4, 5).tensors().values())
    values[number] = values[number].clone()
    values[number].view(-1)[1] = torch.nan
    name = ("log_start", "transition.log_probs", "emission.log_probs")[number]
    with pytest.raises(InputError, match=f"{name} contains NaN: the model is broken"):
        HMM(*values)


@pytest.mark.slow  # the compiler is imported
@pytest.mark.parametrize("kind", ["dense", "blocked", "union"])
def test_compiled_functions_leave_queries_alone(kind: str) -> None:
    dense, blocked = HMM.random(4, 5), random_blocked_hmm(2, 3, 5, seed=2).to(torch.float32)
    hmm = {"dense": dense, "blocked": blocked, "union": HMM.union([dense, blocked])}[kind]
    tokens, lengths = torch.tensor([[0, 1, 2, 4], [3, -1, 1, 1]]), torch.tensor([4, 2])
    want = hmm.log_likelihood(tokens, lengths)
    torch.testing.assert_close(torch.compile(hmm.log_likelihood)(tokens, lengths), want)
    twice = torch.compile(lambda tokens: 2 * hmm.posterior(tokens, lengths))
    torch.testing.assert_close(twice(tokens), 2 * hmm.posterior(tokens, lengths))


# --- mistakes ---

MISTAKES: dict[str, tuple[Callable[[HMM], object], str]] = {
    "length": (lambda hmm: hmm.sample(2, 10**40), r"length must be at most .*, not 10{40}"),
    "num": (lambda hmm: hmm.sample(10**40, 1), "num_samples must be at most"),
    "both": (lambda hmm: hmm.sample(10**6, 10**6), r"num_samples × length must be at most 100,000,000, not 10{12}"),
    "paths": (lambda hmm: hmm.posterior_sample([[0]], num_samples=10**40), "num_samples must be at most"),
    "generator": (lambda hmm: hmm.sample(1, 1, 5), "generator must be a torch.Generator, not 5"),  # type: ignore[arg-type]
    "states": (lambda hmm: HMM.random(10**40, 2), "num_states must be at most"),
    "words": (lambda hmm: HMM.random(10**5, 10**6), "vocab_size\\) must be at most"),
    "seed": (lambda hmm: HMM.random(2, 2, seed="x"), "seed must be an integer, not 'x'"),  # type: ignore[arg-type]
    "large seed": (lambda hmm: HMM.random(2, 2, seed=2**64), "seed must be at most"),
    "hmmlearn": (lambda hmm: HMM.from_hmmlearn(5), "needs a fitted CategoricalHMM: int has no startprob_"),
    "no samples": (lambda hmm: hmm.sample(0, 2), "num_samples must be at least 1, not 0"),
    "half a sample": (lambda hmm: hmm.sample(1.5, 2), r"num_samples must be an integer, not 1\.5"),  # type: ignore[arg-type]
    "no paths": (lambda hmm: hmm.posterior_sample([[0]], num_samples=0), "num_samples must be at least 1, not 0"),
    "half a path": (lambda hmm: hmm.posterior_sample([[0]], num_samples=1.5), r"not 1\.5"),  # type: ignore[arg-type]
    "no length": (lambda hmm: hmm.sample(1, 0), "length must be at least 1, not 0"),
    "blanks": (lambda hmm: hmm.infill_blanks([[-1], [0]], 0), "takes one sequence, not 2"),
    "advance": (lambda hmm: hmm.advance(hmm.begin(), 5), "token 5 "),
    "padded": (lambda hmm: padded([1, 2]), "sequence 0 is 1, not a list of integers"),  # type: ignore[list-item]
    "padded number": (lambda hmm: padded(5), "must be a list of lists of integers, not 5"),  # type: ignore[arg-type]
    "padded floats": (lambda hmm: padded([[1.5], [1, 2]]), "tokens must be integers, not"),
    "padded nested": (lambda hmm: padded([[1], [[2]]]), "tokens must be integers, not"),
    "ragged objects": (lambda hmm: hmm.posterior([[0], [1, None]]), "tokens must be integers, not"),
    "objects": (lambda hmm: hmm.filter(np.array([[0, None]], dtype=object)), "tokens must be a tensor, an array or"),
    "sparse": (lambda hmm: hmm.filter(torch.tensor([[0, 1]]).to_sparse()), "tokens must be a dense tensor"),
    "state": (
        lambda hmm: hmm.advance([0.5, 0.5], 0),
        r"log_state must be a tensor .*, not \[0.5, 0.5\]",
    ),  # type: ignore[arg-type]
    "width": (lambda hmm: hmm.advance(torch.zeros(1), 0), r"log_state must have shape \[..., 2\], not \[1\]"),
    "rows": (lambda hmm: hmm.advance(torch.zeros(2), torch.tensor([0, 1])), "is not a row for each of 2 tokens"),
    "emit": (lambda hmm: hmm.emit(torch.zeros(2), torch.tensor([7])), "tokens must be between 0 and 1"),
    "emit list": (lambda hmm: hmm.emit(torch.zeros(2), [0]), r"tokens must be a tensor of integers \[n\]"),  # type: ignore[arg-type]
    "excluded": (lambda hmm: hmm.infill_blanks([[-1]], 5), "excluded must be at most 1, not 5"),
    "data": (
        lambda hmm: hmmlm.train(data=5),
        "data must be a string, a path or a list, each item a string, not 5",
    ),  # type: ignore[arg-type]
    "out": (lambda hmm: hmmlm.train(out=5), "out must be a string, a path or None, not 5"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_answered_with_a_sentence(name: str) -> None:
    call, message = MISTAKES[name]
    with pytest.raises(InputError, match=message):
        call(HMM.random(2, 2))
