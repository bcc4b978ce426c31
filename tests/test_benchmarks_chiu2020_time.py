"""The script of the times of Chiu & Rush 2020, on tiny models, and what its records decide."""

from pathlib import Path

import pytest

from papers.chiu2020_time import EPOCH, FULL_ROW, SCALAR_ROW, TIME, TOKENS
from papers.claims import claims_table
from papers.records import read_records
from papers.rows import measured_rows
from papers.study import CHIU, FORWARD, STEP


def test_every_ablation_is_timed_with_and_without_dropout() -> None:
    names = [row.name for row in TIME.rows]
    kinds = [name for name in names if not name.endswith("- state dropout")]
    assert len(names) == 9 and kinds[:3] == [FULL_ROW.name, SCALAR_ROW.name, "PTB, + block emb"]


@pytest.mark.slow
def test_rows_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import chiu2020_time

    monkeypatch.setattr(chiu2020_time, "ROUND_SECONDS", 1e-4)
    out, names = tmp_path / "time.json", [FULL_ROW.name, SCALAR_ROW.name, "PTB, LSTM 2x256"]
    chiu2020_time.main(["--small", "--rows", *names, "--out", str(out)])
    records = read_records(out)
    assert [record["row"] for record in records] == names
    steps = TOKENS / 32 + 1  # of 4 × 8 words
    for record in records:
        metrics = record["metrics"]
        assert metrics[STEP] > 0 and metrics["evaluation_ms"] > 0
        assert metrics[EPOCH] == pytest.approx(metrics[STEP] * steps / 1e3, rel=0.01)
        assert (FORWARD in metrics) == (record["row"] != names[2])
    rows = measured_rows(TIME, records)
    assert [row.overrides for row in rows] == [{}] * 3


def test_a_claim_about_a_multiple_is_decided_up_to_its_tolerance() -> None:
    def verdicts(full: float, scalar: float) -> str:
        times = {FULL_ROW.name: full, SCALAR_ROW.name: scalar}
        made = [{"row": name, "metrics": {FORWARD: value}} for name, value in times.items()]
        table = claims_table([TIME], {TIME.name: measured_rows(TIME, made)}, CHIU.page)
        return next(line[3] for line in table if line[0].startswith("A forward pass of the scalar model"))

    assert verdicts(3.0, 1.0) == verdicts(2.75, 1.0) == "holds"
    assert verdicts(2.65, 1.0) == "does not hold"
