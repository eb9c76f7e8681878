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
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager
from functools import partial

from rdzv.core import nodes
from rdzv.core.commands import (
    Command,
    Join,
    MarkAway,
    MarkBack,
    MarkHeard,
    MarkLost,
    Resume,
    Submit,
    Tick,
    Withdraw,
)
from rdzv.core.events import Event, NodesPlaced, RunEnded
from rdzv.core.explain import JobView, view
from rdzv.core.model import Instance, State, is_stand_in
from rdzv.core.placement import FailingCheck
from rdzv.core.rendezvous import Transition, ended_run, may_run_on, unheard, went_along
from rdzv.core.stacks import Report
from rdzv.core.stragglers import Straggler
from rdzv.core.submissions import awaited
from rdzv.core.words import listed
from rdzv.errors import (
    InvalidRequestError,
    InvariantError,
    LimitExceededError,
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousStateError,
    RunStoppingError,
    UnauthenticatedError,
    UnknownJobError,
    UnknownNodeError,
)
from rdzv.runtime.clock import Clock, LoopWatch, Timer, sleep_ms
from rdzv.runtime.concurrency import single_error
from rdzv.runtime.tasks import Tasks
from rdzv.server.diagnosis.hang_investigation import Hangs
from rdzv.server.diagnosis.log_relay import LogRelay
from rdzv.server.diagnosis.progress_tracking import Board
from rdzv.server.diagnosis.stack_archive import Shelf
from rdzv.server.diagnosis.stack_collection import StackRelay
from rdzv.server.diagnosis.straggler_tracking import Stragglers
from rdzv.server.engine import announcements
from rdzv.server.engine.jobs import Guard, Job, Jobs, News
from rdzv.server.messages import (
    Belief,
    Closed,
    Draining,
    Hello,
    Holding,
    Hung,
    Joined,
    Lease,
    LogLines,
    LogPiece,
    LogsWanted,
    LookAgain,
    NodeSummary,
    Progress,
    RankProgress,
    Refused,
    Stacks,
    Told,
    Waiting,
    Welcome,
)
from rdzv.server.scheduling.placer import Placer
from rdzv.server.scheduling.quarantined_nodes import Quarantine
from rdzv.server.security import roles
from rdzv.server.security.callers import ANYBODY, Caller, Role
from rdzv.server.security.tokens import Token, Tokens
from rdzv.server.sessions.streams import Stream
from rdzv.server.settings.config import Config
from rdzv.server.telemetry.metrics_hooks import Figures, Meter
from rdzv.server.telemetry.scrape_targets import ScrapeTargets
from rdzv.stores.base import Record, Store
from rdzv.structs import replace

log = logging.getLogger("rdzv.driver")

MARKED_AT_ONCE = 16
"""Of so many nodes a job hears at once, with one commit: a loss is 30 ms in one of ten thousand."""


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
            judge=self._judge,
            on_store_change=self._show_store,
        )
        self._jobs_of: dict[str, set[str]] = {}
        """By node_id: at least the jobs in which the node is present."""
        self._to_mark: dict[str, dict[str, str]] = {}
        """By rdzv_id, of jobs that are being brought up to date: the nodes that are still to come,
        and why each was given up, if it was."""
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
        self._followers: set[Callable[[str | None], None]] = set()
        self._logs = LogRelay(
            clock, config.limits, config.timings.log_answer_ms, self._send_if_there
        )
        self._quarantine = Quarantine(
            self._jobs,
            clock,
            config.quarantine,
            lambda: self._placer.daemons,
            on_change=self._place_soon,
        )
        self._stacks = StackRelay(
            clock, config.limits, config.timings.stacks_answer_ms, self._send_if_there
        )
        self._shelf = Shelf(self._jobs)
        self._stragglers = Stragglers(config.timings.straggler_after_ms, self._tell)
        self._hangs = Hangs(
            clock,
            tasks,
            self._stacks,
            self._shelf,
            peek=self._jobs.peek,
            submit=self.submit,
            tell=self._tell,
            gather_ms=config.timings.hang_gather_ms,
            retry_ms=config.timings.store_retry_ms,
        )
        self.tokens = Tokens(self._jobs, clock, tasks, config.limits.tokens, self._cut_off)
        self._auth = config.auth
        self._init_admin_token = config.init_admin_token
        self._callers: dict[str, str] = {}
        """By node_id, of nodes that are known: who speaks for them."""
        self._placer = Placer(
            self._jobs,
            clock,
            tasks,
            lambda: self._nodes.records,
            self._quarantine,
            self._send_if_there,
            quiet_ms=config.timings.place_quiet_ms,
            retry_ms=config.timings.store_retry_ms,
            settle_ms=config.tuning.takeover_grace_ms,
        )
        self._agents = ScrapeTargets(config.limits.nodes)
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
                try:
                    # A start that fails may have loaded jobs, whose timers run.
                    await driver._start()
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
        return self._jobs.store_state.trouble

    # ---------------------------------------------------------------- start and stop

    async def _start(self) -> None:
        self._nodes = replace(self._nodes, leadership=await self._jobs.take_over())
        await self._quarantine.load()
        await self._load_tokens()
        await self._jobs.load_all()
        await self._placer.start()
        self._jobs.start_pruning()
        self._watch.start()

    async def _load_tokens(self) -> None:
        await self.tokens.load()
        if not self._auth and self.tokens.any:
            raise InvalidRequestError(
                "tokens were made for this server, and yet it would let everybody do everything; "
                "start it with --auth=required"
            )
        if self._init_admin_token is not None:
            await self.tokens.ensure_admin(self._init_admin_token)

    async def _stop(self) -> None:
        """Close every stream and let what is being decided come to its end."""
        self.close_streams(
            RendezvousConnectionError("this server is stopping; workers run on, connect again")
        )
        self._watch.stop()
        self._placer.stop()
        self._quarantine.stop()
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
        self._hangs.close()
        self._stacks.close()
        for changed in self._changes.values():
            changed.set()
        self._tell_followers(None)

    # ---------------------------------------------------------------- what jobs publish

    async def submit(self, rdzv_id: str, command: Command, guard: Guard | None = None) -> State:
        """Run one command to its end; see `Jobs.submit`."""
        return await self._jobs.submit(rdzv_id, command, guard)

    async def _judge(
        self, before: State, step: Transition
    ) -> tuple[Command | None, tuple[Record, ...]]:
        """Have a step looked at before it is stored: a node may be at fault in it."""
        return await self._quarantine.judge(before, step)

    def _tell(self, rdzv_id: str, events: tuple[Event, ...]) -> None:
        """Tell log, history and whoever watches a job what no step has led to."""
        self._jobs.note(rdzv_id, events)
        self._wake_watchers(rdzv_id)

    def _place_soon(self) -> None:
        self._tell_followers(None)
        self._placer.wake()

    def _publish(self, job: Job, news: News) -> None:
        """Tell everyone concerned of a step. Waits for nothing."""
        now_ms = self._clock.now_ms()
        if isinstance(news.command, Join):
            self._admitted(job, news.command, now_ms)
            self._repeat_line(news.before, news.command)
        elif isinstance(news.command, Resume):
            self._present(job, news.command)
        for event in news.events:
            if isinstance(event, NodesPlaced):
                for node_id in event.node_ids:
                    self._note(job, node_id)
        if news.before.membership.submission or news.after.membership.submission:
            self._placer.wake()
        self._progress.tidy(news.after)
        self._hangs.note_state(news.after)
        self._stragglers.tidy(news.after)
        self._wake_watchers(job.rdzv_id)
        for node_id, message in announcements.news(news.before, news.after, news.events, now_ms):
            self._send_from(news.after, node_id, message)
        # Those who come into a round have heard of it by now.
        self._logs.note_state(news.after)
        if any(isinstance(event, RunEnded) for event in news.events):
            after = news.after
            for node_id in tuple(job.node_ids):
                if not (after.present(node_id) or may_run_on(after, node_id)):
                    self._forget(job, node_id)

    def _admitted(self, job: Job, command: Join, now_ms: int) -> None:
        membership, node_id = job.state.membership, command.node_id
        self._present(job, command)
        self._send(node_id, Joined(job.rdzv_id, membership.run, membership.run_number))
        if node_id in job.state.waiting:
            self._send(node_id, announcements.waiting(job.state, node_id, now_ms))

    def _present(self, job: Job, command: Join | Resume) -> None:
        self._note(job, command.node_id)
        stream = self._streams.get(command.node_id)
        if stream is None or stream.incarnation != command.incarnation:
            # Its stream ended while this was decided, and nobody else will say so.
            self._mark_soon(command.node_id, [job.rdzv_id])

    def _repeat_line(self, before: State, command: Join) -> None:
        stream = self._streams.get(command.node_id)
        line = announcements.unheard_line(before, command, self._clock.now_ms())
        if stream is not None and stream.incarnation == command.incarnation and line is not None:
            stream.send(line, again=True)

    def _send_from(self, state: State, node_id: str, message: Told) -> None:
        stream = self._streams.get(node_id)
        if stream is not None and announcements.concerns(
            state, node_id, stream.incarnation, message
        ):
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
        if stream := self._streams.get(node_id):
            stream.forget(job.rdzv_id)
        if rdzv_ids := self._jobs_of.get(node_id):
            rdzv_ids.discard(job.rdzv_id)
            if not rdzv_ids:
                del self._jobs_of[node_id]

    def _bring_up_to_date(self, job: Job) -> None:
        """After a load: wait for whoever holds a seat, and tell those who are there."""
        former, now_ms = tuple(job.node_ids), self._clock.now_ms()
        round_ = job.state.membership.round
        for participant in round_.participants if round_ else ():
            node_id, instance = participant.node_id, participant.instance
            seat = job.state.seats.get(node_id)
            if seat is None or is_stand_in(node_id):
                continue
            self._note(job, node_id)
            fence_ms = instance.fence_after_ms
            self._step_nodes(nodes.Expect(node_id, seat.incarnation, instance.id, fence_ms))
            self._mark_soon(node_id, [job.rdzv_id])
        for node_id in (*job.state.placed, *unheard(job.state)):
            self._note(job, node_id)
        # Which nodes it may not keep is not stored with it, and holds from its first step on.
        job.loaded = replace(job.state, barred=dict(self._quarantine.bar.barred))
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
        for message in announcements.owed(state, stream.node_id, belief, now_ms):
            stream.send(message)

    # ---------------------------------------------------------------- streams

    def attach(self, hello: Hello, caller: Caller = ANYBODY) -> Stream:
        """Open a node's stream; the first message in it is `Welcome`.

        Raises:
            DeniedError: the caller may not speak for this node.
            NodeSupersededError: another instance speaks for this node_id.
            RendezvousConnectionError: to be tried again: here, or at the server that took over.
            LimitExceededError: too many nodes.
            InvalidRequestError: the node would fence itself too late for its lease.

        """
        self._refuse_hello(hello)
        roles.refuse_node(
            caller,
            hello.node_id,
            foreground=hello.kind is nodes.AgentKind.FOREGROUND and hello.resources is None,
            bound_to=self._callers.get(hello.node_id),
        )
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
            number,
            hello.node_id,
            record.incarnation,
            self._limits.outbox,
            self._meter.sent,
            caller,
            Instance(hello.instance, hello.fence_after_ms),
        )
        self._callers[hello.node_id] = caller.name
        self._meter.stream_opened()
        self._agents.note(hello.node_id, hello.metrics)
        self._logs.note_gone(hello.node_id)
        self._stacks.note_gone(hello.node_id)
        self._streams[hello.node_id] = stream
        self._placer.note_hello(hello)
        self._alone.clear()
        interval_ms = self._heartbeat_interval_ms(record.lease_ms)
        stream.send(Welcome(record.incarnation, interval_ms, record.lease_ms))
        if (owed := self._placer.owed(hello)) is not None:
            stream.send(owed)
        self._logs.note_connected(hello.node_id)
        return stream

    def _heartbeat_interval_ms(self, lease_ms: int) -> int:
        return self._nodes.tuning.interval_for(lease_ms)

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

    def _cut_off(self, tokens: frozenset[str]) -> None:
        """Close the streams that were opened with tokens which are good for nothing any more."""
        for stream in self._streams.values():
            if stream.caller.token in tokens:
                stream.close(UnauthenticatedError("the token that opened this stream was revoked"))

    def detach(self, stream: Stream) -> None:
        """Note that a stream has ended. The node is away, and lost if it stays away."""
        stream.close()
        if self._streams.get(stream.node_id) is stream:
            del self._streams[stream.node_id]
            self._logs.note_gone(stream.node_id)
            self._stacks.note_gone(stream.node_id)
        if not self._streams:
            self._alone.set()
        if not self._stopping:
            self._watch.listened_until_ms()
            # What came and went while this server stood still was an attempt to reach it.
            unheard = self._clock.now_ms() < self._watch.settled_ms
            self._step_nodes(nodes.Disconnect(stream.node_id, stream.number, unheard))

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
        if state is None or not self._is_present(stream):
            return
        if not self._progress.note(state, stream.node_id, stream.incarnation, said, now_ms):
            return
        self._stragglers.note(state, lambda: self._progress.shown(state, now_ms), now_ms)
        if said.rdzv_id in self._changes or self._followers:
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
        self._tell_followers(rdzv_id)

    def _tell_followers(self, rdzv_id: str | None) -> None:
        for note in self._followers:
            note(rdzv_id)

    async def note_holdings(self, stream: Stream, holdings: tuple[Holding, ...]) -> None:
        """Note of which submitted jobs something may be left on a node, after all it said before.

        A job that it has let go of goes on without it: what it said of that may be lost.
        """
        if not self._is_present(stream):
            return
        held = {(holding.rdzv_id, holding.run) for holding in holdings}
        for rdzv_id, runs in self._placer.held(stream.node_id).items():
            for run in sorted(run for run in runs if (rdzv_id, run) not in held):
                await self._note_let_go(stream, rdzv_id, run)
        if self._is_present(stream):
            self._placer.note_holdings(stream.node_id, holdings)
            self._tell_followers(None)

    def note_health(self, stream: Stream, failing: tuple[FailingCheck, ...]) -> None:
        """Note what is wrong with a node by its own checks."""
        if self._is_present(stream):
            self._placer.note_health(stream.node_id, failing)

    def note_draining(self, stream: Stream, draining: Draining) -> None:
        """Note that a node is about to leave all its jobs."""
        if self._is_present(stream):
            self._placer.note_draining(stream.node_id, draining)
            self._show_drain(stream.node_id)

    async def _note_let_go(self, stream: Stream, rdzv_id: str, run: str) -> None:
        """Take a node out of a job of which nothing is left on it."""
        node_id, reason = stream.node_id, "nothing of the job is left on it"
        state = self._jobs.peek(rdzv_id)
        if state is None or state.membership.run != run or state.membership.ended is not None:
            return
        if state.incarnation(node_id) == stream.incarnation:
            lost = MarkLost(node_id, stream.incarnation, reason, heard=True)
            await self._insist_or_log(stream, rdzv_id, lost)
        elif node_id in awaited(state):
            withdrawn = Withdraw(run, (node_id,), reason)
            await self._insist_or_log(stream, rdzv_id, withdrawn)

    def take_log(self, stream: Stream, piece: LogPiece) -> None:
        """Pass on a piece of a log to whoever reads it."""
        if self._is_present(stream):
            self._logs.take(stream.node_id, piece)

    def note_hung(self, stream: Stream, said: Hung) -> None:
        """Look into it that workers of a node hang, or do so no more; see `Hangs.note`."""
        if self._is_present(stream):
            self._hangs.note(stream.node_id, stream.incarnation, said)

    def take_stacks_in(self, stream: Stream, said: Stacks) -> None:
        """Pass on what workers are doing to whoever has asked."""
        if self._is_present(stream):
            self._stacks.take_in(stream.node_id, said)

    def _is_present(self, stream: Stream) -> bool:
        """Whether no newer stream speaks for the node: what comes late on an older one is void."""
        return self._streams.get(stream.node_id) is stream

    async def wait_alone(self, timeout_s: float) -> None:
        """Wait until every node has gone, or for so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._alone.wait()

    async def greet(
        self, stream: Stream, beliefs: Iterable[Belief], unread: Collection[str] = ()
    ) -> None:
        """Hear what a node believes about its jobs, and tell it what it has missed.

        Where the node is present as a former instance that nobody spoke for, that one is lost.
        `unread` are jobs of which it believes something that could not be read.
        """
        believed = set(unread)
        for said in beliefs:
            belief = await self._hear_belief(stream, said)
            if not self._is_of_another_run(belief):
                believed.add(belief.rdzv_id)
        await self._note_left(stream, believed)
        await self._tell_placements(stream)
        stream.greeted = True
        self._mark_soon(stream.node_id)

    async def _hear_belief(self, stream: Stream, belief: Belief) -> Belief:
        """Hear what a node believes about one job; return that by the run that it has joined so."""
        node_id, incarnation = stream.node_id, stream.incarnation
        joined = False
        try:
            state = await self._latest(stream, belief.rdzv_id)
            if not belief.has_workers and may_run_on(state, node_id):
                # Before it joins: the next run may wait for nothing else.
                state = await self._insist(stream, belief.rdzv_id, MarkHeard(node_id))
            if (
                ended_run(state, belief.run) is None
                or announcements.may_be_adopted(state, belief)
                or went_along(state, node_id, incarnation, belief.run)
            ):
                for command in belief.commands:
                    state = await self._insist(stream, belief.rdzv_id, command)
                    joined |= isinstance(command, Join)
        except RendezvousError as error:
            await self._refuse(stream, belief, error)
            return belief
        # A step of someone else may have been published since ours.
        state = self._jobs.peek(belief.rdzv_id) or state
        if joined and state.incarnation(node_id) == incarnation:
            # Another run may have been adopted in the place of its own: it has been told so.
            belief = replace(belief, run=state.membership.run)
        if announcements.unknown(state, belief):
            self._unknown_job(stream, belief)
        for message in announcements.owed(state, node_id, belief, self._clock.now_ms()):
            if announcements.concerns(state, node_id, incarnation, message):
                stream.send(message)
        return belief

    def _is_of_another_run(self, belief: Belief) -> bool:
        """Whether a node says nothing of the present run of a job, in which it may have a place.

        That is so where a restored store has brought back a run that it had left long ago.
        """
        state = self._jobs.peek(belief.rdzv_id)
        present = state.membership.run if state is not None else ""
        return bool(present and belief.run) and belief.run != present

    async def _note_left(self, stream: Stream, believed: Collection[str]) -> None:
        """Take a node out of the jobs that it comes back without.

        They ended for it while no stream was open, and nobody has heard it say so.
        """
        node_id = stream.node_id
        for rdzv_id in sorted(self._jobs_of.get(node_id, set()).difference(believed)):
            state = self._jobs.peek(rdzv_id)
            if state is None or may_run_on(state, node_id):
                await self._insist_or_log(stream, rdzv_id, MarkHeard(node_id))
            elif state.incarnation(node_id) == stream.incarnation:
                reason = "it came back, and takes no part any more"
                lost = MarkLost(node_id, stream.incarnation, reason, heard=True)
                await self._insist_or_log(stream, rdzv_id, lost)

    async def _tell_placements(self, stream: Stream) -> None:
        """Tell a node that comes back which submitted jobs it is to take up, or to let go of."""
        node_id, held = stream.node_id, self._placer.held(stream.node_id)
        # Not all its jobs, each of which its belief has stepped: nodes come back by thousands.
        placed = [
            rdzv_id
            for rdzv_id in self._jobs_of.get(node_id, ())
            if (known := self._jobs.peek(rdzv_id)) is None or node_id in known.placed
        ]
        for rdzv_id in {*placed, *held}:
            try:
                state = await self._latest(stream, rdzv_id)
            except RendezvousError as error:
                log.warning("%s is not told of its placement in %s: %s", node_id, rdzv_id, error)
                continue
            if state.incarnation(node_id) not in (None, stream.incarnation):
                # A former instance is about to be lost, and its placement goes with it.
                continue
            for message in announcements.owed_of_placement(state, node_id, held.get(rdzv_id, ())):
                stream.send(message)

    async def hear(self, stream: Stream, rdzv_id: str, command: Command) -> None:
        """Run what a node asks for; a refusal is told to it, never raised."""
        try:
            self._check_room_for(stream.node_id, rdzv_id, command)
            await self._insist(stream, rdzv_id, command)
        except RendezvousError as error:
            belief = Belief(rdzv_id, getattr(command, "run", ""), None, has_workers=False)
            await self._refuse(stream, belief, error)

    def _check_room_for(self, node_id: str, rdzv_id: str, command: Command) -> None:
        """Refuse a node one more job than it may be in: all of them have to fit into a hello."""
        held = self._jobs_of.get(node_id, set())
        most = self._limits.beliefs
        if isinstance(command, Join) and rdzv_id not in held and len(held) >= most:
            raise LimitExceededError(
                f"{node_id} is in {len(held)} jobs, and may be in {most}; leave one, or raise the "
                "limit `jobs_per_node`"
            )

    async def _latest(self, stream: Stream, rdzv_id: str) -> State:
        """Return the state of a job as it is now: later steps may have been stored with our own."""
        state = await self._insist(stream, rdzv_id, Tick())
        return self._jobs.peek(rdzv_id) or state

    async def _insist(self, stream: Stream, rdzv_id: str, command: Command) -> State:
        """Submit until it is decided: while the store is away, the node's word waits here."""
        guard = None
        if isinstance(command, Join | Resume):
            owner = roles.owner_by(stream.caller)
            command = replace(command, owner=owner, instance=stream.instance)

            def guard(state: State) -> None:
                roles.refuse_stranger(stream.caller, state, stream.node_id)

        said = ""
        while True:
            try:
                return await self.submit(rdzv_id, command, guard)
            except RunStoppingError as error:
                reason = str(error)
            except RendezvousConnectionError as error:
                reason = f"the server can not store what this node says, and tries again: {error}"
            if reason != said:
                stream.send(Waiting(rdzv_id, reason))
                said = reason
            await sleep_ms(self._clock, self._timings.store_retry_ms)

    async def _insist_or_log(self, stream: Stream, rdzv_id: str, command: Command) -> None:
        """Submit what follows from a node's word. A job that fails here concerns no other job."""
        try:
            await self._insist(stream, rdzv_id, command)
        except RendezvousError as error:
            log.error("job %s could not be told about %s: %s", rdzv_id, stream.node_id, error)

    async def _refuse(self, stream: Stream, belief: Belief, error: RendezvousError) -> None:
        """Tell a node that it was refused; if that is because its run is over, tell it how.

        A node that is told of an error of this server ends its stream, and says everything again.
        One that has other jobs goes on with them instead: the error is about one job.
        """
        try:
            await self._refuse_as_it_is(stream, belief, error)
        except (InvariantError, RendezvousStateError) as own:
            log.error("job %s: %s is not heard: %s", belief.rdzv_id, stream.node_id, own)
            if self._jobs_of.get(stream.node_id, set()) - {belief.rdzv_id}:
                reason = f"the server can not decide anything about this job: {own}"
                stream.send(Waiting(belief.rdzv_id, reason))
            else:
                stream.send(Refused(belief.rdzv_id, own.code, str(own)))

    async def _refuse_as_it_is(
        self, stream: Stream, belief: Belief, error: RendezvousError
    ) -> None:
        if isinstance(error, InvariantError | RendezvousStateError):
            raise error
        if isinstance(error, UnknownNodeError):
            self._unknown_job(stream, belief)
            return
        if isinstance(error, RendezvousClosedError) and belief.run:
            state = await self._latest(stream, belief.rdzv_id)
            if ended := ended_run(state, belief.run):
                stream.send(Closed(belief.rdzv_id, belief.run, ended))
                return
            # It was adopted since, or what had ended it was not stored.
            text = f"run {belief.run} is not over after all; say hello again with what you believe"
            error = UnknownNodeError(text)
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
                self._placer.wake()
            case nodes.LeaseGrown():
                if (stream := self._streams.get(event.node_id)) is not None:
                    interval_ms = self._heartbeat_interval_ms(event.lease_ms)
                    stream.send(Lease(interval_ms, event.lease_ms))
            case nodes.NodeAway():
                self._mark_soon(event.node_id)
                self._placer.wake()
            case nodes.NodeLost():
                self._meter.node_lost()
                self._callers.pop(event.node_id, None)
                self._agents.lose(event.node_id, self._clock.now_ms())
                self._placer.note_lost(event.node_id)
                self._close_stream(event.node_id, event.stream, f"given up: {event.reason}")
                self._mark_soon(event.node_id, reason=event.reason)
        self._tell_followers(None)

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
            to_mark = self._to_mark.get(rdzv_id)
            if to_mark is None:
                self._to_mark[rdzv_id] = {node_id: reason}
                self._tasks.start(self._mark_all(rdzv_id))
            else:
                # A node that is still to come is looked at as it is then: once is enough.
                to_mark[node_id] = reason or to_mark.get(node_id, "")

    async def _mark_all(self, rdzv_id: str) -> None:
        """Bring a job up to date about all nodes of which there is news, until there is none."""
        to_mark = self._to_mark[rdzv_id]
        try:
            while to_mark and not self._stopping:
                # Others have their turn in between, however many there are.
                await asyncio.sleep(0)
                marked = {
                    n: to_mark.pop(n) for n in tuple(itertools.islice(to_mark, MARKED_AT_ONCE))
                }
                if not await self._mark(rdzv_id, marked):
                    for node_id, reason in marked.items():
                        to_mark.setdefault(node_id, reason)
                    await sleep_ms(self._clock, self._timings.store_retry_ms)
        finally:
            del self._to_mark[rdzv_id]

    async def _mark(self, rdzv_id: str, marked: Mapping[str, str]) -> bool:
        """Bring a job up to date about nodes, with the reason; False if that is to be tried again.

        Those that are lost at once cost one commit.
        """
        names = listed(marked)
        try:
            async with self._jobs.claim(rdzv_id) as job:
                choices = [
                    partial(self._mark_command, job, node_id, reason)
                    for node_id, reason in marked.items()
                ]
                for refused in await self._jobs.steps(job, choices):
                    log.error("job %s could not be told about %s: %s", rdzv_id, names, refused)
        except RendezvousConnectionError:
            return False
        except RendezvousError as error:
            log.error("job %s could not be told about %s: %s", rdzv_id, names, error)
        return True

    def _mark_command(self, job: Job, node_id: str, reason: str, state: State) -> Command | None:
        """Say what a job in this state must hear of a node now, whatever has led to it."""
        held = state.incarnation(node_id)
        record = self._nodes.records.get(node_id)
        if held is None and node_id in state.placed:
            gone = Withdraw(state.membership.run, (node_id,), reason or "it was given up")
            return gone if record is None and reason else None
        if held is None:
            if not may_run_on(state, node_id):
                self._forget(job, node_id)
            return None
        if record is None:
            return MarkLost(node_id, held, reason or "it was given up")
        if record.incarnation != held:
            return self._mark_former(record, held)
        away = state.away.get(node_id)
        if record.stream is not None:
            return MarkBack(node_id, held) if away is not None else None
        if away is not None and away.firm and record.firm:
            # How much longer it is waited for is for the nodes core alone to say.
            return None
        outlives = record.kind is nodes.AgentKind.DAEMON and not record.fence_after_ms
        return MarkAway(node_id, held, record.until_ms, record.firm, may_run=outlives)

    def _mark_former(self, record: nodes.NodeRecord, held: int) -> Command | None:
        """Give up a former instance, once the one that replaced it has said what it believes."""
        stream = self._streams.get(record.node_id)
        if stream is not None and stream.greeted and stream.number == record.stream:
            reason = "a new instance of the node took its place"
            return MarkLost(record.node_id, held, reason, heard=True)
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
            store_away_ms=self._jobs.store_state.away_ms,
            states=self._jobs.states,
            progress=lambda state: self._progress.shown(state, now_ms),
            straggling=lambda state: len(self._stragglers.shown(state.membership.rdzv_id)),
            lease_ms=self._nodes.tuning.lease_for(len(records)),
            silence_ms=max(
                (now_ms - record.heard_ms for record in records if record.stream is not None),
                default=0,
            ),
            room=self._placer.room,
        )

    def agents(self) -> Mapping[str, str]:
        """Return by node_id where agents answer /metrics; see `ScrapeTargets`."""
        return self._agents.listed(self._clock.now_ms())

    async def status(self, rdzv_id: str) -> JobView:
        """Show one job.

        Raises:
            UnknownJobError: nobody has ever joined it.
            RendezvousConnectionError: its first join waits for the store, or that is away.

        """
        state = await self._jobs.look(rdzv_id)
        if not state.membership.run:
            if self._jobs.store_state.waiting(rdzv_id):
                trouble = self._jobs.store_state.trouble_of(rdzv_id)
                raise RendezvousConnectionError(f"nothing is stored of job {rdzv_id}: {trouble}")
            raise UnknownJobError(
                f"no job {rdzv_id} is known here; `rdzvctl list` shows those that are"
            )
        return self._view(state)

    def _view(self, state: State) -> JobView:
        placer, rdzv_id = self._placer, state.membership.rdzv_id
        shown = view(state, self._clock.now_ms(), placer.wait(rdzv_id), placer.drains())
        # What is shown is what is stored: that more has happened has to be said first.
        if state.membership.ended is None or self._jobs.store_state.waiting(rdzv_id):
            trouble = self._jobs.store_state.trouble_of(rdzv_id)
            shown = replace(shown, reason=f"{trouble}; {shown.reason}") if trouble else shown
        return shown

    def _show_store(self, rdzv_id: str | None) -> None:
        """Show all who watch that a job waits for the store, or all jobs, or that none does."""
        if rdzv_id is not None:
            self._wake_watchers(rdzv_id)
            return
        for state in self._jobs.states:
            self._wake_watchers(state.membership.rdzv_id)
        self._tell_followers(None)

    def progress(self, rdzv_id: str) -> tuple[RankProgress, ...]:
        """Show how far the workers of a job's present round are, by RANK."""
        state = self._jobs.peek(rdzv_id)
        return self._progress.shown(state, self._clock.now_ms()) if state is not None else ()

    def stragglers(self, rdzv_id: str) -> tuple[Straggler, ...]:
        """Name the workers of a job's present round that straggle, by RANK."""
        return self._stragglers.shown(rdzv_id)

    def hangs(self, rdzv_id: str) -> str:
        """Say who hangs in a job now; empty: nobody."""
        return self._hangs.shown(rdzv_id)

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

    @contextmanager
    def followed_by(self, note: Callable[[str | None], None]) -> Iterator[None]:
        """Have `note` called, until the body ends, with each job that has changed, by its rdzv_id.

        None: a node has changed, or this driver closes its streams. It is called in the midst of a
        step and waits for nothing; what it wants to see it looks at later.
        """
        self._followers.add(note)
        try:
            yield
        finally:
            self._followers.discard(note)

    async def obey(self, rdzv_id: str, command: Command) -> JobView:
        """Do what an operator asks of a job, and show it as it then is.

        Raises:
            UnknownJobError: nobody has ever joined it.
            RendezvousClosedError: the run that is meant has ended.

        """
        await self.status(rdzv_id)
        return self._view(await self.submit(rdzv_id, command))

    async def submit_job(self, rdzv_id: str, command: Submit, caller: Caller = ANYBODY) -> JobView:
        """Begin a run whose nodes are chosen here, and show the job as it then is.

        Raises:
            DeniedError: the job is somebody else's.
            JobExistsError: a run of it has not ended.
            InvalidRequestError: no node that is known could ever take it.

        """

        def guard(state: State) -> None:
            roles.refuse_others_job(caller, state, "submit")

        state = await self._jobs.look(rdzv_id)
        if command.run != state.membership.run:
            self._placer.check_placeable(command.spec)
        command = replace(command, spec=replace(command.spec, submitter=caller.name))
        await self.submit(rdzv_id, command, guard)
        await self._placer.place()
        return await self.status(rdzv_id)

    async def look(self, rdzv_id: str) -> State:
        """Return a job's present state; that of a job which nobody knows is vacant."""
        return await self._jobs.look(rdzv_id)

    async def create_token(
        self, name: str, token_roles: Sequence[Role], expires_in_ms: int
    ) -> tuple[Token, str]:
        """Make a token, and return it with its text; see `Tokens.create`.

        Raises:
            InvalidRequestError: nobody here has to show any, and so nobody should rely on it.

        """
        if not self._auth:
            raise InvalidRequestError(
                "this server lets everybody do everything, so a token would protect nothing; start "
                "rdzvd with --auth=required --init-admin-token=FILE"
            )
        return await self.tokens.create(name, token_roles, expires_in_ms)

    async def append(self, rows: tuple[Record, ...]) -> None:
        """Write history that belongs to no job's step; see `Jobs.append`."""
        await self._jobs.append(rows)

    async def past(self, name: str, limit: int) -> tuple[Record, ...]:
        """Return the newest rows of what was appended under a name that no job can have."""
        return await self._jobs.past(name, limit)

    def nodes(self, node_ids: Collection[str] = ()) -> Sequence[NodeSummary]:
        """Show every node that is connected, away, cordoned or quarantined; of these, if any."""
        return self._placer.summaries(node_ids)

    async def cordon(self, node_id: str, reason: str) -> NodeSummary:
        """Place nothing more on a node, and show it as it then is; see `Placer.cordon`."""
        await self._placer.cordon(node_id, reason)
        self._tell_followers(None)
        return self._placer.summary(node_id)

    async def uncordon(self, node_id: str) -> NodeSummary:
        """Let a node be placed on again, and show it as it then is; see `Placer.uncordon`.

        One that is connected runs its checks anew.
        """
        await self._placer.uncordon(node_id)
        self._send(node_id, LookAgain())
        self._tell_followers(None)
        return self._placer.summary(node_id)

    async def drain(
        self, node_id: str, deadline_ms: int, reason: str, *, keep_min: bool = False
    ) -> NodeSummary:
        """Empty a node, and show it as it then is; see `Placer.drain_node`."""
        await self._placer.drain_node(node_id, deadline_ms, reason, keep_min=keep_min)
        self._show_drain(node_id)
        return self._placer.summary(node_id)

    async def undrain(self, node_id: str) -> NodeSummary:
        """Lift a drain, and show the node as it then is; see `Placer.undrain`."""
        await self._placer.undrain(node_id)
        self._show_drain(node_id)
        return self._placer.summary(node_id)

    def _show_drain(self, node_id: str) -> None:
        for rdzv_id in self._jobs_of.get(node_id, ()):
            self._wake_watchers(rdzv_id)

    async def list(self) -> tuple[JobView, ...]:
        """Show every job that can be read."""
        return tuple([view async for view in self.each()])

    async def each(self) -> AsyncGenerator[JobView, None]:
        """Show every job that can be read, one after the other."""
        async with contextlib.aclosing(self._jobs.each()) as states:
            async for state in states:
                # Otherwise it was forgotten since.
                if state.membership.run:
                    yield self._view(state)

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

    async def stacks(self, rdzv_id: str, run: str, number: int | None, why: str) -> Report:
        """Show what the workers of a round do, or did when it hung; see `Control.TakeStacks`.

        Raises:
            UnknownJobError: nobody has ever joined it.
            RendezvousClosedError: the run that is meant is not the last.
            InvalidRequestError: no round is live, and none of that round were kept.
            LimitExceededError: too many are being taken.
            RendezvousConnectionError: the store is away, or this server does not serve any more.

        """
        await self.status(rdzv_id)
        state = await self._jobs.look(rdzv_id)
        membership = state.membership
        if run and run != membership.run:
            raise RendezvousClosedError(
                f"run {run} of {rdzv_id} has ended, and another has begun: run {membership.run}"
            )
        live = _live_round(state)
        if live is not None and number in (None, live):
            return await self._stacks.take(state, why)
        found, kept = await self._kept_stacks(state, number)
        if found is None:
            raise _no_stacks(rdzv_id, number, live, kept)
        return found

    async def kept_stacks(self, rdzv_id: str, number: int | None) -> Report:
        """Show what the workers of a round did when it hung; asks no node, and takes none.

        Raises:
            UnknownJobError: nobody has ever joined it.
            InvalidRequestError: none are kept, of any round or of this one.
            RendezvousConnectionError: the store is away, or this server does not serve any more.

        """
        await self.status(rdzv_id)
        state = await self._jobs.look(rdzv_id)
        found, kept = await self._kept_stacks(state, number)
        if found is not None:
            return found
        if number is None:
            raise InvalidRequestError(
                f"no stacks of {rdzv_id} are kept: no round of this run has hung; "
                f"`rdzvctl stacks {rdzv_id}` takes those of its workers now"
            )
        raise _no_stacks(rdzv_id, number, _live_round(state), kept)

    async def _kept_stacks(
        self, state: State, number: int | None
    ) -> tuple[Report | None, Collection[int]]:
        """Return those of a round, or the latest, and of which rounds there are any."""
        rdzv_id, run = state.membership.rdzv_id, state.membership.run
        kept = await self._shelf.rounds(rdzv_id, run)
        wanted = number if number is not None else max(kept, default=None)
        if wanted is None or wanted not in kept:
            return None, kept
        return await self._shelf.find(rdzv_id, run, wanted), kept

    async def forget(self, rdzv_id: str) -> None:
        """Delete a job that has ended, with its history; see `Jobs.forget`."""
        await self._jobs.forget(rdzv_id)
        try:
            await self._shelf.forget(rdzv_id)
        except RendezvousError as error:
            log.warning("stacks of %s are kept until others take their place: %s", rdzv_id, error)
        self._wake_watchers(rdzv_id)

    def backup(self) -> AsyncIterator[bytes]:
        """Yield all that is stored, as the lines of a file that `rdzvd --restore` reads.

        Raises:
            RendezvousError: it can not be read as a whole; what was yielded is worth nothing.

        """
        return self._jobs.backup(self.leadership)

    def noted(self, rdzv_id: str) -> int:
        """Return a number that grows with what history tells of a job beside its steps."""
        return self._jobs.noted(rdzv_id)

    async def history(self, rdzv_id: str, limit: int) -> tuple[Record, ...]:
        """Return a job's newest events, oldest first.

        Raises:
            UnknownJobError: nobody has ever joined it.

        """
        await self.status(rdzv_id)
        return await self._jobs.history(rdzv_id, limit)


def _live_round(state: State) -> int | None:
    last = state.membership.round
    live = last is not None and last.live and not state.membership.ended
    return last.number if last is not None and live else None


def _no_stacks(
    rdzv_id: str, number: int | None, live: int | None, kept: Collection[int]
) -> InvalidRequestError:
    rounds = f"those of round {listed(kept)} are" if kept else "no round of this run has hung"
    if number is None:
        return InvalidRequestError(
            f"{rdzv_id} has no workers now, so there are no stacks to take, and none are kept: "
            f"{rounds}"
        )
    present = f"; its workers are in round {live} now" if live is not None else ""
    return InvalidRequestError(
        f"no stacks of round {number} of {rdzv_id} are kept, {rounds}{present}"
    )
