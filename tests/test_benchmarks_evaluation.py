"""The script that times an evaluation, on a small model: one record in the row of its study."""

from pathlib import Path

from benchmarks import evaluation
from papers.catalogue import STUDIES
from papers.records import read_records
from papers.rows import measured_rows


def test_an_evaluation_is_timed_on_a_text_of_ones_own(tmp_path: Path) -> None:
    text, out = tmp_path / "mine.txt", tmp_path / "found.json"
    text.write_text("the cat sat\na dog barked\n" * 20)
    evaluation.main(["--data", str(text), "--states", "256", "--repeats", "1", "--out", str(out)])
    (record,) = read_records(out)
    assert record["row"] == "blocked, 256 states, mine.txt"
    assert record["settings"]["tokens"] == 160 and record["metrics"]["command_seconds"] > 0
    assert len(measured_rows(STUDIES["evaluation-cpu"], [record])) == 1
