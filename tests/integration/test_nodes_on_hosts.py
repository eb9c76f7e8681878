"""Nodes that come, go, fail and are upgraded under a real training: three hosts, DDP over gloo.

The training counts its steps, and its one weight is their number. So a lost or repeated step is
noticed.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cluster import FORK_ALL, QUICK_TORCH, alive
from hosts import Hosts, need_root, three_hosts

from tests.support.whole_lines import lines_of

CONFIG = """
# Long, so that an agent that is slow to start on a busy machine is not given up meanwhile.
[lease]
duration = "60 s"
longest = "60 s"
"""

pytestmark = [
    need_root,
    pytest.mark.usefixtures("_torch"),
]


@pytest.fixture(scope="module")
def _torch() -> None:
    pytest.importorskip("torch", reason="torch is not installed")


@dataclass(frozen=True)
class Line:
    """A worker's entry in its diary."""

    round: int
    rank: int
    pid: int
    word: str
    step: int


class Training:
    """A job on three hosts, its diary, and an operator."""

    def __init__(self, hosts: Hosts, job: str) -> None:
        self.hosts = hosts
        self.job = job

    def begin(self, nodes: str, *options: str, script_args: tuple[str, ...] = ()) -> None:
        # A host's name means nothing in its namespace, so gloo is told where its peers are. And
        # all workers of a node are forked, so torch is imported once for them.
        path = {"PYTHONPATH": os.environ["PYTHONPATH"]}
        variables = {"GLOO_SOCKET_IFNAME": "eth0", **FORK_ALL, **QUICK_TORCH, **path}
        environ = [f"--env={name}={value}" for name, value in variables.items()]
        options = (*environ, "--warm=torch", *options)
        self.hosts.submit(self.job, nodes, *options, worker="ddp_steps.py", script_args=script_args)

    def diary(self, round_: int, word: str) -> list[Line]:
        parts = [line.split() for line in lines_of(self.hosts.folder / f"{self.job}.diary")]
        lines = [Line(int(p[0]), int(p[1]), int(p[3]), p[4], int(p[5])) for p in parts]
        return [line for line in lines if (line.round, line.word) == (round_, word)]

    def steps(self, round_: int) -> dict[int, list[int]]:
        """Return, by RANK, the steps that were trained in a round."""
        found: dict[int, list[int]] = {}
        for line in self.diary(round_, "trained"):
            found.setdefault(line.rank, []).append(line.step)
        return found

    def trains(self, round_: int, ranks: int) -> dict[int, int]:
        """Wait until all ranks of a round have trained on from now; return their pids by RANK."""
        before = {rank: steps[-1] for rank, steps in self.steps(round_).items()}

        def all_do() -> bool:
            assert self.hosts.status(self.job).state != "failed", self.hosts.describe()
            now = self.steps(round_)
            return len(now) == ranks and all(s[-1] > before.get(r, -1) for r, s in now.items())

        self.hosts.wait(f"all {ranks} ranks train on in round {round_}", all_do)
        return {line.rank: line.pid for line in self.diary(round_, "begins")}

    def ends_well(self) -> None:
        self.hosts.end_of(self.job).touch()
        self.hosts.ctl("wait", self.job)
        assert self.hosts.status(self.job).state == "succeeded"

    def events(self) -> list[str]:
        shown = json.loads(self.hosts.ctl("events", self.job, "-o", "json"))
        return [event["name"] for event in shown["events"]]

    def node(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.hosts.ctl("nodes", name, "-o", "json"))
        return found


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """One for all stories, since the hosts take seconds to start."""
    with three_hosts(tmp_path_factory.mktemp("hosts"), CONFIG) as found:
        yield found


@pytest.fixture(name="t")
def _training(hosts: Hosts, request: pytest.FixtureRequest) -> Iterator[Training]:
    made = Training(hosts, request.function.__name__.removeprefix("test_")[:16])
    yield made
    if hosts.status(made.job).state not in ("succeeded", "failed"):
        # Its story has failed; the next one needs the nodes.
        hosts.ctl("stop", made.job)


def in_a_row(steps: list[int], first: int = 1) -> bool:
    return steps == list(range(first, first + len(steps)))


def test_agents_that_die_are_restarted_reloaded_and_upgraded_cost_no_step(t: Training) -> None:
    hosts = t.hosts
    t.begin("3")
    pids = t.trains(0, 3)

    hosts.agent("n1").process.kill()
    hosts.agent("n1").wait()
    t.trains(0, 3)
    killed = hosts.start_agent("n1")
    hosts.wait("n1 has adopted", lambda: f"{t.job}: adopted, with runner pid" in killed.text)

    # On purpose, as before an upgrade: two at once, and the server as well.
    left = [hosts.agent(name) for name in ("n2", "n3")]
    for agent in left:
        agent.process.send_signal(signal.SIGUSR2)
    for agent in left:
        assert agent.wait() == 0
        assert "leaving this node's jobs to the next agent" in agent.text
    hosts.restart_server()
    t.trains(0, 3)
    upgraded = [hosts.start_agent(name) for name in ("n2", "n3")]
    for agent in upgraded:
        hosts.wait(f"{agent.name} has adopted", lambda a=agent: f"{t.job}: adopted" in a.text)
    hosts.wait("all are connected", lambda: hosts.connected() == 3)

    config = hosts.folder / "n2.toml"
    config.write_text(config.read_text() + 'rack = "a1"\n')
    upgraded[0].process.send_signal(signal.SIGHUP)
    hosts.wait("n2 is reloaded", lambda: "rack=a1" in hosts.ctl("nodes", "n2"))
    assert t.trains(0, 3) == pids
    assert all(map(alive, pids.values()))

    t.ends_well()
    status = hosts.status(t.job)
    assert (status.round, status.restarts) == (0, 0)
    assert not {"RoundEnded", "NodeLost", "NodeLeft"} & set(t.events())
    steps = t.steps(0)
    assert all(in_a_row(steps[rank]) for rank in range(3))
    # Each rank has trained each step, and nothing after the one that was saved at the end.
    assert {tuple(one) for one in steps.values()} == {tuple(steps[0])}
    assert {line.step for line in t.diary(0, "saved")} == {steps[0][-1]}
    assert t.diary(1, "begins") == []


def test_a_drained_node_saves_last_and_a_stopped_worker_is_found(t: Training) -> None:
    hosts = t.hosts
    t.begin("2", "--max-restarts=1", "--hang-timeout=5", "--notice-signal=none")
    t.trains(0, 2)
    seated = hosts.seated(t.job)
    (spare,) = {"n1", "n2", "n3"} - set(seated)
    hosts.ctl("drain", seated[0], "--deadline=15s", "--reason=new kernel", "--wait")
    t.trains(1, 2)
    (noticed,) = t.diary(0, "noticed")
    # It trained on after the notice, saved, and continued from exactly there.
    (saved,) = {line.step for line in t.diary(0, "saved")}
    assert noticed.step < saved
    assert {rank: in_a_row(s) and s[-1] for rank, s in t.steps(0).items()} == {0: saved, 1: saved}
    assert {line.step for line in t.diary(1, "begins")} == {saved}
    # The spare has the seat as before, and nothing was spent.
    assert hosts.seated(t.job) == [spare, seated[1]]
    status = hosts.status(t.job)
    assert (status.round, status.restarts) == (1, 0)
    assert t.node(seated[0])["drain"] == "drained"

    hosts.ctl("undrain", seated[0])
    stopped = t.trains(1, 2)[1]
    os.kill(stopped, signal.SIGSTOP)
    t.trains(2, 2)
    assert not alive(stopped)
    status = hosts.status(t.job)
    assert (status.round, status.restarts) == (2, 1)
    assert status.last_failure is not None
    cause = status.last_failure.root_cause
    assert (cause.rank, cause.pid) == (1, stopped)
    shown = hosts.ctl("status", t.job)
    assert "; RANK 1 stopped by a signal, in " in shown
    kept = json.loads(hosts.ctl("stacks", t.job, "--round=1", "-o", "json"))
    states = {one["rank"]: one["state"] for one in kept["stacks"]}
    assert states[1] == "T"
    files = {
        Path(frame["file"]).name for one in kept["stacks"] for frame in one["threads"][0]["frames"]
    }
    assert "ddp_steps.py" in files
    assert {line.step for line in t.diary(2, "begins")} == {saved}
    t.ends_well()
    assert all(in_a_row(steps, saved + 1) for steps in t.steps(2).values())


def test_a_node_that_fails_each_time_is_quarantined_and_the_job_ends_well(t: Training) -> None:
    hosts = t.hosts
    # A strike from another story's job must not count here.
    hosts.ctl("uncordon", "n2")
    options = ("--max-restarts=3", "--restart-backoff=0")
    t.begin("2", *options, script_args=("fails_on=n2",))
    hosts.wait("n3 has the seat of n2", lambda: hosts.seated(t.job) == ["n1", "n3"])
    t.trains(3, 2)
    assert [t.diary(round_, "begins") for round_ in range(3)] == [[], [], []]
    status = hosts.status(t.job)
    assert (status.round, status.restarts) == (3, 3)
    shown = hosts.ctl("nodes", "n2")
    assert "quarantined" in shown.splitlines()[0]
    assert "at fault 3 times within" in shown
    hosts.submit("other", "1", "--labels=host=n2")
    hosts.wait("it waits", lambda: "n2 (quarantined)" in str(hosts.status("other").reason))
    hosts.ctl("uncordon", "n2")
    hosts.wait_running("other", 1)
    assert hosts.seated("other") == ["n2"]
    hosts.end_of("other").touch()
    hosts.ctl("wait", "other")
    t.ends_well()
    assert all(in_a_row(steps) for steps in t.steps(3).values())
