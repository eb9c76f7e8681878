"""One job's rendezvous: command rules, followed by state rules until a fixed point is reached.

A command rule records what the command reports. The state rules (release seats, settle the charge,
complete a round, ...) then apply one at a time until none applies. Time enters only through
`now_ms`; `Transition.wake_at_ms` is when a rule may next apply without a command.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rdzv.core import commands
from rdzv.core.draft import Draft, Ignored
from rdzv.core.events import Event
from rdzv.core.life import failures, forming, joining, leaving, restoring, runs, submitted_jobs
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


def step(state: State, command: commands.Command, now_ms: int) -> Transition:
    """Apply one command, and then the state rules until none applies.

    Guarantees: the same state, command and time produce the same transition; a command that is
    immediately repeated has no effect; a `Tick` before `wake_at_ms` has no effect.

    Raises:
        RendezvousError: the command is refused, and nothing has changed; see the `refuse_*`
            functions of `life`.

    """
    membership = restoring.not_after(state.membership, now_ms)
    if membership is not state.membership:
        state = replace(state, membership=membership)
    work = Draft(state, now_ms)
    ignored = _apply(work, command)
    while any(rule(work) for rule in STATE_RULES):
        pass
    wake_at_ms = _wake_at_ms(work.state, now_ms)
    return Transition(work.state, tuple(work.events), wake_at_ms, ignored)


def _apply(work: Draft, command: commands.Command) -> Ignored | None:
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


OfSubmission = commands.Place | commands.Withdraw | commands.Decline | commands.GiveUp


def run_is_open(state: State, _: object) -> Ignored | None:
    """Require a run that has not ended."""
    return None if state.run_is_open else Ignored.NO_OPEN_RUN


def of_this_run(state: State, command: commands.OfRound | OfSubmission) -> Ignored | None:
    """Ignore a command unless it names the current run."""
    return None if command.run == state.membership.run else Ignored.OTHER_RUN


def of_run_joined(state: State, command: commands.Leave) -> Ignored | None:
    """Require that the node name the run it joined, or no run if it does not know the run yet."""
    if command.run in ("", state.membership.run):
        return None
    joined = joining.joined_replaced_run(state, command.node_id, command.incarnation, command.run)
    return None if joined else Ignored.OTHER_RUN


def of_latest_round(state: State, command: commands.OfRound) -> Ignored | None:
    """Require that the command name the latest round, whether live or ended."""
    round_ = state.membership.round
    return None if round_ is not None and round_.number == command.round else Ignored.OTHER_ROUND


def from_holder(state: State, command: commands.OfNode) -> Ignored | None:
    """Require that the command be from, or about, the instance that has the node's place."""
    held = state.incarnation(command.node_id)
    if held is None:
        return Ignored.NOT_PRESENT
    return None if held == command.incarnation else Ignored.OTHER_INSTANCE


def from_seat(state: State, command: commands.OfRound) -> Ignored | None:
    """Require that the node have a seat in the latest round."""
    return None if command.node_id in state.seats else Ignored.NO_SEAT


def from_store_host(state: State, command: commands.OfRound) -> Ignored | None:
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
    commands.Join: CommandRule(joining.join),
    commands.Resume: CommandRule(joining.resume),
    commands.Fail: CommandRule(failures.fail, (*_OF_ROUND, from_seat)),
    commands.Succeed: CommandRule(leaving.succeed, (run_is_open, of_this_run, of_latest_round)),
    commands.Leave: CommandRule(leaving.leave, (*_FROM_HOLDER, of_run_joined)),
    commands.ReportStuck: CommandRule(leaving.report_stuck, (*_OF_ROUND, from_seat)),
    commands.ReportStoreHost: CommandRule(
        failures.report_store_host, (*_OF_ROUND, from_store_host)
    ),
    commands.MarkAway: CommandRule(leaving.mark_away, _FROM_HOLDER),
    commands.MarkBack: CommandRule(
        lambda work, command: leaving.mark_back(work, command.node_id), _FROM_HOLDER
    ),
    commands.MarkLost: CommandRule(leaving.mark_lost, _FROM_HOLDER),
    commands.MarkHeard: CommandRule(
        lambda work, command: leaving.note_heard(work, command.node_id)
    ),
    commands.Stop: CommandRule(runs.stop),
    commands.Restart: CommandRule(runs.restart),
    commands.Scale: CommandRule(runs.scale),
    commands.Submit: CommandRule(submitted_jobs.submit),
    commands.Place: CommandRule(submitted_jobs.choose_nodes, _OF_SUBMISSION),
    commands.Withdraw: CommandRule(submitted_jobs.take_back, _OF_SUBMISSION),
    commands.Bar: CommandRule(submitted_jobs.bar_nodes),
    commands.Decline: CommandRule(submitted_jobs.decline_job, _OF_SUBMISSION),
    commands.GiveUp: CommandRule(
        lambda work, command: work.close(Result.FAILED, command.reason), _OF_SUBMISSION
    ),
    commands.Tick: CommandRule(lambda work, command: None),
}
"""The protocol. docs/protocol.md lists its outcomes, command by command."""

STATE_RULES: tuple[Callable[[Draft], bool], ...] = (
    leaving.release_away_seats,
    restoring.release_unreported_seats,
    leaving.release_unstopped_seats,
    submitted_jobs.withdraw_barred,
    runs.succeed_run,
    failures.settle_charge,
    runs.close_when_stopped,
    runs.close_when_all_left,
    forming.count_ready,
    forming.complete_round,
    forming.admit_newcomers,
    forming.time_out_joining,
)


def _wake_at_ms(state: State, now_ms: int) -> int | None:
    membership = state.membership
    if not membership.run or membership.ended is not None:
        return None
    due: list[int | None] = [due_ms for _, due_ms in leaving.away_seats_due(state)]
    if (unreported := restoring.unreported_seat_due(state)) is not None:
        due.append(unreported[1])
    if state.stop_deadline_ms is not None and leaving.any_seat_has_deadline(state):
        due.append(state.stop_deadline_ms)
    if membership.stopping and not state.seats:
        due.append(leaving.unheard_until_ms(state))
    elif membership.round is None or not membership.round.live:
        due.append(forming.completion_due_ms(state))
    if state.short_since_ms is not None and not state.seats:
        due.append(state.short_since_ms + membership.settings.join_timeout_ms)
    due.append(forming.next_newcomers_ms(state, now_ms))
    return min((due_ms for due_ms in due if due_ms is not None), default=None)
