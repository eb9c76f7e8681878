"""Submitted jobs as identified between the link and the server: placed on or held by this node."""

from __future__ import annotations

from rdzv.core.model import JobSpec
from rdzv.structs import struct

Key = tuple[str, str]
"""Identifies a job's run by its rdzv_id and its uid."""


@struct(frozen=True)
class Placed:
    """A submitted job that the server has placed on this node."""

    rdzv_id: str
    run: str
    spec: JobSpec

    @property
    def key(self) -> Key:
        return self.rdzv_id, self.run


@struct(frozen=True)
class Holding:
    """A submitted job that may still have processes on this node."""

    rdzv_id: str
    run: str
    gpus: int
