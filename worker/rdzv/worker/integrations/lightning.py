"""Lightning under rdzvrun: `Trainer(..., callbacks=[checkpoint, RdzvCallback()])`."""

from __future__ import annotations

import os
from typing import Any

from lightning.pytorch import Callback, Trainer

from .. import notice
from ..state import State


def this_round() -> dict[str, int]:
    """Return this round's `devices` and `num_nodes`, for `Trainer(**this_round())`.

    Lightning refuses a group whose size differs from the configured one, and the size of an elastic
    job changes.
    """
    environ = os.environ
    return {
        "devices": int(environ.get("LOCAL_WORLD_SIZE", "1")),
        "num_nodes": int(environ.get("GROUP_WORLD_SIZE", "1")),
    }


class RdzvCallback(Callback):  # type: ignore[misc]
    """Reports progress, and makes all ranks save before this node leaves or after SIGTERM.

    It saves `last.ckpt` in the same folder as the Trainer's ModelCheckpoint, whose `dirpath` must
    be set because the default folder changes at each start. A worker on a leaving node ends once
    that file is written; the others continue training. In a function under @elastic, pass the
    state, so that a worker is kept when the group changes and its next Trainer continues from
    `ckpt_path="last"`.
    """

    def __init__(self, state: State | None = None) -> None:
        super().__init__()
        self._state = state
        self._folder = ""
        self._step = 0

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Refuse a trainer whose next start would look for checkpoints elsewhere."""
        # This runs before ModelCheckpoint's own setup, which fills in a default.
        folder = getattr(trainer.checkpoint_callback, "dirpath", None)
        if not folder:
            raise ValueError(
                "RdzvCallback has no folder to save to: give the Trainer a ModelCheckpoint with a "
                "dirpath that all nodes share, as ModelCheckpoint(dirpath=..., save_last=True)"
            )
        self._folder = str(folder)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Report the checkpoint's step, and handle SIGTERM here.

        Lightning's own SIGTERM handler broadcasts from the point where it interrupts training.
        Unless all ranks get the signal, that waits forever, so the handler is replaced.
        """
        self._step = trainer.global_step
        notice.report_step(self._step)
        notice.catch_sigterm()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Report each optimizer step, and save a checkpoint if any rank has received a notice."""
        if trainer.global_step == self._step:
            return  # Gradients are being accumulated.
        self._step = trainer.global_step
        notice.report_step(self._step)
        if self._state is not None:
            self._state.commit()
        if notice.should_stop():
            trainer.save_checkpoint(os.path.join(self._folder, "last.ckpt"))  # noqa: PTH118
            notice.exit_if_leaving()

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Restore the script's own handling of SIGTERM."""
        notice.restore_sigterm()
