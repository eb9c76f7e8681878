"""Hugging Face's Accelerate in a function under @elastic."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState


def round_accelerator(**options: Any) -> Accelerator:
    """Make the Accelerator of this round, with Accelerator's own options.

    Accelerate remembers rank and size of the group for as long as the process lives. A worker that
    is kept has others in each round.
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return Accelerator(**options)
