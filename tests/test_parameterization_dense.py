"""Dense reparameterizations: linear, perceptrons, transformers, their grid of options, sizes and configuration."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learning_runs import planted, random_hmm, tiny_config, write_text

from hmmlm.errors import InputError
from hmmlm.experiments.catalogue import STUDIES
from hmmlm.hmm import HMM
from hmmlm.learning.config import config_from_dict, load_recipe, recipe_names
from hmmlm.learning.history import read_history
from hmmlm.learning.prepare import make_parameterization
from hmmlm.learning.trainer import train
from hmmlm.parameterization import CHIU_RUSH_2020, CHIU_RUSH_2025, Factored, Scalar, fit_width, make_dense
from hmmlm.parameterization.capacity import default_layers
from hmmlm.parameterization.dense_networks import Mlp, MlpForm, Transformer, default_heads
from hmmlm.parameterization.networks import Residual

STATES, WORDS, WIDTH = 6, 9, 8


def small(kind: str = "linear", **options: Any) -> Factored:
    options = {"hidden": WIDTH, "generator": torch.Generator().manual_seed(0), **options}
    return make_dense(kind, STATES, WORDS, **options)  # type: ignore[arg-type]


def grid() -> Iterator[dict[str, Any]]:
    """Every point of Table 3's grid that means something, transformers, and the linear forms."""
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


@pytest.mark.parametrize("initial", ["unit", "normal"])
def test_every_form_makes_a_normalised_model_with_gradients_in_all_parameters(initial: str) -> None:
    tokens = torch.randint(0, WORDS, (3, 7), generator=torch.Generator().manual_seed(1))
    points = list(grid())
    assert len(points) == 2 + 4 * (4 + 4 + 2 + 4) + 8
    for point in points:
        model = small(initial=initial, **point)
        hmm = model()
        hmm.detach().validate()
        hmm.log_likelihood(tokens).sum().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None and bool(parameter.grad.isfinite().all()), (point, name)
            # what is added to every state entered alike cancels in the softmax: the last bias of H_out's network
            cancels = name.startswith("networks.1.") and name.endswith(".bias")
            assert bool((parameter.grad != 0).any()) or cancels, (point, name)


@pytest.mark.parametrize("factored", list(itertools.product((False, True), repeat=3)))
def test_each_part_is_factored_or_free(factored: tuple[bool, bool, bool]) -> None:
    """Table 2: where a part is not factored its logits are free, as those of the scalar model."""
    start, transition, emission = factored
    for kind in ("linear", "mlp", "transformer"):
        model = small(kind, start=start, transition=transition, emission=emission)
        hmm = model()
        hmm.detach().validate()
        free = {
            "start": (start, hmm.log_start, STATES),
            "transition": (transition, hmm.log_transition, STATES * STATES),
            "emission": (emission, hmm.log_emission, STATES * WORDS),
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
    model = small(start=False, transition=False, emission=False, scale=2.0)
    scalar = Scalar(STATES, WORDS, 2.0, torch.Generator().manual_seed(0))
    assert {name: p.shape for name, p in model.named_parameters()} == {
        name: p.shape for name, p in scalar.named_parameters()
    }
    for mine, other in zip(model().parameters, scalar().parameters, strict=True):
        assert torch.equal(mine, other)


def test_linear_forms_are_the_printed_products() -> None:
    a, b = small(split=False), small(split=True)
    (single,) = a.embeddings
    logits = single @ single.T
    assert torch.equal(logits, logits.T)
    torch.testing.assert_close(a().log_transition, logits.log_softmax(1))
    torch.testing.assert_close(a().log_emission, (single @ a.emission.T).log_softmax(1))
    left, entered, emitting = b.embeddings
    torch.testing.assert_close(b().log_transition, (left @ entered.T).log_softmax(1))
    torch.testing.assert_close(b().log_emission, (emitting @ b.emission.T).log_softmax(1))
    torch.testing.assert_close(b().log_start, (left @ b.start).log_softmax(0))


def test_transition_logits_of_ablation_a_are_symmetric_and_of_b_are_not() -> None:
    def asymmetry(hmm: HMM) -> float:
        # log A_ij − log A_ji = (a_ij − a_ji) − (n_i − n_j) with row normalisers n: of symmetric a, cycles sum to 0
        gap = (hmm.log_transition - hmm.log_transition.T).detach()
        return float((gap[0, 1] + gap[1, 2] + gap[2, 0]).abs())

    assert asymmetry(small(split=False, initial="normal")()) < 1e-4
    assert asymmetry(small(split=True, initial="normal")()) > 0.1


@pytest.mark.parametrize("point", [
    {"kind": "linear"}, {"kind": "mlp"}, {"kind": "mlp", "skip": "layer", "split": False},
    {"kind": "mlp", "layers": 1, "skip": "none", "norm": False, "split": False},
    {"kind": "mlp", "skip": "none", "relu": False, "norm": False, "mono": True},
    {"kind": "mlp", "layers": 3, "norm": False, "mono": True, "split": False},
    {"kind": "transformer"}, {"kind": "transformer", "mono": True, "split": False, "layers": 5},
])  # fmt: skip
def test_initial_logits_have_unit_variance(point: dict[str, Any]) -> None:
    model = make_dense(hidden=64, states=300, vocab_size=200, generator=torch.Generator().manual_seed(3), **point)
    squares = [float(h.detach().square().mean()) for h in model.features()]
    assert sum(squares) / 3 == pytest.approx(64**-0.5, rel=1e-3)
    assert squares == pytest.approx([64**-0.5] * 3, rel=0.5)
    assert float((model.features()[2] @ model.emission.T).detach().std()) == pytest.approx(1.0, rel=0.35)
    if point == {"kind": "linear"}:
        left, entered, _ = model.features()
        assert float((left @ entered.T).detach().std()) == pytest.approx(1.0, rel=0.05)


def test_normal_tables_have_unit_variance_and_their_logits_that_of_the_width() -> None:
    model = make_dense("linear", 300, 200, hidden=64, initial="normal")
    assert all(float(p.detach().std()) == pytest.approx(1.0, rel=0.05) for p in (*model.embeddings, model.emission))
    left, entered, _ = model.features()
    assert float((left @ entered.T).detach().var()) == pytest.approx(64, rel=0.1)


def test_the_seed_decides_every_parameter() -> None:
    for kind in ("linear", "mlp", "transformer"):
        made = [small(kind, generator=torch.Generator().manual_seed(seed)).state_dict() for seed in (1, 1, 2)]
        assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])
        same = [name for name in made[0] if torch.equal(made[0][name], made[2][name])]
        assert all("norm" in name or name.endswith("bias") for name in same)


def test_network_of_2020_is_that_of_the_blocked_model() -> None:
    torch.manual_seed(0)
    mine, other = Mlp(WIDTH, CHIU_RUSH_2020), Residual(WIDTH)
    own = dict(mine.named_parameters())
    for theirs, name in (("first", "linears.0"), ("second", "linears.1"), ("norm", "norms.0")):
        getattr(other, theirs).load_state_dict({part: own[f"{name}.{part}"] for part in ("weight", "bias")})
    embedding = torch.randn(5, WIDTH)
    torch.testing.assert_close(mine(embedding), other(embedding))


def test_network_of_2025_joins_around_the_activation() -> None:
    torch.manual_seed(0)
    network, embedding = Mlp(WIDTH, CHIU_RUSH_2025), torch.randn(5, WIDTH)
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
    model = small("transformer", mono=mono, split=split, initial="normal")
    before = model().detach()
    with torch.no_grad():
        for table in model.embeddings:
            table.copy_(table[order].clone())
    after = model().detach()
    torch.testing.assert_close(after.log_start, before.log_start[order], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(after.log_transition, before.log_transition[order][:, order], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(after.log_emission, before.log_emission[order], rtol=1e-4, atol=1e-4)


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
    torch.testing.assert_close(hmm.log_emission, model().log_emission, rtol=0.0, atol=0.1)
    assert small(kind).double()().dtype == torch.float64


# --- capacity ---


def count(model: Factored) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("options", [
    {"kind": "linear"}, {"kind": "linear", "split": False}, {"kind": "mlp", "split": False},
    {"kind": "mlp", "split": False, "mono": True}, {"kind": "transformer", "split": False},
    {"kind": "transformer", "split": False, "mono": True},
])  # fmt: skip
@pytest.mark.parametrize("power", [16, 20, 22, 24, 28])
def test_capacities_of_figure_2_are_met(options: dict[str, Any], power: int) -> None:
    with torch.device("meta"):
        model = make_dense(states=512, vocab_size=32_000, capacity=2**power, initial="normal", **options)
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
        chosen = fit_width("mlp", target, 10, 50)
        assert abs(sizes[chosen] - target) == min(abs(size - target) for size in sizes.values())
    assert fit_width("transformer", 50_000, 10, 50, heads=6) % 6 == 0


def test_capacities_out_of_reach_are_refused() -> None:
    with pytest.raises(InputError, match=r"capacity of 1,000 is below the smallest linear model .* 33,537 parameters"):
        fit_width("linear", 1_000, 512, 32_000)
    with pytest.raises(InputError, match="nothing is"):
        fit_width("linear", 10**7, 5, 7, start=False, transition=False, emission=False)


def test_depth_and_heads_by_rule() -> None:
    assert [default_layers("transformer", 2**power) for power in (16, 22, 23, 28)] == [2, 2, 4, 14]
    assert default_layers("mlp", 2**28) == 2
    assert [default_heads(width) for width in (8, 127, 128, 136, 192, 200, 696)] == [1, 1, 2, 2, 3, 2, 8]


# --- configuration, recipes, training ---


def test_options_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(InputError, match="mono is about networks"):
        small("linear", mono=True)
    with pytest.raises(InputError, match="joins the second layer, and layers is 1"):
        MlpForm(layers=1)
    with pytest.raises(InputError, match="leads around the ReLU"):
        MlpForm(relu=False)
    with pytest.raises(InputError, match="width 8 cannot have 3 heads"):
        small("transformer", heads=3)


@pytest.mark.parametrize(("values", "message"), [
    ({"mono": True}, "mono is for parameterization 'mlp' or 'transformer', and it is 'scalar': leave mono out"),
    ({"parameterization": "neural", "split": False}, "split is for parameterization 'linear' or 'mlp' or"),
    ({"parameterization": "linear", "layers": 2}, "layers is for parameterization 'mlp' or 'transformer'"),
    ({"parameterization": "transformer", "relu": False}, "relu is for parameterization 'mlp', and it is 'transformer'"),
    ({"parameterization": "mlp", "heads": 2}, "heads is for parameterization 'transformer'"),
    ({"parameterization": "linear", "structure": "brown", "factor_start": False}, "is factored throughout"),
    ({"parameterization": "mlp", "layers": 1}, "joins the second layer"),
    ({"parameterization": "linear", "capacity": 2**20, "hidden": 64}, "leave out hidden = 64, or capacity"),
    ({"parameterization": "transformer", "heads": 7}, r"hidden \(256\) must be a multiple of heads \(7\)"),
])  # fmt: skip
def test_configuration_names_what_does_not_apply(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        config_from_dict({"model": values}, "my.toml")
    assert str(caught.value).startswith("my.toml: model: ") and "\n" not in str(caught.value)


def test_baum_welch_needs_the_scalar_model() -> None:
    with pytest.raises(InputError, match=r"needs model\.parameterization = 'scalar'"):
        config_from_dict({"model": {"parameterization": "linear"}, "optimizer": {"kind": "baum-welch"}})


def test_every_option_of_the_configuration_reaches_the_model() -> None:
    data = planted(random_hmm(2, 4, seed=0), 4, 5)

    def made(**values: Any) -> Factored:
        model = make_parameterization(config_from_dict({"model": {"states": 5, **values}}).model, data, seed=1)
        assert isinstance(model, Factored)
        return model

    mlp = made(parameterization="mlp", hidden=16, split=False, layers=3, skip="none", relu=False, norm=False)
    assert mlp.networks[0].form == MlpForm(3, "none", False, False)
    assert len(mlp.embeddings) == 1 and mlp.embeddings[0].shape == (5, 16)
    free = made(parameterization="linear", factor_start=False, factor_emission=False, scale=0.0)
    assert free.roles == ("in", "out") and not bool(free.start.any()) and not bool(free.emission.any())
    assert float(made(parameterization="linear", init="normal").emission.detach().std()) > 0.8
    transformer = made(parameterization="transformer", mono=True, layers=1, heads=4, hidden=16)
    assert [block.heads for block in transformer.networks[0].blocks] == [4]
    assert count(made(parameterization="linear", capacity=3000)) == pytest.approx(3000, rel=0.02)


def test_recipes_of_the_study() -> None:
    names = [name for name in recipe_names() if name.startswith("lee-")]
    by_table = {table: [name for name in names if name.startswith(f"lee-{table}-")] for table in ("table1", "table2")}
    assert len(by_table["table1"]) == 4 and len(by_table["table2"]) == 6
    assert len([name for name in names if name.startswith("lee-table3-")]) == 7
    for name in names:
        config = load_recipe(name)
        assert (config.batches.kind, config.batches.batch_size, config.batches.length) == ("chunks", 200, 64), name
        assert (config.schedule.kind, config.schedule.warmup_tokens) == ("cosine", 25_600_000), name
        assert config.train.max_tokens == 500_000_000 and (config.train.epochs or 10**5) > 1000, name
        assert config.train.precision == "bf16-mixed", name
    models = [load_recipe(name).model for name in by_table["table2"]]
    assert len({(model.factor_transition, model.factor_emission, model.factor_start) for model in models}) == 6


def test_studies_have_the_printed_numbers_and_seeds() -> None:
    printed = {run.row: run.paper["test_perplexity"] for run in STUDIES["lee2025-table1"]}
    assert sorted(printed.values()) == [348, 357, 540, 711]
    for table, rows in (("lee2025-table1", 4), ("lee2025-table2", 6), ("lee2025-table3", 7)):
        runs = STUDIES[table]
        assert len({run.row for run in runs}) == rows and len(runs) == 3 * rows
        assert {run.seed for run in runs} == {42, 52, 62}
        prefix = table.replace("2025", "") + "-"
        assert {run.recipe for run in runs} == {name for name in recipe_names() if name.startswith(prefix)}


@pytest.mark.parametrize("model", [
    {"parameterization": "linear"}, {"parameterization": "mlp", "split": False},
    {"parameterization": "transformer", "mono": True, "split": False},
], ids=lambda model: model["parameterization"])  # fmt: skip
def test_a_tiny_run_lowers_the_loss(tmp_path: Path, model: dict[str, Any]) -> None:
    config = tiny_config(
        write_text(tmp_path / "text"), model={**model, "states": 8, "hidden": 16},
        optimizer={"rate": 0.02, "weight_decay": 0.1}, batches={"kind": "chunks", "batch_size": 8, "length": 8},
        train={"epochs": 6, "precision": "bf16-mixed"},
    )  # fmt: skip
    result = train(config, tmp_path / "run")
    losses = [event["loss"] for event in read_history(tmp_path / "run" / "history.jsonl") if event["event"] == "train"]
    assert result.finished and losses[-1] < losses[0] - 0.2
