"""The log line of each round but the first: which workers are kept, which are new, and why."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from rdzv.agent import runner_link
from rdzv.agent.core import commands
from rdzv.agent.system.error_files import describe_exit

log = logging.getLogger("rdzv.agent")

_KEPT = "kept"


class StartLog:
    """Collects how the workers of one job were started, and writes a line once all go on."""

    def __init__(self, rdzv_id: str, local_world_size: int, now_ms: Callable[[], int]) -> None:
        self._rdzv_id = rdzv_id
        self._local_world_size = local_world_size
        self._now_ms = now_ms
        self._round: int | None = None
        """The round whose line is not written yet."""
        self._is_first = True
        self._stopped_ms = self._parked_ms = self._began_ms = 0
        self._how: dict[int, str] = {}
        """How each worker of the round was started, by LOCAL_RANK."""
        self._resumed: set[int] = set()
        self._why_new: dict[int, str] = {}
        """What became of the workers of the round before, by LOCAL_RANK."""
        self._ended: dict[int, str] = {}
        """The same for those of the present round."""

    def decided(self, command: commands.Command) -> None:
        """Note a command that is carried out for the job."""
        match command:
            case commands.StartWorkers():
                self._is_first = not self._stopped_ms
                self._round, self._began_ms = command.assignment.round, self._now_ms()
                self._how, self._resumed = {}, set()
                self._why_new, self._ended = self._ended, {}
            case commands.StopWorkers():
                self._round, self._stopped_ms = None, self._now_ms()

    def runner_said(self, event: runner_link.RunnerEvent) -> None:
        """Note an event of the runner."""
        match event:
            case runner_link.WorkerExited():
                how = describe_exit(event.exit_code, event.signal)
                self._ended.setdefault(event.local_rank, f"its worker ended with {how}")
            case runner_link.WorkerNotKept():
                self._ended.setdefault(event.local_rank, event.reason)
            case runner_link.WorkersGone():
                self._parked_ms = self._now_ms() - self._stopped_ms
            case runner_link.KeptExited():
                reasons = self._ended if self._round is None else self._why_new
                reasons.setdefault(event.local_rank, "its worker was parked, and has ended")
            case runner_link.WorkerStarted() if event.round == self._round and event.how:
                self._how[event.local_rank] = event.how
                self._write_if_complete()
            case runner_link.WorkerResumed() if event.round == self._round:
                self._resumed.add(event.local_rank)
                self._write_if_complete()

    def _write_if_complete(self) -> None:
        kept = {rank for rank, how in self._how.items() if how == _KEPT}
        if self._is_first or len(self._how) < self._local_world_size or kept - self._resumed:
            return
        parts = []
        if kept:
            went_on_s = (self._now_ms() - self._began_ms) / 1000
            parts.append(
                f"{_workers(len(kept))} kept (local_rank {_listed(kept)}), parked in "
                f"{self._parked_ms / 1000:.2f} s and gone on in {went_on_s:.2f} s"
            )
        if new := sorted(self._how.keys() - kept):
            each = "; ".join(self._describe(rank) for rank in new)
            parts.append(f"{_workers(len(new))} new ({each})")
        log.info("%s: round %d: %s", self._rdzv_id, self._round, ", ".join(parts))
        self._round = None

    def _describe(self, rank: int) -> str:
        why = self._why_new.get(rank)
        return f"local_rank {rank} is {self._how[rank]}" + (f": {why}" if why else "")


def _workers(count: int) -> str:
    return f"{count} worker{'' if count == 1 else 's'}"


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))
