"""Workers' output files are copied to the console: whole lines, in order, with a prefix."""

from __future__ import annotations

import asyncio
import doctest
import os
import socket
import threading
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path
from select import PIPE_BUF

import pytest

from rdzv.agent.cli.options import parse_launch
from rdzv.agent.output import console_tee as tee_module
from rdzv.agent.output.console_tee import OutputStream, Tee, line_prefix, parse_filters, parse_ranks
from rdzv.agent.output.tailed_file import TailedFile
from rdzv.agent.workers.worker_group import DRAIN_TIMEOUT_S, LocalWorkerGroup
from rdzv.core.model import Assignment
from rdzv.errors import InvalidRequestError

pytestmark = pytest.mark.slow

LONG_S = 10.0
"""For events that follow at once: a failing test waits this long."""


LINE = Assignment("job-7", "r", 4, 0, 1, 0, 1, 0, 1, "h", 1, True, 0, 3)


class Console:
    """A pipe, and the data read from it."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        self.data = b""

    async def read(self, size: int) -> bytes:
        """Return the next data of this size; others may write meanwhile."""
        async with asyncio.timeout(LONG_S):
            while len(self.data) < size:
                await self._readable()
                self.data += os.read(self.reader, 1 << 16)
        found, self.data = self.data[:size], self.data[size:]
        return found

    async def expect(self, text: bytes) -> None:
        assert await self.read(len(text)) == text

    def rest(self) -> bytes:
        """Return the available data without waiting."""
        try:
            while chunk := os.read(self.reader, 1 << 16):
                self.data += chunk
        except BlockingIOError:
            pass
        return self.data

    async def _readable(self) -> None:
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self.reader, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(self.reader)

    def fill(self) -> int:
        """Write until it blocks."""
        os.set_blocking(self.writer, False)
        written = 0
        try:
            while True:
                written += os.write(self.writer, bytes(PIPE_BUF))
        except BlockingIOError:
            return written
        finally:
            os.set_blocking(self.writer, True)

    def close_reader(self) -> None:
        os.close(self.reader)
        self.reader = -1

    def close(self) -> None:
        for fd in (self.reader, self.writer):
            if fd >= 0:
                os.close(fd)


class Desk:
    """A tee, both of its consoles, and files to follow."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.out, self.err = Console(), Console()
        self.tee = Tee(self.out.writer, self.err.writer)

    def follow(
        self, name: str, prefix: bytes = b"", stream: OutputStream = OutputStream.OUT
    ) -> Path:
        path = self.folder / name
        self.tee.follow(path, prefix, stream)
        return path

    async def drain(self) -> bytes:
        """Copy everything available; return the new data on stdout."""
        assert await self.tee.drain(LONG_S)
        return self.out.rest()


@pytest.fixture
async def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Desk]:
    monkeypatch.setattr(tee_module, "LOOK_EVERY_S", 0.001)
    desk = Desk(tmp_path)
    yield desk
    desk.tee.close()
    desk.out.close()
    desk.err.close()
    threads_end()


def threads_end() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("tee "):
            thread.join(LONG_S)  # They do not need the event loop in order to end.
            assert not thread.is_alive()


def open_descriptors() -> set[Path]:
    return set(Path("/proc/self/fd").iterdir())


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


# ---------------------------------------------------------------------- lines


async def test_lines_come_out_while_they_are_written(desk: Desk) -> None:
    path = desk.folder / "log"
    append(path, b"before\n")
    desk.follow("log", b"[a]:")
    await desk.out.expect(b"[a]:before\n")
    for number in range(20):
        append(path, b"line %d\n" % number)
        await desk.out.expect(b"[a]:line %d\n" % number)
    assert await desk.drain() == b""


async def test_a_file_may_appear_later(desk: Desk) -> None:
    paths = [desk.follow(name, b"%s:" % name.encode()) for name in ("a", "b")]
    append(desk.folder / "unrelated", b"x")
    append(paths[1], b"1\n")
    await desk.out.expect(b"b:1\n")
    (desk.folder / "written elsewhere").write_bytes(b"2\n")
    (desk.folder / "written elsewhere").rename(paths[0])
    await desk.out.expect(b"a:2\n")


async def test_a_file_that_never_appears_does_not_hold_up_the_end(desk: Desk) -> None:
    desk.follow("never")
    assert await desk.drain() == b""


@pytest.mark.quick
async def test_a_torn_line_comes_out_whole(desk: Desk) -> None:
    path, other = desk.follow("a", b"a:"), desk.follow("b", b"b:")
    for piece in (b"to", b"r", b"n"):
        append(path, piece)
        append(other, b"other\n")  # Once it has come out, the piece before was seen, too.
        await desk.out.expect(b"b:other\n")
    append(path, b" line\nnext")
    await desk.out.expect(b"a:torn line\n")
    assert await desk.drain() == b"a:next\n"


@pytest.mark.parametrize("size", [PIPE_BUF, 1 << 16, (1 << 16) + 1, 300_001])
async def test_a_line_may_be_longer_than_every_buffer(desk: Desk, size: int) -> None:
    long, tail = b"x" * size, b"y" * size
    append(desk.follow("a", b"a:"), b"short\n" + long + b"\nshort\n" + tail)
    await desk.out.expect(b"a:short\na:" + long + b"\na:short\n")
    desk.tee.unfollow()
    await desk.out.expect(b"a:" + tail + b"\n")


@pytest.mark.parametrize(
    ("lines", "writes"),
    [
        ([PIPE_BUF], [PIPE_BUF]),
        ([100, PIPE_BUF - 100], [PIPE_BUF]),
        ([100, PIPE_BUF - 99], [100, PIPE_BUF - 99]),
        ([PIPE_BUF, 3, PIPE_BUF], [PIPE_BUF, 3, PIPE_BUF]),
    ],
)
def test_lines_are_written_together_up_to_what_a_pipe_takes_at_once(
    tmp_path: Path, lines: list[int], writes: list[int]
) -> None:
    """Sizes include prefix and line end; one byte more, and others' output could tear the line."""
    path, found = tmp_path / "log", list[int]()
    path.write_bytes(b"".join(b"x" * (size - len(b"a:\n")) + b"\n" for size in lines))
    file = TailedFile(path, b"a:")
    while file.copy_some(lambda data: found.append(len(data)), final=True):
        pass
    assert found == writes


async def test_nothing_gets_into_a_long_line(desk: Desk) -> None:
    long = b"x" * 200_000
    for name in ("a", "b"):
        append(desk.follow(name), b"".join(b"%s%s\n" % (name.encode(), long) for _ in range(3)))
    lines = (await desk.out.read(6 * len(b"a" + long + b"\n"))).splitlines()
    assert sorted(lines) == [b"a" + long] * 3 + [b"b" + long] * 3


@pytest.mark.parametrize("step", [1, 2, 3, 100])
def test_every_end_of_a_line_is_one_wherever_it_is_torn(tmp_path: Path, step: int) -> None:
    r"""Universal newlines, as when torchrun reads the file as text: \n, \r\n, \r, no others."""
    text = b"\r 10%\r 20%\r\n\n\r\r\nform\x0cfeed\x0bvt\x1cfs\xc2\x85nel\0nul\n\r"
    path, found = tmp_path / "log", bytearray()
    path.write_bytes(text)
    file = TailedFile(path, b":", chunk_bytes=step)
    while file.copy_some(found.extend, final=True):
        pass
    universal = text.decode().replace("\r\n", "\n").replace("\r", "\n").encode()
    assert bytes(found) == b"".join(b":" + line + b"\n" for line in universal.split(b"\n")[:-1])


async def test_a_progress_bar_moves(desk: Desk) -> None:
    path = desk.follow("log", b"a:")
    append(path, b"10%\r")
    await desk.out.expect(b"a:10%\n")
    append(path, b"20%\r")
    await desk.out.expect(b"a:20%\n")
    append(path, b"\ndone\r\n")
    await desk.out.expect(b"a:done\n")


async def test_bytes_are_passed_on_as_they_are(desk: Desk) -> None:
    every = bytes(byte for byte in range(256) if byte not in b"\r\n")
    append(desk.follow("log", b"\xff:"), every + b"\n")
    assert await desk.drain() == b"\xff:" + every + b"\n"


async def test_a_file_that_was_cut_begins_anew(desk: Desk) -> None:
    path = desk.follow("log")
    append(path, b"a long line\nrest")
    await desk.out.expect(b"a long line\n")
    os.truncate(path, 0)
    append(path, b"new\n")
    await desk.out.expect(b"new\n")


async def test_stdout_and_stderr_do_not_mix(desk: Desk) -> None:
    append(desk.follow("out", b"a:"), b"to out\n")
    append(desk.follow("err", b"a:", OutputStream.ERR), b"to err\n")
    assert await desk.drain() == b"a:to out\n"
    assert desk.err.rest() == b"a:to err\n"


async def test_many_writers_lose_nothing(desk: Desk) -> None:
    """Files that are written at the same time, in pieces, from threads."""
    paths = [desk.follow(f"{name}", b"%d:" % name) for name in range(8)]

    def write(path: Path) -> None:
        with path.open("ab", buffering=0) as file:
            for number in range(200):
                file.write(b"line ")
                file.write(b"%d\n" % number)

    async with asyncio.TaskGroup() as writers:
        for path in paths:
            writers.create_task(asyncio.to_thread(write, path))
        size = sum(len(b"0:line %d\n" % number) for number in range(200))
        lines = (await desk.out.read(8 * size)).splitlines()
    for name in range(8):
        own = [line for line in lines if line.startswith(b"%d:" % name)]
        assert own == [b"%d:line %d" % (name, number) for number in range(200)]


async def test_a_file_that_can_not_be_read_holds_up_no_other(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    (desk.folder / "folder").mkdir()
    desk.follow("folder")
    append(desk.follow("log"), b"x\n")
    assert await desk.drain() == b"x\n"
    assert "cannot copy" in caplog.text


# ---------------------------------------------------------------------- rounds


async def test_one_round_follows_another(desk: Desk) -> None:
    for round_ in range(3):
        path = desk.follow(f"round_{round_}", b"%d:" % round_)
        append(path, b"first\n")
        await desk.out.expect(b"%d:first\n" % round_)
        append(path, b"last")
        desk.tee.unfollow()
        await desk.out.expect(b"%d:last\n" % round_)
    assert await desk.drain() == b""


async def test_an_unfollowed_file_is_forgotten(desk: Desk) -> None:
    path = desk.follow("old")
    append(path, b"1\n")
    assert await desk.drain() == b"1\n"
    append(path, b"2\n")
    append(desk.follow("new"), b"3\n")
    assert await desk.drain() == b"1\n3\n"


async def test_a_closed_tee_copies_no_more(desk: Desk) -> None:
    for _ in range(2):
        assert await desk.drain() == b""
    desk.tee.close()
    append(desk.follow("log"), b"x\n")
    assert await desk.drain() == b""
    desk.tee.close()


# ---------------------------------------------------------------------- consoles


@pytest.mark.quick
async def test_a_blocked_console_blocks_nothing_else(desk: Desk) -> None:
    filled = desk.out.fill()
    append(desk.follow("out"), b"waits\n")
    append(desk.follow("err", stream=OutputStream.ERR), b"goes on\n")
    await desk.err.expect(b"goes on\n")
    assert not await desk.tee.drain(0.01)
    assert await desk.out.read(filled) == bytes(filled)
    await desk.out.expect(b"waits\n")


async def test_a_console_that_does_not_block_is_waited_for(desk: Desk) -> None:
    filled = desk.out.fill()
    os.set_blocking(desk.out.writer, False)
    append(desk.follow("out"), b"x" * 200_000 + b"\n")
    await desk.out.read(filled)
    await desk.out.expect(b"x" * 200_000 + b"\n")


async def test_a_console_others_fill_is_retried(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had room when it was polled, and none when it was written to."""
    tries, write = 0, os.write

    def full_twice(fd: int, data: bytes) -> int:
        nonlocal tries
        if data == b"x\n":
            tries += 1
            if tries < 3:
                raise BlockingIOError
        return write(fd, data)

    monkeypatch.setattr(os, "write", full_twice)
    append(desk.folder / "out", b"x\n")
    desk.follow("out")
    await desk.out.expect(b"x\n")
    assert tries == 3


async def test_the_file_is_the_buffer(desk: Desk) -> None:
    """Behind a blocked console, or with a line of megabytes, memory use stays minimal."""
    line = b"x" * 99 + b"\n"
    lines, long = line * 10_000, b"y" * 1_000_000 + b"\n"
    filled = desk.out.fill()
    tracemalloc.start()
    try:
        path = desk.follow("log")
        append(path, lines)
        append(path, long)
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        await desk.out.read(filled)
        for _ in range(10):
            await desk.out.expect(line * 1000)
        for _ in range(100):
            await desk.out.expect(b"y" * 10_000)
        await desk.out.expect(b"\n")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - before < 800_000


async def test_a_stuck_console_loses_the_oldest(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    rounds = tee_module.MAX_ENDED_ROUNDS
    filled = desk.out.fill()
    for round_ in range(rounds + 3):
        # More than fits into one turn, so the file at hand is not finished either.
        append(desk.follow(f"{round_}"), b"%d\n" % round_ + b"x" * 70_000 + b"\n")
        desk.tee.unfollow()
        assert desk.tee.pending(OutputStream.OUT) <= rounds
    await desk.out.read(filled)
    drained = asyncio.create_task(desk.tee.drain(LONG_S))
    found = b""
    while not drained.done():
        await asyncio.sleep(0)
        found += desk.out.rest()
        desk.out.data = b""
    assert drained.result()
    numbers = [int(line) for line in (found + desk.out.rest()).split() if line.isdigit()]
    assert numbers[-rounds:] == list(range(3, rounds + 3))
    assert "stdout was too slow" in caplog.text


async def test_a_closed_console_ends_its_copying(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    desk.out.close_reader()
    path = desk.follow("out")
    append(path, b"nobody reads this\n")
    assert await desk.tee.drain(LONG_S)
    assert "cannot write to stdout (Broken pipe)" in caplog.text
    append(desk.follow("out"), b"nor this\n")
    append(desk.follow("err", stream=OutputStream.ERR), b"but this\n")
    await desk.err.expect(b"but this\n")
    assert await desk.tee.drain(LONG_S)
    assert caplog.text.count("cannot write to stdout") == 1


async def test_a_console_that_was_closed_from_the_start_is_no_error(tmp_path: Path) -> None:
    tee = Tee(-1, -1)
    append(tmp_path / "log", b"x\n")
    tee.follow(tmp_path / "log", b"", OutputStream.OUT)
    assert await tee.drain(LONG_S)
    tee.close()
    threads_end()


async def test_no_descriptor_is_left(tmp_path: Path) -> None:
    before = open_descriptors()
    tee = Tee(1, 2)
    tee.duplicate(OutputStream.OUT, tmp_path / "filtered", ["x"])
    tee.follow(tmp_path / "log", b"", OutputStream.OUT)
    tee.close()
    threads_end()
    assert open_descriptors() == before


# ---------------------------------------------------------------------- filters


async def test_lines_with_any_of_the_strings_are_also_copied_into_a_file(desk: Desk) -> None:
    filtered = desk.folder / "filtered_stdout.log"
    filtered.write_text("of an agent before\n")
    desk.tee.duplicate(OutputStream.OUT, filtered, ["apple", "x,y"])
    append(desk.follow("a", b"a:"), b"an apple\npear\nx\nan x,y")
    append(desk.follow("b", b"b:", OutputStream.ERR), b"apple\n")
    out = await desk.drain()
    assert out == b"a:an apple\na:pear\na:x\na:an x,y\n"
    assert filtered.read_bytes() == b"a:an apple\na:an x,y\n"


async def test_a_blocked_console_does_not_hold_up_a_filtered_log(desk: Desk) -> None:
    filtered = desk.folder / "filtered_stdout.log"
    desk.tee.duplicate(OutputStream.OUT, filtered, [""])
    filter_thread = next(t for t in threading.enumerate() if t.name == f"tee {filtered}")
    desk.out.fill()
    append(desk.follow("log", b"a:"), b"x\ny\n")
    desk.tee.unfollow()
    await asyncio.to_thread(filter_thread.join, LONG_S)
    assert filtered.read_bytes() == b"a:x\na:y\n"


async def test_every_round_has_filtered_logs_of_its_own(desk: Desk) -> None:
    for round_ in range(2):
        desk.tee.duplicate(OutputStream.OUT, desk.folder / f"filtered_{round_}", ["x"])
        append(desk.follow(f"{round_}"), b"x %d\n" % round_)
        desk.tee.unfollow()
    append(desk.follow("unfiltered"), b"x\n")
    await desk.drain()
    assert [(desk.folder / f"filtered_{n}").read_bytes() for n in (0, 1)] == [b"x 0\n", b"x 1\n"]


def test_a_string_is_found_in_a_long_line_wherever_it_is(tmp_path: Path) -> None:
    path = tmp_path / "log"
    for place in range(12):
        line = b"." * place + b"needle" + b"." * (12 - place)
        path.write_bytes(b"..............\n" + line + b"\n")
        found = bytearray()
        file = TailedFile(path, b":", (b"needle", b"n/a"), chunk_bytes=4)
        while file.copy_some(found.extend, final=True):
            pass
        assert bytes(found) == b":" + line + b"\n"


# ---------------------------------------------------------------------- what a user asks for


def test_examples_in_docstrings() -> None:
    result = doctest.testmod(tee_module)
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.quick
def test_double_commas_are_read_from_the_left() -> None:
    assert parse_filters(",,,") == (",", "")
    assert parse_filters("a,,,b") == ("a,", "b")


@pytest.mark.quick
@pytest.mark.parametrize("text", ["a", "0,", ",", "-1", "0-2", "9" * 5000])
def test_ranks_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="--local-ranks-filter"):
        parse_ranks(text)


@pytest.mark.quick
def test_a_template_may_be_of_any_bytes() -> None:
    template = os.fsdecode(b"\xff${rank}$$ ")
    assert line_prefix(template, "default", 3, 1) == b"\xff3$ "
    assert line_prefix("", "default", 3, 1) == b"[default1]:"
    assert line_prefix("${hostname}:", "default", 3, 1) == f"{socket.gethostname()}:".encode()


async def test_the_end_of_a_worker_group_waits_for_what_is_to_be_shown(tmp_path: Path) -> None:
    done: list[str] = []

    class Shown(Tee):
        async def drain(self, timeout_s: float) -> bool:
            done.append(f"drained within {timeout_s:g} s")
            return await super().drain(timeout_s)

        def close(self) -> None:
            done.append("closed")
            super().close()

    made = parse_launch(["--tee=3", f"--log-dir={tmp_path}", __file__])[0]
    group = LocalWorkerGroup(made, lambda _: "", console=Shown)
    await group.open_round(LINE, "127.0.0.1")
    await group.close()
    assert done == [f"drained within {DRAIN_TIMEOUT_S:g} s", "closed"]
