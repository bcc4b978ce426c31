"""Training on a GPU: the CUDA graph of a step against eager steps, and runs that are interrupted and resumed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.network_runs import interrupt_after
from helpers.runs import tiny_config, write_text
from torch import Tensor

from hmmlm.config.run import RunConfig
from hmmlm.config.sections import BaumWelchConfig
from hmmlm.config.training import read_config
from hmmlm.data.batches import Batches, ChunkBatches, StreamBatches
from hmmlm.data.tokenfile import TokenFile
from hmmlm.data.tokenizers import WordTokenizer
from hmmlm.learning.fused_adamw import FusedAdamWLearner, fuse
from hmmlm.learning.learners import AdamWLearner, BaumWelchLearner, HmmLearner
from hmmlm.runs.checkpoint import read_checkpoint
from hmmlm.training.train import train

WORDS, BATCH, LENGTH = 40, 8, 16
SCALAR = {"model": {"kind": "scalar", "num_states": 32}, "optimizer": {"lr": 0.05, "eps": 1e-4}}
BAUM_WELCH = {
    "model": {"kind": "scalar", "num_states": 32},
    "optimizer": {"kind": "baum-welch", "full_batch": False, "step": 0.5, "pseudocount": 0.1, "momentum": 0.5},
}
NEURAL = {
    "model": {"kind": "neural", "num_states": 64, "blocks": 4, "hidden": 32, "dropout": 0.5},
    "optimizer": {"lr": 1e-3, "eps": 1e-6},
}
MODELS = {
    "scalar": SCALAR,
    "scalar in bfloat16": {**SCALAR, "train": {"precision": "bf16-mixed"}},
    "Baum-Welch": BAUM_WELCH,
    "neural": NEURAL,
    "neural with network dropout": {**NEURAL, "model": {**NEURAL["model"], "network_dropout": 0.1}},
}


def make_learner(settings: dict[str, Any], device: torch.device, fused: bool = True) -> HmmLearner:
    """Create the learner of a configuration, as a run does; the seed of random numbers is set to 0."""
    from lightning_fabric import Fabric

    config = read_config(RunConfig, settings)
    tokenizer = WordTokenizer(["<unk>", "<eos>", *(f"w{i}" for i in range(WORDS - 2))])
    blocks = config.model.blocks_needed
    block_of_word = torch.arange(WORDS) % blocks if blocks else None
    torch.manual_seed(0)
    model = config.model.build(tokenizer, block_of_word, 0, device)
    fabric = Fabric(accelerator=device.type, devices=1, precision=config.train.precision)
    if isinstance(config.optimizer, BaumWelchConfig):
        return BaumWelchLearner(fabric, model, tokenizer, config.dump(), config.optimizer)
    learner = AdamWLearner(fabric, model, tokenizer, config.dump(), config.optimizer)
    return fuse(learner) if fused else learner


def make_batches(kind: str) -> Batches:
    """Return batches of random tokens.

    "short": four windows per epoch, of which the last does not fit a graph, so that the graph is recorded from the
    first batch of an epoch, which has no carry.
    """
    count = {"stream": BATCH * LENGTH * 9, "short": BATCH * (LENGTH * 3 + 5) - 3, "chunks": BATCH * LENGTH * 6 + 7}[
        kind
    ]
    tokens = torch.randint(WORDS, (count,), generator=torch.Generator().manual_seed(3)).numpy()
    file = TokenFile.from_arrays(tokens, None, WORDS)
    if kind == "chunks":
        return ChunkBatches(file, BATCH, LENGTH, shuffle=True, seed=0)
    return StreamBatches(file, BATCH, LENGTH, shuffle=True, reset_at_eos=kind == "stream", eos_id=1, seed=0)


def learn(learner: HmmLearner, batches: Batches, epochs: int) -> Tensor:
    """Train for some epochs, and return the log-likelihood of every step."""
    found = []
    for epoch in range(epochs):
        carry = None
        for batch in batches.epoch(epoch):
            result = learner.step(batch, carry, learner.peak_lr)
            carry = result.carry
            found.append(result.log_likelihood.detach().double().sum().cpu().clone())
    return torch.stack(found)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("scalar", "stream"),
        ("scalar", "short"),
        ("scalar", "chunks"),
        ("scalar in bfloat16", "stream"),
        ("Baum-Welch", "stream"),
        ("Baum-Welch", "chunks"),
        ("neural", "stream"),
        ("neural", "short"),
        # In streams, eager steps without a carry draw fewer random numbers for the networks than the graph.
        ("neural with network dropout", "chunks"),
    ],
)
def test_the_graph_of_a_step_agrees_with_eager_steps(name: str, kind: str, device: torch.device) -> None:
    """Both draw the same states to drop: a graph advances the random numbers like the kernels that it replays."""
    batches = make_batches(kind)
    graphed, eager = (make_learner(MODELS[name], device) for _ in range(2))
    before = {key: value.clone() for key, value in eager.parameters().items()}
    eager.graphed = None
    torch.manual_seed(1)
    expected = learn(eager, batches, epochs=3)
    torch.manual_seed(1)
    found = learn(graphed, batches, epochs=3)
    assert graphed.graphed is not None and graphed.graphed.graph is not None
    assert graphed.skipped() == eager.skipped() == 0
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
    for key, value in graphed.parameters().items():
        want = eager.parameters()[key]
        # AdamW enlarges rounding where a gradient is nearly zero, and products in bfloat16 round more.
        atol = 2e-3 if name.endswith("bfloat16") else 5e-4
        torch.testing.assert_close(value, want, rtol=1e-3, atol=atol, msg=lambda m, k=key: f"{k}: {m}")
        assert not torch.equal(want, before[key])  # it has learned


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize(
    "settings", [{"max_grad_norm": 0.02}, {"max_grad_norm": 1.0, "weight_decay": 0.1}, {"max_grad_norm": 0.0}]
)
@pytest.mark.parametrize("kind", ["stream", "chunks"])
def test_emissions_without_a_matrix_of_gradients_learn_alike(
    kind: str, settings: dict[str, float], recorded: bool, device: torch.device
) -> None:
    """`FusedAdamWLearner` against a gradient by autograd and torch's AdamW."""
    batches, optimizer = make_batches(kind), {"lr": 0.05, "eps": 1e-4, **settings}
    fused, plain = (make_learner({**SCALAR, "optimizer": optimizer}, device, fused) for fused in (True, False))
    assert isinstance(fused, FusedAdamWLearner) and isinstance(plain, AdamWLearner)
    if not recorded:
        fused.graphed = plain.graphed = None
    found, expected = learn(fused, batches, epochs=2), learn(plain, batches, epochs=2)
    assert fused.compiled
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
    tensors, values = fused.optimizer.state_dict()
    others, same = plain.optimizer.state_dict()
    assert values == same
    for name, value in [*fused.parameters().items(), *tensors.items()]:
        want = {**plain.parameters(), **others}[name]
        torch.testing.assert_close(value, want, rtol=1e-3, atol=5e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("name", ["scalar", "Baum-Welch", "neural"])
def test_steps_on_the_gpu_agree_with_the_cpu(name: str, device: torch.device) -> None:
    """Without dropout, whose random numbers differ between devices."""
    settings = {section: dict(fields) for section, fields in MODELS[name].items()}
    if "dropout" in settings["model"]:
        settings["model"]["dropout"] = 0.0
    batches = make_batches("stream")
    here, there = (learn(make_learner(settings, d), batches, epochs=1) for d in (torch.device("cpu"), device))
    torch.testing.assert_close(there, here, rtol=1e-3, atol=1e-2)


def last_parameters(run: Path) -> dict[str, Tensor]:
    tensors, _ = read_checkpoint(run / "last")
    return {name: value for name, value in tensors.items() if name.startswith("parameters.")}


@pytest.mark.parametrize("name", ["scalar", "Baum-Welch", "neural"])
def test_a_run_that_is_interrupted_and_resumed_ends_as_an_uninterrupted_one(
    name: str, device: torch.device, tmp_path: Path
) -> None:
    settings = {section: dict(fields) for section, fields in MODELS[name].items()}
    if settings["model"]["kind"] == "neural":
        settings["model"]["blocks"] = 2  # the text has about ten words
    training = {"device": device.type, "epochs": None, "max_tokens": 40 * 24, "checkpoint_every": 10}
    config = tiny_config(write_text(tmp_path, lines=100), **settings, train=training)
    whole = train(config, tmp_path / "whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HmmLearner, "graphable", False)
        again = train(config, tmp_path / "again")
    assert whole.finished and abs(whole.steps - 40) <= 1
    with pytest.MonkeyPatch.context() as patch:
        interrupt_after(20, patch)
        stopped = train(config, tmp_path / "resumed")
    assert not stopped.finished and stopped.steps == 20
    resumed = train(config, tmp_path / "resumed", resume=True)
    assert resumed.finished and resumed.steps == whole.steps
    assert again.finished
    found, expected, other = (last_parameters(tmp_path / name) for name in ("resumed", "whole", "again"))
    assert found.keys() == expected.keys()
    # A resumed run takes its first steps eagerly, before it records a graph, and these round differently: it may differ
    # by little more than a run of eager steps alone.
    noise = max(float((expected[key] - other[key]).abs().max()) for key in expected)
    assert noise < 1e-3
    for key, value in found.items():
        close = {"rtol": 1e-5, "atol": 1e-5 + 10 * noise}
        torch.testing.assert_close(value, expected[key], **close, msg=lambda m, k=key: f"{k}: {m}")
    assert resumed.best_perplexity == pytest.approx(whole.best_perplexity, rel=1e-4)
