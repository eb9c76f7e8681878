"""A release: what its files hold, and that they are the same bytes wherever they are built.

`make dist-test` tries them, from the files alone.
"""

from __future__ import annotations

import fnmatch
import hashlib
import importlib.util
import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

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


def test_notes_can_be_made_of_the_present_documents() -> None:
    changelog, upgrading = ROOT / "CHANGELOG.md", ROOT / "docs/upgrade.md"
    made = load().notes(changelog.read_text(), upgrading.read_text(), VERSION)
    assert "rdzvctl backup" in made


def test_a_changelog_without_changes_is_refused() -> None:
    with pytest.raises(SystemExit, match=r"neither a section '9\.9' nor one 'Unreleased'"):
        load().notes("# Changelog\n", "", "9.9")


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
        if folder != ".":
            assert one["project"]["requires-python"] == ">=3.9"
            assert not one["project"].get("dependencies")


def test_the_tried_libraries_are_ones_that_the_project_permits() -> None:
    """The build refuses others; here, that each that is asked for is pinned."""
    lines = (ROOT / "deploy/constraints.txt").read_text().splitlines()
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in lines}
    project = projects()["."]["project"]
    asked = project["dependencies"] + project["optional-dependencies"]["otel"]
    names = {one.partition(">")[0].partition("=")[0].strip().lower() for one in asked}
    assert names <= pinned, "run: make constraints"


def build(out: Path, root: Path = ROOT, **environ: str) -> dict[str, Path]:
    """Build wheels and sdist; return the files by their kind or name."""
    command = [sys.executable, str(root / "deploy/release.py"), "--python-only", str(out)]
    kept = {k: v for k, v in os.environ.items() if k not in ("SOURCE_DATE_EPOCH", "TMPDIR")}
    done = subprocess.run(
        command, env={**kept, **environ}, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return {path.name: path for path in out.iterdir()}


@pytest.mark.slow
def test_it_is_the_same_bytes_from_any_folder_and_from_its_own_sources(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="hatchling is not installed; run: make setup")
    (tmp_path / "elsewhere").mkdir()
    first = build(tmp_path / "first")
    second = build(tmp_path / "second", TMPDIR=str(tmp_path / "elsewhere"))
    sums = first["SHA256SUMS"].read_text()
    assert second["SHA256SUMS"].read_text() == sums
    sdist = first[f"rdzv-{VERSION}.tar.gz"]
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    epoch = {"SOURCE_DATE_EPOCH": load().epoch()}
    third = build(tmp_path / "third", tmp_path / f"rdzv-{VERSION}", **epoch)
    for name in (one for one in first if one.endswith(".whl")):
        assert third[name].read_bytes() == first[name].read_bytes(), name
    _has_one_owner_of_each_file([path for name, path in first.items() if name.endswith(".whl")])


def _has_one_owner_of_each_file(wheels: list[Path]) -> None:
    owners: dict[str, str] = {}
    for wheel in wheels:
        for name in zipfile.ZipFile(wheel).namelist():
            assert owners.setdefault(name, wheel.name) == wheel.name, name
    tracked = load().git("ls-files").split()
    wanted = ("*/rdzv/*.py", "*/rdzv/*.pyi", "*/rdzv/web/*", "*/rdzv/*.proto")
    roots = ("proto/", "rendezvous/", "agent/", "worker/")
    lost = [
        name
        for name in tracked
        if name.startswith(roots) and any(fnmatch.fnmatch(name, one) for one in wanted)
        if name.partition("/")[2] not in owners
    ]
    assert lost == []
    data = f"rdzv-{VERSION}.data/data/share/rdzv"
    for name in (
        "systemd/rdzvd.service",
        "prometheus/alerts.yml",
        "grafana/dashboards/rdzv-job.json",
    ):
        assert f"{data}/{name}" in owners
    assert not [name for name in owners if name.startswith(("tests", "rdzv/worker/tests"))]
