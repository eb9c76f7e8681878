"""The runner's socket to the agent. Receives requests, and stores events until they are confirmed.

Both directions carry frames as defined in channel.py; requests.py lists the requests. An agent
decodes events by their fields, as structs of `rdzv.agent.core.events`:

    started           {round, local_rank, pid}        with `how`: kept, warm or cold
    start_failed      {round, local_rank, reason}     the round is then killed; `gone` follows
    exited            {round, local_rank, pid, exit_code, signal, age_ms}
                                                      `by_itself`: not caused by the runner
    suspect           {round, local_rank, pid, message, traceback, age_ms}
    resumed           {round, local_rank, pid, step, source, healed, init_ms, heal_ms, not_loaded}
    gone              {round, kept}                   only its store host and the parked workers in
                                                      `kept` remain
    not_kept          {round, local_rank, pid, reason}    a worker failed to park and is killed
    kept_exited       {local_rank, pid, exit_code, signal}    a parked worker has exited
    kept_gone         {}                              no parked workers remain
    stuck             {round, pids}                   these survive SIGKILL; `gone` may still follow
    fenced            {round, at_ms}                  the fence was reached; the round is killed
    store_host_ready  {round}
    store_host_exited {round, exit_code, signal}
    zygote_ready      {pid, modules, threads, memory_kb, seconds}
    zygote_lost       {reason, retry_s}               retry_s null: it will not be replaced
    started_cold      {round, local_ranks, reason}    these should have been warm
    snapshots_held    {snapshots: [{local_rank, mark: {lineage, step, series, shards, world_size},
                                    shard, bytes, digest, copy_of}],
                       carrier: {port, token, fingerprint},
                       missing: {mark, reason}}       all snapshots, and copies, after each change
    snapshot_refused  {local_rank, reason}            this worker gets no memory for snapshots
    snapshots_written {mark, reason}                  this node's parts of the step are on disk,
                                                      unless a reason is given
    serve_failed      {reason}                        the runner will still end with its agent
    error             {reason}
    pong              {}                              response to `ping`, never resent

After the request `serve`, events are numbered and are resent to each new agent until an agent has
sent `heard` {number}, which covers all events up to that number. An exit's `age_ms` increases in
the meantime. Events about snapshots are sent only to an agent that has sent `hold_snapshots`, and
are never resent.
"""

from __future__ import annotations

import time
from collections import deque

from .channel import MalformedFrameError
from .requests import RequestError, read_field

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .channel import Channel
    from .loop import Loop


class AgentLink:
    """The connected agent, if any, and the events that no agent has confirmed yet."""

    def __init__(
        self,
        loop: Loop,
        handle: Callable[[Mapping[str, object]], None],
        on_lost: Callable[[bool], None],
    ) -> None:
        self._loop = loop
        self._handle = handle
        self._on_lost = on_lost
        self._channel: Channel | None = None
        self.in_charge = False
        """Whether the connected agent gives orders and receives events."""
        self.hears_of_snapshots = False
        """Whether this agent has asked for snapshot reports."""
        self.numbers_events = False
        """Whether events are numbered and stored until an agent confirms them."""
        self._events = 0
        # Only a limited number of events can occur without an agent, so this queue is bounded.
        self._unconfirmed: deque[tuple[float, dict[str, object]]] = deque()

    @property
    def connected(self) -> bool:
        """Whether an agent is connected, whether or not it is in charge."""
        return self._channel is not None

    def attach(self, channel: Channel) -> None:
        """Connect to the agent at the other end of a channel. May raise `OSError`."""
        self._loop.watch(channel.fileno(), self.read)
        self._channel = channel

    def disconnect(self) -> None:
        if self._channel is None:
            return
        self._loop.unwatch(self._channel.fileno())
        self._channel.close()
        self._channel = None
        was_in_charge, self.in_charge = self.in_charge, False
        self.hears_of_snapshots = False
        self._on_lost(was_in_charge)

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
                self._handle(request)
            except (MalformedFrameError, RequestError) as error:
                self.send({"type": "error", "reason": str(error)})

    def take_fd(self) -> int | None:
        """Return the descriptor sent with a request, or None. The caller owns the descriptor."""
        return None if self._channel is None else self._channel.take_fd()

    @property
    def lost_fds(self) -> bool:
        """Whether a descriptor was lost because this process had too many open."""
        return self._channel is not None and self._channel.lost_fds

    def emit(self, event: str, **fields: object) -> None:
        """Send an event to the agent in charge, or to the next one if there is none now."""
        message = {"type": event, **fields}
        if self.numbers_events:
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

    def repeat_unconfirmed(self) -> None:
        """Resend every event that no agent has confirmed."""
        now = time.monotonic()
        for at, message in tuple(self._unconfirmed):
            if "age_ms" in message:
                self.send({**message, "age_ms": round((now - at) * 1000)})
            else:
                self.send(message)

    def forget_confirmed(self, request: Mapping[str, object]) -> None:
        """Handle `heard`: forget all events up to the number it gives."""
        number = read_field(request, "number", int)
        while self._unconfirmed and read_field(self._unconfirmed[0][1], "number", int) <= number:
            self._unconfirmed.popleft()
