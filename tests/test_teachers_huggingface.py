"""Hugging Face teachers: embeddings are those of transformers, and damaged folders are refused in one line."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.teachers import LINES, word_level, write_sentencepiece

from hmmlm.data.tokenizers import SentencePieceTokenizer, WordTokenizer
from hmmlm.errors import InputError
from hmmlm.teachers.alignment import same_tokens
from hmmlm.teachers.embeddings import student_embeddings
from hmmlm.teachers.teacher import open_teacher

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="the extra `teacher` is not installed")

SIZES = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def save_model(folder: Path, kind: str) -> Any:
    """Write a tiny model with a tokenizer of single words into a folder and return the model."""
    import transformers

    words = word_level(["the", "cat", "sat", "dog"])
    special = {"bos_token": "[CLS]"} if kind == "causal" else {"cls_token": "[CLS]", "sep_token": "[SEP]"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", **special)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(5)
    if kind == "causal":
        config = transformers.LlamaConfig(vocab_size=9, max_position_embeddings=16, tie_word_embeddings=False, **SIZES)
        model = transformers.LlamaForCausalLM(config)
    else:
        model = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=9, max_position_embeddings=16, **SIZES))
    model.eval().save_pretrained(folder)
    return model


def refused(folder: Path, match: str, **arguments: Any) -> None:
    with pytest.raises(InputError, match=match) as error:
        open_teacher(str(folder), device="cpu", **arguments)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["causal", "masked"])
def test_embeddings_of_a_model(kind: str, tmp_path: Path) -> None:
    model = save_model(tmp_path, kind)
    teacher = open_teacher(str(tmp_path), device="cpu")
    assert (teacher.hidden_size, teacher.layers, teacher.context) == (8, 2, 16)
    tokens = torch.tensor([[3, 4, 5], [3, 6, -1]])
    with torch.no_grad():
        whole = model(input_ids=tokens[:1], output_hidden_states=True)
        short = model(input_ids=tokens[1:, :2], output_hidden_states=True)
    for layer in (-1, 1, 0):
        index = layer % 3
        torch.testing.assert_close(teacher.embed(tokens, layer)[:1], whole.hidden_states[index])
        # padding is not attended to, not even by a masked model
        torch.testing.assert_close(teacher.embed(tokens, layer)[1:, :2], short.hidden_states[index])
    torch.testing.assert_close(teacher.head(), model.get_output_embeddings().weight)

    student = WordTokenizer.train(["the cat sat"])
    chunk = torch.tensor([student.encode("the cat sat")])
    ids = [1, 3, 4, 5, *([2] if kind == "masked" else [])]
    expected = teacher.embed(torch.tensor([ids]))
    assert torch.equal(student_embeddings(teacher, student, chunk, align="read"), expected[:, 1:4])
    assert torch.equal(student_embeddings(teacher, student, chunk, align="predict"), expected[:, :3])
    with pytest.raises(InputError, match="no layer 3"):
        teacher.embed(chunk, 3)


def test_random_weights_need_no_weights(tmp_path: Path) -> None:
    save_model(tmp_path, "causal")
    tokens = torch.tensor([[3, 4, 5]])
    trained = open_teacher(str(tmp_path), device="cpu").embed(tokens)
    (tmp_path / "model.safetensors").unlink()
    refused(tmp_path, "has no weights")
    state = torch.get_rng_state()
    first, again, other = (
        open_teacher(str(tmp_path), random=True, seed=seed, device="cpu").embed(tokens) for seed in (0, 0, 1)
    )
    assert torch.equal(state, torch.get_rng_state())  # the global generator is not advanced
    assert torch.equal(first, again) and first.shape == trained.shape
    assert not torch.equal(first, other) and not torch.equal(first, trained)


def test_damaged_folders(tmp_path: Path) -> None:
    save_model(tmp_path, "causal")
    config = json.loads((tmp_path / "config.json").read_text())

    def with_config(**changes: Any) -> None:
        (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))

    with_config(num_hidden_layers=3)
    refused(tmp_path, r"lacks 9 of its weights, such as model\.layers\.2\.")
    with_config(intermediate_size=32)
    refused(
        tmp_path, r"model.layers.0.mlp.down_proj.weight has the shape \[8, 16\], and by its configuration \[8, 32\]"
    )
    with_config(vocab_size=4)
    refused(tmp_path, "has 7 tokens and its network only 4", random=True)
    with_config()
    weights = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[:100])
    refused(tmp_path, r"the network of the teacher .* cannot be loaded \(.*header.*\): check the files")
    (tmp_path / "model.safetensors").write_bytes(weights)
    (tmp_path / "tokenizer.json").write_text("{")
    refused(tmp_path, "the tokenizer of the teacher .* cannot be loaded")
    (tmp_path / "config.json").write_text("{")
    refused(tmp_path, r"the configuration of the teacher .* cannot be loaded .*config\.json")


def test_weights_that_are_not_numbers_are_refused(tmp_path: Path) -> None:
    model = save_model(tmp_path, "causal")
    with torch.no_grad():
        model.get_input_embeddings().weight[1, 2] = torch.nan
    model.save_pretrained(tmp_path)
    refused(tmp_path, r"model\.embed_tokens\.weight contains NaN or infinite values")


def test_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    from transformers import T5Config

    save_model(tmp_path, "causal")
    T5Config(vocab_size=9, d_model=8, d_ff=16, num_layers=1, num_heads=2).save_pretrained(tmp_path)
    refused(tmp_path, "is an encoder-decoder: use a causal or a masked language model")


def test_a_llama_folder_with_tokenizer_model_only(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    pieces = write_sentencepiece(tmp_path / "tokenizer.model")
    own = SentencePieceTokenizer(pieces)
    config = LlamaConfig(vocab_size=own.vocab_size, bos_token_id=1, **SIZES)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    tokenizer = open_teacher(str(tmp_path), device="cpu").tokenizer
    assert tokenizer.prefix_id == 1 and same_tokens(tokenizer, own)  # type: ignore[arg-type] # no __hash__ declared
    special = "</s> <s>"  # in a corpus these are text
    for text in [*LINES, special, "the cat\nsat"]:
        (encoding,) = tokenizer.encode_batch([text])
        assert encoding.ids.tolist() == own.encode(text)
        covered = {place for begin, end in encoding.spans.tolist() for place in range(begin, end)}
        assert covered == set(range(len(text)))
    pieces.write_bytes(b"not a model")
    refused(tmp_path, r"tokenizer\.model is not a .*sentencepiece model")
