"""Ending a round, whatever the cause."""

from __future__ import annotations

from rdzv.core.draft import Draft
from rdzv.core.events import RoundEnded
from rdzv.core.life.absences import longest_stop_ms
from rdzv.core.life.charging import charge_instead
from rdzv.core.model import Cause, RoundEnd, State
from rdzv.structs import replace


def end_round(
    work: Draft,
    cause: Cause,
    reason: str,
    *,
    broken: bool,
    dead_ms: int = 0,
    node_id: str = "",
    keep: bool = True,
) -> None:
    """End the live round, if there is one. All workers stop or, with `keep`, park if they can.

    `node_id` is the node that the cause refers to.
    """
    round_ = work.membership.round
    if round_ is None or not round_.live:
        return
    # An agent that restarts its workers by itself does not keep any of them.
    keep = keep and work.membership.settings.max_restarts is not None
    end = RoundEnd(cause, reason, work.now_ms, broken, cause_node_id=node_id, keep=keep)
    work.store_round(replace(round_, end=end))
    work.state = replace(
        work.state,
        stop_deadline_ms=work.now_ms + longest_stop_ms(round_),
    )
    work.events.append(RoundEnded(round_.number, end, dead_ms))
    if round_.excuse:
        charge_instead(work, Cause.NODE_LEFT, round_.excuse)


def some_succeeded(state: State) -> bool:
    """Return whether any participant of the running round has succeeded, present or not."""
    round_ = state.membership.round
    gone = round_ is not None and round_.live and bool(round_.gone)
    return gone or any(seat.succeeded for seat in state.seats.values())
