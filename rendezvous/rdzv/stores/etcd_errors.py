"""Errors from calls to etcd: which of them are refusals, and how an operator can fix them."""

from __future__ import annotations

from typing import cast

import grpc
import grpc.aio

from rdzv.errors import StoreRefusedError
from rdzv.stores.etcd_config import EtcdConfig

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


class RefusedError(StoreRefusedError):
    """etcd responded and refused the call."""

    def __init__(self, text: str, status: grpc.StatusCode, said: str) -> None:
        super().__init__(text)
        self.status = status
        self.said = said


class CompactedError(StoreRefusedError):
    """The revisions requested by a watch are gone; read the key again and watch from there."""


def judged(config: EtcdConfig, error: grpc.aio.AioRpcError) -> Exception:
    """Return a refusal by etcd as a `RefusedError`, and any other error unchanged."""
    said = error.details() or ""
    by_etcd = said.startswith("etcdserver: ") or error.code() is grpc.StatusCode.UNIMPLEMENTED
    if by_etcd and error.code() in _DEFINITE:
        return RefusedError(f"{config.place}: {said}; nothing was written", error.code(), said)
    return error


def mistake(config: EtcdConfig, error: RefusedError) -> str:
    """Describe which part of the configuration etcd refused."""
    said = error.said
    if "authentication failed" in said:
        return (
            f"{config.place}: user {config.user!r} or its password is refused; give those of "
            "an etcd user (etcdctl user list)"
        )
    if "authentication is not enabled" in said:
        return (
            f"{config.place}: user {config.user!r} cannot be checked: authentication is not "
            "enabled there; leave out user and password, or enable it (etcdctl auth enable)"
        )
    # If the client has a certificate, etcd reports that a user without a name has no access.
    if "user name is empty" in said or ("permission denied" in said and not config.user):
        return f"{config.place}: a user is asked for and none is given; give user and password"
    if "permission denied" in said:
        return (
            f"{config.place}: user {config.user!r} may not read it; give its role "
            f"`readwrite --prefix {config.prefix}/` (etcdctl role grant-permission)"
        )
    if error.status is grpc.StatusCode.UNIMPLEMENTED:
        return f"{config.place}: what listens there is no etcd v3; check the endpoints"
    return f"{config.place}: {said}"


def is_silence(error: grpc.RpcError) -> bool:
    """Return whether a call ended without a response in time."""
    return _call(error).code() is grpc.StatusCode.DEADLINE_EXCEEDED


def reason_of(error: grpc.RpcError) -> str:
    """Describe in one line why a call failed."""
    if is_silence(error):
        return "no answer in time"
    call = _call(error)
    return " ".join((call.details() or call.code().name).split())


def _call(error: grpc.RpcError) -> grpc.Call:
    # The errors of both blocking and asynchronous calls have a status and details.
    return cast("grpc.Call", error)


def unanswered(config: EtcdConfig, index: int, reason: str) -> StoreRefusedError:
    """Return the error for a call that got no response and has changed nothing."""
    return StoreRefusedError(
        f"{tried(config, index)}: {reason}; nothing was written. See that etcd runs there and "
        "has a majority of its members"
    )


def tried(config: EtcdConfig, index: int) -> str:
    """Describe that the last endpoint tried does not answer, and how many others exist."""
    others = len(config.endpoints) - 1
    more = f" (and {others} more)" if others else ""
    return f"etcd at {config.endpoints[index]}{more} does not answer"
