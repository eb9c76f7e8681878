"""Tokens for callers without a certificate. A server stores only their hashes.

A token's text is `rdzv_ID_SECRET`. The id is not secret and is used to list and revoke tokens. The
secret has 256 random bits, so it can neither be guessed nor found from its plain hash. A name may
have several valid tokens, so that a new token can be distributed before the old one is revoked.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import os
import re
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from rdzv import errors
from rdzv.runtime.clock import DAY_MS, MINUTE_MS, Clock
from rdzv.runtime.tasks import Tasks
from rdzv.server.engine.store_access import KeyValueRecord, StoreAccess, unreadable
from rdzv.server.security.callers import Caller, Role, implied
from rdzv.structs import replace, struct
from rdzv.view import answers

log = logging.getLogger("rdzv.tokens")

TOKENS = "tokens"
"""The name of the key-value record that stores all tokens."""

USE_STORED_EVERY_MS = 60 * MINUTE_MS
"""The minimum interval between stores of a token's last use; no call waits for that commit."""

EXPIRED_KEPT_MS = 30 * DAY_MS
"""How long an expired token stays listed, so that people can see why it no longer works."""

_TEXT = re.compile(r"rdzv_([0-9a-f]{8})_([A-Za-z0-9_-]{43})")


@struct(frozen=True)
class StoredToken:
    """A token as it is stored."""

    id: str
    name: str
    roles: tuple[Role, ...]
    sha256: str
    created_ms: int
    expires_ms: int | None = None
    used_ms: int | None = None

    def valid(self, now_ms: int) -> bool:
        return self.expires_ms is None or now_ms < self.expires_ms

    def shown(self, now_ms: int) -> answers.Token:
        expires_ms, used_ms = self.expires_ms, self.used_ms
        return answers.Token(
            id=self.id,
            name=self.name,
            roles=tuple(self.roles),
            age_ms=max(now_ms - self.created_ms, 0),
            expires_in_ms=None if expires_ms is None else max(expires_ms - now_ms, 0),
            used_age_ms=None if used_ms is None else max(now_ms - used_ms, 0),
        )


@struct(frozen=True)
class _Document:
    format: int = 1
    tokens: tuple[StoredToken, ...] = ()


def new_text() -> str:
    return f"rdzv_{secrets.token_hex(4)}_{secrets.token_urlsafe(32)}"


def _hash(text: str) -> str:
    # HTTP headers may contain bytes that are not text, but no token does.
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()


def text_in(file: Path) -> str:
    """Return the token in a file; if the file does not exist, create it with a new token.

    Only the account that runs rdzvd can read a file created here.
    """
    try:
        try:
            made = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            text = file.read_text().strip()
        else:
            text = new_text()
            with os.fdopen(made, "w") as out:
                out.write(text + "\n")
                out.flush()
                os.fsync(out.fileno())
    except (OSError, UnicodeDecodeError) as error:
        raise errors.InvalidRequestError(
            f"the first admin's token cannot be written to {file}: {error}; give another file "
            "with --init-admin-token"
        ) from error
    if not _TEXT.fullmatch(text):
        raise errors.InvalidRequestError(
            f"{file} holds no token; remove it, and rdzvd makes it with one, or give another file "
            "with --init-admin-token"
        )
    return text


TOKENS_AT_ONCE = 2_000
"""The number of callers' tokens, all of which are stored in one key-value record."""


class TokenStore:
    """The tokens of one leading server."""

    def __init__(
        self,
        store: StoreAccess,
        clock: Clock,
        tasks: Tasks,
        on_revoke: Callable[[frozenset[str]], None],
        *,
        auth: bool,
    ) -> None:
        """Create without tokens; `on_revoke` receives the ids of revoked tokens.

        `auth` says whether callers must authenticate.
        """
        self._clock = clock
        self._tasks = tasks
        self._on_revoke = on_revoke
        self._auth = auth
        self._document = KeyValueRecord(store, TOKENS, lambda data: {t.id: t for t in decode(data)})
        self._lock = asyncio.Lock()
        self._storing_use = False

    async def start(self, admin_token: Path | None, *, alone: bool) -> None:
        """Read the stored tokens; with `admin_token`, make sure that an admin has a token.

        `alone` says whether callers can authenticate by nothing else.
        """
        await self._document.load()
        if not self._auth and self._document.revision > 0:
            raise errors.InvalidRequestError(
                "tokens were made for this server, but it would let any caller do anything; start "
                "it with --auth=required"
            )
        if admin_token is not None:
            await self.ensure_admin(admin_token)
        elif alone and not any(one.valid(self._clock.now_ms()) for one in self._tokens.values()):
            log.warning(
                "every call is refused: there is no token, no client CA and no OIDC issuer; start "
                "rdzvd with --init-admin-token=FILE to create an admin's token"
            )

    @property
    def _tokens(self) -> dict[str, StoredToken]:
        return self._document.value

    def listed(self) -> tuple[StoredToken, ...]:
        return tuple(sorted(self._tokens.values(), key=lambda token: token.created_ms))

    def has(self, token_id: str) -> bool:
        return token_id in self._tokens

    def caller(self, text: str) -> Caller:
        now_ms = self._clock.now_ms()
        caller = caller_by(self._tokens, text, now_ms)
        token = self._tokens[caller.token]
        if token.used_ms is None or now_ms - token.used_ms > USE_STORED_EVERY_MS:
            self._tokens[token.id] = replace(token, used_ms=now_ms)
            if not self._storing_use:
                self._storing_use = True
                self._tasks.start(self._store_use())
        return caller

    async def create(
        self, name: str, roles: Sequence[Role], expires_in_ms: int
    ) -> tuple[StoredToken, str]:
        """Create a token and return it with its text. If `expires_in_ms` is 0, it never expires."""
        if not self._auth:
            raise errors.InvalidRequestError(
                "this server lets any caller do anything, so a token would protect nothing; "
                "start rdzvd with --auth=required --init-admin-token=FILE"
            )
        text = new_text()
        token = await self._add(text, name, roles, expires_in_ms)
        return token, text

    async def ensure_admin(self, file: Path) -> None:
        """Make the token in `file` an admin's, unless an admin already has a valid token."""
        now_ms = self._clock.now_ms()
        if any(Role.ADMIN in one.roles and one.valid(now_ms) for one in self._tokens.values()):
            return
        token = await self._add(text_in(file), "admin", (Role.ADMIN,), 0)
        log.warning("token %s in %s is an admin's: there was no other", token.id, file)

    async def revoke(self, id_or_name: str) -> tuple[StoredToken, ...]:
        async with self._lock:
            gone = tuple(t for t in self.listed() if id_or_name in (t.id, t.name))
            if not gone:
                raise errors.UnknownTokenError(
                    f"there is no token {id_or_name}, nor any of that name; `rdzvctl tokens list` "
                    "shows those that are"
                )
            ids = frozenset(token.id for token in gone)
            await self._write({i: t for i, t in self._tokens.items() if i not in ids})
        self._on_revoke(ids)
        return gone

    async def _add(
        self, text: str, name: str, roles: Sequence[Role], expires_in_ms: int
    ) -> StoredToken:
        async with self._lock:
            now_ms = self._clock.now_ms()
            kept = {i: t for i, t in self._tokens.items() if t.valid(now_ms - EXPIRED_KEPT_MS)}
            if len(kept) >= TOKENS_AT_ONCE:
                raise errors.LimitExceededError(
                    f"there are {len(kept)} tokens, which is the limit; revoke some, with "
                    "`rdzvctl tokens revoke`"
                )
            expires_ms = now_ms + expires_in_ms if expires_in_ms else None
            token_id = text.split("_")[1]
            token = StoredToken(token_id, name, tuple(roles), _hash(text), now_ms, expires_ms)
            await self._write({**kept, token_id: token})
        return token

    async def _store_use(self) -> None:
        try:
            async with self._lock:
                await self._write(self._tokens)
        except errors.RendezvousError as error:
            log.debug("cannot store when tokens were last used: %s", error)
        finally:
            self._storing_use = False

    async def _write(self, tokens: dict[str, StoredToken]) -> None:
        """Store tokens before using them. After a failure, the stored ones stay in use."""
        data = msgspec.json.encode(_Document(tokens=tuple(tokens.values())))
        known = self._tokens
        await self._document.swap(tokens, data)
        # Only this server knows which tokens were used in the meantime.
        self._document.value = {
            i: replace(token, used_ms=known[i].used_ms) if i in known else token
            for i, token in tokens.items()
        }


def decode(data: bytes) -> tuple[StoredToken, ...]:
    try:
        document = msgspec.json.decode(data, type=_Document)
    except msgspec.DecodeError as error:
        raise unreadable(TOKENS, error) from error
    if document.format != 1:
        raise errors.RendezvousStateError(
            f"the record {TOKENS} has format {document.format}, and this rdzvd reads format 1; "
            "start the rdzvd version that wrote it"
        )
    return document.tokens


def caller_by(tokens: dict[str, StoredToken], text: str, now_ms: int) -> Caller:
    """Return the caller that owns this token. Errors do not quote the token."""
    found = _TEXT.fullmatch(text)
    token = tokens.get(found.group(1)) if found else None
    # Always compare the whole text, so that the time taken does not reveal how much of it is right.
    same = hmac.compare_digest(_hash(text), token.sha256 if token is not None else "")
    if token is None or not same:
        raise errors.UnauthenticatedError(
            "the token that was shown is not known here, or was revoked; ask an admin for another "
            "(`rdzvctl tokens create`)"
        )
    if not token.valid(now_ms):
        raise errors.UnauthenticatedError(
            f"token {token.id} of {token.name} has expired; ask an admin for another "
            f"(`rdzvctl tokens create {token.name}`)"
        )
    return Caller(token.name, implied(token.roles), f"token {token.id}", token.id)
