"""Options, connection attempts and errors of a node's stream to rdzvd, for all kinds of agents."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterable, Sequence

import grpc

from rdzv import errors
from rdzv.structs import struct
from rdzv.transport.channels import CHECK_NODE, PLAIN, Credentials, handshake_trouble
from rdzv.transport.endpoints import Endpoint, parse_endpoint

Options = tuple[tuple[str, int], ...]

CHANNEL_OPTIONS: Options = (
    # The server is inside the cluster and cannot be reached through an Internet proxy.
    ("grpc.enable_http_proxy", 0),
    # The status of a job with ten thousand waiting nodes exceeds gRPC's own limit of 4 MiB.
    ("grpc.max_receive_message_length", 64 << 20),
)

CONNECT_S = 2.0
"""How long a connection for calls may take to open: less than a call, since connecting waits for
nothing that a busy server does."""


def call_options(timeout_s: float) -> Options:
    """Return the options of a channel for calls that may take `timeout_s`."""
    connect_ms = round(max(CONNECT_S, 0.4 * timeout_s) * 1000)
    # Despite its name, this limits each attempt to connect. gRPC takes 32 bits.
    return (*CHANNEL_OPTIONS, ("grpc.min_reconnect_backoff_ms", min(connect_ms, 2**31 - 1)))


OWN_SERVER_OPTIONS: Options = (
    *CHANNEL_OPTIONS,
    # Each attempt has its own channel, and `Attempts` implements the backoff.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
)
"""The options for a node's stream to a server in the same process."""

STREAM_OPTIONS: Options = (
    *OWN_SERVER_OPTIONS,
    # Unanswered pings reveal a stopped peer or a broken path; the keepalive timeout alone does not.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    # One ping follows each heartbeat. With ten thousand nodes, the server makes both infrequent.
    ("grpc.http2.max_pings_without_data", 1),
    ("grpc.keepalive_permit_without_calls", 1),
    # Otherwise each read would be followed by a ping, which measures how much data may be in
    # flight.
    ("grpc.http2.bdp_probe", 0),
)

FINAL_REFUSALS = frozenset(
    error.code
    for error in (
        errors.DeniedError,
        errors.InvalidRequestError,
        errors.NodeSupersededError,
        errors.RendezvousClosedError,
        errors.SettingsMismatchError,
    )
)
"""Refusals that a retry cannot change. After any other refusal, the node sends Hello again later.
"""


class Rota:
    """Chooses the next server to ask: the leader last named, or else each server in turn.

    A stand-by server names the leader, which need not be among the given endpoints. If the leader
    fails, the other servers are tried again, starting with those that it has named.
    """

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        self._given = self._endpoints = tuple(endpoints)
        self._turn = 0
        self._leader: Endpoint | None = None
        self._led = False
        """Whether another server named the current one as leader, so that its redirection could
        loop."""

    @property
    def present(self) -> Endpoint:
        return self._leader or self._endpoints[self._turn % len(self._endpoints)]

    def learn(self, addresses: Iterable[str]) -> None:
        """Record the servers named by the current one, which are tried next when it fails."""
        named = tuple(filter(None, map(_endpoint, addresses)))
        self._leader = self.present
        self._endpoints = named + tuple(one for one in self._given if one not in named)
        self._turn = -1

    @property
    def next(self) -> Endpoint:
        return self._endpoints[(self._turn + 1) % len(self._endpoints)]

    def failed(self, error: errors.RendezvousError) -> bool:
        """Record why the current server failed; return whether to ask the named leader at once."""
        circles, self._led = self._led, False
        leader = _endpoint(error.leader) if isinstance(error, errors.NotLeaderError) else None
        if leader is not None and leader != self.present and not circles:
            self._leader, self._led = leader, True
            return True
        self._turn, self._leader = self._turn + 1, None
        return False


@struct(frozen=True)
class Backoff:
    """The delays of a node between attempts to open its stream."""

    first_s: float = 0.1
    """The shortest wait, which doubles with each failed attempt."""
    max_s: float = 5.0
    takeover_s: float = 0.5
    """The longest wait during a takeover, when servers stand by for a few seconds and no leader
    responds."""
    steady_s: float = 5.0
    """After a stream that lasted this long, the next attempt follows immediately."""
    spread: Callable[[float, float], float] = random.uniform
    """Picks a wait between two bounds, so that not all nodes reconnect at once."""


BACKOFF = Backoff()


class Attempts:
    """A node's attempts to keep a stream open: when to make the next, with the server of `rota`."""

    def __init__(self, endpoints: Sequence[Endpoint], backoff: Backoff = BACKOFF) -> None:
        self.rota = Rota(endpoints)
        self._backoff = backoff
        self._failed = 0
        """The number of failures since the last good stream, including that stream's own end."""
        self._welcomed_at_s: float | None = None
        self._taking_over = False
        """Whether a stand-by server has responded since the last Welcome, so that a takeover is in
        progress."""

    @property
    def welcome(self) -> bool:
        """Whether the current server has sent Welcome since the last failure."""
        return self._welcomed_at_s is not None

    def welcomed(self, now_s: float) -> None:
        self._welcomed_at_s = now_s
        self._taking_over = False

    def failed(
        self, error: errors.RendezvousError, now_s: float, most_s: float = math.inf
    ) -> float | None:
        """Record why the attempt or the stream ended, and return how long to wait before the next.

        The wait is 0 after the first failure and after a good stream, and otherwise at most
        `most_s`. None means that the server has named the leader, which is asked at once; this does
        not count as a failure.

        A stream that ends soon after its Welcome is not a good one, so a server that keeps doing
        this is asked only after pauses.
        """
        backoff, since_s = self._backoff, self._welcomed_at_s
        self._welcomed_at_s = None
        self._taking_over |= isinstance(error, errors.NotLeaderError)
        if self.rota.failed(error):
            return None
        if since_s is not None and now_s - since_s >= backoff.steady_s:
            self._failed = 0
        self._failed += 1
        if self._failed == 1:
            return 0.0
        longest_s = min(backoff.first_s * 2 ** min(self._failed - 1, 10), backoff.max_s, most_s)
        if self._taking_over:
            longest_s = min(longest_s, backoff.takeover_s)
        return backoff.spread(longest_s / 2, longest_s)


def _endpoint(address: str) -> Endpoint | None:
    try:
        return parse_endpoint(address) if address else None
    except errors.InvalidRequestError:
        return None


# ------------------------------------------------------------------------------------ the errors

_NOT_RDZV = "the program that listens there is not an rdzv server"
_CHECK = "check the address, and that rdzvd runs there"

_PREAMBLE = re.compile(
    r"failed to connect to all addresses; last error: (UNKNOWN|UNAVAILABLE): (ipv[46]:\S+: )?"
)

# gRPC gives the reason for a failed connection only as text; unknown texts are shown unchanged.
_CONNECTION_REASONS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), reason)
    for pattern, reason in (
        ("connection refused", "connection refused"),
        ("no route to host", "no route to host"),
        ("network is unreachable", "network is unreachable"),
        (
            "ping timeout|keepalive|before receiving settings",
            "it may be stopped or overloaded: the connection is open, and it does not answer",
        ),
        ("timed out|timeout occurred", "connection timed out"),
        ("lookup failed|name not found|dns resolution|errors resolving", "no such host name"),
        ("http1|HTTP/2|http2|ssl|handshake", _NOT_RDZV),
        ("reset by peer|socket closed|broken pipe", "the other side closed the connection"),
    )
)


def error_from_status(
    status: grpc.StatusCode,
    details: str | None,
    trailing: Iterable[tuple[str, str | bytes]] | None,
    server: Endpoint,
    timeout_s: float,
    credentials: Credentials = PLAIN,
) -> errors.RendezvousError:
    """Convert the status of a failed call to the corresponding error.

    If the trailing metadata contains an error code, it decides. Otherwise the status is not from
    rdzvd: the server was unreachable, did not respond in time, or is another program.
    """
    text = details or "no details given"
    check = CHECK_NODE if credentials.by_node else _CHECK
    if code := _metadata(trailing, errors.ERROR_CODE_METADATA_KEY):
        if code == errors.NotLeaderError.code:
            return errors.NotLeaderError(text, _metadata(trailing, errors.LEADER_METADATA_KEY))
        return errors.ERRORS.get(code, errors.RendezvousError)(text)
    match status:
        case grpc.StatusCode.UNAVAILABLE:
            if trouble := handshake_trouble(text, server, credentials):
                return _unreachable(server, *trouble, credentials)
            return _unreachable(server, _connection_reason(text), check, credentials)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            remedy = f"it may be stopped or overloaded, or a firewall drops packets; {check}"
            return _unreachable(server, f"no answer within {timeout_s:g} s", remedy, credentials)
        case grpc.StatusCode.UNIMPLEMENTED:
            return _unreachable(server, f"{_NOT_RDZV}, or an older one", check, credentials)
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return errors.LimitExceededError(
                f"the call to the server at {server} exceeds a limit: {text}"
            )
        case _:
            return errors.RendezvousError(f"the server at {server} answered {status.name}: {text}")


def _metadata(trailing: Iterable[tuple[str, str | bytes]] | None, wanted: str) -> str:
    for key, value in trailing or ():
        if key == wanted:
            return value if isinstance(value, str) else value.decode(errors="replace")
    return ""


def _connection_reason(details: str) -> str:
    for pattern, reason in _CONNECTION_REASONS:
        if pattern.search(details):
            return reason
    # The preamble says only that the connection failed, and to which address.
    return _PREAMBLE.sub("", details) or details


def _unreachable(
    server: Endpoint, reason: str, remedy: str, credentials: Credentials
) -> errors.RendezvousConnectionError:
    what = "the serving node" if credentials.by_node else "rdzvd"
    return errors.RendezvousConnectionError(f"cannot reach {what} at {server}: {reason}; {remedy}")
