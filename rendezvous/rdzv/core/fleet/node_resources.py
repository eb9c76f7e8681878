"""A node's resources for submitted jobs, and the health checks that fail on it."""

from __future__ import annotations

from typing import Annotated

from rdzv.bounds import GPUS, Label, Labels, Sentence, UpTo, Within
from rdzv.core.model import JobSpec
from rdzv.structs import struct


@struct(frozen=True)
class Gpu:
    """One GPU of a node."""

    uuid: Label
    name: Label | None
    memory_bytes: int | None


@struct(frozen=True)
class Resources:
    """A node's resources for submitted jobs."""

    cpus: int = 0
    memory_bytes: int = 0
    gpus: Annotated[tuple[Gpu, ...], UpTo(GPUS)] = ()
    labels: Labels = ()
    capacity: Annotated[int, Within(0, 1_024)] = 1
    """The number of jobs that the node takes at once."""
    topology: Label = ""
    """A label for the node's place in the network. A job's nodes come from one place if possible.
    """


@struct(frozen=True)
class FailingCheck:
    """A check that fails on a node, and its finding."""

    name: Sentence
    reason: Sentence

    def __str__(self) -> str:
        return f"{self.name} {self.reason}"


def gpus_needed(spec: JobSpec, resources: Resources) -> int:
    if spec.gpus_per_node is not None:
        return spec.gpus_per_node
    if not resources.gpus:
        return 0
    return spec.local_world_size or len(resources.gpus)
