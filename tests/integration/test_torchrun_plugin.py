"""Stock torchrun with our rendezvous: real nodes and workers, killed and restarted.

Rounds are distinguished by RDZV_ROUND, which workers get here as under rdzvrun.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cluster import BIN, JOB, WORKERS, Cluster, Node, alive
from ready_torchrun import Start

Torchrun = Callable[..., Node]


@pytest.fixture(name="torchrun")
def _torchrun(c: Cluster, ready: Start) -> Torchrun:
    """Start one torchrun of the job, as a user would."""

    def start(name: str, *options: str, **how: Any) -> Node:
        return c.start_torchrun(ready, name, *words(c, name, *options, **how))

    return start


def words(
    c: Cluster,
    name: str,
    *options: str,
    nnodes: str = "2:3",
    nproc: int = 1,
    max_restarts: int = 3,
    conf: str = "",
    worker: str = "report.py",
    args: tuple[str, ...] = (),
) -> list[str]:
    """Return the part of a command line after torchrun's name."""
    return [
        "--rdzv-backend=rdzv",
        f"--rdzv-endpoint={c.endpoint}",
        f"--rdzv-id={JOB}",
        f"--nnodes={nnodes}",
        f"--nproc-per-node={nproc}",
        f"--max-restarts={max_restarts}",
        f"--rdzv-conf=node_id={name}{conf and ','}{conf}",
        *options,
        str(WORKERS / worker),
        *args,
    ]


def seats(c: Cluster) -> dict[str, str]:
    return {node.node_id: node.state for node in c.status().nodes}


def test_a_training_outlives_a_worker_the_node_of_its_store_and_the_server(
    c: Cluster, torchrun: Torchrun
) -> None:
    """Four faults, one after another; with torch's own backends it survives only the first."""
    nodes = [torchrun(f"n{i}", worker="all_reduce.py") for i in (1, 2, 3)]
    first = c.wait_for_round(0, workers=3)
    assert [r["RANK"] for r in first] == ["0", "1", "2"]
    assert {r["WORLD_SIZE"] for r in first} == {"3"}
    assert {r["TORCHELASTIC_USE_AGENT_STORE"] for r in first} == {"True"}

    # A worker is killed: its torchrun spends a restart, and the others join it again.
    os.kill(first[1]["pid"], signal.SIGKILL)
    second = c.wait_for_round(1, workers=3)
    assert second[1]["TORCHELASTIC_RESTART_COUNT"] == "1"
    assert not any(alive(r["pid"]) for r in first)
    status = c.status()
    assert (status.state, status.restarts, status.max_restarts) == ("running", None, None)

    # The node that serves the store dies with all its processes: the survivors form a new round.
    nodes[0].kill_tree()
    third = c.wait_for_round(2, workers=2)
    assert {r["WORLD_SIZE"] for r in third} == {"2"}
    assert seats(c) == {"n2": "seated", "n3": "seated", "n1": "lost"}
    ports = {reports[0]["MASTER_PORT"] for reports in (first, second, third)}
    assert len(ports) == 3, "a port was used by two rounds"

    # The server dies: no worker notices.
    c.kill_server()
    c.start_server()
    c.wait_until("both are back", lambda: list(seats(c).values()).count("seated") == 2)
    assert all(alive(r["pid"]) for r in third)

    # A node comes late: it is admitted.
    nodes.append(torchrun("n4", worker="all_reduce.py"))
    fourth = c.wait_for_round(3, workers=3)
    assert {r["WORLD_SIZE"] for r in fourth} == {"3"}

    c.finish()
    assert [node.wait() for node in nodes[1:]] == [0, 0, 0]
    assert (c.status().state, c.status().world_size) == ("succeeded", 3)


def test_a_torchrun_that_is_signalled_leaves_and_a_spare_takes_its_seat(
    c: Cluster, torchrun: Torchrun
) -> None:
    nodes = [
        torchrun(name, nnodes="2", conf="last_call_timeout=0", args=args)
        for name, args in (("n1", ("deaf",)), ("n2", ()))
    ]
    (deaf,) = (r for r in c.wait_for_round(0, workers=2) if "deaf" in r["argv"])
    spares = [torchrun(f"n{i}", nnodes="2", conf="last_call_timeout=0") for i in (3, 4)]
    c.wait_until("n3 and n4 are spares", lambda: list(seats(c).values()).count("spare") == 2)
    nodes[0].process.send_signal(signal.SIGTERM)
    # All know before its worker is gone.
    c.wait_for_log("round 0 ended (node left): n1: received SIGTERM")
    os.kill(deaf["pid"], signal.SIGKILL)
    c.wait_for_round(1, workers=2)
    assert nodes[0].wait() == 1
    status = c.wait_for_state("running")
    assert status.reason.by_node["n1"] == "received SIGTERM"
    assert seats(c)["n1"] == "left"

    # The spare that was never needed ends as the job does.
    c.finish()
    assert [node.wait() for node in (nodes[1], *spares)] == [0, 0, 0]
    assert "AttributeError" not in "".join(node.text for node in spares)
    assert c.status().state == "succeeded"


def test_after_the_first_success_no_newcomer_ends_the_round(c: Cluster, torchrun: Torchrun) -> None:
    early = torchrun("n1", conf="last_call_timeout=0", args=("exit=0",))
    late = torchrun("n2", conf="last_call_timeout=0")
    c.wait_until("n1 has succeeded", lambda: "n1 succeeded in round 0" in c.server_log)
    newcomer = torchrun("n3", conf="last_call_timeout=0")
    c.wait_until("n3 waits", lambda: seats(c).get("n3") == "waiting")
    assert seats(c)["n1"] == "succeeded"
    c.finish()
    assert [node.wait() for node in (early, late, newcomer)] == [0, 0, 0]
    assert {r["RDZV_ROUND"] for r in c.all_reports()} == {"0"}


def test_the_failure_that_ends_a_torchrun_ends_the_job_with_its_root_cause(
    c: Cluster, torchrun: Torchrun
) -> None:
    nodes = [
        torchrun(f"n{i}", nnodes="2", max_restarts=0, worker="all_reduce.py", args=("boom",))
        for i in (1, 2)
    ]
    assert [node.wait() for node in nodes] == [1, 1]
    status = c.wait_for_state("failed")
    assert "ValueError: boom, said rank 1" in str(status.reason)
    assert status.last_failure is not None
    assert status.last_failure.root_cause.rank == 1
    assert "raise ValueError" in (status.last_failure.root_cause.traceback or "")


def test_a_users_own_agent_and_rendezvous_modules_are_left_alone(
    c: Cluster, tmp_path: Path
) -> None:
    """Two workers, which share no store with the agents because the user says so."""
    for name in ("agent", "rendezvous", "torchrun", "stream"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('this is the user\\'s own')\n")
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    # Executed: the files on the path are read while torchrun starts.
    command = [BIN / "torchrun", *words(c, "n1", nnodes="1", nproc=2, worker="all_reduce.py")]
    node = c.start(
        "n1",
        list(map(str, command)),
        cwd=tmp_path,
        environ={"PYTHONPATH": path, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    )
    reports = c.wait_for_round(0, workers=2)
    assert {r["TORCHELASTIC_USE_AGENT_STORE"] for r in reports} == {"False"}
    assert c.status().world_size == 2
    c.finish()
    assert node.wait() == 0


def test_who_waits_in_vain_says_for_what(c: Cluster, torchrun: Torchrun) -> None:
    alone = torchrun("n1", nnodes="2", conf="join_timeout=1")
    nowhere = torchrun("n2", "--rdzv-endpoint=127.0.0.1:1", nnodes="2", conf="join_timeout=1")
    assert [alone.wait(), nowhere.wait()] == [1, 1]
    assert "RendezvousTimeoutError" in alone.text
    assert "1 of 2:2 nodes; there: n1" in alone.text
    assert "RendezvousConnectionError: no server for 1 s (join_timeout)" in nowhere.text
    assert "cannot reach rdzvd at 127.0.0.1:1: connection refused" in nowhere.text
    assert c.status().state == "failed"
