"""Copies of other nodes' snapshots: their memory, and the process that fetches and sends them.

That process is snapshot_carrier.py, one of the agent's job programs. It runs under the job's
account, starts at the agent's request, outlives its round, and ends with the runner. The runner
itself opens no connections and reads no copies.

All copies belong to one mark. Copies of a newer mark are fetched into separate memory, so a failed
fetch damages no complete copy. The older copies are dropped once the newer ones are complete, or
once a newer mark is whole on all nodes.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass, field

from .channel import Channel, MalformedFrameError
from .descriptors import close_fds, dup_fds, write_warning
from .requests import RequestError, read_argv, read_env, read_field, read_identity
from .snapshot_slots import MAX_SLOT_BYTES, NoSlotsError, SavedSnapshot, memory_file
from .spawn import Program, reason_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from .child_exits import Child, Children
    from .loop import Loop
    from .snapshot_slots import SnapshotSlots

MAX_COPIES = 200
"""The maximum number of copies in a fetch, whose descriptors must fit into one message."""
MAX_COPIES_OF_WORKER = 16
"""The maximum number of copies given to a worker; the server asks for three."""
_MAX_FRAME_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Wanted:
    """Another node's snapshot that this node is to copy."""

    local_rank: int
    """The worker on this node for which the copy is intended."""
    copy_of: int
    snapshot: SavedSnapshot


@dataclass(slots=True)
class _Copy:
    of: Wanted
    fd: int
    is_there: bool = False


@dataclass(slots=True)
class _Copies:
    """The copies for one mark, either complete or being fetched."""

    mark: Mapping[str, object]
    """The mark as sent by the agent."""
    all: list[_Copy] = field(default_factory=list)

    @property
    def fds(self) -> list[int]:
        return [one.fd for one in self.all]


class SnapshotCopies:
    """This node's copies of other nodes' snapshots."""

    def __init__(self, loop: Loop, children: Children, slots: SnapshotSlots) -> None:
        self._loop = loop
        self._children = children
        self._slots = slots
        self._kept: _Copies | None = None
        """The copies for the newest mark whose requested copies are all complete."""
        self._coming: _Copies | None = None
        """The copies for a newer mark, which are being fetched."""
        self._spare: list[int] = []
        """Memory that holds no copy and can be reused."""
        self.carrier: Child | None = None
        """The process that exchanges copies; None if none is running."""
        self._channel: Channel | None = None
        self._port: int | None = None
        self._given: Mapping[str, str] = {}
        """The token and fingerprint that were last given to the carrier."""
        self._used: Mapping[str, str] = {}
        """Those that it uses."""
        self._fetches = 0
        self._missing: Mapping[str, object] | None = None

    # ------------------------------------------------------------------ for the slots

    def reserved(self) -> int:
        """Return the number of bytes reserved for copies."""
        return sum(os.fstat(fd).st_size for fd in self._fds())

    def untouched(self) -> int:
        """Return the number of reserved bytes that have no page yet."""
        return self.reserved() - sum(512 * os.fstat(fd).st_blocks for fd in self._fds())

    def free(self) -> bool:
        """Free memory that holds no copy. Returns whether there was any."""
        if not self._spare:
            return False
        close_fds(self._spare)
        self._spare = []
        return True

    def described(self) -> dict[str, object]:
        """Return the fields of `snapshots_held` that describe the copying itself."""
        carrier = None if self._port is None else {"port": self._port, **self._used}
        return {"carrier": carrier, "missing": self._missing}

    def held(self) -> list[dict[str, object]]:
        return [
            {**one.snapshot.held_for(one.local_rank), "copy_of": one.copy_of}
            for one in (copy.of for copy in self._there())
        ]

    def for_worker(self, local_rank: int) -> list[int]:
        """Duplicate the descriptors of the copies intended for a worker."""
        fds = [one.fd for one in self._there() if one.of.local_rank == local_rank]
        return list(dup_fds(*fds[:MAX_COPIES_OF_WORKER]))

    def send_slots(self, local_rank: int, size: int, fds: list[int]) -> None:
        """Give the carrier a worker's slots, so it can send their contents."""
        self._tell({"type": "slots", "local_rank": local_rank, "bytes": size}, *dup_fds(*fds))

    def drop_after(self, step: int) -> None:
        """Drop copies of later steps, complete or not, and keep their memory for reuse."""
        if self._kept is not None and read_field(self._kept.mark, "step", int) > step:
            self._give_up_kept()
        if self._coming is not None and read_field(self._coming.mark, "step", int) > step:
            self._give_up_coming()
        self._missing = None

    def close(self) -> None:
        self._give_up_kept()
        self._give_up_coming()
        self.free()
        self._hang_up("")

    # ------------------------------------------------------------------ the agent's requests

    def carry(self, request: Mapping[str, object]) -> None:
        """Handle `carry_copies`: start the carrier if necessary, and give it its credentials."""
        argv, env = tuple(read_argv(request)), read_env(request)
        identity, pem = read_identity(request), read_field(request, "pem", str)
        token = read_field(request, "token", str)
        self._given = {"token": token, "fingerprint": read_field(request, "fingerprint", str)}
        if self._channel is None and self.carrier is not None:
            return  # It is being killed. The agent is notified once it is gone.
        if self._channel is None:
            try:
                self._start(Program(argv=argv, env=env, identity=identity))
            except OSError as error:
                write_warning(f"cannot start the process that copies snapshots: {error}")
                return
            for local_rank, size, fds in self._slots.all():
                self.send_slots(local_rank, size, fds)
        self._tell({"type": "credentials", "token": token, "pem": pem})

    def fetch(self, request: Mapping[str, object]) -> None:
        """Handle `fetch_copies`. The next `snapshots_held` reports the result."""
        mark = read_field(request, "mark", dict)
        sources = [_read_source(one) for one in read_field(request, "sources", list)]
        wanted = [one for _, snapshots in sources for one in snapshots]
        if not 0 < len(wanted) <= MAX_COPIES:
            raise RequestError(f"sources: expected 1 to {MAX_COPIES} snapshots, got {len(wanted)}")
        self._give_up_coming()
        if self._channel is None:
            self._lack(mark, "the process that fetches them is not running")
            return
        if self._kept is not None and self._slots.is_outdated(self._kept.mark):
            self._give_up_kept()
        self._coming = _Copies(mark)
        self._missing = None
        try:
            for one in wanted:
                fd = self._memory_for(one.snapshot.bytes)
                self._coming.all.append(_Copy(one, fd))
            fds = dup_fds(*self._coming.fds)
        except (NoSlotsError, OSError) as error:
            self._give_up_coming()
            reason = reason_of(error) if isinstance(error, OSError) else str(error)
            self._lack(mark, f"there is no memory for them: {reason}")
            return
        self._fetches += 1
        asked = [
            {**source, "snapshots": [asdict(one.snapshot) for one in snapshots]}
            for source, snapshots in sources
        ]
        self._tell({"type": "fetch", "id": self._fetches, "sources": asked}, *fds)
        # The remaining memory has sizes that snapshots no longer have.
        self.free()

    def _memory_for(self, size: int) -> int:
        """Return memory for a copy, reusing a file that fits or else creating a new one."""
        fitting = [fd for fd in self._spare if os.fstat(fd).st_size >= size]
        if fitting:
            fd = min(fitting, key=lambda one: os.fstat(one).st_size)
            self._spare.remove(fd)
            return fd
        larger = size + size // 16 + (1 << 20)  # Plain values may grow.
        self._slots.refuse_too_large("a copy needs", larger)
        return memory_file("rdzv copy", larger)

    # ------------------------------------------------------------------ the carrier

    def _start(self, program: Program) -> None:
        ours, theirs = socket.socketpair()
        channel = Channel(ours, takes_fds=False, max_bytes=_MAX_FRAME_BYTES)
        try:
            with theirs:
                fd = theirs.fileno()
                self._loop.watch(channel.fileno(), self._read)
                started = Program(
                    argv=(*program.argv, "--fd", str(fd)),
                    env=program.env,
                    pass_fds=(fd,),
                    identity=program.identity,
                )
                name = "the process that copies snapshots"
                self.carrier = self._children.start(name, started, self._end, spared=True)
        except OSError:
            self._loop.unwatch(channel.fileno())
            channel.close()
            raise
        self._channel = channel

    def _tell(self, message: Mapping[str, object], *fds: int) -> None:
        if self._channel is None:
            close_fds(fds)
            return
        try:
            self._channel.send({**message, "fds": len(fds)}, *fds)
            self._loop.watch_channel(self._channel)
        except (OSError, BufferError, ValueError):
            self._hang_up()

    def _read(self) -> None:
        channel = self._channel
        if channel is None:
            return
        try:
            channel.flush()
            self._loop.watch_channel(channel)
            channel.receive()
            while self._channel is channel and (message := channel.next_message()) is not None:
                self._take(message)
        except (EOFError, OSError, MalformedFrameError, RequestError):
            # The process belongs to the job, so nothing that it sends is trusted.
            self._hang_up()

    def _take(self, message: Mapping[str, object]) -> None:
        kind = message.get("type")
        if kind == "listening":
            port, token = read_field(message, "port", int), read_field(message, "token", str)
            if not 0 < port < 1 << 16:
                raise RequestError(f"port: expected 1 to 65535, got {port!r:.80}")
            if token == self._given["token"]:
                self._port, self._used = port, self._given
                self._slots.tell()
        elif self._coming is None or message.get("id") != self._fetches:
            return  # It belongs to an earlier fetch.
        elif kind == "fetched":
            number = read_field(message, "number", int)
            if 0 <= number < len(self._coming.all):
                self._coming.all[number].is_there = True
        elif kind == "done":
            # JSON may escape what UTF-8 cannot carry.
            self._finish(read_field(message, "reason", str).encode(errors="replace").decode())

    def _finish(self, reason: str) -> None:
        assert self._coming is not None
        if reason or not all(one.is_there for one in self._coming.all):
            mark = self._coming.mark
            self._give_up_coming()
            self._lack(mark, reason or "not all of them arrived")
            return
        self._give_up_kept()
        self._kept, self._coming = self._coming, None
        self._slots.tell()

    def _end(self, child: Child, code: int) -> None:
        if child is self.carrier:
            self.carrier = None
            how = child.failure or (f"exit code {code}" if code >= 0 else f"signal {-code}")
            self._hang_up(f"the process that fetches them has ended: {how}")

    def _hang_up(self, reason: str = "the process that fetches them closed its socket") -> None:
        """Close the carrier's socket and kill the carrier. A fetch in progress has failed."""
        if self._channel is not None:
            if reason:
                write_warning(f"cannot exchange copies of snapshots: {reason}")
            self._loop.unwatch(self._channel.fileno())
            self._channel.close()
            self._channel = None
        if self.carrier is not None:
            # Otherwise it might still write to memory that another fetch reuses.
            with suppress(OSError):
                self.carrier.kill()
        self._port = None
        mark = None if self._coming is None else self._coming.mark
        self._give_up_coming()
        if mark is not None:
            self._missing = {"mark": mark, "reason": reason}
        self._slots.tell()

    # ------------------------------------------------------------------ inside

    def _there(self) -> list[_Copy]:
        return [] if self._kept is None else self._kept.all

    def _fds(self) -> list[int]:
        sets = [one for one in (self._kept, self._coming) if one is not None]
        return [*self._spare, *(fd for one in sets for fd in one.fds)]

    def _give_up_kept(self) -> None:
        if self._kept is not None:
            self._spare += self._kept.fds
            self._kept = None

    def _give_up_coming(self) -> None:
        if self._coming is not None:
            self._spare += self._coming.fds
            self._coming = None

    def _lack(self, mark: Mapping[str, object], reason: str) -> None:
        self._missing = {"mark": mark, "reason": reason}
        self._slots.tell()


def _read_source(said: object) -> tuple[dict[str, object], list[Wanted]]:
    if not isinstance(said, dict):
        raise RequestError(f"sources: expected objects, got {said!r:.80}")
    names = ("node_id", "address", "token", "fingerprint")
    source: dict[str, object] = {name: read_field(said, name, str) for name in names}
    source["port"] = read_field(said, "port", int)
    return source, [_read_wanted(one) for one in read_field(said, "snapshots", list)]


def _read_wanted(said: object) -> Wanted:
    if not isinstance(said, dict):
        raise RequestError(f"snapshots: expected objects, got {said!r:.80}")
    mark = read_field(said, "mark", dict)
    size = read_field(said, "bytes", int)
    if not 0 < size <= MAX_SLOT_BYTES:
        raise RequestError(f"bytes: expected 1 to {MAX_SLOT_BYTES}, got {size}")
    return Wanted(
        local_rank=read_field(said, "local_rank", int),
        copy_of=read_field(said, "copy_of", int),
        snapshot=SavedSnapshot(
            lineage=read_field(mark, "lineage", int),
            step=read_field(mark, "step", int),
            series=read_field(mark, "series", str),
            shard=read_field(said, "shard", int),
            shards=read_field(mark, "shards", int),
            world_size=read_field(mark, "world_size", int),
            bytes=size,
            digest=read_field(said, "digest", str),
        ),
    )
