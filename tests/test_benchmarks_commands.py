"""The script that times commands, on a small model: records in the rows of its study."""

from pathlib import Path

import pytest

from benchmarks import commands
from papers.catalogue import STUDIES
from papers.records import read_records
from papers.rows import measured_rows


@pytest.mark.slow
def test_commands_are_timed_on_a_text_of_ones_own(tmp_path: Path) -> None:
    text, out = tmp_path / "mine.txt", tmp_path / "found.json"
    text.write_text("the cat sat\na dog barked\n" * 20)
    commands.main(["--data", str(text), "--states", "256", "--repeats", "1", "--out", str(out)])
    records = read_records(out)
    rows = ["import hmmlm", "hmmlm --help", "hmmlm eval, 256 states, mine.txt"]
    assert [record["row"] for record in records] == rows
    assert records[-1]["settings"]["tokens"] == 160 and records[-1]["metrics"]["command_seconds"] > 0
    assert len(measured_rows(STUDIES["commands-cpu"], records)) == 3
