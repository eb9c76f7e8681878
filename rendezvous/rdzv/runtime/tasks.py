"""Small extensions of asyncio's task groups."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


@contextmanager
def single_error() -> Iterator[None]:
    """Raise a single error as itself if a task group in the body fails with only that error."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        if error is group:
            raise
        raise error from error.__cause__


@asynccontextmanager
async def beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `work` alongside the body. An error in either cancels the other and is raised."""
    with single_error():
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(work)
            try:
                yield
            finally:
                task.cancel()


class Tasks:
    """The tasks of one driver, in its task group, which outlive the calls that started them.

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
