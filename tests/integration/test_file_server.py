"""The file server that other tests stop: requests to it wait, and then continue."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from file_server import serving

from rdzv.agent.system.error_files import read_error


@pytest.mark.parametrize("ahead_s", [-3_600, 0, 3_600])
def test_a_failure_is_as_old_as_its_file_by_the_clock_of_its_server(
    tmp_path: Path, ahead_s: float
) -> None:
    """Otherwise a failure on a node with a more accurate clock is taken for the root cause."""
    with serving(tmp_path / "remote", clock_ahead_s=ahead_s) as server:
        file = server.path / "error.json"
        file.write_text('{"message": "x"}')
        written_s = file.stat().st_mtime - 60
        os.utime(file, (written_s, written_s))
        assert 60_000 <= read_error(file, None, 7).age_ms < 90_000
