"""The networks that turn state embeddings into what leaves, enters and emits."""

import torch
from torch import Tensor, nn
from torch.nn import functional


class Residual(nn.Module):
    """LN(ReLU(D W2) + D) with D = ReLU(E W1), both linears with bias: the network of Chiu & Rush 2020."""

    def __init__(self, hidden: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.dropout = dropout

    def forward(self, embedding: Tensor) -> Tensor:
        inner = functional.dropout(self.first(embedding).relu(), self.dropout, self.training)
        normed: Tensor = self.norm(self.second(inner).relu() + inner)
        return normed


def initialise_linears_(module: nn.Module, kaiming: bool, generator: torch.Generator | None) -> None:
    """Draw every linear of a module again: Kaiming-uniform with zero biases, or the framework's own U(±1/√fan_in)."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            bound = layer.in_features**-0.5 * (6**0.5 if kaiming else 1.0)
            nn.init.uniform_(layer.weight, -bound, bound, generator=generator)
            if layer.bias is not None:
                bound = 0.0 if kaiming else bound
                nn.init.uniform_(layer.bias, -bound, bound, generator=generator)
