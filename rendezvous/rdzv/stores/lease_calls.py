"""The calls to etcd that maintain a lease. They block, so they are made from threads.

`etcd_client` makes all other calls from the event loop. The calls here do not use the loop, because
it would send them too late while it responds to thousands of nodes.
"""

from __future__ import annotations

import time
from typing import Any

import grpc

from rdzv.etcd import etcd_pb2 as pb
from rdzv.stores.etcd_config import EtcdConfig
from rdzv.stores.etcd_errors import reason_of, unanswered
from rdzv.stores.etcd_login import Login
from rdzv.stores.etcd_values import KeyValue
from rdzv.stores.etcd_wire import (
    AUTHENTICATE,
    CHANNEL_OPTIONS,
    KEEP_ALIVE,
    RANGE,
    Metadata,
    Method,
    Request,
    Response,
    authenticate_message,
    first_of,
    tls,
)


class LeaseCalls:
    """Separate connections to etcd for the threads of one process.

    Each call goes to one member, and raises `StoreRefusedError` if it does not respond in time. The
    following call then goes to the next member.
    """

    def __init__(self, config: EtcdConfig) -> None:
        self._config = config
        credentials = tls(config)
        self._channels = tuple(
            grpc.insecure_channel(endpoint.target, options=CHANNEL_OPTIONS)
            if credentials is None
            else grpc.secure_channel(endpoint.target, credentials, options=CHANNEL_OPTIONS)
            for endpoint in config.endpoints
        )
        self._current = 0
        self._login = Login(config)

    def close(self) -> None:
        """Close all connections. Calls in progress fail, and no further calls are allowed."""
        for channel in self._channels:
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
        index, until_s = self._current, time.monotonic() + timeout_s
        try:
            metadata = self._credentials(until_s)
            try:
                return self._send(index, method, request, until_s, metadata)
            except grpc.RpcError as error:
                if not self._login.refused(metadata, reason_of(error)):
                    raise
            return self._send(index, method, request, until_s, self._credentials(until_s))
        except (grpc.RpcError, StopIteration) as error:
            # Another thread may already have moved on.
            if self._current == index:
                self._current = (index + 1) % len(self._channels)
            ended = "the stream has ended without an answer"
            reason = reason_of(error) if isinstance(error, grpc.RpcError) else ended
            raise unanswered(self._config, index, reason) from error

    def _credentials(self, until_s: float) -> Metadata:
        if self._login.needed:
            request = authenticate_message(self._config)
            self._login.token = self._send(self._current, AUTHENTICATE, request, until_s, ()).token
        return self._login.metadata

    def _send(
        self,
        index: int,
        method: Method[Request, Response],
        request: Request,
        until_s: float,
        metadata: Metadata,
    ) -> Response:
        channel = self._channels[index]
        make: Any = channel.stream_stream if method.streams else channel.unary_unary
        ask = make(
            method.path,
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.response.FromString,
        )
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
