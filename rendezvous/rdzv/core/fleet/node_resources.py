"""A node's resources for submitted jobs, and the health checks that fail on it."""

from __future__ import annotations

from rdzv.core.model import JobSpec
from rdzv.structs import struct


@struct(frozen=True)
class Gpu:
    """One GPU of a node."""

    uuid: str
    name: str
    memory_bytes: int


@struct(frozen=True)
class Resources:
    """A node's resources for submitted jobs."""

    cpus: int = 0
    memory_bytes: int = 0
    gpus: tuple[Gpu, ...] = ()
    labels: tuple[tuple[str, str], ...] = ()
    capacity: int = 1
    """The number of jobs that the node takes at once."""
    topology: str = ""
    """A label for the node's place in the network. A job's nodes come from one place if possible.
    """


@struct(frozen=True)
class FailingCheck:
    """A check that fails on a node, and its finding."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} {self.reason}"


def gpus_needed(spec: JobSpec, resources: Resources) -> int:
    if spec.gpus_per_node is not None:
        return spec.gpus_per_node
    if not resources.gpus:
        return 0
    return spec.local_world_size or len(resources.gpus)
