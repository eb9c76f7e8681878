"""Copies lines from the workers' log files to the console, with a prefix.

Workers write directly to files, so they never wait for the agent or die with it. **The file is the
buffer**: of a line that is incomplete, or that the console does not accept, only the position is
kept. A thread for each destination may block in a write; the event loop never does.

The format is torchrun's (torch/distributed/elastic/multiprocessing/tail_log.py): the prefix, then
the line. `\\n`, `\\r\\n` and `\\r` all end a line and are written as `\\n`. Unlike there, a line is
copied when it is complete, a last line without a line ending gets one, and bytes are unchanged.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from select import PIPE_BUF, POLLIN, POLLOUT, poll
from string import Template

from rdzv.agent.output.tailed_file import TailedFile
from rdzv.errors import InvalidRequestError

log = logging.getLogger("rdzv.agent")

LOOK_EVERY_S = 0.1
"""The interval at which files are looked at, as in torchrun."""
DRAINED_EVERY_S = 0.005
MAX_ENDED_ROUNDS = 8
"""The maximum number of ended rounds whose output may still be waiting for a blocked console."""


class OutputStream(IntEnum):
    """A worker's output stream. The numbers are the bits in --redirects and --tee."""

    OUT = 1
    ERR = 2


# ---------------------------------------------------------------------- options


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

    A closed console ends only the copying to that console.
    """

    def __init__(self, out: int = 1, err: int = 2) -> None:
        """Copy to these descriptors. The caller still owns them."""
        self._consoles = {
            OutputStream.OUT: _Pump(_own_console(out), "stdout"),
            OutputStream.ERR: _Pump(_own_console(err), "stderr"),
        }
        self._filters: dict[OutputStream, tuple[_Pump, tuple[bytes, ...]]] = {}
        self._finishing: list[_Pump] = []

    def duplicate(self, stream: OutputStream, path: Path, filters: Sequence[str]) -> None:
        """Also copy what contains any of `filters` to a new file, until the next `unfollow`."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
        pump = _Pump(os.open(path, flags, 0o666), str(path))
        self._filters[stream] = pump, tuple(map(os.fsencode, filters))

    def follow(self, path: Path, prefix: bytes, stream: OutputStream) -> None:
        """Copy a file's lines, from its beginning. The file need not exist yet."""
        self._consoles[stream].follow(TailedFile(path, prefix))
        if stream in self._filters:
            pump, needles = self._filters[stream]
            pump.follow(TailedFile(path, prefix, needles))

    def unfollow(self) -> None:
        """Copy every file up to its end, in the background, and forget it.

        After `MAX_ENDED_ROUNDS` rounds, what the console has not accepted is dropped with a
        warning, but remains in the files.
        """
        for pump, _ in self._filters.values():
            pump.finish()
            self._finishing.append(pump)
        self._filters.clear()
        self._finishing = [pump for pump in self._finishing if not pump.is_over]
        for pump in self._pumps():
            pump.end_all()

    def pending(self, stream: OutputStream) -> int:
        return self._consoles[stream].pending

    async def drain(self, timeout_s: float) -> bool:
        """Unfollow all files and wait until they are copied; return False on a timeout."""
        self.unfollow()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while any(pump.pending for pump in self._pumps()):  # noqa: ASYNC110
                    await asyncio.sleep(DRAINED_EVERY_S)
                return True
        return False

    def close(self) -> None:
        """Stop copying at once. Output that was not drained remains in the files."""
        for pump in (*self._pumps(), *(pump for pump, _ in self._filters.values())):
            pump.stop()

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


class _Pump:
    """Copies the lines of any number of files to one descriptor, in its own thread."""

    def __init__(self, fd: int, name: str) -> None:
        """Take over a descriptor, which is closed when the pump ends."""
        self._fd = fd
        self._abort = os.eventfd(0)
        self._poll = poll()
        self._poll.register(fd, POLLOUT)
        self._poll.register(self._abort, POLLIN)
        self._name = name
        self._files: dict[TailedFile, int] = {}
        self._dropped = 0
        self._finishing = self._stopping = self._has_news = False
        self.is_over = False
        self._changed = threading.Condition()
        # This is a daemon thread, so that a write that hangs in a terminal does not keep the agent
        # from exiting.
        threading.Thread(target=self._run, name=f"tee {name}", daemon=True).start()

    # ------------------------------------------------------------------ from the event loop

    @property
    def pending(self) -> int:
        return len(self._files)

    def follow(self, file: TailedFile) -> None:
        with self._changed:
            if not self.is_over:
                self._files[file] = 0
            self._wake()

    def end_all(self) -> None:
        """Copy all output up to now and forget the files, dropping output that waits too long."""
        with self._changed:
            if all(self._files.values()):
                return  # No round has ended since the last call.
            kept = {file: ends + 1 for file, ends in self._files.items() if ends < MAX_ENDED_ROUNDS}
            self._dropped += len(self._files) - len(kept)
            self._files = kept
            self._wake()

    def finish(self) -> None:
        with self._changed:
            self._finishing = True
            self._wake()

    def stop(self) -> None:
        """End now, even in the middle of a line."""
        with self._changed:
            self._stopping = True
            if not self.is_over:
                os.eventfd_write(self._abort, 1)
            self._wake()

    def _wake(self) -> None:
        self._has_news = True
        self._changed.notify()

    # ------------------------------------------------------------------ in the thread

    def _run(self) -> None:
        try:
            while self._take_turns():
                pass
        except _AbortedError:
            pass
        except _ConsoleClosedError as error:
            text = "cannot write to %s (%s); worker output is only in the log files"
            log.warning(text, self._name, error)
        finally:
            with self._changed:
                self.is_over = True
                self._files.clear()
                os.close(self._fd)
                os.close(self._abort)

    def _take_turns(self) -> bool:
        """Copy a chunk of each file; wait if none has more. Returns False once all work is done."""
        with self._changed:
            self._has_news = False
            files, dropped, self._dropped = dict(self._files), self._dropped, 0
        if dropped:
            text = "%s was too slow; not copying the rest of %d ended log files to it"
            log.warning(text, self._name, dropped)
        # An ended file was complete before it is read here.
        more = [file for file, ends in files.items() if self._copy_some(file, final=ends > 0)]
        with self._changed:
            if self._stopping or (self._finishing and not self._files):
                return False
            if not more and not self._has_news:
                self._changed.wait(LOOK_EVERY_S if self._files else None)
        return True

    def _copy_some(self, file: TailedFile, *, final: bool) -> bool:
        """Copy one chunk of a file, and drop a `final` one at its end. Returns if there is more."""
        if file not in self._files:
            return False
        try:
            if file.copy_some(self._write, final=final):
                return True
        except OSError as error:
            log.warning("cannot copy %s to %s: %s", file.path, self._name, error)
            final = True
        if final:
            with self._changed:
                self._files.pop(file, None)
        return False

    def _write(self, data: bytes | bytearray) -> None:
        """Write all data. The descriptor is shared, so others determine whether it blocks."""
        rest = memoryview(data)
        while rest:
            # A write of PIPE_BUF bytes is unlikely to block now.
            if any(fd == self._abort for fd, _ in self._poll.poll()):
                raise _AbortedError
            try:
                rest = rest[os.write(self._fd, rest[:PIPE_BUF]) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise _ConsoleClosedError(error.strerror) from error
