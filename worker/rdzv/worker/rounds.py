"""The round that a worker takes part in, read from its environment."""

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
    """One round, as the script's function gets it. Ranks count from 0."""

    number: int
    """The round's number, which never goes back; under torchrun, its count of restarts."""
    rank: int
    world_size: int
    local_rank: int
    restarts: int
    """Restarts that the job has spent so far."""
    token: str
    """A unique name for this round, safe in file names.

    Put it into the names of files that are written in the background, so that a writer of an
    earlier round cannot damage a newer file.
    """
    kept: bool = False
    """Whether this process took part in the round before."""
    notice_file: str = ""

    @property
    def leaving(self) -> bool:
        """Whether this node is leaving (a drain, a preemption): save soon, and return."""
        return bool(self.notice_file) and os.path.exists(self.notice_file)  # noqa: PTH110

    @property
    def device(self) -> torch.device:
        """The device of this worker: GPU `local_rank` if there is CUDA, else the CPU."""
        import torch

        if torch.cuda.is_available():
            return torch.device("cuda", self.local_rank)
        return torch.device("cpu")


def round_of(environ: Mapping[str, str], *, kept: bool = False) -> Round:
    """Read a round from rdzvrun's or torchrun's environment; without one, a world of one worker.

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
