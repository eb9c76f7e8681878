"""Checks that nodes can reach each other: loopback addresses work only within one machine."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from ipaddress import ip_address

from rdzv.core.commands import Join
from rdzv.core.draft import Draft
from rdzv.core.model import Offer, Participant, State, is_placeholder
from rdzv.errors import InvalidRequestError
from rdzv.structs import replace


def refuse_unreachable(state: State, command: Join) -> None:
    """Refuse a join if two nodes are on different machines and one offers a loopback address."""
    offer, local_to = command.offer, state.loopback_machine
    if local_to == offer.machine:
        return
    others = ((n, there) for n, there in _offers(state) if n != command.node_id)
    if only_local(offer):
        elsewhere = [n for n, there in others if there.machine != offer.machine]
        if elsewhere:
            raise _unreachable(command.node_id, offer, elsewhere[0])
    elif local_to is not None:
        for node_id, there in others:
            if only_local(there):
                raise _unreachable(node_id, there, command.node_id)


def note_reach(work: Draft, offer: Offer) -> None:
    """Record which machine all nodes must be on if an address is loopback, or None otherwise."""
    local_to = work.state.loopback_machine
    if local_to == offer.machine:
        return
    if only_local(offer):
        work.state = replace(work.state, loopback_machine=offer.machine)
    elif local_to is not None:
        work.state = replace(work.state, loopback_machine=None)


def _offers(state: State) -> Iterable[tuple[str, Offer]]:
    for node_id, waiting in state.waiting.items():
        yield node_id, waiting.offer
    for participant in state.membership.round.participants if state.membership.round else ():
        if participant.node_id in state.seats and not is_placeholder(participant.node_id):
            yield participant.node_id, participant.offer


def _unreachable(node_id: str, offer: Offer, other: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{node_id} offers the address {offer.address}, which {other} on another machine cannot "
        f"reach; start {node_id} with --local-addr=ADDRESS, or let it reach the server by another "
        "address than loopback"
    )


def only_local(offer: Offer) -> bool:
    """Return whether this address is reachable only from the machine that offers it."""
    return _is_loopback(offer.address) and not offer.host_name


@lru_cache(maxsize=256)
def _is_loopback(address: str) -> bool:
    if address == "localhost":
        return True
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return False


def master_addr(participants: tuple[Participant, ...]) -> str:
    """Choose the address at which all participants can reach GROUP_RANK 0."""
    offer = participants[0].offer
    elsewhere = any(p.offer.machine != offer.machine for p in participants)
    return offer.host_name if elsewhere and _is_loopback(offer.address) else offer.address
