"""The notice file, which tells a job's workers that their node is about to leave.

`RDZV_NOTICE_FILE` is its path. The file does not exist until there is a notice. It then contains
one line of JSON, `{"deadline_unix": ..., "reason": ...}`, and is replaced atomically if the
deadline changes. `docs/drain.md` describes how a worker may react. An error only causes a warning,
because the workers also get a signal.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path

from rdzv.agent.system.accounts import Identity, acting_as, write_anew

log = logging.getLogger("rdzv.agent")

NAME = "notice"


class NoticeFile:
    """The notice file of a job on this node. `place` returns its path in the current round."""

    def __init__(
        self, place: Callable[[str], Path | None], identity: Identity | None = None
    ) -> None:
        self._place = place
        self._identity = identity
        self._path: Path | None = None

    def open_round(self) -> None:
        self._path = self._place(NAME)

    def path(self) -> str:
        """Return the path given to the round's workers; empty if there is no folder for it."""
        return "" if self._path is None else str(self._path)

    def write(self, left_ms: int, reason: str) -> None:
        """Write the notice, replacing an earlier one."""
        if self._path is None:
            return
        deadline = round(time.time() + left_ms / 1000, 3)
        line = json.dumps({"deadline_unix": deadline, "reason": reason}) + "\n"
        new = self._path.with_name(f"{NAME}.new")
        try:
            with acting_as(self._identity):
                write_anew(new, line.encode())
                new.replace(self._path)
        except OSError as error:
            log.warning("cannot write the notice file %s: %s", self._path, error.strerror)

    def take_back(self) -> None:
        """Remove the notice, if there is one."""
        if self._path is not None:
            try:
                with acting_as(self._identity):
                    self._path.unlink(missing_ok=True)
            except OSError as error:
                log.warning("cannot remove the notice file %s: %s", self._path, error.strerror)
