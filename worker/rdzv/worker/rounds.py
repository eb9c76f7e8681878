"""The round in which a worker takes part, read from its environment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Round:
    """A round, as passed to the script's function. Ranks count from 0."""

    number: int
    """The round's number, which never goes back. Under torchrun, it is the restart count."""
    rank: int
    world_size: int
    local_rank: int
    restarts: int
    """The number of restarts that the job has used so far."""
    token: str
    """A unique name for this round that is safe to use in file names.

    Include it in the names of files that are written in the background, so that an earlier round's
    writer cannot damage a newer file.
    """
    kept: bool = False
    """Whether this process took part in the previous round."""
    notice_file: str = ""

    @property
    def leaving(self) -> bool:
        """Whether this node is leaving (a drain or a preemption). If so, save soon and return."""
        return bool(self.notice_file) and os.path.exists(self.notice_file)  # noqa: PTH110

    @property
    def device(self) -> torch.device:
        """This worker's device: GPU `local_rank` if CUDA is available, otherwise the CPU."""
        import torch

        if torch.cuda.is_available():
            return torch.device("cuda", self.local_rank)
        return torch.device("cpu")


def round_of(environ: Mapping[str, str], *, kept: bool = False) -> Round:
    """Read a round from the environment set by rdzvrun or torchrun; the default is one worker.

    >>> found = round_of({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "RDZV_ROUND": "7"})
    >>> found.number, found.rank, found.world_size, found.token
    (7, 3, 4, 'job.round7')
    >>> round_of({}).world_size
    1
    """
    restarts = int(environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    number = int(environ.get("RDZV_ROUND") or restarts)
    run = re.sub(r"[^\w.-]+", "_", environ.get("TORCHELASTIC_RUN_ID", "job"))
    return Round(
        number=number,
        rank=int(environ.get("RANK", "0")),
        world_size=int(environ.get("WORLD_SIZE", "1")),
        local_rank=int(environ.get("LOCAL_RANK", "0")),
        restarts=restarts,
        token=f"{run}.round{number}",
        kept=kept,
        notice_file=environ.get("RDZV_NOTICE_FILE", ""),
    )
