"""What the studies of `papers.beyond` need: parts of a text, growth by splitting, teachers and factors on blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.fake_teacher import LVD, cyclic_hmm, use_fake_teacher
from helpers.runs import planted, tiny_config, write_prepared, write_text

import hmmlm
from hmmlm.emissions import Blocked
from hmmlm.training.prepare import reopen
from hmmlm.training.train import train
from papers import growth
from papers.portions import shorten


def test_a_part_of_a_text_keeps_its_vocabulary_and_what_is_held_out(tmp_path: Path) -> None:
    config = tiny_config(write_text(tmp_path / "text", lines=120), tokenizer={"kind": "word"})
    whole, part = (tmp_path / str(parts) for parts in (1, 4))
    for folder, parts in ((whole, 1), (part, 4)):
        shorten(config, parts, folder)
    before, after = reopen(whole), reopen(part)
    assert before.tokenizer.fingerprint() == after.tokenizer.fingerprint()
    lines = [np.split(data.tokens["train"].tokens, data.tokens["train"].documents[1:-1]) for data in (before, after)]
    assert [line.tolist() for line in lines[1]] == [line.tolist() for line in lines[0][::4]]
    for split in ("valid", "test"):
        assert np.array_equal(before.tokens[split].tokens, after.tokens[split].tokens)
    assert train(tiny_config(part), tmp_path / "run").finished


@pytest.mark.parametrize("form", ["released", "printed"])
def test_a_split_model_predicts_as_the_smaller_one(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "NOISE", 0.0)
    model: dict[str, Any] = {"kind": "neural", "form": form, "blocks": 2, "hidden": 8}
    text = write_text(tmp_path, lines=90)
    rate = {"optimizer": {"lr": 1e-12, "weight_decay": 0.0}}
    configs = [
        tiny_config(text, model={**model, "num_states": 8}, optimizer={"lr": 0.02}),
        tiny_config(text, model={**model, "num_states": 16}, **rate),
    ]
    last = growth.grow(configs, tmp_path / "runs")
    small, large = (hmmlm.load(folder / "final").hmm for folder in (last.parent / "8", last))
    assert (small.num_states, large.num_states) == (8, 16)
    tokens = torch.randint(0, small.vocab_size, (3, 12), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(large.log_likelihood(tokens), small.log_likelihood(tokens), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "model", [{"kind": "neural", "hidden": 8}, {"kind": "linear", "hidden": 8}, {"kind": "linear", "split": False}]
)
def test_blocks_train_with_and_without_labels_of_a_teacher(
    model: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_fake_teacher(monkeypatch)
    folder = write_prepared(tmp_path / "text", planted(cyclic_hmm(), 200, 8))
    settings = {"num_states": 12, "blocks": 3, "dropout": 0.5, **model}
    found = []
    for start in ({"kind": "none"}, {**LVD, "labels": "cached"}):
        result = train(
            tiny_config(folder, model=settings, initialization=start, optimizer={"lr": 0.02}),
            tmp_path / str(start["kind"]),
        )
        hmm = hmmlm.load(result.out / "best").hmm
        assert isinstance(hmm.emission, Blocked) and hmm.emission.num_blocks == 3
        found.append(result.best_perplexity)
    assert max(found) < 6.0 and found[0] != found[1]
