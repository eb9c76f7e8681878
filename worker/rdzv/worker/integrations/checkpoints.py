"""Finds the checkpoint from which Hugging Face's Trainer should continue."""

from __future__ import annotations

import json
import os
import re

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
