"""Every dense reparameterization of Lee & Berg-Kirkpatrick 2025 in one module: linear, perceptrons, transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from hmmlm.errors import InputError
from hmmlm.hmm import HMM
from hmmlm.ops.product import product
from hmmlm.parameterization.base import Parameterization
from hmmlm.parameterization.dense_networks import Mlp, Transformer
from hmmlm.parameterization.networks import initialise_linears_

Initial = Literal["unit", "normal"]
Network = Mlp | Transformer


class Factored(Parameterization):
    """Logits a = H_in H_outᵀ [Z, Z], b = H_emit Vᵀ [Z, W] and π = H_in s [Z]; a softmax over each row.

    Rows of a are the states that are left: H_in is their side, H_out that of the states entered.

    H comes from tables of state embeddings E [Z, h]: one table for all roles, or with `split` one a role.
    `make_network` is what lies between E and H: None for the linear forms (H = E: ablation A with one table, whose a
    is symmetric, ablation B with split ones); otherwise one network a role (ψ), or with `mono` one in all (ι). A
    single network on a single table gives every role the same, so then each role has a linear head of its own.

    `start`, `transition`, `emission`: whether each is factored; those that are not are free logits from N(0, scale²),
    as in the scalar model.

    `initial` says how large it all is at first. "unit": logits of variance 1 whatever the form: V, s and H have
    entries of mean square h^-1/2. Without a network that is E from N(0, h^-1/2); networks without a norm are
    homogeneous in E (their biases start at 0, their weights Kaiming-uniform), so E is scaled, and where a norm comes
    last, its gain is. (The diagonal of ablation A's a is then about √h: it starts with states that stay.)
    "normal", as released: all tables from N(0, 1), linears as the framework draws them; logits then have a variance
    of about h.
    """

    def __init__(
        self, states: int, vocab_size: int, hidden: int, *, make_network: Callable[[], Network] | None = None,
        split: bool = True, mono: bool = False, start: bool = True, transition: bool = True, emission: bool = True,
        initial: Initial = "unit", scale: float = 1.0, generator: torch.Generator | None = None,
    ) -> None:  # fmt: skip
        super().__init__(states, vocab_size)
        if mono and make_network is None:
            raise InputError("mono is about networks, and the linear parameterization has none: set mono to false")
        needed = {"in": start or transition, "out": transition, "emit": emission}
        self.roles = roles = tuple(role for role, wanted in needed.items() if wanted)
        self.factored = {"start": start, "transition": transition, "emission": emission}
        unit = hidden**-0.25

        def logits(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator) * scale)

        def factor(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator) * (unit if initial == "unit" else 1.0))

        # each of these is the logits themselves, or what is multiplied with H to give them
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
            # Kaiming is for ReLUs; transformers are drawn as the framework does
            initialise_linears_(module, initial == "unit" and isinstance(module, Mlp), generator)
            if isinstance(module, Transformer):
                module.shrink_residuals_()
        if initial == "unit" and roles:
            self._scale_to(unit)

    @torch.no_grad()
    def _scale_to(self, size: float) -> None:
        """Make H have entries of this root mean square."""
        total = torch.stack([h.square().mean() for h in self.features()]).mean().sqrt().clamp(min=1e-6)
        gains = [network.gain for network in self.networks if network.gain is not None]
        for tensor in gains or self.embeddings.parameters():
            assert isinstance(tensor, nn.Parameter)
            tensor.mul_(size / total)

    def features(self, states: Tensor | None = None) -> list[Tensor]:
        """H [n, h] of every role that something is factored by, in the order of `roles`; of some states or of all.

        Some are for networks that look at one state at a time, which transformers do not.
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
        start = h["in"] @ self.start if self.factored["start"] else self.start
        transition = product(h["in"], h["out"]) if self.transition is None else self.transition
        emission = product(h["emit"], self.emission) if self.factored["emission"] else self.emission
        log_start, log_transition, log_emission = (
            torch.log_softmax(logits, -1, dtype=self.start.dtype) for logits in (start, transition, emission)
        )
        return HMM(log_start, log_transition, log_emission)
