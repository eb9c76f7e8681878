"""What each role may do: the rows that calls have, and the rules on whose jobs and nodes.

Operators' calls have theirs in the table of operations, others beside their handlers. `Gate`
enforces them for gRPC and HTTP; a call without a row is refused.
"""

from __future__ import annotations

import re
from enum import StrEnum

from rdzv.core.model import State
from rdzv.errors import DeniedError
from rdzv.server.security.callers import Caller, Role
from rdzv.structs import struct


class Whose(StrEnum):
    """The jobs or nodes for which a caller other than an admin may use a call."""

    ANY = "any"
    OWN_JOB = "own job"
    """A job that the caller owns, or one that nobody has begun."""
    OWN_NODE = "own node"
    """The node that has the caller's name; for `submit`, the caller's own rdzvrun."""


@struct(frozen=True)
class Row:
    """The roles that permit a call (any one is enough), and the jobs or nodes it may be used on."""

    roles: frozenset[Role]
    whose: Whose = Whose.ANY
    changes: bool = False
    """Whether the call is audited because it changes something or stops workers for a moment."""

    @property
    def needed(self) -> str:
        return " or ".join(role for role in Role if role in self.roles)


OPEN = Row(frozenset())
"""The row for a call that needs neither a role nor a proof."""
READ = Row(frozenset({Role.READ}))
LOOK_INSIDE = Row(frozenset({Role.SUBMIT}), Whose.OWN_JOB)
CHANGE_JOB = Row(frozenset({Role.SUBMIT}), Whose.OWN_JOB, changes=True)
ADMIN = Row(frozenset({Role.ADMIN}))
ADMIN_CHANGES = Row(frozenset({Role.ADMIN}), changes=True)
ATTACH = Row(frozenset({Role.NODE, Role.SUBMIT}), Whose.OWN_NODE)


def refuse_without_role(caller: Caller, row: Row, what: str) -> None:
    """Refuse a call if the caller has none of the roles that permit it."""
    if not caller.has(row.roles):
        raise DeniedError(
            f"{caller} may not {what}: that needs the role {row.needed}, and it has "
            f"{caller.shown}; ask an admin for a token or certificate with it"
        )


def refuse_others_job(caller: Caller, state: State, what: str) -> None:
    """Refuse a caller that is neither a job's owner nor an admin.

    A job that nobody has begun is open to every caller. One without an owner is not, not even once
    it has ended: its logs and stacks stay what they were.
    """
    membership = state.membership
    owner = membership.owner
    if caller.admin or not membership.run or (owner and owner == caller.name):
        return
    whose = f"it belongs to {owner}" if owner else "it has no owner, so only an admin may"
    raise DeniedError(
        f"{caller} may not {what} {membership.rdzv_id}: {whose}; choose another name, or ask "
        f"{owner or 'an admin'} to do it"
    )


def refuse_stranger(caller: Caller, state: State, node_id: str) -> None:
    """Refuse a node that the caller may not bring into a job.

    A node's own agent may join jobs that the server has placed on it, and jobs that were not
    submitted and have no owner. A submitter may bring nodes into its own jobs.
    """
    membership = state.membership
    own = Role.NODE in caller.roles and caller.name == node_id
    if caller.admin or (own and (node_id in state.placed or state.present(node_id))):
        return
    if Role.SUBMIT in caller.roles:
        refuse_others_job(caller, state, f"bring {node_id} into")
    elif membership.run and (membership.owner or membership.submission is not None):
        owner = membership.owner or "somebody who submitted it"
        raise DeniedError(
            f"{node_id} may not join {membership.rdzv_id}: it belongs to {owner}, and the server "
            "has not placed it there"
        )


def owner_by(caller: Caller) -> str:
    """Return the owner of a job that this caller begins; empty if the caller is a node's agent."""
    return caller.name if Role.SUBMIT in caller.roles else ""


def refuse_node(caller: Caller, node_id: str, *, foreground: bool, bound_to: str | None) -> None:
    """Refuse a hello for a node that the caller may not speak for.

    A caller with the role `node` may speak for the node with its own name, and for each rdzvrun
    named after it with a process id. A caller with the role `submit` may speak for rdzvruns with
    any name that no other caller uses. `bound_to` is the caller that already uses this node_id, if
    any.
    """
    own = node_id == caller.name or (
        foreground and re.fullmatch(rf"{re.escape(caller.name)}-[0-9]+", node_id) is not None
    )
    if caller.admin or (own and Role.NODE in caller.roles):
        return
    if Role.SUBMIT not in caller.roles:
        raise DeniedError(
            f"{caller} may not speak for node {node_id}: a caller with the role node speaks only "
            f"for the node of its own name; start the agent with --node-id={caller.name}, or "
            f"give it a certificate or token for {node_id}"
        )
    if not foreground:
        raise DeniedError(
            f"{caller} may not bring rdzv-agent as node {node_id}: that needs the role node, and a "
            f"certificate or token for {node_id}; with the role submit, use rdzvrun"
        )
    if bound_to not in (None, caller.name):
        raise DeniedError(
            f"{caller} may not speak for node {node_id}: {bound_to or 'another caller'} does; give "
            "another --node-id"
        )
