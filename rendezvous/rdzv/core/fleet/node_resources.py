"""What a node has for submitted jobs, and what keeps it from them: failing checks, and drains."""

from __future__ import annotations

from typing import Annotated

from rdzv.bounds import GPUS, Label, Labels, Sentence, UpTo, Within
from rdzv.core.model import JobSpec
from rdzv.core.reason import ReasonItem
from rdzv.structs import struct


@struct(frozen=True)
class Gpu:
    """One GPU of a node."""

    uuid: Label
    name: Label | None
    memory_bytes: int | None


@struct(frozen=True)
class NodeResources:
    """A node's resources for submitted jobs."""

    cpus: int = 0
    memory_bytes: int = 0
    gpus: Annotated[tuple[Gpu, ...], UpTo(GPUS)] = ()
    labels: Labels = ()
    capacity: Annotated[int, Within(0, 1_024)] = 1
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


def gpus_needed(spec: JobSpec, resources: NodeResources) -> int:
    if spec.gpus_per_node is not None:
        return spec.gpus_per_node
    if not resources.gpus:
        return 0
    return spec.local_world_size or len(resources.gpus)


@struct(frozen=True)
class Drain:
    """The drain of a node, which leaves all its jobs and takes no others."""

    reason: str
    due_ms: int
    """The time at which the remaining workers are killed."""
    at_ms: int
    """The time since which the node is leaving."""
    number: int = 0
    """The number of the drain if an operator requested it, or 0 if the node drains itself."""

    @property
    def by_operator(self) -> bool:
        return self.number != 0

    @property
    def what(self) -> str:
        return "drained" if self.by_operator else "about to leave"

    @property
    def told(self) -> str:
        """The reason sent to the node, which passes it on to its jobs when it leaves them."""
        return told(self.reason)

    def left_ms(self, now_ms: int) -> int:
        return max(self.due_ms - now_ms, 0)

    def item(self, node_id: str, now_ms: int) -> ReasonItem:
        """Describe the drain of a node: its reason, and how soon the node leaves.

        >>> print(Drain("kernel upgrade", 50_000, at_ms=0, number=1).item("n1", now_ms=10_000))
        n1 (drained): kernel upgrade; it leaves in 40 s
        """
        cause = self.reason or "no reason was given"
        return ReasonItem(cause, node_id, self.what, "it leaves in", self.left_ms(now_ms))


def told(reason: str) -> str:
    """Return the reason given when a node drained by an operator leaves.

    >>> told("by ada: new kernel"), told("new kernel")
    ('drained by ada: new kernel', 'drained: new kernel')
    """
    return f"drained{'' if reason.startswith('by ') else ':'} {reason}"
