"""Checks that nodes can reach each other: loopback addresses work only within one machine."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from ipaddress import ip_address

from rdzv.core.commands import Join
from rdzv.core.draft import Draft
from rdzv.core.model import Offer, Participant, State, is_placeholder
from rdzv.core.shared_map import put
from rdzv.errors import InvalidRequestError, UnreachableNodeError
from rdzv.structs import replace


def refuse_unreachable(state: State, command: Join) -> None:
    """Refuse a join if nodes on different machines could not reach each other.

    Raises:
        InvalidRequestError: this node offers a loopback address, and others are elsewhere.
        UnreachableNodeError: another node does, or offers this node's address from elsewhere. It
            may be about to go, so this node retries.

    """
    offer, local_to, node_id = command.offer, state.loopback_machine, command.node_id
    if local_to == offer.machine:
        return
    alone = state.machines.get(offer.address, offer.machine) == offer.machine
    if local_to is None and alone and not only_local(offer):
        return
    for other, there in _offers(state):
        if other == node_id or there.machine == offer.machine:
            continue
        if only_local(offer):
            raise InvalidRequestError(_unreachable(node_id, offer, other))
        if only_local(there):
            raise UnreachableNodeError(_unreachable(other, there, node_id))
        if there.address == offer.address and not _is_loopback(offer.address):
            raise UnreachableNodeError(
                f"{node_id} offers the address {offer.address}, and so does {other} on another "
                "machine, so workers could reach the wrong one; unless one of them is about to be "
                "given up, start each with a --local-addr=ADDRESS that the other can reach"
            )


def note_reach(work: Draft, offer: Offer) -> None:
    """Record which machine all nodes must be on if an address is loopback, or None otherwise."""
    note_address(work, offer)
    local_to = work.state.loopback_machine
    if local_to == offer.machine:
        return
    if only_local(offer):
        work.state = replace(work.state, loopback_machine=offer.machine)
    elif local_to is not None:
        work.state = replace(work.state, loopback_machine=None)


def note_address(work: Draft, offer: Offer) -> None:
    if work.state.machines.get(offer.address) != offer.machine:
        machines = put(work.state.machines, offer.address, offer.machine)
        work.state = replace(work.state, machines=machines)


def _offers(state: State) -> Iterable[tuple[str, Offer]]:
    for node_id, waiting in state.waiting.items():
        yield node_id, waiting.offer
    for participant in state.membership.round.participants if state.membership.round else ():
        if participant.node_id in state.seats and not is_placeholder(participant.node_id):
            yield participant.node_id, participant.offer


def _unreachable(node_id: str, offer: Offer, other: str) -> str:
    return (
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
    if not address.startswith(("127.", ":", "0")):  # Parsing takes a tenth of the time of a join.
        return False
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return False


def master_addr(participants: tuple[Participant, ...]) -> str:
    """Choose the address at which all participants can reach GROUP_RANK 0."""
    offer = participants[0].offer
    elsewhere = any(p.offer.machine != offer.machine for p in participants)
    return offer.host_name if elsewhere and _is_loopback(offer.address) else offer.address
