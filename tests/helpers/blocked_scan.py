"""Problems for the blocked scan, and their solution by any implementation on any device."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from helpers import naive_blocked
from helpers.dense_scan import sticky
from hmmlm.models.base import from_factors, scan_factors
from hmmlm.ops.blocked_scan import Factors
from hmmlm.ops.common import Scan
from hmmlm.scan.generic_scan import generic_scan

KERNEL_CASES: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((3, 4, 5, 9, 3, 4), {}),
    ((2, 5, 3, 6, 3, 3), {"entered": True, "ragged": True, "restarts": True}),
    ((2, 3, 17, 6, 2, 3), {"entered": True, "restarts": True}),
    ((1, 1, 1, 2, 2, 3), {"entered": True}),
    ((2, 2, 2, 4, 2, 3), {"ragged": True, "restarts": True}),
    ((1, 3, 4, 6, 3, 4), {"entered": True}),
    ((3, 4, 5, 9, 3, 4), {"next_words": 1}),
    ((2, 5, 3, 6, 3, 5), {"entered": True, "ragged": True, "restarts": True, "next_words": 3}),
    ((1, 3, 4, 6, 3, 4), {"entered": True, "next_words": 2}),
]
"""Sizes (blocks, states per block, hidden, words, batch, steps) and options of problems for the Triton kernels."""
IN_PIECES = [(2, 129, 4, 5, 4, 5), (2, 3, 4, 5, 40, 3)]
"""Sizes of problems whose tiles are read in chunks of rows, and of whose segments several programs sum."""


class Case(NamedTuple):
    tokens: Tensor
    factors: Factors
    entry: Tensor | None = None
    lengths: Tensor | None = None
    restart: Tensor | None = None
    next_words: Tensor | None = None

    def inputs(self) -> dict[str, Tensor]:
        """Return what the result is differentiable in."""
        found = {name: value for name, value in self.factors._asdict().items() if name != "block_of_word"}
        return found if self.entry is None else {**found, "entry": self.entry}

    def with_inputs(self, inputs: dict[str, Tensor]) -> "Case":
        own = {name: value for name, value in inputs.items() if name != "entry"}
        return self._replace(factors=self.factors._replace(**own), entry=inputs.get("entry"))

    def to(self, device: torch.device | str, dtype: torch.dtype) -> "Case":
        """Return a copy whose inputs are leaves."""
        moved = {name: x.detach().to(device, dtype, copy=True).requires_grad_() for name, x in self.inputs().items()}
        case = self.with_inputs(moved)
        factors = case.factors._replace(block_of_word=case.factors.block_of_word.to(device))
        rest = (None if x is None else x.to(device) for x in (self.lengths, self.restart, self.next_words))
        return Case(self.tokens.to(device), factors, case.entry, *rest)


def make_case(
    blocks: int,
    states_per_block: int,
    hidden: int,
    words: int,
    batch: int,
    steps: int,
    *,
    entered: bool = False,
    ragged: bool = False,
    restarts: bool = False,
    next_words: int = 0,
    seed: int = 0,
) -> Case:
    """Return a case in float64; `entered`: sequences continue those of another window."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def integers(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator)

    states = blocks * states_per_block
    u, w = normal(states, hidden), normal(states, hidden)
    log_normalizer, log_start = (u @ w.T).logsumexp(1), normal(states).log_softmax(0)
    log_emission = normal(words, states_per_block) - 2
    entry = normal(batch, 1 + next_words, states_per_block) - 1 if entered else None
    lengths = integers(steps, batch) + 1 if ragged else None
    restart = integers(3, batch, steps) == 0 if restarts else None
    block_of_word = torch.cat([torch.arange(blocks), integers(blocks, words - blocks)])
    factors = Factors(block_of_word, u, w, log_normalizer, log_start, log_emission)
    tokens = integers(words, batch, steps)
    other = integers(words, batch, steps, next_words) if next_words else None
    return Case(tokens, factors, entry, lengths, restart, other)


def two_regimes(log_leak: float, log_wrong: float) -> Factors:
    """Return two states in one block that hardly ever change, each hardly ever emitting the other's word."""
    parameters = sticky(log_leak, log_wrong)
    return Factors(
        block_of_word=torch.zeros(2, dtype=torch.long),
        u=parameters.log_transition,
        w=torch.eye(2, dtype=torch.float64),
        log_normalizer=torch.zeros(2, dtype=torch.float64),
        log_start=parameters.log_start,
        log_emission=parameters.log_emission.t().contiguous(),
    )


def scan(case: Case, impl: str, **options: Any) -> Scan:
    """Compute the likelihood by the specification ("naive"), by any steps ("generic") or by the kernels ("triton")."""
    if impl == "naive":
        return naive_blocked.blocked_scan(
            case.factors, case.tokens, case.entry, case.lengths, case.restart, case.next_words
        )
    if impl == "triton":
        return scan_factors(
            case.factors, case.tokens, case.lengths, case.entry, case.restart, case.next_words, **options
        )
    hmm, given = from_factors(case.factors), {"entry": case.entry, "next_words": case.next_words}
    return generic_scan(hmm, case.tokens, case.lengths, None, case.restart, **given, exact_carry=True)


class Solution(NamedTuple):
    scan: Scan
    gradients: dict[str, Tensor]  # of a weighted sum of log-likelihoods; zero for inputs that do not matter

    def values(self) -> dict[str, Tensor]:
        """Return everything by name, in float64, on the CPU."""
        found = {"log_likelihood": self.scan.log_likelihood, "carry": self.scan.carry.log_probs.exp(), **self.gradients}
        if self.scan.next_word_score is not None:
            found["next_word_score"] = self.scan.next_word_score
        return {name: value.detach().double().cpu() for name, value in found.items()}


def weights(batch: int) -> Tensor:
    """Return the weight of each log-likelihood in the sum that `solve` differentiates."""
    return torch.linspace(-1, 2, batch, dtype=torch.float64)


def solve(case: Case, impl: str, device: torch.device | str = "cpu", **options: Any) -> Solution:
    """Run the scan and its backward pass; the Triton kernels compute in float32, the others in the dtype of the case.

    The −inf of an impossible sequence is a part of the sum: its gradient must be zero.
    """
    moved = case.to(device, torch.float32 if impl == "triton" else case.factors.u.dtype)
    result = scan(moved, impl, **options)
    assert result.suspect is None or not result.suspect.any()  # only inside a CUDA graph
    assert not result.carry.log_probs.requires_grad
    log_likelihood = result.log_likelihood
    weight = weights(len(log_likelihood)).to(log_likelihood)
    total = torch.where(log_likelihood > -torch.inf, weight * log_likelihood, log_likelihood).sum()
    if result.next_word_score is not None:
        total = total + (weight.flip(0) * result.next_word_score).sum()
    inputs = moved.inputs()
    gradients = [torch.zeros_like(x) for x in inputs.values()]
    if total.requires_grad:  # not if every sequence is empty
        gradients = list(torch.autograd.grad(total, list(inputs.values()), allow_unused=True, materialize_grads=True))
    return Solution(result, dict(zip(inputs, gradients, strict=True)))


def assert_agrees(case: Case, impl: str, device: torch.device | str = "cpu", tolerance: float | None = None) -> None:
    """Compare an implementation with the specification: likelihoods, carries and gradients."""
    tolerance = tolerance or (3e-5 if impl == "triton" else 1e-10)
    got, want = solve(case, impl, device).values(), solve(case, "naive").values()
    for name, expected in want.items():
        torch.testing.assert_close(
            got[name], expected, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )
