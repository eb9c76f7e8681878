"""rdzv-agent as a daemon, with a real rdzvd: submitted jobs run, and the node is free again.

Each node is a separate agent with its own state; GPUs are names without devices.
"""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from cluster import WORKERS, Cluster, Node, alive, cluster
from made_up_gpus import environ_with_gpus

from rdzv.client import ControlClient, parse_endpoints
from rdzv.core.model import JobSpec
from rdzv.errors import RendezvousError
from rdzv.launch_options import flags
from rdzv.structs import replace
from rdzv.view.answers import JobStatus

REPORT = str(WORKERS / "report.py")


class Daemons:
    """A server, and agents that accept jobs submitted to it."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.folder = cluster.folder

    # ------------------------------------------------------------------ agents

    def config(self, name: str, lines: str = "") -> Path:
        path = self.folder / f"{name}.toml"
        path.write_text(
            f'server = "{self.cluster.endpoint}"\nnode_id = "{name}"\naddress = "127.0.0.1"\n'
            f'account = "{os.environ.get("USER") or "root"}"\n'
            f'state_dir = "{self.folder / name}"\nruntime_dir = "{self.folder / name / "run"}"\n'
            'pass_env = ["PATH", "HOME", "RDZV_TEST_*", "PYTHONUNBUFFERED"]\n' + lines
        )
        return path

    def start(self, name: str, lines: str = 'gpus = "none"\n') -> Node:
        """Start an agent, and wait until it is connected to the server."""
        node = self.launch(name, lines)
        self.until(f"{name} is connected", lambda: self.node(name).get("state") == "connected")
        return node

    def launch(self, name: str, lines: str = 'gpus = "none"\n') -> Node:
        """Start an agent."""
        gpus = environ_with_gpus(self.folder, ["GPU-a", "GPU-b", "GPU-c"])
        environ = {"SECRET": "of the agent", **gpus}
        config = self.config(name, lines)
        return self.cluster.start_program(
            name, "rdzv-agent", "--config", str(config), environ=environ
        )

    def until(self, what: str, holds: Callable[[], Any]) -> Any:
        return self.cluster.wait_until(what, holds)

    # ------------------------------------------------------------------ the server

    def client(self) -> ControlClient:
        return ControlClient(parse_endpoints(self.cluster.endpoint))

    def submit(self, rdzv_id: str, *args: str, **spec: Any) -> str:
        """Submit a job as `rdzvctl submit` does; return its run."""
        asked = flags.parse(args, {})
        settings = flags.read_settings(asked)
        counted = isinstance(asked.nproc_per_node, str)
        made = JobSpec(
            args=args,
            chdir=str(self.folder),
            local_world_size=0 if counted else asked.nproc_per_node,
        )
        run = uuid.uuid4().hex
        with self.client() as client:
            client.submit(rdzv_id, run, settings, replace(made, **spec), "a test")
        return run

    def status(self, rdzv_id: str) -> JobStatus:
        with self.client() as client:
            return client.status(rdzv_id)

    def until_state(self, rdzv_id: str, state: str) -> JobStatus:
        def reached() -> JobStatus | None:
            try:
                status = self.status(rdzv_id)
            except RendezvousError:
                return None
            return status if status.state == state else None

        found = self.until(f"{rdzv_id} is {state}", reached)
        assert isinstance(found, JobStatus)
        return found

    def node(self, name: str) -> Mapping[str, Any]:
        """Return the server's view of a node; nothing if it does not know it."""
        with self.client() as client:
            nodes = {node.node_id: node for node in client.nodes()}
        node = nodes.get(name)
        if node is None:
            return {}
        jobs = {job.rdzv_id: job.state for job in node.jobs}
        return {"state": node.state, "jobs": jobs, "gpus_free": node.gpus_free, "node": node}

    def reports(self, rdzv_id: str, count: int) -> list[dict[str, Any]]:
        """Wait until this many workers of a job have reported."""

        def all_there() -> list[dict[str, Any]]:
            found = self.cluster.all_reports()
            found = [report for report in found if report["TORCHELASTIC_RUN_ID"] == rdzv_id]
            return found if len(found) >= count else []

        found = self.until(f"{rdzv_id} has {count} workers", all_there)
        assert isinstance(found, list)
        return found

    def logs(self, rdzv_id: str) -> str:
        ended = self.cluster.run("rdzvctl", f"--server={self.cluster.endpoint}", "logs", rdzv_id)
        assert ended.returncode == 0, ended
        return ended.stdout


@pytest.fixture(name="d")
def _daemons(tmp_path: Path) -> Iterator[Daemons]:
    with cluster(tmp_path) as made:
        yield Daemons(made)


def worker(*options: str) -> tuple[str, ...]:
    return ("--nproc-per-node=1", REPORT, *options)


# ------------------------------------------------------------------ a job


def test_a_submitted_job_runs_where_it_was_submitted_from_and_leaves_the_node_free(
    d: Daemons,
) -> None:
    agent = d.start("n1")
    d.submit("job-1", *worker("say=hello"), env=(("OF_THE_JOB", "1"),))
    (report,) = d.reports("job-1", 1)
    assert report["RDZV_ROUND"] == "0"
    assert report["OF_THE_JOB"] == "1"
    assert "SECRET" not in report
    assert "CUDA_VISIBLE_DEVICES" not in report
    assert Path(f"/proc/{report['pid']}/cwd").readlink() == d.folder
    assert str(Path(f"/proc/{report['pid']}/fd/0").readlink()) == os.devnull
    assert d.node("n1")["jobs"] == {"job-1": "seated"}
    d.cluster.finish()
    d.until_state("job-1", "succeeded")
    d.until("the node is free", lambda: d.node("n1")["jobs"] == {})
    assert agent.process.poll() is None
    d.until("its log is there", lambda: "hello" in d.logs("job-1"))
    assert "hello" not in agent.text


def test_a_job_that_is_scaled_down_gives_its_node_back(d: Daemons) -> None:
    for name in ("n1", "n2"):
        d.start(name)
    run = d.submit("job-1", "--nnodes=1:2", *worker())
    d.reports("job-1", 2)
    with d.client() as client:
        client.scale("job-1", run, 1, 1, "others need it")

    def free() -> list[str]:
        return [name for name in ("n1", "n2") if not d.node(name)["jobs"]]

    (left,) = d.until("one node is free", free)
    agent = next(node for node in d.cluster.nodes if node.name == left)
    d.cluster.wait_for_text(agent, "job-1: the server withdrew this job from this node: ")
    d.submit("job-2", *worker("exit=0"))
    d.until_state("job-2", "succeeded")
    d.cluster.finish()
    d.until_state("job-1", "succeeded")


# ------------------------------------------------------------------ GPUs

GPUS = 'capacity = 3\ngpus = "GPU-a,GPU-b,GPU-c"\n'


def visible(reports: list[dict[str, Any]]) -> list[str]:
    (shown,) = {report["CUDA_VISIBLE_DEVICES"] for report in reports}
    return [uuid for uuid in shown.split(",") if uuid]


def test_no_gpu_is_given_twice(d: Daemons) -> None:
    d.start("n1", GPUS)
    d.submit("two", "--nproc-per-node=2", REPORT)
    two = visible(d.reports("two", 2))
    assert two == ["GPU-a", "GPU-b"]
    d.submit("one", *worker())
    assert visible(d.reports("one", 1)) == ["GPU-c"]
    d.submit("none", *worker(), gpus_per_node=0)
    assert visible(d.reports("none", 1)) == []
    assert d.node("n1")["gpus_free"] == 0
    d.cluster.finish()
    for name in ("two", "one", "none"):
        d.until_state(name, "succeeded")
    d.until("all GPUs are free", lambda: d.node("n1")["gpus_free"] == 3)


# ------------------------------------------------------------------ what cannot run


def declined(d: Daemons, rdzv_id: str) -> str:
    """Wait until a node has declined a job; return its reason."""

    def reason() -> str:
        submission = d.status(rdzv_id).submission
        assert submission is not None
        return "; ".join(node.reason for node in submission.declined)

    return str(d.until(f"{rdzv_id} is declined", reason))


def test_what_can_not_be_launched_is_declined_with_the_reason(d: Daemons) -> None:
    agent = d.start("n1")
    for name, args, reason in (
        ("script", ("no-such-script.py",), "the script 'no-such-script.py' is not on this node"),
        ("named", ("--rdzv-id=other", REPORT), "name their own job, node or server"),
        ("alone", ("--standalone", REPORT), "name their own job, node or server"),
    ):
        d.submit(name, *args)
        assert reason in declined(d, name)
    d.submit("lost", *worker(), chdir="/no/such/folder")
    assert "the folder '/no/such/folder' cannot be used on this node" in declined(d, "lost")
    d.cluster.wait_for_text(agent, "lost: declined: ")
    d.submit("next", *worker("exit=0"))
    d.until_state("next", "succeeded")
    d.until("the node is free", lambda: d.node("n1")["jobs"] == {})


# ------------------------------------------------------------------ the end


def test_sigterm_makes_every_job_leave_in_order(d: Daemons) -> None:
    agent = d.start("n1", 'capacity = 2\ngpus = "none"\n')
    saved = d.folder / "saved"
    d.submit("one", *worker(f"term={saved}"))
    d.submit("two", *worker())
    pids = [report["pid"] for name in ("one", "two") for report in d.reports(name, 1)]
    agent.process.terminate()
    assert agent.wait() == 0
    assert saved.read_text() == "saved"
    assert not any(alive(pid) for pid in pids)
    assert d.status("one").state == "queued"


def test_an_agent_that_dies_with_its_runner_gets_its_job_again_and_keeps_its_logs(
    d: Daemons,
) -> None:
    agent = d.start("n1")
    run = d.submit("job-1", *worker("say=hello"))
    (first,) = d.reports("job-1", 1)
    agent.kill_tree()
    d.until("its worker is dead", lambda: not alive(first["pid"]))
    again = d.start("n1")
    assert len(d.reports("job-1", 2)) == 2
    d.cluster.finish()
    d.until_state("job-1", "succeeded")
    assert d.status("job-1").run == run
    d.until("the node is free", lambda: d.node("n1")["jobs"] == {})
    again.process.kill()
    again.process.wait()
    d.start("n1")
    assert "hello" in d.logs("job-1")


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_the_next_agent_starts_no_job_while_workers_that_it_can_not_adopt_are_left(
    d: Daemons,
) -> None:
    agent = d.start("n1")
    d.submit("job-1", *worker())
    (first,) = d.reports("job-1", 1)
    runner = parent(first["pid"])
    os.kill(runner, signal.SIGSTOP)
    try:
        agent.process.kill()
        agent.process.wait()
        again = d.launch("n1")
        d.until("it waits", lambda: f"waiting for runner pid {runner} of" in again.text)
        assert f"is not adopted: pid {runner} does not answer within 3 s" in again.text
        assert alive(first["pid"])
    finally:
        os.kill(runner, signal.SIGCONT)
    assert len(d.reports("job-1", 2)) == 2
    assert not alive(first["pid"])
    d.cluster.finish()
    d.until_state("job-1", "succeeded")


# ------------------------------------------------------------------ the configuration


def test_a_reload_says_what_it_changes_and_disturbs_no_job(d: Daemons) -> None:
    agent = d.start("n1")
    d.submit("job-1", *worker())
    (report,) = d.reports("job-1", 1)
    lines = 'gpus = "none"\ncapacity = 3\ntopology = "rack-2"\n[labels]\ngpu = "h100"\n'
    d.config("n1", lines)
    agent.process.send_signal(signal.SIGHUP)

    def announced() -> bool:
        resources = d.node("n1")["node"].resources
        return bool(resources.capacity == 3 and dict(resources.labels) == {"gpu": "h100"})

    d.until("the server has heard of it", announced)
    for text in ("capacity is now 3 (it was 1)", 'topology is to be "rack-2"', "needs a restart"):
        d.cluster.wait_for_text(agent, text)
    d.config("n1", "capacity = 0\n")
    agent.process.send_signal(signal.SIGHUP)
    d.until("it is refused", lambda: "nothing has changed" in agent.text)
    assert d.node("n1")["node"].resources.capacity == 3
    assert alive(report["pid"])
    assert [one["pid"] for one in d.reports("job-1", 1)] == [report["pid"]]
    d.cluster.finish()
    d.until_state("job-1", "succeeded")


def test_two_agents_do_not_share_a_state_directory(d: Daemons) -> None:
    d.start("n1")
    ended = d.cluster.run("rdzv-agent", "--config", str(d.config("n1", 'gpus = "none"\n')))
    assert ended.returncode == 2
    assert f"`state_dir` = '{d.folder / 'n1'}' is in use by rdzv-agent pid " in ended.stderr
