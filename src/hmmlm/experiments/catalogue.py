"""The studies: which runs make up each table and figure of the papers, and what the papers report for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Run:
    """One run of a study."""

    row: str
    """The paper's row or point, with the data set."""
    recipe: str
    settings: dict[str, Any] = field(default_factory=dict)
    """What differs from the recipe."""
    seed: int = 0
    paper: dict[str, float] = field(default_factory=dict)
    """The paper's metrics for it, where it prints them."""


def _ablation(row: str, recipe: str, train: float, valid: float) -> Run:
    return Run(f"PTB, {row}", recipe, paper={"train_perplexity": train, "valid_perplexity": valid})


def _valid(value: float) -> dict[str, float]:
    return {"valid_perplexity": value}


def _states(power: int, paper: dict[str, float]) -> Run:
    return Run(f"PTB, 2^{power} states", "ptb-vl-hmm", {"model.states": 2**power}, paper=paper)


def _constraint(states: int, blocks: int, paper: float) -> Run:
    settings: dict[str, Any] = {"model.states": states, "model.blocks": blocks}
    return Run(f"PTB, Brown, {states} states, {blocks} blocks", "ptb-vl-hmm", settings, paper=_valid(paper))


def _uniform(states: int, paper: float) -> Run:
    settings: dict[str, Any] = {"model.states": states, "model.structure": "uniform"}
    return Run(f"PTB, uniform, {states} states", "ptb-vl-hmm", settings, paper=_valid(paper))


def _blocks(blocks: int, factored: bool) -> Run:
    kind = "factored" if factored else "independent"
    settings = {"model.states": 16384, "model.blocks": blocks, "model.factored": factored}
    return Run(f"PTB, {blocks} blocks, {kind} embeddings", "ptb-vl-hmm", settings)


def _beyond(what: str, **settings: Any) -> Run:
    """A change to the 2^14-state model, trained for eight epochs, to see what helps."""
    named = {name.replace("__", "."): value for name, value in settings.items()}
    return Run(f"PTB, 2^14, {what}", "ptb-vl-hmm-14", {"train.epochs": 8, **named})


STUDIES: dict[str, list[Run]] = {
    "chiu2020-table1": [
        Run("PTB, VL-HMM 2^15", "ptb-vl-hmm", paper={"valid_perplexity": 125.0, "test_perplexity": 116.0}),
        Run(
            "WikiText-2, VL-HMM 2^15", "wikitext2-vl-hmm",
            paper={"valid_perplexity": 166.6, "test_perplexity": 158.2},
        ),
    ],
    "chiu2020-table3": [
        _constraint(16384, 32, 137), _constraint(16384, 64, 138), _constraint(16384, 128, 134),
        _constraint(16384, 256, 136),
        Run("PTB, no constraint, 1024 states", "ptb-vl-hmm",
            {"model.states": 1024, "model.structure": "none"}, paper=_valid(180)),
        _constraint(1024, 4, 182), _constraint(1024, 8, 194), _constraint(8192, 64, 142),
        _uniform(8192, 150), _uniform(16384, 146),
    ],
    "chiu2020-table4": [
        _ablation("VL-HMM (2^14)", "ptb-vl-hmm-14", 115, 134),
        _ablation("- neural param", "ptb-vl-hmm-14-scalar", 119, 169),
        _ablation("- state dropout", "ptb-vl-hmm-14-no-dropout", 88, 157),
        _ablation("+ block emb", "ptb-vl-hmm-14-factored", 122, 136),
    ],
    "chiu2020-figure3": [
        *(_states(power, {}) for power in range(10, 14)), _states(14, _valid(134)), _states(15, _valid(125)),
        _states(16, {}),
    ],
    "chiu2020-figure4": [_blocks(blocks, factored) for blocks in (32, 64, 128, 256) for factored in (False, True)],
    "chiu2020-beyond": [
        _beyond("as the paper"),
        _beyond("clusters refined by exchange", model__exchange_passes=10),
        _beyond("state carried through <eos>, text in order", batches__shuffle=False, batches__reset_at_eos=False,
                batches__eval_reset_at_eos=False),
        _beyond("state carried through <eos>, lines shuffled", batches__reset_at_eos=False,
                batches__eval_reset_at_eos=False),
        _beyond("network on the incoming side, Kaiming start", model__form="paper"),
        _beyond("hidden 512", model__hidden=512),
        _beyond("weight decay 0.03", optimizer__weight_decay=0.03),
        _beyond("network dropout 0.1", model__network_dropout=0.1),
        _beyond("64 blocks of 256 states", model__blocks=64),
        _beyond("rate 0.005", optimizer__rate=0.005),
        _beyond("rate 0.02", optimizer__rate=0.02),
        _beyond("state dropout 0.75", model__dropout=0.75),
    ],
    "chiu2020-largest": [Run("PTB, 2^18 states, one epoch", "ptb-vl-hmm-18")],
}
