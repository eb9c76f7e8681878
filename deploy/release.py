"""Build a release: wheels, sdist, Debian package, notes and checksums.

    deploy/release.py [--python-only] [FOLDER]     writes them into FOLDER, else dist/

The files hold what git tracks, with its present content, and their bytes depend on that alone:
neither on the folder nor on the time. `make dist` adds the list of all components (`make sbom`).
A release is made of a commit: with other content the result says so, in its notes.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROJECTS = (".", "worker", "deploy/kubernetes/rdzv-kube")
"""Folders with a pyproject.toml, one wheel each; only the first has an sdist, of everything."""
CONSTRAINTS = "constraints.txt"
NOTES = "RELEASE_NOTES.md"
SUMS = "SHA256SUMS"


def main() -> None:
    """Build what the command line asks for."""
    parser = argparse.ArgumentParser(description="Build a release of rdzv.")
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "dist")
    parser.add_argument("--python-only", action="store_true", help="wheels and sdist alone")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    out = asked.folder.resolve()
    os.environ["SOURCE_DATE_EPOCH"] = epoch()
    # Modes are recorded in archives.
    os.umask(0o022)
    with tempfile.TemporaryDirectory(prefix="rdzv_release_") as folder:
        sources = Path(folder) / "rdzv"
        copy_sources(sources)
        build_python(sources, out)
        if not asked.python_only:
            build_debian(sources, out)
    version = project_version(ROOT)
    text = notes(
        (ROOT / "CHANGELOG.md").read_text(), (ROOT / "docs/upgrade.md").read_text(), version
    )
    (out / NOTES).write_text(warning() + text)
    shutil.copy(ROOT / "deploy" / CONSTRAINTS, out / CONSTRAINTS)
    (out / SUMS).write_text(checksums(out))
    for path in sorted(out.iterdir()):
        print(path)  # noqa: T201


def epoch() -> str:
    """Return the time that all files get: SOURCE_DATE_EPOCH, else that of the commit."""
    if given := os.environ.get("SOURCE_DATE_EPOCH"):
        return given
    if not (ROOT / ".git").exists():
        sys.exit("this is no checkout of git; set SOURCE_DATE_EPOCH to the time of the release")
    return git("log", "-1", "--format=%ct").strip()


def git(*args: str) -> str:
    """Run git on the checkout."""
    command = ["git", "-C", str(ROOT), *args]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def copy_sources(to: Path) -> None:
    """Copy the files that git tracks; without git, as in an unpacked sdist, everything."""
    if not (ROOT / ".git").exists():
        shutil.copytree(ROOT, to, ignore=shutil.ignore_patterns("dist", "build", ".venv*"))
        return
    for name in git("ls-files", "-z").split("\0"):
        if name and (ROOT / name).exists():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, to / name)


def build_python(sources: Path, out: Path) -> None:
    """Build a wheel of each project, and an sdist of everything."""
    for project in PROJECTS:
        if (sources / project).exists():
            if project != ".":
                shutil.copy(sources / "LICENSE", sources / project)
            targets = ["-t", "wheel", *(["-t", "sdist"] if project == "." else [])]
            command = [sys.executable, "-m", "hatchling", "build", *targets, "-d", str(out)]
            run(command, sources / project)


def build_debian(sources: Path, out: Path) -> None:
    """Build the Debian package around the wheels that were built before."""
    if shutil.which("dpkg-deb") is None:
        print("there is no dpkg-deb here, so no Debian package is built", file=sys.stderr)  # noqa: T201
        return
    wheels = [str(next(out.glob(f"{name}-*.whl"))) for name in ("rdzv", "rdzv_worker")]
    pip = f"{sys.executable} -m pip --disable-pip-version-check --quiet"
    os.environ.setdefault("PIP", pip)
    run([str(sources / "deploy/debian/build"), str(out), *wheels], sources)


def run(command: list[str], folder: Path) -> None:
    """Run a command in a folder; its output is shown if it fails."""
    done = subprocess.run(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        sys.exit(f"{done.stdout}\n{command[0]} exited with {done.returncode}")


def project_version(root: Path) -> str:
    """Return the version of the project."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    return str(project["version"])


def warning() -> str:
    """Return a warning if files differ from the commit."""
    if (ROOT / ".git").exists() and git("status", "--porcelain"):
        return "**Not a release: these files hold changes that are in no commit.**\n\n"
    return ""


def notes(changelog: str, upgrading: str, version: str) -> str:
    """Return the notes of a release: its changes, and how to upgrade and to go back.

    Until the changelog has a section of the version, the changes are the unreleased ones.
    """
    changes = section(changelog, version) or section(changelog, "Unreleased")
    if not changes:
        sys.exit(f"CHANGELOG.md has neither a section {version!r} nor one 'Unreleased'")
    upgrade = section(upgrading, "From one release to the next, and back")
    if not upgrade:
        sys.exit("docs/upgrade.md has no section 'From one release to the next, and back'")
    way = f"## Upgrade, and the way back\n\n{upgrade}"
    return f"# rdzv {version}\n\n## Changes\n\n{changes}\n\n{way}\n"


def section(text: str, title: str) -> str:
    """Return the text below a heading of the second level, whatever follows its title.

    >>> section("## 1.0 (in May)\\n\\n* new\\n\\n## 0.9\\n\\n* old\\n", "1.0")
    '* new'
    """
    found = re.search(
        rf"^## {re.escape(title)}(?![\w.])[^\n]*\n(.*?)(?=^## |\Z)", text, re.M | re.S
    )
    return found[1].strip() if found else ""


def checksums(folder: Path) -> str:
    """Return the lines that `sha256sum --check` reads, of all files in a folder."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != SUMS)
    sums = [(hashlib.sha256(path.read_bytes()).hexdigest(), path.name) for path in files]
    return "".join(f"{digest}  {name}\n" for digest, name in sums)


if __name__ == "__main__":
    main()
