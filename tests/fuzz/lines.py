"""The lines of the product that were reached: they show whether a surface is still exploring."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOTS = tuple(f"{Path(__file__).parents[2] / root}/" for root in ("rendezvous", "agent"))


class Lines:
    """Counts lines, each once. A function whose lines are all known is not traced again."""

    def __init__(self) -> None:
        self.reached = 0
        self._unseen: dict[CodeType, set[int] | None] = {}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Trace this thread, and those that it starts, until the body ends."""
        before = sys.gettrace()
        threading.settrace(self._call)
        sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(before)
            threading.settrace(before)  # type: ignore[arg-type]

    def _call(self, frame: FrameType, event: str, _: object) -> Any:
        code = frame.f_code
        unseen = self._unseen.get(code, code)
        if unseen is code:
            ours = code.co_filename.startswith(ROOTS)
            lines = {line for *_, line in code.co_lines() if line} if ours else None
            unseen = self._unseen[code] = lines
        return self._line if unseen else None

    def _line(self, frame: FrameType, event: str, _: object) -> Any:
        unseen = self._unseen[frame.f_code]
        if not unseen:
            return None
        if frame.f_lineno in unseen:
            unseen.discard(frame.f_lineno)
            self.reached += 1
        return self._line
