"""Trees like /sys for machines of many shapes: made from a few numbers, or recorded.

A recorded tree is a text file beside this one, as this prints it:

    cd /sys && grep -s . devices/system/node/{possible,online,node*/cpulist} \
        devices/system/cpu/cpu[0-9]*/topology/{physical_package_id,thread_siblings_list} \
        devices/system/cpu/cpu[0-9]*/cache/index*/{type,level,shared_cpu_list} \
        bus/pci/devices/*/{class,vendor,numa_node}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent

NVIDIA_3D = {"class": "0x030200", "vendor": "0x10de"}


@dataclass(frozen=True)
class Machine:
    """A machine: sockets, their nodes, core complexes, cores and threads, numbered as by Linux.

    The first threads of all cores come first, node by node, then the second threads.
    """

    sockets: int = 1
    nodes_per_socket: int = 1
    complexes_per_node: int = 1
    cores_per_complex: int = 4
    threads: int = 1
    gpu_nodes: tuple[int, ...] = ()
    """`numa_node` of each GPU, in the order of CUDA."""
    empty_nodes: tuple[int, ...] = ()
    """Memory-only nodes."""
    possible: str = ""
    """Nodes that are possible, besides those present."""
    cpu_lists: Mapping[int, str] = field(default_factory=dict)
    """Other spellings of a node's CPUs."""

    @property
    def nodes(self) -> int:
        return self.sockets * self.nodes_per_socket

    @property
    def cores(self) -> int:
        return self.nodes * self.complexes_per_node * self.cores_per_complex

    @property
    def cpus(self) -> frozenset[int]:
        return frozenset(range(self.cores * self.threads))

    @property
    def gpus(self) -> tuple[str, ...]:
        """Addresses that do not ascend, because CUDA's order may differ from the bus's."""
        return tuple(f"0000:{0xE0 - 0x0B * i:02x}:00.0" for i in range(len(self.gpu_nodes)))

    def threads_of(self, cores: range) -> str:
        """Return the CPUs of consecutive cores, as the kernel lists them."""
        starts = [cores.start + thread * self.cores for thread in range(self.threads)]
        return ",".join(
            f"{start}-{start + len(cores) - 1}" if len(cores) > 1 else f"{start}"
            for start in starts
        )

    def write(self, sysfs: Path) -> Path:
        return write_files(sysfs, dict(self.files()))

    def files(self) -> Iterator[tuple[str, str]]:
        yield from self._node_files()
        for cpu in sorted(self.cpus):
            yield from self._cpu_files(cpu)
        for address, node in zip(self.gpus, self.gpu_nodes, strict=True):
            for name, text in {**NVIDIA_3D, "numa_node": str(node)}.items():
                yield f"bus/pci/devices/{address}/{name}", text

    def _node_files(self) -> Iterator[tuple[str, str]]:
        per_node = self.complexes_per_node * self.cores_per_complex
        for node in range(self.nodes):
            cpus = self.threads_of(range(node * per_node, (node + 1) * per_node))
            yield f"devices/system/node/node{node}/cpulist", self.cpu_lists.get(node, cpus)
        for node in self.empty_nodes:
            yield f"devices/system/node/node{node}/cpulist", ""
        present = sorted({*range(self.nodes), *self.empty_nodes})
        online = ",".join(map(str, present))
        yield "devices/system/node/online", online
        yield "devices/system/node/possible", self.possible or online

    def _cpu_files(self, cpu: int) -> Iterator[tuple[str, str]]:
        core = cpu % self.cores
        first = core - core % self.cores_per_complex
        alone = self.threads_of(range(core, core + 1))
        together = self.threads_of(range(first, first + self.cores_per_complex))
        folder = f"devices/system/cpu/cpu{cpu}"
        yield f"{folder}/topology/thread_siblings_list", alone
        yield f"{folder}/topology/physical_package_id", str(core * self.sockets // self.cores)
        for index, kind, level, shared in (
            (0, "Data", 1, alone),
            (1, "Instruction", 1, alone),
            (2, "Unified", 2, alone),
            (3, "Unified", 3, together),
        ):
            yield f"{folder}/cache/index{index}/type", kind
            yield f"{folder}/cache/index{index}/level", str(level)
            yield f"{folder}/cache/index{index}/shared_cpu_list", shared


def write_files(sysfs: Path, files: Mapping[str, str]) -> Path:
    for folder in {(sysfs / name).parent for name in files}:
        folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (sysfs / name).write_text(f"{text}\n")
    return sysfs


def write_recorded(sysfs: Path, name: str) -> Path:
    lines = (HERE / f"{name}.txt").read_text().splitlines()
    return write_files(sysfs, dict(_split(line) for line in lines))


def _split(line: str) -> tuple[str, str]:
    # A PCI address has colons, too: the file's name ends before the first that ends one.
    folder, _, rest = line.rpartition("/")
    name, _, text = rest.partition(":")
    return f"{folder}/{name}", text


WORKSTATION = Machine(cores_per_complex=6, gpu_nodes=(-1, -1))
"""One node, no hyperthreading; the firmware does not say where the GPUs are."""

EIGHT_GPUS = Machine(
    sockets=2,
    nodes_per_socket=2,
    cores_per_complex=7,
    threads=2,
    gpu_nodes=(1, 1, 0, 0, 3, 3, 3, 2),
)
"""Two sockets with two nodes each, hyperthreads; shares that do not divide evenly."""

ZEN = Machine(
    sockets=2, complexes_per_node=3, cores_per_complex=2, threads=2, gpu_nodes=(0, 0, 0, 0, 1, 1)
)
"""Several core complexes per node, but fewer than GPUs on the first."""

WITH_EMPTY_NODES = Machine(
    sockets=2, gpu_nodes=(0, 1), empty_nodes=(2, 3), possible="0-7", threads=2
)
"""Two memory-only nodes, and four that are possible but absent."""
