"""Converts the state of torch's own rendezvous to the job views that `rdzvctl` shows.

The nodes form the groups; this module only reports what they have written. Clocks are not compared:
a node has sent a heartbeat if its stored heartbeat has changed since the last poll.

Theory: `closed` is final and does not imply success. A round is complete or joining; the next one
begins when all participants have left it. A participant whose keep-alive has run out is dropped
from the state by its peers, but nothing else happens: its job continues as if it were there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from rdzv.core.model import JobState, NodeState
from rdzv.core.reason import Reason, ReasonItem
from rdzv.core.words import counted, duration, listed
from rdzv.structs import struct
from rdzv.view.answers import JobStatus, NodeStatus

BACKEND = "c10d"

KEEP_ALIVE_MS = 15_000
"""torch's default for keep_alive_interval times keep_alive_max_attempt. A job's own values are not
in its state."""
GIVEN_UP_MS = 600_000
"""A job whose nodes are all silent for this long counts as stopped, even though it was not
closed."""
STALE_MS = 5_000
"""The store is read once a second. Views older than this are marked as stale."""
MOST_CLOSED = 1_000
"""How many closed jobs are still shown. The store never deletes them."""

_CLOSED = "closed by its nodes; c10d does not report how it ended"


_Number = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]


@struct(frozen=True)
class State:
    """The state shared by a job's nodes.

    A node is one start of torchrun. It is named as torch names it: ADDR_PID_ID.
    """

    round: _Number
    complete: bool
    closed: bool
    last_call: bool
    """Whether enough nodes have joined, so that the round completes at a deadline by the nodes' own
    clocks."""
    participants: Mapping[str, _Number]
    waiting: frozenset[str]
    spare: frozenset[str]
    heartbeats: Mapping[str, str]
    """The last heartbeat of each node, by its own clock; used only to detect new heartbeats."""


@dataclass(slots=True)
class _Seen:
    state: NodeState
    since_ms: int
    group_rank: int | None = None
    reason: str = ""
    heartbeat: str = ""
    heard_ms: int = 0


@dataclass(slots=True)
class _Job:
    rdzv_id: str
    began_ms: int
    state: State | None = None
    job_state: JobState = JobState.JOINING
    since_ms: int = 0
    heard_ms: int = 0
    nodes: dict[str, _Seen] = field(default_factory=dict)


class Watch:
    """The jobs in one store; accepts the results of polls and returns views."""

    def __init__(self) -> None:
        self._jobs: dict[str, _Job] = {}
        self._looked_ms = 0

    def take(self, states: Mapping[str, State | None], gone: Iterable[str], now_ms: int) -> None:
        """Record the result of one poll: the changed states, and the jobs that are gone."""
        self._looked_ms = now_ms
        for rdzv_id in gone:
            self._jobs.pop(rdzv_id, None)
        for rdzv_id, state in states.items():
            job = self._jobs.get(rdzv_id)
            if job is None:
                job = self._jobs[rdzv_id] = _Job(rdzv_id, now_ms, since_ms=now_ms, heard_ms=now_ms)
            _see(job, state, now_ms)
        self._forget_oldest()

    def _forget_oldest(self) -> None:
        closed = [job for job in self._jobs.values() if job.state and job.state.closed]
        for job in sorted(closed, key=lambda job: job.since_ms)[:-MOST_CLOSED]:
            del self._jobs[job.rdzv_id]

    def clear(self) -> tuple[str, ...]:
        """Forget all jobs because the store is lost, and return those that were not closed."""
        lost = [job.rdzv_id for job in self._jobs.values() if not (job.state and job.state.closed)]
        self._jobs.clear()
        return tuple(lost)

    def views(self, now_ms: int) -> tuple[JobStatus, ...]:
        return tuple(self._view(self._jobs[rdzv_id], now_ms) for rdzv_id in sorted(self._jobs))

    def view(self, rdzv_id: str, now_ms: int) -> JobStatus | None:
        job = self._jobs.get(rdzv_id)
        return self._view(job, now_ms) if job else None

    def _view(self, job: _Job, now_ms: int) -> JobStatus:
        state, silent_ms = job.state, now_ms - job.heard_ms
        given_up = _may_change(job) and bool(job.nodes) and silent_ms >= GIVEN_UP_MS
        headline = _explain(job, now_ms)
        if given_up:
            nodes = counted(len(job.nodes), "node")
            headline = f"no heartbeat from any of its {nodes} for {duration(silent_ms)}, "
            headline += "and nobody has closed it"
        elif now_ms - self._looked_ms >= STALE_MS and _may_change(job):
            headline += f"; last seen {duration(now_ms - self._looked_ms)} ago"
        completed = _last_complete(state)
        items = _node_items(job, now_ms)
        if completed is not None and _joins(state):
            ended = f"round {completed} ended"
            items = (ReasonItem("all its participants have left it", state=ended), *items)
        return JobStatus(
            rdzv_id=job.rdzv_id,
            run=None,
            run_number=None,
            state=JobState.STOPPED if given_up else job.job_state,
            reason=Reason(headline, items=items),
            round=completed,
            min_nodes=None,
            max_nodes=None,
            world_size=None,
            restarts=None,
            max_restarts=None,
            nodes=_node_views(job, now_ms),
            state_age_ms=now_ms - (job.heard_ms if given_up else job.since_ms),
            run_age_ms=now_ms - job.began_ms,
            master_addr=None,
            master_port=None,
            last_failure=None,
            backend=BACKEND,
            progress=(),
        )


# ------------------------------------------------------------------------------------ one look


def _see(job: _Job, state: State | None, now_ms: int) -> None:
    before, job.state = job.state, state
    found = _job_state(state)
    new_round = _number_of(state) != _number_of(before)
    if found is not job.job_state or new_round:
        job.job_state, job.since_ms = found, now_ms
    if state is None:
        job.nodes.clear()
        return
    present = _present(state)
    # A node that was dropped from a complete round is shown until the next round.
    dropped = {} if _joins(state) or new_round else {n: job.nodes[n] for n in job.nodes}
    nodes = {node: _seen(job, node, state, present[node], now_ms) for node in present}
    for node, seen in dropped.items():
        if node not in nodes:
            nodes[node] = _dropped(seen, state, now_ms)
    job.nodes = dict(sorted(nodes.items(), key=lambda item: _order(*item)))
    job.heard_ms = max([job.began_ms, *(seen.heard_ms for seen in nodes.values())])


def _number_of(state: State | None) -> tuple[int, bool]:
    return (state.round, state.complete) if state else (0, False)


def _job_state(state: State | None) -> JobState:
    if state is None:
        return JobState.JOINING
    if state.closed:
        return JobState.STOPPED
    return JobState.RUNNING if state.complete else JobState.JOINING


def _joins(state: State | None) -> bool:
    return state is None or not (state.complete or state.closed)


def _may_change(job: _Job) -> bool:
    return job.job_state is not JobState.STOPPED


def _last_complete(state: State | None) -> int | None:
    """Return the last complete round, which is the previous one while a new one forms."""
    if state is None:
        return None
    if state.complete:
        return state.round
    return state.round - 1 if state.round else None


def _present(state: State) -> dict[str, tuple[NodeState, int | None]]:
    found: dict[str, tuple[NodeState, int | None]] = {}
    for node in state.spare:
        found[node] = (NodeState.SPARE, None)
    for node in state.waiting:
        found[node] = (NodeState.WAITING, None)
    for node, rank in state.participants.items():
        if state.complete:
            found[node] = (NodeState.SEATED, rank)
        else:
            found[node] = (NodeState.WAITING, None)
    if state.closed:
        # A closed job's state is no longer updated.
        return {node: (NodeState.LEFT, rank) for node, (_, rank) in found.items()}
    return found


def _seen(
    job: _Job, node: str, state: State, now: tuple[NodeState, int | None], now_ms: int
) -> _Seen:
    before = job.nodes.get(node)
    node_state, group_rank = now
    since_ms = before.since_ms if before and before.state is node_state else now_ms
    heartbeat = state.heartbeats.get(node, "")
    heard_ms = before.heard_ms if before and before.heartbeat == heartbeat else now_ms
    waits = node in state.waiting and state.complete and not state.closed
    reason = "waits until the participants restart for it" if waits else ""
    return _Seen(node_state, since_ms, group_rank, reason, heartbeat, heard_ms)


def _dropped(seen: _Seen, state: State, now_ms: int) -> _Seen:
    if seen.state in (NodeState.LOST, NodeState.LEFT):
        return seen
    silent_ms = now_ms - seen.heard_ms
    if silent_ms < KEEP_ALIVE_MS or state.closed:
        return _Seen(NodeState.LEFT, now_ms, None, "", "", seen.heard_ms)
    reason = f"dropped by its peers after {duration(silent_ms)} of silence; c10d does not re-form"
    return _Seen(NodeState.LOST, now_ms, None, f"{reason} for that", "", seen.heard_ms)


def _order(node: str, seen: _Seen) -> tuple[bool, int, str, str]:
    """Return the sort key that puts participants first, by GROUP_RANK, and then other nodes."""
    return (seen.group_rank is None, seen.group_rank or 0, seen.state, node)


# ------------------------------------------------------------------------------------ in words


def _explain(job: _Job, now_ms: int) -> str:
    state = job.state
    if state is None:
        return "no node has joined yet"
    if state.closed:
        return _CLOSED
    if state.complete:
        verb = "runs" if len(state.participants) == 1 else "run"
        text = f"{counted(len(state.participants), 'node')} {verb} round {state.round}"
        lost = [node for node, seen in job.nodes.items() if seen.state is NodeState.LOST]
        if lost:
            text += f" without {listed(lost)}, for which c10d does not re-form"
        if state.waiting:
            text += f"; waiting until they restart: {listed(sorted(state.waiting))}"
    else:
        text = f"round {state.round} has {counted(len(state.participants), 'node')}; "
        text += "last call" if state.last_call else "waiting for more"
    silent = [
        node
        for node, seen in job.nodes.items()
        if _keeps_alive(seen) and now_ms - seen.heard_ms >= KEEP_ALIVE_MS
    ]
    if silent:
        text += f"; no heartbeat from {listed(silent)}"
    return text


def _keeps_alive(seen: _Seen) -> bool:
    return seen.state not in (NodeState.LEFT, NodeState.LOST)


def _node_views(job: _Job, now_ms: int) -> tuple[NodeStatus, ...]:
    return tuple(
        NodeStatus(
            node_id=node,
            state=seen.state,
            group_rank=seen.group_rank,
            rank_first=None,
            local_world_size=None,
            address=node.rsplit("_", 2)[0],
            role=None,
            state_age_ms=now_ms - seen.since_ms,
        )
        for node, seen in job.nodes.items()
    )


def _node_items(job: _Job, now_ms: int) -> tuple[ReasonItem, ...]:
    found = []
    for node, seen in job.nodes.items():
        if seen.reason:
            found.append(ReasonItem(seen.reason, str(node), seen.state))
        if _keeps_alive(seen) and now_ms - seen.heard_ms >= KEEP_ALIVE_MS:
            silent = f"its last heartbeat was seen {duration(now_ms - seen.heard_ms)} ago"
            found.append(ReasonItem(silent, str(node), seen.state))
    return tuple(found)
