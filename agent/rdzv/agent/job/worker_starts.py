"""Reports how each worker entered a round (kept, warm or cold), and why it was not kept.

Every round is reported to the server, and every round except the first is logged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from rdzv.agent.core import commands, events
from rdzv.agent.system.error_files import describe_exit
from rdzv.agent.workers.fates import ranges
from rdzv.core.model import Assignment
from rdzv.core.words import counted
from rdzv.messages import StartedWorker, WorkersStarted
from rdzv.structs import replace

log = logging.getLogger("rdzv.agent")

_KEPT, _HOT = "kept", "hot"


class LocalStarts:
    """Collects how a job's workers started, and reports it once they all take part in the round."""

    def __init__(
        self,
        rdzv_id: str,
        local_world_size: int,
        now_ms: Callable[[], int],
        report: Callable[[WorkersStarted], None],
        script: Callable[[], str] = str,
        *,
        watched: bool = False,
    ) -> None:
        """`watched`: a zygote starts only once workers have shown that it serves the script.

        `script` returns the digest of the workers' script.
        """
        self._rdzv_id = rdzv_id
        self._local_world_size = local_world_size
        self._now_ms = now_ms
        self._report = report
        self._round: Assignment | None = None
        """The current round, until all its workers take part in it."""
        self._number = -1
        """The number of the latest round."""
        self._not_loaded = ""
        """The first reason why its workers have not loaded snapshots."""
        self._watched, self._forks = watched, False
        self._script = script
        self._reported: WorkersStarted | None = None
        """The report on the current round, once it is complete."""
        self._is_first = True
        self._stopped_ms = self._parked_ms = self._began_ms = 0
        self._how: dict[int, str] = {}
        """How each of the current round's workers was started, by LOCAL_RANK."""
        self._resumed: set[int] = set()
        self._why_new: dict[int, str] = {}
        """How each of the previous round's workers ended, by LOCAL_RANK."""
        self._why_cold: dict[int, str] = {}
        """Why workers that should have been warm are cold, by LOCAL_RANK."""
        self._ended: dict[int, str] = {}
        """How each of the current round's workers ended, by LOCAL_RANK."""

    def decided(self, command: commands.Command) -> None:
        match command:
            case commands.StartWorkers():
                self._is_first = not self._stopped_ms
                self._round, self._began_ms = command.assignment, self._now_ms()
                self._number, self._not_loaded = command.assignment.round, ""
                self._how, self._resumed, self._why_cold = {}, set(), {}
                self._why_new, self._ended = self._ended, {}
            case commands.StopWorkers():
                self._round, self._reported = None, None
                self._stopped_ms = self._now_ms()

    def runner_said(self, event: events.RunnerEvent) -> None:
        round_ = None if self._round is None else self._round.round
        match event:
            case events.WorkerExited():
                how = describe_exit(event.exit_code, event.signal)
                self._ended.setdefault(event.local_rank, f"its worker ended with {how}")
            case events.WorkerNotKept():
                self._ended.setdefault(event.local_rank, event.reason)
            case events.WorkersGone():
                self._parked_ms = self._now_ms() - self._stopped_ms
            case events.ZygoteReady() | events.ZygoteLost():
                self._forks = self._watched and isinstance(event, events.ZygoteReady)
                self._tell_news()
            case events.KeptExited():
                reasons = self._ended if self._round is None else self._why_new
                reasons.setdefault(event.local_rank, "its worker was parked, and has ended")
            case events.WorkersStartedCold() if event.round == round_:
                self._why_cold |= dict.fromkeys(event.local_ranks, f"not warm: {event.reason}")
            case events.WorkerStarted() if event.round == round_ and event.how:
                self._how[event.local_rank] = event.how
                self._tell_if_complete()
            case events.WorkerResumed() if event.round == self._number:
                self._resumed.add(event.local_rank)
                if event.not_loaded and not self._not_loaded:
                    self._not_loaded = event.not_loaded
                    log.warning("%s: round %d: %s", self._rdzv_id, event.round, event.not_loaded)
                elif len(self._resumed) < self._local_world_size:
                    self._tell_if_complete()
                    return
                self._tell_if_complete()
                self._tell_news()

    def say_again(self) -> None:
        if self._reported is not None:
            self._report(self._reported)

    def _tell_news(self) -> None:
        """Report again what has changed since the report on the round, if there was one."""
        if (said := self._reported) is None:
            return
        is_elastic = len(self._resumed) == self._local_world_size
        script = self._script() if is_elastic else ""
        self._reported = replace(
            said, not_loaded=self._not_loaded, forks=self._forks, script=script
        )
        if self._reported != said:
            self._report(self._reported)

    def _tell_if_complete(self) -> None:
        kept = {rank for rank, how in self._how.items() if how == _KEPT}
        if self._round is None or len(self._how) < self._local_world_size or kept - self._resumed:
            return
        assignment, self._round = self._round, None
        ranks = sorted(self._how)
        workers = tuple(StartedWorker(rank, self._how[rank], self._why(rank)) for rank in ranks)
        who = (assignment.rdzv_id, assignment.run, assignment.round)
        self._reported = WorkersStarted(*who, workers, self._not_loaded, self._forks)
        self._report(self._reported)
        self._tell_news()
        if not self._is_first or _HOT in self._how.values():
            log.info("%s: round %d: %s", self._rdzv_id, assignment.round, self._described(kept))

    def _described(self, kept: set[int]) -> str:
        parts = []
        if kept:
            went_on_s = (self._now_ms() - self._began_ms) / 1000
            parts.append(
                f"{counted(len(kept), 'worker')} kept (local_rank {ranges(kept)}), parked in "
                f"{self._parked_ms / 1000:.2f} s and continued in {went_on_s:.2f} s"
            )
        if new := sorted(self._how.keys() - kept):
            alike: dict[str, list[int]] = {}
            for rank in new:
                # If none is kept, it says no more than the end of the last round did.
                why = self._why_new.get(rank) if kept else ""
                alike.setdefault(self._how[rank] + (f": {why}" if why else ""), []).append(rank)
            each = "; ".join(f"local_rank {ranges(alike[how])} {how}" for how in alike)
            parts.append(f"{counted(len(new), 'worker')} new ({each})")
        return ", ".join(parts)

    def _why(self, rank: int) -> str:
        if self._how[rank] in (_KEPT, _HOT):
            return ""
        found = (self._why_new.get(rank), self._why_cold.get(rank))
        return "; ".join(why for why in found if why)
