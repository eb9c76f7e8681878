"""A job's history as a Chrome trace, for ui.perfetto.dev and chrome://tracing.

Each run is one process. Its first track shows the job: each round with the cause of its end and,
between rounds, the time taken to stop all workers and to form the next round. Below it, every node
has a track with a slice for each round that it took part in, followed by a slice for the time it
took to stop. Every other event is an instant on the track to which it belongs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rdzv.core.words import counted
from rdzv.view.answers import Event, JobStatus
from rdzv.view.life import Round, Run, name_present, node_of, runs_of

_JOB_TRACK = 0

# The names of colors that both viewers know.
_LIVE, _FORMING, _STOPPING, _FAILED = "good", "yellow", "grey", "bad"

# Events that are already shown as slices.
_NO_INSTANTS = {"NodeStopped"}

# Instants that are a line across all of the run's tracks.
_ACROSS = {"RoundEnded", "RunBegan", "RunEnded", "WorkerFailed", "NodeLost"}

_BAD_CAUSES = {"worker failure", "node lost", "store host", "start failed"}


def trace(status: JobStatus, history: Sequence[Event], now_ms: int) -> str:
    events: list[dict[str, Any]] = []
    for number, run in enumerate(runs_of(history), 1):
        name_present(run, status)
        events += _Process(number, run, now_ms).events(status.rdzv_id, history)
    document = {
        "displayTimeUnit": "ms",
        "otherData": {"rdzv_id": status.rdzv_id, "version": 1},
        "traceEvents": sorted(events, key=lambda event: (event["ph"] != "M", event.get("ts", 0))),
    }
    return json.dumps(document, ensure_ascii=True, indent=1)


class _Process:
    """One run's process in the trace."""

    def __init__(self, number: int, run: Run, now_ms: int) -> None:
        self._number = number
        self._run = run
        self._until_ms = now_ms if run.ended_ms is None else run.ended_ms
        self._tracks = {node: track for track, node in enumerate(run.nodes, 1)}

    def events(self, rdzv_id: str, history: Iterable[Event]) -> Iterator[dict[str, Any]]:
        number = f" run {self._run.number}" if self._run.number is not None else ""
        process = f"{rdzv_id}{number} ({self._run.run or 'no run'})"
        yield self._event("M", "process_name", _JOB_TRACK, args={"name": process})
        for node, track in {"job": _JOB_TRACK, **self._tracks}.items():
            yield self._event("M", "thread_name", track, args={"name": node})
            yield self._event("M", "thread_sort_index", track, args={"sort_index": track})
        yield from self._job_slices()
        for round_ in self._run.rounds:
            yield from self._node_slices(round_)
        yield from self._instants(history)

    def _event(self, kind: str, name: str, track: int, **more: Any) -> dict[str, Any]:
        return {"ph": kind, "name": name, "pid": self._number, "tid": track, **more}

    def _slice(
        self, track: int, name: str, since_ms: int, until_ms: int, colour: str, **about: str
    ) -> dict[str, Any]:
        times = {"ts": since_ms * 1000, "dur": max(until_ms - since_ms, 0) * 1000}
        known = {key: value for key, value in about.items() if value != ""}
        return self._event("X", name, track, cat="rdzv", **times, cname=colour, args=known)

    def _round(self, track: int, round_: Round, **more: str) -> dict[str, Any]:
        until_ms = self._until_ms if round_.live_until_ms is None else round_.live_until_ms
        colour = _FAILED if (round_.charge or round_.cause) in _BAD_CAUSES else _LIVE
        about = {
            "ended by": round_.cause,
            "because": round_.reason,
            "charged to": round_.charge,
            "restarts spent": round_.restarts,
        }
        name = f"round {round_.number}"
        return self._slice(track, name, round_.at_ms, until_ms, colour, **about, **more)

    def _job_slices(self) -> Iterator[dict[str, Any]]:
        """Yield the job's phases: each round and, before it, how long all took to stop and form."""
        before: Round | None = None
        since_ms: int | None = self._run.began_ms
        for after in (*self._run.rounds, None):
            until_ms = self._until_ms if after is None else after.at_ms
            if since_ms is not None and not (after is not None and after.adopted):
                if before is not None:
                    settled_ms = until_ms if before.settled_ms is None else before.settled_ms
                    yield self._slice(_JOB_TRACK, "stopping", since_ms, settled_ms, _STOPPING)
                    since_ms = settled_ms
                if since_ms < until_ms:
                    yield self._slice(_JOB_TRACK, "forming", since_ms, until_ms, _FORMING)
            if after is not None:
                nodes = counted(len(after.nodes) + after.more, "node")
                workers = str(after.workers or "")
                yield self._round(_JOB_TRACK, after, nodes=nodes, workers=workers)
                before, since_ms = after, after.live_until_ms

    def _node_slices(self, round_: Round) -> Iterator[dict[str, Any]]:
        """Yield the round on each participant's track, followed by the time it took to stop."""
        for node in round_.nodes:
            track, stopped_ms = self._tracks[node], round_.stopped_ms.get(node)
            yield self._round(track, round_)
            if stopped_ms is not None and round_.live_until_ms is not None:
                yield self._slice(track, "stopping", round_.live_until_ms, stopped_ms, _STOPPING)

    def _instants(self, history: Iterable[Event]) -> Iterator[dict[str, Any]]:
        """Yield each other event as an instant, on the track of its node or of the job."""
        for event in history:
            is_slice = event.fields and event.name in _NO_INSTANTS
            if (event.run or "") == self._run.run and not is_slice:
                track = self._tracks.get(node_of(event) or "", _JOB_TRACK)
                scope = "p" if event.name in _ACROSS else "t"
                times = {"ts": event.unix_ms * 1000, "s": scope}
                args = {"text": event.text}
                yield self._event("i", event.name, track, cat="rdzv", **times, args=args)
