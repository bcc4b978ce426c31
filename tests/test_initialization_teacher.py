"""Teachers, and the alignment of their tokens with a student's."""

import importlib.util
import io
import json
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import commands
import numpy as np
import pytest
import sentencepiece
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from network_runs import interrupt_after, write_pairs
from safetensors.torch import load_file
from tokenizers import models, normalizers, pre_tokenizers
from torch import Tensor

from hmmlm.cli.main import main
from hmmlm.data.tokenizer import HuggingFaceTokenizer, SentencePieceTokenizer, Tokenizer, WordTokenizer
from hmmlm.errors import InputError
from hmmlm.initialization.alignment import predict_places, read_places, same_tokens, student_spans
from hmmlm.initialization.embeddings import student_embeddings
from hmmlm.initialization.offsets import FastTokenizer, PlainTokenizer, TeacherTokenizer
from hmmlm.initialization.teacher import open_teacher
from hmmlm.initialization.transformer_lm import TransformerLM, TransformerShape, save_teacher
from hmmlm.learning.teacher import TeacherConfig, TransformerConfig, train_teacher

LINES = ["the cat sat on the mat .", "the dog (not the cat) sat.", "naïve cats — “quoted” 😀 dogs!"]


class EchoTeacher:
    """Its state says which token it read where: [id, position]."""

    name, hidden_size, layers, vocab_size = "echo", 2, 3, 1000
    device = torch.device("cpu")

    def __init__(self, tokenizer: TeacherTokenizer, context: int = 100) -> None:
        self.tokenizer, self.context = tokenizer, context

    def embed(self, tokens: Tensor, layer: int = -1) -> Tensor:
        return torch.stack([tokens, torch.arange(tokens.shape[1]).expand_as(tokens)], -1).float()

    def head(self) -> Tensor:
        return torch.zeros(self.vocab_size, self.hidden_size)


def word_level(words: Sequence[str], lowercase: bool = False) -> tokenizers.Tokenizer:
    """Runs of letters and of marks, as most pre-tokenizers split; white space is in no token."""
    vocabulary = {word: i for i, word in enumerate(["[UNK]", "[CLS]", "[SEP]", *words])}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if lowercase:
        steps = [normalizers.NFD(), normalizers.Lowercase(), normalizers.StripAccents()]
        tokenizer.normalizer = normalizers.Sequence(steps)
    return tokenizer


@pytest.fixture(scope="module")
def bpe() -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer.train(LINES * 5, 300)


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> SentencePieceTokenizer:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES[:2] * 20), model_writer=model, vocab_size=290, model_type="bpe",
        byte_fallback=True, minloglevel=2, hard_vocab_limit=False,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("pieces") / "tokenizer.model"
    path.write_bytes(model.getvalue())
    return SentencePieceTokenizer(path)


# --- where tokens are -----------------------------------------------------------------------------------------------


def test_places_of_spans() -> None:
    #          0123456789
    # text     "ab cd  ef."; the teacher has ab | " c" | d | (empty) | ef.
    teacher = np.array([[0, 2], [2, 4], [4, 5], [5, 5], [7, 10]])
    student = np.array([[0, 1], [1, 2], [2, 5], [5, 7], [7, 9], [9, 10]])
    places, seen = read_places(student, teacher)
    assert places.tolist() == [0, 0, 2, 2, 4, 4]  # white space that is in no token: the last one before it
    assert seen.tolist() == [True, True, True, False, True, True]
    assert predict_places(student, teacher).tolist() == [-1, -1, 0, 2, 2, 2]


def test_places_where_a_character_is_several_tokens() -> None:
    # one character of four bytes: the teacher has two tokens for it, one of them with the space before
    teacher = np.array([[0, 2], [1, 2], [2, 3]])
    student = np.array([[0, 1], [1, 2], [1, 2], [2, 3]])
    assert read_places(student, teacher)[0].tolist() == [0, 1, 1, 2]
    assert predict_places(student, teacher).tolist() == [-1, -1, -1, 1]


def test_a_text_without_teacher_tokens() -> None:
    places, seen = read_places(np.array([[0, 2]]), np.zeros((0, 2), dtype=np.int64))
    assert places.tolist() == [-1] and seen.tolist() == [False]
    assert predict_places(np.array([[0, 2]]), np.zeros((0, 2), dtype=np.int64)).tolist() == [-1]


def spanned(tokenizer: Tokenizer, text: str) -> list[str]:
    """What each token of a text (eos at line breaks) stands for."""
    ids: list[int] = []
    for i, line in enumerate(text.split("\n")):
        ids += ([tokenizer.eos_id] if i else []) + tokenizer.encode(line)
    student = student_spans(tokenizer, np.array(ids))
    assert student.text == tokenizer.decode(ids)
    return [student.text[begin:end] for begin, end in student.spans]


def test_spans_of_words() -> None:
    tokenizer = WordTokenizer.train(["the cat ( sat ) , \" quoted \" naïve"], split="words")
    assert spanned(tokenizer, 'the cat (sat), "quoted"\nnaïve zebra') == [
        "the", "cat", "(", "sat", ")", ",", '"', "quoted", '"', "\n", "naïve", "<unk>",
    ]  # fmt: skip


def test_spans_of_sentencepiece(pieces: SentencePieceTokenizer) -> None:
    found = spanned(pieces, "the cat\nthe 😀 dog")
    assert "".join(dict.fromkeys(found[:2])) == "the cat"
    assert found.count("😀") == 4  # its bytes, each the whole character
    assert found[2] == "\n"


@given(text=st.text(alphabet="the catsdog.(ï😀\u3000漢", max_size=30), missing=st.integers(0, 8))
@settings(max_examples=60, deadline=None)
def test_spans_of_bytes_cover_the_text(bpe: HuggingFaceTokenizer, text: str, missing: int) -> None:
    chunk = np.array([*bpe.encode(text), bpe.eos_id, *[-1] * missing])
    student = student_spans(bpe, chunk)
    assert student.text == text + "\n"
    assert student.places.tolist() == list(range(len(chunk) - missing))
    begins, ends = student.spans.T
    assert (begins < ends).all() and (np.diff(begins) >= 0).all() and (np.diff(ends) >= 0).all()
    covered = {i for begin, end in student.spans for i in range(begin, end)}
    assert covered == set(range(len(student.text)))
    for id, (begin, end) in zip(chunk, student.spans, strict=False):
        if text.isascii() and id != bpe.eos_id:
            assert bpe.token(int(id)).replace("▁", " ") == student.text[begin:end]


# --- embeddings of a student's tokens -------------------------------------------------------------------------------


def test_the_same_tokens_line_up_one_to_one(bpe: HuggingFaceTokenizer) -> None:
    tokens = torch.tensor([[5, 6, 7, 8], [9, 10, -1, -1]])
    teacher = EchoTeacher(PlainTokenizer(bpe))  # reads an eos first
    assert same_tokens(teacher.tokenizer, bpe)
    read = student_embeddings(teacher, bpe, tokens, align="read")
    assert read[..., 0].tolist() == [[5, 6, 7, 8], [9, 10, 0, 0]]
    assert read[..., 1].tolist() == [[1, 2, 3, 4], [1, 2, 0, 0]]
    predict = student_embeddings(teacher, bpe, tokens, align="predict")
    assert predict[..., 0].tolist() == [[bpe.eos_id, 5, 6, 7], [bpe.eos_id, 9, 0, 0]]
    teacher.tokenizer.before = None  # then the first token's prediction is the first state
    assert student_embeddings(teacher, bpe, tokens, align="predict")[..., 0].tolist() == [[5, 5, 6, 7], [9, 9, 0, 0]]


def test_other_tokens_line_up_by_characters() -> None:
    student = WordTokenizer.train(["un happy the naïve cat . ( )"], split="words")
    # the teacher has whole runs of marks, lowercases and strips accents, reads [CLS] first and [SEP] last
    words = ["the", "naive", "cat", "unhappy", ").", "("]
    teacher = EchoTeacher(FastTokenizer(word_level(words, lowercase=True), before=1, after=2, unk_id=0))
    name = {word: i for i, word in enumerate(["[UNK]", "[CLS]", "[SEP]", *words])}
    ids = [*student.encode("the naïve (cat)."), student.eos_id, *student.encode("cat")]
    tokens = torch.tensor([[*ids, -1], student.encode("the cat the cat the cat the cat the")[: len(ids) + 1]])
    assert not same_tokens(teacher.tokenizer, student)

    read = student_embeddings(teacher, student, tokens, align="read")[..., 0].tolist()
    assert read[0] == [name[w] for w in ("the", "naive", "(", "cat", ").", ").", ").", "cat")] + [0]
    assert read[1] == [name[w] for w in ("the", "cat") * 4 + ("the",)]
    predict = student_embeddings(teacher, student, tokens, align="predict")[..., 0].tolist()
    # "." begins inside ")." and the line break after it: what predicts "." comes before ")."
    assert predict[0] == [name[w] for w in ("[CLS]", "the", "naive", "(", "cat", "cat", ").", ").")] + [0]


def test_student_tokens_inside_one_teacher_token(bpe: HuggingFaceTokenizer) -> None:
    teacher = EchoTeacher(FastTokenizer(word_level(["zyxcat", "sat"]), before=1, unk_id=0))
    ids = bpe.encode("zyxcat sat")
    assert len(ids) > 3
    inside = len(bpe.encode("zyxcat"))
    tokens = torch.tensor([ids])
    read = student_embeddings(teacher, bpe, tokens, align="read")[0, :, 1].tolist()
    assert read == [1] * inside + [2] * (len(ids) - inside)
    predict = student_embeddings(teacher, bpe, tokens, align="predict")[0, :, 1].tolist()
    assert predict[:inside] == [0] * inside and predict[inside] == 1


def test_a_rare_long_chunk_is_read_in_pieces() -> None:
    letters = "abcdefgh"
    teacher = EchoTeacher(FastTokenizer(word_level([*letters, "."]), before=1, after=2, unk_id=0), context=5)
    student = WordTokenizer(["<unk>", "<eos>", "a b c", "d", "e f g h"])
    tokens = torch.tensor([[2, 3, 4], [3, 3, -1], [3, -1, -1]])  # 8, 2 and 1 tokens of the teacher, which reads 3
    read = student_embeddings(teacher, student, tokens, align="read")
    name = {word: i for i, word in enumerate(letters, 3)}
    assert read[..., 0].tolist() == [[name["c"], name["d"], name["h"]], [name["d"], name["d"], 0], [name["d"], 0, 0]]
    assert read[0, :, 1].tolist() == [3, 1, 2]  # positions in the pieces abc, def, gh
    predict = student_embeddings(teacher, student, tokens, align="predict")
    assert predict[0, :, 0].tolist() == [1, name["c"], name["d"]]


def test_an_own_teacher_reads_line_ends_as_eos(bpe: HuggingFaceTokenizer, tmp_path: Path) -> None:
    bpe.save(tmp_path)
    fast = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    teacher = FastTokenizer(fast, before=bpe.eos_id, line_end=bpe.eos_id)
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
    (encoding,) = FastTokenizer(tokenizer, before=1, after=2).encode_batch(["the [SEP]"])
    assert 2 not in encoding.ids.tolist()


# --- what is wrong, said before any long work -----------------------------------------------------------------------


def one_line(error: pytest.ExceptionInfo[InputError]) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message


def test_text_that_the_teacher_does_not_see() -> None:
    student = WordTokenizer.train(["cat dog"])
    tokenizer = tokenizers.Tokenizer(models.BPE({"c": 0, "a": 1, "t": 2}, []))  # drops what it has no letter for
    teacher = EchoTeacher(FastTokenizer(tokenizer, before=None))
    tokens = torch.tensor([student.encode("cat cat dog dog")])
    with pytest.raises(InputError, match=r"do not align: 2 of 4 .*'dog' .* position 2 of chunk 0") as error:
        student_embeddings(teacher, student, tokens, align="read")
    one_line(error)


def test_text_that_the_teacher_does_not_know() -> None:
    student = WordTokenizer.train(["cat dog"])
    teacher = EchoTeacher(FastTokenizer(word_level(["cat"]), before=None, unk_id=0))
    student_embeddings(teacher, student, torch.tensor([student.encode("cat dog")]), align="read")
    with pytest.raises(InputError, match=r"2 of 3 tokens .* unknown .*'dog' in chunk 0"):
        student_embeddings(teacher, student, torch.tensor([student.encode("cat dog dog")]), align="read")


def test_bad_arguments(bpe: HuggingFaceTokenizer) -> None:
    teacher, tokens = EchoTeacher(PlainTokenizer(bpe), context=4), torch.tensor([[5, 6, 7, 8]])
    with pytest.raises(InputError, match=r"at most 3 tokens .* chunk of 4 .* usually 4 of its own"):
        student_embeddings(teacher, bpe, tokens, align="read")
    with pytest.raises(InputError, match=r"no layer 4: .* 1 to 3"):
        student_embeddings(teacher, bpe, tokens, align="read", layer=4)
    with pytest.raises(InputError, match="unknown alignment 'reed'"):
        student_embeddings(teacher, bpe, tokens, align="reed")  # type: ignore[arg-type]


def test_a_word_teacher_cannot_read_other_tokens(bpe: HuggingFaceTokenizer) -> None:
    teacher = EchoTeacher(PlainTokenizer(WordTokenizer.train(LINES)))
    with pytest.raises(InputError, match="no character offsets: give the student the same tokenizer"):
        student_embeddings(teacher, bpe, torch.tensor([bpe.encode("the cat")]), align="read")


def test_folders_that_are_no_teachers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path, match: str, **arguments: str) -> None:
        with pytest.raises(InputError, match=match) as error:
            open_teacher(str(path), **arguments)  # type: ignore[arg-type]
        one_line(error)

    refused(tmp_path / "none", r"no teacher at .*none")
    refused(tmp_path, "has no config.json: it should hold")
    refused(tmp_path, "no file a.gguf in the teacher folder", gguf_file="a.gguf")
    (tmp_path / "a.gguf").touch()
    refused(tmp_path, r"has no config.json: give the file, .*a\.gguf")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    refused(tmp_path, "has no weights")
    (tmp_path / "model.safetensors").touch()
    refused(tmp_path, "has no tokenizer")
    (tmp_path / "tokenizer.json").touch()
    refused(tmp_path, "unknown device 'tpu'", device="tpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused(tmp_path, "no CUDA device", device="cuda")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refused(tmp_path, r'needs the package transformers.*: pip install "hmmlm\[teacher\]"')
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "transformers" else None)
    refused(tmp_path / "a.gguf", "needs the package gguf")


# --- the teacher of our own -----------------------------------------------------------------------------------------

SHAPE = TransformerShape(vocab_size=20, hidden=16, layers=2, heads=2, context=8)


def test_likelihood_is_the_product_of_what_each_state_predicts() -> None:
    model = TransformerLM(SHAPE, torch.Generator().manual_seed(0))
    tokens = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, -1, -1]])
    expected = torch.zeros(2)
    for row, length in ((0, 5), (1, 3)):
        for i in range(length):  # a pass for each token, so that no later one can be seen
            before = torch.cat([torch.tensor([7]), tokens[row, :i]])[None]
            logits = model.states(before, 2)[0, -1] @ model.embedding.weight.T
            expected[row] += logits.log_softmax(-1)[tokens[row, i]]
    torch.testing.assert_close(model.log_likelihood(tokens, first=7), expected)


def test_order_matters() -> None:
    model = TransformerLM(SHAPE, torch.Generator().manual_seed(0))
    last = model.states(torch.tensor([[1, 2, 3, 4], [2, 1, 3, 4]]), 2)[:, -1]
    assert not torch.allclose(last[0], last[1], atol=1e-6)


def test_saved_and_opened_again(bpe: HuggingFaceTokenizer, tmp_path: Path) -> None:
    shape = TransformerShape(bpe.vocab_size, hidden=16, layers=2, heads=2, context=8)
    model = TransformerLM(shape, torch.Generator().manual_seed(3))
    save_teacher(tmp_path, model, bpe)
    teacher = open_teacher(str(tmp_path), device="cpu")
    assert (teacher.hidden_size, teacher.layers, teacher.vocab_size) == (16, 2, bpe.vocab_size)
    tokens = torch.tensor([[3, 1, 4]])
    for layer, index in ((-1, 2), (2, 2), (1, 1), (-3, 0)):
        assert torch.equal(teacher.embed(tokens, layer), model.states(tokens, index))
    assert torch.equal(teacher.embed(tokens, 0), model.embedding(tokens))
    assert torch.equal(teacher.head(), model.embedding.weight)
    assert not teacher.embed(tokens).requires_grad
    read = student_embeddings(teacher, bpe, tokens, align="read")
    predict = student_embeddings(teacher, bpe, tokens, align="predict")
    assert read.shape == (1, 3, 16)
    assert torch.equal(read[:, :-1], predict[:, 1:])  # what has read a token predicts the next

    random = [open_teacher(str(tmp_path), random=True, seed=seed, device="cpu").embed(tokens) for seed in (0, 0, 1)]
    assert torch.equal(random[0], random[1])
    assert not torch.equal(random[0], random[2]) and not torch.equal(random[0], teacher.embed(tokens))


def test_damaged_teachers(bpe: HuggingFaceTokenizer, tmp_path: Path) -> None:
    save_teacher(tmp_path, TransformerLM(TransformerShape(bpe.vocab_size, 4, 1, 1, 8)), bpe)
    config = json.loads((tmp_path / "config.json").read_text())

    def refused(match: str, **changes: object) -> None:
        (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
        with pytest.raises(InputError, match=match) as error:
            open_teacher(str(tmp_path))
        one_line(error)

    refused("has version 2", version=2)
    refused(r"tokenizer .* not the one", fingerprint="0")
    refused("truncated or of another model", hidden=8)
    refused("hidden is 0: it must be", hidden=0)
    (tmp_path / "model.safetensors").unlink()
    refused("has no weights: model.safetensors is missing")
    open_teacher(str(tmp_path), random=True)


# --- training it ----------------------------------------------------------------------------------------------------

TINY = TeacherConfig(
    model=TransformerConfig(hidden=32, layers=1, heads=2), length=16, batch_size=8, rate=0.01,
    train={"epochs": 4, "device": "cpu", "tensorboard": False},  # type: ignore[arg-type]
)  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("text"))


def given_data(config: TeacherConfig, corpus: Path, **train: object) -> TeacherConfig:
    return config.model_copy(update={"data": str(corpus), "train": config.train.model_copy(update=train)})


def test_a_teacher_learns_from_the_command_line(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "teacher"
    settings = ["--model.hidden", "32", "--model.layers", "1", "--model.heads", "2", "--length", "15",
                "--rate", "0.01", "--batch-size", "8", "--train.epochs", "6", "--train.device", "cpu",
                "--train.no-tensorboard"]  # fmt: skip
    assert main(["teacher", "--data", str(corpus), "--out", str(out), *settings]) == 0
    found = re.search(r"valid perplexity ([\d.]+) after", capsys.readouterr().out)
    assert found and 1.8 < float(found[1]) < 2.6  # 17 words; at best 2.0, plus what 30 lines of validation vary
    teacher = open_teacher(str(out), device="cpu")
    assert teacher.context == 16 and teacher.hidden_size == 32
    valid = [r for r in map(json.loads, (out / "history.jsonl").read_text().splitlines()) if r["event"] == "valid"]
    assert len(valid) == 6 and valid[-1]["perplexity"] < valid[0]["perplexity"]

    # the token files and the tokenizer of one run serve another
    again = tmp_path / "again"
    assert main(["teacher", "--data", str(out), "--out", str(again), *settings, "--train.epochs", "1"]) == 0
    assert not (again / "data").exists()
    assert open_teacher(str(again), device="cpu").tokenizer.pieces == teacher.tokenizer.pieces


def test_a_resumed_teacher_is_the_same(corpus: Path, tmp_path: Path) -> None:
    # at a constant rate: with cosine, a run that is made longer had other rates before
    schedule = TINY.schedule.model_copy(update={"kind": "constant", "warmup_fraction": 0.0})
    constant = TINY.model_copy(update={"schedule": schedule})
    straight = train_teacher(given_data(constant, corpus, epochs=2), tmp_path / "straight")
    train_teacher(given_data(constant, corpus, epochs=1), tmp_path / "resumed")
    resumed = train_teacher(given_data(constant, corpus, epochs=2), tmp_path / "resumed", resume=True)
    assert (resumed.steps, resumed.tokens) == (straight.steps, straight.tokens)
    first, second = (load_file(tmp_path / run / "last" / "state.safetensors") for run in ("straight", "resumed"))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_a_stopped_teacher_is_saved(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_after(3, monkeypatch)
    config = given_data(TINY, corpus)
    result = train_teacher(config, tmp_path)
    assert not result.finished and result.steps == 3
    monkeypatch.undo()
    state = json.loads((tmp_path / "last" / "state.json").read_text())
    state["teacher"] = state.pop("network")  # as runs of earlier versions have it
    (tmp_path / "last" / "state.json").write_text(json.dumps(state))
    assert train_teacher(config, tmp_path, resume=True).finished


def test_bad_runs_of_the_command(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failure = partial(commands.failure, capsys, "teacher")

    assert "hidden (30) must be a multiple" in failure("--model.hidden", "30")
    assert "no run to resume" in failure("--resume", str(tmp_path / "none"))
    assert "no corpus" in failure("--data", str(tmp_path / "none.txt"), "--out", str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()
    assert "is for hidden Markov models" in failure("--schedule.kind", "plateau")
    run = tmp_path / "run"
    train_teacher(given_data(TINY, corpus, epochs=1), run)
    assert "already holds a run" in failure("--data", str(corpus), "--out", str(run))
    assert "rate is not what the run" in failure("--resume", str(run), "--rate", "1")
    assert "leave out --out" in failure("--resume", str(run), "--out", str(run))
    assert "has its own tokenizer" in failure("--data", str(run), "--tokenizer.kind", "bpe")


# --- Hugging Face, where transformers is installed ------------------------------------------------------------------

if importlib.util.find_spec("transformers") is not None:
    import transformers

    def save_huggingface(folder: Path, kind: str) -> object:
        """A tiny model and a tokenizer of single words in a folder; the model."""
        words = ["[UNK]", "[CLS]", "[SEP]", "the", "cat", "sat", "dog"]
        tokenizer = word_level(words[3:])
        special = {"bos_token": "[CLS]"} if kind == "causal" else {"cls_token": "[CLS]", "sep_token": "[SEP]"}
        transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, unk_token="[UNK]", **special
        ).save_pretrained(folder)
        torch.manual_seed(5)
        model: transformers.PreTrainedModel
        if kind == "causal":
            config = transformers.LlamaConfig(
                vocab_size=9, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
                max_position_embeddings=16, tie_word_embeddings=False,
            )  # fmt: skip
            model = transformers.LlamaForCausalLM(config)
        else:
            model = transformers.BertForMaskedLM(
                transformers.BertConfig(
                    vocab_size=9, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
                    max_position_embeddings=16,
                )
            )  # fmt: skip
        model.eval().save_pretrained(folder)
        return model

    @pytest.mark.parametrize("kind", ["causal", "masked"])
    def test_states_of_a_hugging_face_model(kind: str, tmp_path: Path) -> None:
        model = save_huggingface(tmp_path, kind)
        teacher = open_teacher(str(tmp_path), device="cpu")
        assert (teacher.hidden_size, teacher.layers, teacher.context) == (8, 2, 16)
        tokens = torch.tensor([[3, 4, 5], [3, 6, -1]])
        with torch.no_grad():
            whole = model(input_ids=tokens[:1], output_hidden_states=True)  # type: ignore[operator]
            short = model(input_ids=tokens[1:, :2], output_hidden_states=True)  # type: ignore[operator]
        for layer in (-1, 1, 0):
            index = layer % 3
            torch.testing.assert_close(teacher.embed(tokens, layer)[:1], whole.hidden_states[index])
            # padding is not attended to, by a masked model neither
            torch.testing.assert_close(teacher.embed(tokens, layer)[1:, :2], short.hidden_states[index])
        torch.testing.assert_close(teacher.head(), model.get_output_embeddings().weight)  # type: ignore[attr-defined]

        student = WordTokenizer.train(["the cat sat"])
        chunk = torch.tensor([student.encode("the cat sat")])
        ids = [1, 3, 4, 5, *([2] if kind == "masked" else [])]
        expected = teacher.embed(torch.tensor([ids]))
        assert torch.equal(student_embeddings(teacher, student, chunk, align="read"), expected[:, 1:4])
        assert torch.equal(student_embeddings(teacher, student, chunk, align="predict"), expected[:, :3])
        with pytest.raises(InputError, match="no layer 3"):
            teacher.embed(chunk, 3)

    def test_a_random_hugging_face_model_needs_no_weights(tmp_path: Path) -> None:
        save_huggingface(tmp_path, "causal")
        tokens = torch.tensor([[3, 4, 5]])
        trained = open_teacher(str(tmp_path), device="cpu").embed(tokens)
        (tmp_path / "model.safetensors").unlink()
        with pytest.raises(InputError, match="has no weights"):
            open_teacher(str(tmp_path))
        state = torch.get_rng_state()
        first, again, other = (
            open_teacher(str(tmp_path), random=True, seed=seed, device="cpu").embed(tokens) for seed in (0, 0, 1)
        )
        assert torch.equal(state, torch.get_rng_state())  # nobody else's random numbers change
        assert torch.equal(first, again) and first.shape == trained.shape
        assert not torch.equal(first, other) and not torch.equal(first, trained)

    def test_damaged_hugging_face_folders(tmp_path: Path) -> None:
        save_huggingface(tmp_path, "causal")
        weights = (tmp_path / "model.safetensors").read_bytes()
        (tmp_path / "model.safetensors").write_bytes(weights[:100])
        with pytest.raises(InputError, match="cannot be loaded") as error:
            open_teacher(str(tmp_path))
        one_line(error)
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "model.safetensors").write_bytes(weights)
        (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
        with pytest.raises(InputError, match=r"lacks \d+ of its weights, such as .*layers\.2"):
            open_teacher(str(tmp_path))
        (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 4}))
        with pytest.raises(InputError, match="do not belong together"):
            open_teacher(str(tmp_path), random=True)


# --- runs as teachers, and the hub where there is none --------------------------------------------------------------


def test_a_run_without_a_teacher_yet_is_told_from_a_download(corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train_teacher(given_data(TINY, corpus, epochs=1), run)
    (run / "best").unlink()
    with pytest.raises(InputError, match=f"no validated weights yet: go on with `hmmlm teacher --resume {run}`"):
        open_teacher(str(run), device="cpu")
    fields = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**fields, "optimizer": {}}))
    with pytest.raises(InputError, match="is a run of `hmmlm train`"):
        open_teacher(str(run), device="cpu")


def test_a_teacher_is_not_trained_for_less_than_it_was(corpus: Path, tmp_path: Path) -> None:
    train_teacher(given_data(TINY, corpus, epochs=2), tmp_path)
    saved = (tmp_path / "config.json").read_bytes()
    with pytest.raises(InputError, match=r"has gone further already \(.* epoch 2\)"):
        train_teacher(given_data(TINY, corpus, epochs=1), tmp_path, resume=True)
    assert (tmp_path / "config.json").read_bytes() == saved


def test_the_hub_is_asked_once_and_the_cache_taken_where_it_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    from hmmlm.initialization.huggingface import _reach

    asked: list[str] = []

    def unreachable(name: str, timeout: float) -> None:
        asked.append(name)
        raise ConnectionError("Name or service not known\nand more")

    monkeypatch.setattr(huggingface_hub, "model_info", unreachable)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file: None)
    with pytest.raises(InputError, match=r"no teacher x/y: .* the hub cannot be asked \(Name or service not known\)"):
        _reach("x/y", "config.json")
    assert asked == ["x/y"]
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file: f"/cache/{file}")
    assert _reach("x/y", "config.json") == {"local_files_only": True}
    monkeypatch.setattr(huggingface_hub, "model_info", lambda name, timeout: None)
    assert _reach("x/y", "config.json") == {}
