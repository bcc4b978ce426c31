"""Trials of settings, speed and size around the model of Chiu & Rush 2020."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from papers.chiu2020 import ALL_WORDS, BASELINES, NO_PENALTIES, PENALTIES, SCALAR_RECIPE
from papers.study import BASELINE, CHIU, CHIU_SIZES, CHIU_TRIALS, UNSPENT, NotRun, Study, StudyRow

BROWN_HEADERS = {
    "seconds_in_all": "seconds",
    "classic_mutual_information": "mutual information of the classic tool",
}


def _row(name: str, recipe: str, **settings: Any) -> StudyRow:
    """Return a row on PTB; settings are given as section__name."""
    named = {key.replace("__", "."): value for key, value in settings.items()}
    return StudyRow(name=f"PTB, {name}", recipe=recipe, settings=named, seeds=(0,))


def _beyond(form: str, rate: float, decay: float, what: str = "", **settings: Any) -> StudyRow:
    """Return the 2^14-state model under other settings, for eight epochs."""
    name = f"2^14, {form} networks, rate {rate}, decay {decay}" + (f", {what}" if what else "")
    common = {"model__form": form, "optimizer__lr": rate, "optimizer__weight_decay": decay, "train__epochs": 8}
    return _row(name, "ptb-vl-hmm-14", **common, **settings)


def _small(what: str, **settings: Any) -> StudyRow:
    """Return the 2^10-state model in single precision, for eight epochs."""
    common = {"model__num_states": 1024, "train__precision": "32-true", "train__epochs": 8}
    return _row(f"2^10, {what}", "ptb-vl-hmm", **common, **settings)


def _less_dropout(dropout: float, decay: float) -> StudyRow:
    name = f"2^15, dropout {dropout}, decay {decay}, 10 epochs"
    return _row(name, "ptb-vl-hmm", model__dropout=dropout, optimizer__weight_decay=decay, train__epochs=10)


BOUNDS = (
    *(_beyond("printed", 0.003, 0.1, f"dropout {dropout}", model__dropout=dropout) for dropout in (0.25, 0.75)),
    *(_beyond("printed", 0.003, 0.1, f"width {width}", model__hidden=width) for width in (128, 512)),
)
"""The bounds of the paper's search, where its own choice is .5 and 256."""
PREPRINT = (
    _beyond("preprint", 0.01, 0.0),
    _beyond("preprint", 0.003, 0.1),
    *(
        _row(
            f"2^14, {blocks} blocks, one table for every role, no networks: the preprint's Figure 4",
            "ptb-vl-hmm-14-linear",
            model__split=False,
            model__blocks=blocks,
            train__epochs=8,
        )
        for blocks in (32, 64, 128, 256)
    ),
    *(
        _row(
            f"uniform, {states} states, logits dropped instead of columns",
            "ptb-vl-hmm",
            model__num_states=states,
            model__kind="uniform",
            model__dropped="logits",
            train__epochs=8,
        )
        for states in (8192, 16384)
    ),
)
"""What the preprint describes differently; beside the rows of `_beyond` with the printed form, and of Table 3."""
LESS_DROPOUT = (_less_dropout(0.0, 0.1), _less_dropout(0.0, 0.3), _less_dropout(0.25, 0.3))


def _short_memory(row: StudyRow) -> StudyRow:
    """Return a neural baseline with the second beta of large batches."""
    name, settings = f"{row.name}, 30 epochs, betas .9 and .95", {**row.settings, "optimizer.betas": [0.9, 0.95]}
    return replace(row, name=name, settings=settings, paper={}, headline="")


BEYOND = Study(
    name="chiu2020-beyond",
    title="Beyond the paper: rate, decay, dropout and other changes to the very large HMM",
    topic=CHIU_TRIALS,
    paper=CHIU,
    trials=True,
    rows=(
        _beyond("released", 0.01, 0.0),
        _beyond("released", 0.01, 0.03),
        _beyond("printed", 0.01, 0.0),
        _beyond("printed", 0.01, 0.03),
        _beyond("printed", 0.005, 0.0),
        _beyond("printed", 0.005, 0.03),
        _beyond("printed", 0.005, 0.1),
        _beyond("printed", 0.003, 0.1),
        _beyond("printed", 0.002, 0.03),
        _beyond("printed", 0.01, 0.0, "clusters refined by exchange", model__exchange_passes=10),
        _beyond(
            "printed",
            0.01,
            0.0,
            "state carried through <eos>, text in order",
            batches__shuffle=False,
            batches__reset_at_eos=False,
            batches__eval_reset_at_eos=False,
        ),
        _beyond("printed", 0.01, 0.0, "network dropout 0.1", model__network_dropout=0.1),
        _row("2^14, no networks: ablation B of 2025 on blocks", "ptb-vl-hmm-14-linear", train__epochs=8),
        *LESS_DROPOUT,
        *BOUNDS,
        *PREPRINT,
        *(_short_memory(row) for row in BASELINES if row.group == "PTB"),
        _small("dropout 0.5, decay 0.01", optimizer__weight_decay=0.01),
        _small("dropout 0.0, decay 0.1", model__dropout=0.0),
        _small("dropout 0.0, decay 0.01", model__dropout=0.0, optimizer__weight_decay=0.01),
    ),
    not_run=(
        NotRun(
            UNSPENT,
            rows=(
                "PTB, 2^14, no networks: ablation B of 2025 on blocks",
                *(row.name for row in (*LESS_DROPOUT, *BOUNDS, *PREPRINT)),
            ),
        ),
    ),
)


def _scalar(rate: float, eps: float, decay: float) -> StudyRow:
    """Return the scalar ablation at 2^12 states, for five epochs."""
    options = {"optimizer__lr": rate, "optimizer__eps": eps, "optimizer__weight_decay": decay}
    name = f"scalar 2^12, rate {rate}, eps {eps}, decay {decay}"
    return _row(name, SCALAR_RECIPE, model__num_states=4096, train__epochs=5, **options)


SCALAR = Study(
    name="chiu2020-scalar",
    title="Rate and decay of the scalar ablation, tried at 2^12 states",
    topic=CHIU_TRIALS,
    paper=CHIU,
    trials=True,
    rows=tuple(
        _scalar(rate, eps, decay)
        for rate, eps, decay in (
            (0.03, 1e-8, 0.01),
            (0.03, 1e-8, 0.0),
            (0.03, 1e-8, 0.1),
            (0.03, 1e-8, 0.03),
            (0.1, 1e-8, 0.0),
            (0.01, 1e-8, 0.03),
            (0.1, 1e-8, 0.03),
            (0.3, 3e-5, 0.0),
            (0.1, 1e-5, 0.0),
            (1.0, 3e-5, 0.0),
            (1.0, 3e-4, 0.0),
            (0.3, 3e-4, 0.0),
            (0.3, 3e-5, 0.001),
        )
    ),
)
SPEED = Study(
    name="chiu2020-speed",
    title="Speed of the very large HMM, alone on the GPU",
    topic=CHIU_SIZES,
    paper=CHIU,
    rows=(
        _row("VL-HMM 2^15, two epochs, alone on the GPU", "ptb-vl-hmm", train__epochs=2),
        _row("VL-HMM 2^15, one epoch, alone on the GPU", "ptb-vl-hmm", train__epochs=1),
    ),
)
HALF_KEPT: dict[str, Any] = {"model__dropout": 0.5, "train__checks_per_epoch": 1, "train__max_tokens": 300_000}
LARGEST = Study(
    name="chiu2020-largest",
    title="The largest state space trained on one GPU",
    topic=CHIU_SIZES,
    paper=CHIU,
    rows=(
        _row("2^18 states, one epoch", "ptb-vl-hmm-18"),
        _row("2^18 states, half of them kept, a third of an epoch", "ptb-vl-hmm-18", **HALF_KEPT),
    ),
)
LSTM: dict[str, Any] = {
    "data": "ptb",
    "tokenizer__split": "whitespace",
    "model__kind": "lstm",
    "model__negatives": 0,
    "train__epochs": 4,
}
SMALL: dict[str, Any] = {
    "model__num_states": 4096,
    "model__hidden": 128,
    "train__epochs": 4,
    "train__precision": "32-true",
}
CPU = Study(
    name="chiu2020-cpu",
    title="The very large HMM without a GPU",
    topic=CHIU_SIZES,
    paper=CHIU,
    device="CPU",
    rows=(
        _row("2^13 states, two CPU cores", "ptb-vl-hmm-12-cpu"),
        _row("2^12 states, 4 epochs, two CPU cores", "ptb-vl-hmm", **SMALL),
        _row("LSTM 2x256, 4 epochs, two CPU cores", BASELINE, **LSTM),
    ),
    headers={
        "ngram_test_perplexity": "5-gram, test",
        "mixture_valid_perplexity": "HMM + 5-gram, valid",
        "mixture_test_perplexity": "HMM + 5-gram, test",
        "cpu_seconds": "CPU seconds",
    },
)
BROWN = Study(
    name="chiu2020-brown",
    title="Brown clustering of PTB's training text, beside the classic tool's clusters of it",
    topic=CHIU_SIZES,
    paper=CHIU,
    device="CPU",
    made_by="python -m benchmarks.brown",
    headers=BROWN_HEADERS,
)


def _awd(recipe: str, what: str, **settings: Any) -> StudyRow:
    """Return the LSTM with weight dropout and further settings, given as section__name."""
    text = {"ptb-awd-lstm": "PTB", "wikitext2-awd-lstm": "WikiText-2"}[recipe]
    named = {**ALL_WORDS, **{key.replace("__", "."): value for key, value in settings.items()}}
    return StudyRow(name=f"{text}, AWD-LSTM, {what}", recipe=recipe, settings=named, seeds=(0,))


def _wikitext(what: str, inputs: float, layers: float, outputs: float, **settings: Any) -> StudyRow:
    """Return the LSTM on WikiText-2 with other dropout and the decay of PTB."""
    dropout = {"model__input_dropout": inputs, "model__layer_dropout": layers, "model__dropout": outputs}
    return _awd(
        "wikitext2-awd-lstm", f"{what}, decay 0.01", **dropout, optimizer__weight_decay=0.01, **PENALTIES, **settings
    )


AWD_TRIALS = Study(
    name="chiu2020-awd",
    title="Penalties, dropout and size of the LSTM with weight dropout",
    topic=CHIU_TRIALS,
    paper=CHIU,
    trials=True,
    rows=(
        _awd("ptb-awd-lstm", "no penalties", **NO_PENALTIES),
        _awd("ptb-awd-lstm", "3 layers", model__layers=3, **PENALTIES),
        _wikitext("dropout 0.5 0.3 0.5", 0.5, 0.3, 0.5),
        _wikitext("dropout 0.6 0.4 0.6, 90 epochs", 0.6, 0.4, 0.6, train__epochs=90),
    ),
    not_run=(NotRun(UNSPENT, rows=("PTB, AWD-LSTM, 3 layers",)),),
)
