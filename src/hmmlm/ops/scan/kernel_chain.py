"""A batch prepared for the GPU kernels of the scan: time-major, with the emission scores of its tokens."""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from hmmlm.ops.common import NEG_INF
from hmmlm.ops.graph import side_by_side
from hmmlm.ops.scan.kernels import gather_kernel
from hmmlm.ops.scan.problem import Evidence, Parameters
from hmmlm.ops.scan.scaled import carried_probs
from hmmlm.ops.scan.softmax_kernels import mark_words_kernel, normalizer_kernel, softmax_kernel
from hmmlm.ops.underflow import FLOOR

# Number of states from which products use the library. The fused kernel reads its operands Z/64 and B/128 times from
# the cache: 100 MB for a step of 200 sequences with 2,048 states, which takes longer than two additional launches.
LIBRARY_STATES = 2048
_GATHER = {"BLOCK_Z": 64, "BLOCK_N": 32, "num_warps": 4}
_ROW = 4096  # values of a row that are read at once
_MARK = 128


class Normalizers(NamedTuple):
    """What is kept of logits; log-probabilities of emissions are not."""

    edges: Tensor  # [V+1] the places of a word among the sorted tokens are edges[word] up to edges[word + 1]
    log_normalizer: Tensor  # [Z]
    spread: Tensor  # [Z] Σ p² over the words that are not in the batch
    transition: Tensor  # [Z, Z] logits
    log_transition_normalizer: Tensor  # [Z]
    both: Tensor | None  # [2, Z, Z] the transition probabilities and their transpose, if `step_kernel` reads them


class SortedTokens(NamedTuple):
    """The tokens of a batch in the order of words."""

    words: Tensor  # [T·B]
    order: Tensor  # [T·B] position t·B + b of each


class KernelChain(NamedTuple):
    """A batch prepared for the recursions: time-major, in the given order."""

    start: Tensor  # [Z] probabilities
    transition: Tensor  # [Z, Z] probabilities, in the dtype of products
    scores: Tensor  # [T, B, Z] log p(x_t | z), 0 where x_t is missing; [V+1, Z] if there are `places`
    log_peak: Tensor  # [T, B] or [V+1] maximum of scores over states
    places: Tensor | None  # [T·B] row of each position in the scores of all words
    tokens: SortedTokens | None  # always set unless there are `places`
    initial: Tensor | None  # [B, Z]
    restart: Tensor | None  # [T, B] uint8; always set if `initial` is
    evidence: Evidence
    normalizers: Normalizers | None = None
    order: None = None  # sequences keep their order

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return the number of steps T, of sequences B and of states Z."""
        batch, steps = self.evidence.tokens.shape
        return steps, batch, len(self.start)

    @property
    def flags(self) -> Tensor:
        """Return the restart flags, or a placeholder that kernels with RESTARTS=False do not read."""
        return self.start if self.restart is None else self.restart

    @property
    def rows(self) -> Tensor:
        """Return `places`, or a placeholder that kernels with INDEXED=False do not read."""
        return self.start if self.places is None else self.places


class KernelForward(NamedTuple):
    """Result of both recursions, or of the filter alone if nothing is kept."""

    predicted: Tensor  # [T, B, Z] p(z_t | x_1..t−1); [1, B, Z] if nothing is kept
    joint: Tensor  # [2, T+1, B, Z]: α_t at [0, t+1]; values proportional to p(x_t.. | z_t) at [1, t]
    agreement: Tensor  # [T, B] Σ_z predicted_t(z) joint[1, t](z)
    scale: Tensor  # [T, B] p(x_t | x_1..t−1) / peak of x_t
    log_likelihood: Tensor  # [B]
    carry: Tensor  # [B, Z] log p(z | x) of the last token, in float64
    meeting: Tensor  # [B] least agreement, relative to the mass before joint[1] was divided
    suspect: Tensor  # [B] as `scaled.guess_suspect`, or because `meeting` is too small
    floor: float = FLOOR[torch.float32]  # values below this share of a step's mass may have been lost


def make_chain(
    parameters: Parameters, evidence: Evidence, products: torch.dtype, normalized: bool = True
) -> KernelChain:
    """Convert the batch to time-major order, sort its tokens and gather their emission scores.

    Args:
        normalized: False if `parameters` are logits, whose rows become probabilities by a softmax.
    """
    log_start, log_transition, log_emission = (p.contiguous() for p in parameters)
    (batch, steps), (states, n_words) = evidence.tokens.shape, log_emission.shape
    narrow = torch.int16 if n_words + 1 < 2**15 else torch.int32  # half the radix sort passes
    tokens = evidence.tokens.t().to(narrow, memory_format=torch.contiguous_format).flatten()
    scores, log_peak = log_start.new_empty(steps, batch, states), log_start.new_empty(steps, batch)

    normalizers = None
    if normalized:
        words, order = tokens.sort(stable=True)
        start, transition = log_start.exp(), transition_probs(log_transition, products)
    else:
        (words, order, edges), (log_normalizer, spread), (start, transition, log_sums, both) = side_by_side(
            log_start.device,
            lambda: _sort(tokens, n_words),
            lambda: _normalize(log_emission, tokens),
            lambda: _softmax(log_start, log_transition, products),
        )
        normalizers = Normalizers(edges, log_normalizer, spread, log_transition, log_sums, both)
    gather_kernel[(triton.cdiv(len(words), _GATHER["BLOCK_N"]),)](
        log_emission,
        log_start if normalizers is None else normalizers.log_normalizer,
        words,
        order,
        scores,
        log_peak,
        len(words),
        n_words,
        NORMALIZED=normalized,
        STATES=states,
        **_GATHER,
    )
    initial, restart = _beginnings(evidence, start)
    by_word = SortedTokens(words, order)
    return KernelChain(start, transition, scores, log_peak, None, by_word, initial, restart, evidence, normalizers)


def index_chain(start: Tensor, transition: Tensor, scores: Tensor, log_peak: Tensor, evidence: Evidence) -> KernelChain:
    """Convert the batch to time-major order; its kernels read the scores of all words, of `scores_by_word`."""
    places = evidence.tokens.t().flatten().add(1).to(torch.int32)
    return KernelChain(start, transition, scores, log_peak, places, None, *_beginnings(evidence, start), evidence)


def scores_by_word(log_emission: Tensor) -> tuple[Tensor, Tensor]:
    """Return `scores` and `log_peak` of all words: [V+1, Z], with zeros for a missing token, −1, in row 0; [V+1]."""
    states, n_words = log_emission.shape
    scores = log_emission.new_zeros(n_words + 1, states)
    scores[1:] = log_emission.t()
    log_peak = scores.amax(1)
    return scores, log_peak.masked_fill_(log_peak == NEG_INF, 0.0)


def _beginnings(evidence: Evidence, start: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return `initial` and `restart` of a chain."""
    initial = None if evidence.carry is None else carried_probs(evidence.carry, start.dtype)
    restart = None if evidence.restart is None else evidence.restart.t().contiguous().view(torch.uint8)
    if restart is None and initial is not None:  # as in a graph: all of its kernels must be compiled before
        restart = torch.zeros(evidence.tokens.shape[::-1], dtype=torch.uint8, device=start.device)
    return initial, restart


def _sort(tokens: Tensor, n_words: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens [N] in the order of words, the place of each before, and the edges of the words."""
    words, order = tokens.sort(stable=True)
    return words, order, find_edges(words, n_words)


def _softmax(start: Tensor, transition: Tensor, products: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return probabilities of start and transition, the latter's normalizers, and `both` of `Normalizers`."""
    states = len(start)
    probs = torch.empty(transition.shape, dtype=products, device=transition.device)
    log_normalizer = torch.empty_like(start)
    softmax_kernel[(states,)](transition, probs, log_normalizer, states, **row_blocks(states))
    both = torch.stack((probs, probs.t())) if states < LIBRARY_STATES else None
    return start.softmax(0), probs, log_normalizer, both


def _normalize(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Compute log_normalizer and spread of `Normalizers` from logits [Z, V] and a batch of tokens [N]."""
    states, n_words = logits.shape
    log_normalizer, spread = logits.new_empty(states), logits.new_empty(states)
    absent = torch.ones(n_words, dtype=torch.uint8, device=logits.device)
    mark_words_kernel[(triton.cdiv(len(tokens), _MARK),)](tokens, absent, len(tokens), BLOCK=_MARK)
    normalizer_kernel[(states,)](logits, absent, log_normalizer, spread, n_words, **row_blocks(n_words))
    return log_normalizer, spread


def row_blocks(columns: int) -> dict[str, int]:
    """Return the options of a kernel with a program per row."""
    block = min(_ROW, triton.next_power_of_2(columns))
    return {"BLOCK": block, "num_warps": 8 if block >= 2048 else 4}


def transition_probs(log_transition: Tensor, products: torch.dtype) -> Tensor:
    """Return the transition probabilities [Z, Z] in the dtype of products."""
    probs = torch.empty(log_transition.shape, dtype=products, device=log_transition.device)
    return torch.exp(log_transition, out=probs)  # rounded in the same pass


def find_edges(words: Tensor, n_words: int) -> Tensor:
    """Return [V+1] int32: the places of word v in the sorted `words` are edges[v] up to edges[v + 1]."""
    every = torch.arange(n_words + 1, dtype=words.dtype, device=words.device)
    return torch.searchsorted(words, every, out_int32=True)
