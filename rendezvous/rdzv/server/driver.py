"""Decide, persist, publish: in that order, one command at a time for each job.

The driver holds what the pure cores can not: streams, timers, locks and the store. It decides
nothing. Three loops meet here:

* a *command* to a job is stepped under that job's lock; if the durable half changed it is
  written; then its news go to the streams, its events to log and history, and the job's one timer
  is armed anew (`submit`, `_step`);
* the *nodes core* steps in memory, without waiting for anything, so it needs no lock; what its
  events mean for each job is worked out again under that job's lock (`_mark`), so that neither a
  late delivery nor a repeated one can do harm;
* a *pause* of the loop itself is noticed by any timer that fires late; then leases are renewed
  and no deadline counts before what has come in meanwhile is read (`_could_not_hear`).

When the store is away, streams stay open, nothing new is decided, and whatever a node said is
tried again until it can be written. A commit of which nobody knows whether it happened leaves its
job in doubt; the next reader finds out, and no one is told anything before that.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from rdzv.core import nodes, rendezvous
from rdzv.core.commands import Command, Fail, Join, MarkAway, MarkBack, MarkLost, Tick
from rdzv.core.events import RunEnded
from rdzv.core.explain import JobView, view
from rdzv.core.invariants import violations
from rdzv.core.model import State
from rdzv.core.rendezvous import Transition
from rdzv.errors import (
    InvariantError,
    LimitExceededError,
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousStateError,
    UnknownJobError,
    UnknownNodeError,
)
from rdzv.server import observe, told
from rdzv.server.clock import Clock, Timer, sleep_ms
from rdzv.server.config import Config
from rdzv.server.messages import Belief, Closed, Hello, Joined, Refused, Told, Waiting, Welcome
from rdzv.server.streams import Stream
from rdzv.stores.base import Record, RevisionConflictError, Store

log = logging.getLogger("rdzv.driver")

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Job:
    """One job as the driver holds it. `lock` guards all of it."""

    rdzv_id: str
    timer: Timer
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    claims: int = 0
    """Who holds the lock or waits for it."""
    state: State | None = None
    """None until it is loaded. Always one whose durable half is stored."""
    revision: int = 0
    doubt: tuple[Command, Transition] | None = None
    """A step whose commit may or may not have happened."""
    pending: tuple[Record, ...] = ()
    """History that rides on the next commit."""
    node_ids: set[str] = field(default_factory=set)
    """At least the nodes that are present."""

    @property
    def idle(self) -> bool:
        """Whether it can be forgotten: nobody is in it, and the store has all of it."""
        if self.claims or self.doubt or self.pending:
            return False
        if self.state is None:
            return not self.node_ids
        if not self.state.membership.run:
            return True
        return self.state.membership.ended is not None


class Driver:
    """Drives all jobs and nodes of one server. Made by `running`."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        config: Config,
        tasks: asyncio.TaskGroup,
        new_uid: Callable[[], str],
    ) -> None:
        self._store = store
        self._clock = clock
        self._limits = config.limits
        self._timings = config.timings
        self._tuning = config.tuning
        self._new_uid = new_uid
        self._group = tasks
        self._tasks: set[asyncio.Future[Any]] = set()
        self._jobs: dict[str, Job] = {}
        self._jobs_of: dict[str, set[str]] = {}
        """By node_id: at least the jobs in which the node is present."""
        self._nodes = nodes.Nodes(leadership=0, tuning=config.nodes_tuning)
        self._streams: dict[str, Stream] = {}
        self._numbers = itertools.count(1)
        self._heard: set[str] = set()
        self._nodes_timer = Timer(clock, self._tick_nodes)
        self._hear_timer = Timer(clock, lambda _: self._feed_heard())
        self._watch_timer = Timer(clock, self._watch)
        self._deaf_until_ms = 0
        self._job_ms = 0
        """The latest time that a job was told; it stands still after a pause."""
        self._store_away_since_ms: int | None = None
        self._stopping = False

    @classmethod
    @asynccontextmanager
    async def running(
        cls,
        store: Store,
        clock: Clock,
        config: Config,
        new_uid: Callable[[], str] = lambda: secrets.token_hex(6),
    ) -> AsyncIterator[Driver]:
        """Take over the store, run until the body ends, and close every stream.

        The store remains open; it belongs to the caller.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                driver = cls(store, clock, config, tasks, new_uid)
                await driver._start()
                try:
                    yield driver
                finally:
                    await driver._stop()
        except BaseExceptionGroup as group:
            # The group is our affair: a caller that raises one error is to see that one.
            if len(group.exceptions) == 1:
                raise group.exceptions[0] from group.exceptions[0].__cause__
            raise

    @property
    def leadership(self) -> int:
        """The number of this server's take-over; every message carries it."""
        return self._nodes.leadership

    # ---------------------------------------------------------------- start and stop

    async def _start(self) -> None:
        # Anchored to the clock, so that it does not go back with a store that was lost or restored.
        leadership = await self._store.take_over(at_least=self._clock.now_ms() // 1000)
        self._nodes = replace(self._nodes, leadership=leadership)
        for rdzv_id in await self._store.list():
            try:
                async with self._claim(rdzv_id):
                    pass
            except RendezvousStateError as error:
                log.error("job %s is left alone: %s", rdzv_id, error)
        self._arm_watch()

    async def _stop(self) -> None:
        """Close every stream and let what is being decided come to its end."""
        self._stopping = True
        for timer in (self._nodes_timer, self._hear_timer, self._watch_timer):
            timer.cancel()
        for job in self._jobs.values():
            job.timer.cancel()
        self.close_streams(
            RendezvousConnectionError("this server is stopping; workers run on, connect again")
        )
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._timings.stop_grace_ms / 1000)
        for task in self._tasks:
            task.cancel()
        await self._flush(tuple(row for job in self._jobs.values() for row in job.pending))

    def close_streams(self, error: RendezvousError) -> None:
        """End every stream with this error, which moves no node and no job."""
        self._stopping = True
        for stream in self._streams.values():
            stream.close(error)

    def _spawn(self, work: Coroutine[object, object, T]) -> asyncio.Task[T]:
        """Run in a task of the driver's own. What it raises ends the server, so: nothing."""
        task = self._group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # ---------------------------------------------------------------- commands to a job

    async def submit(self, rdzv_id: str, command: Command) -> State:
        """Run one command to its end: decide, persist, publish — in that order.

        A caller that is cancelled does not cut it short.

        Raises:
            RendezvousError: it was refused and changed nothing; with a `RendezvousConnectionError`
                it may have, and is to be repeated.

        """
        outcome = await asyncio.shield(self._spawn(self._outcome(rdzv_id, command)))
        if isinstance(outcome, RendezvousError):
            raise outcome
        return outcome

    async def _outcome(self, rdzv_id: str, command: Command) -> State | RendezvousError:
        try:
            async with self._claim(rdzv_id) as job:
                return await self._step(job, command)
        except RendezvousError as error:
            return error

    @asynccontextmanager
    async def _claim(self, rdzv_id: str) -> AsyncIterator[Job]:
        """Hold one job, loaded and beyond doubt. A job that is idle afterwards is forgotten."""
        job = self._jobs.get(rdzv_id) or self._new_job(rdzv_id)
        job.claims += 1
        try:
            async with job.lock:
                await self._make_sure(job)
                yield job
        except (RendezvousConnectionError, InvariantError):
            # Its timer, if nobody else, comes back to it.
            job.timer.arm_by(self._retry_ms())
            raise
        finally:
            job.claims -= 1
            if job.idle:
                job.timer.cancel()
                del self._jobs[rdzv_id]

    def _retry_ms(self) -> int:
        return self._clock.now_ms() + self._timings.store_retry_ms

    def _new_job(self, rdzv_id: str) -> Job:
        if len(self._jobs) >= self._limits.jobs:
            raise LimitExceededError(
                f"job {rdzv_id} would be one too many: this server holds {self._limits.jobs}; try "
                "again when others have ended, or raise the limit `jobs`"
            )
        timer = Timer(self._clock, lambda due_ms: self._tick_job(job, due_ms))
        job = self._jobs[rdzv_id] = Job(rdzv_id, timer)
        return job

    async def _step(self, job: Job, command: Command) -> State:
        before = _loaded(job)
        if isinstance(command, Join):
            command = replace(command, new_run=self._new_uid())
        transition = self._decide(before, command)
        if broken := violations(before, transition.state):
            log.error("job %s: %s would break: %s", job.rdzv_id, command, "; ".join(broken))
            await self._load(job)
            job.timer.arm(self._retry_ms())
            raise InvariantError(
                f"a bug of rdzvd, please report it: {type(command).__name__} in job "
                f"{job.rdzv_id} would break {'; '.join(broken)}; nothing was changed"
            )
        if transition.state.membership is not before.membership:
            await self._persist(job, command, transition)
        self._publish(job, command, transition)
        return transition.state

    def _decide(self, state: State, command: Command) -> Transition:
        now_ms = self._listened_until()
        deaf_ms = self._clock.now_ms() - now_ms
        if deaf_ms and isinstance(command, Fail | Join):
            # Ages are counted back from the present, which is not what the job is told.
            failures = tuple(
                replace(f, age_ms=max(f.age_ms - deaf_ms, 0)) for f in command.failures
            )
            command = replace(command, failures=failures)
        try:
            return rendezvous.step(state, command, now_ms)
        except RendezvousError:
            raise
        except Exception as error:
            # Values are immutable: whatever went wrong inside, nothing was changed.
            log.exception("job %s: %s failed", state.membership.rdzv_id, command)
            raise InvariantError(
                f"a bug of rdzvd, please report it: {type(command).__name__} in job "
                f"{state.membership.rdzv_id} failed: {error!r}; nothing was changed"
            ) from error

    async def _persist(self, job: Job, command: Command, transition: Transition) -> None:
        membership = transition.state.membership
        rows = (*job.pending, *self._rows(transition))
        try:
            job.revision = await self._ask_store(
                self._store.compare_and_swap(job.rdzv_id, membership, job.revision, rows)
            )
        except RevisionConflictError as error:
            log.error("job %s was written by somebody else; it is loaded anew", job.rdzv_id)
            await self._load(job)
            raise RendezvousConnectionError(f"{error}; try again") from error
        except RendezvousConnectionError as error:
            if not error.definite:
                job.doubt = (command, transition)
            raise
        job.pending = ()

    def _rows(self, transition: Transition) -> tuple[Record, ...]:
        membership = transition.state.membership
        now_ms = self._clock.now_ms()
        return observe.records(membership.rdzv_id, membership.run, transition.events, now_ms)

    def _publish(self, job: Job, command: Command, transition: Transition) -> None:
        """Make a step that is stored the present, and tell everyone. Waits for nothing."""
        before, after, now_ms = _loaded(job), transition.state, self._clock.now_ms()
        job.state = after
        job.timer.arm(transition.wake_at_ms)
        rows = self._rows(transition)
        if after.membership is before.membership:
            self._postpone(job, rows)
        observe.publish(rows, transition.events)
        if isinstance(command, Join):
            self._admitted(job, command.node_id, now_ms)
        for node_id, message in told.news(before, after, transition.events, now_ms):
            self._send(node_id, message)
        if any(isinstance(event, RunEnded) for event in transition.events):
            self._forget_nodes(job)

    def _admitted(self, job: Job, node_id: str, now_ms: int) -> None:
        state = _loaded(job)
        membership = state.membership
        self._note(job, node_id)
        self._send(node_id, Joined(job.rdzv_id, membership.run, membership.run_number))
        if node_id in state.waiting:
            self._send(node_id, told.waiting(state, node_id, now_ms))

    def _send(self, node_id: str, message: Told) -> None:
        if stream := self._streams.get(node_id):
            stream.send(message)

    # ---------------------------------------------------------------- loading and the store

    async def _make_sure(self, job: Job) -> None:
        """Load a job that is not loaded, and find out about a commit in doubt."""
        if job.state is None:
            await self._load(job)
        if job.doubt is None:
            return
        command, transition = job.doubt
        stored = await self._ask_store(self._store.load(job.rdzv_id))
        revision = stored.revision if stored else 0
        if revision == job.revision:
            job.doubt = None
        elif stored and stored.membership == transition.state.membership:
            job.revision, job.doubt, job.pending = revision, None, ()
            self._publish(job, command, transition)
        else:
            await self._load(job)

    async def _load(self, job: Job) -> None:
        """Begin anew from what is stored, and bring everyone who was there up to date."""
        job.state, job.doubt = None, None
        stored = await self._ask_store(self._store.load(job.rdzv_id))
        now_ms = self._clock.now_ms()
        state = rendezvous.vacant(job.rdzv_id, self._tuning)
        job.revision = 0
        if stored is not None:
            state = rendezvous.restore(stored.membership, self._tuning, now_ms)
            job.revision = stored.revision
        job.state = state
        job.timer.arm(now_ms)
        former = tuple(job.node_ids)
        for node_id, seat in state.seats.items():
            self._note(job, node_id)
            self._step_nodes(nodes.Expect(node_id, seat.incarnation))
            self._mark_soon(node_id, [job.rdzv_id])
        for node_id in former:
            self._tell_anew(state, node_id, now_ms)

    def _tell_anew(self, state: State, node_id: str, now_ms: int) -> None:
        """Tell a connected node how things are with a job that was loaded anew."""
        stream, membership = self._streams.get(node_id), state.membership
        if stream is None:
            return
        if membership.ended is None and state.incarnation(node_id) != stream.incarnation:
            # Who waited is not stored, nor who took over a seat: the node itself knows.
            stream.greeted = False
            text = "the server has read this job anew; say hello again with what you believe"
            stream.send(Refused(membership.rdzv_id, UnknownNodeError.code, text))
            return
        belief = Belief(membership.rdzv_id, membership.run, None, has_workers=False)
        for message in told.owed(state, node_id, belief, now_ms):
            stream.send(message)

    async def _ask_store(self, answer: Awaitable[T]) -> T:
        """Await the store; say once that it is away, and once that it is back."""
        now_ms = self._clock.now_ms()
        try:
            result = await answer
        except RendezvousConnectionError as error:
            if self._store_away_since_ms is None:
                self._store_away_since_ms = now_ms
                log.error("the store is away: %s; workers run on, nothing new is decided", error)
            raise
        if self._store_away_since_ms is not None:
            away_s = (now_ms - self._store_away_since_ms) / 1000
            self._store_away_since_ms = None
            log.warning("the store is back after %.1f s", away_s)
        return result

    def _postpone(self, job: Job, rows: tuple[Record, ...]) -> None:
        """Keep history for the next commit; too much of it gets one of its own."""
        job.pending += rows
        if len(job.pending) > self._limits.pending_rows and not self._stopping:
            rows, job.pending = job.pending, ()
            self._spawn(self._flush(rows))

    async def _flush(self, rows: tuple[Record, ...]) -> None:
        try:
            if rows:
                await self._ask_store(self._store.append(rows))
        except RendezvousError as error:
            # It is in the log all the same; a job never waits for its history.
            log.warning("%d rows of history are lost: %s", len(rows), error)

    def _note(self, job: Job, node_id: str) -> None:
        job.node_ids.add(node_id)
        self._jobs_of.setdefault(node_id, set()).add(job.rdzv_id)

    def _forget_nodes(self, job: Job) -> None:
        """Forget who was in a run that has ended, but for those who began the next."""
        state = _loaded(job)
        for node_id in [n for n in job.node_ids if not state.present(n)]:
            self._forget_node(job, node_id)

    def _forget_node(self, job: Job, node_id: str) -> None:
        job.node_ids.discard(node_id)
        if rdzv_ids := self._jobs_of.get(node_id):
            rdzv_ids.discard(job.rdzv_id)
            if not rdzv_ids:
                del self._jobs_of[node_id]

    # ---------------------------------------------------------------- streams

    def attach(self, hello: Hello) -> Stream:
        """Open a node's stream; the first message in it is `Welcome`.

        Raises:
            NodeSupersededError: another instance speaks for this node_id.
            RendezvousConnectionError: to be tried again: here, or at the server that took over.
            LimitExceededError: too many nodes.

        """
        self._refuse_hello(hello)
        number = next(self._numbers)
        connect = nodes.Connect(
            node_id=hello.node_id,
            instance=hello.instance,
            kind=hello.kind,
            address=hello.address,
            pid=hello.pid,
            stream=number,
            incarnation=hello.incarnation,
        )
        self._step_nodes(connect)
        record = self._nodes.records[hello.node_id]
        stream = Stream(number, hello.node_id, record.incarnation, self._limits.outbox)
        self._streams[hello.node_id] = stream
        interval_ms = record.lease_ms // self._nodes.tuning.heartbeats_per_lease
        stream.send(Welcome(record.incarnation, interval_ms, record.lease_ms))
        return stream

    def _refuse_hello(self, hello: Hello) -> None:
        if self._stopping:
            raise RendezvousConnectionError("this server is stopping; connect again")
        if hello.leadership > self.leadership:
            raise RendezvousConnectionError(
                f"this server (leadership {self.leadership}) was superseded by one with leadership "
                f"{hello.leadership}; try another endpoint"
            )
        known = self._nodes.records
        if hello.node_id not in known and len(known) >= self._limits.nodes:
            raise LimitExceededError(
                f"node {hello.node_id} would be one too many: this server holds "
                f"{self._limits.nodes}; raise the limit `nodes`"
            )

    def detach(self, stream: Stream) -> None:
        """Note that a stream has ended. The node is away, and lost if it stays away."""
        stream.close()
        if self._streams.get(stream.node_id) is stream:
            del self._streams[stream.node_id]
        if not self._stopping:
            self._step_nodes(nodes.Disconnect(stream.node_id, stream.number))

    def heard(self, stream: Stream) -> None:
        """Note that a node has said something."""
        self._heard.add(stream.node_id)
        self._hear_timer.arm_by(self._clock.now_ms() + self._timings.hear_every_ms)

    def plan_away(self, stream: Stream, deadline_ms: int) -> None:
        """Note that an agent goes away on purpose and is back within `deadline_ms`."""
        self._step_nodes(nodes.PlanAway(stream.node_id, stream.number, deadline_ms))

    async def greet(self, stream: Stream, beliefs: Iterable[Belief]) -> None:
        """Hear what a node believes about its jobs, and tell it what it has missed.

        Where the node is present as a former instance that nobody spoke for, that one is lost.
        """
        for belief in beliefs:
            await self._hear_belief(stream, belief)
        stream.greeted = True
        self._mark_soon(stream.node_id)

    async def _hear_belief(self, stream: Stream, belief: Belief) -> None:
        try:
            state = await self._insist(stream, belief.rdzv_id, Tick())
            if rendezvous.ended_run(state, belief.run) is None:
                for command in belief.commands:
                    state = await self._insist(stream, belief.rdzv_id, command)
        except RendezvousError as error:
            await self._refuse(stream, belief, error)
            return
        # A step of someone else may have been published since ours.
        if (job := self._jobs.get(belief.rdzv_id)) and job.state is not None:
            state = job.state
        if told.unknown(state, belief):
            self._unknown_job(stream, belief)
        for message in told.owed(state, stream.node_id, belief, self._clock.now_ms()):
            stream.send(message)

    async def hear(self, stream: Stream, rdzv_id: str, command: Command) -> None:
        """Run what a node asks for; a refusal is told to it, never raised."""
        try:
            await self._insist(stream, rdzv_id, command)
        except RendezvousError as error:
            belief = Belief(rdzv_id, getattr(command, "run", ""), None, has_workers=False)
            await self._refuse(stream, belief, error)

    async def _insist(self, stream: Stream, rdzv_id: str, command: Command) -> State:
        """Submit until it is decided: while the store is away, the node's word waits here."""
        while True:
            try:
                return await self.submit(rdzv_id, command)
            except RendezvousConnectionError as error:
                if isinstance(command, Join):
                    reason = f"the server can not store its decisions and tries again: {error}"
                    stream.send(Waiting(rdzv_id, reason))
            await sleep_ms(self._clock, self._timings.store_retry_ms)

    async def _refuse(self, stream: Stream, belief: Belief, error: RendezvousError) -> None:
        """Tell a node that it was refused; if that is because its run is over, tell it how."""
        if isinstance(error, UnknownNodeError):
            self._unknown_job(stream, belief)
            return
        if isinstance(error, RendezvousClosedError) and belief.run:
            state = await self._insist(stream, belief.rdzv_id, Tick())
            if ended := rendezvous.ended_run(state, belief.run):
                stream.send(Closed(belief.rdzv_id, belief.run, ended))
                return
        stream.send(Refused(belief.rdzv_id, error.code, str(error)))

    def _unknown_job(self, stream: Stream, belief: Belief) -> None:
        """Leave a node alone that runs what is not known here: that is no reason to stop it."""
        log.warning(
            "%s runs round %s of run %s of %s, which this server does not know; it is left alone",
            stream.node_id,
            belief.round,
            belief.run or "(none)",
            belief.rdzv_id,
        )

    # ---------------------------------------------------------------- nodes

    def _step_nodes(self, command: nodes.NodesCommand) -> None:
        """Step the nodes core. Nothing is awaited on the way, so no lock is needed."""
        transition = nodes.step(self._nodes, command, self._clock.now_ms())
        self._nodes = transition.nodes
        self._nodes_timer.arm(transition.wake_at_ms)
        for event in transition.events:
            self._on_node_event(event)

    def _on_node_event(self, event: nodes.NodesEvent) -> None:
        match event:
            case nodes.NodeConnected():
                self._close_stream(event.node_id, event.stale_stream, "a newer one is open")
                self._mark_soon(event.node_id)
            case nodes.NodeAway():
                self._mark_soon(event.node_id)
            case nodes.NodeLost():
                self._close_stream(event.node_id, event.stream, f"given up: {event.reason}")
                self._mark_soon(event.node_id, reason=event.reason)

    def _close_stream(self, node_id: str, number: int | None, why: str) -> None:
        stream = self._streams.get(node_id)
        if stream is not None and stream.number == number:
            stream.close(RendezvousConnectionError(f"this stream of {node_id} is closed: {why}"))

    def _mark_soon(
        self, node_id: str, rdzv_ids: Iterable[str] | None = None, reason: str = ""
    ) -> None:
        """Bring jobs up to date about a node: those named, or all in which it may be."""
        if rdzv_ids is None:
            rdzv_ids = tuple(self._jobs_of.get(node_id, ()))
        for rdzv_id in rdzv_ids:
            self._spawn(self._mark(rdzv_id, node_id, reason))

    async def _mark(self, rdzv_id: str, node_id: str, reason: str) -> None:
        while not self._stopping:
            try:
                async with self._claim(rdzv_id) as job:
                    if command := self._mark_command(job, node_id, reason):
                        await self._step(job, command)
                return
            except RendezvousConnectionError:
                await sleep_ms(self._clock, self._timings.store_retry_ms)
            except RendezvousError as error:
                log.error("job %s could not be told about %s: %s", rdzv_id, node_id, error)
                return

    def _mark_command(self, job: Job, node_id: str, reason: str) -> Command | None:
        """Say what a job must hear of a node now, whatever has led to it."""
        held = _loaded(job).incarnation(node_id)
        if held is None:
            self._forget_node(job, node_id)
            return None
        record = self._nodes.records.get(node_id)
        if record is None:
            return MarkLost(node_id, held, reason or "it was given up")
        if record.incarnation != held:
            return self._mark_former(record, held)
        if record.stream is not None:
            return MarkBack(node_id, held)
        return MarkAway(node_id, held, record.until_ms, record.firm)

    def _mark_former(self, record: nodes.NodeRecord, held: int) -> Command | None:
        """Give up a former instance, once the one that replaced it has said what it believes."""
        stream = self._streams.get(record.node_id)
        if stream is not None and stream.greeted and stream.number == record.stream:
            return MarkLost(record.node_id, held, "a new instance of the node took its place")
        return None

    # ---------------------------------------------------------------- time

    def _tick_job(self, job: Job, due_ms: int) -> None:
        if self._could_not_hear(due_ms):
            job.timer.arm_by(self._deaf_until_ms)
        elif not self._stopping:
            # Nobody waits for the outcome: if it is an error, `_claim` has armed the timer again.
            self._spawn(self._outcome(job.rdzv_id, Tick()))

    def _tick_nodes(self, due_ms: int) -> None:
        if self._could_not_hear(due_ms):
            self._nodes_timer.arm_by(self._deaf_until_ms)
            return
        self._feed_heard()
        self._step_nodes(nodes.Tick())

    def _feed_heard(self) -> None:
        """Let the nodes core know who has spoken, all at once."""
        self._hear_timer.cancel()
        if self._heard:
            heard, self._heard = frozenset(self._heard), set()
            self._step_nodes(nodes.Hear(heard))

    def _watch(self, due_ms: int) -> None:
        self._could_not_hear(due_ms)
        self._arm_watch()

    def _arm_watch(self) -> None:
        self._watch_timer.arm(self._clock.now_ms() + self._timings.watch_every_ms)

    def _could_not_hear(self, due_ms: int) -> bool:
        """Say whether a timer that was due at `due_ms` must wait, for the loop was held up.

        Of all timers that are late the earliest fires first, so the pause is known before any
        deadline is acted upon.
        """
        now_ms = self._clock.now_ms()
        late_ms = now_ms - due_ms
        if late_ms > self._timings.deaf_after_ms and now_ms >= self._deaf_until_ms:
            log.warning("this server was held up for %.1f s; leases are renewed", late_ms / 1000)
            self._deaf_until_ms = now_ms + self._timings.settle_ms
            self._job_ms = max(self._job_ms, due_ms)
            self._step_nodes(nodes.Pause())
        return now_ms < self._deaf_until_ms

    def _listened_until(self) -> int:
        """Return the time that a job is told: that up to which its nodes could be heard.

        After a pause it stands still until what came in meanwhile is read, so that no step, of
        whatever command, draws a conclusion from a deadline that passed unheard.
        """
        watch_ms = self._watch_timer.due_ms
        if watch_ms is None or not self._could_not_hear(watch_ms):
            self._job_ms = self._clock.now_ms()
        return self._job_ms

    # ---------------------------------------------------------------- answers to operators

    async def status(self, rdzv_id: str) -> JobView:
        """Show one job.

        Raises:
            UnknownJobError: nobody has ever joined it.

        """
        state = await self._look(rdzv_id)
        if not state.membership.run:
            raise UnknownJobError(
                f"no job {rdzv_id} is known here; `rdzvctl list` shows those that are"
            )
        return view(state, self._clock.now_ms())

    async def list(self) -> tuple[JobView, ...]:
        """Show every job that can be read, by name."""
        views = []
        for rdzv_id in await self._ask_store(self._store.list()):
            try:
                views.append(await self.status(rdzv_id))
            except RendezvousStateError as error:
                log.error("job %s is not listed: %s", rdzv_id, error)
        return tuple(views)

    async def history(self, rdzv_id: str, limit: int) -> tuple[Record, ...]:
        """Return a job's newest events, oldest first.

        Raises:
            UnknownJobError: nobody has ever joined it.

        """
        await self.status(rdzv_id)
        job = self._jobs.get(rdzv_id)
        pending = job.pending if job else ()
        rows = await self._ask_store(self._store.history(rdzv_id, limit))
        return (*rows, *pending)[-limit:]

    async def _look(self, rdzv_id: str) -> State:
        """Return a job's present state; without waiting for a commit that is under way."""
        job = self._jobs.get(rdzv_id)
        if job is not None and job.state is not None:
            return job.state
        async with self._claim(rdzv_id) as claimed:
            return _loaded(claimed)


def _loaded(job: Job) -> State:
    assert job.state is not None, "a claimed job is loaded"
    return job.state
