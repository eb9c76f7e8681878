"""Investigates hangs: waits for reports, stores all workers' stacks, and ends the round.

The first report in a round (`Hung`) begins an *episode*. Because one hanging worker stalls all
others, the other nodes will soon report hangs too; then stacks are captured while the workers are
still in place.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rdzv.core.commands import Fail
from rdzv.core.events import HangOver, StacksTaken, WorkersHang
from rdzv.core.evidence.hang_culprit import HungWorker, describe_hung, verdict
from rdzv.core.evidence.stacks import CollectedStacks
from rdzv.core.model import Failure, State
from rdzv.errors import RendezvousConnectionError, RendezvousError
from rdzv.messages import Hung
from rdzv.runtime.clock import Timer, sleep_ms
from rdzv.server.diagnosis.round_reports import check_own
from rdzv.server.engine.store_access import STORE_RETRY_MS

if TYPE_CHECKING:
    from rdzv.server.driver import Driver

log = logging.getLogger("rdzv.hangs")

TIMED_OUT_MS = 3_000
"""How long nodes may take to answer after a collective has timed out: less than the time for which
their agents hold back reports of the exits."""
HELD_BACK_MS = 10_000
"""The longest time between the end of a worker that timed out and the end of its round."""


@dataclass(eq=False, slots=True)
class _Episode:
    rdzv_id: str
    run: str
    round: int
    hung: dict[str, tuple[HungWorker, ...]] = field(default_factory=dict)
    timed_out: bool = False
    all_told: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when no further reports are expected."""


GATHER_MS = 2_000
"""How long a round's other nodes have to report hanging workers, too. All check within a second."""


class ReportedHangs:
    """The hangs reported in one server's jobs."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._episodes: dict[str, _Episode] = {}

    def take_report(self, state: State, node_id: str, report: Hung) -> None:
        ranks = (worker.rank for worker in report.workers)
        check_own(state.membership.live_round, node_id, ranks, "a hang")
        episode = self._episodes.get(report.rdzv_id)
        if episode is None or (episode.run, episode.round) != (report.run, report.round):
            if not report.workers:
                return
            episode = _Episode(report.rdzv_id, report.run, report.round)
            if (former := self._episodes.get(report.rdzv_id)) is not None:
                self._end(former)
            self._episodes[report.rdzv_id] = episode
            self._driver.tasks.start(self._look_into(episode))
        self._note_node(episode, node_id, report, len(state.seats))

    def note_state(self, state: State) -> None:
        episode = self._episodes.get(state.membership.rdzv_id)
        if episode is not None and not state.membership.is_live(episode.run, episode.round):
            self._end(episode)

    def shown(self, rdzv_id: str) -> str:
        episode = self._episodes.get(rdzv_id)
        if episode is None or not episode.hung:
            return ""
        return describe_hung(worker for workers in episode.hung.values() for worker in workers)

    @property
    def episodes(self) -> int:
        return len(self._episodes)

    def close(self) -> None:
        """End every episode; the nodes will report their hangs again to the next server."""
        for episode in tuple(self._episodes.values()):
            self._end(episode)

    # ---------------------------------------------------------------- one episode

    def _end(self, episode: _Episode) -> None:
        episode.all_told.set()
        if self._episodes.get(episode.rdzv_id) is episode:
            del self._episodes[episode.rdzv_id]

    def _note_node(self, episode: _Episode, node_id: str, report: Hung, nodes: int) -> None:
        known = episode.hung.pop(node_id, ())
        if report.workers:
            episode.hung[node_id] = report.workers
            if {worker.rank for worker in report.workers} - {worker.rank for worker in known}:
                text = describe_hung(report.workers)
                silent_ms = max(worker.silent_ms for worker in report.workers)
                hang = WorkersHang(episode.round, node_id, text, silent_ms)
                self._driver.note(episode.rdzv_id, (hang,))
        episode.timed_out |= any(worker.timed_out for worker in report.workers)
        # After a timeout, peers lose their connections to the ended workers and soon end as well.
        if episode.timed_out or len(episode.hung) >= nodes:
            episode.all_told.set()

    def _present(self, episode: _Episode) -> State | None:
        if self._episodes.get(episode.rdzv_id) is not episode:
            return None
        state = self._driver.jobs.peek(episode.rdzv_id)
        live = state is not None and state.membership.is_live(episode.run, episode.round)
        return state if live else None

    async def _look_into(self, episode: _Episode) -> None:
        """Run an episode to completion. Never raises, because an error would end the server."""
        try:
            await self._gather(episode)
            report, why = await self._take(episode)
            await self._end_round(episode, report, why)
        except Exception:
            log.exception(
                "failed to investigate the hang in round %d of %s", episode.round, episode.rdzv_id
            )
        finally:
            self._end(episode)

    async def _gather(self, episode: _Episode) -> None:
        timer = Timer(self._driver.clock, lambda _: episode.all_told.set())
        timer.arm(self._driver.clock.now_ms() + GATHER_MS)
        try:
            await episode.all_told.wait()
        finally:
            timer.cancel()

    async def _take(self, episode: _Episode) -> tuple[CollectedStacks | None, str]:
        state = self._present(episode)
        if state is None or not episode.hung:
            return None, ""
        how = "a collective timed out" if episode.timed_out else "it hung"
        within_ms = TIMED_OUT_MS if episode.timed_out else None
        try:
            report = await self._driver.stacks.take(
                state, f"{how}: {self.shown(episode.rdzv_id)}", within_ms
            )
        except RendezvousError as error:
            log.warning("could not capture stacks of %s: %s", episode.rdzv_id, error)
            return None, str(error)
        found = (report.cause.kind, report.cause.ranks) if report.cause is not None else ()
        taken = StacksTaken(report.round, report.summary, *found)
        self._driver.note(episode.rdzv_id, (taken,))
        try:
            await self._driver.stack_archive.keep(report)
        except RendezvousError as error:
            log.warning("could not store stacks of %s: %s", episode.rdzv_id, error)
        return report, ""

    async def _end_round(self, episode: _Episode, report: CollectedStacks | None, why: str) -> None:
        """End the round, unless it is already over or no worker is hanging any more.

        After a timeout, this ends the round only if the records show which ranks are missing or
        differ; otherwise the node's own report of the failure will soon end it.
        """
        found = report is not None and report.cause is not None and report.cause.finds
        if episode.timed_out and not found:
            return
        while (state := self._present(episode)) is not None:
            if not episode.hung:
                self._driver.note(episode.rdzv_id, (HangOver(episode.round),))
                return
            command = _failure(state, episode, report, why, self._driver.clock.now_ms())
            try:
                await self._driver.engine.submit(episode.rdzv_id, command)
            except RendezvousConnectionError:
                # While the store is unavailable, nothing is decided, and a worker that recovers
                # continues.
                await sleep_ms(self._driver.clock, STORE_RETRY_MS)
                continue
            return


def _failure(
    state: State, episode: _Episode, report: CollectedStacks | None, why: str, now_ms: int
) -> Fail:
    known = verdict(episode.hung, report, why)
    seats, node_id = state.seats, known.node_id
    if node_id not in seats:
        # The node has left along with the worker that the others waited for, so name one that
        # hangs.
        node_id = next(iter(episode.hung))
    incarnation = seats[node_id].incarnation if node_id in seats else 0
    failure = Failure(
        local_rank=known.local_rank,
        rank=known.rank,
        pid=known.pid,
        exit_code=0 if known.finished else None,
        signal=None,
        message=known.message,
        traceback=known.traceback,
        # The timeouts that this worker caused are later failures.
        at_ms=now_ms - (HELD_BACK_MS if episode.timed_out or known.finished else 0),
    )
    return Fail(node_id, incarnation, episode.run, episode.round, (failure,))
