"""Records how the workers in each job's live round were started, as reported by the nodes.

The record is kept in memory and for live rounds only; no decision depends on it. A node repeats its
report after a reconnect.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rdzv import messages
from rdzv.core.events import Event, NewWorker, SnapshotsNotLoaded, WorkersStarted, WorkerStart
from rdzv.core.model import Participant, Round, State
from rdzv.core.rounds.ranks import participant_of
from rdzv.core.words import LISTED
from rdzv.errors import InvalidRequestError
from rdzv.structs import struct


@struct(frozen=True)
class Starts:
    """The number of workers that were kept, started warm, and started cold."""

    kept: int
    warm: int
    cold: int


@dataclass(slots=True)
class _Job:
    """The reports in one round, by node_id."""

    run: str
    round: int
    said: dict[str, tuple[messages.StartedWorker, ...]] = field(default_factory=dict)
    not_loaded: set[str] = field(default_factory=set)
    """The nodes, or the first few of them, that have not loaded some snapshots."""
    forks: set[str] = field(default_factory=set)
    """The nodes with a zygote that serves the script."""


class WorkerStarts:
    """The reports about one server's jobs, with at most one for each node in a live round."""

    def __init__(self, tell: Callable[[str, tuple[Event, ...]], None]) -> None:
        """Call `tell` with an event once all nodes in a round have reported.

        It is also called for the first few nodes that have not loaded snapshots.
        """
        self._tell = tell
        self._jobs: dict[str, _Job] = {}

    def note(self, state: State, node_id: str, said: messages.WorkersStarted) -> bool:
        """Record how a node's workers were started for the live round.

        Return whether the report is new.

        Raises:
            InvalidRequestError: the report does not name exactly the workers that the node has.

        """
        round_ = state.membership.live_round
        participant = participant_of(round_, node_id)
        assert round_ is not None and participant is not None
        _check(said, participant)
        job = self._jobs.get(said.rdzv_id)
        if job is None or not state.membership.is_live(job.run, job.round):
            job = self._jobs[said.rdzv_id] = _Job(said.run, said.round)
        if said.not_loaded and node_id not in job.not_loaded and len(job.not_loaded) < LISTED:
            job.not_loaded.add(node_id)
            event = SnapshotsNotLoaded(round_.number, node_id, said.not_loaded)
            self._tell(said.rdzv_id, (event,))
        (job.forks.add if said.forks else job.forks.discard)(node_id)
        if node_id in job.said:
            return False
        job.said[node_id] = said.workers
        if len(job.said) == len(round_.participants):
            self._tell(said.rdzv_id, (_event(round_, job),))
        return True

    def tidy(self, state: State) -> None:
        job = self._jobs.get(state.membership.rdzv_id)
        if job is not None and not state.membership.is_live(job.run, job.round):
            del self._jobs[state.membership.rdzv_id]

    def forks(self, state: State) -> bool | None:
        """Return whether zygotes serve the script on all nodes of the live round, if there is one.

        Only then may a node that has not run the script fork its first workers.
        """
        round_, job = state.membership.live_round, self._jobs.get(state.membership.rdzv_id)
        if round_ is None:
            return None
        if job is None or not state.membership.is_live(job.run, job.round):
            return False
        return all(p.node_id in job.forks for p in round_.participants)

    def shown(self, state: State) -> Mapping[str, Starts]:
        """Return how each node's workers were started for the live round, as far as known."""
        job = self._jobs.get(state.membership.rdzv_id)
        if job is None or not state.membership.is_live(job.run, job.round):
            return {}
        return {node_id: _counted(workers) for node_id, workers in job.said.items()}


def _check(said: messages.WorkersStarted, participant: Participant) -> None:
    named = sorted(worker.local_rank for worker in said.workers)
    size = participant.offer.local_world_size
    if named != list(range(size)):
        raise InvalidRequestError(
            f"started workers: {participant.node_id} names {len(named)}, and has local_rank "
            f"0..{size - 1} in round {said.round}; name each of them once"
        )


def _counted(workers: tuple[messages.StartedWorker, ...]) -> Starts:
    how = Counter(worker.how for worker in workers)
    return Starts(*(how[one] for one in (WorkerStart.KEPT, WorkerStart.WARM, WorkerStart.COLD)))


def _event(round_: Round, job: _Job) -> WorkersStarted:
    workers = tuple(worker for said in job.said.values() for worker in said)
    found = _counted(workers)
    new = [
        NewWorker(p.rank_first + worker.local_rank, p.node_id, worker.how, worker.why)
        for p in round_.participants
        for worker in job.said[p.node_id]
        if worker.why and worker.how != WorkerStart.KEPT
    ]
    return WorkersStarted(round_.number, found.kept, found.warm, found.cold, tuple(new[:LISTED]))
