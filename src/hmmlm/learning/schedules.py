"""Learning-rate schedules as factors of the peak rate: a pure function of the tokens seen, and what checks found."""

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


DIVERGED = math.log(1.5)
"""What a validation loss exceeds the best one by where training diverges: half as much perplexity again."""
MAX_HALVINGS = 3
OPTIONAL = ("diverging", "halvings")


@dataclass
class Plateau:
    """Tracks the best validation loss; with a plateau schedule, divides the rate when it stops improving.

    Whatever the schedule, the rate is halved where training diverges: at the second such loss in a row.
    """

    config: WarmupConfig
    best: float = math.inf
    checks: int = 0
    """Checks since the last best or division."""
    divisions: int = 0
    diverging: int = 0
    """Losses in a row that exceed the best one by far."""
    halvings: int = 0

    @property
    def factor(self) -> float:
        divisor = self.config.factor**self.divisions if isinstance(self.config, PlateauConfig) else 1.0
        return 0.5**self.halvings / divisor

    def check(self, loss: float) -> bool:
        """Take the result of a validation check; return whether training diverges, and so the rate was halved."""
        self.diverging = self.diverging + 1 if loss > self.best + DIVERGED else 0
        if self.diverging == 2 and self.halvings < MAX_HALVINGS:
            self.halvings, self.diverging, self.checks = self.halvings + 1, 0, 0
            return True
        if loss < self.best:
            self.best, self.checks = loss, 0
            return False
        self.checks += 1
        if isinstance(self.config, PlateauConfig) and self.checks >= self.config.patience:
            self.divisions, self.checks = self.divisions + 1, 0
        return False

    def state_dict(self) -> dict[str, float]:
        """Return the state for a checkpoint, without counts that earlier versions lack while these are 0.

        JSON has no infinity, so a missing best is left out.
        """
        state: dict[str, float] = {"checks": self.checks, "divisions": self.divisions}
        state |= {name: count for name in OPTIONAL if (count := getattr(self, name))}
        return state if math.isinf(self.best) else {**state, "best": self.best}

    def load(self, state: dict[str, float]) -> None:
        """Restore the state of a checkpoint."""
        self.best = float(state.get("best", math.inf))
        self.checks, self.divisions = int(state["checks"]), int(state["divisions"])
        self.diverging, self.halvings = (int(state.get(name, 0)) for name in OPTIONAL)
