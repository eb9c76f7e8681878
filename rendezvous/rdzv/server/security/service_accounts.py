"""Authenticates pods by the projected tokens of their Kubernetes service accounts.

Such a token is a JWT that names the account, its namespace, the pod and, since Kubernetes 1.30, the
pod's node. rdzvd never passes it on. The `[[oidc.account]]` table gives the caller its roles, and
specifies which of these names becomes the caller's name.
"""

from __future__ import annotations

import functools
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import jwt

from rdzv.errors import InvalidRequestError, UnauthenticatedError, short
from rdzv.runtime.tasks import beside
from rdzv.server.security.callers import Caller, Role, implied, name_of
from rdzv.server.security.issuer_keys import ALGORITHMS, IssuerKeys, fetch_keys
from rdzv.server.settings.server_settings import Oidc, OidcAccount

_SUBJECT = re.compile(r"system:serviceaccount:([a-z0-9-]{1,63}):([a-z0-9.-]{1,253})")

_CLAIMS = ["iss", "sub", "aud", "exp"]
"""The claims that a token must contain."""


_UNREADABLE = (jwt.PyJWTError, ValueError, TypeError, RecursionError, OverflowError)
"""The errors that PyJWT raises or lets through when a token is invalid."""


class ServiceAccounts:
    """The service accounts accepted by one server."""

    def __init__(self, oidc: Oidc, keys: IssuerKeys) -> None:
        self._oidc = oidc
        self._keys = keys
        self._accounts = {(one.namespace, one.name or ""): one for one in oidc.account}

    async def caller(self, text: str) -> Caller:
        """Return the caller identified by this token. Errors never quote the token.

        Raises:
            UnauthenticatedError: the token is invalid or not meant for this server, or its account
                is unknown.
            RendezvousConnectionError: the issuer's keys are unknown and cannot be fetched now.
            LimitExceededError: too many callers are waiting for the issuer's keys.

        """
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
        """Return a token's claims if it is authentic, unexpired, and meant for this server."""
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
    """Return why a token was refused, with the expected and the actual value."""
    renewed = "kubelet renews a projected one by itself, and its file is read at each call"
    match error:
        case jwt.ExpiredSignatureError():
            return f"the token expired at {_time(claims['exp'])}; {renewed}"
        case jwt.ImmatureSignatureError():
            begins = claims.get("nbf", claims.get("iat"))
            return (
                f"the token is valid from {_time(begins)} on, and here it is {_time(_now())}; "
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


def _now() -> float:
    return datetime.now(UTC).timestamp()


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
