"""Run histories: one, to see it (`python -m tests.sim 4711 --trace`), or many (`--seeds 0:9`)."""

import os
import sys

from tests.sim.report import main

if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        # Otherwise the order of a set of names is random, and a seed would not determine a history.
        arguments = [sys.executable, "-m", "tests.sim", *sys.argv[1:]]
        os.execve(sys.executable, arguments, {**os.environ, "PYTHONHASHSEED": "0"})
    raise SystemExit(main())
