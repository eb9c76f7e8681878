"""A client for etcd's public gRPC API that returns etcd's messages and raises our own exceptions.

`EtcdClient` is for the event loop, `LeaseCalls` for the threads that maintain a lease. Each
endpoint has its own channel, so the client knows where a call was sent. After a failure, a
repeatable call goes to the next endpoint, whereas a transaction does so only if it was certainly
not sent.

The package `etcd3` cannot be imported alongside a current protobuf, and uses a single endpoint.
Other clients lack TLS, or are refused permanently once a token has expired.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager

import grpc
import grpc.aio

from rdzv.errors import InvalidRequestError, RendezvousConnectionError, StoreRefusedError
from rdzv.etcd import etcd_pb2 as pb
from rdzv.stores.etcd_config import EtcdConfig
from rdzv.stores.etcd_errors import (
    CompactedError,
    RefusedError,
    is_silence,
    judged,
    mistake,
    reason_of,
    tried,
    unanswered,
)
from rdzv.stores.etcd_wire import (
    AUTHENTICATE,
    GRANT,
    KEEP_ALIVE,
    RANGE,
    REVOKE,
    TXN,
    WATCH,
    KeyValue,
    Members,
    Metadata,
    Method,
    Request,
    Response,
    first_of,
)

log = logging.getLogger("rdzv.etcd")

MAX_OPERATIONS = 128
"""The maximum number of operations in one transaction, which is etcd's own limit (`--max-txn-ops`).
"""

MAX_REQUEST_BYTES = 1_500_000
"""The maximum size of a request: slightly below etcd's own 1.5 MiB (`--max-request-bytes`)."""

RETRY_S = 0.1
"""The pause after all endpoints have failed."""


class EtcdClient:
    """One process's connections to etcd. Created by `EtcdClient.connected`.

    Every call ends within `timeout_ms`. Repeatable calls are repeated within that time, each at the
    next endpoint. A call raises

    * `StoreRefusedError` if etcd was not reached or refused the call: nothing was written,
    * `RendezvousConnectionError` if the outcome is unknown.
    """

    def __init__(self, config: EtcdConfig) -> None:
        self.config = config
        self.members = Members(config, grpc.aio)
        self._timeout_s = config.timeout_ms / 1000
        self.attempt_s = self._timeout_s / (2 if len(config.endpoints) > 1 else 1)
        """The maximum time to wait for one endpoint. If it is stopped, another still has time to
        respond."""
        self._authenticating = asyncio.Lock()

    @classmethod
    @asynccontextmanager
    async def connected(cls, config: EtcdConfig) -> AsyncIterator[EtcdClient]:
        """Connect, check that the data can be read, and close when the body ends.

        Raises:
            InvalidRequestError: user, password, certificates or prefix are refused.
            RendezvousConnectionError: no endpoint responds.

        """
        config.check()
        client = cls(config)
        try:
            await client._open()
            yield client
        finally:
            await client.close()

    async def close(self) -> None:
        """Close all connections. Calls in progress fail."""
        for channel in self.members.channels:
            await channel.close()

    # ---------------------------------------------------------------- calls

    async def get(self, key: bytes, timeout_s: float | None = None) -> tuple[KeyValue | None, int]:
        request = pb.RangeRequest(key=key)
        response = await self._repeated(RANGE, request, timeout_s)
        return first_of(response), response.header.revision

    async def scan(
        self,
        start: bytes,
        end: bytes,
        *,
        keys_only: bool = False,
        newest_first: bool = False,
        page: int = 500,
        revision: int = 0,
    ) -> AsyncGenerator[tuple[KeyValue, ...]]:
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
            response = await self._repeated(RANGE, request)
            found = tuple(response.kvs)
            if found:
                yield found
            if not response.more or not found:
                return
            if newest_first:
                end = found[-1].key
            else:
                start = found[-1].key + b"\0"

    async def txn(
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
        return await self._once(TXN, request)

    async def grant(self, ttl_s: int) -> tuple[int, int]:
        """Create a lease, and return its id and the TTL in seconds that etcd granted."""
        # A duplicate lease expires on its own.
        response = await self._repeated(GRANT, pb.LeaseGrantRequest(TTL=ttl_s))
        return response.ID, response.TTL

    async def revoke(self, lease: int) -> None:
        """End a lease and delete its keys. An unknown lease is not an error."""
        try:
            await self._repeated(REVOKE, pb.LeaseRevokeRequest(ID=lease))
        except RefusedError as error:
            if error.status is not grpc.StatusCode.NOT_FOUND:
                raise

    async def watch(
        self, key: bytes, revision: int, every_s: float = 1.0
    ) -> AsyncGenerator[tuple[pb.Event, ...]]:
        """Yield () once the watch is active, and then the changes of one key from `revision` on.

        The member is pinged every `every_s`, so if it is stopped or cut off, this is noticed after
        about twice that time. Nothing is queued here, so a slow reader delays the stream.

        Raises:
            CompactedError: those revisions are gone.
            RendezvousConnectionError: the watch broke; read the key again and watch from there.

        """
        index = self.members.current
        metadata = await self._credentials()
        fresh = False
        while True:
            over = asyncio.Event()
            requests = _watch_requests(key, revision, every_s, over)
            ask = self.members.method(index, WATCH)
            call = ask(requests, metadata=(*metadata, _REQUIRE_LEADER))
            try:
                while True:
                    async with asyncio.timeout(2 * every_s):
                        response = await call.read()
                    if not isinstance(response, pb.WatchResponse):
                        reason = "it has ended the watch"
                        break
                    if response.canceled:
                        reason = self._canceled(response)
                        break
                    if response.created or response.events:
                        yield tuple(response.events)
            except grpc.RpcError as error:
                reason = reason_of(error)
            except TimeoutError:
                reason = f"it has not answered for {2 * every_s:g} s"
            finally:
                over.set()
                call.cancel()
            if fresh or not self.members.refuses_token(metadata, reason):
                break
            metadata, fresh = await self._credentials(), True
        self.members.leave(index)
        raise RendezvousConnectionError(f"{tried(self.config, index)}: {reason}")

    # ---------------------------------------------------------------- repeating

    async def _repeated(
        self,
        method: Method[Request, Response],
        request: Request,
        timeout_s: float | None = None,
    ) -> Response:
        """Call until an endpoint responds or time runs out. Only for calls that may run twice."""
        timeout_s = timeout_s or self._timeout_s
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        attempt_s = min(self.attempt_s, timeout_s)
        tried = 0
        reason = ""
        while True:
            index = self.members.current
            left = deadline - loop.time()
            try:
                return await self._attempt(index, method, request, min(attempt_s, left))
            except grpc.RpcError as error:
                failure = error
            # An earlier error is more informative than a timeout.
            reason = reason_of(failure) if not (reason and is_silence(failure)) else reason
            self.members.leave(index)
            tried += 1
            if loop.time() + RETRY_S >= deadline:
                raise unanswered(self.config, index, reason) from failure
            if tried % len(self.members.channels) == 0:
                await asyncio.sleep(RETRY_S)

    async def _once(self, method: Method[Request, Response], request: Request) -> Response:
        """Call a connected endpoint. The call is repeated only if etcd has refused its token."""
        index = await self._connection()
        try:
            return await self._attempt(index, method, request, self._timeout_s)
        except grpc.RpcError as error:
            self.members.leave(index)
            raise self._unsure(index, reason_of(error)) from error

    async def _attempt(
        self, index: int, method: Method[Request, Response], request: Request, timeout_s: float
    ) -> Response:
        """Call one endpoint, with a new token if the old one is no longer accepted.

        Raises:
            StoreRefusedError: etcd refused the call and did nothing.
            grpc.RpcError: the outcome is unknown; another endpoint may succeed.

        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        metadata = await self._credentials()
        try:
            return await self._send(index, method, request, timeout_s, metadata)
        except grpc.aio.AioRpcError as error:
            if not self.members.refuses_token(metadata, error.details() or ""):
                raise judged(self.config, error) from error
        left = max(deadline - loop.time(), 0)
        try:
            return await self._send(index, method, request, left, await self._credentials())
        except grpc.aio.AioRpcError as error:
            raise judged(self.config, error) from error

    async def _send(
        self,
        index: int,
        method: Method[Request, Response],
        request: Request,
        timeout_s: float,
        metadata: Metadata,
    ) -> Response:
        ask = self.members.method(index, method)
        answer: Response = await ask(request, timeout=timeout_s, metadata=metadata)
        return answer

    async def _connection(self) -> int:
        """Return the index of a connected endpoint, trying the current one first.

        Raises:
            StoreRefusedError: no endpoint connected in time.

        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout_s
        tried = 0
        while True:
            index = self.members.current
            left = min(self.attempt_s, deadline - loop.time())
            if await _within(left, self._until_ready(index)):
                return index
            self.members.leave(index)
            tried += 1
            if loop.time() + RETRY_S >= deadline:
                raise unanswered(self.config, index, "no connection")
            if tried % len(self.members.channels) == 0:
                await asyncio.sleep(RETRY_S)

    async def _until_ready(self, index: int) -> bool:
        channel = self.members.channels[index]
        while True:
            state = channel.get_state(try_to_connect=True)
            if state is grpc.ChannelConnectivity.READY:
                return True
            if state in (
                grpc.ChannelConnectivity.TRANSIENT_FAILURE,
                grpc.ChannelConnectivity.SHUTDOWN,
            ):
                return False
            await channel.wait_for_state_change(state)

    # ---------------------------------------------------------------- users

    async def _credentials(self) -> Metadata:
        if self.members.needs_token:
            await self._authenticate()
        return self.members.metadata

    async def _authenticate(self) -> None:
        """Get a token, unless another call has got one in the meantime."""
        async with self._authenticating:
            if not self.members.needs_token:
                return
            request = self.members.authentication()
            loop = asyncio.get_running_loop()
            deadline = loop.time() + self._timeout_s
            while True:
                index = self.members.current
                left = min(self.attempt_s, deadline - loop.time())
                try:
                    response = await self._send(index, AUTHENTICATE, request, left, ())
                except grpc.aio.AioRpcError as error:
                    failure = judged(self.config, error)
                    if isinstance(failure, StoreRefusedError):
                        raise failure from error
                    self.members.leave(index)
                    if loop.time() + RETRY_S >= deadline:
                        raise unanswered(self.config, index, reason_of(error)) from error
                    await asyncio.sleep(RETRY_S)
                else:
                    self.members.token = response.token
                    return

    # ---------------------------------------------------------------- errors

    async def _open(self) -> None:
        """Read a key to distinguish a configuration error from an unreachable etcd."""
        try:
            await self.get(f"{self.config.prefix}/leader".encode())
        except RefusedError as error:
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

    def _canceled(self, response: pb.WatchResponse) -> str:
        if response.compact_revision:
            raise CompactedError(
                f"{self.config.place}: revisions below {response.compact_revision} are gone"
            )
        return f"it refuses the watch: {response.cancel_reason}"

    def _unsure(self, index: int, reason: str) -> RendezvousConnectionError:
        why = f"{tried(self.config, index)}: {reason}; the outcome is unknown"
        return RendezvousConnectionError(why)


class LeaseCalls:
    """Separate connections to etcd for the threads that maintain a lease. Its calls block.

    They do not use the event loop, which would send them too late while it responds to thousands of
    nodes. Each call goes to one member, and raises `StoreRefusedError` if it does not respond in
    time. The following call then goes to the next member.
    """

    def __init__(self, config: EtcdConfig) -> None:
        self._config = config
        self._members = Members(config, grpc)

    def close(self) -> None:
        """Close all connections. Calls in progress fail, and no further calls are allowed."""
        for channel in self._members.channels:
            channel.close()

    def keep_alive(self, lease: int, timeout_s: float) -> int:
        """Renew a lease, and return its TTL in seconds, or 0 if it is gone."""
        return self._ask(KEEP_ALIVE, pb.LeaseKeepAliveRequest(ID=lease), timeout_s).TTL

    def get(self, key: bytes, timeout_s: float) -> tuple[KeyValue | None, int]:
        response = self._ask(RANGE, pb.RangeRequest(key=key), timeout_s)
        return first_of(response), response.header.revision

    def _ask(
        self, method: Method[Request, Response], request: Request, timeout_s: float
    ) -> Response:
        index, until_s = self._members.current, time.monotonic() + timeout_s
        try:
            metadata = self._credentials(until_s)
            try:
                return self._send(index, method, request, until_s, metadata)
            except grpc.RpcError as error:
                if not self._members.refuses_token(metadata, reason_of(error)):
                    raise
            return self._send(index, method, request, until_s, self._credentials(until_s))
        except (grpc.RpcError, StopIteration) as error:
            self._members.leave(index)
            ended = "the stream has ended without an answer"
            reason = reason_of(error) if isinstance(error, grpc.RpcError) else ended
            raise unanswered(self._config, index, reason) from error

    def _credentials(self, until_s: float) -> Metadata:
        members = self._members
        if members.needs_token:
            request = members.authentication()
            members.token = self._send(members.current, AUTHENTICATE, request, until_s, ()).token
        return members.metadata

    def _send(
        self,
        index: int,
        method: Method[Request, Response],
        request: Request,
        until_s: float,
        metadata: Metadata,
    ) -> Response:
        ask = self._members.method(index, method)
        left_s = max(until_s - time.monotonic(), 0)
        if not method.streams:
            answer: Response = ask(request, timeout=left_s, metadata=metadata)
            return answer
        stream = ask(iter((request,)), timeout=left_s, metadata=metadata)
        try:
            first: Response = next(stream)
            return first
        finally:
            stream.cancel()


# ------------------------------------------------------------------------------------ the watch


_REQUIRE_LEADER = ("hasleader", "true")
"""Makes a member that is cut off from the others end the stream rather than stop sending silently.
"""

_CUT_OFF = re.compile(r"socket closed|connection reset", re.IGNORECASE)

_TLS_TROUBLE = re.compile(r"ssl|tls|certificate|handshake|hostname", re.IGNORECASE)


async def _within(seconds: float, work: Awaitable[bool]) -> bool:
    """Return the result of `work`, or False if it takes longer than the given time."""
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError:
        return False


async def _watch_requests(
    key: bytes, revision: int, every_s: float, over: asyncio.Event
) -> AsyncIterator[pb.WatchRequest]:
    """Yield the request for a watch, followed by regular progress requests until the watch ends."""
    create = pb.WatchCreateRequest(key=key, start_revision=revision)
    yield pb.WatchRequest(create_request=create)
    while not await _within(every_s, over.wait()):
        yield pb.WatchRequest(progress_request=pb.WatchProgressRequest())
