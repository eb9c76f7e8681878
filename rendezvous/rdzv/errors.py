"""The error table: what can go wrong between a node, an operator and the server.

It answers two questions for each error: *is it definite* (certainly nothing has happened), and
*what should the caller do*. The server maps an error to its gRPC status and puts its code into the
trailing metadata, from which the client restores it, so messages need not be parsed.

Errors have the same names as in `torch.distributed.elastic.rendezvous.api`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

ERROR_CODE_METADATA_KEY = "rdzv-error"
"""The trailing metadata key for an error's code."""

LEADER_METADATA_KEY = "rdzv-leader"
"""The trailing metadata key with which a stand-by server names the leader, as HOST:PORT."""


class RendezvousError(Exception):
    """The base class of all errors that cross a module boundary."""

    code: ClassVar[str] = "RendezvousError"
    grpc_status: ClassVar[str] = "INTERNAL"
    definite: ClassVar[bool] = True


class InvalidRequestError(RendezvousError):
    """The request is invalid because of a bug or a bad configuration. The caller stops."""

    code = "InvalidRequestError"
    grpc_status = "INVALID_ARGUMENT"


class SettingsMismatchError(RendezvousError):
    """Nodes of one job were launched with different settings. The caller stops."""

    code = "SettingsMismatchError"
    grpc_status = "FAILED_PRECONDITION"


class RendezvousClosedError(RendezvousError):
    """The run has ended and forms no more rounds. The caller stops cleanly."""

    code = "RendezvousClosedError"
    grpc_status = "FAILED_PRECONDITION"


class JobExistsError(RendezvousError):
    """A job with this name has not ended. The caller chooses another name or waits."""

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
    """The server knows no job with this name. The caller corrects the name."""

    code = "UnknownJobError"
    grpc_status = "NOT_FOUND"


class UnknownTokenError(RendezvousError):
    """The server has no such token. The caller corrects the id or the name."""

    code = "UnknownTokenError"
    grpc_status = "NOT_FOUND"


class StaleRoundError(RendezvousError):
    """The request is about a round that has ended. The caller gets the current round."""

    code = "StaleRoundError"
    grpc_status = "ABORTED"


class UnauthenticatedError(RendezvousError):
    """The caller has not proven its identity.

    It stops, because it needs a valid certificate or token.
    """

    code = "UnauthenticatedError"
    grpc_status = "UNAUTHENTICATED"


class DeniedError(RendezvousError):
    """The caller is known, but its role does not allow the request. The caller stops."""

    code = "DeniedError"
    grpc_status = "PERMISSION_DENIED"


class UnreachableNodeError(RendezvousError):
    """A node could not reach another, or not tell itself from it. The caller retries later."""

    code = "UnreachableNodeError"
    grpc_status = "ABORTED"


class LimitExceededError(RendezvousError):
    """The request exceeds one of the server's limits. The caller backs off."""

    code = "LimitExceededError"
    grpc_status = "RESOURCE_EXHAUSTED"


class TooFewNodesError(RendezvousError):
    """A job would be left with too few nodes. The caller waits and asks again."""

    code = "TooFewNodesError"
    grpc_status = "FAILED_PRECONDITION"


class RendezvousConnectionError(RendezvousError):
    """The network or the store failed, and the request may or may not have taken effect.

    The caller sends the same request again.
    """

    code = "RendezvousConnectionError"
    grpc_status = "UNAVAILABLE"
    definite = False


class StoreRefusedError(RendezvousConnectionError):
    """The server's store failed before writing anything. The caller sends the request again."""

    code = "StoreRefusedError"
    definite = True


class RunStoppingError(RendezvousConnectionError):
    """A run is being stopped, and the next one cannot begin yet. The caller retries soon."""

    code = "RunStoppingError"
    definite = True


class NotLeaderError(RendezvousConnectionError):
    """This server is standing by and has changed nothing. The caller asks the leader."""

    code = "NotLeaderError"
    definite = True

    def __init__(self, message: str, leader: str = "") -> None:
        super().__init__(message)
        self.leader = leader
        """The leader's address as HOST:PORT, or empty if no leader is known."""


class RendezvousStateError(RendezvousError):
    """Stored state cannot be read. The server stops, and an operator must intervene."""

    code = "RendezvousStateError"
    grpc_status = "DATA_LOSS"


class RendezvousTimeoutError(RendezvousError):
    """One of the caller's own deadlines has passed. This error is never sent over the wire."""

    code = "RendezvousTimeoutError"
    grpc_status = "DEADLINE_EXCEEDED"
    definite = False


class InvariantError(RendezvousError):
    """A transition would break an invariant, which is a bug in rdzv. Nothing was persisted."""

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
    UnreachableNodeError,
    LimitExceededError,
    TooFewNodesError,
    RendezvousConnectionError,
    NotLeaderError,
    RunStoppingError,
    StoreRefusedError,
    RendezvousStateError,
    RendezvousTimeoutError,
    InvariantError,
    RendezvousError,
)
"""All error classes, by code."""


SHOWN_CHARS = 80


def short(value: str) -> str:
    """Shorten a value of any length for an error message.

    >>> short("night"), len(short("x" * 10_000)), short("x" * 10_000)[-5:]
    ('night', 80, 'xx...')
    """
    return value if len(value) <= SHOWN_CHARS else f"{value[: SHOWN_CHARS - 3]}..."


_SIMILAR = 0.65
"""From which likeness, between 0 and 1, a known name is suggested."""


def did_you_mean(word: str, known: Iterable[str], otherwise: str) -> str:
    """Return the remedy for an unknown name: the known one most like it, or else `otherwise`.

    The last parts of dotted names are compared, too; the dashes of flags are not.

    >>> did_you_mean("staus", ["status", "stop"], "rdzvctl --help lists all")
    'did you mean `status`?'
    >>> did_you_mean("cert", ["tls.cert"], ""), did_you_mean("--limit", ["--timeout"], "see --help")
    ('did you mean `tls.cert`?', 'see --help')
    """
    from difflib import SequenceMatcher

    def likeness(name: str) -> float:
        parts = [(each.lstrip("-"), each.rpartition(".")[2].lstrip("-")) for each in (word, name)]
        whole, last = (SequenceMatcher(None, *pair).ratio() for pair in zip(*parts, strict=True))
        return max(whole, 0.95 * last)

    word = word[:SHOWN_CHARS]
    nearest = max(sorted(known), key=likeness, default="")
    return f"did you mean `{nearest}`?" if likeness(nearest) >= _SIMILAR else otherwise
