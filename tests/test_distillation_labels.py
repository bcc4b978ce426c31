"""Labels for distillation: the objective P(O, S), its closed-form maximum, and labels from clusters of embeddings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.runs import random_hmm
from torch import Tensor

from hmmlm.data.batches import Batch, ChunkBatches, StreamBatches
from hmmlm.data.tokenfile import TokenFile
from hmmlm.distillation.cache import LabelStore
from hmmlm.distillation.kmeans import fit_clusters
from hmmlm.distillation.labels import EmbeddedText, LabeledBatches, StoredLabels, TeacherLabels, hmm_from_labels
from hmmlm.errors import InputError
from hmmlm.hmm import HMM
from hmmlm.models.factored import LinearConfig, MlpConfig, TransformerConfig
from hmmlm.models.neural import Neural
from hmmlm.models.scalar import BlockedScalar, Scalar
from hmmlm.scan.composition import parameters_of
from hmmlm.scan.likelihood import _carry_at, joint_scan
from hmmlm.structure.blocks import Blocks


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- P(O, S) ---


def by_hand(hmm: HMM, tokens: Tensor, states: Tensor) -> float:
    total = float(hmm.log_start[states[0]]) + float(hmm.emission.log_probs[states[0], tokens[0]])
    for before, state, token in zip(states[:-1], states[1:], tokens[1:], strict=True):
        total += float(hmm.transition.log_probs[before, state]) + float(hmm.emission.log_probs[state, token])
    return total


def test_the_joint_likelihood_equals_the_formula_and_sums_to_the_marginal() -> None:
    hmm, tokens = random_hmm(3, 4, seed=0), torch.randint(4, (1, 5), generator=generator())
    paths = torch.cartesian_prod(*[torch.arange(3)] * 5)
    joint = joint_scan(hmm, tokens.expand(len(paths), -1), paths).log_likelihood
    assert float(joint[100]) == pytest.approx(by_hand(hmm, tokens[0], paths[100]))
    torch.testing.assert_close(joint.logsumexp(0), hmm.log_likelihood(tokens)[0])


def test_windows_restarts_and_lengths_of_the_joint_likelihood() -> None:
    hmm = random_hmm(3, 4, seed=0)
    tokens, states = (torch.randint(n, (2, 7), generator=generator(n)) for n in (4, 3))
    whole = joint_scan(hmm, tokens, states).log_likelihood
    first = joint_scan(hmm, tokens[:, :4], states[:, :4])
    second = joint_scan(hmm, tokens[:, 4:], states[:, 4:], carry=first.carry).log_likelihood
    torch.testing.assert_close(first.log_likelihood + second, whole)
    restart = torch.zeros(2, 7, dtype=torch.bool)
    restart[:, 4] = True
    apart = first.log_likelihood + joint_scan(hmm, tokens[:, 4:], states[:, 4:]).log_likelihood
    torch.testing.assert_close(joint_scan(hmm, tokens, states, restart=restart).log_likelihood, apart)
    ragged_tokens, ragged = tokens.clone(), states.clone()
    ragged_tokens[:, 4:], ragged[:, 4:] = -1, -1
    short = joint_scan(hmm, ragged_tokens, ragged, torch.tensor([4, 4]))
    torch.testing.assert_close(short.log_likelihood, first.log_likelihood)
    assert torch.equal(short.carry.log_probs, first.carry.log_probs)


def test_the_gradient_of_the_joint_likelihood_is_the_counts() -> None:
    hmm = random_hmm(3, 4, seed=0)
    tokens, states = (torch.randint(n, (2, 6), generator=generator(n)) for n in (4, 3))
    parameters = [p.requires_grad_() for p in parameters_of(hmm).values()]
    joint = joint_scan(hmm, tokens, states).log_likelihood
    start, transition, emission = torch.autograd.grad(joint.sum(), parameters)
    assert torch.equal(start, torch.bincount(states[:, 0], minlength=3).double())
    pairs = states[:, :-1] * 3 + states[:, 1:]
    assert torch.equal(transition.flatten(), torch.bincount(pairs.flatten(), minlength=9).double())
    assert torch.equal(emission.flatten(), torch.bincount((states * 4 + tokens).flatten(), minlength=12).double())


@pytest.mark.parametrize("kind", ["neural", "scalar"])
def test_a_blocked_model_has_the_joint_likelihood_of_its_dense_form(kind: str) -> None:
    blocks = Blocks.from_clusters(torch.tensor([0, 1, 0, 1, 2]), 6)
    model: Any = Neural(blocks, hidden=4, dropout=0.5, generator=generator())
    if kind == "scalar":
        model = BlockedScalar(blocks, 0.5, 1.0, generator())
    tokens = torch.randint(5, (3, 6), generator=generator())
    states = blocks.block_of_word[tokens] * 2 + torch.randint(2, (3, 6), generator=generator(1))
    hmm = model()
    joint = joint_scan(hmm, tokens, states).log_likelihood
    torch.testing.assert_close(joint, joint_scan(hmm.dense(), tokens, states).log_likelihood)
    joint.sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("config", [LinearConfig, MlpConfig, TransformerConfig])
def test_every_factored_model_learns_labels(config: Any) -> None:
    model = config(num_states=4, hidden=8).make_dense(6, 8, generator())
    tokens, states = torch.tensor([[0, 1, 2, 3]]), torch.tensor([[3, 2, 1, 0]])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    for _ in range(60):
        optimizer.zero_grad()
        loss = -joint_scan(model(), tokens, states).log_likelihood.mean()
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < 1.0  # a uniform guess: 4 · log 6 + 4 · log 4
    assert int(model().viterbi(tokens)[0][0, 1]) == 2


def test_the_carry_of_the_joint_scan_is_the_last_label() -> None:
    tokens, labels = torch.tensor([[0, 1, 2], [1, 0, -1]]), torch.tensor([[2, 0, 1], [0, 2, -1]])
    dense = random_hmm(3, 4, seed=0, dtype=torch.float32)
    scan = joint_scan(dense, tokens, labels, torch.tensor([3, 2]))
    assert scan.carry.log_probs.exp().tolist() == [[0, 1, 0], [0, 0, 1]]


def test_the_carry_of_a_blocked_joint_scan_is_the_last_label() -> None:
    model = Neural(Blocks.from_clusters(torch.tensor([0, 1, 0, 1]), 4), hidden=4, dropout=0.5, generator=generator())
    hmm, words = model(), torch.tensor([[0, 1, 2], [1, 3, -1]])
    labels = torch.tensor([[0, 2, 1], [3, 2, -1]])
    carry = joint_scan(hmm, words, labels, torch.tensor([3, 2])).carry
    assert carry.states is not None
    assert (carry.states * carry.log_probs.exp()).sum(1).tolist() == [1, 2]
    following = joint_scan(hmm, words[:, :2], labels[:, :2], carry=carry).log_likelihood
    dense_carry = _carry_at(hmm.dense(), torch.tensor([1, 2]))
    expected = joint_scan(hmm.dense(), words[:, :2], labels[:, :2], carry=dense_carry).log_likelihood
    torch.testing.assert_close(following, expected)
    marginal = model.scan(words[:, :2], None, carry)  # the next phase continues from it, with dropout
    assert bool(marginal.log_likelihood.isfinite().all())


def test_counts_of_labels_by_hand() -> None:
    text = [(torch.tensor([[0, 1, 1], [2, -1, -1]]), torch.tensor([[0, 1, 1], [1, -1, -1]]))]
    hmm = hmm_from_labels(text, 2, 3, 0.5)
    assert hmm.log_start.exp().tolist() == pytest.approx([0.5, 0.5])
    assert hmm.transition.log_probs.exp().flatten().tolist() == pytest.approx([0.25, 0.75, 0.25, 0.75])
    assert hmm.emission.log_probs[1].exp().tolist() == pytest.approx([0.5 / 4.5, 2.5 / 4.5, 1.5 / 4.5])
    Scalar(2, 3).assign(hmm)
    restarting = hmm_from_labels(text, 2, 3, 0.5, eos_id=0)  # one restart, into state 1, instead of a transition
    assert restarting.log_start.exp().tolist() == pytest.approx([0.25, 0.75])
    assert restarting.transition.log_probs.exp().flatten().tolist() == pytest.approx([0.5, 0.5, 0.25, 0.75])
    assert torch.equal(restarting.emission.log_probs, hmm.emission.log_probs)
    with pytest.raises(InputError, match="pseudocount is 0"):
        hmm_from_labels(text, 2, 3, 0)
    with pytest.raises(InputError, match="no text"):
        hmm_from_labels([], 2, 3, 1)


# --- labels ---


def embed_words(tokens: Tensor) -> Tensor:
    """Return vectors that are far apart for different tokens, and depend a little on the previous token."""
    table = 10 * torch.randn(7, 5, generator=generator())
    known = tokens.clamp(min=0)
    return table[known] + 0.1 * table[known.roll(1, 1)]


class CountedEmbed:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        return embed_words(tokens)


def test_memory_for_embeddings_changes_calls_but_not_clusters() -> None:
    texts = [torch.randint(7, (3, 8), generator=generator(i)) for i in range(4)]
    texts[-1][1:] = -1
    embeds = [CountedEmbed() for _ in range(3)]
    none, some, everything = (
        fit_clusters(EmbeddedText(lambda: texts, embed, max_bytes=size), 4, passes=3)
        for embed, size in zip(embeds, (0, 500, 10**6), strict=True)
    )
    assert torch.equal(none.centroids, some.centroids) and torch.equal(none.centroids, everything.centroids)
    assert none.points == 3 * 24 + 8
    assert embeds[0].calls > embeds[1].calls > embeds[2].calls == 4


def test_labels_of_a_blocked_model_are_states_of_the_block_of_the_word() -> None:
    blocks = Blocks.from_clusters(torch.tensor([0, 1, 2, 0, 1, 2, 0]), 12)
    texts = [torch.randint(7, (4, 8), generator=generator(i)) for i in range(3)]
    pieces = EmbeddedText(lambda: texts, embed_words, blocks.block_of_word)
    source = TeacherLabels(embed_words, fit_clusters(pieces, 4, groups=3), blocks.block_of_word)
    tokens = texts[0].clone()
    tokens[2, 5:] = -1
    labels = source.labels(Batch(tokens, None, None, False))
    assert torch.equal(labels < 0, tokens < 0)
    assert torch.equal(labels[tokens >= 0] // 4, blocks.block_of_word[tokens[tokens >= 0]])
    assert len(labels[tokens >= 0].unique()) > 3  # words of a block have different labels


def test_labels_of_kept_embeddings_equal_those_of_the_teacher() -> None:
    blocks = Blocks.from_clusters(torch.tensor([0, 1, 2, 0, 1, 2, 0]), 12)
    texts = [torch.randint(7, (4, 8), generator=generator(i)) for i in range(3)]
    texts[1][2, 5:] = -1
    one_piece = 4 * 8 * 5 * 2 - 3 * 5 * 2  # bytes of the second, in bfloat16
    pieces = EmbeddedText(lambda: texts, embed_words, blocks.block_of_word, max_bytes=4 * 8 * 5 * 2 + one_piece)
    clusters = fit_clusters(pieces, 4, groups=3)
    kept = list(pieces.kept_labels(clusters))
    source = TeacherLabels(embed_words, clusters, blocks.block_of_word)
    assert len(kept) == 2
    for tokens, labels in zip(texts, kept, strict=False):
        assert torch.equal(labels, source.labels(Batch(tokens, None, None, False)))


@pytest.mark.parametrize("rows", [1, 2, 100])
def test_stored_labels_are_those_of_the_teacher_and_are_computed_once(tmp_path: Path, rows: int) -> None:
    ids = torch.randint(7, (50,), generator=generator())
    text = TokenFile.from_arrays(ids.numpy(), [0, 3, 3, 20, 21, 50], 7)
    clusters = fit_clusters(EmbeddedText(lambda: [ids.view(5, 10)], embed_words), 4)
    padded = torch.nn.functional.pad(ids, (0, 6), value=-1).view(-1, 8)
    expected = TeacherLabels(embed_words, clusters).labels(Batch(padded, None, None, False))
    embed = CountedEmbed()
    store = LabelStore(tmp_path / "labels.bin", len(text), 4)
    source = StoredLabels(TeacherLabels(embed, clusters), store)
    chunks = ChunkBatches(text, rows, 8, shuffle=True, seed=3)
    for batch in LabeledBatches(chunks, source).epoch(0):
        assert batch.places is not None and batch.labels is not None
        assert torch.equal(batch.labels[batch.tokens >= 0], expected.flatten()[batch.places[batch.tokens >= 0]])
        assert torch.equal(batch.labels < 0, batch.tokens < 0)
    assert store.read(torch.arange(50)[None]).flatten().tolist() == expected.flatten()[:50].tolist()
    calls = embed.calls
    assert calls == chunks.steps_per_epoch
    stream = StreamBatches(text, 3, 5, shuffle=True, reset_at_eos=False, eos_id=1, seed=1)  # read by place, too
    for batch in LabeledBatches(stream, source).epoch(1):
        assert batch.places is not None and batch.labels is not None
        assert torch.equal(batch.labels[batch.tokens >= 0], expected.flatten()[batch.places[batch.tokens >= 0]])
    assert embed.calls == calls
