"""Fetches a token issuer's public keys, and keeps them while the issuer cannot be reached.

A single task fetches them at most once every `RETRY_S`, no matter how many calls arrive. A call
that needs an unknown key waits for the next fetch, but no longer than `HOLD_S`.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

import aiohttp
import jwt
import msgspec

from rdzv.core.words import duration
from rdzv.errors import LimitExceededError, RendezvousConnectionError, UnauthenticatedError, short
from rdzv.server.settings.server_settings import Oidc

log = logging.getLogger("rdzv.access")

DISCOVERY = "/.well-known/openid-configuration"

REFRESH_EVERY_S = 600.0
"""How often the keys are fetched again. A token with an unknown key has them fetched at once."""

RETRY_S = 10.0
"""The minimum time between two fetches."""

FETCH_WITHIN_S = 5.0
"""How long a fetch, which makes two requests, may take."""

HOLD_S = 8.0
"""How long a call waits for an unknown key. Less than the 10 s for which nodes wait for an
answer."""

MOST_WAITING = 256
"""How many calls may wait for a fetch at once."""

MOST_BYTES = 256 * 1024
"""The size of the largest response accepted from the issuer."""

MOST_KEYS = 64

ALGORITHMS = frozenset(
    f"{kind}{bits}" for kind in ("RS", "PS", "ES") for bits in ("256", "384", "512")
) | {"EdDSA"}
"""The accepted signature algorithms. All of them are asymmetric, so a key that verifies cannot
sign."""

Keys = Mapping[str, jwt.PyJWK]
Fetch = Callable[[], Awaitable[Keys]]
"""Returns the keys by `kid`, or raises `FetchError`."""


class FetchError(Exception):
    """The keys could not be fetched; the message says why."""


class IssuerKeys:
    """One issuer's keys, current while `follow` runs."""

    def __init__(
        self,
        fetch: Fetch,
        issuer: str,
        *,
        kept_s: float,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fetch = fetch
        self._issuer = issuer
        self._kept_s = kept_s
        self._now_s = now_s
        self._keys: Keys = {}
        self._fetched_s = 0.0
        self._trouble = "they have not been fetched yet"
        """The reason why the last fetch failed; empty if it succeeded."""
        self._begun = self._done = 0
        self._changed = asyncio.Condition()
        self._wanted = asyncio.Event()
        self._waiting = 0

    async def key(self, kid: str) -> jwt.PyJWK:
        """Return a key; if it is unknown, wait for a fetch that begins after this call.

        Raises:
            UnauthenticatedError: the issuer has no such key.
            RendezvousConnectionError: the keys cannot be fetched; retry.
            LimitExceededError: too many calls are waiting for unknown keys.

        """
        if (found := self._known(kid)) is not None:
            return found
        if self._waiting >= MOST_WAITING:
            raise LimitExceededError(
                f"{self._waiting} calls wait for keys of {self._issuer} already; try again"
            )
        wanted = self._begun + 1
        self._wanted.set()
        self._waiting += 1
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(HOLD_S), self._changed:
                    await self._changed.wait_for(
                        lambda: self._done >= wanted or self._known(kid) is not None
                    )
        finally:
            self._waiting -= 1
        if (found := self._known(kid)) is not None:
            return found
        if self._done >= wanted and not self._trouble:
            raise UnauthenticatedError(
                f"the token is signed with key {short(kid)!r}, which {self._issuer} does not have; "
                "fetch a new token (kubelet renews a projected one by itself)"
            )
        raise RendezvousConnectionError(
            f"the token cannot be checked: its key is not known here, and those of {self._issuer} "
            f"cannot be fetched now: {self._trouble or 'another fetch has just ended'}; try again"
        )

    def _known(self, kid: str) -> jwt.PyJWK | None:
        if self._now_s() - self._fetched_s > self._kept_s:
            return None
        return self._keys.get(kid)

    async def follow(self) -> None:
        """Fetch the keys when they are outdated or a call needs an unknown key, until cancelled."""
        while True:
            self._wanted.clear()
            self._begun += 1
            await self._fetch_once()
            async with self._changed:
                self._done = self._begun
                self._changed.notify_all()
            await asyncio.sleep(RETRY_S)
            if not self._trouble:
                with suppress(TimeoutError):
                    async with asyncio.timeout(REFRESH_EVERY_S - RETRY_S):
                        await self._wanted.wait()

    async def _fetch_once(self) -> None:
        former = self._trouble
        try:
            keys = await self._fetch()
        except FetchError as error:
            self._trouble = str(error)
            if self._trouble != former:
                left_s = max(0.0, self._fetched_s + self._kept_s - self._now_s())
                also = (
                    f"known keys stay valid for {duration(round(left_s * 1000))}"
                    if self._keys
                    else "callers with a token from it are asked to retry"
                )
                log.warning("cannot fetch the keys of %s: %s; %s", self._issuer, error, also)
            return
        if former or keys.keys() != self._keys.keys():
            log.info("fetched the keys of %s: %s", self._issuer, ", ".join(keys))
        self._keys, self._fetched_s, self._trouble = keys, self._now_s(), ""


async def fetch_keys(oidc: Oidc) -> Keys:
    """Fetch an issuer's keys by OpenID discovery.

    Raises:
        FetchError: the keys cannot be fetched.

    """
    assert oidc.issuer is not None, "without it, no tokens are accepted"
    headers = {"Accept": "application/json"}
    try:
        if oidc.token_file is not None:
            token = oidc.token_file.read_text(encoding="ascii").strip()
            headers["Authorization"] = f"Bearer {token}"
        # Read the file for each fetch, because the CA may be renewed.
        trusted = ssl.create_default_context(cafile=oidc.ca)
        timeout = aiohttp.ClientTimeout(total=FETCH_WITHIN_S)
        async with (
            asyncio.timeout(FETCH_WITHIN_S),
            aiohttp.ClientSession(
                timeout=timeout,
                connector=aiohttp.TCPConnector(ssl=trusted),
                headers=headers,
                trust_env=True,
            ) as session,
        ):
            found = await _json(session, oidc.issuer.rstrip("/") + DISCOVERY)
            if found.get("issuer") != oidc.issuer:
                raise FetchError(
                    f"it calls itself {short(str(found.get('issuer')))!r}; give that as "
                    "`oidc.issuer`"
                )
            address = str(found.get("jwks_uri"))
            if not address.startswith("https://"):
                raise FetchError(f"its keys are at {short(address)!r}, which is not https")
            return read_keys(await _json(session, address))
    except TimeoutError as error:
        raise FetchError(f"no answer within {FETCH_WITHIN_S:g} s") from error
    except (OSError, UnicodeDecodeError, aiohttp.ClientError, ssl.SSLError) as error:
        raise FetchError(str(error) or type(error).__name__) from error


async def _json(session: aiohttp.ClientSession, address: str) -> dict[str, object]:
    # A redirect would send our token to another address.
    async with session.get(address, allow_redirects=False) as answer:
        try:
            await answer.content.readexactly(MOST_BYTES)
        except asyncio.IncompleteReadError as whole:
            body = whole.partial
        else:
            raise FetchError(f"{short(address)} answers more than {MOST_BYTES} bytes")
        if answer.status != 200:
            why = " (it wants a token: `oidc.token_file`)" if answer.status in (401, 403) else ""
            raise FetchError(f"{short(address)} answers {answer.status}{why}")
    try:
        return msgspec.json.decode(body, type=dict[str, object])
    except msgspec.DecodeError as error:
        raise FetchError(f"{short(address)} answers no JSON object: {error}") from error


def read_keys(document: Mapping[str, object]) -> Keys:
    """Return the keys in a JWK set that can verify signatures of `ALGORITHMS`, by `kid`.

    Raises:
        FetchError: there is no such key.

    """
    listed = document.get("keys")
    found: dict[str, jwt.PyJWK] = {}
    for one in listed[:MOST_KEYS] if isinstance(listed, list) else ():
        if not isinstance(one, dict) or one.get("use", "sig") != "sig":
            continue
        kid = one.get("kid")
        # An unknown kind of key is no reason to reject the others.
        with suppress(jwt.PyJWTError):
            key = jwt.PyJWK.from_dict(one)
            if isinstance(kid, str) and kid and key.algorithm_name in ALGORITHMS:
                found[kid] = key
    if not found:
        raise FetchError("it has no key that signatures can be checked with")
    return found
