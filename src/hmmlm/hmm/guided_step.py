"""One token of several texts under constraints, on a GPU: a dozen kernels, recorded once as a CUDA graph.

A call for one token is a hundred small operations otherwise, and launching them takes ten times longer than they run.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from hmmlm.hmm.logmatrix import least_sum
from hmmlm.ops.graph import record

if TYPE_CHECKING:
    from hmmlm.hmm.dense import HMM

KINDS = (torch.float32, torch.bfloat16, torch.float16)
"""Types of scores."""
MOST_PLACES = 8  # automaton states that many tokens of a row lead to
_ALONE = (
    0,
    64,
    512,
    4096,
)  # tokens of a call that are scored alone, at most: few sizes, so that few graphs are recorded
_GRAPHS = 16  # kept, by shape
_WORDS = 1024  # tokens of a program


class Plan(NamedTuple):
    """The rows of a table of the recursion that score the tokens which may follow an automaton state."""

    group_of: Tensor  # [V] int16: the index in `places` of each token
    places: list[int]  # rows; −1: not accepted any more
    alone: list[tuple[int, int]]  # the tokens that are scored alone, and their rows


class StepRow(NamedTuple):
    """A row of a call."""

    log_state: Tensor  # [Z]
    token: int  # read first; −1: none
    plan: Plan | None  # None: no token is constrained any more
    table: Tensor | None  # [rows, Z] of the plan


class StepResult(NamedTuple):
    """Steered scores."""

    scores: Tensor  # [B, V] log-probabilities
    log_states: Tensor  # [B, Z] log p(z of the next token | tokens so far)
    changed: int  # rows whose most likely token became another


class GuidedSteps:
    """Steps of one HMM in float32. Those of one shape share a CUDA graph."""

    def __init__(self, hmm: HMM) -> None:
        self.hmm = hmm
        self._graphs: OrderedDict[tuple[object, ...], _Step] = OrderedDict()
        self._lock = Lock()  # buffers are shared by all threads that steer with this model

    def __getstate__(self) -> HMM:
        return self.hmm  # a copy of the model records graphs of its own

    def __setstate__(self, hmm: HMM) -> None:
        self.__init__(hmm)  # type: ignore[misc]

    def run(self, rows: Sequence[StepRow], scores: Tensor, weight: float) -> StepResult | None:
        """Return steered scores for scores [B, V]; None if the kernels do not serve.

        They do not where underflow may have changed a sum, or a text is impossible. Either all rows read a token, or
        none; those without a plan need not.
        """
        plans = [row.plan for row in rows if row.plan is not None]
        places, alone = max(len(plan.places) for plan in plans), sum(len(plan.alone) for plan in plans)
        if places > MOST_PLACES or alone > _ALONE[-1] or scores.dtype not in KINDS:
            return None
        first = all(row.token < 0 for row in rows)
        places, alone = _power_of_2(max(1, places)), next(size for size in _ALONE if size >= alone)
        key = (len(rows), scores.shape[1], scores.dtype, places, alone, first, weight)
        with self._lock:
            step = self._graphs.pop(key, None)
            if step is None:
                step = _Step(self.hmm, scores, places, alone, first, weight)
            self._graphs[key] = step
            if len(self._graphs) > _GRAPHS:
                self._graphs.popitem(last=False)
            return step.run(rows, scores.contiguous())


def _power_of_2(least: int) -> int:
    return 1 << (least - 1).bit_length()


class _Step:
    """Buffers and graph of one shape."""

    def __init__(self, hmm: HMM, scores: Tensor, places: int, alone: int, first: bool, weight: float) -> None:
        from hmmlm.ops import guided_kernels  # needs Triton

        self.kernels = guided_kernels
        self.hmm, self.places, self.alone, self.first, self.weight = hmm, places, alone, first, weight
        (count, self.width), device, states = scores.shape, hmm.device, hmm.states
        self.count, self.kind = count, guided_kernels.kind_of(scores.dtype)
        self.begin = guided_kernels.HEADER + count * (guided_kernels.OF_ROW + places)
        self.host = torch.zeros(self.begin + alone * guided_kernels.OF_TOKEN, dtype=torch.int64)
        if device.type == "cuda":
            self.host = self.host.pin_memory()
        self.numbers = self.host.numpy()
        self.packet = torch.empty_like(self.host, device=device)
        self.probs, self.moved = torch.empty(2, count, states, device=device)
        self.weights = torch.empty(count * (1 + places), states, device=device)
        self.matrix, self.column_of = hmm.emissions.columns
        self.sums = torch.empty(len(self.weights), self.matrix.shape[1], device=device)
        self.tops = torch.empty(len(self.weights), device=device)
        self.steered = torch.empty(count, self.width, device=device)
        self.found = torch.zeros(2, dtype=torch.int32, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.runs = 0

    def run(self, rows: Sequence[StepRow], scores: Tensor) -> StepResult | None:
        """Run the kernels for rows and scores [B, V]."""
        out, log_states = torch.empty_like(scores), torch.empty(self.count, self.hmm.states, device=scores.device)
        self.fill(rows, (scores, out, log_states))
        self.packet.copy_(self.host, non_blocking=True)
        if self.graph is None and self.runs and scores.is_cuda:  # the first run has compiled the kernels
            self.graph, _ = record(self.launch, "thread_local")  # other threads may go on
        self.runs += 1
        if self.graph is None:
            self.launch()
        else:
            self.graph.replay()
        doubtful, changed = self.found.tolist()
        return None if doubtful else StepResult(out, log_states, changed)

    def fill(self, rows: Sequence[StepRow], tensors: Sequence[Tensor]) -> None:
        """Write the packet (see `ops.guided_kernels`)."""
        numbers = [tensor.data_ptr() for tensor in tensors]
        alone: list[int] = []
        stride, nothing = self.hmm.states * 4, [0] * (1 + self.places)
        known: dict[tuple[int, int], tuple[int, list[int]]] = {}  # most rows have the plan and the table of others
        for number, (log_state, token, plan, table) in enumerate(rows):
            numbers += (log_state.data_ptr(), token)
            if plan is None or table is None:
                numbers += nothing
                continue
            found = known.get((id(plan), id(table)))
            if found is None:
                begin = table.data_ptr()
                places = [begin + stride * place if place >= 0 else 0 for place in plan.places]
                found = begin, [plan.group_of.data_ptr(), *places, *nothing[1 + len(places) :]]
                known[id(plan), id(table)] = found
            numbers += found[1]
            for word, place in plan.alone:
                alone += (number, word, found[0] + stride * place)
        numbers += alone
        self.numbers[: len(numbers)] = numbers
        self.numbers[len(numbers) :] = -1  # no row: no token

    def launch(self) -> None:
        """Launch the kernels."""
        kernels, hmm, packet, found = self.kernels, self.hmm, self.packet, self.found
        states, words, columns = hmm.states, hmm.vocab_size, self.matrix.shape[1]
        least, forward = least_sum(states, torch.float32), hmm.forward_product
        block = min(4096, _power_of_2(states))
        found.zero_()
        if not self.first:
            kernels.read_kernel[(self.count,)](
                packet, hmm.log_emission, self.probs, found, states, words, PLACES=self.places, BLOCK=block
            )
            torch.mm(self.probs, forward.scaled, out=self.moved)
        kernels.weigh_kernel[(self.count, 1 + self.places)](
            packet,
            self.moved,
            forward.peak,
            self.weights,
            self.tops,
            found,
            states,
            least,
            PLACES=self.places,
            FIRST=self.first,
            BLOCK=block,
        )
        torch.mm(self.weights, self.matrix, out=self.sums)
        kernels.combine_kernel[(self.count, -(-self.width // _WORDS))](
            packet,
            self.sums,
            self.tops,
            packet if self.column_of is None else self.column_of,
            self.steered,
            found,
            words,
            columns,
            self.width,
            least,
            self.weight,
            KIND=self.kind,
            SHARED=self.column_of is not None,
            PLACES=self.places,
            BLOCK=_WORDS,
        )
        if self.alone:
            kernels.alone_kernel[(self.alone,)](
                packet,
                self.begin,
                hmm.log_emission,
                self.steered,
                states,
                words,
                self.width,
                self.weight,
                KIND=self.kind,
                BLOCK=block,
            )
        kernels.finish_kernel[(self.count,)](
            packet, self.steered, found, self.width, KIND=self.kind, PLACES=self.places, BLOCK=4096, num_warps=8
        )
