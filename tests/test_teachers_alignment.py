"""Alignment of a teacher's tokens with a student's, and embeddings of the student's tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from helpers.teachers import LINES, word_level, write_sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models
from torch import Tensor

from hmmlm.data.tokenizers import HuggingFaceTokenizer, SentencePieceTokenizer, Tokenizer, WordTokenizer
from hmmlm.errors import InputError
from hmmlm.teachers.alignment import locate_student, predicting_positions, reading_positions, same_tokens
from hmmlm.teachers.embeddings import student_embeddings
from hmmlm.teachers.tokenizers import FastTokenizer, TeacherTokenizer, TokenizerWithoutOffsets


class EchoTeacher:
    """A teacher whose embeddings are the token id and the position."""

    name, hidden_size, layers, vocab_size = "echo", 2, 3, 1000
    device = torch.device("cpu")

    def __init__(self, tokenizer: TeacherTokenizer, context: int = 100) -> None:
        self.tokenizer, self.context = tokenizer, context

    def embed(self, tokens: Tensor, layer: int = -1) -> Tensor:
        return torch.stack([tokens, torch.arange(tokens.shape[1]).expand_as(tokens)], -1).float()

    def head(self) -> Tensor:
        return torch.zeros(self.vocab_size, self.hidden_size)


@pytest.fixture(scope="module")
def bpe() -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer.train([*LINES * 5, "the\u3000😀 漢"], 300)


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> SentencePieceTokenizer:
    return SentencePieceTokenizer(write_sentencepiece(tmp_path_factory.mktemp("pieces") / "tokenizer.model"))


# --- character spans ------------------------------------------------------------------------------------------------


def test_positions_of_spans() -> None:
    #          0123456789
    # text     "ab cd  ef."; the teacher's tokens: ab | " c" | d | (empty) | ef.
    teacher = np.array([[0, 2], [2, 4], [4, 5], [5, 5], [7, 10]])
    student = np.array([[0, 1], [1, 2], [2, 5], [5, 7], [7, 9], [9, 10]])
    positions, overlaps = reading_positions(student, teacher)
    assert positions.tolist() == [0, 0, 2, 2, 4, 4]  # whitespace in no token: the last token before it
    assert overlaps.tolist() == [True, True, True, False, True, True]
    assert predicting_positions(student, teacher).tolist() == [-1, -1, 0, 2, 2, 2]


def test_positions_when_a_character_is_several_tokens() -> None:
    # one character is two tokens of the teacher, the first including the space before it
    teacher = np.array([[0, 2], [1, 2], [2, 3]])
    student = np.array([[0, 1], [1, 2], [1, 2], [2, 3]])
    assert reading_positions(student, teacher)[0].tolist() == [0, 1, 1, 2]
    assert predicting_positions(student, teacher).tolist() == [-1, -1, -1, 1]


def test_a_text_without_teacher_tokens() -> None:
    positions, overlaps = reading_positions(np.array([[0, 2]]), np.zeros((0, 2), dtype=np.int64))
    assert positions.tolist() == [-1] and overlaps.tolist() == [False]
    assert predicting_positions(np.array([[0, 2]]), np.zeros((0, 2), dtype=np.int64)).tolist() == [-1]


def spanned(tokenizer: Tokenizer, text: str) -> list[str]:
    """Return the text that each token of a text covers; line breaks are eos."""
    ids: list[int] = []
    for i, line in enumerate(text.split("\n")):
        ids += ([tokenizer.eos_id] if i else []) + tokenizer.encode(line)
    student = locate_student(tokenizer, np.array(ids))
    assert student.text == tokenizer.decode(ids)
    return [student.text[begin:end] for begin, end in student.spans]


def test_spans_of_words() -> None:
    tokenizer = WordTokenizer.train(['the cat ( sat ) , " quoted " naïve'], split="words")
    expected = ["the", "cat", "(", "sat", ")", ",", '"', "quoted", '"', "\n", "naïve", "<unk>"]
    assert spanned(tokenizer, 'the cat (sat), "quoted"\nnaïve zebra') == expected


def test_spans_of_sentencepiece(pieces: SentencePieceTokenizer) -> None:
    found = spanned(pieces, "the cat\nthe 😀 dog")
    assert "".join(dict.fromkeys(found[:2])) == "the cat"
    assert found.count("😀") == 4  # each of its bytes covers the whole character
    assert found[2] == "\n"


@given(text=st.text(alphabet="the catsdog.(ï😀\u3000漢", max_size=30), missing=st.integers(0, 8))
@settings(max_examples=60, deadline=None)
def test_spans_of_bytes_cover_the_text(bpe: HuggingFaceTokenizer, text: str, missing: int) -> None:
    chunk = np.array([*bpe.encode(text), bpe.eos_id, *[-1] * missing])
    student = locate_student(bpe, chunk)
    assert student.text == text + "\n"
    assert student.positions.tolist() == list(range(len(chunk) - missing))
    begins, ends = student.spans.T
    assert (begins < ends).all() and (np.diff(begins) >= 0).all() and (np.diff(ends) >= 0).all()
    covered = {i for begin, end in student.spans for i in range(begin, end)}
    assert covered == set(range(len(student.text)))
    for id, (begin, end) in zip(chunk, student.spans, strict=False):
        if text.isascii() and id != bpe.eos_id:
            assert bpe.token(int(id)).replace("▁", " ") == student.text[begin:end]


# --- embeddings of a student's tokens -------------------------------------------------------------------------------


def test_equal_tokenizers_align_one_to_one(bpe: HuggingFaceTokenizer) -> None:
    tokens = torch.tensor([[5, 6, 7, 8], [9, 10, -1, -1]])
    teacher = EchoTeacher(TokenizerWithoutOffsets(bpe))  # its prefix is eos
    assert same_tokens(teacher.tokenizer, bpe)
    read = student_embeddings(teacher, bpe, tokens, align="read")
    assert read[..., 0].tolist() == [[5, 6, 7, 8], [9, 10, 0, 0]]
    assert read[..., 1].tolist() == [[1, 2, 3, 4], [1, 2, 0, 0]]
    predict = student_embeddings(teacher, bpe, tokens, align="predict")
    assert predict[..., 0].tolist() == [[bpe.eos_id, 5, 6, 7], [bpe.eos_id, 9, 0, 0]]
    teacher.tokenizer.prefix_id = None  # the first token is then predicted by the first embedding
    assert student_embeddings(teacher, bpe, tokens, align="predict")[..., 0].tolist() == [[5, 5, 6, 7], [9, 9, 0, 0]]


def test_different_tokenizers_align_by_characters() -> None:
    student = WordTokenizer.train(["un happy the naïve (cat)."], split="words")
    # the teacher keeps runs of punctuation, lowercases and strips accents, and adds [CLS] and [SEP]
    words = ["the", "naive", "cat", "unhappy", ").", "("]
    teacher = EchoTeacher(FastTokenizer(word_level(words, lowercase=True), prefix_id=1, suffix_id=2, unk_id=0))
    name = {word: i for i, word in enumerate(["[UNK]", "[CLS]", "[SEP]", *words])}
    ids = [*student.encode("the naïve (cat)."), student.eos_id, *student.encode("cat")]
    tokens = torch.tensor([[*ids, -1], student.encode("the cat the cat the cat the cat the")[: len(ids) + 1]])
    assert not same_tokens(teacher.tokenizer, student)

    read = student_embeddings(teacher, student, tokens, align="read")[..., 0].tolist()
    assert read[0] == [name[w] for w in ("the", "naive", "(", "cat", ").", ").", ").", "cat")] + [0]
    assert read[1] == [name[w] for w in ("the", "cat") * 4 + ("the",)]
    predict = student_embeddings(teacher, student, tokens, align="predict")[..., 0].tolist()
    # "." begins inside the token ").", so the token before ")." predicts it
    assert predict[0] == [name[w] for w in ("[CLS]", "the", "naive", "(", "cat", "cat", ").", ").")] + [0]


def test_student_tokens_inside_one_teacher_token(bpe: HuggingFaceTokenizer) -> None:
    teacher = EchoTeacher(FastTokenizer(word_level(["zyxcat", "sat"]), prefix_id=1, unk_id=0))
    ids = bpe.encode("zyxcat sat")
    assert len(ids) > 3
    inside = len(bpe.encode("zyxcat"))
    tokens = torch.tensor([ids])
    read = student_embeddings(teacher, bpe, tokens, align="read")[0, :, 1].tolist()
    assert read == [1] * inside + [2] * (len(ids) - inside)
    predict = student_embeddings(teacher, bpe, tokens, align="predict")[0, :, 1].tolist()
    assert predict[:inside] == [0] * inside and predict[inside] == 1


def test_a_rare_long_chunk_is_split() -> None:
    letters = "abcdefgh"
    teacher = EchoTeacher(FastTokenizer(word_level([*letters, "."]), prefix_id=1, suffix_id=2, unk_id=0), context=5)
    student = WordTokenizer(["<unk>", "<eos>", "a b c", "d", "e f g h"])
    tokens = torch.tensor([[2, 3, 4], [3, 3, -1], [3, -1, -1]])  # 8, 2 and 1 teacher tokens; it reads 3
    read = student_embeddings(teacher, student, tokens, align="read")
    name = {word: i for i, word in enumerate(letters, 3)}
    assert read[..., 0].tolist() == [[name["c"], name["d"], name["h"]], [name["d"], name["d"], 0], [name["d"], 0, 0]]
    assert read[0, :, 1].tolist() == [3, 1, 2]  # positions in the parts abc, def, gh
    predict = student_embeddings(teacher, student, tokens, align="predict")
    assert predict[0, :, 0].tolist() == [1, name["c"], name["d"]]


def test_a_gpt_reads_line_breaks_as_eos(bpe: HuggingFaceTokenizer, tmp_path: Path) -> None:
    bpe.save(tmp_path)
    fast = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    teacher = FastTokenizer(fast, prefix_id=bpe.eos_id, newline_id=bpe.eos_id)
    text = "the cat\n\nsat 😀"
    (encoding,) = teacher.encode_batch([text])
    eos = [bpe.eos_id]
    assert encoding.ids.tolist() == bpe.encode("the cat") + eos + eos + bpe.encode("sat 😀")
    breaks = [text[begin:end] for id, (begin, end) in zip(*encoding, strict=True) if id == bpe.eos_id]
    assert breaks == ["\n", "\n"]
    begin, end = encoding.spans[-1]
    assert text[begin:end].strip() == "😀"


def test_special_tokens_in_a_text_are_text() -> None:
    tokenizer = word_level(["the"])
    tokenizer.add_special_tokens(["[SEP]"])
    (encoding,) = FastTokenizer(tokenizer, prefix_id=1, suffix_id=2).encode_batch(["the [SEP]"])
    assert 2 not in encoding.ids.tolist()


# --- errors -----------------------------------------------------------------------------------------------------------


def test_text_that_the_teacher_drops() -> None:
    student = WordTokenizer.train(["cat dog"])
    tokenizer = tokenizers.Tokenizer(models.BPE({"c": 0, "a": 1, "t": 2}, []))  # drops unknown letters
    teacher = EchoTeacher(FastTokenizer(tokenizer, prefix_id=None))
    tokens = torch.tensor([student.encode("cat cat dog dog")])
    with pytest.raises(InputError, match=r"do not align: 2 of 4 .*'dog' .* position 2 of chunk 0") as error:
        student_embeddings(teacher, student, tokens, align="read")
    assert "\n" not in str(error.value)


def test_text_that_the_teacher_does_not_know() -> None:
    student = WordTokenizer.train(["cat dog"])
    teacher = EchoTeacher(FastTokenizer(word_level(["cat"]), prefix_id=None, unk_id=0))
    student_embeddings(teacher, student, torch.tensor([student.encode("cat dog")]), align="read")
    with pytest.raises(InputError, match=r"2 of 3 tokens .* unknown .*'dog' in chunk 0"):
        student_embeddings(teacher, student, torch.tensor([student.encode("cat dog dog")]), align="read")


def test_bad_arguments(bpe: HuggingFaceTokenizer) -> None:
    teacher, tokens = EchoTeacher(TokenizerWithoutOffsets(bpe), context=4), torch.tensor([[5, 6, 7, 8]])
    with pytest.raises(InputError, match=r"at most 3 tokens .* chunk of 4 .* usually 4 of its own"):
        student_embeddings(teacher, bpe, tokens, align="read")
    with pytest.raises(InputError, match=r"no layer 4: .* 1 to 3"):
        student_embeddings(teacher, bpe, tokens, align="read", layer=4)
    with pytest.raises(InputError, match="unknown alignment 'reed'"):
        student_embeddings(teacher, bpe, tokens, align="reed")  # type: ignore[arg-type]


def test_a_word_teacher_cannot_read_other_tokens(bpe: HuggingFaceTokenizer) -> None:
    teacher = EchoTeacher(TokenizerWithoutOffsets(WordTokenizer.train(LINES)))
    with pytest.raises(InputError, match="no character offsets: give the student the same tokenizer"):
        student_embeddings(teacher, bpe, torch.tensor([bpe.encode("the cat")]), align="read")
