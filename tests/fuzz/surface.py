"""What a surface is: a place where bytes come in that somebody else has chosen.

An input is a sequence of steps, each a kind and its bytes, so that all inputs are kept, cut down
and damaged in the same way. A surface makes inputs, takes them, and raises `FoundError` when a
promise of the product is broken: it crashed, hung, leaked, let something escape, or serves nobody
else.
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
"""No input takes a hundredth of it; a machine that is busy with other things may."""

PATIENCE_S = 60.0
"""For what is waited for beside an input: a server's start, its end, and that others are served."""


class FoundError(AssertionError):
    """A promise that an input broke."""


@dataclass(frozen=True)
class Surface:
    """One way into the product."""

    name: str
    promise: str
    """What is checked with each input, for people."""
    make: Callable[[random.Random], Input]
    open: Callable[[Path], AbstractContextManager[Take]]
    """Set up what takes the inputs, with a folder for its files; what it leaves open is a leak."""


@contextmanager
def refusing() -> Iterator[None]:
    """Let refusals of the error table pass, and nothing else.

    What is in one is looked at where it is shown: it names what its reader wrote.
    """
    with suppress(RendezvousError):
        yield


def check_text(what: str, text: str, *, lines: bool = True) -> None:
    """Hold that a text has nothing that a terminal would obey."""
    for char in text:
        if not char.isprintable() and not (lines and char == "\n"):
            raise FoundError(f"{what} has {char!r}: {text!r:.200}")


_BYTES = re.compile(r"""b(['"])(?:\\.|(?!\1)[^\\\n])*(?:\1|$)""", re.MULTILINE)
"""Bytes as Python shows them; they may be cut."""


def where(error: BaseException) -> str:
    """Name an exception by its type and the last place of the product that it came through.

    What differs in the bytes alone that it shows has one name.
    """
    if isinstance(error, FoundError):
        return f"{type(error).__name__}: {_BYTES.sub('b...', str(error))[:120]}"
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if "/rdzv/" in frame.filename
    ]
    at = f" at {Path(frames[-1].filename).name}:{frames[-1].name}" if frames else ""
    return f"{type(error).__name__}{at}"


class Alarm(logging.Handler):
    """Hears what the product logs of its own bugs: a traceback, or a task that nobody asked for."""

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
    """Hear the log of everything while the body runs."""
    alarm = Alarm()
    root = logging.getLogger()
    root.addHandler(alarm)
    try:
        yield alarm
    finally:
        root.removeHandler(alarm)


# ------------------------------------------------------------------------------------ words

PLAUSIBLE = 0.9
"""How often a text is one that could be real, so that the rest is looked at."""
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
    """Make a text: mostly one that is plausible, where there are any, else a hostile one."""
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
