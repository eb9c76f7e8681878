"""Reads the workers' log files for readers that request them through the server.

Each request has a task, which reads one round's files in turn and, with `follow`, those of later
rounds. The request's *credit* limits how much is sent, so a slow reader costs nothing here: the
file is the buffer. Each job's files are read in a separate thread, because a hanging file server
must not block the agent or the reading of other jobs' files. The file names are those given to the
workers at their start; a request never contributes to a name.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

from rdzv.agent.launch.launch import NO_FILES
from rdzv.agent.output.run_files import Written, WrittenRound
from rdzv.agent.system.accounts import Identity, acting_as, open_untrusted
from rdzv.agent.system.file_watches import Watches
from rdzv.agent.system.side_thread import settle
from rdzv.messages import LogPiece
from rdzv.structs import struct

log = logging.getLogger("rdzv.agent")

MAX_REQUESTS = 64
"""The maximum number of concurrent requests. The server has a lower limit of its own."""
PIECE_BYTES = 64 * 1024
"""The maximum amount of data in one piece."""
PIECE_COST = 256
"""The credit that a piece costs in addition to its data, which also limits the number of small
pieces. `rdzv.server.diagnosis.worker_logs` uses the same cost.
"""
TAIL_BYTES = 64 * 1024 * 1024
"""How far back to search for the start of the last lines."""
ERROR_CHARS = 1_000

_P = ParamSpec("_P")
_R = TypeVar("_R")


@struct(frozen=True)
class ReadRequest:
    """The requested part of a job's logs. For the meaning of None, see `rdzv.proto`."""

    request: int
    rdzv_id: str
    credit: int
    round: int | None = None
    local_rank: int | None = None
    rank: int | None = None
    stdout: bool = True
    stderr: bool = True
    follow: bool = False
    tail_bytes: int = 0
    tail_lines: int = 0
    positions: Mapping[tuple[int, bool], int] = field(default_factory=dict)
    """Where to continue in the files of `round`, by LOCAL_RANK and whether the file is stderr."""
    runs: tuple[str, ...] = ()
    """The job's runs, newest first. Another job of the same name has other runs."""


Say = Callable[[LogPiece], Awaitable[None]]


class WorkerLogReader:
    """Handles one stream's requests, for all of a node's jobs."""

    def __init__(self, say: Say) -> None:
        """Send pieces with `say`, which waits until there is room for one."""
        self._say = say
        self.past: Callable[[str, Sequence[str]], Written | None] = lambda *_: None
        """Finds the output of runs of a job that has left this node. Called in the reader thread.
        """
        self._written: dict[str, Written] = {}
        self._requests: dict[int, _Request] = {}
        self._watches: Watches | None = None
        self._readers: dict[str, _Reader] = {}
        """The threads by job, because one job's files may be on a server that hangs."""

    def serve(self, rdzv_id: str, written: Written) -> None:
        """Handle requests for a job from now on."""
        self._written[rdzv_id] = written

    def forget(self, rdzv_id: str) -> None:
        """Treat a job as one that has left this node."""
        self._written.pop(rdzv_id, None)

    def read(self, request: ReadRequest) -> None:
        self.cancel(request.request)
        written = self._written.get(request.rdzv_id)
        answer = _Request(request, written, self._reader(request.rdzv_id), self._say, self.past)
        if len(self._requests) >= MAX_REQUESTS:
            answer.refusal = f"this node already answers {MAX_REQUESTS} readers; try again later"
        self._requests[request.request] = answer
        answer.begin(lambda: self._requests.pop(request.request, None))
        answer.task.add_done_callback(lambda _: self._close_idle())

    def grant(self, number: int, credit: int) -> None:
        if (request := self._requests.get(number)) is not None:
            request.grant(credit)

    def cancel(self, number: int) -> None:
        """Abort the response to a request without sending a final message."""
        if (request := self._requests.pop(number, None)) is not None:
            request.task.cancel()

    def cancel_all(self) -> None:
        """Drop all requests, because their stream has ended."""
        for number in tuple(self._requests):
            self.cancel(number)

    async def finish(self, within_s: float) -> None:
        """Send the rest of ended jobs' logs, as far as readers accept it within `within_s`."""
        tasks = [request.task for request in self._requests.values()]
        if tasks:
            await asyncio.wait(tasks, timeout=within_s)

    def close(self) -> None:
        """Abort the responses to all requests."""
        self.cancel_all()
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()
        if self._watches is not None:
            self._watches.close()
            self._watches = None

    def _reader(self, rdzv_id: str) -> _Reader:
        if self._watches is None:
            self._watches = Watches(asyncio.get_running_loop())
        if rdzv_id not in self._readers:
            self._readers[rdzv_id] = _Reader(self._watches)
        return self._readers[rdzv_id]

    def _close_idle(self) -> None:
        """End the threads of jobs without readers, leaving a hanging thread for the next reader."""
        read = {request.rdzv_id for request in self._requests.values()}
        for rdzv_id in self._readers.keys() - read:
            if not self._readers[rdzv_id].busy:
                self._readers.pop(rdzv_id).close()


class _Request:
    """A request that is being handled."""

    def __init__(
        self,
        wanted: ReadRequest,
        written: Written | None,
        reader: _Reader,
        say: Say,
        past: Callable[[str, Sequence[str]], Written | None],
    ) -> None:
        """Read from `written` or, if the job is not here or lacks that round, from `past`."""
        self.refusal = ""
        self.task: asyncio.Task[None]
        self.rdzv_id = wanted.rdzv_id
        self._wanted = wanted
        self._here = written is not None
        self._written = Written() if written is None else written
        self._past = past
        self._reader = reader
        self._say = say
        self._credit = wanted.credit
        self._news = asyncio.Event()
        """Set when there may be work: new credit, or a change to a file or to the rounds."""
        self._told: set[str] = set()

    def begin(self, at_end: Callable[[], object]) -> None:
        self.task = asyncio.get_running_loop().create_task(self._answer())
        listeners = self._written.listeners
        listeners.add(self._news.set)

        def end(task: asyncio.Task[None]) -> None:
            listeners.discard(self._news.set)
            if not task.cancelled():
                at_end()

        self.task.add_done_callback(end)

    def grant(self, credit: int) -> None:
        self._credit += credit
        self._news.set()

    # ------------------------------------------------------------------ rounds

    async def _answer(self) -> None:
        error = self.refusal
        try:
            if not error:
                error = await self._look_back() or await self._read_rounds()
        except OSError as failure:
            error = f"cannot read {failure.filename or 'a log file'}: {failure.strerror}"
        except Exception as failure:
            log.exception("cannot read logs of %s", self.rdzv_id)
            error = f"a bug in its agent: {failure!r}"
        await self._send(LogPiece(self._wanted.request, last=True, error=error[:ERROR_CHARS]))

    async def _look_back(self) -> str:
        """Find an earlier run if one is requested; return the reason if none can be found."""
        wanted = self._wanted
        earlier = not wanted.follow and wanted.round is not None and not self._at(wanted.round)
        if self._here and not earlier:
            return ""
        found = await self._reader.run(self._past, wanted.rdzv_id, wanted.runs)
        if found is not None and (not self._here or found.at(wanted.round or 0)):
            self._written = found
            return ""
        return "" if self._here else f"this node takes no part in {wanted.rdzv_id}"

    def _at(self, number: int | None) -> WrittenRound | None:
        """Return a round, but none of another job that has or had the same name."""
        found = None if number is None else self._written.at(number)
        if found is not None and self._wanted.runs and found.run not in self._wanted.runs:
            return None
        return found

    async def _read_rounds(self) -> str:
        """Read the requested round and, with `follow`, later ones; return the reason on failure."""
        wanted, written = self._wanted, self._written
        first = wanted.round if wanted.round is not None else written.last
        if not wanted.follow:
            found = self._at(first)
            return "" if found is None else await self._read_round(found, first=True)
        number, begun = first or 0, False
        # This is sent even if there is no data yet, so that the reader knows that the node
        # responds.
        await self._send(LogPiece(wanted.request, number))
        while True:
            found = written.next(number)
            if found is not None and self._at(found.number) is None:
                number = found.number + 1
            elif found is not None:
                if error := await self._read_round(found, first=not begun):
                    return error
                begun = True
                number = found.number + 1
            elif written.ended:
                return ""
            else:
                await self._pause()

    async def _read_round(self, found: WrittenRound, *, first: bool) -> str:
        """Send the requested part of a round; return the reason if nothing at all can be sent."""
        files, nowhere = self._files(found)
        if not files and not nowhere:
            return ""
        await self._send(LogPiece(self._wanted.request, found.number))
        if not files:
            return "; ".join(nowhere)
        for reason in nowhere:
            await self._complain(found, reason)
        try:
            for file in files:
                await self._reader.run(self._place, file, first)
            await self._read_files(found, files)
        finally:
            for file in files:
                self._reader.watches.disarm(file)
        return ""

    def _files(self, found: WrittenRound) -> tuple[list[_File], list[str]]:
        """Return a round's requested files, and the reasons why others are missing."""
        wanted = self._wanted
        files: list[_File] = []
        without: dict[tuple[bool, Path | None], list[int]] = {}
        for local_rank, output in enumerate(found.workers):
            rank = found.rank_first + local_rank
            if wanted.rank not in (None, rank) or wanted.local_rank not in (None, local_rank):
                continue
            for stderr, path in ((False, output.stdout), (True, output.stderr)):
                if not (wanted.stderr if stderr else wanted.stdout):
                    continue
                if path is None or path == NO_FILES:
                    without.setdefault((stderr, path), []).append(rank)
                else:
                    wake = self._news.set
                    files.append(
                        _File(path, found.identity, found.number, local_rank, rank, stderr, wake)
                    )
        return files, [_without_file(*kind, ranks) for kind, ranks in without.items()]

    # ------------------------------------------------------------------ files

    async def _read_files(self, found: WrittenRound, files: Iterable[_File]) -> None:
        """Send a round's files to their end, which is final once the round is over."""
        left = dict.fromkeys(files)
        ready = dict(left)
        while left:
            # This is determined before the read, which thus sees all earlier writes.
            final = not self._wanted.follow or self._written.is_over(found.number)
            if final:
                ready = {file: None for file in (*ready, *left) if file in left}
            for file in [file for file in left if file.woken]:
                ready[file] = None
            if not ready:
                await self._pause()
                continue
            file = next(iter(ready))
            del ready[file]
            file.woken = False
            limit = min(await self._room(), PIECE_BYTES)
            try:
                data = await self._reader.run(file.read, limit)
            except FileNotFoundError:
                data = b""
                if self._written.is_over(found.number):
                    await self._complain(found, f"{file.path} no longer exists")
            except OSError as error:
                reason = error.strerror or str(error)
                await self._complain(found, f"cannot read {file.path}: {reason}")
                del left[file]
                continue
            if data:
                await self._send_data(file, data)
                ready[file] = None
            elif final:
                del left[file]
            elif file.watch is None:
                # Read the file again, because a write in between did not trigger a notification.
                await self._reader.run(self._reader.watches.arm, file)
                ready[file] = None

    def _place(self, file: _File, first: bool) -> None:
        """Determine where to begin in a file and, if it is not followed, where to end."""
        wanted = self._wanted
        if file.round == wanted.round:
            file.offset = wanted.positions.get((file.local_rank, file.stderr), 0)
        with contextlib.suppress(
            OSError
        ):  # Either the first read reports the reason, or the file does not exist yet.
            size = file.size()
            if not wanted.follow:
                file.end = size
            if first and not file.offset:
                file.offset = tail(
                    file.path, size, wanted.tail_bytes, wanted.tail_lines, file.identity
                )

    # ------------------------------------------------------------------ sending

    async def _pause(self) -> None:
        await self._news.wait()
        self._news.clear()

    async def _room(self) -> int:
        """Wait for credit; return the maximum amount of data that a piece may carry."""
        while self._credit <= PIECE_COST:
            await self._pause()
        return self._credit - PIECE_COST

    async def _send(self, piece: LogPiece) -> None:
        await self._room()
        self._credit -= len(piece.data) + PIECE_COST
        await self._say(piece)

    async def _send_data(self, file: _File, data: bytes) -> None:
        await self._send(
            LogPiece(
                self._wanted.request,
                file.round,
                file.local_rank,
                file.rank,
                file.stderr,
                file.offset - len(data),
                data,
            )
        )

    async def _complain(self, found: WrittenRound, reason: str) -> None:
        """Report once why a part is missing. The rest is still sent."""
        if reason not in self._told:
            self._told.add(reason)
            error = reason[:ERROR_CHARS]
            await self._send(LogPiece(self._wanted.request, found.number, error=error))


def _without_file(stderr: bool, path: Path | None, ranks: Iterable[int]) -> str:
    who = f"RANK {', '.join(map(str, ranks))}: {'stderr' if stderr else 'stdout'}"
    if path is None:
        return (
            f"{who} goes to the console of its rdzvrun and to no file; launch with "
            "--redirects=3 or --tee=3, and with --log-dir for a known folder"
        )
    return (
        f"{who} is not kept, because of --log-dir={NO_FILES} or --local-ranks-filter; "
        "launch with --log-dir=FOLDER, and with --redirects=3 or --tee=3"
    )


# ---------------------------------------------------------------------- in the thread


@dataclass(eq=False, slots=True)
class _File:
    """A file, and the position up to which it has been sent."""

    path: Path
    identity: Identity | None
    """The account whose rights are used to open it."""
    round: int
    local_rank: int
    rank: int
    stderr: bool
    tell: Callable[[], None]
    """Called when the file may have changed."""
    offset: int = 0
    end: int | None = None
    """The position at which to end, or None if the file is followed."""
    watch: int | None = None
    woken: bool = False

    def wake(self) -> None:
        self.woken = True
        self.tell()

    def size(self) -> int:
        with _Opened(self.path, self.identity) as fd:
            return os.fstat(fd).st_size

    def read(self, limit: int) -> bytes:
        """Return more data, or b"" at the end. A truncated file is reread from its start."""
        with _Opened(self.path, self.identity) as fd:
            if self.end is not None:
                limit = min(limit, max(self.end - self.offset, 0))
            data = os.pread(fd, limit, self.offset)
            if not data and limit and os.fstat(fd).st_size < self.offset:
                self.offset = 0
                data = os.pread(fd, limit, 0)
            self.offset += len(data)
            return data


class _Opened:
    """A regular file that is open for reading and was not reached through a link.

    Its folders belong to the workers' account, which may replace them with links, so they are
    accessed with that account's rights.
    """

    def __init__(self, path: Path, identity: Identity | None) -> None:
        self._path = path
        self._identity = identity

    def __enter__(self) -> int:
        with acting_as(self._identity):
            self._fd = open_untrusted(self._path, os.O_RDONLY)
        return self._fd

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def tail(
    path: Path, size: int, tail_bytes: int, tail_lines: int, identity: Identity | None = None
) -> int:
    """Return the offset of the last `tail_lines` lines or `tail_bytes` bytes, whichever is less.

    0 means no limit. At most `TAIL_BYTES` are searched for lines.
    """
    start = max(size - tail_bytes, 0) if tail_bytes else 0
    if not tail_lines:
        return start
    start = max(start, size - TAIL_BYTES)
    with _Opened(path, identity) as fd:
        # A line ending at the end of the file does not begin another line.
        end, found = size, -1 if size and os.pread(fd, 1, size - 1) == b"\n" else 0
        while end > start:
            begin = max(end - PIECE_BYTES, start)
            block = os.pread(fd, end - begin, begin)
            here = block.count(b"\n")
            if found + here >= tail_lines:
                at = len(block)
                while found < tail_lines:
                    at = block.rindex(b"\n", 0, at)
                    found += 1
                return begin + at + 1
            found += here
            end = begin
    return start


class _Reader:
    """A thread for reads, which may hang, and the watches for changes to its files."""

    def __init__(self, watches: Watches) -> None:
        self.watches = watches
        self.busy = False
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # This is a daemon thread, so that a read that hangs does not keep the agent from exiting.
        threading.Thread(target=self._run, name="log reader", daemon=True).start()

    async def run(self, function: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Call a function in the thread."""
        future: Future[_R] = Future()
        self._work.put(partial(settle, future, partial(function, *args, **kwargs)))
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        self._work.put(None)

    def _run(self) -> None:
        while (call := self._work.get()) is not None:
            self.busy = True
            call()
            self.busy = False
