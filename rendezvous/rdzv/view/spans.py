"""A run as a sequence of spans: forming, live, stopping. All traces are built from these spans.

`rdzvctl trace` draws them for Perfetto, and rdzvd sends them to OpenTelemetry.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

from rdzv.structs import struct
from rdzv.view.life import Round, Run, following

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


def went_wrong(round_: Round) -> bool:
    """Return whether a round ended because of a failure."""
    return (round_.charge or round_.cause) in _BAD_CAUSES


def about(round_: Round) -> dict[str, str]:
    """Return the attributes that describe how a round ended, with empty values for unknown ones."""
    return {
        "ended by": round_.cause,
        "because": round_.reason,
        "charged to": round_.charge,
        "restarts spent": round_.restarts,
    }
