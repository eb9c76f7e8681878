"""The jobs of one server. All jobs are in the store; live jobs are also in memory.

Only the holder of a claim changes a job. A commit whose outcome is unknown leaves its job in doubt:
the next claim resolves the doubt, and nothing is announced before that. The durable half in memory
is therefore always the stored one, and includes everything that was announced.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from rdzv import errors
from rdzv.core.commands import Command
from rdzv.core.events import Event
from rdzv.core.life import restoring, runs
from rdzv.core.model import State, Tuning
from rdzv.core.rendezvous import Transition
from rdzv.runtime.clock import Timer
from rdzv.server.engine.store_access import STORE_RETRY_MS
from rdzv.stores.base import Record, RevisionConflictError
from rdzv.structs import replace, struct
from rdzv.transport.node_stream import BACKOFF

if TYPE_CHECKING:
    from rdzv.server.driver import Driver

log = logging.getLogger("rdzv.jobs")

T = TypeVar("T")

RECONNECT_MS = round(BACKOFF.max_s * 1000) + 1_000
"""The time in which all nodes reach a server that has started: their longest wait, and a second."""


Guard = Callable[[State], None]
"""Checks a job's state before a command; refuses the command by raising the caller's error."""


@dataclass(slots=True, eq=False)
class Asked:
    """A command waiting to be decided, with the future that receives its outcome."""

    command: Command
    guard: Guard | None = None
    outcome: asyncio.Future[State | errors.RendezvousError] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def answer(self, outcome: State | errors.RendezvousError) -> None:
        if not self.outcome.done():
            self.outcome.set_result(outcome)


@struct(frozen=True)
class Step:
    """A command that has been decided; once its durable half is stored, it can be announced."""

    command: Command
    before: State
    transition: Transition
    asked: Asked | None = None

    @property
    def after(self) -> State:
        return self.transition.state

    @property
    def events(self) -> tuple[Event, ...]:
        return self.transition.events


@dataclass(slots=True, eq=False)
class Job:
    """A job in memory, guarded as a whole by `lock`."""

    rdzv_id: str
    timer: Timer
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    claims: int = 0
    """The number of callers that hold the lock or are waiting for it."""
    loaded: State | None = None
    """The job's state, or None until it is loaded. Its durable half is always stored."""
    revision: int = 0
    doubt: tuple[Step, ...] = ()
    """The steps whose commit may or may not have happened."""
    pending: tuple[Record, ...] = ()
    published: int = 0
    """The number of history rows that this job has had in memory."""
    end_reason: str = ""
    """Why its last round ended, as logged."""
    node_ids: set[str] = field(default_factory=set)
    """A superset of the nodes that are present in the job."""

    @property
    def state(self) -> State:
        """The job's state. The caller must hold a claim, which ensures that the job is loaded."""
        assert self.loaded is not None, "the state of a job is read only under a claim"
        return self.loaded

    @property
    def idle(self) -> bool:
        """Whether the job can be dropped from memory.

        This requires that the job is unclaimed and fully stored, and has no run in progress.
        """
        if self.claims or self.doubt or self.pending:
            return False
        if self.loaded is None:
            return not self.node_ids
        membership = self.loaded.membership
        return not membership.run or membership.ended is not None


class Jobs:
    """All jobs of one server."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._clock = driver.clock
        self._store = driver.store
        self._tuning = Tuning(driver.config.lease.takeover_grace_ms)
        if driver.config.store == "memory":
            forms_from_ms = driver.clock.now_ms() + RECONNECT_MS
            self._tuning = replace(self._tuning, forms_from_ms=forms_from_ms)
        self.in_memory: dict[str, Job] = {}
        self.ended: dict[str, int] = {}
        """When each ended job ended, by rdzv_id; avoids loading a job just to find out."""

    # ---------------------------------------------------------------- claiming and loading

    @asynccontextmanager
    async def claim(self, rdzv_id: str) -> AsyncIterator[Job]:
        """Claim a job, and yield it loaded and with no step in doubt.

        Waits for other claims to end. When the body ends, an idle job is dropped from memory.
        """
        job = self.in_memory.get(rdzv_id) or self._new_job(rdzv_id)
        job.claims += 1
        try:
            async with job.lock:
                if job.loaded is None:
                    await self.load(job)
                if job.doubt:
                    await self._resolve(job, job.doubt)
                yield job
        except (errors.RendezvousConnectionError, errors.InvariantError):
            # If no caller claims the job again, its timer does.
            job.timer.arm_by(self.retry_at_ms())
            raise
        finally:
            job.claims -= 1
            if job.idle and not self._driver.engine.is_waiting(rdzv_id):
                job.timer.cancel()
                del self.in_memory[rdzv_id]

    def _new_job(self, rdzv_id: str) -> Job:
        if len(self.in_memory) >= (most := self._driver.config.limits.jobs):
            raise errors.LimitExceededError(
                f"job {rdzv_id} is over the limit: this server holds {most} jobs; try again when "
                "others have ended, or raise the limit `jobs`"
            )
        timer = Timer(self._clock, lambda due_ms: self._driver.engine.on_due(job, due_ms))
        job = self.in_memory[rdzv_id] = Job(rdzv_id, timer)
        return job

    async def load(self, job: Job) -> None:
        """Load a job from the store; if it is not stored, load it as a job that no node has joined.

        Steps in doubt are discarded, and the nodes that have seats are expected to return.
        """
        job.loaded, job.doubt = None, ()
        stored = await self._store.load(job.rdzv_id)
        now_ms = self._clock.now_ms()
        if stored is None:
            job.loaded, job.revision = runs.vacant(job.rdzv_id, self._tuning), 0
        else:
            job.loaded = restoring.restore(stored.membership, self._tuning, now_ms)
            job.revision = stored.revision
        self.note_end(job)
        self._driver.metrics.loaded(job.loaded, now_ms)
        job.timer.arm(now_ms)
        self._driver.recovery.on_load(job)

    async def _resolve(self, job: Job, steps: Sequence[Step]) -> None:
        """Find out whether the commit of the steps in doubt happened.

        If it did, publish the steps; if another server has written the job, load it.
        """
        stored = await self._store.load(job.rdzv_id)
        revision = stored.revision if stored else 0
        if revision == job.revision:
            job.doubt = ()
        elif stored and stored.membership == steps[-1].after.membership:
            job.revision, job.doubt, job.pending = revision, (), ()
            self._driver.engine.publish(job, steps, stored=True)
        else:
            await self.load(job)

    def vacate(self, job: Job) -> None:
        """Reset a claimed job after its deletion to a job that no node has ever joined."""
        job.loaded, job.revision = runs.vacant(job.rdzv_id, self._tuning), 0
        job.pending = ()
        self.note_end(job)

    async def write(self, job: Job, written: Awaitable[T]) -> T:
        """Await a write to a job and return its result; on a conflict, reload the job."""
        try:
            return await written
        except RevisionConflictError as error:
            log.error("another server has written job %s; reloading it", job.rdzv_id)
            await self.load(job)
            raise errors.StoreRefusedError(f"{error}; try again") from error

    def note_end(self, job: Job) -> None:
        if (ended := job.state.membership.ended) is None:
            self.ended.pop(job.rdzv_id, None)
        else:
            self.ended[job.rdzv_id] = ended.at_ms

    def retry_at_ms(self) -> int:
        return self._clock.now_ms() + STORE_RETRY_MS

    # ---------------------------------------------------------------- reading

    async def look(self, rdzv_id: str) -> State:
        """Return a job's current state without waiting for a commit in progress.

        A job that is not in memory is loaded first, which can raise the same errors as `claim`.
        """
        if (state := self.peek(rdzv_id)) is not None:
            return state
        async with self.claim(rdzv_id) as job:
            return job.state

    def peek(self, rdzv_id: str) -> State | None:
        job = self.in_memory.get(rdzv_id)
        return job.loaded if job else None

    @property
    def states(self) -> tuple[State, ...]:
        return tuple(job.loaded for job in self.in_memory.values() if job.loaded is not None)

    @property
    def doubtful(self) -> tuple[str, ...]:
        return tuple(job.rdzv_id for job in self.in_memory.values() if job.doubt)

    async def load_all(self) -> None:
        """Load every job that has not ended, and when the others ended; skip unreadable jobs."""
        async for rdzv_id, stored in self._store.each():
            try:
                if isinstance(stored, errors.RendezvousStateError):
                    raise stored
                if stored.membership.ended is not None:
                    self.ended[rdzv_id] = stored.membership.ended.at_ms
                    continue
                async with self.claim(rdzv_id):
                    pass
            except errors.RendezvousStateError as error:
                log.error("leaving job %s alone: %s", rdzv_id, error)

    async def each(self) -> AsyncGenerator[State, None]:
        async for rdzv_id, stored in self._store.each():
            try:
                if (present := self.peek(rdzv_id)) is not None:
                    yield present
                elif isinstance(stored, errors.RendezvousStateError):
                    raise stored
                elif stored.membership.ended is not None:
                    yield restoring.restore(stored.membership, self._tuning, self._clock.now_ms())
                else:
                    # The job is being loaded, or has ended since it was read.
                    yield await self.look(rdzv_id)
            except errors.RendezvousStateError as error:
                log.error("not listing job %s: %s", rdzv_id, error)

    def stop_timers(self) -> None:
        for job in self.in_memory.values():
            job.timer.cancel()
