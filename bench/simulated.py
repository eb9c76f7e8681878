"""Nodes without processes: the real stream, the real agent core, and workers that are numbers.

Fifty rdzvruns and their workers would measure this machine. What a take-over asks of a node is
kept: its one gRPC stream, how it looks for a server again, what it believes, and what it decides.
Its workers start, and are gone once they are to stop, in no time.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence

from rdzv.agent.core import begin, commands, events, step
from rdzv.agent.core.model import JobTerms, Phase
from rdzv.agent.runner.system import boottime_ms
from rdzv.agent.server_link import encoding
from rdzv.agent.server_link.link import NodeIdentity, ServerLink
from rdzv.client import Endpoint
from rdzv.core.fleet.nodes import AgentKind
from rdzv.core.model import Offer
from rdzv.messages import Joined
from rdzv.runtime.clock import monotonic_ms
from rdzv.structs import replace
from rdzv.transport.channels import PLAIN, Credentials
from rdzv.v1 import rdzv_pb2 as pb

_store_ports = itertools.cycle(range(20_000, 30_000))
"""Ports on which nothing listens: no worker looks for a store there."""


class SimulatedNode:
    """One node of one job."""

    fence_after_ms = 0

    def __init__(
        self,
        node_id: str,
        endpoints: Sequence[Endpoint],
        job: JobTerms,
        credentials: Credentials = PLAIN,
    ) -> None:
        self.rdzv_id = job.rdzv_id
        self.node_id = node_id
        self.connected_s = 0.0
        """When its stream was last welcomed (`time.monotonic`)."""
        self.slowest_answer_s = 0.0
        """The longest that the server took to answer a message of it, since `ask_answer`."""
        self.admitted = asyncio.Event()
        self.started_s: dict[int, float] = {}
        """By round: when this node was told to start its workers (`time.monotonic`)."""
        self._asked = False
        self._state = begin(job, monotonic_ms())
        self._offer = Offer("127.0.0.1", machine="here", can_host_store=True)
        self._store_port = next(_store_ports)
        self._inbox: deque[events.Event] = deque()
        self._busy = False
        self._timer: asyncio.TimerHandle | None = None
        identity = NodeIdentity(
            node_id=node_id,
            instance=uuid.uuid4().hex,
            kind=AgentKind.FOREGROUND,
            address="127.0.0.1",
            pid=os.getpid(),
            version="bench",
        )
        self.link = ServerLink(endpoints, identity, credentials=credentials)
        self.link.add(self)

    @property
    def round(self) -> int:
        """The round whose workers run; -1 if none do."""
        line = self._state.assignment
        return line.round if line is not None and self._state.phase is Phase.RUNNING else -1

    @property
    def outcome(self) -> str:
        """How the job has ended for this node; empty while it has not."""
        return self._state.outcome.text if self._state.outcome else ""

    def kill_worker(self) -> None:
        """Let its worker die of SIGKILL, as its runner would report it."""
        message = "Signal 9 (SIGKILL)"
        self.post(events.WorkerExited(self.round, 0, 4711, None, 9, 0, message=message))

    def close(self) -> None:
        """Decide nothing more."""
        if self._timer is not None:
            self._timer.cancel()
        self.link.close()

    # ---------------------------------------------------------------- what the link asks of a job

    def belief(self) -> pb.Belief | None:
        """Return the node's belief; None once the job has ended for this node."""
        if self._state.phase is Phase.ENDED:
            return None
        return encoding.belief(self._state, self._join(None), monotonic_ms())

    def _join(self, say: commands.SayJoin | None) -> pb.Join:
        offer = self._current_offer()
        return encoding.join(say, self._state, offer, monotonic_ms(), refuse_reuse=False)

    def waits_ms(self) -> int | None:
        """Return None: it never gives up."""
        return None

    def ask_answer(self) -> None:
        """Send a heartbeat that the server answers."""
        self._asked = True
        self.link.ask_clock()

    def renew_fence(self, heard_at_ms: int) -> None:
        """Note how long an answer took. Workers are not fenced."""
        if self._asked:
            took_s = (boottime_ms() - heard_at_ms) / 1000
            self.slowest_answer_s = max(self.slowest_answer_s, took_s)

    def note(self, reason: str) -> None:
        """Nothing here needs the reason why there are no workers."""

    def post(self, event: events.Event) -> None:
        """Handle an event, after those that came before it."""
        self._inbox.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._inbox:
                self._handle(self._inbox.popleft())
        finally:
            self._busy = False

    def _handle(self, event: events.Event) -> None:
        if isinstance(event, events.ServerConnected):
            self.connected_s = time.monotonic()
        elif isinstance(event, Joined):
            self.admitted.set()
        transition = step(self._state, event, monotonic_ms())
        self._state = transition.state
        for command in transition.commands:
            self._do(command)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if transition.wake_at_ms is not None:
            delay_s = max(transition.wake_at_ms - monotonic_ms(), 0) / 1000
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(delay_s, self.post, events.Ticked())

    def _do(self, command: commands.Command) -> None:
        match command:
            case commands.SayJoin():
                self.link.say(pb.NodeMessage(join=self._join(command)))
            case commands.StartWorkers():
                self._store_port = next(_store_ports)
                self.started_s[command.assignment.round] = time.monotonic()
                self.post(events.StoreHostReady(command.assignment.round))
            case commands.StopWorkers():
                self.post(events.WorkersGone(command.round))
            case commands.StopStoreHost() | commands.Exit():
                pass
            case _:
                self.link.say(encoding.report(command, self.rdzv_id, monotonic_ms()))

    def _current_offer(self) -> Offer:
        if self._state.phase is not Phase.JOINING:
            return self._offer
        return replace(self._offer, store_port=self._store_port)


async def until(what: str, holds: Callable[[], bool], timeout_s: float) -> None:
    """Wait until a condition holds.

    Raises:
        TimeoutError: it does not within the time.
    """
    end_s = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > end_s:
            raise TimeoutError(f"waited {timeout_s:g} s until {what}")
        await asyncio.sleep(0.005)
