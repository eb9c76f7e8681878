"""Starts the runner by path, using only the standard library: `python -I -S __main__.py FD`.

FD is its end of a Unix stream socket to the agent. With --hold before it, this is the process that
holds a runner's connections (held_connections.py), and with --guard its fence's guard (fence.py).
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    # The package is found by its folder's name, because rdzv may not be on the path.
    sys.path.append(__file__.rpartition("/runner/")[0])
    if sys.argv[1] == "--hold":
        from runner.held_connections import hold as main  # type: ignore[import-not-found]
    elif sys.argv[1] == "--guard":
        from runner.fence import guard as main  # type: ignore[import-not-found]
    else:
        from runner.runner import main  # type: ignore[import-not-found]

    sys.path.pop()
    main(int(sys.argv[-1]))
