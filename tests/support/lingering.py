"""A descriptor whose close takes as long as its sender likes, as a hostile job may send it."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress

LINGER_S = 20


def lingering() -> tuple[socket.socket, socket.socket]:
    """Return a socket that blocks whoever closes it for `LINGER_S`, and its peer, to be kept."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sock = socket.create_connection(listener.getsockname())
        peer, _ = listener.accept()
    sock.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            sock.send(bytes(65536))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("2i", 1, LINGER_S))
    return sock, peer
