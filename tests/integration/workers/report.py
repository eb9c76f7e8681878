"""A worker without torch: says who it is, then waits until it is told to end.

Options: `exit=N` exits with N at once; `fail-first` fails in the first attempt; `child` leaves a
grandchild in a session of its own; `term=FILE` writes FILE when it gets SIGTERM; `deaf` ignores
SIGTERM and SIGINT; `say=TEXT` writes TEXT to stdout and stderr; `error=TEXT` writes TEXT to the
error file; `read` reports what stdin holds.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

OPTIONS = dict(arg.partition("=")[::2] for arg in sys.argv[1:])
FINISH = Path(os.environ["RDZV_TEST_FINISH"])


def report() -> None:
    """Leave one file, whole or not at all."""
    folder = Path(os.environ["RDZV_TEST_REPORTS"])
    temporary = folder / f"{os.getpid()}.tmp"
    about = {"pid": os.getpid(), "argv": sys.argv, "fds": descriptors(), "stdin": stdin}
    temporary.write_text(json.dumps({**os.environ, **about}))
    temporary.rename(folder / f"{os.environ['RDZV_ROUND']}-{os.environ['RANK']}-{os.getpid()}.json")


def descriptors() -> list[str]:
    """Name the open descriptors, without the one that lists them."""
    listing = os.open("/proc/self/fd", os.O_RDONLY)
    try:
        return sorted(set(os.listdir(listing)) - {str(listing)} - {str(os.dup(listing))})
    finally:
        os.close(listing)


def on_sigterm(*_: object) -> None:
    Path(OPTIONS["term"]).write_text("saved")
    sys.exit(0)


if "term" in OPTIONS:
    signal.signal(signal.SIGTERM, on_sigterm)
if "child" in OPTIONS:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
report()
if "exit" in OPTIONS:
    sys.exit(int(OPTIONS["exit"]))
if "fail-first" in OPTIONS and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    sys.exit(3)
while not FINISH.exists():
    time.sleep(0.02)
