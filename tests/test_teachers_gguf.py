"""GGUF teachers: the embeddings of the network that was written, its tokenizer, and `hmmlm teacher --convert`."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
from helpers import commands
from helpers.teachers import LINES, write_sentencepiece

from hmmlm.cli.main import main
from hmmlm.data.tokenizers import SentencePieceTokenizer
from hmmlm.distillation.transfer import from_pretrained
from hmmlm.errors import InputError
from hmmlm.teachers.alignment import same_tokens
from hmmlm.teachers.teacher import Teacher, open_teacher

pytestmark = pytest.mark.skipif(
    not all(map(find_spec, ("transformers", "gguf", "accelerate"))), reason="the extra `teacher` is not installed"
)

TOKENS = torch.tensor([[1, 5, 260, 7, 3, 280], [1, 200, 201, 9, 4, 4]])
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Hugging Face's and GGUF's names of a Llama's weights."""


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sentencepiece(tmp_path_factory.mktemp("pieces") / "tokenizer.model")


def tiny_llama(pieces: Path, tied: bool = False) -> Any:
    """Return a Llama with float16 weights that are large enough for every part of it to matter."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=SentencePieceTokenizer(pieces).vocab_size,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((0.5 * torch.randn(parameter.shape) + (parameter.dim() == 1)).half())
    return model


def write_gguf(path: Path, model: Any, pieces: Path) -> None:
    """Write a GGUF file like llama.cpp, which interleaves the halves of each head of queries and keys."""
    from gguf import GGUFWriter

    config, writer = model.config, GGUFWriter(path, "llama")
    head_size = config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(head_size)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(pieces))
    ids = range(processor.vocab_size())
    writer.add_tokenizer_model("llama")
    writer.add_token_list([processor.id_to_piece(i) for i in ids])
    writer.add_token_scores([processor.get_score(i) for i in ids])
    types = (processor.is_unknown, processor.is_control, processor.is_byte)
    writer.add_token_types([next((kind for is_, kind in zip(types, (2, 3, 6), strict=True) if is_(i)), 1) for i in ids])
    writer.add_bos_token_id(1)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    for key, tensor in model.state_dict().items():
        if key in tied:
            continue
        *layer, name = key.removesuffix(".weight").split(".", 3) if ".layers." in key else [key.removesuffix(".weight")]
        if name in ("self_attn.q_proj", "self_attn.k_proj"):
            tensor = tensor.unflatten(0, (-1, 2, head_size // 2)).transpose(1, 2).flatten(0, 2)
        block = f"blk.{layer[2]}." if layer else ""
        writer.add_tensor(f"{block}{NAMES[name]}.weight", tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def assert_same_network(teacher: Teacher, model: Any) -> None:
    with torch.no_grad():
        output = model(TOKENS, output_hidden_states=True)
    for layer in range(3):
        torch.testing.assert_close(teacher.embed(TOKENS, layer), output.hidden_states[layer])
    torch.testing.assert_close(teacher.head(), model.get_output_embeddings().weight)
    torch.testing.assert_close(teacher.embed(TOKENS) @ teacher.head().T, output.logits)


def assert_same_tokenizer(teacher: Teacher, pieces: Path) -> None:
    own = SentencePieceTokenizer(pieces)
    assert teacher.tokenizer.prefix_id == 1
    assert same_tokens(teacher.tokenizer, own)  # type: ignore[arg-type] # protocols declare no __hash__
    for text in [*LINES, "</s> <s>", "the cat\nsat"]:
        assert teacher.tokenizer.encode_batch([text])[0].ids.tolist() == own.encode(text)


@pytest.mark.parametrize("tied", [False, True])
def test_a_gguf_file(tied: bool, pieces: Path, tmp_path: Path) -> None:
    model = tiny_llama(pieces, tied)
    write_gguf(tmp_path / "model.gguf", model, pieces)
    teacher = open_teacher(str(tmp_path / "model.gguf"), device="cpu")
    assert (teacher.hidden_size, teacher.layers, teacher.vocab_size, teacher.context) == (16, 2, 290, 32)
    assert_same_network(teacher, model)
    assert_same_tokenizer(teacher, pieces)
    named = open_teacher(str(tmp_path), gguf_file="model.gguf", device="cpu")
    assert torch.equal(named.embed(TOKENS), teacher.embed(TOKENS))
    random = open_teacher(str(tmp_path / "model.gguf"), random=True, device="cpu")
    assert random.embed(TOKENS).shape == teacher.embed(TOKENS).shape
    assert not torch.equal(random.embed(TOKENS), teacher.embed(TOKENS))


def test_the_network_of_a_gguf_file_can_be_trained(pieces: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", tiny_llama(pieces), pieces)
    model = from_pretrained(open_teacher(str(tmp_path / "model.gguf"), device="cpu"), 5, 6)
    model().log_likelihood(torch.tensor([[1, 5, 3]])).sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


def test_damaged_gguf_files(pieces: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, tiny_llama(pieces), pieces)
    content = path.read_bytes()
    for damaged in (content[:500], content[:-1000], b"no GGUF file"):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=r"of the teacher .*model\.gguf cannot be loaded") as error:
            open_teacher(str(path), device="cpu")
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("tied", [False, True])
def test_converted_by_the_command(tied: bool, pieces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM

    model, source, out = tiny_llama(pieces, tied), tmp_path / "model.gguf", tmp_path / "folder"
    write_gguf(source, model, pieces)
    failure = partial(commands.failure, capsys, "teacher")
    assert "--convert needs a folder" in failure("--convert", str(source))
    assert "is not a GGUF file" in failure("--convert", str(pieces), "--out", str(out))
    assert "is not a GGUF file" in failure("--convert", "none.gguf", "--out", str(out))
    assert not out.exists()
    assert main(["teacher", "--convert", str(source), "--out", str(out)]) == 0
    assert f"the teacher is in {out}" in capsys.readouterr().out
    teacher = open_teacher(str(out), device="cpu")
    assert_same_network(teacher, model)
    assert_same_tokenizer(teacher, pieces)
    weights = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert weights.dtype == torch.float16
