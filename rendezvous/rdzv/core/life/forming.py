"""The rules for when a round completes, which nodes it seats, and when waiting nodes end it."""

from __future__ import annotations

from rdzv.core.draft import Draft
from rdzv.core.events import JobQueued, LastCallBegan, RoundCompleted
from rdzv.core.kept_ranks import keep
from rdzv.core.life.failures import end_round, some_succeeded
from rdzv.core.life.submitted_jobs import awaited, withdraw_nodes
from rdzv.core.model import Cause, NodeState, Result, Round, ScaleUp, Seat, State
from rdzv.core.rounds.budgets import backoff_ms
from rdzv.core.rounds.ranks import assign_seats
from rdzv.core.rounds.reachability import master_addr
from rdzv.core.snapshots import base
from rdzv.structs import replace

PREPARE_MS = 60_000
"""How long after the first newcomer's join a running round goes on while any of them prepares."""
GATHER_QUIET_MS = 1_000
"""New nodes are admitted once none has arrived for this long, so that several cost one restart."""
GATHER_MS = 10_000
"""They are admitted no later than this long after the first of them."""
STORE_BACKOFF_MS = 500
"""The delay before the next round after a store host has failed. It doubles with each in a row."""
STORE_BACKOFF_MAX_MS = 30_000
FLAP_WINDOW_MS = 600_000
"""A node that is lost twice within this time waits before it may end a running round."""
FLAP_HOLD_MS = 60_000
"""The length of that wait. It doubles with each further loss."""
MAX_STORE_FAILURES = 3
"""After this many consecutive store host failures, RANK 0's worker serves the store itself."""


def count_ready(work: Draft) -> bool:
    """Record the time at which there became too few, or enough, nodes for a round."""
    state, settings = work.state, work.membership.settings
    if not _forming(work):
        if state.enough_since_ms is None and state.short_since_ms is None:
            return False
        work.state = replace(state, enough_since_ms=None, short_since_ms=None, regained=False)
        return True
    ready = state.ready
    enough = ready >= work.membership.min_nodes
    short = ready + len(state.seats) < work.membership.min_nodes and not state.queued
    if enough and state.enough_since_ms is None:
        regained = state.short_since_ms is not None and work.membership.round is not None
        work.state = replace(
            state, enough_since_ms=work.now_ms, short_since_ms=None, regained=regained
        )
        called = work.membership.round is None and not state.placed
        if called and ready < work.membership.max_nodes:
            work.events.append(LastCallBegan(ready, settings.last_call_timeout_ms))
        return True
    if not enough and state.enough_since_ms is not None:
        work.state = replace(state, enough_since_ms=None)
        return True
    if short != (state.short_since_ms is not None) and not enough:
        work.state = replace(state, short_since_ms=work.now_ms if short else None)
        return True
    return False


def _forming(work: Draft) -> bool:
    membership, round_ = work.membership, work.membership.round
    return work.open and not membership.stopping and (round_ is None or not round_.live)


def complete_round(work: Draft) -> bool:
    due_ms = completion_due_ms(work.state) if _forming(work) else None
    if due_ms is None or work.now_ms < due_ms:
        return False
    state, membership = work.state, work.membership
    ready = {n: w for n, w in state.waiting.items() if n not in state.away}
    last = membership.round
    seated = assign_seats(last.participants if last else (), ready, membership.max_nodes)
    first, renews = seated[0].offer, last is not None and last.end is not None and not last.end.keep
    round_ = Round(
        number=membership.next_round,
        participants=seated,
        master_addr=master_addr(seated),
        master_port=first.store_port,
        use_agent_store=first.can_host_store and membership.store_failures < MAX_STORE_FAILURES,
        restarts=len(membership.restarts),
        at_ms=work.now_ms,
        renewed=membership.next_round if renews else last.renewed if last else 0,
    )
    round_, not_kept = keep(last, round_, ready)
    round_, not_loaded = base(membership, round_, (ready[p.node_id] for p in seated))
    work.store(replace(membership, round=round_, next_round=round_.number + 1))
    seats = {p.node_id: Seat(p.incarnation, work.now_ms) for p in seated}
    work.put(
        of=None,
        seats=seats,
        waiting={n: w for n, w in state.waiting.items() if n not in seats},
    )
    work.state = replace(work.state, superseded={})
    since_ms = work.now_ms if state.enough_since_ms is None else state.enough_since_ms
    work.events.append(RoundCompleted(round_, work.now_ms - since_ms, not_kept, not_loaded))
    return True


def completion_due_ms(state: State) -> int | None:
    """Return when the next round will complete if nothing changes, or None if it cannot yet."""
    membership, settings, tuning = state.membership, state.membership.settings, state.tuning
    round_, enough_ms = membership.round, state.enough_since_ms
    if state.seats or enough_ms is None or _awaits_survivor(state):
        return None
    earliest_ms = 0
    if membership.store_failures and round_ and round_.end:
        store_ms = STORE_BACKOFF_MS << min(membership.store_failures - 1, 16)
        # The end's time was written by another server, whose clock may have been ahead of this
        # one's.
        end_ms = min(round_.end.at_ms, enough_ms)
        earliest_ms = end_ms + min(store_ms, STORE_BACKOFF_MAX_MS)
    earliest_ms = max(earliest_ms, restart_due_ms(state))
    if round_ is None and membership.resumed_at_ms is not None:
        earliest_ms = membership.resumed_at_ms + tuning.takeover_grace_ms
    earliest_ms = max(earliest_ms, superseded_until_ms(state))
    if state.ready >= membership.max_nodes:
        return max(enough_ms, earliest_ms)
    if state.placed:
        # The server knows which nodes are coming; any that take too long join a later round.
        coming_ms = GATHER_MS if awaited(state) else 0
        return max(enough_ms + coming_ms, earliest_ms)
    if round_ is None:
        earliest_ms = max(earliest_ms, tuning.forms_from_ms)
        return max(enough_ms + settings.last_call_timeout_ms, earliest_ms)
    if state.regained:
        quiet_ms = state.newest_ms + GATHER_QUIET_MS
        gathered_ms = min(max(quiet_ms, enough_ms), enough_ms + GATHER_MS)
        return max(gathered_ms, earliest_ms)
    return max(enough_ms, earliest_ms)


def superseded_until_ms(state: State) -> int:
    """Return when the last workers of superseded rounds will be gone, or 0 if there are none."""
    return max((former.until_ms for former in state.superseded.values()), default=0)


def restart_due_ms(state: State) -> int:
    """Return the earliest restart time of a run that is backing off, or 0 if it is not."""
    round_, enough_ms = state.membership.round, state.enough_since_ms
    wait_ms = backoff_ms(state.membership)
    if not wait_ms or round_ is None or round_.end is None or enough_ms is None:
        return 0
    # The end's time was written by another server, whose clock may have been ahead of this one's.
    return min(round_.end.at_ms, enough_ms) + wait_ms


def _awaits_survivor(state: State) -> bool:
    """Return whether to wait for a participant that has stopped and is briefly away."""
    round_ = state.membership.round
    if round_ is None or not state.away:
        return False
    away = {node_id for node_id in state.away if node_id in state.waiting}
    return any(p.node_id in away for p in round_.participants) if away else False


def time_out_joining(work: Draft) -> bool:
    """Fail a run that has had too few nodes for `join_timeout`; requeue a submitted one."""
    since_ms, settings = work.state.short_since_ms, work.membership.settings
    if since_ms is None or work.state.seats or not _forming(work):
        return False
    if work.now_ms < since_ms + settings.join_timeout_ms:
        return False
    here = ", ".join(work.state.waiting) or "nobody"
    reason = (
        f"join timeout: {settings.join_timeout_ms / 1000:g} s passed with {work.state.ready} of "
        f"{work.membership.min_nodes}:{work.membership.max_nodes} nodes; there: "
        f"{here}{_missing(work.state)}"
    )
    if work.membership.submission is not None:
        work.events.append(JobQueued(reason))
        state = work.state
        node_ids = dict.fromkeys((*state.placed, *state.waiting, *state.stuck))
        withdraw_nodes(work, tuple(node_ids), "the job is queued again")
    else:
        work.close(Result.FAILED, reason, retry_sensible=True)
    return True


def _missing(state: State) -> str:
    last = {d.node_id: d for d in state.membership.departures}
    missing = [
        f"{departure.node_id} {departure.state} ({departure.reason})"
        for node_id, departure in last.items()
        if not state.present(node_id)
    ]
    missing += [f"{node_id} stuck (its workers survive SIGKILL)" for node_id in state.stuck]
    return f"; not there: {', '.join(missing[-8:])}" if missing else ""


def admit_newcomers(work: Draft) -> bool:
    """End a running round to admit waiting nodes, once they fill it or no more are arriving."""
    due_ms = newcomers_due_ms(work.state, work.now_ms) if work.open else None
    if due_ms is None or work.now_ms < due_ms:
        return False
    newcomers = _newcomers(work.state, work.now_ms)
    names = ", ".join(newcomers[:8]) + (" ..." if len(newcomers) > 8 else "")
    end_round(work, Cause.NODES_JOINED, names, broken=False)
    return True


def newcomers_due_ms(state: State, now_ms: int) -> int | None:
    """Return when the waiting nodes will end the running round if no more arrive."""
    free = _free_seats(state)
    newcomers = _newcomers(state, now_ms) if free > 0 else []
    if not newcomers:
        return None
    since = [state.waiting[node_id].since_ms for node_id in newcomers]
    quiet_ms = GATHER_QUIET_MS
    # A node that has just come back may yet report success, in which case no new node ends the
    # round.
    earliest_ms = 0 if state.back_ms is None else state.back_ms + quiet_ms
    settings, round_ = state.membership.settings, state.membership.round
    if settings.scale_up is ScaleUp.AFTER and round_ is not None:
        earliest_ms = max(earliest_ms, round_.at_ms + settings.scale_up_after_ms)
    if preparing(state, now_ms):
        # Whoever ended the round, a node that is seated while it imports stops all others.
        return max(min(since) + PREPARE_MS, earliest_ms)
    if len(newcomers) >= free:
        return max(*since, earliest_ms)
    return max(min(max(since) + quiet_ms, min(since) + GATHER_MS), earliest_ms)


def preparing(state: State, now_ms: int) -> list[str]:
    """Return the newcomers for which the running round goes on until they have prepared."""
    return [
        node_id
        for node_id in _newcomers(state, now_ms)
        if state.waiting[node_id].preparing
        and now_ms < state.waiting[node_id].since_ms + PREPARE_MS
    ]


def next_newcomers_ms(state: State, now_ms: int) -> int | None:
    """Return the earliest time at which waiting nodes, current or held back, may end the round."""
    if _free_seats(state) <= 0:
        return None
    due = [until_ms for node_id, until_ms in holds(state).items() if node_id in state.waiting]
    due = [until_ms for until_ms in due if until_ms > now_ms]
    due_ms = newcomers_due_ms(state, now_ms)
    return min(due if due_ms is None else [*due, due_ms], default=None)


def _free_seats(state: State) -> int:
    """Count the seats for which waiting nodes may end the running round."""
    round_, settings = state.membership.round, state.membership.settings
    if round_ is None or not round_.live or settings.scale_up is ScaleUp.ON_RESTART:
        return 0
    if not state.waiting or some_succeeded(state) or some_seat_away(state):
        return 0
    return state.membership.max_nodes - len(state.seats)


def _newcomers(state: State, now_ms: int) -> list[str]:
    """Return the IDs of the waiting nodes that may end a running round."""
    held = {node_id for node_id, until_ms in holds(state).items() if until_ms > now_ms}
    return [n for n in state.waiting if n not in state.away and n not in held]


def holds(state: State) -> dict[str, int]:
    """Return, for each flapping node, the time until which it may not end a running round.

    A node lost twice within `FLAP_WINDOW_MS` is held for `FLAP_HOLD_MS` after the last loss; the
    hold doubles with each further loss. It depends only on the losses, not on the current time.
    """
    losses: dict[str, list[int]] = {}
    for departure in state.membership.departures:
        if departure.state is NodeState.LOST:
            losses.setdefault(departure.node_id, []).append(departure.at_ms)
    held: dict[str, int] = {}
    for node_id, at_ms in losses.items():
        since_ms = at_ms[-1] - FLAP_WINDOW_MS
        recent = sum(1 for lost_ms in at_ms if lost_ms > since_ms)
        if recent >= 2:
            held[node_id] = at_ms[-1] + (FLAP_HOLD_MS << min(recent - 2, 16))
    return held


def some_seat_away(state: State) -> bool:
    """Return whether a participant is away, and therefore cannot confirm its stop or success."""
    return any(node_id in state.seats for node_id in state.away)
