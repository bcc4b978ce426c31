"""Hostile command lines and files: each is answered with one line and exit code 2, soon and without much memory."""

from __future__ import annotations

import gzip
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.commands import failure, python_environment, run_python

from hmmlm.cli.main import main
from hmmlm.data import text
from hmmlm.data.text import Pipe
from hmmlm.data.words import WordTokenizer
from hmmlm.errors import InputError
from hmmlm.hmm import HMM
from hmmlm.lm.lm import LanguageModel, load
from hmmlm.lm.mixture import MixtureModel
from hmmlm.lm.predictors import CachePredictor, HmmPredictor

SMALL = shlex.split(
    "--model.num-states 4 --batches.batch-size 4 --batches.length 8 --train.epochs 1 --no-train.tensorboard"
)
BILLION, OVER_64_BITS = str(10**9), str(2**64)
WORDS = ["<unk>", "<eos>", "the", "cat", "[red]", "\x1b[31mred", "$x^$", "é"]
NO_HMM = (
    "mixture is a model of `hmmlm mix`, not of `hmmlm train`: a mixture is not an HMM; give one of its HMMs, which are "
    "in its folders 0, 1, …, or use `hmmlm eval`, `score`, `sample` or `compare`\n"
)
TEXT = "the cat é $x^$ [red] \x1b[31mred\n"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model and texts of all kinds."""
    folder = tmp_path_factory.mktemp("hostile")
    generator = torch.Generator().manual_seed(0)
    sizes = ((3,), (3, 3), (3, len(WORDS)))
    hmm = HMM(*(torch.randn(*size, generator=generator).log_softmax(-1) for size in sizes))
    lm = LanguageModel(hmm, WordTokenizer(WORDS))
    lm.save(folder / "model")
    MixtureModel([HmmPredictor(lm), CachePredictor(9, len(WORDS))], [0.5, 0.5], lm.tokenizer).save(folder / "mixture")
    content = "".join(f"{i % 7} {TEXT}" for i in range(100))
    for name in ("text.txt", "[red].txt", "\x1b[31mred.txt"):
        (folder / name).write_text(content)
    (folder / "zeros.txt").write_bytes(bytes(1 << 20))
    (folder / "utf16.txt").write_text(content, encoding="utf-16")
    (folder / "blank.txt").write_text("\n \n")
    (folder / "mark.txt").write_bytes(b"\xef\xbb\xbf")
    with gzip.open(folder / "line.txt.gz", "wb", compresslevel=1) as file:
        file.write(b"a" * (20 << 20))
    (folder / "loop.txt").symlink_to(folder / "loop.txt")
    (folder / "zero.toml").symlink_to("/dev/zero")
    (folder / "deep.toml").write_text("a = " + "[" * 5_000)
    (folder / "broken.toml").write_text('[train]\nepochs = "many"\n')
    os.mkfifo(folder / "pipe")
    for name, schema in (("deep", "[" * 100_000), ("number", "3"), ("torn", "{")):
        (folder / f"{name}.json").write_text(schema)
    optional = {"type": "object", "properties": {f"k{i}": {"$ref": "#"} for i in range(3_000)}}
    (folder / "optional.json").write_text(json.dumps(optional))
    return folder


OPTIONS = [
    # numbers: every size has a bound, whatever its family
    ("train --model.num-states {over}", "--model.num-states: Input should be less than or equal to 4194304"),
    ("train --model.num-states {billion}", "--model.num-states: Input should be less than or equal to"),
    ("train --model.num-states 1e9", "--model.num-states: Input should be a valid integer"),
    ("train --model.num-states 0x10", "--model.num-states: Input should be a valid integer"),
    ("train --model.num-states ''", "--model.num-states: Input should be a valid integer"),
    ("train --model.num-states 1.5", "--model.num-states: Input should be a valid integer"),
    ("train --model.num-states []", "--model.num-states: Input should be a valid integer"),
    ("train --model.blocks {billion}", "--model.blocks: Input should be less than or equal to 65536"),
    ("train --model.blocks -1", "--model.blocks: Input should be greater than or equal to 0"),
    ("train --model.scale 1e300", "--model.scale: Input should be less than or equal to 100"),
    ("train --model.exchange-passes {billion}", "--model.exchange-passes: Input should be less than"),
    ("train --model.kind linear --model.hidden {over}", "--model.hidden: Input should be less than"),
    ("train --model.kind linear --model.capacity {over}", "--model.capacity: Input should be less than"),
    ("train --model.kind mlp --model.layers {billion}", "--model.layers: Input should be less than or equal to 1000"),
    ("train --model.kind transformer --model.layers {billion}", "--model.layers: Input should be less than"),
    ("train --model.kind transformer --model.heads {billion}", "--model.heads: Input should be less than"),
    ("train --model.kind neural --model.num-states {over}", "--model.num-states: Input should be less than"),
    (
        "train --model.kind uniform --model.states-per-word {over}",
        "--model.states-per-word: Input should be less than",
    ),
    ("train --train.seed {over}", "--train.seed: Input should be less than 9223372036854775808"),
    ("train --train.log-every {billion}", "--train.log-every: Input should be less than or equal to 100000"),
    (
        "train --train.checks-per-epoch {billion}",
        "--train.checks-per-epoch: Input should be less than or equal to 1000",
    ),
    ("train --train.checkpoint-every {over}", "--train.checkpoint-every: Input should be less than"),
    ("train --train.epochs {over}", "--train.epochs: Input should be less than or equal to 1000000"),
    ("train --train.max-tokens {over}", "--train.max-tokens: Input should be less than"),
    ("train --batches.batch-size {billion}", "--batches.batch-size: Input should be less than"),
    ("train --batches.length {over}", "--batches.length: Input should be less than"),
    ("train --tokenizer.vocab-size {over}", "--tokenizer.vocab-size: Input should be less than"),
    ("train --tokenizer.min-count {over}", "--tokenizer.min-count: Input should be less than"),
    ("train --tokenizer.kind bpe --tokenizer.vocab-size {billion}", "--tokenizer.vocab-size: Input should be less"),
    ("train --optimizer.lr 1e300", "--optimizer.lr: Input should be less than or equal to 1000"),
    ("train --optimizer.lr nan", "--optimizer.lr: Input should be a finite number"),
    ("train --optimizer.lr 1e400", "--optimizer.lr: Input should be"),
    ("train --optimizer.eps 2", "--optimizer.eps: Input should be less than"),
    ("train --optimizer.max-grad-norm 1e300", "--optimizer.max-grad-norm: Input should be less than"),
    ("train --optimizer.weight-decay 1e38", "--optimizer.weight-decay: Input should be less than"),
    ("train --optimizer.kind baum-welch --optimizer.pseudocount 1e38", "--optimizer.pseudocount: Input should be less"),
    ("train --schedule.warmup 1e300", "--schedule.warmup: Input should be less than"),
    ("train --schedule.kind plateau --schedule.factor 1e300", "--schedule.factor: Input should be less than"),
    ("train --schedule.kind plateau --schedule.patience {over}", "--schedule.patience: Input should be less than"),
    ("train --init lvd --teacher x --initialization.layer {over}", "--initialization.layer: Input should be less than"),
    ("train --init lvd --teacher x --initialization.tokens {over}", "--initialization.tokens: Input should be less"),
    ("train --init lvd --teacher x --initialization.kmeans.seed -1", "--initialization.kmeans.seed: Input should be"),
    ("teacher --model.hidden {over}", "--model.hidden: Input should be less than"),
    ("teacher --model.layers {billion}", "--model.layers: Input should be less than"),
    ("baseline --model.layers {billion}", "--model.layers: Input should be less than"),
    ("baseline --model.kind feedforward --model.order {billion}", "--model.order: Input should be less than"),
    ("data {place}/text.txt --out new --clusters {billion}", "--clusters: Input should be less than or equal to 4096"),
    # values that are not what they should be
    ("train --optimizer.betas " + "[" * 100_000, "nested too deeply"),
    ("train --model '" + '{{"num_states":' * 5_000 + "'", "nested too deeply"),
    ("train --data a --model.kind \udcff", r"the argument '\udcff' is not UTF-8"),
    ("train --\udcff", "is not UTF-8"),
    ("\udcff", "is not UTF-8"),
    ("train --recipe ../../x", "no recipe named"),
    ("train --recipe ''", "no recipe named"),
    ("train --help \udcff", "is not UTF-8"),
    ("train --config {place}/zero.toml", "zero.toml is not a file"),
    ("train --config {place}/deep.toml", "deep.toml: not valid TOML"),
    ("train --config {place}/broken.toml", "broken.toml: train.epochs: Input should be a valid integer"),
    ("train --resume /dev/zero", "no run to resume in /dev/zero"),
    ("train --resume {place}/pipe", "no run to resume in"),
    ("eval", "the following arguments are required: MODEL"),
    ("eval {place}/model --splits", "argument --splits: expected one argument"),
    ("eval {place}/model --splits ''", "--splits.0: Input should be 'train', 'valid' or 'test'"),
    ("eval {place}/model --splits ,", "--splits.0: Input should be 'train', 'valid' or 'test'"),
    ("sample {place}/model --num-samples {over}", "--num-samples: Input should be less than or equal to 1000000"),
    ("sample {place}/model --max-new-tokens {over}", "--max-new-tokens: Input should be less than"),
    ("sample {place}/model --seed {over}", "--seed: Input should be less than"),
    ("sample {place}/model --temperature inf", "--temperature: Input should be a finite number"),
    ("sample {place}/model --prompt \udcff", "is not UTF-8"),
]
FILES = [
    ("train --data /dev/zero", "/dev/zero is a device, not a text file"),
    ("train --data /dev/urandom", "/dev/urandom is a device"),
    ("train --data {place}/pipe", "pipe is a pipe, which can be read only once"),
    ("train --data {place}/line.txt.gz", "line.txt.gz: line 1 is longer than 16 MiB"),
    ("train --data {place}/zeros.txt", "zeros.txt is not text, or is in UTF-16: it has a NUL at byte 0; convert it"),
    ("train --data {place}/utf16.txt", "utf16.txt is not"),
    ("train --data {place}/blank.txt", "blank.txt has only blank lines"),
    ("train --data {place}/mark.txt", "mark.txt has only blank lines"),
    ("train --data {place}/loop.txt", "no corpus"),
    ("train --data ''", "data is empty: give a file or a folder"),
    ("train --data '\x1b[31mnothing'", r"no corpus '\x1b[31mnothing'"),
    ("train --data {place}/text.txt --out '{place}/\x1b[31mred.txt'", r"\x1b[31mred.txt is a file"),
    ("train --data {place}/text.txt --out /dev/null/x", "/dev/null/x"),
    ("train --data {place}/text.txt --tokenizer.kind file --tokenizer.file /dev/zero", "not a regular file"),
    ("train --data {place}/text.txt --tokenizer.kind file --tokenizer.file {place}/pipe", "not a regular file"),
    ("train --data {place}/text.txt --model.blocks 2 --model.clusters /dev/zero", "model.clusters: no file /dev/zero"),
    ("eval {place}/model --data /dev/zero", "/dev/zero is a device, not a text file"),
    ("eval {place}/model --data {place}/line.txt.gz", "line 1 is longer than 16 MiB"),
    ("eval {place}/model --data {place}/zeros.txt", "it has a NUL at byte 0"),
    ("eval {place}/model --data {place}", "a corpus folder needs train, valid and test"),
    ("eval /dev/zero", "/dev/zero is a file, but a model is a folder"),
    ("eval {place}/pipe", "pipe is a file, but a model is a folder"),
    ("data /dev/zero --out {place}/tokens", "/dev/zero is a device"),
    ("data {place}/pipe --out {place}/tokens", "can be read only once"),
    ("infill {place}/model 'no blank'", "the text has no blank"),
    ("infill {place}/model ___ --top 0", "--top: Input should be greater than 0"),
    ("inspect {place}/model --contexts", "--contexts needs the text of a run"),
    ("sample {place}/model --must ''", "is not a word or phrase"),
    ("sample {place}/model --must zebra", "has a word outside the vocabulary"),
    ("sample {place}/model --never '<eos>'", "is not a word or phrase"),
    ("sample {place}/model --temperature 1e300", "temperature must be at most 1e+18, not 1e+300"),
    ("sample {place}/model --regex 'a{{1,100000}}'", "needs more than 400,000,000 steps to compile"),
    (
        "sample {place}/model --regex '(zebra){{4000000000}}'",
        "needs more than 400,000,000 steps to compile",
    ),
    ("sample {place}/model --regex '[z-a]'", "is not a regular expression: bad character range z-a"),
    (
        "sample {place}/model --json-schema {place}/optional.json",
        "steps to compile: list optional properties",
    ),
    ("sample {place}/model --json-schema {place}/deep.json", "deep.json is nested too deeply"),
    ("sample {place}/model --json-schema {place}/number.json", "json: give a schema as a dictionary or its text"),
    ("sample {place}/model --json-schema {place}/torn.json", "torn.json is truncated or not JSON"),
    ("sample {place}/model --json-schema /dev/zero", "it is not a regular file"),
    ("sample {place}/model --words 12-5", "words: 12 to 5 is empty"),
    ("sample {place}/model --words -", "--words: give a range of numbers such as 5-12, 5- or -12, not '-'"),
    (f"sample {{place}}/model --words {'9' * 5000}", "--words: give a range of numbers such as 5-12, 5- or -12"),
    ("sample {place}/model --tokens 3-99999", "tokens: give (min, max), integers from 0 to 10,000"),
    ("score {place}/model /dev/zero", "/dev/zero is a device, not a text file"),
    ("score {place}/model {place}", "is a folder: give a text file"),
    ("score {place}/model {place}/loop.txt", "Too many levels of symbolic links"),
    ("score {place}/model {place}/zeros.txt", "it has a NUL at byte 0"),
    ("score '' {place}/text.txt", "model is empty: give a file or a folder"),
    ("compare {place}/model {place}/model --data /dev/zero", "/dev/zero is a device, not a text file"),
    ("compare {place}/model {place}/none", "none: the folder does not exist"),
    ("runs /dev/zero", "no runs in the folder /dev/zero"),
    ("join {place}/model {place}/model --out /dev/null/x --weights 0.5,0.5", "cannot save to /dev/null/x"),
    ("join {place}/model {place}/model --out {place}/new --weights nan,1", "Input should be a finite number"),
    ("mix {place}/model --out {place}/new", "a mixture needs at least two models"),
    ("eval {place}/model ''", "unexpected argument ''"),
    ("eval {place}/model --data ''", "data is empty"),
    ("compare {place}/model {place}/model --data ''", "data is empty"),
    ("ngram {place}/model --out ''", "out is empty"),
    ("mix {place}/model --ngram 99 --out {place}/new", "--ngram: Input should be less than or equal to 10"),
    ("ngram {place} --order 5", "has no token files"),
    ("distill {place}/text.txt --out {place}/new", "no teacher at"),
    ("distill {place}/none.gguf --out {place}/new", "/none.gguf: give a folder, a .gguf file or a name"),
    ("distill {place}/model --gguf-file none.gguf --out {place}/new", "no file none.gguf in the teacher folder"),
    ("train --data {place}/text.txt --init lvd --teacher {place}/none", "no teacher at"),
    (
        "train --data {place}/text.txt --model.kind pretrained --model.teacher {place}/none",
        "no teacher at",
    ),
    ("teacher --convert {place}/text.txt --out {place}/new", "is not a GGUF file"),
    ("baseline --resume {place}/model", "config.json does not belong to a run of `hmmlm baseline`"),
    ("explore {place}/model --port 99999999", "--port: Input should be less than or equal to 65535"),
    ("explore {place}/model {place}/none", "none: the folder does not exist"),
    ("explore {place}/model --export {place}", "is a folder: give the name of a file"),
    # a mixture where an HMM is needed
    ("infill {place}/mixture ___", NO_HMM),
    ("inspect {place}/mixture", NO_HMM),
    ("explore {place}/mixture", NO_HMM),
    ("explore {place}/model {place}/mixture --export {place}/new", NO_HMM),
    ("join {place}/model {place}/mixture --out {place}/new", NO_HMM),
    ("sample {place}/mixture --must cat", "a mixture is not an HMM, so it cannot sample under a constraint"),
]


def split(command: str, place: Path) -> list[str]:
    return shlex.split(command.format(place=place, billion=BILLION, over=OVER_64_BITS))


@pytest.mark.parametrize(("command", "message"), OPTIONS, ids=[command[:60] for command, _ in OPTIONS])
def test_mistakes_in_options(command: str, message: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in failure(capsys, *split(command, place))


@pytest.mark.parametrize(("command", "message"), FILES, ids=[command[:60] for command, _ in FILES])
def test_files_that_are_no_text(command: str, message: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = split(command, place)
    if argv[0] == "train":
        argv += SMALL + ([] if "--out" in argv else ["--out", str(place / "new")])
    assert message in failure(capsys, *argv)
    assert not (place / "new").exists()


def test_mistakes_in_options_are_found_without_torch() -> None:
    """Run them in a process of its own, because this one has imported torch."""
    program = """
import sys
from hmmlm.cli.main import main
for line in ("data", "eval", "sample m --num-samples 0", "infill", "inspect", "demo x"):
    assert main(line.split()) == 2, line
    assert "torch" not in sys.modules, line
"""
    done = run_python(program)
    assert done.returncode == 0, done.stderr


# --- sizes ---


@pytest.mark.parametrize(
    "options",
    [
        "--model.num-states 40000",
        "--model.kind linear --model.num-states 100000",
        "--model.kind mlp --model.hidden 65536",
        "--model.kind mlp --model.layers 1000 --model.hidden 2048",
        "--model.kind transformer --model.capacity 1000000000000",
        "--model.kind neural --model.num-states 100000 --model.blocks 1",
        "--model.kind uniform --model.num-states 65536",
    ],
)
def test_models_that_cannot_fit_are_refused_before_the_text_is_read(
    options: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hmmlm.training.prepare.total_memory", lambda device: 16 * 10**9)
    argv = ["train", "--data", str(place / "text.txt"), "--out", str(place / "new"), *options.split()]
    assert re.search(r"takes at least [\d,]+ GB, and this machine has 16 GB", failure(capsys, *argv))
    assert not (place / "new").exists()


def test_a_vocabulary_that_cannot_fit_is_refused_before_the_model_is_made(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    states, words = 100, 15
    monkeypatch.setattr("hmmlm.training.prepare.total_memory", lambda device: 24 * states * (states + words) - 1)
    argv = ["train", "--data", str(place / "text.txt"), "--out", str(place / "new"), "--tokenizer.split", "whitespace"]
    assert "takes at least" in failure(capsys, *argv, "--model.num-states", str(states))
    assert not (place / "new").exists()


def test_more_blocks_than_words_are_refused_before_clustering(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["train", "--data", str(place / "text.txt"), "--out", str(place / "new"), "--model.num-states", "60000"]
    argv += ["--model.kind", "neural", "--model.hidden", "2"]
    message = "model.blocks is 60,000, but the training text has 19 different words: set it to 9 or less"
    assert message in failure(capsys, *argv, "--model.blocks", "60000")
    (place / "words.txt").write_text(
        "".join(f"word{i} word{7 * i % 12_000} word{11 * i % 12_000}\n" for i in range(12_000))
    )
    argv[2] = str(place / "words.txt")
    assert "into more than 4,096 takes hours" in failure(
        capsys, *argv, "--model.blocks", "5000", "--tokenizer.vocab-size", "20000"
    )


def test_a_constraint_of_a_million_tokens_takes_no_longer_than_its_recursion_needs(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(place / "model")
    assert main(["sample", model, "--must", "the cat", "--max-new-tokens", "1000000", "--num-samples", "2"]) == 0
    assert capsys.readouterr().out.count("the cat") >= 2
    lm = load(model)
    long, short = (lm.guide(["the cat"], max_new_tokens=tokens) for tokens in (1_000_000, 5_000))
    assert len(long[0]._tables) < 1_000
    torch.testing.assert_close(long[0].next_token(long[1]), short[0].next_token(short[1]))


# --- what is printed ---


@pytest.mark.slow
def test_odd_words_train_and_are_printed_without_effect(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = place / "\x1b[31modd"
    options = ["--tokenizer.split", "whitespace", *SMALL]
    assert main(["train", "--data", str(place / "\x1b[31mred.txt"), "--out", str(run), *options]) == 0
    assert (run / "report.html").exists()  # the plots have labels such as "$x^$"
    out, error = capsys.readouterr()
    assert "\x1b" not in out + error
    assert all(rf"{place}/\x1b[31modd{end}" in out for end in ("\n", "/best\n", "/report.html\n"))
    for argv in (
        ["sample", str(run), "--num-samples", "20", "--seed", "1"],
        ["infill", str(run), "the ___ é", "--top", "20"],
        ["inspect", str(run), "--contexts", "--text", "$x^$ [red] \x1b[31mred [/b]"],
        ["eval", str(run), "--data", str(place / "\x1b[31mred.txt")],
        ["eval", str(place / "model"), "--data", str(place / "\x1b[31mred.txt")],  # with a warning that names it
        ["data", str(place / "text.txt"), "--out", str(place / "\x1b[31mred"), "--clusters", "2"],
        ["explore", str(run), "--export", str(place / "\x1b[31mred.html")],
    ):
        assert main(argv) == 0
        out, error = capsys.readouterr()
        assert "\x1b" not in out + error, argv
        assert r"\x1b[31mred" in out
    assert main(["eval", str(run), "--data", str(place / "[red].txt")]) == 0
    assert "[red].txt" in capsys.readouterr().out
    assert main(["data", str(place / "text.txt"), "--out", str(place / "[bold]tokens")]) == 0
    assert "[bold]tokens" in capsys.readouterr().out


@pytest.mark.slow
def test_an_ascii_terminal(place: Path) -> None:
    environment = {**python_environment(), "PYTHONIOENCODING": "ascii"}
    done = hmmlm("sample", str(place / "model"), "--num-samples", "20", "--seed", "1", env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii() and r"\xe9" in done.stdout
    assert hmmlm("train", "--help", "all", env=environment).returncode == 0
    done = hmmlm("eval", "é", env=environment)
    assert (done.returncode, done.stderr) == (2, "hmmlm: error: no model at \\xe9: the folder does not exist\n")


def hmmlm(*argv: str | bytes, env: dict[str, str] | None = None, **options: object) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    command = [sys.executable, "-m", "hmmlm", *argv]
    return subprocess.run(command, env=env or python_environment(), text=True, timeout=300, **streams)  # type: ignore[call-overload, no-any-return]


def test_arguments_that_are_not_utf_8(place: Path) -> None:
    done = hmmlm("eval", os.fsencode(place / "model"), b"--data", b"bad\xff.txt")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(r"hmmlm: error: the argument 'bad\udcff.txt' is not UTF-8")


def test_a_terminal_that_is_not_utf_8_is_blamed_and_not_the_file(place: Path) -> None:
    environment = {**python_environment(), "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = hmmlm("eval", os.fsencode(place / "model"), b"--data", "é.txt".encode(), env=environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        r"hmmlm: error: the argument '\udcc3\udca9.txt' is UTF-8, but this terminal is set to ascii: run with "
        "LC_ALL=C.UTF-8 or PYTHONUTF8=1\n"
    )
    done = hmmlm("eval", os.fsencode(place / "model"), b"--data", b"bad\xff.txt", env=environment)
    assert "is not UTF-8: rename the file" in done.stderr


@pytest.mark.slow
def test_standard_output_that_is_closed_or_full(place: Path) -> None:
    model = str(place / "model")
    done = hmmlm("sample", model, stdout=None, preexec_fn=lambda: os.close(1))
    assert done.returncode == 2
    assert done.stderr == "hmmlm: error: standard output is closed: redirect it to a file, or to /dev/null\n"
    with open("/dev/full", "w") as full:
        done = hmmlm("sample", model, stdout=full)
    assert (done.returncode, done.stderr) == (2, "hmmlm: error: No space left on device\n")
    assert hmmlm("sample", model, stderr=None, preexec_fn=lambda: os.close(2)).returncode == 0


@pytest.mark.slow
def test_training_into_a_closed_pipe_ends_without_a_message(place: Path) -> None:
    out = place / "piped"
    argv = ["train", "--data", str(place / "text.txt"), "--out", str(out), *SMALL, "--train.epochs", "1000"]
    command = [sys.executable, "-m", "hmmlm", *argv]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, text=True, env=python_environment(), stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None and process.stderr is not None
        while "epoch 1.00" not in process.stdout.readline():
            assert process.poll() is None
        process.stdout.close()
        assert process.wait(timeout=300) == 141
        assert process.stderr.read() == ""
    assert (out / "last").exists()  # and can be resumed


# --- pipes ---


@pytest.mark.slow
def test_a_pipe_is_evaluated_like_the_file(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command, text = [sys.executable, "-m", "hmmlm", "eval", str(place / "model"), "--data"], str(place / "text.txt")
    capsys.readouterr()
    assert main([*command[3:], text]) == 0
    outputs = [capsys.readouterr().out]
    # The second writer is slow: a pipe is refused only if it has none.
    for shell in (f"cat {text} | {shlex.join(command)} /dev/stdin", f"{shlex.join(command)} <(sleep 4; cat {text})"):
        done = subprocess.run(
            ["bash", "-c", shell], env=python_environment(), capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    figures = {tuple(output.splitlines()[-1].split()[1:]) for output in outputs}
    assert len(figures) == 1 and "800" in next(iter(figures))


@pytest.mark.slow
def test_a_pipe_without_a_writer(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nothing was written to the pipe" in failure(
        capsys, "eval", str(place / "model"), "--data", str(place / "pipe")
    )


def test_a_writer_that_is_silent(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = os.open(place / "pipe", os.O_RDWR)
    message = r"nothing was written to .*/pipe in 0 s: give a file"
    with Pipe(place / "pipe", timeout_s=0.05, silence_s=0.2) as pipe, pytest.raises(InputError, match=message):
        pipe.read()
    os.close(writer)
    assert "waiting for text from" in caplog.text


def test_a_writer_that_never_ends(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    message = "pipe has more than 1 MiB of text, maybe no end: save it"
    with (place / "pipe").open("rb+", buffering=0) as pipe, subprocess.Popen(["yes", "the cat"], stdout=pipe) as yes:
        with Pipe(place / "pipe", most=1 << 20) as reader, pytest.raises(InputError, match=message):
            reader.readall()
        yes.kill()
    assert "of text read from" in caplog.text


def test_a_file_of_the_kernel_has_no_size_but_a_text(place: Path) -> None:
    assert next(iter(text.read_lines(Path("/proc/self/status")))).startswith("Name:")
    (place / "empty.txt").write_text("")
    with pytest.raises(InputError, match=r"empty\.txt is empty"):
        list(text.read_lines(place / "empty.txt"))
