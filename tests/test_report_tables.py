"""Labels of tokens and states, and the tables for the terminal."""

import pytest
import torch
from helpers.report_models import WORDS, sentence_model
from rich.console import Console
from rich.table import Table

from hmmlm.data.words import WordTokenizer
from hmmlm.hmm import HMM
from hmmlm.lm.lm import LanguageModel
from hmmlm.report.explain import explain_states
from hmmlm.report.labels import MAX_LENGTH, state_followers, state_label, token_label
from hmmlm.report.tables import path_table, states_table


def render(table: Table, width: int = 80) -> list[str]:
    console = Console(width=width, record=True)
    console.print(table)
    return console.export_text().splitlines()


def test_tables_show_words_as_they_are() -> None:
    lm = sentence_model()
    lm.tokenizer.words[3] = "[bold]"  # type: ignore[attr-defined]
    summary = explain_states(lm, 3)
    lines = render(states_table(lm, summary, 4)) + render(path_table(lm, summary, "the dog runs"))
    assert any("[bold]" in line and "25.0%" in line for line in lines)
    assert any(line.split()[:3] == ["dog", "1", "1.00"] for line in lines)


def test_tables_fit_80_columns_whatever_the_words() -> None:
    lm = sentence_model()
    lm.tokenizer.words[3] = "w" * 200  # type: ignore[attr-defined]
    summary = explain_states(lm, 3)
    for table in (states_table(lm, summary, 4, summary.mass), path_table(lm, summary, "the dog runs")):
        lines = render(table)
        assert max(map(len, lines)) <= 80
        assert any("w" * (MAX_LENGTH - 1) + "…" in line for line in lines)


def test_control_characters_are_escaped() -> None:
    lm = sentence_model()
    lm.tokenizer.words[3] = "\x1b[31m\n"  # type: ignore[attr-defined]
    assert token_label(lm.tokenizer, 3) == "\\x1b[31m\\n"
    assert state_label(explain_states(lm), 1, lm.tokenizer) == "1 \\x1b[31m\\n"


@pytest.mark.parametrize(("probability", "shown"), [(0.993, " 99.3%"), (1.0, " 100%"), (0.5, " 50%"), (0.503, " 50%")])
def test_only_certainty_is_shown_as_100_percent(probability: float, shown: str) -> None:
    hmm = HMM.from_probs([1, 0], [[1 - probability, probability], [0.0, 1.0]], torch.full((2, 2), 0.5))
    tokenizer = WordTokenizer(WORDS[:2])
    followers = state_followers(explain_states(LanguageModel(hmm, tokenizer)), 0, tokenizer)
    assert any(follower.startswith("1 ") and follower.endswith(shown) for follower in followers.split(", "))


def test_only_the_impossible_is_shown_as_0_percent() -> None:
    hmm = HMM.from_probs([1, 0, 0], [[0.999, 0.001, 0], [0, 1, 0], [0, 0, 1]], torch.full((3, 2), 0.5))
    tokenizer = WordTokenizer(WORDS[:2])
    _, rare, impossible = state_followers(explain_states(LanguageModel(hmm, tokenizer)), 0, tokenizer).split(", ")
    assert rare.endswith(" <1%") and impossible.endswith(" 0%")
