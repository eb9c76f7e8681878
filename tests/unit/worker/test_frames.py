"""Frames of the link between a worker and its runner."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from rdzv.worker.link import BrokenLinkError, Received, encode


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_messages_arrive_however_they_are_divided(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    sent = [{"type": "go", "n": n} for n in range(3)]
    found, received = [], Received()
    for octet in b"".join(map(encode, sent)):
        ours.send(bytes([octet]))
        received.read(theirs)
        while (message := received.next_message()) is not None:
            found.append(message[0])
    assert found == sent


def test_descriptors_come_with_their_message(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    reading, writing = os.pipe()
    socket.send_fds(ours, [encode({"type": "go"})], [writing])
    os.close(writing)
    received = Received()
    received.read(theirs)
    message = received.next_message()
    assert message is not None
    (fd,) = message[1]
    assert not os.get_inheritable(fd)
    os.write(fd, b"x")
    assert os.read(reading, 1) == b"x"
    os.close(fd)
    os.close(reading)


@pytest.mark.parametrize("octets", [b"\xff\xff\xff\xff", b"\0\0\0\2[]", b"\0\0\0\2{]"])
def test_what_is_no_frame_breaks_the_link(
    octets: bytes, pair: tuple[socket.socket, socket.socket]
) -> None:
    ours, theirs = pair
    ours.send(octets)
    received = Received()
    received.read(theirs)
    with pytest.raises(BrokenLinkError):
        received.next_message()


def test_the_end_of_the_stream_breaks_the_link(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    ours.close()
    with pytest.raises(BrokenLinkError, match="closed the link"):
        Received().read(theirs)


def test_a_frame_has_a_limit() -> None:
    with pytest.raises(ValueError, match="at most 65536 fit"):
        encode({"text": "x" * 65536})
