"""A worker without torch that reports its step: RANK steps ahead, and one more each 20 ms.

Options: `upto=N` stops there, and waits, `later=N` after the first round; `garbage` reports invalid
steps; `slow=RANK` takes ten times as long, until there is a file `hurry`.
"""

import contextlib
import json
import os
import sys
import time
from pathlib import Path

OPTIONS = dict(arg.partition("=")[::2] for arg in sys.argv[1:])
FINISH = Path(os.environ["RDZV_TEST_FINISH"])
HURRY = FINISH.with_name("hurry")
UPTO = int(OPTIONS.get("upto", 10**9))
if os.environ["RDZV_ROUND"] != "0":
    UPTO = int(OPTIONS.get("later", UPTO))


def report_step(step: int) -> None:
    if file := os.environ.get("RDZV_PROGRESS_FILE"):
        with contextlib.suppress(OSError), open(file, "r+b", buffering=0) as out:  # noqa: PTH123
            out.write(b"%20d\n" % step)


folder = Path(os.environ["RDZV_TEST_REPORTS"])
temporary = folder / f"{os.getpid()}.tmp"
temporary.write_text(json.dumps({**os.environ, "pid": os.getpid()}))
temporary.rename(folder / f"{os.environ['RDZV_ROUND']}-{os.environ['RANK']}-{os.getpid()}.json")
if "garbage" in OPTIONS:
    Path(os.environ["RDZV_PROGRESS_FILE"]).write_text("five")
step = int(os.environ["RANK"])
while not FINISH.exists():
    if "garbage" not in OPTIONS and step <= UPTO:
        report_step(step)
        step += 1
    time.sleep(0.2 if OPTIONS.get("slow") == os.environ["RANK"] and not HURRY.exists() else 0.02)
