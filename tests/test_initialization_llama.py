"""Llamas in our own decoder: the states that transformers gives, from folders and GGUF files, and what is refused."""

from __future__ import annotations

import importlib.util
import io
import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hmmlm.cli.main import main
from hmmlm.data.tokenizer import SentencePieceTokenizer
from hmmlm.errors import InputError
from hmmlm.initialization.alignment import same_tokens
from hmmlm.initialization.decoder import DecoderTeacher
from hmmlm.initialization.llama import Llama, LlamaShape, llama_folder, save_llama
from hmmlm.initialization.offsets import FastTokenizer
from hmmlm.initialization.teacher import open_teacher
from hmmlm.initialization.transfer import PretrainedStack, from_pretrained

LINES = ["the cat sat on the mat .", "the dog (not the cat) sat.", "naïve cats — “quoted” 😀 dogs!"]


def sentencepiece_model(path: Path) -> Path:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES[:2] * 20), model_writer=model, vocab_size=290, model_type="bpe",
        byte_fallback=True, minloglevel=2, hard_vocab_limit=False, normalization_rule_name="identity",
        remove_extra_whitespaces=False,
    )  # fmt: skip
    path.write_bytes(model.getvalue())
    return path


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sentencepiece_model(tmp_path_factory.mktemp("pieces") / "tokenizer.model")


def shape_of(vocab_size: int, tied: bool = False) -> LlamaShape:
    return LlamaShape(
        vocab_size=vocab_size, hidden=16, inner=24, layers=2, heads=4, pairs=2, context=32, base=5000.0, eps=1e-5,
        tied=tied, first=1,
    )  # fmt: skip


def made(pieces: Path, tied: bool = False, seed: int = 0) -> DecoderTeacher:
    """A Llama with weights large enough for every part of it to matter."""
    tokenizer = FastTokenizer.from_sentencepiece(pieces, 1)
    torch.manual_seed(seed)
    model = Llama(shape_of(len(tokenizer.pieces), tied))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((0.5 * torch.randn(parameter.shape) + (parameter.dim() == 1)).half())
    return DecoderTeacher("made", model, tokenizer, 32, torch.device("cpu"))


TOKENS = torch.tensor([[1, 5, 260, 7, 3, 280], [1, 200, 201, 9, -1, -1]])


# --- tokenizers ---


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet="thecatsodgm .()\n😀ï—", max_size=30) | st.sampled_from(LINES))
def test_pieces_are_joined_as_sentencepiece_does(pieces: Path, text: str) -> None:
    fast, own = FastTokenizer.from_sentencepiece(pieces, 1), SentencePieceTokenizer(pieces)
    encoding = fast.encode_batch([text])[0]
    assert encoding.ids.tolist() == own.encode(text)
    covered = {place for begin, end in encoding.spans.tolist() for place in range(begin, end)}
    assert covered == set(range(len(text)))


def test_special_pieces_in_a_text_are_text(pieces: Path) -> None:
    fast, own = FastTokenizer.from_sentencepiece(pieces, 1), SentencePieceTokenizer(pieces)
    assert same_tokens(fast, own)
    ids = fast.encode_batch(["</s> <s>"])[0].ids.tolist()
    assert ids == own.encode("</s> <s>") and not {1, 2} & set(ids)
    (pieces.parent / "broken.model").write_bytes(b"not a model")
    with pytest.raises(InputError, match=r"broken\.model is not a whole sentencepiece model"):
        FastTokenizer.from_sentencepiece(pieces.parent / "broken.model", 1)


# --- folders ---


@pytest.mark.parametrize("tied", [False, True])
def test_saved_and_opened_again_without_transformers(
    tied: bool, pieces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = made(pieces, tied)
    save_llama(tmp_path, teacher)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    again = open_teacher(str(tmp_path), device="cpu")
    assert (again.hidden_size, again.layers, again.vocab_size, again.context) == (16, 2, 290, 32)
    for layer in range(3):
        assert torch.equal(again.embed(TOKENS, layer), teacher.embed(TOKENS, layer))
    assert torch.equal(again.head(), teacher.head())
    assert torch.equal(again.head(), again.embed(torch.arange(290)[None], 0)[0]) is tied
    assert again.tokenizer.before == 1 and list(again.tokenizer.pieces) == list(teacher.tokenizer.pieces)
    ids, expected = (tokenizer.encode_batch(LINES[2:])[0].ids for tokenizer in (again.tokenizer, teacher.tokenizer))
    assert ids.tolist() == expected.tolist()
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.model").write_bytes(pieces.read_bytes())  # as Llama's folders have it
    assert list(open_teacher(str(tmp_path), device="cpu").tokenizer.pieces) == list(teacher.tokenizer.pieces)


def test_random_weights(pieces: Path, tmp_path: Path) -> None:
    save_llama(tmp_path, made(pieces))
    first, again, other = (
        open_teacher(str(tmp_path), random=True, seed=seed, device="cpu").embed(TOKENS[:1]) for seed in (0, 0, 1)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_what_is_read_before_matters_and_what_comes_after_does_not(pieces: Path) -> None:
    teacher = made(pieces)
    states = teacher.embed(TOKENS[:1])
    changed = TOKENS[:1].clone()
    changed[0, 3] = 11
    other = teacher.embed(changed)
    assert torch.equal(states[:, :3], other[:, :3]) and not torch.allclose(states[:, 4:], other[:, 4:])
    swapped = teacher.embed(TOKENS[:1, [0, 2, 1, 3, 4, 5]])  # positions count, not only which tokens there are
    assert not torch.allclose(swapped[:, 3:], states[:, 3:], atol=1e-3)


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "mistral"}, {"attention_bias": True}, {"head_dim": 8}, {"hidden_act": "gelu"},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, {"quantization_config": {"bits": 4}},
    ],
)  # fmt: skip
def test_what_is_no_plain_llama_is_left_to_transformers(change: dict[str, Any], pieces: Path, tmp_path: Path) -> None:
    save_llama(tmp_path, made(pieces))
    assert llama_folder(tmp_path) is not None
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    assert llama_folder(tmp_path) is None


def test_damaged_folders(pieces: Path, tmp_path: Path) -> None:
    save_llama(tmp_path, made(pieces))

    def refused(match: str) -> None:
        with pytest.raises(InputError, match=match) as error:
            open_teacher(str(tmp_path), device="cpu")
        assert "\n" not in str(error.value)

    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 32}))
    refused(r"model.layers.0.mlp.gate_proj.weight has the shape \[24, 16\], and by its configuration \[32, 16\]")
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    refused(r"lacks 9 of its weights, such as model\.layers\.2\.self_attn\.o_proj\.weight")
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text("{")
    refused("tokenizer.json is not a whole tokenizer.json")
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.model").write_bytes(pieces.read_bytes())
    weights = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[:200])
    refused("cannot be loaded: model.safetensors")


def test_as_a_parameterization(pieces: Path) -> None:
    teacher = made(pieces)
    vectors, expected = teacher.model.embedding(TOKENS[:1]), teacher.embed(TOKENS[:1])
    stack = PretrainedStack(teacher.model)
    torch.testing.assert_close(stack(vectors), expected)
    assert stack.graphable and not any("embedding" in name or "head" in name for name, _ in stack.named_parameters())
    model = from_pretrained(made(pieces), 40, 12, torch.Generator().manual_seed(0))
    hmm = model()
    hmm.validate()
    hmm.log_likelihood(torch.tensor([[1, 5, 3]])).sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


if importlib.util.find_spec("transformers") is not None:

    @pytest.mark.parametrize("tied", [False, True])
    def test_transformers_gives_the_same_states(tied: bool, pieces: Path, tmp_path: Path) -> None:
        import transformers

        save_llama(tmp_path, made(pieces, tied))
        teacher = open_teacher(str(tmp_path), device="cpu")
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
        with torch.no_grad():
            result = model(TOKENS[:1], output_hidden_states=True)
        for layer in range(3):
            torch.testing.assert_close(teacher.embed(TOKENS[:1], layer), result.hidden_states[layer])
        torch.testing.assert_close(teacher.embed(TOKENS[:1])[0] @ teacher.head().T, result.logits[0])
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
        assert tokenizer.bos_token_id == 1
        assert tokenizer(LINES[0], add_special_tokens=False).input_ids == (
            teacher.tokenizer.encode_batch([LINES[0]])[0].ids.tolist()
        )


# --- GGUF ---

if importlib.util.find_spec("gguf") is not None:
    import gguf

    from hmmlm.initialization.llama import _foreign_name, llama_gguf

    def write_gguf(path: Path, teacher: DecoderTeacher, pieces: Path, **fields: Any) -> None:
        """As llama.cpp writes it: the halves of each head of queries and keys interleaved."""
        model = teacher.model
        assert isinstance(model, Llama)
        shape, writer = model.shape, gguf.GGUFWriter(path, fields.pop("architecture", "llama"))
        writer.add_context_length(shape.context)
        writer.add_embedding_length(shape.hidden)
        writer.add_block_count(shape.layers)
        writer.add_feed_forward_length(shape.inner)
        writer.add_head_count(shape.heads)
        writer.add_head_count_kv(shape.pairs)
        writer.add_rope_dimension_count(shape.head_size)
        writer.add_rope_freq_base(shape.base)
        writer.add_layer_norm_rms_eps(shape.eps)
        writer.add_tokenizer_model(fields.pop("tokenizer", "llama"))
        own = sentencepiece.SentencePieceProcessor(model_file=str(pieces))
        ids = range(own.vocab_size())
        writer.add_token_list([own.id_to_piece(i) for i in ids])
        writer.add_token_scores([own.get_score(i) for i in ids])
        kinds = [2 if own.is_unknown(i) else 3 if own.is_control(i) else 6 if own.is_byte(i) else 1 for i in ids]
        writer.add_token_types(kinds)
        writer.add_bos_token_id(1)
        assert not fields
        for key, tensor in model.state_dict().items():
            if ".queries." in key or ".keys." in key:
                tensor = tensor.unflatten(0, (-1, 2, shape.head_size // 2)).transpose(1, 2).flatten(0, 2)
            writer.add_tensor(_foreign_name(key, 1), tensor.contiguous().numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    @pytest.mark.parametrize("tied", [False, True])
    def test_a_gguf_file(tied: bool, pieces: Path, tmp_path: Path) -> None:
        teacher = made(pieces, tied)
        write_gguf(tmp_path / "model.gguf", teacher, pieces)
        again = open_teacher(str(tmp_path / "model.gguf"), device="cpu")
        assert isinstance(again, DecoderTeacher) and again.context == 32 and again.tokenizer.before == 1
        for layer in range(3):
            torch.testing.assert_close(again.embed(TOKENS, layer), teacher.embed(TOKENS, layer))
        torch.testing.assert_close(again.head(), teacher.head())
        assert same_tokens(again.tokenizer, SentencePieceTokenizer(pieces))
        expected = teacher.tokenizer.encode_batch([LINES[1]])[0].ids.tolist()
        assert again.tokenizer.encode_batch([LINES[1]])[0].ids.tolist() == expected

    def test_other_gguf_files(pieces: Path, tmp_path: Path) -> None:
        path = tmp_path / "model.gguf"
        write_gguf(path, made(pieces), pieces, architecture="gpt2")
        assert llama_gguf(path) is None
        write_gguf(path, made(pieces), pieces, tokenizer="gpt2")
        found = llama_gguf(path)
        assert found is not None and found.tokenizer is None  # byte pairs of another kind, which the file does not say
        beside = FastTokenizer.from_sentencepiece(pieces, 1)
        beside.save(tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json")
        found = llama_gguf(path)
        assert found is not None and found.tokenizer is not None
        path.write_bytes(path.read_bytes()[:500])
        with pytest.raises(InputError, match="no whole GGUF file") as error:
            open_teacher(str(path), device="cpu")
        assert "\n" not in str(error.value)

    def test_converted_by_the_command(pieces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        teacher, source, out = made(pieces), tmp_path / "model.gguf", tmp_path / "folder"
        write_gguf(source, teacher, pieces)
        assert main(["teacher", "--convert", str(source)]) == 2
        assert "--convert needs a folder" in capsys.readouterr().err
        assert main(["teacher", "--convert", str(source), "--out", str(out)]) == 0
        torch.testing.assert_close(open_teacher(str(out), device="cpu").embed(TOKENS), teacher.embed(TOKENS))
