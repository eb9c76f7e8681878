"""The runner's event loop, which calls a function when its descriptor becomes readable."""

from __future__ import annotations

import os
import selectors
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .channel import Channel

PAUSE_S = 0.25
"""How long to wait before retrying a call that failed for lack of descriptors or memory."""


class Loop:
    """Watches descriptors and calls the function registered for each."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
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
        """Stop watching a descriptor before it is closed. Does nothing if it is not watched."""
        with suppress(KeyError):
            self._selector.unregister(fd)

    def close_watched(self, fd: int) -> None:
        self.unwatch(fd)
        os.close(fd)

    def wait(self, timeout_s: float | None) -> Iterator[Callable[[], object]]:
        """Wait until descriptors are readable, and yield the function registered for each."""
        for key, _ in self._selector.select(timeout_s):
            # An earlier call in this batch may have stopped watching this descriptor.
            if self._selector.get_map().get(key.fd) is key:
                yield key.data

    def close(self) -> None:
        """Stop watching all descriptors."""
        self._selector.close()
