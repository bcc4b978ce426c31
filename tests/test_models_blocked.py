"""Models with blocks: published sizes, state dropout that equals a smaller model, gradients of all parameters."""

import pytest
import torch
from helpers.models import make_dense

from hmmlm.emissions import Blocked
from hmmlm.errors import InputError
from hmmlm.hmm import HMM
from hmmlm.models.factored import BlockedFactored
from hmmlm.models.neural import Neural
from hmmlm.models.scalar import BlockedScalar
from hmmlm.structure.blocks import Blocks
from hmmlm.transitions import Dense, Factored


def count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def blocks(vocab_size: int, states: int, num: int) -> Blocks:
    return Blocks.from_clusters(torch.arange(vocab_size) % num, states)


@pytest.mark.parametrize(
    ("states", "words", "parameters"),
    [
        (2**15, 10_001, 11_355_410),
        (2**14, 10_001, 7_161_106),
        (2**15, 33_279, 17_337_856),
    ],
)
def test_released_sizes(states: int, words: int, parameters: int) -> None:
    """PTB and WikiText-2, with <pad> in the vocabulary as the released code has it."""
    assert count(Neural(blocks(words, states, 128))) == parameters


def test_block_embeddings_have_about_the_printed_size() -> None:
    """Table 4 prints 5.6M for 2^14 states with block embeddings."""
    assert count(Neural(blocks(10_000, 2**14, 128), block_embeddings=True)) == pytest.approx(5.6e6, rel=0.03)


def small(num: int = 3, **options: object) -> Neural:
    return Neural(blocks(30, 24, num), hidden=8, generator=torch.Generator().manual_seed(0), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["released", "printed", "preprint"])
@pytest.mark.parametrize("block_embeddings", [False, True])
def test_model_is_normalized_and_all_parameters_have_gradients(form: str, block_embeddings: bool) -> None:
    model = small(form=form, block_embeddings=block_embeddings)
    hmm = model()
    assert isinstance(hmm.transition, Factored) and isinstance(hmm.emission, Blocked)
    hmm.detach().dense().validate()
    first = model.scan(torch.randint(0, 30, (2, 6)))
    second = model.scan(torch.randint(0, 30, (2, 6)), carry=first.carry)
    (first.log_likelihood + second.log_likelihood).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and bool(parameter.grad.isfinite().all()), name
        # one offset for all start scores cancels in the softmax
        assert bool((parameter.grad != 0).any()) or name == "start.bias", name


def test_in_the_preprint_only_emissions_read_the_embedding_of_the_block() -> None:
    model, printed = small(form="preprint"), small(form="printed")
    assert model.block_embedding is not None
    hmm, other = model().detach(), printed().detach()
    of_block = model.block_embedding[torch.arange(24) // 8]
    features = model.networks["emit"](torch.cat([of_block, model.embedding], 1))
    scores = (features @ model.words.weight.t()).masked_fill(
        torch.arange(24)[:, None] // 8 != model.blocks.block_of_word, -torch.inf
    )
    torch.testing.assert_close(hmm.emission.dense(), scores.log_softmax(1))
    with torch.no_grad():
        model.block_embedding += 1.0
    changed = model().detach()
    assert torch.equal(changed.transition.dense(), hmm.transition.dense())
    assert torch.equal(changed.log_start, hmm.log_start)
    assert not torch.equal(changed.emission.dense(), hmm.emission.dense())
    assert count(model) == count(printed) + 3 * 8 + 8 * 8
    same = small(form="preprint", block_embeddings=True)().detach()
    other = small(form="printed", block_embeddings=True)().detach()
    assert torch.equal(same.emission.dense(), other.emission.dense())


def test_bfloat16_products_keep_their_digits_for_what_distinguishes_states() -> None:
    """A common offset of the states that are entered changes no probability, but would use up the digits of scores."""
    model = small()
    with torch.no_grad():
        model.embedding += 30.0
    with torch.autocast("cpu", dtype=torch.bfloat16):
        transition = model().detach().transition
    assert isinstance(transition, Factored)
    u, w = transition.u, transition.w
    assert (u @ w.mean(0)).abs().max() < 0.1
    exact = (u.double() @ w.double().t()).logsumexp(1)
    torch.testing.assert_close(transition.log_normalizer.double(), exact, rtol=0.0, atol=1e-5)


def test_dropout_is_exactly_the_model_of_the_kept_states() -> None:
    model = small(dropout=0.5)
    tokens = torch.randint(0, 30, (3, 7), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(5)
    result = model.scan(tokens)
    torch.manual_seed(5)
    kept = (torch.rand(3, 8).topk(4, dim=1).indices.sort(1).values + torch.arange(3)[:, None] * 8).flatten()
    dense = model().detach().dense()
    reduced = HMM(
        dense.log_start[kept].log_softmax(0),
        dense.transition.log_probs[kept][:, kept].log_softmax(1),
        dense.emission.log_probs[kept],
    )
    torch.testing.assert_close(result.log_likelihood.detach(), reduced.log_likelihood(tokens), rtol=1e-4, atol=1e-4)
    assert set(result.carry.states.flatten().tolist()) <= set(kept.tolist())


@pytest.mark.parametrize("num", [1, 3])
def test_without_dropout_training_scan_equals_the_model(num: int) -> None:
    model = small(num, dropout=0.0)
    tokens = torch.randint(0, 30, (3, 9), generator=torch.Generator().manual_seed(2))
    whole = model().dense().log_likelihood(tokens)
    for one in (model, model()):
        first = one.scan(tokens[:, :4])
        second = one.scan(tokens[:, 4:], carry=first.carry)
        torch.testing.assert_close(first.log_likelihood + second.log_likelihood, whole, rtol=1e-4, atol=1e-4)


def test_carry_leads_into_the_states_of_the_next_sample() -> None:
    model = small(1, dropout=0.5)
    tokens = torch.randint(0, 30, (3, 5), generator=torch.Generator().manual_seed(3))
    before = model.scan(tokens).carry
    result = model.scan(tokens[:, :1], carry=before)
    now, dense = result.carry.states, model().detach().dense()  # with one block, all states that are kept
    assert now.shape == (3, 12) and not torch.equal(now, before.states)
    scores = dense.transition.log_probs[before.states[0]][:, now[0]]
    emission = dense.emission.log_probs.exp()[now[0]][:, tokens[:, 0]]
    likelihood = (before.log_probs.exp().float() @ scores.softmax(1) * emission.T).sum(1)
    torch.testing.assert_close(result.log_likelihood.detach(), likelihood.log(), rtol=1e-4, atol=1e-4)


def test_bad_dropout_is_refused_before_any_work() -> None:
    with pytest.raises(InputError, match=r"keeps 0\.8 of 8"):
        small(dropout=0.9)
    with pytest.raises(InputError, match=r"dropout rate 1\.0: it must be at least 0 and below 1"):
        small(dropout=1.0)
    with pytest.raises(InputError, match="even hidden size"):
        Neural(blocks(30, 24, 3), hidden=7, block_embeddings=True)


def test_scalar_blocks_agree_with_the_dense_model() -> None:
    model = BlockedScalar(blocks(30, 24, 3), dropout=0.0, generator=torch.Generator().manual_seed(3))
    hmm = model().detach()
    assert isinstance(hmm.transition, Dense) and isinstance(hmm.emission, Blocked)
    dense = hmm.dense()
    dense.validate()
    tokens = torch.randint(0, 30, (3, 9), generator=torch.Generator().manual_seed(4))
    first = model.scan(tokens[:, :4])
    second = model.scan(tokens[:, 4:], carry=first.carry)
    total = first.log_likelihood + second.log_likelihood
    torch.testing.assert_close(total.detach(), dense.log_likelihood(tokens), rtol=1e-4, atol=1e-4)
    mine = torch.autograd.grad(model.scan(tokens).log_likelihood.sum(), list(model.parameters()))
    theirs = torch.autograd.grad(model().dense().log_likelihood(tokens).sum(), list(model.parameters()))
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_scalar_dropout_is_exactly_the_model_of_the_kept_states() -> None:
    model = BlockedScalar(blocks(30, 24, 3), dropout=0.5, generator=torch.Generator().manual_seed(3))
    tokens = torch.randint(0, 30, (3, 7), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(6)
    result = model.scan(tokens)
    torch.manual_seed(6)
    kept = (torch.rand(3, 8).topk(4, dim=1).indices.sort(1).values + torch.arange(3)[:, None] * 8).flatten()
    dense = model().detach().dense()
    reduced = HMM(
        dense.log_start[kept].log_softmax(0),
        dense.transition.log_probs[kept][:, kept].log_softmax(1),
        dense.emission.log_probs[kept],
    )
    torch.testing.assert_close(result.log_likelihood.detach(), reduced.log_likelihood(tokens), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["neural", "scalar"])
def test_a_stream_whose_mass_vanished_restarts(kind: str) -> None:
    model = small(dropout=0.0) if kind == "neural" else BlockedScalar(blocks(30, 24, 3), dropout=0.0)
    tokens = torch.randint(0, 30, (2, 6), generator=torch.Generator().manual_seed(1))
    before = model.scan(tokens).carry
    lost = before._replace(log_probs=before.log_probs + torch.tensor([[0.0], [-torch.inf]]))
    result = model.scan(tokens, carry=lost)
    expected = [model.scan(tokens, carry=before).log_likelihood[0], model.scan(tokens).log_likelihood[1]]
    torch.testing.assert_close(result.log_likelihood, torch.stack(expected))
    result.log_likelihood.sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


def factored(kind: str = "linear", dropout: float = 0.0, **options: object) -> BlockedFactored:
    return BlockedFactored(blocks(30, 24, 3), make_dense(kind, 24, 30, hidden=8, seed=7, **options), dropout)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("linear", {}),
        ("linear", {"split": False}),
        ("mlp", {"split": False}),
        ("mlp", {"mono": True}),
    ],
)
def test_factors_on_blocks_equal_the_dense_model_without_words_of_other_blocks(kind: str, options: dict) -> None:
    model = factored(kind, **options)
    h_in, h_out, h_emit = model.dense.features()
    allowed = model.blocks.block_of_word == torch.arange(24)[:, None] // 8
    scores = (h_emit @ model.dense.emission.T).masked_fill(~allowed, float("-inf"))
    expected = HMM((h_in @ model.dense.start).log_softmax(0), (h_in @ h_out.T).log_softmax(1), scores.log_softmax(1))
    tokens = torch.randint(0, 30, (3, 9), generator=torch.Generator().manual_seed(2))
    first = model.scan(tokens[:, :4])
    second = model.scan(tokens[:, 4:], carry=first.carry)
    total = first.log_likelihood + second.log_likelihood
    torch.testing.assert_close(total, expected.log_likelihood(tokens), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model().log_likelihood(tokens), total, rtol=1e-4, atol=1e-4)
    mine = torch.autograd.grad(model.scan(tokens).log_likelihood.sum(), list(model.parameters()))
    theirs = torch.autograd.grad(expected.log_likelihood(tokens).sum(), list(model.parameters()))
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_factors_on_blocks_drop_states() -> None:
    model = factored(dropout=0.5)
    tokens = torch.randint(0, 30, (2, 6), generator=torch.Generator().manual_seed(3))
    first = model.scan(tokens)
    assert first.carry.states.shape == (2, 4)
    second = model.scan(tokens, carry=first.carry)
    second.log_likelihood.sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


def test_models_that_cannot_have_blocks_are_refused() -> None:
    with pytest.raises(InputError, match="transition is not"):
        factored(factor_transition=False)
    with pytest.raises(InputError, match="use linear or mlp"):
        factored("transformer")
