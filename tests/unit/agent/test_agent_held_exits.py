"""The exit of a worker whose collective timed out waits for the server, for a bounded time."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest

from rdzv.agent.observers import collective_records, held_exits
from rdzv.agent.observers.collective_records import RecordReader
from rdzv.agent.observers.hang_watch import HungReport
from rdzv.agent.observers.held_exits import HeldExits
from rdzv.structs import replace
from tests.unit.agent.test_agent_adoption import LINE

PID = 4711
TIMED_OUT = "[unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation to complete"
CUT = "[pair.cc:534] Connection closed by peer [10.0.0.7]:33001"


def record(waits_s: float) -> bytes:
    """Return torch's record of a worker that waits in its second collective."""
    now_ns = time.time_ns()
    entries = [
        {
            "collective_seq_id": n,
            "process_group": ["0", "default_pg"],
            "profiling_name": "gloo:all_reduce",
            "retired": n == 1,
            "time_created_ns": now_ns - int(waits_s * 1e9) - (2 - n) * 10**9,
        }
        for n in (1, 2)
    ]
    return json.dumps({"entries": entries}).encode()


class Node:
    """The exits of one job's workers on a node."""

    def __init__(self, folder: Path, *, on: bool = True) -> None:
        self.told: list[HungReport] = []
        self.file = folder / "progress"
        self.records = RecordReader("job", on=on)
        self.exits = HeldExits("job", self.records, self.told.append)
        self.exits.open_round(LINE)

    def leave(self, error: str, waits_s: float) -> None:
        """Write the file that the hook leaves when a worker ends by an error of a collective."""
        path = self.file.with_name(f"collectives.{PID}.last")
        path.write_bytes(error.encode() + b"\n" + record(waits_s))

    def hold(self, *, timed_out: bool = False) -> asyncio.Task[None]:
        coroutine = self.exits.hold(1, PID, str(self.file), timed_out=timed_out)
        return asyncio.get_running_loop().create_task(coroutine)


async def ends_in_time(held: asyncio.Task[None]) -> None:
    async with asyncio.timeout(60):
        await held


async def test_a_timeout_is_told_and_held_until_the_round_is_over(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.leave(TIMED_OUT, 3.2)
    held = node.hold()
    await asyncio.sleep(0.01)
    assert not held.done()
    ((run, round_, (worker,)),) = [(one.run, one.round, one.workers) for one in node.told]
    assert (run, round_, worker.rank, worker.pid) == (LINE.run, LINE.round, 3, PID)
    assert worker.timed_out
    assert worker.silent_ms >= 3_200
    assert worker.reason == "its collective failed after 3 s, before all ranks had entered it"
    node.exits.close_round()
    await ends_in_time(held)


@pytest.mark.slow
async def test_a_server_that_does_nothing_is_not_waited_for_long_nor_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_exits, "HELD_S", 0.05)
    node = Node(tmp_path)
    node.leave(TIMED_OUT, 3.0)
    await ends_in_time(node.hold())
    monkeypatch.setattr(held_exits, "HELD_S", 60.0)
    await ends_in_time(node.hold())
    assert len(node.told) == 1


@pytest.mark.slow
async def test_a_lost_connection_is_told_by_nobody_and_held_while_the_server_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_exits, "CUT_S", 0.05)
    node = Node(tmp_path)
    node.leave(CUT, 3.0)
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


@pytest.mark.slow
@pytest.mark.parametrize("waits_s", [None, 0.5], ids=["no record", "it waited for a moment only"])
async def test_other_failures_are_processed_at_once(tmp_path: Path, waits_s: float | None) -> None:
    node = Node(tmp_path)
    if waits_s is not None:
        node.leave(CUT, waits_s)
    await ends_in_time(node.hold(timed_out=True))
    assert node.told == []


async def test_nothing_is_held_without_the_trace_or_with_one_worker(tmp_path: Path) -> None:
    off, alone = Node(tmp_path, on=False), Node(tmp_path)
    alone.exits.open_round(replace(LINE, world_size=1))
    for node in (off, alone):
        node.leave(TIMED_OUT, 3.0)
        await ends_in_time(node.hold())
        assert node.told == []


async def test_of_one_that_was_aborted_the_last_answer_counts_if_it_waited_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NCCL's watchdog ends it: no Python code runs any more."""

    async def answer(folder: Path, pid: int, identity: object) -> bytes:
        return record(waited_s)

    monkeypatch.setattr(collective_records, "first_answer", answer)
    records, file = RecordReader("job", on=True), str(tmp_path / "progress")
    for seconds, known in ((2.0, False), (11.0, True)):
        waited_s = seconds
        await records.times(file, PID, 1.0)
        left = records.left(file, PID)
        assert (left is not None) is known
    records.forget()
    assert records.left(file, PID) is None
