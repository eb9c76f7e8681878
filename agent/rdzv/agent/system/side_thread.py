"""Makes calls that may hang, such as those to a file server, in threads with a bounded wait."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

log = logging.getLogger("rdzv.agent")

_P = ParamSpec("_P")
_R = TypeVar("_R")

ANSWER_WITHIN_S = 300.0
"""How long a file server may take to return files that a job needs to start; after that, the job
starts without this node. An NFS server does not respond for a minute and a half after a restart.
"""

LOG_WAIT_AFTER_S = 10.0
"""The time after which the log says what the agent is waiting for."""


async def in_thread(function: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
    """Call a function in its own thread, and return its result.

    A caller that is cancelled in the meantime leaves the thread behind. The thread does not keep
    the process from exiting, as a thread of `asyncio.to_thread` would.
    """
    call = partial(function, *args, **kwargs)
    return await asyncio.wrap_future(_begin(call, function.__name__))


async def in_time(
    within_s: float, function: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs
) -> _R:
    """Call a function as `in_thread` does, but wait at most `within_s`.

    Raises `TimeoutError` if the function has not returned in time; its thread is left behind.
    """
    call = partial(function, *args, **kwargs)
    return await _within(within_s, asyncio.wrap_future(_begin(call, function.__name__)))


@contextlib.contextmanager
def log_long_wait(what: str) -> Iterator[None]:
    """If the body takes long, log `what` it is waiting for; log nothing if `what` is empty."""
    text = "%s: the file system has not responded for %g s; still waiting"
    loop = asyncio.get_running_loop()
    timer = loop.call_later(LOG_WAIT_AFTER_S, log.warning, text, what, LOG_WAIT_AFTER_S)
    if not what:
        timer.cancel()
    try:
        yield
    finally:
        timer.cancel()


def no_answer(within_s: float) -> TimeoutError:
    return TimeoutError(f"no answer within {within_s:g} s from its file system")


def find_program(name: str) -> str:
    """Return a program's path. May hang.

    Raises `OSError` if it does not exist, or cannot be executed.
    """
    if (path := shutil.which(name)) is not None:
        return path
    code = errno.EACCES if Path(name).exists() else errno.ENOENT
    raise OSError(code, os.strerror(code), name)


class Aside:
    """Calls of one kind, each made in a thread for a limited time.

    While a call that exceeded its limit has not returned, other calls fail at once. So threads do
    not pile up, and a job with many files on a hanging server waits for the server only once.
    """

    def __init__(self, within_s: float, what: str = "") -> None:
        """Limit each call to `within_s`; if `what` is given, name it in the log on a long wait."""
        self._within_s = within_s
        self._what = what
        self._running: dict[Future[Any], float] = {}
        """The calls that have not returned, and when each exceeds its limit."""

    async def answer(self, function: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Call a function, and return its result.

        A cancelled caller leaves the thread behind, which may still exceed its limit. Raises
        `TimeoutError` if the call, or an earlier one, has not returned in time.
        """
        now_s, running = asyncio.get_running_loop().time(), self._running
        self._running = running = {call: at_s for call, at_s in running.items() if not call.done()}
        if any(at_s <= now_s for at_s in running.values()):
            raise no_answer(self._within_s)
        future = _begin(partial(function, *args, **kwargs), "aside")
        running[future] = now_s + self._within_s
        with log_long_wait(self._what):
            return await _within(self._within_s, asyncio.wrap_future(future))


def _begin(call: Callable[[], _R], name: str) -> Future[_R]:
    future: Future[_R] = Future()
    threading.Thread(target=settle, args=(future, call), name=name, daemon=True).start()
    return future


async def _within(within_s: float, answer: asyncio.Future[_R]) -> _R:
    try:
        async with asyncio.timeout(within_s):
            return await answer
    except TimeoutError as error:
        # The function itself may raise a TimeoutError when a file server gives up.
        raise error if error.args else no_answer(within_s) from None


def settle(future: Future[_R], call: Callable[[], _R]) -> None:
    """Call a function, and set its result or exception on a future unless that is cancelled."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
