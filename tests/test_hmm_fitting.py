"""Fitting with the habits of hmmlearn: forms of sequences, restarts, criteria, the number of states, files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.oracle import matrices, random_blocked_hmm

import hmmlm
from hmmlm import HMM, InputError
from hmmlm.transitions import LowRank

CASINO = ([0.5, 0.5], [[0.95, 0.05], [0.1, 0.9]], [[1 / 6] * 6, [0.1] * 5 + [0.5]])


class Column:
    """A column of a table, as pandas and datasets have them: no list, but a sequence."""

    def __init__(self, values: list[Any]) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, i: int) -> Any:
        return self.values[i]


ROWS = [[0, 2, 1], [4], [3, 3, 1, 0]]
JOINED, LENGTHS = [0, 2, 1, 4, 3, 3, 1, 0], [3, 1, 4]
FORMS: dict[str, tuple[Any, Any]] = {
    "[N]": (JOINED, LENGTHS),
    "[N] array": (np.array(JOINED, dtype=np.uint8), np.array(LENGTHS)),
    "[N, 1] array": (np.array(JOINED)[:, None], LENGTHS),
    "[N, 1] tensor": (torch.tensor(JOINED)[:, None], torch.tensor(LENGTHS)),
    "[N, 1] lists": ([[token] for token in JOINED], LENGTHS),
    "a column": (Column(JOINED), LENGTHS),
    "a column of lists": (Column(ROWS), None),
    "an array of lists": (np.array(ROWS, dtype=object), None),
}


@pytest.mark.parametrize("form", FORMS)
def test_sequences_in_every_form_are_the_same(form: str) -> None:
    hmm, given = HMM.random(3, 5).to(torch.float64), FORMS[form]
    assert hmm.score(*given) == pytest.approx(float(hmm.log_likelihood(ROWS).sum()))
    states, probs = hmm.viterbi(ROWS)[0], hmm.posterior(ROWS)
    if given[1] is not None:
        inside = states >= 0
        states, probs = states[inside], probs[inside]
    assert torch.equal(hmm.predict(*given), states)
    torch.testing.assert_close(hmm.predict_proba(*given), probs)
    for mine, theirs in zip(
        matrices(hmm.fit(*given, iterations=2)), matrices(hmm.fit(ROWS, iterations=2)), strict=True
    ):
        torch.testing.assert_close(mine, theirs)


def test_one_sequence_needs_no_lengths_and_one_word_sequences_stay() -> None:
    hmm = HMM.random(3, 5)
    for one in (JOINED, np.array(JOINED), np.array(JOINED)[:, None], torch.tensor(JOINED)):
        assert hmm.score(one) == pytest.approx(float(hmm.log_likelihood([JOINED])))
    assert hmm.score([[0], [1]]) == pytest.approx(float(hmm.log_likelihood([[0], [1]]).sum()))
    with pytest.raises(InputError, match="lengths must be positive integers that sum to the 8 tokens"):
        hmm.score(JOINED, [3, 4])


def test_learning_finds_what_one_start_does_not() -> None:
    truth = HMM.from_probs(*CASINO)
    tokens = truth.sample(20, 100, seed=0)[0]
    alone = [HMM.learn(tokens, 2, restarts=1, seed=seed).score(tokens) for seed in range(6)]
    assert HMM.learn(tokens, 2, restarts=6).score(tokens) == pytest.approx(max(alone), abs=0.1)
    assert min(alone) < truth.score(tokens) < max(alone)
    start = HMM.random(2, 6, seed=3).to(torch.float64)
    assert alone[3] == start.fit(tokens, iterations=500, tolerance=1e-6).score(tokens)
    assert HMM.learn(tokens, 2, restarts=1, vocab_size=9).vocab_size == 9


def test_criteria() -> None:
    hmm, tokens = HMM.random(2, 6), [[0, 1, 2], [5]]
    assert hmm.num_parameters == 1 + 2 + 10
    assert hmm.aic(tokens) == pytest.approx(26 - 2 * hmm.score(tokens))
    assert hmm.bic(tokens) == pytest.approx(13 * math.log(4) - 2 * hmm.score(tokens))


def test_free_parameters_of_every_kind() -> None:
    """Rows that sum to one have one entry less; a factored transition has those of its factors."""
    log = torch.zeros
    kinds = hmmlm.transitions
    assert kinds.Dense(log(4, 4)).num_parameters == 4 * 3
    assert kinds.Factored(log(4, 3), log(4, 3)).num_parameters == 2 * 4 * 3
    assert kinds.LowRank(log(4, 2), log(2, 4)).num_parameters == 4 * 1 + 2 * 3
    assert kinds.Monarch(log(2, 3, 3), log(3, 2, 2)).num_parameters == 2 * 3 * 2 + 3 * 2 * 1
    blocked = hmmlm.emissions.Blocked(log(5, 2), torch.tensor([0, 0, 0, 1, 1]))
    assert blocked.num_parameters == 2 * (3 - 1) + 2 * (2 - 1)
    dense = HMM.random(3, 4)
    union = HMM.union([dense, random_blocked_hmm(2, 2, 4, seed=0).to(torch.float32)])
    assert union.num_parameters == sum(part.num_parameters for part in union.components) + 1


def test_the_number_of_states_is_chosen_by_held_out_likelihood() -> None:
    tokens = HMM.from_probs(*CASINO).sample(60, 100, seed=0)[0]
    found = HMM.choose(tokens, range(1, 4), restarts=2)
    assert found.best.num_states == 2
    assert [each.model.num_states for each in found.candidates] == [1, 2, 3]
    two = found.candidates[1]
    assert two.tokens == 48 * 100 and two.aic == pytest.approx(2 * 13 - 2 * two.log_likelihood)
    assert two.held_out == max(each.held_out for each in found.candidates)
    assert "\n    2*          13 " in repr(found) and len(repr(found).splitlines()) == 4
    labels = [line.get_label() for line in found.plot().axes[0].lines]
    assert labels == ["AIC / 2", "BIC / 2", "held-out −log p", "chosen"]
    one = HMM.choose(tokens[0], [2, 1], restarts=1)
    assert one.best.num_states == min(one.candidates, key=lambda each: each.bic).model.num_states
    assert math.isnan(one.candidates[0].held_out)
    with pytest.raises(InputError, match="num_states is empty"):
        HMM.choose(tokens, [])


def test_saved_and_loaded(tmp_path: Path) -> None:
    models = [HMM.random(3, 4), random_blocked_hmm(2, 2, 5, seed=0), HMM.union([HMM.random(2, 4), HMM.random(3, 4)])]
    for hmm in models:
        hmm.save(tmp_path / "hmm")
        loaded = HMM.load(tmp_path / "hmm")
        assert loaded.kind == hmm.kind and torch.equal(loaded.posterior([[0, 1, 2]]), hmm.posterior([[0, 1, 2]]))
    assert [file.name for file in tmp_path.iterdir()] == ["hmm"]
    for wrong in (tmp_path, tmp_path / "none"):
        with pytest.raises(InputError, match="is no file of `HMM"):
            HMM.load(wrong)
    from safetensors.torch import save_file

    save_file({"log_start": torch.zeros(2)}, tmp_path / "other", {"transition.kind": "dense", "emission.kind": "x"})
    with pytest.raises(InputError, match=r"other is damaged, or not of `HMM\.save`: "):
        HMM.load(tmp_path / "other")


def test_seeds() -> None:
    hmm = HMM.random(3, 5)
    for draw in (lambda **how: hmm.sample(2, 5, **how)[0], lambda **how: hmm.posterior_sample([[0, 1, 2]], **how)):
        assert torch.equal(draw(seed=3), draw(generator=torch.Generator().manual_seed(3)))
        with pytest.raises(InputError, match="give generator or seed, not both"):
            draw(seed=3, generator=torch.Generator())


# --- hmmlearn ---


@pytest.mark.parametrize("implementation", ["log", "scaling"])
def test_the_optimum_is_that_of_hmmlearn(implementation: str) -> None:
    hmm = pytest.importorskip("hmmlearn.hmm", reason="hmmlearn is not installed")
    sampled = HMM.from_probs(*CASINO).sample(1, 2000, seed=0)[0].numpy().reshape(-1, 1)
    lengths, chance = [500, 1, 1499], np.random.default_rng(0)
    start = [chance.dirichlet(np.ones(n), size) for n, size in ((2, None), (2, 2), (6, 2))]
    theirs = hmm.CategoricalHMM(2, n_iter=100, tol=-np.inf, init_params="", implementation=implementation)
    theirs.startprob_, theirs.transmat_, theirs.emissionprob_ = (table.copy() for table in start)
    theirs.fit(sampled, lengths)
    ours = HMM.from_probs(*start).fit(sampled, lengths, iterations=100, tolerance=0)
    tables = zip(matrices(ours), (theirs.startprob_, theirs.transmat_, theirs.emissionprob_), strict=True)
    assert max(float((log.exp() - torch.from_numpy(table)).abs().max()) for log, table in tables) < 1e-6
    for name in ("score", "aic", "bic"):
        assert getattr(ours, name)(sampled, lengths) == pytest.approx(getattr(theirs, name)(sampled, lengths))
    np.testing.assert_array_equal(ours.predict(sampled, lengths), theirs.predict(sampled, lengths))
    np.testing.assert_allclose(ours.predict_proba(sampled, lengths), theirs.predict_proba(sampled, lengths), atol=1e-9)


# --- what is known: labels, allowed transitions, pseudocounts ---


def test_labels_of_all_states_give_their_frequencies() -> None:
    tokens, states = [[0, 1, 1, 0], [2, 0]], [[0, 1, 1, 0], [1, 0]]
    found = HMM.random(2, 3, 1).fit(tokens, labels=states, iterations=1)
    start, transition, emission = (part.exp() for part in (found.log_start, *parts_of(found)))
    torch.testing.assert_close(start, torch.tensor([0.5, 0.5]))
    torch.testing.assert_close(transition, torch.tensor([[0.0, 1.0], [2 / 3, 1 / 3]]))
    torch.testing.assert_close(emission, torch.tensor([[1.0, 0.0, 0.0], [0.0, 2 / 3, 1 / 3]]))
    joined = HMM.random(2, 3, 1).fit([0, 1, 1, 0, 2, 0], [4, 2], labels=[0, 1, 1, 0, 1, 0], iterations=1)
    torch.testing.assert_close(joined.tensors(), found.tensors())


def parts_of(hmm: HMM) -> tuple[torch.Tensor, torch.Tensor]:
    return hmm.transition.dense(), hmm.emission.dense()


def test_a_few_labels_name_the_states() -> None:
    truth = HMM.from_probs([1, 0], [[0.9, 0.1], [0.2, 0.8]], [[0.8, 0.1, 0.1], [0.1, 0.1, 0.8]])
    tokens, states = truth.sample(20, 40, seed=0)
    known = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(0)) < 0.3
    labels = torch.where(known, states, -1)
    for seed in range(4):  # without labels the states of half of the seeds are the other way round
        found = HMM.learn(tokens, 2, restarts=1, seed=seed, labels=labels)
        assert float((found.predict(tokens) == states).double().mean()) > 0.85


@pytest.mark.parametrize("pseudocount", [0.0, 0.5])
def test_only_allowed_transitions_have_probability(pseudocount: float) -> None:
    left_to_right = torch.ones(3, 3, dtype=torch.bool).triu()
    tokens = HMM.random(4, 5, 0).sample(8, 12, seed=1)[0]
    found = HMM.learn(tokens, 3, restarts=2, pseudocount={"transition": pseudocount}, allowed_transitions=left_to_right)
    found.validate()
    probs = found.transition.dense().exp()
    assert bool((probs[~left_to_right] == 0).all())
    again = found.fit(tokens, iterations=1, tolerance=0, pseudocount={"transition": pseudocount})
    if not pseudocount:  # a fixed point of EM with no other transitions stays one
        assert bool((again.transition.dense().exp()[~left_to_right] == 0).all())
    counts = (found.expected_counts(tokens).transition + pseudocount) * left_to_right
    torch.testing.assert_close(probs, counts / counts.sum(1, keepdim=True), atol=2e-3, rtol=0)


def test_what_cannot_be_known_is_refused() -> None:
    hmm = HMM.random(2, 2)
    upper = torch.ones(2, 2).triu().bool()
    factors = (torch.randn(shape).log_softmax(1) for shape in ((2, 1), (1, 2)))
    low_rank = HMM(hmm.log_start, LowRank(*factors), hmm.emission)
    for call, message in (
        (lambda: hmm.fit([[0, 1]], labels=[[0, 2]]), "label 2 in sequence 0 at position 1 is no state"),
        (lambda: hmm.fit([[0, 1]], labels=[[1, 0]], allowed_transitions=upper), "sequence 0 .* position 1 "),
        (lambda: hmm.fit([[0, 1]], allowed_transitions=~upper), "leaves state 0 without a transition"),
        (lambda: hmm.fit([[0, 1]], allowed_transitions=[[1.0]]), r"must be booleans \[2, 2\]"),
        (lambda: low_rank.fit([[0, 1]], allowed_transitions=upper), "needs a dense transition, not a low-rank one"),
        (lambda: hmm.fit([[0, 1]], pseudocount={"emissions": 1}), "pseudocount is for start, transition, emission"),
        (lambda: hmm.fit([[0, 1]], pseudocount={"start": -1}), "pseudocount of start must be a number of at least 0"),
        (lambda: hmm.fit([0, 1, 0], [2, 1], labels=[0, 1]), "2 labels for 3 tokens"),
    ):
        with pytest.raises(InputError, match=message):
            call()
