"""rdzv-agent dies, is restarted or upgraded under running workers, and they keep running.

Each story ends by checking what the job has noticed of it: no round has ended, no restart is spent,
and no line of a worker's output is missing.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from cluster import (
    BIN,
    FORK_ALL,
    QUICK_TORCH,
    WORKERS,
    Cluster,
    Node,
    alive,
    cluster_without_server,
    environ,
)
from test_daemon import Daemons, parent

TESTS = Path(__file__).parents[1]
COUNT = str(WORKERS / "count.py")


class Nodes(Daemons):
    """Two agents whose workers count."""

    def __init__(self, made: Cluster) -> None:
        super().__init__(made)
        self.agents: dict[str, Node] = {}

    def begin(self, *options: str) -> dict[str, int]:
        """Start two agents and a job on them; return its workers' pids by node."""
        for name in ("n1", "n2"):
            self.agents[name] = self.start(name)
        self.submit("job", "--nnodes=2", "--nproc-per-node=1", *options, COUNT)
        reports = self.reports("job", 2)
        pids = {self.node_of(int(report["pid"])): int(report["pid"]) for report in reports}
        assert set(pids) == {"n1", "n2"}
        self.counts_on(pids)
        return pids

    def node_of(self, pid: int) -> str:
        """Name the agent whose runner is the parent of a worker, while it lives."""
        agents = {agent.process.pid: name for name, agent in self.agents.items()}
        return agents[parent(parent(pid))]

    def counts_on(self, pids: dict[str, int]) -> None:
        """Wait until each worker has counted further."""

        def count(pid: int) -> int:
            with suppress(OSError, ValueError):
                return int((self.folder / f"count-{pid}").read_text())
            return 0

        before = {pid: count(pid) for pid in pids.values()}
        self.until("all count on", lambda: all(count(pid) > n for pid, n in before.items()))

    def kill(self, name: str) -> None:
        self.agents[name].process.kill()
        self.agents[name].process.wait()

    def come_back(self, name: str) -> Node:
        """Restart an agent, and wait until it is connected to the server again."""
        again = self.agents[name] = self.launch(name)
        self.until(f"{name} has adopted", lambda: "job: adopted, with runner pid" in again.text)
        return again

    def events(self) -> list[str]:
        with self.client() as client:
            return [event.name for event in client.events("job")]

    def until_back(self, times: int = 1) -> None:
        self.until("the server has it back", lambda: self.events().count("NodeCameBack") == times)

    def undisturbed(self) -> None:
        """Check that the job has noticed nothing."""
        status = self.status("job")
        assert (status.state, status.round, status.restarts) == ("running", 0, 0)
        assert not {"RoundEnded", "NodeLost", "NodeLeft"} & set(self.events())

    def complete_logs(self, pids: dict[str, int]) -> None:
        """Check that every number that the workers counted can be read, once."""
        lines = self.logs("job").splitlines()
        for pid in pids.values():
            counted = [int(line.rpartition(" ")[2]) for line in lines if f"{pid} counts " in line]
            assert counted == list(range(len(counted)))
            assert len(counted) > 3


@pytest.fixture(name="lease")
def _lease() -> str:
    """Long, so that an agent that starts slowly on a busy machine is not given up meanwhile."""
    return "60 s"


@pytest.fixture(name="d")
def _nodes(tmp_path: Path, lease: str) -> Iterator[Nodes]:
    with cluster_without_server(tmp_path) as made:
        config = tmp_path / "rdzvd.toml"
        config.write_text(f'[lease]\nduration = "{lease}"\nlongest = "60 s"\n')
        made.start_server("--config", str(config))
        try:
            yield Nodes(made)
        finally:
            made.kill_adopted()


# ---------------------------------------------------------------------- it dies


def test_an_agent_that_is_killed_disturbs_no_worker_and_the_next_one_goes_on(d: Nodes) -> None:
    pids = d.begin()
    d.kill("n1")
    d.counts_on(pids)
    again = d.come_back("n1")
    d.until_back()
    d.undisturbed()
    assert d.node("n1")["jobs"] == {"job": "seated"}
    # And once more, to show that it is not only the first one that can.
    d.kill("n1")
    d.come_back("n1")
    d.until_back(2)
    d.counts_on(pids)
    d.undisturbed()
    d.cluster.finish()
    d.until_state("job", "succeeded")
    d.complete_logs(pids)
    d.until("n1 is free", lambda: d.node("n1")["jobs"] == {})
    assert d.agents["n1"].process.poll() is None
    assert "Traceback" not in again.text + d.agents["n1"].text


def test_a_worker_that_fails_while_no_agent_is_there_is_reported_and_restarted(d: Nodes) -> None:
    pids = d.begin("--max-restarts=1")
    d.kill("n1")
    os.kill(pids["n1"], signal.SIGKILL)
    d.until("it is dead", lambda: not alive(pids["n1"]))
    again = d.come_back("n1")
    d.until("it is told", lambda: f"SIGKILL (pid {pids['n1']})" in again.text)
    d.until("there is another round", lambda: d.status("job").round == 1)
    assert len(d.reports("job", 4)) == 4
    status = d.until_state("job", "running")
    assert status.restarts == 1
    assert not {"NodeLost", "NodeLeft"} & set(d.events())
    d.cluster.finish()
    d.until_state("job", "succeeded")


@pytest.mark.parametrize("adopted", [True, False])
def test_a_runner_that_is_killed_after_its_agent_leaves_nobody_behind(
    d: Nodes, adopted: bool
) -> None:
    """A worker's child process would then be a child of init, and could hold a GPU forever."""
    d.agents["n1"] = d.start("n1")
    d.submit("job", "--nnodes=1", "--nproc-per-node=1", str(WORKERS / "starts_another.py"))
    (report,) = d.reports("job", 1)
    runner, stray = parent(report["pid"]), int(report["other"])
    d.kill("n1")
    if adopted:
        d.come_back("n1")
        d.until_back()
    assert alive(stray)
    os.kill(runner, signal.SIGKILL)
    d.until("its worker is gone", lambda: not alive(report["pid"]))
    if not adopted:
        assert alive(stray)
        d.agents["n1"] = d.launch("n1")
    d.until("nobody is left", lambda: not alive(stray))
    d.until("it is told", lambda: " left by a dead runner" in d.agents["n1"].text)


# ---------------------------------------------------------------------- another takes its place


@pytest.mark.parametrize("lease", ["2 s"])
def test_an_agent_whose_name_another_one_has_taken_over_ends_and_its_workers_too(d: Nodes) -> None:
    """With an exit code that systemd does not restart."""
    first = d.start("n1")
    d.submit("job", "--nnodes=1", "--nproc-per-node=1", COUNT)
    (report,) = d.reports("job", 1)
    os.kill(first.process.pid, signal.SIGSTOP)
    config = d.folder / "second.toml"
    here, there = str(d.folder / "n1"), str(d.folder / "second")
    lines = d.config("n1", 'gpus = "none"\n[labels]\nwhich = "second"\n').read_text()
    config.write_text(lines.replace(f'"{here}', f'"{there}'))
    d.cluster.start("second", [str(BIN / "rdzv-agent"), "--config", str(config)])

    def taken_over() -> bool:
        seen = d.node("n1")
        return bool(seen) and dict(seen["node"].resources.labels) == {"which": "second"}

    d.until("another has taken over", taken_over)
    os.kill(first.process.pid, signal.SIGCONT)
    assert first.wait() == 1
    assert "node_id n1 was taken over by" in first.text
    d.until("its worker is gone", lambda: not alive(int(report["pid"])))


# ---------------------------------------------------------------------- it is restarted on purpose


def test_a_planned_restart_has_the_time_that_was_announced(d: Nodes) -> None:
    pids = d.begin()
    agent = d.agents["n1"]
    agent.process.send_signal(signal.SIGUSR2)
    assert agent.wait() == 0
    assert "leaving this node's jobs to the next agent, which must start" in agent.text
    d.until("the server knows", lambda: "its place is kept for 300 s" in d.cluster.server_log)
    d.counts_on(pids)
    d.come_back("n1")
    d.until_back()
    d.undisturbed()
    d.cluster.finish()
    d.until_state("job", "succeeded")
    d.complete_logs(pids)


def test_what_was_saved_in_memory_is_there_for_workers_of_the_next_agent(d: Nodes) -> None:
    """Saves go on without an agent; the workers die before the next one is there."""
    script = d.folder / "train.py"
    paths = [str(TESTS / "support"), str(TESTS.parent / "worker")]
    script.write_text(
        f"import sys\nsys.path[:0] = {paths}\n"
        "import kept_training\n"
        "slowly = {'at': 'forward', 'do': 'sleep', 'seconds': 0.05}\n"
        "kept_training.train(100_000, faults=[slowly], snapshot_every=2)\n"
    )
    d.agents["n1"] = d.start("n1")
    options = ("--nnodes=1", "--nproc-per-node=2", "--max-restarts=3", "--warm=torch")
    env = {"PYTHONPATH": os.environ["PYTHONPATH"], **FORK_ALL, **QUICK_TORCH}
    d.submit("job", *options, str(script), env=tuple(env.items()))

    def whole() -> int:
        snapshot = d.status("job").snapshot
        return snapshot.step if snapshot is not None else 0

    d.until_state("job", "running")
    d.until("a step is whole", lambda: whole() >= 4)
    agent = d.agents["n1"]
    agent.process.send_signal(signal.SIGUSR2)
    assert agent.wait() == 0
    announced = whole()
    workers = [pid for pid in d.cluster.marked() if environ(pid).get("RANK")]
    assert len(workers) == 2
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    d.come_back("n1")
    said = "resumed from the snapshot of step "
    # Until the new round's files are there, the request is refused.
    ask = ("rdzvctl", f"--server={d.cluster.endpoint}", "logs", "job")
    d.until("new workers go on from memory", lambda: said in d.cluster.run(*ask).stdout)
    resumed = int(d.logs("job").partition(said)[2].split()[0])
    assert resumed >= announced
    d.until("they save, too", lambda: whole() > resumed)


def test_an_agent_that_dies_amid_a_drain_is_followed_by_one_that_goes_on_with_it(d: Nodes) -> None:
    """Notified workers save and leave as if nothing had happened to their agent."""
    for name in ("n1", "n2"):
        d.agents[name] = d.start(name)
    go, snapshot = d.folder / "go", d.folder / "snapshot"
    worker = (str(WORKERS / "saving.py"), f"snapshot={snapshot}", "by=file", f"go={go}")
    d.submit("job", "--nnodes=1:2", "--nproc-per-node=1", "--notice-signal=none", *worker)
    first = {d.node_of(int(report["pid"])): report for report in d.reports("job", 2)}
    server = f"--server={d.cluster.endpoint}"
    assert d.cluster.run("rdzvctl", server, "drain", "n1", "--deadline=10m").returncode == 0
    told = Path(first["n1"]["RDZV_NOTICE_FILE"])
    d.until("its worker is told", told.exists)
    d.kill("n1")
    d.come_back("n1")
    d.until_back()
    assert told.exists()
    assert d.node("n1")["node"].drain == "draining"
    assert all(alive(int(report["pid"])) for report in first.values())
    go.touch()
    d.until("n1 is drained", lambda: d.node("n1")["node"].drain == "drained")
    (last,) = [r for r in d.reports("job", 3) if r["WORLD_SIZE"] == "1"]
    assert last["step"] > 0
    assert d.status("job").restarts == 0
    d.cluster.finish()
    d.until_state("job", "succeeded")


# ---------------------------------------------------------------------- it is late


@pytest.mark.parametrize("lease", ["4 s"])
def test_an_agent_that_comes_back_after_its_lease_finds_its_workers(d: Nodes) -> None:
    pids = d.begin()
    d.logs("job")  # Both agents are heard while they send these.
    d.kill("n1")
    d.until("its lease is over", lambda: d.node("n1")["node"].state_age_ms > 4_500)
    d.counts_on(pids)
    d.come_back("n1")
    d.until_back()
    d.undisturbed()
    d.cluster.finish()
    d.until_state("job", "succeeded")


def test_a_gpu_that_is_gone_disturbs_no_worker(d: Nodes) -> None:
    """Like one that has fallen off the bus; an agent without workers does not start this way."""
    d.agents["n1"] = d.start("n1", 'gpus = "GPU-a"\n')
    d.submit("job", "--nproc-per-node=1", COUNT)
    (report,) = d.reports("job", 1)
    pids = {"n1": int(report["pid"])}
    d.kill("n1")
    again = d.agents["n1"] = d.launch("n1", 'gpus = "GPU-gone"\n')
    d.until("n1 has adopted", lambda: "job: adopted, with runner pid" in again.text)
    assert "`gpus` names GPU-gone, which is not on this node" in again.text
    d.until_back()
    d.counts_on(pids)
    d.undisturbed()
    d.cluster.finish()
    d.until_state("job", "succeeded")
    assert again.process.poll() is None
