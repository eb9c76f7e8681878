"""A worker, and the link to it, which shows whether it can be kept or has parked.

RDZV_WORKER_LINK gives a worker the descriptor of its end of the link, a Unix stream socket. Both
directions carry frames as defined in channel.py. Frames from the worker, of at most 64 KiB each:

    hello    {protocol, version, wants_queue}        once; the worker can be kept from then on
    suspect  {round, message, traceback}             a collective has failed; it is about to park
    stuck    {round, place}                          it cannot park: gloo has lost an operation
    parked   {round, step, torn, shard, shards, oldest_step, connections}
                                                     it has left its round and is waiting; in the
                                                     round `STANDBY` it waits for its first, and
                                                     says `gpu_bytes`: the memory in use on its GPU
    resumed  {round, step, source, healed, init_ms, heal_ms, is_unwatched,
            not_loaded}
                                                     it continues in a new round
    reserve  {bytes, copies}                         it requests two snapshot slots of this size
                                                     (snapshot_slots.py), or with 0 the ones that
                                                     hold data; copies: whether it also requests
                                                     copies of other nodes' snapshots
    saved    {slot, mark, shard, bytes, digest, stopped_us}
                                                     slot 0 or 1 holds this snapshot, which has
                                                     stopped training for so long; without a mark,
                                                     the slot is empty or holds no state

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

A mark is {lineage, step, series, shards}.

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

from .channel import Link
from .frames import Number, RequestError, Small, Text, decode
from .processes import live_connection, mark_of, new_mark, session_of
from .requests import MAX_SHARDS, MAX_SLOT_BYTES, Snapshot
from .spawn import Program

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from .child_exits import Child
    from .killing import HelpersTime
    from .requests import KeepSpec, WorkerSpec
    from .runner import Runner
    from .workers import Round

LINK_VARIABLE = "RDZV_WORKER_LINK"
"""The environment variable that names the descriptor of a worker's link."""

MARK_VARIABLE = "RDZV_WORKER_MARK"
"""The environment variable that tells a worker's process the mark of it and its descendants."""

RUNNER_VARIABLE = "RDZV_RUNNER"
"""The environment variable that identifies the runner, if it may outlive its agent."""

SNAPSHOTS_VARIABLE = "RDZV_SNAPSHOTS"
"""The environment variable that is set if this runner handles `reserve`."""

PROTOCOL = 1
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
    gpu_bytes: Number = 0

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


class Worker:
    """A worker process, from its start until nothing is left of it, whether it is kept or not."""

    def __init__(self, runner: Runner, of: Round, spec: WorkerSpec) -> None:
        """Make a worker that is about to be started, and its link if it may be kept.

        Call `begin` once it has its end of the link, or else `close`. May raise `OSError`.
        """
        self._runner = runner
        self.of = of
        """The round in which it takes part, or took part most recently."""
        self.spec = spec
        self.local_rank = spec.local_rank
        self.mark = new_mark(spec.env.get(RUNNER_VARIABLE, str(os.getpid())))
        self.child: Child | None = None
        self.parked: Parked | None = None
        self.stuck_in = ""
        self.kill_at: float | None = None
        """When it will be killed; None unless it was asked to park or to end."""
        self.killed = False
        self.hung_up = False
        """Whether a worker that could be kept has closed its end, as it does when it exits."""
        self.then: list[Callable[[], None]] | None = None
        """What follows once it and its descendants are gone; None unless it is parked and ends."""
        self.helpers: HelpersTime | None = None
        """The time for the processes that it has started; None unless it was parked and exited."""
        self.hurries = False
        self.left: set[int] = set()
        self._queue: int | None = None
        self._hello = False
        self._suspected = False
        self._resumed = False
        self._frames = 0
        self._saved: tuple[int, int] = (0, 0)
        """The second in which the last `saved` frame arrived, and how many did in that second."""
        self.theirs: socket.socket | None = None
        self._link: Link | None = None
        if of.has_links:
            ours, self.theirs = socket.socketpair()
            self._link = Link(runner.loop, ours, self._receive, self._note_end)
            try:
                self._link.watch()
            except OSError:
                self.close()
                raise

    def program(self) -> Program:
        """Return the program of a worker that is started cold."""
        spec, env, fds = self.spec, self.environ(), []
        if self.theirs is not None:
            fds.append(self.theirs.fileno())
            env = {**env, LINK_VARIABLE: str(fds[0])}
        return Program(
            argv=spec.argv,
            env=env,
            pass_fds=fds,
            cwd=spec.cwd,
            shares_stdin=True,
            stdout=spec.stdout,
            stderr=spec.stderr,
            cpus=spec.cpus,
            identity=spec.identity,
        )

    def environ(self) -> Mapping[str, str]:
        """Return its environment, except for the descriptor of its link."""
        if self._link is None:
            return self.spec.env
        return {**self.spec.env, MARK_VARIABLE: str(self.mark), SNAPSHOTS_VARIABLE: "1"}

    def begin(self, child: Child) -> None:
        """Become this process, in the current round."""
        self.child = child
        self.of.workers[child.pid] = self
        if self.theirs is not None:
            self.theirs.close()
            self.theirs = None

    @property
    def pid(self) -> int:
        assert self.child is not None
        return self.child.pid

    def owns(self, pid: int) -> bool:
        """Return whether a child that the runner inherited was started by this worker."""
        if session_of(pid) == self.pid:
            return True
        with suppress(OSError):
            return mark_of(pid) == self.mark
        return False

    def has_left(self, pid: int) -> bool:
        """Like `owns`, but also true of dying processes, whose session and mark are gone."""
        return pid in self.left or self.owns(pid)

    @property
    def is_linked(self) -> bool:
        """Whether it has had a link."""
        return self._link is not None

    @property
    def is_open(self) -> bool:
        """Whether both ends of its link are open, as far as known."""
        return self._link is not None and self._link.is_open

    @property
    def can_be_kept(self) -> bool:
        return self._hello and self.is_open

    def describe(self) -> dict[str, object]:
        """Return the parked worker as `gone` has it."""
        assert self.parked is not None
        fields = asdict(self.parked)
        del fields["connections"]
        if not self.parked.gpu_bytes:
            del fields["gpu_bytes"]
        return {"local_rank": self.local_rank, "pid": self.pid, **fields}

    def connected_to(self) -> str:
        """Return an address in its last round to which the parked worker is still connected, or "".

        A worker that cannot be inspected counts as connected.
        """
        assert self.parked is not None
        env, ends = self.spec.env, [*self.parked.connections]
        with suppress(KeyError, ValueError):
            ends.append((env["MASTER_ADDR"], int(env["MASTER_PORT"])))
        try:
            found = live_connection(self.pid, ends)
        except (OSError, ValueError, LookupError) as error:
            return f"something that cannot be inspected: {error}"
        return "" if found is None else f"{found[0]}:{found[1]}"

    # ------------------------------------------------------------------ to the worker

    def ask_to_park(self) -> None:
        self.tell("round_over", round=self.of.number)

    def go(self, of: Round, spec: WorkerSpec, keep: KeepSpec) -> None:
        """Send the parked worker into a round."""
        self.of, self.spec, self.parked = of, spec, None
        self._suspected = self._resumed = False
        self.stuck_in, self._frames = "", 0
        if self._queue is not None:
            self._runner.connections.close(self._queue)  # All the others have left that round, too.
            self._give_queue()
        # The worker opens its files: closing one may take as long as the job's file system likes.
        self.tell(
            "go",
            round=of.number,
            env=self.environ(),
            source=keep.source,
            step=keep.step,
            stdout=spec.stdout,
            stderr=spec.stderr,
        )
        of.workers[self.pid] = self

    def release(self, reason: str) -> None:
        self.tell("release", reason=reason)

    def tell(self, kind: str, fds: Sequence[int] = (), **fields: object) -> None:
        """Send a frame, if the link is open. The link takes ownership of the descriptors."""
        if self._link is not None:
            self._link.tell({"type": kind, **fields, "fds": len(fds)}, *fds)

    def close(self) -> None:
        """Close the link, causing a parked worker to exit. Its connections are held for a while."""
        if self._queue is not None:
            self._runner.connections.close_later(self._queue)
            self._queue = None
        if self._link is not None:
            self._link.close()
        if self.theirs is not None:
            self.theirs.close()

    # ------------------------------------------------------------------ from the worker

    def read(self) -> None:
        if self._link is not None:
            self._link.read()

    def _note_end(self, error: Exception) -> None:
        self.hung_up = self._hello and isinstance(error, EOFError | ConnectionError)
        self.close()

    def _receive(self, frame: Mapping[str, object]) -> None:
        self._count(frame)
        self._take(frame)

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
        elif self.child is None or not self._hello or frame.get("round") != self.of.number:
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
            self.tell("queue", (theirs.detach(),))

    def _emit(self, event: str, **fields: object) -> None:
        who = {"round": self.of.number, "local_rank": self.local_rank, "pid": self.pid}
        self._runner.agent.emit(event, **who, **fields)
