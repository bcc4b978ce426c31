"""A token under constraints: the sums in products agree with log space, and leave to it what they cannot do.

They are NumPy's on a CPU, and kernels in Triton's interpreter.
"""

import copy
from collections.abc import Sequence

import pytest
import torch
from helpers.interpreter import INTERPRETING, run_in_interpreter, starts_interpreter
from torch import Tensor

from hmmlm import HMM, Guide, Steering
from hmmlm.constrain import guided_cpu
from hmmlm.constrain.automaton import Automaton, containing
from hmmlm.constrain.guided_cpu import ClassProducts
from hmmlm.constrain.guided_step import GuidedSteps
from hmmlm.constrain.regex import regex_automaton
from hmmlm.constrain.spelling import Spelling
from hmmlm.transitions import LowRank

END, WORDS, LENGTH = 0, 9, 6


def random_model(seed: int, states: int = 5, spread: float = 2.0) -> HMM:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return (spread * torch.randn(*shape, generator=generator)).log_softmax(-1)

    return HMM(draw(states), draw(states, states), draw(states, WORDS))


def lines() -> list[Automaton]:
    return [
        containing([1, 2], WORDS).until(END),
        (containing([3], WORDS) & containing([4, 4], WORDS) & ~containing([5], WORDS)).until(END),
        (~containing([1], WORDS)).until(END),
    ]


def in_log_space(guides: Sequence[Guide], weight: float = 1.0) -> Steering:
    """Return a processor of the same guides for the same model as one of low rank, without kernels and products."""
    model = guides[0].hmm
    hmm = HMM(model.log_start, LowRank(model.transition.dense(), torch.eye(model.num_states).log()), model.emission)
    slow = [copy.copy(guide) for guide in guides]
    for guide in slow:
        guide.hmm = hmm
        guide._targets = {}
    return Steering.batch([(guide, guide.begin()) for guide in slow], weight)


def served(steering: Steering) -> bool:
    """Return whether the kernels served every call, in the interpreter; NumPy's sums report nothing."""
    return not INTERPRETING or (steering._kernels is not None and not steering._doubtful)


def run(steering: Steering, texts: Tensor, scores: Tensor, prompt: int = 2) -> list[Tensor]:
    """Return the steered scores after 0, 1, … tokens of texts [B, T], and what they were normalized by."""
    begun, found = torch.full((len(texts), prompt), 7), list[Tensor]()
    for t in range(texts.shape[1] + 1):
        found.append(steering(torch.cat([begun, texts[:, :t]], 1), scores[t]))
        assert steering.log_masses is not None
        found.append(steering.log_masses.to(scores.dtype))
    return found


@pytest.mark.parametrize("spread", [1.0, 6.0])
@pytest.mark.parametrize("rows", [1, 3])
def test_tokens_of_many_rows_are_each_scored_with_their_own(
    rows: int, spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens of one to six symbols within a string of a bounded length: each length leads to a state of its own."""
    spelled = [b'"'] + [bytes([97 + n % 26]) * (1 + n % 6) for n in range(200)]
    line = Spelling(spelled).automaton(regex_automaton('"[a-z]{0,30}"'))
    generator = torch.Generator().manual_seed(rows)
    tables = [spread * torch.randn(*shape, generator=generator) for shape in ((7,), (7, 7), (7, len(spelled)))]
    hmm, served = HMM(*(table.log_softmax(-1) for table in tables)), list[int]()
    accept = ClassProducts.accept
    monkeypatch.setattr(ClassProducts, "accept", lambda *given: served.append(1) or accept(*given))
    monkeypatch.setattr(guided_cpu, "_SMALL", 8)
    texts = torch.randint(1, 100, (rows, 5), generator=generator)
    texts[:, 0] = 0  # the string begins
    scores = torch.randn(rows, len(spelled), generator=generator).log_softmax(1)
    each, alone = (Guide(hmm, line, 12, few=few) for few in (2, 10**6))
    mine, theirs = (Steering(guide, guide.begin()) for guide in (each, alone))
    for length in range(texts.shape[1] + 1):
        given = torch.cat([torch.full((rows, 1), 7), texts[:, :length]], 1)
        one, other = mine(given, scores), theirs(given, scores)
        assert torch.equal(one == -torch.inf, other == -torch.inf)
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert served


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("few", "dtype", "weight"),
    [
        (0, torch.float32, 1.0),
        (2, torch.float32, 0.5),
        (256, torch.float32, 0.0),
        (2, torch.bfloat16, 1.0),
    ],
)
@pytest.mark.filterwarnings("ignore:.*before the constraint was satisfied")
def test_steps_agree_with_log_space_also_with_triton(few: int, dtype: torch.dtype, weight: float, shared: bool) -> None:
    hmm, generator = random_model(few), torch.Generator().manual_seed(1)
    if shared:  # columns of emissions that are stored once
        log_emission = hmm.emission.log_probs.clone()
        log_emission[:, 3:] = log_emission[:, 3:4]
        hmm = HMM(hmm.log_start, hmm.transition, log_emission.log_softmax(1))
        assert hmm.emission.column_of_word is not None
    guides = [Guide(hmm, line, LENGTH, few=few) for line in lines()]
    pairs = [(guide, guide.begin()) for guide in guides]
    # The first two rows are of one guide; those that end are not constrained any more.
    texts = torch.tensor(
        [[1, 2, 8, 0, 6], [6, 1, 2, 6, 0], [3, 4, 4, 0, 1], [4, 4, 3, 8, 8], [2, 0, 1, 1, 1], [6, 6, 8, 0, 3]]
    )
    scores = torch.randn(texts.shape[1] + 1, len(texts), WORDS + 2, generator=generator).to(dtype)
    kernels, portable = Steering.batch(pairs, weight), in_log_space(guides, weight)
    found, expected = run(kernels, texts, scores), run(portable, texts, scores)
    assert served(kernels)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        tolerance = {} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.05}
        torch.testing.assert_close(ours.float(), theirs.float(), **tolerance)
    if dtype == torch.float32:
        assert kernels.report == portable.report and kernels.report.changed > 0


@pytest.mark.filterwarnings("ignore:.*before the constraint was satisfied")
def test_steps_follow_beams_and_drafts_also_with_triton() -> None:
    guide, generator = Guide(random_model(3), lines()[1], LENGTH), torch.Generator().manual_seed(2)
    kernels, portable = Steering(guide, guide.begin()), in_log_space([guide])
    # Rows are exchanged and copied, end, go back, are repeated and become fewer.
    calls = [
        [[7], [7], [7]],
        [[7, 3], [7, 4], [7, 6]],
        [[7, 4, 4], [7, 3, 4], [7, 4, 6]],
        [[7, 3, 4, 4], [7, 3, 4, 8], [7, 4, 4, 3]],
        [[7, 4, 4, 3, 0], [7, 3, 4, 4, 0], [7, 3, 4, 8, 4]],
        [[7, 3, 4, 8, 4, 4], [7, 4, 4, 3, 0, 11], [7, 3, 4, 4, 0, 1]],
        [[7, 3, 4], [7, 4, 6]],
        [[7, 3, 4], [7, 4, 6]],
        [[7, 3, 4, 4], [7, 4, 6, 3]],
    ]
    for ids in calls:
        scores = torch.randn(len(ids), WORDS + 3, generator=generator)
        torch.testing.assert_close(kernels(torch.tensor(ids), scores), portable(torch.tensor(ids), scores))
    assert served(kernels) and kernels.report == portable.report


@pytest.mark.filterwarnings("ignore:.*before the constraint was satisfied")
def test_steps_leave_what_underflows_to_log_space_also_with_triton() -> None:
    hmm = random_model(0)
    log_emission = hmm.emission.log_probs.clone()
    log_emission[:, 1] = torch.tensor([-100.0, -120.0, -90.0, -200.0, -150.0])
    log_emission[2:, 3] = -torch.inf
    log_transition = torch.full_like(hmm.transition.log_probs, -torch.inf).fill_diagonal_(0.0)
    hmm = HMM(hmm.log_start, log_transition, log_emission.log_softmax(1))
    guide = Guide(hmm, lines()[0], LENGTH)
    texts = torch.tensor([[3, 3, 1, 2], [1, 1, 2, 8]])
    scores = torch.randn(5, 2, WORDS, generator=torch.Generator().manual_seed(0))
    kernels, portable = Steering(guide, guide.begin()), in_log_space([guide])
    for ours, theirs in zip(run(kernels, texts, scores), run(portable, texts, scores), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert kernels._doubtful or not INTERPRETING


def test_a_model_that_has_steered_can_be_copied_also_with_triton() -> None:
    hmm = random_model(2)
    guide = Guide(hmm, lines()[2], LENGTH)
    scores = torch.zeros(1, WORDS)
    expected = Steering(guide, guide.begin())(torch.tensor([[7]]), scores)
    other = copy.deepcopy(hmm)
    assert GuidedSteps.of(other) is not GuidedSteps.of(hmm) or not INTERPRETING
    guide = Guide(other, lines()[2], LENGTH)
    torch.testing.assert_close(Steering(guide, guide.begin())(torch.tensor([[7]]), scores), expected)


@pytest.mark.parametrize("spread", [1.0, 8.0])
def test_tables_of_probabilities_agree_with_float64_also_with_triton(spread: float) -> None:
    hmm = random_model(1, spread=spread)
    for line in lines():
        tables, expected = Guide(hmm, line, 20)._tables, Guide(hmm.to(torch.float64), line, 20)._tables
        for ours, theirs in zip(tables, expected, strict=False):
            assert torch.equal(ours.row_of, theirs.row_of)
            torch.testing.assert_close(ours.log_probs, theirs.log_probs.float(), rtol=1e-5, atol=1e-5)


@starts_interpreter
def test_triton_kernels_in_the_interpreter() -> None:
    run_in_interpreter(__file__)
