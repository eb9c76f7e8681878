"""A worker that crashes on one node, in every round: `fails_on.py NODE [options of report.py]`.

A worker finds its node's name in the path of its agent's files.
"""

import os
import runpy
import signal
import sys
from pathlib import Path

NODE = sys.argv.pop(1)
if NODE in Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parts:
    # Not an exception, which would be the job's: this node is quarantined for it.
    os.kill(os.getpid(), signal.SIGSEGV)
runpy.run_path(str(Path(__file__).with_name("report.py")), run_name="__main__")
