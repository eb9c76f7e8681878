"""The stream of a node under torchrun: what is reset, and what stays, when it is opened again."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import grpc
import pytest

from rdzv.core.model import Settings
from rdzv.errors import ERROR_CODE_METADATA_KEY
from rdzv.torchrun import sync_stream
from rdzv.torchrun.conversation import Talk
from rdzv.torchrun.plugin_options import PluginOptions
from rdzv.torchrun.sync_stream import NodeStream
from rdzv.transport.endpoints import Endpoint
from rdzv.transport.node_stream import Attempts, Backoff
from rdzv.v1 import rdzv_pb2 as pb
from rdzv.v1.rdzv_pb2_grpc import RendezvousServicer, add_RendezvousServicer_to_server

pytestmark = pytest.mark.slow

WITHIN_S = 10.0
WELCOME = pb.ServerMessage(
    welcome=pb.Welcome(incarnation=7, heartbeat_interval_ms=60_000), leadership=1
)

Refusal = tuple[grpc.StatusCode, str]


class Stream:
    """One stream, seen from the server: what the node says, and what it is told."""

    def __init__(self) -> None:
        self.said: queue.Queue[pb.NodeMessage] = queue.Queue()
        self.tell: queue.Queue[pb.ServerMessage | Refusal | None] = queue.Queue()

    def next(self) -> pb.NodeMessage:
        return self.said.get(timeout=WITHIN_S)


class Servicer(RendezvousServicer):
    def __init__(self) -> None:
        self.streams: queue.Queue[Stream] = queue.Queue()
        self.all: list[Stream] = []

    def Attach(  # noqa: N802
        self, request_iterator: Iterator[pb.NodeMessage], context: grpc.ServicerContext
    ) -> Iterator[pb.ServerMessage]:
        stream = Stream()

        def read() -> None:
            try:
                for message in request_iterator:
                    stream.said.put(message)
            except Exception:
                return  # The stream has ended.

        threading.Thread(target=read, daemon=True).start()
        self.all.append(stream)
        self.streams.put(stream)
        while (told := stream.tell.get()) is not None:
            if isinstance(told, pb.ServerMessage):
                yield told
                continue
            status, code = told
            context.set_trailing_metadata(((ERROR_CODE_METADATA_KEY, code),))
            context.abort(status, f"refused: {code}")


class Heard(Talk):
    """What a node believes is the test's, and it only notes what it hears."""

    def __init__(self, port: int) -> None:
        endpoints = (Endpoint("127.0.0.1", port),)
        super().__init__(
            PluginOptions("job-7", "n1", endpoints, Settings(1, 2), local_addr="127.0.0.1")
        )
        self.believed = [pb.Belief(phase=pb.Belief.JOINING)]
        self.heard: list[pb.ServerMessage] = []

    def beliefs(self) -> list[pb.Belief]:
        return self.believed

    def hear(self, message: pb.ServerMessage) -> None:
        self.heard.append(message)


class Node:
    """A node's stream to a server that the test plays."""

    def __init__(self) -> None:
        self._server = grpc.server(ThreadPoolExecutor(8))
        self._servicer = Servicer()
        add_RendezvousServicer_to_server(self._servicer, self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()
        self.talk = Heard(port)
        self.heard = self.talk.heard
        self.stream = NodeStream(self.talk)

    def accept(self) -> Stream:
        return self._servicer.streams.get(timeout=WITHIN_S)

    def welcomed(self) -> Stream:
        """Accept the next stream, and welcome the node."""
        stream = self.accept()
        stream.tell.put(WELCOME)
        assert stream.next().HasField("hello")
        assert stream.next().HasField("heartbeat")
        return stream

    def until(self, holds: Callable[[], bool]) -> None:
        with self.talk.news:
            assert self.talk.news.wait_for(holds, WITHIN_S)

    def close(self) -> None:
        self.stream.close(0.0)
        self._server.stop(0).wait(WITHIN_S)
        for stream in self._servicer.all:
            stream.tell.put(None)


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    at_once = Backoff(first_s=0.001, max_s=0.001, takeover_s=0.001)
    monkeypatch.setattr(sync_stream, "Attempts", partial(Attempts, backoff=at_once))
    made = Node()
    yield made
    made.close()


UNAUTHENTICATED = (grpc.StatusCode.UNAUTHENTICATED, "UnauthenticatedError")


def test_a_stranger_without_a_valid_token_is_refused_for_good(node: Node) -> None:
    node.stream.open()
    node.accept().tell.put(UNAUTHENTICATED)
    node.until(lambda: bool(node.heard))
    assert node.heard[0].refused.code == "UnauthenticatedError"


def test_a_node_that_was_admitted_outlives_a_token_that_has_expired(node: Node) -> None:
    """Its token file is renewed, while its workers train."""
    node.stream.open()
    node.welcomed().tell.put(UNAUTHENTICATED)
    node.accept().tell.put(UNAUTHENTICATED)
    node.welcomed().tell.put(pb.ServerMessage(closed=pb.Closed(reason="done"), leadership=1))
    node.until(lambda: bool(node.heard))
    assert [message.WhichOneof("body") for message in node.heard] == ["closed"]


def test_each_hello_says_what_is_believed_by_then(node: Node) -> None:
    node.stream.open()
    first = node.accept()
    assert [belief.phase for belief in first.next().hello.beliefs] == [pb.Belief.JOINING]
    node.talk.believed = [pb.Belief(phase=pb.Belief.RUNNING)]
    first.tell.put(WELCOME)
    first.tell.put(None)
    hello = node.accept().next().hello
    assert [belief.phase for belief in hello.beliefs] == [pb.Belief.RUNNING]
    assert (hello.incarnation, hello.leadership) == (7, 1)


def test_how_long_it_is_apart_counts_from_the_loss_and_ends_with_the_welcome(node: Node) -> None:
    created_s = node.stream.apart_since_s
    assert created_s is not None
    node.stream.open()
    # No attempt before the first welcome begins it anew.
    node.accept().tell.put(None)
    second = node.accept()
    assert node.stream.apart_since_s == created_s
    second.tell.put(None)
    stream = node.welcomed()
    assert node.stream.apart_since_s is None
    stream.tell.put(None)
    again = node.accept()
    lost_s = node.stream.apart_since_s
    assert lost_s is not None
    assert created_s < lost_s
    again.tell.put(None)
    node.accept()
    assert node.stream.apart_since_s == lost_s


def test_each_time_that_it_is_lost_for_longer_is_told_once(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    def lines(text: str) -> int:
        return sum(text in record.getMessage() for record in caplog.records)

    with caplog.at_level(logging.WARNING, "rdzv.torchrun"):
        node.stream.open()
        for time_ in (1, 2):
            for _ in range(3):
                node.accept().tell.put(None)
            stream = node.welcomed()
            assert (lines("retrying until"), lines("reconnected")) == (time_, time_)
            stream.tell.put(None)


def test_a_server_that_was_deposed_is_left_and_its_word_does_not_count(node: Node) -> None:
    node.stream.open()
    stream = node.welcomed()
    stream.tell.put(pb.ServerMessage(leadership=5, lease=pb.Lease(heartbeat_interval_ms=60_000)))
    stream.tell.put(pb.ServerMessage(leadership=4, closed=pb.Closed(reason="old")))
    assert node.accept().next().hello.leadership == 5
    assert node.heard == []


def test_a_stream_that_opens_as_it_is_closed_ends_at_once(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`close` finds no call to cancel, as it does not exist yet."""
    opening, may_open = threading.Event(), threading.Event()

    class Held(threading.Timer):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            opening.set()
            assert may_open.wait(WITHIN_S)

    monkeypatch.setattr(sync_stream.threading, "Timer", Held)
    node.stream.open()
    assert opening.wait(WITHIN_S)
    node.stream.close(60.0, wait=False)
    may_open.set()
    began_s = time.monotonic()
    node.stream.close(WITHIN_S)
    assert time.monotonic() - began_s < WITHIN_S
