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
UNLINK
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


def run(command: list[str], folder: Path, script: str, *options: str) -> str:
    (folder / "train.py").write_text(script)
    rdzvrun = [str(Path(sys.executable).parent / "rdzvrun"), "--standalone", *options, "train.py"]
    done = subprocess.run(
        [*command, *rdzvrun], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1, done.stderr
    return done.stderr


@needs_root
@pytest.mark.parametrize(
    ("unlink", "words"),
    [
        pytest.param("", "is full (its size is 1 MiB): enlarge it (docker: --shm-size;", id="kept"),
        pytest.param(
            'os.unlink("/dev/shm/batch")',
            "may have been full (its size is 1 MiB; now that the process has ended, 1 MiB are",
            id="unlinked, as torch and NCCL do",
        ),
    ],
)
def test_a_full_shm_is_named(tmp_path: Path, unlink: str, words: str) -> None:
    small = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"'
    script = BUS_ERROR.replace("UNLINK", unlink)
    said = run(["unshare", "--mount", "sh", "-c", small, "sh"], tmp_path, script)
    assert "received SIGBUS (pid " in said
    assert f": /dev/shm {words}" in said


EXCEPTION = """
def load(path):
    return open(path)

load("/nowhere/weights.pt")
"""


@pytest.mark.parametrize("option", ["--no-collective-trace", "--no-restart-on=FileNotFoundError"])
def test_an_exception_of_a_plain_script_is_its_failure(tmp_path: Path, option: str) -> None:
    said = run([], tmp_path, EXCEPTION, option, "--max-restarts=1")
    summary = said.partition("Root cause, ")[2]
    if option == "--no-collective-trace":
        assert "\n  no error file" in summary
        assert "; restarts spent: 1 of 1\n" in said
    else:
        assert "\n  FileNotFoundError: [Errno 2] No such file or directory: '/nowhere" in summary
        assert '", line 5, in <module>\n' in summary
        assert "not restarted: FileNotFoundError is listed in --no-restart-on\n" in said
        # The script's own traceback is on the console as well, once.
        assert said.count("Traceback (most recent call last)") == 2


def test_a_core_dump_is_found(tmp_path: Path) -> None:
    pattern = Path("/proc/sys/kernel/core_pattern").read_text().strip()
    if pattern.startswith(("|", "/")):
        pytest.skip(f"the kernel writes core dumps elsewhere: core_pattern is {pattern}")
    said = run([], tmp_path, CORE)
    (dump,) = (path for path in tmp_path.iterdir() if path.name != "train.py")
    assert f"its core dump: {dump}" in said
