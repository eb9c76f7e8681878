"""Virtual time, and event loops in it: one for each simulated process that runs real asyncio code.

`Agenda` is the only clock. A `Process` is an event loop whose timers are entries of the agenda;
what is ready runs at once, in asyncio's own order, so that a history follows from its seed. A
process can be paused, as by SIGSTOP: then nothing of it runs, and what fell due meanwhile is late.
It can be killed: then nothing of it ever runs again, wherever it was.
"""

from __future__ import annotations

import asyncio
import heapq
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar

T = TypeVar("T")


class Agenda:
    """What is to happen, in the order of its time; what is due at once, in the order it came."""

    def __init__(self) -> None:
        self.now_ms = 0
        self._entries: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0

    def after(self, in_ms: int, do: Callable[[], None]) -> None:
        """Do something `in_ms` from now."""
        self._count += 1
        heapq.heappush(self._entries, (self.now_ms + in_ms, self._count, do))

    def step(self, until_ms: int) -> bool:
        """Do the next thing that is due; where nothing is until then, let time pass, say False."""
        if self._entries and self._entries[0][0] <= until_ms:
            self.now_ms, _, do = heapq.heappop(self._entries)
            do()
            return True
        self.now_ms = until_ms
        return False


class Call:
    """A callback that can be taken back."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


def _raise(error: BaseException) -> None:
    raise error


class Process(asyncio.AbstractEventLoop):
    """One simulated process: an event loop, and the clock of its machine."""

    def __init__(self, agenda: Agenda, clock_offset_ms: int = 0) -> None:
        self._agenda = agenda
        self.offset_ms = clock_offset_ms
        self._ready: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()
        self._held: list[tuple[int, int, Call]] = []
        self._running = False
        self.name = ""
        self.paused = False
        self.resumed_ms = 0
        """When the last pause was over, by this machine's clock."""
        self.alive = True
        self.on_error: Callable[[BaseException], None] = _raise
        """Hears what a task raises, which would have ended the process."""

    # -------------------------------------------------------------- as a clock

    def now_ms(self) -> int:
        return self._agenda.now_ms + self.offset_ms

    def call_at(self, at_ms: float, callback: Callable[[], None]) -> Call:  # type: ignore[override]
        """Call back at `at_ms` by this machine's clock; late if the process is paused then."""
        call = Call(callback)
        due_ms = int(at_ms) - self.offset_ms

        def fire() -> None:
            if call.callback is None or not self.alive:
                return
            if self.paused:
                heapq.heappush(self._held, (due_ms, len(self._held), call))
            else:
                self.enter(call.callback)

        self._agenda.after(max(due_ms - self._agenda.now_ms, 0), fire)
        return call

    # -------------------------------------------------------------- life

    def enter(self, callback: Callable[..., Any], *args: Any) -> None:
        """Run something in this process, and then all that it has made ready."""
        if not self.alive:
            return
        self._ready.append((callback, args))
        if self._running or self.paused:
            return
        self._running = True
        events._set_running_loop(self)
        ready = self._ready
        try:
            while ready and self.alive:
                callback, args = ready.popleft()
                callback(*args)
        finally:
            self._running = False
            events._set_running_loop(None)

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        """Go on: timers that are late fire first, the earliest of them before the others."""
        self.paused, self.resumed_ms = False, self.now_ms()
        while self._held and self.alive:
            _, _, call = heapq.heappop(self._held)
            if call.callback is not None:
                self.enter(call.callback)
        self.enter(lambda: None)

    def kill(self) -> None:
        """Stop for ever, at whatever point its tasks are."""
        self.alive = False
        self._ready.clear()
        self._held.clear()

    # -------------------------------------------------------------- as an event loop

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return False

    def time(self) -> float:
        return self._agenda.now_ms / 1000

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, T], *, name: object = None, context: object = None
    ) -> asyncio.Task[T]:
        task = asyncio.Task(coro, loop=self)
        task.add_done_callback(self._note_error)
        return task

    def _note_error(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.on_error(error)

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> None:
        # What becomes ready in a process that is dead, or being taken apart, is nobody's concern.
        if self.alive:
            self._ready.append((callback, args))

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Say nothing: errors of tasks are noted, and a killed process leaves tasks behind."""
