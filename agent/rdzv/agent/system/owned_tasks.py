"""Tasks that outlive the call that started them, and whose errors reach their owner."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

_R = TypeVar("_R")


class OwnedTasks:
    """One owner's tasks. The owner receives each exception at once; `close` ends the tasks.

    Intended for owners whose methods are called from event loop callbacks; a coroutine that waits
    for its tasks should use an `asyncio.TaskGroup`.
    """

    def __init__(self, on_error: Callable[[Exception], None]) -> None:
        self._on_error = on_error
        self._running: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, _R], name: str) -> asyncio.Task[_R]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._note_end)
        return task

    def _note_end(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self._on_error(error)

    async def close(self) -> None:
        running = tuple(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
