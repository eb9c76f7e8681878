"""How much more memory can be used on the machine and in this process's cgroups."""

from __future__ import annotations

from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_NO_LIMIT_BYTES = 1 << 60


def free_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the bytes available without swapping or reaching a limit, or None if unknown."""
    return min([*_of_machine(proc), *_of_cgroups(proc, cgroup)], default=None)


def _of_machine(proc: Path) -> Iterator[int]:
    for line in _read(proc / "meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            yield int(value.split()[0]) * 1024


def _of_cgroups(proc: Path, cgroup: Path) -> Iterator[int]:
    for line in _read(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top = cgroup if (cgroup / "cgroup.controllers").exists() else cgroup / "unified"
            limit, usage, prefix = "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            top = cgroup / "memory"
            limit, usage, prefix = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
        else:
            continue
        below = Path(path.lstrip("/"))
        # Inside a container, the path may be the host's, and only the top of the hierarchy is
        # visible.
        for place in (below, *below.parents):
            limited, used = _read(top / place / limit).strip(), _read(top / place / usage).strip()
            if limited.isdigit() and int(limited) < _NO_LIMIT_BYTES and used.isdigit():
                cached = _cached_bytes(_read(top / place / "memory.stat"), prefix)
                yield int(limited) - int(used) + cached


def _cached_bytes(stat: str, prefix: str) -> int:
    """Return the number of bytes that the kernel can reclaim when memory is needed."""
    names = (f"{prefix}inactive_file", f"{prefix}active_file")
    pairs = (line.split() for line in stat.splitlines())
    return sum(int(value) for name, value in pairs if name in names)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
