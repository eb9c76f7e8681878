"""What a worker and its agent tell each other by files: that the node is leaving, and the step."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any


class _Notice:
    """SIGTERM as a notice, where a launcher ends a round by it, or Slurm a job; who was asked."""

    def __init__(self) -> None:
        self.has_come = False
        self.has_saved = False
        self._former_handler: Any = None
        self._is_caught = False
        self.asked: tuple[weakref.ref[Any] | None, int] = (None, 0)
        """The default process group, and how often its ranks have been asked."""

    def catch(self) -> None:
        # Python cannot set handlers outside the main thread.
        if threading.current_thread() is threading.main_thread() and not self._is_caught:
            self._former_handler = signal.signal(signal.SIGTERM, self._note)
            self._is_caught = True
            atexit.register(self._at_exit)

    def restore(self) -> None:
        if self._is_caught:
            signal.signal(signal.SIGTERM, self._former_handler or signal.SIG_DFL)
            self._is_caught = self.has_come = False
            atexit.unregister(self._at_exit)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self.has_come = True

    def _at_exit(self) -> None:
        """Restore SIGTERM's default action, so that it also ends a process exiting on an error.

        Python takes seconds to tear down the modules that a framework has imported. Meanwhile
        others may be waiting for this worker: a peer was lost, its collective failed, and its round
        must end.
        """
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self.has_come and not self.has_saved:
            signal.raise_signal(signal.SIGTERM)


_notice = _Notice()

before_leaving: list[Callable[[], object]] = []
"""Called on all ranks before some of them leave."""
catch_sigterm, restore_sigterm = _notice.catch, _notice.restore


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
    import torch
    import torch.distributed as dist

    catch_sigterm()
    given = _notice.has_come or _node_leaves()
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return given
    # A process that is kept must count as the new ones of its next group do.
    group, calls = _notice.asked
    if group is None or group() is not dist.group.WORLD:
        group, calls = weakref.ref(dist.group.WORLD), 0
    _notice.asked = group, calls + 1
    if (calls + 1) % every:
        return False
    device = "cpu" if "gloo" in str(dist.get_backend_config()) else torch.device("cuda")
    any_given = torch.tensor([int(given)], dtype=torch.int32, device=device)
    dist.all_reduce(any_given, op=dist.ReduceOp.MAX)
    return bool(any_given.item())


def exit_if_leaving() -> None:
    """Wait until all ranks have saved, then end this process if it was told to stop.

    All ranks call it after each `should_stop` that returned True. Where it returns, training goes
    on: the group re-forms once the others are gone, and continues from what was saved. What the
    step's `State.save` has saved is on other nodes by then, or 30 seconds have passed.

    Raises:
        SystemExit: this rank was told: 0 if its node leaves, else 143, as after SIGTERM.
        RuntimeError: the barrier failed, as torch reports it when a rank is gone.

    """
    import torch.distributed as dist

    for call in before_leaving:
        call()
    if dist.is_available() and dist.is_initialized():
        dist.barrier()
    if _notice.has_come or _node_leaves():
        _notice.has_saved = True
        raise SystemExit(0 if _node_leaves() else 128 + signal.SIGTERM)


def _node_leaves() -> bool:
    file = os.environ.get("RDZV_NOTICE_FILE", "")
    return bool(file) and os.path.exists(file)  # noqa: PTH110


def report_step(step: int) -> None:
    """Make `rdzvctl status` show that this worker is at `step`. Does nothing without rdzvrun."""
    if file := os.environ.get("RDZV_PROGRESS_FILE"):
        with contextlib.suppress(OSError), open(file, "r+b", buffering=0) as out:  # noqa: PTH123
            out.write(b"%20d\n" % step)
