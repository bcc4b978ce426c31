"""An HMM under constraints against a list of all sequences; automata against a search in every sequence."""

import itertools
import math
import random
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from helpers.oracle import random_blocked_hmm, random_hmm
from torch import Tensor

from hmmlm.constrain.automaton import Automaton, anything, containing
from hmmlm.constrain.constraint import Constraint
from hmmlm.constrain.guide import Guide
from hmmlm.constrain.guided import log_probs_accept
from hmmlm.constrain.phrases import Phrases
from hmmlm.constrain.spelling import Spelling, containing_text
from hmmlm.data.tokenizers import HuggingFaceTokenizer, WordTokenizer
from hmmlm.errors import InputError
from hmmlm.hmm import HMM
from hmmlm.lm.lm import LanguageModel
from hmmlm.numerics.logmatrix import LogMatrix
from hmmlm.ops import pieces

WORDS = 4


def avoiding(phrase: Sequence[int], vocab_size: int) -> Automaton:
    return containing(phrase, vocab_size).complement()


SEQUENCES = list(itertools.product(range(WORDS), repeat=5))


def has(tokens: Sequence[int], phrase: Sequence[int]) -> bool:
    return any(tuple(tokens[i : i + len(phrase)]) == tuple(phrase) for i in range(len(tokens)))


@pytest.mark.parametrize("phrase", [[2], [1, 1], [1, 2, 1, 2], [1, 1, 2, 1, 1], [0, 1, 0, 0]])
def test_phrases_are_found_at_every_position(phrase: list[int]) -> None:
    wanted, unwanted = containing(phrase, WORDS), avoiding(phrase, WORDS)
    assert wanted.num_states == len(phrase) + 1
    for tokens in itertools.product(range(3), repeat=7):
        assert wanted.accepts(tokens) == has(tokens, phrase) == (not unwanted.accepts(tokens)), tokens


def test_intersections_of_automata_and_their_end() -> None:
    joined = containing([1, 2], WORDS) & containing([2, 1], WORDS) & avoiding([3], WORDS)
    ended, going_on = joined.until(0), joined.until(0, require_eos=False)
    for tokens in SEQUENCES:
        wanted = has(tokens, [1, 2]) and has(tokens, [2, 1]) and 3 not in tokens
        assert joined.accepts(tokens) == wanted
        line = tokens[: tokens.index(0)] if 0 in tokens else None
        good = line is not None and has(line, [1, 2]) and has(line, [2, 1]) and 3 not in line
        assert ended.accepts(tokens) == good, tokens
        assert going_on.accepts(tokens) == (wanted if line is None else good), tokens


def test_unions_of_automata() -> None:
    either = containing([1, 2], WORDS) | containing([3], WORDS)
    none = avoiding([3], WORDS) & either  # only [1, 2] is left
    for tokens in SEQUENCES:
        assert either.accepts(tokens) == (has(tokens, [1, 2]) or 3 in tokens)
        assert none.accepts(tokens) == (has(tokens, [1, 2]) and 3 not in tokens)
    assert int(either.settled().sum()) == 1  # after either phrase everything is accepted


def hmms() -> list[HMM]:
    """Return a dense model, a dense one with zeros, a blocked one, and the union of the first two."""
    given = (random_hmm(3, WORDS, seed, 2.0, zeros) for seed, zeros in ((0, 0.0), (1, 0.4)))
    dense = [HMM(*(p.log() for p in parameters)) for parameters in given]
    return [*dense, random_blocked_hmm(3, 4, 9, seed=0), HMM.union(dense, [0.3, 0.7])]


def sequences(hmm: HMM, length: int) -> tuple[list[tuple[int, ...]], Tensor]:
    every = list(itertools.product(range(hmm.vocab_size), repeat=length))
    return every, hmm.log_likelihood(every).exp().double()


@pytest.mark.parametrize("few", [0, 256])  # 0: whole vocabularies are scored together
@pytest.mark.parametrize("number", range(4))
def test_chances_and_next_tokens_agree_with_a_list_of_all_sequences(number: int, few: int) -> None:
    hmm = hmms()[number]
    words, length = hmm.vocab_size, 4
    automaton = (containing([1, 2], words) & avoiding([3, 1], words)).until(0)
    every, probs = sequences(hmm, length)
    good = torch.tensor([automaton.accepts(tokens) for tokens in every])
    guide = Guide(hmm, automaton, length, few=few)
    position, generated = guide.begin(), ()
    close = {"rtol": 1e-5, "atol": 1e-7} if hmm.dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-12}
    for step in range(length):
        so_far = torch.tensor([tokens[:step] == generated for tokens in every])
        first = torch.tensor([tokens[step] for tokens in every])
        total = probs[so_far].sum()
        assert math.isclose(
            math.exp(guide.log_prob_accept(position)), float(probs[so_far & good].sum() / total), rel_tol=1e-5
        )
        met = torch.stack([probs[so_far & good & (first == v)].sum() for v in range(words)]) / total
        plain = torch.stack([probs[so_far & (first == v)].sum() for v in range(words)]) / total
        torch.testing.assert_close(guide.next_token(position).exp().double(), met / met.sum(), **close)
        expected = torch.where(plain > 0, met / plain, 0.0)
        torch.testing.assert_close(guide.log_probs_accept(position).exp().double(), expected, **close)
        token = int(met.argmax())
        generated, position = (*generated, token), guide.advance(position, token)
    assert automaton.accepts(generated) and guide.log_prob_accept(position) == 0.0
    with pytest.raises(InputError, match="all 4 tokens of the guide have been generated"):
        guide.joint(position)


@pytest.mark.parametrize("number", range(4))
def test_chances_of_several_positions_agree_with_each_alone(number: int) -> None:
    hmm = hmms()[number]
    automaton = (containing([1, 2], hmm.vocab_size) & avoiding([3], hmm.vocab_size)).until(0)
    guide = Guide(hmm, automaton, 5, few=1)
    positions = [guide.begin()]
    for place, token in ((0, 1), (1, 1), (0, 2), (1, 2), (4, 0)):  # at several distances from the end
        positions.append(guide.advance(positions[place], token))
    alone = torch.stack([guide.log_probs_accept(position) for position in positions])
    torch.testing.assert_close(guide.log_probs_accept_of(positions), alone)
    for prompt in ([], [2]):
        position, text, expected = guide.begin(prompt), [1, 1, 2, 0], []
        (found,) = guide.log_probs_accept_along(position, prompt, [text])
        for token in text:
            position = guide.advance(position, token)
            expected.append(guide.log_prob_accept(position))
        assert found == pytest.approx(expected)
    with pieces.limit(1):  # of one automaton state or token
        torch.testing.assert_close(Guide(hmm, automaton, 5, few=1).log_probs_accept_of(positions), alone)


@pytest.mark.parametrize("number", range(4))
def test_a_state_drawn_first_and_its_word_then_have_the_distribution_of_the_next_token(number: int) -> None:
    hmm = hmms()[number]
    automaton = (containing([1, 2], hmm.vocab_size) & avoiding([3], hmm.vocab_size)).until(0)
    guide = Guide(hmm, automaton, 5)
    position, states = guide.begin(), torch.arange(hmm.num_states)
    for token in (1, 1, 2):
        (reading,) = guide.reading([position.automaton], position.remaining)
        state_probs = (position.log_state + reading).softmax(0)
        words, log_probs = hmm.emission.log_rows(states)
        at = [position.automaton] * hmm.num_states
        accepted = guide.accepted_words(at, position.remaining, words, states)
        accepted = (log_probs + accepted).softmax(1).nan_to_num(0.0)
        drawn = torch.zeros(hmm.num_states, hmm.vocab_size, dtype=hmm.dtype).scatter_add(
            1, words.clamp_min(0), accepted
        )
        torch.testing.assert_close(state_probs @ drawn, guide.next_token(position).exp())
        position = guide.advance(position, token)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("p", "rare", "length"), [(2e-4, 1e-300, 200), (2e-4, 1e-300, 2000), (3e-5, 1e-30, 2000), (3e-7, 0.5, 3000)]
)
def test_small_changes_of_many_tokens_add_up(p: float, rare: float, length: int, dtype: torch.dtype) -> None:
    """The last of `length` tokens is the rare one, and none is the one of probability p."""
    log_emission = torch.tensor(
        [[math.log1p(-p - (rare if rare > p else 0)), math.log(p), math.log(rare)]], dtype=dtype
    )
    hmm = HMM(torch.zeros(1, dtype=dtype), torch.zeros(1, 1, dtype=dtype), log_emission)
    automaton = Automaton(torch.tensor([[0, 2, 1], [0, 2, 1], [2, 2, 2]]), torch.tensor([False, True, False]))
    guide = Guide(hmm, automaton, length)
    expected = math.log(rare) + (length - 1) * math.log1p(-p)
    assert guide.log_prob_accept(guide.begin()) == pytest.approx(
        expected, rel=3e-7 if dtype == torch.float32 else 1e-12, abs=1e-5
    )


def test_guides_of_a_blocked_model_and_of_its_dense_form_agree() -> None:
    hmm = random_blocked_hmm(3, 4, 9, seed=0)
    automaton = (containing([1], hmm.vocab_size) & containing([2, 2], hmm.vocab_size)).until(0)
    here, there = Guide(hmm, automaton, 6), Guide(hmm.dense(), automaton, 6)
    for tokens in ((), (1,), (2, 1, 2)):
        one, other = here.next_token(here.begin(tokens)), there.next_token(there.begin(tokens))
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_tiny_probabilities_do_not_underflow() -> None:
    # Each state emits its own word; two transitions to the next have a probability below the range of float32.
    states, rare = 4, 1e-30
    transition = torch.full((states, states), -math.inf)
    for z in range(states):
        transition[z, z] = math.log1p(-rare) if z + 1 < states else 0.0
        if z + 1 < states:
            transition[z, z + 1] = math.log(rare)
    start = torch.tensor([0.0, *[-math.inf] * (states - 1)])
    emission = torch.where(torch.eye(states) > 0, 0.0, -math.inf)
    guide = Guide(HMM(start, transition, emission), containing([3], states), 4)
    assert math.isclose(guide.log_prob_accept(guide.begin()), 3 * math.log(rare), rel_tol=1e-5)
    assert int(guide.next_token(guide.begin([0])).argmax()) == 1
    weights = torch.tensor([[-500.0, -600.0], [-math.inf, -math.inf]])
    matrix = torch.tensor([[-math.inf, 0.0], [-1.0, -400.0]])
    product = LogMatrix(matrix).product(weights)
    torch.testing.assert_close(product, torch.tensor([[-601.0, -500.0], [-math.inf, -math.inf]]))


def test_emissions_are_exponentiated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    original = LogMatrix.__init__
    monkeypatch.setattr(LogMatrix, "__init__", lambda self, values: made.append(values.shape) or original(self, values))
    hmm = HMM(*(p.log().requires_grad_() for p in random_hmm(5, 40, 0)))
    guide = Guide(hmm, containing([1, 2], 40).until(0), 8)
    position = guide.begin()
    for token in (3, 4, 1, 2):
        guide.log_probs_accept(position)
        position = guide.advance(position, token)
    assert made.count((5, 40)) == 1


def test_guides_of_one_batch_may_differ() -> None:
    hmm = hmms()[0]
    guides = [Guide(hmm, containing([1, 2], WORDS).until(0), 5), Guide(hmm, avoiding([3], WORDS).until(0), 3)]
    guided = [(guides[0], guides[0].begin([1])), (guides[1], guides[1].begin()), (guides[0], guides[0].begin())]
    alone = torch.stack([guide.log_probs_accept(position) for guide, position in guided])
    plans = [guide.plan(guide.node(position.automaton, position.remaining)) for guide, position in guided]
    log_states = torch.stack([position.log_state for _, position in guided])
    torch.testing.assert_close(log_probs_accept(hmm, log_states, plans), alone)


@pytest.mark.parametrize("number", range(4))
def test_chances_do_not_depend_on_autocast(number: int) -> None:
    hmm = hmms()[number].to(torch.float32)
    guide = Guide(hmm, containing([1, 2], hmm.vocab_size).until(0), 5, few=0)
    expected = guide.log_probs_accept(guide.begin([1, 3]))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(guide.log_probs_accept(guide.begin([1, 3])), expected)


def test_steps_that_cannot_be_accepted_have_no_rows() -> None:
    # A chain of 50 automaton states that must be read to its end: after r tokens only the last r can be accepted.
    following = torch.full((52, WORDS), 51)
    following[:50, 1] = torch.arange(1, 51)
    guide = Guide(hmms()[0], Automaton(following, torch.arange(52) == 50), 50)
    assert [len(step.log_probs) for step in guide._tables] == [1] * 50
    assert guide.log_prob_accept(guide.begin()) == pytest.approx(float(hmms()[0].log_likelihood([[1] * 50])))
    with pytest.raises(InputError, match=r"50 tokens, 52 automaton states and 3 HMM states need .* simpler constraint"):
        Guide(hmms()[0], Automaton(following, torch.arange(52) == 50), 50, max_gb=1e-6)


def test_bad_arguments_are_named() -> None:
    hmm = hmms()[0]
    with pytest.raises(InputError, match="automaton has 7 words and the model has 4"):
        Guide(hmm, anything(7), 3)
    with pytest.raises(InputError, match="length must be at least 1"):
        Guide(hmm, anything(WORDS), 0)
    with pytest.raises(InputError, match="length must be an integer"):
        Guide(hmm, anything(WORDS), 2.5)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="need 24 GB: use fewer tokens"):
        Guide(hmm, anything(WORDS), 10**9)
    with pytest.raises(InputError, match="token -1 is outside the vocabulary"):
        anything(WORDS).accepts([-1])
    never_two = HMM.from_probs([1.0], [[1.0]], [[0.5, 0.5, 0.0]])
    with pytest.raises(InputError, match="token 2 has probability zero under the model"):
        Guide(never_two, anything(3), 4).begin([2])
    with pytest.raises(InputError, match=r"no continuation of 2 tokens .* is accepted"):
        guide = Guide(hmm, containing([1, 2, 3], WORDS), 2)
        guide.next_token(guide.begin())
    with pytest.raises(InputError, match="token 4 is outside the vocabulary"):
        containing([1, 4], WORDS)
    with pytest.raises(InputError, match="at least one token"):
        containing([], WORDS)
    with pytest.raises(InputError, match="over 4 and 5 words cannot be combined"):
        anything(4) & anything(5)
    with pytest.raises(InputError, match="next must contain automaton states from 0 to 0"):
        Automaton(torch.ones(1, 3, dtype=torch.long), torch.ones(1))
    with pytest.raises(InputError, match=r"needs integers next \[states, words\]"):
        Automaton(torch.zeros(2, 3), torch.ones(2))
    one, other = (Automaton((torch.arange(size)[:, None] + 1) % size, torch.arange(size) == 0) for size in (1009, 1013))
    with pytest.raises(InputError, match=r"the constraint needs more than 400,000,000 steps to compile"):
        one & other


@pytest.fixture
def lm() -> LanguageModel:
    words = ["<unk>", "<eos>", "the", "cat", "dog", "sat"]
    return LanguageModel(HMM(*(p.log() for p in random_hmm(4, len(words), 2))), WordTokenizer(words))


def lines(lm: LanguageModel, must: list[str], never: list[str], unknown: bool = True) -> Automaton:
    line = Phrases(lm.tokenizer).line(Constraint(tuple(must), tuple(never)))
    return (line if unknown else line.without(0)).until(1)


def test_constrained_lines_have_their_conditional_probabilities(lm: LanguageModel) -> None:
    automaton = lines(lm, ["the cat"], ["dog"], unknown=False)
    length = 4  # with <eos>
    every = [tokens for tokens in itertools.product(range(6), repeat=length) if automaton.accepts(tokens)]
    weights = lm.hmm.log_likelihood(every).exp()
    expected: dict[str, float] = {}
    for tokens, weight in zip(every, weights.tolist(), strict=True):
        text = lm.tokenizer.decode(tokens[: tokens.index(1)])
        expected[text] = expected.get(text, 0.0) + weight / float(weights.sum())
    options = {"max_new_tokens": length, "must": ["the cat"], "never": ["dog"], "allow_unk": False}
    texts = [lm.generate(seed=seed, **options) for seed in range(600)]
    assert set(texts) == set(expected)
    for text, p in expected.items():
        assert abs(texts.count(text) / 600 - p) < 5 * math.sqrt(p * (1 - p) / 600) + 0.002, text


def test_a_guide_steers_a_uniform_model(lm: LanguageModel) -> None:
    guide, position = lm.guide(must=["cat sat"], max_new_tokens=6)
    generated = []
    for _ in range(6):
        generated.append(int(guide.log_probs_accept(position).argmax()))
        position = guide.advance(position, generated[-1])
    assert lines(lm, ["cat sat"], []).accepts(generated) and guide.log_prob_accept(position) == 0.0


def test_the_prompt_is_part_of_the_line(lm: LanguageModel) -> None:
    for options in ({"temperature": 0.0}, {"top_k": 1}, {"temperature": 0.3, "seed": 1}):
        text = lm.generate("the", max_new_tokens=6, must=["the cat", "sat"], never=["dog"], **options)
        assert text.startswith("the ") and "the cat" in text and "sat" in text.split() and "dog" not in text.split()
    # Earlier lines are context, not part of the constrained line.
    text = lm.generate("dog the cat\nsat", max_new_tokens=5, must=["cat"], never=["dog"], seed=3)
    line = text.removeprefix("dog the cat\n")
    assert "cat" in line.split() and "dog" not in line.split()
    assert lm.generate("cat", max_new_tokens=1, must=["cat"], seed=0) == "cat"  # only <eos> is left


def test_one_of_several_words_is_enough(lm: LanguageModel) -> None:
    options = {"must": ["sat", ("cat", "dog", "unicorn")], "max_new_tokens": 6, "allow_unk": False}
    texts = [lm.generate(seed=seed, **options) for seed in range(40)]
    found = [{"cat", "dog"} & set(text.split()) for text in texts]
    assert all(found) and all("sat" in text.split() for text in texts)
    assert {"cat"} in found and {"dog"} in found

    def chance(*must: str | tuple[str, ...]) -> float:
        return math.exp((guide := lm.guide(must=must, max_new_tokens=6)[0]).log_prob_accept(guide.begin()))

    both = chance("cat", "dog")
    assert math.isclose(chance(("cat", "dog")), chance("cat") + chance("dog") - both, rel_tol=1e-5) and both > 0


def test_a_chain_that_restarts_ignores_earlier_lines(lm: LanguageModel) -> None:
    restarting = LanguageModel(lm.hmm, lm.tokenizer, {"batches": {"kind": "stream", "eval_reset_at_eos": True}})
    options = {"must": ["cat"], "max_new_tokens": 5}
    positions = [model.guide(prompt="dog sat\nthe", **options)[1] for model in (lm, restarting)]
    alone = lm.guide(prompt="the", **options)[1]
    torch.testing.assert_close(positions[1].log_state, alone.log_state)
    assert not torch.allclose(positions[0].log_state, alone.log_state)
    assert len({position.automaton for position in (*positions, alone)}) == 1


def test_unknown_words_are_not_generated_but_allowed_in_the_prompt(lm: LanguageModel) -> None:
    options = {"must": ["cat"], "never": ["gnu", "dog"], "allow_unk": False}
    for seed in range(20):
        text = lm.generate("the unicorn", max_new_tokens=6, seed=seed, **options)
        assert text.startswith("the unicorn") and "cat" in text.split() and "<unk>" not in text
    # Unknown words in `never` add no automaton states, nor do several words.
    assert lines(lm, [], ["the", "cat", "dog", "sat", "gnu"]).num_states == 4


def test_tokens_after_the_end_are_ignored(lm: LanguageModel) -> None:
    automaton = lines(lm, ["cat"], [], unknown=False)
    assert automaton.accepts([3, 1, 0, 0]) and not automaton.accepts([3, 0, 1]) and not automaton.accepts([3, 3])


PIECES = ["", " list", "list", "li", "st", " l", "ist", "s", "(", ")", " ", "a", "_", " a", "\ufffd"]


@pytest.mark.parametrize("phrase", ["list", "a list", "(a", "a)", "s"])
def test_phrases_are_found_in_every_tokenization(phrase: str) -> None:
    automaton = containing_text([phrase], Spelling(PIECES))
    left = r"(?<![\w\ufffd])" if phrase[0].isalnum() else ""
    right = r"(?![\w\ufffd])" if phrase[-1].isalnum() else ""
    pattern = re.compile(left + re.escape(phrase) + right)
    generator = random.Random(0)
    found = 0
    for _ in range(6000):
        tokens = [generator.randrange(len(PIECES)) for _ in range(generator.randrange(6))]
        wanted = bool(pattern.search("".join(PIECES[token] for token in tokens)))
        assert automaton.accepts(tokens) == wanted, [PIECES[token] for token in tokens]
        found += wanted
    assert 20 < found < 3000


def test_constraints_on_subword_tokens_are_on_whole_words(tmp_path: Path) -> None:
    lines = ["the list of functions", "a function (of the list) is listed", "functional lists, a list"] * 3
    tokenizer = HuggingFaceTokenizer.train(lines, 290)
    lm = LanguageModel(HMM(*(p.log() for p in random_hmm(3, tokenizer.vocab_size, 4))), tokenizer)
    for seed in range(10):
        text = lm.generate("the", max_new_tokens=12, must=["list"], never=["a", "of"], seed=seed)
        words = re.findall(r"[\w\ufffd]+", text.replace("\x00", " "))
        assert "list" in words and not {"a", "of"} & set(words), text


def test_sums_over_many_rare_words_are_exact() -> None:
    zipf = 1.0 / torch.arange(1, 60_001, dtype=torch.float64) ** 1.5
    hmm = HMM(torch.zeros(1), torch.zeros(1, 1), (zipf / zipf.sum()).log().float()[None])
    guide = Guide(hmm, containing([0], 60_000), 100)
    exact = math.log1p(-((1 - float(zipf[0] / zipf.sum())) ** 100))
    assert abs(guide.log_prob_accept(guide.begin()) - exact) < 3e-5  # float32 rounds the sum over words at every step
    unwanted = Guide(hmm, avoiding([0], 60_000), 100)
    assert abs(unwanted.log_prob_accept(unwanted.begin()) - 100 * math.log1p(-float(zipf[0] / zipf.sum()))) < 1e-3


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        (
            "",
            {"must": ["the cat sat"], "max_new_tokens": 3},
            "no line of at most 3 tokens, <eos> counted, satisfies must",
        ),
        ("", {"must": ["the cat"], "never": ["cat"]}, "contradict each other"),
        ("the dog", {"never": ["dog"]}, "the prompt contains a phrase of never"),
        ("", {"must": ["the unicorn"]}, "'the unicorn' has a word outside the vocabulary"),
        ("", {"must": [("unicorn", "gnu")]}, "'unicorn' or 'gnu' has a word outside the vocabulary"),
        ("", {"must": [()]}, "must has an empty list"),
        ("", {"must": [("cat", 3)]}, "an item of must: give a list of words or phrases, not"),
        ("", {"never": [("cat", "dog")]}, "never: give a list of words or phrases, not"),
        ("", {"never": [" "]}, "' ' is not a word or phrase within a line"),
        ("", {"never": ["cat <eos>"]}, "'cat <eos>' is not a word or phrase within a line"),
        ("", {"never": ["the\ncat"]}, "is not a word or phrase within a line"),
        ("", {"must": "cat"}, "must: give a list of words or phrases, not 'cat'"),
        ("", {"must": None, "never": ["cat"]}, "must: give a list"),
        ("", {"must": ["cat"], "max_new_tokens": 0}, "max_new_tokens must be at least 1"),
    ],
)
def test_constraints_that_cannot_be_satisfied_are_named(
    lm: LanguageModel, prompt: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        lm.generate(prompt, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("distinct", [100, 40_000])
def test_chances_of_large_groups_of_tokens(distinct: int) -> None:
    """More tokens than 16 bits can number, all or few of them with an emission of their own."""
    words, generator = 40_000, torch.Generator().manual_seed(0)
    emission = torch.randn(3, words, generator=generator)
    emission[:, distinct:] = emission[:, distinct - 1 : distinct]
    start, transition = torch.randn(3, generator=generator), torch.randn(3, 3, generator=generator)
    hmm = HMM(*(each.double().log_softmax(-1) for each in (start, transition, emission)))
    assert (hmm.emission.column_of_word is None) == (distinct == words)
    following = torch.arange(words) % 3  # the automaton state after a token, from every one
    following[:5] = torch.tensor([2, 1, 0, 3, 3])
    automaton = Automaton(following.expand(4, -1), torch.tensor([False, True, True, False]))
    automaton &= ~containing([7], words)
    guide = Guide(hmm, automaton, 3)
    position = guide.begin([8])
    chances = guide.log_probs_accept(position)
    for token in (0, 1, 2, 3, 4, 6, 7, 8, 99, 100, 101, 32_767, 32_768, 39_998, 39_999):
        assert abs(float(chances[token]) - guide.log_prob_accept(guide.advance(position, token))) < 1e-9 or token == 7
    assert chances[7] == -torch.inf
    joint = hmm.emit(position.log_state) + chances
    torch.testing.assert_close(guide.joint(position), joint)
    both = guide.log_probs_accept_of([guide.begin(), position])
    torch.testing.assert_close(both[1], chances)
