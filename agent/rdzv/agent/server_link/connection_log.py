"""Logs the server's loss and return. Each cause is logged once until a stream is open again."""

from __future__ import annotations

import logging
import re

from rdzv.core.words import duration
from rdzv.transport.endpoints import Endpoint

log = logging.getLogger("rdzv.agent")

CAUSES_MOST = 16
"""The maximum number of causes that are logged until a stream is open again."""
_FIGURES = re.compile(r"\d+(\.\d+)?")


class ConnectionLog:
    """Logs when and why the server is lost, and when it is back."""

    def __init__(self) -> None:
        self._causes: set[str] = set()
        """The causes logged since a stream was last open."""
        self._was_connected = False
        self._refused = False
        """Whether the last stream ended because the server refused this node for now."""

    def lost(
        self,
        endpoint: Endpoint,
        reason: str,
        *,
        again: bool,
        refused: bool = False,
        most_ms: int | None = None,
    ) -> None:
        """Warn that there is no stream, if the immediate retry has failed `again`, too.

        Each cause is logged once; those that differ only in numbers count as the same. `refused`: a
        server has answered. `most_ms`: how long the agent goes on trying.
        """
        self._refused = refused
        cause = _FIGURES.sub("", reason)
        if again and cause not in self._causes and len(self._causes) < CAUSES_MOST:
            self._causes.add(cause)
            log.warning("%s; %s", reason, _retrying(most_ms))
        else:
            log.debug("no stream to %s: %s", endpoint, reason)

    def silent(self, endpoint: Endpoint, silent_s: float, most_ms: int | None) -> None:
        reason = f"no answer from {endpoint} within {silent_s:g} s"
        # Giving up the attempt later counts as the same cause.
        if (cause := _FIGURES.sub("", reason)) not in self._causes:
            self._causes.add(cause)
            log.warning(
                "%s: the server may be stopped or overloaded, or a firewall may be dropping "
                "packets; %s",
                reason,
                _retrying(most_ms),
            )

    def connected(self, endpoint: Endpoint) -> None:
        if self._causes and not self._refused:
            self._causes.clear()
            again = " again" if self._was_connected else ""
            log.info("connected to the server at %s%s", endpoint, again)
        self._was_connected = True


def _retrying(most_ms: int | None) -> str:
    limit = "" if most_ms is None else f", for at most {duration(most_ms)}"
    return f"retrying until a server admits this node{limit}"
