"""The lowest perplexities we reach, beyond what the papers ran."""

from __future__ import annotations

from papers.study import Study, StudyRow


def _pure(states: int, dropout: float, epochs: int, headline: str = "") -> StudyRow:
    """Return a very large HMM on PTB with clusters refined by exchange; it is fixed at test time."""
    return StudyRow(
        name=f"PTB, pure HMM, 2^{states.bit_length() - 1} states, dropout {dropout}, {epochs} epochs",
        recipe="ptb-vl-hmm",
        settings={
            "model.states": states,
            "model.dropout": dropout,
            "model.exchange_passes": 10,
            "train.epochs": epochs,
        },
        seeds=(0, 1),
        headline=headline,
    )


RECORD = Study(
    name="record",
    title="The lowest perplexities: larger state spaces, refined clusters",
    rows=(
        _pure(2**17, 0.75, 28, headline="Very large HMM, 2^17 states, PTB"),
        _pure(2**18, 0.875, 28),
    ),
)
