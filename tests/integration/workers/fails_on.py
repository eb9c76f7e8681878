"""A worker that fails on one node, whatever round it is: `fails_on.py NODE [options of report.py]`.

What a node is called a worker sees from where its agent keeps its files.
"""

import os
import runpy
import sys
from pathlib import Path

NODE = sys.argv.pop(1)
if NODE in Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parts:
    sys.exit(3)
runpy.run_path(str(Path(__file__).with_name("report.py")), run_name="__main__")
