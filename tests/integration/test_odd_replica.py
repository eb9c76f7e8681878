"""A node that changes a bit in memory, with real servers, nodes and processes."""

from __future__ import annotations

import pytest
from cluster import JOB, QUICK_TORCH, Cluster, Node

pytestmark = pytest.mark.slow
STEPS, EVERY, FLIPPED_AT = 14, 4, 9


def start(c: Cluster, name: str, flipped_on: int, nnodes: str) -> Node:
    options = ("--max-restarts=1", "--restart-backoff=0", "--rdzv-conf=last_call_timeout=1")
    args = (str(STEPS), str(EVERY), str(c.folder / "diary"), f"{flipped_on}:{FLIPPED_AT}")
    return c.start_node(
        name, *options, worker="verified.py", args=args, nnodes=nnodes, environ=QUICK_TORCH
    )


def sums(workers: int) -> list[int]:
    """Return the sum of the weights before each step of an undisturbed run."""
    weights = [1]
    while len(weights) < STEPS:
        grown = sum(weights[-1] % 5 + rank + 1 for rank in range(workers))
        weights.append(weights[-1] + grown)
    return [64 * weight for weight in weights]


def diary(c: Cluster, round_: int) -> dict[int, set[int]]:
    """Return the sums that ranks have seen before each step of a round."""
    found: dict[int, set[int]] = {}
    for line in (c.folder / "diary").read_text().splitlines():
        step, _, number, seen = map(int, line.split())
        if number == round_:
            found.setdefault(step, set()).add(seen)
    return found


def test_an_odd_replica_is_named_and_leaves_and_the_others_redo_what_it_has_spoiled(
    c: Cluster,
) -> None:
    nodes = [start(c, f"n{i}", flipped_on=1, nnodes="3") for i in (1, 2, 3)]
    c.wait_for_state("running")
    nodes.append(start(c, "n4", flipped_on=1, nnodes="3"))
    c.wait_for_state("succeeded")
    status = c.status()
    (left,) = (one for one in status.nodes if one.state == "left")
    assert sorted(node.wait() for node in nodes) == [0, 0, 0, 75]
    assert next(node for node in nodes if node.name == left.node_id).wait() == 75
    assert (status.kept, status.restarts, status.resume_step) == (2, 1, 8)
    said = (
        f"{left.node_id} left: unhealthy: replica digest: after step 12, model.weight of rank 1 ("
    )
    for page in ("status", "explain"):
        told = c.run("rdzvctl", f"--server={c.endpoint}", page, JOB).stdout
        assert said.partition(": ")[2] in told
        assert "all were equal at step 8" in told
    c.wait_for_event("NodeLeft", said)
    # Before: what the changed bit has done to the others as well. After: no trace of it.
    right = sums(workers=3)
    spoiled, redone = diary(c, 0), diary(c, 1)
    assert all(spoiled[step] == {right[step - 1]} for step in range(1, FLIPPED_AT + 1))
    assert all(spoiled[step] != {right[step - 1]} for step in range(FLIPPED_AT + 2, 13))
    assert redone == {step: {right[step - 1]} for step in range(9, STEPS + 1)}


def test_of_two_replicas_one_is_replaced_and_both_nodes_are_suspected(c: Cluster) -> None:
    nodes = [start(c, name, flipped_on=0, nnodes="2") for name in ("n1", "n2")]
    c.wait_for_state("succeeded")
    assert [node.wait() for node in nodes] == [0, 0]
    status = c.status()
    assert status.last_failure is not None
    failed = status.last_failure.root_cause
    assert failed.rank == 1
    assert failed.message.startswith("ReplicasDifferError: replica digest: after step 12, ")
    assert "Both nodes are suspected" in failed.message
    assert (status.kept, status.resume_step) == (1, 8)
    right = sums(workers=2)
    assert diary(c, 1) == {step: {right[step - 1]} for step in range(9, STEPS + 1)}
