"""rdzvctl submit, nodes and cordon with a real rdzvd and real daemons, as a user types them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import BIN, WORKERS, Cluster, cluster
from made_up_gpus import environ_with_gpus

from rdzv.client import ControlClient, parse_endpoints
from rdzv.structs import as_dict

REPORT = str(WORKERS / "report.py")


class Typist:
    """Runs commands at a server that has daemons."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.open: list[subprocess.Popen[str]] = []

    def agent(self, name: str, lines: str = 'gpus = "none"\n') -> None:
        """Start a daemon, and wait until the server shows it."""
        folder = self.cluster.folder
        config = folder / f"{name}.toml"
        config.write_text(
            f'server = "{self.cluster.endpoint}"\nnode_id = "{name}"\naddress = "127.0.0.1"\n'
            f'account = "{os.environ.get("USER") or "root"}"\n'
            f'state_dir = "{folder / name}"\nruntime_dir = "{folder / name / "run"}"\n'
            'pass_env = ["PATH", "HOME", "RDZV_TEST_*", "PYTHONUNBUFFERED"]\n' + lines
        )
        gpus = environ_with_gpus(folder, ["GPU-a", "GPU-b", "GPU-c"])
        self.cluster.start_program(name, "rdzv-agent", "--config", str(config), environ=gpus)
        self.cluster.wait_until(
            f"{name} is connected", lambda: self.nodes().get(name, {}).get("state") == "connected"
        )

    def types(self, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return self.cluster.run(
            "rdzvctl", *words, environ={"RDZV_SERVER": self.cluster.endpoint, **environ}
        )

    def says(self, *words: str, **environ: str) -> str:
        done = self.types(*words, **environ)
        assert done.returncode == 0, done
        return done.stdout

    def begins(self, *words: str) -> subprocess.Popen[str]:
        """Run a command that continues."""
        process = subprocess.Popen(
            [str(BIN / "rdzvctl"), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.cluster.folder,
            env={**self.cluster.environ(), "RDZV_SERVER": self.cluster.endpoint},
        )
        self.open.append(process)
        return process

    def job(self, rdzv_id: str) -> dict[str, Any]:
        """Return the output of `status JOB -o json`, without a process per call."""
        with ControlClient(parse_endpoints(self.cluster.endpoint)) as client:
            return as_dict(client.status(rdzv_id))

    def nodes(self) -> dict[str, Any]:
        """Return the output of `nodes -o json`, by name."""
        with ControlClient(parse_endpoints(self.cluster.endpoint)) as client:
            return {node.node_id: as_dict(node) for node in client.nodes()}

    def until_state(self, rdzv_id: str, state: str) -> None:
        self.cluster.wait_until(
            f"{rdzv_id} is {state}", lambda: self.job(rdzv_id)["state"] == state
        )


@pytest.fixture(name="t")
def _typist(tmp_path: Path) -> Iterator[Typist]:
    with cluster(tmp_path) as made:
        typist = Typist(made)
        try:
            yield typist
        finally:
            for process in typist.open:
                process.kill()
                process.communicate()


def test_a_job_is_followed_to_its_end(t: Typist) -> None:
    t.agent("n1", 'gpus = "none"\nlabels = {zone = "a"}\n')
    done = t.types(
        *("submit", "--follow", "--rdzv-id=night", "--labels=zone=a", "--env=GREETING=hello"),
        *("--env", "TOKEN", "--", REPORT, "say=hello", "exit=0"),
        TOKEN="s3cret",
    )
    assert done.returncode == 0, done
    assert done.stdout.splitlines().count("[rank 0] hello") == 2
    assert "night  is submitted" in done.stderr
    assert "rdzvctl: night has succeeded: " in done.stderr
    (report,) = t.cluster.all_reports()
    assert (report["GREETING"], report["TOKEN"]) == ("hello", "s3cret")
    shown = t.says("status", "night") + t.says("status", "night", "-o", "yaml")
    shown += t.says("events", "night") + t.says("nodes", "n1") + t.cluster.server_log
    assert "environment  GREETING, TOKEN (values are not shown)" in shown
    assert "s3cret" not in shown


def test_the_exit_code_of_a_followed_job_is_that_of_wait(t: Typist) -> None:
    t.agent("n1")
    done = t.types("submit", "--follow", "--rdzv-id=bad", REPORT, "exit=3")
    assert done.returncode == 1, done
    assert "rdzvctl: bad has failed: " in done.stderr
    following = t.begins("submit", "--follow", "--rdzv-id=long", REPORT)
    t.cluster.wait_until("it runs", lambda: len(t.cluster.all_reports()) == 2)
    t.says("stop", "long")
    assert following.wait(120) == 3
    assert t.types("wait", "long").returncode == 3


def test_ctrl_c_detaches(t: Typist) -> None:
    t.agent("n1")
    following = t.begins("submit", "--follow", "--rdzv-id=night", REPORT, "say=x")
    assert following.stdout is not None
    assert following.stdout.readline() == "[rank 0] x\n"
    following.send_signal(signal.SIGINT)
    _, said = following.communicate(timeout=120)
    assert following.returncode == 130
    assert said.splitlines()[-1].startswith("rdzvctl: night continues; `rdzvctl logs -f night`")
    assert "Traceback" not in said
    assert t.job("night")["state"] == "running"
    t.cluster.finish()
    t.until_state("night", "succeeded")


def test_who_waits_says_for_what_and_is_served_when_it_is_there(t: Typist) -> None:
    said = t.says("submit", "--rdzv-id=night", "--nnodes=2", "--labels=gpu=h100", REPORT, "exit=0")
    assert "needs 2 nodes with gpu=h100, and no rdzv-agent is connected" in said
    assert "needs 2 nodes" in t.says("list")
    t.agent("n1", 'gpus = "none"\nlabels = {gpu = "h100"}\n')
    t.agent("n2", 'gpus = "none"\nlabels = {gpu = "a100"}\n')
    assert not t.job("night")["submission"]["placed"]
    t.agent("n3", 'gpus = "none"\nlabels = {gpu = "h100"}\n')
    assert t.says("wait", "night").startswith("night has succeeded")
    events = t.says("events", "night")
    assert "n1" in events
    assert "placed on" in events
    assert "n2 " not in events


def test_a_name_is_used_once_at_a_time_and_a_repetition_is_the_same_job(t: Typist) -> None:
    assert t.types("submit", "--rdzv-id=night", REPORT).returncode == 0
    again = t.types("submit", "--rdzv-id=night", REPORT)
    assert again.returncode == 1
    assert "a job night already exists, submitted by " in again.stderr
    t.says("stop", "night")
    t.agent("n1")
    t.says("submit", "--rdzv-id=night", REPORT, "exit=0")
    assert t.says("wait", "night").startswith("night has succeeded")
    assert t.job("night")["run_number"] == 2


def test_a_cordoned_node_gets_nothing_until_it_is_uncordoned(t: Typist) -> None:
    t.agent("n1")
    assert t.says("cordon", "n1", "--reason=its fan is loud") == "n1 is cordoned\n"
    node = t.nodes()["n1"]
    assert node["cordoned"] is True
    assert node["cordon_reason"].endswith(": its fan is loud")
    assert "its fan is loud" in t.says("nodes")
    assert json.loads(t.says("nodes", "n1", "-o", "json"))["cordoned"] is True
    t.says("submit", "--rdzv-id=night", REPORT, "exit=0")
    assert t.job("night")["state"] == "queued"
    t.cluster.kill_server()
    t.cluster.start_server()
    t.cluster.wait_until("n1 is back", lambda: t.nodes()["n1"]["state"] == "connected")
    assert t.nodes()["n1"]["cordoned"] is True
    assert not t.job("night")["submission"]["placed"]
    assert t.says("uncordon", "n1") == "n1 is uncordoned: submitted jobs are placed on it again\n"
    assert t.says("wait", "night").startswith("night has succeeded")
    unknown = t.types("cordon", "n9")
    assert unknown.returncode == 1
    assert "n9" in unknown.stderr


def test_a_job_file_and_what_the_line_adds(t: Typist) -> None:
    t.agent("n1", 'gpus = "GPU-a,GPU-b,GPU-c"\n')
    folder = t.cluster.folder / "gpt"
    folder.mkdir()
    (folder / "job.toml").write_text(
        f'rdzv_id = "night"\nscript = "{REPORT}"\nargs = ["say=file"]\nnproc_per_node = 2\n'
        'chdir = "."\nlog_dir = "logs"\n[env]\nA = "file"\nB = "file"\n'
    )
    t.says("submit", "--file=gpt/job.toml", "--env=A=line", "--nproc-per-node=1")
    t.cluster.wait_until("it runs", t.cluster.all_reports)
    (report,) = t.cluster.all_reports()
    assert (report["A"], report["B"], report["WORLD_SIZE"]) == ("line", "file", "1")
    assert report["CUDA_VISIBLE_DEVICES"] == "GPU-a"
    assert Path(f"/proc/{report['pid']}/cwd").readlink() == folder
    assert t.nodes()["n1"]["gpus_free"] == 2
    assert "2/3" in t.says("nodes")
    t.cluster.finish()
    assert t.says("wait", "night").startswith("night has succeeded")
    assert (folder / "logs").is_dir()
