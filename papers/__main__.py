"""Command line of the studies; see `python -m papers --help`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from hmmlm.errors import InputError
from hmmlm.terminal import discard_output
from papers.catalogue import STUDIES
from papers.listing import list_studies, show_study
from papers.records import read_records
from papers.selection import find_study, refuse_missing_extras, select_runs

RESULTS = Path("results")


class StudyParser(argparse.ArgumentParser):
    """Errors of the command line in one line."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (python -m papers --help shows all options)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    try:
        code = _main(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()  # here, where errors are handled
        return code
    except InputError as error:
        print(f"papers: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("papers: stopped; finished runs are recorded, and the same command trains the others", file=sys.stderr)
        return 130
    except BrokenPipeError:  # as of `| head`
        discard_output()
        return 141


def _main(argv: list[str]) -> int:
    if argv[:1] in (["publish"], ["--check"]):
        if argv[1:]:
            raise InputError(f"{argv[0]} takes no options: it reads results/, docs/ and README.md")
        return _publish() if argv[0] == "publish" else _check()
    show = argv[:1] == ["show"]
    options = _parser().parse_args(argv[show:])
    if options.list:
        print("\n".join(list_studies(STUDIES, options.out)))
        return 0
    if options.study is None:
        raise InputError("name a study, show and a study, publish, --list or --check")
    if options.jobs < 1:
        raise InputError(f"--jobs must be at least 1, not {options.jobs}")
    study, settings = find_study(options.study, STUDIES), _settings(options.set)
    if show:
        records = read_records(RESULTS / f"{study.name}.json")
        lines = list(show_study(study, records, options.rows))
        if options.rows and len(lines) == 1:
            select_runs(study, records, options.rows, [])  # says which rows there are
        print("\n".join(lines))
        return 0
    runs = select_runs(study, read_records(RESULTS / f"{study.name}.json"), options.rows, options.seeds)
    refuse_missing_extras(runs)
    if options.data_folder is not None:
        os.environ["HMMLM_DATA"] = str(options.data_folder)  # not a setting: records hold no folder of a machine

    from papers.runner import run_study, with_settings  # here: torch takes seconds, mistakes above are told before

    runs = with_settings(runs, settings)
    if study.device == "GPU" and not _has_gpu():
        print(
            f"{study.name} was recorded on a GPU, and this machine has none: runs may take hours or days. "
            "--set train.max_tokens=N shortens them, and --out FOLDER keeps their records apart.",
            file=sys.stderr,
        )
    crashed = run_study(study, runs, options.out, options.work, options.jobs, options.again)
    return 1 if crashed else 0


def _parser() -> StudyParser:
    parser = StudyParser(
        prog="python -m papers",
        usage="python -m papers [show] STUDY [OPTIONS], or publish, --list, --check",
        description="Run the studies of the papers. `show STUDY` prints the command of every row; `publish` writes "
        "docs/reproduction and the numbers of the pages from results/; `--check` verifies that every record can be "
        "made again.",
    )
    parser.add_argument("study", nargs="?", help="the study to run")
    parser.add_argument("--list", action="store_true", help="list every study and what it takes")
    parser.add_argument("--rows", default="", metavar="SUBSTRING", help="only rows whose name contains this")
    parser.add_argument("--seeds", type=int, nargs="+", default=[], help="only runs with these seeds")
    parser.add_argument(
        "--jobs", type=int, default=1, help="runs at the same time; with several, no speeds are recorded"
    )
    parser.add_argument("--again", action="store_true", help="also runs that have a record, which is then replaced")
    parser.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="NAME=VALUE", help="settings of every run"
    )
    parser.add_argument("--data-folder", type=Path, help="folder of PTB and WikiText-2; else $HMMLM_DATA or the cache")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results files")
    parser.add_argument("--work", type=Path, default=Path("runs/studies"), help="folder of the training runs")
    return parser


def _publish() -> int:
    from papers.publish import publish

    publish(Path.cwd(), STUDIES)
    return 0


def _check() -> int:
    from papers.check import check

    return check(Path.cwd(), STUDIES)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _settings(given: Sequence[str]) -> dict[str, Any]:
    """Return the settings of --set: numbers, booleans and lists as in JSON, all else as text."""
    for setting in given:
        if "=" not in setting:
            raise InputError(f"--set {setting}: write it as name=value, such as model.num_states=1024")
    return {name: _value(text) for name, text in (setting.split("=", 1) for setting in given)}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


if __name__ == "__main__":
    sys.exit(main())
