"""Rebuilding the state of a server that knows less than its nodes, for example after a restart."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from rdzv.core import model
from rdzv.core.commands import Join, Resume
from rdzv.core.draft import Draft
from rdzv.core.events import NodeAdopted, RoundAdopted, RunBegan
from rdzv.core.life.leaving import give_up
from rdzv.core.life.runs import next_run
from rdzv.core.rounds import recovery_reports
from rdzv.core.rounds.ranks import longest_stop_ms
from rdzv.core.rounds.reachability import note_address, only_local
from rdzv.core.shared_map import put, without
from rdzv.structs import replace


def restore(membership: model.Membership, tuning: model.Tuning, now_ms: int) -> model.State:
    """Rebuild a job loaded from the store; nodes keep their seats while the server waits for them.

    Nodes that were waiting without a seat are forgotten; they join again when they reconnect.
    """
    state = model.State(membership, tuning)
    if membership.ended is not None or not membership.run:
        return state
    round_ = membership.round
    if round_ is None or (round_.end is not None and round_.end.settled):
        return replace(state, short_since_ms=now_ms)
    held = [p for p in round_.participants if p.node_id not in round_.gone]
    until_ms = now_ms + tuning.takeover_grace_ms
    done = frozenset(round_.succeeded)
    return replace(
        state,
        seats={p.node_id: model.Seat(p.incarnation, now_ms, p.node_id in done) for p in held},
        away={
            p.node_id: model.Away(
                now_ms, until_ms, firm=True, may_run=not p.instance.fence_after_ms
            )
            for p in held
        },
        stop_deadline_ms=None if round_.live else until_ms + longest_stop_ms(round_),
        loopback_machine=next((p.offer.machine for p in held if only_local(p.offer)), None),
        machines={p.offer.address: p.offer.machine for p in held},
    )


def adopt(work: Draft, command: Join | Resume, report: model.RecoveryReport) -> None:
    node_id, incarnation, assignment = command.node_id, command.incarnation, report.assignment
    if not recovery_reports.adoptable(work.state, command.run, assignment.round):
        return
    known = work.membership.round if command.run == work.membership.run else None
    if known is not None and known.number == assignment.round:
        held = model.placeholder(assignment.group_rank)
        if held not in work.state.seats or node_id in work.state.seats or node_id in known.gone:
            return
        filled = recovery_reports.further_report(known, command, report)
        if filled is None:
            return
        work.store_round(filled)
        seats, away = without(work.state.seats, held), without(work.state.away, held)
        work.put(of=held, seats=seats, away=away)
    else:
        round_ = recovery_reports.first_report(command, report, work.now_ms)
        if round_ is None:
            return
        if command.run != work.membership.run:
            _adopt_run(work, command, report.settings)
        _adopt_round(work, round_, assignment.tally)
    work.put(
        of=node_id,
        seats=put(work.state.seats, node_id, model.Seat(incarnation, work.now_ms)),
        waiting=without(work.state.waiting, node_id),
        stuck=without(work.state.stuck, node_id),
        away=without(work.state.away, node_id),
    )
    if only_local(report.offer):
        work.state = replace(work.state, loopback_machine=report.offer.machine)
    note_address(work, report.offer)
    superseded = without(work.state.superseded, node_id)
    work.state = replace(work.state, reported_ms=work.now_ms, superseded=superseded)
    work.events.append(NodeAdopted(node_id, assignment.round, assignment.group_rank))


def _adopt_run(work: Draft, command: Join | Resume, settings: model.Settings) -> None:
    """Continue a run that only its nodes know.

    Nodes waiting for the first round of the run known here wait for this run's next round.
    """
    run = command.run
    old, reason = work.membership, "its nodes reported it; this server had no memory of it"
    unstarted = work.open and old.round is None and old.settings == settings
    if work.open and not unstarted:
        work.close(model.Result.STOPPED, f"run {run} of the same job is alive", retry_sensible=True)
    membership = next_run(work.membership, run, settings, work.now_ms, command.owner)
    membership = replace(membership, secret=command.secret)
    work.state = replace(work.state, membership=membership)
    work.events.append(RunBegan(run, membership.run_number, reason))


def _adopt_round(work: Draft, round_: model.Round, tally: model.Tally | None) -> None:
    """Continue a round that replaces an older one. The reporting node does not have a seat yet."""
    until_ms = work.now_ms + work.state.tuning.takeover_grace_ms
    others = [p.node_id for p in round_.participants if model.is_placeholder(p.node_id)]
    superseded = {**work.state.superseded, **dict(_superseded(work.state, work.now_ms))}
    away = {n: held for n, held in work.state.away.items() if n not in work.state.seats}
    work.put(
        of=None,
        seats={node_id: model.Seat(0, work.now_ms) for node_id in others},
        away=away | {node_id: model.Away(work.now_ms, until_ms, firm=True) for node_id in others},
    )
    membership, nodes = work.membership, len(round_.participants)
    bounds = (min(membership.min_nodes, nodes), max(membership.max_nodes, nodes))
    work.store(
        replace(
            membership,
            round=round_,
            next_round=max(membership.next_round, round_.number + 1),
            restarts=recovery_reports.restarts_known(
                membership, round_.restarts, tally, work.now_ms
            ),
            spent=recovery_reports.spent_known(membership, tally),
            # A round outside the bounds must have been scaled by an operator. The new bounds are
            # unknown, so the known ones are widened to include the round.
            scaled=membership.scaled if bounds == membership.bounds else bounds,
        )
    )
    work.state = replace(
        work.state,
        stop_deadline_ms=None,
        last_leave=None,
        moved=model.UNMOVED,
        superseded=superseded,
    )
    work.events.append(RoundAdopted(round_))


def _superseded(state: model.State, now_ms: int) -> Iterable[tuple[str, model.Superseded]]:
    """Yield the nodes that may still run workers of the current round when another is adopted."""
    round_ = state.membership.round
    if round_ is None:
        return
    for node_id, seat in state.seats.items():
        away = state.away.get(node_id)
        # Of the away nodes, include only those to which this server announced the round. Others may
        # come from an old copy of the store, and may be in the later round themselves or long gone.
        unheard = away is not None and seat.since_ms != round_.at_ms
        if not (unheard or seat.succeeded or model.is_placeholder(node_id)):
            hears_ms = max(now_ms, away.until_ms) if away else now_ms
            until_ms = hears_ms + longest_stop_ms(round_)
            yield node_id, model.Superseded(seat.incarnation, round_.number, until_ms)


def release_unreported_seats(work: Draft) -> bool:
    """Give up a place in an adopted round if no node has reported it in time.

    Places are kept while reports are still arriving, because those of a large job take time.
    """
    due = unreported_seat_due(work.state)
    if due is None or work.now_ms < due[1]:
        return False
    waited_s = work.state.tuning.takeover_grace_ms / 1000
    give_up(work, due[0], f"not heard within {waited_s:g} s after this server learned of it")
    return True


CLAIMS_QUIET_MS = 5_000
"""How long after the last report of an adopted round its unreported places are given up."""


def unreported_seat_due(state: model.State) -> tuple[str, int] | None:
    """Return a placeholder and the time at which it is given up, or None if none remain.

    All placeholders have the same deadline, so one is enough. This matters because a large job
    takes as many steps as it has seats.
    """
    round_ = state.membership.round
    if round_ is None or not round_.adopted:
        return None
    placeholders = (
        (node_id, away) for node_id, away in state.away.items() if model.is_placeholder(node_id)
    )
    first = next(placeholders, None)
    if first is None:
        return None
    return first[0], max(first[1].until_ms, state.reported_ms + CLAIMS_QUIET_MS)


_Dated = TypeVar(
    "_Dated", model.Departure, model.Failure, model.RoundEnd, model.SubmittedRun, model.Round
)


def not_after(membership: model.Membership, now_ms: int) -> model.Membership:
    """Return the membership with all future times set to now, unless its run has ended.

    A time can be in the future if the clock was set back, or was ahead when the time was stored.
    Ages would then stand still, and no restart would be forgotten, until the clock caught up. A
    membership without future times is returned unchanged.
    """
    if membership.ended is not None or max(_times(membership)) <= now_ms:
        return membership

    def bounded(one: _Dated) -> _Dated:
        return replace(one, at_ms=min(one.at_ms, now_ms))

    resumed_at_ms, round_ = membership.resumed_at_ms, membership.round
    if round_ is not None:
        if (end := round_.end) is not None:
            end = replace(bounded(end), failures=tuple(map(bounded, end.failures)))
        round_ = replace(bounded(round_), end=end)
    submission = membership.submission
    return replace(
        membership,
        began_at_ms=min(membership.began_at_ms, now_ms),
        resumed_at_ms=None if resumed_at_ms is None else min(resumed_at_ms, now_ms),
        restarts=tuple(min(at_ms, now_ms) for at_ms in membership.restarts),
        departures=tuple(map(bounded, membership.departures)),
        last_failures=tuple(map(bounded, membership.last_failures)),
        round=round_,
        submission=None if submission is None else bounded(submission),
    )


def _times(membership: model.Membership) -> Iterable[int]:
    yield membership.began_at_ms
    yield membership.resumed_at_ms or 0
    yield from membership.restarts
    yield from (departure.at_ms for departure in membership.departures)
    yield from (failure.at_ms for failure in membership.last_failures)
    if membership.submission is not None:
        yield membership.submission.at_ms
    if (round_ := membership.round) is not None:
        yield round_.at_ms
        if (end := round_.end) is not None:
            yield end.at_ms
            yield from (failure.at_ms for failure in end.failures)
