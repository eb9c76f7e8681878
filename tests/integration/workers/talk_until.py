"""A worker without torch that writes a line for each of its steps, until its job may end.

`FILE [exit=N]`: the job may end when FILE exists; then it exits with N. On SIGTERM it writes that
it has saved, and exits 0. With `RDZV_TEST_DIARY` it keeps a diary there: a line for each start.
"""

import os
import signal
import sys
import time
from pathlib import Path

FILE = Path(sys.argv[1])
OPTIONS = dict(arg.partition("=")[::2] for arg in sys.argv[2:])
RANK, ROUND = os.environ["RANK"], os.environ["RDZV_ROUND"]


def on_sigterm(*_: object) -> None:
    print(f"rank {RANK} round {ROUND}: saved", flush=True)
    sys.exit(0)


signal.signal(signal.SIGTERM, on_sigterm)
if diary := os.environ.get("RDZV_TEST_DIARY"):
    with Path(diary).open("a") as lines:
        host = os.environ.get("RDZV_NODE_ID", "")
        lines.write(f"{ROUND} {RANK} {os.environ['WORLD_SIZE']} {os.getpid()} {host}\n")
step = 0
while not FILE.exists():
    print(f"rank {RANK} round {ROUND} step {step}", flush=True)
    step += 1
    time.sleep(0.1)
print(f"rank {RANK} round {ROUND}: done", flush=True)
sys.exit(int(OPTIONS.get("exit", "0")))
