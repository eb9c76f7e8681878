"""Log lines about the stream to the server: each cause once, until a stream is open again."""

from __future__ import annotations

import logging
import re

from rdzv.transport.endpoints import Endpoint

log = logging.getLogger("rdzv.agent")

CAUSES_MOST = 16
"""How many causes of a missing stream are logged at most until one is open again."""
_FIGURES = re.compile(r"\d+(\.\d+)?")


class ConnectionLog:
    """Tells the user when the server is lost, why, and when it is back."""

    def __init__(self) -> None:
        self._causes: set[str] = set()
        """The causes logged since the last stream."""
        self._was_connected = False

    def lost(self, endpoint: Endpoint, reason: str, *, again: bool) -> None:
        """Log that there is no stream; `again` if the immediate retry has failed too.

        Each cause is logged once, even if its numbers change: they may differ every time.
        """
        cause = _FIGURES.sub("", reason)
        if again and cause not in self._causes and len(self._causes) < CAUSES_MOST:
            self._causes.add(cause)
            log.warning("%s; trying again until a server answers", reason)
        else:
            log.debug("no stream to %s: %s", endpoint, reason)

    def silent(self, endpoint: Endpoint, silent_s: float) -> None:
        """Log that the server does not answer, and that the agent waits for it."""
        reason = f"no answer from {endpoint} within {silent_s:g} s"
        # This counts as the same cause as giving up the attempt later.
        if (cause := _FIGURES.sub("", reason)) not in self._causes:
            self._causes.add(cause)
            log.warning(
                "%s: it may be stopped or overloaded, or a firewall drops packets; "
                "trying until a server answers",
                reason,
            )

    def connected(self, endpoint: Endpoint) -> None:
        """Log that there is a server again, if its absence was logged."""
        if self._causes:
            self._causes.clear()
            again = " again" if self._was_connected else ""
            log.info("connected to the server at %s%s", endpoint, again)
        self._was_connected = True
