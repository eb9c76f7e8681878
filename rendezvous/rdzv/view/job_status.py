"""A job's status: its state, the reason for it, and its nodes.

All of this is derived from `State` on request; nothing is stored separately.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from rdzv.core import model
from rdzv.core.fleet.job_queue import QueuedWait
from rdzv.core.fleet.node_resources import Drain
from rdzv.core.kept_ranks import kept_workers
from rdzv.core.life.failures import restarts_that_count, some_succeeded
from rdzv.core.life.forming import (
    completion_due_ms,
    holds,
    newcomers_due_ms,
    preparing,
    restart_due_ms,
    some_seat_away,
    superseded_until_ms,
)
from rdzv.core.life.leaving import unheard, unheard_until_ms
from rdzv.core.life.submitted_jobs import awaited
from rdzv.core.model import (
    Departure,
    Ended,
    Failure,
    JobState,
    Membership,
    NodeState,
    Offer,
    Result,
    Round,
    RoundEnd,
    ScaleUp,
    State,
    is_placeholder,
    job_state,
)
from rdzv.core.reason import LAST_CALL, Reason, ReasonItem
from rdzv.core.rounds.budgets import backoff_ms
from rdzv.core.words import counted, duration, listed, size_text
from rdzv.structs import replace
from rdzv.transport.wire import convert
from rdzv.view.answers import (
    OWN_BACKEND,
    Budgets,
    JobStatus,
    LastFailure,
    NodeStatus,
    Submission,
    WorkerFailure,
)

_NO_DRAINS: Mapping[str, Drain] = MappingProxyType({})
_NO_OFFER = Offer(address="", local_world_size=0)


def _headline(state: State, now_ms: int) -> Reason:
    membership = state.membership
    match job_state(state):
        case JobState.RUNNING:
            return _running(state, now_ms)
        case JobState.STOPPING if state.seats:
            return Reason(f"waiting for {listed(state.seats)} to stop")
        case JobState.STOPPING:
            text = f"workers may still run on {listed(unheard(state))} (no report)"
            return Reason(text, "waiting at most", _left(unheard_until_ms(state), now_ms))
        case JobState.QUEUED:
            return Reason("no nodes chosen yet")
        case JobState.JOINING:
            return _joining(state, now_ms)
        case _:
            return Reason(membership.ended.reason if membership.ended else "")


def _running(state: State, now_ms: int) -> Reason:
    round_ = _round(state)
    nodes, workers = len(round_.participants), round_.world_size
    text = f"{counted(nodes, 'node')} and {counted(workers, 'worker')} run round {round_.number}"
    done = sum(1 for seat in state.seats.values() if seat.succeeded) + len(round_.gone)
    if done:
        text += f"; {done} of {nodes} have succeeded; waiting for the others"
    if away := sum(1 for node_id in state.away if node_id in state.seats):
        text += f"; {counted(away, 'node')} away"
    due_ms = newcomers_due_ms(state, now_ms)
    if due_ms is None:
        return Reason(text)
    coming = preparing(state, now_ms)
    when = f"once {listed(coming)} can start workers warm, " if coming else ""
    return Reason(text, f"newcomers are admitted {when}within", _left(due_ms, now_ms))


def _joining(state: State, now_ms: int) -> Reason:
    ready = state.ready
    bounds = f"{state.membership.min_nodes}:{state.membership.max_nodes}"
    due_ms = completion_due_ms(state)
    if due_ms is not None:
        waits, then = _waits_for(state, due_ms)
        return Reason(f"have {ready} of {bounds} nodes{waits}", then, _left(due_ms, now_ms))
    missing = max(state.membership.min_nodes - ready, 0)
    if not missing:
        away = [node_id for node_id in state.waiting if node_id in state.away]
        return Reason(f"have {ready} of {bounds} nodes; waiting for {listed(away)} to come back")
    if len(coming := awaited(state)) >= missing:
        was, is_ = ("was", "is") if len(coming) == 1 else ("were", "are")
        text = f"{listed(coming)} {was} chosen, and {is_} starting (have {ready} of {bounds} nodes)"
    else:
        text = f"waiting for {counted(missing, 'more node')} (have {ready} of {bounds})"
    if state.short_since_ms is None:
        return Reason(text)
    left_ms = _left(state.short_since_ms + state.membership.settings.join_timeout_ms, now_ms)
    does = "gives up" if state.membership.submission is None else "is queued again"
    return Reason(text, f"{does} in", left_ms)


def _waits_for(state: State, due_ms: int) -> tuple[str, str]:
    failures = state.membership.store_failures
    if due_ms == restart_due_ms(state):
        return f"; {_backs_off(state.membership, due_ms)}", "continues in"
    if due_ms == superseded_until_ms(state):
        who = listed(state.superseded)
        return f"; waiting for {who} to stop workers of an earlier round", "continues within"
    if coming := awaited(state):
        return f"; {listed(coming)} may still join", "continues within"
    if state.membership.round is None and state.membership.resumed_at_ms is not None:
        return "; waiting for reports of nodes that may still run it", "continues within"
    if state.membership.round is None:
        return "", LAST_CALL
    if failures:
        times = "once" if failures == 1 else f"{failures} times in a row"
        return f"; backing off because the store host failed {times}", "continues in"
    return "; gathering newcomers", "continues in"


def _backs_off(membership: Membership, now_ms: int) -> str:
    number, most = restarts_that_count(membership, now_ms), membership.settings.max_restarts
    waits = f"backing off {duration(backoff_ms(membership))} before restart {number} of {most}"
    return f"{waits}: {membership.spent.soon} rounds in a row failed soon"


def _job_items(state: State, wait: QueuedWait | None, now_ms: int) -> Iterator[ReasonItem]:
    membership, round_ = state.membership, state.membership.round
    if membership.ended is not None:
        return
    if wait is not None and not state.queued:
        yield ReasonItem(wait.reason.headline, then=wait.reason.then)
    if wait is not None:
        yield from wait.reason.items
    if round_ is None:
        return
    if round_.end is not None and not _is_told(state, round_.end):
        cause = f"{round_.end.cause}: {round_.end.reason}"
        yield ReasonItem(cause, state=f"round {round_.number} ended")
    if round_.succeeded and job_state(state) is JobState.JOINING:
        done, nodes = len(round_.succeeded), len(round_.participants)
        cause = f"{done} of {nodes} nodes have succeeded in round {round_.number}"
        then = "the job succeeds if the others report success before the next round"
        yield ReasonItem(cause, then=then)
    if round_.live and not _all_seats_taken(state) and (why := _why_not_let_in(state)):
        held = {node_id for node_id, until_ms in holds(state).items() if until_ms > now_ms}
        if comers := [n for n in state.waiting if n not in state.away and n not in held]:
            yield ReasonItem(why, listed(comers), NodeState.WAITING)


def _is_told(state: State, end: RoundEnd) -> bool:
    """Return whether the item about the node that ended a round says why it ended."""
    node_id = end.cause_node_id
    said = [d.reason for d in _departed(state) if d.node_id == node_id]
    said += [state.seats[node_id].leaving] if node_id in state.seats else []
    return any(end.reason == f"{node_id}: {reason}" for reason in said)


def _node_items(state: State, drains: Mapping[str, Drain], now_ms: int) -> Iterator[ReasonItem]:
    for node_id in state.stuck:
        yield _stuck_item(state, node_id)
    # Iterate over the away nodes, which are few, because there may be thousands of seats.
    for node_id, away in state.away.items():
        left_ms = _left(away.until_ms, now_ms)
        if node_id in state.seats and is_placeholder(node_id):
            cause = "no report since this server learned of the round"
            yield ReasonItem(cause, node_id, NodeState.AWAY, "waiting at most", left_ms)
        elif node_id in state.seats:
            cause, then = "its stream ended", "its seat is kept for"
            yield ReasonItem(cause, node_id, NodeState.AWAY, then, left_ms)
        elif node_id in state.waiting:
            cause, then = "its stream ended", "it is given up in"
            yield ReasonItem(cause, node_id, NodeState.AWAY, then, left_ms)
    for node_id, drain in sorted(drains.items(), key=lambda one: (one[1].due_ms, one[0])):
        yield drain.item(node_id, now_ms)
    for node_id, seat in state.seats.items():
        if seat.leaving and node_id not in drains:
            yield ReasonItem(seat.leaving, node_id, "leaving")
    for node_id, until_ms in holds(state).items():
        if until_ms > now_ms and node_id in state.waiting:
            yield _held_item(node_id, until_ms - now_ms)
    waits = NodeState.SPARE if _all_seats_taken(state) else NodeState.WAITING
    for node_id, waiting in state.waiting.items():
        if waiting.standby != model.NO_STANDBY and node_id not in state.away:
            yield ReasonItem(_standby(waiting.standby), node_id, waits)
    for d in _departed(state):
        may_run = "its workers may still run until it reports" if d.may_run else ""
        yield ReasonItem(d.reason, d.node_id, d.state, may_run)


def _stuck_item(state: State, node_id: str) -> ReasonItem:
    pids = ", ".join(str(pid) for pid in state.stuck[node_id].pids)
    cause = f"its workers survive SIGKILL (pid {pids})"
    then = "it is seated when they are gone; restart the machine if they stay"
    return ReasonItem(cause, node_id, NodeState.STOPPING, then)


def _held_item(node_id: str, left_ms: int) -> ReasonItem:
    then = "it gets a seat when the round ends for another reason, or in"
    return ReasonItem(
        "it was lost more than once recently", node_id, NodeState.WAITING, then, left_ms
    )


def _standby(standby: model.Standby) -> str:
    said = f"standby: {standby.state}"
    if standby.why:
        return f"{said}: {standby.why}"
    if not standby.memory_bytes:
        return said
    gpus = f", {size_text(standby.gpu_bytes)} of GPU memory" if standby.gpu_bytes else ""
    return f"{said} ({size_text(standby.memory_bytes)}{gpus}, {standby.cpus:.2g} CPUs)"


def _left(due_ms: int, now_ms: int) -> int:
    return max(due_ms - now_ms, 0)


def _departed(state: State) -> list[Departure]:
    """Return the last departure of every node that is not there or expected, oldest first.

    After the end of a run, that is how its participants ended unless the run has succeeded.
    """
    ended, round_ = state.membership.ended, state.membership.round
    latest = {departure.node_id: departure for departure in state.membership.departures}
    gone = [d for d in latest.values() if not state.present(d.node_id)]
    if ended is None:
        coming = awaited(state)
        return [d for d in gone if d.node_id not in coming]
    if round_ is None:
        return gone
    since_ms = ended.at_ms + 1 if ended.result is Result.SUCCEEDED else round_.at_ms
    seated = {p.node_id for p in round_.participants if p.node_id in latest}
    return [d for d in gone if d.node_id not in seated or d.at_ms >= since_ms]


def waiting_reason(state: State, node_id: str, now_ms: int) -> str:
    """Explain to a node why it has no workers to run.

    Return an empty string if it has workers or is not in the job.
    """
    if node_id in state.stuck:
        return _stuck_item(state, node_id).why
    if node_id not in state.waiting:
        return ""
    held_ms = holds(state).get(node_id, 0)
    if held_ms > now_ms:
        return _held_item(node_id, held_ms - now_ms).why
    if _all_seats_taken(state):
        seats = state.membership.max_nodes
        return f"spare: {'its seat is' if seats == 1 else f'all {seats} seats are'} taken"
    line = _headline(state, now_ms).line
    if job_state(state) is JobState.RUNNING and (why := _why_not_let_in(state)):
        return f"{why}; {line}"
    return line


def _why_not_let_in(state: State) -> str:
    """Explain why a waiting node does not end the running round, or not yet.

    Return an empty string if newcomers are merely gathered, which the headline says.
    """
    if some_succeeded(state):
        return "some participants have succeeded, so no newcomer ends the round"
    settings, round_ = state.membership.settings, state.membership.round
    if settings.scale_up is ScaleUp.ON_RESTART:
        return "newcomers get seats when the round ends for another reason (scale-up on-restart)"
    if settings.scale_up is ScaleUp.AFTER and round_ is not None:
        after = duration(settings.scale_up_after_ms)
        return f"newcomers are admitted when the round has run for {after} (scale-up after)"
    if some_seat_away(state):
        return "newcomers are admitted when the nodes that are away are back"
    return ""


def _all_seats_taken(state: State) -> bool:
    return len(state.seats) >= state.membership.max_nodes


def view(
    state: State,
    now_ms: int,
    wait: QueuedWait | None = None,
    drains: Mapping[str, Drain] = _NO_DRAINS,
) -> JobStatus:
    """Return the whole job's status, without what its workers have reported.

    `wait` explains why a submitted job lacks nodes; `drains` contains the nodes that are about to
    leave.
    """
    membership, round_ = state.membership, state.membership.round
    if membership.ended is not None:
        wait, drains = None, _NO_DRAINS
    drains = {n: drain for n, drain in drains.items() if state.present(n)}
    return JobStatus(
        rdzv_id=membership.rdzv_id,
        run=membership.run or None,
        run_number=membership.run_number or None,
        state=job_state(state),
        state_age_ms=max(now_ms - _state_since_ms(state), 0),
        reason=_reason(state, now_ms, wait, drains),
        run_age_ms=max(now_ms - membership.began_at_ms, 0),
        round=round_.number if round_ else None,
        min_nodes=membership.min_nodes or None,
        max_nodes=membership.max_nodes or None,
        world_size=(round_.world_size if round_ else 0) or None,
        restarts=_restarts(membership, now_ms),
        max_restarts=membership.settings.max_restarts,
        master_addr=(round_.master_addr if round_ else "") or None,
        master_port=(round_.master_port if round_ else 0) or None,
        nodes=node_views(state, now_ms),
        last_failure=_last_failure(membership.last_failures, now_ms),
        backend=OWN_BACKEND,
        progress=(),
        submission=_submission(membership.submission, wait, now_ms),
        budgets=_budgets(membership),
        no_progress=membership.ended is not None and membership.ended.no_progress,
        ended_by_failure=membership.ended is not None and bool(membership.ended.failures),
        owner=membership.owner or None,
        has_secret=bool(membership.secret),
        closed=membership.ended is not None or bool(membership.stopping),
        kept=kept_workers(round_),
        source=round_.source if round_ else None,
        resume_step=round_.resume_step if round_ else None,
    )


def _last_failure(failures: Sequence[Failure], now_ms: int) -> LastFailure | None:
    if not failures:
        return None
    root_cause, *others = (convert(WorkerFailure, failure) for failure in failures)
    return LastFailure(max(now_ms - failures[0].at_ms, 0), root_cause, tuple(others))


def _submission(
    submission: model.SubmittedRun | None, wait: QueuedWait | None, now_ms: int
) -> Submission | None:
    if submission is None:
        return None
    spec = submission.spec
    return convert(
        Submission,
        spec,
        submitted_by=submission.submitted_by or None,
        age_ms=max(now_ms - submission.at_ms, 0),
        env_names=tuple(name for name, _ in spec.env),
        placed=submission.placed,
        jobs_before=wait.jobs_before if wait is not None else None,
        declined=submission.declined,
    )


def _reason(
    state: State, now_ms: int, wait: QueuedWait | None, drains: Mapping[str, Drain]
) -> Reason:
    headline = wait.reason if wait is not None and state.queued else _headline(state, now_ms)
    items = list(_job_items(state, wait, now_ms))
    # That a node cannot be chosen now says more than why it has left.
    named = {item.who for item in items}
    items += [item for item in _node_items(state, drains, now_ms) if item.who not in named]
    return replace(headline, items=tuple(items))


def _budgets(membership: Membership) -> Budgets:
    settings, spent = membership.settings, membership.spent
    return convert(
        Budgets,
        settings,
        preemptions=spent.preemptions,
        store_failures=spent.store_failures,
        restarts_without_progress=spent.without_progress,
        furthest_step=spent.furthest_step,
    )


def _restarts(membership: Membership, now_ms: int) -> int | None:
    if membership.settings.max_restarts is None:
        return None
    return restarts_that_count(membership, now_ms)


def _state_since_ms(state: State) -> int:
    membership, round_ = state.membership, state.membership.round
    if membership.ended is not None:
        return membership.ended.at_ms
    submission = membership.submission
    if state.queued and submission is not None and submission.queued_again_ms is not None:
        return submission.queued_again_ms
    if round_ is None:
        return membership.began_at_ms
    return round_.end.at_ms if round_.end else round_.at_ms


def node_views(state: State, now_ms: int) -> tuple[NodeStatus, ...]:
    """Return a view of each node: participants by GROUP_RANK, then waiting nodes, then departed."""
    round_, ended = state.membership.round, state.membership.ended
    views: dict[str, NodeStatus] = {}

    def show(
        node_id: str,
        node_state: NodeState,
        since_ms: int,
        offer: Offer = _NO_OFFER,
        group_rank: int | None = None,
        rank_first: int | None = None,
        standby: model.Standby | None = None,
    ) -> None:
        if node_id not in views:
            views[node_id] = NodeStatus(
                node_id=node_id,
                state=node_state,
                group_rank=group_rank,
                rank_first=rank_first,
                local_world_size=offer.local_world_size or None,
                address=offer.address or None,
                role=offer.role or None,
                state_age_ms=max(now_ms - since_ms, 0),
                standby=standby,
            )

    for group_rank, p in enumerate(round_.participants if round_ else ()):
        if p.node_id in state.seats or ended is not None:
            node_state, since_ms = _participant_state(state, p.node_id)
            show(p.node_id, node_state, since_ms, p.offer, group_rank, p.rank_first)
    waits = NodeState.SPARE if _all_seats_taken(state) else NodeState.WAITING
    for node_id, waiting in state.waiting.items():
        node_state = NodeState.AWAY if node_id in state.away else waits
        standby = waiting.standby if waiting.standby != model.NO_STANDBY else None
        show(node_id, node_state, waiting.since_ms, waiting.offer, standby=standby)
    for node_id, stuck in state.stuck.items():
        show(node_id, NodeState.STOPPING, stuck.since_ms)
    for node_id in awaited(state) if ended is None else ():
        show(node_id, NodeState.WAITING, now_ms)
    for d in _departed(state):
        offer = Offer(d.address, local_world_size=d.local_world_size, role=d.role)
        show(d.node_id, d.state, d.at_ms, offer)
    return tuple(views.values())


def _participant_state(state: State, node_id: str) -> tuple[NodeState, int]:
    round_, ended = _round(state), state.membership.ended
    if ended is not None:
        return _final_state(state, node_id, ended)
    seat = state.seats[node_id]
    if node_id in state.away:
        return NodeState.AWAY, state.away[node_id].since_ms
    if seat.succeeded:
        return NodeState.SUCCEEDED, seat.since_ms
    if round_.end is not None:
        return NodeState.STOPPING, round_.end.at_ms
    return NodeState.SEATED, seat.since_ms


def _final_state(state: State, node_id: str, ended: Ended) -> tuple[NodeState, int]:
    if ended.result is Result.SUCCEEDED:
        return NodeState.SUCCEEDED, ended.at_ms
    for departure in reversed(state.membership.departures):
        if departure.node_id == node_id and departure.at_ms >= _round(state).at_ms:
            return departure.state, departure.at_ms
    return NodeState.LEFT, ended.at_ms


def _round(state: State) -> Round:
    round_ = state.membership.round
    assert round_ is not None
    return round_
