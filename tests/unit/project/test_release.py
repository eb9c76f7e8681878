"""A release: what its files contain, and that they are the same bytes wherever they are built.

`make dist-test` tries them, from the files alone.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

from rdzv.version import VERSION

ROOT = Path(__file__).parents[3]
PROGRAM = ROOT / "deploy/release.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def projects() -> dict[str, dict[str, Any]]:
    """Return each project's pyproject.toml, by its folder."""
    files = {name: ROOT / name / "pyproject.toml" for name in load().PROJECTS}
    return {name: tomllib.loads(x.read_text()) for name, x in files.items() if x.exists()}


def test_the_notes_have_the_changes_of_the_version_and_the_way_back() -> None:
    changelog = (
        "# Changelog\n\n## Unreleased\n\n* later\n\n## 1.2.0 (in May)\n\n* new\n\n## 1.2\n\n* old\n"
    )
    upgrading = "## From one release to the next, and back\n\nThe server first.\n\n## Other\n"
    made = load().notes(changelog, upgrading, "1.2.0")
    assert made.startswith("# rdzv 1.2.0\n\n## Changes\n\n* new\n\n## Upgrade")
    assert "The server first." in made
    assert "later" not in made and "old" not in made
    assert "* later" in load().notes(changelog, upgrading, "1.3")


def test_checksums_are_of_every_file_but_their_own(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"two")
    (tmp_path / "a").write_bytes(b"one")
    (tmp_path / "SHA256SUMS").write_text("old")
    (tmp_path / "SHA256SUMS").write_text(load().checksums(tmp_path))
    digests = [hashlib.sha256(text).hexdigest() for text in (b"one", b"two")]
    assert (tmp_path / "SHA256SUMS").read_text() == f"{digests[0]}  a\n{digests[1]}  b\n"


def test_all_projects_have_one_version_and_what_jobs_import_asks_for_nothing() -> None:
    found = projects()
    assert {one["project"]["version"] for one in found.values()} == {VERSION}
    for folder, one in found.items():
        # What else is needed of rdzv is of the same version.
        asked = {one for one in one["project"].get("dependencies", ()) if one.startswith("rdzv")}
        assert asked <= {f"rdzv=={VERSION}"}, folder
    worker = found["worker"]["project"]
    assert worker["requires-python"] == ">=3.9" and not worker["dependencies"]


def test_the_tried_libraries_are_ones_that_the_project_permits() -> None:
    """The build refuses others; this checks that each requirement is pinned."""
    lines = (ROOT / "deploy/constraints.txt").read_text().splitlines()
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in lines}
    project = projects()["."]["project"]
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *extras["oidc"]]
    names = {re.split(r"[<>=\[]", one)[0].strip().lower() for one in asked}
    assert names <= pinned, "run: make constraints"
