"""State that outlives its node: another node has kept copies of what was on it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, Node, cluster

SUPPORT = Path(__file__).parents[1] / "support"
ROOT = Path(__file__).parents[2]
STEPS, STOPPED_IN, EVERY = 20, 13, 5


@pytest.fixture(name="c")
def _cluster(tmp_path: Path) -> Iterator[Cluster]:
    with cluster(tmp_path) as made:
        yield made


def start(c: Cluster, name: str, topology: str, *options: str) -> Node:
    """Start a node that trains a sharded model, and stops in the middle of a step of round 0."""
    script = c.folder / "train.py"
    script.write_text(
        "import json, sys, kept_training\nkept_training.train_sharded(**json.loads(sys.argv[1]))\n"
    )
    place = {"step": STOPPED_IN, "at": "forward", "do": "sleep", "seconds": 600, "round": 0}
    faults = [{"rank": rank, **place} for rank in range(2)]
    args = {"steps": STEPS, "snapshot_every": EVERY, "faults": faults}
    given = ("--max-restarts=5", "--keep-timeout=1", f"--topology={topology}", *options)
    paths = os.pathsep.join([str(SUPPORT), str(ROOT / "worker")])
    return c.start_node(
        name,
        *given,
        worker=str(script),
        args=(json.dumps(args),),
        nnodes="2",
        environ={"PYTHONPATH": paths},
    )


def lines(node: Node, what: str, **fields: Any) -> list[dict[str, Any]]:
    """Return the JSON lines of a node's worker that have these fields."""
    found = [
        json.loads(line[line.index("{") :]) for line in node.text.splitlines() if '{"what"' in line
    ]
    return [row for row in found if row["what"] == what and fields.items() <= row.items()]


def snapshots_of(c: Cluster) -> dict[str, int]:
    return {node.node_id: node.snapshots for node in c.status().nodes}


def test_a_sharded_training_survives_the_end_of_a_node(c: Cluster) -> None:
    """Its part of the model is nowhere but in a copy, of which the server knows where it is."""
    one, two = start(c, "n1", "a"), start(c, "n2", "b")
    for node in (one, two):
        c.wait_until("it has stopped", lambda node=node: lines(node, "fault", round=0))
    # Two of its own each, and one of the other's.
    c.wait_until("copies are kept", lambda: snapshots_of(c) == {"n1": 3, "n2": 3})
    two.kill_tree()
    three = start(c, "n3", "b")
    for node in (one, three):
        assert node.wait() == 0
    (begun,) = lines(three, "begin")
    assert begun["step"] in (STOPPED_IN // EVERY * EVERY, STOPPED_IN // EVERY * EVERY - EVERY)
    said = f"resumed from the snapshot of step {begun['step']} in memory (copies of parts "
    assert said in one.text + three.text
    assert len(lines(one, "done")) == len(lines(three, "done")) == 1
