"""One job's rendezvous: command rules, then state rules to a fixed point.

`step()` is a pure function from a state, a command and the time to the next state and what has
happened. A command rule records what was said; the state rules then draw every conclusion that
holds (release seats, settle the charge, complete a round, ...), one at a time, until none applies.
Time enters only through `now_ms`; `Transition.wake_at_ms` says when a rule may next apply without
any command. The package's docstring tells the story of a job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import TypeVar

from rdzv.core.adopt import (
    adoptable,
    first_claim,
    further_claim,
    restarts_known,
    spent_known,
)
from rdzv.core.budgets import backoff_ms, exceeded, further, spend
from rdzv.core.commands import (
    Bar,
    Command,
    Decline,
    Fail,
    FailureReport,
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
from rdzv.core.events import (
    Event,
    JobQueued,
    JobScaled,
    LastCallBegan,
    NodeAdopted,
    NodeCameBack,
    NodeDeclined,
    NodeJoined,
    NodeLeaving,
    NodeLeft,
    NodeLost,
    NodesPlaced,
    NodeStopped,
    NodeStuck,
    NodeSucceeded,
    NodesWithdrawn,
    NodeWentAway,
    RoundAdopted,
    RoundCompleted,
    RoundEnded,
    RoundSettled,
    RunBegan,
    RunEnded,
    WorkerFailed,
)
from rdzv.core.model import (
    UNMOVED,
    Away,
    Cause,
    Claim,
    Departure,
    Ended,
    EndedRun,
    Failure,
    LeaveCause,
    Membership,
    NodeState,
    Offer,
    Participant,
    Result,
    Round,
    RoundEnd,
    ScaleUp,
    Seat,
    Settings,
    State,
    Stuck,
    Submission,
    Superseded,
    Tally,
    Tuning,
    Waiting,
    is_stand_in,
    stand_in,
)
from rdzv.core.ranks import assign_seats
from rdzv.core.root_cause import describe_failure, keep_earliest, root_cause
from rdzv.core.submissions import awaited, decline, place, withdraw, withdrawable
from rdzv.core.times_ahead import not_after
from rdzv.core.words import duration, listed
from rdzv.errors import (
    DeniedError,
    InvalidRequestError,
    JobExistsError,
    NodeSupersededError,
    RendezvousClosedError,
    RunStoppingError,
    SettingsMismatchError,
    UnknownNodeError,
)
from rdzv.structs import field_names, replace, struct

MAX_DEPARTURES = 64
"""How many losses and leaves a job remembers."""
MAX_STORE_FAILURES = 3
"""After so many store hosts that failed in a row, RANK 0's worker serves the store itself."""
MAX_EARLIER_RUNS = 16
"""How many earlier runs a job remembers the end of."""


@struct(frozen=True)
class Transition:
    """The next state, what happened, and when to tick at the latest."""

    state: State
    events: tuple[Event, ...] = ()
    wake_at_ms: int | None = None


def vacant(rdzv_id: str, tuning: Tuning) -> State:
    """Return the state of a job that nobody has joined yet. It is never stored."""
    nobody = Membership(rdzv_id, run="", run_number=0, settings=Settings(1, 1), began_at_ms=0)
    return State(nobody, tuning)


def restore(membership: Membership, tuning: Tuning, now_ms: int) -> State:
    """Rebuild a job after a load: whoever held a seat still holds it, and is waited for.

    Who waited without a seat is forgotten; such nodes say so again when they reconnect.
    """
    state = State(membership, tuning)
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
        seats={p.node_id: Seat(p.incarnation, now_ms, p.node_id in done) for p in held},
        away={
            p.node_id: Away(now_ms, until_ms, firm=True, may_run=not p.instance.fence_after_ms)
            for p in held
        },
        stop_deadline_ms=None if round_.live else until_ms + _longest_stop_ms(round_, tuning),
        loopback_machine=next((p.offer.machine for p in held if _only_local(p.offer)), None),
    )


def ended_run(state: State, run: str) -> Ended | None:
    """Return how the run of this uid ended, if whoever carries it must hear that it did.

    A run that is not known beside one that is present was superseded; None for the present run,
    for a fresh node (empty `run`), and where no run is known to compare with.
    """
    membership = state.membership
    if not run or not membership.run:
        return None
    if run == membership.run:
        return membership.ended
    for earlier in membership.earlier:
        if earlier.run == run:
            return earlier.ended
    reason = f"run {run} is not known here; the present run of {membership.rdzv_id} is another"
    return Ended(Result.STOPPED, reason, membership.began_at_ms)


def went_along(state: State, node_id: str, incarnation: int, run: str) -> bool:
    """Say whether a node that had joined the run of this uid waits in the present one.

    That was adopted in the place of its own, which had begun no round, and of which nothing else is
    left. It may not have heard so.
    """
    waiting, membership = state.waiting.get(node_id), state.membership
    if waiting is None or waiting.incarnation != incarnation or run in ("", membership.run):
        return False
    return all(earlier.run != run for earlier in membership.earlier)


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
    work = _Step(state, now_ms)
    _apply(work, command)
    while any(rule(work) for rule in _STATE_RULES):
        pass
    return Transition(work.state, tuple(work.events), _wake_at_ms(work.state, now_ms))


@dataclass(slots=True)
class _Step:
    """The state in the making. Only `step` sees it change."""

    state: State
    now_ms: int
    events: list[Event] = field(default_factory=list)

    @property
    def membership(self) -> Membership:
        return self.state.membership

    @property
    def open(self) -> bool:
        """Whether there is a run that is not closed."""
        return bool(self.membership.run) and self.membership.ended is None

    def put(
        self,
        *,
        seats: Mapping[str, Seat] | None = None,
        waiting: Mapping[str, Waiting] | None = None,
        stuck: Mapping[str, Stuck] | None = None,
        away: Mapping[str, Away] | None = None,
    ) -> None:
        """Replace who is present."""
        self.state = replace(
            self.state,
            seats=self.state.seats if seats is None else seats,
            waiting=self.state.waiting if waiting is None else waiting,
            stuck=self.state.stuck if stuck is None else stuck,
            away=self.state.away if away is None else away,
        )

    def store(self, membership: Membership) -> None:
        """Replace the durable half."""
        self.state = replace(self.state, membership=membership)

    def store_round(self, round_: Round) -> None:
        self.store(replace(self.membership, round=round_))


_V = TypeVar("_V")


def _without(mapping: Mapping[str, _V], key: str) -> dict[str, _V]:
    others = dict(mapping)
    others.pop(key, None)
    return others


# =================================================================== command rules


def _apply(work: _Step, command: Command) -> None:
    match command:
        case Join():
            _join(work, command)
        case Resume():
            _resume(work, command)
        case Stop() | Restart() | Scale():
            _obey_operator(work, command)
        case Submit():
            _submit(work, command)
        case Place() | Withdraw() | Decline() | GiveUp():
            _apply_to_submitted(work, command)
        case MarkHeard():
            _note_heard(work, command.node_id)
        case Bar():
            work.state = replace(work.state, barred=dict(command.barred))
        case Tick():
            pass
        case Succeed():
            if work.open and command.run == work.membership.run:
                _succeed(work, command)
        case _:
            held = work.state.incarnation(command.node_id)
            if work.open and held == command.incarnation:
                _apply_to_present(work, command)


def _apply_to_present(
    work: _Step,
    command: Fail | Leave | ReportStuck | ReportStoreHost | MarkAway | MarkBack | MarkLost,
) -> None:
    """Apply what concerns a node that is present, in the incarnation that holds its place."""
    match command:
        case MarkAway():
            _mark_away(work, command)
        case MarkBack():
            _mark_back(work, command.node_id)
        case MarkLost():
            _give_up(work, command.node_id, command.reason, heard=command.heard)
        case Leave(run=""):
            _leave(work, command)
        case Leave() if _went_along(work, command):
            _leave(work, command)
        case _ if command.run != work.membership.run:
            pass
        case Fail():
            _fail(work, command)
        case Leave():
            _leave(work, command)
        case ReportStuck():
            _report_stuck(work, command)
        case ReportStoreHost():
            _report_store_host(work, command)


def _join(work: _Step, command: Join) -> None:
    _check_secret(work, command)
    node_id = command.node_id
    claim = command.claim
    if claim and claim.round == command.left_round and not _others_run_on(work.state, command):
        _adopt(work, command, claim)
    held = work.state.incarnation(node_id)
    if held is None:
        if work.open and work.membership.stopping and not command.run:
            raise RunStoppingError(
                f"the last run of {work.membership.rdzv_id} is being stopped; the next begins when "
                f"the workers on {listed((*work.state.seats, *unheard(work.state)))} are gone"
            )
        _admit(work, command)
        return
    _check_speaker(work, command)
    if command.run and not _went_along(work, command):
        _check_run(work, command)
    number = _round_to_stop(work.state, node_id)
    if number is not None and number == command.left_round:
        _confirm_stopped(work, command, number)
    elif held != command.incarnation:
        _give_up(work, node_id, "a new instance of the node took its place", heard=True)
        _admit(work, command)
    elif node_id in work.state.waiting:
        _wait(work, command, work.state.waiting[node_id].since_ms)


def _went_along(work: _Step, command: Join | Leave) -> bool:
    return went_along(work.state, command.node_id, command.incarnation, command.run)


def _others_run_on(state: State, command: Join) -> bool:
    """Whether nodes that are there run an earlier round than the one that this node has left.

    A server without memory has begun it, after it had waited for all others in vain. Nothing of the
    later round is left on this node; adopted, it would let the next begin beside those workers.
    """
    round_ = state.membership.round
    if round_ is None or command.run != state.membership.run or command.left_round is None:
        return False
    # Seats that were stored before a server started are younger than their round: they may be of
    # an old copy of the store, and their nodes in the later round, too.
    begun = (n for n, seat in state.seats.items() if seat.since_ms == round_.at_ms)
    there = any(node_id not in state.away and not is_stand_in(node_id) for node_id in begun)
    return there and command.left_round > round_.number


def _round_to_stop(state: State, node_id: str) -> int | None:
    """Say of which round a join would confirm that no worker is left on a present node.

    None where it has none, or has said that it leaves: then only a `Leave` confirms it.
    """
    if node_id in state.stuck:
        return state.stuck[node_id].round
    seat, round_ = state.seats.get(node_id), state.membership.round
    return round_.number if seat and round_ and not seat.leaving else None


def _check_speaker(work: _Step, command: Join | Resume) -> None:
    held = work.state.incarnation(command.node_id)
    if held is not None and command.incarnation < held:
        raise NodeSupersededError(
            f"a newer instance of node_id {command.node_id} has taken its place in "
            f"{work.membership.rdzv_id}; this one is superseded and must stop its workers"
        )


def _check_run(work: _Step, command: Join | Resume) -> None:
    ended = ended_run(work.state, command.run)
    if ended is not None:
        raise RendezvousClosedError(
            f"run {command.run} of {work.membership.rdzv_id} has ended: {ended.reason}"
        )


def _check_secret(work: _Step, command: Join | Resume) -> None:
    """Keep strangers out of a run: whoever takes part in it knows its secret, if it has one."""
    membership = work.membership
    if not work.open or membership.secret == command.secret:
        return
    if any(earlier.run == command.run for earlier in membership.earlier):
        # It is to hear how that run has ended; of this one it hears nothing.
        return
    if not membership.secret:
        difference = "it gives a job secret, and the job was begun without one"
    elif command.secret:
        difference = "its job secret is not that of the job"
    else:
        difference = "the job was begun with a job secret, and it gives none"
    raise DeniedError(
        f"{command.node_id} can not join {membership.rdzv_id}: {difference}. Launch all nodes of a "
        "job with the same RDZV_JOB_SECRET_FILE, or choose another --rdzv-id"
    )


def _admit(work: _Step, command: Join) -> None:
    """Admit a node that is not present, into this run or, if need be, a new one."""
    if command.run and work.membership.run:
        _check_run(work, command)
    if work.open and work.membership.submission and command.node_id in work.state.barred:
        # It was let go of, and is told so; this is the echo of a join.
        return
    if not work.open:
        _begin_run(work, command)
    elif command.settings != work.membership.settings:
        if work.state.anybody or command.run or work.membership.submission:
            raise _settings_mismatch(work.membership, command)
        _close(
            work, Result.STOPPED, "everyone was gone, and it was launched anew with other settings"
        )
        _begin_run(work, command)
    _check_reachable(work, command)
    if command.left_round is not None and command.left_round >= work.membership.next_round:
        work.store(replace(work.membership, next_round=command.left_round + 1))
    _wait(work, command, work.now_ms)
    offer = command.offer
    work.state = replace(work.state, newest_ms=work.now_ms, last_leave=None)
    work.events.append(
        NodeJoined(command.node_id, command.incarnation, offer.address, offer.local_world_size)
    )


def _begin_run(work: _Step, command: Join) -> None:
    old = work.membership
    if old.ended is not None and command.refuse_reuse:
        raise RendezvousClosedError(
            f"the last run of {old.rdzv_id} has {old.ended.result} ({old.ended.reason}) and "
            "reuse=false was given; choose another --rdzv-id"
        )
    run = command.run or command.new_run
    membership = _next_run(old, run, command.settings, work.now_ms, command.owner)
    membership = replace(membership, secret=command.secret)
    if command.run:
        membership = replace(membership, resumed_at_ms=work.now_ms)
    reason = "the first of this job"
    if old.ended:
        reason = f"the last one has {old.ended.result}: {old.ended.reason}"
    elif command.run:
        reason = "the server had no memory of it"
    if command.owner:
        reason += f"; begun by {command.owner}"
    work.state = State(membership, work.state.tuning)
    work.events.append(RunBegan(membership.run, membership.run_number, reason))


def _next_run(old: Membership, run: str, settings: Settings, now_ms: int, owner: str) -> Membership:
    """Return the run after another. The job stays its owner's, whoever begins this run."""
    ended = (EndedRun(old.run, old.ended),) if old.ended else ()
    return Membership(
        rdzv_id=old.rdzv_id,
        run=run,
        run_number=old.run_number + 1,
        settings=settings,
        began_at_ms=now_ms,
        next_round=old.next_round,
        earlier=(*old.earlier, *ended)[-MAX_EARLIER_RUNS:],
        owner=old.owner or owner,
    )


def _settings_mismatch(membership: Membership, command: Join) -> SettingsMismatchError:
    theirs, ours = command.settings, membership.settings
    differences = [
        f"{name.removesuffix('_ms')} is {_shown(name, here)} here and {_shown(name, there)} in the "
        "job"
        for name in field_names(Settings)
        if (here := getattr(theirs, name)) != (there := getattr(ours, name))
    ]
    return SettingsMismatchError(
        f"{command.node_id} can not join {membership.rdzv_id}: {'; '.join(differences)}. "
        "Launch all nodes of a job alike, or choose another --rdzv-id"
    )


def _shown(name: str, value: object) -> str:
    """Write a setting for people; some may be open."""
    if value is None:
        restarts = name == "max_restarts"
        return "left to each node's own agent (torchrun)" if restarts else "without limit"
    # As it is said on the command line, which knows seconds.
    return f"{value / 1000:g} s" if name.endswith("_ms") and isinstance(value, int) else str(value)


def _check_reachable(work: _Step, command: Join) -> None:
    """Refuse a node that only its own machine can reach beside one that is elsewhere."""
    offer, local_to = command.offer, work.state.loopback_machine
    if local_to == offer.machine:
        return
    if _only_local(offer):
        elsewhere = [n for n, there in _offers(work.state) if there.machine != offer.machine]
        if elsewhere:
            raise _unreachable(command.node_id, offer, elsewhere[0])
        work.state = replace(work.state, loopback_machine=offer.machine)
    elif local_to is not None:
        for node_id, there in _offers(work.state):
            if _only_local(there):
                raise _unreachable(node_id, there, command.node_id)
        work.state = replace(work.state, loopback_machine=None)


def _offers(state: State) -> Iterable[tuple[str, Offer]]:
    for node_id, waiting in state.waiting.items():
        yield node_id, waiting.offer
    for participant in state.membership.round.participants if state.membership.round else ():
        if participant.node_id in state.seats and not is_stand_in(participant.node_id):
            yield participant.node_id, participant.offer


def _unreachable(node_id: str, offer: Offer, other: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{node_id} offers the address {offer.address}, which {other} on another machine can not "
        f"reach; start {node_id} with --local-addr=ADDRESS, or let it reach the server by another "
        "address than loopback"
    )


def _only_local(offer: Offer) -> bool:
    return _is_loopback(offer.address) and not offer.host_name


def _is_loopback(address: str) -> bool:
    if address == "localhost":
        return True
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return False


def _wait(work: _Step, command: Join, since_ms: int) -> None:
    """Put a node among those that wait; it is connected, and speaks for itself from now on."""
    former = work.state.superseded.get(command.node_id)
    if former is not None and (
        former.incarnation != command.incarnation
        or (command.left_round is not None and command.left_round >= former.round)
    ):
        others = _without(work.state.superseded, command.node_id)
        work.state = replace(work.state, superseded=others)
    waiting = Waiting(command.incarnation, command.offer, since_ms, command.instance)
    if work.state.waiting.get(command.node_id) != waiting:
        work.put(waiting={**work.state.waiting, command.node_id: waiting})
    _note_heard(work, command.node_id)
    _mark_back(work, command.node_id)


def _confirm_stopped(work: _Step, command: Join, number: int) -> None:
    """No worker of the round is left on the node: its seat is free, and it waits for the next."""
    round_ = work.membership.round
    if command.node_id in work.state.seats and round_ is not None:
        failures = _failures(work, command.node_id, round_, command.failures)
        if command.fenced:
            # Whoever has failed meanwhile has lost its connections to the workers killed here.
            ago = f" {duration(command.fenced_age_ms)} ago" if command.fenced_age_ms else ""
            reason = (
                f"{command.node_id}: it was cut off, and has killed its workers{ago} "
                "(--fence-after)"
            )
            dead_ms = command.fenced_age_ms
            _end_round(work, Cause.NODE_LEFT, reason, broken=True, dead_ms=dead_ms)
            _charge_instead(work, Cause.NODE_LEFT, reason)
        elif round_.live and failures:
            _end_by_failure(work, failures)
        elif round_.live:
            reason = f"{command.node_id}: it has stopped its workers, and joins again"
            _end_round(work, Cause.NODE_LEFT, reason, broken=False)
        else:
            _add_failures(work, failures)
        work.state = replace(work.state, moved=further(work.state.moved, command.moved))
    work.put(
        seats=_without(work.state.seats, command.node_id),
        stuck=_without(work.state.stuck, command.node_id),
    )
    _wait(work, command, work.now_ms)
    work.events.append(NodeStopped(command.node_id, number))


def _resume(work: _Step, command: Resume) -> None:
    """Hand a seat to the incarnation that speaks for its workers now."""
    _check_secret(work, command)
    if command.claim is not None:
        _adopt(work, command, command.claim)
    if not work.membership.run:
        raise UnknownNodeError(
            f"{work.membership.rdzv_id} is not known here; {command.node_id} says that it runs "
            f"round {command.round} of it"
        )
    _check_run(work, command)
    _check_speaker(work, command)
    seat = work.state.seats.get(command.node_id)
    round_ = work.membership.round
    if seat is None or round_ is None or command.round != round_.number:
        return
    if seat.incarnation != command.incarnation:
        moved = replace(seat, incarnation=command.incarnation)
        work.put(seats={**work.state.seats, command.node_id: moved})
    _mark_back(work, command.node_id)


def _adopt(work: _Step, command: Join | Resume, claim: Claim) -> None:
    """Take over a round that is not known here, or a place in it that nobody has claimed yet."""
    node_id, incarnation = command.node_id, command.incarnation
    if not adoptable(work.state, command.run, claim.round):
        return
    known = work.membership.round if command.run == work.membership.run else None
    if known is not None and known.number == claim.round:
        held = stand_in(claim.group_rank)
        if held not in work.state.seats or node_id in work.state.seats or node_id in known.gone:
            return
        filled = further_claim(known, command, claim)
        if filled is None:
            return
        work.store_round(filled)
        work.put(seats=_without(work.state.seats, held), away=_without(work.state.away, held))
    else:
        round_ = first_claim(command, claim, work.now_ms)
        if round_ is None:
            return
        if command.run != work.membership.run:
            _adopt_run(work, command, claim.settings)
        _adopt_round(work, round_, claim.tally)
    work.put(
        seats={**work.state.seats, node_id: Seat(incarnation, work.now_ms)},
        waiting=_without(work.state.waiting, node_id),
        stuck=_without(work.state.stuck, node_id),
        away=_without(work.state.away, node_id),
    )
    if _only_local(claim.offer):
        work.state = replace(work.state, loopback_machine=claim.offer.machine)
    superseded = _without(work.state.superseded, node_id)
    work.state = replace(work.state, claimed_ms=work.now_ms, superseded=superseded)
    work.events.append(NodeAdopted(node_id, claim.round, claim.group_rank))


def _adopt_run(work: _Step, command: Join | Resume, settings: Settings) -> None:
    """Go on with a run that its nodes know. Who waits for a first round waits for its next one."""
    run = command.run
    old, reason = work.membership, "its nodes told of it; this server had no memory of it"
    unstarted = work.open and old.round is None and old.settings == settings
    if work.open and not unstarted:
        _close(work, Result.STOPPED, f"run {run} of the same job is alive", retry_sensible=True)
    membership = _next_run(work.membership, run, settings, work.now_ms, command.owner)
    membership = replace(membership, secret=command.secret)
    work.state = replace(work.state, membership=membership)
    work.events.append(RunBegan(run, membership.run_number, reason))


def _adopt_round(work: _Step, round_: Round, tally: Tally | None) -> None:
    """Go on with a round, in place of an older one. Its first claim is still to take its seat."""
    until_ms = work.now_ms + work.state.tuning.takeover_grace_ms
    others = [p.node_id for p in round_.participants if is_stand_in(p.node_id)]
    superseded = {**work.state.superseded, **dict(_superseded(work.state, work.now_ms))}
    away = {n: held for n, held in work.state.away.items() if n not in work.state.seats}
    work.put(
        seats={node_id: Seat(0, work.now_ms) for node_id in others},
        away=away | {node_id: Away(work.now_ms, until_ms, firm=True) for node_id in others},
    )
    membership, nodes = work.membership, len(round_.participants)
    bounds = (min(membership.min_nodes, nodes), max(membership.max_nodes, nodes))
    work.store(
        replace(
            membership,
            round=round_,
            next_round=max(membership.next_round, round_.number + 1),
            restarts=restarts_known(membership, round_.restarts, tally, work.now_ms),
            spent=spent_known(membership, tally),
            # What is outside the bounds was scaled by an operator; how far is not known.
            scaled=membership.scaled if bounds == membership.bounds else bounds,
        )
    )
    work.state = replace(
        work.state,
        stop_deadline_ms=None,
        last_leave=None,
        moved=UNMOVED,
        superseded=superseded,
    )
    work.events.append(RoundAdopted(round_))


def _superseded(state: State, now_ms: int) -> Iterable[tuple[str, Superseded]]:
    """Name who may run workers of the present round, and until when, if a later one is adopted."""
    round_ = state.membership.round
    if round_ is None:
        return
    for node_id, seat in state.seats.items():
        away = state.away.get(node_id)
        # Of who is away only those that this server has told of the round: others may be of an old
        # copy of the store, and in the later round themselves, or gone for long.
        unheard = away is not None and seat.since_ms != round_.at_ms
        if not (unheard or seat.succeeded or is_stand_in(node_id)):
            hears_ms = max(now_ms, away.until_ms) if away else now_ms
            until_ms = hears_ms + _longest_stop_ms(round_, state.tuning)
            yield node_id, Superseded(seat.incarnation, round_.number, until_ms)


def _fail(work: _Step, command: Fail) -> None:
    round_ = work.membership.round
    if round_ is None or round_.number != command.round or command.node_id not in work.state.seats:
        return
    failures = _failures(work, command.node_id, round_, command.failures)
    if round_.live:
        _end_by_failure(work, failures)
    else:
        _add_failures(work, failures)


def _failures(
    work: _Step, node_id: str, round_: Round, reports: tuple[FailureReport, ...]
) -> tuple[Failure, ...]:
    """Turn reports into failures at the server's time."""
    if not reports:
        return ()
    address = next((p.offer.address for p in round_.participants if p.node_id == node_id), "")
    return tuple(
        Failure(
            node_id=node_id,
            address=address,
            local_rank=report.local_rank,
            rank=report.rank,
            pid=report.pid,
            exit_code=report.exit_code,
            signal=report.signal,
            message=report.message,
            traceback=report.traceback,
            at_ms=work.now_ms - report.age_ms,
        )
        for report in reports
    )


def _end_by_failure(work: _Step, failures: tuple[Failure, ...]) -> None:
    first = root_cause(failures, work.state.tuning.root_cause_window_ms)
    reason = describe_failure(first[0]) if first else "a worker failed"
    _end_round(work, Cause.WORKER_FAILURE, reason, broken=True)
    _add_failures(work, failures)


def _add_failures(work: _Step, failures: tuple[Failure, ...]) -> None:
    """Note failures of the ended round, as long as its charge is not settled."""
    round_ = work.membership.round
    if round_ is None or round_.end is None or round_.end.settled or not failures:
        return
    kept = keep_earliest((*round_.end.failures, *failures))
    if kept == round_.end.failures:
        return
    known = {(f.node_id, f.local_rank) for f in round_.end.failures}
    work.store_round(replace(round_, end=replace(round_.end, failures=kept)))
    work.events += [
        WorkerFailed(round_.number, f) for f in kept if (f.node_id, f.local_rank) not in known
    ]


def _succeed(work: _Step, command: Succeed) -> None:
    """Note that a node is done. That stays true when it was given up, or the round has ended."""
    round_, node_id = work.membership.round, command.node_id
    if round_ is None or round_.number != command.round:
        return
    seat = work.state.seats.get(node_id)
    if seat is not None and seat.incarnation == command.incarnation and round_.live:
        if not seat.succeeded:
            _note_success(work, round_, node_id)
            done = replace(seat, succeeded=True, since_ms=work.now_ms)
            work.put(seats={**work.state.seats, node_id: done})
    elif round_.end is not None and node_id not in round_.succeeded:
        own = (
            p
            for p in round_.participants
            if p.node_id == node_id and p.incarnation <= command.incarnation
        )
        if any(own):
            _note_success(work, round_, node_id)
            _note_heard(work, node_id)


def _note_success(work: _Step, round_: Round, node_id: str) -> None:
    work.store_round(replace(round_, succeeded=(*round_.succeeded, node_id)))
    work.events.append(NodeSucceeded(node_id, round_.number))


def _leave(work: _Step, command: Leave) -> None:
    """A node without workers goes at once; one with workers keeps its seat until they are gone."""
    round_ = work.membership.round
    seat = work.state.seats.get(command.node_id)
    if seat is None or round_ is None:
        _depart(work, command.node_id, NodeState.LEFT, command.reason, command.cause)
        return
    failed = command.cause is LeaveCause.FAILED
    if command.exited_zero and round_.live and not seat.succeeded and some_succeeded(work.state):
        # It was told to leave, but its workers were done, as those of others were.
        seat = replace(seat, succeeded=True, since_ms=work.now_ms)
        # Or they were not: who fails for want of them may be heard later than this.
        round_ = replace(round_, excuse=f"{command.node_id}: {command.reason}")
        _note_success(work, round_, command.node_id)
    if round_.live and not seat.succeeded:
        cause = _CAUSE_OF_LEAVE.get(command.cause, Cause.NODE_LEFT)
        _end_round(work, cause, f"{command.node_id}: {command.reason}", broken=failed)
    # Who leaves because its workers failed is no excuse for that failure.
    if not (seat.succeeded or seat.leaving or failed):
        _charge_instead(work, Cause.NODE_LEFT, f"{command.node_id}: {command.reason}")
    if seat.succeeded or command.left_round == round_.number:
        _depart(work, command.node_id, NodeState.LEFT, command.reason, command.cause)
    elif not seat.leaving:
        leaving = replace(seat, leaving=command.reason)
        work.put(seats={**work.state.seats, command.node_id: leaving})
        work.events.append(NodeLeaving(command.node_id, command.reason))


_CAUSE_OF_LEAVE = {
    LeaveCause.START_FAILED: Cause.START_FAILED,
    LeaveCause.FAILED: Cause.WORKER_FAILURE,
}


def _report_stuck(work: _Step, command: ReportStuck) -> None:
    """Give the seat away; the node is not seated again until it says that the workers are gone."""
    round_ = work.membership.round
    seat = work.state.seats.get(command.node_id)
    if round_ is None or round_.number != command.round or seat is None:
        return
    pids = ", ".join(str(pid) for pid in command.pids)
    reason = f"workers survive SIGKILL (pid {pids})"
    if round_.live:
        _end_round(work, Cause.WORKER_FAILURE, f"{command.node_id}: {reason}", broken=True)
    _leave_seat(work, command.node_id)
    stuck = Stuck(command.incarnation, round_.number, command.pids, work.now_ms)
    work.put(stuck={**work.state.stuck, command.node_id: stuck})
    work.events.append(NodeStuck(command.node_id, round_.number, reason))


def _report_store_host(work: _Step, command: ReportStoreHost) -> None:
    round_ = work.membership.round
    if (
        round_ is not None
        and round_.number == command.round
        and round_.participants[0].node_id == command.node_id
    ):
        reason = f"on {command.node_id}: {command.reason}"
        _end_round(work, Cause.STORE_HOST, reason, broken=True)
        _charge_instead(work, Cause.STORE_HOST, reason)


def _obey_operator(work: _Step, command: Stop | Restart | Scale) -> None:
    """Do what an operator asks of the run that was looked at; of another one, it is refused."""
    membership, round_ = work.membership, work.membership.round
    if command.run != membership.run or membership.ended is not None:
        what = "been followed by another"
        if membership.ended and command.run == membership.run:
            ago = duration(work.now_ms - membership.ended.at_ms)
            what = f"{membership.ended.result} {ago} ago"
        raise RendezvousClosedError(
            f"run {command.run} of {membership.rdzv_id} has {what}; nothing was changed"
        )
    if membership.stopping and not isinstance(command, Stop):
        raise RendezvousClosedError(
            f"run {command.run} of {membership.rdzv_id} is being stopped ({membership.stopping}); "
            "nothing was changed"
        )
    match command:
        case Stop():
            _stop(work, command.reason)
        case Restart():
            if round_ is None or command.round > round_.number:
                raise InvalidRequestError(
                    f"{membership.rdzv_id} has had no round {command.round}; nothing was changed"
                )
            if command.round == round_.number:
                _end_round(work, Cause.OPERATOR, command.reason, broken=False)
        case Scale():
            _scale(work, command)


def _stop(work: _Step, reason: str) -> None:
    """Have everyone stop; the run is closed when they have, so that no other begins beside it."""
    if not work.membership.stopping:
        work.store(replace(work.membership, stopping=reason))
        _end_round(work, Cause.OPERATOR, reason, broken=False)


def _scale(work: _Step, command: Scale) -> None:
    bounds = (command.min_nodes, command.max_nodes)
    membership = work.membership
    if bounds == membership.bounds:
        return
    work.store(replace(membership, scaled=bounds))
    work.events.append(JobScaled(*bounds, command.reason))
    round_ = membership.round
    if round_ is not None and len(work.state.seats) > command.max_nodes:
        _end_round(work, Cause.OPERATOR, command.reason, broken=False)


def _submit(work: _Step, command: Submit) -> None:
    """Begin a run without nodes. Who submits again what was submitted, changes nothing."""
    old = work.membership
    known = (old.run, *(earlier.run for earlier in old.earlier))
    if command.run in known:
        return
    if work.open and old.stopping:
        raise JobExistsError(
            f"job {old.rdzv_id} is being stopped; submit it again when its workers are gone, for "
            f"which `rdzvctl wait {old.rdzv_id}` waits, or choose another name"
        )
    if work.open:
        by = f", submitted by {old.submission.submitted_by}" if old.submission else ""
        raise JobExistsError(
            f"a job {old.rdzv_id} is there already{by}, and has not ended; choose another name, or "
            "stop that one first"
        )
    submission = Submission(command.spec, command.submitted_by, work.now_ms)
    membership = _next_run(old, command.run, command.settings, work.now_ms, command.spec.submitter)
    work.state = State(
        replace(membership, submission=submission), work.state.tuning, barred=work.state.barred
    )
    reason = f"submitted by {command.submitted_by}"
    if submitter := command.spec.submitter:
        reason += f" [{submitter}]"
    work.events.append(RunBegan(membership.run, membership.run_number, reason))


def _apply_to_submitted(work: _Step, command: Place | Withdraw | Decline | GiveUp) -> None:
    """Change what a submission has got; of a run that is over, nothing is left to change."""
    submission = work.membership.submission
    if not work.open or submission is None or command.run != work.membership.run:
        return
    match command:
        case Place():
            # One may have been barred since it was chosen.
            chosen = [n for n in command.node_ids if n not in work.state.barred]
            _store_submission(work, place(submission, chosen))
            if added := work.state.placed[len(submission.placed) :]:
                work.events.append(NodesPlaced(added))
        case Withdraw():
            _withdraw(work, withdrawable(work.state, command.node_ids), command.reason)
        case Decline(passing=True):
            if command.node_id in submission.placed:
                _withdraw(work, withdrawable(work.state, (command.node_id,)), command.reason)
        case Decline():
            if command.node_id in submission.placed and command.node_id not in work.state.seats:
                _store_submission(work, decline(submission, command.node_id, command.reason))
                work.events.append(NodeDeclined(command.node_id, command.reason))
                if work.state.present(command.node_id):
                    _depart(work, command.node_id, NodeState.LEFT, command.reason, None)
        case GiveUp():
            _close(work, Result.FAILED, command.reason)


def _store_submission(work: _Step, submission: Submission) -> None:
    if submission != work.membership.submission:
        work.store(replace(work.membership, submission=submission))


def _withdraw(work: _Step, node_ids: tuple[str, ...], reason: str) -> None:
    """Take back placements; who waits is in the job no more."""
    submission = work.membership.submission
    if submission is None or not node_ids:
        return
    for node_id in node_ids:
        if work.state.present(node_id):
            _depart(work, node_id, NodeState.LEFT, reason, None)
    _store_submission(work, withdraw(work.membership.submission or submission, node_ids))
    work.events.append(NodesWithdrawn(node_ids, reason))


def _mark_away(work: _Step, command: MarkAway) -> None:
    since_ms = work.now_ms
    if command.node_id in work.state.away:
        since_ms = work.state.away[command.node_id].since_ms
    else:
        work.events.append(NodeWentAway(command.node_id, command.until_ms - work.now_ms))
    away = Away(since_ms, command.until_ms, command.firm, command.may_run)
    work.put(away={**work.state.away, command.node_id: away})


def _mark_back(work: _Step, node_id: str) -> None:
    away = work.state.away.get(node_id)
    if away is None:
        return
    work.put(away=_without(work.state.away, node_id))
    work.events.append(NodeCameBack(node_id, work.now_ms - away.since_ms))
    if node_id in work.state.seats:
        work.state = replace(work.state, back_ms=work.now_ms)
    deadline_ms, round_ = work.state.stop_deadline_ms, work.membership.round
    if away.firm and deadline_ms is not None and round_ is not None:
        # It may hear only now that the round has ended.
        late_ms = work.now_ms + _longest_stop_ms(round_, work.state.tuning)
        work.state = replace(work.state, stop_deadline_ms=max(deadline_ms, late_ms))


def _note_heard(work: _Step, node_id: str) -> None:
    """No worker is left on a node that was given up, for it says so itself."""
    departures = work.membership.departures
    if any(d.may_run and d.node_id == node_id for d in departures):
        heard = (replace(d, may_run=d.may_run and d.node_id != node_id) for d in departures)
        work.store(replace(work.membership, departures=tuple(heard)))


def unheard(state: State) -> tuple[str, ...]:
    """Name the nodes that were given up, and on which workers may still run."""
    return tuple(d.node_id for d in state.membership.departures if d.may_run)


def unheard_until_ms(state: State) -> int:
    """By when workers of dead agents have been ended by their runners; 0: there are none."""
    departures = state.membership.departures
    return max((d.at_ms + d.ends_after_ms for d in departures if d.may_run), default=0)


def _orphans_end_after_ms(work: _Step, node_id: str) -> int:
    """Say within what time a runner whose agent is dead has ended its workers.

    It waits for another agent no longer than the longest lease, and then stops them.
    """
    away, round_, tuning = work.state.away.get(node_id), work.membership.round, work.state.tuning
    age_ms = work.now_ms - away.since_ms if away is not None else 0
    stop_ms = _longest_stop_ms(round_, tuning) if round_ is not None else 0
    return max(tuning.takeover_grace_ms + stop_ms - age_ms, 0)


def may_run_on(state: State, node_id: str) -> bool:
    """Whether workers may still run on a node that was given up."""
    return node_id in unheard(state)


def _may_run(state: State, node_id: str) -> bool:
    """Whether workers may be left on a node that is given up unheard."""
    away = state.away.get(node_id)
    if node_id in state.waiting or is_stand_in(node_id) or (away is not None and not away.may_run):
        return False
    participant = _participant_of(state, node_id)
    return participant is not None and not participant.instance.fence_after_ms


def _give_up(
    work: _Step, node_id: str, reason: str, *, heard: bool = False, stopped_late: bool = False
) -> None:
    """A node is lost. What its loss means for a live or unsettled round follows at once."""
    seat = work.state.seats.get(node_id)
    done = seat is not None and seat.succeeded
    ends_after_ms = None
    if not (heard or done) and _may_run(work.state, node_id):
        # Who had all the time that there is is not given more.
        ends_after_ms = 0 if stopped_late else _orphans_end_after_ms(work, node_id)
    if seat is not None and seat.leaving:
        _depart(work, node_id, NodeState.LEFT, seat.leaving, LeaveCause.SIGNAL)
        return
    if seat is not None and not seat.succeeded:
        text = f"{node_id}: {reason}"
        _end_round(work, Cause.NODE_LOST, text, broken=True)
        _charge_instead(work, Cause.NODE_LOST, text)
    _depart(work, node_id, NodeState.LOST, reason, None, ends_after_ms=ends_after_ms)


def _depart(
    work: _Step,
    node_id: str,
    how: NodeState,
    reason: str,
    cause: LeaveCause | None,
    *,
    ends_after_ms: int | None = None,
) -> None:
    """Take a node out of the job and remember why."""
    offer = _offer_of(work.state, node_id)
    _leave_seat(work, node_id)
    work.put(
        waiting=_without(work.state.waiting, node_id),
        stuck=_without(work.state.stuck, node_id),
        away=_without(work.state.away, node_id),
    )
    departure = Departure(
        node_id=node_id,
        state=how,
        reason=reason,
        at_ms=work.now_ms,
        address=offer.address,
        local_world_size=offer.local_world_size,
        role=offer.role,
        may_run=ends_after_ms is not None,
        ends_after_ms=ends_after_ms or 0,
    )
    departures = (*work.membership.departures, departure)[-MAX_DEPARTURES:]
    work.store(replace(work.membership, departures=departures))
    if (submission := work.membership.submission) is not None:
        if cause is LeaveCause.START_FAILED:
            _store_submission(work, decline(submission, node_id, reason))
        else:
            _store_submission(work, withdraw(submission, (node_id,)))
    work.state = replace(work.state, last_leave=cause)
    lost = how is NodeState.LOST
    event = NodeLost(node_id, reason, departure.may_run) if lost else NodeLeft(node_id, reason)
    work.events.append(event)


def _offer_of(state: State, node_id: str) -> Offer:
    if node_id in state.waiting:
        return state.waiting[node_id].offer
    participant = _participant_of(state, node_id)
    return participant.offer if participant is not None else Offer(address="")


def _participant_of(state: State, node_id: str) -> Participant | None:
    round_ = state.membership.round
    participants = round_.participants if round_ is not None else ()
    return next((p for p in participants if p.node_id == node_id), None)


def _leave_seat(work: _Step, node_id: str) -> None:
    round_ = work.membership.round
    if node_id in work.state.seats and round_ is not None:
        work.put(seats=_without(work.state.seats, node_id))
        work.store_round(replace(round_, gone=(*round_.gone, node_id)))


def _end_round(work: _Step, cause: Cause, reason: str, *, broken: bool, dead_ms: int = 0) -> None:
    """End the live round, if there is one: everybody stops."""
    round_ = work.membership.round
    if round_ is None or not round_.live:
        return
    end = RoundEnd(cause, reason, work.now_ms, broken)
    work.store_round(replace(round_, end=end))
    work.state = replace(
        work.state,
        stop_deadline_ms=work.now_ms + _longest_stop_ms(round_, work.state.tuning),
    )
    work.events.append(RoundEnded(round_.number, end, dead_ms))
    if round_.excuse:
        _charge_instead(work, Cause.NODE_LEFT, round_.excuse)


def _longest_stop_ms(round_: Round, tuning: Tuning) -> int:
    longest_ms = max(p.offer.shutdown_timeout_ms for p in round_.participants)
    return longest_ms + tuning.stop_margin_ms


_EXCUSES = (Cause.NODE_LEFT, Cause.STORE_HOST, Cause.NODE_LOST)
"""What a worker failure may turn out to follow from, in rising order of weight."""


def _charge_instead(work: _Step, cause: Cause, reason: str) -> None:
    """Charge an ended round to what its failures followed from, if that turns up in time.

    When a node's processes or the store die, the others' collectives fail within milliseconds,
    often before the loss itself is known.
    """
    round_ = work.membership.round
    if round_ is None or round_.end is None or round_.end.settled:
        return
    weight = {Cause.WORKER_FAILURE: -1} | {c: i for i, c in enumerate(_EXCUSES)}
    if weight.get(round_.end.cause, len(weight)) < weight[cause]:
        work.store_round(replace(round_, end=replace(round_.end, cause=cause, reason=reason)))


# =================================================================== state rules
#
# Each looks at the state alone, changes one thing and says so, or says False.


def _release_away_seats(work: _Step) -> bool:
    """Once a round has ended, a node that is away is waited for only `reconnect_grace_ms`."""
    for node_id, due_ms in _away_seats_due(work.state):
        if work.now_ms >= due_ms:
            grace_s = work.state.tuning.reconnect_grace_ms / 1000
            reason = f"away when the round ended, and not back within {grace_s:g} s"
            _give_up(work, node_id, reason)
            return True
    return False


def _away_seats_due(state: State) -> Iterable[tuple[str, int]]:
    """Name the away nodes that hold up the end of a round, and when each is given up."""
    round_ = state.membership.round
    if round_ is None or round_.end is None:
        return
    for node_id, away in state.away.items():
        if node_id in state.seats and not away.firm:
            since_ms = max(away.since_ms, round_.end.at_ms)
            yield node_id, since_ms + state.tuning.reconnect_grace_ms


def _release_unclaimed_seats(work: _Step) -> bool:
    """A place in an adopted round that nobody claims in time is given up.

    Not while claims still come in: those of a large job take their time.
    """
    due = _unclaimed_seat_due(work.state)
    if due is None or work.now_ms < due[1]:
        return False
    waited_s = work.state.tuning.takeover_grace_ms / 1000
    _give_up(work, due[0], f"not heard within {waited_s:g} s since this server knows of it")
    return True


def _unclaimed_seat_due(state: State) -> tuple[str, int] | None:
    """Name a stand-in, of whom no stream tells anything, and when it is given up; None: no more.

    All are waited for equally long, so this looks at one: a large job has as many steps as seats.
    """
    round_ = state.membership.round
    if round_ is None or not round_.adopted:
        return None
    stand_ins = ((node_id, away) for node_id, away in state.away.items() if is_stand_in(node_id))
    first = next(stand_ins, None)
    if first is None:
        return None
    return first[0], max(first[1].until_ms, state.claimed_ms + state.tuning.claims_quiet_ms)


def _release_unstopped_seats(work: _Step) -> bool:
    """A node that does not stop its workers within all its deadlines is given up."""
    deadline_ms = work.state.stop_deadline_ms
    if deadline_ms is None or work.now_ms < deadline_ms:
        return False
    for node_id in _seats_with_deadline(work.state):
        _give_up(work, node_id, "it did not stop its workers in time", stopped_late=True)
        return True
    return False


def _seats_with_deadline(state: State) -> Iterable[str]:
    """Name who must have stopped by the deadline: all but those promised more time to return."""
    for node_id in state.seats:
        if node_id not in state.away or not state.away[node_id].firm:
            yield node_id


def _withdraw_barred(work: _Step) -> bool:
    """A submitted job lets go of a barred node as soon as no worker of it is left there."""
    state = work.state
    if not state.barred or state.membership.submission is None or not work.open:
        return False
    for node_id in withdrawable(state, state.barred):
        if node_id not in state.stuck:
            _withdraw(work, (node_id,), state.barred[node_id])
            return True
    return False


def _settle_charge(work: _Step) -> bool:
    """When everyone has stopped, charge the end of the round to its cause."""
    round_ = work.membership.round
    if not work.open or round_ is None or round_.end is None or round_.end.settled:
        return False
    if work.state.seats:
        return False
    end = replace(round_.end, settled=True)
    spent, store_failures = work.membership.restarts, work.membership.store_failures
    max_restarts = work.membership.settings.max_restarts
    failures: tuple[Failure, ...] = ()
    if end.cause is Cause.WORKER_FAILURE:
        failures = root_cause(end.failures, work.state.tuning.root_cause_window_ms)
        end = replace(end, reason=_failure_reason(end, failures))
    others = spend(work.membership, round_, end, work.state.moved, work.state.tuning)
    over = exceeded(work.membership.settings, end, others)
    budget_left = over is None
    if end.cause is Cause.WORKER_FAILURE and budget_left:
        counted = restarts_that_count(work.membership, work.now_ms)
        # Who counts restarts itself tells of a failure when none is left.
        budget_left = max_restarts is not None and counted < max_restarts
        spent = (*spent, work.now_ms) if budget_left else spent
    work.store(
        replace(
            work.membership,
            round=replace(round_, end=end),
            restarts=spent,
            store_failures=store_failures + 1 if end.cause is Cause.STORE_HOST else 0,
            last_failures=failures or work.membership.last_failures,
            spent=others,
        )
    )
    work.state = replace(work.state, stop_deadline_ms=None, moved=UNMOVED)
    counted = restarts_that_count(work.membership, work.now_ms)
    first = failures[0] if failures else None
    work.events.append(
        RoundSettled(round_.number, end.cause, end.reason, counted, max_restarts, first)
    )
    if not budget_left:
        budget = f"restarts spent: {counted} of {max_restarts}"
        if max_restarts is None:
            budget = "the node's own agent restarts no more"
        reason = f"{end.cause}: {end.reason}; {budget}" if over is None else over.reason
        no_progress = over is not None and over.no_progress
        _close(work, Result.FAILED, reason, failures=failures, no_progress=no_progress)
    return True


def _failure_reason(end: RoundEnd, failures: tuple[Failure, ...]) -> str:
    return describe_failure(failures[0]) if failures else end.reason


def restarts_that_count(membership: Membership, now_ms: int) -> int:
    """Count the restarts that were spent and that `restart_window` has not forgotten."""
    window_ms = membership.settings.restart_window_ms
    if not window_ms:
        return len(membership.restarts)
    return sum(1 for at_ms in membership.restarts if now_ms - at_ms < window_ms)


def _succeed_run(work: _Step) -> bool:
    """The job has succeeded when every participant has, whether it is still there or not.

    That one of them was given up, and the round ended by that, changes nothing: it was done.
    """
    if not work.open or not _all_done(work.state):
        return False
    _close(work, Result.SUCCEEDED, "all workers exited 0")
    return True


def _all_done(state: State) -> bool:
    round_ = state.membership.round
    if round_ is None:
        return False
    if round_.live:
        return all(seat.succeeded for seat in state.seats.values())
    return len(round_.succeeded) == len(round_.participants)


def _count_ready(work: _Step) -> bool:
    """Note since when there are too few nodes for a round, or enough."""
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


def _forming(work: _Step) -> bool:
    """Whether the run is open, has no live round, and may have another."""
    membership, round_ = work.membership, work.membership.round
    return work.open and not membership.stopping and (round_ is None or not round_.live)


def _complete_round(work: _Step) -> bool:
    """Complete a round once everyone has stopped and its time has come."""
    due_ms = completion_due_ms(work.state) if _forming(work) else None
    if due_ms is None or work.now_ms < due_ms:
        return False
    state, membership = work.state, work.membership
    ready = {n: w for n, w in state.waiting.items() if n not in state.away}
    prior = membership.round.participants if membership.round else ()
    participants = assign_seats(prior, ready, membership.max_nodes)
    first = participants[0].offer
    round_ = Round(
        number=membership.next_round,
        participants=participants,
        master_addr=_master_addr(participants),
        master_port=first.store_port,
        use_agent_store=first.can_host_store and membership.store_failures < MAX_STORE_FAILURES,
        restarts=len(membership.restarts),
        at_ms=work.now_ms,
    )
    work.store(replace(membership, round=round_, next_round=round_.number + 1))
    seated = {p.node_id for p in participants}
    work.put(
        seats={p.node_id: Seat(p.incarnation, work.now_ms) for p in participants},
        waiting={n: w for n, w in state.waiting.items() if n not in seated},
    )
    work.state = replace(work.state, superseded={})
    work.events.append(RoundCompleted(round_))
    return True


def completion_due_ms(state: State) -> int | None:
    """When the next round completes if nothing changes; None while it can not."""
    membership, settings, tuning = state.membership, state.membership.settings, state.tuning
    round_, enough_ms = membership.round, state.enough_since_ms
    if state.seats or enough_ms is None or _awaits_survivor(state):
        return None
    earliest_ms = 0
    if membership.store_failures and round_ and round_.end:
        store_ms = tuning.store_backoff_ms << min(membership.store_failures - 1, 16)
        # Another server's clock may have been ahead of this one's when it wrote down the end.
        end_ms = min(round_.end.at_ms, enough_ms)
        earliest_ms = end_ms + min(store_ms, tuning.store_backoff_max_ms)
    earliest_ms = max(earliest_ms, restart_due_ms(state))
    if round_ is None and membership.resumed_at_ms is not None:
        earliest_ms = membership.resumed_at_ms + tuning.takeover_grace_ms
    earliest_ms = max(earliest_ms, superseded_until_ms(state))
    if state.ready >= membership.max_nodes:
        return max(enough_ms, earliest_ms)
    if state.placed:
        # The server knows who is to come; who takes too long comes into a later round.
        coming_ms = tuning.gather_ms if awaited(state) else 0
        return max(enough_ms + coming_ms, earliest_ms)
    if round_ is None:
        return max(enough_ms + settings.last_call_timeout_ms, earliest_ms)
    if state.regained:
        quiet_ms = state.newest_ms + tuning.gather_quiet_ms
        gathered_ms = min(max(quiet_ms, enough_ms), enough_ms + tuning.gather_ms)
        return max(gathered_ms, earliest_ms)
    return max(enough_ms, earliest_ms)


def superseded_until_ms(state: State) -> int:
    """By when nothing runs any more of rounds that others have followed elsewhere; 0: nothing."""
    return max((former.until_ms for former in state.superseded.values()), default=0)


def restart_due_ms(state: State) -> int:
    """When a run that backs off restarts at the earliest; 0: it does not back off."""
    round_, enough_ms = state.membership.round, state.enough_since_ms
    wait_ms = backoff_ms(state.membership)
    if not wait_ms or round_ is None or round_.end is None or enough_ms is None:
        return 0
    # Another server's clock may have been ahead of this one's when it wrote down the end.
    return min(round_.end.at_ms, enough_ms) + wait_ms


def _awaits_survivor(state: State) -> bool:
    """Whether a participant that has stopped is away for a moment, and is to be waited for."""
    round_ = state.membership.round
    if round_ is None or not state.away:
        return False
    away = {node_id for node_id in state.away if node_id in state.waiting}
    return any(p.node_id in away for p in round_.participants) if away else False


def _master_addr(participants: tuple[Participant, ...]) -> str:
    """Choose the address at which all participants reach GROUP_RANK 0."""
    offer = participants[0].offer
    elsewhere = any(p.offer.machine != offer.machine for p in participants)
    return offer.host_name if elsewhere and _is_loopback(offer.address) else offer.address


def _admit_newcomers(work: _Step) -> bool:
    """End a running round for nodes that wait, once they fill it or no more of them come."""
    due_ms = newcomers_due_ms(work.state, work.now_ms) if work.open else None
    if due_ms is None or work.now_ms < due_ms:
        return False
    newcomers = _newcomers(work.state, work.now_ms)
    names = ", ".join(newcomers[:8]) + (" ..." if len(newcomers) > 8 else "")
    _end_round(work, Cause.NODES_JOINED, names, broken=False)
    return True


def _free_seats(state: State) -> int:
    """Count the seats for which newcomers may end the running round."""
    round_, settings = state.membership.round, state.membership.settings
    if round_ is None or not round_.live or settings.scale_up is ScaleUp.ON_RESTART:
        return 0
    if not state.waiting or some_succeeded(state) or some_seat_away(state):
        return 0
    return state.membership.max_nodes - len(state.seats)


def some_succeeded(state: State) -> bool:
    """Whether a participant of the running round has succeeded, is it still there or not."""
    round_ = state.membership.round
    gone = round_ is not None and round_.live and bool(round_.gone)
    return gone or any(seat.succeeded for seat in state.seats.values())


def some_seat_away(state: State) -> bool:
    """Whether a participant is away: it can not stop in order, and may have succeeded unheard."""
    return any(node_id in state.seats for node_id in state.away)


def newcomers_due_ms(state: State, now_ms: int) -> int | None:
    """When the newcomers at hand end the running round if no more come."""
    free = _free_seats(state)
    newcomers = _newcomers(state, now_ms) if free > 0 else []
    if not newcomers:
        return None
    since = [state.waiting[node_id].since_ms for node_id in newcomers]
    quiet_ms = state.tuning.gather_quiet_ms
    # Who is just back may yet say that it has succeeded, and then no newcomer ends the round.
    earliest_ms = 0 if state.back_ms is None else state.back_ms + quiet_ms
    settings, round_ = state.membership.settings, state.membership.round
    if settings.scale_up is ScaleUp.AFTER and round_ is not None:
        earliest_ms = max(earliest_ms, round_.at_ms + settings.scale_up_after_ms)
    if len(newcomers) >= free:
        return max(*since, earliest_ms)
    return max(min(max(since) + quiet_ms, min(since) + state.tuning.gather_ms), earliest_ms)


def _newcomers(state: State, now_ms: int) -> list[str]:
    """Name the waiting nodes that may end a running round."""
    held = {node_id for node_id, until_ms in holds(state).items() if until_ms > now_ms}
    return [n for n in state.waiting if n not in state.away and n not in held]


def holds(state: State) -> dict[str, int]:
    """Say until when each flapping node may not end a running round.

    A node lost twice within `flap_window_ms` is held for `flap_hold_ms` from the last loss, and
    twice as long with each further loss. This depends on the losses alone, not on the time.
    """
    losses: dict[str, list[int]] = {}
    for departure in state.membership.departures:
        if departure.state is NodeState.LOST:
            losses.setdefault(departure.node_id, []).append(departure.at_ms)
    held: dict[str, int] = {}
    for node_id, at_ms in losses.items():
        since_ms = at_ms[-1] - state.tuning.flap_window_ms
        recent = sum(1 for lost_ms in at_ms if lost_ms > since_ms)
        if recent >= 2:
            held[node_id] = at_ms[-1] + (state.tuning.flap_hold_ms << min(recent - 2, 16))
    return held


def _time_out_joining(work: _Step) -> bool:
    """Fail a run that had too few nodes for `join_timeout`; a submitted one waits anew."""
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
        _withdraw(work, tuple(node_ids), "the job is queued again")
    else:
        _close(work, Result.FAILED, reason, retry_sensible=True)
    return True


def _missing(state: State) -> str:
    """Name those of the last round who are not there, and why."""
    last = {d.node_id: d for d in state.membership.departures}
    missing = [
        f"{departure.node_id} {departure.state} ({departure.reason})"
        for node_id, departure in last.items()
        if not state.present(node_id)
    ]
    missing += [f"{node_id} stuck (its workers survive SIGKILL)" for node_id in state.stuck]
    return f"; not there: {', '.join(missing[-8:])}" if missing else ""


def _close_when_stopped(work: _Step) -> bool:
    """Close a run that an operator ends, once no worker of it is left that is known of.

    Those of a dead agent run until their runner ends them. Of a node that is cut off nothing is
    known, and it is not waited for longer than for those.
    """
    if not work.open or not work.membership.stopping or work.state.seats:
        return False
    if work.now_ms < unheard_until_ms(work.state):
        return False
    reason = work.membership.stopping
    if names := unheard(work.state):
        reason += f"; workers may still run on {listed(names)}: not heard since it was given up"
    _close(work, Result.STOPPED, reason)
    return True


def _close_when_all_left(work: _Step) -> bool:
    """When the last node has left of its own accord, the run is over, unless it was submitted."""
    cause = work.state.last_leave
    if not work.open or cause is None or work.state.anybody or work.membership.stopping:
        return False
    if work.membership.submission is not None:
        return False
    reason = work.membership.departures[-1].reason
    if cause is LeaveCause.START_FAILED:
        _close(work, Result.FAILED, f"no node could start its workers: {reason}")
    elif cause is LeaveCause.FAILED:
        _close(work, Result.FAILED, f"all nodes left, the last with failed workers: {reason}")
    elif cause is LeaveCause.TIMEOUT:
        _close(work, Result.FAILED, reason, retry_sensible=True)
    else:
        _close(work, Result.STOPPED, f"all nodes left: {reason}")
    return True


def _close(
    work: _Step,
    result: Result,
    reason: str,
    *,
    retry_sensible: bool = False,
    failures: tuple[Failure, ...] = (),
    no_progress: bool = False,
) -> None:
    """Close the run: it forms no more rounds, and nobody is in it any more."""
    ended = Ended(result, reason, work.now_ms, retry_sensible, failures, no_progress)
    work.state = State(replace(work.membership, ended=ended), work.state.tuning)
    work.events.append(RunEnded(work.membership.run, ended))


_STATE_RULES: tuple[Callable[[_Step], bool], ...] = (
    _release_away_seats,
    _release_unclaimed_seats,
    _release_unstopped_seats,
    _withdraw_barred,
    _succeed_run,
    _settle_charge,
    _close_when_stopped,
    _close_when_all_left,
    _count_ready,
    _complete_round,
    _admit_newcomers,
    _time_out_joining,
)


def _wake_at_ms(state: State, now_ms: int) -> int | None:
    """When a state rule may next apply without a command."""
    membership = state.membership
    if not membership.run or membership.ended is not None:
        return None
    due: list[int | None] = [due_ms for _, due_ms in _away_seats_due(state)]
    if (unclaimed := _unclaimed_seat_due(state)) is not None:
        due.append(unclaimed[1])
    if state.stop_deadline_ms is not None and any(_seats_with_deadline(state)):
        due.append(state.stop_deadline_ms)
    if membership.stopping and not state.seats:
        due.append(unheard_until_ms(state))
    elif membership.round is None or not membership.round.live:
        due.append(completion_due_ms(state))
    if state.short_since_ms is not None and not state.seats:
        due.append(state.short_since_ms + membership.settings.join_timeout_ms)
    due.append(_next_newcomers_ms(state, now_ms))
    return min((due_ms for due_ms in due if due_ms is not None), default=None)


def _next_newcomers_ms(state: State, now_ms: int) -> int | None:
    """When newcomers end the running round, or the first of those held back may."""
    if _free_seats(state) <= 0:
        return None
    due = [until_ms for node_id, until_ms in holds(state).items() if node_id in state.waiting]
    due = [until_ms for until_ms in due if until_ms > now_ms]
    due_ms = newcomers_due_ms(state, now_ms)
    return min(due if due_ms is None else [*due, due_ms], default=None)
