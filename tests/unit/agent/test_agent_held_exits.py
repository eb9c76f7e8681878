"""The exit of a worker whose collective timed out waits for the server, for a bounded time."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from pathlib import Path

import pytest

from rdzv.agent.observers import collective_records, held_exits
from rdzv.agent.observers.collective_records import RecordReader
from rdzv.agent.observers.held_exits import HeldExits
from rdzv.messages import Hung
from rdzv.structs import replace
from tests.unit.agent.test_agent_adoption import LINE

PID = 4711
TIMEOUT_MS = 3_000
OPERATION_FAILED = "[/src/gloo/transport/tcp/unbound_buffer.cc:78] it says what it likes, timed out"


def record(waits_s: float, now_ns: int, *, retired: bool = False) -> bytes:
    """Return torch's record of a worker that waits in its second collective."""
    entries = [
        {
            "collective_seq_id": n,
            "process_group": ["0", "default_pg"],
            "profiling_name": "gloo:all_reduce",
            "retired": retired or n == 1,
            "timeout_ms": TIMEOUT_MS,
            "time_created_ns": now_ns - int(waits_s * 1e9) - (2 - n) * 10**9,
        }
        for n in (1, 2)
    ]
    return json.dumps({"entries": entries}).encode()


class Node:
    """The exits of one job's workers on a node."""

    def __init__(self, folder: Path, *, on: bool = True) -> None:
        self.told: list[Hung] = []
        self.file = folder / "progress"
        self.records = RecordReader("job", on=on)
        self.exits = HeldExits("job", self.records, self.told.append)
        self.exits.open_round(LINE)

    def leave(self, waited_s: float, *, failed: bool = True, ago_s: float = 0) -> None:
        """Write the file that the hook leaves when a worker ends by an error of a collective.

        Torch has retired that collective, as it may have by then.
        """
        path = self.file.with_name(f"collectives.{PID}.last")
        at_ns = time.time_ns() - int(ago_s * 1e9)
        head = {"error": OPERATION_FAILED, "failed": failed, "at_ns": at_ns}
        last = record(waited_s, at_ns, retired=True)
        path.write_bytes(json.dumps(head).encode() + b"\n" + last)

    def hold(self, signum: int | None = None) -> asyncio.Task[str]:
        coroutine = self.exits.hold(1, PID, str(self.file), signum)
        return asyncio.get_running_loop().create_task(coroutine)


async def ends_in_time(held: asyncio.Task[str]) -> str:
    async with asyncio.timeout(60):
        return await held


async def test_a_timeout_is_told_and_held_until_the_round_is_over(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.leave(3.2)
    held = node.hold()
    await asyncio.sleep(0.01)
    assert not held.done()
    ((run, round_, (worker,)),) = [(one.run, one.round, one.workers) for one in node.told]
    assert (run, round_, worker.rank, worker.pid) == (LINE.run, LINE.round, 3, PID)
    assert worker.timed_out
    assert worker.silent_ms >= 3_200
    assert worker.reason == "its collective timed out after 3 s"
    node.exits.close_round()
    assert await ends_in_time(held) == "all_reduce #2 of the default group"


@pytest.mark.slow
async def test_a_server_that_does_nothing_is_not_waited_for_long_nor_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_exits, "HELD_S", 0.05)
    node = Node(tmp_path)
    node.leave(3.0)
    await ends_in_time(node.hold())
    monkeypatch.setattr(held_exits, "HELD_S", 60.0)
    assert await ends_in_time(node.hold()) == "all_reduce #2 of the default group"
    assert len(node.told) == 1


@pytest.mark.slow
async def test_a_lost_connection_is_told_by_nobody_and_held_while_the_server_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_exits, "CUT_S", 0.05)
    node = Node(tmp_path)
    # It failed before its timeout, however long ago that was.
    node.leave(2.9, ago_s=60)
    await ends_in_time(node.hold())
    node.exits.open_round(LINE)
    held = node.hold()
    await asyncio.sleep(0)
    node.exits.note_asked()
    await asyncio.sleep(0.1)
    assert not held.done()
    node.exits.close_round()
    await ends_in_time(held)
    assert node.told == []


@pytest.mark.parametrize(
    ("waited_s", "failed", "place"),
    [(None, True, ""), (0.5, True, "all_reduce #2 of the default group"), (60.0, False, "")],
    ids=["no record", "it waited for a moment only", "all of its collectives had ended"],
)
async def test_other_failures_are_processed_at_once(
    tmp_path: Path, waited_s: float | None, failed: bool, place: str
) -> None:
    node = Node(tmp_path)
    if waited_s is not None:
        node.leave(waited_s, failed=failed)
    assert await ends_in_time(node.hold(signal.SIGABRT)) == place
    assert node.told == []


async def test_nothing_is_held_without_the_trace_or_with_one_worker(tmp_path: Path) -> None:
    off, alone = Node(tmp_path, on=False), Node(tmp_path)
    alone.exits.open_round(replace(LINE, world_size=1))
    for node in (off, alone):
        node.leave(3.0)
        await ends_in_time(node.hold())
        assert node.told == []


@pytest.mark.parametrize(
    ("waited_s", "signum", "told"),
    [(2.0, signal.SIGABRT, 0), (11.0, signal.SIGKILL, 0), (11.0, signal.SIGABRT, 1)],
)
async def test_of_one_that_was_aborted_the_last_answer_counts_if_it_waited_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waited_s: float, signum: int, told: int
) -> None:
    """As NCCL's watchdog ends it: no Python code runs any more."""

    async def answer(folder: Path, pid: int, identity: object) -> bytes:
        return record(waited_s, time.time_ns())

    monkeypatch.setattr(collective_records, "first_answer", answer)
    monkeypatch.setattr(held_exits, "HELD_S", 0)
    monkeypatch.setattr(held_exits, "CUT_S", 0)
    node, known = Node(tmp_path), waited_s > 10
    await node.records.times(str(node.file), PID, 1.0)
    assert (node.records.left(str(node.file), PID) is not None) is known
    await ends_in_time(node.hold(signum))
    assert len(node.told) == told
    node.records.forget()
    assert node.records.left(str(node.file), PID) is None
