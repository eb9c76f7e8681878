"""A worker without torch: identifies itself, then waits until it is told to end.

Options: `exit=N` exits with N at once; `fail-first` fails in the first attempt; `child` leaves a
grandchild in a session of its own; `term=FILE` writes FILE when it gets SIGTERM, with "saved" if
the grandchild goes on; `deaf` ignores SIGTERM and SIGINT; `say=TEXT` writes TEXT to stdout and
stderr; `error=TEXT` writes TEXT to the error file; `read` reports the content of stdin; `boom`
makes RANK 1 raise an exception that torch's `@record` writes down.
"""

import contextlib
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
    """Write one file atomically."""
    folder = Path(os.environ["RDZV_TEST_REPORTS"])
    temporary = folder / f"{os.getpid()}.tmp"
    about = {"pid": os.getpid(), "argv": sys.argv, "fds": FDS}
    about |= {"stdin": sys.stdin.read()} if "read" in OPTIONS else {}
    temporary.write_text(json.dumps({**os.environ, **about}))
    temporary.rename(folder / f"{os.environ['RDZV_ROUND']}-{os.environ['RANK']}-{os.getpid()}.json")


def descriptors() -> list[int]:
    """List the open descriptors."""
    found = []
    for number in range(1024):
        with contextlib.suppress(OSError):
            os.fstat(number)
            found.append(number)
    return found


def on_sigterm(*_: object) -> None:
    text = "saved"
    for child in CHILDREN:
        with contextlib.suppress(subprocess.TimeoutExpired):
            text = f"its child has ended with {child.wait(0.2)}"
    Path(OPTIONS["term"]).write_text(text)
    sys.exit(0)


CHILDREN: list["subprocess.Popen[bytes]"] = []
FDS = descriptors()
if "deaf" in OPTIONS:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
if "term" in OPTIONS:
    signal.signal(signal.SIGTERM, on_sigterm)
if "child" in OPTIONS:
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    CHILDREN.append(subprocess.Popen(sleep, start_new_session=True))
if "error" in OPTIONS:
    Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(OPTIONS["error"])
if "say" in OPTIONS:
    print(OPTIONS["say"])
    print(OPTIONS["say"], file=sys.stderr)
report()
if "exit" in OPTIONS:
    sys.exit(int(OPTIONS["exit"]))
if "fail-first" in OPTIONS and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    sys.exit(3)
if "boom" in OPTIONS and os.environ["RANK"] == "1":
    from torch.distributed.elastic.multiprocessing.errors import record

    @record
    def boom() -> None:
        raise ValueError("boom, said rank 1")

    boom()
while not FINISH.exists():
    time.sleep(0.02)
