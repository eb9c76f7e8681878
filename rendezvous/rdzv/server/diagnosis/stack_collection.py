"""Collects the stacks of all workers in a round from their nodes and combines them.

Each node is asked on the stream that it has opened (`TakeStacks`) and answers in pieces. A job may
have 100,000 workers, so stacks are grouped as they arrive: one stack per group is always kept,
along with as many others as fit.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from rdzv.core.evidence.collectives import FINISHED, Evidence, compare
from rdzv.core.evidence.stacks import (
    CollectedStacks,
    Key,
    SilentNode,
    StackFrame,
    ThreadStack,
    WorkerStack,
    evidence,
    groups,
    key_of,
)
from rdzv.core.model import Participant, Round, State, is_placeholder
from rdzv.errors import InvalidRequestError, LimitExceededError, RendezvousConnectionError
from rdzv.messages import Announcement, Stacks, TakeStacks
from rdzv.runtime.clock import Clock, Timer
from rdzv.structs import replace

Send = Callable[[str, Announcement], bool]


@dataclass(eq=False, slots=True)
class _Taking:
    waits_for: dict[str, Participant]
    room: int
    done: asyncio.Event = field(default_factory=asyncio.Event)
    ranks: dict[Key, list[int]] = field(default_factory=dict)
    one_of: dict[Key, WorkerStack] = field(default_factory=dict)
    kept: dict[int, WorkerStack] = field(default_factory=dict)
    told: set[int] = field(default_factory=set)
    evidence: list[Evidence] = field(default_factory=list)
    silent: dict[str, SilentNode] = field(default_factory=dict)

    def add(self, stack: WorkerStack, most_groups: int) -> None:
        """Add a worker's stack; if a worker sends two, the first one counts."""
        if stack.rank in self.told:
            return
        key, shown = key_of(stack), evidence(stack)
        if key not in self.ranks and len(self.ranks) >= most_groups:
            # With this many different stacks, more groups would not help anyone, so the rest share
            # one.
            key = (stack.state or "", (("elsewhere", "", None),), ())
            stack = _elsewhere(stack)
        self.told.add(stack.rank)
        self.evidence.append(shown)
        self.ranks.setdefault(key, []).append(stack.rank)
        first = key not in self.one_of
        if first:
            self.one_of[key] = stack
        size = _size(stack)
        if first or size <= self.room:
            self.room -= size
            self.kept[stack.rank] = stack

    def add_finished(self, node: Participant, most_groups: int) -> None:
        """Add the workers of a node that has succeeded, as far as it has not sent them."""
        self.end(node.node_id)
        self.silent.pop(node.node_id, None)
        for local_rank, rank in enumerate(node.ranks):
            finished = WorkerStack(rank, local_rank, 0, FINISHED, node_id=node.node_id)
            self.add(finished, most_groups)

    def end(self, node_id: str, why: str = "") -> None:
        """Stop waiting for a node; `why` says why stacks are missing, and is empty if none are."""
        node = self.waits_for.pop(node_id, None)
        if node is not None and why:
            size = node.offer.local_world_size
            self.silent[node_id] = SilentNode(node_id, node.rank_first, size, why)
        if not self.waits_for:
            self.done.set()


def _elsewhere(stack: WorkerStack) -> WorkerStack:
    frames = (StackFrame("one of very many places", "elsewhere", None),)
    main = ThreadStack("MainThread", True, frames)
    return WorkerStack(
        stack.rank, stack.local_rank, stack.pid, stack.state, (main,), node_id=stack.node_id
    )


def _size(stack: WorkerStack) -> int:
    frames = (frame for thread in stack.threads for frame in thread.frames)
    recorded = sum(
        100 + 100 * len(record.latest) + 4 * len(record.members) for record in stack.collectives
    )
    shown = sum(len(frame.name) + len(frame.file) + 40 for frame in frames)
    return 200 + len(stack.note or "") + recorded + shown


TAKINGS = 8
"""The number of rounds whose stacks are being collected at once. Each may use `STACK_BYTES`."""

STACK_BYTES = 384 * 1024
"""The size of the stacks kept from one round, well below the limit for a key-value record."""

STACK_GROUPS = 256
"""The number of groups of workers in one round, each with the same stack."""


ANSWER_MS = 10_000
"""How long nodes have to answer a request for stacks. py-spy needs about 20 ms per worker."""


class StackRelay:
    """Runs one server's stack collections."""

    def __init__(self, clock: Clock, send: Send) -> None:
        self._clock = clock
        self._send = send
        self._takings: dict[int, _Taking] = {}
        """The collections in progress, by request number, which is the same for all nodes."""
        self._numbers = itertools.count(1)
        self._closed = False

    @property
    def takings(self) -> int:
        return len(self._takings)

    async def take(
        self, state: State, reason: str, within_ms: int | None = None
    ) -> CollectedStacks:
        """Collect the stacks of the live round's workers, waiting at most `within_ms` if given."""
        membership, round_ = state.membership, state.membership.round
        if membership.ended is not None or round_ is None or not round_.live:
            raise InvalidRequestError(f"{membership.rdzv_id} has no workers now: no round is live")
        if len(self._takings) >= TAKINGS:
            raise LimitExceededError(
                f"stacks of {len(self._takings)} rounds are being taken here, which is the limit; "
                "try again in some seconds"
            )
        nodes = {p.node_id: p for p in round_.participants}
        taking = _Taking(dict(nodes), STACK_BYTES)
        number = next(self._numbers)
        self._takings[number] = taking
        timer = Timer(self._clock, lambda _: taking.done.set())
        at_ms = self._clock.now_ms()
        answer_ms = min(within_ms or ANSWER_MS, ANSWER_MS)
        timer.arm(at_ms + answer_ms)
        request = TakeStacks(number, membership.rdzv_id, membership.run, round_.number, answer_ms)
        try:
            for node_id in nodes:
                if is_placeholder(node_id) or not self._send(node_id, request):
                    taking.end(node_id, "its agent is not connected")
            await taking.done.wait()
        finally:
            timer.cancel()
            del self._takings[number]
        if self._closed:
            raise RendezvousConnectionError("this server no longer serves; ask again")
        seconds = answer_ms / 1000
        for node in round_.participants:
            if node.node_id in round_.succeeded:
                taking.add_finished(node, STACK_GROUPS)
        for node_id in tuple(taking.waits_for):
            why = f"no answer within {seconds:g} s: its agent is held up, or too old to take stacks"
            taking.end(node_id, why)
        return _report(taking, membership.rdzv_id, membership.run, round_, at_ms, reason)

    def take_in(self, node_id: str, stacks: Stacks) -> None:
        taking = self._takings.get(stacks.request)
        node = taking.waits_for.get(node_id) if taking is not None else None
        if taking is None or node is None:
            return
        for stack in stacks.workers:
            if stack.rank in node.ranks:
                taking.add(replace(stack, node_id=node_id), STACK_GROUPS)
        if stacks.last:
            taking.end(node_id, stacks.error)

    def note_gone(self, node_id: str) -> None:
        for taking in self._takings.values():
            taking.end(node_id, "its stream ended before it had answered")

    def close(self) -> None:
        self._closed = True
        for taking in self._takings.values():
            taking.done.set()


def _report(
    taking: _Taking, rdzv_id: str, run: str, round_: Round, at_ms: int, reason: str
) -> CollectedStacks:
    return CollectedStacks(
        rdzv_id=rdzv_id,
        run=run,
        round=round_.number,
        at_ms=at_ms,
        reason=reason,
        groups=tuple(groups(taking.ranks, taking.one_of)),
        stacks=tuple(stack for _, stack in sorted(taking.kept.items())),
        left_out=len(taking.told) - len(taking.kept),
        silent=tuple(taking.silent.values()),
        cause=compare(taking.evidence, round_.world_size),
    )
