"""One job's rendezvous: command rules, followed by state rules until a fixed point is reached.

`step()` is a pure function from a state, a command and the time to the next state and its events. A
command rule records what the command reports. The state rules (release seats, settle the charge,
complete a round, ...) then apply one at a time until none applies. Time enters only through
`now_ms`; `Transition.wake_at_ms` is when a rule may next apply without a command. The package's
docstring describes the life of a job.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rdzv.core.commands import (
    Bar,
    Command,
    Decline,
    Fail,
    GiveUp,
    Join,
    Leave,
    MarkAway,
    MarkBack,
    MarkHeard,
    MarkLost,
    OfNode,
    OfRound,
    Place,
    ReportStoreHost,
    ReportStuck,
    Restart,
    Resume,
    Scale,
    Stop,
    Submit,
    Succeed,
    Tick,
    Withdraw,
)
from rdzv.core.draft import Draft, Ignored
from rdzv.core.events import Event
from rdzv.core.life.failures import fail, report_store_host, settle_charge
from rdzv.core.life.forming import (
    admit_newcomers,
    complete_round,
    completion_due_ms,
    count_ready,
    next_newcomers_ms,
    time_out_joining,
)
from rdzv.core.life.joining import join, joined_replaced_run, resume
from rdzv.core.life.leaving import (
    any_seat_has_deadline,
    away_seats_due,
    leave,
    mark_away,
    mark_back,
    mark_lost,
    note_heard,
    release_away_seats,
    release_unstopped_seats,
    report_stuck,
    succeed,
    unheard_until_ms,
)
from rdzv.core.life.restoring import not_after, release_unreported_seats, unreported_seat_due
from rdzv.core.life.runs import (
    close_when_all_left,
    close_when_stopped,
    restart,
    scale,
    stop,
    succeed_run,
)
from rdzv.core.life.submitted_jobs import (
    bar_nodes,
    choose_nodes,
    decline_job,
    submit,
    take_back,
    withdraw_barred,
)
from rdzv.core.model import Result, State
from rdzv.structs import replace, struct


@struct(frozen=True)
class Transition:
    """The next state, the events, and when the next tick is due, or None if no tick is due."""

    state: State
    events: tuple[Event, ...] = ()
    wake_at_ms: int | None = None
    ignored: Ignored | None = None
    """The reason why the command itself had no effect. State rules may still have applied."""


def step(state: State, command: Command, now_ms: int) -> Transition:
    """Apply one command, and then the state rules until none applies.

    Guarantees: the same state, command and time produce the same transition; a command that is
    immediately repeated has no effect; a `Tick` before `wake_at_ms` has no effect.

    Raises:
        RendezvousError: the command is refused, and nothing has changed; see the `refuse_*`
            functions of `life`.

    """
    membership = not_after(state.membership, now_ms)
    if membership is not state.membership:
        state = replace(state, membership=membership)
    work = Draft(state, now_ms)
    ignored = _apply(work, command)
    while any(rule(work) for rule in STATE_RULES):
        pass
    wake_at_ms = _wake_at_ms(work.state, now_ms)
    return Transition(work.state, tuple(work.events), wake_at_ms, ignored)


def _apply(work: Draft, command: Command) -> Ignored | None:
    """Apply a command's rule, unless one of its conditions does not hold."""
    rule = COMMAND_RULES[type(command)]
    for condition in rule.conditions:
        if (reason := condition(work.state, command)) is not None:
            return reason
    return rule.effect(work, command)


@struct(frozen=True)
class CommandRule:
    """The handling of one command, which takes effect only if all conditions hold.

    An effect may raise an error to refuse the command, or return the reason for ignoring it.
    """

    effect: Callable[[Draft, Any], Ignored | None]
    conditions: tuple[Callable[[State, Any], Ignored | None], ...] = ()


OfSubmission = Place | Withdraw | Decline | GiveUp


def run_is_open(state: State, _: object) -> Ignored | None:
    """Require a run that has not ended."""
    return None if state.run_is_open else Ignored.NO_OPEN_RUN


def of_this_run(state: State, command: OfRound | OfSubmission) -> Ignored | None:
    """Ignore a command unless it names the current run."""
    return None if command.run == state.membership.run else Ignored.OTHER_RUN


def of_run_joined(state: State, command: Leave) -> Ignored | None:
    """Require that the node name the run it joined, or no run if it does not know the run yet."""
    if command.run in ("", state.membership.run):
        return None
    joined = joined_replaced_run(state, command.node_id, command.incarnation, command.run)
    return None if joined else Ignored.OTHER_RUN


def of_latest_round(state: State, command: OfRound) -> Ignored | None:
    """Require that the command name the latest round, whether live or ended."""
    round_ = state.membership.round
    return None if round_ is not None and round_.number == command.round else Ignored.OTHER_ROUND


def from_holder(state: State, command: OfNode) -> Ignored | None:
    """Require that the command be from, or about, the instance that has the node's place."""
    held = state.incarnation(command.node_id)
    if held is None:
        return Ignored.NOT_PRESENT
    return None if held == command.incarnation else Ignored.OTHER_INSTANCE


def from_seat(state: State, command: OfRound) -> Ignored | None:
    """Require that the node have a seat in the latest round."""
    return None if command.node_id in state.seats else Ignored.NO_SEAT


def from_store_host(state: State, command: OfRound) -> Ignored | None:
    """Require that the node, as GROUP_RANK 0, host the c10d store of the latest round."""
    round_ = state.membership.round
    first = round_.participants[0].node_id if round_ is not None else None
    return None if command.node_id == first else Ignored.NOT_STORE_HOST


def of_submitted_run(state: State, _: object) -> Ignored | None:
    """Require that the server choose the nodes of this run."""
    return None if state.membership.submission is not None else Ignored.NOT_SUBMITTED


_FROM_HOLDER = (run_is_open, from_holder)
_OF_ROUND = (*_FROM_HOLDER, of_this_run, of_latest_round)
_OF_SUBMISSION = (run_is_open, of_submitted_run, of_this_run)

COMMAND_RULES: Mapping[type, CommandRule] = {
    Join: CommandRule(join),
    Resume: CommandRule(resume),
    Fail: CommandRule(fail, (*_OF_ROUND, from_seat)),
    Succeed: CommandRule(succeed, (run_is_open, of_this_run, of_latest_round)),
    Leave: CommandRule(leave, (*_FROM_HOLDER, of_run_joined)),
    ReportStuck: CommandRule(report_stuck, (*_OF_ROUND, from_seat)),
    ReportStoreHost: CommandRule(report_store_host, (*_OF_ROUND, from_store_host)),
    MarkAway: CommandRule(mark_away, _FROM_HOLDER),
    MarkBack: CommandRule(lambda work, command: mark_back(work, command.node_id), _FROM_HOLDER),
    MarkLost: CommandRule(mark_lost, _FROM_HOLDER),
    MarkHeard: CommandRule(lambda work, command: note_heard(work, command.node_id)),
    Stop: CommandRule(stop),
    Restart: CommandRule(restart),
    Scale: CommandRule(scale),
    Submit: CommandRule(submit),
    Place: CommandRule(choose_nodes, _OF_SUBMISSION),
    Withdraw: CommandRule(take_back, _OF_SUBMISSION),
    Bar: CommandRule(bar_nodes),
    Decline: CommandRule(decline_job, _OF_SUBMISSION),
    GiveUp: CommandRule(
        lambda work, command: work.close(Result.FAILED, command.reason), _OF_SUBMISSION
    ),
    Tick: CommandRule(lambda work, command: None),
}
"""The protocol. docs/protocol.md lists its outcomes, command by command."""

STATE_RULES: tuple[Callable[[Draft], bool], ...] = (
    release_away_seats,
    release_unreported_seats,
    release_unstopped_seats,
    withdraw_barred,
    succeed_run,
    settle_charge,
    close_when_stopped,
    close_when_all_left,
    count_ready,
    complete_round,
    admit_newcomers,
    time_out_joining,
)


def _wake_at_ms(state: State, now_ms: int) -> int | None:
    """Return when a state rule may next apply without a command, or None."""
    membership = state.membership
    if not membership.run or membership.ended is not None:
        return None
    due: list[int | None] = [due_ms for _, due_ms in away_seats_due(state)]
    if (unreported := unreported_seat_due(state)) is not None:
        due.append(unreported[1])
    if state.stop_deadline_ms is not None and any_seat_has_deadline(state):
        due.append(state.stop_deadline_ms)
    if membership.stopping and not state.seats:
        due.append(unheard_until_ms(state))
    elif membership.round is None or not membership.round.live:
        due.append(completion_due_ms(state))
    if state.short_since_ms is not None and not state.seats:
        due.append(state.short_since_ms + membership.settings.join_timeout_ms)
    due.append(next_newcomers_ms(state, now_ms))
    return min((due_ms for due_ms in due if due_ms is not None), default=None)
