"""A job's history as a Chrome trace, for ui.perfetto.dev and chrome://tracing.

Each run is one process. Its first track shows the job: each round with the cause of its end and,
between rounds, the time taken to stop all workers and to form the next round. Below it, every node
has a track with a slice for each round that it took part in, followed by a slice for the time it
took to stop. Every other event is an instant on the track to which it belongs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any

from rdzv.core.words import counted
from rdzv.structs import struct
from rdzv.view.answers import Event, JobStatus
from rdzv.view.life import Round, Run, following, name_present, node_of, runs_of

_JOB_TRACK = 0

# The names of colors that both viewers know.
_LIVE, _FORMING, _STOPPING, _FAILED = "good", "yellow", "grey", "bad"

# Events that are already shown as slices.
_NO_INSTANTS = {"NodeStopped"}

_BAD_CAUSES = {"worker failure", "node lost", "store host", "start failed"}


class Phase(StrEnum):
    """A phase of a job."""

    FORMING = "forming"
    LIVE = "live"
    STOPPING = "stopping"


@struct(frozen=True)
class Span:
    """The time that a job spent in one phase."""

    phase: Phase
    round: Round | None
    """The round that was forming, live or stopping, or None if a forming phase led to no round."""
    since_ms: int
    until_ms: int


def trace(status: JobStatus, history: Sequence[Event], now_ms: int) -> str:
    """Return the trace as a JSON document; slices still open end at `now_ms`, a Unix time."""
    events = list(_events(status, history, now_ms))
    document = {
        "displayTimeUnit": "ms",
        "otherData": {"rdzv_id": status.rdzv_id, "version": 1},
        "traceEvents": sorted(events, key=lambda event: (event["ph"] != "M", event.get("ts", 0))),
    }
    return json.dumps(document, ensure_ascii=True, indent=1)


def _events(status: JobStatus, history: Sequence[Event], now_ms: int) -> Iterator[dict[str, Any]]:
    for process, run in enumerate(runs_of(history), 1):
        name_present(run, status)
        until_ms = now_ms if run.ended_ms is None else run.ended_ms
        tracks = {node: track for track, node in enumerate(run.nodes, 1)}
        yield from _names(process, status.rdzv_id, run, tracks)
        yield from _job_slices(process, run, until_ms)
        for round_ in run.rounds:
            yield from _node_slices(process, round_, tracks, until_ms)
        yield from _instants(process, run, history, tracks)


def _names(
    process: int, rdzv_id: str, run: Run, tracks: Mapping[str, int]
) -> Iterator[dict[str, Any]]:
    number = f" run {run.number}" if run.number is not None else ""
    yield _name("process_name", process, _JOB_TRACK, f"{rdzv_id}{number} ({run.run or 'no run'})")
    for node, track in {"job": _JOB_TRACK, **tracks}.items():
        yield _name("thread_name", process, track, node)
        yield {
            **{"ph": "M", "name": "thread_sort_index", "pid": process, "tid": track},
            "args": {"sort_index": track},
        }


def _name(what: str, process: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": track, "args": {"name": name}}


def _slice(
    process: int, track: int, name: str, times_ms: tuple[int, int], colour: str, **more: Any
) -> dict[str, Any]:
    since_ms, until_ms = times_ms
    return {
        **{"ph": "X", "cat": "rdzv", "name": name, "pid": process, "tid": track},
        **{"ts": since_ms * 1000, "dur": max(until_ms - since_ms, 0) * 1000},
        **{"cname": colour, "args": {key: value for key, value in more.items() if value != ""}},
    }


def _job_slices(process: int, run: Run, until_ms: int) -> Iterator[dict[str, Any]]:
    """Yield the job's phases, for example a round, stopping, forming, the next round."""
    for span in spans_of(run, until_ms):
        times_ms = (span.since_ms, span.until_ms)
        if span.phase is Phase.LIVE and span.round is not None:
            round_ = span.round
            yield _slice(
                process,
                _JOB_TRACK,
                f"round {round_.number}",
                times_ms,
                _colour(round_),
                **_about(round_),
                nodes=counted(len(round_.nodes) + round_.more, "node"),
                workers=str(round_.workers or ""),
            )
        else:
            colour = _STOPPING if span.phase is Phase.STOPPING else _FORMING
            yield _slice(process, _JOB_TRACK, span.phase, times_ms, colour)


def spans_of(run: Run, until_ms: int) -> Iterator[Span]:
    """Yield the phases of a run in order, cutting a phase that has not ended at `until_ms`."""
    yield from _between(run, None, until_ms)
    for round_ in run.rounds:
        live_ms = until_ms if round_.live_until_ms is None else round_.live_until_ms
        yield Span(Phase.LIVE, round_, round_.at_ms, live_ms)
        yield from _between(run, round_, until_ms)


def _between(run: Run, before: Round | None, until_ms: int) -> Iterator[Span]:
    """Yield the phases after a round, or before the first one: stopping, then forming."""
    after = following(run, before) if before is not None else run.rounds[0] if run.rounds else None
    since_ms = run.began_ms if before is None else before.live_until_ms
    if since_ms is None or (after is not None and after.adopted):
        return
    end_ms = until_ms if after is None else after.at_ms
    if before is not None:
        settled_ms = end_ms if before.settled_ms is None else before.settled_ms
        yield Span(Phase.STOPPING, before, since_ms, settled_ms)
        since_ms = settled_ms
    if since_ms < end_ms:
        yield Span(Phase.FORMING, after, since_ms, end_ms)


def _went_wrong(round_: Round) -> bool:
    """Return whether a round ended because of a failure."""
    return (round_.charge or round_.cause) in _BAD_CAUSES


def _about(round_: Round) -> dict[str, str]:
    """Return the attributes that describe how a round ended, with empty values for unknown ones."""
    return {
        "ended by": round_.cause,
        "because": round_.reason,
        "charged to": round_.charge,
        "restarts spent": round_.restarts,
    }


def _colour(round_: Round) -> str:
    return _FAILED if _went_wrong(round_) else _LIVE


def _node_slices(
    process: int, round_: Round, tracks: Mapping[str, int], until_ms: int
) -> Iterator[dict[str, Any]]:
    """Yield the round on each participant's track, followed by the time the node took to stop."""
    ended_ms = until_ms if round_.live_until_ms is None else round_.live_until_ms
    for node in round_.nodes:
        track = tracks[node]
        times_ms = (round_.at_ms, ended_ms)
        name = f"round {round_.number}"
        yield _slice(process, track, name, times_ms, _colour(round_), **_about(round_))
        stopped_ms = round_.stopped_ms.get(node)
        if stopped_ms is not None and round_.ended_ms is not None:
            yield _slice(process, track, Phase.STOPPING, (ended_ms, stopped_ms), _STOPPING)


def _instants(
    process: int, run: Run, history: Iterable[Event], tracks: Mapping[str, int]
) -> Iterator[dict[str, Any]]:
    """Yield each other event as an instant, on the track of its node or of the job."""
    for event in history:
        if (event.run or "") != run.run or (event.fields and event.name in _NO_INSTANTS):
            continue
        track = tracks.get(node_of(event) or "", _JOB_TRACK)
        yield {
            **{"ph": "i", "cat": "rdzv", "name": event.name, "pid": process, "tid": track},
            # The instant's scope: its own track, or a line across all of the run's tracks.
            **{"ts": event.unix_ms * 1000, "s": "p" if event.name in _ACROSS else "t"},
            "args": {"text": event.text},
        }


_ACROSS = {"RoundEnded", "RunBegan", "RunEnded", "WorkerFailed", "NodeLost"}
