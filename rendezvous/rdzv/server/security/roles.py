"""What each role may do, and the gate before every call.

Operators' calls have their rows in the table of operations, others beside their handlers; a call
without a row is refused. `Gate` identifies the caller, refuses what its roles do not permit, and
records who changed what, both in the log and in a history under a name that no job can have. gRPC
calls reach it through `rpc/calls`, HTTP requests through `http/listener`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from rdzv import bounds
from rdzv.core.model import State
from rdzv.errors import DeniedError, InvalidRequestError, RendezvousError, UnauthenticatedError
from rdzv.runtime.clock import Clock
from rdzv.server.security import callers
from rdzv.server.security.callers import ANYBODY, Caller, Role
from rdzv.server.settings.server_settings import RdzvdSettings
from rdzv.server.telemetry.server_metrics import Metrics
from rdzv.stores.base import Record
from rdzv.structs import struct

if TYPE_CHECKING:
    from rdzv.server.replication.replica import Replica
    from rdzv.server.security.service_accounts import ServiceAccounts

log = logging.getLogger("rdzv.access")


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
            f"{caller} may not act for node {node_id}: a caller with the role node acts only "
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
            f"{caller} may not act for node {node_id}: {bound_to or 'another caller'} does; give "
            "another --node-id"
        )


# ------------------------------------------------------------------------------------ the gate

AUDIT = "@rdzvd"
"""The name of the history of operators' changes. No job name can begin with `@`."""

LOG_EVERY_MS = 1_000
"""The minimum time between log lines about refused calls, so that callers cannot fill the disk."""


@dataclass(slots=True)
class Change:
    """The change made by the current call; empty if there is none."""

    text: str = ""


_change: ContextVar[Change] = ContextVar("change")


def note_change(before: str, after: str) -> None:
    """Add a value's change to the audit record of the current call."""
    text = f"({before} -> {after})" if before != after else f"({after}, as before)"
    _change.get(Change()).text = text


_VERBS = {"Attach": "open a stream", "ServerReflectionInfo": "ask which calls there are"}
"""Plain words for calls whose names do not consist of a verb and its object."""


def verb_of(method: str) -> str:
    """Return a call's name in plain words.

    >>> verb_of("/rdzv.v1.Control/DrainNode")
    'drain node'
    """
    name = method.rpartition("/")[2]
    return _VERBS.get(name) or re.sub(r"(?<!^)(?=[A-Z])", " ", name).lower()


@struct(frozen=True)
class Call:
    """A call as it arrives at the gate."""

    what: str
    """The call in plain words, for refusals and, unless it has a `verb`, for the audit."""
    row: Row | None
    request: object
    """What it names: a job, a node or a token; its run and its reason."""
    peer: str
    header: str | None
    certified: Callable[[], Caller | None]
    """Returns the caller that TLS has verified, or None if the caller presented no certificate."""
    verb: str = ""


_IN_DOUBT = ("UNAVAILABLE", "DEADLINE_EXCEEDED")
"""The statuses of errors after which the outcome of a call is unknown."""


class Gate:
    """One server's gate, which checks every call over gRPC and HTTP."""

    def __init__(
        self,
        replica: Replica,
        clock: Clock,
        config: RdzvdSettings,
        metrics: Metrics | None = None,
        accounts: ServiceAccounts | None = None,
    ) -> None:
        self._replica = replica
        self._clock = clock
        self._config = config
        self._counts = (metrics or Metrics()).counts
        self._accounts = accounts
        self._logged_ms: int | None = None
        self._unlogged = 0

    @asynccontextmanager
    async def admitted(self, call: Call) -> AsyncIterator[None]:
        """Serve a call in the body if its caller may make it, and record what it changes."""
        caller, row = callers.NOBODY, call.row
        try:
            if row is None:
                raise DeniedError(
                    f"nobody may {call.what}: no row of the table of roles has this call"
                )
            if row is not OPEN:
                caller = await self._identify(call)
                await self._check(caller, row, call)
            callers.present.set(caller)
            _change.set(change := Change())
            end = "; the outcome is unknown"
            try:
                yield
                end = ""
            except RendezvousError as error:
                if error.grpc_status not in _IN_DOUBT:
                    end = "refused"
                raise
            finally:
                if row.changes and end != "refused":
                    await self._audit(caller, call, change.text, end)
        except (UnauthenticatedError, DeniedError) as error:
            self._record_refusal(f"{caller} at {call.peer}", error.code, f"{call.what}: {error}")
            raise

    async def _identify(self, call: Call) -> Caller:
        """Identify the caller by its `authorization` header or, if it has none, its certificate."""
        if not self._config.authenticates:
            return ANYBODY
        if call.header is not None:
            text = callers.bearer(call.header)
            if callers.is_jwt(text):
                return await self._service_account(text)
            return (await self._replica.settled_driver()).tokens.caller(text)
        if (caller := call.certified()) is not None:
            return caller
        raise UnauthenticatedError(
            "this server requires authentication, and the call carries none; give a client "
            "certificate, or a token with --token-file (or RDZV_TOKEN_FILE)"
        )

    async def _service_account(self, text: str) -> Caller:
        if self._accounts is None:
            raise UnauthenticatedError(
                "the token is one of a service account, as Kubernetes makes them, and this server "
                "accepts none; add a table [oidc] to rdzvd.toml, or show a token of rdzvd"
            )
        return await self._accounts.caller(text)

    async def _check(self, caller: Caller, row: Row, call: Call) -> None:
        refuse_without_role(caller, row, call.what)
        rdzv_id = getattr(call.request, "rdzv_id", None)
        if row.whose is not Whose.OWN_JOB or caller.admin or rdzv_id is None:
            return
        try:
            named = bounds.rdzv_id_of(rdzv_id)
        except InvalidRequestError:
            # No job can have this name, so the call itself will refuse it.
            return
        refuse_others_job(caller, await self._replica.driver.jobs.look(named), call.what)

    def _record_refusal(self, who: str, code: str, reason: str) -> None:
        """Count a refused call, and log it unless another was logged a moment ago."""
        self._counts.add("rdzv_refused_calls_total", code)
        now_ms = self._clock.now_ms()
        if self._logged_ms is not None and now_ms - self._logged_ms < LOG_EVERY_MS:
            self._unlogged += 1
            return
        also = f" ({self._unlogged} more were refused since the last such line)"
        log.warning("refused a call from %s: %s%s", who, reason, also if self._unlogged else "")
        self._logged_ms, self._unlogged = now_ms, 0

    async def _audit(self, caller: Caller, call: Call, change: str, end: str) -> None:
        verb, request = call.verb or call.what, call.request
        named = (getattr(request, key, "") for key in ("rdzv_id", "node_id", "name", "id_or_name"))
        target = next(filter(None, named), "")
        submitter = getattr(request, "submitted_by", "")
        said = getattr(request, "reason", "") or (submitter and f"by {submitter}")
        reason = bounds.sentence(said)
        why = f": {signed(reason, caller)}" if reason else f", by {caller}"
        text = f"{verb} {target}{change and f' {change}'}{why}, from {call.peer}{end}"
        log.info("%s", text, extra={"audit": True})
        row = Record(self._clock.now_ms(), AUDIT, getattr(request, "run", ""), verb, text)
        try:
            await self._replica.driver.history.append((row,))
        except RendezvousError as error:
            # This server no longer leads, or the store is unavailable; only the log has the change.
            log.warning("change not recorded in the history: %s: %s", error, text)


def signed(reason: str, caller: Caller) -> str:
    """Return the reason given by a caller, with the caller's name appended if it is proven."""
    return f"{reason} [{caller}]" if caller.name else reason
