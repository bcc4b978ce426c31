"""The hidden Markov model: a start distribution, a transition and an emission, with its exact queries."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hmmlm.arguments import check_arguments
from hmmlm.checks import ArrayLike, as_batch, as_log_probs, check_batch, check_count, check_seed
from hmmlm.emissions import Emission, UnionEmission
from hmmlm.errors import InputError
from hmmlm.hmm.fitting import Fitting
from hmmlm.hmm.labels import labels_as_rows
from hmmlm.hmm.selection import Candidate, Selection
from hmmlm.numerics.distributions import check_distributions
from hmmlm.ops.common import Carry, Impl, Scan
from hmmlm.restarts import best_of
from hmmlm.scan.composition import kinds_of, matrices, parameters_of, read_parts
from hmmlm.scan.implementations import Choice, Problem, choose
from hmmlm.transitions import BlockDiagonal, Transition

_ATTEMPT = 50  # iterations of each of several starts, before the best one is chosen
_RANDOM_CELLS = 2**30  # probabilities of a random model: 8 GB while they are drawn


class HMM(Fitting):
    """p(x, z) = start[z_1] Π A[z_t−1, z_t] Π O[z_t, x_t], of Z states and V words.

    log_start [Z] is a tensor, the transition one of `hmmlm.transitions` and the emission one of `hmmlm.emissions`;
    tensors in place of these are matrices of log-probabilities [Z, Z] (row = from-state) and [Z, V].

    The constructor does not check whether each distribution sums to one; `validate()` does, and `from_probs` calls it.
    Tokens are integers [B, T]; −1 is a missing token, which is summed over; `lengths` [B] gives ragged batches.
    Results are detached, except `log_likelihood` (and `filter(...).log_likelihood`) when a parameter requires a
    gradient. `impl` selects the implementation of the likelihood: "auto", "naive" (log space), or for two matrices also
    "scaled", "compiled", "triton" or "parallel" (long sequences, few states).
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

    # --- learning and files ---

    @classmethod
    @check_arguments
    def learn(
        cls,
        sequences: ArrayLike,
        num_states: int,
        lengths: ArrayLike | None = None,
        restarts: int = 10,
        seed: int = 0,
        vocab_size: int | None = None,
        iterations: int = 500,
        tolerance: float = 1e-6,
        pseudocount: float | Mapping[str, float] = 0.0,
        labels: ArrayLike | None = None,
        allowed_transitions: ArrayLike | None = None,
    ) -> HMM:
        """Return the most likely of `restarts` models after `fit` from a random one, in float64.

        Every start takes 50 iterations, and the best one is continued.

        Args:
            sequences: lists, [B, T], or as in hmmlearn one after another, [N] or [N, 1], with lengths that sum to N.
            seed: of the first start; the others have seed + 1, seed + 2, …
            vocab_size: None: one more than the largest token.
            pseudocount: see `fit`, as for labels and allowed_transitions.
        """
        check_count("restarts", restarts, 1)
        check_seed(seed, restarts)
        given, sizes, joined = as_batch(sequences, lengths)
        tokens, sizes = check_batch(given, sizes, 2**31 if vocab_size is None else vocab_size, torch.device("cpu"))
        words = int(tokens.max()) + 1 if vocab_size is None else vocab_size
        known = None if labels is None else labels_as_rows(labels, tokens, sizes if joined else None)

        def learned(model: HMM, most: int) -> HMM:
            return model.fit(tokens, sizes, most, tolerance, pseudocount, known, allowed_transitions)

        def attempt(start: int) -> HMM:
            random = cls.random(num_states, words, start).to(torch.float64)
            return learned(random, _ATTEMPT) if restarts > 1 else random

        best = best_of(attempt, lambda model: float(model.log_likelihood(tokens, sizes, known).sum()), restarts, seed)
        return learned(best, iterations)

    @classmethod
    @check_arguments
    def choose(
        cls,
        sequences: ArrayLike,
        num_states: Sequence[int],
        lengths: ArrayLike | None = None,
        restarts: int = 10,
        seed: int = 0,
        pseudocount: float = 0.01,
    ) -> Selection:
        """Learn a model for each number of states, and choose the one of the highest held-out likelihood.

        A fifth of the sequences is held out, at random. Of fewer than five sequences none is, and the BIC decides.
        The chosen model is then fitted to all sequences.

        Args:
            num_states: such as range(1, 9).
            pseudocount: see `fit`; without, a held-out token may be impossible.
        """
        check_seed(seed)
        given, sizes, _ = as_batch(sequences, lengths)
        tokens, sizes = check_batch(given, sizes, 2**31, torch.device("cpu"))
        shuffled = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(seed))
        held, kept = shuffled.tensor_split([len(tokens) // 5])
        parts = [(tokens[rows], None if sizes is None else sizes[rows]) for rows in (kept, held)]
        words = int(tokens.max()) + 1
        found = []
        for states in num_states:
            model = cls.learn(parts[0][0], states, parts[0][1], restarts, seed, words, pseudocount=pseudocount)
            found.append(Candidate.of(model, *parts))
        if not found:
            raise InputError("num_states is empty: give numbers of states, such as range(1, 9)")
        best = max(found, key=lambda each: each.held_out if len(held) else -each.bic)
        return Selection(best.model.fit(tokens, sizes, 500, 1e-6, pseudocount), found)

    @check_arguments
    def save(self, path: str | Path) -> None:
        """Write the model into one safetensors file; `HMM.load` reads it. A failure leaves an existing file."""
        temporary = Path(f"{path}.{os.getpid()}.tmp")
        try:
            tensors = {name: value.detach().cpu().clone().contiguous() for name, value in self.tensors().items()}
            save_file(tensors, temporary, kinds_of(self))
            os.replace(temporary, path)
        except (OSError, ValueError, SafetensorError) as error:
            raise InputError(f"cannot write {path}: {error}") from None
        finally:
            with suppress(OSError, ValueError):
                temporary.unlink()

    @classmethod
    @check_arguments
    def load(cls, path: str | Path) -> HMM:
        """Return the model that `save` wrote into a file; the HMM of a model folder is `hmmlm.load(folder).hmm`."""
        try:
            with safe_open(path, framework="pt") as file:
                kinds, tensors = file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, ValueError, SafetensorError) as error:
            raise InputError(f"{path} is no file of `HMM.save` ({error}); for a model folder use hmmlm.load") from None
        try:
            hmm = cls(*read_parts(tensors, kinds))
            hmm.validate()
        except (KeyError, InputError) as error:
            raise InputError(f"{path} is damaged, or not of `HMM.save`: {error}") from None
        return hmm

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


def side_by_side(log_start: Tensor, models: Sequence[HMM]) -> HMM:
    """Return the union of models with a start distribution over all states [Z]."""
    transition = BlockDiagonal([model.transition for model in models])
    return HMM(log_start, transition, UnionEmission([model.emission for model in models]))
