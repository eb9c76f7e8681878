"""A worker without torch that counts steps, and saves them when its node is about to leave.

Options: `snapshot=FILE` is where the step is kept, from which the next one continues; `by=file`
polls the notice file, `by=signal` waits for SIGUSR1; `go=FILE` is waited for before it exits;
`deaf` ignores everything, even SIGTERM. It reports the step at which it begins, and writes the
notice beside the snapshot.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

OPTIONS = dict(arg.partition("=")[::2] for arg in sys.argv[1:])
FINISH = Path(os.environ["RDZV_TEST_FINISH"])
SNAPSHOT = Path(OPTIONS["snapshot"])
NOTICE = Path(os.environ["RDZV_NOTICE_FILE"])
signalled = []


def report(step: int) -> None:
    folder, name = Path(os.environ["RDZV_TEST_REPORTS"]), os.environ["RDZV_ROUND"]
    temporary = folder / f"{os.getpid()}.tmp"
    about = {"pid": os.getpid(), "step": step, "notified": NOTICE.exists()}
    temporary.write_text(json.dumps({**os.environ, **about}))
    temporary.rename(folder / f"{name}-{os.environ['RANK']}-{os.getpid()}.json")


def told() -> bool:
    if "deaf" in OPTIONS:
        return False
    return bool(signalled) if OPTIONS.get("by") == "signal" else NOTICE.exists()


signal.signal(signal.SIGUSR1, lambda *_: signalled.append(1))
if "deaf" in OPTIONS:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
step = int(SNAPSHOT.read_text()) if SNAPSHOT.exists() else 0
report(step)
while not FINISH.exists():
    step += 1
    if told():
        SNAPSHOT.with_name("told").write_text(NOTICE.read_text())
        while "go" in OPTIONS and not Path(OPTIONS["go"]).exists():
            time.sleep(0.02)
        SNAPSHOT.write_text(str(step))
        sys.exit(0)
    time.sleep(0.02)
