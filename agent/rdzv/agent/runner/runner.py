"""The runner's main program, which assembles the parts and calls each in turn."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path

from .agent_link import AgentLink
from .agent_replacement import NextAgent
from .channel import Channel
from .child_exits import Children
from .fence import Fence
from .killing import Killing
from .loop import Loop
from .processes import SWEEP_INTERVAL_S, become_subreaper, sweep_descendants
from .requests import PROTOCOL_VERSION, RequestError, read_field
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

_CROSS_A_SHUTDOWN = ("heard", "ping", "shutdown")
"""Requests that may still arrive after a shutdown. They are not refused, because the agent would
respond to a refusal with another request, and kills a runner that does not answer pings.
"""


class Runner:
    """Handles the agent's requests and reports events, until shut down or orphaned."""

    def __init__(self, agent: Channel) -> None:
        self._loop = loop = Loop()
        self.agent = AgentLink(loop, self._handle, self._lose_agent)
        self.next_agent = NextAgent(loop, self.agent, self._hello, self._stop_orphaned)
        self.agent.attach(agent)
        self.agent.in_charge = True
        self._children = Children(loop)
        self._fence = Fence(self.agent, self._children)
        self.forks = WarmForks(loop, self._children, self.agent)
        self._slots = SnapshotSlots(self.agent)
        self._slots.copies = copies = SnapshotCopies(loop, self._children, self._slots)
        writers = SnapshotWriters(loop, self._children, self.agent, self._slots, self.forks)
        self._workers = Workers(
            loop, self._children, self.agent, self._fence, self.forks, self._slots
        )
        self._store_hosts = StoreHosts(loop, self._children, self.agent, self.forks)
        self._killing = Killing(loop, self._children, self.agent, self._workers, self.forks)
        self._finished = False
        self._reported_error = False
        self.requests: dict[str, Callable[[Mapping[str, object]], None]] = {
            "start_workers": self._workers.start,
            "stop_workers": self._workers.stop,
            "end_kept": self._workers.parked.handle_end,
            "notify_workers": self._workers.notify,
            "start_store_host": self._store_hosts.start,
            "stop_store_host": self._store_hosts.stop,
            "renew_fence": self._renew_fence,
            "keep_zygote": self.forks.zygote.keep,
            "begin_zygote": lambda _request: self.forks.zygote.begin(),
            "hold_snapshots": self._slots.hold,
            "watermark": self._slots.announce,
            "carry_copies": copies.carry,
            "fetch_copies": copies.fetch,
            "write_snapshots": writers.write,
            "serve": self.next_agent.serve,
            "keep": self.next_agent.keep,
            "heard": self.agent.forget_confirmed,
            "ping": lambda _request: self.agent.send({"type": "pong"}),
            "shutdown": self._shut_down,
        }
        """The handler for each request, by request type."""

    def run(self) -> None:
        """Run until shut down, or until the agent is lost and all processes have been killed."""
        self._children.listen()
        self._loop.watch(self._fence.fileno(), self._check_fence)
        while not self._finished:
            for call in self._loop.wait(self._timeout_s()):
                self._attempt(call)
            self._attempt(self._do_what_is_due)
            # Done at the end of a turn, so that workers requested together are forked together.
            self._attempt(self.forks.fork_wanted)
            self._attempt(self._advance)
            self._fence.rest(self._workers.round, self._workers.parked)
        self.close()

    def close(self) -> None:
        """Close everything the runner opened at startup, and its sockets to agents."""
        self.next_agent.close()
        self.agent.disconnect()
        self.forks.restarts.close()
        self._slots.close()
        self._loop.close()
        self._fence.close()
        self._children.close()

    def _attempt(self, call: Callable[[], object]) -> None:
        """Call a function, and report its first unexpected `OSError` to the agent."""
        try:
            call()
        except OSError as error:
            # The function may have been handling an exit, which will not be announced again.
            self._children.reap_again()
            if not self._reported_error:
                self._reported_error = True
                self.agent.emit("error", reason=f"the runner fails: {error}")

    def _timeout_s(self) -> float | None:
        if self._killing.goes_on:
            return SWEEP_INTERVAL_S
        times = [
            *self._workers.wake_times(),
            *self._slots.wake_times(),
            *self.next_agent.wake_times(),
            *self._children.wake_times(),
            *self.forks.zygote.wake_times(),
            *self.forks.wake_times(),
        ]
        earliest = min((at for at in times if at is not None), default=None)
        return None if earliest is None else max(earliest - time.monotonic(), 0.0)

    def _do_what_is_due(self) -> None:
        now = time.monotonic()
        self.next_agent.do_due(now)
        self._children.do_due(now)
        self.forks.zygote.do_due(now)
        self.forks.do_due(now)
        self._workers.do_due(now)
        self._slots.do_due(now)

    def _advance(self) -> None:
        """Continue ending the round, or shutting down, as far as currently possible."""
        self._finished = self._killing.advance()
        if self.next_agent.gave_up and not (self._loop.shutting_down or self._workers.round):
            self._loop.shutting_down = True
            self._finished = self._killing.advance()

    # ------------------------------------------------------------------ requests

    def _handle(self, request: Mapping[str, object]) -> None:
        name = read_field(request, "type", str)
        if name == "adopt" and not self.agent.in_charge:
            self.next_agent.adopt()
            return
        handle = self.requests.get(name)
        if handle is None:
            raise RequestError(f"type: there is no request {name!r:.80}")
        if not self.agent.in_charge:
            raise RequestError(f"{name}: this runner was not adopted")
        if self._loop.shutting_down and name not in _CROSS_A_SHUTDOWN:
            raise RequestError("the runner is shutting down")
        handle(request)

    def _renew_fence(self, request: Mapping[str, object]) -> None:
        self._fence.renew(request)
        self._check_fence()

    def _check_fence(self) -> None:
        self._workers.check_fence()

    def _shut_down(self, _request: Mapping[str, object]) -> None:
        self._loop.shutting_down = True

    # ------------------------------------------------------------------ agents

    def _lose_agent(self, was_in_charge: bool) -> None:
        self.next_agent.wait_for_next_agent(was_in_charge=was_in_charge)

    def _stop_orphaned(self, grace_s: float) -> None:
        if self._workers.round is not None:
            self._workers.begin_stop(self._workers.round, signal.SIGTERM, grace_s)

    def _hello(self) -> Mapping[str, object]:
        held = self._workers.round
        return {
            "type": "hello",
            "version": PROTOCOL_VERSION,
            "pid": os.getpid(),
            "round": None if held is None else held.number,
            "last_round": self._workers.last_round,
            "workers": [] if held is None else sorted(held.pids.items()),
            "parked": [link.describe() for link in self._workers.parked.waiting()],
            "store_hosts": self._store_hosts.rounds(),
            "zygote": self.forks.zygote.spec is not None,
        }


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
