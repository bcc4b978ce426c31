"""The script of the curves, on tiny models: every point of an axis, in the rows of the studies."""

import sys
from pathlib import Path

import pytest

from hmmlm.report.plots import logarithmic, new_figure
from papers.catalogue import STUDIES
from papers.drawing import draw
from papers.records import read_records
from papers.rows import measured_rows


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_time_and_memory_of_every_point_of_an_axis(tmp_path: Path) -> None:
    from benchmarks import curves

    curves.main(["--device", "cpu", "--shrink", "16", "--axes", "states", "--results", str(tmp_path)])
    for name, metric in (("time-curves-cpu", "step_ms"), ("memory-curves-cpu", "peak_memory_gb")):
        records = read_records(tmp_path / f"{name}.json")
        assert [record["row"] for record in records] == [f"states × {n}" for n in ("0.25", "0.5", "1", "2", "4")]
        assert all(record["metrics"][metric] >= 0 for record in records)
    study = STUDIES["time-curves-cpu"]
    figure = draw(study, {study.name: measured_rows(study, read_records(tmp_path / f"{study.name}.json"))})
    assert figure is not None and "states: slope" in str(figure.axes[0].get_legend_handles_labels()[1])


def test_small_values_can_be_read_off_a_logarithmic_axis() -> None:
    figure, axes = new_figure(6, 4)
    axes.plot([1, 2], [0.005, 9.0])
    logarithmic(axes)
    figure.canvas.draw()
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert len(set(labels)) == len(labels) and {"0.01", "1.5", "7"} <= set(labels)
