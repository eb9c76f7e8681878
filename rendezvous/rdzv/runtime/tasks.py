"""Tasks that outlive the call that started them but still have a parent."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Tasks:
    """The tasks of one driver, in its task group.

    They must not raise, as an error ends the server.
    """

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self._running: set[asyncio.Future[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start `work`, which continues even if the caller is cancelled."""
        task = self._group.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    @property
    def running(self) -> int:
        return len(self._running)

    async def finish(self, within_ms: int) -> None:
        """Wait up to `within_ms` for running tasks, and then cancel the rest."""
        if self._running:
            await asyncio.wait(self._running, timeout=within_ms / 1000)
        for task in self._running:
            task.cancel()
