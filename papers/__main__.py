"""Command line of the studies; see `python -m papers --help`."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from hmmlm.errors import InputError
from hmmlm.terminal import discard_output
from papers.catalogue import STUDIES
from papers.listing import list_studies
from papers.publish import publish
from papers.runner import run_study, select_runs


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
    if argv[:1] == ["publish"]:
        if argv[1:]:
            raise InputError("publish takes no options: it reads results/ and writes docs/reproduction and README.md")
        publish(Path.cwd(), STUDIES)
        return 0
    parser = StudyParser(
        prog="python -m papers",
        description="Run the studies of the papers, list them, or publish their results "
        "(python -m papers publish writes docs/reproduction and the table of README.md).",
    )
    parser.add_argument("study", nargs="?", help="the study to run, or publish")
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
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of the results files")
    parser.add_argument("--work", type=Path, default=Path("runs/studies"), help="folder of the training runs")
    options = parser.parse_args(argv)
    if options.list:
        print("\n".join(list_studies(STUDIES, options.out)))
        return 0
    if options.study is None:
        parser.error("name a study, publish or --list")
    if options.jobs < 1:
        parser.error(f"--jobs must be at least 1, not {options.jobs}")
    if options.study not in STUDIES:
        near = difflib.get_close_matches(options.study, STUDIES, n=3, cutoff=0.4)
        hint = f"nearest: {', '.join(near)}" if near else "--list shows all"
        raise InputError(f"no study named {options.study!r}; {hint}")
    study = STUDIES[options.study]
    runs = select_runs(study, options.rows, options.seeds, _settings(options.set))
    if study.device == "GPU" and not _has_gpu():
        print(
            f"{study.name} was recorded on a GPU, and this machine has none: runs may take hours or days. "
            "--set train.max_tokens=N shortens them, and --out FOLDER keeps their records apart.",
            file=sys.stderr,
        )
    crashed = run_study(study, runs, options.out, options.work, options.jobs, options.again)
    return 1 if crashed else 0


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _settings(given: Sequence[str]) -> dict[str, str]:
    for setting in given:
        if "=" not in setting:
            raise InputError(f"--set {setting}: write it as name=value, such as model.states=1024")
    return dict(setting.split("=", 1) for setting in given)


if __name__ == "__main__":
    sys.exit(main())
