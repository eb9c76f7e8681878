"""Converts events to history rows and to log lines with the same fields."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from rdzv.core.events import (
    Event,
    NodeDeclined,
    NodeLost,
    NodeStuck,
    RankStraggles,
    WorkersHang,
)
from rdzv.core.model import Result
from rdzv.stores.base import Record
from rdzv.view.history import Kept, RunEnded, WorkerFailed, written
from rdzv.view.sentences import sentence

log = logging.getLogger("rdzv.events")


def records(rdzv_id: str, run: str, events: Iterable[Event], now_ms: int) -> tuple[Record, ...]:
    """Convert events to history rows; an event that names no run is assigned to `run`."""
    return tuple(
        Record(
            unix_ms=now_ms,
            rdzv_id=rdzv_id,
            run=getattr(event, "run", run),
            name=type(event).__name__,
            data=written(event),
        )
        for event in events
    )


def publish(rows: Sequence[Record], events: Sequence[Kept]) -> None:
    """Write a log line for each event; `rows` contains the events' rows in the same order."""
    for row, event in zip(rows, events, strict=True):
        extra = {"rdzv_id": row.rdzv_id, "run": row.run, "event": row.name}
        log.log(_level(event), "%s: %s", row.rdzv_id, sentence(event), extra=extra)


def _level(event: Kept) -> int:
    match event:
        case (
            NodeLost()
            | NodeStuck()
            | WorkerFailed()
            | NodeDeclined()
            | WorkersHang()
            | RankStraggles()
        ):
            return logging.WARNING
        case RunEnded(result=Result.FAILED):
            return logging.ERROR
        case _:
            return logging.INFO
