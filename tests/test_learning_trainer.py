"""The training loop: what it computes, where it ends, and how it fails."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from learning_runs import planted, random_hmm, tiny_config, write_text

import hmmlm
from hmmlm.errors import InputError
from hmmlm.learning import loop, prepare, updaters
from hmmlm.learning.baum_welch import maximise
from hmmlm.learning.evaluate import Evaluation, evaluate
from hmmlm.learning.history import read_history
from hmmlm.learning.interrupt import StopRequest
from hmmlm.learning.loop import Trainer, TrainingError
from hmmlm.learning.prepare import Prepared, make_batches
from hmmlm.learning.progress import Progress
from hmmlm.learning.schedule import rate_factor
from hmmlm.learning.trainer import train
from hmmlm.ops.scan import scan
from hmmlm.parameterization import Scalar

CHUNKS: dict[str, Any] = {"kind": "chunks", "batch_size": 16, "length": 12}
STEADY: dict[str, Any] = {"kind": "constant", "warmup_fraction": 0}


def run(out: Path, data: Prepared, **sections: dict[str, Any]) -> Trainer:
    trainer = Trainer(tiny_config("unused", **sections), out, data, Progress())
    assert trainer.run(StopRequest())
    return trainer


def records(out: Path, event: str) -> list[dict[str, Any]]:
    return [record for record in read_history(out / "history.jsonl") if record["event"] == event]


@pytest.mark.parametrize(
    "optimizer",
    [
        {"rate": 0.1},
        {"kind": "baum-welch"},
        {"kind": "baum-welch", "baum_welch": {"full_batch": False, "step": 0.5, "accumulate": 2, "growth": 1.2,
                                              "pseudocount": 0.01, "momentum": 0.5}},
    ],
    ids=["adamw", "full-batch", "mini-batch"],
)  # fmt: skip
def test_learns_a_planted_hmm_to_near_its_entropy(tmp_path: Path, optimizer: dict[str, Any]) -> None:
    truth = random_hmm(2, 6, seed=1, sharpness=3.0, dtype=torch.float32)
    data = planted(truth, 160, 12)
    trainer = run(
        tmp_path, data, batches={**CHUNKS, "batch_size": 20}, model={"states": 2}, optimizer=optimizer, schedule=STEADY,
        train={"epochs": 20, "checks_per_epoch": 1, "checkpoint_every": 10_000},
    )  # fmt: skip
    best = evaluate(truth, trainer.valid_batches.epoch(0)).perplexity
    checks = [record["perplexity"] for record in records(tmp_path, "valid")]
    assert checks[0] > 1.05 * best
    assert min(checks) < 1.02 * best


def test_adamw_is_the_plain_loop(tmp_path: Path) -> None:
    """Streams with carried state, reset at eos, clipping, decay and schedule, against a loop written out."""
    data = planted(random_hmm(3, 6, seed=0, dtype=torch.float32), 24, 10)
    optimizer = {"rate": 0.3, "weight_decay": 0.1, "clip": 0.05}
    batches = {"batch_size": 4, "length": 7, "reset_at_eos": True}
    trainer = run(tmp_path, data, optimizer=optimizer, batches=batches)

    config = trainer.config
    plain = Scalar(4, 6, 1.0, torch.Generator().manual_seed(config.train.seed))
    adamw = torch.optim.AdamW(plain.parameters(), lr=0.3, betas=(0.9, 0.95), weight_decay=0.1)
    tokens, final = 0, torch.zeros(0)
    for epoch in range(2):
        for batch in make_batches(config, data, "train").epoch(epoch):
            initial = final[: len(batch.tokens)] if batch.carry else None
            start, transition, emission = plain().parameters
            result = scan(start, transition, emission, batch.tokens, batch.lengths, initial, batch.restart, "naive")
            final = result.final
            count = int((batch.tokens >= 0).sum())
            adamw.zero_grad()
            (-result.log_likelihood.sum() / count).backward()
            assert torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05) > 0.05, "clipping is not tested"
            tokens += count
            adamw.param_groups[0]["lr"] = 0.3 * rate_factor(config.schedule, tokens, 480)
            adamw.step()
    assert tokens == 480 == trainer.position.tokens
    for ours, theirs in zip(trainer.parameterization.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_full_batch_baum_welch_is_em_over_the_corpus(tmp_path: Path) -> None:
    data = planted(random_hmm(3, 6, seed=0, dtype=torch.float32), 20, 12)
    trainer = run(
        tmp_path, data, batches=CHUNKS, optimizer={"kind": "baum-welch"}, schedule=STEADY,
        train={"epochs": 6, "log_every": 2},
    )  # fmt: skip
    hmm = Scalar(4, 6, 1.0, torch.Generator().manual_seed(0)).double()()
    tokens = torch.from_numpy(data.tokens["train"].tokens.astype("int64")).reshape(20, 12)
    losses = []
    for _ in range(6):
        counts = hmm.expected_counts(tokens)
        losses.append(-counts.log_likelihood.item() / tokens.numel())
        hmm = maximise(counts.start, counts.transition, counts.emission, hmm)
    assert [record["loss"] for record in records(tmp_path, "train")] == pytest.approx(losses, rel=1e-5)
    assert all(a >= b for a, b in pairwise(losses))
    torch.testing.assert_close(trainer.hmm().log_emission.exp().double(), hmm.log_emission.exp(), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("fewest, size", [(16, 17), (26, 50)])  # tokens of the shortest stream allowed
def test_evaluation_with_carried_state_is_the_likelihood_of_whole_streams(
    fewest: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "FEWEST_TOKENS", fewest)
    hmm = random_hmm(3, 6, seed=4)
    data = planted(hmm, 20, 10)
    config = tiny_config("unused", batches={"batch_size": 3, "length": 7})
    result = evaluate(hmm, make_batches(config, data, "valid").epoch(0))
    streams = torch.from_numpy(data.tokens["valid"].tokens.astype("int64")).split(size)
    expected = sum(hmm.log_likelihood(stream[None]).item() for stream in streams)
    assert result.tokens == 50
    assert result.log_likelihood == pytest.approx(expected, rel=1e-9)
    assert result.perplexity == pytest.approx(math.exp(-expected / 50))


def test_checks_are_even_and_best_is_the_lowest(tmp_path: Path) -> None:
    data = planted(random_hmm(3, 6, seed=0, dtype=torch.float32), 60, 10)
    trainer = run(tmp_path, data, batches={"batch_size": 4, "length": 15}, train={"epochs": 2, "checks_per_epoch": 4})
    checks = records(tmp_path, "valid")
    assert trainer.train_batches.steps_per_epoch == 10
    assert [record["step"] for record in checks] == [3, 5, 8, 10, 13, 15, 18, 20]
    lowest = min(checks, key=lambda record: record["perplexity"])
    assert [r["step"] for r in checks if r["best"]][-1] == lowest["step"]
    assert (tmp_path / "best").resolve().name == f"best-{lowest['step']:08}"
    assert math.exp(trainer.plateau.best) == pytest.approx(lowest["perplexity"])


def test_train_from_text_gives_models_to_load_and_says_how_it_went(tmp_path: Path) -> None:
    kept = {"tensorboard": True, "precision": "bf16-mixed", "max_tokens": 300}
    result = train(tiny_config(write_text(tmp_path), train=kept), tmp_path / "run")
    assert result.finished
    assert 300 <= result.tokens < 300 + 3 * 8
    assert str(tmp_path / "run" / "best") in result.message
    best, final = hmmlm.load(tmp_path / "run"), hmmlm.load(tmp_path / "run" / "final")
    assert best.config["model"]["states"] == final.hmm.states == 4
    assert result.best_perplexity == min(r["perplexity"] for r in records(tmp_path / "run", "valid"))
    assert math.isfinite(final.perplexity(["a b c d"]))
    assert list((tmp_path / "run" / "tensorboard").iterdir())
    assert not list((tmp_path / "run").rglob("*.pt")) + list((tmp_path / "run").rglob("*.pkl"))


def test_parameters_that_are_not_numbers_stop_at_their_step_and_keep_the_last_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learn, seen = updaters.AdamW.step, []

    def poison(self: updaters.AdamW, *args: Any) -> Any:
        result = learn(self, *args)
        seen.append(None)
        if len(seen) == 6:
            with torch.no_grad():
                self.parameterization.get_parameter("emission")[0, 0] = math.nan
        return result

    monkeypatch.setattr(updaters.AdamW, "step", poison)
    data = planted(random_hmm(3, 6, seed=0, dtype=torch.float32), 40, 10)
    what = r"the loss in training is nan at step 7 .*lower optimizer\.rate.* is of step 5"
    with pytest.raises(TrainingError, match=what):
        run(tmp_path, data, train={"log_every": 9, "checkpoint_every": 5, "checks_per_epoch": 1})
    trainer = Trainer(tiny_config("unused", train={"log_every": 9}), tmp_path, data, Progress())
    trainer.load()
    assert trainer.position.step == 5
    assert all(p.isfinite().all() for p in trainer.parameterization.parameters())


def test_parameters_gone_bad_since_the_last_loss_are_not_saved(tmp_path: Path) -> None:
    data = planted(random_hmm(3, 6, seed=0, dtype=torch.float32), 40, 10)
    trainer = run(tmp_path, data)
    before = (tmp_path / "last").resolve()
    with torch.no_grad():
        trainer.parameterization.get_parameter("start")[0] = math.nan
    trainer.position.step += 1
    with pytest.raises(TrainingError, match=r"parameters are nan after step \d+ "):
        trainer.save()
    assert (tmp_path / "last").resolve() == before


def test_a_loss_that_is_bad_only_in_validation_is_said_to_be_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = planted(random_hmm(3, 6, seed=0, dtype=torch.float32), 40, 10)
    monkeypatch.setattr(loop, "evaluate", lambda *_: Evaluation(math.nan, 100, math.nan))
    with pytest.raises(TrainingError, match=r"the loss in validation is nan after step 9 \(epoch 0\): lower"):
        run(tmp_path, data)


@pytest.mark.parametrize(("rows", "parameters"), [(3, 0.0), (2, 0.0), (1, 0.0), (0, math.nan)])
def test_what_a_graph_hides_ends_the_run_when_the_loss_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int, parameters: float
) -> None:
    """There a sequence that cannot be trusted has likelihood 0 and is counted, also if it is so for NaN."""
    learn, steps = updaters.AdamW.step, []

    def graphed(self: updaters.AdamW, *args: Any) -> Any:
        result = learn(self, *args)
        steps.append(None)
        if len(steps) > 4:
            self.parameterization.skipped += rows
            with torch.no_grad():
                self.parameterization.get_parameter("start")[0] += parameters
        return result._replace(log_likelihood=result.log_likelihood.nan_to_num(0.0))

    monkeypatch.setattr(updaters.AdamW, "step", graphed)
    data = planted(random_hmm(3, 6, seed=0, dtype=torch.float32), 40, 10)
    options = {"log_every": 4, "checks_per_epoch": 1, "checkpoint_every": 1000}
    if rows == 1:  # few are nothing to end a run for
        run(tmp_path, data, train=options)
        assert [record["skipped"] for record in records(tmp_path, "valid")] == [13, 30]
        return
    what = "parameters are nan after" if rows == 0 else rf"probability of {4 * rows} of the last 12 .* until"
    with pytest.raises(TrainingError, match=f"{what} step 8 "):
        run(tmp_path, data, train=options)
    assert [record["step"] for record in records(tmp_path, "train")] == [4]


def test_a_word_made_impossible_by_mini_batch_em_is_explained(tmp_path: Path) -> None:
    data = planted(random_hmm(2, 6, seed=0, dtype=torch.float32), 30, 6)
    optimizer = {"kind": "baum-welch", "baum_welch": {"full_batch": False}}
    what = r"the loss in training is inf at step \d+ .*set optimizer\.baum_welch\.pseudocount"
    with pytest.raises(TrainingError, match=what):
        run(tmp_path, data, optimizer=optimizer, batches={"kind": "chunks", "batch_size": 1, "length": 3})
    optimizer["baum_welch"] = {"full_batch": False, "pseudocount": 0.1}
    run(tmp_path / "again", data, optimizer=optimizer, batches={"kind": "chunks", "batch_size": 1, "length": 3})


def test_a_device_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    data = planted(random_hmm(3, 6, seed=0, dtype=torch.float32), 40, 10)
    with pytest.raises(InputError, match="no CUDA device"):
        Trainer(tiny_config("unused", train={"device": "cuda"}), tmp_path, data, Progress())


def test_plateau_lowers_the_rate_in_the_loop(tmp_path: Path) -> None:
    data = planted(random_hmm(3, 6, seed=0, dtype=torch.float32), 40, 10)
    schedule = {"kind": "plateau", "warmup_fraction": 0, "patience": 1, "factor": 10}
    run(tmp_path, data, schedule=schedule, optimizer={"rate": 3.0}, train={"epochs": 4, "log_every": 1})
    rates = {record["step"]: record["rate"] for record in records(tmp_path, "train")}
    failed = [record["step"] for record in records(tmp_path, "valid") if not record["best"]]
    assert failed, "the rate was meant to be too large"
    assert rates[failed[0]] == 3.0
    assert rates[failed[0] + 1] == pytest.approx(0.3)
