"""How much memory is free: the minimum of what the machine and each cgroup leave."""

from __future__ import annotations

from pathlib import Path

from rdzv.agent.runner.system import free_bytes

MIB = 1 << 20


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def machine(folder: Path, membership: str) -> tuple[Path, Path]:
    proc, cgroup = folder / "proc", folder / "cgroup"
    write(proc / "meminfo", f"MemTotal: 9999999 kB\nMemAvailable: {4096 * MIB // 1024} kB\n")
    write(proc / "self" / "cgroup", membership)
    return proc, cgroup


def test_without_limits_it_is_what_the_machine_has(tmp_path: Path) -> None:
    proc, cgroup = machine(tmp_path, "0::/job\n")
    write(cgroup / "cgroup.controllers", "memory")
    write(cgroup / "job" / "memory.max", "max\n")
    assert free_bytes(proc, cgroup) == 4096 * MIB
    assert free_bytes(tmp_path / "none", cgroup) is None


def test_the_tightest_limit_above_counts_without_the_page_cache(tmp_path: Path) -> None:
    proc, cgroup = machine(tmp_path, "0::/slice/job\n")
    write(cgroup / "cgroup.controllers", "memory")
    write(cgroup / "slice" / "memory.max", f"{1000 * MIB}\n")
    write(cgroup / "slice" / "memory.current", f"{900 * MIB}\n")
    stat = f"anon {500 * MIB}\ninactive_file {300 * MIB}\nactive_file {50 * MIB}\n"
    write(cgroup / "slice" / "memory.stat", stat)
    write(cgroup / "slice" / "job" / "memory.max", f"{800 * MIB}\n")
    write(cgroup / "slice" / "job" / "memory.current", f"{100 * MIB}\n")
    assert free_bytes(proc, cgroup) == (1000 - 900 + 350) * MIB


def test_the_first_version_of_cgroups_is_read_as_well(tmp_path: Path) -> None:
    proc, cgroup = machine(tmp_path, "5:cpu:/\n4:cpuset,memory:/host/only\n0::/\n")
    write(cgroup / "memory" / "memory.limit_in_bytes", f"{1000 * MIB}\n")
    write(cgroup / "memory" / "memory.usage_in_bytes", f"{900 * MIB}\n")
    stat = f"inactive_file {MIB}\ntotal_inactive_file {300 * MIB}\ntotal_active_file 0\n"
    write(cgroup / "memory" / "memory.stat", stat)
    assert free_bytes(proc, cgroup) == 400 * MIB
