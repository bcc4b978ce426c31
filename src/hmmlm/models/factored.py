"""The reparameterizations of Lee & Berg-Kirkpatrick 2025: linear, MLP and transformer; dense, or with Brown blocks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from hmmlm.errors import InputError
from hmmlm.hmm import HMM
from hmmlm.models.base import FactoredBlockedModel, Model
from hmmlm.models.config import FactorScale
from hmmlm.models.networks import Mlp, Transformer, initialize_linears_
from hmmlm.ops.blocked_emission import blocked_emission
from hmmlm.ops.blocked_scan import Factors
from hmmlm.ops.common import factor_logits
from hmmlm.ops.linear_logsumexp import linear_logsumexp
from hmmlm.structure.blocks import Blocks

Network = Mlp | Transformer


class Factored(Model):
    """Logits a = H_in H_outᵀ [Z, Z], b = H_emit Vᵀ [Z, W] and π = H_in s [Z]; a softmax over each row.

    Rows of a are the states that are left: H_in is their side, H_out that of the states entered.

    H comes from tables of state embeddings E [Z, h]: one table for all roles, or with `split` one per role.
    `make_network` creates the network between E and H: None for the linear forms (H = E: ablation A with one table,
    whose a is symmetric, ablation B with split ones); otherwise one network per role (ψ), or with `mono` one in all
    (ι). A single network on a single table gives every role the same H, so then each role has a linear head of its own.

    `start`, `transition`, `emission`: whether each is factored; the others are free logits from N(0, scale²), as in the
    scalar model.

    `init` sets the initial scale. "unit": logits of variance 1 whatever the form: V, s and H have entries of mean
    square h^-1/2. Without a network that is E from N(0, h^-1/2); networks without a norm are homogeneous in E (their
    biases are zero, their weights Kaiming-uniform), so E is scaled, and where a norm comes last, its gain is. (The
    diagonal of ablation A's a is then about √h: its states tend to stay.) "normal", as in the released code: all tables
    from N(0, 1), linear layers with PyTorch's initialization; logits then have a variance of about h.
    """

    def __init__(
        self,
        states: int,
        vocab_size: int,
        hidden: int,
        *,
        make_network: Callable[[], Network] | None = None,
        split: bool = True,
        mono: bool = False,
        start: bool = True,
        transition: bool = True,
        emission: bool = True,
        init: FactorScale = "unit",
        scale: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(states, vocab_size)
        if mono and make_network is None:
            raise InputError("mono needs a network, and the linear model has none: set mono to false")
        needed = {"in": start or transition, "out": transition, "emit": emission}
        self.roles = roles = tuple(role for role, wanted in needed.items() if wanted)
        self.is_factored = {"start": start, "transition": transition, "emission": emission}
        unit = hidden**-0.25

        def logits(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator) * scale)

        def factor(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator) * (unit if init == "unit" else 1.0))

        # Each of these is the logits themselves, or what H is multiplied with.
        self.start = factor(hidden) if start else logits(states)
        self.transition = None if transition else logits(states, states)
        self.emission = factor(vocab_size, hidden) if emission else logits(states, vocab_size)
        self.embeddings = nn.ParameterList(
            nn.Parameter(torch.randn(states, hidden, generator=generator)) for _ in (roles if split else roles[:1])
        )
        self.networks = nn.ModuleList(make_network() for _ in (roles[:1] if mono else roles) if make_network)
        headed = mono and not split
        self.heads = nn.ModuleList(nn.Linear(hidden, hidden, bias=False) for _ in roles if headed)
        for module in (*self.networks, *self.heads):
            # Kaiming is for ReLUs; transformers keep PyTorch's initialization.
            initialize_linears_(module, init == "unit" and isinstance(module, Mlp), generator)
            if isinstance(module, Transformer):
                module.shrink_residuals_()
        if init == "unit" and roles:
            self._scale_to(unit)

    @torch.no_grad()
    def _scale_to(self, size: float) -> None:
        """Scale H to entries of this root mean square."""
        total = torch.stack([h.square().mean() for h in self.features()]).mean().sqrt().clamp(min=1e-6)
        gains = [network.gain for network in self.networks if network.gain is not None]
        for tensor in gains or self.embeddings.parameters():
            assert isinstance(tensor, nn.Parameter)
            tensor.mul_(size / total)

    def features(self, states: Tensor | None = None) -> list[Tensor]:
        """Return H [n, h] of every role, in the order of `roles`; of some states or of all.

        Some states only: for networks that look at one state at a time, which transformers do not.
        """
        tables: list[Tensor] = list(self.embeddings)
        networks = list(self.networks)
        if states is not None:
            tables = [table.index_select(0, states) for table in tables]
        if len(networks) == 1 < len(tables):
            return list(networks[0](torch.stack(tables)).unbind())
        if self.heads:
            inner = networks[0](tables[0])
            return [head(inner) for head in self.heads]
        each = tables * len(self.roles) if len(tables) == 1 else tables
        return [network(table) for network, table in zip(networks, each, strict=True)] if networks else each

    def forward(self) -> HMM:
        h = dict(zip(self.roles, self.features(), strict=True))
        start = h["in"] @ self.start if self.is_factored["start"] else self.start
        transition = factor_logits(h["in"], h["out"]) if self.transition is None else self.transition
        emission = factor_logits(h["emit"], self.emission) if self.is_factored["emission"] else self.emission
        log_start, log_transition, log_emission = (
            torch.log_softmax(logits, -1, dtype=self.start.dtype) for logits in (start, transition, emission)
        )
        return HMM(log_start, log_transition, log_emission)


class BlockedFactored(FactoredBlockedModel):
    """H_in, H_out, H_emit of a `Factored` model of the same size, of which a batch computes only the states it keeps.

    Everything is factored, and networks are MLPs: a transformer over the states would see others with every sample.
    """

    def __init__(self, blocks: Blocks, dense: Factored, dropout: float = 0.5) -> None:
        super().__init__(blocks, dropout)
        if not all(dense.is_factored.values()):
            free = ", ".join(name for name, factored in dense.is_factored.items() if not factored)
            raise InputError(f"models with blocks are factored throughout, and {free} is not: factor it")
        if any(isinstance(network, Transformer) for network in dense.networks):
            raise InputError(
                "a transformer attends to all states, and a blocked model computes some: use linear or mlp"
            )
        self.dense = dense

    def factors_of(
        self, states: Tensor | None, carried: Tensor | None = None
    ) -> tuple[Factors, tuple[Tensor, Tensor] | None]:
        u, w, emitting = self.dense.features(states)
        log_start = torch.log_softmax(u @ self.dense.start, 0, dtype=self.dense.start.dtype)
        blocked = emitting.reshape(self.blocks.num_blocks, -1, emitting.shape[1])
        log_emission = blocked_emission(blocked, self.dense.emission, None, self.tiles)
        left = None
        if carried is not None:
            rows = self.dense.features(carried)[0]
            left = rows, linear_logsumexp(rows, w)
        return Factors(self.blocks.block_of_word, u, w, linear_logsumexp(u, w), log_start, log_emission), left
