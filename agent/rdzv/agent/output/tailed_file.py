"""Reads the complete lines of a growing file, from where the last read ended."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from select import PIPE_BUF

CHUNK_BYTES = 1 << 16

Write = Callable[[bytes | bytearray], None]


class TailedFile:
    """A file, closed between reads, and the position up to which its lines have been copied."""

    def __init__(
        self,
        path: Path,
        prefix: bytes,
        needles: tuple[bytes, ...] = (),
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """With `needles`, copy only lines that contain one; read at most `chunk_bytes` at once."""
        self.path = path
        self._prefix = prefix
        self._needles = needles
        self._chunk_bytes = chunk_bytes
        self._line = 0  # The start of the first line that has not been copied.
        self._scanned = 0  # The line does not end before this position.
        self._after_cr = False

    def copy_some(self, write: Write, *, final: bool) -> bool:
        """Copy the lines that the next chunk completes; return False at the file's end.

        There, a `final` call copies a last line without an ending. A truncated file is copied anew.
        """
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
        except FileNotFoundError:
            return False
        try:
            chunk = os.pread(fd, self._chunk_bytes, self._scanned)
            if chunk:
                self._copy_chunk(fd, chunk, write)
            elif os.fstat(fd).st_size < self._scanned:
                self._line, self._scanned, self._after_cr = 0, 0, False
                return True
            elif final and self._line < self._scanned:
                self._copy_carried(fd, self._scanned, write)
                self._line = self._scanned
            return bool(chunk)
        finally:
            os.close(fd)

    def _copy_chunk(self, fd: int, chunk: bytes, write: Write) -> None:
        lines = chunk.splitlines(keepends=True)  # Bytes are split at \n, \r\n and \r only.
        position = self._scanned
        if self._after_cr and lines[0] == b"\n":  # The second half of a line ending.
            del lines[0]
            self._line = position = position + 1
        self._after_cr = chunk.endswith(b"\r")
        self._scanned += len(chunk)
        rest = lines.pop() if lines and not lines[-1].endswith((b"\n", b"\r")) else b""
        if not lines:
            return
        if self._line < position:
            self._copy_carried(fd, position + len(lines.pop(0).rstrip(b"\r\n")), write)
        self._copy_lines(lines, write)
        self._line = self._scanned - len(rest)

    def _copy_carried(self, fd: int, end: int, write: Write) -> None:
        if end - self._line <= self._chunk_bytes:
            self._copy_lines(self._pieces(fd, end), write)
        elif self._wants(self._pieces(fd, end)):
            for piece in chain([self._prefix], self._pieces(fd, end), [b"\n"]):
                write(piece)

    def _copy_lines(self, lines: Iterable[bytes], write: Write) -> None:
        """Write whole lines in one call; up to PIPE_BUF, no other output is interleaved."""
        batch = bytearray()
        for line in lines:
            text = line.rstrip(b"\r\n")
            if not self._wants([text]):
                continue
            if batch and len(batch) + len(self._prefix) + len(text) >= PIPE_BUF:
                write(batch)
                batch = bytearray()
            batch += self._prefix + text + b"\n"
        write(batch)

    def _wants(self, pieces: Iterable[bytes]) -> bool:
        if not self._needles:
            return True
        overlap = max(map(len, self._needles)) - 1
        seen = b""
        for piece in chain(pieces, [b"\n"]):
            seen += piece
            if any(needle in seen for needle in self._needles):
                return True
            seen = seen[-overlap:] if overlap > 0 else b""
        return False

    def _pieces(self, fd: int, end: int) -> Iterator[bytes]:
        """Read the present line, which ends here, again."""
        for position in range(self._line, end, self._chunk_bytes):
            yield os.pread(fd, min(self._chunk_bytes, end - position), position)
