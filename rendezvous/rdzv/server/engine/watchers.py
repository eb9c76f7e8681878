"""Wakes callers when jobs or nodes change: operators' watch calls, and the HTTP feeds."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rdzv.runtime.clock import Clock, Timer

Note = Callable[[str | None], None]
"""Receives the rdzv_id of a job that has changed, or None if a node has changed or watching has
ended."""


class Watchers:
    """Wakes watchers, which then read the new state themselves."""

    def __init__(self, clock: Clock, show_progress_every_ms: int) -> None:
        """Report mere progress for all jobs together, once per `show_progress_every_ms`."""
        self._clock = clock
        self._show_progress_every_ms = show_progress_every_ms
        self._changes = weakref.WeakValueDictionary[str, asyncio.Event]()
        """By rdzv_id: an event that is set at the job's next change."""
        self._followers: set[Note] = set()
        self._progressed: set[str] = set()
        """The rdzv_ids of watched jobs that have progressed since progress was last reported."""
        self._progress_timer = Timer(clock, lambda _: self._show_progress())
        self.closed = False
        """Whether watching has ended."""

    @property
    def followers(self) -> int:
        """The number of callers that follow all changes."""
        return len(self._followers)

    @property
    def progress_due_ms(self) -> int | None:
        """When progress is next reported; None if there is none to report."""
        return self._progress_timer.due_ms

    def next_change(self, rdzv_id: str) -> asyncio.Event:
        """Return the event that is set at a job's next change.

        Only the caller keeps the event alive, and must hold it while waiting.
        """
        return self._changes.setdefault(rdzv_id, asyncio.Event())

    @contextmanager
    def followed_by(self, note: Note) -> Iterator[None]:
        """Call `note` at each change until the body ends.

        `note` is called while a step is published, and must not block.
        """
        self._followers.add(note)
        try:
            yield
        finally:
            self._followers.discard(note)

    def job_changed(self, rdzv_id: str) -> None:
        """Wake the watchers of a job, and the followers of all changes."""
        if (changed := self._changes.pop(rdzv_id, None)) is not None:
            changed.set()
        for note in self._followers:
            note(rdzv_id)

    def nodes_changed(self) -> None:
        """Wake the followers of all changes, because a node has changed."""
        for note in self._followers:
            note(None)

    def job_progressed(self, rdzv_id: str) -> None:
        """Schedule a wake-up of a job's watchers, batched with those of other jobs."""
        if rdzv_id in self._changes or self._followers:
            self._progressed.add(rdzv_id)
            at_ms = self._clock.now_ms() + self._show_progress_every_ms
            self._progress_timer.arm_by(at_ms)

    def _show_progress(self) -> None:
        progressed, self._progressed = self._progressed, set()
        for rdzv_id in progressed:
            self.job_changed(rdzv_id)

    def close(self) -> None:
        """End watching: wake all watchers, which find `closed` set."""
        self.closed = True
        for changed in self._changes.values():
            changed.set()
        self.nodes_changed()

    def stop(self) -> None:
        """Stop the timer for progress."""
        self._progress_timer.cancel()
