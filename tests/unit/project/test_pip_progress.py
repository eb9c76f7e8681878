"""`make setup` says what takes its time, and fails as pip does."""

from __future__ import annotations

import doctest
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parents[3] / "deploy/pip_progress.py"

PIP = """
print("Collecting torch==2.13.0 (from rdzv==0.1.0)")
print("  Downloading torch-2.13.0-cp311-none-linux_x86_64.whl (192.3 MB)")
print("  Downloading click-8.5.1-py3-none-any.whl (126 kB)")
print("Installing collected packages: click, torch")
print("ERROR: no space left", end="")
raise SystemExit({code})
"""


@pytest.mark.parametrize("code", [0, 3])
def test_large_downloads_and_the_installation_are_said_and_why_it_failed(code: int) -> None:
    command = [sys.executable, PROGRAM, sys.executable, "-c", PIP.format(code=code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code
    said = [line.split(maxsplit=1)[1] for line in done.stdout.splitlines()]
    told = ["looking for packages", "downloading torch 2.13.0 (192.3 MB)", "installing 2 packages"]
    assert said == [*told, *(["done"] if code == 0 else [])]
    assert ("ERROR: no space left" in done.stderr) == (code != 0)


def test_what_is_said_of_a_line() -> None:
    spec = importlib.util.spec_from_file_location("pip_progress", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert doctest.testmod(module) == (0, 3)
