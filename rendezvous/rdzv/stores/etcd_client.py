"""A client for etcd's public gRPC API that returns etcd's messages and raises our own exceptions.

Its calls block: the event loop makes them in threads (`run`), and threads of their own keep an
election's lease, which the loop would renew too late while it responds to thousands of nodes. Each
endpoint has its own channel, so the client knows where a call was sent. After a failure, a
repeatable call goes to the next endpoint, whereas a transaction does so only if it was certainly
not sent.

The package `etcd3` cannot be imported alongside a current protobuf, and uses a single endpoint.
Other clients lack TLS, or are refused permanently once a token has expired.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

import grpc
from google.protobuf.message import Message

from rdzv.errors import InvalidRequestError, RendezvousConnectionError, StoreRefusedError
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

MAX_OPERATIONS = 128
"""The maximum number of operations in one transaction, which is etcd's own limit (`--max-txn-ops`).
"""

MAX_REQUEST_BYTES = 1_500_000
"""The maximum size of a request: slightly below etcd's own 1.5 MiB (`--max-request-bytes`)."""

RETRY_S = 0.1
"""The pause after all endpoints have failed."""

CALLS_AT_ONCE = 64
"""The maximum number of calls of the event loop in progress; more wait for one of these to end."""

KeyValue = pb.KeyValue

T = TypeVar("T")
P = ParamSpec("P")
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
AUTHENTICATE = Method(
    "/etcdserverpb.Auth/Authenticate", pb.AuthenticateRequest, pb.AuthenticateResponse
)

# ------------------------------------------------------------------------------------ errors

_DEFINITE = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)
"""Statuses that prove that etcd has done nothing. With any other status, the outcome is unknown."""

_CUT_OFF = re.compile(r"socket closed|connection reset", re.IGNORECASE)

_TLS_TROUBLE = re.compile(r"ssl|tls|certificate|handshake|hostname", re.IGNORECASE)

_TOKEN_REFUSED = re.compile("invalid auth token|revision of auth store is old")


class EtcdRefusedError(StoreRefusedError):
    """etcd responded and refused the call."""

    def __init__(self, text: str, status: grpc.StatusCode, said: str) -> None:
        super().__init__(text)
        self.status = status
        self.said = said


class _FailedError(Exception):
    """A member did not respond, or not in time; the outcome is unknown."""

    def __init__(self, error: grpc.RpcError | None) -> None:
        reason = "the stream has ended without an answer"
        if isinstance(error, grpc.Call):
            reason = " ".join((error.details() or error.code().name).split())
        self.is_silence = (
            isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        )
        super().__init__("no answer in time" if self.is_silence else reason)


def mistake(config: EtcdConfig, error: EtcdRefusedError) -> str:
    details = error.said
    if "authentication failed" in details:
        return (
            f"{config.place}: user {config.user!r} or its password is refused; give those of "
            "an etcd user (etcdctl user list)"
        )
    if "authentication is not enabled" in details:
        return (
            f"{config.place}: user {config.user!r} cannot be checked: authentication is not "
            "enabled there; leave out user and password, or enable it (etcdctl auth enable)"
        )
    # If the client has a certificate, etcd reports that a user without a name has no access.
    if "user name is empty" in details or ("permission denied" in details and not config.user):
        return f"{config.place}: a user is asked for and none is given; give user and password"
    if "permission denied" in details:
        return (
            f"{config.place}: user {config.user!r} may not read it; give its role "
            f"`readwrite --prefix {config.prefix}/` (etcdctl role grant-permission)"
        )
    if error.status is grpc.StatusCode.UNIMPLEMENTED:
        return f"{config.place}: what listens there is no etcd v3; check the endpoints"
    return f"{config.place}: {details}"


# ------------------------------------------------------------------------------------ the client


class EtcdClient:
    """One process's connections to etcd. The event loop creates one by `EtcdClient.connected`.

    Every call ends within `timeout_ms`. Repeatable calls are repeated within that time, each at the
    next endpoint. A call raises

    * `StoreRefusedError` if etcd was not reached or refused the call: nothing was written,
    * `RendezvousConnectionError` if the outcome is unknown.
    """

    def __init__(self, config: EtcdConfig) -> None:
        self.config = config
        self._timeout_s = config.timeout_ms / 1000
        self.attempt_s = self._timeout_s / (2 if len(config.endpoints) > 1 else 1)
        """The maximum time to wait for one endpoint. If it is stopped, another still has time to
        respond."""
        self._channels = tuple(_channels(config))
        self._current = 0
        self._answered = [False] * len(self._channels)
        """Whether each member has answered on its present connection."""
        self._followed = False
        self.token = ""
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(CALLS_AT_ONCE, thread_name_prefix="etcd")

    @classmethod
    @asynccontextmanager
    async def connected(cls, config: EtcdConfig) -> AsyncIterator[EtcdClient]:
        """Connect, check that the data can be read, and close when the body ends."""
        config.check()
        client = cls(config)
        try:
            await client.run(client._open)
            yield client
        finally:
            await asyncio.to_thread(client.close)

    def close(self) -> None:
        for channel in self._channels:
            channel.close()
        self._threads.shutdown()

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Make calls in a thread. They are not cancelled with the caller."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, partial(call, *args, **kwargs))

    # ---------------------------------------------------------------- calls

    def get(self, key: bytes, timeout_s: float | None = None) -> tuple[KeyValue | None, int]:
        """Return a key, or None if it does not exist, and the revision at which it was read."""
        response = self._repeated(RANGE, pb.RangeRequest(key=key), timeout_s)
        return first_of(response), response.header.revision

    def scan(
        self,
        start: bytes,
        end: bytes,
        *,
        keys_only: bool = False,
        newest_first: bool = False,
        page: int = 500,
        revision: int = 0,
    ) -> Iterator[tuple[KeyValue, ...]]:
        """Yield all keys from `start` up to but not including `end`, at most `page` keys at a time.

        Without `revision`, writes made in the meantime may or may not appear. With `newest_first`,
        the keys are yielded in reverse order.
        """
        order = pb.RangeRequest.DESCEND if newest_first else pb.RangeRequest.NONE
        while True:
            request = pb.RangeRequest(
                key=start,
                range_end=end,
                limit=page,
                revision=revision,
                sort_order=order,
                keys_only=keys_only,
            )
            response = self._repeated(RANGE, request)
            found = tuple(response.kvs)
            if found:
                yield found
            if not response.more or not found:
                return
            if newest_first:
                end = found[-1].key
            else:
                start = found[-1].key + b"\0"

    def txn(
        self,
        compare: Sequence[pb.Compare],
        then: Sequence[pb.RequestOp],
        otherwise: Sequence[pb.RequestOp] = (),
    ) -> pb.TxnResponse:
        """Execute `then` if all comparisons hold, or `otherwise` if not, in one atomic transaction.

        It is executed at most once; it is sent again only if etcd has refused the token.

        Raises:
            StoreRefusedError: it was not sent, or etcd refused it.
            RendezvousConnectionError: it may have been executed, or may still be.

        """
        request = pb.TxnRequest(compare=compare, success=then, failure=otherwise)
        if (size := request.ByteSize()) > MAX_REQUEST_BYTES:
            raise StoreRefusedError(
                f"{self.config.place}: a write of {size} bytes is above the {MAX_REQUEST_BYTES} "
                "that etcd takes at once; nothing was written"
            )
        index = self._answering()
        try:
            return self._attempt(index, TXN, request, self._timeout_s)
        except _FailedError as error:
            self._leave(index)
            raise RendezvousConnectionError(
                f"{self._silent(index)}: {error}; the outcome is unknown"
            ) from error

    def grant(self, ttl_s: int) -> tuple[int, int]:
        # A duplicate lease expires on its own.
        response = self._repeated(GRANT, pb.LeaseGrantRequest(TTL=ttl_s))
        return response.ID, response.TTL

    def keep_alive(self, lease: int, timeout_s: float) -> int:
        """Renew a lease, and return its TTL in seconds, or 0 if it is gone."""
        return self._repeated(KEEP_ALIVE, pb.LeaseKeepAliveRequest(ID=lease), timeout_s).TTL

    def revoke(self, lease: int) -> None:
        """End a lease and delete its keys. An unknown lease is not an error."""
        try:
            self._repeated(REVOKE, pb.LeaseRevokeRequest(ID=lease))
        except EtcdRefusedError as error:
            if error.status is not grpc.StatusCode.NOT_FOUND:
                raise

    # ---------------------------------------------------------------- repeating

    def _repeated(
        self,
        method: Method[Request, Response],
        request: Request,
        timeout_s: float | None = None,
    ) -> Response:
        """Call until an endpoint responds or time runs out. Only for calls that may run twice."""
        timeout_s = timeout_s or self._timeout_s
        deadline_s = time.monotonic() + timeout_s
        attempt_s = min(self.attempt_s, timeout_s)
        tried, reason = 0, ""
        while True:
            index, left_s = self._current, deadline_s - time.monotonic()
            try:
                return self._attempt(index, method, request, min(attempt_s, left_s))
            except _FailedError as error:
                failure = error
            # An earlier error is more informative than a timeout.
            reason = reason if reason and failure.is_silence else str(failure)
            self._leave(index)
            tried += 1
            if time.monotonic() + RETRY_S >= deadline_s:
                raise StoreRefusedError(
                    f"{self._silent(index)}: {reason}; nothing was written. See that etcd runs "
                    "there and has a majority of its members"
                ) from failure
            if tried % len(self._channels) == 0:
                time.sleep(RETRY_S)

    def _answering(self) -> int:
        """Return the index of a member that has answered on its present connection."""
        with self._lock:
            if not self._followed:
                self._followed = True
                for index, channel in enumerate(self._channels):
                    channel.subscribe(partial(self._note_state, index))
        index = self._current
        while not self._answered[index]:
            self._repeated(RANGE, pb.RangeRequest(key=self._probe_key))
            index = self._current
        return index

    def _note_state(self, index: int, state: grpc.ChannelConnectivity) -> None:
        if state is not grpc.ChannelConnectivity.READY:
            self._answered[index] = False

    def _leave(self, index: int) -> None:
        """Make the next call start with another member, unless another call has done so."""
        self._answered[index] = False
        if self._current == index:
            self._current = (index + 1) % len(self._channels)

    def _attempt(
        self, index: int, method: Method[Request, Response], request: Request, timeout_s: float
    ) -> Response:
        """Call one endpoint, with a new token if the old one is no longer accepted."""
        until_s = time.monotonic() + timeout_s
        token = self._authenticated(index, until_s)
        try:
            answer = self._send(index, method, request, until_s, token)
        except EtcdRefusedError as error:
            if not token or not _TOKEN_REFUSED.search(error.said):
                raise
            # A newer token, obtained by another call in the meantime, is kept.
            if token == self.token:
                self.token = ""
            token = self._authenticated(index, until_s)
            answer = self._send(index, method, request, until_s, token)
        self._answered[index] = True
        return answer

    def _authenticated(self, index: int, until_s: float) -> str:
        if not self.config.user:
            return ""
        with self._lock:
            if not self.token:
                request = pb.AuthenticateRequest(
                    name=self.config.user, password=self.config.password
                )
                self.token = self._send(index, AUTHENTICATE, request, until_s, "").token
            return self.token

    def _send(
        self,
        index: int,
        method: Method[Request, Response],
        request: Request,
        until_s: float,
        token: str,
    ) -> Response:
        channel: Any = self._channels[index]
        make = channel.stream_stream if method.streams else channel.unary_unary
        left_s = max(until_s - time.monotonic(), 0)
        metadata: Metadata = (("token", token),) if token else ()
        try:
            ask = make(
                method.path,
                request_serializer=method.request.SerializeToString,
                response_deserializer=method.response.FromString,
            )
            if not method.streams:
                answer: Response = ask(request, timeout=left_s, metadata=metadata)
                return answer
            stream = ask(iter((request,)), timeout=left_s, metadata=metadata)
            try:
                first: Response | None = next(stream, None)
            finally:
                stream.cancel()
        except grpc.RpcError as error:
            raise self._judged(error) from error
        except ValueError as error:
            raise StoreRefusedError("the connection to etcd is closed") from error
        if first is None:
            raise _FailedError(None)
        return first

    def _judged(self, error: grpc.RpcError) -> Exception:
        assert isinstance(error, grpc.Call)
        details, status = error.details() or "", error.code()
        by_etcd = details.startswith("etcdserver: ") or status is grpc.StatusCode.UNIMPLEMENTED
        if by_etcd and status in _DEFINITE:
            text = f"{self.config.place}: {details}; nothing was written"
            return EtcdRefusedError(text, status, details)
        return _FailedError(error)

    def _silent(self, index: int) -> str:
        others = len(self.config.endpoints) - 1
        more = f" (and {others} more)" if others else ""
        return f"etcd at {self.config.endpoints[index]}{more} does not answer"

    @property
    def _probe_key(self) -> bytes:
        return f"{self.config.prefix}/leader".encode()

    def _open(self) -> None:
        """Read a key to distinguish a configuration error from an unreachable etcd."""
        try:
            self.get(self._probe_key)
        except EtcdRefusedError as error:
            if error.status is grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            raise InvalidRequestError(mistake(self.config, error)) from error
        except RendezvousConnectionError as error:
            if self.config.secure and _TLS_TROUBLE.search(str(error)):
                raise InvalidRequestError(
                    f"{error}; that etcd speaks TLS there; that the CA has signed the members' "
                    "certificates, and these name the endpoints as they are given; and that a "
                    "client certificate is given if they ask for one"
                ) from error
            if not self.config.secure and _CUT_OFF.search(str(error)):
                raise StoreRefusedError(
                    f"{error}. If it speaks TLS, give its endpoints as https://HOST:PORT"
                ) from error
            raise


def _channels(config: EtcdConfig) -> Iterator[grpc.Channel]:
    """Yield a channel to each endpoint; TLS files are read anew."""

    def read(path: Path | None) -> bytes | None:
        return path.read_bytes() if path else None

    for endpoint in config.endpoints:
        if not config.secure:
            yield grpc.insecure_channel(endpoint.target, options=CHANNEL_OPTIONS)
            continue
        pem = read(config.ca), read(config.key), read(config.cert)
        credentials = grpc.ssl_channel_credentials(*pem)
        yield grpc.secure_channel(endpoint.target, credentials, options=CHANNEL_OPTIONS)


# ------------------------------------------------------------------------------ transactions


def created(key: bytes, revision: int) -> pb.Compare:
    """Hold if the key was created at this revision or, with 0, if it does not exist."""
    return pb.Compare(key=key, target=pb.Compare.CREATE, create_revision=revision)


def modified(key: bytes, revision: int) -> pb.Compare:
    """Hold if the key was last written at this revision or, with 0, if it does not exist."""
    return pb.Compare(key=key, target=pb.Compare.MOD, mod_revision=revision)


def leased(key: bytes, lease: int) -> pb.Compare:
    return pb.Compare(key=key, target=pb.Compare.LEASE, lease=lease)


def get(key: bytes) -> pb.RequestOp:
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
    return response.kvs[0] if response.kvs else None


def found_by(response: pb.TxnResponse) -> tuple[KeyValue | None, ...]:
    """Return what a transaction has read: one entry for each `get` that was executed."""
    return tuple(
        first_of(done.response_range)
        for done in response.responses
        if done.WhichOneof("response") == "response_range"
    )


def below(folder: str) -> tuple[bytes, bytes]:
    """Return the range of all keys below a folder whose name ends in a slash."""
    return folder.encode(), folder[:-1].encode() + b"0"
