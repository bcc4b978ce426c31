"""The files of the project beside its code."""

import tomllib
from pathlib import Path

import pytest
import yaml

from hmmlm import __version__

ROOT = Path(__file__).parent.parent


def test_license_citation_and_changelog_agree_with_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"]["text"] == "Apache-2.0"
    license_text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in license_text and "Version 2.0" in license_text
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == project["version"] == __version__
    assert citation["license"] == "Apache-2.0" and len(citation["references"]) == 2
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert all(address.startswith("https://") for address in project["urls"].values())


@pytest.mark.parametrize("folder", ["src", "docs/guide", "README.md"])
def test_commands_to_install_work_as_printed(folder: str) -> None:
    """`hmmlm` is not on a package index: `pip install "hmmlm[teacher]"` would not find it."""
    path = ROOT / folder
    files = [path] if path.is_file() else [file for kind in ("*.py", "*.md", "*.j2") for file in path.rglob(kind)]
    assert files and not [file for file in files if "hmmlm[" in file.read_text(encoding="utf-8")]
