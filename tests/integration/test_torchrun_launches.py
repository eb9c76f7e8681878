"""A process that launches more than once with the plug-in, as a notebook does: twenty-six stories.

They are in `workers/launches.py`.
"""

from __future__ import annotations

import sys

import pytest
from cluster import WORKERS, Cluster

pytest.importorskip("torch", reason="torch is not installed")

PATIENCE_S = 400.0
"""For all of them, on a busy machine."""


@pytest.mark.parametrize("how", ["together", "alone"])
def test_every_launch_of_a_process_ends_as_if_it_were_the_only_one(c: Cluster, how: str) -> None:
    """`together`: all in one process; `alone`: each in one that has launched nothing before."""
    command = [sys.executable, str(WORKERS / "launches.py"), c.endpoint, str(c.folder), how]
    told = c.start("launches", command)
    assert told.wait(PATIENCE_S) == 0, told.text
    assert told.text.count(": as it should") == 26
    assert "FAILED" not in told.text
