"""Queries workers for the record of their collectives, which `worker_hook` makes available.

Each worker's torch serves HTTP on a Unix socket beside its progress file, in a folder of the job's
account. Every request has a deadline, and responses are bounded. A failed worker may have left its
record in the folder; of an aborted one, the last response counts if it had been waiting long.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import ParamSpec, TypeVar

import msgspec

from rdzv.agent.observers import flight_records
from rdzv.agent.runner import descriptors
from rdzv.agent.system.accounts import Identity, acting_as, open_untrusted
from rdzv.core.evidence.collectives import GroupRecord
from rdzv.structs import replace, struct

log = logging.getLogger("rdzv.agent")

P = ParamSpec("P")
T = TypeVar("T")

HOOK = Path(__file__).parents[1] / "job_programs" / "worker_hook"
"""The folder with the `sitecustomize` that makes workers respond."""
KEPT_PATH = "RDZV_PYTHONPATH"
"""The variable that holds the script's own PYTHONPATH."""

MAX_NAMES = 64
"""The maximum number of names examined in a worker's folder."""
MAX_MEMBERS = 4_096
"""The maximum number of RANKs read for a process group."""
MAX_TRIED = 4
"""The maximum number of sockets tried."""
MAX_BYTES = 16 << 20
"""The size limit for a response; torch's 2,000 entries take one megabyte."""
MAX_WHY_BYTES = 300
MAX_ERROR_BYTES = 4_000
MAX_GROUPS_BYTES = 1 << 18
"""The size limit for the file with the RANKs of a worker's process groups."""
MAX_TOLD = 8
"""The maximum number of reasons logged for one job."""
HANDLERS = ("fr_trace_json", "dump_nccl_trace_json")
"""The names of torch's handlers for the record, newest first."""

LONG_WAIT_MS = 10_000
"""A dead worker's last response counts if it had waited this long: it did not leave the collective.
"""

_NAME = re.compile(r"collectives\.(\d+)\.([0-9a-f]{8}|why)")

OFF = "it is turned off by --no-collective-trace"
NOTHING = (
    "it has not started torch.distributed, or its interpreter runs no sitecustomize from "
    "PYTHONPATH (does it clear the environment, or use -E, -I or -S?)"
)

OLDER = "its torch gives no record of collectives (2.13 does; an older one may not)"


class NoRecordError(Exception):
    """A worker's record is not available; the message gives the reason."""


def with_hook(environ: Mapping[str, str]) -> dict[str, str]:
    """Return a worker's environment in which its interpreter runs the hook."""
    path = environ.get("PYTHONPATH")
    first = os.pathsep.join([str(HOOK), *([path] if path else [])])
    kept = {} if path is None else {KEPT_PATH: path}
    return {**environ, **kept, "PYTHONPATH": first}


class _Head(msgspec.Struct, frozen=True):
    """The first line of the file that a failed worker leaves, as `worker_hook` writes it."""

    error: str
    failed: bool
    at_ns: int


@struct(frozen=True)
class LeftRecord:
    """The record left by a failed worker."""

    error: str
    """The error of a collective that ended it, or an empty string if unknown."""
    record: flight_records.FlightRecord


class RecordReader:
    """Reads the records of one job's workers, with their account's rights."""

    def __init__(self, rdzv_id: str, *, on: bool, identity: Identity | None = None) -> None:
        self._rdzv_id = rdzv_id
        self.on = on
        self.identity = identity
        self._told: set[str] = set()
        self._latest: dict[int, tuple[int, bytes]] = {}
        """The time and content of each worker's last response, by pid."""

    async def read(
        self, file: str, pid: int, entries: int, timeout_s: float, *, begins: bool = False
    ) -> flight_records.FlightRecord:
        """Return the record of the worker with this progress file, with `entries` per group.

        Raises:
            NoRecordError: there is no record, or it does not arrive in time. The reason is logged
                once, unless the worker has only begun (`begins`) and has no record yet.
        """
        try:
            answer = await self._answer(file, pid, timeout_s)
            return _read(flight_records.read_record, answer, time.time_ns(), entries)
        except NoRecordError as error:
            why = str(error)
            if begins and why == NOTHING:
                raise
            if self.on and why not in self._told and len(self._told) < MAX_TOLD:
                self._told.add(why)
                log.info("%s: no record of collectives for pid %d: %s", self._rdzv_id, pid, why)
            raise

    async def times(
        self, file: str, pid: int, timeout_s: float
    ) -> dict[str, flight_records.GroupTimes]:
        """Return when the worker with this progress file entered its collectives, by group."""
        answer = await self._answer(file, pid, timeout_s)
        self._latest[pid] = time.time_ns(), answer
        return _read(flight_records.read_times, answer, time.time_ns() - time.monotonic_ns())

    def left(
        self, file: str, pid: int, entries: int = flight_records.ENTRIES, *, gone: bool = True
    ) -> LeftRecord | None:
        """Return what a worker left, or of one that is `gone` its last response if that counts."""
        if not self.on or not file:
            return None
        try:
            path = Path(file).with_name(f"collectives.{pid}.last")
            with acting_as(self.identity):
                fd = open_untrusted(path, os.O_RDONLY)
            with os.fdopen(fd, "rb") as text:
                head = msgspec.json.decode(text.readline(MAX_ERROR_BYTES), type=_Head)
                answer = text.read(MAX_BYTES)
            # Torch's clock and the hook's are the same, so the collective's age is exact.
            return LeftRecord(
                " ".join(head.error.split()),
                flight_records.read_record(answer, head.at_ns, entries, failed=head.failed),
            )
        except (OSError, ValueError):
            return self._last_answer(pid, entries) if gone else None

    def _last_answer(self, pid: int, entries: int) -> LeftRecord | None:
        at_ns, answer = self._latest.get(pid, (0, b""))
        try:
            if answer and flight_records.read_record(answer, at_ns).waiting_ms >= LONG_WAIT_MS:
                return LeftRecord("", flight_records.read_record(answer, time.time_ns(), entries))
        except ValueError:
            log.debug("cannot read the last response from pid %d", pid)
        return None

    def with_members(
        self, file: str, pid: int, groups: Iterable[GroupRecord]
    ) -> tuple[GroupRecord, ...]:
        """Return a worker's groups, those in which it waits with the RANKs that are in them."""
        members: dict[str, tuple[int, ...]] = {}
        if any(group.pending is not None for group in groups):
            with contextlib.suppress(OSError, ValueError):
                path = Path(file).with_name(f"collectives.{pid}.groups")
                with acting_as(self.identity):
                    fd = open_untrusted(path, os.O_RDONLY)
                with os.fdopen(fd, "rb") as text:
                    lines = text.read(MAX_GROUPS_BYTES).decode().splitlines()
                for name, _, ranks in (line.rpartition(" ") for line in lines):
                    members[name] = tuple(map(_rank, ranks.split(",")[:MAX_MEMBERS]))
        return tuple(
            group
            if group.pending is None or group.group not in members
            else replace(group, members=members[group.group])
            for group in groups
        )

    def forget(self) -> None:
        self._latest.clear()

    async def _answer(self, file: str, pid: int, timeout_s: float) -> bytes:
        if not self.on:
            raise NoRecordError(OFF)
        if not file:
            raise NoRecordError("there is no folder for its socket")
        try:
            async with asyncio.timeout(timeout_s):
                return await first_answer(Path(file).parent, pid, self.identity)
        except TimeoutError:
            raise NoRecordError("its torch does not answer in time") from None
        except descriptors.SentDescriptorError:
            # It is not torch that answers, and each further request would cost a process.
            why = "a process of the job answers with a descriptor, as torch never does"
            if self.on:
                log.warning("%s: no more requests for collectives: %s", self._rdzv_id, why)
            self.on = False
            raise NoRecordError(why) from None
        except OSError as error:
            why = error.strerror or str(error)
            raise NoRecordError(f"the request to its torch failed: {why}") from error


def _rank(text: str) -> int:
    rank = int(text)
    if 0 <= rank < 1 << 32:
        return rank
    raise ValueError(f"no RANK: {rank}")


def _read(reader: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    try:
        return reader(*args, **kwargs)
    except ValueError as error:
        raise NoRecordError(str(error)) from error


async def first_answer(folder: Path, pid: int, identity: Identity | None) -> bytes:
    """Return the first response from a socket, the worker's own or else a descendant's."""
    with acting_as(identity):
        sockets, whys = _names(folder, pid)
    last: OSError | None = None
    for path in sockets[:MAX_TRIED]:
        try:
            return await _post_each(path, identity)
        except descriptors.SentDescriptorError:
            raise
        except OSError as error:
            last = error
    if last is not None:
        raise last
    with acting_as(identity):
        raise NoRecordError(_why(whys[0]) if whys else NOTHING)


def _names(folder: Path, pid: int) -> tuple[list[Path], list[Path]]:
    """Return the folder's sockets and its files with reasons, the worker's own first."""
    found: dict[bool, list[tuple[bool, Path]]] = {True: [], False: []}
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry, _ in zip(entries, range(MAX_NAMES), strict=False):
            if name := _NAME.fullmatch(entry.name):
                own = int(name[1]) == pid
                found[name[2] == "why"].append((not own, Path(entry.path)))
    return [path for _, path in sorted(found[False])], [path for _, path in sorted(found[True])]


def _why(path: Path) -> str:
    try:
        with os.fdopen(open_untrusted(path, os.O_RDONLY), "rb") as file:
            return file.read(MAX_WHY_BYTES).decode(errors="replace")
    except OSError:
        return NOTHING


async def _post_each(path: Path, identity: Identity | None) -> bytes:
    status = 0
    for handler in HANDLERS:
        status, body = await _post(path, f"/handler/{handler}", identity)
        if status == 200:
            return body
    why = OLDER if status == 404 else f"its torch gives no record of collectives: HTTP {status}"
    raise NoRecordError(why)


async def _post(path: Path, target: str, identity: Identity | None) -> tuple[int, bytes]:
    loop = asyncio.get_running_loop()
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.setblocking(False)
        # Connecting to a Unix socket succeeds or fails at once, even if its queue is full.
        with acting_as(identity), descriptors.short_path(path) as short:
            sock.connect(short)
        head = f"POST {target} HTTP/1.1\r\nHost: worker\r\nConnection: close\r\n"
        await loop.sock_sendall(sock, f"{head}Content-Length: 0\r\n\r\n".encode())
        answer = bytearray()
        while part := await _receive(loop, sock):
            answer += part
            if len(answer) > MAX_BYTES:
                raise NoRecordError(f"its record is larger than {MAX_BYTES >> 20} MiB")
    finally:
        descriptors.close_job_socket(sock)
    top, _, body = bytes(answer).partition(b"\r\n\r\n")
    words = top.split(b" ", 2)
    status = int(words[1]) if len(words) > 1 and words[1].isdigit() else 0
    return status, body


async def _receive(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> bytes:
    while True:
        readable = loop.create_future()
        loop.add_reader(sock, readable.set_result, None)
        try:
            await readable
        finally:
            loop.remove_reader(sock)
        with contextlib.suppress(BlockingIOError):
            return descriptors.receive_data(sock, 1 << 18)[0]
