"""Regular expressions over bytes against Python's `re`, and over tokens of every spelling."""

import itertools
import random
import re

import pytest

from hmmlm.constrain.budget import STEPS, construction
from hmmlm.constrain.regex import regex_automaton
from hmmlm.constrain.spelling import Spelling
from hmmlm.errors import InputError

PATTERNS = [
    r"[A-Z][a-z]+ (is|was) .*",
    r"(a|b)*abb",
    r"a{2,4}b?",
    r"\w+é?",
    r"[^a-c]x",
    r"[^\w ]+",
    r"(?i)straße|ab",
    r"\d{1,3}(\.\d+)?",
    r"(?s).*\n.",
    r"x*?y",
    r"",
    r"[\s\S]",
    r"\S\D",
    r"a|",
    r"(?:ab){0}c",
    r"[é-☃😀]+",
    r"(?i:a)b",
]
CHARACTERS = "kKsSiI09 _\x1c\x85\xa0éÉßẞİıſKΩωΩςσΣ\u0345ιιǄǅǆⒶⓐ☃µμ𐐀𐐨ﬅﬆაᲐ"


@pytest.mark.parametrize("pattern", PATTERNS)
def test_automata_of_regular_expressions_agree_with_re(pattern: str) -> None:
    automaton = regex_automaton(pattern)
    spaced = regex_automaton(pattern, optional_space=True)
    own = pattern if "^" in pattern else pattern.replace(r"\w", "[0-9A-Za-z_]").replace(r"\d", "[0-9]")
    wanted, generator = re.compile(own), random.Random(0)
    whole = [
        "abb",
        "aab",
        "Xa is b",
        "12.5",
        "straße",
        "STRASSE",
        "ab",
        "Ab",
        "xxy",
        "Za was ☃",
        "c",
        "\n\n",
        "é😀",
        "",
        "zx",
        "x",
    ]
    found = 0
    for _ in range(1500):
        text = "".join(generator.choice("abcxyAZ1.9 \n_é☃ß😀iswa") for _ in range(generator.randrange(6)))
        text = generator.choice([*whole, text, text])
        match = bool(wanted.fullmatch(text))
        assert automaton.accepts(text.encode()) == match, text
        assert spaced.accepts(text.encode()) == (match or (text[:1] == " " and bool(wanted.fullmatch(text[1:])))), text
        found += match
    assert found
    assert not automaton.accepts(b"\xff") and not automaton.accepts("é".encode()[:1])


@pytest.mark.parametrize("flags", ["", "a", "i", "ai"])
@pytest.mark.parametrize(
    "pattern", [r"[^a-z\d]", "[a-z]", "k", "[^k]", r"\s", r"\S", "[é-☃]", "ß", "σ", r"\W", "ǅ", "[^İ]"]
)
def test_flags_match_as_in_re(pattern: str, flags: str) -> None:
    pattern = f"(?{flags}){pattern}" if flags else pattern
    automaton = regex_automaton(pattern)
    for character in CHARACTERS:
        accepted = bool(automaton.accepting[automaton.read(list(character.encode()))])
        assert accepted == (re.fullmatch(pattern, character) is not None), character


def test_bounds_are_redundant_at_the_ends() -> None:
    assert regex_automaton("^ab$").accepts(b"ab") and not regex_automaton("^ab$").accepts(b"xab")


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        (r"(?=a)b", "lookahead and lookbehind"),
        (r"(?<!a)b", "lookahead and lookbehind"),
        (r"(a)\1", "a backreference is not regular"),
        (r"(a)?(?(1)b|c)", "a conditional group is not regular"),
        (r"a++b", "a possessive repeat"),
        (r"(?>a*)b", "an atomic group"),
        (r"\bword", r"\\b and \\B"),
        (r"a^b", "inside the expression"),
        (r"(a", "is not a regular expression: missing \\)"),
        (r"(?a)(?u)the", "is not a regular expression: ASCII and UNICODE flags are incompatible"),
        ("(?:" * 3000 + "a" + ")+" * 3000, "nested too deeply|is not a regular expression"),
    ],
)
def test_what_is_not_regular_is_refused_with_the_reason(pattern: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        regex_automaton(pattern)


HOSTILE = {
    "(?:a{0,500}){0,500}": None,
    "(?:.{0,60}|x){0,60}": None,
    "(?:a?){4000}a{4000}": 8002,
    r"(?:\w{1,20} ?){1,30}": 632,
    "(a|b)*a(a|b){20}": None,
    "(ab{500}){999}": None,
    "(a?){4000000000}": None,
    "(a|b{0,4000000000})": None,
    r"(?:[^\w]{0,200}é?){0,50}": None,
    "(?:(?:(?:a{0,20}b?){0,20}c?){0,20}d?){0,20}": None,
    "(?:" * 60 + "a" + "{0,3})" * 60: None,
    "a" * 2_000_000: None,
    "(?i)" + "".join(map(chr, range(0x400, 0x1400))): None,
}


@pytest.mark.parametrize("pattern", HOSTILE, ids=lambda pattern: pattern[:30])
def test_every_expression_is_answered_within_the_budget(pattern: str) -> None:
    with construction() as budget:
        if HOSTILE[pattern] is None:
            with pytest.raises(InputError, match=f"needs more than {STEPS:,} steps to compile: use smaller repeats"):
                regex_automaton(pattern)
            assert budget.steps > STEPS
        else:
            assert regex_automaton(pattern).num_states == HOSTILE[pattern]
            assert budget.steps <= STEPS


@pytest.mark.parametrize(
    "pattern",
    [
        r"(?:a{0,2}b?){1,3}",
        "(?:a?){3}a{2,3}",
        ".*a.{1,2}b",
        "(?:(ab|a){1,2}b?){2,4}",
        "(a{2,3}|a{5}b){1,2}",
        "(?:a{2}){1,3}",
    ],
)
def test_repeats_of_repeats_agree_with_re(pattern: str) -> None:
    automaton, wanted = regex_automaton(pattern), re.compile(pattern)
    for size in range(11):
        for text in map("".join, itertools.product("ab", repeat=size)):
            assert automaton.accepts(text.encode()) == bool(wanted.fullmatch(text)), text


def test_repeats_of_nothing_end() -> None:
    for pattern in ("a(){4000000000}b", "a(?:){0,4000000000}b", "a(){3,}b"):
        automaton = regex_automaton(pattern)
        assert automaton.accepts(b"ab") and not automaton.accepts(b"aab")


def test_every_tokenization_of_a_match_is_accepted() -> None:
    pieces = [
        None,
        b"",
        b"a",
        b"ab",
        b"b",
        b" is",
        b"is",
        b" ",
        "é".encode(),
        "é".encode()[:1],
        "é".encode()[1:],
        b"aaa",
    ]
    spelling, pattern = Spelling(pieces), r"a+b* (is|é)"
    automaton, generator = spelling.automaton(regex_automaton(pattern), rejects=True), random.Random(0)
    found = 0
    for _ in range(5000):
        tokens = [generator.choice([2, 3, 4, 5, 6, 7, 8, 9, 10, 11]) for _ in range(generator.randrange(6))]
        text = b"".join(pieces[token] or b"" for token in tokens)
        try:
            wanted = bool(re.fullmatch(pattern, text.decode()))
        except UnicodeDecodeError:
            wanted = False
        assert automaton.accepts(tokens) == automaton.accepts([1, *tokens]) == wanted, text
        assert not automaton.accepts([*tokens, 0])  # a token without text
        found += wanted
    assert found > 20
