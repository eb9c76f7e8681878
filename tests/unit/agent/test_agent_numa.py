"""The CPUs that each worker is bound to, on various machines, and the GPUs that a job sees."""

import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rdzv.agent.launch import numa
from rdzv.agent.launch.numa import (
    NumaBinding,
    bound_cpus,
    format_cpu_list,
    parse_cpu_list,
    visible_gpu_pci_addresses,
)
from rdzv.errors import InvalidRequestError
from tests.support.numa_trees.machines import (
    EIGHT_GPUS,
    NVIDIA_3D,
    WITH_EMPTY_NODES,
    WORKSTATION,
    ZEN,
    Machine,
    write_files,
)

Write = Callable[[Machine], Path]


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Write:
    """Return a function that writes each machine once."""
    written: dict[str, Path] = {}

    def once(machine: Machine) -> Path:
        key = repr(machine)
        if key not in written:
            written[key] = machine.write(tmp_path_factory.mktemp("sys"))
        return written[key]

    return once


def bound(
    sysfs: Path, machine: Machine, binding: str, *, workers: int = 0, allowed: str = ""
) -> list[str]:
    """Return the CPUs of each worker; one worker per GPU by default."""
    workers = workers or len(machine.gpus)
    usable = parse_cpu_list(allowed) if allowed else machine.cpus
    ranks = range(workers)
    mode = NumaBinding(binding)
    found = [bound_cpus(mode, r, workers, machine.gpus, allowed=usable, sysfs=sysfs) for r in ranks]
    return [format_cpu_list(cpus) for cpus in found]


def refusal(sysfs: Path, machine: Machine, binding: str, **options: Any) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        bound(sysfs, machine, binding, **options)
    return str(caught.value)


# ------------------------------------------------------------------ the modes

WITHOUT_GPUS = replace(EIGHT_GPUS, gpu_nodes=())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("machine", "binding", "workers", "allowed", "expected"),
    [
        # The node of its GPUs is unknown.
        (WORKSTATION, "node", 0, "", ["0-5", "0-5"]),
        (WORKSTATION, "exclusive", 1, "", ["0-2"]),
        (EIGHT_GPUS, "socket", 0, "", ["0-13,28-41"] * 4 + ["14-27,42-55"] * 4),
        (EIGHT_GPUS, "node", 2, "", ["7-13,35-41"] * 2),
        (
            EIGHT_GPUS,
            "exclusive",
            0,
            "",
            [
                *("7-10,35-38", "11-13,39-41"),  # 7 cores for GPUs 0 and 1
                *("0-3,28-31", "4-6,32-34"),
                *("21-23,49-51", "24-25,52-53", "26-27,54-55"),  # for GPUs 4, 5 and 6
                "14-20,42-48",
            ],
        ),
        # The cores of CPUs 7, 8, 9 and 12, two of them in full.
        (EIGHT_GPUS, "exclusive", 2, "7-9,36-37,40", ["7-8,36", "9,37,40"]),
        (
            ZEN,
            "core-complex",
            0,
            "",
            ["0-1,12-13", "2-3,14-15", "4-5,16-17", "0-1,12-13", "6-7,18-19", "8-9,20-21"],
        ),
        # That with most usable CPUs comes first.
        (ZEN, "core-complex", 4, "0,2-3,4-5,16", ["4-5,16", "2-3", "0", "4-5,16"]),
        # Nodes without CPUs are on no socket.
        (WITH_EMPTY_NODES, "socket", 0, "", ["0-3,8-11", "4-7,12-15"]),
        # Without GPUs, workers are spread in blocks: two get a socket each.
        (WITHOUT_GPUS, "node", 2, "", ["0-6,28-34", "14-20,42-48"]),
        (WITHOUT_GPUS, "socket", 5, "", ["0-13,28-41"] * 3 + ["14-27,42-55"] * 2),
        (
            WITHOUT_GPUS,
            "exclusive",
            5,
            "",
            ["0-3,28-31", "4-6,32-34", "7-13,35-41", "14-20,42-48", "21-27,49-55"],
        ),
        (
            replace(WITH_EMPTY_NODES, gpu_nodes=()),
            "exclusive",
            2,
            "4-7,12-15",
            ["4-5,12-13", "6-7,14-15"],
        ),
    ],
)
def test_where_workers_are_bound(
    write: Write, machine: Machine, binding: str, workers: int, allowed: str, expected: list[str]
) -> None:
    assert bound(write(machine), machine, binding, workers=workers, allowed=allowed) == expected


@pytest.mark.slow
def test_without_an_l3_the_last_level_counts(tmp_path: Path) -> None:
    machine = Machine(gpu_nodes=(0, 0))
    machine.write(tmp_path)
    for index in tmp_path.glob("devices/system/cpu/cpu*/cache/index3"):
        shutil.rmtree(index)
    assert bound(tmp_path, machine, "core-complex") == ["0", "1"]


@pytest.mark.slow
def test_only_what_this_process_may_use_is_allowed_by_default(write: Write) -> None:
    machine = Machine(cores_per_complex=max(os.sched_getaffinity(0)) + 2, gpu_nodes=(0,))
    found = bound_cpus(NumaBinding.NODE, 0, 1, machine.gpus, sysfs=write(machine))
    assert found == os.sched_getaffinity(0)


@pytest.mark.parametrize("address", ["0000:E0:00.0", "00000000:E0:00.0"])
def test_addresses_may_be_spelled_as_nvidia_does(write: Write, address: str) -> None:
    allowed = WORKSTATION.cpus
    sysfs = write(WORKSTATION)
    found = bound_cpus(NumaBinding.NODE, 0, 1, [address], allowed=allowed, sysfs=sysfs)
    assert found == allowed


def test_two_mig_devices_of_one_gpu_share_its_node(write: Write) -> None:
    address = WORKSTATION.gpus[0]
    sysfs, allowed, mode = write(WORKSTATION), WORKSTATION.cpus, NumaBinding.EXCLUSIVE
    found = [
        bound_cpus(mode, rank, 3, [address] * 3, allowed=allowed, sysfs=sysfs) for rank in range(3)
    ]
    assert found == [{0, 1}, {2, 3}, {4, 5}]


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize("binding", NumaBinding)
def test_a_node_without_usable_cpus_is_refused(write: Write, binding: str) -> None:
    reason = refusal(write(EIGHT_GPUS), EIGHT_GPUS, binding, allowed="0-6")
    assert reason == (
        f"--numa-binding={binding}, LOCAL_RANK 0: none of the CPUs of NUMA node 1 may be used, "
        "only 0-6; widen the job's CPU set (container, cgroup, scheduler), or leave "
        "--numa-binding out"
    )


def test_more_gpus_than_cores_are_refused(write: Write) -> None:
    reason = refusal(write(WORKSTATION), WORKSTATION, "exclusive", allowed="3")
    assert "2 share NUMA node 0, which has only 1 usable physical core (CPUs 3)" in reason
    assert "--numa-binding=node" in reason


def test_more_workers_than_gpus_are_refused_for_all(write: Write) -> None:
    reason = refusal(write(WORKSTATION), WORKSTATION, "node", workers=3)
    assert "LOCAL_RANK 0: 3 workers but only 2 GPUs (0000:e0:00.0, 0000:d5:00.0)" in reason
    assert "CUDA_VISIBLE_DEVICES" in reason


def test_a_gpu_that_sysfs_does_not_show_is_refused(tmp_path: Path) -> None:
    assert "numa_node" in refusal(tmp_path, WORKSTATION, "node")


def test_a_machine_without_numa_is_refused(tmp_path: Path) -> None:
    assert "lists no NUMA node" in refusal(tmp_path, Machine(), "node", workers=1)


@pytest.mark.slow
def test_a_machine_that_hides_its_caches_is_refused(tmp_path: Path) -> None:
    WORKSTATION.write(tmp_path)
    for cache in tmp_path.glob("devices/system/cpu/cpu*/cache"):
        shutil.rmtree(cache)
    assert "--numa-binding=node" in refusal(tmp_path, WORKSTATION, "core-complex")


@pytest.mark.slow
def test_nonsense_in_sysfs_is_refused(tmp_path: Path) -> None:
    WORKSTATION.write(tmp_path)
    (tmp_path / "devices/system/node/node0/cpulist").write_text("many\n")
    assert "node0/cpulist holds 'many'" in refusal(tmp_path, WORKSTATION, "node")


def test_nonsense_as_address_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"'\.\./\.\.' is not a PCI address"):
        bound_cpus(NumaBinding.NODE, 0, 1, ["../.."], allowed=frozenset({0}), sysfs=tmp_path)


# ------------------------------------------------------------------ lists of CPUs


@pytest.mark.parametrize(
    ("text", "written"),
    [("", ""), ("\n", ""), ("0-3\n", "0-3"), ("0-1,64-65", "0-1,64-65"), (" 5, 7-8 ,", "5,7-8")],
)
def test_lists_are_read_and_written_as_the_kernel_does(text: str, written: str) -> None:
    assert format_cpu_list(parse_cpu_list(text)) == written


@pytest.mark.parametrize("text", ["a", "1-", "-1", "1-2-3", "0x3"])
def test_what_is_no_list_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        parse_cpu_list(text)


# ------------------------------------------------------------------ what CUDA shows


STUB = r"""
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Shows the comma-separated addresses in CUDA_VISIBLE_DEVICES; some words are orders. */
static const char *shown(void) {
    const char *text = getenv("CUDA_VISIBLE_DEVICES");
    return text ? text : "";
}
int cuInit(unsigned flags) {
    puts("noise of the driver");
    if (!strcmp(shown(), "hang")) sleep(60);
    if (!strcmp(shown(), "crash")) raise(SIGKILL);
    if (!strcmp(shown(), "exit")) _exit(0);
    if (!strcmp(shown(), "fail")) return 999;
    return strcmp(shown(), "none") ? 0 : 100;
}
int cuDeviceGetCount(int *count) {
    *count = 1;
    for (const char *c = shown(); *c; c++) *count += *c == ',';
    return 0;
}
/* A handle need not be the index. */
int cuDeviceGet(int *device, int index) { *device = index + 40; return 0; }
int cuDeviceGetPCIBusId(char *text, int size, int device) {
    const char *from = shown();
    for (device -= 40; device--;) from = strchr(from, ',') + 1;
    snprintf(text, size, "%.*s", (int)strcspn(from, ","), from);
    return 0;
}
int cuGetErrorString(int code, const char **text) { *text = "unknown error"; return 0; }
"""


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the path of a CUDA driver that does what CUDA_VISIBLE_DEVICES says."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler for the stub of the CUDA driver")
    folder = tmp_path_factory.mktemp("cuda")
    (folder / "stub.c").write_text(STUB)
    command = [compiler, "-shared", "-fPIC", "-w", "-o", "libcuda.so.1", "stub.c"]
    subprocess.run(command, check=True, cwd=folder)
    return str(folder / "libcuda.so.1")


async def seen(stub: str, visible: str, sysfs: Path, timeout_s: float = 10) -> tuple[str, ...]:
    environ = {"CUDA_VISIBLE_DEVICES": visible, "PYTHONPATH": "/nowhere", "PYTHONHOME": "/nowhere"}
    return await visible_gpu_pci_addresses(environ, library=stub, sysfs=sysfs, timeout_s=timeout_s)


@pytest.mark.slow
async def test_the_driver_sees_the_environment_of_the_workers(stub: str, tmp_path: Path) -> None:
    gpus = ("0000:DC:00.0", "0000:19:00.0")
    assert await seen(stub, ",".join(gpus), tmp_path) == gpus
    assert await seen(stub, "none", tmp_path) == ()
    assert await seen("libno-such-cuda.so.1", "0", tmp_path) == ()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("does", "why"),
    [
        ("fail", r"cuInit: unknown error \(error 999\)"),
        ("crash", r"signal 9 \(SIGKILL\); check whether nvidia-smi"),
        ("exit", r"the CUDA driver fails: exit code 0; check"),
        ("hang", r"not list its GPUs within 0\.05 s"),
    ],
)
async def test_a_driver_that_does_not_answer_is_refused(
    stub: str, tmp_path: Path, does: str, why: str
) -> None:
    with pytest.raises(InvalidRequestError, match=why):
        await seen(stub, does, tmp_path, timeout_s=0.05 if does == "hang" else 10)


@pytest.mark.slow
async def test_a_library_that_is_no_driver_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"libc\.so\.6: .*cuInit"):
        await seen("libc.so.6", "0", tmp_path)


@pytest.mark.parametrize(
    ("device", "is_gpu"),
    [
        (NVIDIA_3D, True),
        ({"class": "0x120000", "vendor": "0x1002"}, True),
        ({"class": "0x030000", "vendor": "0x1a03"}, False),  # The display of a board's controller.
        ({"class": "0x020000", "vendor": "0x10de"}, False),
        ({}, False),
    ],
)
async def test_gpus_that_cuda_does_not_show_are_not_bound_to_by_guess(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: dict[str, str], is_gpu: bool
) -> None:
    async def shows_none(*_: object) -> tuple[tuple[str, ...], str]:
        return (), "the CUDA driver cannot be loaded (gone)"

    monkeypatch.setattr(numa, "ask_cuda", shows_none)
    folder = "bus/pci/devices/0000:e0:00.0"
    write_files(tmp_path, {f"{folder}/{name}": text for name, text in device.items()})
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    if not is_gpu:
        assert await visible_gpu_pci_addresses({}, sysfs=tmp_path) == ()
        return
    with pytest.raises(InvalidRequestError) as caught:
        await visible_gpu_pci_addresses({}, sysfs=tmp_path)
    assert str(caught.value).startswith(
        "--numa-binding: the CUDA driver cannot be loaded (gone), but there are GPUs on the PCI "
        "bus (0000:e0:00.0); give this job access to them"
    )


@pytest.mark.slow
@pytest.mark.parametrize("hidden", ["", "-1", "NoDevFiles"])
async def test_gpus_that_are_hidden_are_not_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hidden: str
) -> None:
    monkeypatch.setattr(numa, "ask_cuda", SimpleNamespace())
    WORKSTATION.write(tmp_path)
    environ = {"CUDA_VISIBLE_DEVICES": hidden}
    assert await visible_gpu_pci_addresses(environ, sysfs=tmp_path) == ()
