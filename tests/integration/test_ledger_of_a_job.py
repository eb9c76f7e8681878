"""The ledger of a real job, compared with the wall clock and its workers' own records."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from cluster import JOB, Cluster, cluster

from rdzv.view.answers import JobStatus
from tests.support.whole_lines import lines_of

WITHIN_S = 0.75
"""By how much a phase may differ from the workers' records: reports come once a second."""


class Lived:
    """The workers' records: the times of rounds, by their number."""

    def __init__(self, c: Cluster) -> None:
        self.first: dict[int, float] = {}
        self.last: dict[int, float] = {}
        self.reached: dict[tuple[int, int], float] = {}
        """By round and step: when it was made first."""
        self.failed_s = 0.0
        self.furthest: dict[int, int] = {}
        for file in c.reports.glob("lived-*"):
            for line in lines_of(file):
                at, number, what, step = line.split()
                self._note(float(at), int(number), what, int(step))

    def _note(self, at_s: float, number: int, what: str, step: int) -> None:
        if what == "fail":
            self.failed_s = at_s
            return
        self.first[number] = min(at_s, self.first.get(number, at_s))
        self.last[number] = max(at_s, self.last.get(number, at_s))
        key = number, step
        self.reached[key] = min(at_s, self.reached.get(key, at_s))
        self.furthest[number] = max(step, self.furthest.get(number, 0))


def test_the_ledger_is_what_has_happened(tmp_path: Path) -> None:
    """A worker fails, then a node dies and another takes its seat: nothing is lost or guessed."""
    with cluster(tmp_path) as c:
        args = ("load=1", "fail=110", "upto=420")

        def start(name: str) -> None:
            c.start_node(name, "--max-restarts=3", worker="saves.py", args=args, nnodes="2")

        start("n1")
        appeared_s = seen(c, "joining")
        start("n2")
        c.wait_for_event("LostStepsRedone", "round 1")
        start("n3")
        c.wait_until("it goes on for a while", lambda: furthest(c.status()) >= 200)
        killed_s = time.time()
        c.nodes[1].kill_tree()
        c.wait_for_event("LostStepsRedone", "round 2")
        ended_s = seen(c, "succeeded")
        told = c.run("rdzvctl", "--server", c.endpoint, "report", JOB, "-o", "json").stdout
        ledger = json.loads(told)["ledger"]
        lived = Lived(c)

    wall_s = ended_s - appeared_s
    phases = {phase: ms / 1000 for phase, ms in ledger["phases"].items()}
    assert sum(ledger["phases"].values()) == ledger["wall_ms"]
    assert ledger["wall_ms"] / 1000 == pytest.approx(wall_s, rel=0.01)

    redone = [lived.reached[number, lived.furthest[number - 1]] for number in (1, 2)]
    near = {"abs": WITHIN_S}
    assert phases["redoing"] == pytest.approx(
        sum(at_s - lived.first[number] for number, at_s in enumerate(redone, 1)), **near
    )
    trained_s = lived.failed_s - lived.first[0] + killed_s - redone[0] + lived.last[2] - redone[1]
    assert phases["training"] == pytest.approx(trained_s, **near)
    # Interpreter and load of each later round, and of the first.
    assert 2 < phases["loading"] < 10
    assert 1 < phases["starting"] < 10
    assert ledger["goodput"] == pytest.approx(trained_s / wall_s, abs=0.02)

    costs = {(cost["cause"], cost["node_id"]): cost["times"] for cost in ledger["costs"]}
    assert costs == {("", ""): 1, ("worker failure", "n2"): 1, ("node lost", "n2"): 1}
    assert ledger["steps_reported"]
    assert ledger["steps_redone"] == pytest.approx(
        sum(lived.furthest[number - 1] % 60 for number in (1, 2)), abs=4
    )


def seen(c: Cluster, state: str) -> float:
    """Wait until the job is seen in a state, and return the time."""
    with c.client() as client:

        def there() -> float | None:
            found = any(job.rdzv_id == JOB and job.state == state for job in client.jobs())
            return time.time() if found else None

        at_s: float = c.wait_until(f"the job is {state}", there)
    return at_s


def furthest(status: JobStatus) -> int:
    return max((one.step for one in status.progress), default=0)
