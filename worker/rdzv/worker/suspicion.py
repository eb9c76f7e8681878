"""Distinguishes failures of collectives, which a peer may have caused, from the script's own."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Iterator
from types import CodeType, TracebackType

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
