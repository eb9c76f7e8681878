"""Events as lines: the log and the history use the same words, so they can not disagree."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Sequence

from rdzv.core.events import (
    Event,
    HangOver,
    JobQueued,
    JobScaled,
    LastCallBegan,
    NodeAdopted,
    NodeCameBack,
    NodeDeclined,
    NodeDrained,
    NodeJoined,
    NodeLeaving,
    NodeLeft,
    NodeLost,
    NodesPlaced,
    NodeStopped,
    NodeStuck,
    NodeSucceeded,
    NodesWithdrawn,
    NodeUndrained,
    NodeWentAway,
    RankCaughtUp,
    RankStraggles,
    RoundAdopted,
    RoundCompleted,
    RoundEnded,
    RoundSettled,
    RunBegan,
    RunEnded,
    StacksTaken,
    WorkerFailed,
    WorkersHang,
)
from rdzv.core.model import Result, Round
from rdzv.core.root_cause import describe_failure
from rdzv.core.words import LISTED, counted, duration, listed
from rdzv.runtime.log_format import formatter_for
from rdzv.stores.base import Record

log = logging.getLogger("rdzv.events")


def describe(event: Event) -> str:
    """Say in one line what happened. The job's name is the reader's to put before it.

    >>> from rdzv.core.events import NodeLost
    >>> describe(NodeLost("n7", "lease ran out: nothing heard for 5.0 s"))
    'n7 was lost: lease ran out: nothing heard for 5.0 s'
    """
    return _one_line(_describe(event))


def _describe(event: Event) -> str:
    match event:
        case RunBegan():
            return f"run {event.run_number} ({event.run}) began: {event.reason}"
        case NodeJoined():
            workers = counted(event.local_world_size, "worker")
            return f"{event.node_id} joined from {event.address} with {workers}"
        case NodeStopped():
            return f"{event.node_id} stopped its workers of round {event.round}"
        case NodeSucceeded():
            return f"{event.node_id} succeeded in round {event.round}"
        case NodeLeaving():
            return f"{event.node_id} leaves: {event.reason}"
        case NodeLeft():
            return f"{event.node_id} left: {event.reason}"
        case NodeWentAway():
            return f"{event.node_id} is away, its place is kept for {_seconds(event.for_ms)}"
        case NodeCameBack():
            return f"{event.node_id} is back after {_seconds(event.after_ms)}"
        case NodeLost():
            unheard = "; its workers may still run until it is heard" if event.may_run else ""
            return f"{event.node_id} was lost: {event.reason}{unheard}"
        case NodeStuck():
            return f"{event.node_id} is stuck in round {event.round}: {event.reason}"
        case WorkerFailed():
            return f"worker failed in round {event.round}: {describe_failure(event.failure)}"
        case LastCallBegan():
            nodes = counted(event.nodes, "node")
            return f"last call: {nodes} at hand, more may come for {_seconds(event.for_ms)}"
        case RoundCompleted():
            return _describe_round(event.round)
        case RoundAdopted():
            nodes = counted(len(event.round.participants), "node")
            return f"round {event.round.number} of {nodes} goes on: its nodes told of it"
        case NodeAdopted():
            return f"{event.node_id} has GROUP_RANK {event.group_rank} in round {event.round}"
        case RoundEnded():
            return f"round {event.round} ended ({event.end.cause}): {event.end.reason}"
        case RoundSettled():
            return f"round {event.round} is charged to {event.cause}: {event.reason}" + _budget(
                event
            )
        case JobScaled():
            return f"scaled to {event.min_nodes}:{event.max_nodes} nodes: {event.reason}"
        case NodesPlaced():
            return f"placed on {listed(event.node_ids)}"
        case NodesWithdrawn():
            return f"withdrawn from {listed(event.node_ids)}: {event.reason}"
        case NodeDeclined():
            return f"{event.node_id} can not run it: {event.reason}"
        case NodeDrained():
            return f"{event.node_id} leaves within {duration(event.within_ms)}: {event.reason}"
        case NodeUndrained():
            return f"{event.node_id} may stay: its drain is lifted"
        case JobQueued():
            return f"queued again: {event.reason}"
        case WorkersHang():
            return f"{event.node_id}: workers hang in round {event.round}: {event.reason}"
        case StacksTaken():
            return f"stacks of round {event.round}: {event.summary}"
        case RankStraggles():
            pace = f"{event.step_s:.3g} s a step, where the median is {event.median_s:.3g} s"
            return f"RANK {event.rank} on {event.node_id} straggles: {pace}"
        case RankCaughtUp():
            return f"RANK {event.rank} on {event.node_id} straggles no more"
        case HangOver():
            return f"nobody hangs any more in round {event.round}, which goes on"
        case RunEnded():
            return f"run {event.run} {event.ended.result}: {event.ended.reason}"


def _budget(event: RoundSettled) -> str:
    if event.max_restarts is None:
        return ""
    return f"; restarts spent: {event.restarts} of {event.max_restarts}"


def _describe_round(round_: Round) -> str:
    places = [
        f"{p.node_id}={_ranks(p.rank_first, p.offer.local_world_size)}"
        for p in round_.participants[:LISTED]
    ]
    more = len(round_.participants) - len(places)
    listed = " ".join(places) + (f" and {counted(more, 'more node')}" if more else "")
    return (
        f"round {round_.number} complete: {listed}, world_size {round_.world_size}, "
        f"MASTER {_host_port(round_.master_addr, round_.master_port)}"
    )


def _ranks(first: int, count: int) -> str:
    return f"{first}..{first + count - 1}" if count > 1 else str(first)


def _host_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _seconds(ms: int) -> str:
    return f"{ms / 1000:.3g} s"


def _one_line(text: str) -> str:
    """Keep what nodes say from forging lines of the log, or moving a terminal's cursor."""
    return "".join(char if char.isprintable() else " " for char in text)


# ------------------------------------------------------------------ history and log


def records(rdzv_id: str, run: str, events: Iterable[Event], now_ms: int) -> tuple[Record, ...]:
    """Turn events into rows of history; `run` is that of events which do not name one."""
    return tuple(
        Record(
            unix_ms=now_ms,
            rdzv_id=rdzv_id,
            run=getattr(event, "run", run),
            name=type(event).__name__,
            text=describe(event),
        )
        for event in events
    )


def publish(rows: Sequence[Record], events: Sequence[Event]) -> None:
    """Write one line to the log for each event."""
    for row, event in zip(rows, events, strict=True):
        extra = {"rdzv_id": row.rdzv_id, "run": row.run, "event": row.name}
        log.log(_level(event), "%s: %s", row.rdzv_id, row.text, extra=extra)


def _level(event: Event) -> int:
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
        case RunEnded(ended=ended) if ended.result is Result.FAILED:
            return logging.ERROR
        case _:
            return logging.INFO


def configure_logging(level: str, log_format: str) -> None:
    """Log to stderr, which is where services and people look; stdout is for the ready line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter_for(log_format))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
