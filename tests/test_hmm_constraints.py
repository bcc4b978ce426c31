"""An HMM under constraints against a list of all sequences; automata against what they are meant to say."""

import itertools
import math
import random
import re
from collections.abc import Sequence
from pathlib import Path

import oracle
import pytest
import torch
from test_hmm_blocked import make
from torch import Tensor

from hmmlm.data.tokenizer import HuggingFaceTokenizer, WordTokenizer
from hmmlm.errors import InputError
from hmmlm.hmm import HMM, AnyHMM, constraints
from hmmlm.hmm.automaton import Automaton, anything, containing, spelling
from hmmlm.hmm.constraints import Guide
from hmmlm.hmm.mixing import mix
from hmmlm.lm import LanguageModel
from hmmlm.phrases import Phrases

WORDS = 4


def avoiding(phrase: Sequence[int], vocab_size: int) -> Automaton:
    return containing(phrase, vocab_size).complement()


SEQUENCES = list(itertools.product(range(WORDS), repeat=5))


def has(tokens: Sequence[int], phrase: Sequence[int]) -> bool:
    return any(tuple(tokens[i : i + len(phrase)]) == tuple(phrase) for i in range(len(tokens)))


@pytest.mark.parametrize("phrase", [[2], [1, 1], [1, 2, 1, 2], [1, 1, 2, 1, 1], [0, 1, 0, 0]])
def test_phrases_are_found_wherever_they_stand(phrase: list[int]) -> None:
    wanted, unwanted = containing(phrase, WORDS), avoiding(phrase, WORDS)
    assert wanted.states == len(phrase) + 1
    for tokens in itertools.product(range(3), repeat=7):
        assert wanted.accepts(tokens) == has(tokens, phrase) == (not unwanted.accepts(tokens)), tokens


def test_automata_are_joined_and_ended() -> None:
    joined = containing([1, 2], WORDS) & containing([2, 1], WORDS) & avoiding([3], WORDS)
    ended, going_on = joined.until(0), joined.until(0, ended=False)
    for tokens in SEQUENCES:
        wanted = has(tokens, [1, 2]) and has(tokens, [2, 1]) and 3 not in tokens
        assert joined.accepts(tokens) == wanted
        line = tokens[: tokens.index(0)] if 0 in tokens else None
        good = line is not None and has(line, [1, 2]) and has(line, [2, 1]) and 3 not in line
        assert ended.accepts(tokens) == good, tokens
        assert going_on.accepts(tokens) == (wanted if line is None else good), tokens


def test_either_of_two_is_enough() -> None:
    either = containing([1, 2], WORDS) | containing([3], WORDS)
    none = avoiding([3], WORDS) & either  # what is left is the other
    for tokens in SEQUENCES:
        assert either.accepts(tokens) == (has(tokens, [1, 2]) or 3 in tokens)
        assert none.accepts(tokens) == (has(tokens, [1, 2]) and 3 not in tokens)
    assert int(either.settled().sum()) == 1  # once one is there, nothing more is asked


def hmms() -> list[AnyHMM]:
    """Dense, dense with zeros, and blocked; all over the same words."""
    given = (oracle.random_hmm(3, WORDS, seed, 2.0, zeros) for seed, zeros in ((0, 0.0), (1, 0.4)))
    return [*(HMM(*(p.log() for p in parameters)) for parameters in given), make()]


def sequences(hmm: AnyHMM, length: int) -> tuple[list[tuple[int, ...]], Tensor]:
    every = list(itertools.product(range(hmm.vocab_size), repeat=length))
    return every, hmm.log_likelihood(every).exp().double()


@pytest.mark.parametrize("few", [0, constraints.FEW])
@pytest.mark.parametrize("number", range(3))
def test_chances_and_tokens_are_those_of_a_list_of_all_sequences(
    number: int, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constraints, "FEW", few)  # 0: whole vocabularies are read together
    hmm = hmms()[number]
    words, length = hmm.vocab_size, 4
    automaton = (containing([1, 2], words) & avoiding([3, 1], words)).until(0)
    every, probs = sequences(hmm, length)
    good = torch.tensor([automaton.accepts(tokens) for tokens in every])
    guide = Guide(hmm, automaton, length)
    position, said = guide.begin(), ()
    close = {"rtol": 1e-5, "atol": 1e-7} if hmm.dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-12}
    for step in range(length):
        so_far = torch.tensor([tokens[:step] == said for tokens in every])
        first = torch.tensor([tokens[step] for tokens in every])
        total = probs[so_far].sum()
        assert math.isclose(math.exp(guide.chance(position)), float(probs[so_far & good].sum() / total), rel_tol=1e-5)
        met = torch.stack([probs[so_far & good & (first == v)].sum() for v in range(words)]) / total
        plain = torch.stack([probs[so_far & (first == v)].sum() for v in range(words)]) / total
        torch.testing.assert_close(guide.next_token(position).exp().double(), met / met.sum(), **close)
        expected = torch.where(plain > 0, met / plain, 0.0)
        torch.testing.assert_close(guide.chances(position).exp().double(), expected, **close)
        token = int(met.argmax())
        said, position = (*said, token), guide.advance(position, token)
    assert automaton.accepts(said) and guide.chance(position) == 0.0
    with pytest.raises(InputError, match="all 4 tokens have been said"):
        guide.joint(position)


@pytest.mark.parametrize("number", range(3))
def test_chances_of_many_are_those_of_each(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraints, "FEW", 1)
    hmm = hmms()[number]
    guide = Guide(hmm, (containing([1, 2], hmm.vocab_size) & avoiding([3], hmm.vocab_size)).until(0), 5)
    positions = [guide.begin()]
    for place, token in ((0, 1), (1, 1), (0, 2), (1, 2), (4, 0)):  # at several distances from the end
        positions.append(guide.advance(positions[place], token))
    alone = torch.stack([guide.chances(position) for position in positions])
    for cells in (constraints.CELLS, 1):
        monkeypatch.setattr(constraints, "CELLS", cells)
        torch.testing.assert_close(guide.chances_of(positions), alone)


def test_a_blocked_model_is_guided_as_its_dense_form() -> None:
    hmm = make()
    automaton = (containing([1], hmm.vocab_size) & containing([2, 2], hmm.vocab_size)).until(0)
    here, there = Guide(hmm, automaton, 6), Guide(hmm.dense(), automaton, 6)
    for tokens in ((), (1,), (2, 1, 2)):
        one, other = here.next_token(here.begin(tokens)), there.next_token(there.begin(tokens))
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_nothing_is_lost_where_probabilities_are_tiny() -> None:
    # each state says its own word, and leaves for the next with a probability that float32 cannot hold after two
    states, rare = 4, 1e-30
    transition = torch.full((states, states), -math.inf)
    for z in range(states):
        transition[z, z] = math.log1p(-rare) if z + 1 < states else 0.0
        if z + 1 < states:
            transition[z, z + 1] = math.log(rare)
    start = torch.tensor([0.0, *[-math.inf] * (states - 1)])
    emission = torch.where(torch.eye(states) > 0, 0.0, -math.inf)
    guide = Guide(HMM(start, transition, emission), containing([3], states), 4)
    assert math.isclose(guide.chance(guide.begin()), 3 * math.log(rare), rel_tol=1e-5)
    assert int(guide.next_token(guide.begin([0])).argmax()) == 1
    weights = torch.tensor([[-500.0, -600.0], [-math.inf, -math.inf]])
    matrix = torch.tensor([[-math.inf, 0.0], [-1.0, -400.0]])
    torch.testing.assert_close(mix(weights, matrix), torch.tensor([[-601.0, -500.0], [-math.inf, -math.inf]]))


def test_what_cannot_be_is_said() -> None:
    hmm = hmms()[0]
    with pytest.raises(InputError, match="reads 7 words and the model says 4"):
        Guide(hmm, anything(7), 3)
    with pytest.raises(InputError, match="length must be 1 or more"):
        Guide(hmm, anything(WORDS), 0)
    with pytest.raises(InputError, match="length must be a whole number"):
        Guide(hmm, anything(WORDS), 2.5)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="need 24 GB: allow fewer tokens"):
        Guide(hmm, anything(WORDS), 10**9)
    with pytest.raises(InputError, match="token -1 is outside the vocabulary"):
        anything(WORDS).accepts([-1])
    never_two = HMM.from_probs([1.0], [[1.0]], [[0.5, 0.5, 0.0]])
    with pytest.raises(InputError, match="the model never says token 2 here"):
        Guide(never_two, anything(3), 4).begin([2])
    with pytest.raises(InputError, match="nothing that the model can say in 2 tokens is accepted"):
        guide = Guide(hmm, containing([1, 2, 3], WORDS), 2)
        guide.next_token(guide.begin())
    with pytest.raises(InputError, match="token 4 is outside the vocabulary"):
        containing([1, 4], WORDS)
    with pytest.raises(InputError, match="at least one token"):
        containing([], WORDS)
    with pytest.raises(InputError, match="over 4 and 5 words cannot be joined"):
        anything(4) & anything(5)
    with pytest.raises(InputError, match="next must hold states, 0 to 0"):
        Automaton(torch.ones(1, 3, dtype=torch.long), torch.ones(1))
    with pytest.raises(InputError, match=r"needs integers next \[states, words\]"):
        Automaton(torch.zeros(2, 3), torch.ones(2))
    many = anything(30)
    with pytest.raises(InputError, match="ask for fewer phrases"):
        for token in range(14):
            many &= containing([token], 30)


@pytest.fixture
def lm() -> LanguageModel:
    words = ["<unk>", "<eos>", "the", "cat", "dog", "sat"]
    return LanguageModel(HMM(*(p.log() for p in oracle.random_hmm(4, len(words), 2))), WordTokenizer(words))


def test_lines_are_drawn_as_often_as_the_model_says_them(lm: LanguageModel) -> None:
    automaton = Phrases(lm.tokenizer).lines(["the cat"], ["dog"]).without(0)
    length = 4  # with <eos>
    every = [tokens for tokens in itertools.product(range(6), repeat=length) if automaton.accepts(tokens)]
    weights = lm.hmm.log_likelihood(every).exp()
    expected: dict[str, float] = {}
    for tokens, weight in zip(every, weights.tolist(), strict=True):
        text = lm.tokenizer.decode(tokens[: tokens.index(1)])
        expected[text] = expected.get(text, 0.0) + weight / float(weights.sum())
    options = {"max_new_tokens": length, "must": ["the cat"], "never": ["dog"], "unknown": False}
    texts = [lm.generate(seed=seed, **options) for seed in range(1200)]
    assert set(texts) == set(expected)
    for text, p in expected.items():
        assert abs(texts.count(text) / 1200 - p) < 5 * math.sqrt(p * (1 - p) / 1200) + 0.002, text


def test_a_guide_steers_another_model(lm: LanguageModel) -> None:
    guide, position = lm.guide(must=["cat sat"], max_new_tokens=6)
    said = []
    for _ in range(6):  # which says everything equally often
        said.append(int(guide.chances(position).argmax()))
        position = guide.advance(position, said[-1])
    assert Phrases(lm.tokenizer).lines(["cat sat"], []).accepts(said) and guide.chance(position) == 0.0


def test_the_prompt_counts_and_other_options_hold(lm: LanguageModel) -> None:
    for options in ({"temperature": 0.0}, {"top_k": 1}, {"temperature": 0.3, "seed": 1}):
        text = lm.generate("the", max_new_tokens=6, must=["the cat", "sat"], never=["dog"], **options)
        assert text.startswith("the ") and "the cat" in text and "sat" in text.split() and "dog" not in text.split()
    # lines before the last are heard, and do not count
    text = lm.generate("dog the cat\nsat", max_new_tokens=5, must=["cat"], never=["dog"], seed=3)
    line = text.removeprefix("dog the cat\n")
    assert "cat" in line.split() and "dog" not in line.split()
    assert lm.generate("cat", max_new_tokens=1, must=["cat"], seed=0) == "cat"  # <eos> is all that is left


def test_of_several_words_one_is_enough(lm: LanguageModel) -> None:
    wishes = {"must": ["sat", ("cat", "dog", "unicorn")], "max_new_tokens": 6, "unknown": False}
    texts = [lm.generate(seed=seed, **wishes) for seed in range(40)]
    found = [{"cat", "dog"} & set(text.split()) for text in texts]
    assert all(found) and all("sat" in text.split() for text in texts)
    assert {"cat"} in found and {"dog"} in found

    def chance(*must: str | tuple[str, ...]) -> float:
        return math.exp((guide := lm.guide(must=must, max_new_tokens=6)[0]).chance(guide.begin()))

    both = chance("cat", "dog")
    assert math.isclose(chance(("cat", "dog")), chance("cat") + chance("dog") - both, rel_tol=1e-5) and both > 0


def test_a_chain_that_restarts_forgets_earlier_lines(lm: LanguageModel) -> None:
    restarting = LanguageModel(lm.hmm, lm.tokenizer, {"batches": {"kind": "stream", "eval_reset_at_eos": True}})
    wishes = {"must": ["cat"], "max_new_tokens": 5}
    positions = [model.guide(prompt="dog sat\nthe", **wishes)[1] for model in (lm, restarting)]
    alone = lm.guide(prompt="the", **wishes)[1]
    torch.testing.assert_close(positions[1].log_state, alone.log_state)
    assert not torch.allclose(positions[0].log_state, alone.log_state)
    assert len({position.automaton for position in (*positions, alone)}) == 1


def test_unknown_words_are_never_added_but_may_be_in_the_prompt(lm: LanguageModel) -> None:
    wishes = {"must": ["cat"], "never": ["gnu", "dog"], "unknown": False}
    for seed in range(20):
        text = lm.generate("the unicorn", max_new_tokens=6, seed=seed, **wishes)
        assert text.startswith("the unicorn") and "cat" in text.split() and "<unk>" not in text
    # never is met by words that the model cannot say, and many of them cost nothing
    assert Phrases(lm.tokenizer).lines([], ["the", "cat", "dog", "sat", "gnu"]).states == 4


def test_what_comes_after_the_end_does_not_matter(lm: LanguageModel) -> None:
    automaton = Phrases(lm.tokenizer).lines(["cat"], []).without(0)
    assert automaton.accepts([3, 1, 0, 0]) and not automaton.accepts([3, 0, 1]) and not automaton.accepts([3, 3])


PIECES = ["", " list", "list", "li", "st", " l", "ist", "s", "(", ")", " ", "a", "_", " a", "\ufffd"]


@pytest.mark.parametrize("phrase", ["list", "a list", "(a", "a)", "s"])
def test_phrases_are_found_however_they_are_spelled(phrase: str) -> None:
    automaton = spelling(phrase, PIECES)
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


def test_subwords_make_whole_words(tmp_path: Path) -> None:
    lines = ["the list of functions", "a function (of the list) is listed", "functional lists, a list"] * 3
    tokenizer = HuggingFaceTokenizer.train(lines, 290)
    lm = LanguageModel(HMM(*(p.log() for p in oracle.random_hmm(3, tokenizer.vocab_size, 4))), tokenizer)
    for seed in range(10):
        text = lm.generate("the", max_new_tokens=12, must=["list"], never=["a", "of"], seed=seed)
        words = re.findall(r"[\w\ufffd]+", text.replace("\x00", " "))
        assert "list" in words and not {"a", "of"} & set(words), text


def test_rare_words_are_not_lost_in_the_sum_over_many() -> None:
    zipf = 1.0 / torch.arange(1, 60_001, dtype=torch.float64) ** 1.5
    hmm = HMM(torch.zeros(1), torch.zeros(1, 1), (zipf / zipf.sum()).log().float()[None])
    guide = Guide(hmm, containing([0], 60_000), 100)
    exact = math.log1p(-((1 - float(zipf[0] / zipf.sum())) ** 100))
    assert abs(guide.chance(guide.begin()) - exact) < 1e-5
    unwanted = Guide(hmm, avoiding([0], 60_000), 100)
    assert abs(unwanted.chance(unwanted.begin()) - 100 * math.log1p(-float(zipf[0] / zipf.sum()))) < 1e-3


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("", {"must": ["the cat sat"], "max_new_tokens": 3}, "can say in 3 tokens, <eos> counted"),
        ("", {"must": ["the cat"], "never": ["cat"]}, "contradict each other"),
        ("the dog", {"never": ["dog"]}, "the prompt has what it must not have"),
        ("", {"must": ["the unicorn"]}, "'the unicorn' has a word that the model does not know"),
        ("", {"must": [("unicorn", "gnu")]}, "'unicorn' or 'gnu' has a word that the model does not know"),
        ("", {"must": [()]}, "must has a list of no words"),
        ("", {"must": [("cat", 3)]}, "a part of must must be a list of words or phrases, not"),
        ("", {"never": [("cat", "dog")]}, "never must be a list of words or phrases, not"),
        ("", {"never": [" "]}, "' ' is not a word or a phrase within a line"),
        ("", {"never": ["cat <eos>"]}, "'cat <eos>' is not a word or a phrase within a line"),
        ("", {"never": ["the\ncat"]}, "is not a word or a phrase within a line"),
        ("", {"must": "cat"}, "must must be a list of words or phrases, not 'cat'"),
        ("", {"must": None, "never": ["cat"]}, "must must be a list"),
        ("", {"must": ["cat"], "max_new_tokens": 0}, "max_new_tokens must be 1 or more"),
    ],
)  # fmt: skip
def test_wishes_that_cannot_be_met(lm: LanguageModel, prompt: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        lm.generate(prompt, **options)  # type: ignore[arg-type]
