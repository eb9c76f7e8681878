"""Operator commands for a run: stop, restart, and scale."""

from __future__ import annotations

from rdzv.core.commands import Restart, Scale, Stop
from rdzv.core.draft import Draft
from rdzv.core.events import JobScaled
from rdzv.core.life.conditions import Ignored
from rdzv.core.life.refusals import refuse_operator
from rdzv.core.life.round_end import end_round
from rdzv.core.model import Cause
from rdzv.structs import replace


def stop(work: Draft, command: Stop) -> Ignored | None:
    """Stop every node. The run closes only once all nodes have stopped, so no two runs overlap."""
    refuse_operator(work.state, command, work.now_ms)
    if work.membership.stopping:
        return Ignored.KNOWN
    work.store(replace(work.membership, stopping=command.reason))
    end_round(work, Cause.OPERATOR, command.reason, broken=False, keep=False)
    return None


def restart(work: Draft, command: Restart) -> Ignored | None:
    """End the latest round so that another can form, without spending a restart."""
    refuse_operator(work.state, command, work.now_ms)
    round_ = work.membership.round
    if round_ is None or command.round != round_.number:
        return Ignored.OTHER_ROUND
    if not round_.live:
        return Ignored.KNOWN
    end_round(work, Cause.OPERATOR, command.reason, broken=False, keep=False)
    return None


def scale(work: Draft, command: Scale) -> Ignored | None:
    """Change the run's bounds, ending a round that has more nodes than they allow."""
    refuse_operator(work.state, command, work.now_ms)
    bounds = (command.min_nodes, command.max_nodes)
    membership = work.membership
    if bounds == membership.bounds:
        return Ignored.KNOWN
    work.store(replace(membership, scaled=bounds))
    work.events.append(JobScaled(*bounds, command.reason))
    round_ = membership.round
    if round_ is not None and len(work.state.seats) > command.max_nodes:
        end_round(work, Cause.OPERATOR, command.reason, broken=False)
    return None
