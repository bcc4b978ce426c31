"""An HMM as a start distribution, a transition and an emission: its parameters, without queries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from hmmlm import emissions, transitions
from hmmlm.arguments import check_type
from hmmlm.emissions import Categorical, Emission, UnionEmission
from hmmlm.errors import InputError
from hmmlm.numerics.distributions import check_distributions, check_parameters, move
from hmmlm.numerics.tables import UnionTables
from hmmlm.ops.common import Impl, finite, logsumexp
from hmmlm.ops.scan import Parameters
from hmmlm.transitions import BlockDiagonal, Dense, Transition

Self = TypeVar("Self", bound="Composition")
AnyHMM = TypeVar("AnyHMM", bound="Composition")


class Composition:
    """log_start [Z], a transition and an emission of the same Z states."""

    def __init__(
        self, log_start: Tensor, transition: Transition | Tensor, emission: Emission | Tensor, impl: Impl = "auto"
    ) -> None:
        if isinstance(transition, Tensor):
            transition = Dense(transition)
        if isinstance(emission, Tensor):
            emission = Categorical(emission)
        check_type("transition", transition, Transition)
        check_type("emission", emission, Emission)
        check_type("impl", impl, Impl)
        check_parameters({"log_start": log_start}, "; HMM.from_probs takes arrays")
        if log_start.dim() != 1 or not len(log_start):
            raise InputError(f"log_start must have shape [states], not {list(log_start.shape)}")
        if not len(log_start) == transition.num_states == emission.num_states:
            raise InputError(
                f"log_start has {len(log_start)} states, the transition {transition.num_states} and the emission "
                f"{emission.num_states}: give all three the same number"
            )
        sizes = [part.sizes if isinstance(part, UnionTables) else () for part in (transition, emission)]
        if sizes[0] != sizes[1]:
            raise InputError(
                f"the transition is a union of {list(sizes[0])} states and the emission of {list(sizes[1])}: "
                "HMM.union makes both"
            )
        if len({(part.dtype, part.device) for part in (log_start, transition, emission)}) > 1:
            raise InputError("log_start, transition and emission must share one dtype and device")
        self.log_start, self.transition, self.emission = log_start, transition, emission
        self.impl: Impl = impl

    # --- sizes ---

    @property
    def num_states(self) -> int:
        return len(self.log_start)

    @property
    def vocab_size(self) -> int:
        return self.emission.vocab_size

    @property
    def device(self) -> torch.device:
        return self.log_start.device

    @property
    def dtype(self) -> torch.dtype:
        return self.log_start.dtype

    @property
    def requires_grad(self) -> bool:
        return self.log_start.requires_grad or self.transition.requires_grad or self.emission.requires_grad

    # --- tensors ---

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name, as a model file stores them."""
        parts = (self.transition, self.emission)
        inner = {f"{part.role}.{name}": value for part in parts for name, value in part.tensors().items()}
        return {"log_start": self.log_start, **inner}

    @property
    def kind(self) -> str:
        """The kinds of transition and emission, for people."""
        if isinstance(self.transition, BlockDiagonal):
            return self.transition.kind
        return f"{self.transition.kind} × {self.emission.kind}"

    def validate(self) -> None:
        """Raise an InputError that names the first tensor with a distribution that does not sum to one."""
        check_distributions(self.log_start, "log_start")
        self.transition.validate()
        self.emission.validate()

    def to(self: Self, *args: Any, **kwargs: Any) -> Self:
        """Return the model on another device or in another dtype, like `Tensor.to`."""
        (log_start,) = move([self.log_start], *args, **kwargs)
        return with_parts(self, log_start, self.transition.to(*args, **kwargs), self.emission.to(*args, **kwargs))

    def detach(self: Self) -> Self:
        """Return the model without gradients; the model itself, with its caches, if it requires none."""
        if not self.requires_grad:
            return self
        return with_parts(self, self.log_start.detach(), self.transition.detach(), self.emission.detach())

    def dense(self: Self) -> Self:
        """Return the same model as two matrices; for small sizes."""
        if matrices(self) is not None:
            return self
        return with_parts(self, self.log_start, Dense(self.transition.dense()), Categorical(self.emission.dense()))

    # --- unions ---

    @cached_property
    def components(self: Self) -> tuple[Self, ...]:
        """The models of a union; the model itself if it is none."""
        if not isinstance(self.transition, BlockDiagonal) or not isinstance(self.emission, UnionEmission):
            return (self,)
        starts = self.log_start.split(self.transition.sizes)
        parts = zip(starts, self.transition.parts, self.emission.parts, strict=True)
        return tuple(
            with_parts(self, start - finite(logsumexp(start, 0)), transition, emission)
            for start, transition, emission in parts
        )

    @property
    def log_weights(self) -> Tensor:
        """The logarithm of the weight of each model of a union [K]."""
        sizes = self.transition.sizes if isinstance(self.transition, BlockDiagonal) else (self.num_states,)
        return torch.stack([logsumexp(start, 0) for start in self.log_start.split(sizes)])


def layout(kinds: Mapping[str, str]) -> tuple[dict[str, list[str]], list[str]]:
    """Return the tensors of a model file with their dimensions, and those that are integers, from its kinds."""
    dims, indices = {"log_start": ["states"]}, list[str]()
    for prefix, registry in (("transition.", transitions.KINDS), ("emission.", emissions.KINDS)):
        for inner, cls in UnionTables.leaves(prefix, registry, kinds):
            other = {"states": "states of the component"} if inner != prefix else {}
            for name, shape in cls.TENSORS.items():
                dims[inner + name] = [other.get(dim, dim) for dim in shape.split(", ")]
            indices += [inner + name for name in cls.INDICES]
    return dims, indices


def with_parts(hmm: AnyHMM, log_start: Tensor, transition: Transition, emission: Emission) -> AnyHMM:
    """Return the same model with other parts."""
    return type(hmm)(log_start, transition, emission, hmm.impl)


def matrices(hmm: Composition) -> Parameters | None:
    """Return the parameters of a model of two matrices; None for others."""
    if isinstance(hmm.transition, Dense) and isinstance(hmm.emission, Categorical):
        return Parameters(hmm.log_start, hmm.transition.log_probs, hmm.emission.log_probs)
    return None


def parameters_of(hmm: Composition) -> dict[str, Tensor]:
    """Return the floating-point tensors of a model by name."""
    return {name: value for name, value in hmm.tensors().items() if value.is_floating_point()}


def with_tensors(hmm: AnyHMM, tensors: Mapping[str, Tensor]) -> AnyHMM:
    """Return the same model with other tensors in place of some."""
    transition, emission = (
        part.replace({name: tensors.get(f"{part.role}.{name}", value) for name, value in part.tensors().items()})
        for part in (hmm.transition, hmm.emission)
    )
    assert isinstance(transition, Transition) and isinstance(emission, Emission)
    return with_parts(hmm, tensors.get("log_start", hmm.log_start), transition, emission)


def map_tensors(hmm: AnyHMM, function: Callable[[Tensor], Tensor]) -> AnyHMM:
    """Return the model with a function applied to each floating-point tensor."""
    return with_parts(hmm, function(hmm.log_start), hmm.transition.map(function), hmm.emission.map(function))


def kinds_of(hmm: Composition) -> dict[str, str]:
    """Return the kinds of the transition and the emission, by the names that a model file uses."""
    parts = (hmm.transition, hmm.emission)
    return {f"{part.role}.{name}": kind for part in parts for name, kind in part.kinds().items()}


def read_parts(tensors: Mapping[str, Tensor], kinds: Mapping[str, str]) -> tuple[Tensor, Transition, Emission]:
    """Return the start, transition and emission from the tensors and kinds of a model file; see `layout`."""
    transition = BlockDiagonal.read("transition.", transitions.KINDS, kinds, tensors)
    sizes = transition.sizes if isinstance(transition, BlockDiagonal) else [transition.num_states]
    emission = UnionEmission.read("emission.", emissions.KINDS, kinds, tensors, sizes)
    return tensors["log_start"], transition, emission
