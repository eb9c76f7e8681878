"""The Makefile: each target can be made from a fresh checkout."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE)


@pytest.mark.parametrize("target", TARGETS)
def test_make_knows_how_a_target_is_made(target: str, tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "proto", "deploy"):
        (tmp_path / name).symlink_to(ROOT / name)
    planned = subprocess.run(
        ["make", "--dry-run", target],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert planned.returncode == 0, planned.stderr


def test_benchmarks_find_their_imports_without_the_paths_of_the_tests() -> None:
    benchmarks = sorted(set(re.findall(r"bench/(\w+)\.py", MAKEFILE)))
    imported = subprocess.run(
        [sys.executable, "-c", f"import {', '.join(benchmarks)}"],
        cwd=ROOT / "bench",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert imported.returncode == 0, imported.stderr
