"""Feeds inputs to a surface for a given time, and reports the findings.

The corpus comes first. New inputs come in batches; between batches the surface is set up again, and
anything that it has left open is a finding, too. Later batches recombine parts of the inputs that
reached new lines.
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
"""The share of inputs that are variations of these."""
MOST_STEPS = 24
LESS_TRIES = 40
"""How many attempts are made to shorten an input that found something."""
GROWTH_KB = 128 * 1024
"""How much a process may grow after its first quarter; a leak with each input soon exceeds it."""
TICK_S = 1.0
STOPPED_S = 10.0
"""A running process exceeds `TICK_S` between two ticks by a hundredth at most."""


@dataclass
class Result:
    """The result of one surface."""

    surface: str
    inputs: int = 0
    replayed: int = 0
    seconds: float = 0.0
    lines: int = 0
    found: dict[str, tuple[Input, str]] = field(default_factory=dict)
    """By error: the input, and all that is known of it."""

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
    """Try a surface for a number of seconds, or with `most` inputs if that is less."""
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
        # Anything opened or loaded once for the whole process is no leak, and its time does not
        # count.
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
        """Set the surface up; anything open afterwards that was not open before is a finding."""
        before = _open_now()
        with tempfile.TemporaryDirectory() as folder, self._surface.open(Path(folder)) as take:
            yield take
        until = time.monotonic() + PATIENCE_S
        # Threads of gRPC end a little after their calls.
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
        """Shorten an input while it still finds the same, if that takes few attempts."""
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
    """Remove each step in turn, then each half of its bytes."""
    if len(steps) > 1:
        for at in range(len(steps)):
            yield steps[:at] + steps[at + 1 :]
    for at, (kind, data) in enumerate(steps):
        half = len(data) // 2
        for less in (data[:half], data[half:]) if half else ():
            yield (*steps[:at], (kind, less), *steps[at + 1 :])


def _varied(pool: Sequence[Input], dice: random.Random) -> Input:
    """Combine parts of inputs that reached new lines, and damage them."""
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
    """An input failed while this process was stopped, which proves nothing about the input."""


def _take_in_time(take: Take, steps: Input) -> None:
    """Try an input; if it does not return in time, it is interrupted where it is.

    Time in which this process does not run is not counted as silence: the ticks missed meanwhile
    count as one.

    Raises:
        StoppedError: it failed, but the process was stopped, and the waits here depend on the
    clock.
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
"""The descriptors and their targets; the number of threads; the number of processes."""


def _open_now() -> _Open:
    files = {}
    for fd in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208
        with suppress(FileNotFoundError):  # It was the descriptor used for listing.
            files[fd] = os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115
    return files, threading.active_count(), len(_children())


def _left(before: _Open) -> str:
    """Describe what is open beyond the initial state."""
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
