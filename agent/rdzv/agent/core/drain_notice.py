"""The notice of a drain: its deadline, what workers are told, and when their node leaves."""

from __future__ import annotations

from rdzv.agent.core.commands import NotifyWorkers, TakeBackNotice, Work
from rdzv.agent.core.events import NoticeGiven, WorkerExited, WorkerSuspected
from rdzv.agent.core.model import AgentState, DrainNotice, Phase
from rdzv.agent.core.stopping import leave
from rdzv.structs import replace

_SAME_DEADLINE_MS = 1_000
"""Deadlines that differ by less count as equal: a message takes time to arrive."""

_DONE_MS = 500
"""How much later than this node's workers other nodes' workers may exit if all have finished."""

_SIGTERM = 15


def give_drain_notice(work: Work, event: NoticeGiven) -> None:
    """Workers that were already notified get no second signal; only the deadline may change."""
    state = work.state
    if state.is_ending:
        return
    due_ms, before = work.now_ms + event.left_ms, state.notice
    notice = DrainNotice(event.reason, work.now_ms, due_ms)
    if before is not None:
        notice = replace(before, reason=event.reason, due_ms=due_ms)
    work.state = replace(state, notice=notice)
    if state.workers_gone and state.phase is not Phase.SUCCEEDED:
        leave(work, notice.leaving, grace_ms=0, signum=None)
    elif state.phase is Phase.RUNNING:
        assert state.assignment is not None
        signum = state.job.notice_signum if before is None else 0
        known_ms = before.due_ms if before is not None else None
        if known_ms is None or abs(known_ms - due_ms) >= _SAME_DEADLINE_MS:
            number = state.assignment.round
            work.do(NotifyWorkers(number, event.left_ms, event.reason, signum or None))


def lift_drain_notice(work: Work) -> None:
    """Drop the deadline. Workers that still exit because of the notice have not failed."""
    state, notice = work.state, work.state.notice
    if notice is None or notice.due_ms is None or state.leaving is not None:
        return
    if state.phase is Phase.RUNNING:
        assert state.assignment is not None
        forget_ms = work.now_ms + state.job.shutdown_timeout_ms
        work.state = replace(state, notice=replace(notice, due_ms=None, forget_ms=forget_ms))
        work.do(TakeBackNotice(state.assignment.round))
    else:
        work.state = replace(state, notice=None)


def follows_notice(work: Work, event: WorkerExited | WorkerSuspected) -> bool:
    notice = work.state.notice
    return notice is not None and work.now_ms - event.age_ms >= notice.since_ms


def leave_with_workers(work: Work, event: WorkerExited) -> None:
    """If all exited with 0, the job may be done, so the node first waits for other nodes."""
    notice, alive = work.state.notice, work.state.alive
    assert notice is not None
    if event.exit_code != 0:
        leave(work, notice.leaving, notice_grace_ms(work) if alive else 0, signum=None)
    elif not alive:
        work.state = replace(work.state, notice=replace(notice, exited_ms=work.now_ms))


def notice_grace_ms(work: Work) -> int:
    """Return how long notified workers may take to exit once the round is over."""
    notice, grace_ms = work.state.notice, work.state.job.shutdown_timeout_ms
    if notice is None or notice.due_ms is None:
        return grace_ms
    return max(min(grace_ms, notice.due_ms - work.now_ms), 0)


def keep_notice(work: Work) -> None:
    state, notice = work.state, work.state.notice
    if notice is None:
        return
    if notice.exited_ms is not None:
        if state.phase is Phase.RUNNING and work.now_ms >= notice.exited_ms + _DONE_MS:
            leave(work, replace(notice.leaving, exited_zero=True), grace_ms=0, signum=None)
    elif notice.due_ms is None:
        if work.now_ms >= notice.forget_ms:
            work.state = replace(state, notice=None)
    elif state.phase is Phase.RUNNING and work.now_ms >= notice.due_ms:
        _end_late_workers(work, notice)
    elif state.phase is Phase.SUCCEEDED and state.workers_gone:
        # Other nodes may need the store that this node serves.
        stays = state.assignment is not None and state.assignment.hosts_store
        if work.now_ms >= notice.due_ms or not stays:
            leave(work, notice.leaving, grace_ms=0, signum=None)


def notice_due_ms(state: AgentState) -> int | None:
    notice = state.notice
    if notice is None or not state.phase.needs_store:
        return None
    if state.phase is Phase.SUCCEEDED and not state.workers_gone:
        return None
    if notice.exited_ms is not None:
        return notice.exited_ms + _DONE_MS
    return notice.forget_ms if notice.due_ms is None else notice.due_ms


def _end_late_workers(work: Work, notice: DrainNotice) -> None:
    """End workers that have not exited in time, at once if they have already received SIGTERM."""
    job = work.state.job
    got_sigterm = job.notice_signum == _SIGTERM
    reason = f"{notice.reason}; its workers had not exited by the deadline"
    leaving = replace(notice.leaving, reason=reason)
    leave(work, leaving, 0 if got_sigterm else job.failure_stop_timeout_ms, signum=None)
