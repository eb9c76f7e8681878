"""State and services shared by the parts of one job's driver."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rdzv.agent.job.decisions import Decisions
from rdzv.agent.job.store_offer import StoreOffer
from rdzv.agent.job.worker_observers import WorkerObservers
from rdzv.agent.launch.launch import Launch
from rdzv.agent.runner_link import RunnerLink
from rdzv.agent.system.owned_tasks import OwnedTasks
from rdzv.agent.system.side_thread import Aside
from rdzv.agent.workers.fates import FateRecorder, NodeOutcome
from rdzv.agent.workers.worker_group import LocalWorkerGroup
from rdzv.core.model import Offer

if TYPE_CHECKING:
    from rdzv.agent.job.round import Round

ERROR_FILE_WITHIN_S = 2.0
"""How long a failed worker's exit waits for its error file to be read."""


@dataclass(eq=False)
class JobContext:
    """A job on this node, as shared by its driver, its rounds and its event router."""

    launch: Launch
    workers: LocalWorkerGroup
    observers: WorkerObservers
    fates: FateRecorder
    decisions: Decisions
    tasks: OwnedTasks
    keep: Callable[[], None]
    """Stores the current state in the runner for the next agent."""
    examine: Callable[[], Awaitable[str]] | None
    """Returns what is wrong with this node, or an empty string. None if there are no health checks.
    """
    offer: StoreOffer = field(default_factory=lambda: StoreOffer(Offer(address="")))
    linked: RunnerLink | None = None
    """The job's runner; None until the job is prepared."""
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once it is known whether workers can be started on this node."""
    unready: str = ""
    """Why workers cannot be started on this node; empty if they can."""
    error_files: Aside = field(default_factory=lambda: Aside(ERROR_FILE_WITHIN_S))
    ended: asyncio.Future[NodeOutcome] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """The job's outcome on this node, or the unexpected error that ended it."""
    last_round: Round | None = None
    """The last round in which this node took part; None before the first."""

    @property
    def runner(self) -> RunnerLink:
        """The job's runner. Available once the job has been prepared."""
        assert self.linked is not None
        return self.linked

    @property
    def round(self) -> Round:
        """The last round. Available once there has been one."""
        assert self.last_round is not None
        return self.last_round

    def round_of(self, number: int) -> Round | None:
        """Return the last round if it has this number, or None, because an older round is over."""
        last = self.last_round
        return last if last is not None and last.assignment.round == number else None
