"""The connections of workers that have ended: held for a while, and never too many."""

from __future__ import annotations

import socket
import time

import pytest

from rdzv.agent.runner.held_connections import (
    HELD_S,
    MAX_ENDED,
    ConnectionQueue,
    HeldConnections,
)


def queue_with_a_connection() -> tuple[ConnectionQueue, socket.socket]:
    """Return a queue that holds one end of a connection, and the other end."""
    queue = ConnectionQueue()
    ours, peer = socket.socketpair()
    with ours, queue.theirs:
        socket.send_fds(queue.theirs, [b"0"], [ours.fileno()])
    peer.setblocking(False)
    return queue, peer


def is_open(peer: socket.socket) -> bool:
    try:
        return peer.recv(1) != b""
    except BlockingIOError:
        return True


def test_a_queue_lets_go_of_all_its_connections_and_takes_more() -> None:
    queue = ConnectionQueue()
    for _ in range(2):
        pairs = [socket.socketpair() for _ in range(3)]
        for ours, peer in pairs:
            socket.send_fds(queue.theirs, [b"0"], [ours.fileno()])
            ours.close()
            peer.setblocking(False)
        assert all(is_open(peer) for _, peer in pairs)
        queue.drop()
        assert not any(is_open(peer) for _, peer in pairs)
        for _, peer in pairs:
            peer.close()
    queue.theirs.close()
    queue.close()


def test_a_worker_that_ends_is_outlived_by_its_connections_for_a_while() -> None:
    held = HeldConnections()
    assert list(held.wake_times()) == []
    queue, peer = queue_with_a_connection()
    with peer:
        held.take(queue)
        (until,) = held.wake_times()
        assert until - time.monotonic() <= HELD_S
        held.do_due(until - 0.001)
        assert is_open(peer)
        held.do_due(until)
        assert not is_open(peer)
    assert list(held.wake_times()) == []


@pytest.mark.parametrize("more", [0, 1])
def test_the_oldest_make_place(more: int) -> None:
    held = HeldConnections()
    first, peer = queue_with_a_connection()
    with peer:
        for queue in (first, *(ConnectionQueue() for _ in range(MAX_ENDED - 1 + more))):
            queue.theirs.close()
            held.take(queue)
        assert is_open(peer) is (more == 0)
        held.do_due(time.monotonic() + HELD_S + 1)
