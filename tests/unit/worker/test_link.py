"""A worker's end of its link: what it sends and receives, and when it cuts a round."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from rdzv.worker.link import (
    SNAPSHOTS_VARIABLE,
    BrokenLinkError,
    Go,
    Link,
    Received,
    Release,
    encode,
    process_link,
)


class Runner:
    """The other end."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._received = Received()

    def say(self, **message: Any) -> None:
        self._socket.sendall(encode(message))

    def send_queue(self, queue: socket.socket) -> None:
        socket.send_fds(self._socket, [encode({"type": "queue", "fds": 1})], [queue.fileno()])
        queue.close()

    def hear(self) -> Mapping[str, Any]:
        while (found := self._received.next_message()) is None:
            self._received.read(self._socket)
        return found[0]

    def leave(self) -> None:
        self._socket.close()


class Cut:
    """Counts how often a round is cut."""

    def __init__(self) -> None:
        self.times = 0
        self.is_cut = False
        self.again = threading.Event()

    def cut(self) -> None:
        self.is_cut = True
        self.times += 1
        if self.times == 3:
            self.again.set()


@pytest.fixture
def runner() -> Iterator[tuple[Link, Runner]]:
    ours, theirs = socket.socketpair()
    theirs.settimeout(60)
    link = Link(ours)
    link.listen()
    with theirs:
        other = Runner(theirs)
        assert other.hear()["type"] == "hello"
        yield link, other
    while not link.is_closed:
        link.wait_for_order()
    ours.close()


def test_a_round_is_over_from_its_own_end_on(runner: tuple[Link, Runner]) -> None:
    link, other = runner
    link.begin(2, Cut())  # type: ignore[arg-type]
    other.say(type="round_over", round=1)
    # A type that this worker does not know, from a newer runner, is ignored.
    other.say(type="news", round=2)
    other.say(type="go", round=1, env={})
    assert link.wait_for_order() == Go(1, {})
    assert not link.is_over()
    other.say(type="round_over", round=2)
    assert link.wait_until_over(60)
    # A late message of an earlier round undoes nothing.
    other.say(type="round_over", round=1)
    other.say(type="release", reason="enough")
    assert link.wait_for_order() == Release("enough")
    assert link.is_over()


def test_connections_stay_open_in_the_runners_queue_though_the_worker_is_gone(
    runner: tuple[Link, Runner],
) -> None:
    link, other = runner
    assert not link.holds_connections
    assert not link.hold_open([0])
    queue, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    other.send_queue(theirs)
    # Messages are received in order.
    other.say(type="go", round=1, env={})
    link.wait_for_order()
    assert link.holds_connections
    ours, peer = socket.socketpair()
    with queue, peer:
        peer.setblocking(False)
        fds = [ours.fileno(), *(os.dup(ours.fileno()) for _ in range(300))]
        assert link.hold_open(fds)
        ours.detach()
        for fd in fds:
            os.close(fd)
        with pytest.raises(BlockingIOError):
            peer.recv(1)
        for _ in range(2):  # All fit into two messages.
            queue.recv(1)
        assert peer.recv(1) == b""
        # A runner that is gone holds nothing.
        queue.close()
        assert not link.hold_open([0])
    other.say(type="go", round=2, env={})


@pytest.mark.slow
def test_a_worker_that_cannot_park_says_so_once(
    runner: tuple[Link, Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lost:
        def __init__(self) -> None:
            self._place = place

        def place(self) -> str:
            return self._place

    place = "of the round before"

    monkeypatch.setattr("rdzv.worker.link.LostWait", Lost)
    link, other = runner
    cut = Cut()
    link.begin(2, Cut())  # type: ignore[arg-type]
    # What a round has seen of the main thread does not count in the next one.
    place = "graph.py:979"
    link.begin(3, cut)  # type: ignore[arg-type]
    other.say(type="round_over", round=3)
    assert other.hear() == {"type": "stuck", "round": 3, "place": "graph.py:979"}
    assert cut.again.wait(60)
    link.parked(3, [])
    assert other.hear()["type"] == "parked"
    other.say(type="go", round=4, env={})
    link.wait_for_order()


@pytest.mark.slow
def test_a_round_that_is_over_is_cut_again_and_again_until_nothing_of_it_is_left(
    runner: tuple[Link, Runner],
) -> None:
    link, other = runner
    cut = Cut()
    link.begin(0, cut)  # type: ignore[arg-type]
    assert cut.times == 0
    other.say(type="round_over", round=0)
    assert cut.again.wait(60)
    link.end()
    # The end of this round arrived before its beginning.
    late = Cut()
    link.begin(0, late)  # type: ignore[arg-type]
    assert late.times >= 1


@pytest.mark.slow
def test_what_a_worker_reports(runner: tuple[Link, Runner]) -> None:
    link, other = runner
    link.suspect(3, "m" * 5000, "t" * 20_000 + "end")
    report = other.hear()
    assert (report["type"], report["round"]) == ("suspect", 3)
    assert report["message"] == "m" * 4000
    assert len(report["traceback"]) == 12_000
    assert report["traceback"].endswith("end")
    link.parked(3, [["a", 1]] * 600, step=7, torn=True)
    assert other.hear() == {
        **{"type": "parked", "round": 3, "step": 7, "torn": True},
        "connections": [["a", 1]] * 500,
    }
    link.resumed(round=4, step=7)
    assert other.hear() == {"type": "resumed", "round": 4, "step": 7}


def test_a_runner_that_is_gone_ends_the_wait(runner: tuple[Link, Runner]) -> None:
    link, other = runner
    other.leave()
    assert link.wait_for_order() is None
    assert link.is_closed
    link.resumed(round=4)  # Nobody receives it, and that is no error.


def test_a_runner_that_is_gone_ends_the_wait_for_slots(
    runner: tuple[Link, Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SNAPSHOTS_VARIABLE, "1")
    link, other = runner
    got: list[Any] = []
    waiting = threading.Thread(target=lambda: got.append(link.reserve(8)), daemon=True)
    waiting.start()
    assert other.hear()["type"] == "reserve"
    other.leave()
    waiting.join(8)  # An answer may take ten seconds.
    assert [slots.fds for slots in got] == [[]]


def test_a_process_without_a_runner_has_no_link() -> None:
    assert process_link() is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_forked_child_has_no_link_and_no_lock_of_its_parent(runner: tuple[Link, Runner]) -> None:
    link, other = runner
    held, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        with link._changed, link._sending:
            held.set()
            let_go.wait(60)

    other_thread = threading.Thread(target=hold)
    other_thread.start()
    assert held.wait(60)
    pid = os.fork()
    if pid == 0:
        # Ended by the alarm, if it waits for a lock that no thread of its own holds.
        signal.alarm(20)
        os._exit(0 if link.wait_for_order() is None and link.is_closed else 1)
    let_go.set()
    other_thread.join()
    assert os.waitpid(pid, 0)[1] == 0
    link.resumed(round=1)
    assert other.hear()["round"] == 1


# ------------------------------------------------------------------ frames


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
    socket.send_fds(ours, [encode({"type": "go", "fds": 1})], [writing])
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
