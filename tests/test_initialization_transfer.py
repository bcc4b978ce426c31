"""Transfer: a pretrained network inside a parameterization, and centroids and head as its embeddings."""

from __future__ import annotations

import importlib.util
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
import torch
from learning_runs import tiny_config, write_text
from test_learning_resume import Interrupting, assert_same_run

from hmmlm.data.tokenizer import WordTokenizer, load_tokenizer
from hmmlm.errors import InputError
from hmmlm.initialization.clustering import Piece, fit_clusters
from hmmlm.initialization.offsets import FastTokenizer
from hmmlm.initialization.teacher import open_teacher
from hmmlm.initialization.transfer import (
    PretrainedStack,
    from_pretrained,
    set_states,
    set_words,
    shared,
    spread_out,
    word_vectors,
)
from hmmlm.initialization.transformer_lm import TransformerLM, TransformerShape, save_teacher
from hmmlm.learning.checkpoint import read_state
from hmmlm.learning.trainer import train
from hmmlm.parameterization import Factored, make_dense

WORDS = ["<unk>", "<eos>", *"abcd"]


def save(folder: Path, words: list[str] | None = None, context: int = 16) -> Path:
    """A small language model with random weights, which will do for a pretrained one."""
    tokenizer = WordTokenizer(words or WORDS)
    shape = TransformerShape(tokenizer.vocab_size, 8, 2, 2, context)
    folder.mkdir(parents=True, exist_ok=True)
    model = TransformerLM(shape, torch.Generator().manual_seed(5))
    with torch.no_grad():
        model.norm.bias.add_(0.3)
    save_teacher(folder, model, tokenizer)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tmp_path / "teacher")


def test_the_stack_reads_vectors_as_the_model_reads_tokens(folder: Path) -> None:
    teacher = open_teacher(str(folder), device="cpu")
    tokens = torch.randint(6, (2, 5), generator=torch.Generator().manual_seed(0))
    expected = teacher.embed(tokens)
    vectors = teacher.model.embedding(tokens)  # type: ignore[attr-defined]
    stack = PretrainedStack(teacher.model)  # type: ignore[attr-defined]
    torch.testing.assert_close(stack(vectors), expected)
    torch.testing.assert_close(stack(vectors[0]), expected[0])
    assert not any("embedding" in name for name, _ in stack.named_parameters())
    assert all(p.requires_grad for p in stack.parameters()) and not stack.train().training


if importlib.util.find_spec("transformers") is not None:

    def test_a_network_of_transformers_reads_vectors_too() -> None:
        import transformers

        config = transformers.LlamaConfig(
            vocab_size=9, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
        tokens = torch.tensor([[1, 5, 3]])
        expected = model.base_model(tokens).last_hidden_state.detach()
        vectors = model.get_input_embeddings()(tokens)
        stack = PretrainedStack(model)
        torch.testing.assert_close(stack(vectors), expected)
        assert not stack.graphable and not any("embed" in name for name, _ in stack.named_parameters())


def test_a_parameterization_with_pretrained_weights(folder: Path) -> None:
    weights = open_teacher(str(folder), device="cpu").model.state_dict()  # type: ignore[attr-defined]
    model = from_pretrained(open_teacher(str(folder), device="cpu"), 7, 6, torch.Generator().manual_seed(0))
    kept = model.networks[0].model.state_dict()  # type: ignore[union-attr]
    assert len(kept) == len(weights) - 1 and all(torch.equal(kept[name], weights[name]) for name in kept)
    assert shared(model.networks[0](model.embeddings[0])) <= 0.2  # or states would be alike
    hmm = model()
    hmm.validate()
    assert hmm.log_emission.shape == (7, 6)
    assert 0.1 < float(hmm.log_emission.detach().std()) < 3  # logits of a size to learn from
    random = from_pretrained(open_teacher(str(folder), random=True, device="cpu"), 7, 6)
    other = random.networks[0].model.state_dict()  # type: ignore[union-attr]
    assert not torch.equal(other["blocks.0.mlp_in.weight"], weights["blocks.0.mlp_in.weight"])
    from_pretrained(open_teacher(str(folder), device="cpu"), 18, 6)().validate()  # beyond the context, which is 16


def test_with_its_words_a_state_emits_what_the_language_model_predicts(folder: Path) -> None:
    teacher, tokenizer = open_teacher(str(folder), device="cpu"), load_tokenizer(folder)
    words = word_vectors(teacher, tokenizer)
    assert torch.equal(words, teacher.head())
    model = from_pretrained(open_teacher(str(folder), device="cpu"), 7, 6, torch.Generator().manual_seed(0), words)
    lm = teacher.model  # type: ignore[attr-defined]
    with torch.no_grad():
        expected = (lm.read(model.embeddings[0][None], 2)[0] @ teacher.head().T).log_softmax(-1)
        torch.testing.assert_close(model().log_emission, expected)
    bare = from_pretrained(open_teacher(str(folder), device="cpu"), 7, 6, torch.Generator().manual_seed(0))
    assert torch.equal(bare.embeddings[0], model.embeddings[0]) and torch.equal(bare.start, model.start)
    assert not torch.equal(bare.emission, words)


def test_whatever_the_sizes_of_network_and_words_one_rate_suits_both(folder: Path) -> None:
    def made(gain: float) -> Factored:
        teacher = open_teacher(str(folder), device="cpu")
        words = teacher.head().clone() / gain
        with torch.no_grad():
            for parameter in teacher.model.norm.parameters():  # type: ignore[attr-defined]
                parameter.mul_(gain)
        return from_pretrained(teacher, 7, 6, torch.Generator().manual_seed(0), words)

    plain, loud = made(1), made(30)  # the same language model, whose network says much and whose words are small
    torch.testing.assert_close(loud().log_emission, plain().log_emission)
    torch.testing.assert_close(loud.emission, plain.emission)
    hidden = plain.embeddings[0].shape[1]
    torch.testing.assert_close(loud.networks[0](loud.embeddings[0]).square().mean(), torch.tensor(1.0))
    sizes = {role: float(h.detach().square().mean()) for role, h in zip(loud.roles, loud.features(), strict=True)}
    assert sizes["emit"] == pytest.approx(float(loud.emission.detach().square().mean()), rel=1e-4)
    assert sizes["in"] == pytest.approx(hidden**-0.5, rel=0.5) and sizes["out"] == pytest.approx(sizes["in"], rel=0.5)


class Biased(torch.nn.Module):
    """Says the same of all, and a little of each."""

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        return 3.0 + vectors


def test_states_are_drawn_so_far_apart_that_the_network_tells_them_apart() -> None:
    mean, offsets = torch.zeros(8), torch.randn(5000, 8, generator=torch.Generator().manual_seed(0))
    assert shared(Biased()(offsets)) == pytest.approx(0.9, abs=0.01)
    assert abs(shared(offsets[:4])) < 0.5 and shared(offsets[:1]) == 0
    torch.testing.assert_close(spread_out(Biased(), mean, offsets, 0.2), 8 * offsets)  # 9 / (9 + 8²): the first
    torch.testing.assert_close(spread_out(torch.nn.Identity(), mean + 1, 3 * offsets, 0.2), 1 + 3 * offsets)
    torch.testing.assert_close(spread_out(Biased(), mean, offsets, 1.0), offsets)  # as far apart as words are
    constant = torch.nn.Linear(8, 8)
    torch.nn.init.zeros_(constant.weight)  # where nothing helps, they stay where they are
    torch.testing.assert_close(spread_out(constant, mean, offsets, 0.2), offsets)


def test_a_head_of_another_width_is_refused(folder: Path) -> None:
    teacher = open_teacher(str(folder), device="cpu")
    with pytest.raises(InputError, match=r"has 5 dimensions and its network 8: .* initialization\.network = 'body'"):
        from_pretrained(teacher, 7, 6, words=torch.zeros(6, 5))


def test_words_of_a_teacher_with_other_tokens_are_means_over_its_pieces() -> None:
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1, "ab": 2, "\n": 3}, [("a", "b")]))
    head = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    teacher: Any = SimpleNamespace(tokenizer=FastTokenizer(bpe, before=None), head=lambda: head)
    words = word_vectors(teacher, WordTokenizer(["<unk>", "<eos>", "ab", "baab", "z"]))
    expected = [head.mean(0), head[3], head[2], head[[1, 0, 2]].mean(0), head.mean(0)]  # nothing for "<unk>" and "z"
    torch.testing.assert_close(words, torch.stack(expected))


class Positioned(torch.nn.Module):
    """Looks like a network of transformers with a table of four positions."""

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
    with pytest.raises(InputError, match="the network of small knows 4 positions, and there are 5 states"):
        from_pretrained(teacher, 5, 6)


def test_centroids_and_head(folder: Path) -> None:
    teacher, tokenizer = open_teacher(str(folder), device="cpu"), load_tokenizer(folder)
    points = 3 + torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    clusters = fit_clusters([Piece(points)], 5)
    model = make_dense("mlp", 5, 6, hidden=8)
    set_states(model, clusters)
    set_words(model, teacher, tokenizer, clusters)
    torch.testing.assert_close(model.embeddings[0].mean(), points.mean(), rtol=0.2, atol=0.2)
    assert torch.equal(model.emission, teacher.head())
    small = fit_clusters([Piece(points)], 5, pca=4)
    model = make_dense("linear", 5, 6, hidden=4)
    set_states(model, small)
    set_words(model, teacher, tokenizer, small)
    torch.testing.assert_close(model.emission.data, teacher.head() @ small.components)
    assert torch.equal(model.embeddings[2], small.centroids[0])
    with pytest.raises(InputError, match=r"a centroid has 8 dimensions and model\.hidden is 4: set model\.hidden to 8"):
        set_states(model, clusters)
    with pytest.raises(InputError, match="gives no character offsets"):
        set_words(model, teacher, WordTokenizer([*WORDS[:-1], "z"]), small)


LVD: dict[str, Any] = {"kind": "lvd", "tokens": 100, "kmeans": {"tokens": 200, "passes": 2}}


def run_config(tmp_path: Path, start: dict[str, Any], **model: Any) -> Any:
    text = write_text(tmp_path)
    words = sorted({word for line in text.read_text().splitlines() for word in line.split()})
    teacher = save(tmp_path / "teacher", ["<unk>", "<eos>", *words])
    return tiny_config(
        text, initialization={"teacher": str(teacher), **start}, model=model, optimizer={"rate": 0.01},
        tokenizer={"kind": "file", "file": str(teacher / "tokenizer.json")},
    )  # fmt: skip


def test_frozen_embeddings_move_only_after_their_tokens(tmp_path: Path) -> None:
    start = {**LVD, "centroids": True, "head": True, "frozen_tokens": 300}
    config = run_config(tmp_path, start, parameterization="mlp", hidden=8, split=False)
    names = ("parameters.embeddings.0", "parameters.emission")
    stopped = train(config, tmp_path / "run", progress=Interrupting("train", 2, signal.SIGINT))
    early = read_state(tmp_path / "run" / "last")[0]
    assert stopped.tokens < 300
    train(config, tmp_path / "run", resume=True, progress=Interrupting("train", 4, signal.SIGINT))
    frozen = read_state(tmp_path / "run" / "last")[0]
    assert all(torch.equal(early[name], frozen[name]) for name in names)
    assert not torch.equal(early["parameters.networks.0.linears.0.weight"],
                           frozen["parameters.networks.0.linears.0.weight"])
    assert train(config, tmp_path / "run", resume=True).finished
    free = read_state(tmp_path / "run" / "last")[0]
    assert not any(torch.equal(frozen[name], free[name]) for name in names)
    assert train(config, tmp_path / "straight").finished
    assert_same_run(tmp_path / "run", tmp_path / "straight")


@pytest.mark.parametrize(
    "start", [{"network": "pretrained"}, {"network": "body"}, {"network": "random"},
              {"network": "pretrained", "head": True, "frozen_tokens": 300}]
)  # fmt: skip
def test_a_run_with_the_teachers_network(tmp_path: Path, start: dict[str, Any]) -> None:
    config = run_config(tmp_path, {**LVD, **start}, parameterization="transformer", split=False, mono=True, hidden=8)
    assert not train(config, tmp_path / "run", progress=Interrupting("train", 6, signal.SIGINT)).finished
    assert train(config, tmp_path / "run", resume=True).finished
    assert train(config, tmp_path / "straight").finished
    assert_same_run(tmp_path / "run", tmp_path / "straight")


def test_how_alike_states_begin_is_a_setting(tmp_path: Path) -> None:
    spread = {}
    for alike in (1.0, 0.0):
        start = {"kind": "none", "network": "pretrained", "alike": alike}
        config = run_config(tmp_path, start, parameterization="transformer", split=False, mono=True)
        train(config, tmp_path / f"run{alike}", progress=Interrupting("train", 1, signal.SIGINT))
        spread[alike] = float(read_state(tmp_path / f"run{alike}" / "last")[0]["parameters.embeddings.0"].std(0).mean())
    assert spread[0.0] > 1.5 * spread[1.0]


@pytest.mark.parametrize(
    ("start", "model", "message"),
    [
        ({"network": "pretrained"}, {"parameterization": "mlp"}, "network = 'pretrained' needs model.parameterization"),
        ({"kind": "none", "centroids": True, "network": "random"}, {"parameterization": "transformer", "mono": True,
         "split": False}, "centroids and head are of clusters"),
        ({**LVD, "frozen_tokens": 5}, {}, "frozen_tokens is for what centroids and head set"),
        ({**LVD, "head": True}, {}, "need model.parameterization = 'linear'"),
        ({**LVD, "head": True}, {"parameterization": "linear", "factor_emission": False}, "factor_emission = true"),
    ],
)  # fmt: skip
def test_bad_configurations(tmp_path: Path, start: dict[str, Any], model: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        run_config(tmp_path, start, **model)


@pytest.mark.parametrize("network", ["pretrained", "body"])
def test_a_network_without_weights_is_refused_before_any_work(tmp_path: Path, network: str) -> None:
    start = {"kind": "none", "network": network}
    config = run_config(tmp_path, start, parameterization="transformer", split=False, mono=True)
    (tmp_path / "teacher" / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"model\.safetensors"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_width_that_does_not_fit_is_refused_before_any_work(tmp_path: Path) -> None:
    config = run_config(tmp_path, {**LVD, "centroids": True}, parameterization="linear", hidden=12)
    with pytest.raises(InputError, match=r"a centroid has 8 dimensions and model\.hidden is 12"):
        train(config, tmp_path / "run")
