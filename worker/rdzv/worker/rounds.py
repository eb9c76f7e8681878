"""A round as a worker sees it: its environment, its exceptions, and what its ranks exchange.

Failures of collectives, which a peer may have caused, are distinguished from the script's own.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store


@dataclass(frozen=True)
class Round:
    """A round, as passed to the script's function. Ranks count from 0."""

    number: int
    """The round's number, which never goes back. Under torchrun, it is the restart count."""
    rank: int
    world_size: int
    local_rank: int
    restarts: int
    """The number of restarts that the job has used so far."""
    token: str
    """A unique name for this round that is safe to use in file names.

    Include it in the names of files that are written in the background, so that an earlier round's
    writer cannot damage a newer file.
    """
    kept: bool = False
    """Whether this process took part in the previous round."""
    notice_file: str = ""
    step: int = 0
    """The number of committed steps from which the round continues."""
    source: int = 0
    """The rank whose state the others have received, or are to receive."""

    @property
    def leaving(self) -> bool:
        """Whether this node is leaving (a drain or a preemption). If so, save soon and return."""
        return bool(self.notice_file) and os.path.exists(self.notice_file)  # noqa: PTH110

    @property
    def device(self) -> torch.device:
        """This worker's device: GPU `local_rank` if CUDA is available, otherwise the CPU."""
        import torch

        if torch.cuda.is_available():
            return torch.device("cuda", self.local_rank)
        return torch.device("cpu")


STANDBY = "standby"
"""The value of RANK, RDZV_ROUND and the like in a process that was started without a rank. A
script that reads one as a number fails, so it can never train with a wrong one.
"""
STANDBY_ROUND = -1


def round_of(environ: Mapping[str, str], *, kept: bool = False) -> Round:
    """Read a round from the environment set by rdzvrun or torchrun; the default is one worker.

    >>> found = round_of({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "RDZV_ROUND": "7"})
    >>> found.number, found.rank, found.world_size, found.token
    (7, 3, 4, 'job.round7')
    >>> round_of({}).world_size
    1
    """
    restarts = int(environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    number = int(environ.get("RDZV_ROUND") or restarts)
    run = re.sub(r"[^\w.-]+", "_", environ.get("TORCHELASTIC_RUN_ID", "job"))
    return Round(
        number=number,
        rank=int(environ.get("RANK", "0")),
        world_size=int(environ.get("WORLD_SIZE", "1")),
        local_rank=int(environ.get("LOCAL_RANK", "0")),
        restarts=restarts,
        token=f"{run}.round{number}",
        kept=kept,
        notice_file=environ.get("RDZV_NOTICE_FILE", ""),
    )


class RoundOver(BaseException):
    """The round has ended. The function must exit, and is called again in the next round.

    This is not an `Exception`, so a loop's `except Exception` cannot swallow it. A script may catch
    it to clean up, but must re-raise it.
    """

    def __init__(self, reason: str = "the round is over", *, leaving: bool = False) -> None:
        super().__init__(reason)
        self.leaving = leaving
        """Whether this worker's node is leaving, in which case there is no next round here."""


class WorkerError(RuntimeError):
    """The script uses the library in a way that cannot work; the message gives the remedy."""


class NoRoundError(WorkerError):
    """A call that needs a round was made outside of any round."""


class MismatchError(WorkerError):
    """Ranks differ in the names, shapes or types of their state."""


class CannotBroadcastError(WorkerError):
    """An entry of the state cannot be copied or sent to another rank."""


class StaleGroupError(WorkerError):
    """A process group, or a wrapper around one, was created outside the round that would use it."""


class UnsupportedError(WorkerError):
    """This version of torch, or this form of parallelism, is not supported."""


class NoSourceError(WorkerError):
    """No rank holds the step from which the round should continue."""


class OddReplicaError(WorkerError):
    """This rank's state differs from that of most other ranks; its node leaves the job."""


class ReplicasDifferError(WorkerError):
    """The states of ranks differ, and nothing shows which are right."""


def warn(round_: Round | None, text: str) -> None:
    rank = "" if round_ is None else f"rank {round_.rank}: "
    sys.stderr.write(f"rdzv: {rank}warning: {text}\n")


def exchange(store: Store, round_: Round, name: str, mine: Any) -> list[Any]:
    """Publish this rank's value under a name, and return all ranks' values, ordered by rank.

    Blocks until all ranks have published their values. Values are JSON.
    """
    store.set(f"{name}/{round_.rank}", json.dumps(mine))
    keys = [f"{name}/{rank}" for rank in range(round_.world_size)]
    return [json.loads(one) for one in store.multi_get(keys)]


# ------------------------------------------------------------------ whose failure it is

# Almost every gloo error includes gloo's source file and line, and no other error does; the text
# varies. The last one follows a collective that has timed out.
_GLOO = re.compile(
    r"\bgloo/[\w/]+\.(?:cc|h|cpp):\d+\]|Gloo connectFullMesh failed"
    r"|Application timeout caused pair closure"
)
_NCCL = re.compile(
    r"NCCL communicator was aborted|NCCL error|ncclUnhandledCudaError|ncclSystemError"
    r"|ncclRemoteError|ncclInternalError"
)
# Torch's messages about a group that another thread has aborted.
_NO_GROUP = re.compile(
    r"Default process group has not been initialized|Invalid process group"
    r"|not initialized in the world group map|Group .* is not registered"
)


def is_suspect(error: BaseException) -> bool:
    """Return whether an exception follows from a failed collective, and so possibly from a peer.

    It does if its chain contains any collective's exception. An exception raised by a signal
    handler never does, because it merely happened to arrive during a collective.
    """
    if not isinstance(error, Exception) or raised_by_handler(error):
        return False
    return any(_is_of_collective(one) for one in chain(error))


def follows_from_cut(error: BaseException) -> bool:
    """Return whether an exception results from the cut of this round's collectives."""
    if is_suspect(error):
        return True
    if not isinstance(error, Exception) or raised_by_handler(error):
        return False
    return any(
        isinstance(one, (ValueError, RuntimeError)) and _NO_GROUP.search(str(one))
        for one in chain(error)
    )


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, and every exception that it was raised from or while handling.

    Causes hidden by `raise ... from None` are included.
    """
    left: list[BaseException] = [error]
    seen: set[int] = set()
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        left += [other for other in (one.__cause__, one.__context__) if other is not None]


def raised_by_handler(error: BaseException) -> bool:
    """Return whether the error was raised while a signal handler of this process was running."""
    handlers = set(_handlers())
    return any(code in handlers for code in _codes(error.__traceback__))


def _handlers() -> Iterator[CodeType]:
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        if handler is signal.default_int_handler or not callable(handler):
            continue
        function = getattr(handler, "func", handler)  # functools.partial
        function = getattr(function, "__func__", function)  # a method
        code = getattr(function, "__code__", None)
        if code is None:
            code = getattr(vars(type(function)).get("__call__"), "__code__", None)
        if isinstance(code, CodeType):
            yield code


def _codes(traceback: TracebackType | None) -> Iterator[CodeType]:
    while traceback is not None:
        yield traceback.tb_frame.f_code
        traceback = traceback.tb_next


def _is_of_collective(error: BaseException) -> bool:
    distributed = sys.modules.get("torch.distributed")
    dist_error = getattr(distributed, "DistError", None)
    if dist_error is not None and isinstance(error, dist_error):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    return bool(_GLOO.search(text) or _NCCL.search(text))
