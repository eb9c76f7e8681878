"""The output of the trainings whose recovery is timed, and when they end."""

import fcntl
import json
import os

STEPS_OF_STEADY = 5
PAUSE_S = 0.02
"""Between two steps: a machine on which many train must not be busy with training."""


def reach(stage: str, at_s: float, round_: int = 0, world_size: int = 0) -> None:
    """Say that a stage is reached, in one write, which no other worker's can cut in two.

    `round_` is the round, if the processes of the script stay from one to the next, and
    `world_size` how many take part where the launcher does not say it.
    """
    line = {
        "stage": stage,
        "at_s": at_s,
        "pid": os.getpid(),
        "seat": f"{os.environ['RDZV_BENCH_NODE']}/{os.environ.get('LOCAL_RANK', '0')}",
        "world_size": world_size or int(os.environ["WORLD_SIZE"]),
        "round": round_,
    }
    stages = os.open(os.environ["RDZV_BENCH_STAGES"], os.O_WRONLY | os.O_APPEND)
    try:
        os.write(stages, json.dumps(line).encode() + b"\n")
    finally:
        os.close(stages)


def end_with_the_bench() -> None:
    """End this process once the lock is free."""
    lifeline = os.open(os.environ["RDZV_BENCH_LIFELINE"], os.O_RDONLY)
    fcntl.flock(lifeline, fcntl.LOCK_SH)
    os._exit(0)
