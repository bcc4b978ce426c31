"""Tokenizers: round trips, vocabularies, and files that are not what they should be."""

from __future__ import annotations

import io
import json
from collections import Counter
from functools import cache
from pathlib import Path

import huggingface_hub
import pytest
import sentencepiece
import tokenizers
from helpers.commands import failure
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, processors

from hmmlm.cli.main import main
from hmmlm.data.tokenizers import (
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    WordTokenizer,
    find_tokenizer,
    load_tokenizer,
)
from hmmlm.data.words import drop_rare
from hmmlm.errors import InputError

LINES = [
    "the cat sat on the mat .",
    "the dog sat on the log .",
    "a naïve cat , a café , and the dog saw the mat",
    "where is the cat ? the cat is on the log !",
]


def sentencepiece_model(**options: object) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES * 5),
        model_writer=model,
        vocab_size=60,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    return model.getvalue()


@pytest.fixture(scope="module")
def all_kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    path = tmp_path_factory.mktemp("sentencepiece") / "some.model"
    path.write_bytes(sentencepiece_model())
    return {
        "word": WordTokenizer.train(LINES),
        "huggingface": HuggingFaceTokenizer.train(LINES * 5, 300),
        "char": HuggingFaceTokenizer.train(LINES, None),
        "sentencepiece": SentencePieceTokenizer(path),
    }


@pytest.mark.parametrize("kind", ["word", "huggingface", "char", "sentencepiece"])
def test_every_kind_follows_the_protocol(all_kinds: dict[str, Tokenizer], kind: str, tmp_path: Path) -> None:
    tokenizer = all_kinds[kind]
    assert tokenizer.kind == kind
    for line in LINES:
        ids = tokenizer.encode(line)
        assert tokenizer.decode(ids) == line
        assert all(0 <= i < tokenizer.vocab_size for i in ids)
        assert tokenizer.eos_id not in ids
        spans = tokenizer.spans(line)
        assert len(spans) == len(ids) and all(0 <= a <= b <= len(line) for a, b in spans)
        assert "".join(line[a:b] for a, b in spans).replace(" ", "") == line.replace(" ", "")
    both = [*tokenizer.encode(LINES[0]), tokenizer.eos_id, *tokenizer.encode(LINES[1])]
    assert tokenizer.decode(both) == f"{LINES[0]}\n{LINES[1]}"
    assert tokenizer.encode("") == [] and tokenizer.decode([]) == ""
    shown = [tokenizer.token(i) for i in range(tokenizer.vocab_size)]
    assert {"the", "▁the"} & set(shown) if kind != "char" else {"▁", "ï"} <= set(shown)
    for bad in (tokenizer.vocab_size, -1):
        for call in (tokenizer.token, lambda i: tokenizer.decode([i])):
            with pytest.raises(InputError, match=f"token {bad} is outside the vocabulary of {tokenizer.vocab_size}"):
                call(bad)
    tokenizer.save(tmp_path / "new")
    again = load_tokenizer(tmp_path / "new")
    assert again.kind == kind
    assert again.fingerprint() == tokenizer.fingerprint() and len(again.fingerprint()) == 16
    assert (again.vocab_size, again.eos_id, again.unk_id) == (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.unk_id)
    assert [again.encode(line) for line in LINES] == [tokenizer.encode(line) for line in LINES]


def test_tokenizers_have_different_fingerprints(all_kinds: dict[str, Tokenizer]) -> None:
    others = [
        WordTokenizer.train(LINES[:2]),
        WordTokenizer.train(LINES, split="words"),
        WordTokenizer.train(LINES, lowercase=True),
        HuggingFaceTokenizer.train(LINES * 5, 110),
    ]
    prints = [tokenizer.fingerprint() for tokenizer in [*all_kinds.values(), *others]]
    assert len(set(prints)) == len(prints)


def test_words_are_ranked_by_count_then_alphabet_and_the_vocabulary_is_cut() -> None:
    lines = ["b a c c <unk> <unk> <unk>", "c b a d"]
    assert WordTokenizer.train(lines).words == ["<unk>", "<eos>", "c", "a", "b", "d"]
    assert WordTokenizer.train(reversed(lines), 4).words == ["<unk>", "<eos>", "c", "a"]
    assert WordTokenizer.train(lines, None, 2).words == ["<unk>", "<eos>", "c", "a", "b"]


def test_words_seen_once_become_unk_unless_the_text_has_unk() -> None:
    assert WordTokenizer.train(["b a c", "b a"], None, None).words == ["<unk>", "<eos>", "a", "b"]
    assert WordTokenizer.train(["b a c", "b a <unk>"], None, None).words == ["<unk>", "<eos>", "a", "b", "c"]


def test_unknown_words_and_the_unk_of_the_text_are_the_same() -> None:
    for split in ("whitespace", "words"):
        tokenizer = WordTokenizer.train(["a <unk> b"], split=split)
        assert tokenizer.vocab_size == 4
        assert tokenizer.encode("a <unk> zebra b") == [2, 0, 0, 3]
        assert tokenizer.unk_id == 0 and tokenizer.eos_id == 1


def test_punctuation_is_split_off_and_put_back() -> None:
    text = 'He said "go away" (twice), didn\'t he? See os.path [1]: 3.14 or 1,000; read-only… `x`, and/or "y". Fine!'
    tokenizer = WordTokenizer.train([text], split="words")
    words = [tokenizer.token(i) for i in tokenizer.encode(text)]
    for word in ("away", '"', "(", ")", "didn't", "?", "os.path", "3.14", "1,000", "read-only", "Fine", "!"):
        assert word in words
    assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="ab1.,'\"()[]-_/ …<>:!`", max_size=30))
def test_decoded_text_has_the_same_characters(text: str) -> None:
    tokenizer = WordTokenizer.train([text, "a"], split="words")
    decoded = tokenizer.decode(tokenizer.encode(text))
    assert "".join(decoded.split()) == "".join(text.split())


def test_the_spaces_of_a_text_are_given_back(tmp_path: Path) -> None:
    lines = ["red,S,1", "blue,M,2", "a == b ; (c) ; d", "x – y"]
    tokenizer = WordTokenizer.train(lines, split="words")
    tokenizer.save(tmp_path)
    for each in (tokenizer, load_tokenizer(tmp_path)):
        assert [each.decode(each.encode(line)) for line in lines[:2]] == lines[:2]
        assert (
            each.decode(each.encode(lines[2])).endswith("b ; (c) ; d") and each.decode(each.encode("x – y")) == "x – y"
        )
        assert each.spacing == tokenizer.spacing
    assert tokenizer.fingerprint() == WordTokenizer(tokenizer.words, "words").fingerprint()  # the ids are the same


def test_lowercase() -> None:
    tokenizer = WordTokenizer.train(["The CAT"], lowercase=True)
    assert tokenizer.words[2:] == ["cat", "the"]
    assert tokenizer.decode(tokenizer.encode("THE Cat")) == "the cat"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\n"), max_size=30), min_size=1, max_size=5))
def test_characters_and_their_pairs_give_back_every_line(lines: list[str]) -> None:
    for tokenizer in (HuggingFaceTokenizer.train(lines, None), HuggingFaceTokenizer.train(lines * 5, 10_000)):
        for line in lines:
            ids = tokenizer.encode(line)
            assert tokenizer.decode(ids) == line and not {tokenizer.unk_id, tokenizer.eos_id} & {*ids}


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(2, 109), max_size=30))
def test_any_tokens_are_one_line_of_text(ids: list[int]) -> None:
    text = _bpe().decode(ids)
    assert "\ufffd" not in text and "\n" not in text
    assert b"".join(spelling for id in ids if (spelling := _bpe().spell(id))).decode() == text


@cache
def _bpe() -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer.train(LINES * 5, 110)


def test_a_small_text_has_a_small_vocabulary() -> None:
    assert HuggingFaceTokenizer.train(LINES, 10_000).vocab_size < 110
    assert HuggingFaceTokenizer.train(LINES * 5, 10_000).vocab_size > 120


def test_eos_written_in_a_text_is_text() -> None:
    tokenizer = _bpe()
    assert tokenizer.eos_id not in tokenizer.encode("a <eos> b")


def foreign(specials: list[str]) -> tokenizers.Tokenizer:
    """Return a tokenizer that truncates, pads and adds tokens, as a tokenizer.json of others may."""
    words = {"[UNK]": 0, "the": 1, "cat": 2, **{special: 3 + i for i, special in enumerate(specials)}}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=4)
    tokenizer.post_processor = processors.TemplateProcessing(single="the $A", special_tokens=[("the", 1)])
    return tokenizer


@pytest.mark.parametrize(("specials", "eos"), [(["</s>"], "</s>"), (["<|endoftext|>"], "<|endoftext|>"), ([], "<eos>")])
def test_any_tokenizer_json(tmp_path: Path, specials: list[str], eos: str) -> None:
    foreign(specials).save(str(tmp_path / "tokenizer.json"))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        tokenizer = load_tokenizer(path)
        assert tokenizer.encode("the cat cat zebra cat") == [1, 2, 2, 0, 2]
        assert (tokenizer.unk_id, tokenizer.eos_id, tokenizer.vocab_size) == (0, 3, 4)
        assert tokenizer.token(3) == eos
    tokenizer.save(tmp_path)
    assert load_tokenizer(tmp_path).vocab_size == 4


def test_too_small_or_empty_vocabularies() -> None:
    least = 2 + len({*map(chr, range(32, 127)), *"".join(LINES)})
    with pytest.raises(InputError, match=f"too small for the characters of the text: use {least} or more"):
        HuggingFaceTokenizer.train(LINES, least - 1)
    assert HuggingFaceTokenizer.train(LINES, least).vocab_size == least
    with pytest.raises(InputError, match="no room for a word"):
        WordTokenizer.train(LINES, 2)
    with pytest.raises(InputError, match="has no words"):
        WordTokenizer.train(["", "  "])
    with pytest.raises(InputError, match="unknown split 'letters'"):
        WordTokenizer.train(LINES, split="letters")


def test_files_that_are_not_tokenizers_are_refused(tmp_path: Path) -> None:
    def refused(message: str, content: bytes, name: str = "tokenizer.json") -> None:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=message) as caught:
            load_tokenizer(tmp_path)
        assert "\n" not in str(caught.value)
        (tmp_path / name).unlink()

    with pytest.raises(InputError, match=r"no tokenizer in .*: it should contain tokenizer.json or tokenizer.model"):
        load_tokenizer(tmp_path)
    with pytest.raises(InputError, match=r"no tokenizer at .*nowhere"):
        load_tokenizer(tmp_path / "nowhere")
    WordTokenizer.train(LINES).save(tmp_path)
    whole = (tmp_path / "tokenizer.json").read_bytes()
    content = json.loads(whole)
    refused("is truncated or not JSON", whole[:-10])
    refused("is truncated or not JSON", b"\xff\xfe")
    refused("neither a word vocabulary of hmmlm nor", b'{"a": 1}')
    refused("not a Hugging Face tokenizer that this version reads", b'{"model": {"type": "Unheard"}}')
    refused("has version 9; this hmmlm reads 1", json.dumps({**content, "version": 9}).encode())
    refused("words are not a list of strings", json.dumps({**content, "words": [1]}).encode())
    refused("contains 'cat' twice", json.dumps({**content, "words": [*content["words"], "cat"]}).encode())
    refused("has no <eos>", json.dumps({**content, "words": ["<unk>", "a"]}).encode())
    refused("unknown split ''", json.dumps({**content, "split": ""}).encode())
    model = sentencepiece_model()
    refused("not a complete sentencepiece model", model[: len(model) // 2], "tokenizer.model")
    refused("not a complete sentencepiece model", b"", "tokenizer.model")
    refused("has no end-of-sentence piece", sentencepiece_model(eos_id=-1), "tokenizer.model")


def test_two_kinds_are_not_saved_into_one_folder(all_kinds: dict[str, Tokenizer], tmp_path: Path) -> None:
    all_kinds["word"].save(tmp_path)
    with pytest.raises(InputError, match="already contains another tokenizer"):
        all_kinds["sentencepiece"].save(tmp_path)
    assert load_tokenizer(tmp_path).kind == "word"


def test_a_tokenizer_by_its_name_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer = HuggingFaceTokenizer.train(LINES, 300)
    tokenizer.save(tmp_path / "cache")
    cached: dict[str, str] = {}
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file: cached.get(f"{name}/{file}"))

    def offline(*args: object, **options: object) -> None:
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr(huggingface_hub, "model_info", offline)
    (tmp_path / "text.txt").write_text("\n".join(LINES * 9))
    argv = ["data", "text.txt", "--out", "tokens", "--tokenizer.kind", "file", "--tokenizer.file", "owner/name"]
    error = failure(capsys, *argv)
    assert "no tokenizer owner/name" in error and "no route to the hub" in error and "check the name" in error
    cached["owner/name/tokenizer.json"] = str(tmp_path / "cache" / "tokenizer.json")
    assert find_tokenizer(Path("owner/name")).fingerprint() == tokenizer.fingerprint()
    assert main(argv) == 0
    assert load_tokenizer(Path("tokens/tokenizer")).fingerprint() == tokenizer.fingerprint()
    with pytest.raises(
        InputError, match=r"no tokenizer at missing/tokenizer\.json"
    ):  # a path, which no hub is asked for
        find_tokenizer(Path("missing/tokenizer.json"))


def test_an_end_token_of_another_name_is_saved(tmp_path: Path) -> None:
    plain = HuggingFaceTokenizer.train(["the cat sat on the mat"], 270)
    backend = tokenizers.Tokenizer.from_str(plain._tokenizer.to_str())
    backend.add_special_tokens(["<|im_end|>"])
    tokenizer = HuggingFaceTokenizer(backend, "<|im_end|>")
    assert tokenizer.eos_id == plain.vocab_size != plain.eos_id
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert (loaded.eos_id, loaded.fingerprint()) == (tokenizer.eos_id, tokenizer.fingerprint())
    (tmp_path / "eos.json").write_text('{"eos_token": "<no>"}')
    with pytest.raises(InputError, match="'<no>' is not in the vocabulary"):
        load_tokenizer(tmp_path)
    # The usual name needs no file.
    HuggingFaceTokenizer(tokenizers.Tokenizer.from_str(plain._tokenizer.to_str()), "<eos>").save(tmp_path / "usual")
    assert not (tmp_path / "usual" / "eos.json").exists()


def test_spans_are_those_of_the_text_as_it_is_written() -> None:
    text = "The İstanbul CAT, ok"
    tokenizer = WordTokenizer(["<unk>", "<eos>", "the", "cat"], "words", lowercase=True)
    assert next(text[a:b] for a, b in tokenizer.spans(text)) == "The"
    assert [text[a:b] for a, b in tokenizer.spans(text)][-3:] == ["CAT", ",", "ok"]
    assert len(tokenizer.spans(text)) == len(tokenizer.encode(text))


def test_the_rarest_words_of_a_very_large_text_are_not_counted() -> None:
    counts: Counter[str] = Counter()
    for i in range(1000):
        counts.update(["the", "cat", "<unk>", f"rare{i}"])
        drop_rare(counts, 100)
        assert len(counts) <= 100
    assert WordTokenizer.from_counts(counts, 5, 2).words == ["<unk>", "<eos>", "cat", "the"]
