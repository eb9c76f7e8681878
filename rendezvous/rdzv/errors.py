"""The error table: what can go wrong between a node, an operator and the server.

It answers two questions for each error: *is it definite* (certainly, nothing has happened), and
*what should the caller do*. The server turns an error into its gRPC status and puts its code into
the trailing metadata; the client turns it back, so nobody parses a message.

The names used by `torch.distributed.elastic.rendezvous.api` are kept.
"""

from __future__ import annotations

from typing import ClassVar

ERROR_CODE_METADATA_KEY = "rdzv-error"
"""Trailing metadata key under which an error's code travels."""

LEADER_METADATA_KEY = "rdzv-leader"
"""Trailing metadata key in which a stand-by names the leader: HOST:PORT."""


class RendezvousError(Exception):
    """Base of all errors that cross a module boundary here."""

    code: ClassVar[str] = "RendezvousError"
    grpc_status: ClassVar[str] = "INTERNAL"
    definite: ClassVar[bool] = True


class InvalidRequestError(RendezvousError):
    """The request is invalid: a bug or a bad configuration. The caller stops."""

    code = "InvalidRequestError"
    grpc_status = "INVALID_ARGUMENT"


class SettingsMismatchError(RendezvousError):
    """Nodes of one job were launched with different settings. The caller stops."""

    code = "SettingsMismatchError"
    grpc_status = "FAILED_PRECONDITION"


class RendezvousClosedError(RendezvousError):
    """The run has ended and forms no more rounds. The caller stops, cleanly."""

    code = "RendezvousClosedError"
    grpc_status = "FAILED_PRECONDITION"


class JobExistsError(RendezvousError):
    """A job of this name has not ended. The caller chooses another, or waits."""

    code = "JobExistsError"
    grpc_status = "ALREADY_EXISTS"


class NodeSupersededError(RendezvousError):
    """Another instance has taken over this node_id. The caller stops its workers and exits."""

    code = "NodeSupersededError"
    grpc_status = "FAILED_PRECONDITION"


class UnknownNodeError(RendezvousError):
    """The server does not know this node. The caller sends Hello again; its workers continue."""

    code = "UnknownNodeError"
    grpc_status = "NOT_FOUND"


class UnknownJobError(RendezvousError):
    """The server knows no job of this name. The caller corrects it."""

    code = "UnknownJobError"
    grpc_status = "NOT_FOUND"


class UnknownTokenError(RendezvousError):
    """The server has no such token. The caller corrects it."""

    code = "UnknownTokenError"
    grpc_status = "NOT_FOUND"


class StaleRoundError(RendezvousError):
    """The request is about a round that is over. The caller receives the present one."""

    code = "StaleRoundError"
    grpc_status = "ABORTED"


class UnauthenticatedError(RendezvousError):
    """The caller's identity is not proven. It stops; a valid certificate or token is needed."""

    code = "UnauthenticatedError"
    grpc_status = "UNAUTHENTICATED"


class DeniedError(RendezvousError):
    """The server knows the caller, whose role does not allow this. The caller stops."""

    code = "DeniedError"
    grpc_status = "PERMISSION_DENIED"


class LimitExceededError(RendezvousError):
    """A limit of the server is reached. The caller backs off."""

    code = "LimitExceededError"
    grpc_status = "RESOURCE_EXHAUSTED"


class TooFewNodesError(RendezvousError):
    """A job would be left with too few nodes. The caller waits and asks again."""

    code = "TooFewNodesError"
    grpc_status = "FAILED_PRECONDITION"


class RendezvousConnectionError(RendezvousError):
    """The network or the store has failed, and the request may or may not have taken effect.

    The caller sends the same request again.
    """

    code = "RendezvousConnectionError"
    grpc_status = "UNAVAILABLE"
    definite = False


class RunStoppingError(RendezvousConnectionError):
    """A run is being stopped, and the next cannot begin yet. The caller asks again soon."""

    code = "RunStoppingError"
    definite = True


class NotLeaderError(RendezvousConnectionError):
    """This server stands by and has changed nothing. The caller asks the leader."""

    code = "NotLeaderError"
    definite = True

    def __init__(self, message: str, leader: str = "") -> None:
        super().__init__(message)
        self.leader = leader
        """The leader's address, HOST:PORT; empty if no leader is known."""


class RendezvousStateError(RendezvousError):
    """Stored state cannot be read. The server stops; an operator is needed."""

    code = "RendezvousStateError"
    grpc_status = "DATA_LOSS"


class RendezvousTimeoutError(RendezvousError):
    """A deadline of the caller's own has passed; never sent over the wire."""

    code = "RendezvousTimeoutError"
    grpc_status = "DEADLINE_EXCEEDED"
    definite = False


class InvariantError(RendezvousError):
    """A transition would break an invariant: a bug of ours. Nothing was persisted."""

    code = "InvariantError"
    grpc_status = "INTERNAL"


def _table(*errors: type[RendezvousError]) -> dict[str, type[RendezvousError]]:
    return {error.code: error for error in errors}


ERRORS = _table(
    InvalidRequestError,
    SettingsMismatchError,
    RendezvousClosedError,
    JobExistsError,
    NodeSupersededError,
    UnknownNodeError,
    UnknownJobError,
    UnknownTokenError,
    StaleRoundError,
    UnauthenticatedError,
    DeniedError,
    LimitExceededError,
    TooFewNodesError,
    RendezvousConnectionError,
    NotLeaderError,
    RunStoppingError,
    RendezvousStateError,
    RendezvousTimeoutError,
    InvariantError,
    RendezvousError,
)
"""Every error class by its code."""


SHOWN_CHARS = 80


def short(value: str) -> str:
    """Cut a value of any length to the part that an error shows.

    >>> short("night"), len(short("x" * 10_000)), short("x" * 10_000)[-5:]
    ('night', 80, 'xx...')
    """
    return value if len(value) <= SHOWN_CHARS else f"{value[: SHOWN_CHARS - 3]}..."
