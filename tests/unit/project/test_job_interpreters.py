"""Code in the jobs' interpreters runs on Python 3.9: clusters have older ones than daemons."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
PROGRAMS = (
    "agent/rdzv/agent/job_programs",
    "rendezvous/rdzv/c10d/store_server.py",
    "rendezvous/rdzv/demo/training.py",
    "worker/rdzv/worker",
)
"""The zygote, the store host, torch's side, the facade's store, the demo, and imports of jobs."""


def too_new(*paths: Path) -> str:
    """Return the constructs that are newer than Python 3.9, or an empty text."""
    # Annotations are never evaluated, since every such file postpones them. The zygote checks
    # whether `sys` has `orig_argv`.
    flags = ("--target=3.9-", "--violations", "--no-eval-annotations", "--processes=1")
    program = Path(sys.executable).with_name("vermin")
    if not program.exists():
        pytest.skip("vermin is not installed; run: make setup")
    command = [str(program), *flags, "--exclude", "sys.orig_argv", *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert "Minimum required versions" in done.stdout, (done.stdout, done.stderr)
    return "" if done.returncode == 0 else done.stdout


def test_no_construct_in_them_is_newer() -> None:
    paths = [ROOT / name for name in PROGRAMS]
    assert too_new(*(path for path in paths if path.exists())) == ""


def test_annotations_are_postponed_in_all_of_them() -> None:
    paths = [ROOT / name for name in PROGRAMS]
    files = [file for path in paths for file in (path, *path.rglob("*.py")) if file.is_file()]
    evaluated = [
        str(file)
        for file in files
        if any(isinstance(x, ast.FunctionDef) for x in ast.parse(file.read_text()).body)
        if "from __future__ import annotations" not in file.read_text()
    ]
    assert len(files) > len(PROGRAMS) and evaluated == []


@pytest.mark.parametrize(
    "line",
    [
        "match 1:\n    case 1:\n        pass\n",
        "import tomllib\n",
        "from itertools import pairwise\n",
        "for one in zip([], [], strict=True):\n    pass\n",
    ],
)
def test_a_newer_construct_is_seen(line: str, tmp_path: Path) -> None:
    path = tmp_path / "file.py"
    path.write_text(line)
    assert too_new(path)
