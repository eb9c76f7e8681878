"""Finds processes that the kernel killed because memory ran out.

The kernel's log names the process, if this agent may read it and sees the kernel's own pids. It may
be a child of the worker, such as a DataLoader's process, without which the worker fails. Elsewhere,
as in most containers, the counters of the cgroups and the machine are compared with their values at
the start of the round. The kernel counts a kill before it sends the signal.

Sources: `Documentation/admin-guide/cgroup-v2.rst` (`memory.events`, `memory.max`, `memory.peak`),
`cgroup-v1/memory.rst` and `mm/oom_kill.c` (the lines of the log) of Linux 6.1.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import field
from pathlib import Path

from rdzv.agent.inventory.resources import CGROUP, PROC, MemoryCgroup, memory_cgroups, read_text
from rdzv.agent.inventory.xid import KMSG, read_records
from rdzv.core.words import size_text
from rdzv.structs import struct

RECENT_S = 60.0
"""The age above which a log record may be about an earlier process with the worker's pid."""
FOLLOWS_S = 10.0
"""How old another kill may be to count. A DataLoader looks after its processes every 5 s."""

_KILLED = re.compile(r"^oom-kill:constraint=\w+,.*,task=(.*),pid=(\d+),uid=(\d+)$")
_CGROUP = re.compile(r",oom_memcg=([^,]*),")
INIT_PID_NAMESPACE = "pid:[4026531836]"
"""What /proc/self/ns/pid links to where pids are those of the kernel's log."""


@struct(frozen=True)
class MemoryKills:
    """How many processes the kernel has killed because memory ran out."""

    machine: int | None = None
    """The count for the whole machine, or None if the kernel does not provide it."""
    cgroups: Mapping[MemoryCgroup, int] = field(default_factory=dict)
    """The counts for this process's memory cgroups, innermost first."""


def count_memory_kills(proc: Path = PROC, cgroup: Path = CGROUP) -> MemoryKills:
    cgroups = {}
    for place in memory_cgroups(proc, cgroup):
        count = _value_of("oom_kill", read_text(place.events))
        if count is not None:
            cgroups[place] = count
    return MemoryKills(_value_of("oom_kill", read_text(proc / "vmstat")), cgroups)


@struct(frozen=True)
class _Kill:
    pid: int
    uid: int
    task: str
    cgroup: str | None
    """The cgroup that was out of memory, or None if it was the machine."""
    age_s: float


def explain_memory_kill(
    pid: int,
    before: MemoryKills,
    *,
    killed: bool,
    uid: int,
    proc: Path = PROC,
    cgroup: Path = CGROUP,
    kernel_log: Path = KMSG,
) -> str:
    """Describe what the kernel killed for lack of memory as a worker failed, or return "".

    That is the worker itself if it was `killed` (by SIGKILL), or a process of the same account,
    `uid`. `before` holds the counts from before the worker started.
    """
    kills: list[_Kill] = []
    with suppress(OSError):
        kills = list(_kills(read_records(kernel_log), time.monotonic()))[::-1]
    now = count_memory_kills(proc, cgroup)
    risen = [place for place, n in now.cgroups.items() if n > before.cgroups.get(place, n)]

    def shortage(place: str | None) -> str:
        if place is None:
            return f"because the machine was out of memory{_machine(proc)}"
        places = [known for known in now.cgroups if place.endswith(known.name)] + risen
        limit = _limit(places[0]) if places else ""
        return f"because cgroup {place} was out of memory{limit}"

    for kill in kills if killed else ():
        if kill.pid == pid:
            return f"the kernel killed it {shortage(kill.cgroup)}"
    if _link(proc / "self" / "ns" / "pid") == INIT_PID_NAMESPACE:
        for kill in kills:
            if kill.pid != pid and kill.uid == uid and kill.age_s <= FOLLOWS_S:
                return (
                    f"{kill.age_s:.1f} s before, the kernel killed pid {kill.pid} ({kill.task}) of "
                    f"the same account {shortage(kill.cgroup)}"
                )
    if not killed:
        return ""
    if risen:
        return (
            "most likely the kernel killed it: since it started, a process was killed "
            f"{shortage(risen[0].name)}"
        )
    if now.machine is not None and before.machine is not None and now.machine > before.machine:
        return (
            "most likely the kernel killed it: since it started, a process was killed "
            f"because memory ran out on this machine{_machine(proc)}"
        )
    return ""


def _kills(records: Iterable[str], now_s: float) -> Iterator[_Kill]:
    for record in records:
        head, _, text = record.partition(";")
        fields = head.split(",")
        killed = _KILLED.match(text.rstrip())
        if killed is None or len(fields) < 3 or not fields[2].isdecimal():
            continue
        age_s = max(now_s - int(fields[2]) / 1e6, 0.0)
        if age_s <= RECENT_S:
            named = _CGROUP.search(text)
            place = named[1] if named is not None else None
            yield _Kill(int(killed[2]), int(killed[3]), killed[1], place, age_s)


def _link(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:
        return ""


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
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == name and words[1].isdigit():
            return int(words[1])
    return None
