"""This node's resources for jobs that the server places on it: CPUs, memory, GPUs, labels.

GPUs are known by UUIDs, which do not depend on the order of devices. MIG devices count as GPUs, but
the GPU that they divide does not.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rdzv.agent.launch.launch import count_cpus
from rdzv.core.fleet.node_resources import Gpu, NodeResources
from rdzv.core.words import counted, listed, size_text
from rdzv.errors import InvalidRequestError
from rdzv.structs import struct

log = logging.getLogger("rdzv.agent")

T = TypeVar("T")

NVML = "nvml"
"""The value of `gpus` that means all GPUs listed by NVML."""
NONE = "none"
"""The value of `gpus` that means no GPUs, even if the machine has some."""

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")

_UUID_PREFIXES = ("GPU-", "MIG-")
_NO_LIMIT_BYTES = 1 << 62
"""Larger than any machine's memory; cgroup v1 uses such a number to mean "no limit"."""
_V1_FILES = ("memory.limit_in_bytes", "memory.max_usage_in_bytes", "memory.oom_control")


def find_resources(
    gpus: str, *, labels: Mapping[str, str], capacity: int, topology: str
) -> NodeResources:
    """This may take seconds while GPUs wake up."""
    return NodeResources(
        cpus=count_cpus(),
        memory_bytes=memory_bytes(),
        gpus=find_gpus(gpus),
        labels=tuple(sorted(labels.items())),
        capacity=capacity,
        topology=topology,
    )


def describe(has: NodeResources) -> str:
    """Describe a node's resources.

    >>> describe(NodeResources(cpus=8, memory_bytes=64 << 30, labels=(("zone", "a"),)))
    '8 CPUs, 64 GiB, 0 GPUs, 1 at once, zone=a'
    """
    names = listed(dict.fromkeys(gpu.name for gpu in has.gpus if gpu.name))
    return ", ".join(
        [
            counted(has.cpus, "CPU"),
            size_text(has.memory_bytes),
            counted(len(has.gpus), "GPU") + (f" ({names})" if names else ""),
            f"{has.capacity} at once",
            *(f"{name}={value}" for name, value in has.labels),
        ]
    )


# ---------------------------------------------------------------------- memory


def memory_bytes(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Return the machine's memory, or its cgroup's lower limit; 0 if it is unknown."""
    limits = []
    for line in read_text(proc / "meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemTotal":
            limits.append(int(value.split()[0]) * 1024)
    for place in memory_cgroups(proc, cgroup):
        text = read_text(place.limit).strip()
        if text.isdigit() and 0 < int(text) < _NO_LIMIT_BYTES:
            limits.append(int(text))
    return min(limits, default=0)


@struct(frozen=True)
class MemoryCgroup:
    """A cgroup that can limit memory, and its files."""

    name: str
    """Its path from the top of the hierarchy, as reported by the kernel."""
    limit: Path
    peak: Path
    events: Path
    """Contains a line `oom_kill NUMBER`."""


def memory_cgroups(proc: Path = PROC, cgroup: Path = CGROUP) -> Iterator[MemoryCgroup]:
    """Yield this process's memory cgroup and its ancestors. Their files may not exist."""
    for line in read_text(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, files = cgroup, ("memory.max", "memory.peak", "memory.events")
            if not (top / "cgroup.controllers").exists():
                top = cgroup / "unified"
        elif "memory" in controllers.split(","):
            top, files = cgroup / "memory", _V1_FILES
        else:
            continue
        below = Path(path.lstrip("/"))
        # Inside a container, the path may be the host's, and only the top of the hierarchy is
        # visible.
        for place in (below, *below.parents):
            limit, peak, events = (top / place / name for name in files)
            yield MemoryCgroup("/" if place == Path() else f"/{place}", limit, peak, events)


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


# ---------------------------------------------------------------------- GPUs


def find_gpus(
    wanted: str,
    *,
    library: str = "",
    nvml: Any = None,
    environ: Mapping[str, str] | None = None,
) -> tuple[Gpu, ...]:
    """Return the GPUs that jobs may use: `nvml`, `none`, or a comma-separated list of UUIDs.

    `library` is the path of NVML's library, empty for the system's; `nvml` is its Python module. If
    NVML cannot be queried, there are no GPUs, and naming any is an error. If CUDA_VISIBLE_DEVICES
    restricts this process to some of the GPUs, jobs get only those.
    """
    if wanted == NONE:
        return ()
    found, trouble = ask_nvml(_gpus_of, nvml, library)
    present = found or ()
    if wanted != NVML:
        return _named_gpus(parse_gpus(wanted), present, trouble)
    if trouble:
        log.info("no GPUs are visible: %s", trouble)
    visible = (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES")
    return present if visible is None or not present else _visible(visible, present)


def parse_gpus(text: str) -> tuple[str, ...]:
    """Parse a comma-separated list of UUIDs.

    >>> parse_gpus("GPU-aa, GPU-bb")
    ('GPU-aa', 'GPU-bb')
    """
    uuids = tuple(part.strip() for part in text.split(",") if part.strip())
    for uuid in uuids:
        if not uuid.startswith(_UUID_PREFIXES) or not uuid.isascii() or not uuid.isprintable():
            raise InvalidRequestError(
                f"{uuid!r} is not the UUID of a GPU; give those of `nvidia-smi -L`, separated by "
                f'commas, or "{NVML}", or "{NONE}"'
            )
        if uuids.count(uuid) > 1:
            raise InvalidRequestError(f"{uuid} is named twice; name each GPU once")
    if not uuids:
        raise InvalidRequestError(f'no GPU is named; give UUIDs, or "{NVML}", or "{NONE}"')
    return uuids


def _named_gpus(uuids: Sequence[str], present: Sequence[Gpu], trouble: str) -> tuple[Gpu, ...]:
    if trouble:
        raise InvalidRequestError(
            f"`gpus` names {uuids[0]}, but NVML cannot be queried for it: "
            f'{trouble}; check that `nvidia-smi -L` shows it, or set gpus = "{NONE}"'
        )
    by_uuid = {gpu.uuid: gpu for gpu in present}
    for uuid in uuids:
        if uuid not in by_uuid:
            there = ", ".join(by_uuid) or "none"
            raise InvalidRequestError(
                f"`gpus` names {uuid}, which is not on this node; NVML lists: {there}; name one "
                f'of these, or set gpus = "{NVML}" or "{NONE}"'
            )
    return tuple(by_uuid[uuid] for uuid in uuids)


def _visible(visible: str, present: Sequence[Gpu]) -> tuple[Gpu, ...]:
    tokens = [token.strip() for token in visible.split(",") if token.strip()]
    if not all(token.startswith(_UUID_PREFIXES) for token in tokens):
        raise InvalidRequestError(
            f"rdzv-agent was started with CUDA_VISIBLE_DEVICES={visible}, whose numbers "
            "depend on an order that only CUDA knows; give UUIDs there, or name the GPUs "
            "in `gpus`"
        )
    return tuple(gpu for gpu in present if gpu.uuid.startswith(tuple(tokens)))


def ask_nvml(ask: Callable[[Any], T], nvml: Any = None, library: str = "") -> tuple[T | None, str]:
    """Return what `ask` finds with NVML, or None and why it cannot be queried."""
    try:
        module: Any = importlib.import_module("pynvml") if nvml is None else nvml
        if library:
            # pynvml would do the same with the system's library.
            module.nvmlLib = ctypes.CDLL(library)
    except (ImportError, OSError) as error:
        return None, str(error)
    try:
        module.nvmlInit()
    except module.NVMLError as error:
        return None, f"NVML: {error}"
    try:
        return ask(module), ""
    except module.NVMLError as error:
        log.warning("NVML failed, so no GPUs are seen: %s", error)
        return None, f"NVML: {error}"
    finally:
        module.nvmlShutdown()


def _gpus_of(nvml: Any) -> tuple[Gpu, ...]:
    handles = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
    return tuple(
        Gpu(
            nvml.nvmlDeviceGetUUID(part),
            nvml.nvmlDeviceGetName(part),
            int(nvml.nvmlDeviceGetMemoryInfo(part).total),
        )
        for handle in handles
        for part in parts_of(nvml, handle)
    )


def parts_of(nvml: Any, handle: Any) -> list[Any]:
    """Return a partitioned GPU's MIG devices, or the GPU itself if it is not partitioned."""
    try:
        divided = nvml.nvmlDeviceGetMigMode(handle)[0]
    except nvml.NVMLError:
        divided = 0  # This GPU cannot be partitioned.
    if not divided:
        return [handle]
    parts = []
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            parts.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index))
        except nvml.NVMLError:
            continue  # No device has this number.
    return parts
