"""The commands, from training to samples: what they print and write, and mistakes answered with one line."""

import json
import math
import re
import shlex
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from helpers.commands import failure, python_environment, run_python, write_corpus

import hmmlm
from hmmlm.cli.main import main
from hmmlm.config.run import RunConfig
from hmmlm.errors import InputError
from hmmlm.lm.ctrlg import save_ctrlg
from hmmlm.lm.lm import load
from hmmlm.runs.checkpoint import read_checkpoint
from hmmlm.runs.folders import saved_config
from hmmlm.scan.composition import matrices
from hmmlm.training.prepare import reopen
from hmmlm.training.train import train

SMALL = shlex.split(
    "--model.num-states 4 --batches.batch-size 4 --batches.length 8 --schedule.kind constant --schedule.warmup 0 "
    "--no-train.tensorboard"
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("text") / "animals.txt")


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "animals"
    assert main(["train", "--data", str(corpus), "--out", str(out), "--train.epochs", "2", *SMALL]) == 0
    return out


# --- training, evaluation, use ---


def test_train_writes_a_model_a_history_and_a_report(trained: Path) -> None:
    report = (trained / "report.html").read_text()
    assert load(trained).hmm.num_states == 4
    assert (trained / "history.jsonl").read_text().count('"event": "valid"') == 2
    assert "Kneser-Ney bigram" in report
    assert "<script" not in report
    assert not re.search(r"""(src|href)=["'](?!data:)""", report)  # nothing from outside
    for name in ("learning-curve", "learning-rate", "transitions", "posterior"):
        assert (trained / "plots" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_resumed_run_equals_a_longer_one(
    trained: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = tmp_path / "short"
    assert main(["train", "--data", str(corpus), *SMALL, "--train.epochs", "1", "--out", str(short)]) == 0
    assert main(["train", "--resume", str(short), "--train.epochs", "2"]) == 0
    assert str(short) in capsys.readouterr().out
    resumed, straight = load(short / "final").hmm, load(trained / "final").hmm
    assert all(torch.equal(*pair) for pair in zip(matrices(resumed), matrices(straight), strict=True))


def test_eval_of_splits_and_of_a_file(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["eval", str(trained)]) == 0
    default = capsys.readouterr().out
    assert main(["eval", str(trained / "best"), "--splits", "valid,test"]) == 0
    both = capsys.readouterr().out
    assert re.search(r"^test +[\d,]+( +[\d.]+){4} +0.00%$", default, re.M)
    assert default.splitlines()[-1].split() == both.splitlines()[-1].split()
    assert both.splitlines()[-2].startswith("valid")
    assert main(["eval", str(trained), "--data", str(trained)]) == 0  # the token files, as `hmmlm data` makes them
    assert capsys.readouterr().out == default
    lm, tokens_of = load(trained), reopen(trained).tokens["test"].tokens.tolist()
    ends = [i + 1 for i, token in enumerate(tokens_of) if token == lm.tokenizer.eos_id]
    examples = [torch.tensor([tokens_of[a:b]]) for a, b in pairwise([0, *ends])]
    exact = sum(lm.hmm.log_likelihood(example).item() for example in examples) / len(tokens_of)
    assert float(default.split()[-5]) == pytest.approx(math.exp(-exact), rel=1e-3)  # however it is cut into streams
    text = tmp_path / "one.txt"
    text.write_text("the cat sees the unicorn .\n")
    assert main(["eval", str(trained), "--data", str(text)]) == 0
    name, tokens, perplexity, _, bits, _, unknown = capsys.readouterr().out.splitlines()[-1].split()
    assert (name, tokens, unknown) == ("one.txt", "7", "16.67%")
    assert float(perplexity) == pytest.approx(load(trained).perplexity(["the cat sees the unicorn ."]), rel=1e-3)
    assert 2 ** float(bits) == pytest.approx(float(perplexity), rel=1e-2)


def test_a_model_away_from_its_run_is_evaluated_on_the_test_split_only(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load(trained).save(tmp_path / "alone")
    assert main(["eval", str(trained)]) == 0
    at_home = capsys.readouterr().out.splitlines()[-1].split()
    assert main(["eval", str(tmp_path / "alone")]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == at_home


def test_sample(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    options = ["sample", str(trained), "--num-samples", "3", "--seed", "4", "--prompt", "the", "--max-new-tokens", "5"]
    texts = []
    for _ in range(2):
        assert main(options) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert [line.split()[0] for line in texts[0].splitlines()] == ["the"] * 3
    assert texts[0].splitlines()[1] == load(trained).generate("the", max_new_tokens=5, seed=5)


def test_inspect(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["inspect", str(trained), "--text", "the cat likes [/b] .", "--num-states", "3"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("4 states")
    for word in ("the", "cat", "likes", "<unk>", "<eos>"):
        assert re.search(rf"^{word} +\d+ +[01]\.\d\d ", out, re.M), word


def test_data_writes_token_files(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for split in ("train", "valid", "test"):
        (folder / f"{split}.txt").write_text(corpus.read_text())
    assert main(["data", str(folder), "--out", str(tmp_path / "tokens"), "--tokenizer.vocab-size", "12"]) == 0
    out = capsys.readouterr().out
    assert "vocabulary 12" in out
    assert (tmp_path / "tokens" / "data" / "train.bin").stat().st_size == 2 * 200 * 8


def test_a_recipe_file_is_where_settings_start_from(corpus: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text(
        f'data = "{corpus}"\n[model]\nnum_states = 3\n[batches]\nbatch_size = 4\n'
        "[train]\nepochs = 1\ntensorboard = false\n"
    )
    assert main(["train", "--config", str(recipe), "--batches.batch-size=8", f"--out={tmp_path / 'out'}"]) == 0
    config = load(tmp_path / "out").config
    assert (config["model"]["num_states"], config["batches"]["batch_size"], config["train"]["epochs"]) == (3, 8, 1)


def test_without_out_a_folder_is_created_and_printed(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--data", str(corpus), "--train.epochs", "1", *SMALL]) == 0
    found = re.search(r"run folder: (runs/animals-\d{8}-\d{6})", capsys.readouterr().out)
    assert found
    assert (tmp_path / found[1] / "best" / "model.safetensors").exists()


def test_idle_threads_do_not_spin_unless_the_user_chooses_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spinning makes training and queries many times slower if one core of two is busy."""
    # torch reads it when it is imported
    program = """
import os, sys
from hmmlm.cli.main import main
main()
print(os.environ.get("GOMP_SPINCOUNT"), "torch" in sys.modules)
"""

    def shown() -> str:
        return run_python(program, "--version").stdout.splitlines()[1]

    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert shown() == "7 False"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    assert shown() == "10000 False"
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    assert shown() == "None False"


def test_the_package_leaves_the_environment_alone() -> None:
    program = """
import os
before = dict(os.environ)
import hmmlm
from hmmlm.cli.main import main
hmmlm.HMM, hmmlm.train, main(["--version"])
added = {name: value for name, value in os.environ.items() if before.get(name) != value}
print(added)
"""
    done = run_python(program)
    assert done.stdout.splitlines()[1:] == ["{}"], (done.stdout, done.stderr)


def test_threads_are_set_for_every_command(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = torch.get_num_threads()
    try:
        assert main(["sample", str(trained), "--num-samples", "1", "--threads", "1"]) == 0
        assert torch.get_num_threads() == 1
        hmmlm.set_threads(2)
        assert torch.get_num_threads() == 2
        assert "--threads" in failure(capsys, "sample", str(trained), "--threads", "0")
        with pytest.raises(InputError, match="threads must be an integer from 1 to 1,024, not 0"):
            hmmlm.set_threads(0)
    finally:
        torch.set_num_threads(before)


def test_words_of_a_prompt_outside_the_vocabulary_are_named(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sample", str(trained), "--num-samples", "2", "--prompt", "zebra <unk> quux", "--seed", "1"]) == 0
    shown = capsys.readouterr()
    assert shown.err == "hmmlm: warning: outside the vocabulary, read as <unk>: 'zebra', 'quux'\n"
    assert shown.out.count("zebra <unk> quux") == 2


def test_inspect_shows_shares_of_the_text_and_checks_the_sentence_first(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["inspect", str(trained)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "long-run" in lines[1] and "share of" in lines[1]
    shares = [float(line.split()[2].rstrip("%")) for line in lines if re.match(r" *\d+ +[\d.]+% +[\d.]+% ", line)]
    assert len(shares) == 4 and sum(shares) == pytest.approx(100, abs=0.3)
    assert shares == sorted(shares, reverse=True)
    load(trained).save(tmp_path / "alone")
    assert main(["inspect", str(tmp_path / "alone")]) == 0
    assert "share of" not in capsys.readouterr().out
    for text in ("", " "):
        assert main(["inspect", str(trained), "--text", text]) == 2
        printed = capsys.readouterr()
        assert printed.out == "" and "at least one word" in printed.err


def test_infill_and_samples_without_unknown_words(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["infill", str(trained), "the ___ sees the ___ .", "--top", "2"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    want = [blank[:2] for blank in load(trained).infill("the ___ sees the ___ .")]
    assert [row[-2:] for row in rows] == [[word, f"{p:.4f}"] for blank in want for word, p in blank]
    assert [row[0] for row in rows if len(row) == 3] == ["1", "2"]
    assert "no blank" in failure(capsys, "infill", str(trained), "the cat")
    assert "--top: Input should be greater than 0" in failure(capsys, "infill", str(trained), "___", "--top", "0")
    options = ["--num-samples", "1", "--seed", "3", "--no-allow-unk"]
    assert main(["sample", str(trained), *options]) == 0
    assert capsys.readouterr().out == load(trained).generate(seed=3, allow_unk=False) + "\n"
    options = ["--num-samples", "2", "--seed", "3", "--max-new-tokens", "12"]
    options += ["--must", "the cat", "--must", "bird", "--never", "dog"]
    assert main(["sample", str(trained), *options]) == 0
    for line in capsys.readouterr().out.splitlines():
        assert "the cat" in line and "bird" in line and "dog" not in line
    assert "no line of at most 2 tokens, <eos> counted, satisfies must" in failure(
        capsys, "sample", str(trained), "--must", "the cat", "--max-new-tokens", "2"
    )


@pytest.mark.slow
def test_a_model_that_learned_little_causes_a_warning(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rate, warned in (("0.001", True), ("0.3", False)):
        options = ["--data", str(corpus), "--out", str(tmp_path / rate), *SMALL, "--optimizer.lr", rate]
        assert main(["train", *options, "--train.epochs", "2"]) == 0
        assert ("little more than word frequencies" in capsys.readouterr().err) == warned


@pytest.mark.slow
def test_the_warning_is_about_the_optimizer_in_use(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["--model.num-states", "4", "--train.epochs", "1", "--no-train.tensorboard"]
    for kind, setting, other in (("adamw", "lr", "step"), ("baum-welch", "step", "lr")):
        options = ["--out", str(tmp_path / kind), *model, "--optimizer.kind", kind, f"--optimizer.{setting}", "0.0001"]
        assert main(["train", "--data", str(corpus), *options]) == 0
        warning = capsys.readouterr().err
        assert f"lower optimizer.{setting} if" in warning and f"optimizer.{other}" not in warning


@pytest.mark.slow
def test_every_family_trains_with_its_own_defaults(corpus: Path, tmp_path: Path) -> None:
    """Factors and networks diverge at the rate of scalar models."""
    for kind, more in (("linear", []), ("neural", ["--model.blocks", "2"])):
        options = [*SMALL, "--model.hidden", "8", "--train.epochs", "1", "--model.kind", kind, *more]
        assert main(["train", "--data", str(corpus), "--out", str(tmp_path / kind), *options]) == 0
        config = json.loads((tmp_path / kind / "config.json").read_text())
        assert config["model"]["kind"] == kind and config["optimizer"]["lr"] <= 0.03
        assert load(tmp_path / kind).perplexity(["the cat sees the bird ."]) < 40


# --- mistakes ---


def test_bad_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "blank.txt").write_text("\n\n \n")
    (tmp_path / "binary.txt").write_bytes(bytes(range(256)) * 4)
    (tmp_path / "latin.txt").write_bytes("déjà vu\n".encode("latin-1"))
    (tmp_path / "short.txt").write_text("one line\n")
    messages = [("empty", "is empty"), ("blank", "only blank"), ("binary", "is not text"), ("latin", "not UTF-8")]
    for name, message in [*messages, ("short", "too few")]:
        error = failure(capsys, "train", "--data", str(tmp_path / f"{name}.txt"), "--out", str(tmp_path / "out"))
        assert message in error
        assert f"{name}.txt" in error
    error = failure(capsys, "train", "--data", str(tmp_path / "none.txt"), "--out", str(tmp_path / "out"))
    assert "no corpus" in error


def test_samples_under_constraints(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--num-samples", "3", "--seed", "1", "--max-new-tokens", "12"]
    for flags in (
        ["--regex", "(the|a) .*"],
        ["--choice", "the", "--choice", "a"],
        ["--words", "2-4"],
        ["--tokens", "3"],
    ):
        assert main(["sample", str(trained), *options, *flags]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 3
        if "--regex" in flags:
            assert all(line.startswith(("the ", "a ")) for line in lines)
        if "--choice" in flags:
            assert set(lines) <= {"the", "a"}
    assert "give a range of numbers such as 5-12" in failure(capsys, "sample", str(trained), "--words", "two")
    assert "lookahead" in failure(capsys, "sample", str(trained), "--regex", "(?=a)b")


def test_bad_models(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("eval", "sample", "inspect"):
        assert "the folder does not exist" in failure(capsys, command, str(tmp_path / "nothing"))
    save_ctrlg(load(trained).hmm, tmp_path / "foreign", 1)
    assert "no tokenizer in" in failure(capsys, "sample", str(tmp_path / "foreign"))
    load(trained).save(tmp_path / "cut")
    whole = (tmp_path / "cut" / "model.safetensors").read_bytes()
    (tmp_path / "cut" / "model.safetensors").write_bytes(whole[:100])
    assert "truncated" in failure(capsys, "eval", str(tmp_path / "cut"))
    load(trained).save(tmp_path / "other")
    words = (tmp_path / "other" / "tokenizer.json").read_text()
    (tmp_path / "other" / "tokenizer.json").write_text(words.replace('"cat"', '"cow"'))
    assert "is not the one the model was trained with" in failure(capsys, "inspect", str(tmp_path / "other"))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["sample", "--num-samples", "0"], "--num-samples: Input should be greater than 0 (given '0')"),
        (["sample", "--seed", "-1"], "--seed: Input should be greater than or equal to 0 (given '-1')"),
        (["sample", "--temperature", "-1"], "--temperature: Input should be greater than or equal to 0"),
        (["sample", "--top-k", "0"], "--top-k: Input should be greater than 0 (given '0')"),
        (["inspect", "--num-states", "0"], "--num-states: Input should be greater than 0 (given '0')"),
        (["inspect", "--text", " "], "at least one word"),
        (["eval", "--splits", "valid,dev"], "--splits.1: Input should be 'train', 'valid' or 'test' (given 'dev')"),
        (["eval", "--data", "nowhere.txt"], "no corpus 'nowhere.txt'"),
    ],
)
def test_bad_questions(trained: Path, argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in failure(capsys, argv[0], str(trained), *argv[1:])


def test_a_run_is_not_overwritten_nor_resumed_with_another_model(
    trained: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "already contains a run" in failure(capsys, "train", "--data", str(corpus), "--out", str(trained), *SMALL)
    assert "model.num_states is 9" in failure(capsys, "train", "--resume", str(trained), "--model.num-states", "9")


def test_places_that_cannot_be_written(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    error = failure(capsys, "train", "--data", str(corpus), "--out", str(tmp_path / "file" / "run"), *SMALL)
    assert "file" in error


def test_errors_of_the_system_are_one_line_and_bugs_are_tracebacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def raising(error: Exception) -> None:
        def run(argv: list[str]) -> int:
            raise error

        monkeypatch.setattr("hmmlm.cli.sample.run", run)

    raising(PermissionError(13, "Permission denied", "/root/x"))
    assert "error: /root/x: Permission denied" in failure(capsys, "sample")
    raising(OSError(28, "No space left on device"))
    assert "error: No space left on device" in failure(capsys, "sample")
    raising(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4000000000000 bytes"))
    assert "not enough memory: use fewer states" in failure(capsys, "sample")
    raising(KeyError("a bug"))
    with pytest.raises(KeyError):
        main(["sample"])
    monkeypatch.setattr("hmmlm.cli.sample.run", lambda argv: (_ for _ in ()).throw(KeyboardInterrupt))
    assert main(["sample"]) == 130
    assert "interrupted" in capsys.readouterr().err


# --- processes ---


def start(*argv: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "hmmlm", *argv]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, text=True, env=python_environment(), stdout=pipe, stderr=pipe)


@pytest.mark.slow
def test_an_interrupted_process_prints_how_to_resume(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = start("train", "--data", str(corpus), "--out", str(out), "--train.epochs", "100000", *SMALL)
    try:
        for _ in range(3000):  # until training has started
            if (out / "best").exists() or process.poll() is not None:
                break
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        output, error = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 130, error
    assert f"hmmlm train --resume {out}" in output
    assert "Traceback" not in error
    config, (_, state) = saved_config(RunConfig, out), read_checkpoint(out / "last")
    longer = config.train.model_copy(update={"max_tokens": state["position"]["tokens"] + 100})
    assert train(config.model_copy(update={"train": longer}), out, resume=True).finished


@pytest.mark.slow
def test_a_closed_pipe_ends_the_process_without_a_message(trained: Path) -> None:
    process = start("sample", str(trained), "--num-samples", "100000")
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=300) == 141
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.stderr.close()


@pytest.mark.slow
def test_a_missing_extra_is_named_before_training_is_imported() -> None:
    program = """
import importlib.util, sys
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "transformers" else find_spec(name, *more)
from hmmlm.cli.main import main
assert main(["train", "--initialization.kind", "lvd", "--initialization.teacher", "gpt2"]) == 2
assert "hmmlm.training.train" not in sys.modules
"""
    done = run_python(program)
    assert done.returncode == 0, done.stderr
    assert "a teacher on the hub needs transformers, which the extra hmmlm[teacher] installs" in done.stderr
