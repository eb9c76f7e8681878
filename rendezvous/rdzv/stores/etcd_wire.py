"""etcd's methods and messages, and the conversion between messages and values.

Its messages are used only by this module and the two that call etcd (`etcd_client` from the event
loop, `lease_calls` from threads).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import grpc
from google.protobuf.message import Message

from rdzv.etcd import etcd_pb2 as pb
from rdzv.stores.etcd_config import EtcdConfig
from rdzv.stores.etcd_values import (
    Change,
    Condition,
    Created,
    Delete,
    Get,
    KeyValue,
    Leased,
    Modified,
    Operation,
    Put,
)

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


def tls(config: EtcdConfig) -> grpc.ChannelCredentials | None:
    """Return the TLS credentials, read anew from the files, or None for plaintext."""
    if not config.secure:
        return None

    def read(path: Path | None) -> bytes | None:
        return path.read_bytes() if path else None

    return grpc.ssl_channel_credentials(read(config.ca), read(config.key), read(config.cert))


def authenticate_message(config: EtcdConfig) -> pb.AuthenticateRequest:
    """Encode the request for a user's token."""
    return pb.AuthenticateRequest(name=config.user, password=config.password)


def value_of(kv: pb.KeyValue) -> KeyValue:
    return KeyValue(kv.key, kv.value, kv.create_revision, kv.mod_revision, kv.lease)


def first_of(response: pb.RangeResponse) -> KeyValue | None:
    """Return the first key that was read, or None if there is none."""
    return value_of(response.kvs[0]) if response.kvs else None


def change_of(event: pb.Event) -> Change:
    deleted = event.type == pb.Event.DELETE
    return Change(None if deleted else value_of(event.kv), event.kv.mod_revision)


def compare_message(condition: Condition) -> pb.Compare:
    match condition:
        case Created(key, revision):
            return pb.Compare(key=key, target=pb.Compare.CREATE, create_revision=revision)
        case Modified(key, revision):
            return pb.Compare(key=key, target=pb.Compare.MOD, mod_revision=revision)
        case Leased(key, lease):
            return pb.Compare(key=key, target=pb.Compare.LEASE, lease=lease)


def operation_message(operation: Operation) -> pb.RequestOp:
    match operation:
        case Get(key):
            return pb.RequestOp(request_range=pb.RangeRequest(key=key))
        case Put(key, value, None):
            put = pb.PutRequest(key=key, value=value, ignore_lease=True)
            return pb.RequestOp(request_put=put)
        case Put(key, value, lease):
            return pb.RequestOp(request_put=pb.PutRequest(key=key, value=value, lease=lease or 0))
        case Delete(key, end):
            deletion = pb.DeleteRangeRequest(key=key, range_end=end)
            return pb.RequestOp(request_delete_range=deletion)
