"""The script of the headline steps: its rows, and what it measures of each, on tiny models."""

from pathlib import Path

import pytest

from papers.records import read_records

NAMES = [
    "dense 512 AdamW",
    "dense 512 Baum-Welch",
    "dense 4096 AdamW",
    "dense 512 AdamW, batch 2048",
    "dense 16384 AdamW, batch 256",
    "evaluation 4096",
    "VL-HMM 2^15",
    "VL-HMM 2^17",
]


@pytest.mark.slow
def test_rows_of_every_kind_are_measured_beside_their_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import speed

    assert list(speed.ROWS) == NAMES
    monkeypatch.setattr(speed, "ROUND_SECONDS", 1e-4)
    out, profile = tmp_path / "speed.json", tmp_path / "profile.txt"
    chosen = ["dense 512 AdamW", "dense 512 Baum-Welch", "evaluation 4096", "VL-HMM 2^15"]
    speed.main(["--small", "--rows", *chosen, "--out", str(out), "--profile", str(profile)])
    records = read_records(out)
    assert [record["row"] for record in records] == chosen
    for record in records:
        metrics = record["metrics"]
        assert metrics["tokens_per_second"] > 0 and metrics["step_ms"] > 0 and metrics["bare_products_ms"] > 0
        for name in ("log_likelihood_error", "log_likelihood_error_peaked"):
            assert metrics[name] < 1e-5
        for name in ("gradient_error", "gradient_error_peaked"):
            assert metrics[name] < 1e-2
    assert {"autograd_ms"} <= set(records[0]["metrics"]) and "autograd_ms" not in records[2]["metrics"]
    text = profile.read_text()
    assert all(f"## {name}:" in text for name in chosen) and "kernel" in text
