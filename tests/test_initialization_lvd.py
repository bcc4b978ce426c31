"""Latent variable distillation: labels, the joint objective, the start from counts, and runs that begin with a teacher.

The teacher here knows the states of a planted HMM: its embedding of a token is a vector for the most likely state, and
noise. No network is needed for that.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from learning_runs import planted, random_hmm, tiny_config, write_text
from test_learning_resume import Interrupting, assert_same_run
from torch import Tensor

from hmmlm.cli.train import _parse
from hmmlm.data.batches import Batch
from hmmlm.data.tokenfile import TokenFile
from hmmlm.errors import InputError
from hmmlm.hmm import HMM, Carry
from hmmlm.initialization.clustering import Clusters, fit_clusters
from hmmlm.initialization.lvd import (
    EmbeddedText,
    Labeller,
    hmm_from_labels,
    joint_log_likelihood,
    write_labels,
)
from hmmlm.learning import initialize
from hmmlm.learning.config import RunConfig
from hmmlm.learning.history import read_history
from hmmlm.learning.interrupt import StopRequest
from hmmlm.learning.loop import Trainer
from hmmlm.learning.progress import Progress
from hmmlm.learning.trainer import saved_config, train
from hmmlm.learning.updaters import joint_scan
from hmmlm.parameterization import BlockedNeural, BlockedScalar, Scalar, make_dense
from hmmlm.structure.blocks import Blocks


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def by_hand(hmm: HMM, tokens: Tensor, states: Tensor) -> float:
    total = float(hmm.log_start[states[0]]) + float(hmm.log_emission[states[0], tokens[0]])
    for before, state, token in zip(states[:-1], states[1:], tokens[1:], strict=True):
        total += float(hmm.log_transition[before, state]) + float(hmm.log_emission[state, token])
    return total


# --- the joint objective ---


def test_the_joint_likelihood_is_the_formula_and_sums_to_the_marginal() -> None:
    hmm, tokens = random_hmm(3, 4, seed=0), torch.randint(4, (1, 5), generator=generator())
    paths = torch.cartesian_prod(*[torch.arange(3)] * 5)
    joint = joint_log_likelihood(hmm, tokens.expand(len(paths), -1), paths)
    assert float(joint[100]) == pytest.approx(by_hand(hmm, tokens[0], paths[100]))
    torch.testing.assert_close(joint.logsumexp(0), hmm.log_likelihood(tokens)[0])


def test_windows_restarts_and_lengths() -> None:
    hmm = random_hmm(3, 4, seed=0)
    tokens, states = (torch.randint(n, (2, 7), generator=generator(n)) for n in (4, 3))
    whole = joint_log_likelihood(hmm, tokens, states)
    first = joint_log_likelihood(hmm, tokens[:, :4], states[:, :4])
    second = joint_log_likelihood(hmm, tokens[:, 4:], states[:, 4:], before=states[:, 3])
    torch.testing.assert_close(first + second, whole)
    restart = torch.zeros(2, 7, dtype=torch.bool)
    restart[:, 4] = True
    apart = first + joint_log_likelihood(hmm, tokens[:, 4:], states[:, 4:])
    torch.testing.assert_close(joint_log_likelihood(hmm, tokens, states, restart), apart)
    ragged_tokens, ragged = tokens.clone(), states.clone()
    ragged_tokens[:, 4:], ragged[:, 4:] = -1, -1
    torch.testing.assert_close(joint_log_likelihood(hmm, ragged_tokens, ragged), first)


def test_the_gradient_is_the_counts() -> None:
    hmm = random_hmm(3, 4, seed=0)
    tokens, states = (torch.randint(n, (2, 6), generator=generator(n)) for n in (4, 3))
    parameters = [p.requires_grad_() for p in hmm.parameters]
    start, transition, emission = torch.autograd.grad(joint_log_likelihood(hmm, tokens, states).sum(), parameters)
    assert torch.equal(start, torch.bincount(states[:, 0], minlength=3).double())
    pairs = states[:, :-1] * 3 + states[:, 1:]
    assert torch.equal(transition.flatten(), torch.bincount(pairs.flatten(), minlength=9).double())
    assert torch.equal(emission.flatten(), torch.bincount((states * 4 + tokens).flatten(), minlength=12).double())


@pytest.mark.parametrize("kind", ["neural", "scalar"])
def test_a_blocked_model_has_the_joint_likelihood_of_its_dense_one(kind: str) -> None:
    blocks = Blocks.from_clusters(torch.tensor([0, 1, 0, 1, 2]), 6)
    model: Any = BlockedNeural(blocks, hidden=4, dropout=0.5, generator=generator())
    if kind == "scalar":
        model = BlockedScalar(blocks, 0.5, 1.0, generator())
    tokens = torch.randint(5, (3, 6), generator=generator())
    states = blocks.block_of_word[tokens] * 2 + torch.randint(2, (3, 6), generator=generator(1))
    hmm = model()
    joint = joint_log_likelihood(hmm, tokens, states)
    torch.testing.assert_close(joint, joint_log_likelihood(hmm.dense(), tokens, states))
    joint.sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("kind", ["linear", "mlp", "transformer"])
def test_every_dense_parameterization_learns_labels(kind: Any) -> None:
    model = make_dense(kind, 4, 6, hidden=8, generator=generator())
    tokens, states = torch.tensor([[0, 1, 2, 3]]), torch.tensor([[3, 2, 1, 0]])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    for _ in range(60):
        optimizer.zero_grad()
        loss = -joint_log_likelihood(model(), tokens, states).mean()
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < 1.0  # from 4 · log 6 + …: the pairs are learnt
    assert int(model().viterbi(tokens)[0][0, 1]) == 2


def test_the_next_window_starts_from_the_last_labels() -> None:
    tokens, labels = torch.tensor([[0, 1, 2], [1, 0, -1]]), torch.tensor([[2, 0, 1], [0, 2, -1]])
    batch = Batch(tokens, torch.tensor([3, 2]), None, False)
    scan = joint_scan(random_hmm(3, 4, seed=0, dtype=torch.float32), batch, None, labels)
    assert scan.final.tolist() == [[0, 1, 0], [0, 0, 1]]  # type: ignore[union-attr]
    model = BlockedNeural(Blocks.from_clusters(torch.tensor([0, 1, 0, 1]), 4), hidden=4, dropout=0.5)
    words = torch.tensor([[0, 1, 2], [1, 3, -1]])
    own = torch.tensor([[0, 2, 1], [3, 2, -1]])
    first = joint_scan(model(), Batch(words, torch.tensor([3, 2]), None, False), None, own)
    assert isinstance(first.final, Carry)
    assert (first.final.states * first.final.probs).sum(1).tolist() == [1, 2]
    following = Batch(words[:, :2], None, None, True)
    second = joint_scan(model(), following, first.final, own[:, :2])
    expected = joint_log_likelihood(model(), words[:, :2], own[:, :2], before=torch.tensor([1, 2]))
    torch.testing.assert_close(second.log_likelihood, expected)
    goes_on = model.scan(words[:, :2], None, first.final)  # with dropout
    assert bool(goes_on.log_likelihood.isfinite().all())


def test_the_start_from_counts_by_hand() -> None:
    text = [(torch.tensor([[0, 1, 1], [2, -1, -1]]), torch.tensor([[0, 1, 1], [1, -1, -1]]))]
    hmm = hmm_from_labels(text, 2, 3, 0.5)
    assert hmm.log_start.exp().tolist() == pytest.approx([0.5, 0.5])
    assert hmm.log_transition.exp().flatten().tolist() == pytest.approx([0.25, 0.75, 0.25, 0.75])
    assert hmm.log_emission[1].exp().tolist() == pytest.approx([0.5 / 4.5, 2.5 / 4.5, 1.5 / 4.5])
    Scalar(2, 3).assign(hmm)
    restarting = hmm_from_labels(text, 2, 3, 0.5, eos_id=0)  # once, into state 1: no longer a transition from state 0
    assert restarting.log_start.exp().tolist() == pytest.approx([0.25, 0.75])
    assert restarting.log_transition.exp().flatten().tolist() == pytest.approx([0.5, 0.5, 0.25, 0.75])
    assert torch.equal(restarting.log_emission, hmm.log_emission)
    with pytest.raises(InputError, match="pseudocount is 0"):
        hmm_from_labels(text, 2, 3, 0)
    with pytest.raises(InputError, match="no text"):
        hmm_from_labels([], 2, 3, 1)


# --- labels ---


def embed_words(tokens: Tensor) -> Tensor:
    """Far apart for different tokens, a little moved by the token before."""
    table = 10 * torch.randn(7, 5, generator=generator())
    known = tokens.clamp(min=0)
    return table[known] + 0.1 * table[known.roll(1, 1)]


def test_what_is_held_in_memory_changes_nothing() -> None:
    texts = [torch.randint(7, (3, 8), generator=generator(i)) for i in range(4)]
    texts[-1][1:] = -1
    calls = 0

    def embed(tokens: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return embed_words(tokens)

    none, some, everything = (
        fit_clusters(EmbeddedText(lambda: texts, embed, hold=hold), 4, passes=3) for hold in (0, 500, 10**6)
    )
    assert torch.equal(none.centroids, some.centroids) and torch.equal(none.centroids, everything.centroids)
    assert none.points == 3 * 24 + 8
    calls = 0
    fit_clusters(EmbeddedText(lambda: texts, embed, hold=10**6), 4, passes=3)
    assert calls == 4


def test_labels_of_a_blocked_model_stay_inside_the_block_of_the_word() -> None:
    blocks = Blocks.from_clusters(torch.tensor([0, 1, 2, 0, 1, 2, 0]), 12)
    texts = [torch.randint(7, (4, 8), generator=generator(i)) for i in range(3)]
    pieces = EmbeddedText(lambda: texts, embed_words, blocks.block_of_word)
    clusters = fit_clusters(pieces, 4, groups=3)
    label = Labeller(embed_words, clusters, blocks.block_of_word)
    tokens = texts[0].clone()
    tokens[2, 5:] = -1
    labels = label(tokens)
    assert torch.equal(labels < 0, tokens < 0)
    assert torch.equal(labels[tokens >= 0] // 4, blocks.block_of_word[tokens[tokens >= 0]])
    assert len(labels[tokens >= 0].unique()) > 3  # words of a block are told apart


def test_cached_labels_are_those_on_the_fly(tmp_path: Path) -> None:
    ids = torch.randint(7, (50,), generator=generator())
    tokens = TokenFile.from_arrays(ids.numpy(), [0, 3, 3, 20, 21, 50], 7)
    clusters = fit_clusters(EmbeddedText(lambda: [ids.view(5, 10)], embed_words), 4)
    label = Labeller(embed_words, clusters)
    for rows in (1, 2, 100):
        file = write_labels(tmp_path / f"labels{rows}", tokens, label, 4, rows, 8)
        assert file.documents.tolist() == [0, 3, 3, 20, 21, 50]
        padded = torch.nn.functional.pad(ids, (0, 6), value=-1).view(-1, 8)
        assert file.tokens.tolist() == label(padded).flatten()[:50].tolist()


# --- runs ---


class FakeTeacher:
    """Says which state of a planted HMM a token is likely to come from, as a vector."""

    hidden_size, layers, device = 6, 1, torch.device("cpu")

    def __init__(self, hmm: HMM) -> None:
        self.hmm, self.asked = hmm, 0
        self.table = 5 * torch.randn(hmm.states, self.hidden_size, generator=generator(7))


def embed_states(teacher: FakeTeacher, tokenizer: object, tokens: Tensor, *, align: str, layer: int) -> Tensor:
    teacher.asked += 1
    known = tokens.clamp(min=0, max=teacher.hmm.vocab_size - 1)
    states = teacher.hmm.posterior(known).argmax(-1)
    noise = torch.randn(teacher.hmm.vocab_size**2, teacher.hidden_size, generator=generator(8))
    return teacher.table[states] + 0.3 * noise[known * teacher.hmm.vocab_size + known.roll(1, 1)]


def cycle() -> HMM:
    """Six states one after another, two words each, which every other state shares: who follows whom tells them."""
    transition = 0.9 * torch.eye(6).roll(1, 1) + 0.1 / 6
    emission = torch.full((6, 6), 0.01) + 0.47 * (torch.eye(6).roll(2, 1) + torch.eye(6)[[0, 0, 1, 1, 2, 2]])
    return HMM.from_probs(torch.full((6,), 1 / 6), transition, emission)


@pytest.fixture
def teacher(monkeypatch: pytest.MonkeyPatch) -> FakeTeacher:
    """The teacher that every run of the test opens."""
    made = FakeTeacher(cycle())
    monkeypatch.setattr(initialize, "open_teacher", lambda *args, **kwargs: made)
    monkeypatch.setattr(initialize, "student_embeddings", embed_states)
    return made


LVD: dict[str, Any] = {"kind": "lvd", "teacher": "fake", "tokens": 1000, "kmeans": {"tokens": 800, "start_points": 200}}


def trained(tmp_path: Path, by: FakeTeacher, **start: Any) -> Trainer:
    config = tiny_config(
        Path("unused"), initialization=start, batches={"kind": "chunks", "batch_size": 8, "length": 16},
        model={"states": 6}, optimizer={"rate": 0.3}, train={"epochs": 1, "checks_per_epoch": 1},
    )  # fmt: skip
    tmp_path.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(config, tmp_path, planted(by.hmm, 160, 16), Progress())
    assert trainer.run(StopRequest())
    return trainer


def test_an_informative_teacher_helps_at_equal_tokens(tmp_path: Path, teacher: FakeTeacher) -> None:
    plain = trained(tmp_path / "plain", teacher)
    taught = trained(tmp_path / "taught", teacher, **LVD)
    counted = trained(tmp_path / "counted", teacher, **{**LVD, "kind": "counts"})
    assert plain.position.tokens == taught.position.tokens == counted.position.tokens
    assert taught.plateau.best < plain.plateau.best - 0.3
    assert counted.plateau.best < plain.plateau.best - 0.3
    records = [r for r in read_history(tmp_path / "taught" / "history.jsonl") if "rate" in r]
    assert [r.get("objective") for r in records] == ["joint"] * 2 + [None] * (len(records) - 2)
    assert records[1]["tokens"] == 1_024  # the first batch to reach the thousand: no loss is of both objectives
    assert Clusters.load(tmp_path / "taught" / "clusters.safetensors").points == 800


def test_cached_labels_train_the_same_model(tmp_path: Path, teacher: FakeTeacher) -> None:
    flying = trained(tmp_path / "fly", teacher, **LVD)
    cached = trained(tmp_path / "cached", teacher, **LVD, labels="cached")
    ours, theirs = flying.hmm().parameters, cached.hmm().parameters  # type: ignore[union-attr]
    assert all(map(torch.equal, ours, theirs))


def test_baum_welch_learns_from_labels_too(tmp_path: Path, teacher: FakeTeacher) -> None:
    config = tiny_config(
        Path("unused"), initialization=LVD, batches={"kind": "chunks", "batch_size": 8, "length": 16},
        model={"states": 4}, train={"epochs": 1, "checks_per_epoch": 1}, schedule={"kind": "constant"},
        optimizer={"kind": "baum-welch", "baum_welch": {"full_batch": False, "pseudocount": 0.1, "step": 0.3}},
    )  # fmt: skip
    trainer = Trainer(config, tmp_path, planted(teacher.hmm, 160, 16), Progress())
    assert trainer.run(StopRequest())
    assert trainer.plateau.best < 1.6  # as AdamW above; a uniform guess is log 6 = 1.79


KINDS: dict[str, dict[str, Any]] = {
    "chunks": {"batches": {"kind": "chunks", "batch_size": 8, "length": 8}},
    "stream": {"batches": {"reset_at_eos": True}},
    "blocked": {"model": {"structure": "brown", "blocks": 2, "parameterization": "neural", "hidden": 8}},
    "cached": {"initialization": {"labels": "cached"}},
}


@pytest.mark.parametrize("kind", KINDS)
def test_killed_and_resumed_on_either_side_of_the_switch(kind: str, tmp_path: Path, teacher: FakeTeacher) -> None:
    sections = {**KINDS[kind]}
    start = {**LVD, "tokens": 220, "kmeans": {"tokens": 300, "passes": 2}, **sections.pop("initialization", {})}
    config = tiny_config(write_text(tmp_path), initialization=start, **sections)
    straight = train(config, tmp_path / "straight")
    assert straight.finished and straight.tokens > 300
    asked = teacher.asked
    for phase, after in (("embedding and clustering", 1), ("train", 2), ("train", 3), ("train", 4), ("train", 3)):
        result = train(
            config, tmp_path / "run", resume=(tmp_path / "run" / "last").exists(),
            progress=Interrupting(phase, after, signal.SIGINT),
        )  # fmt: skip
        assert not result.finished
    last = teacher.asked
    assert train(saved_config(tmp_path / "run"), tmp_path / "run", resume=True).finished
    assert teacher.asked == last and last > asked  # past the switch nobody asks the teacher
    assert_same_run_of_any_kind(tmp_path / "run", tmp_path / "straight")


def assert_same_run_of_any_kind(run: Path, other: Path) -> None:
    from hmmlm.learning.checkpoint import read_state

    if (run / "clusters.json").exists():  # blocked: its HMM has no `parameters`
        ours, theirs = read_state(run / "last")[0], read_state(other / "last")[0]
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    else:
        assert_same_run(run, other)
    ours, theirs = (Clusters.load(folder / "clusters.safetensors") for folder in (run, other))  # type: ignore[assignment]
    assert torch.equal(ours.centroids, theirs.centroids)  # type: ignore[attr-defined]


def test_clusters_of_another_run_can_be_used(tmp_path: Path, teacher: FakeTeacher) -> None:
    first = trained(tmp_path / "first", teacher, **LVD)
    asked = teacher.asked
    second = trained(tmp_path / "second", teacher, **LVD, clusters=str(tmp_path / "first" / "clusters.safetensors"))
    assert teacher.asked - asked < asked
    assert second.plateau.best == first.plateau.best
    with pytest.raises(InputError, match=r"1 × 6 clusters \(blocks × states\), this model 1 × 5"):
        start = {**LVD, "clusters": str(tmp_path / "first" / "clusters.safetensors")}
        config = tiny_config(Path("unused"), initialization=start, model={"states": 5})
        Trainer(config, tmp_path, planted(teacher.hmm, 40, 16), Progress()).run(StopRequest())
    teacher.hidden_size = 9
    with pytest.raises(InputError, match="of embeddings of 6 dimensions, the teacher fake has 9"):
        trained(tmp_path / "third", teacher, **LVD, clusters=str(tmp_path / "first" / "clusters.safetensors"))


def test_the_command_line_has_short_names() -> None:
    for line in (["--init", "lvd", "--teacher", "some/folder"], ["--init=lvd", "--teacher=some/folder"]):
        start = _parse(line, RunConfig()).run.initialization
        assert (start.kind, start.teacher) == ("lvd", "some/folder")
    with pytest.raises(InputError, match="initialization: kind = 'lvd' needs a teacher"):
        _parse(["--init", "lvd"], RunConfig())


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"initialization": {"kind": "lvd"}}, "initialization: kind = 'lvd' needs a teacher"),
        ({"initialization": {"teacher": "x"}}, "teacher = 'x' is not used with kind = 'none'"),
        (
            {"initialization": {**LVD, "kind": "counts"}, "model": {"parameterization": "linear"}},
            "'counts' needs model.parameterization = 'scalar'",
        ),
        (
            {"initialization": LVD, "model": {"parameterization": "neural", "structure": "uniform", "states": 128}},
            "all there is for model.structure = 'uniform'",
        ),
        ({"initialization": LVD, "model": {"states": 900}}, r"kmeans.tokens \(800\) must be at least model.states"),
    ],
)
def test_bad_configurations(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        tiny_config(Path("unused"), **sections)


def test_fewer_tokens_than_states(tmp_path: Path, teacher: FakeTeacher) -> None:
    config = tiny_config(Path("unused"), initialization=LVD, model={"states": 700})
    with pytest.raises(InputError, match="has 640 tokens, fewer than the 700 states"):
        Trainer(config, tmp_path, planted(teacher.hmm, 40, 16), Progress())


def test_a_layer_that_the_teacher_has_not_is_named_before_any_work(tmp_path: Path, teacher: FakeTeacher) -> None:
    with pytest.raises(InputError, match="the teacher has no layer 5"):
        train(tiny_config(write_text(tmp_path), initialization={**LVD, "layer": 5}), tmp_path / "run")
    assert not (tmp_path / "run").exists() and not teacher.asked


def test_an_unknown_teacher_is_named_before_any_work(tmp_path: Path) -> None:
    config = tiny_config(write_text(tmp_path), initialization={**LVD, "teacher": str(tmp_path / "nobody")})
    with pytest.raises(InputError, match="nobody"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
