"""The networks that turn state embeddings into what leaves, enters and emits."""

import torch
from torch import Tensor, nn

from hmmlm.ops.residual_norm import residual_norm


class Residual(nn.Module):
    """LN(ReLU(D W2) + D) with D = ReLU(E W1), both linears with bias: the network of Chiu & Rush 2020."""

    def __init__(self, hidden: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.dropout = dropout

    def forward(self, embedding: Tensor) -> Tensor:
        first, second, norm = self.first, self.second, self.norm
        return residual_norm(
            embedding, first.weight, first.bias, second.weight, second.bias, norm.weight, norm.bias, eps=norm.eps,
            dropout=self.dropout if self.training else 0.0,
        )  # fmt: skip


def initialise_linears_(module: nn.Module, kaiming: bool, generator: torch.Generator | None) -> None:
    """Draw every linear of a module again: Kaiming-uniform with zero biases, or the framework's own U(±1/√fan_in)."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            bound = layer.in_features**-0.5 * (6**0.5 if kaiming else 1.0)
            nn.init.uniform_(layer.weight, -bound, bound, generator=generator)
            if layer.bias is not None:
                bound = 0.0 if kaiming else bound
                nn.init.uniform_(layer.bias, -bound, bound, generator=generator)
