"""Tracks whether the store is available, why it is not, and which commands are waiting for it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from rdzv.core.commands import (
    Command,
    Decline,
    Fail,
    Join,
    Leave,
    MarkAway,
    MarkBack,
    MarkLost,
    Place,
    ReportStoreHost,
    ReportStuck,
    Resume,
    Succeed,
    Tick,
    Withdraw,
)
from rdzv.core.words import counted, duration
from rdzv.errors import RendezvousError
from rdzv.runtime.clock import Clock, Timer

log = logging.getLogger("rdzv.jobs")

STORE_RETRY_MS = 1_000
"""How often a store that is away is tried again."""
MOST_NAMED = 4
"""The maximum number of waiting commands named in one sentence."""
FRESH_RETRIES = 3
"""If a command is not repeated within this many retry intervals, its node is gone and the command
is no longer waiting."""


class StoreState:
    """The store's state, derived from the outcomes of calls to it."""

    def __init__(
        self,
        clock: Clock,
        on_change: Callable[[str | None], None],
        probe: Callable[[], object],
    ) -> None:
        """Call `on_change` with the job whose `trouble_of` has changed, or with None for all jobs.

        `probe` tries the store. It is called at intervals while the store is unavailable and no
        waiting command is being retried.
        """
        self._clock = clock
        self._on_change = on_change
        self._probe = probe
        self._timer = Timer(clock, lambda _: self._look())
        self._stopped = False
        self._since_ms: int | None = None
        self._why = ""
        self.unwritable = False
        """Whether a write has failed and none has succeeded since; reads do not count."""
        self._waiting: dict[str, dict[str, int]] = {}
        """The waiting commands in words, each with the time when it was last tried, by rdzv_id."""

    def failed(self, error: RendezvousError, began_ms: int, *, writes: bool) -> None:
        """Record the failure of a call that began at `began_ms`; log only the first failure."""
        self.unwritable |= writes
        known, self._why = self._why, str(error)
        if self._since_ms is None:
            self._since_ms = began_ms
            log.error("the store is away: %s; workers run on, nothing new is decided", error)
            if not self._stopped:
                self._timer.arm_by(self._clock.now_ms() + STORE_RETRY_MS)
        if known != self._why:
            self._on_change(None)

    def answered(self, *, writes: bool) -> None:
        """Record a successful call; after a failed write, only a write counts."""
        self.unwritable &= not writes
        if self._since_ms is None or self.unwritable:
            return
        log.warning("the store is back after %.1f s", self.away_ms / 1000)
        self._since_ms, self._why = None, ""
        self._waiting.clear()
        self._timer.cancel()
        self._on_change(None)

    def waits(self, rdzv_id: str, command: Command) -> None:
        """Record that a command could not be stored and is being retried."""
        if words := _words(command):
            waiting = self._waiting.setdefault(rdzv_id, {})
            known = words in waiting
            waiting[words] = self._clock.now_ms()
            if not known:
                self._on_change(rdzv_id)

    def decided(self, rdzv_id: str, command: Command) -> None:
        """Record that a command is no longer waiting for the store."""
        if (waiting := self._waiting.get(rdzv_id)) is not None:
            waiting.pop(_words(command), None)
            if not waiting:
                del self._waiting[rdzv_id]

    @property
    def waiting_jobs(self) -> Collection[str]:
        """The jobs with commands that wait for the store, by rdzv_id."""
        return self._waiting.keys()

    def waiting(self, rdzv_id: str) -> tuple[str, ...]:
        """Describe one job's commands that are waiting for the store."""
        since_ms = self._clock.now_ms() - FRESH_RETRIES * STORE_RETRY_MS
        return tuple(
            words for words, at_ms in self._waiting.get(rdzv_id, {}).items() if at_ms >= since_ms
        )

    @property
    def away_ms(self) -> int:
        """How long the store has been unavailable, or 0 while it is believed to be available."""
        return 0 if self._since_ms is None else max(self._clock.now_ms() - self._since_ms, 1)

    @property
    def trouble(self) -> str:
        """Why the store is unavailable and for how long, for operators; empty if it is available.

        The sentence also names the waiting commands of all jobs.
        """
        waiting = [
            f"{words} ({rdzv_id})" for rdzv_id in self._waiting for words in self.waiting(rdzv_id)
        ]
        return self._sentence(waiting)

    def trouble_of(self, rdzv_id: str) -> str:
        """Return the same sentence as `trouble`, but with only this job's waiting commands."""
        return self._sentence(self.waiting(rdzv_id))

    def stop(self) -> None:
        """Stop probing the store; later failed calls are only logged."""
        self._stopped = True
        self._timer.cancel()

    def _sentence(self, waiting: list[str] | tuple[str, ...]) -> str:
        if self._since_ms is None:
            return ""
        text = (
            f"the store has been away for {duration(self.away_ms)} ({self._why}); workers run on, "
            "nothing new is decided"
        )
        if waiting:
            named = ", ".join(waiting[:MOST_NAMED])
            more = len(waiting) - MOST_NAMED
            text += f"; not stored yet: {named}" + (
                f" and {counted(more, 'more decision')}" if more > 0 else ""
            )
        return text

    def _look(self) -> None:
        """Drop commands that are no longer waiting; if none remain, probe the store."""
        if self._since_ms is None:
            return
        self._timer.arm(self._clock.now_ms() + STORE_RETRY_MS)
        for rdzv_id in [name for name in self._waiting if not self.waiting(name)]:
            del self._waiting[rdzv_id]
        if not self._waiting:
            self._probe()


def _words(command: Command) -> str:
    """Describe a waiting command, or return "" for a command whose caller does not wait."""
    match command:
        case Join():
            return f"{command.node_id} joins"
        case Resume():
            return f"{command.node_id} returns with its workers"
        case Fail():
            return f"workers of {command.node_id} have failed"
        case Succeed():
            return f"workers of {command.node_id} have succeeded"
        case Leave():
            return f"{command.node_id} leaves"
        case MarkLost():
            return f"{command.node_id} is lost"
        case MarkAway():
            return f"{command.node_id} is away"
        case MarkBack():
            return f"{command.node_id} is back"
        case ReportStuck():
            return f"workers of {command.node_id} survive SIGKILL"
        case ReportStoreHost():
            return f"the store host on {command.node_id} has failed"
        case Decline():
            return f"{command.node_id} declines"
        case Place() | Withdraw():
            return "the nodes that it is placed on"
        case Tick():
            return "timers"
        case _:
            return ""
