"""deploy/slurm on a real Slurm of four nodes: its script, its bridge for drains, its Python."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import WORKERS
from slurm.real import DEPLOY, ENDPOINT, Slurm, slurm

pytestmark = pytest.mark.clusters

REPORT = str(WORKERS / "report.py")
QUICK = "--rdzv-conf=last_call_timeout=1,join_timeout=60"
SUBMITIT = Path(__file__).parents[2] / "build" / "frameworks" / "bin" / "python"


@pytest.fixture(scope="module")
def booted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm(tmp_path_factory.mktemp("slurm")) as made:
        yield made


@pytest.fixture(name="s")
def _slurm(booted: Slurm) -> Iterator[Slurm]:
    """Give each test all four nodes, and leave no job behind."""
    booted.finish_file.unlink(missing_ok=True)
    yield booted
    booted.do("scancel", "--user=root")
    booted.wait("no job is left", lambda: not booted.do("squeue", "--noheader"))


def start(s: Slurm, rdzv_id: str, *script: str, nodes: int = 3, nnodes: str = "2:2") -> str:
    environ = {"RDZV_ID": rdzv_id, "RDZV_NNODES": nnodes}
    return s.sbatch(QUICK, *(script or (REPORT,)), options=(f"--nodes={nodes}",), environ=environ)


def finish(s: Slurm, job: str) -> None:
    s.finish_file.touch()
    assert s.wait_for_job(job, "COMPLETED")["ExitCode"] == "0:0"


def events(s: Slurm, rdzv_id: str, name: str) -> list[dict[str, Any]]:
    found = json.loads(s.ctl("events", rdzv_id, "-o", "json"))["events"]
    return [event for event in found if event["name"] == name]


def test_nodes_beyond_the_most_are_spares_and_end_with_the_job(s: Slurm) -> None:
    job = start(s, "spares")
    s.wait_for_round("spares", 0, workers=2)
    s.wait("one is a spare", lambda: sorted(s.states("spares").values())[-1] == "spare")
    finish(s, job)


def test_each_task_of_an_array_is_a_job_of_its_own(s: Slurm) -> None:
    options = ("--nodes=1", "--array=3,5")
    job = s.sbatch(QUICK, REPORT, options=options, environ={"RDZV_NNODES": "1"})
    for task in ("3", "5"):
        s.wait_for_round(f"slurm-{job}_{task}", 0, workers=1)
    s.finish_file.touch()
    s.wait("both are done", lambda: not s.do("squeue", "--noheader"))


def test_an_allocation_that_is_too_small_for_ever_is_refused(s: Slurm) -> None:
    job = s.sbatch(QUICK, REPORT, options=("--nodes=2",), environ={"RDZV_NNODES": "3:4"})
    assert s.wait_for_job(job, "FAILED")["ExitCode"] == "2:0"
    assert "RDZV_NNODES=3:4 needs 3 nodes, and this allocation has 2: give sbatch" in s.output(job)


def test_a_spare_that_is_an_allocation_of_its_own_joins_and_leaves_a_running_job(s: Slurm) -> None:
    job = start(s, "joined", nodes=2)
    s.wait_for_round("joined", 0, workers=2)
    spare = start(s, "joined", nodes=1)
    s.wait("a spare waits", lambda: "spare" in s.states("joined").values())
    assert "needs 2 nodes, and this allocation has 1: waiting for other" in s.output(spare)
    s.do("scancel", spare)
    s.wait_for_job(spare, "CANCELLED")
    s.wait("the spare has left", lambda: "spare" not in s.states("joined").values())
    status = s.status("joined")
    assert (status["state"], status["round"]) == ("running", 0)
    finish(s, job)


def test_two_allocations_are_one_job(s: Slurm) -> None:
    """Neither has enough nodes by itself."""
    jobs = [start(s, "halves", nodes=1) for _ in range(2)]
    s.wait_for_round("halves", 0, workers=2)
    for job in jobs:
        finish(s, job)


def test_sigurg_to_the_step_lets_workers_save(s: Slurm, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    job = start(s, "told", REPORT, f"term={saved}", "child", nodes=2)
    s.wait_for_round("told", 0, workers=2)
    s.do("scancel", "--signal=URG", f"{job}.0")
    s.wait_for_job(job, "FAILED")
    assert saved.read_text() == "saved"
    assert "forcing job termination" not in s.output(job)


def test_the_time_limit_lets_workers_save_and_the_job_goes_on_in_its_next_life(
    s: Slurm, tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    # Slurm checks every 30 s, and signals ahead of time: with a minute it may do so at the start.
    options = ("--nodes=2", "--time=2", "--signal=B:USR1@50")
    script = (QUICK, REPORT, f"term={saved}", "child")
    job = s.sbatch(*script, options=options, environ={"RDZV_ID": "limit", "RDZV_NNODES": "2:2"})
    first = s.wait_for_round("limit", 0, workers=2)
    s.wait("it is queued again", lambda: s.job(job)["Restarts"] == "1")
    assert saved.read_text() == "saved"
    s.wait("its next life trains", lambda: s.status("limit")["state"] == "running")
    second = s.wait_for_round("limit", s.status("limit")["round"], workers=2)
    assert {r["pid"] for r in first}.isdisjoint(r["pid"] for r in second)
    assert "is queued again" in s.output(job)
    finish(s, job)


def test_a_node_that_slurm_drains_leaves_with_its_deadline_and_may_come_back(s: Slurm) -> None:
    """The bridge checks, also while rdzvd is away; a spare takes the seat."""
    job = start(s, "drained")
    s.wait_for_round("drained", 0, workers=2)
    s.wait("one is a spare", lambda: "spare" in s.states("drained").values())
    leaves = next(n for n, state in s.states("drained").items() if state == "seated" and n != "n1")
    bridge = (sys.executable, str(DEPLOY / "rdzv-slurm-drain"), f"--server={ENDPOINT}", "--once")
    assert s.run(*bridge).returncode == 0
    change = ("scontrol", "update", f"nodename={leaves}")
    s.do(*change, "state=drain", "reason=bad fan deadline=20s")
    assert s.node_state(leaves) == "MIXED+DRAIN"

    s.kill_server()
    failed = s.run(*bridge)
    assert failed.returncode == 75 and "nothing was looked at: rdzvctl: " in failed.stderr
    s.start_server()

    def is_drained() -> bool:
        # A bridge that runs before the node is back leaves the drain to its next run.
        return s.run(*bridge).returncode == 0 and bool(events(s, "drained", "NodeDrained"))

    s.wait("the bridge has drained it", is_drained)
    s.wait_for_round("drained", 1, workers=2)
    assert s.states("drained")[leaves] == "left"
    (told,) = (event["text"] for event in events(s, "drained", "NodeDrained"))
    assert "drained in Slurm: bad fan deadline=20s" in told
    assert s.run(*bridge).stderr == "", "it did the same again"

    s.do(*change, "state=resume")
    assert f"undrain {leaves}.{job}" in s.run(*bridge).stderr
    assert s.run(*bridge).stderr == ""
    finish(s, job)


@pytest.mark.skipif(not SUBMITIT.exists(), reason="submitit is not here; run: make frameworks")
def test_the_python_example_saves_is_queued_again_and_goes_on(s: Slurm, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    example = str(DEPLOY / "submit_with_submitit.py")
    environ = {"PATH": f"{SUBMITIT.parent}:{s.environ()['PATH']}"}
    words = (str(SUBMITIT), example, f"--folder={s.folder}", f"--endpoint={ENDPOINT}")
    training = ("--nodes=2", "--nnodes=2", REPORT, f"term={saved}")
    job = s.do(*words, *training, environ=environ).strip()
    name = f"submitit-{job}"
    s.wait_for_round(name, 0, workers=2)
    # Slurm sends this when the time limit is near.
    s.do("scancel", "--signal=USR2", f"{job}.0")
    s.wait("it is queued again", lambda: s.job(job).get("Restarts") == "1")
    assert saved.read_text() == "saved"
    s.wait("its next life trains", lambda: s.job(job)["JobState"] == "RUNNING")
    s.wait("both nodes are seated", lambda: list(s.states(name).values()).count("seated") == 2)
    finish(s, job)


def test_a_node_that_dies_is_replaced_long_before_slurm_knows(s: Slurm) -> None:
    """The last test: the node is gone for good."""
    job = start(s, "killed")
    s.wait_for_round("killed", 0, workers=2)
    s.wait("one is a spare", lambda: "spare" in s.states("killed").values())
    # n1 has the batch script; without it Slurm ends the job.
    dies = next(n for n, state in s.states("killed").items() if state == "seated" and n != "n1")
    s.kill_node(dies)
    begun = time.monotonic()
    second = s.wait_for_round("killed", 1, workers=2)
    assert dies not in {report["SLURMD_NODENAME"] for report in second}
    assert s.states("killed")[dies] == "lost"
    slurm_said = s.node_state(dies)
    assert "DOWN" not in slurm_said, slurm_said
    (lost,) = events(s, "killed", "NodeLost")
    started = max(report["begun_unix"] for report in second)
    assert started - lost["unix_ms"] / 1000 < 2
    s.wait("Slurm knows", lambda: "DOWN" in s.node_state(dies))
    print(f"Slurm took {time.monotonic() - begun:.0f} s, rdzvd gave {dies} up long before")
    finish(s, job)
