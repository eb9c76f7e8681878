"""Small extensions of asyncio's task groups, and tasks that outlive their callers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
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


class OwnedTasks:
    """One owner's tasks. The owner receives each exception at once; `close` ends the tasks.

    Intended for owners whose methods are called from event loop callbacks; a coroutine that waits
    for its tasks should use an `asyncio.TaskGroup`.
    """

    def __init__(self, on_error: Callable[[Exception], None]) -> None:
        self._on_error = on_error
        self._running: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
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
