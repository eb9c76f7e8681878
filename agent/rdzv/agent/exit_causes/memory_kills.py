"""Finds processes that the kernel killed because memory ran out.

The kernel's log names the process, if this agent may read it and sees the kernel's own pids.
Elsewhere, as in most containers, the counters of the cgroups and the machine are compared with
their values at the start of the round. The kernel counts a kill before it sends the signal.

Sources: `Documentation/admin-guide/cgroup-v2.rst` (`memory.events`, `memory.max`, `memory.peak`),
`cgroup-v1/memory.rst` and `mm/oom_kill.c` (the lines of the log) of Linux 6.1.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field
from pathlib import Path

from rdzv.agent.inventory.resources import CGROUP, PROC, MemoryCgroup, memory_cgroups, read_text
from rdzv.agent.inventory.xid import KMSG, read_records
from rdzv.core.words import size_text
from rdzv.structs import struct

RECENT_S = 60.0
"""The age above which a log record may be about an earlier process with the worker's pid."""

_KILLED = re.compile(r"^oom-kill:constraint=(\w+),.*\bpid=(\d+),uid=\d+$")
_CGROUP = re.compile(r",oom_memcg=([^,]*),")


@struct(frozen=True)
class MemoryKills:
    """How many processes the kernel has killed because memory ran out."""

    machine: int | None = None
    """The count for the whole machine, or None if the kernel does not provide it."""
    cgroups: Mapping[MemoryCgroup, int] = field(default_factory=dict)
    """The counts for this process's memory cgroups, innermost first."""


def count_memory_kills(proc: Path = PROC, cgroup: Path = CGROUP) -> MemoryKills:
    """Return the current counts, leaving out any that cannot be read."""
    cgroups = {}
    for place in memory_cgroups(proc, cgroup):
        count = _value_of("oom_kill", read_text(place.events))
        if count is not None:
            cgroups[place] = count
    return MemoryKills(_value_of("oom_kill", read_text(proc / "vmstat")), cgroups)


def explain_memory_kill(
    pid: int,
    before: MemoryKills,
    *,
    proc: Path = PROC,
    cgroup: Path = CGROUP,
    kernel_log: Path = KMSG,
) -> str:
    """Describe how the kernel killed a process for lack of memory, or return "" without evidence.

    `before` holds the counts from before the process started.
    """
    now = count_memory_kills(proc, cgroup)
    risen = [place for place, n in now.cgroups.items() if n > before.cgroups.get(place, n)]
    for record in _kills_logged(kernel_log, pid):
        named = _CGROUP.search(record)
        if named is None:
            return f"the kernel killed it because the machine was out of memory{_machine(proc)}"
        places = [place for place in now.cgroups if named[1].endswith(place.name)] + risen
        limit = _limit(places[0]) if places else ""
        return f"the kernel killed it because cgroup {named[1]} was out of memory{limit}"
    if risen:
        return (
            "most likely the kernel killed it: since it started, a process was killed "
            f"because cgroup {risen[0].name} was out of memory{_limit(risen[0])}"
        )
    if now.machine is not None and before.machine is not None and now.machine > before.machine:
        return (
            "most likely the kernel killed it: since it started, a process was killed "
            f"because memory ran out on this machine{_machine(proc)}"
        )
    return ""


def _kills_logged(kernel_log: Path, pid: int) -> Iterator[str]:
    """Yield recent lines about this process from the kernel's log, latest first."""
    try:
        records = read_records(kernel_log)
    except OSError:
        return
    yield from _kills_of(pid, records, time.monotonic())


def _kills_of(pid: int, records: Iterable[str], now_s: float) -> list[str]:
    found = []
    for record in records:
        head, _, text = record.partition(";")
        fields = head.split(",")
        killed = _KILLED.match(text.rstrip())
        if killed is None or int(killed[2]) != pid or len(fields) < 3 or not fields[2].isdecimal():
            continue
        if now_s - int(fields[2]) / 1e6 <= RECENT_S:
            found.append(text.rstrip())
    return found[::-1]


def _limit(place: MemoryCgroup) -> str:
    limit, peak = _bytes(place.limit), _bytes(place.peak)
    known = [f"limit {size_text(limit)}"] if limit else []
    known += [f"peak {size_text(peak)}"] if peak else []
    return f" ({', '.join(known)})" if known else ""


def _machine(proc: Path) -> str:
    kilobytes = _value_of("MemTotal:", read_text(proc / "meminfo"))
    return f" ({size_text(kilobytes * 1024)})" if kilobytes else ""


def _bytes(path: Path) -> int | None:
    text = read_text(path).strip()
    return int(text) if text.isdigit() else None


def _value_of(name: str, text: str) -> int | None:
    """Return the number that follows a name in lines of the form `NAME NUMBER`."""
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == name and words[1].isdigit():
            return int(words[1])
    return None
