"""Emissions from random subsets of the states: the training scan against the dense model, with and without dropout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from learning_runs import tiny_config, write_text
from torch import Tensor

from hmmlm.errors import InputError
from hmmlm.hmm import HMM, Carry
from hmmlm.learning.config import RunConfig, config_from_dict
from hmmlm.learning.history import read_history
from hmmlm.learning.trainer import train
from hmmlm.lm import LanguageModel
from hmmlm.parameterization import UniformNeural, uniform
from hmmlm.structure.blocks import UniformSubsets
from hmmlm.structure.dropout import sample_columns

WORDS, STATES, DRAWN = 30, 16, 9


def small(states: int = STATES, drawn: int = DRAWN, **options: Any) -> UniformNeural:
    subsets = UniformSubsets.sample(WORDS, states, drawn, seed=0)
    return UniformNeural(subsets, hidden=8, generator=torch.Generator().manual_seed(0), **options).double()


def draw(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(0, WORDS, shape, generator=torch.Generator().manual_seed(seed))


def written_out(model: UniformNeural, columns: Tensor | None = None) -> HMM:
    """The model from its parameters, as the paper writes it; `columns` [Z] bool: those that dropout keeps."""
    network, form = model.network, model.network.form
    out, emit = (network.networks[role](network.embedding) for role in ("out", "emit"))
    incoming = network.networks["in"](network.embedding) if form == "paper" else network.embedding
    start = network.start(incoming if form == "paper" else network.networks["start"](network.embedding))[:, 0]
    transition, emission = out @ incoming.T, network.words(emit)
    if columns is not None:
        start, transition = (x.masked_fill(~columns, -torch.inf) for x in (start, transition))
    emission = emission.masked_fill(~model.subsets.mask(), -torch.inf)
    return HMM(start.log_softmax(0), transition.log_softmax(1), emission.log_softmax(1))


def spread(carry: Carry, states: int = STATES) -> Tensor:
    """[B, Z] from the few states of a carry."""
    return torch.zeros(len(carry.probs), states, dtype=carry.probs.dtype).scatter(1, carry.states, carry.probs)


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
    lists = uniform.make_lists(subsets)
    found = [[int(w) for w, e in zip(*row, strict=True) if not e] for row in zip(lists.words, lists.empty, strict=True)]
    assert found == [[w for w in range(words) if s in picks[w]] for s in range(states)]
    for word in range(words):
        assert lists.words[subsets.states_of_word[word], lists.slot[word]].tolist() == [word] * drawn


@pytest.mark.parametrize("form", ["code", "paper"])
def test_the_model_is_the_dense_one_written_out(form: str) -> None:
    model = small(form=form)
    hmm = model()
    hmm.detach().validate()
    assert torch.equal(hmm.log_emission > -torch.inf, model.subsets.mask())
    for mine, expected in zip(hmm.parameters, written_out(model).parameters, strict=True):
        torch.testing.assert_close(mine, expected)
    tokens = draw(2, 6)
    check_gradients(model, hmm.log_likelihood(tokens), written_out(model).log_likelihood(tokens))


@pytest.mark.parametrize("form", ["code", "paper"])
def test_without_dropout_the_training_scan_equals_the_model(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uniform, "_SCORES", 5 * WORDS)  # several pieces, the last a smaller one
    model, tokens = small(form=form, dropout=0.0), draw(3, 9)
    restart = torch.zeros_like(tokens, dtype=torch.bool)
    restart[1, 2] = restart[0, 4] = restart[2, 6] = True
    first = model.scan(tokens[:, :4], restart=restart[:, :4])
    second = model.scan(tokens[:, 4:], initial=first.final, restart=restart[:, 4:])
    whole = written_out(model).scan(tokens, restart=restart)
    torch.testing.assert_close(first.log_likelihood + second.log_likelihood, whole.log_likelihood)
    torch.testing.assert_close(spread(second.final), whole.final)
    hmm = written_out(model)
    check_gradients(
        model, first.log_likelihood + second.log_likelihood,
        hmm.scan(tokens[:, :4], restart=restart[:, :4]).log_likelihood + hmm.scan(
            tokens[:, 4:], initial=spread(first.final), restart=restart[:, 4:]).log_likelihood,
    )  # what is carried is detached


def test_words_beyond_a_length_do_not_matter() -> None:
    model, tokens, lengths = small(dropout=0.0), draw(3, 5), torch.tensor([5, 1, 3])
    padded = tokens.masked_fill(torch.arange(5) >= lengths[:, None], -1)
    result, expected = model.scan(padded, lengths), written_out(model).scan(padded, lengths)
    torch.testing.assert_close(result.log_likelihood, expected.log_likelihood)
    torch.testing.assert_close(spread(result.final), expected.final)


def test_dropout_is_the_dense_model_without_those_columns() -> None:
    """Also across windows: what is carried sits on states of the last sample and is left by the columns of this."""
    model, tokens = small(dropout=0.5), draw(3, 9)
    torch.manual_seed(5)
    columns = [sample_columns(STATES, 0.5) for _ in range(2)]
    assert not torch.equal(*columns)
    torch.manual_seed(5)
    first = model.scan(tokens[:, :4])
    second = model.scan(tokens[:, 4:], initial=first.final)
    hmms = [written_out(model, kept) for kept in columns]
    expected = hmms[0].scan(tokens[:, :4])
    torch.testing.assert_close(first.log_likelihood, expected.log_likelihood)
    torch.testing.assert_close(spread(first.final), expected.final)
    assert bool((spread(first.final)[:, ~columns[1]] > 0).any())
    later = hmms[1].scan(tokens[:, 4:], initial=spread(first.final))
    torch.testing.assert_close(second.log_likelihood, later.log_likelihood)
    torch.testing.assert_close(spread(second.final), later.final)
    check_gradients(
        model, first.log_likelihood + second.log_likelihood, expected.log_likelihood + later.log_likelihood)
    assert int(model.skipped) == 0


def test_a_sequence_that_dropout_makes_impossible_is_skipped_and_starts_again() -> None:
    model = small(states=4, drawn=1, dropout=0.5)
    torch.manual_seed(0)
    first_kept, second_kept = (sample_columns(4, 0.5) for _ in range(2))
    emits = model.subsets.states_of_word[:, 0]
    dropped, alive = (int((first_kept[emits] == kept).nonzero()[0]) for kept in (False, True))
    follows = int(second_kept[emits].nonzero()[0])
    torch.manual_seed(0)
    first = model.scan(torch.tensor([[alive, dropped, alive], [alive, alive, alive]]))
    second = model.scan(torch.tensor([[follows, follows]] * 2), initial=first.final)
    assert int(model.skipped) == 1
    hmms = [written_out(model, kept) for kept in (first_kept, second_kept)]
    whole = hmms[0].scan(torch.tensor([[alive] * 3]))
    assert first.log_likelihood[0] == 0
    torch.testing.assert_close(first.log_likelihood[1:], whole.log_likelihood)
    again = hmms[1].scan(torch.tensor([[follows, follows]])).log_likelihood
    onward = hmms[1].scan(torch.tensor([[follows, follows]]), initial=whole.final).log_likelihood
    torch.testing.assert_close(second.log_likelihood, torch.cat([again, onward]))
    check_gradients(
        model, first.log_likelihood.sum() + second.log_likelihood.sum(), whole.log_likelihood.sum() + again + onward)


def test_in_low_precision_only_the_factors_are_rounded() -> None:
    model, tokens = small(dropout=0.0).float(), draw(3, 9)
    with torch.autocast("cpu", torch.bfloat16):
        result, hmm = model.scan(tokens), model().detach()
        u, w, *_ = model.factors(torch.arange(STATES))
    u, w = (factor.detach().bfloat16().float() for factor in (u, w))
    torch.testing.assert_close(hmm.log_transition, (u @ w.T).log_softmax(1))
    hmm.validate()
    torch.testing.assert_close(result.log_likelihood.detach(), hmm.log_likelihood(tokens), rtol=1e-3, atol=0.0)


@pytest.mark.parametrize(("fields", "message"), [
    ({"parameterization": "scalar"}, "structure = 'uniform' is for parameterization = 'neural' only"),
    ({"factored": True}, "factored = true needs blocks"),
    ({"states_per_word": 65}, r"states_per_word \(65\) must be at most states \(64\)"),
    ({"states_per_word": 0}, r"model\.states_per_word: .*greater than 0"),
])  # fmt: skip
def test_what_does_not_go_with_the_constraint_is_named(fields: dict[str, Any], message: str) -> None:
    model = {"structure": "uniform", "parameterization": "neural", "states": 64, "states_per_word": 8, **fields}
    with pytest.raises(InputError, match=message):
        config_from_dict({"model": model})


def test_bad_dropout_is_refused() -> None:
    with pytest.raises(InputError, match=r"keeps 1\.6 of 16"):
        small(dropout=0.9)


def test_trains_saves_and_resumes(tmp_path: Path) -> None:
    """A resumed run draws the same subsets again: it ends where one that was not stopped does."""
    model = {"structure": "uniform", "parameterization": "neural", "states": 8, "states_per_word": 6, "hidden": 8}
    text = write_text(tmp_path, lines=90)

    def config(epochs: int) -> RunConfig:
        return tiny_config(
            text, model=model, optimizer={"rate": 0.02}, schedule={"kind": "constant", "warmup_fraction": 0},
            train={"epochs": epochs, "checks_per_epoch": 1, "log_every": 10, "checkpoint_every": 1000},
        )  # fmt: skip

    train(config(2), tmp_path / "whole")
    train(config(1), tmp_path / "parts")
    train(config(2), tmp_path / "parts", resume=True)
    losses = [r["loss"] for r in read_history(tmp_path / "whole" / "history.jsonl") if r["event"] == "train"]
    assert max(losses[-3:]) < losses[0] - 0.2
    models = [LanguageModel.load(tmp_path / run / "final").hmm for run in ("whole", "parts")]
    assert isinstance(models[0], HMM) and isinstance(models[1], HMM)
    for a, b in zip(models[0].parameters, models[1].parameters, strict=True):
        assert torch.equal(a, b)
