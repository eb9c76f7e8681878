"""deploy/slurm: its script runs real nodes against a real server, with a stand-in for Slurm."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from cluster import BIN, JOB, WORKERS, Cluster, Node, cluster

pytestmark = pytest.mark.clusters

SCRIPT = Path(__file__).parents[2] / "deploy" / "slurm" / "rdzv.sbatch"
STAND_IN = Path(__file__).with_name("slurm") / "stand_in.py"
QUICK = "--rdzv-conf=last_call_timeout=1,join_timeout=30"


class Slurm:
    """The stand-in, and the job that it runs."""

    def __init__(self, c: Cluster) -> None:
        self.c = c
        self.state = c.folder / "slurm"
        self.bin = c.folder / "bin"
        self.state.mkdir()
        self.bin.mkdir()
        for name in ("sbatch", "srun", "scancel", "scontrol"):
            program = self.bin / name
            program.write_text(f"#!{sys.executable}\n{STAND_IN.read_text()}")
            program.chmod(0o755)

    def fake(self, program: str, text: str) -> None:
        """Replace a real program by one of ours."""
        (self.bin / program).write_text(f"#!/bin/sh\n{text}\n")
        (self.bin / program).chmod(0o755)

    def submit(
        self, *args: str, nodes: int = 3, nnodes: str = "2:2", environ: Mapping[str, str] = {}
    ) -> Node:
        command = [str(self.bin / "sbatch"), f"--nodes={nodes}", str(SCRIPT), QUICK]
        return self.c.start(
            "sbatch",
            [*command, f"--log-dir={self.c.folder / 'logs'}", *args],
            environ={
                "PATH": f"{self.bin}:{BIN}:{os.environ['PATH']}",
                "SLURM_STAND_IN": str(self.state),
                "RDZV_ENDPOINT": self.c.endpoint,
                "RDZV_ID": JOB,
                "RDZV_NNODES": nnodes,
                **environ,
            },
        )

    def wait_for_all(self, round_: int, nodes: int = 3) -> list[dict[str, Any]]:
        """Wait until two nodes train and the others are there, too: they start when they can.

        One that came after the end of the job would begin its next run.
        """
        reports = self.c.wait_for_round(round_, workers=2)
        here = ("seated", "spare")
        self.c.wait_until(
            f"{nodes} nodes are there",
            lambda: sum(node.state in here for node in self.c.status().nodes) == nodes,
        )
        return reports

    def task(self, name: str) -> int:
        return int((self.state / "tasks" / name).read_text())


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    with cluster(tmp_path) as c:
        yield Slurm(c)


REPORT = str(WORKERS / "report.py")


def test_nodes_beyond_the_most_are_spares_and_end_with_the_job(slurm: Slurm) -> None:
    job = slurm.submit(REPORT)
    slurm.wait_for_all(0)
    status = slurm.c.status()
    assert sorted(node.state for node in status.nodes) == ["seated", "seated", "spare"]
    assert {node.node_id.partition(".")[2] for node in status.nodes} == {"4711"}
    slurm.c.finish()
    assert job.wait() == 0
    assert not (slurm.state / "requeue").exists()


def test_a_spare_takes_a_lost_nodes_seat_and_the_job_has_succeeded_all_the_same(
    slurm: Slurm,
) -> None:
    job = slurm.submit(REPORT)
    reports = slurm.wait_for_all(0)
    os.kill(slurm.task(reports[1]["SLURMD_NODENAME"]), signal.SIGKILL)
    slurm.c.wait_for_round(1, workers=2)
    slurm.c.finish()
    assert job.wait() == 0
    assert not (slurm.state / "requeue").exists()


def test_a_job_that_fails_is_not_queued_again(slurm: Slurm) -> None:
    job = slurm.submit(REPORT, "exit=3")
    assert job.wait() == 1
    assert not (slurm.state / "requeue").exists()


def test_a_job_that_fails_by_the_code_of_its_root_cause_is_not_queued_again_at_the_time_limit(
    slurm: Slurm,
) -> None:
    started = slurm.c.folder / "started"
    ends = "trap 'exit 137' URG"
    slurm.fake("rdzvrun", f"{ends}; touch {started}; while true; do sleep 0.05; done")
    slurm.fake("rdzvctl", "exit 1")
    job = slurm.submit(REPORT, nodes=1, nnodes="1:1")
    slurm.c.wait_until("its task has started", started.exists)
    os.kill(int((slurm.state / "batch").read_text()), signal.SIGUSR1)
    assert job.wait() == 137
    assert not (slurm.state / "requeue").exists()


def test_the_time_limit_lets_workers_save_and_the_job_goes_on_in_its_next_life(
    slurm: Slurm, tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    job = slurm.submit(REPORT, f"term={saved}", "child")
    slurm.wait_for_all(0)
    os.kill(int((slurm.state / "batch").read_text()), signal.SIGUSR1)
    slurm.wait_for_all(1)
    assert saved.read_text() == "saved"
    assert "forcing job termination" not in job.text
    assert "job ended with 143 and is queued again" in job.text
    slurm.c.finish()
    assert job.wait() == 0


def test_without_enough_nodes_it_is_tried_again_but_not_for_ever(slurm: Slurm) -> None:
    conf = "--rdzv-conf=join_timeout=1"
    job = slurm.submit(conf, REPORT, nnodes="4:4", environ={"RDZV_REQUEUES": "1"})
    assert job.wait() == 75
    assert job.text.count("job ended with 75 and is queued again") == 1


def test_a_crash_loop_without_progress_ends_for_good_though_its_time_is_up(slurm: Slurm) -> None:
    """The real Slurm; a node that is lost on the way has a higher exit code."""
    slurm.fake("rdzvrun", f'{BIN}/rdzvrun "$@" || exit $(($? + 40))')
    loop = ("--max-restarts=5", "--no-progress-restarts=1", "--restart-backoff=0")
    job = slurm.submit(*loop, REPORT, "exit=3")
    assert job.wait() == 93
    assert not (slurm.state / "requeue").exists()


def test_what_makes_no_progress_is_not_queued_again(slurm: Slurm) -> None:
    slurm.fake("rdzvrun", 'case "$SLURMD_NODENAME" in n1) exit 93 ;; *) exit 75 ;; esac')
    job = slurm.submit(REPORT)
    assert job.wait() == 93
    assert not (slurm.state / "requeue").exists()


def test_a_job_without_a_server_is_queued_again_also_if_a_node_died(slurm: Slurm) -> None:
    slurm.c.kill_server()
    slurm.fake("rdzvrun", 'case "$SLURMD_NODENAME" in n1) kill -9 $$ ;; *) exit 75 ;; esac')
    job = slurm.submit(REPORT, environ={"RDZV_REQUEUES": "1"})
    assert job.wait() == 137
    assert job.text.count("job ended with 137 and is queued again") == 1


def test_each_node_is_told_what_it_has_and_where_it_is(slurm: Slurm) -> None:
    slurm.fake("rdzvrun", f'echo "$*" >{slurm.state}/args-$SLURMD_NODENAME')
    environ = {"SLURM_GPUS_ON_NODE": "8", "SLURM_CPUS_PER_TASK": "4"}
    assert slurm.submit("train.py", "--lr=1", nodes=3, environ=environ).wait() == 0
    words = (slurm.state / "args-n2").read_text().split()
    assert words[:3] == ["--node-id=n2.4711", "--topology=s1", "--nproc-per-node=8"]
    assert words[-2:] == ["train.py", "--lr=1"]
    assert f"--rdzv-endpoint={slurm.c.endpoint}" in words


def test_without_an_endpoint_it_says_what_is_missing(slurm: Slurm) -> None:
    job = slurm.submit(REPORT, environ={"RDZV_ENDPOINT": ""})
    assert job.wait() != 0
    assert "RDZV_ENDPOINT: give HOST:PORT of an rdzvd" in job.text
