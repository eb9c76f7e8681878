"""`rdzvctl logs`: parses which part of the logs to read, and prints it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable

import click

from rdzv.errors import InvalidRequestError
from rdzv.runtime.log_format import harmless
from rdzv.view.answers import LogLines
from rdzv.view.log_lines import Printer, note_of

_TAIL = re.compile(r"([0-9]{1,15})([kMG]?)")
_UNITS = {"k": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_MOST_LINES = 2**32 - 1


def parse_tail(text: str) -> tuple[int, int]:
    """Parse a number of lines or bytes. Return both, with 0 for the one not given.

    >>> parse_tail("100"), parse_tail("64k")
    ((100, 0), (0, 65536))

    Raises:
        InvalidRequestError: the text is neither.
    """
    found = _TAIL.fullmatch(text)
    count = int(found[1]) if found else 0
    if found is None or count == 0 or (not found[2] and count > _MOST_LINES):
        raise InvalidRequestError(
            f"--tail={text} is not a number of lines or bytes; give, for example, 100 or 64k"
        )
    return (0, count * _UNITS[found[2]]) if found[2] else (count, 0)


def show(pieces: Iterable[LogLines], *, one_rank: bool, one_stream: bool) -> bool:
    """Print all pieces, with notes on stderr; return whether the output is complete."""
    terminal = sys.stdout.isatty()
    printer = Printer(
        sys.stdout.buffer,
        prefixed=not one_rank,
        escaped=terminal,
        as_it_comes=one_rank and one_stream and not terminal,
    )
    whole, absent = True, False
    try:
        for piece in pieces:
            if piece.note is None:
                printer.take(piece)
                absent = False
                continue
            click.echo(harmless(f"rdzvctl: {note_of(piece)}"), err=True)
            # Output may still follow a note that concerns the whole job.
            absent = absent or not piece.node_id
            whole = whole and not piece.node_id
    finally:
        printer.end()
    return whole and not absent
