"""The store host serves a connection of every rank of a large job, and nothing else holds it up."""

from __future__ import annotations

import platform
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from runners import STORE_HOST

pytest.importorskip("torch", reason="torch is not installed")

SOFT_LIMIT = 64
"""Of open files; where it is 1,024, as usual, the ranks would be as many more."""
PATIENCE_S = 120.0
VALIDATE_AND_PING = struct.pack("<BIBI", 0, 0x3C85F7CE, 13, 0)
SYSTEM_CALLS = {"x86_64": (41, 317), "aarch64": (198, 277)}
"""By machine: socket(2) and seccomp(2)."""

# With a last argument, the kernel kills the process at its next socket(2).
SERVE = """
import ctypes, resource, runpy, struct, sys

program, fd, limit, *calls = sys.argv[1:]
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (int(limit), hard))
store = runpy.run_path(program, run_name="store_host")["serve"](int(fd), whole_torch=True)
if calls:
    forbidden, seccomp = map(int, calls)
    load, kill, allow = (0x20, 0, 0, 0), (0x06, 0, 0, 0x80000000), (0x06, 0, 0, 0x7FFF0000)
    rules = b"".join(struct.pack("HBBI", *rule) for rule in
                     (load, (0x15, 0, 1, forbidden), kill, allow))
    filters = ctypes.create_string_buffer(rules)
    program = struct.pack("HxxxxxxQ", 4, ctypes.addressof(filters))
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, set_filter, all_threads = 38, 1, 1
    assert libc.prctl(no_new_privileges, 1, 0, 0, 0) == 0
    assert libc.syscall(seccomp, set_filter, all_threads, program) == 0, ctypes.get_errno()
print("serves", flush=True)
sys.stdin.readline()
"""


@contextmanager
def serving(*system_calls: int) -> Iterator[int]:
    """Serve a store on all addresses, as on a cluster; the value is its port."""
    with socket.create_server(
        ("::", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=512
    ) as listening:
        options = [STORE_HOST, listening.fileno(), SOFT_LIMIT, *system_calls]
        with subprocess.Popen(
            [sys.executable, "-c", SERVE, *map(str, options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=(listening.fileno(),),
        ) as process:
            port = int(listening.getsockname()[1])
            listening.close()
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == "serves\n"
                yield port
            finally:
                process.kill()


def connect(stack: ExitStack, port: int) -> socket.socket:
    """Connect as a rank does."""
    rank = stack.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE_S))
    rank.sendall(VALIDATE_AND_PING)
    return rank


def test_there_may_be_more_ranks_than_the_soft_limit_of_open_files() -> None:
    with serving() as port, ExitStack() as stack:
        ranks = [connect(stack, port) for _ in range(2 * SOFT_LIMIT)]
        assert [len(rank.recv(4)) for rank in ranks] == [4] * len(ranks)


@pytest.mark.skipif(platform.machine() not in SYSTEM_CALLS, reason="its calls are not known here")
def test_no_name_service_is_asked_who_connects() -> None:
    """Torch's server asks for the name of each client, and serves nobody until it is answered."""
    with serving(*SYSTEM_CALLS[platform.machine()]) as port, ExitStack() as stack:
        assert len(connect(stack, port).recv(4)) == 4
        assert len(connect(stack, port).recv(4)) == 4
