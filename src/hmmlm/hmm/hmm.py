"""The hidden Markov model: a start distribution, a transition and an emission, with its exact queries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hmmlm.arguments import check_arguments
from hmmlm.checks import ArrayLike, as_log_probs, check_batch, check_count, check_number
from hmmlm.emissions import Emission, UnionEmission
from hmmlm.errors import InputError
from hmmlm.hmm.queries import Queries
from hmmlm.numerics.distributions import check_distributions
from hmmlm.ops.common import NEG_INF, Carry, Impl, Scan
from hmmlm.ops.maximize_rows import maximize_rows
from hmmlm.ops.pieces import at_once
from hmmlm.scan.composition import matrices, parameters_of, with_parts
from hmmlm.scan.implementations import Choice, Problem, choose
from hmmlm.transitions import BlockDiagonal, Transition

_RANDOM_CELLS = 2**30  # probabilities of a random model: 8 GB while they are drawn


class HMM(Queries):
    """p(x, z) = start[z_1] Π A[z_t−1, z_t] Π O[z_t, x_t], of Z states and V words.

    log_start [Z] is a tensor, the transition one of `hmmlm.transitions` and the emission one of `hmmlm.emissions`;
    tensors in place of these are matrices of log-probabilities [Z, Z] (row = from-state) and [Z, V].

    The constructor does not check whether each distribution sums to one; `validate()` does, and `from_probs` calls it.
    Tokens are integers [B, T]; −1 is a missing token, which is summed over; `lengths` [B] gives ragged batches.
    Results are detached, except `log_likelihood` (and `filter(...).log_likelihood`) when a parameter requires a
    gradient. `impl` selects the implementation of the likelihood: "auto", "naive" (log space), or for two matrices also
    "scaled", "compiled" or "triton".
    """

    # --- constructors ---

    @classmethod
    def from_probs(
        cls,
        start: ArrayLike,
        transition: Transition | ArrayLike,
        emission: Emission | ArrayLike,
        impl: Impl = "auto",
    ) -> HMM:
        """Create an HMM from probabilities, as arrays, lists or tensors; each distribution must sum to one.

        Lists give a float32 model; parameters of different dtypes give a float64 one. A transition and an emission may
        also be objects, which have log-probabilities.
        """
        given: dict[str, Any] = {"start": start, "transition": transition, "emission": emission}
        parts: dict[str, Any] = {n: part for n, part in given.items() if isinstance(part, Transition | Emission)}
        logs = {name: as_log_probs(part, name) for name, part in given.items() if name not in parts}
        dtypes = {part.dtype for part in parts.values()} or {dtype for _, dtype in logs.values()}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.float64
        for name, (log_probs, _) in logs.items():
            parts[name] = log_probs.to(dtype)
        hmm = cls(parts["start"], parts["transition"], parts["emission"], impl)
        for name in logs:
            check_distributions(parts[name], name)
        hmm.validate()
        return hmm

    @classmethod
    def random(cls, num_states: int, vocab_size: int, seed: int = 0) -> HMM:
        """Create an HMM of random distributions (uniform over all distributions), to `fit`."""
        check_count("num_states", num_states, 1)
        check_count("vocab_size", vocab_size, 1)
        check_count("num_states × (num_states + vocab_size)", num_states * (num_states + vocab_size), 1, _RANDOM_CELLS)
        check_count("seed", seed, -(2**63))
        generator = torch.Generator().manual_seed(seed)
        shapes = ((num_states,), (num_states, num_states), (num_states, vocab_size))
        draws = [torch.empty(shape, dtype=torch.float64).exponential_(generator=generator) for shape in shapes]
        start, transition, emission = ((draw / draw.sum(-1, keepdim=True)).float() for draw in draws)
        return cls.from_probs(start, transition, emission)

    @classmethod
    @check_arguments
    def union(cls, models: Sequence[HMM], weights: Sequence[float] | None = None) -> HMM:
        """Return p(x) = Σ_k weight_k p_k(x): the first step chooses a model, in which the chain then stays.

        Its states are those of the models, one after another. Where the chain restarts, a model is chosen again. The
        models may be unions themselves.

        Args:
            weights: None: equal ones.
        """
        if not len(models):
            raise InputError("a union needs at least one model")
        given = [1 / len(models)] * len(models) if weights is None else list(weights)
        if len(given) != len(models):
            raise InputError(f"{len(given)} weights for {len(models)} models: give one for each")
        check_distributions(torch.tensor(given, dtype=torch.float64).log(), "weights")
        starts = [model.log_start + model.log_start.new_tensor(w).log() for model, w in zip(models, given, strict=True)]
        return side_by_side(torch.cat(starts), [part for model in models for part in model.components])

    @classmethod
    def from_hmmlearn(cls, model: Any) -> HMM:
        """Create an HMM from a fitted `CategoricalHMM` of hmmlearn."""
        for name in ("startprob_", "transmat_", "emissionprob_"):
            if not hasattr(model, name):
                raise InputError(f"from_hmmlearn needs a fitted CategoricalHMM: {type(model).__name__} has no {name}")
        return cls.from_probs(model.startprob_, model.transmat_, model.emissionprob_)

    @classmethod
    def from_dynamax(cls, params: Any) -> HMM:
        """Create an HMM from the parameters of a `CategoricalHMM` of dynamax with one emission."""
        try:
            probs = params.initial.probs, params.transitions.transition_matrix, params.emissions.probs
        except AttributeError as error:
            raise InputError(f"from_dynamax needs the parameters of a CategoricalHMM: {error}") from None
        start, transition, emission = map(np.array, probs)  # copies: arrays of JAX cannot be written to
        if emission.ndim != 3 or emission.shape[1] != 1:
            raise InputError(f"from_dynamax needs one emission, [states, 1, words], not {list(emission.shape)}")
        return cls.from_probs(start, transition, emission[:, 0])

    # --- representation ---

    def __repr__(self) -> str:
        sizes = f"num_states={self.num_states}, vocab_size={self.vocab_size}, dtype={self.dtype}, device={self.device}"
        return f"HMM({self.kind}, {sizes})"

    def _repr_html_(self) -> str:
        """Return a table for notebooks."""
        facts = {
            "kind": self.kind,
            "states": f"{self.num_states:,}",
            "words": f"{self.vocab_size:,}",
            "parameters": f"{sum(value.numel() for value in parameters_of(self).values()):,}",
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": str(self.device),
        }
        rows = "".join(f"<tr><th>{name}</th><td>{fact}</td></tr>" for name, fact in facts.items())
        return f"<b>HMM</b><table>{rows}</table>"

    def to_hmmlearn(self) -> Any:
        """Return the model as a `CategoricalHMM` of hmmlearn, in float64, with rows that sum to one exactly."""
        try:
            from hmmlearn.hmm import CategoricalHMM
        except ImportError:
            raise InputError("hmmlearn is not installed: pip install hmmlearn") from None
        start, transition, emission = self._to_arrays()
        model = CategoricalHMM(n_components=self.num_states, n_features=self.vocab_size)
        model.startprob_, model.transmat_, model.emissionprob_ = start, transition, emission
        return model

    def to_dynamax(self) -> tuple[Any, Any, Any]:
        """Return the model as a `CategoricalHMM` of dynamax with one emission: model, parameters and their properties.

        Its methods take tokens as emissions [T, 1]. The dtype is that of JAX: float32 unless JAX has 64 bits enabled.
        """
        try:
            import jax.numpy as jnp
            from dynamax.hidden_markov_model import CategoricalHMM
        except ImportError:
            raise InputError("dynamax is not installed: pip install dynamax") from None
        start, transition, emission = self._to_arrays()
        model = CategoricalHMM(self.num_states, emission_dim=1, num_classes=self.vocab_size)
        given = {"initial_probs": start, "transition_matrix": transition, "emission_probs": emission[:, None]}
        return model, *model.initialize(**{name: jnp.asarray(probs) for name, probs in given.items()})

    def _to_arrays(self) -> list[np.ndarray]:
        """Return the three matrices in float64, with rows that sum to one exactly."""
        found = matrices(self.detach().dense())
        assert found is not None
        return [log_probs.double().softmax(-1).cpu().numpy() for log_probs in found]

    # --- likelihood and expected counts ---

    def scan(
        self,
        tokens: Tensor,
        lengths: Tensor | None = None,
        carry: Carry | None = None,
        restart: Tensor | None = None,
        exact_carry: bool = True,
    ) -> Scan:
        """Compute log p(x) [B], differentiable, and the carry of a training or evaluation batch; nothing is checked.

        Args:
            carry: of the previous window; position 0 continues from it unless it restarts.
            restart: [B, T] bool, True where the chain restarts from the start distribution.
            exact_carry: also recompute sequences of which only the carry underflows; training does without.
        """
        problem = Problem(self, tokens, lengths, carry, restart, "exact" if exact_carry else "kept")
        return choose(problem)[0].run(problem)

    def implementation(self, tokens: ArrayLike, lengths: ArrayLike | None = None) -> Choice:
        """Return the name of what computes the likelihood of a batch, and why others refuse it."""
        checked, sizes = check_batch(tokens, lengths, self.vocab_size, self.device)
        chosen, refused = choose(Problem(self, checked, sizes, None, None, "none"))
        return Choice(chosen.name, refused)

    def fit(
        self,
        tokens: ArrayLike,
        lengths: ArrayLike | None = None,
        iterations: int = 100,
        tolerance: float = 1e-4,
        pseudocount: float = 0.0,
    ) -> HMM:
        """Return the model after expectation maximization (Baum-Welch) on all sequences; this one stays unchanged.

        Every iteration raises the likelihood, unless there are pseudocounts. It stops after `iterations`, or when the
        log-likelihood per token rises by less than `tolerance`. For a corpus, use `hmmlm.train`.

        Args:
            pseudocount: added to every expected count.
        """
        check_count("iterations", iterations, 1)
        check_number("tolerance", tolerance)
        check_number("pseudocount", pseudocount)
        checked, sizes = check_batch(tokens, lengths, self.vocab_size, self.device)
        total = int(checked.numel() if sizes is None else sizes.sum())
        rows = at_once(checked.shape[1] * self.num_states, 2**25)
        pieces = [
            (checked[i : i + rows], None if sizes is None else sizes[i : i + rows])
            for i in range(0, len(checked), rows)
        ]
        model, before = self.detach(), NEG_INF
        for _ in range(iterations):
            counts = [model.expected_counts(*piece) for piece in pieces]
            start, transition, emission, log_likelihood = map(_add_up, zip(*counts, strict=True))
            if float(log_likelihood) == NEG_INF:
                model._possible(checked, sizes)  # names the impossible token
            if float(log_likelihood) - before < tolerance * total:
                break
            before = float(log_likelihood)
            model = with_parts(
                model,
                maximize_rows(start, model.log_start, pseudocount),
                model.transition.maximize(_by_name(transition, model.transition), pseudocount),
                model.emission.maximize(_by_name(emission, model.emission), pseudocount),
            )
        return model


def side_by_side(log_start: Tensor, models: Sequence[HMM]) -> HMM:
    """Return the union of models with a start distribution over all states [Z]."""
    transition = BlockDiagonal([model.transition for model in models])
    return HMM(log_start, transition, UnionEmission([model.emission for model in models]))


def _by_name(counts: Any, part: Transition | Emission) -> dict[str, Tensor]:
    """Return the counts of each tensor of a transition or emission."""
    return counts if isinstance(counts, dict) else {next(iter(part.parameters())): counts}


def _add_up(counts: Sequence[Any]) -> Any:
    if isinstance(counts[0], dict):
        return {name: _add_up([each[name] for each in counts]) for name in counts[0]}
    return sum(counts[1:], counts[0])
