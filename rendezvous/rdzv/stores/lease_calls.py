"""The calls to etcd that maintain a lease. They block, so they are made from threads.

`etcd_client` makes all other calls from the event loop. The calls here do not use the loop, because
it would send them too late while it responds to thousands of nodes.
"""

from __future__ import annotations

import time

import grpc

from rdzv.etcd import etcd_pb2 as pb
from rdzv.stores.etcd_config import EtcdConfig
from rdzv.stores.etcd_errors import reason_of, unanswered
from rdzv.stores.etcd_wire import (
    AUTHENTICATE,
    KEEP_ALIVE,
    RANGE,
    KeyValue,
    Members,
    Metadata,
    Method,
    Request,
    Response,
    first_of,
)


class LeaseCalls:
    """Separate connections to etcd for the threads of one process.

    Each call goes to one member, and raises `StoreRefusedError` if it does not respond in time. The
    following call then goes to the next member.
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
