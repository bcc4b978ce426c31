"""Transfer of a pretrained network into a parameterization, and of centroids and head into its embeddings."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
import torch
from helpers.runs import Interrupting, assert_same_run, tiny_config, write_text

from hmmlm.data.tokenizers import WordTokenizer, load_tokenizer
from hmmlm.distillation.kmeans import Piece, fit_clusters
from hmmlm.distillation.transfer import (
    PretrainedStack,
    from_pretrained,
    mean_similarity,
    set_state_embeddings,
    set_word_vectors,
    spread_states,
    word_vectors,
)
from hmmlm.errors import InputError
from hmmlm.models.factored import DenseFactored, LinearConfig, MlpConfig
from hmmlm.runs.checkpoint import read_checkpoint
from hmmlm.teachers.gpt import GPT, GPTShape
from hmmlm.teachers.teacher import open_teacher
from hmmlm.teachers.tokenizers import FastTokenizer
from hmmlm.training.train import train

WORDS = ["<unk>", "<eos>", *"abcd"]


def save(folder: Path, words: list[str] | None = None, context: int = 16) -> Path:
    """Write a small language model with random weights in place of a pretrained one."""
    tokenizer = WordTokenizer(words or WORDS)
    shape = GPTShape(tokenizer.vocab_size, 8, 2, 2, context)
    folder.mkdir(parents=True, exist_ok=True)
    model = GPT(shape, tokenizer.eos_id, torch.Generator().manual_seed(5))
    with torch.no_grad():
        model.norm.bias.add_(0.3)
    model.save(folder, tokenizer)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tmp_path / "teacher")


def test_the_stack_embeds_vectors_as_the_model_embeds_tokens(folder: Path) -> None:
    teacher = open_teacher(str(folder), device="cpu")
    tokens = torch.randint(6, (2, 5), generator=torch.Generator().manual_seed(0))
    expected = teacher.embed(tokens)
    vectors = teacher.model.embedding(tokens)  # type: ignore[attr-defined]
    stack = PretrainedStack(teacher.model)  # type: ignore[attr-defined]
    torch.testing.assert_close(stack(vectors), expected)
    torch.testing.assert_close(stack(vectors[0]), expected[0])
    assert not any("embedding" in name for name, _ in stack.named_parameters())
    assert all(p.requires_grad for p in stack.parameters()) and not stack.train().training


def tiny_llama(**settings: Any) -> Any:
    transformers = pytest.importorskip("transformers", reason="the extra `teacher` is not installed")
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=9, **sizes, **settings))


def test_the_stack_of_a_transformers_model() -> None:
    model = tiny_llama()
    tokens = torch.tensor([[1, 5, 3]])
    expected = model.base_model(tokens).last_hidden_state.detach()
    vectors = model.get_input_embeddings()(tokens)
    stack = PretrainedStack(model)
    torch.testing.assert_close(stack(vectors), expected)
    assert not any("embed" in name or "head" in name for name, _ in stack.named_parameters())
    assert all(p.requires_grad for p in stack.parameters())


def test_a_parameterization_with_a_llama() -> None:
    teacher: Any = SimpleNamespace(model=tiny_llama(), hidden_size=8, name="llama")
    model = from_pretrained(teacher, 40, 12, torch.Generator().manual_seed(0))
    hmm = model()
    hmm.validate()
    hmm.log_likelihood(torch.tensor([[1, 5, 3]])).sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


def test_networks_that_a_cuda_graph_can_capture(folder: Path) -> None:
    assert PretrainedStack(open_teacher(str(folder), device="cpu").model).graphable  # type: ignore[attr-defined]
    assert not PretrainedStack(Positioned()).graphable
    assert PretrainedStack(tiny_llama()).graphable
    assert not PretrainedStack(tiny_llama(attn_implementation="eager")).graphable
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    assert not PretrainedStack(tiny_llama(rope_parameters=dynamic)).graphable


def test_a_parameterization_with_pretrained_weights(folder: Path) -> None:
    weights = open_teacher(str(folder), device="cpu").model.state_dict()  # type: ignore[attr-defined]
    model = from_pretrained(open_teacher(str(folder), device="cpu"), 7, 6, torch.Generator().manual_seed(0))
    kept = model.networks[0].model.state_dict()  # type: ignore[union-attr]
    assert len(kept) == len(weights) - 1 and all(torch.equal(kept[name], weights[name]) for name in kept)
    assert mean_similarity(model.networks[0](model.embeddings[0])) <= 0.2  # states are distinguishable
    hmm = model()
    hmm.validate()
    assert hmm.emission.log_probs.shape == (7, 6)
    assert 0.1 < float(hmm.emission.log_probs.detach().std()) < 3  # logits have a scale that trains
    random = from_pretrained(open_teacher(str(folder), random=True, device="cpu"), 7, 6)
    other = random.networks[0].model.state_dict()  # type: ignore[union-attr]
    assert not torch.equal(other["blocks.0.mlp_in.weight"], weights["blocks.0.mlp_in.weight"])
    from_pretrained(open_teacher(str(folder), device="cpu"), 18, 6)().validate()  # more states than its context of 16


def test_with_its_words_a_state_emits_what_the_language_model_predicts(folder: Path) -> None:
    teacher, tokenizer = open_teacher(str(folder), device="cpu"), load_tokenizer(folder)
    words = word_vectors(teacher, tokenizer)
    assert torch.equal(words, teacher.head())
    model = from_pretrained(open_teacher(str(folder), device="cpu"), 7, 6, torch.Generator().manual_seed(0), words)
    lm = teacher.model  # type: ignore[attr-defined]
    with torch.no_grad():
        expected = (lm.embed_vectors(model.embeddings[0][None], 2)[0] @ teacher.head().T).log_softmax(-1)
        torch.testing.assert_close(model().emission.log_probs, expected)
    bare = from_pretrained(open_teacher(str(folder), device="cpu"), 7, 6, torch.Generator().manual_seed(0))
    assert torch.equal(bare.embeddings[0], model.embeddings[0]) and torch.equal(bare.start, model.start)
    assert not torch.equal(bare.emission, words)


def test_scales_do_not_depend_on_those_of_network_and_words(folder: Path) -> None:
    def made(gain: float) -> DenseFactored:
        teacher = open_teacher(str(folder), device="cpu")
        words = teacher.head().clone() / gain
        with torch.no_grad():
            for parameter in teacher.model.norm.parameters():  # type: ignore[attr-defined]
                parameter.mul_(gain)
        return from_pretrained(teacher, 7, 6, torch.Generator().manual_seed(0), words)

    plain, loud = made(1), made(30)  # the same language model with larger hidden states and smaller words
    torch.testing.assert_close(loud().emission.log_probs, plain().emission.log_probs)
    torch.testing.assert_close(loud.emission, plain.emission)
    hidden = plain.embeddings[0].shape[1]
    torch.testing.assert_close(loud.networks[0](loud.embeddings[0]).square().mean(), torch.tensor(1.0))
    sizes = {role: float(h.detach().square().mean()) for role, h in zip(loud.roles, loud.features(), strict=True)}
    assert sizes["emit"] == pytest.approx(float(loud.emission.detach().square().mean()), rel=1e-4)
    assert sizes["in"] == pytest.approx(hidden**-0.5, rel=0.5) and sizes["out"] == pytest.approx(sizes["in"], rel=0.5)


class Biased(torch.nn.Module):
    """A network whose outputs share a large constant."""

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        return 3.0 + vectors


def test_states_are_spread_until_the_outputs_differ() -> None:
    mean, offsets = torch.zeros(8), torch.randn(5000, 8, generator=torch.Generator().manual_seed(0))
    assert mean_similarity(Biased()(offsets)) == pytest.approx(0.9, abs=0.01)
    assert abs(mean_similarity(offsets[:4])) < 0.5 and mean_similarity(offsets[:1]) == 0
    torch.testing.assert_close(
        spread_states(Biased(), mean, offsets, 0.2), 8 * offsets
    )  # 9 / (9 + 8²) is the first below 0.2
    torch.testing.assert_close(spread_states(torch.nn.Identity(), mean + 1, 3 * offsets, 0.2), 1 + 3 * offsets)
    torch.testing.assert_close(spread_states(Biased(), mean, offsets, 1.0), offsets)  # spread like words
    constant = torch.nn.Linear(8, 8)
    torch.nn.init.zeros_(constant.weight)  # spreading has no effect, so they keep their spread
    torch.testing.assert_close(spread_states(constant, mean, offsets, 0.2), offsets)


def test_a_head_of_another_width_is_refused(folder: Path) -> None:
    teacher = open_teacher(str(folder), device="cpu")
    with pytest.raises(InputError, match=r"has 5 dimensions and its network 8: .* model\.weights = 'body'"):
        from_pretrained(teacher, 7, 6, words=torch.zeros(6, 5))


def test_words_of_a_teacher_with_other_tokens_are_means_over_its_pieces() -> None:
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1, "ab": 2, "\n": 3}, [("a", "b")]))
    head = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    teacher: Any = SimpleNamespace(tokenizer=FastTokenizer(bpe, prefix_id=None), head=lambda: head)
    words = word_vectors(teacher, WordTokenizer(["<unk>", "<eos>", "ab", "baab", "z"]))
    expected = [head.mean(0), head[3], head[2], head[[1, 0, 2]].mean(0), head.mean(0)]  # no tokens for "<unk>" and "z"
    torch.testing.assert_close(words, torch.stack(expected))


class Positioned(torch.nn.Module):
    """A stand-in for a transformers model with a table of four positions."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = torch.nn.Embedding(6, 8), torch.nn.Embedding(4, 8)

    @property
    def base_model(self) -> torch.nn.Module:
        return self

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.wte

    def set_input_embeddings(self, module: torch.nn.Module) -> None:
        self.wte = module  # type: ignore[assignment]


def test_more_states_than_positions_are_refused() -> None:
    teacher: Any = SimpleNamespace(model=Positioned(), hidden_size=8, name="small")
    with pytest.raises(InputError, match="the network of small has 4 positions, and there are 5 states"):
        from_pretrained(teacher, 5, 6)


def test_centroids_and_head(folder: Path) -> None:
    teacher, tokenizer = open_teacher(str(folder), device="cpu"), load_tokenizer(folder)
    points = 3 + torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    clusters = fit_clusters([Piece(points)], 5)
    model = MlpConfig(num_states=5).make_dense(6, 8, None)
    set_state_embeddings(model, clusters)
    set_word_vectors(model, teacher, tokenizer)
    assert torch.equal(model.embeddings[0], clusters.centroids[0] + clusters.mean)
    torch.testing.assert_close(model.embeddings[0].mean(), points.mean(), rtol=0.2, atol=0.2)
    assert torch.equal(model.emission, teacher.head())
    model = LinearConfig(num_states=5).make_dense(6, 4, None)
    with pytest.raises(InputError, match=r"a centroid has 8 dimensions and model\.hidden is 4: set model\.hidden to 8"):
        set_state_embeddings(model, clusters)
    with pytest.raises(InputError, match="the teacher's head has 8 dimensions"):
        set_word_vectors(model, teacher, tokenizer)
    with pytest.raises(InputError, match="gives no character offsets"):
        set_word_vectors(model, teacher, WordTokenizer([*WORDS[:-1], "z"]))


LVD: dict[str, Any] = {"kind": "lvd", "tokens": 100, "kmeans": {"tokens": 200, "passes": 2}}


def run_config(tmp_path: Path, start: dict[str, Any], **model: Any) -> Any:
    """Return the configuration of a run; where `start` or `model` needs a teacher, it is one with the run's words."""
    text = write_text(tmp_path)
    words = sorted({word for line in text.read_text().splitlines() for word in line.split()})
    teacher = save(tmp_path / "teacher", ["<unk>", "<eos>", *words])
    named = {"teacher": str(teacher)}
    return tiny_config(
        text,
        initialization={**named, **start} if start else {},
        model={**named, **model} if model["kind"] == "pretrained" else model,
        optimizer={"lr": 0.01},
        tokenizer={"kind": "file", "file": str(teacher / "tokenizer.json")},
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weights", "start"),
    [("all", {}), ("body", {}), ("random", LVD), ("all", {**LVD, "head": True, "frozen_tokens": 300})],
)
def test_a_run_with_a_pretrained_network(tmp_path: Path, weights: str, start: dict[str, Any]) -> None:
    config = run_config(tmp_path, start, kind="pretrained", weights=weights)
    assert not train(config, tmp_path / "run", progress=Interrupting("train", 6)).finished
    assert train(config, tmp_path / "run", resume=True).finished
    assert train(config, tmp_path / "straight").finished
    assert_same_run(tmp_path / "run", tmp_path / "straight")


def test_maximum_initial_similarity_is_a_setting(tmp_path: Path) -> None:
    spread = {}
    for similarity in (1.0, 0.0):
        config = run_config(tmp_path, {}, kind="pretrained", max_initial_similarity=similarity)
        run = tmp_path / f"run{similarity}"
        train(config, run, progress=Interrupting("train", 1))
        spread[similarity] = float(read_checkpoint(run / "last")[0]["parameters.embeddings.0"].std(0).mean())
    assert spread[0.0] > 1.5 * spread[1.0]


@pytest.mark.parametrize("weights", ["all", "body"])
def test_a_network_without_weights_is_refused_before_any_work(tmp_path: Path, weights: str) -> None:
    config = run_config(tmp_path, {}, kind="pretrained", weights=weights)
    (tmp_path / "teacher" / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"model\.safetensors is missing"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
