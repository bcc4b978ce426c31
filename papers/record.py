"""The lowest perplexities we reach, beyond what the papers ran."""

from __future__ import annotations

from typing import Any

from papers.chiu2020 import ALL_WORDS, AWD_PTB
from papers.renames import FIRST_WIKITEXT_LSTM, NO_PENALTIES
from papers.study import LOWEST, UNSPENT, Combination, NotRun, Study, StudyRow

NGRAM, CACHE = 5, 500
"""Order of the Kneser-Ney n-gram and words of the cache in mixtures."""
WIKITEXT_CACHE = 2000
"""Articles of WikiText-2 are longer than those of PTB."""
DISTILLED = "distilled from an LSTM"
"""In the labels of models that learn next words that an LSTM draws."""
RECENT, WIKITEXT_RECENT = 150, 300
"""Half-life of recent words in mixtures that adapt to them."""

PTB_TEACHER = StudyRow(
    name="PTB, AWD-LSTM, 60 epochs",
    recipe="ptb-awd-lstm",
    settings={
        **ALL_WORDS,
        "model.input_dropout": 0.6,
        "model.layer_dropout": 0.4,
        "model.dropout": 0.6,
        "train.epochs": 60,
        **NO_PENALTIES,
    },
    seeds=(0,),
)

WIKITEXT_TEACHER = StudyRow(
    name="WikiText-2, AWD-LSTM, 25 epochs",
    recipe="wikitext2-awd-lstm",
    settings={**ALL_WORDS, "train.epochs": 25, **NO_PENALTIES, **FIRST_WIKITEXT_LSTM},
    seeds=(0,),
)


def _named(settings: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return settings given as section__name by their dotted names, and their text in the name of a row."""
    named = {name.replace("__", "."): value for name, value in settings.items()}
    labels = {name: "rate" if name == "optimizer.lr" else name.partition(".")[2] for name in named}  # as rows say
    return named, "".join(f", {labels[name].replace('_', ' ')} {value}" for name, value in named.items())


def _pure(
    states: int,
    dropout: float,
    epochs: int,
    headline: str = "",
    teacher: StudyRow | None = None,
    words: int = 2,
    text: str = "PTB",
    **settings: Any,
) -> StudyRow:
    """Return a very large HMM with clusters refined by exchange; it is fixed at test time.

    With a teacher, `words` next words that it draws at each position have half the weight. Further settings are given
    as section__name; the name of the row has their values.
    """
    named, more = _named(settings)
    learned = "" if teacher is None else ", next words of an LSTM"
    return StudyRow(
        name=f"{text}, pure HMM, 2^{states.bit_length() - 1} states, dropout {dropout}, {epochs} epochs{learned}{more}",
        recipe={"PTB": "ptb-vl-hmm", "WikiText-2": "wikitext2-vl-hmm"}[text],
        settings={
            "model.num_states": states,
            "model.dropout": dropout,
            "model.exchange_passes": 10,
            "train.epochs": epochs,
            **({} if teacher is None else {"next_words.weight": 0.5, "next_words.samples": words}),
            **named,
        },
        seeds=(0, 1),
        headline=headline,
        teacher=teacher,
    )


def _combined(name: str, parts: tuple[StudyRow, ...], headline: str = "", **fields: Any) -> StudyRow:
    """Return a row that combines models of other rows, each with the seed of the run."""
    combine = Combination(parts=parts, **fields)
    return StudyRow(name=name, recipe=parts[0].recipe, seeds=(0, 1), combine=combine, headline=headline)


PTB = _pure(2**17, 0.75, 28, "Very large HMM, 2^17 states, PTB")
OTHERS = (
    _pure(2**17, 0.75, 28, model__blocks=256),
    _pure(2**16, 0.5, 28, model__blocks=64),
    _pure(2**17, 0.75, 28, model__exchange_passes=0),
)
"""Models with other clusters, which a union gains most from."""
LARGER: dict[str, Any] = {"batches__batch_size": 64, "optimizer__lr": 0.006}
"""Batches of four times the rows at twice the rate, which take half the time."""
TAUGHT_16 = _pure(2**17, 0.75, 20, teacher=PTB_TEACHER)
TAUGHT = (
    _pure(2**17, 0.75, 24, teacher=PTB_TEACHER, **LARGER),
    _pure(2**17, 0.75, 24, teacher=PTB_TEACHER, model__blocks=256, **LARGER),
)
"""Models that also learn an LSTM's next words."""
WIKITEXT = (
    _pure(2**17, 0.75, 12, text="WikiText-2", **LARGER),
    _pure(
        2**17,
        0.75,
        14,
        "Very large HMM, 2^17 states, WikiText-2",
        text="WikiText-2",
        batches__batch_size=32,
        optimizer__lr=0.004,
    ),
)
SMALLER: dict[str, Any] = {"model__blocks": 256, "batches__batch_size": 32, "optimizer__lr": 0.004}
"""Blocks of half the states, and batches of twice the rows of the recipe."""
TAUGHT_SMALLER = (
    _pure(2**17, 0.75, 24, teacher=AWD_PTB, **SMALLER),
    _pure(2**17, 0.75, 24, teacher=AWD_PTB, **{**SMALLER, "model__blocks": 512}),
    _pure(2**17, 0.75, 24, teacher=AWD_PTB, model__exchange_passes=0, **SMALLER),
)
"""Models of different clusters that learn the next words of a better LSTM."""
WIKITEXT_256 = tuple(_pure(2**17, dropout, 18, text="WikiText-2", **SMALLER) for dropout in (0.75, 0.625))
WIKITEXT_TAUGHT = tuple(
    _pure(2**17, dropout, 26, headline, WIKITEXT_TEACHER, text="WikiText-2", **SMALLER)
    for dropout, headline in ((0.75, f"Very large HMM, 2^17 states, {DISTILLED}, WikiText-2"), (0.625, ""))
)
WITH_RECENT: dict[str, Any] = {"mixed": "token", "ngram": NGRAM, "recent": RECENT}
RECENT_COUNTS = f"Kneser-Ney {NGRAM}-gram and recent words, half-life {RECENT}"
WITH_COUNTS: dict[str, Any] = {"mixed": "token", "ngram": NGRAM, "cache": CACHE}
COUNTS = f"Kneser-Ney {NGRAM}-gram and cache of {CACHE} words"
WIKITEXT_WITH_RECENT: dict[str, Any] = {"mixed": "token", "ngram": NGRAM, "recent": WIKITEXT_RECENT}
WIKITEXT_RECENT_COUNTS = f"Kneser-Ney {NGRAM}-gram and recent words, half-life {WIKITEXT_RECENT}"
NOT_RUN = (
    "PTB, pure HMM, 2^18 states, dropout 0.875, 28 epochs",
    TAUGHT_SMALLER[2].name,
    *(row.name for row in OTHERS),
    "PTB, pure HMM, union of 2",
    "PTB, pure HMM, union of 4",
    "PTB, pure HMM, union of 3, next words of an LSTM, batch size 32",
    f"PTB, mixture of one HMM, {COUNTS}",
    f"PTB, mixture of one HMM, next words of an LSTM, batch size 64, {RECENT_COUNTS}",
    f"PTB, mixture of 2 HMMs, next words of an LSTM, {RECENT_COUNTS}",
    f"PTB, mixture of 3 HMMs, next words of an LSTM, batch size 32, {RECENT_COUNTS}",
    f"PTB, mixture of 4 HMMs, {COUNTS}",
    f"WikiText-2, mixture of one HMM, {WIKITEXT_RECENT_COUNTS}",
    *(row.name for row in WIKITEXT_256),
    WIKITEXT_TAUGHT[1].name,
    *(
        f"WikiText-2, mixture of {models}, {WIKITEXT_RECENT_COUNTS}"
        for models in (
            "one HMM, blocks 256, dropout 0.75",
            "one HMM, blocks 256, dropout 0.625",
            "2 HMMs, blocks 256",
            "one HMM, blocks 256, dropout 0.625, next words of an LSTM",
            "2 HMMs, blocks 256, next words of an LSTM",
        )
    ),
)
RECORD = Study(
    name="record",
    title="The lowest perplexities: larger state spaces, refined clusters, unions and mixtures",
    topic=LOWEST,
    not_run=(
        NotRun("second seeds: only of rows that the headline ones build on", seeds=(1,)),
        NotRun(UNSPENT, rows=NOT_RUN),
    ),
    rows=(
        PTB,
        _pure(2**18, 0.875, 28),
        TAUGHT_16,
        *TAUGHT,
        PTB_TEACHER,
        *TAUGHT_SMALLER,
        *OTHERS,
        _combined("PTB, pure HMM, union of 2", (PTB, OTHERS[0]), mixed="sequence"),
        _combined("PTB, pure HMM, union of 4", (PTB, *OTHERS), mixed="sequence"),
        _combined("PTB, pure HMM, union of 2, next words of an LSTM", TAUGHT, mixed="sequence"),
        *(
            _combined(
                f"PTB, pure HMM, union of {n}, next words of an LSTM, batch size 32",
                TAUGHT_SMALLER[:n],
                f"Union of two HMMs, {DISTILLED}, PTB" if n == 2 else "",
                mixed="sequence",
            )
            for n in (2, 3)
        ),
        _combined(f"PTB, mixture of one HMM, {COUNTS}", (PTB,), **WITH_COUNTS),
        _combined(f"PTB, mixture of one HMM, next words of an LSTM, {COUNTS}", (TAUGHT_16,), **WITH_COUNTS),
        _combined(
            f"PTB, mixture of one HMM, next words of an LSTM, batch size 64, {COUNTS}", TAUGHT[:1], **WITH_COUNTS
        ),
        _combined(
            f"PTB, mixture of 2 HMMs, next words of an LSTM, {COUNTS}",
            TAUGHT,
            **WITH_COUNTS,
        ),
        _combined(
            f"PTB, mixture of one HMM, next words of an LSTM, batch size 64, {RECENT_COUNTS}", TAUGHT[:1], **WITH_RECENT
        ),
        _combined(f"PTB, mixture of 2 HMMs, next words of an LSTM, {RECENT_COUNTS}", TAUGHT, **WITH_RECENT),
        *(
            _combined(
                f"PTB, mixture of {n} HMMs, next words of an LSTM, batch size 32, {RECENT_COUNTS}",
                TAUGHT_SMALLER[:n],
                f"Two HMMs that adapt to recent words, {DISTILLED}, with a 5-gram, PTB" if n == 2 else "",
                **WITH_RECENT,
            )
            for n in (2, 3)
        ),
        _combined(f"PTB, mixture of 4 HMMs, {COUNTS}", (PTB, *OTHERS), **WITH_COUNTS),
        *WIKITEXT,
        _combined(
            f"WikiText-2, mixture of one HMM, Kneser-Ney {NGRAM}-gram and cache of {WIKITEXT_CACHE:,} words",
            WIKITEXT[:1],
            "HMM with a 5-gram and a cache, WikiText-2",
            mixed="token",
            ngram=NGRAM,
            cache=WIKITEXT_CACHE,
        ),
        _combined(f"WikiText-2, mixture of one HMM, {WIKITEXT_RECENT_COUNTS}", WIKITEXT[1:], **WIKITEXT_WITH_RECENT),
        # A union would choose one model for the whole text, which is one sequence here: only mixtures gain from two.
        WIKITEXT_TEACHER,
        *WIKITEXT_256,
        *WIKITEXT_TAUGHT,
        *(
            _combined(
                f"WikiText-2, mixture of {count}{learned}, {WIKITEXT_RECENT_COUNTS}",
                parts,
                f"HMM that adapts to recent words, {DISTILLED}, with a 5-gram, WikiText-2"
                if parts == WIKITEXT_TAUGHT[:1]
                else "",
                **WIKITEXT_WITH_RECENT,
            )
            for learned, models in (("", WIKITEXT_256), (", next words of an LSTM", WIKITEXT_TAUGHT))
            for count, parts in (
                ("one HMM, blocks 256, dropout 0.75", models[:1]),
                ("one HMM, blocks 256, dropout 0.625", models[1:]),
                ("2 HMMs, blocks 256", models),
            )
        ),
        StudyRow(
            name="PTB, 2^20 states, one epoch",
            recipe="ptb-vl-hmm-18",
            # An eighth of the states is kept in each batch; 256 blocks, so that a block has 4,096 states.
            settings={
                "model.num_states": 2**20,
                "model.blocks": 256,
                "model.dropout": 0.875,
                "train.checks_per_epoch": 1,
                **_named(LARGER)[0],
            },
            seeds=(0,),
        ),
    ),
)
