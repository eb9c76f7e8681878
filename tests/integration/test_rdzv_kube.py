"""A real rdzv-kube, with real nodes and rdzvd, and a stand-in for Kubernetes' API server."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cluster import JOB, Cluster, Node, cluster

from tests.support.kubernetes_stand_in import StandIn, machine, pod, standing_in

PROJECT = Path(__file__).parents[2] / "deploy/kubernetes/rdzv-kube"
TRY_AGAIN = 75


@pytest.fixture
def api() -> Iterator[StandIn]:
    with standing_in() as running:
        yield running


@pytest.fixture
def c(tmp_path: Path) -> Iterator[Cluster]:
    with cluster(tmp_path) as running:
        yield running


def start_kube(c: Cluster, api: StandIn) -> Node:
    kubeconfig = api.kubeconfig(c.folder / "kubeconfig")
    command = [sys.executable, "-m", "rdzv_kube", f"--kubeconfig={kubeconfig}"]
    environ = {"PYTHONPATH": str(PROJECT)}
    return c.start("kube", [*command, f"--server={c.endpoint}"], environ=environ)


def in_seconds(seconds: float) -> str:
    return datetime.fromtimestamp(time.time() + seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def drain_of(c: Cluster, name: str) -> str:
    """Return the drain of a node as shown by `rdzvctl nodes`; empty while it is not drained."""
    with c.client() as client:
        return next((n.cordon_reason or "" for n in client.nodes() if n.node_id == name), "")


def test_a_pod_that_is_deleted_leaves_in_order_and_its_name_is_free_again(
    c: Cluster, api: StandIn
) -> None:
    pods = [pod("train-0", on="gpu-1"), pod("train-1", on="gpu-2")]
    for each in (machine("gpu-1"), machine("gpu-2"), *pods):
        api.put(each)
    kube = start_kube(c, api)
    nodes = [c.start_node(name, nnodes="1:2") for name in ("train-0", "train-1")]
    c.wait_for_round(0, workers=2)
    c.wait_for_text(kube, "watching 2 pods")

    # The server is away when the event comes, and the watch is cut as well: nothing is lost.
    c.kill_server()
    deleted = pod("train-1", on="gpu-2", deletionTimestamp=in_seconds(40))
    api.put(deleted)
    api.cut()
    c.wait_for_text(kube, "rdzvd cannot be updated")
    c.start_server()
    assert nodes[1].wait() == TRY_AGAIN, nodes[1].text
    assert drain_of(c, "train-1").startswith(
        "Kubernetes: pod team-a/train-1 on node gpu-2 is being deleted"
    )
    c.wait_for_round(1, workers=1)
    with c.client() as client:
        events = [event.text for event in client.events(JOB, 100)]
    assert any("drained: Kubernetes: pod team-a/train-1" in text for text in events), events

    # The pod is gone, and one with the same name comes.
    api.delete(deleted)
    c.wait_until("the drain is lifted", lambda: not drain_of(c, "train-1"))
    again = c.start_node("train-1", nnodes="1:2")
    c.wait_for_round(2, workers=2)
    c.finish()
    assert [nodes[0].wait(), again.wait()] == [0, 0]


def test_a_node_that_is_tainted_is_drained_and_one_of_adas_stays(c: Cluster, api: StandIn) -> None:
    for name in ("gpu-1", "gpu-2"):
        api.put(machine(name))
    nodes = [c.start_node(name, nnodes="1:2") for name in ("gpu-1", "gpu-2")]
    c.wait_for_round(0, workers=2)
    done = c.run("rdzvctl", f"--server={c.endpoint}", "cordon", "gpu-1", "--reason=disk")
    assert done.returncode == 0, done
    kube = start_kube(c, api)
    api.put(machine("gpu-2", "ToBeDeletedByClusterAutoscaler"))
    assert nodes[1].wait() == TRY_AGAIN, nodes[1].text
    assert "has the taint ToBeDeletedByClusterAutoscaler" in drain_of(c, "gpu-2")
    # It stores nothing: another one continues where the first was killed.
    kube.process.kill()
    api.put(machine("gpu-2"))
    start_kube(c, api)
    c.wait_until("the drain is lifted", lambda: not drain_of(c, "gpu-2"))
    assert "disk" in drain_of(c, "gpu-1")
    c.finish()
    assert nodes[0].wait() == 0
