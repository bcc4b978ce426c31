"""Units of text: lines, paragraphs, documents, and a text without line breaks."""

import json
from pathlib import Path

import pytest
from helpers.commands import failure
from test_cli_main import SMALL

from hmmlm.cli.main import main
from hmmlm.data.corpora import load_text
from hmmlm.data.text import MAX_CHARACTERS, split_long
from hmmlm.lm.lm import load
from hmmlm.training.prepare import reopen

RUNNING = ["--no-batches.reset-at-eos", "--no-batches.eval-reset-at-eos"]
WRAPPED = "The first paragraph\nis wrapped.\n\nThe second one\n  too.\n\n\n\nAnother document\nis here.\n"


def documents(path: Path, unit: str) -> list[list[str]]:
    splits = load_text(str(path), unit=unit)
    return sorted(document for split in splits.values() for document in split)


def test_wrapped_prose_becomes_paragraphs_and_documents(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(WRAPPED)
    first, second, other = "The first paragraph is wrapped.", "The second one too.", "Another document is here."
    assert documents(tmp_path / "text.txt", "paragraph") == sorted([[first], [second], [other]])
    (tmp_path / "text.txt").write_text(f"{WRAPPED}\n\n\none\n\n\ntwo\n")
    assert documents(tmp_path / "text.txt", "document") == [[other], [first, second], ["one"], ["two"]]
    assert len(documents(tmp_path / "text.txt", "line")) == 8


def test_a_folder_of_files_is_a_corpus_of_documents(tmp_path: Path) -> None:
    for i in range(30):
        folder = tmp_path / "books" / str(i % 3)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{i}.txt").write_text(f"Book number\n{i}.\n\nIts second paragraph.\n")
    splits = {split: list(found) for split, found in load_text(str(tmp_path / "books"), unit="document").items()}
    assert sorted(d for found in splits.values() for d in found) == sorted(
        [f"Book number {i}.", "Its second paragraph."] for i in range(30)
    )
    assert all(splits.values())


def test_training_on_paragraphs_holds_out_whole_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "".join(f"the cat {i}\nsees the dog\n\n" for i in range(60))
    (tmp_path / "prose.txt").write_text(text)
    argv = ["train", "--data", str(tmp_path / "prose.txt"), "--text.unit", "paragraph", *SMALL]
    assert main([*argv, "--train.epochs", "1", "--quiet", "--out", str(tmp_path / "run")]) == 0
    data = reopen(tmp_path / "run")
    assert sum(len(tokens.documents) - 1 for tokens in data.tokens.values()) == 60
    eos = data.tokenizer.eos_id
    assert all((tokens.tokens == eos).sum() == len(tokens.documents) - 1 for tokens in data.tokens.values())
    # Another text is read as the model's own was.
    (tmp_path / "other.txt").write_text("the cat\nsees the dog\n")
    capsys.readouterr()
    assert main(["eval", str(tmp_path / "run"), "--data", str(tmp_path / "other.txt"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["results"]["other.txt"]["tokens"] == 6


@pytest.mark.parametrize(
    ("unit", "batches"), [("line", []), ("line", RUNNING), ("paragraph", []), ("document", RUNNING)]
)
def test_python_reads_a_text_as_eval_does(
    unit: str, batches: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The unit is that of the text which the token files were made from."""
    gap = "\n\n" if unit == "document" else "\n"
    (tmp_path / "prose.txt").write_text("".join(f"the cat {i}\nsees the dog\n{gap}" for i in range(60)))
    tokens, run, other = tmp_path / "tokens", tmp_path / "run", tmp_path / "other.txt"
    assert (
        main(
            [
                "data",
                str(tmp_path / "prose.txt"),
                "--out",
                str(tokens),
                "--text.unit",
                unit,
                "--tokenizer.kind",
                "word",
                "--quiet",
            ]
        )
        == 0
    )
    argv = ["train", "--data", str(tokens), *SMALL, *batches, "--train.epochs", "1", "--quiet", "--out", str(run)]
    assert main(argv) == 0
    text = "\nthe cat\nsees the dog\n\n\nthe dog\n \n\nthe cat sees\n\n"
    other.write_text(text)
    capsys.readouterr()
    assert main(["eval", str(run), "--data", str(other), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)["results"]["other.txt"]
    lm = load(run)
    assert lm.config["text"]["unit"] == unit
    assert len(lm.encode(text)) == result["tokens"] == 10 + (4 if unit == "line" else 3)
    assert lm.perplexity([text]) == pytest.approx(result["perplexity"], rel=1e-4)
    continued = lm.score(["sees the dog"], given="the cat\n\n")
    assert continued == pytest.approx(lm.score(["the cat\n\nsees the dog"]) - lm.score(["the cat"]), rel=1e-4)


def test_one_long_line_is_divided_into_sentences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "line.txt").write_text(" ".join(f"The cat {i} sees the dog." for i in range(60)))
    argv = ["data", str(tmp_path / "line.txt"), "--out", str(tmp_path / "tokens")]
    assert main(argv) == 0
    assert "its one line divided into sentences" in capsys.readouterr().out
    assert sum(len(tokens.documents) - 1 for tokens in reopen(tmp_path / "tokens").tokens.values()) == 60
    (tmp_path / "short.txt").write_text("One sentence only")
    assert "1 line, too few" in failure(capsys, "train", "--data", str(tmp_path / "short.txt"))
    for unit in ("paragraph", "document"):
        error = failure(capsys, "train", "--data", str(tmp_path / "short.txt"), "--text.unit", unit)
        assert f"1 {unit}, too few for train, valid and test" in error


def test_pieces_of_a_long_line() -> None:
    assert split_long('He said: "Yes!" Then he left. 1.5 is not an end') == [
        'He said: "Yes!"',
        "Then he left.",
        "1.5 is not an end",
    ]
    assert split_long("猫坐着。狗跑了！") == ["猫坐着。", "狗跑了！"]
    words = [f"word{i}" for i in range(300)]
    assert " ".join(split_long(" ".join(words))).split() == words
    for text in (" ".join(words), "猫" * 1000, ""):
        pieces = split_long(text)
        assert all(0 < len(piece) <= MAX_CHARACTERS for piece in pieces)
        assert "".join(pieces).replace(" ", "") == text.replace(" ", "")
