"""Whether every recorded number can be made again: the repository's own records, and faults that are found."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from papers import __main__ as command_line
from papers.check import check
from papers.study import CHIU, LEE, NotRun, Study, StudyRow

ROOT = Path(__file__).parents[1]
PLAIN = StudyRow(name="plain", recipe="lee-base", settings={"train.max_tokens": 1000}, seeds=(0, 1))


@pytest.mark.slow
def test_every_record_of_the_repository_can_be_made_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    code = command_line.main(["--check"])
    output = capsys.readouterr().out
    assert code == 0, output
    counts = {
        kind: int(count) for count, _, kind in (part.partition(" ") for part in output.splitlines()[-1].split("; "))
    }
    assert counts["records"] > 800 and counts["recipes"] > 40 and counts["removed methods"] == 167
    faults = ("refused", "other models", "unrecognised", "without record or reason", "failing recipes", "stale pages")
    assert [counts[kind] for kind in faults] == [0] * len(faults)


@pytest.fixture
def found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function that checks made-up records of a study, and returns what it prints."""
    for page in ("README.md", CHIU.page, LEE.page):
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "README.md").write_text("<!-- results --> <!-- /results -->")
    (tmp_path / "results").mkdir()

    def run(study: Study, *records: dict[str, Any], rate: float = 0.1) -> list[str]:
        (tmp_path / "results" / f"{study.name}.json").write_text(json.dumps(records))
        frozen = {"lee-base": {"optimizer.rate": rate, "model.parameterization": "scalar"}}  # its name of then
        (tmp_path / "papers/recipes").mkdir(parents=True, exist_ok=True)
        (tmp_path / "papers/recipes/recorded.json").write_text(json.dumps(frozen))
        check(tmp_path, {study.name: study}, ["lee-base"])
        return capsys.readouterr().out.splitlines()

    return run


def made(seed: int = 0, **settings: Any) -> dict[str, Any]:
    named = {name.replace("__", "."): value for name, value in settings.items()}
    return {
        "row": "plain",
        "recipe": "lee-base",
        "seed": seed,
        "settings": {"train.max_tokens": 1000, **named},
        "command": "hmmlm train",
        "commit": "0123456",
        "metrics": {"test_perplexity": 5.0},
    }


def test_what_cannot_be_made_again_is_listed_and_counted(found: Any) -> None:
    study = Study(name="new", title="New", rows=(PLAIN,), not_run=(NotRun("no time", seeds=(1,)),))
    *listed, counts = found(study, made())
    assert "1 records; 0 measurements; 0 removed methods; 2 planned runs; 1 not run; 1 recipes" in counts
    assert "0 refused; 0 other models; 0 unrecognised; 0 without record or reason; 0 failing recipes" in counts
    assert "not run: new: plain, seed 1: no time" in listed
    *listed, counts = found(study, made(model__num_states=256))
    assert "unrecognised: new: plain, seed 0" in listed
    assert "without record or reason: new: plain, seed 0" in listed
    assert any(line.startswith("stale pages: docs/reproduction/results") for line in listed)
    assert "1 unrecognised; 1 without record or reason" in counts


def test_a_record_with_a_setting_that_nobody_knows_is_refused_by_its_name(found: Any) -> None:
    study = Study(name="new", title="New", rows=(PLAIN,), not_run=(NotRun("no time", seeds=(1,)),))
    *listed, counts = found(study, made(), made(seed=2, model__nstates=7))
    (refused,) = (line for line in listed if line.startswith("refused"))
    assert refused.startswith("refused: new: plain: ") and "model.nstates" in refused
    assert "1 records" in counts and "1 refused; 0 other models" in counts


def test_numbers_that_look_measured_are_found() -> None:
    from papers.numbers import unrecorded

    for text in ("98.71 here", "perplexity of about 98", "98 in perplexity", "Perplexity 7.4", "9.8 on valid"):
        assert list(unrecorded(f"It has {text}.")), text
    for text in (
        "twice as fast",
        "3.5x faster",
        "4 × faster",
        "3.5-fold faster",
        "ten times faster",
        "speed-up of 2.3",
    ):
        assert list(unrecorded(f"It is {text}.")), text
    for text in ("2 × 256 units", "the first two times", "version 2.13.0", "16.8 MB"):
        assert not list(unrecorded(f"There are {text}.")), text


def test_a_chain_is_what_its_command_trained(found: Any) -> None:
    teacher = StudyRow(name="teacher", recipe="baseline", settings={"model.negatives": 0}, seeds=(0,))
    student = replace(PLAIN, name="plain", recipe="ptb-vl-hmm", settings={}, seeds=(0,), teacher=teacher)
    study = Study(name="new", title="New", rows=(student,))
    chain = "hmmlm baseline --train.seed 0 --out runs/teacher && hmmlm train --recipe ptb-vl-hmm --train.seed 0"
    record = {**made(), "recipe": "ptb-vl-hmm", "settings": {}, "command": f"{chain} --next-words.teacher runs/teacher"}
    assert "; 0 other models" not in found(study, record)[-1]  # ptb-vl-hmm has no line of what it was
    record["command"] = record["command"].replace("hmmlm baseline", "hmmlm baseline --model.hidden 64")
    assert "other models: new: plain, seed 0: the plan is not what the record trained" in found(study, record)


def test_an_ngram_is_its_settings_not_a_chain(found: Any) -> None:
    row = StudyRow(name="counted", recipe="ngram", settings={"data": "ptb", "order": 3}, seeds=(0,))
    command = "hmmlm data ptb --out tokens && hmmlm ngram tokens --order 3"
    record = {**made(), "row": "counted", "recipe": "ngram", "settings": dict(row.settings), "command": command}
    study = Study(name="new", title="New", rows=(row,))
    assert "0 refused; 1 other models" in found(study, record)[-1]  # ngram has no line in recorded.json
    assert not [line for line in found(study, record) if "not what the record trained" in line]


def test_a_recipe_that_changed_is_another_model(found: Any) -> None:
    study = Study(name="new", title="New", rows=(replace(PLAIN, seeds=(0,)),))
    assert "; 0 other models;" in found(study, made())[-1]
    *listed, counts = found(study, made(), rate=0.2)
    changed = "recipe lee-base: optimizer.lr is 0.1, and was 0.2 when its first records were made"
    assert f"other models: {changed}" in listed and "; 1 other models;" in counts


def test_a_measurement_names_a_program_that_exists(found: Any) -> None:
    record = {
        "row": "a",
        "recipe": "benchmarks/speed.py",
        "seed": 0,
        "metrics": {},
        "command": "python -m benchmarks.speed",
    }
    study = Study(name="new", title="New", made_by=record["command"])
    assert "0 records; 1 measurements" in found(study, record)[-1] and "0 refused" in found(study, record)[-1]
    gone = replace(study, made_by="python -m benchmarks.gone")
    assert "refused: new: no program 'python -m benchmarks.gone'" in found(gone, record)
