"""Calls that may hang, as those to a file server do, in threads that nobody waits for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


async def in_thread(function: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
    """Call a function in a thread of its own, and return what it returns.

    Whoever is cancelled meanwhile leaves the thread behind; it does not keep the process from
    exiting, as one of `asyncio.to_thread` would.
    """
    future: Future[_R] = Future()
    call = partial(function, *args, **kwargs)
    name = function.__name__
    threading.Thread(target=settle, args=(future, call), name=name, daemon=True).start()
    return await asyncio.wrap_future(future)


def settle(future: Future[_R], call: Callable[[], _R]) -> None:
    """Call a function, and give a future what it returns or raises; nothing if it is cancelled."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
