"""A runner's frames are events of the agent's core."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from rdzv.agent.core import events
from rdzv.agent.core.events import RunnerEvent
from rdzv.agent.runner.channel import MalformedFrameError

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
    """Return an event's number, or 0 if it has none."""
    number = message.get("number", 0)
    if type(number) is not int:
        raise MalformedFrameError(f"the runner numbered an event {number!r:.200}")
    return number


def decode_event(message: Mapping[str, Any]) -> RunnerEvent:
    """Decode an event. Raises `MalformedFrameError` if the message is not an event."""
    try:
        return msgspec.convert(message, EVENTS[message["type"]])
    except (KeyError, TypeError, msgspec.ValidationError) as error:
        raise MalformedFrameError(f"the runner sent {message!r:.200}: {error}") from error
