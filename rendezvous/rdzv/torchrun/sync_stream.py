"""A node's stream to the server, for a program without an event loop.

One thread keeps it open and reopens it. Messages are sent through `say`; received messages are
passed to a function in that thread. Each stream begins with a Hello that has the node's full state,
so losing a message with the previous stream does no harm.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
import time
import uuid
from collections.abc import Iterator

import grpc

from rdzv.errors import (
    InvalidRequestError,
    RendezvousConnectionError,
    RendezvousError,
    UnauthenticatedError,
)
from rdzv.torchrun.conversation import Talk
from rdzv.transport.endpoints import Endpoint
from rdzv.transport.node_stream import FINAL_REFUSALS, STREAM_OPTIONS, Attempts, error_from_status
from rdzv.v1 import rdzv_pb2 as pb
from rdzv.v1.rdzv_pb2_grpc import RendezvousStub
from rdzv.version import PROTOCOL_VERSION, VERSION

log = logging.getLogger("rdzv.torchrun")

CONNECT_TIMEOUT_S = 2.0
"""How long a server may take to accept a connection. A stream that is closed waits for it."""

WELCOME_TIMEOUT_S = 10.0
"""How long an open stream may wait for the server's Welcome."""

_Outbox = queue.SimpleQueue[pb.NodeMessage | None]


class NodeStream:
    """Keeps a stream to one of the servers open, reconnecting until `close`.

    `say` must be called with the talk's `news` held, so that each message is sent exactly once when
    a stream opens. A waiter on `news` wakes up when a message arrives and when the stream is lost.
    """

    def __init__(self, talk: Talk) -> None:
        self._talk = talk
        self._attempts = Attempts(talk.options.endpoints)
        self._credentials = talk.options.credentials
        self._lock = talk.news
        self._hello = pb.Hello(
            protocol_version=PROTOCOL_VERSION,
            node_id=talk.options.node_id,
            instance=uuid.uuid4().hex,
            # torch's agent does not adopt workers: once it has exited, they count as gone.
            kind=pb.AGENT_KIND_FOREGROUND,
            pid=os.getpid(),
            agent_version=f"torchrun-{VERSION}",
        )
        self.apart_since_s: float | None = time.monotonic()
        """When the last connection was lost, or this object was created; None while connected."""
        self.trouble = "no attempt was made"
        self._outbox: _Outbox | None = None
        self._call: grpc.Call | None = None
        self._heartbeat_interval_s = WELCOME_TIMEOUT_S
        self._told_lost = False
        self._closing = threading.Event()
        self._cut: threading.Timer | None = None
        """The timer that cancels a closed stream if it does not end by itself."""
        self._thread = threading.Thread(target=self._run, name="rdzv-stream", daemon=True)

    def open(self) -> None:
        self._thread.start()

    def say(self, message: pb.NodeMessage) -> None:
        """Send a message if a stream is open; otherwise the next Hello includes it."""
        if self._outbox is not None:
            self._outbox.put(message)

    def close(self, within_s: float, *, wait: bool = True) -> None:
        """End the stream once the server has received all messages, or after `within_s`.

        With `wait`, `news` must not be held.
        """
        with self._lock:
            self._closing.set()
            if self._outbox is not None:
                self._outbox.put(None)
            if self._call is not None:
                self._cut = _timer(within_s, self._call)
        # If Ctrl-C arrived before the thread was started, it never starts.
        if wait and self._thread.is_alive():
            # The timer cancels the stream in time, and the thread then ends by itself.
            self._thread.join(within_s + 1)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        while not self._closing.is_set():
            trouble = self._converse(self._attempts.rota.present)
            if self._closing.is_set():
                return
            wait_s = self._attempts.failed(trouble, time.monotonic())
            if wait_s is None:
                continue
            self.note_lost(str(trouble), again=wait_s > 0)
            self._closing.wait(wait_s)

    def note_lost(self, trouble: str, *, again: bool) -> None:
        """Record that no stream is open; `again` means the immediate retry failed, too."""
        if again and not self._told_lost:
            self._told_lost = True
            log.warning(
                "%s; retrying until a server admits this node, for at most %g s (join_timeout) "
                "while it has no workers; running workers continue",
                trouble,
                self._talk.options.settings.join_timeout_ms / 1000,
            )
        with self._lock:
            self.trouble = trouble
            if self.apart_since_s is None:
                self.apart_since_s = time.monotonic()
            self._lock.notify_all()

    # ------------------------------------------------------------------ one stream

    def _converse(self, endpoint: Endpoint) -> RendezvousError:
        outbox: _Outbox = queue.SimpleQueue()
        try:
            metadata = self._credentials.metadata(endpoint)
            opened = self._credentials.channel(endpoint, STREAM_OPTIONS)
        except InvalidRequestError as error:
            # This is not final, because the certificate may be renewed soon.
            return RendezvousConnectionError(f"cannot connect to {endpoint}: {error}")
        with opened as channel:
            try:
                # gRPC would say when it is connected in a thread of its own, which the launcher's
                # forks do not survive.
                with socket.create_connection((endpoint.host, endpoint.port), CONNECT_TIMEOUT_S):
                    self._hello.address = self._talk.place(endpoint)
            except RendezvousConnectionError as error:
                return error
            except OSError as error:
                why = (error.strerror or str(error)).lower()
                return RendezvousConnectionError(f"cannot reach rdzvd at {endpoint}: {why}")
            call = RendezvousStub(channel).Attach(self._outgoing(outbox), metadata=metadata)
            watchdog = _timer(WELCOME_TIMEOUT_S, call)
            try:
                with self._lock:
                    if self._closing.is_set():
                        # Nothing else would end this stream, because it did not exist yet when
                        # `close` was called.
                        return RendezvousConnectionError("it was closed before it opened")
                    # This Hello has the state so far; later messages follow it.
                    self._hello.ClearField("beliefs")
                    self._hello.beliefs.extend(self._talk.beliefs())
                    outbox.put(pb.NodeMessage(hello=self._hello))
                    self._outbox, self._call = outbox, call
                return RendezvousConnectionError(self._listen(call, endpoint, watchdog))
            except grpc.RpcError:
                return self._judge(endpoint, call)
            finally:
                watchdog.cancel()
                with self._lock:
                    self._outbox = self._call = None
                    if self._cut is not None:
                        self._cut.cancel()
                outbox.put(None)
                call.cancel()

    def _outgoing(self, outbox: _Outbox) -> Iterator[pb.NodeMessage]:
        while True:
            try:
                message = outbox.get(timeout=self._heartbeat_interval_s)
            except queue.Empty:
                message = pb.NodeMessage(heartbeat=pb.Heartbeat())
            if message is None:
                return
            yield message

    def _listen(
        self, call: Iterator[pb.ServerMessage], endpoint: Endpoint, watchdog: threading.Timer
    ) -> str:
        for message in call:
            watchdog.cancel()
            if message.leadership < self._hello.leadership:
                return f"a server was deposed (leadership {message.leadership})"
            self._hello.leadership = message.leadership
            if message.HasField("welcome"):
                self._greet(endpoint, message.welcome)
            elif message.HasField("servers"):
                self._attempts.rota.learn(message.servers.addresses)
            elif message.HasField("lease"):
                self._apply_interval(message.lease.heartbeat_interval_ms)
            elif message.HasField("read_log"):
                with self._lock:
                    self.say(_no_logs(message.read_log.request))
            elif message.HasField("refused") and message.refused.code not in FINAL_REFUSALS:
                return f"the server refused for now: {message.refused.message}"
            else:
                self._deliver(message)
        return "the server ended the stream"

    def _greet(self, endpoint: Endpoint, welcome: pb.Welcome) -> None:
        self._attempts.welcomed(time.monotonic())
        self._hello.incarnation = welcome.incarnation
        self._apply_interval(welcome.heartbeat_interval_ms)
        if self._told_lost:
            self._told_lost = False
            log.warning("reconnected to the server at %s", endpoint)
        with self._lock:
            self.apart_since_s = None
            # The sender is still waiting for the old interval; this message ends its wait.
            self.say(pb.NodeMessage(heartbeat=pb.Heartbeat()))

    def _apply_interval(self, heartbeat_interval_ms: int) -> None:
        self._heartbeat_interval_s = max(heartbeat_interval_ms, 100) / 1000

    def _deliver(self, message: pb.ServerMessage) -> None:
        with self._lock:
            self._talk.hear(message)
            self._lock.notify_all()

    def _judge(self, endpoint: Endpoint, call: grpc.Call) -> RendezvousError:
        if not self._attempts.welcome and call.code() is grpc.StatusCode.CANCELLED:
            return RendezvousConnectionError(
                f"no answer from {endpoint} within {WELCOME_TIMEOUT_S:g} s"
            )
        failure = error_from_status(
            call.code(),
            call.details(),
            call.trailing_metadata(),
            endpoint,
            WELCOME_TIMEOUT_S,
            self._credentials,
        )
        # A node that was admitted before may be admitted again with a renewed token or certificate.
        stranger = isinstance(failure, UnauthenticatedError) and not self._hello.incarnation
        if stranger or failure.code in FINAL_REFUSALS:
            refused = pb.Refused(code=failure.code, message=str(failure))
            self._deliver(pb.ServerMessage(refused=refused))
        return failure


def _timer(after_s: float, call: grpc.Call) -> threading.Timer:
    timer = threading.Timer(after_s, call.cancel)
    timer.name, timer.daemon = "rdzv-timer", True
    timer.start()
    return timer


def _no_logs(request: int) -> pb.NodeMessage:
    """Return the response that logs are not available; only torch's agent knows where they are."""
    error = "its workers are torchrun's, which sends no logs; read them there, in its --log-dir"
    return pb.NodeMessage(log_piece=pb.LogPiece(request=request, last=True, error=error))
