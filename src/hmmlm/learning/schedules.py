"""Learning-rate schedules as factors of the peak rate: a pure function of the tokens seen, and the plateau's memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hmmlm.config.sections import CosineConfig, PlateauConfig, WarmupConfig


def lr_factor(config: WarmupConfig, tokens: int, total_tokens: int) -> float:
    """Return the factor for the step that ends at `tokens` of `total_tokens`: warm-up, then constant or cosine.

    The first step of a warm-up has a rate above 0, and the step that ends it, the peak.
    """
    warmup = config.warmup if config.warmup >= 1 else config.warmup * total_tokens
    if tokens < warmup:
        return tokens / warmup
    if not isinstance(config, CosineConfig):
        return 1.0
    progress = min(1.0, (tokens - warmup) / max(1.0, total_tokens - warmup))
    return config.final_fraction + (1 - config.final_fraction) * (1 + math.cos(math.pi * progress)) / 2


@dataclass
class Plateau:
    """Tracks the best validation loss; with a plateau schedule, divides the rate when it stops improving."""

    config: WarmupConfig
    best: float = math.inf
    checks: int = 0
    """Checks since the last best or division."""
    divisions: int = 0

    @property
    def factor(self) -> float:
        return self.config.factor**-self.divisions if isinstance(self.config, PlateauConfig) else 1.0

    def check(self, loss: float) -> None:
        """Take the result of a validation check."""
        if loss < self.best:
            self.best, self.checks = loss, 0
            return
        self.checks += 1
        if isinstance(self.config, PlateauConfig) and self.checks >= self.config.patience:
            self.divisions, self.checks = self.divisions + 1, 0

    def state_dict(self) -> dict[str, float]:
        """Return the state for a checkpoint; JSON has no infinity, so a missing best is left out."""
        state: dict[str, float] = {"checks": self.checks, "divisions": self.divisions}
        return state if math.isinf(self.best) else {**state, "best": self.best}

    def load(self, state: dict[str, float]) -> None:
        """Restore the state of a checkpoint."""
        self.best = float(state.get("best", math.inf))
        self.checks, self.divisions = int(state["checks"]), int(state["divisions"])
