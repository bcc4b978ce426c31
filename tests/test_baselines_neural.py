"""The feed-forward model and the LSTM: what they read, that they are distributions, and that they learn."""

from __future__ import annotations

import json
import re
from functools import partial
from itertools import pairwise
from pathlib import Path

import commands
import numpy as np
import pytest
import torch
from network_runs import interrupt_after, write_pairs
from safetensors.torch import load_file

from hmmlm.baselines.neural import NeuralBaseline, load_baseline, make_baseline
from hmmlm.cli.main import main
from hmmlm.errors import InputError
from hmmlm.initialization.teacher import open_teacher
from hmmlm.learning.baseline import score_baseline, train_baseline
from hmmlm.learning.config_baseline import BaselineConfig, BaselineModelConfig

KINDS = ("feedforward", "lstm")


def small(kind: str, vocab: int = 7, dropout: float = 0.0, **settings: int) -> NeuralBaseline:
    sizes = {"hidden": 8, "layers": 2, "order": 4, "first": 0} | settings
    generator = torch.Generator().manual_seed(1)
    return make_baseline(kind, vocab, dropout=dropout, generator=generator, **sizes).double().eval()  # type: ignore[arg-type]


def text(rows: int, length: int, vocab: int = 7) -> torch.Tensor:
    return torch.randint(vocab, (rows, length), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("kind", KINDS)
def test_every_context_has_a_distribution(kind: str) -> None:
    model = small(kind)
    for context in (text(1, 0), text(1, 1), text(1, 6)):
        each = torch.cat([context.expand(7, -1), torch.arange(7)[:, None]], 1)
        assert torch.logsumexp(model.log_probs(each)[0][:, -1], 0).item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cuts", [(0, 1, 2, 9), (0, 5, 9), (0, 8, 9)])
def test_windows_read_on_where_the_last_one_ended(kind: str, cuts: tuple[int, ...]) -> None:
    model, tokens = small(kind), text(3, 9)
    whole, _ = model.log_probs(tokens)
    state, parts = None, []
    for begin, end in pairwise(cuts):
        part, state = model.log_probs(tokens[:, begin:end], state)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    fewer, _ = model.log_probs(tokens[:2, -1:], model.log_probs(tokens[:, :-1])[1])
    torch.testing.assert_close(fewer, whole[:2, -1:])


@pytest.mark.parametrize(("kind", "reads"), [("feedforward", 3), ("lstm", 8)])
def test_how_far_each_one_reads(kind: str, reads: int) -> None:
    model, tokens = small(kind), text(1, 9)
    last = model.log_probs(tokens)[0][0, -1]
    for back in range(1, 9):
        changed = tokens.clone()
        changed[0, -1 - back] = (changed[0, -1 - back] + 1) % 7
        assert bool(model.log_probs(changed)[0][0, -1] == last) == (back > reads)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_scored_beyond_a_row(kind: str) -> None:
    model, tokens = small(kind), text(2, 6)
    ragged = tokens.clone()
    ragged[1, 4:] = -1
    whole, scored = model.log_probs(tokens)[0], model.log_probs(ragged)[0]
    torch.testing.assert_close(scored[0], whole[0])
    torch.testing.assert_close(scored[1], torch.cat([whole[1, :4], torch.zeros(2)]))


@pytest.mark.parametrize(
    ("kind", "words", "millions"),
    [("feedforward", 10_000, 2.9), ("lstm", 10_000, 3.6), ("feedforward", 33_278, 8.8), ("lstm", 33_278, 9.6)],
)
def test_as_many_parameters_as_the_paper_prints(kind: str, words: int, millions: float) -> None:
    settings = BaselineModelConfig(kind=kind)  # type: ignore[arg-type]
    with torch.device("meta"):
        model = make_baseline(**settings.model_dump(), vocab_size=words, first=0)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.06)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("text"))


SETTINGS = ["--model.hidden", "32", "--model.dropout", "0.1", "--batch-size", "4", "--length", "16", "--rate", "0.02",
            "--train.epochs", "10", "--train.device", "cpu", "--train.no-tensorboard"]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_baseline_learns_from_the_command_line(
    kind: str, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main(["baseline", "--data", str(corpus), "--model.kind", kind, "--out", str(out), *SETTINGS]) == 0
    found = re.search(r"perplexity: valid ([\d.]+), test ([\d.]+)", capsys.readouterr().out)
    assert found and 1.8 < float(found[1]) < 2.6 and 1.8 < float(found[2]) < 2.6

    # the saved model, read in one go, is the one that was scored
    model, tokenizer = load_baseline(out / "best")
    tokens = np.fromfile(out / "data" / "test.bin", np.uint16).astype(np.int64)
    assert tokenizer.vocab_size == 18 and len(tokens) < 2_000  # one stream
    mean = model.log_probs(torch.from_numpy(tokens)[None])[0].mean().detach()
    scores = json.loads((out / "perplexity.json").read_text())
    assert scores["test"] == pytest.approx(float(torch.exp(-mean)), rel=1e-5)
    assert score_baseline(out, "test") == scores["test"]


def tiny(corpus: Path, kind: str, **train: object) -> BaselineConfig:
    return BaselineConfig.model_validate({
        "data": str(corpus), "model": {"kind": kind, "hidden": 8}, "length": 16, "batch_size": 4,
        "train": {"epochs": 2, "device": "cpu", "tensorboard": False, **train},
    })  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_was_stopped_in_an_epoch_comes_to_the_same(
    kind: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_baseline(tiny(corpus, kind), tmp_path / "straight")
    interrupt_after(3, monkeypatch)
    result = train_baseline(tiny(corpus, kind), tmp_path / "stopped")
    assert not result.finished and result.steps == 3 and not (tmp_path / "stopped" / "perplexity.json").exists()
    monkeypatch.undo()
    assert train_baseline(tiny(corpus, kind), tmp_path / "stopped", resume=True).finished
    first, second = (load_file(tmp_path / run / "last" / "state.safetensors") for run in ("straight", "stopped"))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_bad_input(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failure = partial(commands.failure, capsys, "baseline")

    assert "order is for kind = 'feedforward'" in failure("--model.order", "3")
    assert "--rate: Input should be greater than 0 (given -1.0)" in failure("--rate", "-1")
    assert "--betas.1: Input should be less than 1 (given 1.0)" in failure("--betas", "0.9", "1.0")
    assert "use 'cosine' or 'constant'" in failure("--schedule.kind", "plateau", "--data", str(corpus))
    assert "no run to resume" in failure("--resume", str(tmp_path / "none"))
    run = tmp_path / "run"
    train_baseline(tiny(corpus, "lstm", epochs=1), run)
    assert "already holds a run" in failure("--data", str(corpus), "--out", str(run))
    assert "model is not what the run" in failure("--resume", str(run), "--model.hidden", "9")
    assert "leave out --out" in failure("--resume", str(run), "--out", str(run))
    with pytest.raises(InputError, match=r"is not of a run of hmmlm teacher: model\.kind"):
        main_teacher_config(run)
    assert f"{run} is of `hmmlm baseline`: a neural network" in commands.failure(capsys, "eval", str(run))
    with pytest.raises(InputError, match="is a run of `hmmlm baseline`"):
        open_teacher(str(run), device="cpu")
    (run / "best" / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(InputError, match="best is damaged or of another model"):
        load_baseline(run / "best")


def main_teacher_config(run: Path) -> None:
    from hmmlm.learning.config_teacher import saved_teacher_config

    saved_teacher_config(run)
