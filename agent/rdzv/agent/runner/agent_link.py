"""The runner's socket to its agent, and how the next agent takes over.

Both directions carry frames as defined in channel.py; requests.py lists the requests. Events are
structs of `rdzv.agent.core.events` (`rdzv.agent.runner_link` has their names); `pong` is none, but
the response to `ping`.

When the agent's end of the socket closes, everything is killed at once, unless the agent has asked
the runner to *serve*. In that case the runner listens on a socket, where a process of the same user
may connect and *adopt* it (the agent's half is `rdzv.agent.handover`):

    next agent  ── connects ──▶  hello {version, pid, round, last_round, workers, store_hosts, kept}
                ── adopt ──▶     every event that no agent has confirmed, and then new ones

After `serve`, events are numbered and are resent to each new agent until an agent has sent
`forget_events`, which covers all events up to a number. An exit's `age_ms` increases in the
meantime. Events about snapshots are sent only to an agent that has sent `hold_snapshots`, and are
never resent.

`kept` holds the values, by name, that an agent needs to continue where its predecessor died. The
runner does not interpret them, and they outlive the agent exactly as the workers do. A value that
was sent before a request is never lost if that request arrived. Only one agent is served at a time;
any other is sent `refused` {reason}. If no agent adopts the runner within `orphan_timeout_s`, it
stops its workers, with `grace_s`, and ends. The clock keeps running until `adopt`: an agent that
finds this runner too old or too new simply disconnects.
"""

from __future__ import annotations

import errno
import os
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

from .channel import Channel, MalformedFrameError
from .descriptors import listen_at, peer_of, write_warning
from .frames import RequestError
from .loop import PAUSE_S
from .requests import ForgetEvents, Keep, Serve
from .spawn import reason_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping

    from .runner import Runner


class AgentLink:
    """The connected agent, the events that none has confirmed, and the next one's way in."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._loop = runner.loop
        self._channel: Channel | None = None
        self.in_charge = False
        self.hears_of_snapshots = False
        self._events = 0
        # Only a limited number of events can occur without an agent, so this queue is bounded.
        self._unconfirmed: deque[tuple[float, dict[str, object]]] = deque()
        self._path: Path | None = None
        """The path of the socket for the next agent, or None if this runner ends with its agent."""
        self._listener: socket.socket | None = None
        self._orphan_timeout_s = self._grace_s = 0.0
        self.gave_up = False
        self._kept: dict[str, str] = {}

    @property
    def connected(self) -> bool:
        return self._channel is not None

    def attach(self, channel: Channel) -> None:
        self._loop.watch(channel.fileno(), self.read)
        self._channel = channel

    def disconnect(self) -> None:
        """Lose the agent: wait for the next one, or shut down."""
        if self._channel is None:
            return
        self._loop.unwatch(self._channel.fileno())
        self._channel.close()
        self._channel = None
        was_in_charge, self.in_charge = self.in_charge, False
        self.hears_of_snapshots = False
        if self._path is None:
            self._loop.shutting_down = True
        elif was_in_charge and not self.gave_up:
            self._loop.call_at(time.monotonic() + self._orphan_timeout_s, self._give_up)

    def close(self) -> None:
        if self._listener is not None:
            self._loop.call_at(None, self._listen_again)
            self._loop.unwatch(self._listener.fileno())
            self._listener.close()
            self._listener = None
            with suppress(OSError):
                assert self._path is not None
                self._path.unlink()
        self.disconnect()

    # ------------------------------------------------------------------ requests

    def read(self) -> None:
        channel = self._channel
        if channel is None:
            return
        try:
            if channel.has_unsent:
                channel.flush()
                self._loop.watch_channel(channel)
            channel.receive()
        except (EOFError, OSError):
            self.disconnect()
        while self._channel is channel:
            try:
                request = channel.next_message()
                if request is None:
                    return
                self._runner.handle(request)
            except RequestError as error:
                self.send({"type": "error", "reason": str(error)})
            except MalformedFrameError as error:
                self.send({"type": "error", "reason": str(error)})
                self.disconnect()

    def take_fd(self) -> int | None:
        return None if self._channel is None else self._channel.take_fd()

    @property
    def lost_fds(self) -> bool:
        """Whether a descriptor was lost because this process had too many open."""
        return self._channel is not None and self._channel.lost_fds

    def serve(self, request: Serve) -> None:
        if "\0" in request.socket:
            raise RequestError(f"socket: {request.socket!r:.80}")
        if self._path is None:
            path, listener = Path(request.socket), None
            try:
                listener = listen_at(path)
                self._loop.watch(listener.fileno(), self._accept)
            except OSError as error:
                if listener is not None:
                    listener.close()
                self.emit("serve_failed", reason=f"{request.socket}: {reason_of(error)}")
                return
            self._path, self._listener = path, listener
        self._orphan_timeout_s, self._grace_s = request.orphan_timeout_s, request.grace_s

    def keep(self, request: Keep) -> None:
        self._kept[request.name] = request.value

    def adopt(self) -> None:
        """Take orders from the connected agent and send it all stored events."""
        self.in_charge = True
        self._loop.call_at(None, self._give_up)
        now = time.monotonic()
        for at, message in tuple(self._unconfirmed):
            age = {"age_ms": round((now - at) * 1000)} if "age_ms" in message else {}
            self.send({**message, **age})

    def forget_confirmed(self, request: ForgetEvents) -> None:
        # They are numbered one after another.
        last = self._events - len(self._unconfirmed)
        for _ in range(min(request.number - last, len(self._unconfirmed))):
            self._unconfirmed.popleft()

    # ------------------------------------------------------------------ events

    def emit(self, event: str, **fields: object) -> None:
        """Send an event to the agent in charge, or to the next one if there is none now."""
        message = {"type": event, **fields}
        if self._path is not None:
            self._events += 1
            message["number"] = self._events
            self._unconfirmed.append((time.monotonic(), message))
        if self.in_charge:
            self.send(message)

    def tell(self, event: str, **fields: object) -> None:
        """Send an event to the agent in charge, if there is one. The event is never resent."""
        if self.in_charge:
            self.send({"type": event, **fields})

    def send(self, message: Mapping[str, object]) -> None:
        channel = self._channel
        if channel is None:
            return
        try:
            channel.send(message)
            self._loop.watch_channel(channel)
        except (OSError, BufferError):
            # An agent that does not read is treated as dead.
            self.disconnect()

    # ------------------------------------------------------------------ the next agent

    def _accept(self) -> None:
        """Send hello to a connecting agent, unless it is another user's or there already is one."""
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.ECONNABORTED):  # The agent is gone again.
                self._loop.unwatch(self._listener.fileno())  # It would remain readable.
                self._loop.call_at(time.monotonic() + PAUSE_S, self._listen_again)
            return
        pid, uid = peer_of(connection)
        if uid not in (0, os.geteuid()):
            connection.close()
            return
        self.read()  # The old agent's end of file may also be waiting there.
        channel = Channel(connection)
        if self.connected:
            reason = f"this runner, pid {os.getpid()}, already has an agent and refuses pid {pid}"
            with suppress(OSError):
                channel.send({"type": "refused", "reason": reason})
            channel.close()
            return
        try:
            self.attach(channel)
        except OSError:
            channel.close()  # It may try again.
            return
        self.send({**self._runner.hello(), "kept": self._kept})

    def _listen_again(self) -> None:
        assert self._listener is not None
        try:
            self._loop.watch(self._listener.fileno(), self._accept)
        except OSError:
            self._loop.call_at(time.monotonic() + PAUSE_S, self._listen_again)

    def _give_up(self) -> None:
        write_warning(
            f"runner pid {os.getpid()}: no agent within {self._orphan_timeout_s:g} s; "
            "stopping its workers"
        )
        self.gave_up = True
        self.close()
        self._runner.stop_orphaned(self._grace_s)
