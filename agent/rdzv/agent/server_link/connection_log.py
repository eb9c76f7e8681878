"""The log lines about the stream to the server: each cause once, until there is a stream again."""

from __future__ import annotations

import logging
import re

from rdzv.transport.endpoints import Endpoint

log = logging.getLogger("rdzv.agent")

CAUSES_MOST = 16
"""The log names at most this number of causes for a missing stream, until there is one again."""
_FIGURES = re.compile(r"\d+(\.\d+)?")


class ConnectionLog:
    """Tells a user that there is no server, why, and that there is one again."""

    def __init__(self) -> None:
        self._causes: set[str] = set()
        """Why there is no stream, as far as the log has it since the last one."""
        self._was_connected = False

    def lost(self, endpoint: Endpoint, reason: str, *, again: bool) -> None:
        """Say that there is no stream; `again`: the attempt made at once has failed too.

        Each cause is logged once, whatever its figures are: the next one may be another.
        """
        cause = _FIGURES.sub("", reason)
        if again and cause not in self._causes and len(self._causes) < CAUSES_MOST:
            self._causes.add(cause)
            log.warning("%s; trying again until a server answers", reason)
        else:
            log.debug("no stream to %s: %s", endpoint, reason)

    def silent(self, endpoint: Endpoint, silent_s: float) -> None:
        """Say that the server does not answer; it is waited for."""
        reason = f"no answer from {endpoint} within {silent_s:g} s"
        # The same as when the attempt is given up later.
        if (cause := _FIGURES.sub("", reason)) not in self._causes:
            self._causes.add(cause)
            log.warning(
                "%s: it may be stopped or overloaded, or a firewall drops packets; trying until a "
                "server answers",
                reason,
            )

    def connected(self, endpoint: Endpoint) -> None:
        """Say that there is a server, where it was said that there is none."""
        if self._causes:
            self._causes.clear()
            again = " again" if self._was_connected else ""
            log.info("connected to the server at %s%s", endpoint, again)
        self._was_connected = True
