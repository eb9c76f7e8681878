"""Short words for tests of the cores: commands with defaults, and a job that checks itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rdzv.core import model
from rdzv.core.commands import (
    Command,
    Fail,
    Join,
    Leave,
    MarkAway,
    MarkBack,
    MarkLost,
    ReportStoreHost,
    ReportStuck,
    Resume,
    Succeed,
    Tick,
)
from rdzv.core.events import Event
from rdzv.core.invariants import violations
from rdzv.core.life.leaving import any_seat_has_deadline, seats_with_deadline
from rdzv.core.life.restoring import restore
from rdzv.core.life.runs import vacant
from rdzv.core.rendezvous import Transition, step
from rdzv.errors import RendezvousError
from rdzv.structs import replace
from rdzv.view.job_status import view, waiting_reason

SETTINGS = model.Settings(min_nodes=2, max_nodes=3, last_call_timeout_ms=5_000)
RUN = "run-1"
"""The uid of the first run of a `Job`; the next is `run-2`."""


class BrokenPromiseError(AssertionError):
    """The core broke an invariant."""


# ------------------------------------------------------------------ commands


def offer(node_id: str, **given: Any) -> model.Offer:
    """A node's offer: by default, its own machine and address, and one worker."""
    return model.Offer(**{"address": f"{node_id}.net", "machine": f"machine-of-{node_id}", **given})


def join(
    node_id: str,
    incarnation: int = 1,
    *,
    run: str = "",
    settings: model.Settings = SETTINGS,
    left_round: int | None = None,
    failures: Iterable[model.Failure] = (),
    moved: model.Moved = model.UNMOVED,
    refuse_reuse: bool = False,
    new_run: str = RUN,
    secret: str = "",
    kept: Iterable[model.KeptWorker] = (),
    snapshots: Iterable[model.Snapshot] = (),
    **offered: Any,
) -> Join:
    """Build a join; arguments that are no fields of `Join` describe the node's offer."""
    return Join(
        node_id=node_id,
        incarnation=incarnation,
        run=run,
        settings=settings,
        offer=offer(node_id, **offered),
        left_round=left_round,
        failures=tuple(failures),
        moved=moved,
        refuse_reuse=refuse_reuse,
        new_run=new_run,
        secret=secret,
        kept=tuple(kept),
        snapshots=tuple(snapshots),
    )


LATER_MS = 1 << 50
"""A time after any step: a failure of that time counts as one of the step that is told of it."""


def report(
    rank: int = 0, exit_code: int | None = 1, message: str = "", **given: Any
) -> model.Failure:
    """Build a node's report of one failed worker, which fails when the job is told of it."""
    defaults: dict[str, Any] = {
        "local_rank": 0,
        "rank": rank,
        "pid": 4711,
        "exit_code": exit_code,
        "signal": None,
        "message": message,
        "traceback": "",
        "at_ms": LATER_MS,
    }
    return model.Failure(**{**defaults, **given})


def odd_replica(rank: int = 0, kind: str = "OddReplicaError") -> model.Failure:
    """Build a report of a worker that differs from the other replicas."""
    message = f"{kind}: replica digest: after step 300, model.weight of rank {rank} differs"
    traceback = f"Traceback (most recent call last):\n  ...\nrdzv.worker.rounds.{message}"
    return report(rank, message=message, traceback=traceback)


# ------------------------------------------------------------------ a job that checks itself


E = TypeVar("E", bound=Event)


@dataclass
class Job:
    """One job driven as the server drives it, with all invariants checked after each step.

    Time only moves forward, through `now_ms`; ticks that fall due on the way are made at their
    time. `strict` also repeats every command, ticks early and crashes, without effect.
    """

    settings: model.Settings = SETTINGS
    tuning: model.Tuning = field(default_factory=model.Tuning)
    now_ms: int = 0
    strict: bool = True
    name: str = "job-7"
    state: model.State = field(init=False)
    wake_at_ms: int | None = None
    events: list[Event] = field(default_factory=list)
    """All events so far."""

    def __post_init__(self) -> None:
        self.state = vacant(self.name, self.tuning)

    # -------------------------------------------------------------- to let things happen

    def do(self, command: Command, at_ms: int | None = None) -> tuple[Event, ...]:
        """Let time pass until `at_ms`, run a command, and return its events."""
        if at_ms is not None:
            self.pass_until(at_ms)
        return self._step(command)

    def pass_until(self, at_ms: int) -> list[tuple[int, tuple[Event, ...]]]:
        """Let time pass; return the events of the ticks on the way, with their times."""
        happened = []
        while self.wake_at_ms is not None and self.wake_at_ms <= at_ms:
            self.now_ms = self.wake_at_ms
            happened.append((self.now_ms, self._step(Tick())))
        self.now_ms = max(self.now_ms, at_ms)
        return happened

    def crash(self) -> tuple[Event, ...]:
        """Lose everything that is not durable, and start again from the rest."""
        self.state = restore(self.state.membership, self.tuning, self.now_ms)
        self.wake_at_ms = None
        return self._step(Tick())

    def _step(self, command: Command) -> tuple[Event, ...]:
        if isinstance(command, Join):
            command = replace(command, new_run=f"run-{self.state.membership.run_number + 1}")
        before = self.state
        transition = step(before, command, self.now_ms)
        check_step(before, command, transition, self.now_ms)
        if self.strict:
            check_calm(command, transition, self.now_ms)
        self.state, self.wake_at_ms = transition.state, transition.wake_at_ms
        self.events += transition.events
        return transition.events

    # -------------------------------------------------------------- what nodes say

    def join(self, *node_ids: str, incarnation: int = 1, **given: Any) -> tuple[Event, ...]:
        """Let nodes join, as launched."""
        commands = [
            join(node_id, incarnation, **{"settings": self.settings, **given})
            for node_id in node_ids
        ]
        return self._all(commands)

    def stopped(
        self, *node_ids: str, round_: int | None = None, incarnation: int = 1, **given: Any
    ) -> tuple[Event, ...]:
        """Let nodes report that no worker of the last round is left, and join again."""
        number = self.round.number if round_ is None else round_
        given = {"settings": self.settings, "run": self.membership.run, **given}
        return self._all(
            [join(node_id, incarnation, left_round=number, **given) for node_id in node_ids]
        )

    def resume(self, node_id: str, incarnation: int = 1) -> tuple[Event, ...]:
        return self.do(Resume(node_id, incarnation, self.membership.run, self.round.number))

    def fail(self, node_id: str, *reports: model.Failure) -> tuple[Event, ...]:
        round_ = self.round
        return self.do(Fail(node_id, 1, self.membership.run, round_.number, reports or (report(),)))

    def succeed(self, *node_ids: str) -> tuple[Event, ...]:
        run, number = self.membership.run, self.round.number
        return self._all([Succeed(node_id, 1, run, number) for node_id in node_ids])

    def leave(
        self,
        node_id: str,
        left_round: int | None = None,
        cause: model.LeaveCause = model.LeaveCause.SIGNAL,
        reason: str = "its agent received SIGTERM",
    ) -> tuple[Event, ...]:
        return self.do(Leave(node_id, 1, self.membership.run, cause, reason, left_round))

    def report_stuck(self, node_id: str, *pids: int) -> tuple[Event, ...]:
        return self.do(ReportStuck(node_id, 1, self.membership.run, self.round.number, pids))

    def report_store_host(self, node_id: str, reason: str = "it exited 1") -> tuple[Event, ...]:
        return self.do(ReportStoreHost(node_id, 1, self.membership.run, self.round.number, reason))

    # -------------------------------------------------------------- what the nodes core says

    def away(self, *node_ids: str, for_ms: int = 5_000, firm: bool = False) -> tuple[Event, ...]:
        return self._all([MarkAway(n, 1, self.now_ms + for_ms, firm) for n in node_ids])

    def back(self, *node_ids: str) -> tuple[Event, ...]:
        return self._all([MarkBack(node_id, 1) for node_id in node_ids])

    def lost(self, *node_ids: str, reason: str = "lease expired") -> tuple[Event, ...]:
        return self._all([MarkLost(node_id, 1, reason) for node_id in node_ids])

    def _all(self, commands: Iterable[Command]) -> tuple[Event, ...]:
        return tuple(event for command in commands for event in self._step(command))

    # -------------------------------------------------------------- what to look at

    @property
    def membership(self) -> model.Membership:
        return self.state.membership

    @property
    def round(self) -> model.Round:
        """The latest complete round."""
        assert self.membership.round is not None, "no round has completed yet"
        return self.membership.round

    @property
    def seated(self) -> list[str]:
        """The participants of the latest round, by GROUP_RANK."""
        return [participant.node_id for participant in self.round.participants]

    @property
    def job_state(self) -> model.JobState:
        return model.job_state(self.state)

    @property
    def reason(self) -> str:
        return str(view(self.state, self.now_ms).reason)

    def last(self, kind: type[E]) -> E:
        """Return the latest event of a kind."""
        return next(event for event in reversed(self.events) if isinstance(event, kind))


def running(*node_ids: str, settings: model.Settings = SETTINGS, **given: Any) -> Job:
    """Return a job whose round 0 runs on these nodes; `max_nodes` may exceed their number."""
    job = Job(settings, **given)
    job.join(*node_ids)
    job.pass_until(job.now_ms + settings.last_call_timeout_ms)
    assert job.seated == sorted(node_ids)
    return job


# ------------------------------------------------------------------ the promises of every step


def check_step(before: model.State, command: Command, transition: Transition, now_ms: int) -> None:
    """Check the invariants that hold after every step."""
    after = transition.state
    if found := violations(before, after):
        raise BrokenPromiseError(f"{command} broke {found}")
    wake_at_ms = transition.wake_at_ms
    if wake_at_ms is not None and wake_at_ms <= now_ms:
        raise BrokenPromiseError(f"busy loop: wakes at {wake_at_ms}, and it is {now_ms}")
    if any_seat_has_deadline(after) != any(seats_with_deadline(after)):
        raise BrokenPromiseError(f"after {command} the seats with a deadline are miscounted")
    if transition.events and after == before:
        raise BrokenPromiseError(f"{command} changed nothing and said {transition.events}")
    if transition.ignored is not None:
        tick = step(before, Tick(), now_ms)
        if (after, transition.events) != (tick.state, tick.events):
            raise BrokenPromiseError(f"{command} is ignored ({transition.ignored}), and is not")


def check_calm(command: Command, transition: Transition, now_ms: int) -> None:
    """Check that a repetition, an early tick and a crash change nothing; and that all have a why.

    The crash comes just after the step was persisted: earlier announcements stay true.
    """
    state, wake_at_ms = transition.state, transition.wake_at_ms
    _expect_nothing(command, state, command, now_ms)
    early = [now_ms] if wake_at_ms is None else sorted({now_ms, wake_at_ms - 1})
    for tick_ms in early:
        _expect_nothing(command, state, Tick(), tick_ms)
    restored = restore(state.membership, state.tuning, now_ms)
    if found := violations(state, restored):
        raise BrokenPromiseError(f"a crash after {command} would break {found}")
    again = step(restored, Tick(), now_ms)
    check_step(restored, Tick(), again, now_ms)
    check_reasons(state, now_ms)


def _expect_nothing(first: Command, state: model.State, command: Command, now_ms: int) -> None:
    try:
        transition = step(state, command, now_ms)
    except RendezvousError:
        return  # Refused, so nothing has changed.
    if transition.state != state or transition.events:
        what = "repeated" if command is first else f"a tick at {now_ms}"
        raise BrokenPromiseError(f"after {first}, {what}, was no no-op: {transition.events}")


def check_reasons(state: model.State, now_ms: int) -> None:
    """Check that a job that does not run can say why."""
    shown = view(state, now_ms)
    if state.membership.run and not shown.reason.headline:
        raise BrokenPromiseError(f"no reason is given while {shown.state}")
    for node_id in (*state.waiting, *state.stuck):
        if not waiting_reason(state, node_id, now_ms):
            raise BrokenPromiseError(f"no reason is given why {node_id} does not run")
