"""Emissions from random subsets of the states: the training scan against the dense model, with and without dropout."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.runs import tiny_config, write_text
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import hmmlm
from hmmlm.config.run import RunConfig
from hmmlm.config.training import read_config
from hmmlm.errors import InputError
from hmmlm.hmm import HMM, Carry
from hmmlm.models.uniform import UniformNeural, make_lists
from hmmlm.ops import pieces
from hmmlm.runs.history import read_history
from hmmlm.scan.composition import matrices
from hmmlm.structure.blocks import UniformSubsets
from hmmlm.structure.dropout import sample_columns
from hmmlm.training.train import train

WORDS, STATES, DRAWN = 30, 16, 9


def small(states: int = STATES, drawn: int = DRAWN, **options: Any) -> UniformNeural:
    subsets = UniformSubsets.sample(WORDS, states, drawn, seed=0)
    return UniformNeural(subsets, hidden=8, generator=torch.Generator().manual_seed(0), **options).double()


def draw(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(0, WORDS, shape, generator=torch.Generator().manual_seed(seed))


def emitted(subsets: UniformSubsets) -> Tensor:
    """Return a mask [Z, V], True where a state may emit a word."""
    return torch.zeros(WORDS, subsets.num_states).scatter(1, subsets.states_of_word, 1.0).T.bool()


def written_out(model: UniformNeural, columns: Tensor | None = None) -> HMM:
    """Return the model from its parameters, as in the paper; `columns` [Z] bool: those that dropout keeps."""
    network, form = model.network, model.network.form
    out, emit = (network.networks[role](network.embedding) for role in ("out", "emit"))
    incoming = network.networks["in"](network.embedding) if form == "printed" else network.embedding
    start = network.start(incoming if form == "printed" else network.networks["start"](network.embedding))[:, 0]
    transition, emission = out @ incoming.T, network.words(emit)
    if columns is not None:
        start, transition = (x.masked_fill(~columns, -torch.inf) for x in (start, transition))
    emission = emission.masked_fill(~emitted(model.subsets), -torch.inf)
    return HMM(start.log_softmax(0), transition.log_softmax(1), emission.log_softmax(1))


def spread(carry: Carry, states: int = STATES) -> Tensor:
    """Return the log-probabilities [B, Z] of a carry over a few states."""
    assert carry.states is not None
    nothing = torch.full((len(carry.log_probs), states), -torch.inf, dtype=torch.float64)
    return nothing.scatter(1, carry.states, carry.log_probs)


def check_gradients(model: UniformNeural, mine: Tensor, expected: Tensor) -> None:
    parameters = dict(model.named_parameters())
    pairs = zip(*(torch.autograd.grad(x.sum(), list(parameters.values())) for x in (mine, expected)), strict=True)
    for name, (a, b) in zip(parameters, pairs, strict=True):
        torch.testing.assert_close(a, b, msg=lambda text, name=name: f"{name}: {text}")
        # an offset common to all start scores cancels in the softmax
        assert bool((a != 0).any()) or name.endswith(("start.bias", "start.norm.bias")), name


@given(st.integers(1, 12), st.integers(1, 6), st.data())
def test_lists_are_the_subsets_seen_from_the_states(words: int, states: int, data: st.DataObject) -> None:
    drawn = data.draw(st.integers(1, states))
    picks = [sorted(data.draw(st.permutations(range(states)))[:drawn]) for _ in range(words)]
    subsets = UniformSubsets(torch.tensor(picks), states)
    lists = make_lists(subsets)
    found = [[int(w) for w, e in zip(*row, strict=True) if not e] for row in zip(lists.words, lists.empty, strict=True)]
    assert found == [[w for w in range(words) if s in picks[w]] for s in range(states)]
    for word in range(words):
        assert lists.words[subsets.states_of_word[word], lists.slot[word]].tolist() == [word] * drawn


@pytest.mark.parametrize("form", ["released", "printed"])
def test_model_equals_the_dense_one_of_the_paper(form: str) -> None:
    model = small(form=form)
    hmm = model()
    hmm.detach().validate()
    assert torch.equal(hmm.emission.log_probs > -torch.inf, emitted(model.subsets))
    for mine, expected in zip(matrices(hmm), matrices(written_out(model)), strict=True):
        torch.testing.assert_close(mine, expected)
    tokens = draw(2, 6)
    check_gradients(model, hmm.log_likelihood(tokens), written_out(model).log_likelihood(tokens))


@pytest.fixture
def several_pieces() -> Iterator[None]:
    """Let the last piece of the scores be a smaller one."""
    with pieces.limit(5 * WORDS):
        yield


@pytest.mark.parametrize("form", ["released", "printed"])
@pytest.mark.usefixtures("several_pieces")
def test_without_dropout_training_scan_equals_the_model(form: str) -> None:
    model, tokens = small(form=form, dropout=0.0), draw(3, 9)
    restart = torch.zeros_like(tokens, dtype=torch.bool)
    restart[1, 2] = restart[0, 4] = restart[2, 6] = True
    first = model.scan(tokens[:, :4], restart=restart[:, :4])
    second = model.scan(tokens[:, 4:], carry=first.carry, restart=restart[:, 4:])
    whole = written_out(model).scan(tokens, restart=restart)
    torch.testing.assert_close(first.log_likelihood + second.log_likelihood, whole.log_likelihood)
    torch.testing.assert_close(spread(second.carry), whole.carry.log_probs, rtol=1e-5, atol=1e-5)
    hmm = written_out(model)
    check_gradients(
        model,
        first.log_likelihood + second.log_likelihood,
        hmm.scan(tokens[:, :4], restart=restart[:, :4]).log_likelihood
        + hmm.scan(tokens[:, 4:], carry=Carry(spread(first.carry)), restart=restart[:, 4:]).log_likelihood,
    )  # the carry is detached


def test_words_beyond_a_length_do_not_matter() -> None:
    model, tokens, lengths = small(dropout=0.0), draw(3, 5), torch.tensor([5, 1, 3])
    padded = tokens.masked_fill(torch.arange(5) >= lengths[:, None], -1)
    result, expected = model.scan(padded, lengths), written_out(model).scan(padded, lengths)
    torch.testing.assert_close(result.log_likelihood, expected.log_likelihood)
    torch.testing.assert_close(spread(result.carry), expected.carry.log_probs, rtol=1e-5, atol=1e-5)


def test_dropout_is_the_dense_model_without_those_columns() -> None:
    """Also across windows: the carry is over states of one sample, and the next has the columns of another."""
    model, tokens = small(dropout=0.5), draw(3, 9)
    torch.manual_seed(5)
    columns = [sample_columns(STATES, 0.5) for _ in range(2)]
    assert not torch.equal(*columns)
    torch.manual_seed(5)
    first = model.scan(tokens[:, :4])
    second = model.scan(tokens[:, 4:], carry=first.carry)
    hmms = [written_out(model, kept) for kept in columns]
    expected = hmms[0].scan(tokens[:, :4])
    torch.testing.assert_close(first.log_likelihood, expected.log_likelihood)
    torch.testing.assert_close(spread(first.carry), expected.carry.log_probs, rtol=1e-5, atol=1e-5)
    assert bool((spread(first.carry)[:, ~columns[1]] > -torch.inf).any())
    later = hmms[1].scan(tokens[:, 4:], carry=Carry(spread(first.carry)))
    torch.testing.assert_close(second.log_likelihood, later.log_likelihood)
    torch.testing.assert_close(spread(second.carry), later.carry.log_probs, rtol=1e-5, atol=1e-5)
    check_gradients(model, first.log_likelihood + second.log_likelihood, expected.log_likelihood + later.log_likelihood)
    assert int(model.skipped) == 0


def test_dropped_logits_are_those_of_random_transitions_of_each_state() -> None:
    model, tokens = small(dropout=0.75, dropped="logits"), draw(3, 9)
    torch.manual_seed(5)
    kept = torch.rand(STATES, STATES, dtype=torch.float64).topk(4, 1).indices
    torch.manual_seed(5)
    result = model.scan(tokens)
    network = model.network
    logits = network.networks["out"](network.embedding) @ network.embedding.T
    dropped = torch.ones_like(logits, dtype=torch.bool).scatter(1, kept, False)
    plain = written_out(model)
    hmm = HMM(plain.log_start, logits.masked_fill(dropped, -torch.inf).log_softmax(1), plain.emission)
    expected = hmm.scan(tokens)
    assert bool(expected.log_likelihood.isfinite().all())
    torch.testing.assert_close(result.log_likelihood, expected.log_likelihood)
    torch.testing.assert_close(result.carry.log_probs, expected.carry.log_probs)
    check_gradients(model, result.log_likelihood, expected.log_likelihood)
    torch.manual_seed(5)
    assert not torch.equal(model.scan(tokens, carry=result.carry).log_likelihood, result.log_likelihood)
    torch.testing.assert_close(model().log_likelihood(tokens), plain.log_likelihood(tokens))


@pytest.mark.parametrize("dropped", ["columns", "logits"])
def test_the_form_of_the_preprint_trains(dropped: str) -> None:
    model = small(form="preprint", dropped=dropped)
    model.scan(draw(3, 9)).log_likelihood.sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


def test_a_sequence_that_dropout_makes_impossible_is_skipped_and_restarts() -> None:
    model = small(states=4, drawn=1, dropout=0.5)
    torch.manual_seed(0)
    first_kept, second_kept = (sample_columns(4, 0.5) for _ in range(2))
    emits = model.subsets.states_of_word[:, 0]
    dropped, alive = (int((first_kept[emits] == kept).nonzero()[0]) for kept in (False, True))
    follows = int(second_kept[emits].nonzero()[0])
    torch.manual_seed(0)
    first = model.scan(torch.tensor([[alive, dropped, alive], [alive, alive, alive]]))
    second = model.scan(torch.tensor([[follows, follows]] * 2), carry=first.carry)
    assert int(model.skipped) == 1
    hmms = [written_out(model, kept) for kept in (first_kept, second_kept)]
    whole = hmms[0].scan(torch.tensor([[alive] * 3]))
    assert first.log_likelihood[0] == 0
    torch.testing.assert_close(first.log_likelihood[1:], whole.log_likelihood)
    again = hmms[1].scan(torch.tensor([[follows, follows]])).log_likelihood
    onward = hmms[1].scan(torch.tensor([[follows, follows]]), carry=whole.carry).log_likelihood
    torch.testing.assert_close(second.log_likelihood, torch.cat([again, onward]))
    check_gradients(
        model, first.log_likelihood.sum() + second.log_likelihood.sum(), whole.log_likelihood.sum() + again + onward
    )


def test_in_low_precision_only_the_factors_are_rounded() -> None:
    model, tokens = small(dropout=0.0).float(), draw(3, 9)
    with torch.autocast("cpu", torch.bfloat16):
        result, hmm = model.scan(tokens), model().detach()
        embedding = model.network.embed(torch.arange(STATES))
        (u, _), (w, _) = model.network.leaving(embedding, None), model.network.entering(embedding)
    u, w = (factor.detach().bfloat16().float() for factor in (u, w))
    torch.testing.assert_close(hmm.transition.log_probs, (u @ w.T).log_softmax(1))
    hmm.validate()
    torch.testing.assert_close(result.log_likelihood.detach(), hmm.log_likelihood(tokens), rtol=1e-3, atol=0.0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"blocks": 8}, "unknown setting model.blocks for model.kind = 'uniform'"),
        ({"block_embeddings": True}, "unknown setting model.block_embeddings for model.kind = 'uniform'"),
        ({"states_per_word": 65}, r"states_per_word \(65\) must be at most states \(64\)"),
        ({"states_per_word": 0}, r"model\.states_per_word: .*greater than 0"),
    ],
)
def test_settings_that_do_not_fit_the_constraint_are_named(fields: dict[str, Any], message: str) -> None:
    model = {"kind": "uniform", "num_states": 64, "states_per_word": 8, **fields}
    with pytest.raises(InputError, match=message):
        read_config(RunConfig, {"model": model})


def test_bad_dropout_is_refused() -> None:
    with pytest.raises(InputError, match=r"keeps 1\.6 of 16"):
        small(dropout=0.9)


@pytest.mark.slow
def test_trains_saves_and_resumes(tmp_path: Path) -> None:
    """A resumed run draws the same subsets again, so it ends with the same model as an uninterrupted one."""
    model = {"kind": "uniform", "num_states": 8, "states_per_word": 6, "hidden": 8, "form": "released", "dropout": 0.5}
    text = write_text(tmp_path, lines=90)

    def config(epochs: int) -> RunConfig:
        return tiny_config(
            text,
            model=model,
            optimizer={"lr": 0.02},
            schedule={"kind": "constant", "warmup": 0},
            train={"epochs": epochs, "checks_per_epoch": 1, "log_every": 10, "checkpoint_every": 1000},
        )

    train(config(2), tmp_path / "whole")
    train(config(1), tmp_path / "parts")
    train(config(2), tmp_path / "parts", resume=True)
    losses = [r["loss"] for r in read_history(tmp_path / "whole" / "history.jsonl") if r["event"] == "train"]
    assert max(losses[-3:]) < losses[0] - 0.2
    models = [hmmlm.load(tmp_path / run / "final").hmm for run in ("whole", "parts")]
    assert isinstance(models[0], HMM) and isinstance(models[1], HMM)
    for a, b in zip(*(model.tensors().values() for model in models), strict=True):
        assert torch.equal(a, b)
