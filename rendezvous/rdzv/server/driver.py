"""A leading server: creates, starts and stops its parts, and publishes steps.

It holds the state that the pure cores do not hold, and makes no decisions. Each part is given the
`Driver`, and reaches the others through it. `Engine.submit` takes each command to a job through
*decide, persist, publish*, and calls `Driver.publish` for the last of these. Nodes enter through
`connections`, `recovery`, `commands` and `reports`, operators through `operations` and `fleet`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from rdzv.core.events import Event
from rdzv.errors import RendezvousConnectionError, RendezvousError
from rdzv.runtime.clock import Clock, LoopWatch
from rdzv.runtime.tasks import Tasks, single_error
from rdzv.server.diagnosis.node_requests import NodeRequests
from rdzv.server.diagnosis.reported_hangs import ReportedHangs
from rdzv.server.diagnosis.round_reports import RoundReports
from rdzv.server.diagnosis.snapshot_tracking import SnapshotTracking
from rdzv.server.diagnosis.stack_archive import StackArchive
from rdzv.server.diagnosis.stack_collection import StackRelay
from rdzv.server.diagnosis.worker_logs import WorkerLogs
from rdzv.server.engine.decide_persist_publish import Engine
from rdzv.server.engine.forgetting import Forgetting
from rdzv.server.engine.history import History
from rdzv.server.engine.jobs import Job, Jobs, Step
from rdzv.server.engine.store_access import StoreAccess
from rdzv.server.engine.watchers import Watchers
from rdzv.server.operations.job_operations import JobOperations
from rdzv.server.scheduling.fleet import Fleet
from rdzv.server.scheduling.placing import Placer
from rdzv.server.scheduling.quarantine import Quarantine
from rdzv.server.security.tokens import TokenStore
from rdzv.server.sessions.connections import Connections, Leases
from rdzv.server.sessions.from_nodes import NodeCommands, Recovery, Reports
from rdzv.server.sessions.node_jobs import NodeJobs
from rdzv.server.sessions.streams import Streams
from rdzv.server.settings.server_settings import RdzvdSettings
from rdzv.server.telemetry.server_metrics import Metrics
from rdzv.stores.base import Store

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
        metrics: Metrics,
    ) -> None:
        self.clock, self.config, self.tasks = clock, config, tasks
        self.new_uid, self.metrics = new_uid, metrics
        self.leases = Leases(self)
        self.loop_watch = LoopWatch(
            clock,
            self.leases.renew,
            every_ms=max(WATCH_EVERY_MS, config.lease.duration_ms // 100),
            on_look=metrics.loop_late,
        )
        self.watchers = Watchers(clock)
        self.store = StoreAccess(self, store)
        self.engine, self.jobs = Engine(self), Jobs(self)
        self.history = History(self)
        self.forgetting = Forgetting(self)
        # Nodes on their streams, and what they say.
        self.streams, self.connections = Streams(self), Connections(self)
        self.node_jobs, self.commands = NodeJobs(self), NodeCommands(self)
        self.recovery, self.reports = Recovery(self), Reports(self)
        self.fleet, self.quarantine, self.placer = Fleet(self), Quarantine(self), Placer(self)
        # What is known of workers; only `hangs` ever changes a job.
        send = self.streams.send
        self.rounds, self.snapshots = RoundReports(self), SnapshotTracking(send, self.note)
        self.requests = NodeRequests(clock, send)
        self.logs, self.stacks = WorkerLogs(clock, self.requests, send), StackRelay(clock, send)
        self.hangs, self.stack_archive = ReportedHangs(self), StackArchive(self.store)
        # What operators and other callers ask.
        self.tokens = TokenStore(
            self.store, clock, tasks, self.streams.close_opened_with, auth=config.authenticates
        )
        self.operations = JobOperations(self)

    @classmethod
    @asynccontextmanager
    async def running(
        cls,
        store: Store,
        clock: Clock,
        config: RdzvdSettings,
        new_uid: Callable[[], str] = lambda: secrets.token_hex(6),
        metrics: Metrics | None = None,
    ) -> AsyncIterator[Driver]:
        """Take over the store, run until the body ends, and close every stream.

        Events are counted by `metrics`, if given. The store stays open, because the caller owns it.
        """
        with single_error():
            async with asyncio.TaskGroup() as group:
                driver = cls(store, clock, config, Tasks(group), new_uid, metrics or Metrics())
                try:
                    # A failed start must be followed by `stop`, because timers of loaded jobs may
                    # be running.
                    await driver.start()
                    yield driver
                finally:
                    await driver.stop()

    # ---------------------------------------------------------------- start and stop

    async def start(self) -> None:
        """Take over the store and load its contents."""
        self.leases.start(await self.store.take_over())
        await self.fleet.load()
        await self.tokens.start(self.config.init_admin_token, alone=self.config.needs_tokens)
        await self.jobs.load_all()
        self.placer.start()
        self.forgetting.start_pruning()
        self.loop_watch.start()

    async def stop(self) -> None:
        """Close every stream, and give decisions in progress a limited time to finish."""
        self.close_streams(
            RendezvousConnectionError("this server is stopping; workers continue, connect again")
        )
        self.loop_watch.stop()
        self.placer.stop()
        self.quarantine.stop()
        self.leases.stop()
        self.watchers.stop()
        self._stop_timers()
        await self.tasks.finish(within_ms=STOP_GRACE_MS)
        # Stop the timers again, because a decision that has just finished may have armed one.
        self._stop_timers()
        await self.history.flush()
        self.metrics.forget_jobs()

    def _stop_timers(self) -> None:
        self.forgetting.stop()
        self.store.stop()
        self.jobs.stop_timers()

    def close_streams(self, error: RendezvousError) -> None:
        """End every stream with this error and open no more. No node or job changes state."""
        self.streams.close_all(error)
        self.logs.close(RendezvousConnectionError(str(error)))
        # The nodes will report their hangs again to the next server.
        self.hangs.close()
        self.stacks.close()
        self.watchers.close()

    # ---------------------------------------------------------------- publishing changes

    def publish(self, job: Job, step: Step) -> None:
        self.node_jobs.note_step(job, step)
        if step.before.membership.submission or step.after.membership.submission:
            self.placer.wake()
        self.rounds.note_state(step.after)
        self.snapshots.tidy(step.after)
        self.hangs.note_state(step.after)
        self.watchers.job_changed(job.rdzv_id)
        self.streams.announce(step)
        # By now, the nodes taking part in a new round know about it and can be asked for logs.
        self.logs.note_state(step.after)
        self.node_jobs.note_end(job, step)

    def note_gone(self, node_id: str) -> None:
        """Expect no more answers on a node's stream, which has ended."""
        self.requests.note_gone(node_id)
        self.stacks.note_gone(node_id)
        self.snapshots.note_gone(node_id)

    def note(self, rdzv_id: str, events: tuple[Event, ...]) -> None:
        """Log and record events that were not caused by a step, and wake the job's watchers."""
        self.history.note(rdzv_id, events)
        self.watchers.job_changed(rdzv_id)

    # ---------------------------------------------------------------- the server as a whole

    @property
    def leadership(self) -> int:
        return self.leases.leadership

    @property
    def trouble(self) -> str:
        """The reason why nothing new can be decided now; empty if decisions are possible."""
        return self.store.trouble
