"""Lines of workers' logs: whole lines, each prefixed with its RANK.

Output to a pipe or a file is unchanged. On a terminal it is neutralized, because a log may contain
control sequences that retitle the terminal, clear it, or type into it.
"""

from __future__ import annotations

from typing import BinaryIO

from rdzv.runtime.log_format import harmless
from rdzv.view.answers import LogLines

LINE_BYTES = 64 * 1024
"""The length above which lines are split, to bound the wait for the end of a line."""

_Source = tuple[str, int, int, bool]


def note_of(piece: LogLines) -> str:
    return f"{piece.node_id}: {piece.note}" if piece.node_id else str(piece.note)


class Printer:
    """Joins the chunks of several workers' logs into lines."""

    def __init__(self, out: BinaryIO, *, prefixed: bool, escaped: bool, as_it_comes: bool) -> None:
        self._out = out
        self._prefixed = prefixed
        self._escaped = escaped
        self._as_it_comes = as_it_comes
        self._begun: dict[_Source, bytes] = {}
        """Lines that are not yet terminated."""
        self._rounds: dict[str, int] = {}

    def take(self, piece: LogLines) -> None:
        if self._as_it_comes:
            self._out.write(piece.data)
        else:
            if self._rounds.get(piece.node_id) != piece.round:
                self._end_round(piece.node_id)
                self._rounds[piece.node_id] = piece.round
            source = (piece.node_id, piece.rank, piece.round, piece.stderr)
            self._split(source, self._begun.pop(source, b"") + piece.data)
        self._out.flush()

    def end(self) -> None:
        for node_id in tuple(self._rounds):
            self._end_round(node_id)
        self._out.flush()

    def _split(self, source: _Source, text: bytes) -> None:
        """Print whole lines. Each step of a progress bar ends in CR and counts as a line."""
        *lines, rest = text.splitlines(keepends=True) or [b""]
        # It is unknown until the next chunk whether an LF follows a CR.
        if rest.endswith(b"\n"):
            lines, rest = [*lines, rest], b""
        for line in lines:
            self._line(source, line)
        while len(rest) >= LINE_BYTES:
            self._line(source, rest[:LINE_BYTES])
            rest = rest[LINE_BYTES:]
        if rest:
            self._begun[source] = rest

    def _line(self, source: _Source, line: bytes) -> None:
        if not self._prefixed and not self._escaped:
            self._out.write(line if line.endswith((b"\n", b"\r")) else line + b"\n")
            return
        text = line.rstrip(b"\r\n")
        if self._escaped:
            decoded = text.decode(errors="backslashreplace")
            text = "\t".join(map(harmless, decoded.split("\t"))).encode(errors="backslashreplace")
        prefix = f"[rank {source[1]}] ".encode() if self._prefixed else b""
        self._out.write(prefix + text + b"\n")

    def _end_round(self, node_id: str) -> None:
        for source in [source for source in self._begun if source[0] == node_id]:
            self._line(source, self._begun.pop(source))
