"""Callbacks for training frameworks.

They report progress, save before the node leaves, and keep workers. `transformers` has a callback
for Hugging Face's Trainer, `lightning` has one for Lightning, and `accelerate` creates a round's
Accelerator. Each of these modules imports its framework, and nothing here imports the modules, so a
job needs only the framework that it uses. Loops of one's own call `report_step`, and
`should_stop` and `exit_if_leaving` of `rdzv.worker`.

The agent names two files in the environment: the step is written to `RDZV_PROGRESS_FILE`, and
`RDZV_NOTICE_FILE` exists once the node is leaving. On that notice, or on SIGTERM, the framework is
asked to save. Without these files, for example under torchrun, only SIGTERM works, and no progress
is shown.
"""

from __future__ import annotations

import json
import os
import re

from ..notice import report_step

__all__ = ["newest_checkpoint", "report_step"]

_CHECKPOINT = re.compile(r"checkpoint-(\d+)$")


def newest_checkpoint(output_dir: str | os.PathLike[str]) -> str | None:
    """Return a Trainer's newest whole checkpoint for `resume_from_checkpoint`, or None.

    A worker that is killed while saving leaves a partial checkpoint, which Trainer's own search
    returns and then fails to load at every restart. Trainer writes `trainer_state.json` last.
    """
    found: list[tuple[int, str]] = []
    names = os.listdir(output_dir) if os.path.isdir(output_dir) else []  # noqa: PTH112, PTH208
    for name in names:
        path = os.path.join(output_dir, name)  # noqa: PTH118
        if (match := _CHECKPOINT.match(name)) and _is_whole(path):
            found.append((int(match[1]), path))
    return max(found)[1] if found else None


def _is_whole(checkpoint: str) -> bool:
    try:
        with open(os.path.join(checkpoint, "trainer_state.json")) as file:  # noqa: PTH118, PTH123
            json.load(file)
    except (OSError, ValueError):
        return False
    return True
