"""The command line: help that is true, settings from recipes and options, and mistakes answered with one line."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from helpers import options
from helpers.commands import ParsedError, failure, help_text, only_parse, options_of, run_python
from helpers.runs import tiny_config, write_text

from hmmlm.cli import parse as parsing
from hmmlm.cli.main import COMMANDS, main
from hmmlm.cli.parse import parse
from hmmlm.cli.train import OVERVIEW, SHORTCUTS
from hmmlm.cli.training import BaselineArguments, TeacherArguments, TrainArguments, config_of
from hmmlm.config.explain import member_types
from hmmlm.config.recipe import load_recipe, recipe_names
from hmmlm.config.run import RunConfig
from hmmlm.models.factored import LinearConfig
from hmmlm.models.scalar import ScalarConfig
from hmmlm.training.train import train

TRAINING = {"train": TrainArguments, "teacher": TeacherArguments, "baseline": BaselineArguments}


def parsed(*argv: str) -> RunConfig:
    """Return the configuration that `hmmlm train` would train with."""
    config = config_of(RunConfig, parse(TrainArguments, list(argv), "train", OVERVIEW, SHORTCUTS))
    assert isinstance(config, RunConfig)
    return config


# --- help ---


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ([], ["--help"], ["-h"]):
        out = help_text(capsys, *argv)
        assert all(f"  {command} " in out for command in COMMANDS)
    assert help_text(capsys, "--version").startswith("hmmlm 0")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command_has_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = help_text(capsys, command, "--help")
    assert f"\n  hmmlm {command}" in out
    assert max(map(len, out.splitlines())) <= 100
    assert not re.search(r"noqa|fmt:|type: ignore|pydantic|SUPPRESS|undefined", out)


def test_the_first_screen_of_train_fits_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    out = help_text(capsys, "train", "--help")
    assert len(out.splitlines()) <= 40
    assert all(name in out for name in recipe_names())


@pytest.mark.parametrize("columns", [5, 30, 40, 79])
def test_help_fits_a_narrow_terminal(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for argv in (["--help"], *([command, "--help"] for command in COMMANDS), ["train", "--help", "all"]):
        monkeypatch.setenv("COLUMNS", "100")
        wide = help_text(capsys, *argv)
        monkeypatch.setenv("COLUMNS", str(columns))
        narrow = help_text(capsys, *argv)
        assert re.sub(r"\s", "", wide) == re.sub(r"\s", "", narrow)  # nothing is cut, nor moved
        for line in narrow.splitlines():  # a word, an option, an example and the usage may be longer
            whole = len(line.split()) == 1 or re.match(r"usage: | +-| *hmmlm ", line) or columns < 20
            assert len(line) <= columns or whole, line


def test_help_does_not_import_torch() -> None:
    """Run every help in a process of its own, because this one has imported torch."""
    program = """
import sys
from hmmlm.cli.main import COMMANDS, main
for argv in [["--help"], ["--version"], *([command, "--help"] for command in COMMANDS)]:
    try:
        assert main(argv) == 0
    except SystemExit as end:
        assert end.code == 0
    assert "torch" not in sys.modules, argv
"""
    done = run_python(program)
    assert done.returncode == 0, done.stderr


def test_an_unknown_option_is_answered_without_importing_torch() -> None:
    """Run every mistake in a process of its own, because this one has imported torch."""
    program = """
import sys
from hmmlm.cli.main import COMMANDS, main
mistakes = ["--no-such-option"], ["x", "--bogus=3"], ["--data", "x", "--model.num-staes", "3"]
for argv in ([command, *mistake] for command in COMMANDS for mistake in mistakes):
    assert main(argv) == 2
    assert "torch" not in sys.modules, argv
"""
    done = run_python(program)
    assert done.returncode == 0, done.stderr
    errors = done.stderr.splitlines()
    assert len(errors) == 3 * len(COMMANDS) and all(error.startswith("hmmlm: error: ") for error in errors)
    assert (
        "hmmlm: error: unknown option --model.num-staes; did you mean --model.num-states?; see hmmlm train --help"
        in errors
    )


def test_the_recorded_options_are_those_of_the_parsers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsing, "check_options", lambda command, argv: None)
    assert options.FILE.read_text() == options.options_text(), "run `make options`"


def test_values_are_no_unknown_options(capsys: pytest.CaptureFixture[str]) -> None:
    parsing.check_options("train", ["--data=--x", "--out", "--a file", "--threads", "-1", "--", "--x"])
    parsing.check_options("sample", ["--x"])  # its parser finds the mistake
    assert "unknown option --modle.states; did you mean --model.num-states?" in failure(
        capsys, "train", "--modle.states=3", "--out"
    )


@pytest.mark.parametrize("command", TRAINING)
def test_everything_on_the_first_screen_exists(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    screen = help_text(capsys, command, "--help")
    shown_options = set(re.findall(r"--[a-z][\w.-]*", re.sub(r"\(hmmlm [^)]*\)", "", screen)))  # not of another command
    assert {"--data", "--out", "--resume", "--train.epochs"} <= shown_options
    assert shown_options <= options_of(command)
    sections = re.search(r"SECTION is (.*), or all", screen)
    assert sections is not None
    for section in sections[1].split(", "):
        assert f"--{section}." in help_text(capsys, command, "--help", section)
    for section, kinds in re.findall(r"--(\w+)\.kind KIND +(.*)", screen):
        members = member_types(TRAINING[command].model_fields[section])
        shown, _, more = kinds.replace(" (default)", "").partition(", …")
        existing = {str(member.model_fields["kind"].default) for member in members}
        assert set(shown.split(", ")) <= existing
        assert more or len(shown.split(", ")) == len(existing)
        default = TRAINING[command].model_fields[section].default
        assert f"{default.kind} (default)" in kinds


@pytest.mark.parametrize("command", COMMANDS)
def test_every_example_of_the_help_can_be_parsed(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    examples = re.findall(rf"^  hmmlm ({command}\b.*)$", help_text(capsys, command, "--help"), re.MULTILINE)
    assert examples
    only_parse(monkeypatch)
    for example in examples:
        argv = shlex.split(example)
        if "--resume" in argv:
            assert "no run to resume" in failure(capsys, *argv)
            continue
        if "latest" in argv:
            assert "no runs in the folder runs" in failure(capsys, *argv)
            continue
        with pytest.raises(ParsedError):
            main(argv)


def test_help_of_one_section_and_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    model, everything = (help_text(capsys, "train", "--help", section) for section in ("model", "all"))
    assert "--model.num-states int" in model and "--optimizer.lr" not in model
    assert "--model.num-states int" in everything and "--optimizer.lr" in everything
    assert model in everything
    error = failure(capsys, "train", "--help", "modell")
    assert "no section 'modell' of options; sections: text, tokenizer, batches" in error


def test_help_shows_the_defaults_and_the_kinds_of_settings(capsys: pytest.CaptureFixture[str]) -> None:
    for command, texts in {
        "train": {
            "--model.kind": "(default: scalar)",
            "--model.hidden": "(linear, mlp, transformer, neural, uniform; default: 256)",
            "--tokenizer.kind": "(default: word)",
            "--tokenizer.file": "(file; required)",
            "--optimizer.kind": "(default: adamw)",
            "--optimizer.betas": "(adamw; default: [0.9,0.95])",
            "--optimizer.lr": "(adamw; default: 1.0)",
            "--initialization.kind": "(default: none)",
            "--initialization.kmeans.passes": "(default: 10)",
            "--schedule.kind": "(default: cosine)",
        },
        "teacher": {"--batches.kind": "(default: chunks)", "--optimizer.lr": "(default: 0.001)"},
        "baseline": {
            "--model.order": "(feedforward; default: 5)",
            "--batches.reset-at-eos": "(stream; default: False)",
        },
    }.items():
        help_of_all = " ".join(help_text(capsys, command, "--help", "all").split())
        for option, text in texts.items():
            entry = re.search(rf"{re.escape(option)}[ ,].*?\)(?= --| \w+ options|$)", help_of_all)
            assert entry is not None and text in entry[0], option


# --- mistakes ---


def test_unknown_names_are_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert "unknown command 'trian'; did you mean 'train'?" in failure(capsys, "trian")
    assert "unknown option '--hlep'; commands: demo" in failure(capsys, "--hlep")
    error = failure(capsys, "train", "--model.stats", "3")
    assert "unknown option --model.stats; did you mean --model.num-states?" in error
    assert "did you mean --model.num-states?" in failure(capsys, "train", "--states", "3")
    assert "did you mean --temperature?" in failure(capsys, "sample", "x", "--temprature", "3")
    assert "no recipe named 'dmeo'; nearest: demo" in failure(capsys, "train", "--recipe", "dmeo")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model.num-states", "many"], "--model.num-states: Input should be a valid integer, "),
        (["--model.num-states", "many"], "(given 'many')"),
        (["--model.num-states", "-3"], "--model.num-states: Input should be greater than 0 (given '-3')"),
        (["--model.num-states="], "--model.num-states: Input should be a valid integer, "),
        (["--model"], "argument --model: expected one argument"),
        (["--optimizer.lr", "fast"], "--optimizer.lr: Input should be a valid number, "),
        (["--optimizer.lr", "nan"], "--optimizer.lr: Input should be a finite number (given 'nan')"),
        (["--optimizer.betas", "[0.9,1.0]"], "--optimizer.betas.1: Input should be less than 1 (given 1.0)"),
        (["--optimizer.betas", "0.9,0.99"], "--optimizer.betas: write a list as [1,2] (given '0.9,0.99')"),
        (["--optimizer.betas=0.9,0.99"], "--optimizer.betas: write a list as [1,2] (given '0.9,0.99')"),
        (["--train.epochs", "2.5"], "--train.epochs: Input should be a valid integer"),
        (["--train.device", "tpu"], "--train.device: Input should be 'auto', 'cpu' or 'cuda' (given 'tpu')"),
        (["--optimizer.kind", "sgd"], "--optimizer.kind: unknown kind 'sgd': use 'adamw', 'baum-welch'"),
        (["--tokenizer.kind", "file"], "--tokenizer.file: required for --tokenizer.kind = 'file'"),
        (["--init", "lvd"], "--initialization.teacher: required for --initialization.kind = 'lvd'"),
        (["--teacher", "x"], "--initialization.teacher for --initialization.kind = 'none'; it is a setting of 'lvd'"),
        (["--model.hidden", "8"], "--model.hidden for --model.kind = 'scalar'; it is a setting of 'linear', "),
        (
            ["--optimizer.kind", "baum-welch", "--optimizer.max-grad-norm", "1"],
            "unknown setting --optimizer.max-grad-norm for",
        ),
        (["--model.dropout", "0.5"], "--model: dropout = 0.5 needs blocks"),
        (
            ["--optimizer.kind", "baum-welch", "--model.kind", "linear"],
            "optimizer.kind = 'baum-welch' needs a model of tables, such as 'scalar'",
        ),
        (["--model.num-states"], "argument --model.num-states: expected one argument"),
        (["--out"], "argument --out: expected one argument"),
        (["extra"], "unexpected argument 'extra'"),
        (["--recipe", "demo", "--config", "x.toml"], "give --recipe or --config, not both"),
        (["--config", "x.json"], "--config x.json: a recipe is a file that ends in .toml"),
        (["--config", "nowhere.toml"], "recipe file nowhere.toml does not exist"),
        (["--resume", "x", "--out", "y"], "leave out --out"),
        (["--resume", "x", "--recipe", "demo"], "leave out --recipe"),
        (["--resume", "nowhere"], "no run to resume in nowhere"),
    ],
)
def test_bad_settings(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in failure(capsys, "train", *argv)


def test_networks_have_no_baum_welch(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("teacher", "baseline"):
        error = failure(capsys, command, "--optimizer.kind", "baum-welch")
        assert "--optimizer.kind: Input should be 'adamw' (given 'baum-welch')" in error


def test_missing_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    for command, missing in {"eval": "MODEL", "sample": "MODEL", "infill": "MODEL", "data": "CORPUS"}.items():
        error = failure(capsys, command)
        assert missing in error and f"see hmmlm {command} --help" in error
    assert "--out: required; see hmmlm data --help" in failure(capsys, "data", "embedded")


def test_mistakes_in_a_recipe_name_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "bad.toml"
    for content, message in {
        "[model]\nstats = 3\n": "unknown setting model.stats for model.kind = 'scalar'; did you mean model.num_states?",
        "[model]\nstates = 'x'\n": "model.num_states: Input should be a valid integer",
        "[model]\nkind = 'lineer'\n": "model.kind: unknown kind 'lineer'",
        "[model\n": "not valid TOML",
    }.items():
        recipe.write_text(content)
        error = failure(capsys, "train", "--config", str(recipe))
        assert message in error
        assert str(recipe) in error


# --- settings ---


def test_options_in_all_their_forms() -> None:
    config = parsed(
        "--no-train.tensorboard", "--optimizer.betas", "[0.8,0.9]", "--model.num-states=8", "--data", "x.txt"
    )
    assert not config.train.tensorboard and config.optimizer.kind == "adamw" and config.optimizer.betas == (0.8, 0.9)
    assert (config.model.num_states, config.data) == (8, "x.txt")
    assert parsed("--train.epochs", "None", "--train.max-tokens", "9").train.epochs is None


def test_defaults_are_those_of_the_configuration_and_follow_the_family() -> None:
    assert parsed() == RunConfig(chosen=())
    assert parsed("--model.kind", "scalar") == RunConfig(chosen=("model.kind",))
    assert parsed("--recipe", "default") == load_recipe("default")
    neural, scalar = parsed("--model.kind", "neural"), parsed("--model.kind", "scalar")
    assert (neural.optimizer.lr, scalar.optimizer.lr) == (0.003, 1.0)  # type: ignore[union-attr]
    assert (neural.model.num_states, scalar.model.num_states) == (2048, 512)
    changed = parsed("--model.kind", "neural", "--optimizer.lr", "0.5")
    assert changed.optimizer == neural.optimizer.model_copy(update={"lr": 0.5})


def test_shortcuts_of_distillation() -> None:
    for argv in (["--init", "lvd", "--teacher", "some/folder"], ["--init=lvd", "--teacher=some/folder"]):
        start = parsed(*argv).initialization
        assert start.kind == "lvd" and start.teacher == "some/folder"
    long = ["--initialization.kind", "counts", "--initialization.teacher", "x", "--initialization.kmeans.passes", "3"]
    start = parsed(*long).initialization
    assert start.kind == "counts" and (start.teacher, start.kmeans.passes) == ("x", 3)


def test_a_recipe_is_where_settings_start_from() -> None:
    base = load_recipe("ptb-vl-hmm")
    assert parsed("--recipe", "ptb-vl-hmm") == base
    config = parsed("--recipe", "ptb-vl-hmm", "--model.num-states", "256", "--train.seed", "3")
    assert config == base.model_copy(
        update={
            "model": base.model.model_copy(update={"num_states": 256}),
            "train": base.train.model_copy(update={"seed": 3}),
        }
    )


def test_a_kind_on_the_command_line_keeps_the_fields_of_the_recipe_that_it_has() -> None:
    base = load_recipe("ptb-vl-hmm")
    linear = parsed("--recipe", "ptb-vl-hmm", "--model.kind", "linear")
    assert linear.model == LinearConfig(num_states=32768, blocks=128, hidden=256, dropout=0.5)  # no form
    assert linear.optimizer == base.optimizer
    scalar = parsed("--recipe", "ptb-vl-hmm", "--model.kind", "scalar", "--model.num-states", "128")
    assert scalar.model == ScalarConfig(num_states=128, blocks=128, dropout=0.5)
    plateau = parsed("--recipe", "ptb-vl-hmm", "--schedule.kind", "plateau").schedule
    assert plateau.kind == "plateau" and plateau.warmup == 0.0
    chunks = parsed("--recipe", "ptb-vl-hmm", "--batches.kind", "chunks").batches
    assert chunks.kind == "chunks" and (chunks.batch_size, chunks.length) == (16, 32)
    words = parsed("--recipe", "ptb-vl-hmm", "--tokenizer.kind", "bpe").tokenizer
    assert words.kind == "bpe" and words.vocab_size == 10_000
    same = parsed("--recipe", "ptb-vl-hmm", "--model.kind", "neural", "--optimizer.kind", "adamw")
    assert same == base


def test_recipe_files_that_extend_others(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text('extends = "ptb-vl-hmm"\n[model]\nnum_states = 256\nblocks = 4\n')
    (tmp_path / "mine.toml").write_text('extends = "base.toml"\ndata = "x.txt"\n[train]\nseed = 3\n')
    config, base = parsed("--config", str(tmp_path / "mine.toml"), "--model.blocks=8"), load_recipe("ptb-vl-hmm")
    assert config == base.model_copy(
        update={
            "data": "x.txt",
            "model": base.model.model_copy(update={"num_states": 256, "blocks": 8}),
            "train": base.train.model_copy(update={"seed": 3}),
        }
    )


def test_what_a_recipe_leaves_open_may_be_given_as_an_option(tmp_path: Path) -> None:
    recipe = tmp_path / "distilled.toml"
    recipe.write_text('[initialization]\nkind = "lvd"\n[model]\nkind = "linear"\nblocks = 3\n')
    argv = ["--config", str(recipe), "--teacher", "some/folder", "--model.num-states", "9"]  # 512 is no multiple of 3
    config = parsed(*argv)
    assert config.initialization.kind == "lvd" and config.initialization.teacher == "some/folder"
    assert config.model.num_states == 9


# --- resume ---


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a short run of one epoch."""
    folder = tmp_path_factory.mktemp("resume")
    train(tiny_config(write_text(folder), train={"epochs": 1}), folder / "run")
    return folder / "run"


def test_resume_starts_from_the_settings_of_the_run(run: Path) -> None:
    saved = tiny_config(run.parent / "text.txt", train={"epochs": 1})
    assert parsed("--resume", str(run)) == saved
    longer = parsed("--resume", str(run), "--train.epochs", "3", "--no-train.tensorboard")
    assert longer == saved.model_copy(update={"train": saved.train.model_copy(update={"epochs": 3})})


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model.num-states", "9"], "model.num_states is 9, but the run in"),
        (["--optimizer.lr", "0.5"], "optimizer.lr is 0.5, but the run in"),
        (["--model.kind", "linear"], "model.kind is 'linear', but the run in"),
        (["--optimizer.kind", "baum-welch"], "optimizer.kind is 'baum-welch', but the run in"),
        (["--data", "other.txt"], "data is 'other.txt', but the run in"),
        (["--train.max-tokens", "20"], "more than the 20 of these settings"),
    ],
)
def test_settings_that_a_resumed_run_cannot_change(
    run: Path, argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (run / "config.json").read_bytes()
    assert message in failure(capsys, "train", "--resume", str(run), *argv)
    assert (run / "config.json").read_bytes() == before


def test_a_run_is_resumed_by_the_command_that_started_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("teacher", "baseline"):
        error = failure(capsys, command, "--resume", str(run))
        assert f"config.json does not belong to a run of `hmmlm {command}`" in error
