"""The links to the workers, which show which workers can be kept or have parked.

RDZV_WORKER_LINK gives a worker the descriptor of its end of the link, a Unix stream socket. Both
directions carry frames as defined in channel.py. Frames from the worker, of at most 64 KiB each:

    hello    {protocol, version, wants_queue}        once; the worker can be kept from then on
    suspect  {round, message, traceback}             a collective has failed; it is about to park
    stuck    {round, place}                          it cannot park: gloo has lost an operation
    parked   {round, step, torn, shard, shards, oldest_step, connections}
                                                     it has left its round and is waiting
    resumed  {round, step, source, healed, init_ms, heal_ms, is_unwatched,
            not_loaded}
                                                     it continues in a new round
    reserve  {bytes, copies}                         it requests two snapshot slots of this size
                                                     (snapshot_slots.py), or with 0 the ones that
                                                     hold data; copies: whether it also requests
                                                     copies of other nodes' snapshots
    saved    {slot, mark, shard, bytes, digest}      slot 0 or 1 holds this snapshot; without a
                                                     mark, the slot is empty or holds no state

Frames to the worker:

    round_over {round}                               it must park
    go         {round, env, source, step, stdout, stderr}
                                                     it takes part in this round, and appends to
                                                     these files from now on, unless they are null
    queue      {}                                    if the worker wants it; sent with a socket that
                                                     holds the connections of a round, before its
                                                     `go` (held_connections.py)
    release    {reason}                              it must raise the exception that it reported
    slots      {bytes}                               response to `reserve`; sent with two memfds,
                                                     and with those of copies, if requested
    no_slots   {reason}                              response to `reserve`; sent with the memfds of
                                                     copies, if requested
    watermark  {mark, given_up}                      all parts of this step are saved on some node;
                                                     later ones up to the mark `given_up` may also
                                                     be overwritten; it may be null
    pinned     {mark}                                this step is being written to disk; null: none

A mark is {lineage, step, series, shards, world_size}.

Both sides ignore unknown frames. A worker is the job's own process, so nothing that it sends is
trusted: a malformed frame, a descriptor or too many frames cause the link to be closed, and the
worker is then ended like one without a link. A parked worker exits when its link is closed.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass

from .channel import Channel, MalformedFrameError
from .frames import Number, RequestError, Small, Text, decode
from .processes import live_connection, mark_of, new_mark, session_of
from .requests import MAX_SHARDS, MAX_SLOT_BYTES, Snapshot

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .child_exits import Child
    from .requests import WorkerSpec
    from .runner import Runner

LINK_VARIABLE = "RDZV_WORKER_LINK"
"""The environment variable that names the descriptor of a worker's link."""

MARK_VARIABLE = "RDZV_WORKER_MARK"
"""The environment variable that tells a worker's process the mark of it and its descendants."""

RUNNER_VARIABLE = "RDZV_RUNNER"
"""The environment variable that identifies the runner, if it may outlive its agent."""

SNAPSHOTS_VARIABLE = "RDZV_SNAPSHOTS"
"""The environment variable that is set if this runner handles `reserve`."""

PROTOCOL = 1
MAX_FRAME_BYTES = 64 << 10
MAX_FRAMES = 64
"""The maximum number of frames, not counting `saved`, from a worker between two `go`."""
MAX_SAVED_A_SECOND = 200


@dataclass(frozen=True, slots=True)
class Parked:
    """A parked worker's report."""

    shard: Small = 0
    shards: Small = 1
    step: Number | None = None
    torn: bool = False
    oldest_step: Number | None = None
    connections: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        if not self.shard < self.shards <= MAX_SHARDS:
            raise RequestError(f"shard {self.shard} of {self.shards}")


@dataclass(frozen=True, slots=True)
class Suspect:
    """A worker's report of a collective that has failed."""

    message: Text = ""
    traceback: Text = ""


@dataclass(frozen=True, slots=True)
class Stuck:
    """A worker's report that it cannot park."""

    place: Text = ""


@dataclass(frozen=True, slots=True)
class Resumed:
    """A worker's report that it continues in a new round."""

    step: Number | None = None
    source: Small | None = None
    healed: bool = False
    init_ms: Small = 0
    heal_ms: Small = 0
    is_unwatched: bool = False
    not_loaded: Text = ""


@dataclass(frozen=True, slots=True)
class Reserve:
    """A worker's request for slots."""

    bytes: Number = 0
    copies: bool = False


class WorkerLink:
    """A worker and the runner's end of its link."""

    def __init__(self, runner: Runner, spec: WorkerSpec, round_: int) -> None:
        """Create the link for a worker that is about to be started. May raise `OSError`.

        `theirs` is the other end, which must be closed once the worker has it.
        """
        self._runner = runner
        self._loop = runner.loop
        self._queue: int | None = None
        """The number of the queue for its connections."""
        self.local_rank = spec.local_rank
        self.mark = new_mark(spec.env.get(RUNNER_VARIABLE, str(os.getpid())))
        self.round = round_
        """The round in which the worker is taking part, or took part most recently."""
        self.child: Child | None = None
        self.parked: Parked | None = None
        self.stuck_in = ""
        """Where the worker reports being stuck, so that it cannot park; otherwise an empty string.
        """
        self.kill_at: float | None = None
        """When the worker will be killed; None unless it was asked to park or to end."""
        self.killed = False
        self.hurries = False
        """Whether the processes that it has started are killed as soon as it has exited."""
        self.hung_up = False
        """Whether a worker that could be kept has closed its end, as it does when it exits."""
        self.left: set[int] = set()
        """The pids of the processes that the worker left behind when it exited."""
        self._store = _store_of(spec)
        self._hello = False
        self._suspected = False
        self._resumed = False
        self._frames = 0
        self._saved: tuple[int, int] = (0, 0)
        """The second in which the last `saved` frame arrived, and the number of such frames in that
        second.
        """
        ours, self.theirs = socket.socketpair()
        self._channel = Channel(ours, takes_fds=False, max_bytes=MAX_FRAME_BYTES)
        try:
            self._loop.watch(self._channel.fileno(), self.read)
        except OSError:
            ours.close()
            self.theirs.close()
            raise

    @property
    def pid(self) -> int:
        assert self.child is not None
        return self.child.pid

    def owns(self, pid: int) -> bool:
        if session_of(pid) == self.pid:
            return True
        with suppress(OSError):
            return mark_of(pid) == self.mark
        return False

    def has_left(self, pid: int) -> bool:
        """Like `owns`, but also true of dying processes, whose session and mark are gone."""
        return pid in self.left or self.owns(pid)

    def kill(self) -> None:
        assert self.child is not None
        with suppress(OSError):
            self.child.kill()

    @property
    def is_open(self) -> bool:
        return self._channel.fileno() >= 0

    @property
    def can_be_kept(self) -> bool:
        return self._hello and self.is_open

    def environ(self, env: Mapping[str, str], *, fd: int | None = None) -> dict[str, str]:
        link = {} if fd is None else {LINK_VARIABLE: str(fd)}
        return {**env, MARK_VARIABLE: str(self.mark), SNAPSHOTS_VARIABLE: "1", **link}

    def describe(self) -> dict[str, object]:
        assert self.parked is not None
        fields = asdict(self.parked)
        del fields["connections"]
        return {"local_rank": self.local_rank, "pid": self.pid, **fields}

    def connected_to(self) -> str:
        """Return an address in its last round to which the parked worker is still connected, or "".

        A worker that cannot be inspected counts as connected.
        """
        assert self.parked is not None
        try:
            found = live_connection(self.pid, [*self._store, *self.parked.connections])
        except (OSError, ValueError, LookupError) as error:
            return f"something that cannot be inspected: {error}"
        return "" if found is None else f"{found[0]}:{found[1]}"

    # ------------------------------------------------------------------ to the worker

    def ask_to_park(self) -> None:
        self._send({"type": "round_over", "round": self.round})

    def go(self, spec: WorkerSpec, round_: int, source: int | None, step: int | None) -> None:
        self.round, self.parked, self._store = round_, None, _store_of(spec)
        self._suspected = self._resumed = False
        self.stuck_in = ""
        if self._queue is not None:
            self._runner.connections.close(self._queue)  # All the others have left that round, too.
            self._give_queue()
        self._frames = 0
        # The worker opens its files: closing one may take as long as the job's file system likes.
        files = {"stdout": spec.stdout, "stderr": spec.stderr}
        where = {"env": self.environ(spec.env), "source": source, "step": step, **files}
        self._send({"type": "go", "round": round_, **where})

    def release(self, reason: str) -> None:
        self._send({"type": "release", "reason": reason})

    def tell(self, kind: str, fds: Sequence[int] = (), **fields: object) -> None:
        """Send the worker a frame about snapshots. The link takes ownership of the descriptors."""
        self._send({"type": kind, **fields}, tuple(fds))

    def close(self) -> None:
        """Close the link, causing a parked worker to exit. Its connections are held for a while."""
        if self._queue is not None:
            self._runner.connections.close_later(self._queue)
            self._queue = None
        if self.is_open:
            self._loop.unwatch(self._channel.fileno())
            self._channel.close()

    def _send(self, message: Mapping[str, object], fds: tuple[int, ...] = ()) -> None:
        if not self.is_open:
            for fd in fds:
                os.close(fd)
            return
        try:
            self._channel.send({**message, "fds": len(fds)}, *fds)
            self._loop.watch_channel(self._channel)
        except (OSError, BufferError, ValueError) as error:
            self.hung_up = self._hello and isinstance(error, ConnectionError)
            self.close()

    # ------------------------------------------------------------------ from the worker

    def read(self) -> None:
        if not self.is_open:
            return
        try:
            self._channel.flush()
            self._loop.watch_channel(self._channel)
            self._channel.receive()
            while self.is_open and (frame := self._channel.next_message()) is not None:
                self._count(frame)
                self._take(frame)
        except (EOFError, OSError, MalformedFrameError, RequestError) as error:
            self.hung_up = self._hello and isinstance(error, EOFError)
            self.close()

    def _count(self, frame: Mapping[str, object]) -> None:
        if frame.get("type") == "saved":
            now = int(time.monotonic())
            self._saved = (now, self._saved[1] + 1 if self._saved[0] == now else 1)
        else:
            self._frames += 1
        if self._frames > MAX_FRAMES or self._saved[1] > MAX_SAVED_A_SECOND:
            raise RequestError("too many frames")

    def _take(self, frame: Mapping[str, object]) -> None:
        kind = frame.get("type")
        if kind == "hello" and frame.get("protocol") == PROTOCOL:
            self._hello = True
            if frame.get("wants_queue") is True and self._queue is None:
                self._give_queue()
        elif kind == "reserve" and self._hello:
            wanted = decode(Reserve, frame)
            size = min(wanted.bytes, MAX_SLOT_BYTES)
            self._runner.slots.give(self, size, with_copies=wanted.copies)
        elif kind == "saved" and self._hello:
            saved = {**frame, "local_rank": self.local_rank, "copy_of": None}
            snapshot = decode(Snapshot, saved) if "mark" in frame else None
            self._runner.slots.note(self.local_rank, 1 if frame.get("slot") else 0, snapshot)
        elif self.child is None or not self._hello or frame.get("round") != self.round:
            return  # It has not sent `hello`, or the frame is from an earlier round.
        elif kind == "suspect" and not self._suspected and self.parked is None:
            self._suspected = True
            self._emit("suspect", **asdict(decode(Suspect, frame)), age_ms=0)
        elif kind == "stuck":
            self.stuck_in = decode(Stuck, frame).place[:500]
        elif kind == "parked" and self.parked is None:
            self.parked = decode(Parked, frame)
        elif kind == "resumed" and not self._resumed:
            resumed = asdict(decode(Resumed, frame))
            self._resumed = True
            self._emit("resumed", **{**resumed, "not_loaded": resumed["not_loaded"][:500]})

    def _give_queue(self) -> None:
        self._queue = None
        with suppress(OSError):
            self._queue, theirs = self._runner.connections.add()
            self._send({"type": "queue"}, (theirs.detach(),))

    def _emit(self, event: str, **fields: object) -> None:
        who = {"round": self.round, "local_rank": self.local_rank, "pid": self.pid}
        self._runner.agent.emit(event, **who, **fields)


def _store_of(spec: WorkerSpec) -> list[tuple[str, int]]:
    with suppress(KeyError, ValueError):
        return [(spec.env["MASTER_ADDR"], int(spec.env["MASTER_PORT"]))]
    return []
