"""What the runner reads in /proc and /sys: a process's TCP connections, and free memory."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from rdzv.agent.runner.processes import live_connection
from rdzv.agent.runner.system import free_bytes


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as closing:
        yield closing


def connected(stack: ExitStack, family: socket.AddressFamily, host: str) -> socket.socket:
    """Return a connection of this process to its own listener, whose other end stays open."""
    listener = stack.enter_context(socket.create_server((host, 0), family=family))
    client = stack.enter_context(socket.create_connection(listener.getsockname()[:2]))
    stack.enter_context(listener.accept()[0])
    return client


def live(*endpoints: tuple[str, int]) -> tuple[str, int] | None:
    return live_connection(os.getpid(), endpoints)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")]
)
def test_a_connection_is_live_until_it_is_shut_down(
    stack: ExitStack, family: socket.AddressFamily, host: str
) -> None:
    if family is socket.AF_INET6 and not socket.has_dualstack_ipv6():
        pytest.skip("there is no IPv6 here")
    client = connected(stack, family, host)
    port = client.getpeername()[1]
    assert live((host, port)) == (host, port)
    assert live(("localhost", port)) == (host, port)
    assert live(("192.0.2.1", port), (host, port + 1)) is None
    client.shutdown(socket.SHUT_RDWR)
    deadline = time.monotonic() + 10
    while live((host, port)) is not None:  # The other end, also in this process, notices it later.
        assert time.monotonic() < deadline


@pytest.mark.slow
def test_an_address_of_ipv4_in_ipv6_is_the_same(stack: ExitStack) -> None:
    client = connected(stack, socket.AF_INET, "127.0.0.1")
    port = client.getpeername()[1]
    assert live(("::ffff:127.0.0.1", port)) == ("127.0.0.1", port)
    if not socket.has_dualstack_ipv6():
        pytest.skip("there is no IPv6 here")
    both = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    stack.enter_context(both)
    visitor = stack.enter_context(socket.create_connection(("127.0.0.1", both.getsockname()[1])))
    accepted = stack.enter_context(both.accept()[0])
    # The kernel lists this one among those of IPv6, which are all read for an address not found.
    assert accepted.getpeername()[0] == "::ffff:127.0.0.1"
    assert live(("192.0.2.1", visitor.getsockname()[1])) is None


def test_another_process_is_looked_at_and_one_that_is_gone_is_an_error() -> None:
    assert live_connection(os.getppid(), [("127.0.0.1", 9)]) is None
    with pytest.raises(OSError, match="No such file"):
        live_connection(4_000_000, [("127.0.0.1", 9)])


# ---------------------------------------------------------------------- free memory

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
