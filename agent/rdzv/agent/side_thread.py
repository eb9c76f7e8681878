"""Calls that may hang, as those to a file server do, in threads that nobody waits for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


async def in_thread(function: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
    """Call a function in a thread of its own, and return what it returns.

    Whoever is cancelled meanwhile leaves the thread behind; it does not keep the process from
    exiting, as one of `asyncio.to_thread` would.
    """
    future: Future[_R] = Future()

    def call() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = function(*args, **kwargs)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=call, name=function.__name__, daemon=True).start()
    return await asyncio.wrap_future(future)
