"""Files and modules that our programs do not touch, and what they hide from the workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from cluster import BIN, JOB, WORKERS, Cluster

pytestmark = pytest.mark.usefixtures("own_temporary_folder")

REPORT = str(WORKERS / "report.py")


def maps_torch(pid: int) -> bool:
    maps = Path(f"/proc/{pid}/maps").read_text()
    assert maps, "it has ended"
    return "libtorch" in maps or "torch/_C" in maps


def test_no_program_of_ours_has_torch_in_memory_while_a_job_runs(c: Cluster) -> None:
    """Only the store host imports it: it serves the job, and is no agent."""
    node = c.start_node("n1", nnodes="1")
    config = c.folder / "agent.toml"
    args = json.dumps(["--rdzv-id=other", f"--log-dir={c.folder / 'logs'}", REPORT])
    config.write_text(f'server = "{c.endpoint}"\n[[job]]\nargs = {args}\n')
    agent = c.start("agent", [str(BIN / "rdzv-agent"), "--config", str(config)])
    c.wait_until("both jobs run", lambda: len(c.all_reports()) == 2)
    assert c.server is not None
    runners = [node.descendants()[0], agent.descendants()[0]]
    ours = [c.server.pid, node.process.pid, agent.process.pid, *runners]
    assert [maps_torch(pid) for pid in ours] == [False] * len(ours)
    c.finish()
    assert [node.wait(), agent.wait()] == [0, 0]


def test_the_users_own_modules_do_not_shadow_ours(c: Cluster) -> None:
    """They have the names of our folders and modules, and fail when they are imported."""
    folder = c.folder / "project"
    folder.mkdir()
    names = ("agent", "rendezvous", "proto", "logs", "errors", "client", "server", "core", "runner")
    for name in names:
        (folder / f"{name}.py").write_text(f"raise SystemExit('the user\\'s {name}.py was run')\n")
    (folder / "helper.py").write_text("WORD = 'helped'\n")
    script = folder / "train.py"
    script.write_text(
        f"import helper, sys\nprint(helper.WORD)\nsys.argv[0] = {REPORT!r}\n"
        f"exec(open({REPORT!r}).read())\n"
    )
    python_path = os.pathsep.join([".", *filter(None, [os.environ.get("PYTHONPATH")])])
    environ = {"PYTHONPATH": python_path, "RDZV_SERVER": c.endpoint}
    node = c.start_node("n1", nnodes="1", worker=str(script), environ=environ, cwd=folder)
    c.wait_for_round(0, workers=1)
    ended = c.run("rdzvctl", "status", JOB, environ=environ, cwd=folder)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "running" in ended.stdout
    ended = c.run("rdzvd", "--version", environ=environ, cwd=folder)
    assert ended.returncode == 0, ended
    c.finish()
    assert node.wait() == 0
    assert "helped" in node.text
    assert "was run" not in node.text


def descriptors(report: dict[str, Any]) -> list[int]:
    """Return a worker's descriptors, except the link by which it may ask to be kept."""
    return [fd for fd in report["fds"] if fd != int(report["RDZV_WORKER_LINK"])]


def test_workers_have_no_descriptors_but_the_three(c: Cluster) -> None:
    """Neither the agent's own descriptors nor those that it was given."""
    read_end, write_end = os.pipe()
    try:
        command = [str(BIN / "rdzvrun"), "--nproc-per-node=2", "--max-restarts=1", REPORT]
        with (c.folder / "output").open("w") as output:
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=output,
                env=c.environ(),
                pass_fds=[read_end, write_end],
            )
        first = c.wait_for_round(0, workers=2)
        os.kill(first[0]["pid"], signal.SIGKILL)
        second = c.wait_for_round(1, workers=2)
        c.finish()
        assert process.wait(100) == 0
    finally:
        os.close(read_end)
        os.close(write_end)
    reports = (*first, *second)
    assert [len(report["fds"]) for report in reports] == [4] * 4
    assert [descriptors(report) for report in reports] == [[0, 1, 2]] * 4


@pytest.mark.parametrize("closed", ["0<&-", "0<&- 1>&-", "0<&- 1>&- 2>&-"])
def test_closed_standard_descriptors_are_not_filled_with_ours(c: Cluster, closed: str) -> None:
    """The agent's files must not get a number that workers use as stdin or stdout."""
    c.finish()
    node = c.start("n1", ["bash", "-c", f"exec {closed}; exec {BIN / 'rdzvrun'} {REPORT}"])
    assert node.wait() == 0
    (report,) = c.all_reports()
    still_open = [0, 1, 2][closed.count("&-") :]
    assert descriptors(report) == still_open
