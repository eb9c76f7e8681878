"""A worker with descendants: `tree.py FOLDER stay|leave`.

Creates a child in its own process group, one in its own session, and a daemon forked twice; all
ignore SIGTERM, and have written their pids to FOLDER before "ready" appears there.
"""

import os
import signal
import sys
from pathlib import Path

folder, what_then = Path(sys.argv[1]), sys.argv[2]


def live_on(name: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (folder / f"{name}.new").write_text(str(os.getpid()))
    (folder / f"{name}.new").rename(folder / name)
    while True:
        signal.pause()


if os.fork() == 0:
    live_on("child")
if os.fork() == 0:
    os.setsid()
    live_on("session")
middle = os.fork()
if middle == 0:
    os.setsid()
    if os.fork() == 0:
        live_on("daemon")
    os._exit(0)
os.waitpid(middle, 0)

while not all((folder / name).exists() for name in ("child", "session", "daemon")):
    os.sched_yield()
(folder / "ready").touch()
if what_then == "stay":
    live_on("worker")
