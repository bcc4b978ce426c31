"""Constraints by name: every text satisfies them, with its conditional probability; bad input is named beforehand."""

import itertools
import math
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import tokenizers
import torch
from helpers.oracle import random_hmm

from hmmlm import HMM, Automaton, InputError
from hmmlm.constrain.automaton import at_least, containing
from hmmlm.constrain.budget import STEPS, construction
from hmmlm.constrain.constraint import Constraint, counted_words
from hmmlm.constrain.spelling import Spelling, containing_text
from hmmlm.data.tokenizers import HuggingFaceTokenizer, WordTokenizer
from hmmlm.lm.blanks import encode_blanks
from hmmlm.lm.lm import LanguageModel

WORDS = ["<unk>", "<eos>", "the", "cat", "cats", "sat"]


@pytest.fixture
def lm() -> LanguageModel:
    return LanguageModel(HMM(*(p.log() for p in random_hmm(4, len(WORDS), 2))), WordTokenizer(WORDS))


@pytest.fixture(scope="module")
def subwords() -> LanguageModel:
    lines = ["the list of functions", "a function (of the list) is listed", "functional lists, a list, the é"] * 5
    tokenizer = HuggingFaceTokenizer.train(lines, 290)
    return LanguageModel(HMM(*(p.log() for p in random_hmm(3, tokenizer.vocab_size, 4))), tokenizer)


CASES: list[tuple[str, dict[str, Any], Callable[[str, str], bool]]] = [
    ("", {"choice": ["the cat", "sat"]}, lambda line, new: new in ("the cat", "sat")),
    ("the", {"choice": ["cat", "cats sat"]}, lambda line, new: new in ("cat", "cats sat")),
    ("", {"regex": "(the )?cats? .*"}, lambda line, new: bool(re.fullmatch("(the )?cats? .*", new))),
    ("", {"words": (2, 3)}, lambda line, new: 2 <= len(new.split()) <= 3),
    ("the", {"words": (None, 1)}, lambda line, new: len(new.split()) <= 1),
    ("", {"words": (3, None)}, lambda line, new: len(new.split()) >= 3),
    ("", {"tokens": (2, 3)}, lambda line, new: 2 <= len(new.split()) <= 3),
    ("the", {"suffix": "cat sat"}, lambda line, new: new == "cat sat" or new.endswith(" cat sat")),
    ("", {"never": ["cat"], "match": "prefix"}, lambda line, new: "cat" not in line),
    ("", {"must": ["at"], "match": "substring"}, lambda line, new: "at" in line),
    ("the cat", {"must": ["cat"], "regex": "sat.*"}, lambda line, new: new.startswith("sat")),
    (
        "the",
        {"never": ["the cat"], "words": (1, 2)},
        lambda line, new: not re.search(r"the cat\b", line) and 1 <= len(new.split()) <= 2,
    ),
]


@pytest.mark.parametrize(("prompt", "options", "satisfies"), CASES)
def test_texts_have_their_conditional_probabilities(
    lm: LanguageModel, prompt: str, options: dict[str, Any], satisfies: Callable[[str, str], bool]
) -> None:
    length, given = 4, lm.tokenizer.encode(prompt)
    guide, position = lm.guide(prompt=prompt, max_new_tokens=length, allow_unk=False, **options)
    expected: dict[tuple[int, ...], float] = {}
    for size in range(length):
        for new in itertools.product(range(2, 6), repeat=size):
            line = " ".join(WORDS[t] for t in (*given, *new))
            if satisfies(line, " ".join(WORDS[t] for t in new)):
                expected[new] = float(lm.hmm.log_likelihood([[*given, *new, 1]]).exp())
    assert expected
    total = sum(expected.values())
    found: dict[tuple[int, ...], float] = {}

    def walk(position: Any, text: tuple[int, ...], log_prob: float) -> None:
        for token, p in enumerate(guide.next_token(position).tolist()):
            if token == 1 and p > -math.inf:
                found[text] = log_prob + p
            elif p > -math.inf:
                walk(guide.advance(position, token), (*text, token), log_prob + p)

    walk(position, (), 0.0)
    assert set(found) == set(expected)
    for text, p in expected.items():
        assert math.isclose(math.exp(found[text]), p / total, rel_tol=1e-5), text


MARKS = ["<unk>", "<eos>", "list", "a", ".", "(", ")", '"', "'"]
MARKED: list[tuple[str, dict[str, Any], Callable[[str, str], bool]]] = [
    ("", {"regex": r"a list\."}, lambda line, new: new == "a list."),
    ("a", {"regex": r"\(?list\)?\.*"}, lambda line, new: bool(re.fullmatch(r"\(?list\)?\.*", new))),
    ('a "', {"regex": r"list\"( a)*\.?"}, lambda line, new: bool(re.fullmatch(r'list"( a)*\.?', new))),
    ("a (", {"choice": ["a).", "list"]}, lambda line, new: new in ("a).", "list")),
    ("", {"words": (2, 2)}, lambda line, new: len(new.split()) == 2),
    ("a '", {"suffix": "' a."}, lambda line, new: new.endswith("' a.")),
    ("a", {"must": ["a."], "match": "substring"}, lambda line, new: "a." in line),
    ('a "', {"never": ['"a'], "match": "substring", "words": (1, 2)}, lambda line, new: '"a' not in line),
]


@pytest.mark.parametrize(("prompt", "options", "satisfies"), MARKED)
def test_constraints_read_the_text_that_is_returned(
    prompt: str, options: dict[str, Any], satisfies: Callable[[str, str], bool]
) -> None:
    tokenizer = WordTokenizer(MARKS, split="words")
    lm = LanguageModel(HMM(*(p.log() for p in random_hmm(4, len(MARKS), 2))), tokenizer)
    guide, position = lm.guide(prompt=prompt, max_new_tokens=5, allow_unk=False, **options)
    given, accepted = tokenizer.encode(prompt), 0
    for size in range(5):
        for new in itertools.product(range(2, len(MARKS)), repeat=size):
            text = tokenizer.decode([*given, *new])
            added = text[len(tokenizer.decode(given)) :].removeprefix(" " if given else "")
            expected = satisfies(text, added)
            if "words" in options:
                expected &= options["words"][0] <= len(added.split()) <= options["words"][1]
            assert guide.automaton.accepting[guide.automaton.read([*new, 1], position.automaton)] == expected, text
            accepted += expected
    assert accepted


def test_subwords_spell_what_is_asked(subwords: LanguageModel) -> None:
    for seed in range(6):
        text = subwords.generate("a list", max_new_tokens=30, regex=r" ?of [a-z]{3,8}(, (is|was))?\.", seed=seed)
        assert re.fullmatch(r"a list ?of [a-z]{3,8}(, (is|was))?\.", text), text
        assert subwords.generate("", max_new_tokens=12, choice=["a list", "the é"], seed=seed) in ("a list", "the é")
        ending = subwords.generate("the", max_new_tokens=20, suffix="of the list.", seed=seed)
        assert re.fullmatch(r"the(.*[^0-9A-Za-z_])?of the list\.", ending, re.DOTALL), ending
        never = subwords.generate("", max_new_tokens=20, never=["l"], match="substring", seed=seed)
        assert "l" not in never


def test_characters_are_constrained_and_left_out() -> None:
    tokenizer = HuggingFaceTokenizer.train(["ACGTACGT", "TTT"], None)
    lm = LanguageModel(HMM(*(p.log() for p in random_hmm(3, tokenizer.vocab_size, 4))), tokenizer)
    assert "GATT" in lm.generate("AC", max_new_tokens=12, must=["GATT"], match="substring", seed=0)
    with pytest.raises(InputError, match="whole words of must: use match="):
        lm.generate("AC", must=["GATT"])
    assert re.fullmatch("AC[GT]{4}", lm.generate("AC", max_new_tokens=12, regex="[GT]{4}", seed=0))
    assert encode_blanks(tokenizer, "AC___GT") == [*tokenizer.encode("AC"), -1, *tokenizer.encode("GT")]
    assert {word for word, _ in lm.infill("AC___GT", top=9)[0]} <= {"A", "C", "G", "T", "<unk>", "<eos>"}


def test_characters_that_tokens_spell_in_parts_are_matched() -> None:
    pieces = ["é", " ", "a", *(bytes([b]).decode(errors="surrogateescape") for b in "é☃".encode()), " é"]
    spelled = [piece.encode(errors="surrogateescape") for piece in pieces]
    automaton = containing_text(["é☃"], Spelling(pieces))
    units, generator, found = [[0], [1], [2], [3, 4], [5, 6, 7], [8]], random.Random(0), 0
    for _ in range(3000):
        tokens = [token for _ in range(generator.randrange(1, 5)) for token in generator.choice(units)]
        text = b"".join(spelled[token] for token in tokens).decode(errors="replace")
        wanted = bool(re.search(r"(?<![\w☃])é☃", text))  # bytes count as letters
        assert automaton.accepts(tokens) == wanted, text
        found += wanted
    assert found > 20 and not automaton.accepts([3, 4, 5, 6])


def test_automata_are_combined(lm: LanguageModel) -> None:
    one, other = lm.automaton(must=["the cat"]), lm.automaton(regex="sat.*")
    for seed in range(10):
        text = lm.generate(max_new_tokens=6, automaton=one & ~other, seed=seed, allow_unk=False)
        assert "the cat" in text and not text.startswith("sat")
        text = lm.generate(max_new_tokens=6, automaton=one | other, seed=seed, allow_unk=False)
        assert "the cat" in text or text.startswith("sat")


def test_minimized_automata_accept_the_same() -> None:
    automaton = (containing([1, 2], 4) | containing([2, 1], 4)) & ~containing([3, 3], 4) & at_least(2, 4)
    smaller = automaton.minimized()
    assert smaller.num_states < automaton.num_states
    for tokens in itertools.product(range(4), repeat=5):
        assert smaller.accepts(tokens) == automaton.accepts(tokens)
        moved = automaton.starting_at(automaton.read([1]))
        assert moved.accepts(tokens[1:]) == automaton.accepts((1, *tokens[1:]))


@pytest.mark.parametrize(("least", "most"), [(None, 2), (2, 3), (1, None), (0, 0)])
def test_words_are_counted(least: int | None, most: int | None) -> None:
    automaton = counted_words(least, most)
    for symbols in itertools.product(b" \nab", repeat=6):
        count = len(bytes(symbols).split())
        assert automaton.accepts(symbols) == ((least or 0) <= count <= (99 if most is None else most))


def optional_properties(count: int, kind: dict[str, str]) -> dict[str, object]:
    return {"type": "object", "properties": {f"k{i}": kind for i in range(count)}}


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def test_json_texts_follow_their_schema(subwords: LanguageModel) -> None:
    pytest.importorskip("outlines_core", reason="outlines-core is not installed")
    import json

    for seed in range(4):
        value = json.loads(subwords.generate("", max_new_tokens=24, json=SCHEMA, seed=seed))
        assert set(value) == {"a"} and isinstance(value["a"], int)
    with pytest.raises(InputError, match="json: the schema cannot be used"):
        subwords.generate("", json={"type": "nothing"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"regex": "cat", "choice": ["sat"]}, "no text satisfies choice and regex: they contradict each other"),
        ({"regex": "zebra"}, "the tokens of this model cannot spell a text that satisfies regex"),
        ({"regex": "(the ){9}cat", "max_new_tokens": 5}, "no line of at most 5 tokens, <eos> counted, satisfies regex"),
        ({"regex": ""}, "regex: give a string that is not empty"),
        ({"regex": 3}, "regex: give a string that is not empty, not 3"),
        ({"regex": "(?=a)"}, "lookahead and lookbehind look at text outside the match"),
        ({"words": (3, 2)}, "words: 3 to 2 is empty: give the smaller number first"),
        ({"words": 3}, r"words: give \(min, max\), integers from 0 to 10,000 or None, not 3"),
        ({"words": (True, 2)}, r"words: give \(min, max\)"),
        ({"tokens": (9, None), "max_new_tokens": 5}, "no line of at most 5 tokens"),
        ({"match": "stem", "must": ["cat"]}, "match must be one of word, prefix, substring, not 'stem'"),
        ({"choice": "cat"}, "choice: give a list"),
        ({"json": "{"}, "json: give a schema as a dictionary or its text"),
        ({"json": "[" * 100_000}, "json: give a schema as a dictionary or its text: maximum recursion depth"),
        (
            {"json": optional_properties(3000, {"type": "string"})},
            "steps to compile: list optional",
        ),
        (
            {"json": optional_properties(50, {"$ref": "#"})},
            "steps to compile: list optional",
        ),
        ({"must": ["\ud800"]}, "a phrase has a lone surrogate"),
        ({"automaton": "x"}, "automaton: give an Automaton, not a str"),
        ({"automaton": at_least(1, 9)}, "automata over 6 and 9 words cannot be combined"),
        ({"suffix": "sat", "never": ["sat"]}, "no line of at most 100 tokens"),
    ],
)
def test_bad_constraints_are_named(lm: LanguageModel, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        lm.generate(**options)


def nested(depth: int) -> dict[str, Any]:
    """Return a schema of lists in lists of strings."""
    inner = (
        {"type": "array", "items": nested(depth - 1), "maxItems": 8} if depth else {"type": "string", "maxLength": 20}
    )
    return {"type": "object", "properties": {"a": inner}, "required": ["a"]}


LETTERS = random.Random(0)
NAMES = ["".join(LETTERS.choices("abcdefghijklmnop", k=5)) for _ in range(2000)]
HOSTILE: list[tuple[dict[str, Any], bool]] = [
    ({"never": NAMES}, True),
    ({"must": [NAMES[:500]]}, True),
    ({"choice": NAMES}, True),
    ({"suffix": " ".join(NAMES)[:10_000] * 2}, False),
    ({"suffix": "a" * 20_000}, False),
    ({"words": (9_000, 10_000)}, False),
    ({"words": (100, 200), "regex": "(?:[a-z ]{1,40},){1,40}", "suffix": "of the list"}, False),
    ({"regex": r"(?:\w{1,20} ?){1,30}", "must": ["list"], "never": ["function"]}, True),
    ({"json": nested(1)}, True),
    ({"json": nested(8)}, False),
]


@pytest.mark.parametrize(("options", "compiles"), HOSTILE, ids=lambda value: str(value)[:30])
def test_every_constraint_is_answered_within_the_budget(
    subwords: LanguageModel, options: dict[str, Any], compiles: bool
) -> None:
    if "json" in options:
        pytest.importorskip("outlines_core", reason="outlines-core is not installed")
    with construction() as budget:
        if compiles:
            assert bool(subwords.automaton(**options).hopeful()[0])
            assert budget.steps <= STEPS
        else:
            with pytest.raises(InputError, match=f"needs more than {STEPS:,} steps to compile"):
                subwords.automaton(**options)


def test_phrases_are_found_together(subwords: LanguageModel) -> None:
    phrases, tokens = ["list", "a f", "ted", "list of", "s"], range(subwords.tokenizer.vocab_size)
    generator = random.Random(0)
    for match in ("word", "prefix", "substring"):
        each = [subwords.automaton(must=[phrase], match=match) for phrase in phrases]
        found, forbidden = (
            subwords.automaton(must=[phrases], match=match),
            subwords.automaton(never=phrases, match=match),
        )
        accepted = 0
        for _ in range(300):
            text = [token for token in generator.choices(tokens, k=12) if token != subwords.tokenizer.eos_id]
            wanted = any(automaton.accepts(text) for automaton in each)
            assert found.accepts(text) == wanted != forbidden.accepts(text)
            accepted += wanted
        assert 0 < accepted < 300, match


def test_constraints_are_compared_by_value() -> None:
    assert Constraint(must=["a", ["b", "c"]]) == Constraint(must=("a", ("b", "c")))
    assert not Constraint() and Constraint(words=(1, 2)).names == ["words"]
    assert Constraint(json={"type": "null"}) == Constraint(json='{"type": "null"}')


def test_lengths_need_an_end(lm: LanguageModel) -> None:
    with pytest.raises(InputError, match="tokens: a largest number needs a text that ends"):
        lm.guide(tokens=(1, 2), require_eos=False)
    every = Automaton(torch.zeros(1, 6, dtype=torch.long), torch.ones(1))
    assert lm.generate(automaton=every, tokens=(0, 0), seed=0) == ""


def test_tokens_without_text_are_not_generated() -> None:
    """Between the parts of a phrase they would be part of the text, and some models end texts with them."""
    inner = tokenizers.Tokenizer.from_str(HuggingFaceTokenizer.train(["ab a ab"] * 5, 102)._tokenizer.to_str())
    inner.add_special_tokens(["<pad>", "<s>"])
    tokenizer = HuggingFaceTokenizer(inner)
    special = [inner.token_to_id(name) for name in ("<pad>", "<s>")]
    lm = LanguageModel(HMM(*(p.log() for p in random_hmm(2, tokenizer.vocab_size, 4))), tokenizer)
    for options in ({"must": ["a"]}, {"never": ["a"]}, {"tokens": (2, 6)}, {"words": (1, 3)}):
        chances = (found := lm.guide(max_new_tokens=8, **options))[0].log_probs_accept(found[1])
        assert bool((chances[special] == -math.inf).all()) and bool((chances > -math.inf).any())


def test_unknown_words_can_be_forbidden_by_name(lm: LanguageModel) -> None:
    texts = lm.generate(never=["<unk>"], max_new_tokens=8, num_samples=200, seed=0)
    assert not any("<unk>" in text for text in texts)


def test_tokens_that_end_words_are_refused() -> None:
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({"a</w>": 0, "b": 1, "b</w>": 2}, [], end_of_word_suffix="</w>"))
    inner.decoder = tokenizers.decoders.BPEDecoder()
    tokenizer = HuggingFaceTokenizer(inner)
    lm = LanguageModel(HMM(*(p.log() for p in random_hmm(2, tokenizer.vocab_size, 4))), tokenizer)
    with pytest.raises(InputError, match="this tokenizer marks the ends of words"):
        lm.generate(words=(2, 2))


def test_more_words_than_tokens_are_refused_at_once(lm: LanguageModel) -> None:
    with pytest.raises(InputError, match="no line of at most 50 tokens, <eos> counted, satisfies words"):
        lm.generate(words=(10_000, None), max_new_tokens=50)
