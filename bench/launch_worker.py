"""A worker that says when it runs its first line, and then waits: it uses no CPU, and no torch.

It appends one JSON line to `$RDZV_BENCH_STARTS`, with the time by CLOCK_MONOTONIC, which all
processes of one machine share. It ends with its launcher or, where it outlives that, with the
bench, which holds the lock on `$RDZV_BENCH_LIFELINE`.
"""

import time

STARTED_S = time.monotonic()

import fcntl  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402

starts = os.open(os.environ["RDZV_BENCH_STARTS"], os.O_WRONLY | os.O_APPEND)
os.write(starts, json.dumps({"at_s": STARTED_S, "pid": os.getpid()}).encode() + b"\n")
os.close(starts)

lifeline = os.open(os.environ["RDZV_BENCH_LIFELINE"], os.O_RDONLY)
fcntl.flock(lifeline, fcntl.LOCK_SH)
