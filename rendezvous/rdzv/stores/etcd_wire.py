"""etcd's methods, the parts of its transactions, and one client's connections to its members.

etcd's own messages are its values here. The two clients are in `etcd_client`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

import grpc
from google.protobuf.message import Message

from rdzv.etcd import etcd_pb2 as pb
from rdzv.stores.etcd_config import EtcdConfig

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    # etcd is inside the cluster; an Internet proxy would respond instead.
    ("grpc.enable_http_proxy", 0),
    # One value is at most as large as one request; pages contain few values, or only keys.
    ("grpc.max_receive_message_length", 16 << 20),
    # Unanswered pings reveal a stopped member; the keepalive timeout alone does not. etcd closes
    # connections that ping more often than every 5 s, or without a call.
    ("grpc.keepalive_time_ms", 6_000),
    ("grpc.keepalive_timeout_ms", 2_000),
    ("grpc.http2.ping_timeout_ms", 2_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 0),
    # A restarted member is soon used again.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Each client manages its own connections and repeats calls itself.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
)
"""The options for every channel to etcd."""

Metadata = tuple[tuple[str, str], ...]

Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)


@dataclass(frozen=True, slots=True)
class Method(Generic[Request, Response]):
    """One method of etcd's API."""

    path: str
    request: type[Request]
    response: type[Response]
    streams: bool = False


RANGE = Method("/etcdserverpb.KV/Range", pb.RangeRequest, pb.RangeResponse)
TXN = Method("/etcdserverpb.KV/Txn", pb.TxnRequest, pb.TxnResponse)
GRANT = Method("/etcdserverpb.Lease/LeaseGrant", pb.LeaseGrantRequest, pb.LeaseGrantResponse)
REVOKE = Method("/etcdserverpb.Lease/LeaseRevoke", pb.LeaseRevokeRequest, pb.LeaseRevokeResponse)
KEEP_ALIVE = Method(
    "/etcdserverpb.Lease/LeaseKeepAlive",
    pb.LeaseKeepAliveRequest,
    pb.LeaseKeepAliveResponse,
    streams=True,
)
WATCH = Method("/etcdserverpb.Watch/Watch", pb.WatchRequest, pb.WatchResponse, streams=True)
AUTHENTICATE = Method(
    "/etcdserverpb.Auth/Authenticate", pb.AuthenticateRequest, pb.AuthenticateResponse
)


# ------------------------------------------------------------------------------ transactions

KeyValue = pb.KeyValue


def created(key: bytes, revision: int) -> pb.Compare:
    """Hold if the key was created at this revision or, with 0, if it does not exist."""
    return pb.Compare(key=key, target=pb.Compare.CREATE, create_revision=revision)


def modified(key: bytes, revision: int) -> pb.Compare:
    """Hold if the key was last written at this revision or, with 0, if it does not exist."""
    return pb.Compare(key=key, target=pb.Compare.MOD, mod_revision=revision)


def leased(key: bytes, lease: int) -> pb.Compare:
    """Hold if the key is attached to this lease."""
    return pb.Compare(key=key, target=pb.Compare.LEASE, lease=lease)


def get(key: bytes) -> pb.RequestOp:
    """Read one key."""
    return pb.RequestOp(request_range=pb.RangeRequest(key=key))


def put(key: bytes, value: bytes, lease: int | None = 0) -> pb.RequestOp:
    """Write one key and attach it to `lease`; 0 means no lease, and None keeps the current one."""
    kept = lease is None
    request = pb.PutRequest(key=key, value=value, lease=lease or 0, ignore_lease=kept)
    return pb.RequestOp(request_put=request)


def delete(key: bytes, end: bytes = b"") -> pb.RequestOp:
    """Delete one key, or all keys from it up to but not including `end`."""
    return pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=key, range_end=end))


def first_of(response: pb.RangeResponse) -> KeyValue | None:
    """Return the first key that was read, or None if there is none."""
    return response.kvs[0] if response.kvs else None


def found_by(response: pb.TxnResponse) -> tuple[KeyValue | None, ...]:
    """Return what a transaction has read: one entry for each `get` that was executed."""
    return tuple(
        first_of(done.response_range)
        for done in response.responses
        if done.WhichOneof("response") == "response_range"
    )


# ------------------------------------------------------------------------------ connections

# For a watch, some versions report that permission was denied when only the token has expired.
_REFUSAL = re.compile(
    "invalid auth token|revision of auth store is old|refuses the watch: .*permission denied"
)


class Members:
    """One client's connections to etcd's members, one of which is asked first, and its token.

    The client authenticates if that `needs_token`, and sends `metadata` with each call. A call
    whose token was refused was not carried out, so the client sends it once more with a new token.
    """

    def __init__(self, config: EtcdConfig, transport: ModuleType) -> None:
        """Connect by `transport`, which is `grpc` or `grpc.aio`."""
        self.config = config
        options, credentials = CHANNEL_OPTIONS, _tls(config)
        self.channels: tuple[Any, ...] = tuple(
            transport.insecure_channel(endpoint.target, options=options)
            if credentials is None
            else transport.secure_channel(endpoint.target, credentials, options=options)
            for endpoint in config.endpoints
        )
        self.current = 0
        """The index of the member that is asked first."""
        self.token = ""
        """The token that etcd has issued to the user, or empty if there is none."""

    def leave(self, index: int) -> None:
        """Make the next call start with another member, unless another call has done so."""
        if self.current == index:
            self.current = (index + 1) % len(self.channels)

    def method(self, index: int, method: Method[Any, Any]) -> Any:
        """Return a method of one member, as grpc calls it."""
        channel = self.channels[index]
        make = channel.stream_stream if method.streams else channel.unary_unary
        return make(
            method.path,
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.response.FromString,
        )

    @property
    def needs_token(self) -> bool:
        """Whether the client must authenticate before its next call."""
        return bool(self.config.user) and not self.token

    def authentication(self) -> pb.AuthenticateRequest:
        return pb.AuthenticateRequest(name=self.config.user, password=self.config.password)

    @property
    def metadata(self) -> Metadata:
        return (("token", self.token),) if self.token else ()

    def refuses_token(self, sent: Metadata, reason: str) -> bool:
        """Return whether a call failed because of its token, and if so, discard that token.

        A newer token, obtained by another call in the meantime, is kept.
        """
        if not sent or not _REFUSAL.search(reason):
            return False
        if sent == self.metadata:
            self.token = ""
        return True


def _tls(config: EtcdConfig) -> grpc.ChannelCredentials | None:
    """Return the TLS credentials, read anew from the files, or None for plaintext."""
    if not config.secure:
        return None

    def read(path: Path | None) -> bytes | None:
        return path.read_bytes() if path else None

    return grpc.ssl_channel_credentials(read(config.ca), read(config.key), read(config.cert))
