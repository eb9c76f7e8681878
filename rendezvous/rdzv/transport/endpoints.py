"""Parses server endpoints as written by users, without importing gRPC, which is slow to load."""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import socket
from collections.abc import Iterable
from urllib.parse import quote

from rdzv.errors import InvalidRequestError, short
from rdzv.structs import struct

DEFAULT_PORT = 29_400
"""rdzvd's default port, which is that of torchrun's own rendezvous, so firewalls need no change."""

_BRACKETED = re.compile(r"\[(?P<host>[^\[\]]*)\](?::(?P<port>.*))?", re.DOTALL)
_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_.])?")


@struct(frozen=True)
class Endpoint:
    """The address of a server. `host` has no brackets; `str()` adds them where needed."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def target(self) -> str:
        """The endpoint in gRPC's format, safe for host names that look like URI schemes."""
        return f"dns:///{quote(str(self), safe='[]:')}"


def parse_endpoint(text: str, default_port: int = DEFAULT_PORT) -> Endpoint:
    """Parse `host`, `host:port`, `[v6]` or `[v6]:port`.

    Anything else is refused with an `InvalidRequestError` that names the value, reason and remedy.

    >>> str(parse_endpoint("head-1")), str(parse_endpoint("[::1]:7"))
    ('head-1:29400', '[::1]:7')
    """
    host, port = _host_and_port(text, least_port=1)
    return Endpoint(host, default_port if port is None else port)


def _host_and_port(text: str, least_port: int) -> tuple[str, int | None]:
    value = text.strip()
    if bracketed := _BRACKETED.fullmatch(value):
        host, port = bracketed["host"], bracketed["port"]
        _check_v6(text, host)
    else:
        host, colon, rest = value.partition(":")
        port = rest if colon else None
        _check_host(text, host, rest)
    return host, None if port is None else _parse_port(text, port, least_port)


def _check_v6(text: str, host: str) -> None:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        raise _unusable(
            text, f"{short(host)!r} is not an IPv6 address", "only IPv6 addresses are in brackets"
        ) from None


def _check_host(text: str, host: str, rest: str) -> None:
    if rest.startswith("//"):
        raise _unusable(text, "it is a URL", "leave out everything but HOST:PORT")
    if ":" in rest:
        raise _unusable(text, "it has more than one colon", "write IPv6 as [ADDRESS]:PORT")
    if not host:
        raise _unusable(text, "it names no host", "write HOST or HOST:PORT")
    if not _HOST_NAME.fullmatch(host):
        raise _unusable(
            text,
            f"{short(host)!r} is not a host name or address",
            "write HOST, HOST:PORT or [IPv6]:PORT",
        )


def _parse_port(text: str, port: str, least: int) -> int:
    if port.isascii() and port.isdigit() and least <= int(port[:6]) <= 65535:
        return int(port)
    raise _unusable(
        text, f"{short(port)!r} is not a port", f"a port is a number from {least} to 65535"
    )


def _unusable(text: str, reason: str, remedy: str) -> InvalidRequestError:
    return InvalidRequestError(f"endpoint {short(text)!r} cannot be used: {reason}; {remedy}")


def parse_endpoints(text: str, default_port: int = DEFAULT_PORT) -> tuple[Endpoint, ...]:
    """Parse one or more comma-separated endpoints."""
    found = tuple(parse_endpoint(part, default_port) for part in text.split(",") if part.strip())
    if not found:
        raise _unusable(text, "it names no host", "write HOST:PORT, or several with commas")
    return found


def is_link_local(address: str) -> bool:
    """Return whether this is an IPv6 address that has a meaning only together with an interface.

    >>> [is_link_local(a) for a in ("fe80::1%eth0", "fe80::1", "169.254.1.1", "n1", "2001:db8::1")]
    [True, True, False, False, False]
    """
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    return found.version == 6 and found.is_link_local


def is_loopback(address: str) -> bool:
    """Return whether an address is reachable only from this machine.

    >>> [is_loopback(a) for a in ("127.0.0.1", "::1", "localhost", "10.0.0.5", "n1")]
    [True, True, True, False, False]
    """
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def refuse_link_local(endpoints: Iterable[Endpoint], local_addr: str = "") -> None:
    """Refuse addresses that a node's workers could not use: a link-local one has no interface."""
    linked = [str(endpoint) for endpoint in endpoints if is_link_local(endpoint.host)]
    if is_link_local(local_addr):
        given = f"--local-addr={local_addr}"
    elif linked and not local_addr:
        given = f"endpoint {linked[0]}"
    else:
        return
    raise InvalidRequestError(
        f"{given} is link-local: this node would be announced to the others under an address that "
        "they cannot use, since only this machine knows its interface; give another address or a "
        "name for the server, or --local-addr=ADDRESS with one that is not link-local"
    )


@struct(frozen=True)
class Listen(Endpoint):
    """An address to listen on."""

    @classmethod
    def parse(cls, text: str) -> Listen:
        """Parse HOST:PORT, where an IPv6 host is in brackets and port 0 means any free port.

        >>> Listen.parse("127.0.0.1:29400"), str(Listen.parse("[::1]:0"))
        (Listen(host='127.0.0.1', port=29400), '[::1]:0')
        """
        host, port = _host_and_port(text, least_port=0)
        if port is None:
            example = f"127.0.0.1:{DEFAULT_PORT}"
            raise _unusable(text, "it has no port", f"write HOST:PORT, for example {example}")
        return cls(host, port)

    @property
    def loopback(self) -> bool:
        return is_loopback(self.host)

    @property
    def unspecified(self) -> bool:
        """Whether this means all addresses of this machine, to which no client can connect."""
        try:
            return ipaddress.ip_address(self.host).is_unspecified
        except ValueError:
            return False


def cannot_listen(listen: Listen, error: OSError, option: str) -> InvalidRequestError:
    """Return the error to raise when an address cannot be bound.

    `option` names the option that sets the address.
    """
    advice = f"give another address with {option}"
    if isinstance(error, socket.gaierror):
        reason = f"host {listen.host}: {error.strerror}"
    elif error.errno == errno.EADDRINUSE:
        reason = "another program does already"
        advice = f"end that one (`ss -ltnp sport = :{listen.port}` names it), or {advice}"
    else:
        reason = os.strerror(error.errno) if error.errno else str(error)
    return InvalidRequestError(f"cannot listen on {listen}: {reason}; {advice}")
