"""Why a worker ended: a kill by the kernel, a full /dev/shm, a core dump, its last messages."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from rdzv.agent.exit_causes import ExitedWorker, MemoryKills, explain_exit
from rdzv.agent.exit_causes.exit_messages import explain_signal, find_core_dump
from rdzv.agent.exit_causes.last_words import KNOWN, explain_last_words, explain_peer_address
from rdzv.agent.exit_causes.memory_kills import (
    INIT_PID_NAMESPACE,
    count_memory_kills,
    explain_memory_kill,
)
from rdzv.structs import replace

PID = 4711


class Machine:
    """The files of a kernel with cgroup v2, or with v1."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.cgroup = folder / "proc", folder / "cgroup"
        self.kernel_log = folder / "kmsg"
        self.job = self.cgroup / "jobs" / "a"
        self.write(self.proc / "self" / "cgroup", "0::/jobs/a\n")
        (self.proc / "self" / "ns").mkdir()
        (self.proc / "self" / "ns" / "pid").symlink_to(INIT_PID_NAMESPACE)
        self.write(self.proc / "vmstat", "pgfault 7\noom_kill 3\n")
        self.write(self.proc / "meminfo", "MemTotal:       25165824 kB\nMemFree: 1 kB\n")
        self.write(self.cgroup / "cgroup.controllers", "memory\n")
        self.write(self.job / "memory.max", f"{16 << 30}\n")
        self.write(self.job / "memory.peak", f"{16 << 30}\n")
        self.write(self.job / "memory.events", "low 0\nhigh 0\nmax 9\noom 1\noom_kill 1\n")

    def write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def count(self) -> MemoryKills:
        return count_memory_kills(self.proc, self.cgroup)

    def explain(self, before: MemoryKills, *, killed: bool = True) -> str:
        files = {"proc": self.proc, "cgroup": self.cgroup, "kernel_log": self.kernel_log}
        return explain_memory_kill(PID, before, killed=killed, uid=1000, **files)

    def log(self, text: str, age_s: float = 0) -> None:
        at_us = int((time.monotonic() - age_s) * 1e6)
        self.write(self.kernel_log, f"3,100,{at_us},-;{text}\n")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "file", "text", "told"),
    [
        (16 << 30, "job/memory.events", "oom 2\noom_kill 2\n", "(limit 16 GiB, peak 16 GiB)"),
        (3 << 29, "job/memory.events", "oom_kill 2\n", "(limit 1.5 GiB, "),
        (1023 << 20, "job/memory.events", "oom_kill 2\n", "(limit 1023 MiB, "),
        (0, "proc/vmstat", "oom_kill 4\n", "memory ran out on this machine (24 GiB)"),
        (0, "job/memory.events", "oom_kill 1\n", ""),
    ],
)
def test_a_kill_since_the_round_began_is_named_with_what_ran_out(
    machine: Machine, limit: int, file: str, text: str, told: str
) -> None:
    machine.write(machine.job / "memory.max", f"{limit}\n")
    before = machine.count()
    folder, name = file.split("/")
    machine.write(getattr(machine, folder) / name, text)
    found = machine.explain(before)
    if told.startswith("(limit"):
        told = (
            "most likely the kernel killed it: since it started, a process was killed because "
            f"cgroup /jobs/a was out of memory {told}"
        )
    assert found.startswith(told) if told.endswith(", ") else told in found
    assert bool(found) is bool(told)


def test_what_cannot_be_read_explains_nothing(tmp_path: Path) -> None:
    empty = Machine.__new__(Machine)
    empty.proc, empty.cgroup, empty.kernel_log = tmp_path, tmp_path, tmp_path / "kmsg"
    assert empty.count() == MemoryKills()
    assert empty.explain(MemoryKills()) == ""
    assert empty.explain(MemoryKills(), killed=False) == ""


@pytest.mark.slow
def test_cgroup_v1_counts_kills_as_well(machine: Machine) -> None:
    machine.write(machine.proc / "self" / "cgroup", "5:cpu,memory:/jobs/b\n")
    job = machine.cgroup / "memory" / "jobs" / "b"
    machine.write(job / "memory.oom_control", "under_oom 0\noom_kill 0\n")
    machine.write(job / "memory.limit_in_bytes", f"{512 << 20}\n")
    before = machine.count()
    machine.write(job / "memory.oom_control", "under_oom 0\noom_kill 1\n")
    assert "cgroup /jobs/b was out of memory (limit 512 MiB)" in machine.explain(before)


MEMCG = (
    "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,"
    f"oom_memcg=/jobs/a,task_memcg=/jobs/a,task=python,pid={PID},uid=1000"
)
GLOBAL = (
    "oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,"
    f"task_memcg=/jobs/a,task=python,pid={PID},uid=1000"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("record", "why"),
    [
        (MEMCG, "cgroup /jobs/a was out of memory (limit 16 GiB, peak 16 GiB)"),
        (GLOBAL, "the machine was out of memory (24 GiB)"),
    ],
)
def test_the_log_names_process_and_memory(machine: Machine, record: str, why: str) -> None:
    machine.log(record)
    assert machine.explain(machine.count()) == f"the kernel killed it because {why}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "age_s"),
    [
        (MEMCG, 3600),
        (MEMCG.replace(f"{PID},uid=1000", "12,uid=1001"), 0),
        (f"a program that writes {MEMCG}", 0),
        ("oom-kill:constraint=", 0),
    ],
    ids=["an old record", "another process", "not the kernel's words", "cut off"],
)
def test_other_log_records_explain_nothing(machine: Machine, text: str, age_s: float) -> None:
    machine.log(text, age_s)
    assert machine.explain(machine.count()) == ""


CHILD = MEMCG.replace(f"task=python,pid={PID}", "task=pt_data_worker,pid=4800")


@pytest.mark.parametrize("killed", [True, False])
def test_another_process_of_the_account_is_named(machine: Machine, killed: bool) -> None:
    """Even if the worker was killed, the count has risen because of that process."""
    before = machine.count()
    machine.write(machine.job / "memory.events", "oom_kill 2\n")
    machine.log(CHILD, 2)
    told = machine.explain(before, killed=killed)
    assert re.fullmatch(
        r"2\.\d s before, the kernel killed pid 4800 \(pt_data_worker\) of the same account "
        r"because cgroup /jobs/a was out of memory \(limit 16 GiB, peak 16 GiB\)",
        told,
    )


@pytest.mark.parametrize(
    ("text", "age_s"), [(CHILD, 30), (CHILD.replace("uid=1000", "uid=1001"), 0), (MEMCG, 0)]
)
def test_of_others_the_log_says_nothing(machine: Machine, text: str, age_s: float) -> None:
    before = machine.count()
    machine.write(machine.job / "memory.events", "oom_kill 2\n")
    machine.log(text, age_s)
    assert machine.explain(before, killed=False) == ""


def test_pids_of_another_namespace_are_not_compared(machine: Machine) -> None:
    link = machine.proc / "self" / "ns" / "pid"
    link.unlink()
    link.symlink_to("pid:[4026532001]")
    machine.log(CHILD)
    assert machine.explain(machine.count()) == ""


# ---------------------------------------------------------------------- core dumps


def kernel(folder: Path, pattern: str, uses_pid: str = "1") -> Path:
    (folder / "core_pattern").write_text(pattern + "\n")
    (folder / "core_uses_pid").write_text(uses_pid + "\n")
    return folder


@pytest.mark.parametrize(
    ("pattern", "uses_pid", "name"),
    [
        ("core", "1", f"core.{PID}"),
        ("core", "0", "core"),
        ("core-%e-%p-%t", "0", f"core-python-{PID}-1700000000"),
        ("100%%-%p", "0", f"100%-{PID}"),
    ],
)
def test_a_core_file_is_found(tmp_path: Path, pattern: str, uses_pid: str, name: str) -> None:
    where = kernel(tmp_path, pattern, uses_pid)
    assert find_core_dump(PID, signal.SIGSEGV, tmp_path, None, where) == ""
    (tmp_path / name).write_bytes(b"\x7fELF")
    found = find_core_dump(PID, signal.SIGSEGV, tmp_path, None, where)
    assert found == f"its core dump: {tmp_path / name}"
    assert find_core_dump(PID, signal.SIGKILL, tmp_path, None, where) == ""
    os.utime(tmp_path / name, (1, 1))
    assert find_core_dump(PID, signal.SIGSEGV, tmp_path, None, where) == "", "another's, and old"


def test_a_link_is_no_core_file(tmp_path: Path) -> None:
    where = kernel(tmp_path, "core")
    (tmp_path / f"core.{PID}").symlink_to("/etc/passwd")
    assert find_core_dump(PID, signal.SIGABRT, tmp_path, None, where) == ""


def test_a_program_that_takes_core_dumps_is_named(tmp_path: Path) -> None:
    where = kernel(tmp_path, "|/usr/lib/systemd/systemd-coredump %P %u")
    assert find_core_dump(PID, signal.SIGSEGV, None, None, where) == (
        f"its core dump: coredumpctl info {PID}"
    )
    where = kernel(tmp_path, "|/usr/share/apport/apport %p")
    assert "piped to /usr/share/apport/apport" in find_core_dump(
        PID, signal.SIGSEGV, None, None, where
    )


# ---------------------------------------------------------------------- last words


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        (
            "h:1:2 [0] misc/shmutils.cc:113 NCCL WARN Error while creating shared memory segment "
            "/dev/shm/nccl-UbzKZ9 (size 9637888)\nncclSystemError: System call failed",
            "NCCL cannot make its shared memory",
        ),
        (
            "RuntimeError: DataLoader worker (pid 12) is killed by signal: Bus error. It is "
            "possible that dataloader's workers are out of shared memory.",
            "a DataLoader worker found no shared memory",
        ),
        (
            "RuntimeError: DataLoader worker (pid(s) 12, 13) exited unexpectedly",
            "a DataLoader worker was killed",
        ),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "memory is used"),
        ("ModuleNotFoundError: No module named 'torch'", "has no torch: install it there"),
        ("ModuleNotFoundError: No module named 'rdzv.worker'", "install the wheel rdzv_worker"),
        ("ModuleNotFoundError: No module named 'rdzv'", "install the wheel rdzv_worker"),
        ("CUDA error: uncorrectable ECC error encountered", "damaged"),
        (
            "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, "
            "OpType=BROADCAST) ran for 600081 milliseconds before timing out.",
            "that rank is the one to look at, not this one",
        ),
        (
            "NET/IB : Got completion from peer 10.2.0.5<33092> with error 12, opcode 0, len 0, "
            "vendor err 129 (Recv)",
            "InfiniBand",
        ),
        ("OSError: [Errno 24] Too many open files", "ulimit -n"),
        ("terminate called without an active exception", "destroy_process_group"),
        # It may be the result of something worse.
        ("terminate called without an active exception\nCUDA out of memory", "memory is used"),
    ],
)
def test_known_last_words_are_explained(text: str, meaning: str) -> None:
    assert meaning in explain_last_words(text)


def test_other_words_are_not() -> None:
    assert explain_last_words("[gloo/transport/tcp/pair.cc:547] Connection closed by peer") == ""
    assert explain_last_words("ModuleNotFoundError: No module named 'torchvision'") == ""
    assert explain_last_words("ValueError: lr must be positive\nloss 0.3, memory 12 GB\n") == ""


UNREACHED = (
    "RuntimeError: Gloo connectFullMesh failed with [/__w/pytorch/third_party/gloo/gloo/transport/"
    "tcp/pair.cc:152] timed out connecting: SO_ERROR: Connection refused, remote=[{}]:28082$1"
)


@pytest.mark.parametrize(
    ("address", "what"),
    [
        ("127.0.1.1", "127.0.1.1 is loopback"),
        ("::1", "::1 is loopback"),
        ("172.17.0.1", "172.17.0.1 is an address of this machine itself"),
        ("10.0.0.6", ""),
    ],
)
def test_an_unreached_peer_at_an_address_of_this_machine_is_said(address: str, what: str) -> None:
    found = explain_peer_address(UNREACHED.format(address), lambda: {"172.17.0.1"})
    assert found.startswith(what)
    assert bool(found) is bool(what)
    if what:
        assert "GLOO_SOCKET_IFNAME" in found
        assert "--local-addr" in found


def test_a_peer_that_was_reached_before_is_not() -> None:
    closed = "[/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:2808"
    assert explain_peer_address(closed, tuple) == ""
    assert explain_peer_address("cannot connect to the data base at [127.0.0.1]:5432", tuple) == ""


def test_each_pattern_compiles_and_has_a_source() -> None:
    for pattern, meaning, source in KNOWN:
        re.compile(pattern)
        assert source, pattern
        assert meaning[-1] not in ".!", "it stands in a longer message"


# ---------------------------------------------------------------------- together


def exited(folder: Path, signum: int | None, stderr: str = "") -> ExitedWorker:
    log = folder / "stderr.log"
    log.write_text(stderr)
    return ExitedWorker(PID, signum, folder / "error.json", log, folder, None, MemoryKills())


@pytest.mark.slow
def test_the_log_explains_what_the_exit_code_does_not(tmp_path: Path) -> None:
    long = "step\n" * 100_000 + "terminate called after throwing an instance of 'std::bad_alloc'\n"
    error = explain_exit(exited(tmp_path, signal.SIGABRT, long))
    assert error.message.startswith(f"received SIGABRT (pid {PID}): this process could not")


def test_what_was_written_before_an_exception_does_not_explain_it(tmp_path: Path) -> None:
    worker = exited(tmp_path, None, "Timed out waiting 4000ms for recv operation, trying again\n")
    raised = {"message": "KeyError: 'x'", "extraInfo": {"py_callstack": "KeyError: 'x'"}}
    worker.error_file.write_text(json.dumps({"message": raised}))
    assert explain_exit(worker).message == "KeyError: 'x'"
    worker.error_file.unlink()
    assert "that rank is the one to look at" in explain_exit(worker).message


def test_only_among_several_nodes_is_loopback_a_wrong_address(tmp_path: Path) -> None:
    alone = exited(tmp_path, None, UNREACHED.format("127.0.1.1"))
    assert "127.0.1.1 is" not in explain_exit(alone).message
    assert "127.0.1.1 is loopback" in explain_exit(replace(alone, has_other_nodes=True)).message


def test_a_message_that_nobody_knows_stays_as_it_is(tmp_path: Path) -> None:
    assert explain_exit(exited(tmp_path, signal.SIGTERM)).message == f"received SIGTERM (pid {PID})"


def test_a_log_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    worker = exited(tmp_path, signal.SIGTERM)
    (tmp_path / "stderr.log").unlink()
    os.mkfifo(tmp_path / "stderr.log")
    assert explain_exit(worker).message == f"received SIGTERM (pid {PID})"


def test_a_bus_error_is_not_blamed_on_an_shm_of_unknown_size(tmp_path: Path) -> None:
    worker = exited(tmp_path, signal.SIGBUS)
    # The kernel shows /proc without blocks, as it does a file system of unknown size.
    assert "/dev/shm" not in explain_signal(worker, Path("/proc"))
    assert "/dev/shm" not in explain_signal(worker, tmp_path / "nowhere")
