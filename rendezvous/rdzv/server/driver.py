"""The driver of a leading server: creates, starts and stops its parts, and publishes steps.

It holds the state that the pure cores do not hold, and makes no decisions. `Engine.submit` takes
each command to a job through *decide, persist, publish*, and calls `Driver.publish` for the last of
these. Nodes enter through `connections`, `recovery`, `commands` and `reports`, operators through
`views`, `workers`, `operations` and `nodes`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from rdzv.core.commands import Command
from rdzv.core.events import Event
from rdzv.core.fleet.nodes import NodesEvent
from rdzv.core.model import State
from rdzv.core.rendezvous import Transition
from rdzv.errors import RendezvousConnectionError, RendezvousError
from rdzv.runtime.clock import Clock, LoopWatch
from rdzv.runtime.tasks import Tasks, single_error
from rdzv.server.diagnosis.diagnosis import Diagnosis
from rdzv.server.engine.decide_persist_publish import Engine
from rdzv.server.engine.forgetting import Forgetting
from rdzv.server.engine.job import Job, News
from rdzv.server.engine.store_access import StoreAccess
from rdzv.server.engine.watchers import Watchers
from rdzv.server.operations.job_operations import JobOperations
from rdzv.server.operations.job_views import JobViews
from rdzv.server.operations.node_operations import NodeOperations
from rdzv.server.operations.node_views import NodeViews
from rdzv.server.operations.worker_views import WorkerViews
from rdzv.server.scheduling.scheduling import Scheduling
from rdzv.server.security.tokens import Tokens
from rdzv.server.sessions.commands_from_nodes import NodeCommands
from rdzv.server.sessions.connections import Connections
from rdzv.server.sessions.node_jobs import NodeJobs
from rdzv.server.sessions.node_leases import Leases
from rdzv.server.sessions.recovery import Recovery
from rdzv.server.sessions.reports_from_nodes import Reports
from rdzv.server.sessions.streams import Streams
from rdzv.server.settings.server_settings import RdzvdSettings
from rdzv.server.telemetry.metrics_interface import Figures, Meter
from rdzv.server.telemetry.scrape_targets import ScrapeTargets
from rdzv.stores.base import Record, Store

WATCH_EVERY_MS = 250
"""How often the event loop checks whether it was blocked, unless leases are long."""

STOP_GRACE_MS = 500
"""How long open calls and decisions have to end when the server stops."""


class Driver:
    """Drives all jobs and nodes of one server. Use `running` to create one."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        config: RdzvdSettings,
        tasks: Tasks,
        new_uid: Callable[[], str],
        meter: Meter,
    ) -> None:
        """Create the parts in the order of their dependencies."""
        self._clock = clock
        self._config = config
        self._meter = meter
        self.tasks = tasks
        self.loop_watch = LoopWatch(
            clock,
            self._renew_leases,
            every_ms=max(WATCH_EVERY_MS, config.lease.duration_ms // 100),
            on_look=meter.loop_late,
        )
        self.store = StoreAccess(store, clock, tasks, meter, on_change=self._show_store)
        self.engine = Engine(
            self.store,
            clock,
            self.loop_watch,
            config,
            tasks,
            new_uid,
            meter,
            judge=self._judge,
            publish=self.publish,
            on_load=self._on_load,
        )
        self.jobs, self.history = self.engine.jobs, self.engine.history
        self.forgetting = Forgetting(self.jobs, self.store, clock, config, tasks)
        self.watchers = Watchers(clock)
        self.streams = Streams(clock)
        self.leases = Leases(
            clock,
            self.loop_watch,
            config.lease,
            on_event=self._on_node_event,
        )
        self.node_jobs = NodeJobs(self.engine, self.leases, self.streams, clock, tasks)
        self._make_services()
        self._make_entrances_of_nodes()
        self._make_entrances_of_operators()

    def _make_services(self) -> None:
        """Create the parts that serve both nodes and operators."""
        clock, config, tasks = self._clock, self._config, self.tasks
        self.tokens = Tokens(
            self.store,
            clock,
            tasks,
            self.streams.close_opened_with,
            auth=config.authenticates,
        )
        self.diagnosis = Diagnosis(
            self.engine, self.store, clock, tasks, config, self.streams.send, self._note
        )
        self.streams.forks = self.diagnosis.starts.forks
        self.scheduling = Scheduling(
            self.engine,
            self.store,
            clock,
            tasks,
            config,
            records=lambda: self.leases.records,
            send=self.streams.send,
            on_quarantine=self.watchers.nodes_changed,
        )
        self.scrape_targets = ScrapeTargets(config.limits.nodes)

    def _make_entrances_of_nodes(self) -> None:
        clock, limits = self._clock, self._config.limits
        self.connections = Connections(
            clock,
            self.loop_watch,
            limits,
            self._meter,
            streams=self.streams,
            leases=self.leases,
            node_jobs=self.node_jobs,
            scheduling=self.scheduling,
            diagnosis=self.diagnosis,
            targets=self.scrape_targets,
            watchers=self.watchers,
        )
        self.commands = NodeCommands(self.engine, self.node_jobs, clock)
        self.recovery = Recovery(
            self.jobs,
            clock,
            streams=self.streams,
            leases=self.leases,
            node_jobs=self.node_jobs,
            commands=self.commands,
            scheduling=self.scheduling,
        )
        self.reports = Reports(
            self.jobs,
            clock,
            streams=self.streams,
            node_jobs=self.node_jobs,
            commands=self.commands,
            scheduling=self.scheduling,
            diagnosis=self.diagnosis,
            watchers=self.watchers,
        )

    def _make_entrances_of_operators(self) -> None:
        clock = self._clock
        self.views = JobViews(
            self.engine,
            self.store.state,
            clock,
            scheduling=self.scheduling,
            diagnosis=self.diagnosis,
            watchers=self.watchers,
        )
        self.operations = JobOperations(
            self.engine,
            forgetting=self.forgetting,
            views=self.views,
            placer=self.scheduling.placer,
            stack_archive=self.diagnosis.stack_archive,
            watchers=self.watchers,
        )
        self.workers = WorkerViews(self.views, self.diagnosis, self.watchers)
        self.node_views = NodeViews(self.jobs, clock, lambda: self.leases.records, self.scheduling)
        self.nodes = NodeOperations(
            views=self.node_views,
            scheduling=self.scheduling,
            streams=self.streams,
            node_jobs=self.node_jobs,
            watchers=self.watchers,
        )

    @classmethod
    @asynccontextmanager
    async def running(
        cls,
        store: Store,
        clock: Clock,
        config: RdzvdSettings,
        new_uid: Callable[[], str] = lambda: secrets.token_hex(6),
        meter: Meter | None = None,
    ) -> AsyncIterator[Driver]:
        """Take over the store, run until the body ends, and close every stream.

        Events are counted by `meter`, if given. The store stays open, because the caller owns it.
        """
        with single_error():
            async with asyncio.TaskGroup() as group:
                driver = cls(store, clock, config, Tasks(group), new_uid, meter or Meter())
                try:
                    # A failed start must be followed by `stop`, because timers of loaded jobs may
                    # be running.
                    await driver.start()
                    yield driver
                finally:
                    await driver.stop()

    # ---------------------------------------------------------------- start and stop

    async def start(self) -> None:
        """Take over the store and load its contents.

        Raises:
            RendezvousError: the store is unavailable, or its contents cannot be read.

        """
        self.leases.start(await self.store.take_over())
        await self.scheduling.quarantine.load()
        await self.tokens.start(self._config.init_admin_token)
        await self.jobs.load_all()
        await self.scheduling.start()
        self.forgetting.start_pruning()
        self.loop_watch.start()

    async def stop(self) -> None:
        """Close every stream, and give decisions in progress a limited time to finish."""
        self.close_streams(
            RendezvousConnectionError("this server is stopping; workers run on, connect again")
        )
        self.loop_watch.stop()
        self.scheduling.stop()
        self.leases.stop()
        self.watchers.stop()
        self._stop_timers()
        await self.tasks.finish(within_ms=STOP_GRACE_MS)
        # Stop the timers again, because a decision that has just finished may have armed one.
        self._stop_timers()
        await self.history.flush()
        self._meter.forget_jobs()

    def _stop_timers(self) -> None:
        self.forgetting.stop()
        self.store.state.stop()
        self.jobs.stop_timers()

    def close_streams(self, error: RendezvousError) -> None:
        """End every stream with this error and open no more. No node or job changes state."""
        self.streams.close_all(error)
        self.diagnosis.close(error)
        self.watchers.close()

    # ---------------------------------------------------------------- callbacks of parts created
    # earlier

    def _renew_leases(self, late_ms: int) -> None:
        self.leases.renew(late_ms)

    def _on_load(self, job: Job) -> None:
        self.recovery.on_load(job)

    async def _judge(
        self, before: State, step: Transition
    ) -> tuple[Command | None, tuple[Record, ...]]:
        return await self.scheduling.quarantine.judge(before, step)

    def _on_node_event(self, event: NodesEvent) -> None:
        self.connections.note_event(event)

    # ---------------------------------------------------------------- publishing changes

    def publish(self, job: Job, news: News) -> None:
        """Announce a stored step to nodes, watchers and the other parts without waiting."""
        self.node_jobs.note_step(job, news)
        if news.before.membership.submission or news.after.membership.submission:
            self.scheduling.placer.wake()
        self.diagnosis.note_state(news.after)
        self.watchers.job_changed(job.rdzv_id)
        self.streams.announce(news)
        # By now, the nodes taking part in a new round know about it and can be asked for logs.
        self.diagnosis.logs.note_state(news.after)
        self.node_jobs.note_end(job, news)

    def _note(self, rdzv_id: str, events: tuple[Event, ...]) -> None:
        """Log and record events that were not caused by a step, and wake the job's watchers."""
        self.history.note(rdzv_id, events)
        self.watchers.job_changed(rdzv_id)

    def _show_store(self, rdzv_id: str | None) -> None:
        """Wake watchers when a job starts or stops waiting for the store; None means all jobs."""
        if rdzv_id is not None:
            self.watchers.job_changed(rdzv_id)
            return
        for state in self.jobs.states:
            self.watchers.job_changed(state.membership.rdzv_id)
        self.watchers.nodes_changed()

    # ---------------------------------------------------------------- the server as a whole

    @property
    def leadership(self) -> int:
        """This server's leadership number, which every message carries."""
        return self.leases.leadership

    @property
    def trouble(self) -> str:
        """The reason why nothing new can be decided now; empty if decisions are possible."""
        return self.store.state.trouble

    def figures(self) -> Figures:
        now_ms, records = self._clock.now_ms(), self.leases.records.values()
        connected = sum(1 for record in records if record.stream is not None)
        return Figures(
            now_ms=now_ms,
            leadership=self.leadership,
            streams=len(self.streams.open),
            nodes_connected=connected,
            nodes_away=len(records) - connected,
            watchers=self.views.watching,
            store_away_ms=self.store.state.away_ms,
            states=self.jobs.states,
            progress=lambda state: self.diagnosis.progress.shown(state, now_ms),
            straggling=lambda state: self.diagnosis.stragglers.shown(state.membership.rdzv_id),
            snapshots=self.diagnosis.snapshots.shown,
            lease_ms=self.leases.lease_ms,
            silence_ms=max(
                (now_ms - record.heard_ms for record in records if record.stream is not None),
                default=0,
            ),
            room=self.node_views.room,
        )

    def agents(self) -> Mapping[str, str]:
        """Return the addresses at which agents serve /metrics, by node_id (see `ScrapeTargets`)."""
        return self.scrape_targets.listed(self._clock.now_ms())
