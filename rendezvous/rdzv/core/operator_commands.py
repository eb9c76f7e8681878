"""What operators ask of a run: stop, restart, scale."""

from __future__ import annotations

from rdzv.core.commands import Restart, Scale, Stop
from rdzv.core.draft import Draft
from rdzv.core.ending import end_round
from rdzv.core.events import JobScaled
from rdzv.core.model import Cause
from rdzv.core.words import duration
from rdzv.errors import InvalidRequestError, RendezvousClosedError
from rdzv.structs import replace


def obey_operator(work: Draft, command: Stop | Restart | Scale) -> None:
    """Do what an operator asks of the run that was looked at; of another one, it is refused."""
    membership, round_ = work.membership, work.membership.round
    if command.run != membership.run or membership.ended is not None:
        what = "been followed by another"
        if membership.ended and command.run == membership.run:
            ago = duration(work.now_ms - membership.ended.at_ms)
            what = f"{membership.ended.result} {ago} ago"
        raise RendezvousClosedError(
            f"run {command.run} of {membership.rdzv_id} has {what}; nothing was changed"
        )
    if membership.stopping and not isinstance(command, Stop):
        raise RendezvousClosedError(
            f"run {command.run} of {membership.rdzv_id} is being stopped ({membership.stopping}); "
            "nothing was changed"
        )
    match command:
        case Stop():
            _stop(work, command.reason)
        case Restart():
            if round_ is None or command.round > round_.number:
                raise InvalidRequestError(
                    f"{membership.rdzv_id} has had no round {command.round}; nothing was changed"
                )
            if command.round == round_.number:
                end_round(work, Cause.OPERATOR, command.reason, broken=False)
        case Scale():
            _scale(work, command)


def _stop(work: Draft, reason: str) -> None:
    """Have everyone stop; the run is closed when they have, so that no other begins beside it."""
    if not work.membership.stopping:
        work.store(replace(work.membership, stopping=reason))
        end_round(work, Cause.OPERATOR, reason, broken=False)


def _scale(work: Draft, command: Scale) -> None:
    bounds = (command.min_nodes, command.max_nodes)
    membership = work.membership
    if bounds == membership.bounds:
        return
    work.store(replace(membership, scaled=bounds))
    work.events.append(JobScaled(*bounds, command.reason))
    round_ = membership.round
    if round_ is not None and len(work.state.seats) > command.max_nodes:
        end_round(work, Cause.OPERATOR, command.reason, broken=False)
