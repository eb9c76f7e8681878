"""A runner's frames are events of the agent's core. Some are reported by a log line alone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from rdzv.agent.core import events
from rdzv.agent.core.events import RunnerEvent
from rdzv.agent.runner.channel import MalformedFrameError

log = logging.getLogger("rdzv.agent.runner")

_MAX_TOLD = 100

OnEvent = Callable[[RunnerEvent], asyncio.Future[None] | None]
"""Handles an event; must not raise. Returns a future that is done once the event has been handled,
or None if it already has been. Until then, the next event is not delivered and the runner does not
forget this one.
"""

EVENTS: Mapping[str, type[RunnerEvent]] = {
    "started": events.WorkerStarted,
    "start_failed": events.StartFailed,
    "exited": events.WorkerExited,
    "suspect": events.WorkerSuspected,
    "resumed": events.WorkerResumed,
    "gone": events.WorkersGone,
    "not_kept": events.WorkerNotKept,
    "kept_exited": events.KeptExited,
    "kept_gone": events.KeptGone,
    "stuck": events.WorkersStuck,
    "fenced": events.Fenced,
    "started_cold": events.WorkersStartedCold,
    "zygote_ready": events.ZygoteReady,
    "zygote_lost": events.ZygoteLost,
    "store_host_ready": events.StoreHostReady,
    "store_host_exited": events.StoreHostExited,
    "snapshots_held": events.SnapshotsChanged,
    "snapshot_refused": events.SnapshotRefused,
    "snapshots_written": events.SnapshotsWritten,
    "serve_failed": events.ServeFailed,
    "error": events.RunnerRefused,
}


def number_of(message: Mapping[str, Any]) -> int:
    number = message.get("number", 0)
    if type(number) is not int:
        raise MalformedFrameError(f"the runner numbered an event {number!r:.200}")
    return number


def decode_event(message: Mapping[str, Any]) -> RunnerEvent:
    """Decode an event. Raises `MalformedFrameError` if the message is not an event."""
    try:
        return msgspec.convert(message, EVENTS[message["type"]])
    except (KeyError, TypeError, ValueError, msgspec.ValidationError) as error:
        raise MalformedFrameError(f"the runner sent {message!r:.200}: {error}") from error


class RunnerLog:
    """Writes log lines for one runner. A repeated reason is logged only once."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._told: set[str] = set()

    def write(self, event: RunnerEvent) -> None:
        """Log an event if there is a log line for its kind."""
        match event:
            case events.RunnerRefused():
                log.error("the runner refused a request: %s", event.reason)
            case events.ServeFailed():
                text = "the runner (pid %d) cannot outlive this agent: %s"
                log.warning(text, self._pid, event.reason)
            case events.WorkerNotKept():
                text = "round %d: killing local_rank %d (pid %d) instead of keeping it: %s"
                log.warning(text, event.round, event.local_rank, event.pid, event.reason)
            case events.SnapshotRefused():
                text = "local_rank %d cannot save snapshots in memory: %s"
                log.log(
                    self._level(event.reason, logging.WARNING), text, event.local_rank, event.reason
                )
            case events.ZygoteReady():
                log.info(
                    "workers can be warm: the zygote imported %s in %.1f s (%d MiB, pid %d)",
                    ", ".join(event.modules),
                    event.seconds,
                    event.memory_kb >> 10,
                    event.pid,
                )
            case events.ZygoteLost():
                retry = "" if event.retry_s is None else "; another zygote will be started"
                text = "there is no zygote: %s; workers will start cold%s"
                log.log(self._level(event.reason, logging.WARNING), text, event.reason, retry)
            case events.WorkersStartedCold():
                ranks = ", ".join(map(str, event.local_ranks))
                text = "round %d: workers will start cold (local_rank %s): %s"
                level = self._level(f"cold: {event.reason}", logging.INFO)
                log.log(level, text, event.round, ranks, event.reason)

    def _level(self, what: str, first: int) -> int:
        if what in self._told or len(self._told) >= _MAX_TOLD:
            return logging.DEBUG
        self._told.add(what)
        return first
