"""Hugging Face's Trainer under rdzvrun: `Trainer(..., callbacks=[RdzvCallback()])`."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from .. import notice
from ..state import State
from . import newest_checkpoint

__all__ = ["RdzvCallback", "newest_checkpoint"]


class RdzvCallback(TrainerCallback):  # type: ignore[misc]
    """Reports progress, and makes all ranks save before this node leaves or after SIGTERM.

    A worker on a leaving node ends once the checkpoint is written; the others continue training. In
    a function under @elastic, pass the state, so that a worker is kept when the group changes and
    its next Trainer continues from the newest checkpoint.
    """

    def __init__(self, state: State | None = None) -> None:
        self._state = state
        self._agreed = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report the checkpoint's step, and treat SIGTERM as a notice."""
        notice.report_step(state.global_step)
        notice.catch_sigterm()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report the step, and make all ranks save it if any rank has received a notice."""
        notice.report_step(state.global_step)
        if self._state is not None:
            self._state.commit()
        if notice.should_stop():
            self._agreed = control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End this worker if it has received a notice, now that its work is saved."""
        if self._agreed:
            self._agreed = False
            notice.exit_if_leaving()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Restore the script's own handling of SIGTERM."""
        notice.restore_sigterm()
