"""Networks on state embeddings.

Those of Chiu & Rush 2020, and the MLPs and transformers of Lee & Berg-Kirkpatrick 2025.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from hmmlm.errors import InputError
from hmmlm.ops.residual_norm import residual_norm

Skip = Literal["none", "activation", "layer"]
HEAD = 64  # smallest size of an attention head, where the number of heads is not given


class Residual(nn.Module):
    """LN(ReLU(D W2) + D) with D = ReLU(E W1), both linears with bias: the network of Chiu & Rush 2020."""

    def __init__(self, hidden: int, dropout: float = 0.0, inputs: int = 1) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(inputs * hidden, hidden), nn.Linear(hidden, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.dropout = dropout

    def forward(self, embedding: Tensor) -> Tensor:
        first, second, norm = self.first, self.second, self.norm
        return residual_norm(
            embedding,
            first.weight,
            first.bias,
            second.weight,
            second.bias,
            norm.weight,
            norm.bias,
            eps=norm.eps,
            dropout=self.dropout if self.training else 0.0,
        )


class _DistinctRows(torch.autograd.Function):
    """Rows of a table, none of them twice: their gradients are copied, which takes half the time of adding them."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.shape = table.shape
        return table.index_select(0, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (rows,) = ctx.saved_tensors
        return grad.new_zeros(ctx.shape).index_copy_(0, rows, grad), None


def distinct_rows(table: Tensor, rows: Tensor) -> Tensor:
    """Return rows [n], which are all different, of a table [m, h]."""
    result: Tensor = _DistinctRows.apply(table, rows)
    return result


def initialize_linears_(module: nn.Module, kaiming: bool, generator: torch.Generator | None) -> None:
    """Initialize every linear layer of a module: Kaiming-uniform with zero biases, or PyTorch's own U(±1/√fan_in)."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            bound = layer.in_features**-0.5 * (6**0.5 if kaiming else 1.0)
            nn.init.uniform_(layer.weight, -bound, bound, generator=generator)
            if layer.bias is not None:
                bound = 0.0 if kaiming else bound
                nn.init.uniform_(layer.bias, -bound, bound, generator=generator)


@dataclass(frozen=True)
class MlpForm:
    """One point of the grid of Lee & Berg-Kirkpatrick 2025, Table 3."""

    layers: int = 2
    """Linear layers, of the width of the embeddings, with biases."""
    skip: Skip = "activation"
    """Added to the output of every layer but the first: nothing, the input of its ReLU, or its own input."""
    relu: bool = True
    """A ReLU after every linear layer."""
    norm: bool = True
    """A LayerNorm after every layer but the first (after the only one, if there is one)."""

    def __post_init__(self) -> None:
        if self.skip != "none" and self.layers == 1:
            raise InputError(f"skip = {self.skip!r} needs a second layer, and layers is 1: set skip to 'none'")
        if self.skip == "activation" and not self.relu:
            raise InputError("skip = 'activation' skips the ReLU, and relu is false: set skip to 'none'")


class Mlp(nn.Module):
    """[..., h] → [..., h]."""

    def __init__(self, hidden: int, form: MlpForm) -> None:
        super().__init__()
        self.form = form
        self.linears = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(form.layers))
        normed = max(1, form.layers - 1) if form.norm else 0
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(normed))

    @property
    def gain(self) -> nn.Parameter | None:
        """Return the gain of the last norm, which scales the output; None without a norm."""
        return self.norms[-1].weight if len(self.norms) else None  # type: ignore[return-value]

    def forward(self, embedding: Tensor) -> Tensor:
        form, before = self.form, embedding
        first_normed = form.layers - len(self.norms)
        for i, linear in enumerate(self.linears):
            inner = linear(before)
            after = inner.relu() if form.relu else inner
            if i and form.skip != "none":
                after = after + (inner if form.skip == "activation" else before)
            before = self.norms[i - first_normed](after) if form.norm and i >= first_normed else after
        return before


class TransformerBlock(nn.Module):
    """Attention among the states, then an MLP of four times the width, each with a residual connection (pre-LN)."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))
        self.queries_keys_values = nn.Linear(hidden, 3 * hidden, bias=False)
        self.attended = nn.Linear(hidden, hidden, bias=False)
        self.up, self.down = nn.Linear(hidden, 4 * hidden, bias=False), nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        three = self.queries_keys_values(self.norms[0](states)).unflatten(-1, (3, self.heads, -1))
        queries, keys, values = three.movedim(-3, 0).transpose(-3, -2)  # [..., heads, n, h / heads] each
        mixed = functional.scaled_dot_product_attention(queries, keys, values)
        states = states + self.attended(mixed.transpose(-3, -2).flatten(-2))
        result: Tensor = states + self.down(functional.gelu(self.up(self.norms[1](states))))
        return result


class Transformer(nn.Module):
    """[..., n, h] → [..., n, h] over the n states as one sequence.

    There are no position embeddings: a permutation of the states permutes the outputs.
    """

    def __init__(self, hidden: int, layers: int = 2, heads: int | None = None) -> None:
        super().__init__()
        heads = heads or default_heads(hidden)
        if hidden % heads:
            raise InputError(
                f"a transformer of width {hidden} cannot have {heads} heads: the width must be a multiple of them"
            )
        self.blocks = nn.Sequential(*(TransformerBlock(hidden, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(hidden)

    @property
    def gain(self) -> nn.Parameter:
        return self.norm.weight

    @torch.no_grad()
    def shrink_residuals_(self) -> None:
        """Divide the initial outputs of the blocks by √(2·layers), so that depth does not drown the embeddings."""
        for block in self.blocks:
            assert isinstance(block, TransformerBlock)
            for linear in (block.attended, block.down):
                linear.weight /= (2 * len(self.blocks)) ** 0.5

    def forward(self, embedding: Tensor) -> Tensor:
        result: Tensor = self.norm(self.blocks(embedding))
        return result


def default_heads(hidden: int) -> int:
    """Return the largest number of heads that divides the width with at least 64 dimensions each; one below 128."""
    return next((heads for heads in range(hidden // HEAD, 1, -1) if hidden % heads == 0), 1)
