"""Virtual time, and event loops in it: one for each simulated process that runs real asyncio code.

`Agenda` is the only clock. A `Process` is an event loop whose timers are entries of the agenda;
ready callbacks run at once, in asyncio's own order, so that a history follows from its seed. A
process can be paused, as by SIGSTOP: then nothing in it runs, and timers due meanwhile are late. If
it is killed, nothing in it ever runs again, wherever it was.
"""

from __future__ import annotations

import asyncio
import heapq
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar

from rdzv.runtime.clock import Timer

T = TypeVar("T")


class Agenda:
    """The future callbacks in the order of their times; those of one time in order of arrival."""

    def __init__(self) -> None:
        self.now_ms = 0
        self._entries: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0

    def after(self, in_ms: int, do: Callable[[], None]) -> None:
        """Do something `in_ms` from now."""
        self._count += 1
        heapq.heappush(self._entries, (self.now_ms + in_ms, self._count, do))

    def run(self, until_ms: int, check: Callable[[], None]) -> None:
        """Run everything due until then, in order; `check` may raise after each callback."""
        entries, pop = self._entries, heapq.heappop
        while entries and entries[0][0] <= until_ms:
            self.now_ms, _, do = pop(entries)
            do()
            check()
        self.now_ms = until_ms


class Call:
    """A callback of a process that can be cancelled."""

    __slots__ = ("callback", "due_ms", "process")

    def __init__(self, process: Process, due_ms: int, callback: Callable[[], None]) -> None:
        self.process = process
        self.due_ms = due_ms
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None

    def fire(self) -> None:
        process = self.process
        if self.callback is None or not process.alive:
            return
        if process.paused:
            process.hold(self)
        else:
            process.enter(self.callback)


class Looks(Timer):
    """The timer of a `LoopWatch`, which checks all the time, but finds only pauses.

    So only the check that a pause has delayed is simulated; of the others only the time is known.
    """

    def __init__(self, process: Process, every_ms: int, look: Callable[[int], None]) -> None:
        super().__init__(process, look)
        self._process = process
        self._every_ms = every_ms
        self._is_late = False
        """Whether a check delayed by a pause is still to come."""

    @property
    def due_ms(self) -> int | None:
        if self._due_ms is not None and not self._process.paused and not self._is_late:
            passed_ms = self._process.now_ms() - self._due_ms
            if passed_ms >= 0:
                self._due_ms += (passed_ms // self._every_ms + 1) * self._every_ms
        return self._due_ms

    def arm(self, at_ms: int | None) -> None:
        self._due_ms, self._is_late = at_ms, False

    def late(self) -> Call | None:
        """Return the check that was due in the pause that is now over, if any was."""
        if self._due_ms is None or self._due_ms > self._process.now_ms():
            return None
        self._is_late = True
        return Call(self._process, self._due_ms - self._process.offset_ms, self._fire)


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
        self.looks: Looks | None = None
        self.on_error: Callable[[BaseException], None] = _raise
        """Receives errors of tasks, which would have ended the process."""

    # -------------------------------------------------------------- as a clock

    def now_ms(self) -> int:
        return self._agenda.now_ms + self.offset_ms

    def call_at(self, at_ms: float, callback: Callable[[], None]) -> Call:  # type: ignore[override]
        """Call back at `at_ms` by this machine's clock; late if the process is paused then."""
        due_ms = int(at_ms) - self.offset_ms
        call = Call(self, due_ms, callback)
        self._agenda.after(max(due_ms - self._agenda.now_ms, 0), call.fire)
        return call

    def hold(self, call: Call) -> None:
        """Keep a callback that was due while this process was paused."""
        heapq.heappush(self._held, (call.due_ms, len(self._held), call))

    # -------------------------------------------------------------- life

    def enter(self, callback: Callable[..., Any], *args: Any) -> None:
        """Run a callback in this process, and then everything that it made ready."""
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
        if self.looks is not None:
            _ = self.looks.due_ms
        self.paused = True

    def resume(self) -> None:
        """Continue: overdue timers fire first, the earliest of them before the others."""
        if self.looks is not None and (late := self.looks.late()) is not None:
            self.hold(late)
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
        # A killed process leaves tasks behind.
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        task.add_done_callback(self._note_error)
        return task

    def _note_error(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.on_error(error)

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> None:
        # Callbacks in a process that is dead, or being taken apart, do not matter.
        if self.alive:
            self._ready.append((callback, args))

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Log nothing: errors of tasks are recorded."""
