"""JSON frames over a Unix socket, optionally carrying file descriptors; `Link` is a job's."""

from __future__ import annotations

import errno
import json
import os
import socket
import struct
from collections import deque

from .descriptors import (
    SentDescriptorError,
    close_fds,
    close_job_socket,
    receive_data,
)
from .frames import RequestError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from .loop import Loop

MAX_FRAME_BYTES = 16 << 20
MAX_UNSENT_BYTES = 4 * MAX_FRAME_BYTES
"""The limit for unread data, above which a peer is considered dead."""

RECEIVE_BYTES = 256 << 10
_MAX_FDS = 16

_TRANSIENT = (
    errno.EINTR,
    errno.ENOMEM,
    errno.ENOBUFS,
    errno.EMFILE,
    errno.ENFILE,
    errno.ETOOMANYREFS,
)
"""Socket errors after which a call can be retried, because the peer is still connected."""


class MalformedFrameError(ValueError):
    """Raised for a frame that is too large or not a JSON object. Nothing is read after it."""


class Channel:
    """JSON objects, and file descriptors with them, over a Unix stream socket; never blocks.

    A frame is its length in 4 bytes, big endian, followed by that many bytes of JSON. Descriptors
    travel with the first bytes of the frame they belong to.
    """

    def __init__(
        self, sock: socket.socket, *, takes_fds: bool = True, max_bytes: int = MAX_FRAME_BYTES
    ) -> None:
        """Take ownership of a socket. Unless `takes_fds`, a descriptor sent to it is malformed.

        A frame longer than `max_bytes` is malformed, too. All received data is held until a frame
        is complete, so a job should be allowed only short frames. It must not send descriptors:
        `receive_data` says why.
        """
        sock.setblocking(False)
        self._socket = sock
        self._takes_fds = takes_fds
        self._max_bytes = max_bytes
        self._received = bytearray()
        self._fds: deque[int] = deque()
        self._unsent: deque[tuple[memoryview, Sequence[int]]] = deque()
        self._unsent_bytes = 0
        self.lost_fds = False
        """Whether a message lost its descriptors because this process had too many open."""

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, message: Mapping[str, object], *fds: int) -> None:
        """Send as much of a message as the socket accepts now, and keep the rest for `flush`.

        The channel owns `fds` from here on, even if this call raises an exception.

        Raises:
            ValueError: the message is too large for a frame.
            BufferError: the peer has left too much unread.
            OSError: the peer is gone.
        """
        payload = json.dumps(message, separators=(",", ":")).encode()
        if len(payload) > MAX_FRAME_BYTES:
            close_fds(fds)
            raise ValueError(f"a message of {len(payload)} bytes is too large")
        frame = memoryview(struct.pack(">I", len(payload)) + payload)
        self._unsent.append((frame, fds))
        self._unsent_bytes += len(frame)
        if self._unsent_bytes > MAX_UNSENT_BYTES:
            raise BufferError(f"the peer leaves {self._unsent_bytes} bytes unread")
        self.flush()

    def flush(self) -> None:
        """Send as much unsent data as the socket accepts. Raises `OSError` if the peer is gone."""
        while self._unsent:
            frame, fds = self._unsent[0]
            try:
                sent = socket.send_fds(self._socket, [frame], fds)
            except OSError as error:
                if error.errno in (errno.EAGAIN, *_TRANSIENT):
                    return
                raise
            close_fds(fds)
            self._unsent_bytes -= sent
            if sent < len(frame):
                self._unsent[0] = (frame[sent:], ())
            else:
                self._unsent.popleft()

    def receive(self) -> bool:
        """Read available data for `next_message`.

        Returns False if there was none, and raises `EOFError` at the end of the stream.
        """
        fds: list[int] = []
        try:
            if self._takes_fds:
                data, fds, flags, _ = socket.recv_fds(
                    self._socket, RECEIVE_BYTES, _MAX_FDS, socket.MSG_CMSG_CLOEXEC
                )
                self.lost_fds |= bool(flags & socket.MSG_CTRUNC)
            else:
                data, _ = receive_data(self._socket, RECEIVE_BYTES)
        except BlockingIOError:
            return False
        except SentDescriptorError as error:
            raise MalformedFrameError(str(error)) from error
        except OSError as error:
            if error.errno in _TRANSIENT:
                return False  # Nothing is lost.
            raise EOFError(str(error)) from error
        self._fds.extend(fds)
        if not data:
            raise EOFError("the peer has closed the channel")
        self._received += data
        return True

    def next_message(self) -> Mapping[str, object] | None:
        """Return the next complete message, if any. May raise `MalformedFrameError`.

        Once all messages have been returned, descriptors that were not taken are closed.
        """
        if not self._received:
            self._close_fds()
            self.lost_fds = False
        if len(self._received) < 4:
            return None
        (length,) = struct.unpack_from(">I", self._received)
        if length > self._max_bytes:
            raise MalformedFrameError(f"a frame of {length} bytes is too large")
        if len(self._received) < 4 + length:
            return None
        payload = bytes(self._received[4 : 4 + length])
        del self._received[: 4 + length]
        try:
            message = json.loads(payload)
        except (ValueError, RecursionError) as error:
            raise MalformedFrameError(f"a frame is not JSON: {error}") from error
        if not isinstance(message, dict):
            raise MalformedFrameError("a frame is not a JSON object")
        return message

    def take_fd(self) -> int | None:
        """Return a descriptor sent with the last returned message, or None. The caller owns it."""
        return self._fds.popleft() if self._fds else None

    def close(self) -> None:
        """Close the socket and every descriptor that has not been sent or taken."""
        if self._takes_fds:
            self._socket.close()
        else:
            close_job_socket(self._socket)
        self._close_fds()
        while self._unsent:
            close_fds(self._unsent.popleft()[1])

    def _close_fds(self) -> None:
        while self._fds:
            os.close(self._fds.popleft())


MAX_JOB_FRAME_BYTES = 64 << 10


class Link(Channel):
    """A channel to one of the job's own processes, which the runner's loop reads and flushes.

    Nothing that such a process sends is trusted. Its frames are short and carry no descriptors. The
    link is closed by the first frame that is malformed or refused with `RequestError`, as it is by
    an error or the other end; then `on_end` is called with the reason.
    """

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        on_message: Callable[[Mapping[str, object]], None],
        on_end: Callable[[Exception], None],
        max_bytes: int = MAX_JOB_FRAME_BYTES,
    ) -> None:
        super().__init__(sock, takes_fds=False, max_bytes=max_bytes)
        self._loop = loop
        self._on_message = on_message
        self._on_end = on_end

    @property
    def is_open(self) -> bool:
        """Whether both ends are open, as far as known."""
        return self.fileno() >= 0

    def watch(self) -> None:
        self._loop.watch(self.fileno(), self.read)

    def tell(self, message: Mapping[str, object], *fds: int) -> None:
        """Send a message and descriptors, which the link owns from here on. May end the link."""
        if not self.is_open:
            close_fds(fds)
            return
        try:
            self.send(message, *fds)
            self._loop.watch_channel(self)
        except (OSError, BufferError, ValueError) as error:
            self._end(error)

    def read(self) -> bool:
        """Handle what has arrived. Returns whether anything had."""
        if not self.is_open:
            return False
        try:
            self.flush()
            self._loop.watch_channel(self)
            arrived = self.receive()
            while self.is_open and (message := self.next_message()) is not None:
                self._on_message(message)
        except (EOFError, OSError, MalformedFrameError, RequestError) as error:
            self._end(error)
            return False
        return arrived

    def _end(self, error: Exception) -> None:
        self.close()
        self._on_end(error)

    def close(self) -> None:
        if self.is_open:
            self._loop.unwatch(self.fileno())
            super().close()
