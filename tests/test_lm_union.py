"""`hmmlm join`: the union of trained models, as every command uses it."""

import json
import math
from pathlib import Path

import pytest
import torch
from helpers.commands import failure, write_corpus
from test_cli_main import SMALL

from hmmlm.cli.main import main
from hmmlm.data.modelfolder import CONFIG
from hmmlm.errors import InputError
from hmmlm.hmm import HMM
from hmmlm.lm.lm import LanguageModel, load
from hmmlm.lm.union import join_models
from hmmlm.training.prepare import reopen

BLOCKED = ["--model.kind", "neural", "--model.num-states", "16"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two blocked models, a dense one, their union, and one that reads a text differently."""
    folder = tmp_path_factory.mktemp("union")
    corpus = write_corpus(folder / "animals.txt")
    options = [*SMALL, "--train.epochs", "1", "--quiet"]
    kinds = {
        "two": [*BLOCKED, "--model.blocks", "2"],
        "four": [*BLOCKED, "--model.blocks", "4", "--train.seed", "1"],
        "dense": [],
        "running": ["--no-batches.reset-at-eos", "--no-batches.eval-reset-at-eos"],
    }
    for name, own in kinds.items():
        assert main(["train", "--data", str(corpus), *options, *own, "--out", str(folder / name)]) == 0
    models = [str(folder / name) for name in ("two", "four", "dense")]
    assert main(["join", *models, "--weights", ".2,.3,.5", "--out", str(folder / "joined")]) == 0
    return folder


@pytest.mark.slow
def test_eval_mixes_per_line(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["eval", str(runs / "joined"), "--data", str(runs / "two"), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)["results"]["test"]
    models = [load(runs / name) for name in ("two", "four", "dense")]
    # The test text, line by line: each is drawn from one of the models.
    sequences = models[0].sequences(reopen(runs / "two").tokens["test"].tokens.tolist())
    assert len(sequences) > 1
    scores = torch.stack([lm.score_sequences(sequences) for lm in models])
    mixed = (scores + torch.tensor([0.2, 0.3, 0.5]).double().log()[:, None]).logsumexp(0)
    assert figures["log_likelihood"] == pytest.approx(float(mixed.sum()), rel=1e-5)


def test_a_union_is_a_model_like_any_other(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lm = load(runs / "joined")
    assert [part.num_states for part in lm.hmm.components] == [16, 16, 4]
    assert lm.restarts
    text = "3 the cat sees the dog ."
    assert float(lm.score([text])[0]) == pytest.approx(sum(p for _, p in lm.token_scores([text])[0]), rel=1e-5)
    # log normalizers of factors exceed 100, where float32 is 8e-6 apart
    assert sum(p for _, p in lm.next_token("3 the", top=100)) == pytest.approx(1, abs=1e-4)
    assert sum(p for _, p in lm.infill("3 the ___ sees", top=100)[0]) == pytest.approx(1, abs=1e-4)
    assert all("dog" in line for line in lm.generate(must=["dog"], num_samples=3, seed=1))
    assert lm.nearest("cat")
    for command in (["sample"], ["inspect", "--text", text], ["infill", "the ___ ."], ["compare", str(runs / "two")]):
        name, *rest = command
        assert main([name, str(runs / "joined"), *rest]) == 0
    assert main(["score", str(runs / "joined"), str(runs / "animals.txt")]) == 0
    assert capsys.readouterr().out


def test_the_weights_are_those_of_the_highest_likelihood(runs: Path, tmp_path: Path) -> None:
    assert main(["join", str(runs / "two"), str(runs / "dense"), "--out", str(tmp_path / "fitted")]) == 0
    tokens = reopen(runs / "two").tokens["valid"].tokens.tolist()

    def score(lm: LanguageModel) -> float:
        return float(lm.score_sequences(lm.sequences(tokens)).sum())

    parts, best = [load(runs / "two"), load(runs / "dense")], score(load(tmp_path / "fitted"))
    assert all(best >= score(join_models(parts, [w, 1 - w])) - 1e-3 for w in (0.0, 0.25, 0.5, 0.75, 1.0))


def test_without_a_text_the_weights_are_equal(runs: Path, tmp_path: Path) -> None:
    for name in ("two", "dense"):
        load(runs / name).save(tmp_path / name)
    assert main(["join", str(tmp_path / "two"), str(tmp_path / "dense"), "--out", str(tmp_path / "equal")]) == 0
    hmm = load(tmp_path / "equal").hmm
    assert hmm.log_weights.tolist() == pytest.approx([math.log(0.5)] * 2)


def test_mistakes(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two, dense = str(runs / "two"), str(runs / "dense")
    other = write_corpus(tmp_path / "other.txt", lines=40)
    other.write_text(other.read_text().replace("cat", "unicorn"))
    out = ["--out", str(tmp_path / "new")]
    assert (
        main(["train", "--data", str(other), *SMALL, "--train.epochs", "1", "--quiet", "--out", str(tmp_path / "run")])
        == 0
    )
    for error, argv in [
        ("at least two models", [two, *out]),
        ("3 numbers for 2 models", [two, dense, "--weights", ".1,.1,.8", *out]),
        ("sum to 0.9, not to one", [two, dense, "--weights", ".1,.8", *out]),
        ("model 2 has another vocabulary", [two, str(tmp_path / "run"), *out]),
        ("model 2 reads a text in one sequence, the first in lines", [two, str(runs / "running"), *out]),
        ("is not empty", [two, dense, "--out", str(runs / "joined")]),
        ("required: MODELS", out),
    ]:
        assert error in failure(capsys, "join", *argv)
    assert not (tmp_path / "new").exists()


def test_no_models() -> None:
    for join in (join_models, HMM.union):
        with pytest.raises(InputError, match="a union needs at least one model"):
            join([])


def test_damaged_files_are_refused(runs: Path, tmp_path: Path) -> None:
    lm = load(runs / "joined")
    lm.save(tmp_path / "model")
    header = json.loads((tmp_path / "model" / CONFIG).read_text())
    (tmp_path / "model" / CONFIG).write_text(json.dumps({**header, "states": 7}))
    with pytest.raises(
        InputError, match=r"log_start has shape \[36\], config\.json has \[7\]: files of two models are mixed"
    ):
        load(tmp_path / "model")
