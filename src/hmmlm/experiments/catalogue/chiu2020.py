"""Studies of Chiu & Rush 2020."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hmmlm.experiments.catalogue.run import BASELINE, Run


def _ablation(row: str, recipe: str, train: float, valid: float) -> Run:
    return Run(f"PTB, {row}", recipe, paper={"train_perplexity": train, "valid_perplexity": valid})


def _without_decay(run: Run) -> Run:
    """As in the paper, where dropout of states is the only regularisation; networks then like a larger rate."""
    rate = {} if run.recipe == "ptb-vl-hmm-14-scalar" else {"optimizer.rate": 0.005}
    return replace(run, settings={"optimizer.weight_decay": 0.0, **rate})


def _as_released(run: Run) -> Run:
    """With the released networks and settings, and the paper's schedule: no decay, divided on plateaus."""
    form = {} if run.recipe == "ptb-vl-hmm-14-scalar" else {"model.form": "code"}
    return replace(run, settings={
        **form, "optimizer.rate": 0.01, "optimizer.weight_decay": 0.0, "schedule.kind": "plateau",
        "train.checks_per_epoch": 4,
    })  # fmt: skip


def _baseline(data: str, kind: str, valid: float, test: float) -> Run:
    """A neural baseline of Table 1, as printed but for the schedule, a cosine over fewer epochs."""
    name = {"ptb": "PTB", "wikitext-2": "WikiText-2"}[data]
    settings: dict[str, Any] = {
        "data": data, "tokenizer.split": "whitespace", "model.kind": kind, "train.epochs": 30,
        "train.precision": "bf16-mixed",
    }  # fmt: skip
    if data == "wikitext-2":
        settings["tokenizer.vocab_size"] = 33_278
    row = "LSTM 2x256"
    if kind == "feedforward":
        row = "FF 5-gram 256"
        settings |= {"batch_size": 128, "length": 64}
    return Run(f"{name}, {row}", BASELINE, settings, paper={"valid_perplexity": valid, "test_perplexity": test})


def _short_memory(run: Run) -> Run:
    """With what is right for large batches."""
    return Run(f"{run.row}, 30 epochs, betas .9 and .95", BASELINE, {**run.settings, "betas": [0.9, 0.95]})


def _valid(value: float) -> dict[str, float]:
    return {"valid_perplexity": value}


def _states(power: int, paper: dict[str, float]) -> Run:
    return Run(f"PTB, 2^{power} states", "ptb-vl-hmm", {"model.states": 2**power}, paper=paper)


def _without_dropout(run: Run) -> Run:
    """Not in the paper: half of the states dropped is too much for a small model."""
    return replace(run, row=f"{run.row}, no dropout", settings={**run.settings, "model.dropout": 0.0})


def _constraint(states: int, blocks: int, paper: float) -> Run:
    settings: dict[str, Any] = {"model.states": states, "model.blocks": blocks}
    return Run(f"PTB, Brown, {states} states, {blocks} blocks", "ptb-vl-hmm", settings, paper=_valid(paper))


def _uniform(states: int, paper: float) -> Run:
    settings: dict[str, Any] = {"model.states": states, "model.structure": "uniform"}
    return Run(f"PTB, uniform, {states} states", "ptb-vl-hmm", settings, paper=_valid(paper))


def _blocks(blocks: int, factored: bool) -> Run:
    """Figure 4; what Tables 3 and 4 print of it."""
    kind = "factored" if factored else "independent"
    printed = {(32, False): 137, (64, False): 138, (128, False): 134, (256, False): 136, (128, True): 136}
    settings = {"model.states": 16384, "model.blocks": blocks, "model.factored": factored}
    paper = _valid(printed[blocks, factored]) if (blocks, factored) in printed else {}
    return Run(f"PTB, {blocks} blocks, {kind} embeddings", "ptb-vl-hmm", settings, paper=paper)


def _beyond(form: str, rate: float, decay: float, what: str = "", **settings: Any) -> Run:
    """The 2^14-state model under other settings, eight epochs, to see what helps."""
    named = {name.replace("__", "."): value for name, value in settings.items()}
    common = {"model.form": form, "optimizer.rate": rate, "optimizer.weight_decay": decay, "train.epochs": 8}
    networks = "printed" if form == "paper" else "released"
    row = f"PTB, 2^14, {networks} networks, rate {rate}, decay {decay}" + (f", {what}" if what else "")
    return Run(row, "ptb-vl-hmm-14", {**common, **named})


def _less_dropout(dropout: float, decay: float) -> Run:
    row = f"PTB, 2^15, dropout {dropout}, decay {decay}, 10 epochs"
    return Run(row, "ptb-vl-hmm", {"model.dropout": dropout, "optimizer.weight_decay": decay, "train.epochs": 10})


BASELINES = [
    _baseline("ptb", "feedforward", 159.9, 152.0), _baseline("ptb", "lstm", 93.6, 88.8),
    _baseline("wikitext-2", "feedforward", 210.9, 195.0), _baseline("wikitext-2", "lstm", 124.5, 117.5),
]  # fmt: skip
TABLE4 = [
    _ablation("VL-HMM (2^14)", "ptb-vl-hmm-14", 115, 134),
    _ablation("- neural param", "ptb-vl-hmm-14-scalar", 119, 169),
    _ablation("- state dropout", "ptb-vl-hmm-14-no-dropout", 88, 157),
    _ablation("+ block emb", "ptb-vl-hmm-14-factored", 122, 136),
]
SMALL = [  # of Table 3
    Run("PTB, no constraint, 1024 states", "ptb-vl-hmm",
        {"model.states": 1024, "model.structure": "none"}, paper=_valid(180)),
    _constraint(1024, 4, 182), _constraint(1024, 8, 194), _constraint(8192, 64, 142),
]  # fmt: skip

CHIU2020: dict[str, list[Run]] = {
    "chiu2020-table1": [
        Run("PTB, VL-HMM 2^15", "ptb-vl-hmm", paper={"valid_perplexity": 125.0, "test_perplexity": 116.0}),
        Run(
            "WikiText-2, VL-HMM 2^15", "wikitext2-vl-hmm",
            paper={"valid_perplexity": 166.6, "test_perplexity": 158.2},
        ),
        *BASELINES,
    ],
    "chiu2020-table3": [
        _constraint(16384, 32, 137), _constraint(16384, 64, 138), _constraint(16384, 128, 134),
        _constraint(16384, 256, 136), *SMALL, _uniform(8192, 150), _uniform(16384, 146), *map(_without_dropout, SMALL),
    ],
    "chiu2020-table4": TABLE4,
    "chiu2020-table4-no-decay": [_without_decay(run) for run in TABLE4],
    "chiu2020-table4-released": [_as_released(run) for run in TABLE4],
    "chiu2020-figure3": [
        *(_states(power, {}) for power in range(10, 14)), _states(14, _valid(134)), _states(15, _valid(125)),
        _states(16, {}), *(_without_dropout(_states(power, {})) for power in range(10, 16)),
    ],
    "chiu2020-figure4": [_blocks(blocks, factored) for blocks in (32, 64, 128, 256) for factored in (False, True)],
    "chiu2020-beyond": [
        _beyond("code", 0.01, 0.0), _beyond("code", 0.01, 0.03), _beyond("paper", 0.01, 0.0),
        _beyond("paper", 0.01, 0.03), _beyond("paper", 0.005, 0.0), _beyond("paper", 0.005, 0.03),
        _beyond("paper", 0.005, 0.1), _beyond("paper", 0.003, 0.1), _beyond("paper", 0.002, 0.03),
        _beyond("paper", 0.01, 0.0, "clusters refined by exchange", model__exchange_passes=10),
        _beyond("paper", 0.01, 0.0, "state carried through <eos>, text in order", batches__shuffle=False,
                batches__reset_at_eos=False, batches__eval_reset_at_eos=False),
        _beyond("paper", 0.01, 0.0, "network dropout 0.1", model__network_dropout=0.1),
        Run("PTB, 2^14, no networks: ablation B of 2025 on blocks", "ptb-vl-hmm-14-linear", {"train.epochs": 8}),
        _less_dropout(0.0, 0.1), _less_dropout(0.0, 0.3), _less_dropout(0.25, 0.3),
        *(_short_memory(run) for run in BASELINES if run.row.startswith("PTB")),
    ],
    "chiu2020-cpu": [Run("PTB, 2^12 states, two CPU cores", "ptb-vl-hmm-12-cpu")],
    "chiu2020-largest": [Run("PTB, 2^18 states, one epoch", "ptb-vl-hmm-18")],
}
