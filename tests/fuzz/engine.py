"""Gives inputs to a surface for as long as asked, and says what came of it.

The corpus comes first. New inputs come in batches; between them what takes them is set up anew, and
whatever it has left open is a finding, too. Inputs that reached new lines are taken apart and put
together again by later batches.
"""

from __future__ import annotations

import gc
import os
import random
import re
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType

from tests.fuzz import corpus
from tests.fuzz.lines import Lines
from tests.fuzz.surface import HANG_S, PATIENCE_S, FoundError, Input, Surface, Take, where

BATCH = 200
POOL = 200
"""Inputs that reached something new and are still varied."""
VARIED = 0.4
"""How many of all inputs are varied from such."""
MOST_STEPS = 24
LESS_TRIES = 40
"""How often an input that found something is cut down."""
GROWTH_KB = 128 * 1024
"""What a process may grow by after its first quarter; what leaks with each input is soon more."""
TICK_S = 1.0
STOPPED_S = 10.0
"""Between two ticks of a process that runs there is a hundredth of it more than `TICK_S`."""


@dataclass
class Result:
    """What came of one surface."""

    surface: str
    inputs: int = 0
    replayed: int = 0
    seconds: float = 0.0
    lines: int = 0
    found: dict[str, tuple[Input, str]] = field(default_factory=dict)
    """By what is wrong: the input, and all that is known of it."""

    def __str__(self) -> str:
        return (
            f"{self.surface:7} {self.inputs:7} inputs ({self.replayed} of the corpus) in "
            f"{self.seconds:6.1f} s, {self.lines:5} lines reached, {len(self.found)} findings"
        )


def fuzz(
    surface: Surface,
    seconds: float,
    *,
    first_seed: int,
    most: int | None = None,
    batch: int = BATCH,
) -> Result:
    """Try a surface for so many seconds, or with `most` inputs if that is less."""
    return _Run(surface, first_seed, most, batch).run(seconds)


class _Run:
    def __init__(self, surface: Surface, first_seed: int, most: int | None, batch: int) -> None:
        self._surface = surface
        self._dice = random.Random(first_seed)
        self._most = most
        self._batch = batch
        self._lines = Lines()
        self._pool: list[Input] = []
        self._result = Result(surface.name)

    def run(self, seconds: float) -> Result:
        result = self._result
        # What is opened, or loaded, once for the whole process is no leak, and takes no time of it.
        with tempfile.TemporaryDirectory() as folder, self._surface.open(Path(folder)):
            pass
        began = time.monotonic()
        first_kb = 0
        with self._lines.watched():
            kept = [*corpus.load(self._surface.name).values()]
            result.replayed = len(kept)
            while kept:
                with suppress(StoppedError), self._opened() as take:
                    while kept:
                        self._try(take, kept[-1])
                        kept.pop()
            while time.monotonic() - began < seconds and not self._is_enough():
                with suppress(StoppedError), self._opened() as take:
                    self._one_batch(take, began + seconds)
                self._dice.shuffle(self._pool)
                del self._pool[POOL:]
                if time.monotonic() - began > seconds / 4:
                    first_kb = first_kb or _resident_kb()
        if first_kb and _resident_kb() - first_kb > GROWTH_KB:
            self._note((), FoundError(f"leak: {_resident_kb() - first_kb} KiB of memory"))
        result.seconds, result.lines = time.monotonic() - began, self._lines.reached
        return result

    def _is_enough(self) -> bool:
        return self._most is not None and self._result.inputs - self._result.replayed >= self._most

    @contextmanager
    def _opened(self) -> Iterator[Take]:
        """Set the surface up; what is open afterwards and was not before is a finding."""
        before = _open_now()
        with tempfile.TemporaryDirectory() as folder, self._surface.open(Path(folder)) as take:
            yield take
        until = time.monotonic() + PATIENCE_S
        # Threads of gRPC end a little after what they served.
        while (left := _left(before)) and time.monotonic() < until:
            gc.collect()
            time.sleep(0.01)
        if left:
            self._note((), FoundError(f"leak: {left}"))

    def _one_batch(self, take: Take, until: float) -> None:
        for _ in range(self._batch):
            if time.monotonic() > until or self._is_enough():
                return
            varied = self._pool and self._dice.random() < VARIED
            make = partial(_varied, self._pool) if varied else self._surface.make
            steps, before = make(self._dice), self._lines.reached
            self._try(take, steps)
            if self._lines.reached > before:
                self._pool.append(steps)

    def _try(self, take: Take, steps: Input) -> None:
        try:
            _take_in_time(take, steps)
        except StoppedError:
            raise
        except Exception as error:
            if where(error) not in self._result.found:
                self._note(self._less(take, steps, where(error)), error)
        self._result.inputs += 1

    def _less(self, take: Take, steps: Input, what: str) -> Input:
        """Cut an input down to what still finds the same, if that needs few tries."""
        tries = 0
        parts = _parts(steps)
        while tries < LESS_TRIES and "hang" not in what and (less := next(parts, None)) is not None:
            tries += 1
            try:
                _take_in_time(take, less)
            except Exception as error:
                if where(error) == what:
                    steps, parts = less, _parts(less)
        return steps

    def _note(self, steps: Input, error: BaseException) -> None:
        what = where(error)
        if what not in self._result.found:
            self._result.found[what] = (steps, f"{error!r}")


def _parts(steps: Input) -> Iterator[Input]:
    """Take each step away, then each half of its bytes."""
    if len(steps) > 1:
        for at in range(len(steps)):
            yield steps[:at] + steps[at + 1 :]
    for at, (kind, data) in enumerate(steps):
        half = len(data) // 2
        for less in (data[:half], data[half:]) if half else ():
            yield (*steps[:at], (kind, less), *steps[at + 1 :])


def _varied(pool: Sequence[Input], dice: random.Random) -> Input:
    """Put together parts of inputs that went somewhere, and damage them."""
    steps = [*dice.choice(pool), *(dice.choice(pool) if dice.random() < 0.5 else ())]
    for _ in range(dice.randint(0, 3)):
        at = dice.randrange(len(steps))
        kind, data = steps[at]
        change = dice.random()
        if change < 0.2 and len(steps) > 1:
            del steps[at]
        elif change < 0.4:
            steps.insert(at, (kind, data))
        elif change < 0.5:
            steps[at] = (kind, data[: dice.randint(0, len(data))])
        else:
            place = dice.randint(0, len(data))
            taken = place + dice.randint(0, 4)
            steps[at] = (kind, data[:place] + dice.randbytes(dice.randint(0, 4)) + data[taken:])
    return tuple(steps[:MOST_STEPS])


# ------------------------------------------------------------------------------------ watching


class StoppedError(Exception):
    """An input has failed while this process was stopped, which proves nothing of the input."""


def _take_in_time(take: Take, steps: Input) -> None:
    """Give an input; what does not come back is broken off where it is.

    Time in which this process does not run is no silence of what is tried: the ticks that would
    have come meanwhile come as one.

    Raises:
        StoppedError: it failed, but the process was stopped, and what waits here goes by the clock.

    """
    ticks = 0
    stopped = False
    seen = time.monotonic(), time.process_time()

    def look() -> None:
        nonlocal seen, stopped
        now = time.monotonic(), time.process_time()
        gone_s, ran_s = (at - then for at, then in zip(now, seen, strict=True))
        stopped = stopped or (gone_s > STOPPED_S and ran_s < gone_s / 10)
        seen = now

    def tick(number: int, frame: FrameType | None) -> None:
        nonlocal ticks
        ticks += 1
        look()
        if ticks * TICK_S > HANG_S + PATIENCE_S:
            raise FoundError(f"hang: nothing for {HANG_S + PATIENCE_S:g} s")

    before = signal.signal(signal.SIGALRM, tick)
    signal.setitimer(signal.ITIMER_REAL, TICK_S, TICK_S)
    try:
        take(steps)
    except Exception as error:
        look()
        if stopped:
            raise StoppedError from error
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


_Open = tuple[Mapping[int, str], int, int]
"""Descriptors and what each is of; how many threads; how many processes."""


def _open_now() -> _Open:
    files = {}
    for fd in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208
        with suppress(FileNotFoundError):  # It was the one that listed.
            files[fd] = os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115
    return files, threading.active_count(), len(_children())


def _left(before: _Open) -> str:
    """Say what is open beyond what was."""
    (files, *now), (files_then, *then) = _open_now(), before
    more = (len(files) - len(files_then), *map(int.__sub__, now, then))
    of = {re.sub(r"\d+", "N", files[fd]) for fd in files.keys() - files_then.keys()}
    names = (f"descriptors of {sorted(of)}", "threads", "processes")
    return ", ".join(f"{n} {name}" for n, name in zip(more, names, strict=True) if n > 0)


def _children() -> list[str]:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


def _resident_kb() -> int:
    gc.collect()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))
