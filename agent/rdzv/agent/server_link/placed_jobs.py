"""How the link and the server name submitted jobs: those placed on this node, those held here."""

from __future__ import annotations

from rdzv.core.model import JobSpec
from rdzv.structs import struct

Key = tuple[str, str]
"""Identifies a run of a job: its rdzv_id and its uid."""


@struct(frozen=True)
class Placed:
    """A submitted job that the server has placed on this node."""

    rdzv_id: str
    run: str
    spec: JobSpec

    @property
    def key(self) -> Key:
        """The key of the placed run."""
        return self.rdzv_id, self.run


@struct(frozen=True)
class Holding:
    """A submitted job that may still have processes on this node."""

    rdzv_id: str
    run: str
    gpus: int
