"""A short run of every surface: earlier findings, and the same few new inputs each time.

Long runs are `make fuzz`.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.fuzz.engine import fuzz
from tests.fuzz.surface import FoundError, where
from tests.fuzz.surfaces import SURFACES

pytestmark = pytest.mark.slow

INPUTS = {
    **{"rpc": 15, "bytes": 15, "tls": 15, "tokens": 15},
    **{"c10d": 40, "spec": 40, "text": 20, "config": 60},
}
"""Besides the corpus; a second or so of each."""
SECONDS = 120.0
"""A bound that matters only on a machine that is too slow even for that."""
SEED = 4711


@pytest.mark.parametrize("name", sorted(SURFACES))
def test_hostile_input_is_refused_and_the_rest_goes_on(name: str) -> None:
    result = fuzz(SURFACES[name], SECONDS, first_seed=SEED, most=INPUTS[name])
    assert not result.found
    assert result.inputs > result.replayed
    assert result.lines > 0


def test_what_differs_in_the_bytes_of_a_peer_alone_is_one_finding() -> None:
    names = {
        where(FoundError(f"grpc: Invalid encoding on {peer!r:.40}\nTraceback"))
        for peer in (b"\xaa", b"it's\xc9", b"'\"\xff\\", b"y" * 200)
    }
    assert names == {"FoundError: grpc: Invalid encoding on b...\nTraceback"}


STOPPED = """
import os, sys
from tests.fuzz import engine

engine.TICK_S, engine.STOPPED_S, engine.HANG_S, engine.PATIENCE_S = 0.05, 0.5, 0.5, 0.5

def take(steps):
    print("ready", flush=True)
    sys.stdin.readline()
    if steps:
        raise ValueError

engine._take_in_time(take, ())
try:
    engine._take_in_time(take, (("fails", b""),))
except engine.StoppedError:
    print("stopped")
"""


def test_time_in_which_the_process_is_stopped_is_no_silence() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STOPPED], stdin=-1, stdout=-1, text=True, bufsize=1
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for _ in range(2):
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGSTOP)
            while (state := Path(f"/proc/{process.pid}/stat").read_text().split()[2]) != "T":
                assert state in "RS"
            # Longer than the limit for a hang.
            time.sleep(2)
            process.stdin.write("\n")
            process.send_signal(signal.SIGCONT)
        assert process.stdout.read() == "stopped\n"
    assert process.returncode == 0
