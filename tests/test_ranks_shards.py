"""Rows of A and O divided over processes: the same model, less memory in each, and the same checkpoints."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.fake_teacher import LVD, use_fake_teacher
from helpers.ranks import run_ranks
from helpers.runs import planted, records, tiny_config, write_prepared, write_text
from test_ranks_faults import train_until
from test_ranks_training import MINI_BATCH, assert_close, train_in_float64, train_with_teacher

from hmmlm.config.run import RunConfig
from hmmlm.config.training import read_config
from hmmlm.errors import InputError
from hmmlm.learning.adamw import AdamW
from hmmlm.learning.fit import Fit
from hmmlm.learning.learners import AdamWLearner, BaumWelchLearner
from hmmlm.learning.train import train
from hmmlm.models.scalar import Scalar
from hmmlm.ops.join_rows import join_rows
from hmmlm.ops.scan import Evidence, Parameters, divided_scan, scan
from hmmlm.ranks import world

pytestmark = pytest.mark.slow
SETTINGS: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer": {"clip": 0.5, "weight_decay": 0.1}},
    "chunks": {"batches": {"kind": "chunks"}},
    "baum-welch": {"optimizer": MINI_BATCH},
    "full batch": {"optimizer": {**MINI_BATCH, "full_batch": True}},
}


def held_matrices(fit: Fit) -> dict[str, torch.Size]:
    """Return the shapes of all matrices that a learner holds between steps."""
    learner, held = fit.learner, dict(fit.learner.parameters())
    if isinstance(learner, AdamWLearner):
        for name, parameter in learner.model.named_parameters():
            held |= {f"{name}.{key}": moment for key, moment in learner.optimizer.optimizer.state[parameter].items()}
    else:
        assert isinstance(learner, BaumWelchLearner)
        held |= learner.optimizer.state_dict()[0]
    return {name: tensor.shape for name, tensor in held.items() if tensor.dim() == 2}


def train_divided(config: dict[str, Any], out: Path, resume: bool = False) -> None:
    """Train in float64; every matrix that a process holds has its rows only, gradients included."""
    made: list[Fit] = []
    gradients: set[int] = set()

    def refuse(*_: Any) -> None:
        raise AssertionError("all rows are in one process")

    original, update = Fit.run, AdamW._norm

    def run(fit: Fit, *args: Any) -> bool:
        made.append(fit)
        return original(fit, *args)

    def norm(optimizer: AdamW, found: Any) -> torch.Tensor:
        gradients.update(len(gradient) for name, gradient in found.items() if name != "start")
        return update(optimizer, found)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fit, "run", run)
        patch.setattr(AdamW, "_norm", norm)
        patch.setattr(Scalar, "join", refuse)
        train_in_float64(config, out, resume)
    rows = 8 // world().count
    shapes = held_matrices(made[0])
    assert len(shapes) >= 6 and {shape[0] for shape in shapes.values()} == {rows}
    assert gradients <= {rows} and bool(gradients) == isinstance(made[0].learner, AdamWLearner)


def config_of(data: Path, kind: str, **model: Any) -> dict[str, Any]:
    sections = {**SETTINGS[kind], "batches": {"batch_size": 5, "length": 8, **SETTINGS[kind].get("batches", {})}}
    sections["train"] = {"epochs": 3, "checks_per_epoch": 1, "checkpoint_every": 30}
    return tiny_config(data, model={"states": 8, **model}, **sections).dump()


@pytest.mark.parametrize("kind", SETTINGS)
def test_divided_rows_are_the_same_model(kind: str, tmp_path: Path) -> None:
    data = write_text(tmp_path, 80)
    train_in_float64(config_of(data, kind), tmp_path / "1")
    assert records(tmp_path / "1", "valid")[-1]["step"] >= 50
    for count in (2, 4) if kind == "adamw" else (2,):
        run_ranks(count, train_divided, config_of(data, kind, shard=True), tmp_path / str(count))
        assert_close(tmp_path / str(count), tmp_path / "1")
        parameters = [records(tmp_path / name, "start")[0]["parameters"] for name in ("1", str(count))]
        assert parameters[0] == parameters[1]


@pytest.mark.parametrize("kind", ["adamw", "full batch"])
def test_a_run_resumes_with_another_number_of_processes(kind: str, tmp_path: Path) -> None:
    data, out = write_text(tmp_path, 80), tmp_path / "run"
    whole, divided = config_of(data, kind), config_of(data, kind, shard=True)
    train_in_float64(whole, tmp_path / "straight")
    run_ranks(2, train_until, 7, 1, "SIGTERM", divided, out)
    run_ranks(4, train_until, 17, 3, "SIGTERM", divided, out, True)
    train_in_float64(whole, out, resume=True)
    assert_close(out, tmp_path / "straight")


@pytest.mark.parametrize("start", ["lvd", "counts"])
def test_a_teacher_initializes_divided_rows(start: str, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        data = write_prepared(tmp_path / "tokens", planted(use_fake_teacher(patch).hmm, 60, 16))
    sections: dict[str, Any] = {"initialization": {**LVD, "kind": start}, "batches": {"kind": "chunks", "length": 16}}
    config = tiny_config(data, model={"states": 6}, **sections).dump()
    train_with_teacher(config, tmp_path / "1")
    run_ranks(2, train_with_teacher, {**config, "model": {**config["model"], "shard": True}}, tmp_path / "2")
    assert_close(tmp_path / "2", tmp_path / "1")


def differentiate() -> None:
    own = torch.arange(2.0) + 2 * world().rank
    own.requires_grad_()
    whole = join_rows(own[:, None])
    assert whole.flatten().tolist() == [0.0, 1.0, 2.0, 3.0]
    (whole.flatten() * torch.arange(4.0) * (world().rank + 1)).sum().backward()
    assert own.grad is not None and own.grad.tolist() == [6.0 * world().rank, 3.0 + 6 * world().rank]


def test_gradients_of_rows_are_those_of_all_processes() -> None:
    run_ranks(2, differentiate)


def random_problem(peaked: bool, carried: bool, dtype: torch.dtype) -> tuple[Parameters, Evidence]:
    """Return parameters of 12 states and 5 sequences, of which the last ones are shorter."""
    torch.manual_seed(int(carried))
    states, words, batch, steps, spread = 12, 7, 5, 6, 60.0 if peaked else 1.0
    shapes = ((states,), (states, states), (states, words))
    parameters = Parameters(*((torch.randn(shape, dtype=dtype) * spread).log_softmax(-1) for shape in shapes))
    tokens, lengths = torch.randint(-1, words, (batch, steps)), torch.tensor([6, 6, 5, 3, 1])
    tokens[torch.arange(steps) >= lengths[:, None]] = -1
    initial = torch.rand(batch, states, dtype=dtype).softmax(1) if carried else None
    return parameters, Evidence(tokens, lengths, initial, torch.rand(batch, steps) < 0.2 if carried else None)


def compare_recursions(peaked: bool, carried: bool, dtype: torch.dtype) -> None:
    """Compare likelihoods, carry and gradients with those of log space in one process."""
    parameters, evidence = random_problem(peaked, carried, dtype)
    exact = Parameters(*(p.clone().double().requires_grad_() for p in parameters))
    initial = None if evidence.initial is None else evidence.initial.double()
    expected = scan(exact, evidence._replace(initial=initial), "naive")
    weights = torch.arange(1.0, 6.0, dtype=torch.float64)
    (expected.log_likelihood * weights).sum().backward()
    rank, count = world().rank, world().count
    rows, sequences = world().own_rows(12), torch.arange(rank, 5, count)
    own = Parameters(parameters.log_start, *(p[rows].clone() for p in parameters[1:]))
    for part in own:
        part.requires_grad_()
    # Without lengths, and with fewer positions, as batches have them.
    mine = evidence.rows(sequences)
    assert mine.lengths is not None
    width = int(mine.lengths.max())
    restart = None if mine.restart is None else mine.restart[:, :width]
    full = None if bool((mine.lengths == width).all()) else mine.lengths
    result = divided_scan(own, Evidence(mine.tokens[:, :width], full, mine.initial, restart))
    tolerance = {"rtol": 1e-10, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 2e-5, "atol": 2e-6}
    check = partial(torch.testing.assert_close, check_dtype=False, **tolerance)
    check(result.log_likelihood, expected.log_likelihood[sequences].detach())
    check(result.carry.probs, expected.carry.probs[sequences])
    result.log_likelihood.backward(weights[sequences].to(dtype))
    start = own.log_start.grad
    assert start is not None and exact.log_start.grad is not None
    world().sum_([start])
    check(start, exact.log_start.grad)
    for part, whole in zip(own[1:], exact[1:], strict=True):
        assert part.grad is not None and whole.grad is not None
        check(part.grad, whole.grad[rows])


@pytest.mark.parametrize("peaked", [False, True])
@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_divided_recursions_are_those_of_log_space(peaked: bool, carried: bool, dtype: torch.dtype) -> None:
    run_ranks(3, compare_recursions, peaked, carried, dtype)


def start_undividable(config: dict[str, Any], out: Path) -> None:
    with pytest.raises(InputError, match=r"model.shard cannot divide 8 states evenly over 3 processes"):
        train(read_config(RunConfig, config), out)
    assert not out.exists()


def test_states_that_cannot_be_divided_evenly(tmp_path: Path) -> None:
    run_ranks(3, start_undividable, config_of(write_text(tmp_path), "adamw", shard=True), tmp_path / "run")


def test_blocks_are_not_divided(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"model.* shard = true needs blocks = 0"):
        config_of(write_text(tmp_path), "adamw", shard=True, blocks=2)
