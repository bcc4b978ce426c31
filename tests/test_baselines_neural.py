"""Neural baselines: their contexts, that they are distributions, and that they learn."""

from __future__ import annotations

import json
import re
import shlex
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import commands
from helpers.network_runs import interrupt_after, write_pairs
from helpers.runs import assert_same_run

from hmmlm.baselines.neural import (
    AwdLstm,
    AwdLstmConfig,
    FeedForwardConfig,
    LstmConfig,
    NeuralBaseline,
    RelaxedHmm,
    RelaxedHmmConfig,
    load_baseline,
)
from hmmlm.cli.main import main
from hmmlm.config.networks import BaselineConfig, TeacherConfig
from hmmlm.config.training import read_config
from hmmlm.data.tokenizers import WordTokenizer
from hmmlm.errors import InputError
from hmmlm.runs.folders import saved_config
from hmmlm.teachers.teacher import open_teacher
from hmmlm.training.networks import score_baseline, train_baseline

KINDS = ("feedforward", "lstm", "awd-lstm", "relaxed-hmm")
CONFIGS = {
    "feedforward": FeedForwardConfig(hidden=8, order=4, dropout=0),
    "lstm": LstmConfig(hidden=8, dropout=0),
    "awd-lstm": AwdLstmConfig(hidden=8, embedding=6),
    "relaxed-hmm": RelaxedHmmConfig(hidden=8),
}


def vocabulary(words: int) -> WordTokenizer:
    return WordTokenizer(["<unk>", "<eos>", *(f"w{i}" for i in range(words - 2))])


def small(kind: str) -> NeuralBaseline:
    return CONFIGS[kind].build(vocabulary(7), 0, torch.Generator().manual_seed(1)).double().eval()


def text(rows: int, length: int) -> torch.Tensor:
    return torch.randint(7, (rows, length), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("kind", KINDS)
def test_every_context_has_a_distribution(kind: str) -> None:
    model = small(kind)
    for context in (text(1, 0), text(1, 1), text(1, 6)):
        each = torch.cat([context.expand(7, -1), torch.arange(7)[:, None]], 1)
        last = model.score(each)[0][:, -1]
        assert torch.logsumexp(last, 0).item() == pytest.approx(0, abs=1e-6)
        hidden = model.score(context)[1] if context.shape[1] else model.start(1)
        torch.testing.assert_close(model.next_token(hidden)[0], last)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cuts", [(0, 1, 2, 9), (0, 5, 9), (0, 8, 9)])
def test_a_window_continues_the_previous_one(kind: str, cuts: tuple[int, ...]) -> None:
    model, tokens = small(kind), text(3, 9)
    whole, _ = model.score(tokens)
    hidden, parts = None, []
    for begin, end in pairwise(cuts):
        part, hidden = model.score(tokens[:, begin:end], hidden)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    fewer, _ = model.score(tokens[:2, -1:], model.score(tokens[:, :-1])[1])
    torch.testing.assert_close(fewer, whole[:2, -1:])


@pytest.mark.parametrize(("kind", "words"), [("feedforward", 3), ("lstm", 1), ("awd-lstm", 1), ("relaxed-hmm", 1)])
def test_a_text_is_read_after_eos(kind: str, words: int) -> None:
    assert small(kind).start(2)[0].tolist() == [[vocabulary(7).eos_id] * words] * 2


@pytest.mark.parametrize(("kind", "reads"), [("feedforward", 3), ("lstm", 8), ("awd-lstm", 8), ("relaxed-hmm", 8)])
def test_length_of_the_context(kind: str, reads: int) -> None:
    model, tokens = small(kind), text(1, 9)
    last = model.score(tokens)[0][0, -1]
    for back in range(1, 9):
        changed = tokens.clone()
        changed[0, -1 - back] = (changed[0, -1 - back] + 1) % 7
        assert bool(model.score(changed)[0][0, -1] == last) == (back > reads)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_scored_beyond_the_length_of_a_row(kind: str) -> None:
    model, tokens = small(kind), text(2, 6)
    ragged = tokens.clone()
    ragged[1, 4:] = -1
    whole, scored = model.score(tokens)[0], model.score(ragged)[0]
    torch.testing.assert_close(scored[0], whole[0])
    torch.testing.assert_close(scored[1], torch.cat([whole[1, :4], torch.zeros(2)]))


@pytest.mark.parametrize(
    ("kind", "words", "millions"),
    [("feedforward", 10_000, 2.9), ("lstm", 10_000, 3.6), ("feedforward", 33_278, 8.8), ("lstm", 33_278, 9.6)],
)
def test_the_number_of_parameters_is_that_of_the_paper(kind: str, words: int, millions: float) -> None:
    config = FeedForwardConfig() if kind == "feedforward" else LstmConfig()
    with torch.device("meta"):
        model = config.build(vocabulary(words), 0, None)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.06)


def test_the_masks_of_an_awd_lstm_are_the_same_at_every_step() -> None:
    settings = {"word_dropout": 0.0, "weight_dropout": 0.0, "layer_dropout": 0.0, "dropout": 0.0, "input_dropout": 0.5}
    config = AwdLstmConfig(hidden=16, embedding=16, layers=1, **settings)
    model = config.build(vocabulary(7), 0, torch.Generator().manual_seed(0))
    assert isinstance(model, AwdLstm)
    ones = torch.ones(3, 5, 16)
    mask = model._drop_locked(ones, 0.5)
    assert torch.equal(mask, mask[:, :1].expand_as(mask))
    assert set(mask.unique().tolist()) == {0.0, 2.0}
    assert torch.equal(model.eval()._drop_locked(ones, 0.5), ones)


@pytest.mark.parametrize("field", ["word_dropout", "weight_dropout", "layer_dropout", "dropout", "input_dropout"])
def test_dropout_of_an_awd_lstm_is_for_training_only(field: str) -> None:
    none = dict.fromkeys(["word_dropout", "weight_dropout", "layer_dropout", "dropout", "input_dropout"], 0.0)
    config = AwdLstmConfig(hidden=8, embedding=6, **{**none, field: 0.5})
    model, tokens = config.build(vocabulary(7), 0, torch.Generator().manual_seed(1)), text(2, 6)
    torch.manual_seed(0)
    assert not torch.equal(model.score(tokens)[0], model.score(tokens)[0])
    assert torch.equal(model.eval().score(tokens)[0], model.score(tokens)[0])


def test_penalties_of_an_awd_lstm_are_in_the_gradient_alone() -> None:
    none = dict.fromkeys(["word_dropout", "weight_dropout", "layer_dropout", "dropout", "input_dropout"], 0.0)
    tokens, gradients = text(2, 6), []
    for penalties in ({}, {"size_penalty": 2.0, "change_penalty": 3.0}):
        config = AwdLstmConfig(hidden=8, embedding=6, **none, **penalties)
        model = config.build(vocabulary(7), 0, torch.Generator().manual_seed(1)).double().train()
        scores, _ = model.score(tokens)
        torch.testing.assert_close(scores, model.eval().score(tokens)[0])
        gradients.append(torch.autograd.grad(-scores.sum(), tuple(model.parameters())))
    features, _ = model.read(tokens, None)
    change = features[:, 1:] - features[:, :-1]
    penalty = (2 * features.square().sum() + 3 * change.square().sum()) / 6
    added = torch.autograd.grad(penalty, tuple(model.parameters()), materialize_grads=True)
    for without, whole, more in zip(*gradients, added, strict=True):
        torch.testing.assert_close(whole, without + more)


def test_a_relaxed_hmm_filters_as_its_formula_says() -> None:
    model, tokens = small("relaxed-hmm"), text(1, 6)
    assert isinstance(model, RelaxedHmm)
    embedding, expected, p = model.embedding.weight, [], torch.full((8,), 1 / 8).double()
    for given, word in pairwise([vocabulary(7).eos_id, *tokens[0].tolist()]):
        q = (p.log() + 8**0.25 * embedding[given]).softmax(0)
        p = (8**0.5 * model.transition.weight @ q + model.word(embedding[given])).softmax(0)
        expected.append((8**0.5 * embedding @ p).log_softmax(0)[word])
    torch.testing.assert_close(model.score(tokens)[0][0], torch.stack(expected))


def test_an_awd_lstm_without_dropout_is_an_lstm() -> None:
    model, tokens = small("awd-lstm"), text(2, 6)
    assert isinstance(model, AwdLstm)
    x = model.embedding(torch.cat([model.start(2)[0], tokens[:, :-1]], 1))
    for layer in model.layers:
        x, _ = layer(x)
    logits = model.output(x) @ model.embedding.weight.T
    torch.testing.assert_close(model.score(tokens)[0], logits.log_softmax(2).gather(2, tokens[..., None])[..., 0])


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("text"))


SETTINGS = shlex.split(
    "--model.hidden 32 --model.dropout 0.1 --batches.batch-size 4 --batches.length 16 --optimizer.lr 0.02 "
    "--train.epochs 10 --train.device cpu --no-train.tensorboard"
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_baseline_learns_from_the_command_line(
    kind: str, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main(["baseline", "--data", str(corpus), "--model.kind", kind, "--out", str(out), *SETTINGS]) == 0
    found = re.search(r"perplexity: valid ([\d.]+), test ([\d.]+)", capsys.readouterr().out)
    assert found and 1.8 < float(found[1]) < 2.6 and 1.8 < float(found[2]) < 2.6

    # The saved model, applied to the whole text at once, is the one that was scored.
    model, tokenizer = load_baseline(out / "best")
    tokens = np.fromfile(out / "data" / "test.bin", np.uint16).astype(np.int64)
    assert tokenizer.vocab_size == 18 and len(tokens) < 2_000  # one stream
    mean = model.score(torch.from_numpy(tokens)[None])[0].mean().detach()
    scores = json.loads((out / "perplexity.json").read_text())
    assert scores["test"] == pytest.approx(float(torch.exp(-mean)), rel=1e-5)
    assert score_baseline(out, "test") == scores["test"]


def tiny(corpus: Path, kind: str, **train: object) -> BaselineConfig:
    values = {
        "data": str(corpus),
        "model": {"kind": kind, "hidden": 8},
        "batches": {"length": 16, "batch_size": 4},
        "train": {"epochs": 2, "device": "cpu", "tensorboard": False, **train},
    }
    return read_config(BaselineConfig, values)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_was_stopped_in_an_epoch_is_resumed(
    kind: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_baseline(tiny(corpus, kind), tmp_path / "straight")
    interrupt_after(3, monkeypatch)
    result = train_baseline(tiny(corpus, kind), tmp_path / "stopped")
    assert not result.finished and result.steps == 3 and not (tmp_path / "stopped" / "perplexity.json").exists()
    monkeypatch.undo()
    assert train_baseline(tiny(corpus, kind), tmp_path / "stopped", resume=True).finished
    assert_same_run(tmp_path / "stopped", tmp_path / "straight")


def test_bad_input(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failure = partial(commands.failure, capsys, "baseline")

    assert "--model.order for --model.kind = 'lstm'; it is a setting of 'feedforward'" in failure("--model.order", "3")
    assert "--optimizer.lr: Input should be greater than or equal to 0.0" in failure("--optimizer.lr", "-1")
    betas = failure("--optimizer.betas", "[0.9,1.0]")
    assert "--optimizer.betas.1: Input should be less than 1 (given 1.0)" in betas
    assert "no run to resume" in failure("--resume", str(tmp_path / "none"))
    run = tmp_path / "run"
    train_baseline(tiny(corpus, "lstm", epochs=1), run)
    assert "already contains a run" in failure("--data", str(corpus), "--out", str(run))
    assert "model.hidden is 9, but the run in" in failure("--resume", str(run), "--model.hidden", "9")
    assert "leave out --out" in failure("--resume", str(run), "--out", str(run))
    with pytest.raises(
        InputError, match=r"does not belong to a run of `hmmlm teacher` of this version \(unknown setting "
    ):
        saved_config(TeacherConfig, run)
    with pytest.raises(InputError, match="hmmlm baseline"):
        open_teacher(str(run), device="cpu")
    (run / "best" / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(InputError, match=r"best/model\.safetensors is missing, truncated or not safetensors"):
        load_baseline(run / "best")


def test_weights_of_another_model_are_refused(corpus: Path, tmp_path: Path) -> None:
    for kind in KINDS:
        train_baseline(tiny(corpus, kind, epochs=1), tmp_path / kind)
    weights = (tmp_path / "lstm" / "best" / "model.safetensors").read_bytes()
    (tmp_path / "feedforward" / "best" / "model.safetensors").write_bytes(weights)
    with pytest.raises(InputError, match=r"feedforward/best.* belongs to another") as caught:
        load_baseline(tmp_path / "feedforward")
    assert "\n" not in str(caught.value)
