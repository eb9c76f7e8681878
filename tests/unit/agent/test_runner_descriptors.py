"""Descriptors that a job sends to root: they are neither taken nor closed by whoever receives."""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rdzv.agent.runner.channel import Channel, MalformedFrameError
from rdzv.agent.runner.descriptors import (
    SentDescriptorError,
    close_job_socket,
    close_shared,
    receive_data,
)
from tests.support.lingering import LINGER_S, lingering

pytestmark = pytest.mark.slow


@contextmanager
def at_once() -> Iterator[None]:
    begun = time.monotonic()
    yield
    assert time.monotonic() - begun < LINGER_S / 4


def send(sock: socket.socket, data: bytes, flags: int = 0, *, last: bool = True) -> socket.socket:
    """Send the only copy of a lingering socket; return its peer."""
    sent, peer = lingering()
    socket.send_fds(sock, [data], [sent.fileno()], flags)
    if last:
        sent.close()
    return peer


URGENT = socket.MSG_OOB


@pytest.mark.parametrize(
    ("before", "data", "flags"),
    [
        (b"", b"x", 0),
        (b"frame", b"x", 0),
        (b"", b"x", URGENT),
        (b"frame", b"x", URGENT),
        (b"frame", b"xyz", URGENT),
    ],
)
def test_a_descriptor_is_left_in_the_queue(before: bytes, data: bytes, flags: int) -> None:
    root, job = socket.socketpair()
    root.setblocking(False)
    with job:
        if before:
            job.send(before)
            assert receive_data(root, 100) == (before, [])
        with send(job, data, flags):
            job.send(b"more")
            with at_once():
                for _ in range(2):
                    with pytest.raises(SentDescriptorError):
                        receive_data(root, 100)
                close_job_socket(root)


def test_the_closing_process_outlives_slow_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    spawn, pids = os.posix_spawn, []

    def then_wait(*args: Any, **kwargs: Any) -> int:
        pids.append(spawn(*args, **kwargs))
        ended = os.pidfd_open(pids[0])
        assert select.select([ended], [], [], 0.3)[0] == [], "it exits first"
        os.close(ended)
        return pids[0]

    root, job = socket.socketpair()
    with job, send(job, b"x") as peer:
        monkeypatch.setattr(os, "posix_spawn", then_wait)
        with at_once():
            close_job_socket(root)
        assert root.fileno() == -1
        peer.close()
        os.waitpid(pids[0], 0)


def test_urgent_data_without_a_descriptor_is_data() -> None:
    root, job = socket.socketpair()
    with job:
        job.send(b"ab", URGENT)
        job.send(b"c", URGENT)
        got = b""
        while len(got) < 3:
            got += receive_data(root, 100)[0]
        assert got == b"abc"
        close_job_socket(root)


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_a_socket_with_unread_descriptors_is_closed_by_another_process(kind: int) -> None:
    root, job = socket.socketpair(socket.AF_UNIX, kind)
    with job:
        job.send(b"" if kind == socket.SOCK_DGRAM else b"1")
        job.send(b"2")
        peer = send(job, b"3")
        read_end, write_end = os.pipe()
        socket.send_fds(job, [b"4"], [write_end])
        os.close(write_end)
        with at_once():
            close_job_socket(root)
        with pytest.raises(OSError, match=r"pipe|reset|refused|endpoint"):
            job.send(b"5")
        # The other process ends, and with it everything that was in the queue.
        assert select.select([read_end], [], [], 10.0)[0]
        assert os.read(read_end, 1) == b""
        os.close(read_end)
        peer.close()


def test_a_socket_without_descriptors_is_closed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_process(*_: object, **__: object) -> int:
        raise AssertionError("a process was started")

    monkeypatch.setattr(os, "posix_spawn", no_process)
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        root, job = socket.socketpair(socket.AF_UNIX, kind)
        with job:
            job.send(b"unread")
            close_job_socket(root)
            assert root.fileno() == -1
            close_job_socket(root)


def test_without_another_process_it_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> int:
        raise BlockingIOError

    monkeypatch.setattr(os, "posix_spawn", fail)
    root, job = socket.socketpair()
    fd = root.fileno()
    with job, send(job, b"1"), at_once():
        close_job_socket(root)
        os.fstat(fd)
    with socket.socket(fileno=fd) as left:
        monkeypatch.undo()
        close_job_socket(left)


@pytest.mark.parametrize("hidden", [0, URGENT])
def test_a_job_on_a_channel_sends_frames_but_no_descriptors(hidden: int) -> None:
    ours, job = socket.socketpair()
    channel = Channel(ours, takes_fds=False)
    frame = struct.pack(">I", 2) + b"{}"
    with job:
        job.send(frame)
        assert channel.receive() and channel.next_message() == {}
        with send(job, frame, hidden), at_once():
            with pytest.raises(MalformedFrameError, match="descriptor"):
                channel.receive()
            channel.close()


def test_a_descriptor_that_was_not_read_does_not_block_the_close_of_a_channel() -> None:
    ours, job = socket.socketpair()
    channel = Channel(ours, takes_fds=False)
    with job, send(job, b"x"), at_once():
        channel.close()


def listening(sock: socket.socket) -> None:
    """Do nothing to a socket."""


def turned(sock: socket.socket) -> None:
    """Make a listening socket one that is connected and lingers, as any holder of it may."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sock.shutdown(socket.SHUT_RDWR)
        sock.connect(listener.getsockname())
        peer, _ = listener.accept()
    sock.setblocking(False)
    try:
        while True:
            sock.send(bytes(65536))
    except BlockingIOError:
        pass
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("2i", 1, LINGER_S))
    held.append(peer)


held: list[socket.socket] = []


@pytest.mark.parametrize("change", [listening, turned])
def test_a_shared_socket_is_closed_at_once(change: Callable[[socket.socket], None]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        shared = os.dup(sock.fileno())
        change(sock)
    with at_once():
        close_shared(socket.socket(fileno=shared))
    while held:
        held.pop().close()
