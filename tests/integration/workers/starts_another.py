"""A worker that has started another process, in a separate session, and waits for its end."""

import json
import os
import subprocess
import time
from pathlib import Path

reports = Path(os.environ["RDZV_TEST_REPORTS"])
other = subprocess.Popen(["sleep", "1000"], start_new_session=True)
temporary = reports / f"{os.getpid()}.tmp"
temporary.write_text(json.dumps({**os.environ, "pid": os.getpid(), "other": other.pid}))
temporary.rename(reports / f"{os.environ['RDZV_ROUND']}-{os.environ['RANK']}-{os.getpid()}.json")
while not Path(os.environ["RDZV_TEST_FINISH"]).exists():
    time.sleep(0.05)
