"""Decide, persist, publish: in that order, one command after another for each job.

Commands of one job that wait while it commits are decided one after another and share the next
commit, which alone makes all of them true: a thousand nodes that speak at once cost a few commits.

A commit of which nobody knows whether it happened leaves its job in doubt: the next to claim the
job finds out, and no one is told anything before that. What is in memory is therefore always what
is stored, and everything that was announced is in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Mapping,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from rdzv.core import rendezvous
from rdzv.core.commands import Command, Fail, Join, Tick
from rdzv.core.events import Event
from rdzv.core.explain import job_state
from rdzv.core.invariants import violations
from rdzv.core.model import State
from rdzv.core.rendezvous import Transition
from rdzv.errors import (
    InvalidRequestError,
    InvariantError,
    LimitExceededError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousStateError,
    UnknownJobError,
)
from rdzv.runtime.clock import Clock, LoopWatch, Timer
from rdzv.runtime.tasks import Tasks
from rdzv.server.engine.clock_steps import TimeSeen
from rdzv.server.engine.store_state import StoreState
from rdzv.server.settings.config import DAY_MS, Config
from rdzv.server.telemetry import event_lines
from rdzv.server.telemetry.metrics_hooks import Meter
from rdzv.stores.base import Read, Record, RevisionConflictError, Store, StoreRefusedError
from rdzv.structs import replace, struct

log = logging.getLogger("rdzv.jobs")

T = TypeVar("T")

PROBE = "store-probe"
"""The document that is written to find out whether the store takes writes again."""

TIME_SEEN = "time-seen"
"""The document that says when servers of this store were seen."""

AT_ONCE = 256
"""So many commands are decided at once, and share a commit, at the most."""
AT_ONCE_MS = 100
"""No more are decided at once after so long: nobody else is heard meanwhile."""


@dataclass(slots=True, eq=False)
class Asked:
    """A command that waits to be decided, and who waits for its outcome."""

    command: Command
    guard: Guard | None
    outcome: asyncio.Future[State | RendezvousError]

    def answer(self, outcome: State | RendezvousError) -> None:
        """Say what came of it; who was cancelled does not hear it."""
        if not self.outcome.done():
            self.outcome.set_result(outcome)


@struct(frozen=True)
class _Step:
    """A step that was decided, and is not stored yet."""

    command: Command
    transition: Transition
    asked: Asked | None = None


@dataclass(slots=True, eq=False)
class Job:
    """One job in memory. `lock` guards all of it."""

    rdzv_id: str
    timer: Timer
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    claims: int = 0
    """Who holds the lock or waits for it."""
    loaded: State | None = None
    """None until it is loaded. Always one whose durable half is stored."""
    revision: int = 0
    doubt: tuple[_Step, ...] = ()
    """Steps whose commit may or may not have happened."""
    pending: tuple[Record, ...] = ()
    """History that rides on the next commit."""
    noted: int = 0
    """How often something has happened that no step has led to."""
    node_ids: set[str] = field(default_factory=set)
    """At least the nodes that are present."""

    @property
    def state(self) -> State:
        """The state of a job that is claimed, and so is loaded."""
        assert self.loaded is not None, "only a claimed job is asked for its state"
        return self.loaded

    @property
    def idle(self) -> bool:
        """Whether it can be forgotten: nobody is in it, and the store has all of it."""
        if self.claims or self.doubt or self.pending:
            return False
        if self.loaded is None:
            return not self.node_ids
        membership = self.loaded.membership
        return not membership.run or membership.ended is not None


@struct(frozen=True)
class News:
    """A step that is stored, and of which everyone may now hear."""

    command: Command
    before: State
    after: State
    events: tuple[Event, ...]
    last: bool = True
    """Whether no later step was stored with it."""


_time_seen_decoder = msgspec.json.Decoder(TimeSeen)

Guard = Callable[[State], None]
"""Refuses what must not be done to a job as it is, by raising what the caller is to hear."""

Judge = Callable[[State, Transition], Awaitable[tuple[Command | None, tuple[Record, ...]]]]
"""Hears of a step before it is stored. It may have a command come first, and adds to the history.

What it raises, the step does, and is then taken again.
"""


class Jobs:
    """All jobs of one server: those in the store, and in memory those that are alive."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        watch: LoopWatch,
        config: Config,
        tasks: Tasks,
        new_uid: Callable[[], str],
        publish: Callable[[Job, News], None],
        on_load: Callable[[Job], None],
        meter: Meter,
        judge: Judge,
        on_store_change: Callable[[str | None], None],
    ) -> None:
        """`on_store_change`: see `StoreState`."""
        self._store = store
        self._meter = meter
        self._clock = clock
        self._watch = watch
        self._limits = config.limits
        self._tuning = config.tuning
        self._timings = config.timings
        self._tasks = tasks
        self._new_uid = new_uid
        self._tell = publish
        self._on_load = on_load
        self._judge = judge
        self._jobs: dict[str, Job] = {}
        self._asked: dict[str, deque[Asked]] = {}
        """By rdzv_id: what waits to be decided."""
        self._ended: dict[str, int] = {}
        """When each stored job that was loaded ended, so that none is read again to find out."""
        self._time_noted = False
        """This server has written down that it runs."""
        self._prune_timer = Timer(clock, lambda _: self.start_pruning())
        self.store_state = StoreState(
            clock,
            config.timings.store_retry_ms,
            on_store_change,
            lambda: tasks.start(self._probe()),
        )

    # ---------------------------------------------------------------- decide, persist, publish

    async def submit(self, rdzv_id: str, command: Command, guard: Guard | None = None) -> State:
        """Run one command to its end: decide, persist, publish — in that order.

        `guard` sees the job first, and nobody changes it in between. A caller that is cancelled
        does not cut it short.

        Raises:
            RendezvousError: it was refused and changed nothing; with a `RendezvousConnectionError`
                it may have, and is to be repeated.

        """
        outcome: asyncio.Future[State | RendezvousError] = (
            asyncio.get_running_loop().create_future()
        )
        self._ask_for(rdzv_id, Asked(command, guard, outcome))
        decided = await outcome
        if isinstance(decided, RendezvousError):
            raise decided
        return decided

    def _ask_for(self, rdzv_id: str, asked: Asked) -> None:
        if (waiting := self._asked.get(rdzv_id)) is not None:
            waiting.append(asked)
        else:
            self._asked[rdzv_id] = deque([asked])
            self._tasks.start(self._decide_asked(rdzv_id))

    async def _decide_asked(self, rdzv_id: str) -> None:
        """Decide what waits, until nothing does; others may claim the job in between."""
        waiting = self._asked[rdzv_id]
        try:
            while waiting:
                await self._decide_next(rdzv_id, waiting)
                # Not between two commands: thousands wait, and each turn of the loop is long then.
                await asyncio.sleep(0)
        finally:
            del self._asked[rdzv_id]
            for asked in waiting:
                asked.outcome.cancel()

    async def _decide_next(self, rdzv_id: str, waiting: deque[Asked]) -> None:
        """Decide the next of those that wait, with one commit, and answer them."""
        batch: list[Asked] = []
        try:
            async with self.claim(rdzv_id) as job:
                until_ms = self._clock.now_ms() + AT_ONCE_MS
                steps: list[_Step] = []
                while waiting and len(batch) < AT_ONCE and self._clock.now_ms() < until_ms:
                    batch.append(waiting.popleft())
                    await self._add_step_if_sound(job, batch[-1], steps)
                await self._settle(job, steps)
        except RendezvousError as error:
            # It is everybody's if the job could not be claimed.
            for asked in batch or [waiting.popleft()]:
                if isinstance(error, RendezvousConnectionError) and asked.command != Tick():
                    self.store_state.waits(rdzv_id, asked.command)
                asked.answer(error)
        finally:
            for asked in batch:
                asked.outcome.cancel()

    async def _add_step_if_sound(self, job: Job, asked: Asked, steps: list[_Step]) -> None:
        """Decide one more command; one that would break a guarantee is refused, and no other."""
        try:
            await self._add_step(job, asked, steps)
        except InvariantError as error:
            asked.answer(error)

    async def _add_step(self, job: Job, asked: Asked, steps: list[_Step]) -> None:
        """Decide one more command, upon those that are decided and not stored yet.

        What is refused is answered at once. What this raises concerns the whole job, except for a
        broken guarantee.
        """
        state = steps[-1].transition.state if steps else job.state
        command = asked.command
        if isinstance(command, Join):
            command = replace(command, new_run=self._new_uid())
        try:
            if asked.guard is not None:
                asked.guard(state)
            transition = self._decide(state, command)
        except RendezvousError as error:
            asked.answer(error)
            return
        first, rows = await self._judge(state, transition)
        job.pending += rows
        if first is not None:
            barred = _Step(first, self._decide(state, first))
            await self._check(job, state, barred, steps)
            steps.append(barred)
            state = barred.transition.state
            try:
                transition = self._decide(state, command)
            except RendezvousError as error:
                asked.answer(error)
                return
        step = _Step(command, transition, asked)
        await self._check(job, state, step, steps)
        steps.append(step)

    async def steps(
        self, job: Job, choices: Sequence[Callable[[State], Command | None]]
    ) -> list[RendezvousError]:
        """Do the work of `submit` for a job that the caller has claimed, with one commit.

        Each command is chosen in view of what came of those before it; None: nothing is to be done.
        Returns what was refused.

        Raises:
            RendezvousError: nothing was done, or it is not known whether it was.

        """
        steps: list[_Step] = []
        decided: list[Asked] = []
        for choose in choices:
            command = choose(steps[-1].transition.state if steps else job.state)
            if command is not None:
                asked = Asked(command, None, asyncio.get_running_loop().create_future())
                decided.append(asked)
                await self._add_step_if_sound(job, asked, steps)
        await self._settle(job, steps)
        outcomes = [asked.outcome.result() for asked in decided]
        return [outcome for outcome in outcomes if isinstance(outcome, RendezvousError)]

    async def _check(self, job: Job, before: State, step: _Step, decided: list[_Step]) -> None:
        """Store what was decided before a step that breaks a guarantee, and refuse that one."""
        broken = violations(before, step.transition.state, step.transition.events)
        if broken:
            earlier, decided[:] = tuple(decided), ()
            await self._settle(job, earlier)
            raise await self._reload_broken(job, step.command, broken)

    async def _settle(self, job: Job, steps: Sequence[_Step]) -> None:
        """Persist what was decided, and publish it in its order."""
        if not steps:
            return
        stored = steps[-1].transition.state.membership is not job.state.membership
        if stored:
            await self._persist(job, steps)
        self._publish(job, steps, stored=stored)

    def _decide(self, state: State, command: Command) -> Transition:
        now_ms = self._watch.listened_until_ms()
        command = _aged(command, self._clock.now_ms() - now_ms)
        try:
            return rendezvous.step(state, command, now_ms)
        except RendezvousError:
            raise
        except Exception as error:
            # Values are immutable: whatever went wrong inside, nothing was changed.
            log.exception("job %s: %s failed", state.membership.rdzv_id, command)
            raise _bug(state.membership.rdzv_id, command, f"failed: {error!r}") from error

    async def _reload_broken(self, job: Job, command: Command, broken: list[str]) -> InvariantError:
        what = f"would break {'; '.join(broken)}"
        log.error("job %s: %s %s", job.rdzv_id, command, what)
        await self._load(job)
        # Not at once, or a tick that breaks something would spin.
        job.timer.arm(self._retry_ms())
        return _bug(job.rdzv_id, command, what)

    async def _persist(self, job: Job, steps: Sequence[_Step]) -> None:
        membership = steps[-1].transition.state.membership
        told = (row for step in steps for row in self._rows(step.transition))
        rows = (*job.pending, *told)
        try:
            with self._meter.committing():
                job.revision = await self._write(
                    job, self._store.compare_and_swap(job.rdzv_id, membership, job.revision, rows)
                )
        except RendezvousConnectionError as error:
            if not error.definite:
                job.doubt = tuple(steps)
            for step in steps:
                # One that changes nothing, as most ticks, would be heard of at any time.
                if step.transition.events:
                    self.store_state.waits(job.rdzv_id, step.command)
            raise
        job.pending = ()

    async def _write(self, job: Job, written: Awaitable[T]) -> T:
        """Write a job. If somebody else has written it, it is loaded anew, and nothing was done."""
        try:
            return await self._ask(written, writes=True)
        except RevisionConflictError as error:
            log.error("job %s was written by somebody else; it is loaded anew", job.rdzv_id)
            await self._load(job)
            raise StoreRefusedError(f"{error}; try again") from error

    def _publish(self, job: Job, steps: Sequence[_Step], *, stored: bool) -> None:
        """Make these steps the present, one after another, and tell everyone. Waits for nothing.

        `stored`: they have been, so that none of their history waits for another commit.
        """
        for step in steps:
            before, transition = job.state, step.transition
            after = job.loaded = transition.state
            self.store_state.decided(job.rdzv_id, step.command)
            self._note_end(job)
            job.timer.arm(transition.wake_at_ms)
            rows = self._rows(transition)
            if not stored:
                self._postpone(job, rows)
            self._say(rows, transition.events)
            self._meter.stepped(before, after, transition.events, self._clock.now_ms())
            news = News(step.command, before, after, transition.events, last=step is steps[-1])
            self._tell(job, news)
            if step.asked is not None:
                step.asked.answer(after)

    def note(self, rdzv_id: str, events: tuple[Event, ...]) -> None:
        """Write events that no step has led to: to the log, and with the next commit to history."""
        job = self._jobs.get(rdzv_id)
        if job is not None and job.loaded is not None:
            run = job.loaded.membership.run
            rows = event_lines.records(rdzv_id, run, events, self._clock.now_ms())
            self._postpone(job, rows)
            self._say(rows, events)
            job.noted += 1

    def _rows(self, transition: Transition) -> tuple[Record, ...]:
        membership = transition.state.membership
        now_ms = self._clock.now_ms()
        return event_lines.records(membership.rdzv_id, membership.run, transition.events, now_ms)

    def record(self, rdzv_id: str, event: Event) -> None:
        """Write into the history of a job what concerns it, and changes nothing of it."""
        if (job := self._jobs.get(rdzv_id)) is not None and job.loaded is not None:
            membership, now_ms = job.loaded.membership, self._clock.now_ms()
            rows = event_lines.records(rdzv_id, membership.run, (event,), now_ms)
            self._postpone(job, rows)
            self._say(rows, (event,))
            job.noted += 1

    def _say(self, rows: tuple[Record, ...], events: tuple[Event, ...]) -> None:
        """Tell the log, and whoever counts, what history tells."""
        event_lines.publish(rows, events)
        self._meter.recorded(rows)

    def _postpone(self, job: Job, rows: tuple[Record, ...]) -> None:
        """Keep history for the next commit; too much of it gets one of its own."""
        job.pending += rows
        if len(job.pending) > self._limits.pending_rows:
            rows, job.pending = job.pending, ()
            self._tasks.start(self._flush(rows))

    # ---------------------------------------------------------------- claiming and loading

    @asynccontextmanager
    async def claim(self, rdzv_id: str) -> AsyncIterator[Job]:
        """Hold one job, loaded and beyond doubt. A job that is idle afterwards is forgotten.

        Raises:
            RendezvousConnectionError: the store is away.
            RendezvousStateError: what is stored can not be read.
            LimitExceededError: too many jobs.

        """
        job = self._jobs.get(rdzv_id) or self._new_job(rdzv_id)
        job.claims += 1
        try:
            async with job.lock:
                if job.loaded is None:
                    await self._load(job)
                if job.doubt:
                    await self._resolve(job, job.doubt)
                yield job
        except (RendezvousConnectionError, InvariantError):
            # Its timer, if nobody else, comes back to it.
            job.timer.arm_by(self._retry_ms())
            raise
        finally:
            job.claims -= 1
            if job.idle and not self._asked.get(rdzv_id):
                job.timer.cancel()
                del self._jobs[rdzv_id]

    def _new_job(self, rdzv_id: str) -> Job:
        if len(self._jobs) >= self._limits.jobs:
            raise LimitExceededError(
                f"job {rdzv_id} would be one too many: this server holds {self._limits.jobs}; try "
                "again when others have ended, or raise the limit `jobs`"
            )
        timer = Timer(self._clock, lambda due_ms: self._tick(job, due_ms))
        job = self._jobs[rdzv_id] = Job(rdzv_id, timer)
        return job

    async def _load(self, job: Job) -> None:
        """Begin anew from what is stored; `on_load` brings everyone who was there up to date."""
        job.loaded, job.doubt = None, ()
        stored = await self._ask(self._store.load(job.rdzv_id))
        now_ms = self._clock.now_ms()
        if stored is None:
            job.loaded, job.revision = rendezvous.vacant(job.rdzv_id, self._tuning), 0
        else:
            job.loaded = rendezvous.restore(stored.membership, self._tuning, now_ms)
            job.revision = stored.revision
        self._note_end(job)
        self._meter.loaded(job.loaded, now_ms)
        job.timer.arm(now_ms)
        self._on_load(job)

    async def _resolve(self, job: Job, steps: Sequence[_Step]) -> None:
        """Find out whether a commit has happened, and go on from there."""
        stored = await self._ask(self._store.load(job.rdzv_id))
        revision = stored.revision if stored else 0
        if revision == job.revision:
            job.doubt = ()
        elif stored and stored.membership == steps[-1].transition.state.membership:
            job.revision, job.doubt, job.pending = revision, (), ()
            self._publish(job, steps, stored=True)
        else:
            await self._load(job)

    def _tick(self, job: Job, due_ms: int) -> None:
        if self._watch.late(due_ms):
            job.timer.arm_by(self._watch.settled_ms)
        else:
            # Nobody waits for the outcome: if it is an error, `claim` has armed the timer again.
            outcome: asyncio.Future[State | RendezvousError] = (
                asyncio.get_running_loop().create_future()
            )
            self._ask_for(job.rdzv_id, Asked(Tick(), None, outcome))

    def _retry_ms(self) -> int:
        return self._clock.now_ms() + self._timings.store_retry_ms

    # ---------------------------------------------------------------- forgetting

    async def forget(self, rdzv_id: str) -> None:
        """Delete a job that has ended, with its history: what joins by its name is a new job.

        A caller that is cancelled does not cut it short.

        Raises:
            UnknownJobError: nobody has ever joined it.
            InvalidRequestError: its run has not ended, or somebody is in it; nothing was deleted.
            RendezvousConnectionError: it may have been deleted; to be repeated.

        """
        error = await asyncio.shield(self._tasks.start(self._forgotten(rdzv_id)))
        if error is not None:
            raise error

    async def _forgotten(self, rdzv_id: str) -> RendezvousError | None:
        try:
            async with self.claim(rdzv_id) as job:
                _refuse_to_forget(job.state)
                await self._delete(job, "an operator said so")
        except RendezvousError as error:
            return error
        return None

    async def _delete(self, job: Job, why: str) -> None:
        """Delete a claimed job whose run has ended from the store, and from memory."""
        try:
            await self._write(job, self._store.delete(job.rdzv_id, job.revision))
        except RendezvousConnectionError as error:
            if not error.definite:
                # Whoever claims it next finds out.
                job.loaded = None
            raise
        log.info("job %s is forgotten: %s", job.rdzv_id, why)
        job.loaded, job.revision = rendezvous.vacant(job.rdzv_id, self._tuning), 0
        job.pending = ()
        self._note_end(job)

    def _note_end(self, job: Job) -> None:
        if (ended := job.state.membership.ended) is None:
            self._ended.pop(job.rdzv_id, None)
        else:
            self._ended[job.rdzv_id] = ended.at_ms

    def start_pruning(self) -> None:
        """Forget ended jobs that are too many or too old, now and from time to time.

        Nobody waits for it. A job that was never loaded, for it can not be read, is left alone.
        """
        self._prune_timer.arm(self._clock.now_ms() + self._timings.prune_every_ms)
        self._tasks.start(self._prune())

    async def _prune(self) -> None:
        most, kept_ms = self._limits.ended_jobs, self._timings.ended_kept_ms
        now_ms, ended_at_ms = self._clock.now_ms(), dict(self._ended)
        try:
            seen = await self._note_time(now_ms)
        except RendezvousError as error:
            log.warning("ended jobs are forgotten later: %s", error)
            return
        counted = {
            rdzv_id: now_ms - seen.counted_since(at_ms, now_ms)
            for rdzv_id, at_ms in ended_at_ms.items()
        }
        for rdzv_id, why in outlived(counted, now_ms, most, kept_ms):
            try:
                async with self.claim(rdzv_id) as job:
                    ended = job.state.membership.ended
                    # Meanwhile it may have begun, and even ended, another run.
                    same = ended is not None and ended.at_ms == ended_at_ms[rdzv_id]
                    if same and not job.state.anybody:
                        await self._delete(job, why)
            except (RendezvousConnectionError, LimitExceededError) as error:
                log.warning("ended jobs are forgotten later: %s", error)
                return
            except RendezvousError as error:
                log.error("job %s can not be forgotten: %s", rdzv_id, error)

    async def _note_time(self, now_ms: int) -> TimeSeen:
        """Write down that a server runs now; return that, with what was written before."""
        data, revision = await self.load_document(TIME_SEEN) or (b"{}", 0)
        try:
            past = _time_seen_decoder.decode(data)
        except msgspec.DecodeError as error:
            raise RendezvousStateError(
                f"the document {TIME_SEEN} can not be read: {error}; it was left untouched. "
                "Restore it from a backup"
            ) from error
        seen = past.noted(now_ms, at_start=not self._time_noted)
        await self.swap_document(TIME_SEEN, msgspec.json.encode(seen), revision)
        self._time_noted = True
        return seen

    # ---------------------------------------------------------------- the store

    async def _ask(self, answer: Awaitable[T], *, writes: bool = False) -> T:
        """Await the store, and note whether it has answered."""
        began_ms = self._clock.now_ms()
        try:
            result = await answer
        except RendezvousConnectionError as error:
            self._meter.store_failed(writes=writes)
            self.store_state.failed(error, began_ms, writes=writes)
            raise
        self.store_state.answered(writes=writes)
        return result

    async def _probe(self) -> None:
        """Find out whether the store is back, and takes writes if that was what it did not."""
        with contextlib.suppress(RendezvousError):
            found = await self._ask(self._store.load_document(PROBE))
            if self.store_state.unwritable:
                revision = found[1] if found is not None else 0
                await self.swap_document(PROBE, b"", revision)

    @property
    def states(self) -> tuple[State, ...]:
        """The present states of all jobs in memory, which is all that have not ended."""
        return tuple(job.loaded for job in self._jobs.values() if job.loaded is not None)

    @property
    def doubtful(self) -> tuple[str, ...]:
        """The jobs of which nobody knows whether their last commit has happened."""
        return tuple(job.rdzv_id for job in self._jobs.values() if job.doubt)

    async def _flush(self, rows: tuple[Record, ...]) -> None:
        try:
            if rows:
                await self._ask(self._store.append(rows), writes=True)
        except RendezvousError as error:
            # It is in the log all the same; a job never waits for its history.
            log.warning("%d rows of history are lost: %s", len(rows), error)

    async def take_over(self) -> int:
        """Return this server's leadership number."""
        # Anchored to the clock, so that it does not go back with a store that was lost or restored.
        at_least = self._clock.now_ms() // 1000
        return await self._ask(self._store.take_over(at_least), writes=True)

    async def load_all(self) -> None:
        """Load what has not ended, and note what has; one that can not be read is left alone.

        Raises:
            RendezvousConnectionError: the store is away.

        """
        async for rdzv_id, stored in self._stored():
            try:
                if isinstance(stored, RendezvousStateError):
                    raise stored
                if stored.membership.ended is not None:
                    self._ended[rdzv_id] = stored.membership.ended.at_ms
                    continue
                async with self.claim(rdzv_id):
                    pass
            except RendezvousStateError as error:
                log.error("job %s is left alone: %s", rdzv_id, error)

    async def each(self) -> AsyncGenerator[State, None]:
        """Yield the present state of every stored job that can be read, one after the other."""
        async for rdzv_id, stored in self._stored():
            try:
                if (present := self.peek(rdzv_id)) is not None:
                    yield present
                elif isinstance(stored, RendezvousStateError):
                    raise stored
                elif stored.membership.ended is not None:
                    yield rendezvous.restore(stored.membership, self._tuning, self._clock.now_ms())
                else:
                    # It is being loaded, or has ended since.
                    yield await self.look(rdzv_id)
            except RendezvousStateError as error:
                log.error("job %s is not listed: %s", rdzv_id, error)

    async def _stored(self) -> AsyncGenerator[tuple[str, Read], None]:
        async with aclosing(self._store.pages()) as pages:
            while (page := await self._ask(anext(pages, None))) is not None:
                for found in page:
                    yield found

    async def look(self, rdzv_id: str) -> State:
        """Return a job's present state, without waiting for a commit that is under way."""
        if (state := self.peek(rdzv_id)) is not None:
            return state
        async with self.claim(rdzv_id) as job:
            return job.state

    def peek(self, rdzv_id: str) -> State | None:
        """Return the present state of a job that is in memory."""
        job = self._jobs.get(rdzv_id)
        return job.loaded if job else None

    def noted(self, rdzv_id: str) -> int:
        """Return a number that grows when something happens to a job that no step has led to."""
        job = self._jobs.get(rdzv_id)
        return job.noted if job else 0

    async def history(self, rdzv_id: str, limit: int) -> tuple[Record, ...]:
        """Return a job's newest events, oldest first, with those that wait for a commit."""
        job = self._jobs.get(rdzv_id)
        pending = job.pending if job else ()
        rows = await self._ask(self._store.history(rdzv_id, limit))
        return (*rows, *pending)[-limit:]

    async def load_document(self, name: str) -> tuple[bytes, int] | None:
        """Return a document as it was last written, and its revision; None if it never was."""
        return await self._ask(self._store.load_document(name))

    async def swap_document(self, name: str, data: bytes, revision: int) -> int:
        """Write a document; return the new revision. Raises what `Store.swap_document` does."""
        return await self._ask(self._store.swap_document(name, data, revision), writes=True)

    async def append(self, rows: tuple[Record, ...]) -> None:
        """Write history that belongs to no step; if it can not be stored, the log has it alone."""
        await self._flush(rows)

    async def past(self, rdzv_id: str, limit: int) -> tuple[Record, ...]:
        """Return the newest rows of what was appended under a name that no job can have."""
        return await self._ask(self._store.history(rdzv_id, limit))

    async def backup(self, leadership: int) -> AsyncIterator[bytes]:
        """Yield all that the store holds, as the lines of a backup file."""
        from rdzv.stores import backup

        now_ms = self._clock.now_ms()
        header = backup.Header(self._store.place, leadership, now_ms)
        async for line in backup.lines(self._store, header):
            yield line

    def stop_timers(self) -> None:
        """Let time pass for no job any more."""
        self._prune_timer.cancel()
        self.store_state.stop()
        for job in self._jobs.values():
            job.timer.cancel()

    async def flush(self) -> None:
        """Write the history that still waits for a commit."""
        await self._flush(tuple(row for job in self._jobs.values() for row in job.pending))


def outlived(
    ended_at_ms: Mapping[str, int], now_ms: int, most: int, kept_ms: int
) -> tuple[tuple[str, str], ...]:
    """Say which ended jobs are to be forgotten, and why; what ended first goes first.

    >>> outlived({"a": 30, "b": 10, "c": 20}, now_ms=40, most=2, kept_ms=DAY_MS)
    (('b', '2 other jobs have ended since'),)
    """
    oldest_first = sorted(ended_at_ms, key=lambda rdzv_id: (ended_at_ms[rdzv_id], rdzv_id))
    too_many = max(len(oldest_first) - most, 0)
    too_old = sum(1 for at_ms in ended_at_ms.values() if now_ms - at_ms > kept_ms)
    return tuple(
        (
            rdzv_id,
            f"it ended more than {kept_ms / DAY_MS:g} days ago"
            if place < too_old
            else f"{most} other jobs have ended since",
        )
        for place, rdzv_id in enumerate(oldest_first[: max(too_many, too_old)])
    )


def _refuse_to_forget(state: State) -> None:
    membership = state.membership
    rdzv_id = membership.rdzv_id
    if not membership.run:
        raise UnknownJobError(
            f"no job {rdzv_id} is known here; `rdzvctl list` shows those that are"
        )
    if membership.ended is None:
        raise InvalidRequestError(
            f"job {rdzv_id} is {job_state(state)} and can not be forgotten; stop it first, with "
            f"`rdzvctl stop {rdzv_id}`, or wait for its end"
        )
    if state.anybody:
        names = sorted({*state.seats, *state.waiting, *state.stuck})
        raise InvalidRequestError(
            f"job {rdzv_id} can not be forgotten: it is {job_state(state)}, and {names[0]} is "
            "still in it; wait until nobody is"
        )


def _aged(command: Command, deaf_ms: int) -> Command:
    """Count the ages in a command back from the time that its job is told, not from the present."""
    if deaf_ms <= 0 or not isinstance(command, Fail | Join):
        return command
    failures = (replace(f, age_ms=max(f.age_ms - deaf_ms, 0)) for f in command.failures)
    return replace(command, failures=tuple(failures))


def _bug(rdzv_id: str, command: Command, what: str) -> InvariantError:
    return InvariantError(
        f"a bug of rdzvd, please report it: {type(command).__name__} in job {rdzv_id} {what}; "
        "nothing was changed"
    )
