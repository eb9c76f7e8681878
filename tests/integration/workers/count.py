"""A worker without torch that counts, in its own file and on stdout, until it may end."""

import json
import os
import time
from pathlib import Path

FINISH = Path(os.environ["RDZV_TEST_FINISH"])
REPORTS = Path(os.environ["RDZV_TEST_REPORTS"])

pid = os.getpid()
about = {**os.environ, "pid": pid}
temporary = REPORTS / f"{pid}.tmp"
temporary.write_text(json.dumps(about))
temporary.rename(REPORTS / f"{os.environ['RDZV_ROUND']}-{os.environ['RANK']}-{pid}.json")

count = 0
mine = REPORTS.parent / f"count-{pid}"
while count < 5 or not FINISH.exists():
    print(f"{pid} counts {count}", flush=True)
    mine.with_suffix(".tmp").write_text(str(count))
    mine.with_suffix(".tmp").rename(mine)
    count += 1
    time.sleep(0.05)
