"""Likelihoods of batches under one dense HMM on a GPU, replayed from CUDA graphs where a shape recurs.

A step of the filter is two kernels, and launching them from Python takes several times longer than they run.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from hmmlm.ops.common import Carry, Impl, Scan, product_dtype
from hmmlm.ops.graph import record
from hmmlm.ops.pieces import fits
from hmmlm.ops.scan import Evidence, Parameters
from hmmlm.ops.scan.fixed import FixedModel, filter_fixed, prepare, serves

EAGER = 8  # batches of a shape before it is recorded, which takes as long as several of them
_SHAPES = 4  # whose graphs are kept
_CELLS = 2**26  # largest [T, B, Z] of a graph, which keeps 400 MB then
_EMISSIONS = 2**28  # largest [Z, V], of which a copy by word is kept: 1 GB
_PRODUCT = 2**34  # largest B·Z²: the products of larger steps take longer than their launches
_TRIALS = 4  # replays that may turn out suspect before the share of these matters


class RecordedScans:
    """The graphs of one model, which is given with each batch: a reference to it would be a cycle, freed late."""

    _of_models: ClassVar[WeakKeyDictionary[object, RecordedScans]] = WeakKeyDictionary()

    @classmethod
    def of(cls, hmm: object) -> RecordedScans:
        """Return the graphs of a model, which live as long as it."""
        if hmm not in cls._of_models:
            cls._of_models[hmm] = cls()
        return cls._of_models[hmm]

    def __init__(self) -> None:
        self._model: tuple[object, ...] = ()
        self._fixed: dict[torch.dtype, FixedModel | None] = {}  # by the dtype of products
        self._shapes: OrderedDict[tuple[object, ...], _Replay] = OrderedDict()
        self._lock = Lock()  # buffers are shared by all threads that use this model

    def run(self, parameters: Parameters, evidence: Evidence, impl: Impl, exact_carry: bool = False) -> Scan | None:
        """Return the likelihood of a batch and the carry; None if `scan` has to compute them.

        That is so for the first batches of a shape, for problems that the kernels do not support, and where underflow
        may have changed a sequence.
        """
        (batch, steps), states = evidence.tokens.shape, len(parameters.log_start)
        cells, emissions = batch * steps * states, parameters.log_emission.numel()
        if not (fits(cells, _CELLS) and fits(emissions, _EMISSIONS)) or batch * states**2 > _PRODUCT:
            return None
        products = product_dtype(parameters.log_start)
        if not serves(parameters, evidence, products, impl) or any(p.is_inference() for p in parameters):
            return None
        given = tuple(None if value is None else (value.shape, value.dtype) for value in evidence)
        with self._lock:
            model = tuple((p.data_ptr(), p._version) for p in parameters)
            if model != self._model:  # changed in place
                self._model = model
                self._fixed.clear()
                self._shapes.clear()
            shape = self._shapes.pop((given, products), None) or _Replay()
            self._shapes[given, products] = shape
            if len(self._shapes) > _SHAPES:
                self._shapes.popitem(last=False)
            return shape.run(lambda: self._fix(parameters, products), evidence, exact_carry)

    def _fix(self, parameters: Parameters, products: torch.dtype) -> FixedModel | None:
        """Return the model prepared for the filter, once for all shapes; None if nothing can be recorded."""
        if products not in self._fixed:
            try:
                self._fixed[products] = prepare(parameters, products)
            except torch.OutOfMemoryError:  # `scan` needs no copy of the emissions
                self._fixed[products] = None
        return self._fixed[products]


class _Replay:
    """Buffers and graph of the batches of one shape."""

    def __init__(self) -> None:
        self.graph: torch.cuda.CUDAGraph | None = None
        self.runs, self.replays, self.suspect = 0, 0, 0

    def run(self, get_model: Callable[[], FixedModel | None], evidence: Evidence, exact_carry: bool) -> Scan | None:
        """Replay the graph; None if there is none yet, or it did not serve."""
        self.runs += 1
        if self.runs <= EAGER or 2 * self.suspect > self.replays + _TRIALS:
            return None
        if self.graph is None:
            self.record(get_model, evidence)
        if self.graph is None:
            return None
        for own, value in zip(self.evidence, evidence, strict=True):
            if own is not None and value is not None:
                own.copy_(value, non_blocking=True)
        self.graph.replay()
        self.replays += 1
        log_likelihood, carry = self.result.log_likelihood.clone(), self.result.carry.clone()
        suspect = self.result.suspect | self.result.suspect_carry if exact_carry else self.result.suspect
        if not bool(suspect):  # waits: nothing else may write to the buffers before
            return Scan(log_likelihood, Carry(carry))
        self.suspect += 1
        return None

    @torch.inference_mode(False)  # the buffers outlive it
    @torch.no_grad()
    def record(self, get_model: Callable[[], FixedModel | None], evidence: Evidence) -> None:
        """Record the filter, unless nothing can be recorded."""
        model = get_model()
        if model is None:
            self.suspect = _TRIALS  # do not try again
            return
        tokens, _, carry, restart, _ = evidence
        carry, restart = (None if value is None else _copy(value) for value in (carry, restart))
        self.evidence = Evidence(_copy(tokens), None, carry, restart)
        filter_fixed(model, self.evidence)  # compiles the kernels for these buffers
        self.graph, self.result = record(lambda: filter_fixed(model, self.evidence), "thread_local")


def _copy(value: Tensor) -> Tensor:
    """Return a contiguous copy."""
    return value.clone(memory_format=torch.contiguous_format)
