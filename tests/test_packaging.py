"""The files of the project beside its code."""

import re
import subprocess
import sys
import tomllib
from functools import reduce
from pathlib import Path

import pytest
import yaml

import hmmlm
from hmmlm import __version__

ROOT = Path(__file__).parent.parent


def test_license_citation_and_changelog_agree_with_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0"
    license_text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in license_text and "Version 2.0" in license_text
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == project["version"] == __version__
    assert citation["license"] == "Apache-2.0" and len(citation["references"]) == 2
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert all(address.startswith("https://") for address in project["urls"].values())


def test_every_file_beside_the_code_is_in_the_wheel() -> None:
    """Pages, templates and recipes are found at run time; without py.typed, types are not read."""
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["hmmlm"]
    package = ROOT / "src" / "hmmlm"
    packed = {file for pattern in patterns for file in package.glob(pattern)}
    others = {file for file in package.rglob("*") if file.is_file() and "__pycache__" not in file.parts}
    assert {file for file in others if file.suffix != ".py"} == packed
    assert package / "py.typed" in packed
    assert all((file.parent / "__init__.py").exists() for file in others if file.suffix == ".py")


def test_every_extra_is_documented() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    text = (ROOT / "docs" / "guide" / "libraries.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)` \|", text[text.index("## Extras") :], re.MULTILINE)) == set(extras)


def test_the_readme_shows_the_explorer_and_results() -> None:
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert all((ROOT / picture).stat().st_size > 10_000 for picture in pictures)
    assert {Path(picture).parent.name for picture in pictures} == {"figures"} and len(pictures) >= 3
    assert any("explorer" in picture for picture in pictures) and any("reproduction" in p for p in pictures)


def test_the_long_description_has_no_links_into_the_repository() -> None:
    command = [sys.executable, "setup.py", "--long-description"]
    text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert text.startswith("# hmmlm") and "hmmlm train --data my.txt" in text and "| VL-HMM, 2^15 states, PTB |" in text
    assert "\npip install hmmlm\n" in text and "pip install 'hmmlm[fast]'" in text
    assert not re.search(r"pip install '?\.|make demo|\]\((?!https:)|\.venv/bin|!\[|<img", text)


@pytest.mark.parametrize("folder", ["src", "docs/guide", "README.md"])
def test_commands_to_install_work_as_printed(folder: str) -> None:
    """Extras that are named exist; where hmmlm is installed, pip takes them from it and needs no package index."""
    path = ROOT / folder
    files = [path] if path.is_file() else [file for kind in ("*.py", "*.md", "*.j2") for file in path.rglob(kind)]
    named = {name for file in files for name in re.findall(r"(?:hmmlm|'\.)\[(\w+)\]", file.read_text(encoding="utf-8"))}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert files and named <= set(extras)


def test_the_workflow_uses_targets_and_files_that_exist() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    script = "\n".join(step.get("run", "") for job in jobs.values() for step in job["steps"])
    makefile = (ROOT / "Makefile").read_text()
    targets, files = re.findall(r"^make (\w+)", script, re.MULTILINE), re.findall(r"tests/[\w/]+\.py", script)
    assert targets and all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
    assert files and all((ROOT / file).exists() for file in files)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"'\.\[(\w+)\]'", script)) <= set(extras)


def test_plugins_name_what_exists() -> None:
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["lm_eval.models"]
    for name, target in points.items():
        module, value = target.split(":")
        source = (ROOT / "src" / module.replace(".", "/")).with_suffix(".py").read_text()
        assert f'@register_model("{name}")\nclass {value}(' in source


def test_every_file_of_the_documentation_for_contributors_exists() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    links = re.findall(r"\]\(([^)#]+)", text)
    assert links and all((ROOT / link).exists() for link in links)
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"(?:^|`)make (\w+)", text, re.MULTILINE)
    assert targets and all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


def test_every_name_of_ours_beside_that_of_another_library_exists() -> None:
    text = (ROOT / "docs" / "guide" / "libraries.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| (.+) \| (.+) \|$", text[text.index("### Your name, ours") : text.index("## n-grams")], re.MULTILINE
    )
    ours = [re.findall(r"`([\w.]+)`", right) for _, right in rows if right != "hmmlm"]
    assert len(ours) > 20 and all(ours)
    places: dict[str, object] = {"hmm": hmmlm.HMM, "lm": hmmlm.LanguageModel, "hmmlm": hmmlm}
    for name in (name for names in ours for name in names):
        first, *others = name.split(".")
        assert callable(reduce(getattr, others, places[first])), name


def test_every_page_and_public_name_is_in_the_documentation() -> None:
    """`make docs` checks the links and that the names of the reference exist."""
    text = (ROOT / "mkdocs.yml").read_text()
    docs = ROOT / "docs"
    pages = {str(file.relative_to(docs)) for file in docs.rglob("*.md")}
    pages |= {str(file.relative_to(docs).with_suffix(".md")) for file in docs.rglob("*.ipynb")}
    listed = set(re.findall(r"[\w/-]+\.md", text[text.index("\nnav:") :]))
    assert pages | {"index.md", "changelog.md", "contributing.md"} == listed
    reference = "".join(file.read_text() for file in (docs / "api").glob("*.md"))
    missing = [name for name in hmmlm.__all__ if not re.search(rf"::: hmmlm\.[\w.]*\b{name}\b", reference)]
    assert missing == ["__version__"]
