"""GPT teachers: the network, its folder, and training it with `hmmlm teacher`."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import commands
from helpers.network_runs import interrupt_after, write_pairs
from helpers.teachers import LINES
from safetensors.torch import save_file

from hmmlm.cli.main import main
from hmmlm.config.networks import TeacherConfig
from hmmlm.config.training import read_config
from hmmlm.data.tokenizers import HuggingFaceTokenizer
from hmmlm.errors import InputError
from hmmlm.runs.checkpoint import read_checkpoint
from hmmlm.teachers.embeddings import student_embeddings
from hmmlm.teachers.gpt import GPT, GPTShape
from hmmlm.teachers.teacher import open_teacher
from hmmlm.training.networks import train_teacher


@pytest.fixture(scope="module")
def bpe() -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer.train(LINES * 5, 300)


SHAPE = GPTShape(vocab_size=20, hidden=16, layers=2, heads=2, context=8)


def test_likelihood_is_the_product_of_next_token_probabilities() -> None:
    model = GPT(SHAPE, 7, torch.Generator().manual_seed(0))
    tokens = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, -1, -1]])
    expected = torch.zeros(2)
    for row, length in ((0, 5), (1, 3)):
        for i in range(length):  # one pass per token, so that no later token is visible
            before = torch.cat([torch.tensor([7]), tokens[row, :i]])[None]
            logits = model.embed_tokens(before, 2)[0, -1] @ model.embedding.weight.T
            expected[row] += logits.log_softmax(-1)[tokens[row, i]]
    torch.testing.assert_close(model.score(tokens)[0], expected)


def test_order_matters() -> None:
    model = GPT(SHAPE, 7, torch.Generator().manual_seed(0))
    last = model.embed_tokens(torch.tensor([[1, 2, 3, 4], [2, 1, 3, 4]]), 2)[:, -1]
    assert not torch.allclose(last[0], last[1], atol=1e-6)


def test_saved_and_opened_again(bpe: HuggingFaceTokenizer, tmp_path: Path) -> None:
    shape = GPTShape(bpe.vocab_size, hidden=16, layers=2, heads=2, context=8)
    model = GPT(shape, bpe.eos_id, torch.Generator().manual_seed(3))
    model.save(tmp_path, bpe)
    teacher = open_teacher(str(tmp_path), device="cpu")
    assert (teacher.hidden_size, teacher.layers, teacher.vocab_size) == (16, 2, bpe.vocab_size)
    tokens = torch.tensor([[3, 1, 4]])
    for layer, index in ((-1, 2), (2, 2), (1, 1), (-3, 0)):
        assert torch.equal(teacher.embed(tokens, layer), model.embed_tokens(tokens, index))
    assert torch.equal(teacher.embed(tokens, 0), model.embedding(tokens))
    assert torch.equal(teacher.head(), model.embedding.weight)
    assert not teacher.embed(tokens).requires_grad
    read = student_embeddings(teacher, bpe, tokens, align="read")
    predict = student_embeddings(teacher, bpe, tokens, align="predict")
    assert read.shape == (1, 3, 16)
    assert torch.equal(read[:, :-1], predict[:, 1:])  # the embedding that read a token predicts the next

    random = [open_teacher(str(tmp_path), random=True, seed=seed, device="cpu").embed(tokens) for seed in (0, 0, 1)]
    assert torch.equal(random[0], random[1])
    assert not torch.equal(random[0], random[2]) and not torch.equal(random[0], teacher.embed(tokens))


def test_a_folder_of_an_earlier_version_opens(bpe: HuggingFaceTokenizer, tmp_path: Path) -> None:
    shape = GPTShape(bpe.vocab_size, hidden=16, layers=1, heads=2, context=8)
    model = GPT(shape, bpe.eos_id, torch.Generator().manual_seed(0))
    block = ("attention_norm", "mlp_norm", "attention_in", "attention_out", "mlp_in", "mlp_out")
    modules = ["norm", *(f"blocks.0.{name}" for name in block)]
    names = {f"{module}.{kind}" for module in modules for kind in ("weight", "bias")}
    assert model.state_dict().keys() == {"embedding.weight", *names}
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    bpe.save(tmp_path)
    header = {"format": "hmmlm teacher", "version": 1, **asdict(shape), "fingerprint": bpe.fingerprint()}
    (tmp_path / "config.json").write_text(json.dumps(header))
    assert torch.equal(open_teacher(str(tmp_path), device="cpu").head(), model.embedding.weight)


def test_damaged_teachers(bpe: HuggingFaceTokenizer, tmp_path: Path) -> None:
    GPT(GPTShape(bpe.vocab_size, 4, 1, 1, 8), bpe.eos_id).save(tmp_path, bpe)
    config = json.loads((tmp_path / "config.json").read_text())

    def refused(match: str, **changes: object) -> None:
        (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
        with pytest.raises(InputError, match=match) as error:
            open_teacher(str(tmp_path))
        assert "\n" not in str(error.value)

    refused("has version 2", version=2)
    refused(r"tokenizer.* is not the one", tokenizer="0")
    refused(r"embedding.weight has shape \[\d+, 4\], config.json has \[\d+, 8\]", hidden=8)
    refused("config.json: hidden is 0, not an integer of at least 1", hidden=0)
    (tmp_path / "model.safetensors").unlink()
    refused("has no weights: .*model.safetensors is missing")
    open_teacher(str(tmp_path), random=True)


# --- training -------------------------------------------------------------------------------------------------------


def tiny_teacher(corpus: Path, **train: Any) -> TeacherConfig:
    return read_config(
        TeacherConfig,
        {
            "data": str(corpus),
            "model": {"hidden": 32, "layers": 1, "heads": 2},
            "batches": {"length": 16, "batch_size": 8},
            "optimizer": {"lr": 0.01},
            "schedule": {"kind": "constant", "warmup": 0.0},
            "train": {"epochs": 4, "device": "cpu", "tensorboard": False, **train},
        },
    )


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("text"))


def test_a_teacher_learns_from_the_command_line(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "teacher"
    network = "--model.hidden 32 --model.layers 1 --model.heads 2 --batches.length 15 --batches.batch-size 8"
    training = "--optimizer.lr 0.01 --train.epochs 6 --train.device cpu --no-train.tensorboard"
    settings = f"{network} {training}".split()
    assert main(["teacher", "--data", str(corpus), "--out", str(out), *settings]) == 0
    found = re.search(r"of valid perplexity ([\d.]+) \(", capsys.readouterr().out)
    assert found and 1.8 < float(found[1]) < 2.6  # 17 words; 2.0 is optimal, and 30 validation lines add noise
    teacher = open_teacher(str(out), device="cpu")
    assert teacher.context == 16 and teacher.hidden_size == 32
    valid = [r for r in map(json.loads, (out / "history.jsonl").read_text().splitlines()) if r["event"] == "valid"]
    assert len(valid) == 6 and valid[-1]["perplexity"] < valid[0]["perplexity"]

    # another run reuses the token files and the tokenizer
    again = tmp_path / "again"
    assert main(["teacher", "--data", str(out), "--out", str(again), *settings, "--train.epochs", "1"]) == 0
    assert open_teacher(str(again), device="cpu").tokenizer.pieces == teacher.tokenizer.pieces


def test_a_resumed_teacher_is_the_same(corpus: Path, tmp_path: Path) -> None:
    straight = train_teacher(tiny_teacher(corpus, epochs=2), tmp_path / "straight")
    train_teacher(tiny_teacher(corpus, epochs=1), tmp_path / "resumed")
    resumed = train_teacher(tiny_teacher(corpus, epochs=2), tmp_path / "resumed", resume=True)
    assert (resumed.steps, resumed.tokens) == (straight.steps, straight.tokens)
    first, second = (read_checkpoint(tmp_path / run / "last")[0] for run in ("straight", "resumed"))
    assert first.keys() == second.keys()
    # the window of steps since the last record was written and emptied where the first run ended
    assert [name for name in first if not torch.equal(first[name], second[name])] == ["window"]


def test_a_stopped_teacher_is_saved(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_after(3, monkeypatch)
    config = tiny_teacher(corpus)
    result = train_teacher(config, tmp_path)
    assert not result.finished and result.steps == 3
    monkeypatch.undo()
    assert train_teacher(config, tmp_path, resume=True).finished


def test_bad_runs_of_the_command(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failure = partial(commands.failure, capsys, "teacher")

    assert "hidden (30) must be a multiple" in failure("--model.hidden", "30")
    assert "no run to resume" in failure("--resume", str(tmp_path / "none"))
    assert "no corpus" in failure("--data", str(tmp_path / "none.txt"), "--out", str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()
    assert "Input should be 'adamw' (given 'baum-welch')" in failure("--optimizer.kind", "baum-welch")
    run = tmp_path / "run"
    train_teacher(tiny_teacher(corpus, epochs=1), run)
    assert "already contains a run" in failure("--data", str(corpus), "--out", str(run))
    assert "optimizer.lr is 1.0, but the run in" in failure("--resume", str(run), "--optimizer.lr", "1")
    assert "leave out --out" in failure("--resume", str(run), "--out", str(run))


def test_a_run_without_validated_weights_is_refused(corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train_teacher(tiny_teacher(corpus, epochs=1), run)
    (run / "best").unlink()
    with pytest.raises(InputError, match=f"no validated weights yet: resume with `hmmlm teacher --resume {run}`"):
        open_teacher(str(run), device="cpu")
    fields = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**fields, "initialization": {}}))
    with pytest.raises(InputError, match="is a run of `hmmlm train`"):
        open_teacher(str(run), device="cpu")


def test_resuming_with_fewer_epochs_is_refused(corpus: Path, tmp_path: Path) -> None:
    train_teacher(tiny_teacher(corpus, epochs=2), tmp_path)
    saved = (tmp_path / "config.json").read_bytes()
    with pytest.raises(InputError, match=r"already has 3,240 tokens \(epoch 2\), more than the 1,620"):
        train_teacher(tiny_teacher(corpus, epochs=1), tmp_path, resume=True)
    assert (tmp_path / "config.json").read_bytes() == saved
