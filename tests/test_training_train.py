"""The training loop: what it computes, when it ends, how it fails, and how deep its calls are."""

from __future__ import annotations

import inspect
import math
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from helpers.dense_scan import scan
from helpers.runs import fit_planted, planted, random_hmm, records, tiny_config, write_text

import hmmlm
from hmmlm.errors import InputError
from hmmlm.learning import learners
from hmmlm.learning.evaluate import Evaluation, evaluate
from hmmlm.learning.fit import Fit, TrainingError
from hmmlm.learning.learners import AdamWLearner, HmmLearner
from hmmlm.learning.optimizers import maximize
from hmmlm.learning.schedules import lr_factor
from hmmlm.models import base, scalar
from hmmlm.models.base import Model
from hmmlm.models.scalar import Scalar
from hmmlm.ops.scan import Evidence
from hmmlm.runs.checkpoint import read_checkpoint
from hmmlm.runs.progress import Progress
from hmmlm.scan import implementations
from hmmlm.scan.composition import matrices
from hmmlm.training.prepare import evaluation_batches, make_batches
from hmmlm.training.train import train
from hmmlm.training.trainer import make_fabric

CHUNKS: dict[str, Any] = {"kind": "chunks", "batch_size": 16, "length": 12}
STEADY: dict[str, Any] = {"kind": "constant", "warmup": 0}


def model_of(fit: Fit) -> Model:
    assert isinstance(fit.learner, HmmLearner)
    return fit.learner.model


@pytest.mark.parametrize(
    "optimizer",
    [
        {"lr": 0.1},
        {"kind": "baum-welch", "full_batch": True},
        {"kind": "baum-welch", "full_batch": False, "step": 0.5, "pseudocount": 0.01, "momentum": 0.5},
    ],
    ids=["adamw", "full-batch", "mini-batch"],
)
def test_learns_a_planted_hmm_to_near_its_entropy(tmp_path: Path, optimizer: dict[str, Any]) -> None:
    truth = random_hmm(2, 6, seed=1, sharpness=3.0, dtype=torch.float32)
    data = planted(truth, 160, 12)
    fit = fit_planted(
        tmp_path / "run",
        data,
        batches={**CHUNKS, "batch_size": 20},
        model={"num_states": 2},
        optimizer=optimizer,
        schedule=STEADY,
        train={"epochs": 20, "checks_per_epoch": 1, "checkpoint_every": 10_000},
    )
    best = evaluate(truth, fit.valid.epoch(0)).perplexity
    checks = [record["perplexity"] for record in records(tmp_path / "run", "valid")]
    assert checks[0] > 1.05 * best
    assert min(checks) < 1.02 * best


def test_adamw_equals_a_plain_loop(tmp_path: Path) -> None:
    """Compare streams with a carry and restarts at eos, clipping, decay and schedule with a loop written out here."""
    data = planted(random_hmm(3, 6, seed=0, dtype=torch.float32), 24, 10)
    optimizer = {"lr": 0.3, "weight_decay": 0.1, "max_grad_norm": 0.05, "eps": 1e-8}
    batches = {"batch_size": 4, "length": 7, "reset_at_eos": True}
    fit = fit_planted(tmp_path / "run", data, optimizer=optimizer, batches=batches)

    config = fit.config
    plain = Scalar(4, 6, 1.0, torch.Generator().manual_seed(config.train.seed))
    adamw = torch.optim.AdamW(plain.parameters(), lr=0.3, betas=(0.9, 0.95), weight_decay=0.1)
    tokens, carry = 0, torch.zeros(0)
    for epoch in range(2):
        for batch in make_batches(config, data, "train").epoch(epoch):
            before = carry[: len(batch.tokens)] if batch.carry else None
            evidence = Evidence(batch.tokens, batch.lengths, before, batch.restart)
            result = scan(matrices(plain()), evidence, "naive")
            carry = result.carry.log_probs
            count = int((batch.tokens >= 0).sum())
            adamw.zero_grad()
            (-result.log_likelihood.sum() / count).backward()
            assert torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05) > 0.05, "clipping is not tested"
            tokens += count
            adamw.param_groups[0]["lr"] = 0.3 * lr_factor(config.schedule, tokens, 480)
            adamw.step()
    assert tokens == 480 == fit.position.tokens
    for ours, theirs in zip(model_of(fit).parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_full_batch_baum_welch_is_em_over_the_corpus(tmp_path: Path) -> None:
    data = planted(random_hmm(3, 6, seed=0, dtype=torch.float32), 20, 12)
    fit = fit_planted(
        tmp_path / "run",
        data,
        batches=CHUNKS,
        optimizer={"kind": "baum-welch", "full_batch": True},
        schedule=STEADY,
        train={"epochs": 6, "log_every": 2},
    )
    hmm = Scalar(4, 6, 1.0, torch.Generator().manual_seed(0)).double()()
    tokens = torch.from_numpy(data.tokens["train"].tokens.astype("int64")).reshape(20, 12)
    losses = []
    for _ in range(6):
        counts = hmm.expected_counts(tokens)
        losses.append(-counts.log_likelihood.item() / tokens.numel())
        tables = dict(zip(("start", "transition", "emission"), matrices(hmm), strict=True))
        hmm = hmmlm.HMM(*maximize(counts._asdict(), tables).values())
    assert [record["loss"] for record in records(tmp_path / "run", "train")] == pytest.approx(losses, rel=1e-5)
    assert all(a >= b for a, b in pairwise(losses))
    ours = model_of(fit)().emission.log_probs.exp().double()  # type: ignore[attr-defined]
    torch.testing.assert_close(ours, hmm.emission.log_probs.exp(), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("fewest, size", [(16, 17), (26, 50)])  # tokens of the shortest stream allowed
def test_evaluation_with_a_carry_is_the_likelihood_of_whole_streams(fewest: int, size: int) -> None:
    hmm = random_hmm(3, 6, seed=4)
    data = planted(hmm, 20, 10)
    config = tiny_config("unused", batches={"batch_size": 3, "length": 7})
    batches = evaluation_batches(config.batches, data.tokens["valid"], data.tokenizer.eos_id, min_stream_tokens=fewest)
    result = evaluate(hmm, batches.epoch(0))
    streams = torch.from_numpy(data.tokens["valid"].tokens.astype("int64")).split(size)
    expected = sum(hmm.log_likelihood(stream[None]).item() for stream in streams)
    assert result.tokens == 50
    assert result.log_likelihood == pytest.approx(expected, rel=1e-9)
    assert result.perplexity == pytest.approx(math.exp(-expected / 50))


def test_checks_are_evenly_spaced_and_best_is_the_lowest(tmp_path: Path) -> None:
    data = planted(random_hmm(3, 6, seed=0, dtype=torch.float32), 60, 10)
    out, batches = tmp_path / "run", {"batch_size": 4, "length": 15}
    fit = fit_planted(out, data, batches=batches, train={"epochs": 2, "checks_per_epoch": 4})
    checks = records(out, "valid")
    assert fit.train.steps_per_epoch == 10
    assert [record["step"] for record in checks] == [3, 5, 8, 10, 13, 15, 18, 20]
    lowest = min(checks, key=lambda record: record["perplexity"])
    assert [r["step"] for r in checks if r["best"]][-1] == lowest["step"]
    assert (out / "best").resolve().name == f"best-{lowest['step']:08}"
    assert math.exp(fit.plateau.best) == pytest.approx(lowest["perplexity"])


def test_train_from_text_writes_models_to_load_and_returns_how_it_ended(tmp_path: Path) -> None:
    kept = {"tensorboard": True, "precision": "bf16-mixed", "max_tokens": 300}
    result = train(tiny_config(write_text(tmp_path), train=kept), tmp_path / "run")
    assert result.finished
    assert result.out == tmp_path / "run"
    assert 300 <= result.tokens < 300 + 3 * 8
    assert result.steps == read_checkpoint(tmp_path / "run" / "last")[1]["position"]["step"]
    best, final = hmmlm.load(tmp_path / "run"), hmmlm.load(tmp_path / "run" / "final")
    assert best.config["model"]["num_states"] == final.hmm.num_states == 4
    assert result.best_perplexity == min(r["perplexity"] for r in records(tmp_path / "run", "valid"))
    assert math.isfinite(final.perplexity(["a b c d"]))
    assert list((tmp_path / "run" / "tensorboard").iterdir())
    assert not list((tmp_path / "run").rglob("*.pt")) + list((tmp_path / "run").rglob("*.pkl"))


def test_nan_parameters_stop_training_at_their_step_and_keep_the_last_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learn, seen = AdamWLearner.step, []

    def poison(self: AdamWLearner, *args: Any) -> Any:
        result = learn(self, *args)
        seen.append(None)
        if len(seen) == 6:
            with torch.no_grad():
                self.model.get_parameter("emission")[0, 0] = math.nan
        return result

    monkeypatch.setattr(AdamWLearner, "step", poison)
    data = planted(random_hmm(3, 6, seed=0, dtype=torch.float32), 40, 10)
    message = r"the training loss is nan at step 7 .*lower optimizer\.lr.* is of step 5"
    with pytest.raises(TrainingError, match=message):
        fit_planted(tmp_path / "run", data, train={"log_every": 9, "checkpoint_every": 5, "checks_per_epoch": 1})
    tensors, state = read_checkpoint(tmp_path / "run" / "last")
    assert state["position"]["step"] == 5
    assert all(bool(tensor.isfinite().all()) for name, tensor in tensors.items() if name.startswith("parameters."))


def test_parameters_that_became_nan_after_the_last_logged_loss_are_not_saved(tmp_path: Path) -> None:
    data = planted(random_hmm(3, 6, seed=0, dtype=torch.float32), 40, 10)
    fit = fit_planted(tmp_path / "run", data)
    before = (tmp_path / "run" / "last").resolve()
    with torch.no_grad():
        model_of(fit).get_parameter("start")[0] = math.nan
    fit.position.step += 1
    with pytest.raises(TrainingError, match=r"parameters are NaN after step \d+ "):
        fit.save()
    assert (tmp_path / "run" / "last").resolve() == before


def test_a_validation_loss_of_nan_is_named_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = planted(random_hmm(3, 6, seed=0, dtype=torch.float32), 40, 10)
    monkeypatch.setattr(learners, "evaluate", lambda *_: Evaluation(math.nan, 100, math.nan))
    with pytest.raises(TrainingError, match=r"the validation loss is NaN after step 9 \(epoch 0\): lower"):
        fit_planted(tmp_path / "run", data)


@pytest.mark.parametrize(("rows", "parameters"), [(3, 0.0), (2, 0.0), (1, 0.0), (0, math.nan)])
def test_errors_inside_a_graph_end_the_run_when_the_loss_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int, parameters: float
) -> None:
    """Inside a CUDA graph a suspect sequence has log-likelihood 0 and is counted, also if the reason is NaN."""
    learn, steps = AdamWLearner.step, []

    def graphed(self: AdamWLearner, *args: Any) -> Any:
        result = learn(self, *args)
        steps.append(None)
        if len(steps) > 4:
            self.model.skipped += rows
            with torch.no_grad():
                self.model.get_parameter("start")[0] += parameters
        return result._replace(log_likelihood=result.log_likelihood.nan_to_num(0.0))

    monkeypatch.setattr(AdamWLearner, "step", graphed)
    data = planted(random_hmm(3, 6, seed=0, dtype=torch.float32), 40, 10)
    out, options = tmp_path / "run", {"log_every": 4, "checks_per_epoch": 1, "checkpoint_every": 1000}
    if rows == 1:  # a few do not end a run
        fit_planted(out, data, train=options)
        assert [record["skipped"] for record in records(out, "valid")] == [13, 30]
        return
    message = "parameters are NaN after" if rows == 0 else rf"probability of {4 * rows} of the last 12 .* before"
    with pytest.raises(TrainingError, match=f"{message} step 8 "):
        fit_planted(out, data, train=options)
    assert [record["step"] for record in records(out, "train")] == [4]


def test_a_word_made_impossible_by_mini_batch_em_is_explained(tmp_path: Path) -> None:
    data = planted(random_hmm(2, 6, seed=0, dtype=torch.float32), 30, 6)
    optimizer = {"kind": "baum-welch", "step": 1.0, "pseudocount": 0.0}
    batches = {"kind": "chunks", "batch_size": 1, "length": 3}
    message = r"the training loss is inf at step \d+ .*set optimizer\.pseudocount"
    with pytest.raises(TrainingError, match=message):
        fit_planted(tmp_path / "run", data, optimizer=optimizer, batches=batches)
    fit_planted(tmp_path / "again", data, optimizer={**optimizer, "pseudocount": 0.1}, batches=batches)


def test_a_missing_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="no CUDA device"):
        make_fabric(tiny_config("unused", train={"device": "cuda"}))


def test_plateau_lowers_the_rate_in_the_loop(tmp_path: Path) -> None:
    data = planted(random_hmm(3, 6, seed=0, dtype=torch.float32), 40, 10)
    out, schedule = tmp_path / "run", {"kind": "plateau", "warmup": 0, "patience": 1, "factor": 10}
    optimizer = {"lr": 3.0, "eps": 1e-8}
    fit_planted(out, data, schedule=schedule, optimizer=optimizer, train={"epochs": 4, "log_every": 1})
    rates = {record["step"]: record["rate"] for record in records(out, "train")}
    failed = [record["step"] for record in records(out, "valid") if not record["best"]]
    assert failed, "the rate was meant to be too large"
    assert rates[failed[0]] == 3.0
    assert rates[failed[0] + 1] == pytest.approx(0.3)


# --- depth of calls ---


def frames_of_the_step(frame: FrameType | None) -> list[str]:
    """Return the names of the Python functions from `frame` to `Fit.run_phase`, both included; none outside a step."""
    names = []
    while frame is not None:
        names.append(frame.f_code.co_qualname)
        if frame.f_code is Fit.run_phase.__code__:
            return names if Fit.step.__qualname__ in names else []
        frame = frame.f_back
    return []


@pytest.mark.parametrize(
    ("config", "module", "op", "scan"),
    [
        ({}, implementations, "scan", "HMM.scan"),
        ({"optimizer": {"kind": "baum-welch"}}, implementations, "scan", "HMM.scan"),
        ({"model": {"kind": "linear", "hidden": 8}}, implementations, "scan", "HMM.scan"),
        ({"model": {"blocks": 2, "dropout": 0.5}}, scalar, "generic_scan", "BlockedScalar.scan"),
        ({"model": {"kind": "neural", "blocks": 2, "hidden": 8}}, base, "generic_scan", "FactoredBlockedModel.scan"),
    ],
    ids=["scalar", "baum-welch", "linear", "blocked scalar", "neural"],
)
def test_at_most_four_frames_from_a_step_to_the_scan_and_two_more_to_the_op(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], module: Any, op: str, scan: str
) -> None:
    original, stacks = getattr(module, op), []

    def recorded(*args: Any, **kwargs: Any) -> Any:
        frame = inspect.currentframe()
        assert frame is not None
        stacks.append(frames_of_the_step(frame.f_back))
        return original(*args, **kwargs)

    monkeypatch.setattr(module, op, recorded)
    result = train(tiny_config(write_text(tmp_path), **config, train={"max_tokens": 20}), tmp_path / "run")
    in_steps = [stack for stack in stacks if stack]  # the others are of validation
    assert len(in_steps) == result.steps == 1
    begin, end = in_steps[0].index("Fit.step"), in_steps[0].index(scan)
    assert begin - end <= 4 and end <= 2, in_steps[0]


def test_a_run_that_diverges_returns_to_its_best_parameters_at_half_the_rate(tmp_path: Path) -> None:
    notes: list[str] = []

    class Notes(Progress):
        def note(self, line: str) -> None:
            notes.append(line)

    fast = {"lr": 30.0, "eps": 1e-8}
    schedule, run = {"kind": "constant", "warmup": 0.0}, tmp_path / "run"
    config = tiny_config(write_text(tmp_path), schedule=schedule, optimizer=fast, train={"log_every": 1})
    train(config, run, progress=Notes())
    assert any("parameters of step 13 at half the rate (1 of 3 times)" in note for note in notes)
    rates = {record["step"]: record["rate"] for record in records(run, "train")}
    assert (rates[39], rates[40]) == (30.0, 15.0)
    losses = {record["step"]: record["loss"] for record in records(run, "valid")}
    assert losses[52] < losses[39] - 1
