"""JSON frames, with file descriptors, on the socket between a worker and its runner."""

from __future__ import annotations

import array
import json
import os
import socket
import struct
from collections.abc import Mapping
from typing import Any

MAX_FRAME_BYTES = 64 << 10
MAX_FDS = 18
"""Two slots, and copies of up to 16 snapshots from other nodes."""
WITH_FDS = ("go", "queue", "slots", "no_slots")
"""The types of messages that carry descriptors."""
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
        """Read once, blocking until data arrives.

        Raises `BrokenLinkError` at the end of the stream.
        """
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
        """Return the next complete message and its descriptors, or None if none is complete.

        The caller owns the descriptors. Raises `BrokenLinkError` for data that is not a frame.
        """
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
        if message.get("type") not in WITH_FDS:
            return message, []  # Descriptors received so far belong to a later message.
        fds, self._fds = self._fds, []
        return message, fds

    def close(self) -> None:
        """Close received descriptors that were never handed over with their messages."""
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
