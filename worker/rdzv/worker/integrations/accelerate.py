"""Hugging Face's Accelerate in a function decorated with @elastic."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState


def round_accelerator(**options: Any) -> Accelerator:
    """Create this round's Accelerator, with Accelerator's own options.

    Accelerate remembers the group's rank and size for the life of the process, but in a kept worker
    they differ from round to round.
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return Accelerator(**options)
