"""One token of several texts under constraints, on a GPU: a dozen kernels, recorded once as a CUDA graph.

A call for one token is a hundred small operations otherwise, and launching them takes ten times longer than they run.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import ClassVar, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from hmmlm.constrain.guided import Steered, StepRows, Targets, has_kernels
from hmmlm.emissions import Categorical
from hmmlm.hmm.hmm import HMM
from hmmlm.ops.graph import record
from hmmlm.ops.underflow import least_sum
from hmmlm.transitions import Dense

KINDS = (torch.float32, torch.bfloat16, torch.float16)
"""Types of scores."""
MOST_PLACES = 8  # automaton states that many tokens of a row lead to
_MOST_ALONE = 4096  # tokens of a call that are scored alone
_PROGRAMS = (0, 8, 64, 512)  # of a row that score these: few sizes, so that few graphs are recorded
_GRAPHS = 64  # kept, by shape
_WORDS = 1024  # tokens of a program
_MOST_ROWS = 32  # of a product by `product_kernel`; more by the library, whose products need many
_SMALL = 512  # states, for which the library is faster with two rows
# Blocks of that kernel, by rows of a tile. Few columns are divided further, into parts of the states.
_MOVE = {rows: {"BLOCK_N": 64, "BLOCK_K": 64, "num_warps": 4, "num_stages": 4} for rows in (16, 32)}
_MOVE_PROGRAMS = 256
_EMIT = {
    16: {"BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 4, "num_stages": 3},
    32: {"BLOCK_N": 128, "BLOCK_K": 32, "num_warps": 4, "num_stages": 4},
}


class PackedTargets(NamedTuple):
    """Targets for the kernels."""

    rows: int  # for many tokens, rounded up to a power of 2
    alone: int  # tokens that are scored alone
    programs: int  # that score these
    numbers: Tensor  # see `guided_kernels`
    addresses: tuple[int, int]  # of number_of and numbers


def pack(targets: Targets) -> PackedTargets:
    """Return targets for the kernels, which keep them."""
    if targets.packed is None:
        alone = torch.stack([targets.tokens, targets.token_rows], 1).flatten().tolist()
        filled = [*targets.rows, *[-1] * MOST_PLACES][:MOST_PLACES]
        count = len(targets.tokens)
        numbers = torch.tensor([count, *filled, *alone], device=targets.tokens.device)
        programs = next((size for size in _PROGRAMS if size >= count), _PROGRAMS[-1])
        addresses = targets.number_of.data_ptr(), numbers.data_ptr()
        targets.packed = PackedTargets(_power_of_2(max(1, len(targets.rows))), count, programs, numbers, addresses)
    return targets.packed  # type: ignore[no-any-return]


class GuidedSteps:
    """Steps of one HMM in float32. Those of one shape share a CUDA graph."""

    _of_models: ClassVar[WeakKeyDictionary[HMM, GuidedSteps]] = WeakKeyDictionary()

    def __init__(self, transition: Dense, emission: Categorical) -> None:
        self.transition, self.emission = transition, emission
        self._graphs: OrderedDict[_Shape, _Step] = OrderedDict()
        self._lock = Lock()  # buffers are shared by all threads that steer with this model

    @classmethod
    def of(cls, hmm: HMM) -> GuidedSteps | None:
        """Return the steps of a model, always the same; None if the kernels do not serve it."""
        if has_kernels(hmm) and hmm not in cls._of_models:
            cls._of_models[hmm] = cls(hmm.transition, hmm.emission)  # type: ignore[arg-type]
        return cls._of_models.get(hmm)

    def run(self, rows: StepRows, scores: Tensor, weight: float) -> Steered | None:
        """Return steered scores for scores [B, V]; None if the kernels do not serve.

        They do not where underflow may have changed a sum, or a text is impossible. Some row must have a plan; the
        resulting states of those without are not to be used.
        """
        places = alone = programs = 0
        for plan in rows.plans:
            if plan is not None:
                packed = pack(plan.targets)
                places, programs = max(places, packed.rows), max(programs, packed.programs)
                alone += packed.alone
        if places > MOST_PLACES or alone > _MOST_ALONE or scores.dtype not in KINDS:
            return None
        count, width = scores.shape
        shape = _Shape(count, width, scores.dtype, places, programs, rows.tokens is None, weight)
        with self._lock:
            step = self._graphs.pop(shape, None)
            if step is None:
                step = _Step(self.transition, self.emission, shape)
            self._graphs[shape] = step
            if len(self._graphs) > _GRAPHS:
                self._graphs.popitem(last=False)
            return step.run(rows, scores.contiguous())


def _power_of_2(least: int) -> int:
    return 1 << (least - 1).bit_length()


class _Shape(NamedTuple):
    """What a graph is recorded for."""

    rows: int
    width: int  # of the scores
    dtype: torch.dtype
    places: int  # of each row
    programs: int  # that score the tokens of a row which are scored alone
    first: bool  # no row reads a token
    weight: float


class _Step:
    """Buffers and graph of one shape."""

    def __init__(self, transition: Dense, emission: Categorical, shape: _Shape) -> None:
        from hmmlm.constrain import guided_kernels  # needs Triton

        self.kernels, self.shape = guided_kernels, shape
        self.transition, self.emission = transition, emission
        self.kind = guided_kernels.kind_of(shape.dtype)
        (rows, width), device, states = shape[:2], transition.device, transition.num_states
        self.written = torch.zeros(guided_kernels.HEADER + rows * guided_kernels.OF_ROW, dtype=torch.int64)
        self.found = torch.zeros(1 + rows, dtype=torch.int32)
        if device.type == "cuda":
            self.written, self.found = self.written.pin_memory(), self.found.pin_memory()
        self.numbers, self.reports = self.written.numpy(), self.found.numpy()
        self.packet = torch.empty_like(self.written, device=device)
        self.probs = torch.empty(rows, states, device=device)
        blocks = -(-states // _MOVE[16]["BLOCK_N"])
        self.parts = max(1, min(_MOVE_PROGRAMS // blocks, blocks)) if _has_blocks(rows, states) else 1
        self.moved = torch.empty(self.parts, rows, states, device=device)
        self.weights = torch.empty(rows * (1 + shape.places), states, device=device)
        self.matrix, self.column_of = emission.matrix.matrix.scaled, emission.column_of_word
        self.sums = torch.empty(len(self.weights), self.matrix.shape[1], device=device)
        self.tops = torch.empty(len(self.weights), device=device)
        self.steered = torch.empty(rows, width, device=device)
        self.blocks = -(-width // _WORDS)
        self.summaries = torch.empty(rows, self.blocks + shape.programs, 4, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.runs = 0

    def run(self, rows: StepRows, scores: Tensor) -> Steered | None:
        """Run the kernels for rows and scores [B, V]."""
        out, log_states = torch.empty_like(scores), torch.empty_like(self.probs)
        log_masses = self.probs.new_empty(self.shape.rows)
        self.numbers[:] = packet_of(rows, (scores, out, log_states, log_masses))
        self.reports[:] = 0
        if self.graph is None and self.runs and scores.is_cuda:  # the first run has compiled the kernels
            self.graph, _ = record(self.launch, "thread_local")  # other threads may go on
        self.runs += 1
        if self.graph is None:
            self.launch()
        else:
            self.graph.replay()
        if scores.is_cuda:
            torch.accelerator.current_stream(scores.device.index).synchronize()
        suspect, *changed = self.reports.tolist()
        return None if suspect else Steered(out, log_states, sum(changed), log_masses)

    def launch(self) -> None:
        """Launch the kernels."""
        kernels, packet, found = self.kernels, self.packet, self.found
        count, width, _, places, programs, first, weight = self.shape
        log_emission, forward = self.emission.log_probs, self.transition.matrix()
        (states, words), columns = log_emission.shape, self.matrix.shape[1]
        least = least_sum(states, torch.float32)
        block = min(4096, _power_of_2(states))
        kernels.read_kernel[(count,)](
            self.written, packet, log_emission, self.probs, found, states, words, FIRST=first, BLOCK=block
        )
        if not first:
            self.multiply(self.probs, forward.scaled, self.moved, _MOVE)
        kernels.weigh_kernel[(count, 1 + places)](
            packet,
            self.moved,
            forward.peak,
            self.weights,
            self.tops,
            found,
            states,
            least,
            FIRST=first,
            PARTS=self.parts,
            BLOCK=block,
        )
        self.multiply(self.weights, self.matrix, self.sums[None], _EMIT)
        entries = self.summaries.shape[1]
        kernels.combine_kernel[(count, self.blocks)](
            packet,
            self.sums,
            self.tops,
            packet if self.column_of is None else self.column_of,
            self.steered,
            self.summaries,
            found,
            words,
            columns,
            width,
            least,
            weight,
            places,
            entries,
            KIND=self.kind,
            SHARED=self.column_of is not None,
            BLOCK=_WORDS,
        )
        if programs:
            kernels.alone_kernel[(count, programs)](
                packet,
                log_emission,
                self.steered,
                self.summaries,
                states,
                words,
                width,
                weight,
                entries,
                KIND=self.kind,
                MOST_PLACES=MOST_PLACES,
                BLOCK=block,
            )
        kernels.finish_kernel[(count, self.blocks)](
            packet,
            self.steered,
            self.summaries,
            found,
            width,
            ENTRIES=entries,
            ENTRIES_WIDTH=_power_of_2(entries),
            KIND=self.kind,
            BLOCK=_WORDS,
        )

    def multiply(self, rows: Tensor, matrix: Tensor, out: Tensor, blocks: dict[int, dict[str, int]]) -> None:
        """Launch the product of rows [n, Z] and a matrix [Z, columns], of parts of the states: out [parts, n, columns].

        Args:
            blocks: by the rows of a tile.
        """
        parts, count, columns = out.shape
        if not _has_blocks(count, len(matrix)):
            torch.mm(rows, matrix, out=out[0])
        else:
            tile = 16 if count <= 16 else 32
            chosen = blocks[tile]
            self.kernels.product_kernel[(-(-columns // chosen["BLOCK_N"]), parts)](
                rows, matrix, out, count, len(matrix), columns, BLOCK_M=tile, **chosen
            )


def _has_blocks(rows: int, states: int) -> bool:
    """Return whether `product_kernel` multiplies this number of rows."""
    return rows <= _MOST_ROWS and (rows > 2 or states > _SMALL)


def packet_of(rows: StepRows, tensors: Sequence[Tensor]) -> list[int]:
    """Return the packet (see `guided_kernels`) of rows; `tensors`: scores, results, log-states and masses."""
    numbers = [tensor.data_ptr() for tensor in tensors]
    log_states, of_row, tokens, plans = rows
    begin, stride = log_states.data_ptr(), log_states.stride(0) * log_states.element_size()
    for number, token, plan in zip(of_row, tokens or [-1] * len(plans), plans, strict=True):
        if plan is None:
            numbers += (begin + stride * number, -1, 0, 0, 0)
        else:
            number_of, targets = pack(plan.targets).addresses
            numbers += (begin + stride * number, token, number_of, plan.table.data_ptr(), targets)
    return numbers
