"""Implements `--numa-binding`, which binds each worker to logical CPUs near its GPU.

As under torchrun, LOCAL_RANK n uses the n-th GPU that CUDA shows to the job, and a worker is bound
to CPUs of the NUMA node to which this GPU is attached. The modes, and the choices within a node,
are those of `torch/numa/binding.py` in torch 2.13; tests compare the two on the same trees.

Three differences from torch are deliberate:

* The CPUs are set with `sched_setaffinity`, so `numactl` need not be installed.
* `socket` skips nodes without a CPU for this process: memory-only nodes, possible but absent nodes,
  and nodes outside the container. torch fails on each of these.
* Without a GPU, torch fails. Here, the workers are spread over the nodes in blocks, starting on
  the first node. Neighbouring ranks, which communicate most, stay together, and two workers on two
  sockets get one socket each.

Like torch, this binds CPUs but not memory, because the kernel places a page near the thread that
first writes to it.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from rdzv.agent.runner_link import agent_children
from rdzv.agent.system.accounts import Account, started_as
from rdzv.agent.system.error_files import describe_exit
from rdzv.core.words import counted
from rdzv.errors import InvalidRequestError
from rdzv.structs import struct

_CUDA = Path(__file__).with_name("cuda.py")
SYSFS = Path("/sys")
CUDA_LIBRARY = "libcuda.so.1"

CUDA_TIMEOUT_S = 60.0
"""How long the CUDA driver may take to list GPUs; without persistence mode, it wakes up each one.
"""


HIDES_ALL = ("", "-1", "NoDevFiles")
"""Values of CUDA_VISIBLE_DEVICES with which users, frameworks and Slurm hide all GPUs."""

_NO_GPUS = "set CUDA_VISIBLE_DEVICES to nothing to bind without GPUs, or leave --numa-binding out"

_T = TypeVar("_T")


class NumaBinding(StrEnum):
    """How close to its GPU, and how exclusively, a worker is bound."""

    NODE = "node"
    """All CPUs of the GPU's NUMA node; the best choice if in doubt."""

    SOCKET = "socket"
    """All CPUs of all NUMA nodes on the GPU's socket."""

    EXCLUSIVE = "exclusive"
    """A share of the physical cores of the GPU's NUMA node that is not used for any other GPU."""

    CORE_COMPLEX = "core-complex"
    """Those cores of the GPU's NUMA node that share one last-level cache."""


def bound_cpus(
    binding: NumaBinding,
    local_rank: int,
    local_world_size: int,
    gpu_pci_addresses: Sequence[str],
    *,
    allowed: AbstractSet[int] | None = None,
    sysfs: Path = SYSFS,
) -> frozenset[int]:
    """Return the logical CPUs to bind a worker to, of which there is at least one.

    `gpu_pci_addresses` are the job's GPUs on this machine, by CUDA's index; as in torch, all of
    them count even if there are fewer workers. Only CPUs in `allowed` are used, by default this
    process's. The result depends on nothing else, so workers bound one by one do not collide.
    Raises `InvalidRequestError` if the machine lacks something that the binding requires.
    """
    allowed = os.sched_getaffinity(0) if allowed is None else allowed
    machine = _Machine(sysfs, frozenset(allowed))
    try:
        homes = _homes(machine, local_world_size, gpu_pci_addresses)
        return _MODES[binding](machine, _Place.of(local_rank, homes))
    except _UnbindableError as error:
        message = f"--numa-binding={binding}, LOCAL_RANK {local_rank}: {error}"
        raise InvalidRequestError(message) from error


def parse_cpu_list(text: str) -> frozenset[int]:
    """Parse a list of CPUs or nodes in the kernel's format. Raises `ValueError` if it is invalid.

    >>> sorted(parse_cpu_list("0-2,8,10-11"))
    [0, 1, 2, 8, 10, 11]
    """
    found: set[int] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        first, dash, last = part.partition("-")
        found.update(range(int(first), int(last if dash else first) + 1))
    return frozenset(found)


def format_cpu_list(cpus: Iterable[int]) -> str:
    """Format CPUs as a list in the kernel's format.

    >>> format_cpu_list({11, 0, 1, 2, 8, 10})
    '0-2,8,10-11'
    """
    ranges: list[list[int]] = []
    for cpu in sorted(cpus):
        if ranges and cpu == ranges[-1][1] + 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)


# ---------------------------------------------------------------------- the machine


class _UnbindableError(Exception):
    """Raised if a worker cannot be bound; the message gives the reason and a remedy."""


@struct(frozen=True)
class _Machine:
    """The kernel's description of CPUs, NUMA nodes and PCI devices.

    Its methods raise `_UnbindableError` if the kernel lacks a value.
    """

    sysfs: Path
    allowed: frozenset[int]

    def nodes(self) -> list[int]:
        folders = (self.sysfs / "devices/system/node").glob("node[0-9]*")
        numbers = sorted(int(folder.name.removeprefix("node")) for folder in folders)
        return [node for node in numbers if self.cpus_of(node)]

    def cpus_of(self, node: int) -> frozenset[int]:
        return self._cpu_list(f"devices/system/node/node{node}/cpulist") & self.allowed

    def node_of_gpu(self, address: str) -> int:
        """Return the node to which a PCI device is attached, or 0 if the firmware does not say."""
        return max(self._number(f"bus/pci/devices/{_as_in_sysfs(address)}/numa_node"), 0)

    def socket_of(self, cpu: int) -> int:
        return self._number(f"devices/system/cpu/cpu{cpu}/topology/physical_package_id")

    def core_of(self, cpu: int) -> int:
        return self._first(f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")

    def core_complex_of(self, cpu: int) -> int:
        """Identify the cores that share a CPU's last-level cache by their first CPU.

        As in torch, this is the L3 cache if the kernel lists one, and otherwise the next lower
        level.
        """
        caches = sorted((self.sysfs / f"devices/system/cpu/cpu{cpu}/cache").glob("index[0-9]*"))
        levels = {
            self._number(f"{cache}/level"): cache
            for cache in caches
            if self._text(f"{cache}/type") in ("Data", "Unified")
        }
        if not levels:
            raise _UnbindableError(
                f"the kernel lists no cache of CPU {cpu}, as in some virtual machines; "
                f"use --numa-binding={NumaBinding.NODE}"
            )
        return self._first(f"{levels[max(levels)]}/shared_cpu_list")

    def _first(self, path: str) -> int:
        cpus = self._cpu_list(path)
        if not cpus:
            raise _UnbindableError(f"{self.sysfs / path} is empty; leave --numa-binding out")
        return min(cpus)

    def _cpu_list(self, path: str) -> frozenset[int]:
        return self._parsed(path, parse_cpu_list)

    def _number(self, path: str) -> int:
        return self._parsed(path, int)

    def _parsed(self, path: str, parse: Callable[[str], _T]) -> _T:
        text = self._text(path)
        try:
            return parse(text)
        except ValueError as error:
            raise _UnbindableError(
                f"{self.sysfs / path} holds {text!r:.80}, which is not a CPU list; leave "
                "--numa-binding out"
            ) from error

    def _text(self, path: str) -> str:
        try:
            return (self.sysfs / path).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise _UnbindableError(
                f"{error}; mount the machine's {SYSFS} in the container, or leave "
                "--numa-binding out"
            ) from error


def _as_in_sysfs(address: str) -> str:
    """Format a PCI address like sysfs; NVIDIA's tools use upper case and longer domains.

    >>> _as_in_sysfs("00000000:DC:00.0")
    '0000:dc:00.0'
    """
    found = re.fullmatch(r"([0-9a-f]{4,8}):([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])", address.lower())
    if found is None:
        raise _UnbindableError(
            f"{address!r:.80} is not a PCI address; expected one like 0000:dc:00.0"
        )
    return f"{int(found[1], 16):04x}:{found[2]}"


# ---------------------------------------------------------------------- places


@struct(frozen=True)
class _Place:
    node: int
    index: int
    sharers: int

    @classmethod
    def of(cls, local_rank: int, homes: Sequence[int]) -> _Place:
        node = homes[local_rank]
        return cls(node, homes[:local_rank].count(node), homes.count(node))


def _homes(machine: _Machine, local_world_size: int, gpus: Sequence[str]) -> list[int]:
    if gpus:
        if local_world_size > len(gpus):
            raise _UnbindableError(
                f"{local_world_size} workers but only {len(gpus)} GPUs ({', '.join(gpus)}); "
                f"start at most one worker per GPU, or {_NO_GPUS}"
            )
        return [machine.node_of_gpu(address) for address in gpus]
    nodes = machine.nodes()
    if not nodes:
        raise _UnbindableError(
            f"{machine.sysfs / 'devices/system/node'} lists no NUMA node with any of the CPUs "
            f"{format_cpu_list(machine.allowed)}; leave --numa-binding out"
        )
    return [nodes[rank * len(nodes) // local_world_size] for rank in range(local_world_size)]


# ---------------------------------------------------------------------- the modes


def _bind_node(machine: _Machine, place: _Place) -> frozenset[int]:
    cpus = machine.cpus_of(place.node)
    if not cpus:
        raise _UnbindableError(
            f"none of the CPUs of NUMA node {place.node} may be used, only "
            f"{format_cpu_list(machine.allowed)}; widen the job's CPU set (container, cgroup, "
            "scheduler), or leave --numa-binding out"
        )
    return cpus


def _bind_socket(machine: _Machine, place: _Place) -> frozenset[int]:
    """Return the CPUs of all NUMA nodes on the worker's socket.

    A node's first usable CPU determines which socket the node is on.
    """
    socket = machine.socket_of(min(_bind_node(machine, place)))
    cpus_of_nodes = [machine.cpus_of(node) for node in machine.nodes()]
    near = [cpus for cpus in cpus_of_nodes if machine.socket_of(min(cpus)) == socket]
    return frozenset().union(*near)


def _bind_exclusive(machine: _Machine, place: _Place) -> frozenset[int]:
    """Divide a node's physical cores among its workers; the first ones get the remainder.

    A core's hardware threads stay together.
    """
    cores = _grouped(_bind_node(machine, place), machine.core_of)
    if len(cores) < place.sharers:
        raise _UnbindableError(
            f"{place.sharers} share NUMA node {place.node}, which has only "
            f"{counted(len(cores), 'usable physical core')} (CPUs "
            f"{format_cpu_list(frozenset().union(*cores.values()))}); widen the job's CPU "
            f"set, or use --numa-binding={NumaBinding.NODE}"
        )
    share, left_over = divmod(len(cores), place.sharers)
    start = place.index * share + min(place.index, left_over)
    end = start + share + (place.index < left_over)
    return frozenset().union(*(cores[core] for core in sorted(cores)[start:end]))


def _bind_core_complex(machine: _Machine, place: _Place) -> frozenset[int]:
    """Distribute workers over a node's core complexes, starting with the most usable CPUs."""
    complexes = _grouped(_bind_node(machine, place), machine.core_complex_of)
    by_size = sorted(complexes, key=lambda first: (-len(complexes[first]), first))
    return complexes[by_size[place.index % len(by_size)]]


_MODES: Mapping[NumaBinding, Callable[[_Machine, _Place], frozenset[int]]] = {
    NumaBinding.NODE: _bind_node,
    NumaBinding.SOCKET: _bind_socket,
    NumaBinding.EXCLUSIVE: _bind_exclusive,
    NumaBinding.CORE_COMPLEX: _bind_core_complex,
}


def _grouped(cpus: frozenset[int], name_of: Callable[[int], int]) -> dict[int, frozenset[int]]:
    groups: defaultdict[int, set[int]] = defaultdict(set)
    for cpu in cpus:
        groups[name_of(cpu)].add(cpu)
    return {name: frozenset(group) for name, group in groups.items()}


# ---------------------------------------------------------------------- the GPUs


async def visible_gpu_pci_addresses(
    environ: Mapping[str, str],
    *,
    account: Account | None = None,
    library: str = CUDA_LIBRARY,
    sysfs: Path = SYSFS,
    timeout_s: float = CUDA_TIMEOUT_S,
) -> tuple[str, ...]:
    """Return the PCI addresses of the GPUs visible to workers with this environment, in order.

    Only the CUDA driver knows: the order depends on CUDA_DEVICE_ORDER, and CUDA_VISIBLE_DEVICES may
    name GPUs in many ways. It runs in a process of its own. The result is empty if the job has no
    GPU. If CUDA shows none although some were not deliberately hidden, that is an error, because a
    guess would bind workers far from their GPUs. Raises `InvalidRequestError` if the driver fails
    or hangs, or shows none of the existing GPUs.
    """
    if environ.get("CUDA_VISIBLE_DEVICES") in HIDES_ALL:
        return ()
    shown, why = await ask_cuda(environ, account, library, timeout_s)
    unseen = () if shown else _gpus_on_pci(sysfs)
    if unseen:
        raise InvalidRequestError(
            f"--numa-binding: {why or 'CUDA shows no GPU'}, but there are GPUs on the PCI "
            f"bus ({', '.join(unseen)}); give this job access to them (driver, container "
            f"runtime, CUDA_VISIBLE_DEVICES; only NVIDIA's are supported), or {_NO_GPUS}"
        )
    return shown


async def ask_cuda(
    environ: Mapping[str, str], account: Account | None, library: str, timeout_s: float
) -> tuple[tuple[str, ...], str]:
    try:
        with started_as(account) as how:
            code, output, complaint = await agent_children.ask_spared(
                # Isolated by -I and -S, because PYTHONPATH and the like belong to the job.
                *(sys.executable, "-I", "-S", str(_CUDA), library),
                timeout_s=timeout_s,
                env=environ,
                **how,
            )
    except TimeoutError:
        raise _cuda_failed(f"does not list its GPUs within {timeout_s:g} s") from None
    except OSError as error:
        raise _cuda_failed(f"cannot be queried ({error})") from error
    if code or not output:
        last = complaint.decode(errors="replace").strip().rpartition("\n")[2]
        ended = describe_exit(None, -code) if code < 0 else last or describe_exit(code, None)
        raise _cuda_failed(f"fails: {ended}")
    answer = json.loads(output.splitlines()[-1])  # Preloaded code may have printed something first.
    if answer["failure"]:
        raise _cuda_failed(f"fails: {answer['failure']}")
    return tuple(answer["gpus"]), answer["why_none"]


def _cuda_failed(how: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"--numa-binding: the CUDA driver {how}; check whether nvidia-smi works on this "
        f"node, or {_NO_GPUS}"
    )


_PCI_VENDORS_OF_GPUS = ("0x10de", "0x1002")
_PCI_CLASS_DISPLAY = "0x03"
_PCI_CLASS_ACCELERATOR = "0x12"


def _gpus_on_pci(sysfs: Path) -> tuple[str, ...]:
    found = []
    for device in sorted((sysfs / "bus/pci/devices").glob("*")):
        pci_class = _text_or_nothing(device / "class")
        displays = pci_class.startswith(_PCI_CLASS_DISPLAY)
        if pci_class.startswith(_PCI_CLASS_ACCELERATOR) or (
            displays and _text_or_nothing(device / "vendor") in _PCI_VENDORS_OF_GPUS
        ):
            found.append(device.name)
    return tuple(found)


def _text_or_nothing(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
