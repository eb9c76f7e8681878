"""rdzvrun is a drop-in for torchrun: one table of command lines, each run under both.

Whatever a worker can see, and whatever the user gets, must be the same, except for what a case
marks as different, with the reason. docs/torchrun.md tells users the same, row by row.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from launchers import Case, Differ, Launched, Seen, Send, launched

pytest.importorskip("torch", reason="torch is not installed")

pytestmark = pytest.mark.timeout(150)

# ---------------------------------------------------------------------- differences

EVERYWHERE = {
    # The restart count does not tell two rounds apart where nodes come and go for free.
    "env RDZV_ROUND",
    # How torchrun's command tells torchrun's agent which signals to handle; no worker reads it.
    "env TORCHELASTIC_SIGNALS_TO_HANDLE",
}
"""What every worker sees and only one of the launchers gives."""

USAGE = {
    "exit codes": Differ([1], [2], "what can not work as typed is a usage error, without traceback")
}


def ends(signum: signal.Signals) -> dict[str, Differ]:
    why = "128+n, as from a shell: a scheduler can tell a signal from a failure"
    return {"exit codes": Differ([1], [128 + signum], why)}


def loopback(workers: int) -> dict[str, Differ]:
    why = "an address and not a name, so that no name service has a say"
    return {"env MASTER_ADDR": Differ(["localhost"] * workers, ["127.0.0.1"] * workers, why)}


# ---------------------------------------------------------------------- the table

CASES: Sequence[Case] = [
    Case("bare", "see.py a 'b c'"),
]


# ---------------------------------------------------------------------- the test


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "_"))
def test_it_is_as_under_torchrun(case: Case, tmp_path: Path) -> None:
    with launched(case, tmp_path) as both:
        for each in both:
            each.poke()
        theirs, ours = (each.end() for each in both)
        check(case, theirs, ours, both)
