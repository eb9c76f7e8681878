"""Workers are asked for their collectives on a socket beside their progress file.

Each request has a deadline. A small server answers in place of torch.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rdzv.agent.observers import collective_records
from rdzv.agent.observers.collective_records import (
    HANDLERS,
    HOOK,
    NOTHING,
    OFF,
    OLDER,
    NoRecordError,
    RecordReader,
    with_hook,
)
from rdzv.agent.observers.hang_watch import HangWatch
from rdzv.core.evidence.collectives import CollectiveRecord, GroupRecord
from rdzv.core.evidence.hang_culprit import HangTimeout
from rdzv.core.model import Assignment
from rdzv.messages import Hung
from tests.support.lingering import LINGER_S, lingering

pytestmark = pytest.mark.slow

PID = 4711


def trace(completed: int, *, waits: bool = False) -> bytes:
    entry = {
        "collective_seq_id": completed + waits,
        "process_group": ["0", "default_pg"],
        "profiling_name": "gloo:all_reduce",
        "retired": not waits,
        "time_created_ns": 0,
    }
    status = {"0": {"last_completed_collective": str(completed)}}
    return json.dumps({"entries": [entry], "pg_status": status}).encode()


class Torch:
    """Answers every request with the same body."""

    def __init__(self, body: bytes = b"", handler: str = "fr_trace_json") -> None:
        self.body, self.handler, self.asked = body, handler, 0
        self.silent = False
        self.held: list[asyncio.StreamWriter] = []

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.asked += 1
        if self.silent:
            self.held.append(writer)
        else:
            found = head.startswith(f"POST /handler/{self.handler} ")
            status = "200 OK" if found else "404 Not Found"
            writer.write(f"HTTP/1.1 {status}\r\n\r\n".encode() + (self.body if found else b""))
            await writer.drain()
            writer.close()


@asynccontextmanager
async def serving(path: Path, torch: Torch) -> AsyncIterator[Torch]:
    server = await asyncio.start_unix_server(torch.answer, path)
    try:
        yield torch
    finally:
        server.close()
        for writer in torch.held:
            writer.close()
            await writer.wait_closed()


def reader(**more: Any) -> RecordReader:
    return RecordReader("job-7", **{"on": True, **more})


async def ask(folder: Path, timeout_s: float = 5.0, **more: Any) -> Any:
    return await reader(**more).read(str(folder / "progress"), PID, 64, timeout_s)


# ------------------------------------------------------------------ asking


@pytest.mark.quick
async def test_the_record_of_a_worker(tmp_path: Path) -> None:
    async with serving(tmp_path / f"collectives.{PID}.0a1b2c3d", Torch(trace(41, waits=True))):
        found = await ask(tmp_path)
    assert (found.completed, found.waits, found.groups[0].entered) == (41, True, 42)


@pytest.mark.parametrize(
    ("text", "members"),
    [
        ("1 0,2\n2 0,1\n1 1,3\n", (1, 3)),
        ("my group 0,1\n1 4\n", (4,)),
        ("2 0,1\n", ()),
        ("1 0,x\n", ()),
        ("1 -1\n", ()),
        (f"1 {1 << 32}\n", ()),
        (f"1 {','.join(map(str, range(5_000)))}\n", tuple(range(4_096))),
        (None, ()),
    ],
)
def test_the_ranks_of_a_group_in_which_a_worker_waits(
    tmp_path: Path, text: str | None, members: tuple[int, ...]
) -> None:
    records, file = RecordReader("job", on=True), str(tmp_path / "progress")
    if text is not None:
        (tmp_path / "collectives.7.groups").write_text(text)
    waits = GroupRecord("1", "", 1, (CollectiveRecord(1, "barrier"),))
    done = GroupRecord("2", "", 1, (CollectiveRecord(1, "barrier", done=True),))
    found = records.with_members(file, 7, (waits, done))
    assert [one.members for one in found] == [members, ()]
    assert records.with_members(file, 8, (waits,)) == (waits,)


async def test_an_older_torch_has_another_name_for_it(tmp_path: Path) -> None:
    torch = Torch(trace(3), handler="dump_nccl_trace_json")
    async with serving(tmp_path / f"collectives.{PID}.0a1b2c3d", torch):
        assert (await ask(tmp_path)).completed == 3


async def test_the_workers_own_socket_comes_first(tmp_path: Path) -> None:
    """A shell script that is the worker has a child with the socket; a fork may have another."""
    async with serving(tmp_path / "collectives.99.00000000", Torch(trace(1))):
        assert (await ask(tmp_path)).completed == 1
        async with serving(tmp_path / f"collectives.{PID}.ffffffff", Torch(trace(2))):
            assert (await ask(tmp_path)).completed == 2


async def test_a_socket_that_nobody_serves_any_more_is_passed_over(tmp_path: Path) -> None:
    async with serving(tmp_path / f"collectives.{PID}.00000000", Torch()):
        pass
    async with serving(tmp_path / "collectives.99.00000000", Torch(trace(1))):
        assert (await ask(tmp_path)).completed == 1


async def test_no_answer_in_time(tmp_path: Path) -> None:
    torch = Torch()
    torch.silent = True
    async with serving(tmp_path / f"collectives.{PID}.0a1b2c3d", torch):
        with pytest.raises(NoRecordError, match="does not answer in time"):
            await ask(tmp_path, timeout_s=0.05)


async def test_a_process_that_answers_with_a_descriptor_keeps_nobody_and_is_not_asked_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sent, peer = lingering()
    records = reader()
    with peer, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / f"collectives.{PID}.0a1b2c3d"))
        listener.listen()
        listener.setblocking(False)
        begun = time.monotonic()
        asked = asyncio.create_task(records.read(str(tmp_path / "progress"), PID, 64, 5.0))
        connection, _ = await asyncio.get_running_loop().sock_accept(listener)
        with connection:
            socket.send_fds(connection, [b"HTTP/1.1 200 OK\r\n\r\n"], [sent.fileno()])
            sent.close()
            with pytest.raises(NoRecordError, match="answers with a descriptor"):
                await asked
        assert time.monotonic() - begun < LINGER_S / 4
        assert "job-7: no more requests for collectives" in caplog.text
        with pytest.raises(NoRecordError):
            await records.read(str(tmp_path / "progress"), PID, 64, 5.0)
        with pytest.raises(BlockingIOError):
            listener.accept()


async def test_an_endless_answer_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective_records, "MAX_BYTES", 1_000)
    async with serving(tmp_path / f"collectives.{PID}.0a1b2c3d", Torch(b" " * 5_000)):
        with pytest.raises(NoRecordError, match="is larger than"):
            await ask(tmp_path)


async def test_a_torch_without_a_record_is_not_one_that_does_not_answer(tmp_path: Path) -> None:
    """Each name was tried: torch 2.4 answers, but knows none of them."""
    torch = Torch(handler="ping")
    async with serving(tmp_path / f"collectives.{PID}.0a1b2c3d", torch):
        with pytest.raises(NoRecordError) as raised:
            await ask(tmp_path)
    assert str(raised.value) == OLDER
    assert torch.asked == len(HANDLERS)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("files", "why"),
    [
        pytest.param({}, NOTHING, id="nothing"),
        pytest.param({f"collectives.{PID}.why": "no such class"}, "no such class", id="a reason"),
        pytest.param({"collectives.x.why": "no", "notice": ""}, NOTHING, id="other files"),
    ],
)
async def test_why_there_is_no_record(tmp_path: Path, files: dict[str, str], why: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(NoRecordError) as raised:
        await ask(tmp_path)
    assert str(raised.value) == why


@pytest.mark.parametrize(
    ("handlers", "started"),
    [
        pytest.param(None, False, id="torch 2.4 does not name its handlers"),
        pytest.param(["ping", "dump_traceback"], False, id="it has no record to give"),
        pytest.param(["ping", "fr_trace_json"], True, id="torch 2.13"),
    ],
)
def test_a_torch_that_gives_no_record_is_left_alone(
    tmp_path: Path, handlers: list[str] | None, started: bool
) -> None:
    """Its server would be useless there, and has crashed processes that were exiting."""
    site, folder = tmp_path / "site", tmp_path / "worker"
    folder.mkdir()
    names = "" if handlers is None else f"def _get_handler_names(): return {handlers}\n"
    for module, text in {
        "__init__": "",
        "_C/__init__": "",
        "_C/_distributed_c10d": f"class _WorkerServer:\n    pass\n{names}",
        "distributed/__init__": "",
        "distributed/distributed_c10d": "def init_process_group(): pass\n",
    }.items():
        path = site / "torch" / f"{module}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    environ = with_hook({"PYTHONPATH": str(site), "RDZV_PROGRESS_FILE": str(folder / "progress")})
    script = "import torch.distributed.distributed_c10d as c; c.init_process_group(); import os; "
    command = [sys.executable, "-c", f"{script}print(os.getpid())"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    with pytest.raises(NoRecordError) as raised:
        asyncio.run(reader().read(str(folder / "progress"), int(done.stdout), 64, 5.0))
    # The program started here has no torch, and says so.
    assert (str(raised.value) != OLDER) is started


@pytest.mark.quick
async def test_a_reason_that_is_a_pipe_does_not_hold_the_agent_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / f"collectives.{PID}.why")
    with pytest.raises(NoRecordError, match="it has not started"):
        await ask(tmp_path)


@pytest.mark.quick
async def test_who_does_not_want_it_is_not_asked(tmp_path: Path) -> None:
    async with serving(tmp_path / f"collectives.{PID}.0a1b2c3d", Torch(trace(1))) as torch:
        with pytest.raises(NoRecordError) as raised:
            await ask(tmp_path, on=False)
    assert (str(raised.value), torch.asked) == (OFF, 0)


@pytest.mark.quick
async def test_the_log_says_once_why_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rdzv.agent")
    one = reader()
    for begins in (True, False, False):
        with pytest.raises(NoRecordError):
            await one.read(str(tmp_path / "progress"), PID, 64, 1.0, begins=begins)
    assert [record.getMessage() for record in caplog.records] == [
        f"job-7: no record of collectives for pid {PID}: {NOTHING}"
    ]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"PYTHONPATH": str(HOOK)}),
        ({"PYTHONPATH": "/a:/b"}, {"PYTHONPATH": f"{HOOK}:/a:/b", "RDZV_PYTHONPATH": "/a:/b"}),
        ({"PYTHONPATH": ""}, {"PYTHONPATH": str(HOOK), "RDZV_PYTHONPATH": ""}),
    ],
)
def test_the_hook_is_first_and_the_path_kept(
    given: dict[str, str], expected: dict[str, str]
) -> None:
    assert with_hook(given) == expected


# ------------------------------------------------------------------ hangs without progress files


class Watch:
    def __init__(self, folder: Path) -> None:
        self.said: list[Hung] = []
        self.file = folder / "progress"
        clock_ms = itertools.count(0, 250)
        # Together, the calls of the clock in one examination take about a second.
        self.watch = HangWatch(
            "job-7",
            HangTimeout(10_000),
            self.said.append,
            reader(),
            now_ms=lambda: next(clock_ms),
        )
        self.watch.open_round(Assignment("job-7", "r", 4, 0, 1, 0, 1, 0, 1, "h", 1, True, 0, 3))
        self.watch.worker_started(0, os.getpid(), str(self.file))

    async def look(self, times: int = 1) -> None:
        for _ in range(times):
            others = asyncio.all_tasks()
            self.watch.look()
            await asyncio.gather(*(asyncio.all_tasks() - others))

    @property
    def reasons(self) -> list[str]:
        return [worker.reason for report in self.said for worker in report.workers]


async def test_a_worker_that_completes_no_more_collectives_hangs(tmp_path: Path) -> None:
    async with serving(tmp_path / f"collectives.{os.getpid()}.0a1b2c3d", Torch(trace(20))) as torch:
        w = Watch(tmp_path)
        await w.look(5)
        torch.body = trace(24)
        await w.look(5)
        assert w.reasons == []
        await w.look(50)
        w.watch.close_round()
    assert w.reasons[0].startswith("no collective completed for 10 s, limit 10 s")


async def test_one_that_waits_in_its_first_collective_hangs(tmp_path: Path) -> None:
    torch = Torch(trace(0, waits=True))
    async with serving(tmp_path / f"collectives.{os.getpid()}.0a1b2c3d", torch):
        w = Watch(tmp_path)
        await w.look(150)
        w.watch.close_round()
    assert w.reasons[0].startswith("no collective completed for 60 s, limit 60 s")


async def test_a_worker_with_collectives_at_its_start_alone_is_unwatched(tmp_path: Path) -> None:
    async with serving(tmp_path / f"collectives.{os.getpid()}.0a1b2c3d", Torch(trace(5))):
        w = Watch(tmp_path)
        await w.look(60)
        w.watch.close_round()
    assert w.reasons == []


async def test_one_that_answers_no_more_is_not_silent(tmp_path: Path) -> None:
    """The machine may be slow; the workers that wait for this one still answer."""
    async with serving(tmp_path / f"collectives.{os.getpid()}.0a1b2c3d", Torch(trace(5))) as torch:
        w = Watch(tmp_path)
        await w.look(5)
        torch.body = trace(9)
        await w.look(5)
        torch.body = b"not a record"
        await w.look(80)
        w.watch.close_round()
    assert w.reasons == []


async def test_one_that_reports_its_progress_is_asked_no_more(tmp_path: Path) -> None:
    async with serving(tmp_path / f"collectives.{os.getpid()}.0a1b2c3d", Torch(trace(5))) as torch:
        w = Watch(tmp_path)
        await w.look(3)
        w.file.write_bytes(b"7\n")
        await w.look(1)
        asked = torch.asked
        await w.look(10)
        w.watch.close_round()
    assert 0 < asked == torch.asked
