"""AdamW on softmax emissions whose gradient is not stored, in Triton's interpreter; tests/gpu runs it on a GPU."""

from typing import Any

import pytest
import torch
from helpers import compiled
from helpers.dense_scan import scan
from helpers.interpreter import (
    INTERPRETING,
    in_interpreter,
    multiply_bfloat16,
    needs_triton,
    outside_interpreter,
    run_in_interpreter,
    starts_interpreter,
)
from helpers.runs import cpu_fabric
from helpers.softmax_adamw import (
    SCANS,
    UPDATES,
    as_matrix,
    check_scan,
    check_updates,
    make_logits,
    scan_exactly,
    scan_logits,
)
from torch import Tensor

from hmmlm.config.sections import AdamWConfig
from hmmlm.data.batches import Batch
from hmmlm.data.tokenizers import WordTokenizer
from hmmlm.learning.fused_adamw import FusedAdamWLearner, fuse
from hmmlm.learning.learners import AdamWLearner
from hmmlm.models.scalar import Scalar
from hmmlm.ops.scan import Parameters

if INTERPRETING:

    @pytest.fixture(autouse=True)
    def products_of_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
        multiply_bfloat16(monkeypatch)


@starts_interpreter
def test_the_kernels_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


@in_interpreter
@pytest.mark.parametrize(("size", "options"), SCANS)
def test_triton_gradients_agree_with_float64(size: tuple[int, int, int, int], options: dict[str, Any]) -> None:
    check_scan(size, "cpu", **options)


@in_interpreter
def test_triton_softmax_of_rows_in_several_blocks() -> None:
    """Rows of transitions have several with more than 4,096 states, too many for the recursions of a test."""
    from hmmlm.ops.scan.softmax_kernels import softmax_gradient_kernel, softmax_kernel

    generator = torch.Generator().manual_seed(0)
    logits, gradient = torch.randn(2, 3, 50, generator=generator)
    logits[1, :16] = -torch.inf
    probs, (log_normalizer, norms) = torch.empty_like(logits), torch.empty(2, 3)
    softmax_kernel[(3,)](logits, probs, log_normalizer, 50, BLOCK=16)
    torch.testing.assert_close(probs, logits.softmax(1))
    torch.testing.assert_close(log_normalizer, logits.logsumexp(1))
    leaf = logits.clone().requires_grad_()
    (expected,) = torch.autograd.grad(leaf.softmax(1), leaf, gradient)
    softmax_gradient_kernel[(3,)](gradient, logits, log_normalizer, norms, 50, BLOCK=16)
    torch.testing.assert_close(gradient, expected)
    torch.testing.assert_close(norms, expected.norm(dim=1))


@in_interpreter
def test_triton_gradients_of_words_that_fill_many_chunks() -> None:
    """Each word has about 1,200 places: more chunks than are joined at once. Any numbers do for the recursions."""
    from hmmlm.ops.scan import kernel_chain, kernel_counts

    states, words, batch, steps = 3, 2, 1800, 2
    logits, evidence = make_logits((states, words, batch, steps), "cpu")
    chain = kernel_chain.make_chain(logits, evidence, torch.float32, normalized=False)
    generator = torch.Generator().manual_seed(0)
    predicted = torch.rand(steps, batch, states, generator=generator)
    joint = torch.rand(2, steps + 1, batch, states, generator=generator)
    posterior = predicted * joint[1, :steps]
    seed, done = torch.linspace(-1, 2, batch), torch.zeros(batch, dtype=torch.bool)
    result = kernel_chain.KernelForward(predicted, joint, posterior.sum(2), seed, seed, predicted[0], seed, done)
    _, _, gradient, _ = kernel_counts.accumulate_words(chain, result, seed)
    weighted = (posterior / posterior.sum(2, keepdim=True) * seed[:, None]).double()
    counts = torch.stack([weighted[evidence.tokens.t() == word].sum(0) for word in range(words)], 1)
    expected = counts - counts.sum(1, keepdim=True) * logits.log_emission.double().softmax(1)
    torch.testing.assert_close(as_matrix(gradient, logits.log_emission).double(), expected, rtol=1e-5, atol=1e-3)


@in_interpreter
@pytest.mark.parametrize("name", UPDATES)
def test_triton_updates_agree_with_adamw_of_torch(name: str) -> None:
    check_updates(UPDATES[name], "cpu", (33, 70, 9, 4))


@in_interpreter
def test_triton_steps_that_have_nothing_to_learn_from() -> None:
    """All tokens missing: no word has a place, and every gradient is zero."""
    logits, evidence = make_logits((5, 7, 2, 3), "cpu")
    evidence = evidence._replace(tokens=torch.full_like(evidence.tokens, -1))
    _, (_, _, gradient), _ = scan_logits(logits, evidence, torch.ones(2))
    assert not as_matrix(gradient, logits.log_emission).any()


@in_interpreter
def test_triton_multiplies_in_the_type_of_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    from hmmlm.ops.scan import kernel_chain
    from hmmlm.ops.scan.softmax import softmax_scan

    def truncated(log_transition: Tensor, products: torch.dtype) -> Tensor:
        """Return the probabilities as a kernel stores them in the interpreter, which truncates; a GPU rounds."""
        probs = log_transition.exp()
        return (
            probs if products == torch.float32 else (probs.view(torch.int32) & ~0xFFFF).view(torch.float32).to(products)
        )

    monkeypatch.setattr(kernel_chain, "transition_probs", truncated)
    logits, evidence = make_logits((37, 70, 9, 4), "cpu")
    start, transition = (p.log_softmax(-1) for p in logits[:2])
    likelihoods = []
    for enabled in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled):
            found = softmax_scan(Parameters(start, transition, logits.log_emission), evidence)
            expected = scan(Parameters(start, transition, logits.log_emission.log_softmax(1)), evidence, "triton")
        assert found is not None
        torch.testing.assert_close(found.scan.log_likelihood, expected.log_likelihood, rtol=1e-6, atol=0.0)
        likelihoods.append(found.scan.log_likelihood)
    assert not torch.equal(*likelihoods)


def make_learner(seed: int = 0, **settings: float) -> AdamWLearner:
    fabric, tokenizer = cpu_fabric(), WordTokenizer(["<unk>", "<eos>", *map(str, range(28))])
    model = Scalar(12, 30, generator=torch.Generator().manual_seed(seed))
    return AdamWLearner(fabric, model, tokenizer, {}, AdamWConfig.model_validate({"lr": 0.05, "eps": 1e-4} | settings))


def make_batches(count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [Batch(torch.randint(-1, 30, (6, 5), generator=generator), None, None, True) for _ in range(count)]


@in_interpreter
@pytest.mark.parametrize("settings", [{"max_grad_norm": 0.05}, {"max_grad_norm": 0.0, "weight_decay": 0.1}])
def test_a_learner_with_triton_learns_like_one_without(
    settings: dict[str, float],
) -> None:
    """The plain learner takes the step of a ragged batch, from the same moments."""
    learners = FusedAdamWLearner(make_learner(**settings)), make_learner(**settings)
    batches = make_batches(5)
    batches[2] = batches[2]._replace(lengths=torch.tensor([5, 5, 4, 3, 3, 1]))
    learned: list[Batch] = []
    learn = learners[0].plain.learn
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learners[0].plain, "learn", lambda batch, carry: learned.append(batch) or learn(batch, carry))
        found = [learners[0].step(batch, None, 0.05).log_likelihood for batch in batches]
    assert [batch.lengths is not None for batch in learned] == [True]
    expected = [learners[1].step(batch, None, 0.05).log_likelihood for batch in batches]
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=1e-5, atol=1e-4)
    for name, value in learners[0].parameters().items():
        torch.testing.assert_close(value, learners[1].parameters()[name], rtol=1e-4, atol=1e-4)
    tensors, values = learners[0].optimizer.state_dict()
    others, same = learners[1].optimizer.state_dict()
    assert values == same and tensors.keys() == others.keys()
    for name, value in tensors.items():
        assert value.dtype == others[name].dtype and value.shape == others[name].shape
        torch.testing.assert_close(value, others[name], rtol=1e-3, atol=1e-6)


@in_interpreter
def test_triton_leaves_sequences_that_underflow_to_log_space() -> None:
    from hmmlm.ops.scan.softmax import softmax_scan

    logits, evidence = make_logits((2, 2, 2, 8), "cpu")
    emission = torch.tensor([[0.0, -120.0], [-120.0, 0.0]])
    transition = torch.tensor([[0.0, -120.0], [-120.0, 0.0]])
    evidence = evidence._replace(tokens=torch.tensor([[0] * 3 + [1] * 5, [0, 1] * 4]))
    assert softmax_scan(Parameters(logits.log_start, transition, emission), evidence) is None


@outside_interpreter
def test_on_a_cpu_the_learner_is_the_plain_one() -> None:
    learner = make_learner()
    assert fuse(learner) is learner


@outside_interpreter
def test_the_reference_has_the_gradient_of_every_word() -> None:
    logits, evidence = make_logits((4, 6, 3, 5), "cpu")
    _, gradients = scan_exactly(logits, evidence, torch.ones(3))
    assert gradients[2].sum(1).abs().max() < 1e-9  # a softmax does not change if a row is shifted


@pytest.mark.slow
@needs_triton
@outside_interpreter
@pytest.mark.parametrize("vocab", [300, 40_000])
def test_the_kernels_compile(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from hmmlm.ops.scan import kernel_chain, kernel_counts
    from hmmlm.ops.softmax_adamw import Moments
    from hmmlm.ops.softmax_adamw import triton as updates

    states, batch, steps = 512, 200, 4
    _, evidence = make_logits((1, vocab, batch, steps), "cpu")
    logits = Parameters(torch.zeros(states), torch.zeros(states, states), torch.zeros(states, vocab))
    launches = compiled.record(monkeypatch, kernel_chain, kernel_counts)
    chain = kernel_chain.make_chain(logits, evidence, torch.bfloat16, normalized=False)
    joint, row = torch.zeros(2, steps + 1, batch, states, dtype=torch.bfloat16), torch.zeros(steps, batch)
    seed, done = torch.zeros(batch), torch.zeros(batch, dtype=torch.bool)
    result = kernel_chain.KernelForward(chain.scores, joint, row, row, seed, chain.scores[0], seed, done)
    updating = compiled.record(monkeypatch, updates)
    _, _, gradient, parts = kernel_counts.accumulate_words(chain, result, seed)
    names = ["mark_words_kernel", "normalizer_kernel", "softmax_kernel", "gather_kernel"]
    names += ["sum_words_kernel", "join_words_kernel", "weigh_kernel", "softmax_gradient_kernel"]
    assert [kernel.__name__ for kernel, _, _ in launches] == names
    compiled.check(launches, "sum_words_kernel")
    moments = Moments(torch.zeros(()), torch.zeros(states, vocab), torch.zeros(states, vocab))
    settings = UPDATES["weight decay"]
    _, plan = updates.plan_step(gradient, parts, moments, settings, torch.zeros(()))
    updates.update(logits.log_emission, gradient, moments, settings, plan)
    assert [kernel.__name__ for kernel, _, _ in updating] == ["norm_kernel", "plan_kernel", "update_kernel"]
    for launch in [*launches, *updating]:
        assert "st.global" in compiled.ptx(*launch)
