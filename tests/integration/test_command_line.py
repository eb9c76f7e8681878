"""The commands that people type, and their effects: rdzvrun, rdzv-agent and rdzvctl."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path

import pytest
from cluster import BIN, JOB, WORKERS, Cluster, Node, alive

pytestmark = pytest.mark.usefixtures("own_temporary_folder")

REPORT = str(WORKERS / "report.py")


def rdzvrun(c: Cluster, *args: str, environ: dict[str, str] | None = None) -> Node:
    """Start one rdzvrun with only this on its command line."""
    return c.start_program("rdzvrun", "rdzvrun", *args, environ=environ, cwd=c.folder)


# ------------------------------------------------------------------ one machine


@pytest.mark.parametrize("options", [(), ("--standalone",), ("--standalone", "--rdzv-id=mine")])
def test_one_node_needs_no_server_and_no_options(alone: Cluster, options: tuple[str, ...]) -> None:
    alone.finish()
    # Executed, as people do it; elsewhere it is forked.
    command = [str(BIN / "rdzvrun"), *options, REPORT]
    assert alone.start("rdzvrun", command, cwd=alone.folder).wait() == 0
    (report,) = alone.all_reports()
    seen = {k: report[k] for k in ("RANK", "WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_ADDR")}
    assert seen == {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
    }
    if "--rdzv-id=mine" in options:
        assert report["TORCHELASTIC_RUN_ID"] == "mine"


# ------------------------------------------------------------------ logs


def test_logs_of_two_nodes_in_one_folder_lie_apart(c: Cluster) -> None:
    """A restart makes a new round, and nothing of the first one is lost."""
    args = ("say=hello", "fail-first", 'error={"message": "at first"}')
    nodes = [
        c.start_node(
            f"n{i}", "--max-restarts=1", "-r", "3", nnodes="2", nproc=2, args=args
        )
        for i in (1, 2)
    ]  # fmt: skip
    c.wait_for_round(1, workers=4)
    c.finish()
    assert [node.wait() for node in nodes] == [0, 0]
    run = c.status().run
    assert [path.name for path in (c.folder / "logs").iterdir()] == [f"{JOB}-{run}"]
    for name in ("n1", "n2"):
        folder = c.folder / "logs" / f"{JOB}-{run}" / name
        assert {path.name for path in folder.iterdir()} == {
            "round_0",
            "round_1",
            "attempt_0",
            "attempt_1",
        }
        assert (folder / "attempt_0").readlink() == Path("round_0")
        assert (folder / "attempt_1").readlink() == Path("round_1")
        for local_rank in "01":
            assert (folder / "round_0" / local_rank).is_dir()
            worker = folder / "attempt_1" / local_rank
            assert (worker / "stdout.log").read_text() == "hello\n"
            assert (worker / "stderr.log").read_text() == "hello\n"
            assert json.loads((worker / "error.json").read_text()) == {"message": "at first"}
    assert [*(c.folder / "logs").glob("*/*/round_0/*/error.json")], "somebody failed first"
    assert not any("hello\n" in node.text for node in nodes)


# ------------------------------------------------------------------ signals

ENDING = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT]


@pytest.mark.parametrize("signum", ENDING, ids=lambda signum: signum.name)
def test_a_signal_ends_it_with_128_and_its_number(alone: Cluster, signum: signal.Signals) -> None:
    node = rdzvrun(alone, "--nproc-per-node=2", REPORT, "child")
    alone.wait_for_round(0, workers=2)
    node.process.send_signal(signum)
    assert node.wait() == 128 + signum
    assert f"received {signum.name}; leaving the job" in node.text
    assert "rdzv/agent" not in node.text, "only a worker may show a traceback"
    assert not alone.marked()


@pytest.mark.parametrize("signum", [*ENDING, signal.SIGKILL], ids=lambda signum: signum.name)
def test_who_is_ended_while_still_joining_leaves_nothing(
    c: Cluster, signum: signal.Signals
) -> None:
    temporary = c.folder / "tmp"
    temporary.mkdir()
    options = (f"--rdzv-endpoint={c.endpoint}", f"--rdzv-id={JOB}", "--nnodes=2", "--node-id=n1")
    node = rdzvrun(c, *options, REPORT, environ={"TMPDIR": str(temporary)})
    c.wait_until("it waits", lambda: "waiting for 1 more node" in node.text)
    below = node.descendants()
    assert below, "its runner"
    node.process.send_signal(signum)
    assert node.wait() == (-signum if signum is signal.SIGKILL else 128 + signum)
    c.wait_until("all are gone", lambda: not any(alive(pid) for pid in below))
    assert not any(temporary.iterdir())
    assert not c.all_reports()
    state = "lost" if signum is signal.SIGKILL else "left"
    c.wait_until("the server knows", lambda: [n.state for n in c.status().nodes] == [state])


def test_who_is_ended_while_no_server_answers_leaves_nothing(alone: Cluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"--rdzv-endpoint=127.0.0.1:{silent.getsockname()[1]}"
        node = rdzvrun(alone, endpoint, f"--rdzv-id={JOB}", REPORT)
        alone.wait_until("its runner is up", node.descendants)
        alone.wait_until("it listens to SIGTERM", lambda: catches(node, signal.SIGTERM))
        node.process.send_signal(signal.SIGTERM)
        assert node.wait() == 128 + signal.SIGTERM
    assert "Traceback" not in node.text


def catches(node: Node, signum: int) -> bool:
    status = Path(f"/proc/{node.process.pid}/status").read_text()
    (mask,) = [line.split()[1] for line in status.splitlines() if line.startswith("SigCgt")]
    return bool(int(mask, 16) >> (signum - 1) & 1)


def test_the_second_ctrl_c_cuts_the_grace_short(alone: Cluster) -> None:
    node = rdzvrun(alone, "--shutdown-timeout=600", REPORT, "deaf")
    (report,) = alone.wait_for_round(0, workers=1)
    node.process.send_signal(signal.SIGINT)
    alone.wait_until("it has noticed", lambda: "received SIGINT; leaving" in node.text)
    assert alive(report["pid"])
    node.process.send_signal(signal.SIGINT)
    assert node.wait() == 130
    assert not alive(report["pid"])


def test_ctrl_c_before_it_has_joined_is_no_traceback(alone: Cluster) -> None:
    """The embedded server is not up yet: from the first moment at which it handles signals."""
    node = rdzvrun(alone, REPORT)
    alone.wait_until("it listens to SIGTERM", lambda: catches(node, signal.SIGTERM))
    node.process.send_signal(signal.SIGINT)
    assert node.wait() == 130
    assert "rdzv/agent" not in node.text
    assert "grpc" not in node.text


# ------------------------------------------------------------------ rdzvctl


def ctl(c: Cluster, *args: str) -> str:
    ended = c.run("rdzvctl", *args, environ={"RDZV_SERVER": c.endpoint})
    assert (ended.returncode, ended.stderr) == (0, ""), ended
    return ended.stdout


# ------------------------------------------------------------------ rdzv-agent


def agent_config(c: Cluster, *jobs: str, script: str = REPORT) -> Path:
    path = c.folder / "agent.toml"
    lines = [f'server = "{c.endpoint}"', 'node_id = "gpu-7"']
    logs = f"--log-dir={c.folder / 'logs'}"
    for job in jobs:
        lines += ["[[job]]", f"args = {json.dumps([f'--rdzv-id={job}', logs, script])}"]
    path.write_text("\n".join(lines))
    return path


def start_agent(c: Cluster, *jobs: str) -> Node:
    config = str(agent_config(c, *jobs))
    return c.start_program("agent", "rdzv-agent", "--config", config, cwd=c.folder)


def job_states(c: Cluster) -> dict[str, str]:
    jobs = json.loads(ctl(c, "list", "-o", "json"))["jobs"]
    return {job["rdzv_id"]: job["state"] for job in jobs}


def both_running(c: Cluster) -> list[int]:
    """Wait until both jobs have a worker; return their pids."""
    c.wait_until("both jobs run", lambda: len(c.all_reports()) == 2)
    assert {r["TORCHELASTIC_RUN_ID"] for r in c.all_reports()} == {"day", "night"}
    assert job_states(c) == {"day": "running", "night": "running"}
    return [r["pid"] for r in c.all_reports()]


def test_rdzv_agent_runs_two_jobs_over_one_stream(c: Cluster) -> None:
    agent = start_agent(c, "day", "night")
    both_running(c)
    c.finish()
    assert agent.wait() == 0
    assert job_states(c) == {"day": "succeeded", "night": "succeeded"}
    for job in ("day", "night"):
        assert f"{job}: round 0: GROUP_RANK 0 of 1" in agent.text
        assert f"{job}: the job has succeeded" in agent.text


def test_sigterm_makes_rdzv_agent_leave_all_its_jobs(c: Cluster) -> None:
    agent = start_agent(c, "day", "night")
    pids = both_running(c)
    agent.process.terminate()
    assert agent.wait() == 128 + signal.SIGTERM
    assert not any(alive(pid) for pid in pids)
    assert job_states(c) == {"day": "stopped", "night": "stopped"}


def test_a_failed_job_of_rdzv_agent_leaves_the_other_alone(c: Cluster) -> None:
    agent = start_agent(c, "day", "night")
    both_running(c)
    (failing,) = [r["pid"] for r in c.all_reports() if r["TORCHELASTIC_RUN_ID"] == "day"]
    os.kill(failing, signal.SIGKILL)
    c.wait_until("day has failed", lambda: job_states(c)["day"] == "failed")
    assert job_states(c)["night"] == "running"
    c.finish()
    assert agent.wait() == 1
    assert job_states(c) == {"day": "failed", "night": "succeeded"}
    assert "day: the job has failed" in agent.text
    assert "Root cause, the first failure of the last round:" in agent.text
    assert "night: the job has succeeded" in agent.text


JOB_TABLE = '[[job]]\nargs = ["--rdzv-id=a", "script.py"]\n'
BAD_CONFIGS = [
    ("server = '\xff'", "it is not TOML: "),
    (f'server = "a"\nservers = "b"\n{JOB_TABLE}', "`servers` is unknown; did you mean `server`?"),
    (
        f'server = "a"\n{JOB_TABLE}{JOB_TABLE}',
        "two [[job]] tables have the --rdzv-id a; rename one",
    ),
]


@pytest.mark.parametrize(("text", "said"), BAD_CONFIGS)
def test_a_bad_configuration_is_refused_by_name(alone: Cluster, text: str, said: str) -> None:
    (alone.folder / "script.py").touch()
    path = alone.folder / "agent.toml"
    path.write_text(text, encoding="latin-1")
    ended = alone.run("rdzv-agent", "--config", str(path))
    assert ended.returncode == 2, ended
    last = ended.stderr.splitlines()[-1]
    assert last.startswith(f"rdzv-agent: {path}")
    assert said in last
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("place", ["no-such.toml", "."])
def test_a_configuration_that_is_not_there_is_refused(alone: Cluster, place: str) -> None:
    ended = alone.run("rdzv-agent", "--config", place)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"rdzv-agent: {place}: it cannot be read: ")


def test_check_config_starts_nothing(c: Cluster) -> None:
    ended = c.run("rdzv-agent", "--check-config", "--config", str(agent_config(c, "day")))
    said = f"rdzv-agent: {c.folder}/agent.toml is in order\n"
    assert (ended.returncode, ended.stdout) == (0, said)
    assert job_states(c) == {}
