"""The definition of a surface: a place where bytes arrive that somebody else has chosen.

An input is a sequence of steps, each a kind and its bytes, so that all inputs are stored, shortened
and damaged in the same way. A surface generates inputs, processes them, and raises `FoundError` if
a guarantee of the product is broken: it crashed, hung, leaked, let an exception escape, or stopped
serving others.
"""

from __future__ import annotations

import logging
import random
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rdzv.errors import RendezvousError

Step = tuple[str, bytes]
Input = tuple[Step, ...]
Take = Callable[[Input], None]

HANG_S = 30.0
"""No input takes a hundredth of it, but a busy machine may."""

PATIENCE_S = 60.0
"""For other waits: a server's start and end, and the answers to other clients."""


class FoundError(AssertionError):
    """A guarantee that an input broke."""


@dataclass(frozen=True)
class Surface:
    """One way into the product."""

    name: str
    promise: str
    """A description of the checks for each input, for people."""
    make: Callable[[random.Random], Input]
    open: Callable[[Path], AbstractContextManager[Take]]
    """Set up the receiver of inputs, with a folder for its files; anything left open is a leak."""


@contextmanager
def refusing() -> Iterator[None]:
    """Allow refusals of the error table, and nothing else.

    Their text is checked where it is shown: it quotes the reader's own input.
    """
    with suppress(RendezvousError):
        yield


def check_text(what: str, text: str, *, lines: bool = True) -> None:
    """Check that a text contains nothing that a terminal would obey."""
    for char in text:
        if not char.isprintable() and not (lines and char == "\n"):
            raise FoundError(f"{what} has {char!r}: {text!r:.200}")


_BYTES = re.compile(r"""b(['"])(?:\\.|(?!\1)[^\\\n])*(?:\1|$)""", re.MULTILINE)
"""Bytes as Python shows them; they may be truncated."""


def where(error: BaseException) -> str:
    """Name an exception by its type and the last place in the product that it passed through.

    Exceptions that differ only in quoted bytes have the same name.
    """
    if isinstance(error, FoundError):
        return f"{type(error).__name__}: {_BYTES.sub('b...', str(error))[:120]}"
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if "/rdzv/" in frame.filename
    ]
    at = f" at {Path(frames[-1].filename).name}:{frames[-1].name}" if frames else ""
    return f"{type(error).__name__}{at}"


class Alarm(logging.Handler):
    """Collects the product's logs of its own bugs: tracebacks, and errors of unawaited tasks."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.heard: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info or "bug" in text or "Unexpected" in text or "never retrieved" in text:
            trace = "".join(traceback.format_exception(*record.exc_info)) if record.exc_info else ""
            self.heard.append(f"{record.name}: {text:.300}\n{trace[-2_000:]}")

    def check(self) -> None:
        if self.heard:
            heard, self.heard = self.heard, []
            raise FoundError(heard[0])


@contextmanager
def alarmed() -> Iterator[Alarm]:
    """Collect the log of everything while the body runs."""
    alarm = Alarm()
    root = logging.getLogger()
    root.addHandler(alarm)
    try:
        yield alarm
    finally:
        root.removeHandler(alarm)


# ------------------------------------------------------------------------------------ words

PLAUSIBLE = 0.9
"""How often a text is plausible, so that the code behind the checks is reached."""
ESCAPES = (
    "\x1b[2J",
    "\x1b]0;title\x07",
    "\x1b]52;c;cm0gLXJm\x07",
    "\x9b31m",
    "\r\x1b[K",
    "\x00",
    "\x08\x08",
    "\u202egnp.exe",
    "\u2028",
    "\x85",
    "\ud800",
    "\U000e0001",
    "e\u0301" * 40,
    "\x7f",
)
PATHS = ("..", "../../etc/passwd", "/etc/passwd", "a/b", ".", "", "%2e%2e", "a\\b", "~root", "//x")
HUGE = ("x" * 5_000, "é" * 70_000)
ESCAPES_IN_UTF8 = tuple(escape for escape in ESCAPES if escape != "\ud800")
HOSTILE = (*ESCAPES_IN_UTF8, *PATHS, *HUGE, "None", "-1", "NaN", "--help", "{}", "%s%n", "$(id)")


def text(dice: random.Random, plausible: Sequence[str] = ()) -> str:
    """Make a text: usually a plausible one, if there are any, otherwise a hostile one."""
    if plausible and dice.random() < PLAUSIBLE:
        return dice.choice(plausible)
    if dice.random() < 0.6:
        return dice.choice(HOSTILE)
    parts = [
        *ESCAPES_IN_UTF8,
        *PATHS,
        "a",
        "Z",
        "7",
        " ",
        "é",
        "漢",
        "😀",
        ",",
        "=",
        '"',
        "'",
        "\n",
    ]
    return "".join(dice.choice(parts) for _ in range(dice.randint(0, 8)))
