"""Studies of Chiu & Rush 2020, *Scaling Hidden Markov Language Models*."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from papers.study import (
    BASELINE,
    CHIU,
    CHIU_SIZES,
    CHIU_TABLES,
    FORWARD,
    NGRAM,
    PARAMETERS,
    PERPLEXITY_COLUMNS,
    TEST,
    TRAIN,
    UNSPENT,
    VALID,
    Bars,
    Cell,
    Claim,
    Lines,
    NotRun,
    Study,
    StudyRow,
)
from papers.ticks import power_of_two

AXIS = "validation perplexity, PTB (lower is better)"
NO_DROPOUT = "no dropout"
RELEASED: dict[str, Any] = {
    "model.form": "released",
    "optimizer.lr": 0.01,
    "optimizer.weight_decay": 0.0,
    "schedule.kind": "plateau",
    "train.checks_per_epoch": 4,
}
"""The released networks and the paper's schedule, as in the recipe ptb-vl-hmm-released."""
SCALAR_RECIPE = "ptb-vl-hmm-14-scalar"
EIGHT: dict[str, Any] = {"train.epochs": 8}
"""The length of Table 3 and the figures; the recipes have 30 epochs."""
TABLE1_COLUMNS = ("paper parameters", "parameters", *PERPLEXITY_COLUMNS)
ABLATION_COLUMNS = ("paper parameters", "parameters", "paper ms", "forward ms", *PERPLEXITY_COLUMNS)
FIFTY: dict[str, Any] = {"train.epochs": 50}
"""The length of the paper's runs."""


ALL_WORDS = {"model.negatives": 0}
"""Of networks: the whole vocabulary in every step, on a CPU too."""


def _ptb(label: str, recipe: str, settings: Mapping[str, Any], valid: float | None = None, **labels: Any) -> StudyRow:
    """Return a row on PTB with seed 0, and its printed validation perplexity."""
    paper = {} if valid is None else {VALID: valid}
    labels = {"name": f"PTB, {label}", "bar": label, "group": "PTB", "seeds": (0,), "paper": paper, **labels}
    return StudyRow(recipe=recipe, settings=settings, **labels)


def _without_dropout(row: StudyRow, **labels: Any) -> StudyRow:
    """Return the row without state dropout; not in the paper, where half of the states are dropped."""
    names = {"name": f"{row.name}, {NO_DROPOUT}", "bar": f"{row.bar}, {NO_DROPOUT}"}
    settings = {**row.settings, "model.dropout": 0.0}
    return replace(row, settings=settings, paper={}, group=f"PTB, {NO_DROPOUT}", **{**names, **labels})


def _printed(millions: float, valid: float | None = None, test: float | None = None) -> dict[str, float]:
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
    _baseline("ptb", "feedforward", _printed(2.9, 159.9, 152.0)),
    _baseline("ptb", "lstm", _printed(3.6, 93.6, 88.8)),
    _baseline("wikitext-2", "feedforward", _printed(8.8, 210.9, 195.0)),
    _baseline("wikitext-2", "lstm", _printed(9.6, 124.5, 117.5)),
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
AWD_PTB = _lstm("ptb", paper=_printed(24, 60.0, 57.3), **PENALTIES)
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
        paper=_printed(33, 68.6, 65.8),
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
    paper=_printed(10, 284.6),
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


RELAXED = (_relaxed("ptb", _printed(10, 142.3)), _relaxed("wikitext-2", {}))


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


TABLE1 = Study(
    name="chiu2020-table1",
    title=f"{CHIU.name}, Table 1: the very large HMM",
    topic=CHIU_TABLES,
    paper=CHIU,
    columns=TABLE1_COLUMNS,
    not_run=(NotRun(UNSPENT, rows=("WikiText-2, VL-HMM 2^15", "WikiText-2, LSTM 2x256")),),
    rows=(
        StudyRow(
            name="PTB, VL-HMM 2^15",
            recipe="ptb-vl-hmm",
            seeds=(0, 1),
            paper=_printed(11.4, 125.0, 116.0),
            group="PTB",
            headline="VL-HMM, 2^15 states, PTB",
        ),
        StudyRow(
            name="WikiText-2, VL-HMM 2^15",
            recipe="wikitext2-vl-hmm",
            seeds=(0,),
            also=({"batches.reset_at_eos": True, "batches.eval_reset_at_eos": True},),  # as the paper does
            paper=_printed(17.3, 166.6, 158.2),
            group="WikiText-2",
            headline="VL-HMM, 2^15 states, WikiText-2",
        ),
        *(_as_printed(row) if row.settings["model.kind"] == "lstm" else row for row in BASELINES),
        *LSTMS,
        SCALAR_900,
        WIKITEXT_900,
        *RELAXED,
        _ngram("ptb", _printed(2, test=141.2), headline="Kneser-Ney 5-gram, PTB"),
        _ngram("wikitext-2", _printed(5.7, 248.7, 234.3)),
    ),
    claims=(
        Claim(
            "An HMM with 2^15 states reaches these perplexities.",
            "reached",
            {
                "PTB": (Cell("PTB, VL-HMM 2^15", "valid", VALID), Cell("PTB, VL-HMM 2^15", "test")),
                "WikiText-2": (
                    Cell("WikiText-2, VL-HMM 2^15", "valid", VALID),
                    Cell("WikiText-2, VL-HMM 2^15", "test"),
                ),
            },
        ),
        Claim("It outperforms n-gram models (test).", "ascending", _pairs("VL-HMM 2^15", "KN 5-gram")),
        Claim("It outperforms feed-forward models (test).", "ascending", _pairs("VL-HMM 2^15", "FF 5-gram 256")),
        Claim("LSTMs outperform it (test).", "ascending", _pairs("LSTM 2x256", "VL-HMM 2^15")),
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
    ),
)
TABLE1_RELEASED = Study(
    name="chiu2020-table1-released",
    title=f"{CHIU.name}, Table 1: the very large HMM, with the released networks and settings",
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
            paper=_printed(11.4, 125.0, 116.0),
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
            paper=_printed(17.3, 166.6, 158.2),
            group="WikiText-2",
        ),
    ),
)


def _ablation(label: str, recipe: str, millions: float, train: float, valid: float, milliseconds: float) -> StudyRow:
    """Return a line of Tables 2 and 4."""
    return _ptb(label, recipe, {}, paper={**_printed(millions, valid), TRAIN: train, FORWARD: milliseconds})


def _for_epochs(rows: Sequence[StudyRow], *epochs: int) -> tuple[StudyRow, ...]:
    """Return rows with the number of epochs of each."""
    pairs = zip(rows, epochs, strict=True)
    return tuple(replace(row, settings={**row.settings, "train.epochs": count}) for row, count in pairs)


FULL, SCALAR, UNDROPPED, FACTORED = "VL-HMM (2^14)", "- neural param", "- state dropout", "+ block emb"
ABLATIONS = (
    _ablation(FULL, "ptb-vl-hmm-14", 7.2, 115, 134, 40),
    _ablation(SCALAR, SCALAR_RECIPE, 423, 119, 169, 14),
    _ablation(UNDROPPED, "ptb-vl-hmm-14-no-dropout", 7.2, 88, 157, 100),
    _ablation(FACTORED, "ptb-vl-hmm-14-factored", 5.6, 122, 136, 48),
)


def _released(row: StudyRow, epochs: int, *shorter: int) -> StudyRow:
    """Return the row with the released networks and settings; the scalar model has no networks.

    `epochs` of the longest run, and of the others; the 50 of the paper are planned.
    """
    settings = {name: value for name, value in RELEASED.items() if name != "model.form" or row.recipe != SCALAR_RECIPE}
    also = tuple({"train.epochs": count} for count in shorter)
    return replace(row, settings={**settings, "train.epochs": epochs}, also=(*also, FIFTY))


def _without_decay(row: StudyRow) -> StudyRow:
    """Return the row without weight decay, as in the paper; networks then prefer a larger rate."""
    rate = {} if row.recipe == SCALAR_RECIPE else {"optimizer.lr": 0.005}
    return replace(row, settings={"optimizer.weight_decay": 0.0, **rate})


def _ablation_claim(text: str, better: str, worse: str) -> Claim:
    cells = Cell(f"PTB, {better}", better, VALID), Cell(f"PTB, {worse}", worse, VALID)
    return Claim(text, "ascending", {"": cells})


TABLE2 = Study(
    name="chiu2020-table2",
    title=f"{CHIU.name}, Table 2: ablations at 2^14 states, our settings",
    topic=CHIU_TABLES,
    paper=CHIU,
    rows=_for_epochs(ABLATIONS[:3], 16, 8, 12),
    columns=ABLATION_COLUMNS,
    drawing=Bars(VALID, AXIS),
    claims=(_ablation_claim("Networks generalize better than scalar parameters (our settings).", FULL, SCALAR),),
)
TABLE4_RELEASED = Study(
    name="chiu2020-table4-released",
    title=f"{CHIU.name}, Tables 2 and 4, with the released networks and settings",
    topic=CHIU_TABLES,
    paper=CHIU,
    not_run=(NotRun(UNSPENT),),
    rows=tuple(
        _released(row, *epochs) for row, epochs in zip(ABLATIONS, ((40, 30), (9,), (37, 12), (34, 30)), strict=True)
    ),
    columns=ABLATION_COLUMNS,
    drawing=Bars(VALID, AXIS),
    claims=(
        _ablation_claim("The neural parameterization generalizes better than the scalar one.", FULL, SCALAR),
        _ablation_claim("State dropout improves perplexity (released settings).", FULL, UNDROPPED),
        _ablation_claim("Factored state embeddings are slightly worse.", FULL, FACTORED),
    ),
)
TABLE4 = Study(
    name="chiu2020-table4",
    title=f"{CHIU.name}, Tables 2 and 4: ablations at 2^14 states, our settings",
    topic=CHIU_TABLES,
    paper=CHIU,
    rows=_for_epochs(ABLATIONS, 16, 8, 12, 16),
    columns=ABLATION_COLUMNS,
    drawing=Bars(VALID, AXIS),
    claims=(_ablation_claim("State dropout improves perplexity (our settings: weight decay).", FULL, UNDROPPED),),
)
TABLE4_NO_DECAY = Study(
    name="chiu2020-table4-no-decay",
    title=f"{CHIU.name}, Tables 2 and 4, without weight decay",
    topic=CHIU_TABLES,
    paper=CHIU,
    rows=_for_epochs([_without_decay(row) for row in ABLATIONS], 8, 8, 8, 8),
    not_run=(NotRun("its recipe has no decay: the row of chiu2020-table4", rows=(f"PTB, {SCALAR}",)),),
    columns=ABLATION_COLUMNS,
    drawing=Bars(VALID, AXIS),
)


def _constraint(states: int, blocks: int, valid: float) -> StudyRow:
    settings = {"model.num_states": states, "model.blocks": blocks, **EIGHT}
    return _ptb(f"Brown, {states} states, {blocks} blocks", "ptb-vl-hmm", settings, valid)


def _uniform(states: int, valid: float) -> StudyRow:
    settings = {"model.num_states": states, "model.kind": "uniform", **EIGHT}
    return _ptb(f"uniform, {states} states", "ptb-vl-hmm", settings, valid)


SMALL = (
    _ptb("no constraint, 1024 states", "ptb-vl-hmm", {"model.num_states": 1024, "model.blocks": 0, **EIGHT}, 180),
    _constraint(1024, 4, 182),
    _constraint(1024, 8, 194),
    _constraint(8192, 64, 142),
)
TABLE3 = Study(
    name="chiu2020-table3",
    title=f"{CHIU.name}, Table 3: emission constraints",
    topic=CHIU_TABLES,
    paper=CHIU,
    rows=(
        _constraint(16384, 32, 137),
        _constraint(16384, 64, 138),
        _constraint(16384, 128, 134),
        _constraint(16384, 256, 136),
        *SMALL,
        _uniform(8192, 150),
        _uniform(16384, 146),
        *map(_without_dropout, SMALL),
    ),
    drawing=Bars(VALID, AXIS),
    claims=(
        Claim(
            "Brown blocks outperform uniform subsets of states.",
            "ascending",
            {
                "8,192 states": (
                    Cell("PTB, Brown, 8192 states, 64 blocks", "Brown", VALID),
                    Cell("PTB, uniform, 8192 states", "uniform", VALID),
                ),
                "16,384 states": (
                    Cell("PTB, Brown, 16384 states, 128 blocks", "Brown", VALID),
                    Cell("PTB, uniform, 16384 states", "uniform", VALID),
                ),
            },
        ),
        Claim(
            "With 2^10 states, 4 blocks match an unconstrained HMM (within 3%).",
            "similar",
            {
                "half of the states dropped": (
                    Cell("PTB, no constraint, 1024 states", "no constraint", VALID),
                    Cell("PTB, Brown, 1024 states, 4 blocks", "4 blocks", VALID),
                ),
                NO_DROPOUT: (
                    Cell("PTB, no constraint, 1024 states, no dropout", "no constraint", VALID),
                    Cell("PTB, Brown, 1024 states, 4 blocks, no dropout", "4 blocks", VALID),
                ),
            },
            tolerance=0.03,
        ),
    ),
)


def _states(power: int, valid: float | None = None) -> StudyRow:
    label = f"2^{power} states"
    labels = {"x": 2.0**power, "series": "half of the states dropped"}
    return _ptb(label, "ptb-vl-hmm", {"model.num_states": 2**power, **EIGHT}, valid, **labels)


STATES = (*map(_states, range(10, 14)), _states(14, 134), _states(15, 125), _states(16))
FIGURE3 = Study(
    name="chiu2020-figure3",
    title=f"{CHIU.name}, Figure 3: number of states",
    topic=CHIU_SIZES,
    paper=CHIU,
    rows=(*STATES, *(_without_dropout(row, series=NO_DROPOUT) for row in STATES[:-1])),
    drawing=Lines(VALID, AXIS, "states", power_of_two),
    claims=(
        Claim(
            "Perplexity improves continuously up to 2^16 states.",
            "ascending",
            {"": tuple(Cell(row.name, row.bar, VALID) for row in reversed(STATES))},
        ),
    ),
)


def _blocks(blocks: int, factored: bool) -> StudyRow:
    """Return a point of Figure 4, with the value that Tables 3 and 4 print for it."""
    kind = "factored" if factored else "independent"
    printed = {(32, False): 137, (64, False): 138, (128, False): 134, (256, False): 136, (128, True): 136}
    settings = {"model.num_states": 16384, "model.blocks": blocks, "model.block_embeddings": factored, **EIGHT}
    label, valid = f"{blocks} blocks, {kind} embeddings", printed.get((blocks, factored))
    return _ptb(label, "ptb-vl-hmm", settings, valid, x=float(blocks), series=f"{kind} embeddings")


BLOCKS = (32, 64, 128, 256)
FIGURE4 = Study(
    name="chiu2020-figure4",
    title=f"{CHIU.name}, Figure 4: number of blocks",
    topic=CHIU_SIZES,
    paper=CHIU,
    rows=tuple(_blocks(blocks, factored) for blocks in BLOCKS for factored in (False, True)),
    drawing=Lines(VALID, AXIS, "blocks"),
    claims=(
        Claim(
            "With 2^14 states the number of blocks hardly matters (within 3%).",
            "similar",
            {"": tuple(Cell(_blocks(blocks, False).name, f"{blocks} blocks", VALID) for blocks in BLOCKS)},
            tolerance=0.03,
        ),
    ),
)
