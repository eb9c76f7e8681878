"""The quick starts, as a reader runs them: all commands of a page, in order, in one shell."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")

pytestmark = pytest.mark.release

DOCS = Path(__file__).parents[2] / "docs"
COMMANDS = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SCRIPT = re.compile(r'^```python title="([\w.]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)


def run(folder: Path, page: str) -> str:
    """Run the command blocks of a page in a folder that has the scripts of the quick start."""
    for name, text in SCRIPT.findall((DOCS / "start/one-machine.md").read_text()):
        (folder / name).write_text(text)
    commands = COMMANDS.findall((DOCS / page).read_text())
    assert commands, f"{page} has no command that could be run"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = {**os.environ, "PATH": path}
    environ.pop("RDZV_SERVER", None)
    shell = subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", "\n".join(commands)],
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = shell.communicate(timeout=150)
    finally:
        # What the page left running, if it failed midway.
        with suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGTERM)
    written = "\n".join(f"== {p.name}\n{p.read_text()}" for p in folder.glob("*.txt"))
    assert shell.returncode == 0, f"{said}\n{written}"
    return said


def test_two_minutes_on_one_machine(tmp_path: Path) -> None:
    said = run(tmp_path, "start/one-machine.md")
    assert said.count("step 40") == 2
    assert "SIGKILL" in said, "the killed worker is named with its signal"
    assert said.count("RANK 1 is pid") == 3, "once, then twice with the restart"


def test_the_first_cluster_on_one_machine(tmp_path: Path) -> None:
    said = run(tmp_path, "start/cluster.md")
    assert "first  succeeded" in said
    assert "step 40" in (tmp_path / "n1.txt").read_text() + (tmp_path / "n2.txt").read_text()
