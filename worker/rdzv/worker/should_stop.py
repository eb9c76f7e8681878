"""A notice that some rank is about to be ended, on which all ranks act in the same step."""

from __future__ import annotations

from .notice import Notice

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
