"""A worker without torch that trains independently: it saves, fails, and records both.

RANK 0 saves every `SAVE_EVERY` steps; a starting worker loads that, which takes `load` seconds. The
last RANK exits 1 at step `fail` of round 0; every worker exits 0 at step `upto`. Each appends its
actions, with the time, to `lived-RANK` in the folder of reports, against which a ledger is checked.
"""

import os
import sys
import time
from pathlib import Path

OPTIONS = dict(arg.partition("=")[::2] for arg in sys.argv[1:])
REPORTS = Path(os.environ["RDZV_TEST_REPORTS"])
RANK, ROUND = int(os.environ["RANK"]), int(os.environ["RDZV_ROUND"])
LAST = int(os.environ["WORLD_SIZE"]) - 1 == RANK
SAVED = REPORTS.with_name("saved")
SAVE_EVERY = 60
STEP_S = 0.05


def note(what: str, step: int) -> None:
    with (REPORTS / f"lived-{RANK}").open("a") as out:
        out.write(f"{time.time()} {ROUND} {what} {step}\n")


step = int(SAVED.read_text()) if SAVED.exists() else 0
time.sleep(float(OPTIONS["load"]))
while step < int(OPTIONS["upto"]):
    time.sleep(STEP_S)
    step += 1
    with open(os.environ["RDZV_PROGRESS_FILE"], "r+b", buffering=0) as out:  # noqa: PTH123
        out.write(b"%20d\n" % step)
    note("step", step)
    if RANK == 0 and step % SAVE_EVERY == 0:
        SAVED.with_suffix(".new").write_text(str(step))
        SAVED.with_suffix(".new").rename(SAVED)
    if LAST and ROUND == 0 and step == int(OPTIONS["fail"]):
        note("fail", step)
        sys.exit(1)
