"""Log lines for those runner events that are not reported anywhere else."""

from __future__ import annotations

import logging

from rdzv.agent.core.events import (
    RunnerEvent,
    RunnerRefused,
    ServeFailed,
    SnapshotRefused,
    WorkerNotKept,
    WorkersStartedCold,
    ZygoteLost,
    ZygoteReady,
)

log = logging.getLogger("rdzv.agent.runner")

_MAX_TOLD = 100


class RunnerLog:
    """Writes log lines for one runner. A repeated reason is logged only once."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._told: set[str] = set()

    def write(self, event: RunnerEvent) -> None:
        """Log an event if there is a log line for its kind."""
        match event:
            case RunnerRefused():
                log.error("the runner refused a request: %s", event.reason)
            case ServeFailed():
                text = "the runner (pid %d) cannot outlive this agent: %s"
                log.warning(text, self._pid, event.reason)
            case WorkerNotKept():
                text = "round %d: killing local_rank %d (pid %d) instead of keeping it: %s"
                log.warning(text, event.round, event.local_rank, event.pid, event.reason)
            case SnapshotRefused():
                text = "local_rank %d cannot save snapshots in memory: %s"
                log.log(
                    self._level(event.reason, logging.WARNING), text, event.local_rank, event.reason
                )
            case ZygoteReady():
                log.info(
                    "workers can be warm: the zygote imported %s in %.1f s (%d MiB, pid %d)",
                    ", ".join(event.modules),
                    event.seconds,
                    event.memory_kb >> 10,
                    event.pid,
                )
            case ZygoteLost():
                retry = "" if event.retry_s is None else "; another zygote will be started"
                text = "there is no zygote: %s; workers will start cold%s"
                log.log(self._level(event.reason, logging.WARNING), text, event.reason, retry)
            case WorkersStartedCold():
                ranks = ", ".join(map(str, event.local_ranks))
                text = "round %d: workers will start cold (local_rank %s): %s"
                level = self._level(f"cold: {event.reason}", logging.INFO)
                log.log(level, text, event.round, ranks, event.reason)

    def _level(self, what: str, first: int) -> int:
        """Return `first` for a new reason, or DEBUG for one that was logged before."""
        if what in self._told or len(self._told) >= _MAX_TOLD:
            return logging.DEBUG
        self._told.add(what)
        return first
