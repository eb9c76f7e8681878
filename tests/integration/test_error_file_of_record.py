"""A script under torch's own `@record` leaves an error file that is understood."""

import subprocess
import sys
from pathlib import Path

import pytest

from rdzv.agent.system.error_files import read_error
from rdzv.core.model import Failure
from rdzv.core.root_cause import names_of_end

pytest.importorskip("torch", reason="torch is not installed")

SCRIPT = """
import torch
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    raise torch.OutOfMemoryError("batch 17 is too large")

main()
"""


def test_what_record_writes_is_understood(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    environ = {"TORCHELASTIC_ERROR_FILE": str(path)}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=environ, capture_output=True, timeout=60, check=False)
    assert done.returncode == 1
    found = read_error(path, None, 7)
    assert found.message == "OutOfMemoryError: batch 17 is too large"
    assert "in main" in found.traceback
    how = (1, None, found.message, found.traceback)
    names = names_of_end(Failure(0, 0, 7, *how, at_ms=0))
    assert names == ("1", "torch.OutOfMemoryError", "OutOfMemoryError")
