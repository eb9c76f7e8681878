"""The runner with workers that save snapshots in its memory, and die.

The worker is `tests/support/linked_worker.py`, which implements its link by hand.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from runners import PATIENCE_S
from test_parking import Parking

from rdzv.agent.core.events import SnapshotRefused, SnapshotsChanged, SnapshotsWritten, WorkerExited
from rdzv.agent.runner.requests import (
    HoldSnapshots,
    KeepSpec,
    Serve,
    SnapshotWatermark,
    StateMark,
    WriteSnapshots,
)
from rdzv.agent.runner_link.found_runner import FoundRunner
from rdzv.agent.runner_link.runner_link import StartedRunner
from rdzv.core.model import Snapshot, SnapshotMark
from rdzv.structs import as_dict

MIB = 1 << 20
MARK = '{"lineage": 0, "step": %d, "series": "abc", "shards": 1}'
"""How a worker prints the mark of what it has saved at a step."""


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Parking]:
    async with Parking(tmp_path).running() as node:
        yield node


def memory_files(pid: int) -> list[int]:
    """List the memory for snapshots that a process has open, by inode."""
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if "rdzv snapshot" in str(link.readlink()):
                found.append(link.stat().st_ino)
        except OSError:
            pass  # It was closed meanwhile.
    return sorted(found)


async def restart(node: Parking, round_: int, pid: int, *does: str) -> int:
    """Kill the worker, end the round, and start it again; return its pid."""
    os.kill(pid, signal.SIGKILL)
    await node.heard(WorkerExited, round=round_ - 1, pid=pid)
    await node.stop(round_ - 1)
    worker = node.worker(round_, 0, *does)
    node.link.start_workers(round_, [worker], KeepSpec((), None, None))
    line = await node.printed(worker, f"round {round_}")
    return int(line.split()[3])


async def test_what_a_killed_worker_has_saved_is_there_for_the_next_one(node: Parking) -> None:
    node.link.ask(HoldSnapshots(None))
    (pid,) = await node.begin(f"saves:{MIB}", ranks=1)
    first = node.worker(0, 0)
    assert await node.printed(first, "slots") == f"slots {MIB} {MIB} empty"
    saved = Snapshot(0, SnapshotMark(0, 10, "abc", 1), 0, MIB, "d")
    assert await node.heard(SnapshotsChanged, snapshots=(saved,))
    next_pid = await restart(node, 1, pid, f"saves:{MIB}", "children")
    line = await node.printed(node.worker(1, 0), "slots")
    assert line == f"slots {MIB} {MIB} {pid}"
    newer = Snapshot(0, SnapshotMark(0, 20, "abc", 1), 0, MIB, "d")
    assert await node.heard(SnapshotsChanged, snapshots=(newer,))
    # No process that a worker starts inherits them.
    child = (await node.printed(node.worker(1, 0), "children")).split()[1]
    assert len(memory_files(node.link.pid)) == 2
    assert memory_files(next_pid) == memory_files(node.link.pid)
    assert not memory_files(int(child))
    await node.stop(1)


async def test_they_outlive_agents_and_the_next_one_is_told_of_them(tmp_path: Path) -> None:
    node, started = Parking(tmp_path), StartedRunner()
    node.link = started.link(node.hear)
    path = tmp_path / "runner.sock"
    node.link.ask(Serve(str(path), 60, 0))
    await node.begin(f"saves:{MIB}", ranks=1)
    await node.printed(node.worker(0, 0), "slots")
    held = memory_files(node.link.pid)
    await node.link.let_go(PATIENCE_S)
    found = await FoundRunner.meet(path)
    assert found is not None
    found.adopt()
    node.link = found.link(node.hear)
    # This agent has not asked; the one before had not, either.
    assert not [event for event in node.events if isinstance(event, SnapshotsChanged)]
    node.link.ask(HoldSnapshots(None))
    ((saved,), *_) = [(await node.heard(SnapshotsChanged)).snapshots]
    assert saved.mark == SnapshotMark(0, 10, "abc", 1)
    assert memory_files(node.link.pid) == held and len(held) == 2
    mark = StateMark(**as_dict(saved.mark))
    node.link.ask(SnapshotWatermark(mark))
    watermark = f'{{"type": "watermark", "mark": {MARK % 10}, "given_up": %s, "fds": 0}}'
    await node.printed(node.worker(0, 0), watermark % "null")
    node.link.ask(SnapshotWatermark(mark, replace(mark, step=20)))
    await node.printed(node.worker(0, 0), watermark % (MARK % 20))
    await node.link.close(PATIENCE_S)
    started.process.wait()


async def test_a_worker_that_gets_no_memory_is_told_why_and_trains_on(node: Parking) -> None:
    node.link.ask(HoldSnapshots(3 * MIB))
    await node.begin(f"saves:{2 * MIB}", ranks=1)
    refused = await node.heard(SnapshotRefused, local_rank=0)
    assert refused.reason.startswith("two slots need 4.2 MB, but only 3.1 MB of the 3.1 MB")
    assert refused.reason in await node.printed(node.worker(0, 0), '{"type": "no_slots"')
    assert len(await node.park()) == 1
    await node.stop(0)


async def test_a_worker_that_says_saved_without_end_is_not_listened_to(node: Parking) -> None:
    await node.begin("saves:4096", "floods", ranks=1)
    await node.printed(node.worker(0, 0), "the link is closed")
    await node.stop(0)


async def test_the_process_that_writes_to_disk_is_answered_for(node: Parking) -> None:
    node.link.ask(HoldSnapshots(None))
    await node.begin(f"saves:{MIB}", ranks=1)
    saved = Snapshot(0, SnapshotMark(0, 10, "abc", 1), 0, MIB, "d")
    await node.heard(SnapshotsChanged, snapshots=(saved,))
    mark, env = StateMark(**as_dict(saved.mark)), dict(os.environ)
    pinned = f'{{"type": "pinned", "mark": {MARK % 10}, "fds": 0}}'
    for program, reason in (
        # It has the slot that holds the step, and neither the other one nor anything else.
        ('test "$1 $2" = "--mark 0:10:abc" && test $# = 3 && readlink /proc/self/fd/$3', ""),
        ("exit 7", "its writer ended with exit code 7; its stderr says why"),
    ):
        node.link.ask(WriteSnapshots(mark, ("sh", "-c", program, "sh"), env))
        assert (await node.heard(SnapshotsWritten, reason=reason)).mark == saved.mark
        await node.printed(node.worker(0, 0), pinned)
    node.link.ask(WriteSnapshots(replace(mark, step=20), ("true",), env))
    await node.heard(SnapshotsWritten, reason="this node holds no part of it")
    await node.stop(0)
