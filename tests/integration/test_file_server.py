"""The file server that other tests let hang: what is asked of it waits, and goes on."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from file_server import WHY_NOT, serving

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


def test_who_asks_a_server_that_hangs_waits_until_it_goes_on(tmp_path: Path) -> None:
    with serving(tmp_path / "remote") as server:
        script = server.mount / "folder" / "script.py"
        script.parent.mkdir()
        script.write_text("print('here')\n")
        server.hang()
        asking = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE)
        with pytest.raises(subprocess.TimeoutExpired):
            asking.wait(0.3)
        server.go_on()
        assert asking.communicate(timeout=30)[0] == b"here\n"


def test_its_clock_is_its_own(tmp_path: Path) -> None:
    with serving(tmp_path / "remote", clock_ahead_s=3_600) as server:
        file = server.mount / "file"
        file.write_text("x")
        assert file.stat().st_mtime == pytest.approx(time.time() + 3_600, abs=60)
