"""Occurrences of states in a text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.runs import tiny_config, write_text
from rich.console import Console

from hmmlm.cli.main import main
from hmmlm.data.tokenfile import TokenFile
from hmmlm.data.tokenizers import WordTokenizer
from hmmlm.hmm import HMM
from hmmlm.lm.lm import LanguageModel
from hmmlm.report.contexts import contexts_table, find_occurrences, text_share
from hmmlm.report.explain import explain_states
from hmmlm.training.train import train

WORDS = ["<unk>", "<eos>", "a", "b", "[/b]"]
VALUES = [0, 0, 1, 1, 2]  # of each word


def model() -> LanguageModel:
    emission = torch.zeros(3, 5)
    for word, state in enumerate(VALUES):
        emission[state, word] = 1 / VALUES.count(state)
    hmm = HMM.from_probs(torch.full((3,), 1 / 3), torch.full((3, 3), 1 / 3), emission)
    return LanguageModel(hmm, WordTokenizer(WORDS))


def test_occurrences_are_of_their_state_and_of_different_words() -> None:
    lm, ids = model(), torch.randint(5, (150,), generator=torch.Generator().manual_seed(0)).tolist()
    occurrences = find_occurrences(lm, TokenFile.from_arrays(ids, None, 5), 3)
    assert sorted(occurrences) == [0, 1, 2]
    for state, found in occurrences.items():
        assert len(found) == 3
        for tokens, position in found:
            assert VALUES[tokens[position]] == state and len(tokens) <= 13
            assert any(ids[i : i + len(tokens)] == tokens for i in range(len(ids)))
    assert {tokens[position] for tokens, position in occurrences[1][:2]} == {2, 3}


def test_the_table_shows_words_as_they_are() -> None:
    lm = model()
    table = contexts_table(lm, explain_states(lm), 3, TokenFile.from_arrays([2, 4, 3, 2, 1], None, 5), 1)
    console = Console(width=80, record=True)
    console.print(table)
    text = console.export_text()
    assert "[/b]" in text and "b a" in text


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_table_fits_the_terminal_and_keeps_the_state_and_the_nearest_words(width: int) -> None:
    """Words of 20 letters fill more than any of these widths: contexts are cut on the side away from the word."""
    words = ["<unk>", "<eos>", *(letter * 20 for letter in "abcdefgh")]
    hmm = HMM.from_probs([1.0], [[1.0]], torch.full((1, 10), 0.1))
    lm = LanguageModel(hmm, WordTokenizer(words))
    console = Console(width=width, record=True)
    text = TokenFile.from_arrays([2, 3, 4, 5, 6, 7, 8], None, 10)
    console.print(contexts_table(lm, replace(explain_states(lm), words=torch.tensor([[9]])), 1, text, 4))
    header, *lines = console.export_text().splitlines()
    assert header.split() == ["state", "before", "word", "after"]
    assert max(map(len, [header, *lines])) <= width
    assert lines[0].startswith("0 hhhh")
    fourth = lines[3]  # the occurrence of "dddd…"
    before, after = fourth[: fourth.index("d")].rstrip(), fourth[fourth.rindex("d") + 1 :].lstrip("…").strip()
    assert before.endswith("c") and "…" in before and "a" not in before
    assert after.startswith("e") and after.endswith("…")


def test_inspect_shows_contexts_of_a_run_and_refuses_without_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tiny_config(write_text(tmp_path), train={"epochs": 1}), tmp_path / "run")
    assert main(["inspect", str(tmp_path / "run"), "--contexts"]) == 0
    assert "before" in capsys.readouterr().out
    (tmp_path / "run" / "best").resolve().rename(tmp_path / "alone")
    assert main(["inspect", str(tmp_path / "alone"), "--contexts"]) == 2
    assert "--contexts needs the text of a run" in capsys.readouterr().err


@pytest.mark.parametrize("restarts", [False, True])
def test_the_text_is_read_with_the_restarts_of_evaluation(restarts: bool) -> None:
    """State 0 is the first of a chain and no other: of every line, or of the text."""
    hmm = HMM.from_probs([1, 0, 0], [[0, 1, 0], [0, 1, 0], [0, 0, 1]], torch.full((3, 5), 0.2))
    lm = LanguageModel(hmm, WordTokenizer(WORDS), {"batches": {"kind": "stream", "eval_reset_at_eos": restarts}})
    ids = [2, 3, 4, 2, 1, 3, 1, 2, 4, 4, 3, 3, 2, 1] * 40  # lines of 5, 2 and 7 tokens, more than one window
    text = TokenFile.from_arrays(ids, None, 5)
    firsts = [i for i in range(len(ids)) if i == 0 or (restarts and ids[i - 1] == 1)]
    share = text_share(lm, text)
    assert share is not None
    want = [len(firsts) / len(ids), 1 - len(firsts) / len(ids), 0]
    torch.testing.assert_close(share, torch.tensor(want, dtype=torch.float64), atol=1e-6, rtol=0)
    found = find_occurrences(lm, text, 4)[0]
    assert len(found) == (4 if restarts else 1)
    for tokens, position in found:
        assert position == 0 or tokens[position - 1] == 1
    console = Console(width=80, record=True)
    console.print(contexts_table(lm, explain_states(lm), 3, text))
    assert "not found in the 560 tokens read: 2" in console.export_text()


def test_an_impossible_text_has_no_share_and_no_occurrences() -> None:
    lm = LanguageModel(HMM.from_probs([1.0], [[1.0]], [[0.5, 0.5, 0, 0, 0]]), WordTokenizer(WORDS))
    text = TokenFile.from_arrays([0, 2, 1] * 100, None, 5)
    assert text_share(lm, text) is None
    assert find_occurrences(lm, text, 3) == {}
    half = TokenFile.from_arrays([0] * 400 + [2] * 30, None, 5)  # the last two windows are impossible
    assert text_share(lm, half) is not None
