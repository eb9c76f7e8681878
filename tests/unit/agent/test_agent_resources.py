"""A node's resources: memory within the limits of its cgroups, GPUs as NVML names them."""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rdzv.agent.inventory.resources import (
    describe,
    find_gpus,
    find_resources,
    memory_bytes,
    parse_gpus,
)
from rdzv.agent.node.gpu_assignments import GpuLedger
from rdzv.core.fleet.node_resources import Gpu, NodeResources
from rdzv.errors import InvalidRequestError

# ------------------------------------------------------------------ memory

GIB = 1 << 30


@pytest.mark.parametrize(
    ("cgroups", "files", "expected"),
    [
        ("0::/a\n", {"cgroup.controllers": "memory", "a/memory.max": "max\n"}, 64 * GIB),
        # The least limit above this process counts.
        (
            "0::/a/b\n",
            {
                "cgroup.controllers": "memory",
                "a/memory.max": f"{8 * GIB}",
                "a/b/memory.max": f"{16 * GIB}",
            },
            8 * GIB,
        ),
        # Inside a container, only the top is seen.
        (
            "5:cpu,memory:/docker/abc\n3:pids:/docker/abc\n0::/x\n",
            {"memory/memory.limit_in_bytes": f"{4 * GIB}\n"},
            4 * GIB,
        ),
        # This is what cgroup v1 says without a limit.
        ("5:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, 64 * GIB),
    ],
)
def test_memory_is_the_machines_or_that_of_its_cgroup(
    tmp_path: Path, cgroups: str, files: dict[str, str], expected: int
) -> None:
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal:  {64 * GIB // 1024} kB\nMemFree: 1 kB\n")
    (proc / "self" / "cgroup").write_text(cgroups)
    for name, text in files.items():
        (cgroup / name).parent.mkdir(parents=True, exist_ok=True)
        (cgroup / name).write_text(text)
    assert memory_bytes(proc, cgroup) == expected


def test_nothing_is_known_without_proc(tmp_path: Path) -> None:
    assert memory_bytes(tmp_path, tmp_path) == 0


def test_this_machine_has_something() -> None:
    has = find_resources("none", labels={"b": "2", "a": "1"}, capacity=2, topology="rack-1")
    assert has.cpus > 0
    assert has.memory_bytes > 0
    assert has.gpus == ()
    assert has.labels == (("a", "1"), ("b", "2"))
    assert (has.capacity, has.topology) == (2, "rack-1")


def test_what_a_node_has_is_said_in_words() -> None:
    one = NodeResources(cpus=1, memory_bytes=GIB, gpus=(Gpu("GPU-a", "", 0),))
    assert describe(one) == "1 CPU, 1 GiB, 1 GPU, 1 at once"
    gpus = (Gpu("GPU-a", "H100", 0), Gpu("GPU-b", "H100", 0))
    two = NodeResources(cpus=2, memory_bytes=GIB // 2, gpus=gpus, capacity=2)
    assert describe(two) == "2 CPUs, 512 MiB, 2 GPUs (H100), 2 at once"


# ------------------------------------------------------------------ GPUs


class NvmlError(Exception):
    pass


@dataclass
class Nvml:
    """NVML as its Python module presents it, with fake devices."""

    uuids: Sequence[str] = ("GPU-a", "GPU-b")
    mig: dict[str, list[str | None]] = field(default_factory=dict)
    broken: str = ""
    open: bool = False
    NVMLError: type[Exception] = NvmlError

    def _check(self, what: str) -> None:
        if self.broken == what:
            raise NvmlError(f"{what} fails")

    def nvmlInit(self) -> None:  # noqa: N802
        self._check("init")
        self.open = True

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open = False

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        assert self.open
        return len(self.uuids)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        self._check("handle")
        return self.uuids[index]

    def nvmlDeviceGetUUID(self, handle: str) -> str:  # noqa: N802
        return handle

    def nvmlDeviceGetName(self, handle: str) -> str:  # noqa: N802
        return f"name of {handle}"

    def nvmlDeviceGetMemoryInfo(self, _: str) -> Any:  # noqa: N802
        return SimpleNamespace(total=80 * GIB)

    def nvmlDeviceGetMigMode(self, handle: str) -> Sequence[int]:  # noqa: N802
        if not self.mig:
            raise NvmlError("not supported")
        return [int(handle in self.mig), 0]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: str) -> int:  # noqa: N802
        return len(self.mig[handle])

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: str, index: int) -> str:  # noqa: N802
        found = self.mig[handle][index]
        if found is None:
            raise NvmlError("not found")
        return found


def found(wanted: str, nvml: Nvml, visible: str | None = None) -> list[str]:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    return [gpu.uuid for gpu in find_gpus(wanted, nvml=nvml, environ=environ)]


def test_nvml_names_the_gpus() -> None:
    nvml = Nvml()
    gpus = find_gpus("nvml", nvml=nvml, environ={})
    assert gpus[0] == Gpu("GPU-a", "name of GPU-a", 80 * GIB)
    assert [gpu.uuid for gpu in gpus] == ["GPU-a", "GPU-b"]
    assert not nvml.open


def test_a_gpu_that_is_divided_counts_as_its_parts() -> None:
    nvml = Nvml(mig={"GPU-b": ["MIG-1", None, "MIG-2"]})
    assert found("nvml", nvml) == ["GPU-a", "MIG-1", "MIG-2"]


@pytest.mark.parametrize("broken", ["init", "handle"])
def test_where_nvml_fails_no_gpu_is_seen(broken: str) -> None:
    assert found("nvml", Nvml(broken=broken)) == []


def test_where_none_are_wanted_nobody_is_asked() -> None:
    assert find_gpus("none", library="/no/such/library") == ()


@pytest.mark.slow
def test_a_library_that_is_not_there_shows_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_gpus("nvml", library="/no/such/library", environ={}) == ()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert find_gpus("nvml", environ={}) == ()


def test_gpus_that_are_named_are_taken_in_that_order() -> None:
    assert found("GPU-b, GPU-a", Nvml()) == ["GPU-b", "GPU-a"]
    assert found("GPU-b", Nvml()) == ["GPU-b"]


def test_a_gpu_that_is_named_and_not_there_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"names GPU-c, .* NVML lists: GPU-a, GPU-b"):
        found("GPU-c", Nvml())


@pytest.mark.parametrize("broken", ["init", "handle"])
def test_where_nvml_can_not_be_asked_none_may_be_named(broken: str) -> None:
    said = f"names GPU-c, but NVML cannot be queried .* {broken} fails; check that `nvidia-smi -L`"
    with pytest.raises(InvalidRequestError, match=said):
        find_gpus("GPU-c", nvml=Nvml(broken=broken))
    with pytest.raises(InvalidRequestError, match="names GPU-c, but NVML cannot be queried"):
        find_gpus("GPU-c", library="/no/such/library")


def test_an_agent_that_was_given_some_of_the_gpus_gives_no_others() -> None:
    assert found("nvml", Nvml(), visible="GPU-b") == ["GPU-b"]
    assert found("nvml", Nvml(), visible="") == []


def test_numbers_of_gpus_have_no_meaning_here() -> None:
    with pytest.raises(InvalidRequestError, match="CUDA_VISIBLE_DEVICES=0,1, whose numbers"):
        found("nvml", Nvml(), visible="0,1")
    assert found("nvml", Nvml(uuids=()), visible="0,1") == []


@pytest.mark.parametrize("text", ["", ",", "0", "GPU-a,x", "GPU-a,GPU-a", "GPU-\x07"])
def test_what_is_no_list_of_uuids_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError):
        parse_gpus(text)


STUB = """
#include <string.h>
#include <stdio.h>
typedef struct { unsigned long long total, free, used; } memory_t;
int nvmlInit_v2(void) { return 0; }
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return code == 3 ? "Not Supported" : "Unknown"; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    *device = (void *)(unsigned long)(index + 1);
    return 0;
}
int nvmlDeviceGetUUID(void *device, char *text, unsigned size) {
    snprintf(text, size, "GPU-stub-%d", (int)(unsigned long)device);
    return 0;
}
int nvmlDeviceGetName(void *device, char *text, unsigned size) {
    snprintf(text, size, "Stub");
    return 0;
}
int nvmlDeviceGetMemoryInfo(void *device, memory_t *memory) {
    memory->total = 1024;
    return 0;
}
int nvmlDeviceGetMigMode(void *device, unsigned *now, unsigned *later) { return 3; }
"""


@pytest.mark.slow
def test_the_real_module_reads_a_library(tmp_path: Path) -> None:
    """In its own process, since the module keeps the library that it has loaded."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler for the stub of NVML")
    (tmp_path / "stub.c").write_text(STUB)
    command = [compiler, "-shared", "-fPIC", "-w", "-o", "libnvidia-ml.so.1", "stub.c"]
    subprocess.run(command, check=True, cwd=tmp_path)
    question = (
        "import sys; from rdzv.agent.inventory.resources import find_gpus; "
        "print(find_gpus('nvml', library=sys.argv[1], environ={}))"
    )
    library = str(tmp_path / "libnvidia-ml.so.1")
    answer = subprocess.run(
        [sys.executable, "-c", question, library], capture_output=True, text=True, check=True
    )
    expected = tuple(Gpu(f"GPU-stub-{n}", "Stub", 1024) for n in (1, 2))
    assert answer.stdout.strip() == repr(expected)


# ------------------------------------------------------------------ the ledger


def ledger(gpus: int = 4, capacity: int = 3) -> GpuLedger:
    names = tuple(Gpu(f"GPU-{n}", "", 0) for n in range(gpus))
    return GpuLedger.of(NodeResources(gpus=names, capacity=capacity))


def test_no_gpu_is_given_twice() -> None:
    kept = ledger()
    kept.release("never held")
    assert kept.take("a", 2) == ("GPU-0", "GPU-1")
    assert kept.take("b", 1) == ("GPU-2",)
    assert kept.take("c", 2) is None
    assert kept.why_not(2) == "GPUs: 2 requested, 1 of 4 free"
    kept.release("a")
    assert kept.take("c", 2) == ("GPU-0", "GPU-1")
    assert kept.free == ("GPU-3",)
    with pytest.raises(InvalidRequestError, match="5 GPUs are requested, but this node has 4"):
        kept.check(5)


def test_no_more_jobs_are_here_than_the_node_takes() -> None:
    kept = ledger(capacity=2)
    assert (kept.take("a", 0), kept.take("b", 0), kept.take("c", 0)) == ((), (), None)
    assert kept.why_not(0) == "a job to end: 2 of 2 places taken"
    kept.release("a")
    assert kept.take("c", 0) == ()
