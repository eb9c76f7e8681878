"""A file server hangs under one job of rdzv-agent: the agent and its other jobs continue.

The agent is watched as by systemd: it has to send signs of life all the time.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster import BIN, Cluster, cluster
from file_server import FileServer, serving
from test_daemon import REPORT, Daemons, worker

from rdzv.agent.runner_link.agent_children import end_spared, start_spared

WATCHDOG_S = 5.0


class Watched(Daemons):
    """An agent with room for two jobs, and a counter of its signs of life."""

    def __init__(self, made: Cluster) -> None:
        super().__init__(made)
        self.signs = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    def watch(self) -> None:
        where = self.folder / "notify"
        self.signs.bind(str(where))
        config = self.config("n1", 'capacity = 2\ngpus = "none"\n')
        self.agent = self.cluster.start(
            "n1",
            [str(BIN / "rdzv-agent"), "--config", str(config)],
            environ={
                "NOTIFY_SOCKET": str(where),
                "WATCHDOG_USEC": str(round(WATCHDOG_S * 1_000_000)),
            },
        )
        self.until("n1 is connected", lambda: self.node("n1").get("state") == "connected")
        self.last_sign_s = time.monotonic()
        self.longest_s = 0.0

    def look(self) -> None:
        """Read the signs of life that have come; note the longest gap."""
        while select.select([self.signs], [], [], 0)[0]:
            if b"WATCHDOG=1" in self.signs.recv(4096):
                self.last_sign_s = time.monotonic()
        self.longest_s = max(self.longest_s, time.monotonic() - self.last_sign_s)

    def until(self, what: str, holds: Callable[[], object]) -> object:
        def look_and_see() -> object:
            if hasattr(self, "last_sign_s"):
                self.look()
            return holds()

        return super().until(what, look_and_see)


@pytest.fixture(name="d")
def _watched(tmp_path: Path) -> Iterator[Watched]:
    with cluster(tmp_path) as made:
        watched = Watched(made)
        with watched.signs:
            yield watched


@pytest.fixture(name="remote")
def _remote(tmp_path: Path) -> Iterator[FileServer]:
    with serving(tmp_path / "remote") as server:
        yield server


def test_a_job_whose_files_hang_keeps_nothing_else_from_going_on(
    d: Watched, remote: FileServer
) -> None:
    script = remote.path / "report.py"
    script.write_text(Path(REPORT).read_text())
    d.watch()
    log_dir = f"--log-dir={remote.path / 'logs'}"
    d.submit("far", "--max-restarts=3", "--nproc-per-node=1", log_dir, str(script))
    d.submit("near", "--max-restarts=3", *worker())
    (far,), (near,) = d.reports("far", 1), d.reports("near", 1)
    remote.hang()
    os.kill(far["pid"], signal.SIGKILL)
    os.kill(near["pid"], signal.SIGKILL)
    # The driver of the job that needs the server begins no other round, and the agent says what it
    # waits for; the other job is unaffected.
    d.until("far's failure is told", lambda: "cannot read the error file" in d.agent.text)
    assert "no answer within 2 s from its file system" in d.agent.text
    d.reports("near", 2)
    d.until("near runs", lambda: d.status("near").state == "running")
    d.until("far's restart is spent", lambda: d.status("far").restarts == 1)
    remote.go_on()
    d.reports("far", 2)
    d.cluster.finish()
    for name in ("far", "near"):
        d.until_state(name, "succeeded")
    assert d.agent.process.poll() is None
    assert d.longest_s < WATCHDOG_S, f"{d.longest_s:.1f} s without a sign of life"


async def test_a_program_that_hangs_as_it_is_opened_is_waited_for_by_its_process_alone(
    remote: FileServer,
) -> None:
    program = remote.path / "program"
    program.write_text("#!/bin/sh\nexec cat\n")
    program.chmod(0o755)
    remote.hang()
    for chdir in (None, remote.path):
        began_s = time.monotonic()
        process = await start_spared(str(program), chdir=chdir)
        assert process.returncode is None
        await end_spared(process)
        assert time.monotonic() - began_s < WATCHDOG_S
        assert process.returncode == -signal.SIGKILL
