"""Distillation: samples that survive interruption, an ordinary run, and mistakes answered with one line."""

from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.causal import BOS, EOS, save_causal
from helpers.commands import failure

import hmmlm
from hmmlm.cli.main import main
from hmmlm.config.distill import DistillConfig
from hmmlm.data.tokenfile import TokenFile
from hmmlm.distillation.samples import SampleFolder, SamplePlan
from hmmlm.errors import InputError
from hmmlm.report.distill import by_position, evaluate_distillation, verdict
from hmmlm.runs.interrupt import Stopped
from hmmlm.runs.progress import Progress
from hmmlm.teachers.sampling import TextSampler, open_sampler
from hmmlm.training import distill as module
from hmmlm.training.distill import Speeds, _plan, distill, resume_distillation

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("transformers") is None, reason="the extra `teacher` is not installed"),
]
SMALL = ["--tokens", "4000", "--length", "30", "--num-states", "6", "--epochs", "2", "--device", "cpu", "--quiet"]
PHASES = ["sampling", "embedding", "clustering", "training", "evaluation"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a causal language model."""
    folder = tmp_path_factory.mktemp("causal")
    save_causal(folder)
    return folder


@pytest.fixture(scope="module")
def run(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a finished distillation."""
    out = tmp_path_factory.mktemp("distilled") / "run"
    assert main(["distill", str(folder), "--out", str(out), *SMALL]) == 0
    return out


def small_config(folder: Path, **settings: Any) -> DistillConfig:
    sizes = {"tokens": 4000, "length": 30, "num_states": 6, "epochs": 2}
    return DistillConfig(**{"model": str(folder), **sizes, **settings})


def file_bytes(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_distilled_run_is_an_ordinary_run(run: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lm = hmmlm.load(run)
    assert (lm.hmm.num_states, lm.hmm.vocab_size, lm.tokenizer.eos_id) == (6, 13, EOS)
    capsys.readouterr()
    assert main(["eval", str(run)]) == 0
    assert main(["sample", str(run), "--num-samples", "2", "--seed", "1"]) == 0
    assert main(["inspect", str(run), "--text", "the cat sat"]) == 0
    assert main(["ngram", str(run)]) == 0
    assert main(["train", "--resume", str(run), "--quiet"]) == 0
    assert (run / "report.html").exists()
    assert main(["train", "--data", str(run / "samples"), "--model.num-states", "3", "--train.epochs", "1", "--quiet",
                 "--out", str(run.parent / "trained")]) == 0  # fmt: skip


def test_the_report_compares_the_hmm_with_an_ngram_and_the_model(run: Path) -> None:
    rows = json.loads((run / "distillation.json").read_text())["test"]
    test = TokenFile.open(run / "data" / "test")
    assert [(row["first"], row["last"]) for row in rows] == [(1, 8), (9, 16), (17, 30), (1, 30)]
    assert rows[-1]["tokens"] == len(test) == sum(row["tokens"] for row in rows[:-1])
    figures = rows[-1]["perplexity"]
    assert set(figures) == {"model", "5-gram", "the language model"}
    own = SampleFolder(run / "samples").log_probs("test")
    assert figures["the language model"] == pytest.approx(np.exp(-own.mean()))
    results = json.loads((run / "results.json").read_text())
    for name in ("model", "5-gram"):
        assert figures[name] == pytest.approx(results[name]["test"]["perplexity"])
    found = json.loads((run / "distillation.json").read_text())
    shares = found["guesses"]
    assert shares["the language model"] == pytest.approx(np.exp(own).mean())
    assert 0 < shares["unigram"] < shares["model"] < shares["the language model"] < 1
    assert found["half_perplexity"] > 1
    # The HMM has learned something, and nothing knows the model better than itself.
    assert figures["the language model"] < figures["model"] < results["unigram"]["test"]["perplexity"]


def test_the_report_says_how_good_the_guide_is(run: Path) -> None:
    results = evaluate_distillation(run)
    for hmm, weak in ((1066.0, True), (700.0, False)):
        perplexities = {"model": hmm, "5-gram": 918.0, "the language model": 35.9}
        positions = [{"first": 1, "last": 30, "tokens": 9, "perplexity": perplexities}]
        text = verdict(replace(results, positions=positions, half_perplexity=1224.0))
        assert f"predicts {results.guesses['model']:.1%} of the model's choices" in text and "-25%" in text
        assert ("That is weak: counts of the same samples reach a perplexity of 918.0" in text) == weak


class Notes(Progress):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, line: str) -> None:
        self.lines.append(line)


def test_the_plan_has_the_time_of_each_phase(folder: Path, tmp_path: Path) -> None:
    notes = Notes()
    distill(small_config(folder, epochs=1), tmp_path / "run", notes)
    (plan,) = (line for line in notes.lines if line.startswith("plan: 4,000 tokens, 6 states; "))
    assert notes.lines.index(plan) == 0  # before anything is sampled
    assert all(re.search(rf"{phase} [\d.e-]+ (ms|s|min)[,:]", plan) for phase in PHASES)


def test_minutes_choose_the_largest_distillation_that_fits(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_measure", lambda *args: Speeds(1e-3, 1e-4, 1e-9, 1e-6))
    sampler = open_sampler(str(folder), device=torch.device("cpu"))
    planned = []
    for minutes, given in ((1, {}), (10, {}), (100, {}), (10, {"num_states": 8}), (10, {"tokens": 9_000})):
        config = DistillConfig(model=str(folder), minutes=minutes, length=30, **given)
        chosen, seconds = _plan(config.resolve("cpu"), config, sampler, [""])
        assert list(seconds) == PHASES and sum(seconds.values()) <= 60 * minutes
        assert all(getattr(chosen, name) == value for name, value in given.items())
        planned.append((chosen.tokens, chosen.num_states))
    assert planned[0] < planned[1] < planned[2] and planned[0][1] < planned[2][1] and planned[1][0] > 60_000
    with pytest.raises(InputError, match=r"--minutes 0.01 is too short: the smallest distillation takes about"):
        distill(DistillConfig(model=str(folder), minutes=0.01, length=30), tmp_path / "run")


def test_the_hmm_steers_the_model_it_was_distilled_from(run: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    lm = hmmlm.load(run)
    model = AutoModelForCausalLM.from_pretrained(folder)
    steering = hmmlm.Steering(*lm.guide(must=["tree"], never=["cat"], prompt="the", max_new_tokens=12))
    prompt = torch.tensor([[BOS, *lm.tokenizer.encode("the")]])
    rows = model.generate(
        prompt, logits_processor=[steering], max_new_tokens=12, do_sample=True, top_k=0, num_return_sequences=8,
        pad_token_id=EOS,
    )  # fmt: skip
    for row in rows[:, 2:].tolist():
        text = lm.tokenizer.decode(row[: row.index(EOS)])
        assert "tree" in text.split() and "cat" not in text.split()


def test_texts_are_whole_documents_and_prompts_are_left_out(folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the cat sat\n\nthe dog ran on the mat\n")
    distill(small_config(folder, prompts=prompts, length=20, epochs=1), tmp_path / "run")
    files = {split: TokenFile.open(tmp_path / "run" / "data" / split) for split in ("train", "valid", "test")}
    texts = [text.tolist() for f in files.values() for text in np.split(np.array(f.tokens), f.documents[1:-1])]
    assert 4000 <= sum(map(len, texts)) < 4000 + 20  # the rest of the last text
    assert all(EOS not in text[:-1] and (len(text) == 20 or text[-1] == EOS) for text in texts)
    assert any(len(text) < 20 for text in texts) and any(text[-1] != EOS for text in texts)
    # Held-out texts are a tenth.
    sizes = {split: len(f.documents) - 1 for split, f in files.items()}
    assert sizes["valid"] == pytest.approx(sum(sizes.values()) / 20, abs=1)
    # The first tokens follow the prompts, not the beginning of a text.
    sampler = open_sampler(str(folder), device=torch.device("cpu"))
    model = sampler.model
    with torch.no_grad():
        ends = [sampler.encode_prompt(line) for line in ("the cat sat", "the dog ran on the mat")]
        expected = sum(model(torch.tensor([ids])).logits[0, -1].softmax(-1) for ids in ends) / 2
    found = np.bincount([text[0] for text in texts], minlength=13) / len(texts)
    assert np.abs(found - expected.numpy()).max() < 0.12


def test_a_model_that_ends_texts_with_its_first_token(tmp_path: Path) -> None:
    save_causal(tmp_path / "model", end=BOS)
    sizes = {"tokens": 3000, "length": 30, "num_states": 4, "epochs": 1}
    lm = hmmlm.distill(tmp_path / "model", tmp_path / "run", **sizes, device="cpu")
    assert lm.tokenizer.eos_id == BOS
    assert hmmlm.load(tmp_path / "run" / "best").tokenizer.eos_id == BOS


class Killed(Exception):
    pass


def test_interrupted_sampling_resumes_with_the_same_tokens(folder: Path, tmp_path: Path) -> None:
    sampler = open_sampler(str(folder), device=torch.device("cpu"))
    plan = SamplePlan(tokens=1200, length=30, shard_texts=16, seed=7)
    whole = SampleFolder(tmp_path / "whole")
    whole.fill(sampler, plan, lambda tokens: None, lambda tokens: None)
    broken, done, kept = SampleFolder(tmp_path / "broken"), 0, list[int]()

    def kill(tokens: int) -> None:
        nonlocal done
        done += tokens
        if done > 500:
            done = 0
            raise Killed

    for _ in range(20):
        try:
            broken.fill(sampler, plan, kill, kept.append)
            break
        except Killed:
            assert not broken.complete
    assert sum(kept) > 1000  # shards were used again
    assert file_bytes(whole.path) == file_bytes(broken.path)


def test_a_distillation_resumes_in_every_phase(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    distill(small_config(folder), tmp_path / "whole")
    out = tmp_path / "broken"
    sample, shards = TextSampler.sample, 0

    def stop_at_the_second_shard(self: TextSampler, *args: Any) -> Any:
        nonlocal shards
        shards += 1
        if shards == 4:  # the first two measure the speed
            raise Stopped
        return sample(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(TextSampler, "sample", stop_at_the_second_shard)
        assert not distill(small_config(folder), out).finished
    assert "has no samples yet" in failure(capsys, "train", "--resume", str(out))

    class StopInTraining(Progress):
        def note(self, line: str) -> None:
            if line.startswith("epoch 1.00"):
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resume_distillation(out, StopInTraining())
    assert resume_distillation(out).finished
    for part in ("final/model.safetensors", "best/model.safetensors", "data/train.bin", "data/test.bin"):
        assert (out / part).read_bytes() == (tmp_path / "whole" / part).read_bytes()


def test_bad_input_is_one_line(
    folder: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(match: str, *argv: str) -> None:
        out = tmp_path / "out"
        assert match in failure(capsys, "distill", *argv)
        assert not out.exists()

    to = ["--out", str(tmp_path / "out"), "--device", "cpu"]
    other = tmp_path / "other"  # a run that was not distilled
    other.mkdir()
    (other / "config.json").write_bytes((run / "config.json").read_bytes())
    fails("give a model to distill")
    fails("no teacher at /no/such/folder", "/no/such/folder", *to)
    fails("is a run of `hmmlm train`", str(run), *to)
    fails("--tokens", str(folder), "--tokens", "0", *to)
    fails("no file", str(folder), "--prompts", str(tmp_path / "absent.txt"), *to)
    (tmp_path / "empty.txt").write_text("\n \n")
    fails("blank lines", str(folder), "--prompts", str(tmp_path / "empty.txt"), *to)
    (tmp_path / "long.txt").write_text("the cat\n" + "the " * 40 + "\n")
    fails("prompt 2 has 41 tokens", str(folder), "--prompts", str(tmp_path / "long.txt"), *to)
    (tmp_path / "long.txt").write_text("the cat\n" + "the " * 20 + "\n")
    fails("prompt 2 has 21 tokens", str(folder), "--prompts", str(tmp_path / "long.txt"), "--length", "30", *to)
    fails("--tokens 100 is too few for 5,000 states", str(folder), "--tokens", "100", "--num-states", "5000", *to)
    fails("leave out num_states", "--resume", str(run), "--num-states", "7")
    fails("no run to resume", "--resume", str(tmp_path))
    fails("no distillation to resume", "--resume", str(other))
    fails("already contains a run", str(folder), "--out", str(run))
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else find(name))
    fails(f"the teacher {folder} needs transformers, which the extra hmmlm[teacher] installs", str(folder), *to)
    fails("no teacher at /no/such/folder", "/no/such/folder", *to)  # whatever is installed
    fails(f"no teacher at {tmp_path / 'absent.gguf'}", str(tmp_path / "absent.gguf"), *to)
    fails("there is no folder absent, and a teacher on the hub needs transformers", "absent", *to)


def test_another_model_under_the_same_name_is_refused(tmp_path: Path) -> None:
    save_causal(tmp_path / "model")
    sampler = open_sampler(str(tmp_path / "model"), device=torch.device("cpu"))
    folder, plan = SampleFolder(tmp_path / "samples"), SamplePlan(2000, 30, 16, 0)

    def kill(tokens: int) -> None:
        if (tmp_path / "samples" / "shards" / "00000.json").exists():
            raise Killed

    with pytest.raises(Killed):
        folder.fill(sampler, plan, kill, lambda tokens: None)
    save_causal(tmp_path / "model", end=BOS)
    with pytest.raises(InputError, match="sampled from another version"):
        folder.fill(sampler, plan, kill, lambda tokens: None)


def test_positions_are_counted_from_the_start_of_a_document() -> None:
    documents = np.array([0, 10, 11, 13])
    log_probs = np.concatenate([np.arange(1, 11), [1], [1, 2]]) * -1.0
    rows = by_position({"model": log_probs}, documents)
    assert [(row["first"], row["last"], row["tokens"]) for row in rows] == [(1, 8, 11), (9, 10, 2), (1, 10, 13)]
    assert rows[1]["perplexity"]["model"] == pytest.approx(np.exp(9.5))
