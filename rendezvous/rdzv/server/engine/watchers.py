"""Wakes callers when jobs or nodes change, for operators' watch calls and the HTTP feeds."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rdzv.runtime.clock import Clock, Timer

Note = Callable[[str | None], None]
"""A callback that receives the rdzv_id of a changed job, or None if a node changed or watching
ended."""


SHOW_PROGRESS_EVERY_MS = 1_000
"""How often changes that are only progress are shown. Nodes report progress every second."""


class Watchers:
    """Wakes watchers, which then read the new state themselves."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._changes = weakref.WeakValueDictionary[str, asyncio.Event]()
        """The events that are set at the next change of each job, by rdzv_id."""
        self._followers: set[Note] = set()
        self._progressed: set[str] = set()
        """The rdzv_ids of watched jobs that have made progress since progress was last reported."""
        self._progress_timer = Timer(clock, lambda _: self._show_progress())
        self.closed = False

    @property
    def followers(self) -> int:
        return len(self._followers)

    @property
    def progress_due_ms(self) -> int | None:
        return self._progress_timer.due_ms

    def next_change(self, rdzv_id: str) -> asyncio.Event:
        """Return the event that will be set at a job's next change.

        Only the caller keeps the event alive, so it must hold a reference while waiting.
        """
        return self._changes.setdefault(rdzv_id, asyncio.Event())

    @contextmanager
    def followed_by(self, note: Note) -> Iterator[None]:
        """Call `note` at each change until the body ends.

        `note` is called while a step is being published, and must not block.
        """
        self._followers.add(note)
        try:
            yield
        finally:
            self._followers.discard(note)

    def job_changed(self, rdzv_id: str) -> None:
        if (changed := self._changes.pop(rdzv_id, None)) is not None:
            changed.set()
        for note in self._followers:
            note(rdzv_id)

    def nodes_changed(self) -> None:
        for note in self._followers:
            note(None)

    def job_progressed(self, rdzv_id: str) -> None:
        """Schedule a wake-up of a job's watchers, batched with other jobs' wake-ups."""
        if rdzv_id in self._changes or self._followers:
            self._progressed.add(rdzv_id)
            at_ms = self._clock.now_ms() + SHOW_PROGRESS_EVERY_MS
            self._progress_timer.arm_by(at_ms)

    def _show_progress(self) -> None:
        progressed, self._progressed = self._progressed, set()
        for rdzv_id in progressed:
            self.job_changed(rdzv_id)

    def close(self) -> None:
        """End watching by waking all watchers, which then find `closed` set."""
        self.closed = True
        for changed in self._changes.values():
            changed.set()
        self.nodes_changed()

    def stop(self) -> None:
        self._progress_timer.cancel()
