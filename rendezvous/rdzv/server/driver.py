"""The driver of one server: streams, nodes and timers around the pure cores.

It holds what the cores can not, and decides nothing. `Jobs` steps each job under its own lock:
*decide, persist, publish*. Here is the rest:

* the *nodes core* steps in memory, without waiting for anything, so it needs no lock; what its
  events mean for a job is worked out again under that job's lock (`_mark`), so that neither a
  late delivery nor a repeated one can do harm;
* what is published goes to *streams*, and what a node says waits in order while the store is
  away: streams stay open, nothing new is decided, and workers run on;
* a *pause* of the process itself renews every lease, and no deadline counts before what has come
  in meanwhile is read (`LoopWatch`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace

from rdzv.concurrency import single_error
from rdzv.core import nodes
from rdzv.core.commands import Command, Join, MarkAway, MarkBack, MarkLost, Resume, Tick
from rdzv.core.events import RunEnded
from rdzv.core.explain import JobView, view
from rdzv.core.model import State, is_stand_in
from rdzv.core.rendezvous import ended_run
from rdzv.errors import (
    LimitExceededError,
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousStateError,
    UnknownJobError,
    UnknownNodeError,
)
from rdzv.server import told
from rdzv.server.clock import Clock, LoopWatch, Timer, sleep_ms
from rdzv.server.config import Config
from rdzv.server.jobs import Job, Jobs, News
from rdzv.server.log_relay import LogRelay
from rdzv.server.messages import (
    Belief,
    Closed,
    Hello,
    Joined,
    LogLines,
    LogPiece,
    LogsWanted,
    Progress,
    RankProgress,
    Refused,
    Told,
    Waiting,
    Welcome,
)
from rdzv.server.meter import Figures, Meter
from rdzv.server.progress import Board
from rdzv.server.streams import Stream
from rdzv.server.tasks import Tasks
from rdzv.stores.base import Record, Store

log = logging.getLogger("rdzv.driver")


class Driver:
    """Drives all jobs and nodes of one server. Made by `running`."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        config: Config,
        tasks: Tasks,
        new_uid: Callable[[], str],
        meter: Meter,
    ) -> None:
        self._clock = clock
        self._meter = meter
        self._limits = config.limits
        self._timings = config.timings
        self._tasks = tasks
        self._watch = LoopWatch(
            clock,
            self._renew_leases,
            every_ms=config.timings.watch_every_ms,
            deaf_after_ms=config.timings.deaf_after_ms,
            settle_ms=config.timings.settle_ms,
            on_look=meter.loop_late,
        )
        self._jobs = Jobs(
            store,
            clock,
            self._watch,
            config,
            tasks,
            new_uid,
            publish=self._publish,
            on_load=self._bring_up_to_date,
            meter=meter,
        )
        self._jobs_of: dict[str, set[str]] = {}
        """By node_id: at least the jobs in which the node is present."""
        self._nodes = nodes.Nodes(leadership=0, tuning=config.nodes_tuning)
        self._nodes_timer = Timer(clock, self._tick_nodes)
        self._heard: set[str] = set()
        self._hear_timer = Timer(clock, lambda _: self._feed_heard())
        self._streams: dict[str, Stream] = {}
        self._alone = asyncio.Event()
        """Set while no stream is open."""
        self._alone.set()
        self._changes = weakref.WeakValueDictionary[str, asyncio.Event]()
        """By rdzv_id: what those wait for who watch a job."""
        self._watchers = 0
        self._logs = LogRelay(
            clock, config.limits, config.timings.log_answer_ms, self._send_if_there
        )
        self._progress = Board()
        self._progressed: set[str] = set()
        """By rdzv_id: the jobs that are watched and have progressed unseen."""
        self._progress_timer = Timer(clock, lambda _: self._show_progress())
        self._numbers = itertools.count(1)
        self._stopping = False

    @classmethod
    @asynccontextmanager
    async def running(
        cls,
        store: Store,
        clock: Clock,
        config: Config,
        new_uid: Callable[[], str] = lambda: secrets.token_hex(6),
        meter: Meter | None = None,
    ) -> AsyncIterator[Driver]:
        """Take over the store, run until the body ends, and close every stream.

        `meter` is told what is to be counted; without one, nothing is.

        The store remains open; it belongs to the caller.
        """
        with single_error():
            async with asyncio.TaskGroup() as group:
                driver = cls(store, clock, config, Tasks(group), new_uid, meter or Meter())
                await driver._start()
                try:
                    yield driver
                finally:
                    await driver._stop()

    @property
    def leadership(self) -> int:
        """The number of this server's take-over; every message carries it."""
        return self._nodes.leadership

    @property
    def trouble(self) -> str:
        """Why nothing new can be decided at present; empty if it can."""
        return self._jobs.trouble

    # ---------------------------------------------------------------- start and stop

    async def _start(self) -> None:
        self._nodes = replace(self._nodes, leadership=await self._jobs.take_over())
        for rdzv_id in await self._jobs.names():
            try:
                async with self._jobs.claim(rdzv_id):
                    pass
            except RendezvousStateError as error:
                log.error("job %s is left alone: %s", rdzv_id, error)
        self._jobs.start_pruning()
        self._watch.start()

    async def _stop(self) -> None:
        """Close every stream and let what is being decided come to its end."""
        self.close_streams(
            RendezvousConnectionError("this server is stopping; workers run on, connect again")
        )
        self._watch.stop()
        self._nodes_timer.cancel()
        self._hear_timer.cancel()
        self._progress_timer.cancel()
        self._jobs.stop_timers()
        await self._tasks.finish(within_ms=self._timings.stop_grace_ms)
        # Once more, for what came to its end has armed its timer.
        self._jobs.stop_timers()
        await self._jobs.flush()
        self._meter.forget_jobs()

    def close_streams(self, error: RendezvousError) -> None:
        """End every stream with this error; that moves no node and no job, and no other opens."""
        self._stopping = True
        for stream in self._streams.values():
            stream.close(error)
        self._logs.close(RendezvousConnectionError(str(error)))
        for changed in self._changes.values():
            changed.set()

    # ---------------------------------------------------------------- what jobs publish

    async def submit(self, rdzv_id: str, command: Command) -> State:
        """Run one command to its end; see `Jobs.submit`."""
        return await self._jobs.submit(rdzv_id, command)

    def _publish(self, job: Job, news: News) -> None:
        """Tell everyone concerned of a step. Waits for nothing."""
        now_ms = self._clock.now_ms()
        if isinstance(news.command, Join):
            self._admitted(job, news.command.node_id, now_ms)
            self._repeat_line(news.before, news.command)
        elif isinstance(news.command, Resume):
            self._present(job, news.command.node_id)
        self._progress.tidy(news.after)
        self._wake_watchers(job.rdzv_id)
        for node_id, message in told.news(news.before, news.after, news.events, now_ms):
            self._send_from(news.after, node_id, message)
        # Those who come into a round have heard of it by now.
        self._logs.note_state(news.after)
        if any(isinstance(event, RunEnded) for event in news.events):
            for node_id in [n for n in job.node_ids if not news.after.present(n)]:
                self._forget(job, node_id)

    def _admitted(self, job: Job, node_id: str, now_ms: int) -> None:
        membership = job.state.membership
        self._present(job, node_id)
        self._send(node_id, Joined(job.rdzv_id, membership.run, membership.run_number))
        if node_id in job.state.waiting:
            self._send(node_id, told.waiting(job.state, node_id, now_ms))

    def _present(self, job: Job, node_id: str) -> None:
        self._note(job, node_id)
        if node_id not in self._streams:
            # Its stream ended while this was decided, and nobody else will say so.
            self._mark_soon(node_id, [job.rdzv_id])

    def _repeat_line(self, before: State, command: Join) -> None:
        stream = self._streams.get(command.node_id)
        line = told.unheard_line(before, command)
        if stream is not None and stream.incarnation == command.incarnation and line is not None:
            stream.send(line, again=True)

    def _send_from(self, state: State, node_id: str, message: Told) -> None:
        stream = self._streams.get(node_id)
        if stream is not None and told.concerns(state, node_id, stream.incarnation, message):
            stream.send(message)

    def _send(self, node_id: str, message: Told) -> None:
        if stream := self._streams.get(node_id):
            stream.send(message)

    def _send_if_there(self, node_id: str, message: Told) -> bool:
        stream = self._streams.get(node_id)
        if stream is not None:
            stream.send(message)
        return stream is not None

    def _note(self, job: Job, node_id: str) -> None:
        """Remember that a node is in a job."""
        job.node_ids.add(node_id)
        self._jobs_of.setdefault(node_id, set()).add(job.rdzv_id)

    def _forget(self, job: Job, node_id: str) -> None:
        """Forget a node that is in a job no more."""
        job.node_ids.discard(node_id)
        if rdzv_ids := self._jobs_of.get(node_id):
            rdzv_ids.discard(job.rdzv_id)
            if not rdzv_ids:
                del self._jobs_of[node_id]

    def _bring_up_to_date(self, job: Job) -> None:
        """After a load: wait for whoever holds a seat, and tell those who are there."""
        former, now_ms = tuple(job.node_ids), self._clock.now_ms()
        for node_id, seat in job.state.seats.items():
            if is_stand_in(node_id):
                continue
            self._note(job, node_id)
            self._step_nodes(nodes.Expect(node_id, seat.incarnation))
            self._mark_soon(node_id, [job.rdzv_id])
        for node_id in former:
            if stream := self._streams.get(node_id):
                self._tell_anew(job.state, stream, now_ms)

    def _tell_anew(self, state: State, stream: Stream, now_ms: int) -> None:
        """Tell a connected node how things are with a job that was loaded anew."""
        membership = state.membership
        if membership.ended is None and state.incarnation(stream.node_id) != stream.incarnation:
            # Who waited is not stored, nor who took over a seat: the node itself knows.
            stream.greeted = False
            text = "the server has read this job anew; say hello again with what you believe"
            stream.send(Refused(membership.rdzv_id, UnknownNodeError.code, text))
            return
        belief = Belief(membership.rdzv_id, membership.run, None, has_workers=False)
        for message in told.owed(state, stream.node_id, belief, now_ms):
            stream.send(message)

    # ---------------------------------------------------------------- streams

    def attach(self, hello: Hello) -> Stream:
        """Open a node's stream; the first message in it is `Welcome`.

        Raises:
            NodeSupersededError: another instance speaks for this node_id.
            RendezvousConnectionError: to be tried again: here, or at the server that took over.
            LimitExceededError: too many nodes.
            InvalidRequestError: the node would fence itself too late for its lease.

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
            fence_after_ms=hello.fence_after_ms,
        )
        self._step_nodes(connect)
        record = self._nodes.records[hello.node_id]
        stream = Stream(
            number, hello.node_id, record.incarnation, self._limits.outbox, self._meter.sent
        )
        self._logs.note_gone(hello.node_id)
        self._streams[hello.node_id] = stream
        self._alone.clear()
        interval_ms = record.lease_ms // self._nodes.tuning.heartbeats_per_lease
        stream.send(Welcome(record.incarnation, interval_ms, record.lease_ms))
        self._logs.note_connected(hello.node_id)
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
            self._logs.note_gone(stream.node_id)
        if not self._streams:
            self._alone.set()
        if not self._stopping:
            self._step_nodes(nodes.Disconnect(stream.node_id, stream.number))
            self._watch.listened_until_ms()
            if self._clock.now_ms() < self._watch.settled_ms:
                # What came and went while this server stood still was an attempt to reach it.
                self._step_nodes(nodes.Pause())

    def heard(self, stream: Stream) -> None:
        """Note that a node has said something."""
        self._meter.received()
        self._heard.add(stream.node_id)
        self._hear_timer.arm_by(self._clock.now_ms() + self._timings.hear_every_ms)

    def plan_away(self, stream: Stream, deadline_ms: int) -> None:
        """Note that an agent goes away on purpose and is back within `deadline_ms`."""
        self._step_nodes(nodes.PlanAway(stream.node_id, stream.number, deadline_ms))

    def note_progress(self, stream: Stream, said: Progress) -> None:
        """Note how far the workers of a node are, if they are of the present round.

        Raises:
            InvalidRequestError: it speaks of a worker that is not its own.

        """
        state = self._jobs.peek(said.rdzv_id)
        now_ms = self._clock.now_ms()
        if state is None or not self._progress.note(
            state, stream.node_id, stream.incarnation, said, now_ms
        ):
            return
        if said.rdzv_id in self._changes:
            self._progressed.add(said.rdzv_id)
            self._progress_timer.arm_by(now_ms + self._timings.show_progress_every_ms)

    def _show_progress(self) -> None:
        """Let those who watch see what has progressed, all at once."""
        progressed, self._progressed = self._progressed, set()
        for rdzv_id in progressed:
            self._wake_watchers(rdzv_id)

    def _wake_watchers(self, rdzv_id: str) -> None:
        if (changed := self._changes.pop(rdzv_id, None)) is not None:
            changed.set()

    def take_log(self, stream: Stream, piece: LogPiece) -> None:
        """Pass on a piece of a log to whoever reads it."""
        if self._streams.get(stream.node_id) is stream:
            self._logs.take(stream.node_id, piece)

    async def wait_alone(self, timeout_s: float) -> None:
        """Wait until every node has gone, or for so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._alone.wait()

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
            if ended_run(state, belief.run) is None or told.may_be_adopted(state, belief):
                for command in belief.commands:
                    state = await self._insist(stream, belief.rdzv_id, command)
        except RendezvousError as error:
            await self._refuse(stream, belief, error)
            return
        # A step of someone else may have been published since ours.
        state = self._jobs.peek(belief.rdzv_id) or state
        if told.unknown(state, belief):
            self._unknown_job(stream, belief)
        for message in told.owed(state, stream.node_id, belief, self._clock.now_ms()):
            if told.concerns(state, stream.node_id, stream.incarnation, message):
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
            if ended := ended_run(state, belief.run):
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
            self._tasks.start(self._mark(rdzv_id, node_id, reason))

    async def _mark(self, rdzv_id: str, node_id: str, reason: str) -> None:
        while not self._stopping:
            try:
                async with self._jobs.claim(rdzv_id) as job:
                    if command := self._mark_command(job, node_id, reason):
                        await self._jobs.step(job, command)
                return
            except RendezvousConnectionError:
                await sleep_ms(self._clock, self._timings.store_retry_ms)
            except RendezvousError as error:
                log.error("job %s could not be told about %s: %s", rdzv_id, node_id, error)
                return

    def _mark_command(self, job: Job, node_id: str, reason: str) -> Command | None:
        """Say what a job must hear of a node now, whatever has led to it."""
        held = job.state.incarnation(node_id)
        if held is None:
            self._forget(job, node_id)
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

    def _tick_nodes(self, due_ms: int) -> None:
        if self._watch.late(due_ms):
            self._nodes_timer.arm_by(self._watch.settled_ms)
            return
        self._feed_heard()
        self._step_nodes(nodes.Tick())

    def _feed_heard(self) -> None:
        """Let the nodes core know who has spoken, all at once."""
        self._hear_timer.cancel()
        if self._heard:
            heard, self._heard = frozenset(self._heard), set()
            self._step_nodes(nodes.Hear(heard))

    def _renew_leases(self, late_ms: int) -> None:
        """Silence that the server could not hear proves nothing."""
        log.warning("this server was held up for %.1f s; leases are renewed", late_ms / 1000)
        self._step_nodes(nodes.Pause())

    # ---------------------------------------------------------------- answers to operators

    def figures(self) -> Figures:
        """Show what this server holds, for those who scrape it."""
        now_ms, records = self._clock.now_ms(), self._nodes.records.values()
        connected = sum(1 for record in records if record.stream is not None)
        return Figures(
            now_ms=now_ms,
            leadership=self.leadership,
            streams=len(self._streams),
            nodes_connected=connected,
            nodes_away=len(records) - connected,
            watchers=self._watchers,
            store_away_ms=self._jobs.store_away_ms,
            states=self._jobs.states,
            progress=lambda state: self._progress.shown(state, now_ms),
        )

    async def status(self, rdzv_id: str) -> JobView:
        """Show one job.

        Raises:
            UnknownJobError: nobody has ever joined it.

        """
        state = await self._jobs.look(rdzv_id)
        if not state.membership.run:
            raise UnknownJobError(
                f"no job {rdzv_id} is known here; `rdzvctl list` shows those that are"
            )
        return view(state, self._clock.now_ms())

    def progress(self, rdzv_id: str) -> tuple[RankProgress, ...]:
        """Show how far the workers of a job's present round are, by RANK."""
        state = self._jobs.peek(rdzv_id)
        return self._progress.shown(state, self._clock.now_ms()) if state is not None else ()

    async def watch(self, rdzv_id: str) -> AsyncGenerator[JobView, None]:
        """Show one job, at once and then whenever it has changed. Who is slow misses some.

        Raises:
            UnknownJobError: nobody has ever joined it.
            LimitExceededError: too many are watching.
            RendezvousConnectionError: this server does not serve any more.

        """
        if self._watchers >= self._limits.watchers:
            raise LimitExceededError(
                f"{self._watchers} callers watch jobs here, and no more may; try again later, or "
                "raise the limit `watchers`"
            )
        self._watchers += 1
        try:
            while not self._stopping:
                changed = self._changes.setdefault(rdzv_id, asyncio.Event())
                yield await self.status(rdzv_id)
                await changed.wait()
            raise RendezvousConnectionError("this server does not serve any more; ask again")
        finally:
            self._watchers -= 1

    async def obey(self, rdzv_id: str, command: Command) -> JobView:
        """Do what an operator asks of a job, and show it as it then is.

        Raises:
            UnknownJobError: nobody has ever joined it.
            RendezvousClosedError: the run that is meant has ended.

        """
        await self.status(rdzv_id)
        return view(await self.submit(rdzv_id, command), self._clock.now_ms())

    async def list(self) -> tuple[JobView, ...]:
        """Show every job that can be read, by name."""
        views = []
        for rdzv_id in await self._jobs.names():
            try:
                views.append(await self.status(rdzv_id))
            except UnknownJobError:
                # It was forgotten since.
                pass
            except RendezvousStateError as error:
                log.error("job %s is not listed: %s", rdzv_id, error)
        return tuple(views)

    async def read_logs(self, rdzv_id: str, wanted: LogsWanted) -> AsyncGenerator[LogLines, None]:
        """Yield what a job's workers have written, as it comes from their nodes.

        Raises:
            UnknownJobError: nobody has ever joined it.
            InvalidRequestError: it has had no such round, or nobody with that RANK.
            RendezvousClosedError: the run that is meant is not the last.
            LimitExceededError: too many read.
            RendezvousConnectionError: this server does not serve any more.

        """
        await self.status(rdzv_id)
        state = await self._jobs.look(rdzv_id)
        if self._stopping:
            raise RendezvousConnectionError("this server does not serve any more; ask again")
        reader = self._logs.open(state, wanted)
        try:
            while (lines := await reader.next()) is not None:
                yield lines
        finally:
            reader.close()

    async def forget(self, rdzv_id: str) -> None:
        """Delete a job that has ended, with its history; see `Jobs.forget`."""
        await self._jobs.forget(rdzv_id)
        self._wake_watchers(rdzv_id)
        self._wake_watchers(rdzv_id)

    def backup(self) -> AsyncIterator[bytes]:
        """Yield all that is stored, as the lines of a file that `rdzvd --restore` reads.

        Raises:
            RendezvousError: it can not be read as a whole; what was yielded is worth nothing.

        """
        return self._jobs.backup(self.leadership)

    async def history(self, rdzv_id: str, limit: int) -> tuple[Record, ...]:
        """Return a job's newest events, oldest first.

        Raises:
            UnknownJobError: nobody has ever joined it.

        """
        await self.status(rdzv_id)
        return await self._jobs.history(rdzv_id, limit)
