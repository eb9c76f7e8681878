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
    """The base class of all errors that cross a module boundary.

    A class with a `status` is sent to callers under its own name; others are sent as their base.
    """

    code: ClassVar[str] = "RendezvousError"
    grpc_status: ClassVar[str] = "INTERNAL"
    definite: ClassVar[bool] = True

    def __init_subclass__(cls, status: str = "", definite: bool = True) -> None:
        if status:
            cls.code, cls.grpc_status, cls.definite = cls.__name__, status, definite
            ERRORS[cls.code] = cls


ERRORS: dict[str, type[RendezvousError]] = {RendezvousError.code: RendezvousError}


class InvalidRequestError(RendezvousError, status="INVALID_ARGUMENT"):
    """The request is invalid because of a bug or a bad configuration. The caller stops."""


class SettingsMismatchError(RendezvousError, status="FAILED_PRECONDITION"):
    """Nodes of one job were launched with different settings. The caller stops."""


class RendezvousClosedError(RendezvousError, status="FAILED_PRECONDITION"):
    """The run has ended and forms no more rounds. The caller stops cleanly."""


class JobExistsError(RendezvousError, status="ALREADY_EXISTS"):
    """A job with this name has not ended. The caller chooses another name or waits."""


class NodeSupersededError(RendezvousError, status="FAILED_PRECONDITION"):
    """Another instance has taken over this node_id. The caller stops its workers and exits."""


class UnknownNodeError(RendezvousError, status="NOT_FOUND"):
    """The server does not know this node. The caller sends Hello again; its workers continue."""


class UnknownJobError(RendezvousError, status="NOT_FOUND"):
    """The server knows no job with this name. The caller corrects the name."""


class UnknownTokenError(RendezvousError, status="NOT_FOUND"):
    """The server has no such token. The caller corrects the id or the name."""


class UnauthenticatedError(RendezvousError, status="UNAUTHENTICATED"):
    """The caller has not proven its identity.

    It stops, because it needs a valid certificate or token.
    """


class DeniedError(RendezvousError, status="PERMISSION_DENIED"):
    """The caller is known, but its role does not allow the request. The caller stops."""


class UnreachableNodeError(RendezvousError, status="ABORTED"):
    """A node could not reach another, or not tell itself from it. The caller retries later."""


class LimitExceededError(RendezvousError, status="RESOURCE_EXHAUSTED"):
    """The request exceeds one of the server's limits. The caller backs off."""


class TooFewNodesError(RendezvousError, status="FAILED_PRECONDITION"):
    """A job would be left with too few nodes. The caller waits and asks again."""


class RendezvousConnectionError(RendezvousError, status="UNAVAILABLE", definite=False):
    """The network or the store failed, and the request may or may not have taken effect.

    The caller sends the same request again.
    """


class StoreRefusedError(RendezvousConnectionError, status="UNAVAILABLE"):
    """The server's store failed before writing anything. The caller sends the request again."""


class RunStoppingError(RendezvousConnectionError, status="UNAVAILABLE"):
    """A run is being stopped, and the next one cannot begin yet. The caller retries soon."""


class NotLeaderError(RendezvousConnectionError, status="UNAVAILABLE"):
    """This server is standing by and has changed nothing. The caller asks the leader."""

    def __init__(self, message: str, leader: str = "") -> None:
        super().__init__(message)
        self.leader = leader


class RendezvousStateError(RendezvousError, status="DATA_LOSS"):
    """Stored state cannot be read. The server stops, and an operator must intervene."""


class RendezvousTimeoutError(RendezvousError, status="DEADLINE_EXCEEDED", definite=False):
    """One of the caller's own deadlines has passed. This error is never sent over the wire."""


class InvariantError(RendezvousError, status="INTERNAL"):
    """A transition would break an invariant, which is a bug in rdzv. Nothing was persisted."""


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
