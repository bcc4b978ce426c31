"""A hidden Markov model given by its distributional parameters, and exact answers from it."""

from typing import Any

import torch
from torch import Tensor

from hmmlm.errors import InputError
from hmmlm.hmm.checks import ArrayLike, as_log_probs, check_distributions, check_initial, check_lengths, check_tokens
from hmmlm.hmm.mixing import mix
from hmmlm.hmm.sampling import sample_chain, sample_paths
from hmmlm.ops import scan as ops
from hmmlm.ops.results import Counts, Filtered, Scan
from hmmlm.ops.scan import Evidence, Impl, Parameters
from hmmlm.ops.scan.naive import logsumexp
from hmmlm.ops.viterbi import viterbi


class HMM:
    """Start [Z], transition [Z, Z] (row = from-state) and emission [Z, V], as log-probabilities.

    They are taken as they are: whether each distribution sums to one is not checked here, but by `validate()`
    (which `from_probs` calls).
    Tokens are integers [B, T]; −1 is a missing token, summed over everywhere; `lengths` [B] gives ragged batches.
    Results are detached, except `log_likelihood` (and `filter(...).log_likelihood`) when a parameter requires a
    gradient. `impl` chooses the implementation of the recursions: "auto", "torch" (scaled), "triton" (scaled, `scan` as
    GPU kernels) or "naive" (log space).
    """

    def __init__(self, log_start: Tensor, log_transition: Tensor, log_emission: Tensor, impl: Impl = "auto") -> None:
        named = {"log_start": log_start, "log_transition": log_transition, "log_emission": log_emission}
        for name, value in named.items():
            if not isinstance(value, Tensor) or value.dtype not in (torch.float32, torch.float64):
                what = str(value.dtype).removeprefix("torch.") if isinstance(value, Tensor) else type(value).__name__
                raise InputError(f"{name} must be a float32 or float64 tensor, not {what}; HMM.from_probs takes arrays")
        if log_start.dim() != 1 or log_start.shape[0] == 0:
            raise InputError(f"log_start must have shape [states], not {list(log_start.shape)}")
        states = log_start.shape[0]
        if log_transition.shape != (states, states):
            raise InputError(f"log_transition must have shape [{states}, {states}], not {list(log_transition.shape)}")
        if log_emission.dim() != 2 or log_emission.shape[0] != states or log_emission.shape[1] == 0:
            raise InputError(f"log_emission must have shape [{states}, words], not {list(log_emission.shape)}")
        if len({(value.dtype, value.device) for value in named.values()}) > 1:
            raise InputError("log_start, log_transition and log_emission must share one dtype and device")
        self.log_start, self.log_transition, self.log_emission = log_start, log_transition, log_emission
        self.impl: Impl = impl

    @classmethod
    def from_probs(cls, start: ArrayLike, transition: ArrayLike, emission: ArrayLike, impl: Impl = "auto") -> "HMM":
        """From probabilities, as arrays, lists or tensors; each distribution must sum to one.

        Lists make a model in float32; parameters of different dtypes make one in float64."""
        given = {"start": start, "transition": transition, "emission": emission}
        logs, dtypes = zip(*(as_log_probs(values, name) for name, values in given.items()), strict=True)
        dtype = dtypes[0] if len(set(dtypes)) == 1 else torch.float64
        hmm = cls(*Parameters(*(log.to(dtype) for log in logs)), impl)
        hmm.validate()
        return hmm

    def validate(self) -> None:
        """Raise an error that names the first distribution that does not sum to one."""
        check_distributions(self.log_start, "start")
        check_distributions(self.log_transition, "transition")
        check_distributions(self.log_emission, "emission")

    @property
    def states(self) -> int:
        return self.log_start.shape[0]

    @property
    def vocab_size(self) -> int:
        return self.log_emission.shape[1]

    @property
    def device(self) -> torch.device:
        return self.log_start.device

    @property
    def dtype(self) -> torch.dtype:
        return self.log_start.dtype

    @property
    def parameters(self) -> Parameters:
        return Parameters(self.log_start, self.log_transition, self.log_emission)

    def to(self, *args: Any, **kwargs: Any) -> "HMM":
        """On another device or in another dtype, as `Tensor.to`."""
        start, transition, emission = (p.to(*args, **kwargs) for p in self.parameters)
        return HMM(start, transition, emission, self.impl)

    def detach(self) -> "HMM":
        return HMM(*self._fixed(), self.impl)

    def __repr__(self) -> str:
        return f"HMM(states={self.states}, vocab_size={self.vocab_size}, dtype={self.dtype}, device={self.device})"

    def _evidence(
        self, tokens: ArrayLike, lengths: ArrayLike | None, initial: ArrayLike | None = None
    ) -> Evidence:
        tokens = check_tokens(tokens, self.vocab_size, self.device)
        lengths = check_lengths(lengths, tokens)
        initial = check_initial(initial, tokens, self.log_start)
        if lengths is not None:  # what lies beyond a sequence's end must not matter
            outside = torch.arange(tokens.shape[1], device=tokens.device) >= lengths[:, None]
            tokens = tokens.masked_fill(outside, -1)
        return Evidence(tokens, lengths, initial)

    def _fixed(self) -> Parameters:
        return Parameters(*(p.detach() for p in self.parameters))

    def scan(
        self, tokens: Tensor, lengths: Tensor | None = None, initial: Tensor | None = None,
        restart: Tensor | None = None,
    ) -> Scan:
        """What training calls: log p(x) [B], differentiable, and the final filtered distribution; nothing is checked.

        `restart` [B, T] bool: at that position the chain starts afresh from the start distribution.
        """
        return ops.scan(*self.parameters, tokens, lengths, initial, restart, impl=self.impl)

    def log_likelihood(self, tokens: ArrayLike, lengths: ArrayLike | None = None) -> Tensor:
        """log p(x) [B], natural log; −inf for a sequence that cannot happen. Differentiable in the parameters."""
        return self.scan(*self._evidence(tokens, lengths)).log_likelihood

    def filter(
        self, tokens: ArrayLike, lengths: ArrayLike | None = None, initial: ArrayLike | None = None
    ) -> Filtered:
        """p(z_t | x_1..t). `initial` [B, Z] is the filtered distribution at the token before this window."""
        evidence = self._evidence(tokens, lengths, initial)
        log_likelihood, log_filtered = ops.filter_states(self._fixed(), evidence, self.impl)
        probs = log_filtered.exp()
        last = evidence.last()[:, None, None]
        final = torch.take_along_dim(probs, last, 1).squeeze(1)
        if torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters):
            log_likelihood = self.scan(*evidence).log_likelihood
        return Filtered(log_likelihood, final, probs)

    def _require_possible(self, evidence: Evidence, log_likelihood: Tensor) -> None:
        """Raise an error that names the first sequence that cannot happen, and its first impossible position."""
        impossible = (log_likelihood == float("-inf")).nonzero()
        if impossible.numel():
            row = int(impossible[0])
            alone = evidence.rows(torch.tensor([row], device=self.device))
            _, log_filtered = ops.filter_states(self._fixed(), alone, self.impl)
            position = int((log_filtered[0].amax(1) == float("-inf")).nonzero()[0])
            raise InputError(
                f"sequence {row} is impossible under this model: token {int(alone.tokens[0, position])} at position "
                f"{position} has probability zero given the tokens before it"
            )

    def posterior(self, tokens: ArrayLike, lengths: ArrayLike | None = None) -> Tensor:
        """p(z_t | x_1..T) [B, T, Z]; zero beyond a sequence's length."""
        evidence = self._evidence(tokens, lengths)
        marginal = ops.posterior(self._fixed(), evidence, self.impl)
        self._require_possible(evidence, marginal[:, 0].sum(1).log())
        return marginal

    def viterbi(self, tokens: ArrayLike, lengths: ArrayLike | None = None) -> tuple[Tensor, Tensor]:
        """The most likely states [B, T] (−1 beyond a length) and their joint log-probability with the tokens [B]."""
        evidence = self._evidence(tokens, lengths)
        path, log_prob = viterbi(self._fixed(), evidence, self.impl)
        self._require_possible(evidence, log_prob)
        return path, log_prob

    @torch.no_grad()
    def sample(self, num: int, length: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Draw tokens [num, length] and their states [num, length] from the model."""
        if num < 1 or length < 1:
            raise InputError(f"sample needs num and length of at least 1, not {num} and {length}")
        return sample_chain(self._fixed(), num, length, generator)

    @torch.no_grad()
    def posterior_sample(
        self, tokens: ArrayLike, lengths: ArrayLike | None = None, num: int = 1,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """`num` exact draws of the whole path given the tokens: states [num, B, T], −1 beyond a length."""
        if num < 1:
            raise InputError(f"posterior_sample needs num of at least 1, not {num}")
        evidence = self._evidence(tokens, lengths)
        log_likelihood, log_filtered = ops.filter_states(self._fixed(), evidence, self.impl)
        self._require_possible(evidence, log_likelihood)
        return sample_paths(self.log_transition.detach(), log_filtered, evidence, num, generator)

    def next_token(self, tokens: ArrayLike, lengths: ArrayLike | None = None) -> Tensor:
        """log p(next token | tokens) [B, V]."""
        evidence = self._evidence(tokens, lengths)
        fixed = self._fixed()
        with torch.no_grad():
            result = self.scan(*evidence)
            self._require_possible(evidence, result.log_likelihood)
            return self.emit((result.final @ fixed.log_transition.exp()).log())

    # --- one step at a time: distributions over the state of the next token, as logarithms [Z] ---

    def begin(self) -> Tensor:
        """log p(z_1)."""
        return self.log_start.detach()

    @torch.no_grad()
    def advance(self, log_state: Tensor, token: int) -> Tensor:
        """log p(z_t+1 | x_1..t) from log p(z_t | x_1..t−1) and x_t = token."""
        joint = (log_state + self.log_emission[:, token]).log_softmax(0)
        return logsumexp(joint[:, None] + self.log_transition, 0)

    @torch.no_grad()
    def emit(self, log_states: Tensor) -> Tensor:
        """log Σ_z p(z) p(word | z) [..., V] for log-distributions over states [..., Z], safe for any scale."""
        return mix(log_states, self.log_emission.detach())

    def expected_counts(self, tokens: ArrayLike, lengths: ArrayLike | None = None) -> Counts:
        """Expected counts of starts [Z], transitions [Z, Z] and emissions [Z, V] under the posterior, summed over B."""
        evidence = self._evidence(tokens, lengths)
        return ops.expected_counts(self._fixed(), evidence, self.impl)

    def entropy(self, tokens: ArrayLike, lengths: ArrayLike | None = None) -> Tensor:
        """Entropy of the posterior over paths [B], in nats."""
        evidence = self._evidence(tokens, lengths)
        self._require_possible(evidence, self.detach().scan(*evidence).log_likelihood)
        return ops.entropy(self._fixed(), evidence, self.impl)

    @torch.no_grad()
    def infill(self, tokens: ArrayLike, lengths: ArrayLike | None = None) -> Tensor:
        """log p(x_t = v | all other observed tokens) [B, T, V] at every position, exactly; −inf beyond a length."""
        evidence = self._evidence(tokens, lengths)
        self._require_possible(evidence, self.detach().scan(*evidence).log_likelihood)
        return self.emit(ops.surroundings(self._fixed(), evidence, self.impl))
