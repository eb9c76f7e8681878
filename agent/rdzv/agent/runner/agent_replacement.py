"""How an agent is replaced: the runner outlives it and is adopted by the next agent.

When the agent's end of the socket closes, everything is killed at once, unless the agent has asked
the runner to *serve*. In that case the runner listens on a socket, where a process of the same user
may connect and *adopt* it (the agent's half is `rdzv.agent.handover.runner_adoption`):

    next agent  ── connects ──▶  hello {version, pid, round, last_round, workers, store_hosts,
                                        zygote, kept}
                ── adopt ──▶     every event that no agent has confirmed, and then new ones

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
from contextlib import suppress

from .channel import Channel
from .descriptors import closed_if_failing, listen_at, peer_of, write_warning
from .loop import PAUSE_S
from .requests import (
    MAX_GRACE_S,
    MAX_ORPHAN_TIMEOUT_S,
    read_field,
    read_seconds,
    read_socket_path,
)
from .spawn import reason_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from .agent_link import AgentLink
    from .loop import Loop


class NextAgent:
    """The socket for the next agent, the values kept for it, and the wait for its arrival."""

    def __init__(
        self,
        loop: Loop,
        agent: AgentLink,
        hello: Callable[[], Mapping[str, object]],
        on_orphaned: Callable[[float], None],
    ) -> None:
        """Use `hello` to describe the runner, and pass the grace period to `on_orphaned`."""
        self._loop = loop
        self._agent = agent
        self._hello = hello
        self._on_orphaned = on_orphaned
        self._path: Path | None = None
        self._listener: socket.socket | None = None
        """The socket for the next agent, or None if this runner ends with its agent."""
        self._orphan_timeout_s = self._grace_s = 0.0
        self._orphaned_until: float | None = None
        """When everything ends unless an agent has taken charge by then."""
        self._accept_again_at: float | None = None
        """When to listen again after running out of descriptors."""
        self.gave_up = False
        """Whether no agent came in time, in which case everything ends with the round."""
        self._kept: dict[str, str] = {}

    def serve(self, request: Mapping[str, object]) -> None:
        """Handle `serve`: outlive the agent from now on. A second one only changes the times."""
        path = read_socket_path(request)
        orphan_timeout_s = read_seconds(request, "orphan_timeout_s", MAX_ORPHAN_TIMEOUT_S)
        grace_s = read_seconds(request, "grace_s", MAX_GRACE_S)
        if self._listener is None:
            try:
                listener = listen_at(path)
                with closed_if_failing(listener):
                    self._loop.watch(listener.fileno(), self._accept)
            except OSError as error:
                self._agent.emit("serve_failed", reason=f"{path}: {reason_of(error)}")
                return
            self._path, self._listener = path, listener
            self._agent.numbers_events = True
        self._orphan_timeout_s, self._grace_s = orphan_timeout_s, grace_s

    def keep(self, request: Mapping[str, object]) -> None:
        self._kept[read_field(request, "name", str)] = read_field(request, "value", str)

    def adopt(self) -> None:
        """Handle `adopt`: take orders from the connected agent and send it all stored events."""
        self._agent.in_charge, self._orphaned_until = True, None
        self._agent.repeat_unconfirmed()

    def wait_for_next_agent(self, *, was_in_charge: bool) -> None:
        """Start the clock, or shut down, because the agent has been lost."""
        if self._listener is None:
            self._loop.shutting_down = True
        elif was_in_charge and not self.gave_up:
            self._orphaned_until = time.monotonic() + self._orphan_timeout_s

    def wake_times(self) -> Iterator[float | None]:
        yield self._orphaned_until
        yield self._accept_again_at

    def do_due(self, now: float) -> None:
        """Stop waiting for an agent, or listen again."""
        if self._orphaned_until is not None and now >= self._orphaned_until:
            self._end_orphaned()
        if self._accept_again_at is not None and now >= self._accept_again_at:
            self._listen_again(now)

    def close(self) -> None:
        if self._listener is not None and self._listener.fileno() >= 0:
            self._accept_again_at = None
            self._loop.unwatch(self._listener.fileno())
            self._listener.close()
            with suppress(OSError):
                assert self._path is not None
                self._path.unlink()

    def _accept(self) -> None:
        """Send hello to a connecting agent, unless it is another user's or there already is one."""
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.ECONNABORTED):  # The agent is gone again.
                self._loop.unwatch(self._listener.fileno())  # It would remain readable.
                self._accept_again_at = time.monotonic() + PAUSE_S
            return
        pid, uid = peer_of(connection)
        if uid not in (0, os.geteuid()):
            connection.close()
            return
        self._agent.read()  # The old agent's end of file may also be waiting there.
        channel = Channel(connection)
        if self._agent.connected:
            reason = f"this runner, pid {os.getpid()}, already has an agent and refuses pid {pid}"
            with suppress(OSError):
                channel.send({"type": "refused", "reason": reason})
            channel.close()
            return
        try:
            self._agent.attach(channel)
        except OSError:
            channel.close()  # It may try again.
            return
        self._agent.send({**self._hello(), "kept": self._kept})

    def _listen_again(self, now: float) -> None:
        assert self._listener is not None
        try:
            self._loop.watch(self._listener.fileno(), self._accept)
            self._accept_again_at = None
        except OSError:
            self._accept_again_at = now + PAUSE_S

    def _end_orphaned(self) -> None:
        """Stop the workers, and then everything, because no agent has come."""
        write_warning(
            f"runner pid {os.getpid()}: no agent within {self._orphan_timeout_s:g} s; "
            "stopping its workers"
        )
        self._orphaned_until, self.gave_up = None, True
        self.close()
        self._agent.disconnect()
        self._on_orphaned(self._grace_s)
