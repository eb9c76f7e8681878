"""A script under torch's own `@record` leaves an error file that is understood."""

import subprocess
import sys
from pathlib import Path

import pytest

from rdzv.agent.system.error_files import read_error

pytest.importorskip("torch", reason="torch is not installed")

SCRIPT = """
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    raise ValueError("batch 17 is empty")

main()
"""


def test_what_record_writes_is_understood(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    environ = {"TORCHELASTIC_ERROR_FILE": str(path)}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=environ, capture_output=True, timeout=60, check=False)
    assert done.returncode == 1
    found = read_error(path, None, 7)
    assert found.message == "ValueError: batch 17 is empty"
    assert "in main" in found.traceback
