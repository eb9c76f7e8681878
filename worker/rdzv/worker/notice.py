"""What a worker and its agent tell each other by files: that the node is leaving, and the step."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading
import weakref
from types import FrameType
from typing import Any


class Notice:
    """A notice to this worker, on which all ranks act in the same step.

    A notice may reach only one node's ranks, but a checkpoint needs all ranks. So a loop calls
    `agreed` after each step, on every rank:

        if notice.agreed():
            save_checkpoint()
            notice.saved()

    The ranks that received no notice continue training. Once the others are gone, the group
    re-forms without them and resumes from that checkpoint.
    """

    def __init__(self) -> None:
        self._terminated = False
        self._has_saved = False
        self._former_handler: Any = None
        self._waits_for_sigterm = False
        self._group: weakref.ref[Any] | None = None
        self._calls = 0
        """How often the ranks of that group have been asked."""

    def wait_for_sigterm(self) -> None:
        """Treat SIGTERM as a notice from now on, instead of letting it end the process.

        Launchers send SIGTERM to the workers when a round must end, and Slurm does at its time
        limit. Python cannot set handlers outside the main thread, so nothing changes there.
        """
        if threading.current_thread() is threading.main_thread() and not self._waits_for_sigterm:
            self._former_handler = signal.signal(signal.SIGTERM, self._note)
            self._waits_for_sigterm = True
            atexit.register(self._at_exit)

    def restore_sigterm(self) -> None:
        """Undo `wait_for_sigterm`."""
        if self._waits_for_sigterm:
            signal.signal(signal.SIGTERM, self._former_handler or signal.SIG_DFL)
            self._waits_for_sigterm = False
            atexit.unregister(self._at_exit)

    @property
    def given(self) -> bool:
        """Whether this worker has received a notice."""
        return self._terminated or _node_leaves()

    def agreed(self, every: int = 1) -> bool:
        """Return whether any rank has received a notice. All ranks must call it at the same point.

        It is a single four-byte collective; with NCCL alone, it waits for the GPU. With `every`
        above 1, only each call of that number in a group asks, and the others return False.
        """
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            return self.given
        # A process that is kept must count as the new ones of its next group do.
        if self._group is None or self._group() is not dist.group.WORLD:
            self._group, self._calls = weakref.ref(dist.group.WORLD), 0
        self._calls += 1
        if self._calls % every:
            return False
        import torch

        device = "cpu" if "gloo" in str(dist.get_backend_config()) else torch.device("cuda")
        told = torch.tensor([int(self.given)], dtype=torch.int32, device=device)
        dist.all_reduce(told, op=dist.ReduceOp.MAX)
        return bool(told.item())

    def saved(self) -> None:
        """Wait until all ranks have saved, and end this worker if it has received a notice.

        All ranks must call it after each `agreed` that returned True. A worker whose node is
        leaving exits with 0. After SIGTERM it exits with 143, so the job does not count as
        succeeded.
        """
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            dist.barrier()
        if self.given:
            self._has_saved = True
            raise SystemExit(0 if _node_leaves() else 128 + signal.SIGTERM)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self._terminated = True

    def _at_exit(self) -> None:
        """Restore SIGTERM's default action, so that it also ends a process exiting on an error.

        Python takes seconds to tear down the modules that a framework has imported. Meanwhile
        others may be waiting for this worker: a peer was lost, its collective failed, and its round
        must end.
        """
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self._terminated and not self._has_saved:
            signal.raise_signal(signal.SIGTERM)


def _node_leaves() -> bool:
    file = os.environ.get("RDZV_NOTICE_FILE", "")
    return bool(file) and os.path.exists(file)  # noqa: PTH110


_notice = Notice()


def should_stop(every: int = 1) -> bool:
    """Return whether to save now, because a rank is about to be ended: the same on all ranks.

    A loop calls it once a step, on every rank of the default process group:

        if should_stop():
            save(step)
            exit_if_leaving()

    A rank is told by the file that `RDZV_NOTICE_FILE` names (its node is drained or preempted), or
    by SIGTERM, as from torchrun or Slurm. From the first call on, which must be in the main thread
    for that, SIGTERM no longer ends the process by itself.

    A call costs an all_reduce of one int32. If the group has gloo, it runs on the CPU; with NCCL
    alone, on the current CUDA device, and it waits for the GPU. With `every` above 1, only each
    call of that number agrees, counted from the group's creation, and the others return False at
    once. Without an initialised group, or in a group of one, the answer is this process's own.

    Raises:
        ValueError: `every` is below 1.
        RuntimeError: the collective failed, as torch reports it when a rank is gone.

    """
    if every < 1:
        raise ValueError(f"every={every} cannot be used: give the number of calls, 1 or more")
    _notice.wait_for_sigterm()
    return _notice.agreed(every)


def exit_if_leaving() -> None:
    """Wait until all ranks have saved, then end this process if it was told to stop.

    All ranks call it after each `should_stop` that returned True. Where it returns, training goes
    on: the group re-forms once the others are gone, and continues from what was saved.

    Raises:
        SystemExit: this rank was told: 0 if its node leaves, else 143, as after SIGTERM.
        RuntimeError: the barrier failed, as torch reports it when a rank is gone.

    """
    _notice.saved()


def report_step(step: int) -> None:
    """Make `rdzvctl status` show that this worker is at `step`. Does nothing without rdzvrun."""
    if file := os.environ.get("RDZV_PROGRESS_FILE"):
        with contextlib.suppress(OSError), open(file, "r+b", buffering=0) as out:  # noqa: PTH123
            out.write(b"%20d\n" % step)
