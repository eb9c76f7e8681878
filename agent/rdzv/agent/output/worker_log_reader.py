"""Reads the workers' log files for readers that request them through the server, piece by piece.

Each request says how far its reader has come, and is answered with one piece and where to continue:
the file is the buffer, so a slow reader costs nothing. Each job's files are read in a thread of its
own, because a file server may hang. A request never contributes to a file's name.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

from rdzv.agent.launch.launch import NO_FILES
from rdzv.agent.output.run_files import Written, WrittenRound
from rdzv.agent.system.accounts import Identity, acting_as, open_untrusted
from rdzv.agent.system.side_thread import Aside
from rdzv.messages import LogPiece, LogPosition, ReadLog
from rdzv.structs import replace

log = logging.getLogger("rdzv.agent")

MAX_READERS = 64
"""The maximum number of concurrent readers. The server has a lower limit of its own."""
BLOCK_BYTES = 64 * 1024
"""How much is read at once in search of the last lines."""
TAIL_BYTES = 64 * 1024 * 1024
"""How far back to search for the start of the last lines."""
ERROR_CHARS = 1_000
LOOK_EVERY_S = 0.2
"""The interval at which files that are followed are looked at while there is nothing more."""
READ_WITHIN_S = 60.0
"""How long a file server may take to answer."""


class WorkerLogReader:
    """Handles one stream's requests, for all of a node's jobs."""

    def __init__(self, say: Callable[[LogPiece], Awaitable[None]]) -> None:
        self._say = say
        self.past: Callable[[str, Sequence[str]], Written | None] = lambda *_: None
        """Finds the output of runs of a job that has left this node. Called in the reader thread.
        """
        self._written: dict[str, Written] = {}
        self._readers: dict[int, _Reader] = {}
        """The readers that have not been sent their last piece, by the number of their request."""
        self._all_read = asyncio.Event()
        self._asides: WeakValueDictionary[str, Aside] = WeakValueDictionary()
        """How files are read, by job, as one job's files may be on a server that hangs. Each lives
        as long as a reader, or a read that hangs."""

    def serve(self, rdzv_id: str, written: Written) -> None:
        self._written[rdzv_id] = written

    def forget(self, rdzv_id: str) -> None:
        self._written.pop(rdzv_id, None)

    def read(self, asked: ReadLog) -> None:
        """Send a reader's next piece, as soon as there is one or its time is up."""
        reader = self._readers.get(asked.request)
        refusal = ""
        if reader is None:
            if len(self._readers) >= MAX_READERS:
                refusal = f"this node already answers {MAX_READERS} readers; try again later"
            aside = self._asides.setdefault(asked.rdzv_id, Aside(READ_WITHIN_S))
            reader = self._readers[asked.request] = _Reader(aside)
            self._all_read.clear()
        reader.stop()
        reader.task = asyncio.create_task(self._answer(asked, reader, refusal))

    def stop(self, number: int) -> None:
        if (reader := self._readers.pop(number, None)) is not None:
            reader.stop()
        if not self._readers:
            self._all_read.set()

    def stop_all(self) -> None:
        for number in tuple(self._readers):
            self.stop(number)

    async def finish(self, within_s: float) -> None:
        """Send the rest of ended jobs' logs, as far as readers ask for it within `within_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while self._readers:
                    await self._all_read.wait()

    async def _answer(self, asked: ReadLog, reader: _Reader, refusal: str) -> None:
        piece = LogPiece(asked.request, last=True, error=refusal)
        try:
            if not refusal:
                piece = await self._piece(asked, reader)
        except OSError as failure:
            reason = failure.strerror or failure
            error = f"cannot read {failure.filename or 'a log file'}: {reason}"
            piece = replace(piece, error=error)
        except Exception as failure:
            log.exception("cannot read logs of %s", asked.rdzv_id)
            piece = replace(piece, error=f"a bug in its agent: {failure!r}")
        await self._say(replace(piece, error=piece.error[:ERROR_CHARS]))
        if piece.last:
            reader.task = None
            self.stop(asked.request)

    async def _piece(self, asked: ReadLog, reader: _Reader) -> LogPiece:
        if reader.written is None:
            reader.written = await self._find(asked, reader.aside)
        if reader.written is None:
            error = f"this node takes no part in {asked.rdzv_id}"
            return LogPiece(asked.request, last=True, error=error)
        return await _Look(asked, reader.written, reader.aside).piece()

    async def _find(self, asked: ReadLog, aside: Aside) -> Written | None:
        """Return the job's output here or, if it has left or lacks the round, that of the past."""
        here = self._written.get(asked.rdzv_id)
        earlier = not asked.follow and asked.round is not None
        if here and not (earlier and _own(here.at(asked.round or 0), asked) is None):
            return here
        past = await aside.answer(self.past, asked.rdzv_id, asked.runs)
        return here if here and not (past and past.at(asked.round or 0)) else past


@dataclass(eq=False, slots=True)
class _Reader:
    aside: Aside
    written: Written | None = None
    task: asyncio.Task[None] | None = None

    def stop(self) -> None:
        if self.task is not None:
            self.task.cancel()


def _own(found: WrittenRound | None, asked: ReadLog) -> WrittenRound | None:
    """Return a round, unless it is of another job that has or had the same name."""
    return None if found and asked.runs and found.run not in asked.runs else found


class _Look:
    def __init__(self, asked: ReadLog, written: Written, aside: Aside) -> None:
        self._asked = asked
        self._written = written
        self._aside = aside
        self._news = asyncio.Event()
        """Set when the rounds may have changed."""
        self._until_s = asyncio.get_running_loop().time() + asked.wait_ms / 1000

    async def piece(self) -> LogPiece:
        """Return the next piece; one without data says where the reader is."""
        asked, written = self._asked, self._written
        written.listeners.add(self._news.set)
        try:
            number = asked.round if asked.round is not None else written.last or 0
            round_ = _own(written.at(number), asked)
            if round_ is not None:
                if (piece := await self._read_round(round_)) is not None:
                    return piece
                number += 1
            if asked.follow:
                return await self._begin_next(number)
            return LogPiece(asked.request, last=True)
        finally:
            written.listeners.discard(self._news.set)

    async def _begin_next(self, number: int) -> LogPiece:
        while True:
            round_ = self._written.next(number)
            if round_ is not None:
                number = round_.number + 1
                files, nowhere = self._files(round_)
                if _own(round_, self._asked) and (files or nowhere):
                    return await self._begin(round_, files, nowhere)
            elif self._written.ended:
                return LogPiece(self._asked.request, last=True)
            elif not await self._news_came():
                return LogPiece(self._asked.request, number)

    async def _begin(
        self, round_: WrittenRound, files: Sequence[_File], nowhere: Sequence[str]
    ) -> LogPiece:
        for file in files:
            if not file.placed:
                await self._aside.answer(self._place, file)
        return replace(self._said(round_, files, "; ".join(nowhere)), last=not files)

    async def _read_round(self, round_: WrittenRound) -> LogPiece | None:
        files, nowhere = self._files(round_)
        if not all(file.placed for file in files) or (nowhere and not files):
            return await self._begin(round_, files, nowhere)
        while files:
            # This is determined before the read, which thus sees all earlier writes.
            over = self._written.is_over(round_.number)
            unread = [file for file in files if not file.done]
            came = await self._aside.answer(self._read_one, unread, over)
            if came is not None:
                file, data, error = came
                files = [*(one for one in files if one is not file), file]
                return replace(
                    self._said(round_, files, error),
                    local_rank=file.local_rank,
                    rank=file.rank,
                    stderr=file.stderr,
                    offset=file.offset - len(data),
                    data=data,
                )
            if over or not self._asked.follow:
                break
            if not await self._news_came(LOOK_EVERY_S):
                return self._said(round_, files)
        return None

    def _said(self, round_: WrittenRound, files: Iterable[_File], error: str = "") -> LogPiece:
        """Return a piece without data, which says where the reader is."""
        positions = tuple(
            LogPosition("", round_.number, one.local_rank, one.stderr, one.offset, one.end)
            for one in files
        )
        return LogPiece(self._asked.request, round_.number, error=error, positions=positions)

    def _files(self, round_: WrittenRound) -> tuple[list[_File], list[str]]:
        """Return what is wanted, in the order of known positions, and why others are missing."""
        asked = self._asked
        places = {
            (at.local_rank, at.stderr): at for at in asked.positions if at.round == round_.number
        }
        files: dict[tuple[int, bool], _File] = {}
        without: dict[tuple[bool, Path | None], list[int]] = {}
        for local_rank, output in enumerate(round_.workers):
            rank = round_.rank_first + local_rank
            if asked.rank not in (None, rank):
                continue
            for stderr, path in ((False, output.stdout), (True, output.stderr)):
                if not (asked.stderr if stderr else asked.stdout):
                    continue
                if path is None or path == NO_FILES:
                    without.setdefault((stderr, path), []).append(rank)
                    continue
                file = _File(path, round_.identity, local_rank, rank, stderr)
                if (at := places.get((local_rank, stderr))) is not None:
                    file.offset, file.end, file.placed = at.offset, at.end, True
                files[local_rank, stderr] = file
        order = [key for key in places if key in files]
        nowhere = [_without_file(*kind, ranks) for kind, ranks in without.items()]
        return [files[key] for key in dict.fromkeys((*order, *files))], nowhere

    async def _news_came(self, look_s: float = math.inf) -> bool:
        until_s = min(self._until_s, asyncio.get_running_loop().time() + look_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until_s):
                await self._news.wait()
        self._news.clear()
        return asyncio.get_running_loop().time() < self._until_s

    # ------------------------------------------------------------------ in the thread

    def _place(self, file: _File) -> None:
        asked = self._asked
        # Either the first read reports the reason, or the file does not exist yet.
        with contextlib.suppress(OSError):
            size = file.size()
            if not asked.follow:
                file.end = size
            file.offset = tail(file.path, size, asked.tail_bytes, asked.tail_lines, file.identity)

    def _read_one(self, files: Iterable[_File], over: bool) -> tuple[_File, bytes, str] | None:
        for file in files:
            data, error = b"", ""
            try:
                data = file.read(self._asked.max_bytes)
            except FileNotFoundError:
                error = f"{file.path} no longer exists" if over else ""
            except OSError as failure:
                error = f"cannot read {file.path}: {failure.strerror or failure}"
            if error:
                file.end = file.offset
            if data or error:
                return file, data, error
        return None


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


@dataclass(eq=False, slots=True)
class _File:
    path: Path
    identity: Identity | None
    local_rank: int
    rank: int
    stderr: bool
    offset: int = 0
    end: int | None = None
    """The position at which to end, or None if the file is followed."""
    placed: bool = False
    """Whether the request says how far the file has been read."""

    @property
    def done(self) -> bool:
        return self.end is not None and self.offset >= self.end

    def size(self) -> int:
        with _opened(self.path, self.identity) as fd:
            return os.fstat(fd).st_size

    def read(self, limit: int) -> bytes:
        """Return more data, or b"" at the end. A truncated file is reread from its start."""
        with _opened(self.path, self.identity) as fd:
            if self.end is not None:
                limit = min(limit, self.end - self.offset)
            data = os.pread(fd, limit, self.offset)
            if not data and limit and os.fstat(fd).st_size < self.offset:
                self.offset = 0
                data = os.pread(fd, limit, 0)
            self.offset += len(data)
            return data


@contextlib.contextmanager
def _opened(path: Path, identity: Identity | None) -> Iterator[int]:
    """Open a regular file with the account's rights: it may replace folders with links."""
    with acting_as(identity):
        fd = open_untrusted(path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


def tail(
    path: Path, size: int, tail_bytes: int, tail_lines: int, identity: Identity | None = None
) -> int:
    """Return where the last lines or bytes begin, whichever is less. 0 means no limit."""
    start = max(size - tail_bytes, 0) if tail_bytes else 0
    if not tail_lines:
        return start
    start = max(start, size - TAIL_BYTES)
    with _opened(path, identity) as fd:
        # A line ending at the end of the file does not begin another line.
        end, found = size, -1 if size and os.pread(fd, 1, size - 1) == b"\n" else 0
        while end > start:
            begin = max(end - BLOCK_BYTES, start)
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
