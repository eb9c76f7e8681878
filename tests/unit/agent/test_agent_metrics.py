"""An agent's metrics: events on a node are counted, and shown when the server asks for them.

A scripted history has a golden file. The runner and the stream are fakes; their messages are real.
"""

from __future__ import annotations

import gc
import re
import shutil
import subprocess
import sys
import weakref
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from grafana import documented_metrics
from prometheus_client.parser import text_string_to_metric_families

from rdzv.agent.agent_counts import NodeCounts
from rdzv.agent.core import commands, events
from rdzv.agent.node.agent_metrics import AgentMetrics
from rdzv.agent.node.placements import Occupancy, Placements
from rdzv.agent.server_link.link import NodeIdentity, ServerLink
from rdzv.core.fleet.node_resources import NodeResources
from rdzv.core.model import Assignment, KeptWorker
from rdzv.v1 import rdzv_pb2 as pb

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).parents[1] / "golden" / "metrics" / "agent.txt"
EXPIRES = datetime(2027, 3, 1, tzinfo=UTC)
IDENTITY = NodeIdentity("n1", "one", pb.AGENT_KIND_FOREGROUND, "10.0.0.5", 99, "1.2.3")


class Node:
    """An agent in which everything but the counting is fake."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.link = SimpleNamespace(
            identity=IDENTITY,
            lease_ms=None,
            counts=NodeCounts(now_s=lambda: self.now_s),
            certificate_expires=lambda: EXPIRES,
        )
        self.occupancy = Occupancy(
            {"waiting": 1, "running": 1, "ending": 0}, {"free": 1, "running": 6, "ending": 1}
        )
        placements = SimpleNamespace(
            occupancy=lambda: self.occupancy, resources=NodeResources(capacity=2)
        )
        self.placements = cast(Placements, placements)
        link = cast(ServerLink, self.link)
        self.counts = link.counts
        self.metrics = AgentMetrics(link, self.placements)

    def values(self) -> dict[str, float]:
        return {
            s.name + "".join(f"{{{k}={v}}}" for k, v in sorted(s.labels.items())): s.value
            for family in text_string_to_metric_families(self.metrics.text().decode())
            for s in family.samples
        }

    def workers(self) -> list[float]:
        found = self.values()
        states = ("starting", "running", "stopping")
        return [found[f"rdzv_agent_workers{{state={state}}}"] for state in states]


@pytest.fixture
def n() -> Node:
    return Node()


def start(round_: int, restarts: int = 0) -> commands.StartWorkers:
    line = Assignment("job-7", "r1", round_, 0, 1, 0, 2, 0, 2, "127.0.0.1", 1, False, restarts, 3)
    return commands.StartWorkers(line)


def exited(
    round_: int, rank: int, code: int | None, signum: int | None = None
) -> events.WorkerExited:
    return events.WorkerExited(round_, rank, 100 + rank, code, signum, 0)


def history(n: Node) -> None:
    """A worker fails, the other one is stopped; the next round runs; another job has succeeded."""
    n.counts.stream_ended(welcomed=False, on_purpose=False)
    n.counts.stream_opened()
    n.link.lease_ms = 5_000
    job = n.counts.job(local_world_size=2)
    job.has_runner = True
    job.decided(start(0))
    n.now_s += 0.03
    job.runner_said(events.WorkerStarted(0, 0, 100))
    job.runner_said(events.WorkerStarted(0, 1, 101))
    job.runner_said(exited(0, 1, None, 11))
    job.decided(commands.StopWorkers(0, 5_000, None))
    job.runner_said(exited(0, 0, None, 15))
    job.runner_said(events.WorkersGone(0))
    job.decided(start(1, restarts=1))
    n.now_s += 0.2
    job.runner_said(events.WorkersStartedCold(1, (0, 1), "the zygote is gone"))
    job.runner_said(events.WorkerStarted(1, 0, 102, "cold"))
    keeps = n.counts.job(local_world_size=2)
    keeps.decided(start(3))
    keeps.runner_said(events.WorkerStarted(3, 0, 300, "cold"))
    keeps.runner_said(events.WorkerStarted(3, 1, 301, "warm"))
    keeps.decided(commands.StopWorkers(3, 5_000, None, 10_000))
    n.now_s += 0.04
    keeps.runner_said(events.WorkersGone(3, kept=(KeptWorker(0, pid=300), KeptWorker(1, pid=301))))
    keeps.decided(start(4))
    keeps.runner_said(events.WorkerStarted(4, 0, 300, "kept"))
    n.now_s += 0.02
    keeps.runner_said(events.WorkerResumed(4, 0))
    keeps.decided(commands.StopWorkers(4, 5_000, None, 10_000))
    keeps.runner_said(events.WorkersGone(4, kept=(KeptWorker(0, pid=300), KeptWorker(1, pid=301))))
    keeps.runner_said(events.KeptExited(1, 301, None, 9))
    n.counts.stream_ended(welcomed=True, on_purpose=False)
    n.counts.stream_opened()

    other = n.counts.job(local_world_size=1)
    other.has_runner = True
    other.decided(start(7))
    other.runner_said(events.WorkerStarted(7, 0, 200))
    other.runner_said(events.StoreHostExited(7, "", 0))
    other.runner_said(exited(7, 0, 0))
    other.runner_said(events.WorkersGone(7))
    other.runner_said(events.RunnerExited(0))
    other.closed()


def test_a_history_has_these_metrics(n: Node, request: pytest.FixtureRequest) -> None:
    history(n)
    text = re.sub(r'python="[^"]*"', 'python="3"', n.metrics.text().decode())
    if request.config.getoption("--rewrite"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text(), "review the diff, then: pytest --rewrite"


@pytest.mark.quick
def test_every_metric_is_documented_and_no_other(n: Node) -> None:
    history(n)
    families = text_string_to_metric_families(n.metrics.text().decode())
    told = {f.name + ("_total" if f.type == "counter" else "") for f in families}
    assert told == {name for name in documented_metrics() if name.startswith("rdzv_agent_")}


def test_promtool_finds_nothing_to_improve() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian's package prometheus has it)")
    n = Node()
    n.metrics.add_process()
    history(n)
    done = subprocess.run(
        [promtool, "check", "metrics"],
        input=n.metrics.text(),
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


# ------------------------------------------------------------------ workers


def test_workers_are_followed_from_their_start_to_their_end(n: Node) -> None:
    job = n.counts.job(local_world_size=2)
    assert n.workers() == [0, 0, 0]
    job.decided(start(0))
    assert n.workers() == [2, 0, 0]
    job.runner_said(events.WorkerStarted(0, 0, 100))
    assert n.workers() == [1, 1, 0]
    job.runner_said(events.WorkerStarted(0, 1, 101))
    job.decided(commands.StopWorkers(0, 5_000, None))
    assert n.workers() == [0, 0, 2]
    job.runner_said(exited(0, 0, None, 15))
    assert n.workers() == [0, 0, 1]
    job.runner_said(events.WorkersStuck(0, (101, 102)))
    assert n.values()["rdzv_agent_stuck_processes"] == 2
    job.runner_said(events.WorkersGone(0))
    assert n.workers() == [0, 0, 0]
    assert n.values()["rdzv_agent_stuck_processes"] == 0
    found = n.values()
    assert found["rdzv_agent_worker_exits_total{during=stop}{how=SIGTERM}"] == 1
    assert found["rdzv_agent_worker_exits_total{during=run}{how=SIGTERM}"] == 0


def test_adopted_workers_are_there_and_were_not_started() -> None:
    node = Node()
    job = node.counts.job(2)
    job.adopted((0, 1), restarts=1)
    assert node.workers() == [0, 2, 0]
    job.runner_said(exited(0, 1, 1, None))
    assert node.workers() == [0, 1, 0]
    found = node.values()
    assert found["rdzv_agent_runners"] == 1
    assert found["rdzv_agent_rounds_started_total"] == 0
    job.decided(start(2, restarts=2))
    assert node.values()["rdzv_agent_restarts_total"] == 1


def test_a_round_that_could_not_be_started_leaves_no_worker(n: Node) -> None:
    job = n.counts.job(local_world_size=2)
    job.decided(start(0))
    job.runner_said(events.StartFailed(0, "no such file"))
    job.runner_said(events.WorkersGone(0))
    assert n.workers() == [0, 0, 0]
    assert n.values()["rdzv_agent_worker_start_failures_total"] == 1


def test_a_runner_that_dies_takes_its_workers_with_it(n: Node) -> None:
    job = n.counts.job(local_world_size=1)
    job.has_runner = True
    job.decided(start(0))
    job.runner_said(events.WorkerStarted(0, 0, 100))
    assert n.values()["rdzv_agent_runners"] == 1
    job.runner_said(events.RunnerExited(-9))
    found = n.values()
    assert n.workers() == [0, 0, 0]
    assert found["rdzv_agent_runners"] == 0
    assert found["rdzv_agent_runner_exits_total{how=unexpectedly}"] == 1


def test_a_job_that_is_gone_is_forgotten_and_its_counts_are_not() -> None:
    n, jobs = Node(), list[weakref.ref[object]]()
    for round_ in range(3):
        job = n.counts.job(local_world_size=1)
        job.decided(start(round_))
        job.closed()
        job.closed()
        jobs.append(weakref.ref(job))
    del job
    gc.collect()
    assert [job() for job in jobs] == [None] * 3
    assert n.workers() == [0, 0, 0]
    assert n.values()["rdzv_agent_rounds_started_total"] == 3


@pytest.mark.quick
def test_restarts_are_rounds_after_a_failure_and_not_those_after_a_lost_node(n: Node) -> None:
    job = n.counts.job(local_world_size=1)
    for round_, restarts in ((0, 2), (1, 2), (2, 3), (3, 3)):
        job.decided(start(round_, restarts))
    found = n.values()
    assert found["rdzv_agent_rounds_started_total"] == 4
    assert found["rdzv_agent_restarts_total"] == 1


def test_a_fence_is_counted_and_its_kills_are_no_failures(n: Node) -> None:
    job = n.counts.job(local_world_size=1)
    job.decided(start(0))
    job.runner_said(events.WorkerStarted(0, 0, 100))
    job.runner_said(events.Fenced(0, 0))
    job.runner_said(exited(0, 0, None, 9))
    found = n.values()
    assert found["rdzv_agent_rounds_fenced_total"] == 1
    assert found["rdzv_agent_worker_exits_total{during=stop}{how=SIGKILL}"] == 1


@pytest.mark.parametrize(
    "code",
    [0, 1, 255, 70_000, -1, *(pytest.param(c, marks=pytest.mark.slow) for c in range(2, 255))],
)
def test_ways_to_exit_are_bounded(n: Node, code: int) -> None:
    job = n.counts.job(local_world_size=1)
    job.runner_said(exited(0, 0, code))
    job.runner_said(exited(0, 0, None, abs(code)))
    hows = {name for name in n.values() if name.startswith("rdzv_agent_worker_exits_total")}
    assert len(hows) <= 10
    assert any(f"how=exit {code & 255}}}" in how for how in hows)


# ------------------------------------------------------------------ the stream


def test_streams_that_the_agent_ends_itself_are_not_lost(n: Node) -> None:
    n.counts.stream_opened()
    n.counts.stream_ended(welcomed=True, on_purpose=True)
    n.counts.stream_opened()
    n.counts.stream_ended(welcomed=True, on_purpose=False)
    for _ in range(3):
        n.counts.stream_ended(welcomed=False, on_purpose=False)
    n.counts.stream_opened()
    found = n.values()
    names = ("streams_opened", "streams_lost", "reconnects", "connect_failures")
    assert [found[f"rdzv_agent_{name}_total"] for name in names] == [3, 1, 1, 3]


# ------------------------------------------------------------------ the page


def test_what_fails_is_told_and_does_no_harm(n: Node, caplog: pytest.LogCaptureFixture) -> None:
    n.occupancy = cast(Any, None)
    for _ in range(2):
        found = n.values()
        assert found["rdzv_agent_collector_success{collector=placements}"] == 0
        assert found["rdzv_agent_collector_success{collector=stream}"] == 1
        assert "rdzv_agent_capacity" not in found
    assert len(caplog.records) == 1


def test_an_agent_that_nobody_scrapes_loads_no_library_for_it() -> None:
    code = (
        "import sys; import rdzv.agent.app.daemon, rdzv.agent.node.node, rdzv.agent.__main__\n"
        "print(sorted({'aiohttp', 'prometheus_client'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
