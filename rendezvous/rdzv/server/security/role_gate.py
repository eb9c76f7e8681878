"""Checks each call against its row of the table of roles before it is served.

`Gate` identifies the caller, refuses calls that `roles` does not permit, and records who changed
what, both in the log and in a history under a name that no job can have. gRPC calls reach the gate
through `rpc/calls`, HTTP requests through `http/listener`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rdzv import bounds
from rdzv.errors import DeniedError, InvalidRequestError, RendezvousError, UnauthenticatedError
from rdzv.runtime.clock import Clock
from rdzv.server.security import callers, roles
from rdzv.server.security.callers import ANYBODY, Caller
from rdzv.server.security.roles import OPEN, Row, Whose
from rdzv.server.settings.server_settings import RdzvdSettings
from rdzv.server.telemetry.metrics_interface import Meter
from rdzv.stores.base import Record
from rdzv.structs import struct

if TYPE_CHECKING:
    from rdzv.server.replication.replica import Replica
    from rdzv.server.security.service_accounts import ServiceAccounts

log = logging.getLogger("rdzv.access")

AUDIT = "@rdzvd"
"""The name of the history of operators' changes. No job name can begin with `@`."""

LOG_EVERY_MS = 1_000
"""The minimum time between log lines about refused calls, so that callers cannot fill the disk."""


@dataclass(slots=True)
class Change:
    """The change made by the current call, with the old and new values; empty if there is none."""

    text: str = ""


_change: ContextVar[Change] = ContextVar("change")


def note_change(before: str, after: str) -> None:
    """Add a value's change to the audit record of the current call."""
    text = f"from {before} to {after}" if before != after else f"{after} as before"
    _change.get(Change()).text = text


_VERBS = {
    "Attach": "open a stream",
    "ServerReflectionInfo": "ask which calls there are",
}
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
    """Its row of the table of roles, or None if it has none."""
    request: object
    """What it names: a job, a node or a token; its run and its reason."""
    peer: str
    """The address from which it comes."""
    header: str | None
    """Its `authorization` header."""
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
        meter: Meter | None = None,
        accounts: ServiceAccounts | None = None,
    ) -> None:
        self._replica = replica
        self._clock = clock
        self._config = config
        self._meter = meter or Meter()
        self._accounts = accounts
        self._logged_ms: int | None = None
        self._unlogged = 0

    @asynccontextmanager
    async def admitted(self, call: Call) -> AsyncIterator[None]:
        """Serve a call in the body if its caller may make it, and record what it changes.

        Raises:
            DeniedError: the caller may not make this call.
            UnauthenticatedError, NotLeaderError, RendezvousConnectionError: see `_identify`.

        """
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
            self._note_refusal(f"{caller} at {call.peer}", error.code, f"{call.what}: {error}")
            raise

    async def _identify(self, call: Call) -> Caller:
        """Identify the caller by its `authorization` header or, if it has none, its certificate.

        Raises:
            UnauthenticatedError: the caller sent neither, or its token or certificate is invalid.
            NotLeaderError: the caller sent a token, but only a leading server knows tokens.
            RendezvousConnectionError: the caller sent a service account's token whose key is
                unknown and cannot be fetched now.

        """
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
        """Refuse a call that this caller may not make."""
        roles.refuse_without_role(caller, row, call.what)
        rdzv_id = getattr(call.request, "rdzv_id", None)
        if row.whose is not Whose.OWN_JOB or caller.admin or rdzv_id is None:
            return
        try:
            named = bounds.rdzv_id_of(rdzv_id)
        except InvalidRequestError:
            # No job can have this name, so the call itself will refuse it.
            return
        roles.refuse_others_job(caller, await self._replica.driver.jobs.look(named), call.what)

    def _note_refusal(self, who: str, code: str, reason: str) -> None:
        """Count a refused call, and log it unless another was logged a moment ago."""
        self._meter.call_refused(code)
        now_ms = self._clock.now_ms()
        if self._logged_ms is not None and now_ms - self._logged_ms < LOG_EVERY_MS:
            self._unlogged += 1
            return
        also = f" ({self._unlogged} more were refused since the last such line)"
        log.warning("refused a call from %s: %s%s", who, reason, also if self._unlogged else "")
        self._logged_ms, self._unlogged = now_ms, 0

    async def _audit(self, caller: Caller, call: Call, change: str, end: str) -> None:
        """Record a change and its caller, with the old and new values."""
        verb, request = call.verb or call.what, call.request
        named = (getattr(request, key, "") for key in ("rdzv_id", "node_id", "name", "id_or_name"))
        target = next(filter(None, named), "")
        submitter = getattr(request, "submitted_by", "")
        said = getattr(request, "reason", "") or (submitter and f"by {submitter}")
        reason = bounds.sentence(said)
        why = f": {signed(reason, caller)}" if reason else f", by {caller}"
        text = f"{verb} {target}{change and f' {change}'}{why}, from address {call.peer}{end}"
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
