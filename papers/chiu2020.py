"""Table 1 of Chiu & Rush 2020, *Scaling Hidden Markov Language Models*: the very large HMM and its baselines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from papers.study import (
    BASELINE,
    CHIU,
    CHIU_TABLES,
    NGRAM,
    PARAMETERS,
    PERPLEXITY_COLUMNS,
    TEST,
    UNSPENT,
    VALID,
    Cell,
    Claim,
    NotRun,
    Study,
    StudyRow,
)

SCALAR_RECIPE = "ptb-vl-hmm-14-scalar"
TABLE1_COLUMNS = ("paper parameters", "parameters", *PERPLEXITY_COLUMNS)
FIFTY: dict[str, Any] = {"train.epochs": 50}
"""The length of the paper's runs."""


ALL_WORDS = {"model.negatives": 0}
"""Of networks: the whole vocabulary in every step, on a CPU too."""


def printed(millions: float, valid: float | None = None, test: float | None = None) -> dict[str, float]:
    """Return a line of Table 1."""
    line = {PARAMETERS: 1e6 * millions, VALID: valid, TEST: test}
    return {name: value for name, value in line.items() if value is not None}


def _baseline(data: str, kind: str, paper: Mapping[str, float]) -> StudyRow:
    """Return a neural baseline of Table 1, as printed except for the schedule: a cosine over fewer epochs."""
    text = {"ptb": "PTB", "wikitext-2": "WikiText-2"}[data]
    settings: dict[str, Any] = {"data": data, "tokenizer.split": "whitespace", "model.kind": kind, **ALL_WORDS}
    settings |= {"train.epochs": 30, "train.precision": "bf16-mixed"}
    if data == "wikitext-2":
        settings["tokenizer.vocab_size"] = 33_278
    if kind == "feedforward":
        settings |= {"batches.batch_size": 128, "batches.length": 64}
    name = f"{text}, {'FF 5-gram 256' if kind == 'feedforward' else 'LSTM 2x256'}"
    return StudyRow(name=name, recipe=BASELINE, settings=settings, seeds=(0,), paper=paper, group=text)


BASELINES = (
    _baseline("ptb", "feedforward", printed(2.9, 159.9, 152.0)),
    _baseline("ptb", "lstm", printed(3.6, 93.6, 88.8)),
    _baseline("wikitext-2", "feedforward", printed(8.8, 210.9, 195.0)),
    _baseline("wikitext-2", "lstm", printed(9.6, 124.5, 117.5)),
)
SMALL_BATCHES = replace(
    BASELINES[0],
    name=f"{BASELINES[0].name}, small batches",
    settings={**BASELINES[0].settings, "batches.batch_size": 16, "batches.length": 32},
    paper={},
)

LSTM = "LSTM, 2 × 256"
PRINTED_SCHEDULE: dict[str, Any] = {"schedule.kind": "plateau", "schedule.warmup": 0.0, "train.checks_per_epoch": 4}
OUR_SCHEDULE: dict[str, Any] = {"schedule.kind": "cosine", "schedule.warmup": 0.05, "train.checks_per_epoch": 1}
BEST_LSTM: dict[str, Any] = {"batches.shuffle": False, "train.epochs": 50, "optimizer.lr": 0.003}
"""On PTB, of those tried, by validation perplexity."""
PRINTED_RATE: dict[str, Any] = {"optimizer.lr": 0.001}
FIRST_LSTM: dict[str, Any] = {"batches.shuffle": True, "train.epochs": 30, **PRINTED_RATE}
TRIED_LSTMS: dict[str, tuple[Mapping[str, Any], tuple[Mapping[str, Any], ...]]] = {
    "PTB, LSTM 2x256": (
        BEST_LSTM,
        (
            PRINTED_RATE,
            FIRST_LSTM,
            {**FIRST_LSTM, "optimizer.lr": 0.0003},
            {**FIRST_LSTM, "optimizer.lr": 0.003},
            {**FIRST_LSTM, "batches.shuffle": False},
            {**FIRST_LSTM, **OUR_SCHEDULE},
        ),
    ),
    "WikiText-2, LSTM 2x256": ({}, ({"optimizer.lr": 0.003}, BEST_LSTM, {**BEST_LSTM, **PRINTED_RATE})),
}
"""Settings of the plain LSTM, and those that it is run with too: rates, text in order, length, schedule."""


def _as_printed(row: StudyRow) -> StudyRow:
    """Return the plain LSTM with the paper's schedule, and the best of the settings tried."""
    best, others = TRIED_LSTMS[row.name]
    settings = {**row.settings, **PRINTED_SCHEDULE, **best}
    return replace(row, settings=settings, also=others, headline=f"{LSTM}, {row.group}")


AWD, TUNED = "AWD-LSTM", "LSTM 2x256, weight dropout"
"""Names of rows: the recipes of `hmmlm baseline`, and the paper's small LSTM with their kinds of dropout."""


def _lstm(
    data: str, name: str = AWD, paper: Mapping[str, float] | None = None, headline: str = "", **settings: Any
) -> StudyRow:
    """Return an LSTM with weight dropout; settings are given as section__name."""
    text, recipe = {"ptb": ("PTB", "ptb-awd-lstm"), "wikitext-2": ("WikiText-2", "wikitext2-awd-lstm")}[data]
    return StudyRow(
        name=f"{text}, {name}",
        recipe=recipe,
        settings={**ALL_WORDS, **{key.replace("__", "."): value for key, value in settings.items()}},
        seeds=(0,),
        paper=paper or {},
        group=text,
        headline=headline,
    )


SMALL_LSTM: dict[str, Any] = {
    "batches__batch_size": 40,
    "model__hidden": 256,
    "model__embedding": 256,
    "model__dropout": 0.3,
    "model__input_dropout": 0.3,
    "model__layer_dropout": 0.2,
    "model__word_dropout": 0.05,
    "model__weight_dropout": 0.2,
}
PENALTIES: dict[str, Any] = {"model__size_penalty": 2.0, "model__change_penalty": 1.0}
"""Stated by every row, because the recipes had none at first (see `papers.renames`)."""
NO_PENALTIES: dict[str, Any] = dict.fromkeys(PENALTIES, 0.0)
AWD_PTB = _lstm("ptb", paper=printed(24, 60.0, 57.3), **PENALTIES)
LSTMS = (
    AWD_PTB,
    _lstm(
        "ptb",
        TUNED,
        headline=f"{LSTM}, with weight dropout, 80 epochs, PTB",
        **SMALL_LSTM,
        **NO_PENALTIES,
        train__epochs=80,
    ),
    _lstm(
        "wikitext-2",
        paper=printed(33, 68.6, 65.8),
        model__input_dropout=0.65,
        model__layer_dropout=0.2,
        model__dropout=0.4,
        optimizer__weight_decay=0.1,
        **PENALTIES,
    ),
    _lstm(
        "wikitext-2",
        TUNED,
        **SMALL_LSTM,
        **NO_PENALTIES,
        optimizer__weight_decay=0.01,
        train__epochs=40,
    ),
)
SCALAR_900 = StudyRow(
    name="PTB, HMM 900",
    recipe=SCALAR_RECIPE,
    # Every state may emit every word; Buys et al. 2018 report validation only.
    settings={"model.num_states": 900, "model.blocks": 0, "model.dropout": 0.0},
    seeds=(0,),
    paper=printed(10, 284.6),
    group="PTB",
)
WIKITEXT_900 = replace(
    SCALAR_900,
    name="WikiText-2, HMM 900",
    # On PTB the fourth epoch is the best of 30.
    settings={**SCALAR_900.settings, "data": "wikitext-2", "tokenizer.vocab_size": 33_278, "train.epochs": 10},
    paper={},
    group="WikiText-2",
)


def _relaxed(data: str, paper: Mapping[str, float]) -> StudyRow:
    """Return the HMM that is relaxed to a recurrent network, with 900 states."""
    row = _baseline(data, "relaxed-hmm", paper)
    settings = {**row.settings, "batches.batch_size": 64, "optimizer.lr": 0.003}
    return replace(row, name=f"{row.group}, HMM+RNN, 900 states", settings=settings)


RELAXED = (_relaxed("ptb", printed(10, 142.3)), _relaxed("wikitext-2", {}))


def _ngram(data: str, paper: Mapping[str, float], **labels: Any) -> StudyRow:
    """Return the Kneser-Ney 5-gram of a text, which `hmmlm train` also prints in its report."""
    text = {"ptb": "PTB", "wikitext-2": "WikiText-2"}[data]
    settings = {"data": data, "reset_at_eos": data == "ptb"}  # articles of WikiText-2 are read through
    return StudyRow(
        name=f"{text}, KN 5-gram", recipe=NGRAM, settings=settings, seeds=(0,), paper=paper, group=text, **labels
    )


def _pairs(better: str, worse: str) -> dict[str, tuple[Cell, ...]]:
    """Return the comparison of two rows of Table 1 on both data sets."""
    return {
        text: (Cell(f"{text}, {better}", better), Cell(f"{text}, {worse}", worse)) for text in ("PTB", "WikiText-2")
    }


REACHED = {
    text: (Cell(f"{text}, VL-HMM 2^15", "valid", VALID), Cell(f"{text}, VL-HMM 2^15", "test"))
    for text in ("PTB", "WikiText-2")
}
TABLE1 = Study(
    name="chiu2020-table1",
    title=f"{CHIU.name}, Table 1: the very large HMM",
    topic=CHIU_TABLES,
    paper=CHIU,
    columns=TABLE1_COLUMNS,
    not_run=(NotRun(UNSPENT, rows=("WikiText-2, VL-HMM 2^15", "WikiText-2, LSTM 2x256", SMALL_BATCHES.name)),),
    rows=(
        StudyRow(
            name="PTB, VL-HMM 2^15",
            recipe="ptb-vl-hmm",
            seeds=(0, 1),
            paper=printed(11.4, 125.0, 116.0),
            group="PTB",
            headline="VL-HMM, 2^15 states, PTB",
        ),
        StudyRow(
            name="WikiText-2, VL-HMM 2^15",
            recipe="wikitext2-vl-hmm",
            seeds=(0,),
            also=({"batches.reset_at_eos": True, "batches.eval_reset_at_eos": True},),  # as the paper does
            paper=printed(17.3, 166.6, 158.2),
            group="WikiText-2",
            headline="VL-HMM, 2^15 states, WikiText-2",
        ),
        *(_as_printed(row) if row.settings["model.kind"] == "lstm" else row for row in BASELINES),
        SMALL_BATCHES,
        *LSTMS,
        SCALAR_900,
        WIKITEXT_900,
        *RELAXED,
        _ngram("ptb", printed(2, test=141.2), headline="Kneser-Ney 5-gram, PTB"),
        _ngram("wikitext-2", printed(5.7, 248.7, 234.3), also=({"reset_at_eos": True},)),
    ),
    claims=(
        Claim("An HMM with 2^15 states reaches these perplexities (our settings).", "reached", REACHED),
        Claim("It outperforms n-gram models (test).", "ascending", _pairs("VL-HMM 2^15", "KN 5-gram")),
        Claim("It outperforms feed-forward models (test).", "ascending", _pairs("VL-HMM 2^15", "FF 5-gram 256")),
        Claim("LSTMs outperform it (test).", "ascending", _pairs("LSTM 2x256", "VL-HMM 2^15")),
        Claim("So do LSTMs with weight dropout (test).", "ascending", _pairs(AWD, "VL-HMM 2^15")),
        Claim(
            "It outperforms an HMM with 900 states (valid).",
            "ascending",
            {"PTB": (Cell("PTB, VL-HMM 2^15", "VL-HMM 2^15", VALID), Cell(SCALAR_900.name, "HMM 900", VALID))},
        ),
        Claim(
            "It outperforms the HMM that is relaxed to an RNN (valid).",
            "ascending",
            {"PTB": (Cell("PTB, VL-HMM 2^15", "VL-HMM 2^15", VALID), Cell(RELAXED[0].name, "HMM+RNN", VALID))},
        ),
        Claim(
            "The FF model needs batches larger than 16 × 32 (valid).",
            "ascending",
            {"PTB": (Cell(BASELINES[0].name, "128 × 64", VALID), Cell(SMALL_BATCHES.name, "16 × 32", VALID))},
        ),
    ),
)
TABLE1_RELEASED = Study(
    name="chiu2020-table1-released",
    title=f"{CHIU.name}, Table 1: the very large HMM, with the released networks and settings",
    claims=(
        Claim(
            "An HMM with 2^15 states reaches these perplexities at the paper's settings (within 1%).",
            "reached",
            REACHED,
            tolerance=0.01,
        ),
    ),
    topic=CHIU_TABLES,
    paper=CHIU,
    columns=TABLE1_COLUMNS,
    not_run=(NotRun(UNSPENT),),
    rows=(
        StudyRow(
            name="PTB, VL-HMM 2^15",
            recipe="ptb-vl-hmm-released",
            settings={"train.epochs": 37},  # the best model is that of epoch 27
            also=(FIFTY,),
            seeds=(0,),
            paper=printed(11.4, 125.0, 116.0),
            group="PTB",
        ),
        StudyRow(
            name="WikiText-2, VL-HMM 2^15",
            recipe="ptb-vl-hmm-released",
            # The chain restarts after every <eos>, and the rate is a tenth of that on PTB, as printed.
            settings={
                "data": "wikitext-2",
                "tokenizer.vocab_size": 33_278,
                "optimizer.lr": 0.001,
                **FIFTY,
            },
            seeds=(0,),
            paper=printed(17.3, 166.6, 158.2),
            group="WikiText-2",
        ),
    ),
)
