"""The choice of a tokenizer, and what is noted of a text."""

import random
from collections import Counter
from pathlib import Path

import pytest

from hmmlm.config.sections import AutoTokenizerConfig
from hmmlm.data.corpora import Documents, load_text, notices
from hmmlm.data.words import WordTokenizer
from hmmlm.runs.progress import Progress
from hmmlm.training.tokenizers import make_tokenizer

_RANDOM = random.Random(0)


def _lines(symbols: str, joint: str, low: int = 20, high: int = 40) -> list[str]:
    return [joint.join(_RANDOM.choices(symbols, k=_RANDOM.randint(low, high))) for _ in range(400)]


@pytest.mark.parametrize(
    ("lines", "kind", "unknown"),
    [
        (_lines("ACGT", " "), "word", "0.0%"),
        (_lines("ACGT", ""), "char", "100.0%"),
        (_lines("".join(map(chr, range(0x4E00, 0x4E00 + 600))), ""), "bpe", "100.0%"),
        ([" ".join("".join(_RANDOM.choices("abcdefgh", k=4)) for _ in range(8)) for _ in range(400)], "bpe", ""),
    ],
)
def test_the_text_decides(lines: list[str], kind: str, unknown: str, tmp_path: Path) -> None:
    notes: list[str] = []
    progress = Progress()
    progress.note = notes.append  # type: ignore[method-assign]
    (tmp_path / "text.txt").write_text("\n".join(lines), encoding="utf-8")
    tokenizer = make_tokenizer(AutoTokenizerConfig(), load_text(str(tmp_path / "text.txt")), progress)
    assert (tokenizer.kind == "word") == (kind == "word")
    assert f"tokenizer: {kind}, {tokenizer.vocab_size:,} tokens: {unknown}" in notes[0]
    assert "--tokenizer.kind overrides" in notes[0] and len(notes) == 1


def test_a_vocabulary_is_enlarged_only_as_far_as_held_out_words_need_it() -> None:
    counts = Counter({"a": 9, "b": 2, **{f"w{i:02}": 1 for i in range(20)}})
    for held_out, size, unknown in (
        (Counter(a=9, b=1), 4, 0.0),
        (Counter(a=8, w02=1, w19=1), 7, 0.1),
        (Counter(a=5, w19=5), 19, 0.5),  # a quarter of the words that occur once stays unknown
    ):
        made, share = WordTokenizer.covering(counts, held_out, 0.15, 100)
        assert (made.vocab_size, share) == (size, pytest.approx(unknown))


def _documents(lines: list[str]) -> Documents:
    return Documents("lines", lambda: [[line] for line in lines])


def test_wrapped_lines_and_lines_of_the_training_text_are_noted(tmp_path: Path) -> None:
    sentences = [f"sentence number {i} of a text" for i in range(40)]
    splits = {
        "train": _documents(sentences),
        "valid": _documents(["x"]),
        "test": _documents([*sentences[:3], "a", "b"]),
    }
    text = tmp_path / "text.txt"
    text.write_text("\n".join(sentences))
    assert [*notices(str(text), splits)] == [
        "60% of the test lines occur in the training text, so that its perplexity is too low"
    ]
    splits["test"] = _documents(["a", "b"])
    paragraph = "\n".join(["a line of running text that is broken at a width of seventy columns"] * 5)
    text.write_text("\n\n".join([paragraph] * 4))
    assert [*notices(str(text), splits)] == ["lines look wrapped: --text.unit paragraph joins them"]
