"""The lowest perplexities we reach, beyond what the papers ran."""

from __future__ import annotations

from papers.study import Study, StudyRow

PTB_TEACHER = StudyRow(
    name="PTB, AWD-LSTM, 60 epochs",
    recipe="ptb-awd-lstm",
    settings={
        "model.input_dropout": 0.6,
        "model.layer_dropout": 0.4,
        "model.dropout": 0.6,
        "train.epochs": 60,
    },
    seeds=(0,),
)


def _pure(
    states: int, dropout: float, epochs: int, headline: str = "", teacher: StudyRow | None = None, words: int = 2
) -> StudyRow:
    """Return a very large HMM on PTB with clusters refined by exchange; it is fixed at test time.

    With a teacher, `words` next words that it draws at each position have half the weight.
    """
    learned = "" if teacher is None else ", next words of an LSTM"
    return StudyRow(
        name=f"PTB, pure HMM, 2^{states.bit_length() - 1} states, dropout {dropout}, {epochs} epochs{learned}",
        recipe="ptb-vl-hmm",
        settings={
            "model.states": states,
            "model.dropout": dropout,
            "model.exchange_passes": 10,
            "train.epochs": epochs,
            **({} if teacher is None else {"next_words.weight": 0.5, "next_words.samples": words}),
        },
        seeds=(0, 1),
        headline=headline,
        teacher=teacher,
    )


RECORD = Study(
    name="record",
    title="The lowest perplexities: larger state spaces, refined clusters",
    rows=(
        _pure(2**17, 0.75, 28, headline="Very large HMM, 2^17 states, PTB"),
        _pure(2**18, 0.875, 28),
        _pure(2**17, 0.75, 22, teacher=PTB_TEACHER),
        PTB_TEACHER,
    ),
)
