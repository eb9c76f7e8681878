"""The control plane is invisible: a training does not notice what happens to its servers."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from cluster import Cluster, Node, alive
from replicas import Replicas

from tests.faults.sources import Diaries

TTL = "--etcd-ttl=2"
NODES = 2
WORKER = Path(__file__).parents[1] / "faults" / "workers" / "gloo.py"


class Training:
    """Two nodes that all-reduce a small tensor about a hundred times a second."""

    def __init__(
        self, c: Cluster, options_of: Callable[[str], Sequence[str]] = lambda node: ()
    ) -> None:
        self.cluster = c
        self._options_of = options_of
        folder = c.folder / "diaries"
        folder.mkdir()
        self.diaries = Diaries(folder)
        self.nodes = [self._start(f"n{number}", folder) for number in range(1, NODES + 1)]

    def _start(self, name: str, folder: Path) -> Node:
        environ = {
            "RDZV_FAULTS_HISTORY": str(folder),
            "RDZV_FAULTS_SNAPSHOT": str(self.cluster.folder / "snapshot"),
            "RDZV_FAULTS_FINISH": str(self.cluster.finish_file),
            "RDZV_FAULTS_HOST": name,
            "RDZV_FAULTS_NODE": name,
            "RDZV_FAULTS_PAUSE_S": "0.005",
        }
        options = self._options_of(name)
        return self.cluster.start_node(
            name, *options, nnodes="2", worker=str(WORKER), environ=environ
        )

    def steps(self) -> list[int]:
        """Return each worker's step."""
        self.diaries.poll()
        return [stepped.step for stepped in self.diaries.latest.values()]

    def wait_for_steps(self, more: int) -> None:
        """Wait until every worker has advanced by this many steps."""
        before = max(self.steps(), default=0)

        def forward() -> bool:
            steps = self.steps()
            return len(steps) == NODES and min(steps) >= before + more

        self.cluster.wait_until(f"{NODES} workers pass step {before + more}", forward)

    def wait_until_seated(self) -> None:
        """Wait until the server has heard from all nodes."""

        def seated() -> bool:
            return [node.state for node in self.cluster.status().nodes] == ["seated"] * NODES

        self.cluster.wait_until("all are seated", seated)

    def check_undisturbed(self) -> None:
        """Check that there were never any workers but the first ones of the first round."""
        self.wait_for_steps(20)
        started = self.diaries.started.values()
        assert [(s.round, s.restarts) for s in started] == [(0, 0)] * NODES
        assert all(alive(s.pid) for s in started)
        status = self.cluster.status()
        assert (status.state, status.round, status.restarts) == ("running", 0, 0)

    def finish(self) -> None:
        self.cluster.finish()
        assert [node.wait() for node in self.nodes] == [0] * NODES
        self.diaries.poll()
        assert len(self.diaries.started) == NODES


@pytest.fixture(name="replicas")
def _replicas(tmp_path: Path) -> Iterator[Replicas]:
    """Run three rdzvd on the three members of an etcd."""
    with Replicas.running(tmp_path, 3, TTL) as made:
        yield made


@pytest.mark.parametrize("kills", [6, pytest.param(20, marks=pytest.mark.campaign)])
def test_a_training_does_not_notice_kills_of_its_server(c: Cluster, kills: int) -> None:
    """SIGKILL at random moments, sometimes before all nodes are back from the previous kill."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    rng = random.Random(seed)
    training = Training(c)
    training.wait_for_steps(20)
    for kill in range(kills):
        time.sleep(rng.uniform(0.0, 0.5))
        c.kill_server()
        if kill % 4 == 0:
            # Nor that there is none.
            training.wait_for_steps(20)
        c.start_server()
    training.wait_until_seated()
    training.check_undisturbed()
    training.finish()


@pytest.mark.parametrize("times", [3, pytest.param(10, marks=pytest.mark.campaign)])
def test_a_training_does_not_notice_fail_overs(replicas: Replicas, times: int) -> None:
    """The leader of three is killed repeatedly, and comes back as a standby."""
    leader = replicas.wait_for_leader()
    training = Training(replicas)
    training.wait_for_steps(20)
    for _ in range(times):
        replicas.kill_replica(leader.address)
        training.wait_for_steps(20)
        replicas.start_replica(leader.address, TTL)
        leader = replicas.wait_for_leader(above=leader.leadership or 0)
    training.wait_until_seated()
    training.check_undisturbed()
    training.finish()
