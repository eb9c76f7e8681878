"""A worker without torch that writes the lines that the log tests read.

It writes one line to each stream, reports, and then waits until it is told to end. If there is a
file `say` beside the finish file, it writes the content. Options: `count` goes on counting;
`flood=N` writes N MiB and leaves a file `flooded`.
"""

import json
import os
import sys
import time
from pathlib import Path

OPTIONS = dict(arg.partition("=")[::2] for arg in sys.argv[1:])
FINISH = Path(os.environ["RDZV_TEST_FINISH"])
SAY = FINISH.with_name("say")
WHERE = f"of {os.environ['RANK']} in {os.environ['RDZV_ROUND']}"


def report() -> None:
    """Write one file atomically."""
    folder = Path(os.environ["RDZV_TEST_REPORTS"])
    temporary = folder / f"{os.getpid()}.tmp"
    temporary.write_text(json.dumps({**os.environ, "pid": os.getpid()}))
    temporary.rename(folder / f"{os.environ['RDZV_ROUND']}-{os.environ['RANK']}-{os.getpid()}.json")


def flood(mib: int) -> None:
    line = "x" * 127 + "\n"
    for _ in range(mib):
        sys.stdout.write(line * (8 * 1024))
    print("flooded", flush=True)
    FINISH.with_name("flooded").touch()


print("out", WHERE, flush=True)
print("err", WHERE, file=sys.stderr, flush=True)
report()
if "flood" in OPTIONS:
    flood(int(OPTIONS["flood"]))
said, count = False, 0
while not FINISH.exists():
    if not said and SAY.exists() and (text := SAY.read_text()):
        said = True
        print(text, WHERE, flush=True)
    if "count" in OPTIONS:
        print(count, flush=True)
        count += 1
    time.sleep(0.02)
print("bye", WHERE, flush=True)
