"""Copies lines from the workers' log files to the console, with a prefix.

Workers write directly to files, so they never wait for the agent or die with it. This module
follows the files, as `tail -f` does. **The file is the buffer**: for a line that is incomplete, or
that the console does not accept, only its position in the file is kept. So an unread console costs
neither memory nor event loop time, and a line of any length is copied in one go.

::

    inotify ──event loop──▶ Watches ──wake──▶  _Pump: a thread per destination ──▶ console
                               ▲                 one chunk of one file at a time,
                               └──arm, at the──  in turn
                                  end of a file

A watch fires once, and is set again when a file has been read to its end. While a pump is busy or
its console is blocked, workers' writes wake no thread. A pump's thread may block in a write; the
event loop never does.

The format is torchrun's (torch/distributed/elastic/multiprocessing/tail_log.py): the prefix, then
the line. `\\n`, `\\r\\n` and `\\r` all end a line and are written as `\\n`, so each step of a
progress bar is a line. There are three deliberate differences:

* A line is copied when it is complete. torchrun copies the available data every 0.1 s and puts a
  prefix before each piece.
* A last line without a line ending gets one. torchrun continues the line with the next output.
* Bytes are passed on unchanged. torchrun decodes them and replaces those that are not UTF-8.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from select import PIPE_BUF, POLLIN, POLLOUT, poll
from string import Template

from rdzv.agent.output.tailed_file import TailedFile
from rdzv.agent.system.file_watches import Watches
from rdzv.errors import InvalidRequestError
from rdzv.structs import struct

__all__ = ["Route", "Stream", "Tee", "line_prefix", "parse_filters", "parse_ranks", "route"]

log = logging.getLogger("rdzv.agent")

MAX_ENDED_ROUNDS = 8
"""The maximum number of ended rounds whose output may still be waiting for a blocked console."""


class Stream(IntEnum):
    """A worker's output stream. The numbers are the bits in --redirects and --tee."""

    OUT = 1
    ERR = 2


# ---------------------------------------------------------------------- options


@struct(frozen=True)
class Route:
    """The destination of one worker's stream."""

    file: Path | None
    """The log file, or None if the stream goes directly to the agent's own stdout or stderr."""
    followed: bool
    """Whether its lines are copied to the console, and to the filtered log if there is one."""


def route(file: Path, *, redirect: bool, tee: bool, shown: bool) -> Route:
    """Determine the destination of a stream that has a log file.

    `shown` is whether --local-ranks-filter allows this worker's output on the console. The rules
    are those of `DefaultLogsSpecs.reify` in torch/distributed/elastic/multiprocessing/api.py.

    >>> route(Path("stdout.log"), redirect=False, tee=True, shown=False)
    Route(file=PosixPath('stdout.log'), followed=False)
    >>> route(Path("stdout.log"), redirect=False, tee=False, shown=False)
    Route(file=PosixPath('/dev/null'), followed=False)
    """
    if redirect or tee:
        return Route(file, followed=tee and shown)
    return Route(None if shown else Path(os.devnull), followed=False)


def line_prefix(template: str | None, role: str, rank: int, local_rank: int) -> bytes:
    """Return the prefix for a worker's lines.

    `template` is --log-line-prefix-template; unknown variables in it are left unchanged. `hostname`
    is this machine's short name (torch/distributed/elastic/agent/server/local_elastic_agent.py of
    torch 2.14).

    >>> line_prefix(None, "default", rank=9, local_rank=1)
    b'[default1]:'
    >>> line_prefix("${role_name} $rank/${local_rank} $x$ ", "trainer", rank=9, local_rank=1)
    b'trainer 9/1 $x$ '
    """
    text = Template(template or "[${role_name}${local_rank}]:").safe_substitute(
        role_name=role, rank=rank, local_rank=local_rank, hostname=socket.gethostname()
    )
    return os.fsencode(text)


def parse_filters(text: str) -> tuple[str, ...]:
    """Parse --duplicate-stdout-filters, a list of strings, one of which a line must contain.

    As in torch/distributed/run.py, `,,` stands for a comma, and an empty string among others
    matches every line. But empty text means no filters, as its help promises.

    >>> parse_filters("apple,x,,y"), parse_filters("apple,"), parse_filters("")
    (('apple', 'x,y'), ('apple', ''), ())
    """
    if not text:
        return ()
    return tuple(item.replace("\0", ",") for item in text.replace(",,", "\0").split(","))


def parse_ranks(text: str) -> frozenset[int] | None:
    """Parse --local-ranks-filter, a comma-separated list of LOCAL_RANKs; None means all.

    >>> sorted(parse_ranks("0,2")), parse_ranks("")
    ([0, 2], None)

    Raises:
        InvalidRequestError: it is not such a list.
    """
    if not text:
        return None
    ranks = text.split(",")
    if not all(rank.strip().isdecimal() and len(rank) < 10 for rank in ranks):
        raise InvalidRequestError(
            f"--local-ranks-filter={text} is not a list of LOCAL_RANKs; give one, e.g. 0,2"
        )
    return frozenset(map(int, ranks))


# ---------------------------------------------------------------------- the files of a round


class Tee:
    """Copies worker output to two consoles, and lines that pass a filter into files.

    For each round, call `duplicate` if filters are requested, `follow` for every file before its
    worker starts, and `unfollow` when the workers are gone. After all rounds, call `drain`, then
    `close`. Each file's lines are copied whole, in order, and once; several workers' files take
    turns. Only `drain` blocks.

    A closed console ends only the copying to that console. Create a `Tee` only if something is
    followed: it holds two threads and an inotify instance, and each user may have only a few of
    those.
    """

    def __init__(self, out: int = 1, err: int = 2) -> None:
        """Copy to these descriptors, in the running event loop. The caller still owns them."""
        self._watches = Watches(asyncio.get_running_loop())
        self._consoles = {
            Stream.OUT: _Pump(_own_console(out), "stdout", self._watches),
            Stream.ERR: _Pump(_own_console(err), "stderr", self._watches),
        }
        self._filters: dict[Stream, tuple[_Pump, tuple[bytes, ...]]] = {}
        self._finishing: list[_Pump] = []

    def duplicate(self, stream: Stream, path: Path, filters: Sequence[str]) -> None:
        """Also copy a stream's lines that contain any of `filters` into a new file.

        This applies to files followed until the next `unfollow`. torchrun calls the new files
        `filtered_stdout.log` and `filtered_stderr.log`, and puts them next to the workers' folders;
        their lines have the same prefixes as the console's.

        Raises:
            OSError: the file cannot be created.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
        pump = _Pump(os.open(path, flags, 0o666), str(path), self._watches)
        self._filters[stream] = pump, tuple(map(os.fsencode, filters))

    def follow(self, path: Path, prefix: bytes, stream: Stream) -> None:
        """Copy a file's lines, from its beginning. The file need not exist yet."""
        self._consoles[stream].follow(TailedFile(path, prefix))
        if stream in self._filters:
            pump, needles = self._filters[stream]
            pump.follow(TailedFile(path, prefix, needles))

    def unfollow(self) -> None:
        """Copy every file up to its current end, and forget it.

        This happens in the background, and only for the last `MAX_ENDED_ROUNDS` rounds. Older
        output that the console has not accepted by then is dropped with a warning, but remains in
        the files.
        """
        for pump, _ in self._filters.values():
            pump.finish()
            self._finishing.append(pump)
        self._filters.clear()
        self._finishing = [pump for pump in self._finishing if not pump.is_over]
        for pump in self._pumps():
            pump.end_all()

    def pending(self, stream: Stream) -> int:
        """Return the number of files that are followed, or not yet copied to the console."""
        return self._consoles[stream].pending

    async def drain(self, timeout_s: float) -> bool:
        """Unfollow all files and wait until they are copied; return False on a timeout."""
        self.unfollow()
        waits = [asyncio.wrap_future(pump.drained()) for pump in self._pumps()]
        _, late = await asyncio.wait(waits, timeout=timeout_s)
        for wait in late:
            wait.cancel()
        return not late

    def close(self) -> None:
        """Stop copying at once. Output that was not drained remains in the files."""
        for pump in (*self._pumps(), *(pump for pump, _ in self._filters.values())):
            pump.stop()
        self._watches.close()

    def _pumps(self) -> list[_Pump]:
        return [*self._consoles.values(), *self._finishing]


def _own_console(fd: int) -> int:
    """Return our own descriptor for a console, or /dev/null if it was closed from the start."""
    try:
        return os.dup(fd)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY)


# ---------------------------------------------------------------------- writing


class _AbortedError(Exception):
    """The console did not accept its data in time."""


class _ConsoleClosedError(Exception):
    """The console no longer accepts data."""


class _Sink:
    """A descriptor for writes that block until told to abort."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._abort = os.eventfd(0)
        self._poll = poll()
        self._poll.register(fd, POLLOUT)
        self._poll.register(self._abort, POLLIN)

    def write(self, data: bytes | bytearray) -> None:
        """Write all data. The descriptor is shared, so others determine whether it blocks."""
        rest = memoryview(data)
        while rest:
            self._wait_for_room()
            try:
                rest = rest[os.write(self._fd, rest[:PIPE_BUF]) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise _ConsoleClosedError(error.strerror) from error

    def _wait_for_room(self) -> None:
        """Wait until a write of PIPE_BUF bytes is unlikely to block."""
        if any(fd == self._abort for fd, _ in self._poll.poll()):
            raise _AbortedError

    def abort(self) -> None:
        """Make a waiting write and all later ones fail."""
        os.eventfd_write(self._abort, 1)

    def close(self) -> None:
        os.close(self._fd)
        os.close(self._abort)


@dataclass(eq=False, slots=True)
class _Source:
    """A file from which a pump copies."""

    tail: TailedFile
    woken: Callable[[_Source], None]
    watch: int | None = None
    identity: None = None
    """Always None, because if there is a console, the workers run under this process's account."""
    ends: int = 0
    """The number of rounds that have ended since its own began. Once positive, the file no longer
    grows.
    """

    @property
    def path(self) -> Path:
        return self.tail.path

    def wake(self) -> None:
        self.woken(self)


@dataclass(slots=True)
class _Work:
    """State shared by a pump's thread and the event loop, under a lock."""

    sources: dict[_Source, None] = field(default_factory=dict)
    ready: dict[_Source, None] = field(default_factory=dict)
    waiters: list[Future[None]] = field(default_factory=list)
    dropped: int = 0
    finishing: bool = False
    stopping: bool = False
    over: bool = False


class _Pump:
    """Copies the lines of any number of files to one descriptor, in its own thread."""

    def __init__(self, fd: int, name: str, watches: Watches) -> None:
        """Take over a descriptor, which is closed when the pump ends."""
        self._sink = _Sink(fd)
        self._name = name
        self._watches = watches
        self._work = _Work()
        self._changed = threading.Condition()
        # This is a daemon thread, so that a write that hangs in a terminal does not keep the agent
        # from exiting.
        threading.Thread(target=self._run, name=f"tee {name}", daemon=True).start()

    # ------------------------------------------------------------------ from the event loop

    @property
    def is_over(self) -> bool:
        return self._work.over

    @property
    def pending(self) -> int:
        return len(self._work.sources)

    def follow(self, tail: TailedFile) -> None:
        """Copy a file until `end_all`."""
        source = _Source(tail, self._wake)
        with self._changed:
            if not self._work.over:
                self._work.sources[source] = None
        self._wake(source)

    def end_all(self) -> None:
        """Copy all output up to now and forget the files, dropping output that waits too long."""
        with self._changed:
            if all(source.ends for source in self._work.sources):
                return  # No round has ended since the last call.
            for source in list(self._work.sources):
                source.ends += 1
                if source.ends > MAX_ENDED_ROUNDS:
                    self._work.dropped += 1
                    del self._work.sources[source]
                    self._work.ready.pop(source, None)
                else:
                    self._work.ready[source] = None
            self._changed.notify()

    def finish(self) -> None:
        """End once all currently followed files have been copied."""
        with self._changed:
            self._work.finishing = True
            self._changed.notify()

    def stop(self) -> None:
        """End now, even in the middle of a line."""
        with self._changed:
            self._work.stopping = True
            if not self._work.over:
                self._sink.abort()
            self._changed.notify()

    def drained(self) -> Future[None]:
        """Return a future that completes when no files remain to be copied."""
        future: Future[None] = Future()
        with self._changed:
            self._work.waiters.append(future)
            if not self._work.sources:
                self._release_waiters()
        return future

    def _wake(self, source: _Source) -> None:
        with self._changed:
            if source in self._work.sources:
                self._work.ready[source] = None
                self._changed.notify()

    def _release_waiters(self) -> None:
        for future in self._work.waiters:
            if future.set_running_or_notify_cancel():
                future.set_result(None)
        self._work.waiters.clear()

    # ------------------------------------------------------------------ in the thread

    def _run(self) -> None:
        try:
            while (source := self._next()) is not None:
                self._take_turn(source)
        except _AbortedError:
            pass
        except _ConsoleClosedError as error:
            text = "cannot write to %s (%s); worker output is only in the log files"
            log.warning(text, self._name, error)
        finally:
            self._end()

    def _next(self) -> _Source | None:
        """Wait for a source that may have new data; return None when all work is done."""
        work = self._work
        with self._changed:
            while not (work.ready or work.stopping or (work.finishing and not work.sources)):
                self._changed.wait()
            if work.stopping or not work.ready:
                return None
            source = next(iter(work.ready))
            del work.ready[source]
            dropped, work.dropped = work.dropped, 0
        if dropped:
            text = "%s was too slow; not copying the rest of %d ended log files to it"
            log.warning(text, self._name, dropped)
        return source

    def _take_turn(self, source: _Source) -> None:
        """Copy one chunk of a file; at its end, wait for a change or drop the file.

        After the watch is set, the file is read again, because a write in between caused no
        notification.
        """
        # This is determined before the read, which thus sees all earlier writes.
        final = source.ends > 0
        try:
            more = source.tail.copy_some(self._sink.write, final=final)
        except OSError as error:
            log.warning("cannot copy %s to %s: %s", source.tail.path, self._name, error)
            final, more = True, False
        if more:
            self._wake(source)
        elif final:
            self._forget(source)
        elif source.watch is None:
            self._watches.arm(source)
            self._wake(source)

    def _forget(self, source: _Source) -> None:
        self._watches.disarm(source)
        with self._changed:
            self._work.sources.pop(source, None)
            if not self._work.sources:
                self._release_waiters()

    def _end(self) -> None:
        with self._changed:
            self._work.over = True
            self._sink.close()
            left = list(self._work.sources)
            self._work.sources.clear()
            self._work.ready.clear()
            self._release_waiters()
        for source in left:
            self._watches.disarm(source)
