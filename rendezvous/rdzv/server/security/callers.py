"""The caller of a request, as proven by a client certificate or a token.

A certificate's common name (CN) is the caller's name, and each organization (O) that names a role
gives the caller that role. A token takes precedence over a certificate, which may belong to the
machine. A service account's token proves only a name; its roles come from the configuration. If the
server requires no proof, every caller is `ANYBODY`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from contextvars import ContextVar
from enum import StrEnum

from rdzv.errors import InvalidRequestError, UnauthenticatedError
from rdzv.structs import struct
from rdzv.transport.certificates import read_certificate


class Role(StrEnum):
    """A caller's role. `roles` lists the calls that each role permits."""

    READ = "read"
    SUBMIT = "submit"
    NODE = "node"
    ADMIN = "admin"


IMPLIED = {
    Role.READ: frozenset({Role.READ}),
    Role.SUBMIT: frozenset({Role.SUBMIT, Role.READ}),
    Role.NODE: frozenset({Role.NODE}),
    Role.ADMIN: frozenset(Role),
}
"""The roles that each role implies, including itself. A node's key is on a machine that runs users'
code, so its role permits only the node's own stream."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._@+-]{0,127}")
"""Matches valid caller names, which appear in logs and events and as account names."""


_JWT = re.compile(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*")


@struct(frozen=True)
class Caller:
    """A caller with its roles and all roles that they imply."""

    name: str
    roles: frozenset[Role]
    proof: str
    """How the name was proven, such as by `certificate`, `token ID` or `service account NAME`."""
    token: str = ""
    """The id of the rdzvd token that the caller sent; empty if it sent none."""

    def has(self, roles: Iterable[Role]) -> bool:
        return not self.roles.isdisjoint(roles)

    @property
    def admin(self) -> bool:
        return Role.ADMIN in self.roles

    @property
    def shown(self) -> str:
        own = [
            role
            for role in Role
            if role in self.roles
            and not any(role in IMPLIED[other] for other in self.roles - {role})
        ]
        return " and ".join(own) or "none"

    def __str__(self) -> str:
        return f"{self.name} ({self.proof})" if self.name else self.proof


ANYBODY = Caller("", IMPLIED[Role.ADMIN], "anybody")

NOBODY = Caller("", frozenset(), "nobody")

present: ContextVar[Caller] = ContextVar("caller", default=NOBODY)
"""The caller whose call is served by the current task."""


def name_of(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise InvalidRequestError(
            f"{text[:140]!r} is not the name of a caller; give at most 128 letters, "
            "digits and . _ @ + -"
        )
    return text


def roles_of(names: Iterable[str]) -> tuple[Role, ...]:
    known = {role.value: role for role in Role}
    found = dict[Role, None]()
    for name in names:
        if name not in known:
            raise InvalidRequestError(
                f"{name[:40]!r} is not a role; the roles are: {', '.join(known)}"
            )
        found[known[name]] = None
    if not found:
        raise InvalidRequestError(f"no role was given; give one of {', '.join(known)}")
    return tuple(found)


def implied(roles: Iterable[Role]) -> frozenset[Role]:
    return frozenset[Role]().union(*(IMPLIED[role] for role in roles))


@functools.lru_cache(maxsize=4096)
def certified(pem: bytes) -> Caller:
    """Return the caller named by this certificate, which TLS has already verified."""
    try:
        certificate = read_certificate(pem, "the certificate that was shown")
    except InvalidRequestError as error:
        raise UnauthenticatedError(str(error)) from error
    name = certificate.common_name
    if not _NAME.fullmatch(name):
        raise UnauthenticatedError(
            f"the client certificate has the common name {name[:140]!r}; it needs one of "
            "letters, digits and . _ @ + -: the caller's name (`rdzvctl certs` makes such)"
        )
    known = {role.value: role for role in Role}
    # Organizations that do not name a role have no meaning here.
    roles = [known[other] for other in certificate.organizations if other in known]
    return Caller(name, implied(roles), "certificate")


def is_jwt(token: str) -> bool:
    """Return whether a token may be a JWT, which has two dots; rdzvd's own tokens have none."""
    return _JWT.fullmatch(token) is not None


def bearer(header: str) -> str:
    kind, _, text = header.strip().partition(" ")
    if kind.lower() != "bearer" or not text.strip():
        raise UnauthenticatedError(
            "the authorization header carries no token; send `authorization: Bearer TOKEN`"
        )
    return text.strip()
