"""A torchrun that has done its imports; see `forked_programs`."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from forked_programs import Forked, forked_programs

TORCHRUN = Path(sys.executable).with_name("torchrun")
_STREAMS = {
    "stdin": os.O_RDONLY,
    "stdout": os.O_WRONLY | os.O_APPEND,
    "stderr": os.O_WRONLY | os.O_APPEND,
}

Start = Callable[[Sequence[str], Path, Mapping[str, str]], Forked]
"""Starts torchrun with these words, in this folder, where the files stdin, stdout and stderr are
for it, and with this environment."""


@contextlib.contextmanager
def ready_torchrun(folder: Path, environ: Mapping[str, str]) -> Iterator[Start]:
    """Keep a process ready to be forked, with the environment that matters at its start."""
    # Without it numpy has as many threads as there are CPUs once it is imported.
    own = {**environ, "OPENBLAS_NUM_THREADS": "1"}
    with forked_programs(folder, own, ["torch.distributed.run"], interpreter()) as fork:

        def start(words: Sequence[str], home: Path, environ: Mapping[str, str]) -> Forked:
            with streams_in(home) as streams:
                return fork([str(TORCHRUN), *words], home, environ, streams)

        yield start


@contextlib.contextmanager
def streams_in(home: Path) -> Iterator[list[int]]:
    """Open the files stdin, stdout and stderr of a folder."""
    streams = [os.open(home / name, how | os.O_CREAT, 0o666) for name, how in _STREAMS.items()]
    try:
        yield streams
    finally:
        for stream in streams:
            os.close(stream)


def interpreter() -> str:
    """Return the Python that torchrun is executed with, by the name that it passes to workers."""
    first_line = TORCHRUN.read_text().partition("\n")[0]
    named = first_line.removeprefix("#!")
    return named if Path(named).name.startswith("python") else sys.executable
