"""The runner's event loop: calls functions when a descriptor is readable, or when it is time."""

from __future__ import annotations

import os
import selectors
import time
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .channel import Channel

PAUSE_S = 0.25
"""How long to wait before retrying a call that failed for lack of descriptors or memory."""

_MAX_WAIT_S = 3600.0


class Loop:
    """Watches descriptors and the time, and says which functions to call."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._times: dict[Callable[[], object], float] = {}
        self.shutting_down = False
        """Whether everything is ending, in which case nothing new is started."""

    def watch(self, fd: int, call: Callable[[], object]) -> None:
        """Call a function whenever a descriptor is readable. May raise `OSError`."""
        self._selector.register(fd, selectors.EVENT_READ, call)

    def watch_channel(self, channel: Channel) -> None:
        """Watch a channel for writing, in addition to reading, while it has unsent bytes."""
        key = self._selector.get_key(channel.fileno())
        mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.has_unsent else 0)
        if key.events != mask:
            self._selector.modify(channel.fileno(), mask, key.data)

    def unwatch(self, fd: int) -> None:
        with suppress(KeyError):
            self._selector.unregister(fd)

    def close_watched(self, fd: int) -> None:
        self.unwatch(fd)
        os.close(fd)

    def call_at(self, at: float | None, call: Callable[[], object]) -> None:
        """Call a function once, at a time of `time.monotonic`, or not at all with None.

        This replaces any other time for the same function.
        """
        if at is None:
            self._times.pop(call, None)
        else:
            self._times[call] = at

    def time_of(self, call: Callable[[], object]) -> float | None:
        return self._times.get(call)

    def wait(self, timeout_s: float | None) -> Iterator[Callable[[], object]]:
        """Wait until descriptors are readable, or something is `due`, for at most `timeout_s`.

        Yields the function registered for each readable descriptor.
        """
        now = time.monotonic()
        waits = [_MAX_WAIT_S, *(at - now for at in self._times.values())]
        if timeout_s is not None:
            waits.append(timeout_s)
        for key, _ in self._selector.select(max(min(waits), 0.0)):
            # An earlier call in this batch may have stopped watching this descriptor.
            if self._selector.get_map().get(key.fd) is key:
                yield key.data

    def due(self, now: float) -> Iterator[Callable[[], object]]:
        for call, at in list(self._times.items()):
            # An earlier call in this batch may have changed the time.
            if at <= now and self._times.get(call) == at:
                del self._times[call]
                yield call

    def close(self) -> None:
        self._selector.close()
