"""What transitions and emissions have in common: a kind, and named tensors of one dtype on one device."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import count, takewhile
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from hmmlm.errors import InputError
from hmmlm.numerics.distributions import check_distributions, check_parameters, move
from hmmlm.numerics.support import Support, UnionSupport, spans
from hmmlm.ops.maximize_rows import maximize_rows

Self = TypeVar("Self", bound="Tables")
AnyPart = TypeVar("AnyPart", bound="Tables")


class Tables(ABC):
    """Named tensors, which are the arguments of the constructor and what a model file stores."""

    role: ClassVar[str]
    """The attribute of an HMM, by which messages and files name the tensors."""
    kind: ClassVar[str]
    """The name of the kind in model files."""
    TENSORS: ClassVar[dict[str, str]]
    """The tensors and their dimensions: of "states" and "words" there are as many as a model file says."""
    INDICES: ClassVar[tuple[str, ...]] = ()
    """Those of them that are integers; the others are floating-point."""

    @property
    def num_states(self) -> int:
        """The size of the first dimension of the first tensor, unless a kind overrides it."""
        return len(next(iter(self.tensors().values())))

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name, as a model file stores them."""
        return {name: getattr(self, name) for name in self.TENSORS}

    def parameters(self) -> dict[str, Tensor]:
        """Return the floating-point tensors by name."""
        return {name: value for name, value in self.tensors().items() if value.is_floating_point()}

    @property
    def num_parameters(self) -> int:
        """The number of free parameters: one less than its entries for each distribution, a row."""
        return sum(value.numel() - value.shape[:-1].numel() for value in self.parameters().values())

    def replace(self: Self, tensors: Mapping[str, Tensor]) -> Self:
        """Return the same kind with other tensors in place of some."""
        return type(self)(**self.tensors() | dict(tensors))

    def kinds(self) -> dict[str, str]:
        """Return the kind, and those of a union's parts, by the name that a model file uses."""
        return {"kind": self.kind}

    @classmethod
    def from_tensors(cls: type[Self], tensors: Mapping[str, Tensor], states: int) -> Self:
        """Return the part of an HMM with `states` states from its tensors in a model file."""
        return cls(**tensors)

    def map(self: Self, function: Callable[[Tensor], Tensor]) -> Self:
        """Return the same kind with a function applied to each floating-point tensor."""
        return self.replace({name: function(value) for name, value in self.parameters().items()})

    def to(self: Self, *args: Any, **kwargs: Any) -> Self:
        """Return the same on another device or in another dtype, like `Tensor.to`."""
        given = self.parameters()
        moved = dict(zip(given, move(list(given.values()), *args, **kwargs), strict=True))
        device = next(iter(moved.values())).device
        return self.replace(
            moved | {name: value.to(device) for name, value in self.tensors().items() if name not in given}
        )

    def detach(self: Self) -> Self:
        """Return the same without gradients; itself, with its caches, if it requires none."""
        return self.map(Tensor.detach) if self.requires_grad else self

    @cached_property
    def _values(self) -> tuple[Tensor, ...]:
        return tuple(self.parameters().values())

    @property
    def requires_grad(self) -> bool:
        return any(value.requires_grad for value in self._values)

    @property
    def dtype(self) -> torch.dtype:
        return self._values[0].dtype

    @property
    def device(self) -> torch.device:
        return self._values[0].device

    # --- for kinds; by default, the rows of every tensor are log-distributions ---

    def validate(self) -> None:
        """Raise an InputError that names the first distribution that does not sum to one."""
        for name, log_probs in self.parameters().items():
            check_distributions(log_probs, self._name(name))

    def maximize(self: Self, counts: dict[str, Tensor], pseudocount: float = 0.0) -> Self:
        """Return the kind that maximizes the expected log-likelihood, from the counts of its tensors."""
        given = self.parameters().items()
        return self.replace({name: maximize_rows(counts[name], value, pseudocount) for name, value in given})

    def _name(self, tensor: str) -> str:
        return f"{self.role}.{tensor}"

    def _check(self) -> None:
        """Raise an InputError unless the tensors have the dimensions of `TENSORS`, equal ones of a size, and no NaN."""
        check_parameters({self._name(name): getattr(self, name) for name in self.TENSORS if name not in self.INDICES})
        sizes = dict[str, int]()
        for name, value in self.tensors().items():
            dims = self.TENSORS[name].split(", ")
            if value.dim() == len(dims) and value.numel():
                for dim, size in zip(dims, value.shape, strict=True):
                    sizes.setdefault(dim, size)
            want = [sizes.get(dim, dim) for dim in dims]
            if list(value.shape) != want:
                raise InputError(
                    f"{self._name(name)} must have shape [{', '.join(map(str, want))}], not {list(value.shape)}"
                )


class UnionTables(Tables, Generic[AnyPart]):
    """The transitions, or the emissions, of several HMMs side by side: the states of one follow those of another."""

    kind = "union"
    TENSORS: ClassVar[dict[str, str]] = {}

    def __init__(self, parts: Sequence[AnyPart]) -> None:
        self.parts, self.sizes = tuple(parts), tuple(part.num_states for part in parts)
        if not self.parts:
            raise InputError(f"the {self.role} of a union needs at least one component")
        if len({(part.dtype, part.device) for part in self.parts}) > 1:
            raise InputError(f"the {self.role}s of a union must share one dtype and device")

    @staticmethod
    def leaves(
        prefix: str, registry: Mapping[str, type[AnyPart]], kinds: Mapping[str, str]
    ) -> list[tuple[str, type[AnyPart]]]:
        """Return the prefix of the tensors in a model file, and the class, of a kind or of the parts of a union."""
        kind = kinds.get(f"{prefix}kind")
        if kind == UnionTables.kind:
            parts = [f"{prefix}{i}." for i in takewhile(lambda i: f"{prefix}{i}.kind" in kinds, count())]
            if not parts or any(kinds[f"{part}kind"] == kind for part in parts):
                raise InputError(f"{prefix}kind is {kind!r}: it needs the kinds of its components, {prefix}0.kind, …")
            return [leaf for part in parts for leaf in UnionTables.leaves(part, registry, kinds)]
        if kind is None or kind not in registry:
            raise InputError(f"{prefix}kind is {kind!r:.40}; this hmmlm reads {', '.join(registry)}")
        return [(prefix, registry[kind])]

    @classmethod
    def read(
        cls,
        prefix: str,
        registry: Mapping[str, type[AnyPart]],
        kinds: Mapping[str, str],
        tensors: Mapping[str, Tensor],
        sizes: Sequence[int] | None = None,
    ) -> Any:
        """Return a kind, or a union of several, from the tensors of a model file.

        Args:
            sizes: the states of each part, where they do not follow from its tensors.
        """
        leaves = cls.leaves(prefix, registry, kinds)
        known = [0] * len(leaves) if sizes is None else sizes
        if len(leaves) != len(known):
            raise InputError(f"{len(leaves)} components with {prefix}kind, {len(known)} with the other kind")
        found = [
            leaf.from_tensors({name: tensors[inner + name] for name in leaf.TENSORS}, size)
            for (inner, leaf), size in zip(leaves, known, strict=True)
        ]
        return cls(found) if kinds[f"{prefix}kind"] == cls.kind else found[0]

    @property
    def num_states(self) -> int:
        return sum(self.sizes)

    @property
    def num_parameters(self) -> int:
        return sum(part.num_parameters for part in self.parts)

    def tensors(self) -> dict[str, Tensor]:
        return {f"{i}.{name}": value for i, part in enumerate(self.parts) for name, value in part.tensors().items()}

    def kinds(self) -> dict[str, str]:
        inner = {f"{i}.{name}": kind for i, part in enumerate(self.parts) for name, kind in part.kinds().items()}
        return {"kind": self.kind, **inner}

    def replace(self: Self, tensors: Mapping[str, Tensor]) -> Self:
        assert isinstance(self, UnionTables)
        given = self.tensors() | dict(tensors)
        own = [{name: given[f"{i}.{name}"] for name in part.tensors()} for i, part in enumerate(self.parts)]
        return type(self)([part.replace(each) for part, each in zip(self.parts, own, strict=True)])

    def detach(self: Self) -> Self:
        assert isinstance(self, UnionTables)
        return type(self)([part.detach() for part in self.parts]) if self.requires_grad else self

    def validate(self) -> None:
        for i, part in enumerate(self.parts):
            try:
                part.validate()
            except InputError as error:
                raise InputError(f"component {i}: {error}") from None

    def maximize(self: Self, counts: dict[str, Tensor], pseudocount: float = 0.0) -> Self:
        raise InputError(f"the {self.role} of a union has no closed M step: train it by gradients")

    def split(self, values: Tensor | None, support: Support) -> Iterator[tuple[AnyPart, Any, Support]]:
        """Yield each part with its share of values [n, K] over a support, and its support."""
        supports = support.parts if isinstance(support, UnionSupport) else (None,) * len(self.parts)
        widths = support.widths if isinstance(support, UnionSupport) else self.sizes
        shares = [None] * len(self.parts) if values is None else values.split(widths, 1)
        yield from zip(self.parts, shares, supports, strict=True)

    def _locate(self, states: Tensor) -> Iterator[tuple[AnyPart, Tensor, Tensor]]:
        """Yield each part with a mask of the states that are its own, and their numbers in it (0 for others)."""
        for part, span in zip(self.parts, spans(self.sizes), strict=True):
            inside = (states >= span.start) & (states < span.stop)
            yield part, inside, torch.where(inside, states - span.start, 0)
