"""The socket between a worker and its runner: its messages, frames and receiving thread."""

from __future__ import annotations

import array
import contextlib
import json
import os
import select
import socket
import stat
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .cutting import LostWait, RoundCut
from .slot_format import NO_MARK, Mark

MAX_FRAME_BYTES = 64 << 10
MAX_FDS = 253
"""The maximum number of descriptors that the kernel passes with a message."""
MAX_RECEIVED_BYTES = 1 << 20
"""The size limit for frames from the runner, which carry a whole environment and so may be longer
than a worker's.
"""


class BrokenLinkError(OSError):
    """The peer is gone, or has sent data that is not a frame."""


def encode(message: Mapping[str, object]) -> bytes:
    """Return a message as a frame: a 4-byte big-endian length, followed by a JSON object.

    >>> encode({"type": "hello"})
    b'\\x00\\x00\\x00\\x10{"type":"hello"}'
    """
    payload = json.dumps(message, separators=(",", ":")).encode()
    if len(payload) > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {len(payload)} bytes; at most {MAX_FRAME_BYTES} fit")
    return struct.pack(">I", len(payload)) + payload


class Received:
    """Splits received bytes and descriptors into messages."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._fds: list[int] = []

    def read(self, link: socket.socket) -> None:
        size = array.array("i").itemsize
        try:
            data, ancillary, _, _ = link.recvmsg(
                64 << 10, socket.CMSG_SPACE(MAX_FDS * size), socket.MSG_CMSG_CLOEXEC
            )
        except OSError as error:
            raise BrokenLinkError(str(error)) from error
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(content[: len(content) - len(content) % size])
                self._fds += fds
        if not data:
            raise BrokenLinkError("the runner has closed the link")
        self._bytes += data

    def next_message(self) -> tuple[Mapping[str, Any], list[int]] | None:
        """Return the next complete message, and its descriptors, which the caller owns."""
        if len(self._bytes) < 4:
            return None
        (length,) = struct.unpack_from(">I", self._bytes)
        if length > MAX_RECEIVED_BYTES:
            raise BrokenLinkError(f"a frame of {length} bytes is too long")
        if len(self._bytes) < 4 + length:
            return None
        payload = bytes(self._bytes[4 : 4 + length])
        del self._bytes[: 4 + length]
        try:
            message = json.loads(payload)
        except ValueError as error:
            raise BrokenLinkError(f"a frame is not JSON: {error}") from error
        if not isinstance(message, dict):
            raise BrokenLinkError("a frame is not a JSON object")
        # Further ones belong to a later message.
        count = int(message.get("fds", 0))
        fds, self._fds = self._fds[:count], self._fds[count:]
        return message, fds

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()


LINK_VARIABLE = "RDZV_WORKER_LINK"
SNAPSHOTS_VARIABLE = "RDZV_SNAPSHOTS"
"""The environment variable that is set if the runner holds snapshots."""
PROTOCOL = 1
VERSION = "0.1.0"

_CUT_AGAIN_MS = 20
"""How often to search a cut round for late connections."""
_SEND_TIMEOUT_S = 10.0
"""How long the runner may stop reading before it counts as gone."""
_ANSWER_TIMEOUT_S = 10.0
_FDS_AT_ONCE = 200
"""Descriptors per message; the kernel passes at most 253."""


@dataclass(frozen=True)
class Go:
    """This worker takes part in the next round."""

    round: int
    env: Mapping[str, str]
    source: int | None = None
    step: int | None = None
    stdout: str | None = None
    """The file to append to from now on; None for the same as before."""
    stderr: str | None = None


@dataclass(frozen=True)
class Release:
    """This worker must raise the exception it reported, and end."""

    reason: str


@dataclass(frozen=True)
class GivenSlots:
    """Memory for snapshots. Who receives it closes the descriptors."""

    size: int
    fds: list[int]
    reason: str = ""
    """The reason why there are no slots."""
    copies: list[int] = field(default_factory=list)
    """Descriptors of copies of other nodes' snapshots."""


@dataclass
class Announced:
    """What the runner has announced of snapshots."""

    whole: Mark | None = None
    """The newest state for which all parts are saved, or None until the first announcement."""
    given_up: Mark = NO_MARK
    """Newer states up to this one are incomplete, and will never be whole."""
    pinned: Mark = NO_MARK
    """The state that is being written to disk."""


class Link:
    """A worker's end of the socket. All methods are thread-safe, and release the GIL to wait."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        sock.settimeout(None)
        self._socket = sock
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._cut: RoundCut | None = None
        self._lost_wait: LostWait | None = None
        self._round = -1
        self._over_through = -1
        """The last round that the runner has declared over."""
        self._order: Go | Release | None = None
        self._closed = False
        self._queue: socket.socket | None = None
        """The socket whose queue holds the connections of this round, or None if the runner has not
        provided one.
        """
        self._slots: GivenSlots | None = None
        self.announced = Announced()

    def listen(self) -> None:
        os.register_at_fork(after_in_child=self._leave_to_parent)
        self._send({"type": "hello", "protocol": PROTOCOL, "version": VERSION, "wants_queue": True})
        threading.Thread(target=self._listen, name="rdzv link", daemon=True).start()

    @property
    def is_closed(self) -> bool:
        return self._closed

    def begin(self, number: int, cut: RoundCut) -> None:
        """Cut a round as soon as it is over."""
        with self._changed:
            self._round = number
            self._cut, self._lost_wait = cut, LostWait()
            over = self._over_through >= number
        if over:
            cut.cut()

    def is_over(self) -> bool:
        return self._over_through >= self._round

    def wait_until_over(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(self.is_over, timeout_s)

    def end(self) -> None:
        with self._changed:
            self._cut = None

    def suspect(self, number: int, message: str, traceback: str) -> None:
        self._send(
            {
                "type": "suspect",
                "round": number,
                "message": message[:4000],
                # The cause is at the end of a traceback.
                "traceback": traceback[-12_000:],
            }
        )

    def parked(self, number: int, connections: list[list[Any]], **state: Any) -> None:
        self._send({"type": "parked", "round": number, "connections": connections[:500], **state})

    def resumed(self, **what: Any) -> None:
        self._send({"type": "resumed", **what})

    @property
    def holds_connections(self) -> bool:
        return self._queue is not None

    def hold_open(self, fds: list[int]) -> bool:
        """Ask the runner to keep these connections open until all workers have left the round.

        They then stay open even if this process closes them or dies. Returns False if the runner's
        queue is full or gone.
        """
        queue = self._queue
        if queue is None:
            return False
        try:
            for at in range(0, len(fds), _FDS_AT_ONCE):
                rights = array.array("i", fds[at : at + _FDS_AT_ONCE])
                ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
                queue.sendmsg([b"0"], ancillary, socket.MSG_DONTWAIT)
        except OSError:
            return False
        return True

    def reserve(self, size: int, *, copies: bool = False) -> GivenSlots:
        """Request this worker's slots, of at least `size` bytes; with 0, those that hold data.

        With `copies`, also the copies of other nodes' snapshots. Waits up to 10 seconds.
        """
        if SNAPSHOTS_VARIABLE not in os.environ:
            return GivenSlots(0, [], "its runner holds no snapshots")
        with self._changed:
            self._slots = None
        self._send({"type": "reserve", "bytes": size, "copies": copies})
        with self._changed:
            self._changed.wait_for(lambda: self._slots or self._closed, _ANSWER_TIMEOUT_S)
            slots, self._slots = self._slots, None
        return slots or GivenSlots(0, [], "its runner does not answer")

    def saved(self, slot: int, **what: Any) -> None:
        """Report the snapshot in a slot. Without fields, the slot is empty or holds no state."""
        self._send({"type": "saved", "slot": slot, **what})

    def wait_until_whole(self, mark: Mark, timeout_s: float) -> bool:
        """Wait until the runner announces a step, or a later one, or the end of the round."""

        def is_known() -> bool:
            whole = self.announced.whole
            return self.is_over() or (whole is not None and whole.time >= mark.time)

        with self._changed:
            return self._changed.wait_for(is_known, timeout_s)

    def wait_for_order(self) -> Go | Release | None:
        """Wait for the runner's order. Returns None if the runner is gone."""
        with self._changed:
            self._changed.wait_for(lambda: self._order is not None or self._closed)
            order, self._order = self._order, None
            return order

    def _send(self, message: Mapping[str, object]) -> None:
        """Send a message, closing the link if the runner is gone or reads nothing."""
        frame = encode(message)
        with self._sending:
            if self._closed:
                return
            view = memoryview(frame)
            try:
                while view:
                    _, ready, _ = select.select([], [self._socket], [], _SEND_TIMEOUT_S)
                    if not ready:
                        raise TimeoutError("the runner reads nothing")
                    view = view[self._socket.send(view, socket.MSG_DONTWAIT) :]
            except OSError:
                self._close()

    def _listen(self) -> None:
        received = Received()
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        try:
            while True:
                if poll.poll(self._poll_ms()):
                    received.read(self._socket)
                    while (found := received.next_message()) is not None:
                        self._take(*found)
                elif (cut := self._cut) is not None and cut.is_cut:
                    cut.cut()
                    self._report_lost_wait()
        except (BrokenLinkError, OSError, ValueError):
            received.close()
            self._close()

    def _report_lost_wait(self) -> None:
        if self._lost_wait is not None and (place := self._lost_wait.place()):
            self._lost_wait = None
            self._send({"type": "stuck", "round": self._round, "place": place[-500:]})

    def _poll_ms(self) -> int | None:
        cut = self._cut
        return _CUT_AGAIN_MS if cut is not None and cut.is_cut else None

    def _take(self, message: Mapping[str, Any], fds: list[int]) -> None:
        kind = message.get("type")
        if kind == "go":
            env = {str(name): str(value) for name, value in message["env"].items()}
            more = {name: message.get(name) for name in ("source", "step", "stdout", "stderr")}
            self._note(Go(int(message["round"]), env, **more))
            return
        if kind in ("slots", "no_slots"):
            count, reason = 2 if kind == "slots" else 0, str(message.get("reason", ""))
            slots = GivenSlots(int(message.get("bytes", 0)), fds[:count], reason, fds[count:])
            with self._changed:
                self._slots = slots
                self._changed.notify_all()
            return
        if kind == "queue" and len(fds) == 1:
            former, self._queue = self._queue, socket.socket(fileno=fds[0])
            if former is not None:
                former.close()
            return
        for fd in fds:
            os.close(fd)
        if kind == "watermark":
            with self._changed:
                self.announced.whole = _mark(message.get("mark"))
                self.announced.given_up = _mark(message.get("given_up"))
                self._changed.notify_all()
        elif kind == "pinned":
            self.announced.pinned = _mark(message.get("mark"))
        elif kind == "release":
            self._note(Release(str(message.get("reason", ""))))
        elif kind == "round_over":
            with self._changed:
                self._over_through = max(self._over_through, int(message["round"]))
                cut = self._cut if self.is_over() else None
                self._changed.notify_all()
            if cut is not None:
                cut.cut()

    def _note(self, order: Go | Release) -> None:
        with self._changed:
            self._order = order
            self._changed.notify_all()

    def _close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _leave_to_parent(self) -> None:
        # Locks may be held by threads that do not exist in a forked child.
        self._closed = True
        self._sending = threading.Lock()
        self._changed = threading.Condition()
        with contextlib.suppress(OSError):
            self._socket.close()
        if self._queue is not None:
            self._queue.close()


def _mark(fields: Mapping[str, Any] | None) -> Mark:
    return NO_MARK if fields is None else Mark(**fields)


_links: list[Link] = []


def process_link() -> Link | None:
    """Return this process's link, or None without one; the first call sends the hello.

    The variable is removed from the environment, because children do not have the descriptor.
    """
    value = os.environ.pop(LINK_VARIABLE, "")
    if value:
        link = _opened(value)
        if link is not None:
            link.listen()
            _links[:] = [link]
    return _links[0] if _links and not _links[0].is_closed else None


def _opened(value: str) -> Link | None:
    try:
        fd = int(value)
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            return None
        os.set_inheritable(fd, False)
        sock = socket.socket(fileno=fd)
    except (ValueError, OSError):
        return None  # A child of the worker may inherit the variable, but not the descriptor.
    if sock.family != socket.AF_UNIX:
        sock.detach()
        return None
    return Link(sock)
