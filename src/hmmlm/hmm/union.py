"""A union of HMMs: the first step chooses a component, in which the chain then stays."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from hmmlm.arguments import check_arguments
from hmmlm.errors import InputError
from hmmlm.hmm.blocked import BlockedHMM
from hmmlm.hmm.checks import check_distributions, check_log_state, check_parameters, move
from hmmlm.hmm.dense import HMM
from hmmlm.hmm.protocol import Carry, Counts, Scan, Support
from hmmlm.hmm.queries import HiddenMarkovModel
from hmmlm.hmm.union_scan import first_states, join_carries, scan_components, split_carry
from hmmlm.ops.common import NEG_INF, logsumexp

COMPONENTS: dict[str, type[HMM] | type[BlockedHMM]] = {"dense": HMM, "blocked": BlockedHMM}
"""Kinds of components by the name that model files use."""
_NAME = re.compile(r"components\.(\d{1,4})\.([a-z]+)\.(\w+)")  # of a component's tensor in a model file


class UnionSupport(NamedTuple):
    """The support of each component; values over it are those of the components side by side."""

    parts: tuple[Support, ...]
    widths: tuple[int, ...]

    def rows(self, rows: slice) -> UnionSupport:
        return UnionSupport(tuple(None if part is None else part.rows(rows) for part in self.parts), self.widths)


class UnionHMM(HiddenMarkovModel):
    """K HMMs over the same words as one: p(x) = Σ_k w_k p_k(x).

    Its states are those of the components, one after another; its transition matrix is block-diagonal, and its start
    distribution is the weights times those of the components. Where the chain restarts, a component is chosen again.
    Supports every query of `HMM`, at the cost of the components' own: nothing larger than they hold is stored.
    """

    kind: ClassVar[str] = "union"
    TENSORS: ClassVar[dict[str, str]] = {"log_weights": "?"}

    @check_arguments
    def __init__(self, components: Sequence[HiddenMarkovModel], log_weights: Tensor) -> None:
        if not len(components):
            raise InputError("a union needs at least one HMM")
        self.components, self.log_weights = tuple(components), log_weights
        if log_weights.shape != (len(components),):
            raise InputError(
                f"log_weights must have shape [{len(components)}], one per component, not {list(log_weights.shape)}"
            )
        for i, component in enumerate(self.components):
            if not isinstance(component, tuple(COMPONENTS.values())):
                raise InputError(f"component {i} is a {type(component).__name__}, not a dense or blocked HMM")
            if component.vocab_size != self.vocab_size:
                raise InputError(
                    f"component {i} has {component.vocab_size} words and component 0 {self.vocab_size}: a union needs "
                    "one vocabulary"
                )
        starts = {f"component {i}": component.log_start_scores() for i, component in enumerate(self.components)}
        check_parameters({**starts, "log_weights": log_weights})

    @classmethod
    @check_arguments
    def join(cls, models: Sequence[HiddenMarkovModel], weights: Sequence[float] | None = None) -> UnionHMM:
        """Return the union of HMMs, which may be unions themselves, with the given weights (None: equal ones)."""
        if not len(models):
            raise InputError("a union needs at least one model")
        given = [1 / len(models)] * len(models) if weights is None else list(weights)
        if len(given) != len(models):
            raise InputError(f"{len(given)} weights for {len(models)} models: give one for each")
        components, parts = list[HiddenMarkovModel](), list[Tensor]()
        for model, weight in zip(models, given, strict=True):
            inner = model.log_weights if isinstance(model, UnionHMM) else model.log_start_scores().new_zeros(1)
            components += model.components if isinstance(model, UnionHMM) else [model]
            parts.append(inner + inner.new_tensor(weight).log())
        union = cls(components, torch.cat(parts))
        check_distributions(union.log_weights, "weights")
        return union

    # --- representation ---

    @classmethod
    def layout(cls, names: Iterable[str]) -> tuple[dict[str, str], tuple[str, ...]]:
        dims, indices = dict(cls.TENSORS), list[str]()
        for prefix, kind in sorted(_components(names)):
            own = COMPONENTS[kind]
            dims |= {f"{prefix}{name}": shape.replace("Z", "?") for name, shape in own.TENSORS.items()}
            indices += [f"{prefix}{name}" for name in own.INDICES]
        return dims, tuple(indices)

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> UnionHMM:
        found = sorted(_components(tensors), key=lambda pair: int(pair[0].split(".")[1]))
        parts = []
        for prefix, kind in found:
            own = {name: tensors[f"{prefix}{name}"] for name in COMPONENTS[kind].TENSORS}
            parts.append(COMPONENTS[kind].from_tensors(own))
        return cls(parts, tensors["log_weights"])

    def tensors(self) -> dict[str, Tensor]:
        """Return the parameters by name, as a model file stores them."""
        return {"log_weights": self.log_weights} | {
            f"components.{i}.{component.kind}.{name}": value
            for i, component in enumerate(self.components)
            for name, value in component.tensors().items()
        }

    def validate(self) -> None:
        """Raise an InputError that names the first tensor with a distribution that does not sum to one."""
        check_distributions(self.log_weights, "log_weights")
        for i, component in enumerate(self.components):
            try:
                component.validate()
            except InputError as error:
                raise InputError(f"component {i}: {error}") from None

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of states of each component."""
        return tuple(component.states for component in self.components)

    @property
    def states(self) -> int:
        return sum(self.sizes)

    @property
    def vocab_size(self) -> int:
        return self.components[0].vocab_size

    @property
    def device(self) -> torch.device:
        return self.log_weights.device

    @property
    def dtype(self) -> torch.dtype:
        return self.log_weights.dtype

    @property
    def requires_grad(self) -> bool:
        return self.log_weights.requires_grad or any(component.requires_grad for component in self.components)

    def to(self, *args: Any, **kwargs: Any) -> UnionHMM:
        """Return the model on another device or in another dtype, like `Tensor.to`."""
        (log_weights,) = move([self.log_weights], *args, **kwargs)
        return UnionHMM([component.to(*args, **kwargs) for component in self.components], log_weights)

    def detach(self) -> UnionHMM:
        """Return the model without gradients; the model itself if it has none."""
        if not self.requires_grad:
            return self
        return UnionHMM([component.detach() for component in self.components], self.log_weights.detach())

    def dense(self) -> HMM:
        """Return the same model with dense matrices; for small sizes."""
        parts = [component.dense() for component in self.components]
        transition = torch.full((self.states, self.states), NEG_INF, dtype=self.dtype, device=self.device)
        for span, part in zip(self._spans(), parts, strict=True):
            transition[span, span] = part.log_transition
        return HMM(self.log_start_scores(), transition, torch.cat([part.log_emission for part in parts]))

    def __repr__(self) -> str:
        return f"UnionHMM(components={len(self.components)}, states={self.states}, vocab_size={self.vocab_size})"

    def _spans(self) -> Iterator[slice]:
        """Yield the states of each component."""
        for first, size in zip(first_states(self.sizes), self.sizes, strict=True):
            yield slice(first, first + size)

    def _inside(self, states: Tensor) -> Iterator[tuple[HiddenMarkovModel, Tensor, Tensor]]:
        """Yield each component with a mask of the states that are its own, and their numbers in it (0 for others)."""
        for component, span in zip(self.components, self._spans(), strict=True):
            inside = (states >= span.start) & (states < span.stop)
            yield component, inside, torch.where(inside, states - span.start, 0)

    # --- likelihood ---

    def scan(
        self,
        tokens: Tensor,
        lengths: Tensor | None = None,
        carry: Carry | None = None,
        restart: Tensor | None = None,
        exact_carry: bool = True,
    ) -> Scan:
        """See `Primitives.scan`; tokens may not be missing if they may not in a component."""
        return scan_components(self.components, self.sizes, self.log_weights, tokens, lengths, carry, restart)

    def _log_likelihood(self, tokens: Tensor, lengths: Tensor | None, carry: Carry | None) -> Tensor:
        return logsumexp(self._log_joint(tokens, lengths, carry), 0).to(self.dtype)

    def _log_joint(self, tokens: Tensor, lengths: Tensor | None, carry: Carry | None) -> Tensor:
        """Compute log p(component, x) [K, B] in float64: components may be unlikely."""
        every = torch.arange(len(tokens), device=self.device)
        given = None if carry is None else split_carry(carry, every, self.sizes)
        rows = []
        for k, component in enumerate(self.components):
            log_weight, own = (self.log_weights[k], None) if given is None else given[k]
            rows.append(log_weight.double() + component._log_likelihood(tokens, lengths, own).double())
        return torch.stack(rows)

    @torch.no_grad()
    def _expected_counts(self, tokens: Tensor, lengths: Tensor | None, weights: Tensor | None) -> Counts:
        log_joint = self._log_joint(tokens, lengths, None)
        responsibility = log_joint.softmax(0).nan_to_num(0.0).to(self.dtype)
        weights = torch.ones_like(responsibility[0]) if weights is None else weights
        counts = [
            component._expected_counts(tokens, lengths, share * weights)
            for component, share in zip(self.components, responsibility, strict=True)
        ]
        log_likelihood = logsumexp(log_joint, 0).to(self.dtype)
        return Counts(
            torch.cat([each.start for each in counts]),
            _block_diagonal([each.transition for each in counts]),
            torch.cat(_alike([each.emission for each in counts])),
            torch.where(weights > 0, weights * log_likelihood, 0.0).sum(),
        )

    # --- operations of the queries: those of the components, side by side ---

    def _parts(self, values: Tensor, support: Support) -> Iterator[tuple[HiddenMarkovModel, Tensor, Support]]:
        """Yield each component with its part of values [n, K] over a support, and its support."""
        supports = [None] * len(self.components) if support is None else support.parts
        widths = self.sizes if support is None else support.widths
        yield from zip(self.components, values.split(widths, 1), supports, strict=True)

    def _targets(self, target: Support) -> Sequence[Support]:
        return [None] * len(self.components) if target is None else target.parts

    def observe(self, tokens: Tensor, missing: bool, log_missing: Tensor | None = None) -> tuple[Support, Tensor]:
        explained = [None] * len(self.components) if log_missing is None else list(log_missing.split(self.sizes))
        observed = [
            component.observe(tokens, missing, own) for component, own in zip(self.components, explained, strict=True)
        ]
        supports, scores = zip(*observed, strict=True)
        return UnionSupport(supports, tuple(score.shape[1] for score in scores)), torch.cat(scores, 1)

    def restrict(self, values: Tensor, support: Support) -> Tensor:
        if support is None:
            return values
        parts = zip(self.components, values.split(self.sizes, 1), support.parts, strict=True)
        return torch.cat([component.restrict(own, inner) for component, own, inner in parts], 1)

    def spread(self, values: Tensor, support: Support, fill: float) -> Tensor:
        return torch.cat([part.spread(own, inner, fill) for part, own, inner in self._parts(values, support)], 1)

    def state_ids(self, support: Support, index: Tensor) -> Tensor:
        if support is None:
            return index
        result, first = torch.zeros_like(index), 0
        for component, span, inner, width in zip(
            self.components, self._spans(), support.parts, support.widths, strict=True
        ):
            inside = (index >= first) & (index < first + width)
            own = component.state_ids(inner, torch.where(inside, index - first, 0)) + span.start
            result = torch.where(inside, own, result)
            first += width
        return result

    def log_start_scores(self) -> Tensor:
        weights = zip(self.log_weights, self.components, strict=True)
        return torch.cat([weight + component.log_start_scores() for weight, component in weights])

    def pull(self, log_probs: Tensor, source: Support = None, target: Support = None) -> Tensor:
        moved = []
        for (part, own, inner), to in zip(self._parts(log_probs, source), self._targets(target), strict=True):
            mass = _finite_mass(own)
            moved.append(part.pull(own - mass, inner, to) + mass)
        return torch.cat(moved, 1)

    def predict(self, log_probs: Tensor, source: Support) -> Tensor:
        """See `HiddenMarkovModel.predict`; a blocked component keeps products of its own."""
        predicted = []
        for part, own, inner in self._parts(log_probs, source):
            mass = _finite_mass(own)
            predicted.append(part.predict(own - mass, inner) + mass)
        return torch.stack(predicted).logsumexp(0)

    def pull_max(self, log_probs: Tensor, source: Support = None, target: Support = None) -> Tensor:
        parts = zip(self._parts(log_probs, source), self._targets(target), strict=True)
        return torch.cat([part.pull_max(own, inner, to) for (part, own, inner), to in parts], 1)

    def push(self, log_values: Tensor, source: Support = None, target: Support = None) -> Tensor:
        parts = zip(self._parts(log_values, target), self._targets(source), strict=True)
        return torch.cat([part.push(own, origin, inner) for (part, own, inner), origin in parts], 1)

    def origin_entropy(self, log_probs: Tensor, source: Support, target: Support) -> Tensor:
        results = []
        for (part, own, inner), to in zip(self._parts(log_probs, source), self._targets(target), strict=True):
            mass = _finite_mass(own)
            results.append(part.origin_entropy(own - mass, inner, to))
        return torch.cat(results, 1)

    def transitions_into(self, source: Support, states: Tensor) -> Tensor:
        results = []
        for (component, inside, own), origin in zip(self._inside(states), self._targets(source), strict=True):
            results.append(torch.where(inside[..., None], component.transitions_into(origin, own), NEG_INF))
        return torch.cat(results, -1)

    def transitions_from(self, states: Tensor) -> Tensor:
        result = torch.full((len(states), self.states), NEG_INF, dtype=self.dtype, device=self.device)
        for (component, inside, own), span in zip(self._inside(states), self._spans(), strict=True):
            result[inside, span] = component.transitions_from(own[inside])
        return result

    def emissions_from(self, states: Tensor) -> tuple[Tensor, Tensor]:
        found = [(inside, *component.emissions_from(own[inside])) for component, inside, own in self._inside(states)]
        width = max(log_probs.shape[1] for _, _, log_probs in found)
        words = torch.full((len(states), width), -1, device=self.device)
        result = torch.full(words.shape, NEG_INF, dtype=self.dtype, device=self.device)
        for inside, own, log_probs in found:
            words[inside, : own.shape[1]], result[inside, : own.shape[1]] = own, log_probs
        return words, result

    def emit(self, log_states: Tensor, tokens: Tensor | None = None) -> Tensor:
        check_log_state(log_states, self.states, self.device)
        parts = zip(self.components, log_states.split(self.sizes, -1), strict=True)
        return torch.stack([component.emit(own, tokens) for component, own in parts]).logsumexp(0)

    def group_emission(self, group_of_word: Tensor, groups: int) -> Tensor:
        return torch.cat([component.group_emission(group_of_word, groups) for component in self.components], 1)

    def joint_scores(self, origins: Tensor, states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        result = [torch.full(states.shape, NEG_INF, dtype=self.dtype, device=self.device)] * 3
        for k, ((component, inside, own), (_, left, origin)) in enumerate(
            zip(self._inside(states), self._inside(origins), strict=True)
        ):
            started, moved, emitted = component.joint_scores(origin, own, tokens)
            scores = (started + self.log_weights[k], moved, emitted)
            masks = (inside, inside & left, inside)
            result = [torch.where(m, s, r) for m, s, r in zip(masks, scores, result, strict=True)]
        return result[0], result[1], result[2]

    def carry_at(self, states: Tensor) -> Carry:
        carries, weights = [], []
        for component, inside, own in self._inside(states):
            carries.append(component.carry_at(own))
            weights.append(inside.double().log())
        return join_carries(carries, torch.stack(weights), self.sizes)


def _components(names: Iterable[str]) -> set[tuple[str, str]]:
    """Return the prefix and the kind of each component of a model file; raise an InputError for unknown kinds."""
    found = {match.groups()[:2] for name in names if (match := _NAME.fullmatch(name))}
    unknown = sorted({kind for _, kind in found} - COMPONENTS.keys())
    if unknown:
        raise InputError(f"a component of kind {unknown[0]!r}; this hmmlm reads {', '.join(COMPONENTS)}")
    if sorted(int(number) for number, _ in found) != list(range(len(found))):
        raise InputError("the components are not numbered 0, 1, …: files of two models are mixed")
    return {(f"components.{number}.{kind}.", kind) for number, kind in found}


def _alike(matrices: list[Tensor]) -> list[Tensor]:
    """Return matrices that are all dense, or all sparse."""
    return [matrix.to_sparse() for matrix in matrices] if any(matrix.is_sparse for matrix in matrices) else matrices


def _block_diagonal(matrices: list[Tensor]) -> Tensor:
    """Return a block-diagonal matrix; sparse if one of the blocks is."""
    blocks = _alike(matrices)
    if not blocks[0].is_sparse:
        return torch.block_diag(*blocks)
    indices, values, first = list[Tensor](), list[Tensor](), 0
    for block in blocks:
        own = block.coalesce()
        indices.append(own.indices() + first)
        values.append(own.values())
        first += block.shape[0]
    with torch.sparse.check_sparse_tensor_invariants():
        return torch.sparse_coo_tensor(torch.cat(indices, 1), torch.cat(values), (first, first)).coalesce()


def _finite_mass(log_probs: Tensor) -> Tensor:
    """Return the log-mass [n, 1] of rows, finite: a component expects distributions, or nothing at all."""
    return logsumexp(log_probs, 1)[:, None].clamp_min(torch.finfo(log_probs.dtype).min)
