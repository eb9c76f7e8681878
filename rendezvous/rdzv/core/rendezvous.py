"""One job's rendezvous: command rules, then state rules to a fixed point.

`step()` is a pure function from a state, a command and the time to the next state and what has
happened. A command rule records what was said; the state rules then draw every conclusion that
holds (release seats, settle the charge, complete a round, ...), one at a time, until none applies.
Time enters only through `now_ms`; `Transition.wake_at_ms` says when a rule may next apply without
any command. The package's docstring tells the story of a job.
"""

from __future__ import annotations

from collections.abc import Callable

from rdzv.core.absences import mark_away, mark_back, note_heard, unheard_until_ms
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
from rdzv.core.draft import Draft
from rdzv.core.ending import fail, report_store_host, settle_charge
from rdzv.core.events import Event
from rdzv.core.forming import (
    admit_newcomers,
    complete_round,
    completion_due_ms,
    count_ready,
    next_newcomers_ms,
    time_out_joining,
)
from rdzv.core.joining import join
from rdzv.core.leaving import (
    away_seats_due,
    give_up,
    leave,
    release_away_seats,
    release_unstopped_seats,
    report_stuck,
    seats_with_deadline,
    succeed,
)
from rdzv.core.model import State
from rdzv.core.operator_commands import obey_operator
from rdzv.core.rebuilding import release_unclaimed_seats, resume, unclaimed_seat_due
from rdzv.core.refusals import has_gone_along
from rdzv.core.runs import close_when_all_left, close_when_stopped, succeed_run
from rdzv.core.submitting import apply_to_submitted, submit, withdraw_barred
from rdzv.core.times_ahead import not_after
from rdzv.structs import replace, struct


@struct(frozen=True)
class Transition:
    """The next state, what happened, and when to tick at the latest."""

    state: State
    events: tuple[Event, ...] = ()
    wake_at_ms: int | None = None


def step(state: State, command: Command, now_ms: int) -> Transition:
    """Apply one command and draw every conclusion from it.

    Guarantees: the same state, command and time give the same transition; a command that is
    repeated at once changes nothing; a `Tick` before `wake_at_ms` changes nothing.

    Raises:
        InvalidRequestError: the node could not be reached by the others as it is.
        SettingsMismatchError: the job was launched with other settings.
        RendezvousClosedError: the run has ended, and this node may not begin another.
        JobExistsError: the job is to be submitted while a run of it has not ended.
        RunStoppingError: the last run is being stopped; to be tried again.
        NodeSupersededError: a newer incarnation speaks for this node.
        UnknownNodeError: a running node belongs to a job that is not known.
        DeniedError: the node does not know the secret of the job.

    """
    membership = not_after(state.membership, now_ms)
    if membership is not state.membership:
        state = replace(state, membership=membership)
    work = Draft(state, now_ms)
    _apply(work, command)
    while any(rule(work) for rule in _STATE_RULES):
        pass
    return Transition(work.state, tuple(work.events), _wake_at_ms(work.state, now_ms))


def _apply(work: Draft, command: Command) -> None:
    match command:
        case Join():
            join(work, command)
        case Resume():
            resume(work, command)
        case Stop() | Restart() | Scale():
            obey_operator(work, command)
        case Submit():
            submit(work, command)
        case Place() | Withdraw() | Decline() | GiveUp():
            apply_to_submitted(work, command)
        case MarkHeard():
            note_heard(work, command.node_id)
        case Bar():
            work.state = replace(work.state, barred=dict(command.barred))
        case Tick():
            pass
        case Succeed():
            if work.open and command.run == work.membership.run:
                succeed(work, command)
        case _:
            held = work.state.incarnation(command.node_id)
            if work.open and held == command.incarnation:
                _apply_to_present(work, command)


def _apply_to_present(
    work: Draft,
    command: Fail | Leave | ReportStuck | ReportStoreHost | MarkAway | MarkBack | MarkLost,
) -> None:
    """Apply what concerns a node that is present, in the incarnation that holds its place."""
    match command:
        case MarkAway():
            mark_away(work, command)
        case MarkBack():
            mark_back(work, command.node_id)
        case MarkLost():
            give_up(work, command.node_id, command.reason, heard=command.heard)
        case Leave(run=""):
            leave(work, command)
        case Leave() if has_gone_along(work, command):
            leave(work, command)
        case _ if command.run != work.membership.run:
            pass
        case Fail():
            fail(work, command)
        case Leave():
            leave(work, command)
        case ReportStuck():
            report_stuck(work, command)
        case ReportStoreHost():
            report_store_host(work, command)


_STATE_RULES: tuple[Callable[[Draft], bool], ...] = (
    release_away_seats,
    release_unclaimed_seats,
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
    """When a state rule may next apply without a command."""
    membership = state.membership
    if not membership.run or membership.ended is not None:
        return None
    due: list[int | None] = [due_ms for _, due_ms in away_seats_due(state)]
    if (unclaimed := unclaimed_seat_due(state)) is not None:
        due.append(unclaimed[1])
    if state.stop_deadline_ms is not None and any(seats_with_deadline(state)):
        due.append(state.stop_deadline_ms)
    if membership.stopping and not state.seats:
        due.append(unheard_until_ms(state))
    elif membership.round is None or not membership.round.live:
        due.append(completion_due_ms(state))
    if state.short_since_ms is not None and not state.seats:
        due.append(state.short_since_ms + membership.settings.join_timeout_ms)
    due.append(next_newcomers_ms(state, now_ms))
    return min((due_ms for due_ms in due if due_ms is not None), default=None)
