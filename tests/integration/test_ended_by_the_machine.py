"""A worker killed by the machine: rdzvrun says what happened to it, with a real kernel."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.accounts import needs_root

BUS_ERROR = """
import mmap, os
fd = os.open("/dev/shm/batch", os.O_RDWR | os.O_CREAT)
os.ftruncate(fd, 8 << 20)
batch = mmap.mmap(fd, 8 << 20)
for page in range(0, 8 << 20, 4096):
    batch[page] = 1
"""

CORE = """
import os, resource
resource.setrlimit(resource.RLIMIT_CORE, (1 << 30, 1 << 30))
os.abort()
"""


def run(command: list[str], folder: Path, script: str) -> str:
    (folder / "train.py").write_text(script)
    rdzvrun = [str(Path(sys.executable).parent / "rdzvrun"), "--standalone", "train.py"]
    done = subprocess.run(
        [*command, *rdzvrun], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1, done.stderr
    return done.stderr


@needs_root
def test_a_full_shm_is_named(tmp_path: Path) -> None:
    small = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"'
    said = run(["unshare", "--mount", "sh", "-c", small, "sh"], tmp_path, BUS_ERROR)
    assert "received SIGBUS" in said
    assert "/dev/shm is full: enlarge it (docker: --shm-size;" in said
    assert "its size is 1 MiB" in said


def test_a_core_dump_is_found(tmp_path: Path) -> None:
    pattern = Path("/proc/sys/kernel/core_pattern").read_text().strip()
    if pattern.startswith(("|", "/")):
        pytest.skip(f"the kernel writes core dumps elsewhere: core_pattern is {pattern}")
    said = run([], tmp_path, CORE)
    (dump,) = (path for path in tmp_path.iterdir() if path.name != "train.py")
    assert f"its core dump: {dump}" in said
