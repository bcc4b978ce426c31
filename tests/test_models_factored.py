"""Dense reparameterizations: linear, MLP and transformer, their options, sizes, configuration and training."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models import CONFIGS, make_dense
from helpers.runs import tiny_config, write_text
from hypothesis import given, settings
from hypothesis import strategies as st

from hmmlm.config.run import RunConfig
from hmmlm.config.training import read_config
from hmmlm.data.tokenizers import WordTokenizer
from hmmlm.errors import InputError
from hmmlm.hmm import HMM
from hmmlm.models.capacity import transformer_layers
from hmmlm.models.factored import DenseFactored, LinearConfig, MlpConfig, TransformerConfig
from hmmlm.models.networks import Mlp, MlpForm, Residual, Transformer, default_heads
from hmmlm.models.scalar import Scalar
from hmmlm.runs.history import read_history
from hmmlm.scan.composition import matrices
from hmmlm.training.train import train

STATES, WORDS, WIDTH = 6, 9, 8


def small(kind: str = "linear", **options: Any) -> DenseFactored:
    return make_dense(kind, STATES, WORDS, **{"hidden": WIDTH, **options})


def grid() -> Iterator[dict[str, Any]]:
    """Yield every valid point of the grid of Table 3, transformers, and the linear forms."""
    places = [{"split": split, "mono": mono} for split in (False, True) for mono in (False, True)]
    forms = [
        {"layers": layers, "skip": skip, "relu": relu, "norm": norm}
        for layers, skip, relu, norm in itertools.product(
            (1, 2), ("none", "activation", "layer"), (False, True), (False, True)
        )
        if (skip == "none" or layers == 2) and (skip != "activation" or relu)
    ]
    yield from ({"kind": "linear", "split": split} for split in (False, True))
    yield from ({"kind": "mlp", **place, **form} for place in places for form in forms)
    yield from ({"kind": "transformer", "heads": heads, **place} for place in places for heads in (None, 2))


@pytest.mark.parametrize("init", ["unit", "normal"])
def test_every_form_is_normalized_and_all_parameters_have_gradients(init: str) -> None:
    tokens = torch.randint(0, WORDS, (3, 7), generator=torch.Generator().manual_seed(1))
    points = list(grid())
    assert len(points) == 2 + 4 * (4 + 4 + 2 + 4) + 8
    for point in points:
        model = small(init=init, **point)
        hmm = model()
        hmm.detach().validate()
        hmm.log_likelihood(tokens).sum().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None and bool(parameter.grad.isfinite().all()), (point, name)
            # an offset common to all states entered cancels in the softmax: the last bias of the network of H_out
            cancels = name.startswith("networks.1.") and name.endswith(".bias")
            assert bool((parameter.grad != 0).any()) or cancels, (point, name)


@pytest.mark.parametrize("factored", list(itertools.product((False, True), repeat=3)))
def test_each_part_is_factored_or_free(factored: tuple[bool, bool, bool]) -> None:
    """Table 2: the logits of a part that is not factored are free, like those of the scalar model."""
    start, transition, emission = factored
    for kind in ("linear", "mlp", "transformer"):
        model = small(kind, factor_start=start, factor_transition=transition, factor_emission=emission)
        hmm = model()
        hmm.detach().validate()
        free = {
            "start": (start, hmm.log_start, STATES),
            "transition": (transition, hmm.transition.log_probs, STATES * STATES),
            "emission": (emission, hmm.emission.log_probs, STATES * WORDS),
        }
        for name, (is_factored, made, size) in free.items():
            parameter = getattr(model, name)
            if not is_factored:
                assert parameter.numel() == size
                torch.testing.assert_close(parameter.log_softmax(-1), made)
            elif parameter is not None:
                assert parameter.numel() == (WIDTH if name == "start" else WORDS * WIDTH)
        hmm.log_likelihood(torch.tensor([[1, 4, 2]])).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())


def test_with_nothing_factored_it_is_the_scalar_model() -> None:
    model = small(factor_start=False, factor_transition=False, factor_emission=False, scale=2.0)
    scalar = Scalar(STATES, WORDS, 2.0, torch.Generator().manual_seed(0))
    assert {name: p.shape for name, p in model.named_parameters()} == {
        name: p.shape for name, p in scalar.named_parameters()
    }
    for mine, other in zip(matrices(model()), matrices(scalar()), strict=True):
        assert torch.equal(mine, other)


def test_linear_forms_are_the_printed_products() -> None:
    a, b = small(split=False), small(split=True)
    (single,) = a.embeddings
    logits = single @ single.T
    assert torch.equal(logits, logits.T)
    torch.testing.assert_close(a().transition.log_probs, logits.log_softmax(1))
    torch.testing.assert_close(a().emission.log_probs, (single @ a.emission.T).log_softmax(1))
    left, entered, emitting = b.embeddings
    torch.testing.assert_close(b().transition.log_probs, (left @ entered.T).log_softmax(1))
    torch.testing.assert_close(b().emission.log_probs, (emitting @ b.emission.T).log_softmax(1))
    torch.testing.assert_close(b().log_start, (left @ b.start).log_softmax(0))


def test_transition_logits_of_ablation_a_are_symmetric_and_of_b_are_not() -> None:
    def asymmetry(hmm: HMM) -> float:
        # log A_ij − log A_ji = (a_ij − a_ji) − (n_i − n_j) with row normalizers n: cycles sum to 0 if a is symmetric
        gap = (hmm.transition.log_probs - hmm.transition.log_probs.T).detach()
        return float((gap[0, 1] + gap[1, 2] + gap[2, 0]).abs())

    assert asymmetry(small(split=False, init="normal")()) < 1e-4
    assert asymmetry(small(split=True, init="normal")()) > 0.1


@pytest.mark.parametrize(
    "point",
    [
        {"kind": "linear"},
        {"kind": "mlp"},
        {"kind": "mlp", "skip": "layer", "split": False},
        {"kind": "mlp", "layers": 1, "skip": "none", "norm": False, "split": False},
        {"kind": "mlp", "skip": "none", "relu": False, "norm": False, "mono": True},
        {"kind": "mlp", "layers": 3, "norm": False, "mono": True, "split": False},
        {"kind": "transformer"},
        {"kind": "transformer", "mono": True, "split": False, "layers": 5},
    ],
)
def test_initial_logits_have_unit_variance(point: dict[str, Any]) -> None:
    model = make_dense(states=300, words=200, hidden=64, seed=3, **point)
    squares = [float(h.detach().square().mean()) for h in model.features()]
    assert sum(squares) / 3 == pytest.approx(64**-0.5, rel=1e-3)
    assert squares == pytest.approx([64**-0.5] * 3, rel=0.5)
    assert float((model.features()[2] @ model.emission.T).detach().std()) == pytest.approx(1.0, rel=0.35)
    if point == {"kind": "linear"}:
        left, entered, _ = model.features()
        assert float((left @ entered.T).detach().std()) == pytest.approx(1.0, rel=0.05)


def test_normal_tables_have_unit_variance_and_their_logits_that_of_the_width() -> None:
    model = make_dense("linear", 300, 200, hidden=64, init="normal")
    assert all(float(p.detach().std()) == pytest.approx(1.0, rel=0.05) for p in (*model.embeddings, model.emission))
    left, entered, _ = model.features()
    assert float((left @ entered.T).detach().var()) == pytest.approx(64, rel=0.1)


def test_the_seed_decides_every_parameter() -> None:
    for kind in ("linear", "mlp", "transformer"):
        made = [small(kind, seed=seed).state_dict() for seed in (1, 1, 2)]
        assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])
        same = [name for name in made[0] if torch.equal(made[0][name], made[2][name])]
        assert all("norm" in name or name.endswith("bias") for name in same)


def test_network_of_2020_is_that_of_the_blocked_model() -> None:
    torch.manual_seed(0)
    mine, other = Mlp(WIDTH, MlpForm(skip="layer")), Residual(WIDTH)
    own = dict(mine.named_parameters())
    for theirs, name in (("first", "linears.0"), ("second", "linears.1"), ("norm", "norms.0")):
        getattr(other, theirs).load_state_dict({part: own[f"{name}.{part}"] for part in ("weight", "bias")})
    embedding = torch.randn(5, WIDTH)
    torch.testing.assert_close(mine(embedding), other(embedding))


def test_network_of_2025_joins_around_the_activation() -> None:
    torch.manual_seed(0)
    network, embedding = Mlp(WIDTH, MlpForm(skip="activation")), torch.randn(5, WIDTH)
    inner = network.linears[1](network.linears[0](embedding).relu())
    expected = torch.nn.functional.layer_norm(inner.relu() + inner, (WIDTH,))
    torch.testing.assert_close(network(embedding), expected)


def test_monolithic_networks_are_shared_and_others_are_not() -> None:
    for kind in ("mlp", "transformer"):
        assert [len(small(kind, mono=mono).networks) for mono in (False, True)] == [3, 1]
        shared = small(kind, mono=True, split=True)
        for table, made in zip(shared.embeddings, shared.features(), strict=True):
            torch.testing.assert_close(shared.networks[0](table), made)
        headed = small(kind, mono=True, split=False)
        assert len(headed.embeddings) == 1 and len(headed.heads) == 3
        assert not torch.allclose(headed.features()[0], headed.features()[1])  # or transitions would be symmetric


@settings(max_examples=8, deadline=None)
@given(order=st.permutations(range(STATES)), mono=st.booleans(), split=st.booleans())
def test_transformers_are_equivariant_to_permuting_states(order: list[int], mono: bool, split: bool) -> None:
    model = small("transformer", mono=mono, split=split, init="normal")
    before = model().detach()
    with torch.no_grad():
        for table in model.embeddings:
            table.copy_(table[order].clone())
    after = model().detach()
    torch.testing.assert_close(after.log_start, before.log_start[order], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        after.transition.log_probs, before.transition.log_probs[order][:, order], rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(after.emission.log_probs, before.emission.log_probs[order], rtol=1e-4, atol=1e-4)


def test_transformers_look_at_other_states() -> None:
    network = Transformer(WIDTH)
    states = torch.randn(4, WIDTH)
    moved = states.clone()
    moved[3, 0] += 1.0
    assert not torch.allclose(network(states)[0], network(moved)[0])


@pytest.mark.parametrize("kind", ["linear", "mlp", "transformer"])
def test_autocast_rounds_products_but_not_the_softmax(kind: str) -> None:
    model = small(kind)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hmm = model()
        loss = -model.scan(torch.tensor([[1, 4, 2, 0]])).log_likelihood.sum()
    assert hmm.dtype == torch.float32
    hmm.detach().validate()
    loss.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
    torch.testing.assert_close(hmm.emission.log_probs, model().emission.log_probs, rtol=0.0, atol=0.1)
    assert small(kind).double()().dtype == torch.float64


# --- capacity ---


def count(model: DenseFactored) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    "options",
    [
        {"kind": "linear"},
        {"kind": "linear", "split": False},
        {"kind": "mlp", "split": False},
        {"kind": "mlp", "split": False, "mono": True},
        {"kind": "transformer", "split": False},
        {"kind": "transformer", "split": False, "mono": True},
    ],
)
@pytest.mark.parametrize("power", [16, 20, 22, 24, 28])
def test_capacities_of_figure_2_are_met(options: dict[str, Any], power: int) -> None:
    config = CONFIGS[options["kind"]](num_states=512, capacity=2**power, init="normal", **options)
    with torch.device("meta"):
        model = config.make_dense(32_000, config.width(32_000), None)
    assert count(model) == pytest.approx(2**power, rel=0.04)
    width = model.embeddings[0].shape[1]
    assert width < 128 or width % 8 == 0
    if options["kind"] == "transformer":
        blocks = len(model.networks[0].blocks)
        assert blocks == (2 if power <= 22 else 2 * (power - 21))
        assert power < 22 or 30 <= width / blocks <= 90


def test_width_is_the_nearest() -> None:
    sizes = {width: count(make_dense("mlp", 10, 50, hidden=width)) for width in range(1, 40)}
    for target in (sizes[1], 2_000, 5_000, 12_345):
        chosen = MlpConfig(num_states=10, capacity=target).width(50)
        assert abs(sizes[chosen] - target) == min(abs(size - target) for size in sizes.values())
    assert TransformerConfig(num_states=10, capacity=50_000, heads=6).width(50) % 6 == 0


def test_capacities_out_of_reach_are_refused() -> None:
    with pytest.raises(InputError, match=r"1,000 is below the 33,537 parameters .* of 512 states and 32,000 words"):
        LinearConfig(num_states=512, capacity=1_000).width(32_000)
    free = {"factor_start": False, "factor_transition": False, "factor_emission": False}
    with pytest.raises(InputError, match="nothing is"):
        LinearConfig(num_states=5, capacity=10**7, **free).width(7)


def test_depth_and_heads_by_rule() -> None:
    assert [transformer_layers(2**power) for power in (16, 22, 23, 28)] == [2, 2, 4, 14]
    assert MlpConfig(capacity=2**28).layers == 2
    assert [default_heads(width) for width in (8, 127, 128, 136, 192, 200, 696)] == [1, 1, 2, 2, 3, 2, 8]


# --- configuration, training ---


def test_options_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(InputError, match="mono needs a network"):
        DenseFactored(STATES, WORDS, WIDTH, mono=True)
    with pytest.raises(InputError, match="needs a second layer, and layers is 1"):
        MlpForm(layers=1)
    with pytest.raises(InputError, match="skips the ReLU, and relu is false"):
        MlpForm(relu=False)
    with pytest.raises(InputError, match="width 8 cannot have 3 heads"):
        Transformer(8, heads=3)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mono": True}, "unknown setting model.mono for model.kind = 'scalar'"),
        ({"kind": "neural", "split": False}, "unknown setting model.split for model.kind = 'neural'"),
        ({"kind": "linear", "layers": 2}, "unknown setting model.layers for model.kind = 'linear'"),
        ({"kind": "transformer", "relu": False}, "unknown setting model.relu for model.kind = 'transformer'"),
        ({"kind": "transformer", "blocks": 4}, "unknown setting model.blocks for model.kind = 'transformer'"),
        ({"kind": "mlp", "heads": 2}, "unknown setting model.heads for model.kind = 'mlp'"),
        ({"kind": "linear", "blocks": 4, "factor_start": False}, "model: a model with blocks is factored throughout"),
        ({"kind": "mlp", "layers": 1}, "model: skip = 'activation' needs a second layer"),
        ({"kind": "linear", "capacity": 2**20, "hidden": 64}, "model: .*leave out hidden = 64, or capacity"),
        ({"kind": "transformer", "heads": 7}, r"model: hidden \(256\) must be a multiple of heads \(7\)"),
    ],
)
def test_configuration_names_what_does_not_apply(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"^my.toml: {message}") as caught:
        read_config(RunConfig, {"model": values}, "my.toml")
    assert "\n" not in str(caught.value)


def test_baum_welch_needs_a_model_of_tables() -> None:
    with pytest.raises(InputError, match="needs a model of tables, such as 'scalar'"):
        read_config(RunConfig, {"model": {"kind": "linear"}, "optimizer": {"kind": "baum-welch"}})


def test_every_option_of_the_configuration_reaches_the_model() -> None:
    vocabulary = WordTokenizer(["<unk>", "<eos>", "a", "b"])

    def made(**values: Any) -> DenseFactored:
        config = read_config(RunConfig, {"model": {"num_states": 5, **values}})
        model = config.model.build(vocabulary, None, 1, torch.device("cpu"))
        assert isinstance(model, DenseFactored)
        return model

    mlp = made(kind="mlp", hidden=16, split=False, layers=3, skip="none", relu=False, norm=False)
    assert mlp.networks[0].form == MlpForm(3, "none", False, False)
    assert len(mlp.embeddings) == 1 and mlp.embeddings[0].shape == (5, 16)
    free = made(kind="linear", factor_start=False, factor_emission=False, scale=0.0)
    assert free.roles == ("in", "out") and not bool(free.start.any()) and not bool(free.emission.any())
    assert float(made(kind="linear", init="normal").emission.detach().std()) > 0.8
    transformer = made(kind="transformer", mono=True, layers=1, heads=4, hidden=16)
    assert [block.heads for block in transformer.networks[0].blocks] == [4]
    assert count(made(kind="linear", capacity=3000)) == pytest.approx(3000, rel=0.02)


@pytest.mark.parametrize(
    "model",
    [
        {"kind": "linear"},
        {"kind": "mlp", "split": False},
        {"kind": "transformer", "mono": True, "split": False},
    ],
    ids=lambda model: model["kind"],
)
def test_a_tiny_run_lowers_the_loss(tmp_path: Path, model: dict[str, Any]) -> None:
    config = tiny_config(
        write_text(tmp_path / "text"),
        model={**model, "num_states": 8, "hidden": 16},
        optimizer={"lr": 0.02, "weight_decay": 0.1},
        batches={"kind": "chunks", "batch_size": 8, "length": 8},
        train={"epochs": 6, "precision": "bf16-mixed"},
    )
    result = train(config, tmp_path / "run")
    losses = [event["loss"] for event in read_history(tmp_path / "run" / "history.jsonl") if event["event"] == "train"]
    assert result.finished and losses[-1] < losses[0] - 0.2
