"""Authenticates pods by the projected tokens of their Kubernetes service accounts.

Such a token is a JWT that names the account, its namespace, the pod and, since Kubernetes 1.30, the
pod's node. rdzvd never passes it on. The `[[oidc.account]]` table gives the caller its roles, and
specifies which of these names becomes the caller's name.

The issuer's public keys are kept while it cannot be reached. A single task fetches them at most
once every `RETRY_S`, no matter how many calls arrive. A call that needs an unknown key waits for
the next fetch, but no longer than `HOLD_S`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import re
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from typing import Any

import aiohttp
import jwt
import msgspec

from rdzv.core.words import duration
from rdzv.errors import (
    InvalidRequestError,
    LimitExceededError,
    RendezvousConnectionError,
    UnauthenticatedError,
    short,
)
from rdzv.runtime.tasks import beside
from rdzv.server.security.callers import Caller, Role, implied, name_of
from rdzv.server.settings.server_settings import Oidc, OidcAccount

log = logging.getLogger("rdzv.access")

DISCOVERY = "/.well-known/openid-configuration"

REFRESH_EVERY_S = 600.0
"""How often the keys are fetched again. A token with an unknown key has them fetched at once."""

RETRY_S = 10.0

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
        """Return a key; if it is unknown, wait for a fetch that begins after this call."""
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
    """Return the keys in a JWK set that can verify signatures of `ALGORITHMS`, by `kid`."""
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


# ------------------------------------------------------------------------------------ tokens

_SUBJECT = re.compile(r"system:serviceaccount:([a-z0-9-]{1,63}):([a-z0-9.-]{1,253})")

_CLAIMS = ["iss", "sub", "aud", "exp"]


_UNREADABLE = (jwt.PyJWTError, ValueError, TypeError, RecursionError, OverflowError)
"""The errors that PyJWT raises or lets through when a token is invalid."""


class ServiceAccounts:
    """The service accounts accepted by one server."""

    def __init__(self, oidc: Oidc, keys: IssuerKeys) -> None:
        self._oidc = oidc
        self._keys = keys
        self._accounts = {(one.namespace, one.name or ""): one for one in oidc.account}

    async def caller(self, text: str) -> Caller:
        """Return the caller identified by this token. Errors never quote the token."""
        try:
            header = jwt.get_unverified_header(text)
            claimed = jwt.decode(text, options={"verify_signature": False})
        except _UNREADABLE as error:
            raise UnauthenticatedError(
                "the token cannot be read: it is neither one of rdzvd nor of Kubernetes"
            ) from error
        algorithm, kid = header.get("alg"), header.get("kid")
        if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
            raise UnauthenticatedError(
                f"the token is signed by {short(str(algorithm))!r}, which proves nothing here; "
                f"accepted are {', '.join(sorted(ALGORITHMS))}"
            )
        # Check this before looking up the key: another issuer's keys are unknown here.
        if claimed.get("iss") != self._oidc.issuer:
            raise UnauthenticatedError(
                f"the token is of issuer {short(str(claimed.get('iss')))!r}, and this server "
                f"accepts those of {self._oidc.issuer!r} (`oidc.issuer`)"
            )
        if not isinstance(kid, str) or not kid:
            raise UnauthenticatedError("the token does not say which key has signed it (kid)")
        key = await self._keys.key(kid)
        return self._known(self._checked(text, key))

    def _checked(self, text: str, key: jwt.PyJWK) -> Mapping[str, Any]:
        oidc = self._oidc
        try:
            claims: dict[str, Any] = jwt.decode(
                text,
                key,
                algorithms=[key.algorithm_name],
                issuer=oidc.issuer,
                audience=oidc.audience,
                leeway=oidc.leeway_ms / 1000,
                options={"require": _CLAIMS},
            )
            return claims
        except _UNREADABLE as error:
            # The signature is checked first, so any other error is about authentic claims.
            trouble = _in_words(error, jwt.decode(text, options={"verify_signature": False}), oidc)
            raise UnauthenticatedError(trouble) from error

    def _known(self, claims: Mapping[str, Any]) -> Caller:
        found = _SUBJECT.fullmatch(str(claims["sub"]))
        if found is None:
            raise UnauthenticatedError(
                f"the token is of {short(str(claims['sub']))!r}, which is no service account"
            )
        namespace, name = found.groups()
        account = self._accounts.get((namespace, name)) or self._accounts.get((namespace, ""))
        if account is None:
            raise UnauthenticatedError(
                f"service account {namespace}/{name} is not known here; add an [[oidc.account]] "
                f'with namespace = "{namespace}" to rdzvd.toml, and its roles'
            )
        roles = implied(Role(role) for role in account.roles)
        proof = f"service account {namespace}/{name}"
        try:
            return Caller(name_of(_name(account, namespace, name, claims)), roles, proof)
        except InvalidRequestError as error:
            raise UnauthenticatedError(f"{proof}: {error}") from error


def _name(account: OidcAccount, namespace: str, name: str, claims: Mapping[str, Any]) -> str:
    if account.known_as != "node":
        return namespace if account.known_as == "namespace" else f"{name}@{namespace}"
    of_kubernetes = claims.get("kubernetes.io")
    node = of_kubernetes.get("node") if isinstance(of_kubernetes, dict) else None
    if not isinstance(node, dict) or not isinstance(node.get("name"), str):
        raise UnauthenticatedError(
            f"the token of {namespace}/{name} does not name the node of its pod, which "
            '`known_as` = "node" needs: it has to be a projected token of a pod, by Kubernetes '
            "1.30 or newer"
        )
    return str(node["name"])


def _in_words(error: Exception, claims: Mapping[str, Any], oidc: Oidc) -> str:
    renewed = "kubelet renews a projected one by itself, and its file is read at each call"
    match error:
        case jwt.ExpiredSignatureError():
            return f"the token expired at {_time(claims['exp'])}; {renewed}"
        case jwt.ImmatureSignatureError():
            begins = claims.get("nbf", claims.get("iat"))
            return (
                f"the token is valid from {_time(begins)} on, and here it is {_time(time.time())}; "
                "compare the clocks of the two machines"
            )
        case jwt.InvalidAudienceError():
            named = claims.get("aud")
            audiences = named if isinstance(named, list) else [named]
            theirs = ", ".join(repr(short(str(one))) for one in audiences[:4])
            return (
                f"the token is for audience {theirs}, and this server wants {oidc.audience!r}; "
                "set `audience` of the pod's serviceAccountToken volume to that"
            )
        case jwt.MissingRequiredClaimError():
            return f"the token has no {short(error.claim)!r}, which it needs"
        case _:
            return "the token was not signed with its issuer's key, or its claims are damaged"


def _time(stamp: object) -> str:
    """Format a token's timestamp for people.

    >>> _time(0)
    '1970-01-01T00:00:00Z'
    """
    try:
        return datetime.fromtimestamp(float(str(stamp)), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (ValueError, OverflowError, OSError):
        return repr(short(str(stamp)))


@asynccontextmanager
async def proving(oidc: Oidc) -> AsyncIterator[ServiceAccounts]:
    """Yield the accepted service accounts, keeping their issuer's keys current."""
    assert oidc.issuer is not None, "without it, no tokens are accepted"
    fetch = functools.partial(fetch_keys, oidc)
    keys = IssuerKeys(fetch, oidc.issuer, kept_s=oidc.keys_kept_ms / 1000)
    async with beside(keys.follow()):
        yield ServiceAccounts(oidc, keys)
