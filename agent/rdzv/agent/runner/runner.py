"""The runner's main program, which assembles the parts and calls each in turn."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from functools import partial
from pathlib import Path

from . import requests
from .agent_link import AgentLink
from .channel import Channel
from .child_exits import Children
from .fence import Fence
from .frames import RequestError, decode, read_field
from .held_connections import HeldConnections
from .killing import Killing
from .loop import Loop
from .processes import SWEEP_INTERVAL_S, become_subreaper, sweep_descendants
from .requests import PROTOCOL_VERSION, type_of
from .snapshot_copies import SnapshotCopies
from .snapshot_slots import SnapshotSlots
from .snapshot_writers import SnapshotWriters
from .spawn import SIGNALS_FOR_WORKERS
from .store_hosts import StoreHosts
from .warm_forks import WarmForks
from .workers import Workers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

_CROSS_A_SHUTDOWN = ("forget_events", "ping", "shutdown")
"""Requests that may still arrive after a shutdown. They are not refused, because the agent would
respond to a refusal with another request, and kills a runner that does not answer pings.
"""


class Runner:
    """Handles the agent's requests and reports events, until shut down or orphaned.

    Each of its parts knows the runner, and through it the others.
    """

    def __init__(self, agent: Channel) -> None:
        self.loop = loop = Loop()
        self.agent = AgentLink(self)
        self.agent.attach(agent)
        self.agent.in_charge = True
        self.children = Children(loop)
        self.connections = HeldConnections(self)
        self.fence = Fence(self)
        self.forks = WarmForks(self)
        self.slots = SnapshotSlots(self)
        self.copies = SnapshotCopies(self)
        self.workers = Workers(self)
        self.store_hosts = StoreHosts(self)
        self.killing = Killing(self)
        self._finished = False
        self._reported_error = False
        handlers: dict[type, Callable[[Any], None]] = {
            requests.StartWorkers: self.workers.start,
            requests.StopWorkers: self.workers.stop,
            requests.EndKept: self.workers.end_kept,
            requests.NotifyWorkers: self.workers.notify,
            requests.StartStoreHost: self.store_hosts.start,
            requests.StopStoreHost: self.store_hosts.stop,
            requests.RenewFence: self.fence.renew,
            requests.KeepZygote: self.forks.zygote.keep,
            requests.BeginZygote: lambda _request: self.forks.zygote.begin(),
            requests.HoldSnapshots: self.slots.hold,
            requests.SnapshotWatermark: self.slots.announce,
            requests.CarryCopies: self.copies.carry,
            requests.KeepCopies: self.copies.fetch,
            requests.WriteSnapshots: SnapshotWriters(self).write,
            requests.Serve: self.agent.serve,
            requests.Keep: self.agent.keep,
            requests.ForgetEvents: self.agent.forget_confirmed,
        }
        self.requests: dict[str, Callable[[Mapping[str, object]], None]] = {
            **{type_of(kind): partial(_decode_for, call, kind) for kind, call in handlers.items()},
            "ping": lambda _request: self.agent.send({"type": "pong"}),
            "shutdown": self._shut_down,
        }

    def run(self) -> None:
        self.children.listen()
        self.fence.watch()
        while not self._finished:
            for call in self.loop.wait(self._timeout_s()):
                self._attempt(call)
            now = time.monotonic()
            for call in self.loop.due(now):
                self._attempt(call)
            for part in (self.forks, self.workers):
                self._attempt(partial(part.do_due, now))
            # Done at the end of a turn, so that workers requested together are forked together.
            self._attempt(self.forks.fork_wanted)
            self._attempt(self._advance)
            self.fence.rest()
        self.close()

    def close(self) -> None:
        self.agent.close()
        self.forks.restarts.close()
        self.slots.close()
        self.loop.close()
        self.fence.close()
        self.children.close()

    def _attempt(self, call: Callable[[], object]) -> None:
        """Call a function, and report its first unexpected `OSError` to the agent."""
        try:
            call()
        except OSError as error:
            # The function may have been handling an exit, which will not be announced again.
            self.children.reap_again()
            if not self._reported_error:
                self._reported_error = True
                self.agent.emit("error", reason=f"the runner fails: {error}")

    def _timeout_s(self) -> float | None:
        if self.killing.goes_on:
            return SWEEP_INTERVAL_S
        parts = (self.workers, self.forks)
        times = [at for part in parts for at in part.wake_times() if at is not None]
        return max(min(times) - time.monotonic(), 0.0) if times else None

    def _advance(self) -> None:
        self._finished = self.killing.advance()
        if self.agent.gave_up and not (self.loop.shutting_down or self.workers.round):
            self.loop.shutting_down = True
            self._finished = self.killing.advance()

    # ------------------------------------------------------------------ the agent

    def handle(self, request: Mapping[str, object]) -> None:
        """Carry out a request of the connected agent. Raises `RequestError`."""
        name = read_field(request, "type", str)
        if name == "adopt" and not self.agent.in_charge:
            self.agent.adopt()
            return
        handle = self.requests.get(name)
        if handle is None:
            raise RequestError(f"type: there is no request {name!r:.80}")
        if not self.agent.in_charge:
            raise RequestError(f"{name}: this runner was not adopted")
        if self.loop.shutting_down and name not in _CROSS_A_SHUTDOWN:
            raise RequestError("the runner is shutting down")
        handle(request)

    def _shut_down(self, _request: Mapping[str, object]) -> None:
        self.loop.shutting_down = True

    def stop_orphaned(self, grace_s: float) -> None:
        if self.workers.round is not None:
            self.workers.begin_stop(self.workers.round, signal.SIGTERM, grace_s)

    def hello(self) -> Mapping[str, object]:
        held = self.workers.round
        return {
            "type": "hello",
            "version": PROTOCOL_VERSION,
            "pid": os.getpid(),
            "last_round": self.workers.last_round,
            "workers": {} if held is None or held.number == requests.STANDBY else held.pids,
            "store_hosts": self.store_hosts.rounds(),
        }


def _decode_for(handle: Callable[[Any], None], kind: type, request: Mapping[str, object]) -> None:
    handle(decode(kind, request))


def main(fd: int) -> None:
    """Run as the runner for the agent at the other end of a socket."""
    if not Path(f"/proc/self/task/{os.getpid()}/children").exists():
        sys.exit("rdzv: /proc does not list children; the kernel needs CONFIG_PROC_CHILDREN")
    os.set_inheritable(fd, False)
    for signum in SIGNALS_FOR_WORKERS:
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    become_subreaper()
    try:
        Runner(Channel(socket.socket(fileno=fd))).run()
    except BaseException:
        # Leave no processes behind.
        sweep_descendants()
        raise
