"""Where a server's CPU time goes: by part of the process, and by module of Python.

Two samplers look at one process at the same time, and neither asks anything of it:

* `perf` counts, for all threads, which library runs: gRPC's core (HTTP/2 and TLS, which it cannot
  tell apart: compare runs with and without TLS), the kernel (sockets, and threads that wake one
  another), Python's interpreter, protobuf, the store;
* `py-spy` looks at what holds the interpreter's lock, and says which function of which package is
  the innermost. What gRPC's core does for Python meanwhile is counted to the function that calls
  it; `Handle._run` of asyncio is the core's own callbacks.

Shares are of samples in which the process ran. The samplers hold it up, so CPU times are to be
measured without them.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

PERF_HZ = 997
SPY_HZ = 100
READY_S = 1.0
WRITTEN_S = 60.0
LEAST = 0.005
MOST = 40
"""The smallest share shown, and the most rows."""

PARTS = (
    ("cygrpc", "gRPC's core"),
    ("kernel", "kernel"),
    ("vdso", "kernel"),
    ("_upb", "protobuf"),
    ("msgspec", "structs"),
    ("sqlite", "SQLite"),
    ("python", "Python's interpreter"),
    ("libc", "libc"),
    ("ld-linux", "libc"),
)
"""By part of a library's file name: its name here; others keep their own."""

_FRAME = re.compile(r"(?P<function>.+?) \((?P<file>.+?):\d+\)$")
_PACKAGES = ("rdzv", "google", "grpc", "asyncio", "sqlite3", "logging")


class Profile:
    """The results of two samplers for one act."""

    def __init__(self, parts: Mapping[str, int], functions: Mapping[str, int]) -> None:
        self._parts = _shares(parts)
        self._packages = _shares(_by_package(functions))
        self._functions = _shares(functions)

    def __str__(self) -> str:
        """Show shares as lines, the largest first."""
        return "\n".join(
            [
                *_lines("all threads, by part", self._parts),
                *_lines("Python, by package", self._packages),
                *_lines("Python, by function", self._functions),
            ]
        )


def _lines(what: str, shares: Mapping[str, float]) -> list[str]:
    shown = [(name, share) for name, share in shares.items() if share >= LEAST][:MOST]
    return [f"  {what}:", *(f"    {100 * share:5.1f} %  {name}" for name, share in shown)]


def _by_package(functions: Mapping[str, int]) -> Counter[str]:
    counted: Counter[str] = Counter()
    for name, count in functions.items():
        file = name.partition(" ")[0]
        counted[str(Path(file).parent) if file.startswith("rdzv/") else file] += count
    return counted


def _shares(counted: Mapping[str, int]) -> dict[str, float]:
    total = sum(counted.values()) or 1
    in_order = sorted(counted.items(), key=lambda item: -item[1])
    return {name: count / total for name, count in in_order}


@contextmanager
def profiled(pid: int, folder: Path) -> Iterator[list[Profile]]:
    """Sample a process during the body; the list then has its profile.

    Raises:
        RuntimeError: there is no perf on this machine, or it may not look.

    """
    perf, stacks = folder / "perf.data", folder / "stacks.txt"
    if shutil.which("perf") is None:
        raise RuntimeError("a profile needs perf; install linux-perf (or leave --profile out)")
    spy = Path(sys.executable).parent / "py-spy"
    commands = (
        ["perf", "record", f"--freq={PERF_HZ}", f"--pid={pid}", f"--output={perf}"],
        [
            str(spy),
            "record",
            f"--pid={pid}",
            f"--rate={SPY_HZ}",
            "--format=raw",
            "--full-filenames",
            "--gil",
            f"--output={stacks}",
        ],
    )
    samplers = [
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    found: list[Profile] = []
    try:
        for sampler in samplers:
            _check_runs(sampler)
        yield found
    finally:
        for sampler in samplers:
            sampler.send_signal(signal.SIGINT)
        for sampler in samplers:
            sampler.communicate(timeout=WRITTEN_S)
    found.append(Profile(_listed(perf), functions(stacks.read_text())))


def _check_runs(sampler: subprocess.Popen[str]) -> None:
    try:
        sampler.wait(READY_S)
    except subprocess.TimeoutExpired:
        return
    _, said = sampler.communicate()
    raise RuntimeError(f"a sampler has ended: {said.strip() or sampler.returncode}")


def _listed(perf: Path) -> Counter[str]:
    listed = subprocess.run(
        ["perf", "script", f"--input={perf}", "--fields=ip,dso"],
        check=True,
        capture_output=True,
        text=True,
    )
    return parts(listed.stdout)


def parts(listed: str) -> Counter[str]:
    """Count samples by part, as `perf script` lists them: an address and a file in brackets.

    >>> parts("  7f00 (/usr/lib/libpython3.11.so)\\n  ff00 ([kernel.kallsyms])\\n")
    Counter({"Python's interpreter": 1, 'kernel': 1})
    """
    files = (line.rpartition(" (")[2].rstrip(")") for line in listed.splitlines() if line.strip())
    return Counter(_part(Path(file).name) for file in files)


def _part(file: str) -> str:
    return next((name for part, name in PARTS if part in file), file)


def functions(stacks: str) -> Counter[str]:
    """Count samples by the innermost function of one of the packages, as py-spy lists stacks.

    >>> functions("main (rdzv/server/driver.py:3);_run (asyncio/events.py:80);f (x.py:1) 5")
    Counter({'asyncio/events.py _run': 5})
    """
    counted: Counter[str] = Counter()
    for line in stacks.splitlines():
        stack, _, count = line.rpartition(" ")
        counted[_innermost(stack.split(";"))] += int(count)
    return counted


def _innermost(frames: list[str]) -> str:
    for frame in reversed(frames):
        if (read := _FRAME.match(frame)) is None:
            continue
        path = Path(read["file"]).parts
        if (at := next((i for i, part in enumerate(path) if part in _PACKAGES), None)) is not None:
            return f"{'/'.join(path[at:])} {read['function']}"
    return "other"
