"""Workers that stay between rounds, with real servers, nodes and processes.

The worker is `tests/support/linked_worker.py`, which implements its link by hand.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import (
    FORK_ALL,
    JOB,
    QUICK_TORCH,
    Cluster,
    Node,
    alive,
    cluster_without_server,
)
from test_agent_restart import Nodes

from tests.support.whole_lines import lines_of

ROOT = Path(__file__).parents[2]
WORKER = str(ROOT / "tests" / "support" / "linked_worker.py")


def start(
    c: Cluster, name: str, *does: str, options: tuple[str, ...] = (), nnodes: str = "2", nproc: int
) -> Node:
    given = ("--max-restarts=5", "--redirects=3", *options)
    return c.start_node(name, *given, worker=WORKER, args=does, nnodes=nnodes, nproc=nproc)


def pids(reports: list[dict[str, Any]]) -> list[int]:
    """Return the workers' pids by RANK."""
    return [int(report["pid"]) for report in reports]


def one_node(c: Cluster, *does: str, options: tuple[str, ...] = (), nproc: int = 3) -> Node:
    return start(c, "n1", *does, options=options, nnodes="1", nproc=nproc)


# ------------------------------------------------------------------ kept


def test_survivors_of_a_killed_worker_keep_their_processes(c: Cluster) -> None:
    nodes = [start(c, name, nproc=2) for name in ("n1", "n2")]
    before = pids(c.wait_for_round(0, workers=4))
    os.kill(before[1], signal.SIGKILL)
    reports = c.wait_for_round(1, workers=4)
    after = pids(reports)
    assert [after[n] for n in (0, 2, 3)] == [before[n] for n in (0, 2, 3)]
    assert after[1] != before[1]
    for node in nodes:
        c.wait_for_text(node, "kept (local_rank")
    assert any("its worker ended with signal 9 (SIGKILL))" in node.text for node in nodes)
    assert {report["TORCHELASTIC_RESTART_COUNT"] for report in reports} == {"1"}
    assert {report["RDZV_ROUND"] for report in reports} == {"1"}
    ports = {report["MASTER_PORT"] for report in reports}
    assert len(ports) == 1
    c.wait_until("both nodes have said so", lambda: c.status().cold is not None)
    status = c.status()
    assert (status.kept, status.warm, status.cold) == (3, 0, 1)
    assert [(node.kept, node.cold) for node in status.nodes] == [(1, 1), (2, 0)]
    told = c.run("rdzvctl", f"--server={c.endpoint}", "explain", JOB).stdout
    said = "3 kept, 1 cold: RANK 1 on n1 is cold (its worker ended with signal 9 (SIGKILL))."
    assert said in " ".join(told.split())
    c.finish()
    assert [node.wait() for node in nodes] == [0, 0]


def test_survivors_of_a_lost_node_keep_their_processes(c: Cluster) -> None:
    nodes = [start(c, f"n{i}", nnodes="2:3", nproc=2) for i in (1, 2, 3)]
    before = c.wait_for_round(0, workers=6)
    lost = next(node for node in nodes if int(before[0]["pid"]) in node.workers())
    lost.kill_tree()
    reports = c.wait_for_round(1, workers=4)
    assert pids(reports) == pids(before)[2:]
    assert [report["RANK"] for report in reports] == ["0", "1", "2", "3"]
    assert {report["WORLD_SIZE"] for report in reports} == {"4"}
    assert c.status().restarts == 0
    c.finish()
    assert [node.wait() for node in nodes if node is not lost] == [0, 0]


def test_a_spare_takes_the_place_of_a_lost_node_beside_kept_workers(c: Cluster) -> None:
    nodes = [start(c, f"n{i}", nproc=1) for i in (1, 2)]
    before = c.wait_for_round(0, workers=2)
    nodes.append(start(c, "n3", nproc=1))
    c.wait_until("n3 waits", lambda: "n3" in [node.node_id for node in c.status().nodes])
    lost = next(node for node in nodes if int(before[1]["pid"]) in node.workers())
    lost.kill_tree()
    after = pids(c.wait_for_round(1, workers=2))
    assert after[0] == pids(before)[0]
    assert after[1] in nodes[2].workers()
    assert c.status().restarts == 0


def test_rounds_in_a_row_keep_the_same_processes(c: Cluster) -> None:
    node = one_node(c)
    kept = pids(c.wait_for_round(0, workers=3))[:2]
    for number in range(1, 4):
        os.kill(pids(c.wait_for_round(number - 1, workers=3))[2], signal.SIGKILL)
        assert pids(c.wait_for_round(number, workers=3))[:2] == kept
    c.finish()
    assert node.wait() == 0


# ------------------------------------------------------------------ not kept


def test_a_worker_that_says_it_cannot_park_is_replaced_at_once(c: Cluster) -> None:
    node = one_node(c, "stuck:1", options=("--keep-timeout=600",))
    before = pids(c.wait_for_round(0, workers=3))
    os.kill(before[2], signal.SIGKILL)
    after = pids(c.wait_for_round(1, workers=3))
    assert after[0] == before[0]
    assert after[1] != before[1]
    why = "it waits in graph.py:979 for an operation that gloo has lost"
    c.wait_for_text(node, f"instead of keeping it: {why}")
    # Its end is no failure of its own.
    assert c.status().restarts == 1


def test_without_keep_timeout_every_worker_is_new(c: Cluster) -> None:
    one_node(c, "unlinked", options=("--keep-timeout=0",))
    reports = c.wait_for_round(0, workers=3)
    assert not any("RDZV_WORKER_LINK" in report for report in reports)
    os.kill(pids(reports)[2], signal.SIGKILL)
    assert not set(pids(c.wait_for_round(1, workers=3))) & set(pids(reports))


def test_an_operators_restart_keeps_no_worker(c: Cluster) -> None:
    one_node(c)
    before = pids(c.wait_for_round(0, workers=3))
    asked = c.run("rdzvctl", f"--server={c.endpoint}", "restart", JOB)
    assert asked.returncode == 0, asked
    assert not set(pids(c.wait_for_round(1, workers=3))) & set(before)


# ------------------------------------------------------------------ failures


def test_a_failure_of_the_script_is_one_as_ever_and_its_siblings_stay(c: Cluster) -> None:
    file = c.folder / "fail"
    node = one_node(c, f"fails:{file}")
    before = pids(c.wait_for_round(0, workers=3))
    file.touch()
    after = pids(c.wait_for_round(1, workers=3))
    assert len(set(before) & set(after)) == 2
    assert c.status().restarts == 1
    c.wait_for_text(node, "ValueError: the script's own")


def test_suspects_are_innocent_where_a_worker_was_killed(c: Cluster) -> None:
    file = c.folder / "suspect"
    node = one_node(c, f"suspect:{file}")
    before = pids(c.wait_for_round(0, workers=3))
    os.kill(before[2], signal.SIGSTOP)
    file.touch()
    # They end the round, long before it is noticed what has killed the third.
    c.wait_for_text(node, "round 0 ended")
    for rank in (0, 1):
        (log,) = (c.folder / "logs").glob(f"*/*/round_0/{rank}/stdout.log")
        c.wait_until("it has parked", lambda log=log: "parked after round 0" in log.read_text())
    file.unlink()
    os.kill(before[2], signal.SIGKILL)
    after = pids(c.wait_for_round(1, workers=3))
    assert after[:2] == before[:2]
    assert after[2] != before[2]
    assert c.status().restarts == 1
    c.wait_for_text(node, "local_rank 2 cold: its worker ended with signal 9 (SIGKILL)")


# ------------------------------------------------------------------ while they are parked


def parked(c: Cluster, *options: str, does: tuple[str, ...] = ()) -> tuple[Node, list[int]]:
    """Return a node whose workers are parked since the other node is lost, and their pids."""
    nodes = [start(c, f"n{i}", *does, nproc=1, options=options) for i in (1, 2)]
    before = pids(c.wait_for_round(0, workers=2))
    lost = next(node for node in nodes if before[1] in node.workers())
    (stays,) = [node for node in nodes if node is not lost]
    lost.kill_tree()
    (log,) = (c.folder / "logs").glob(f"*/{stays.name}/round_0/0/stdout.log")
    c.wait_until("it has parked", lambda: "parked after round 0" in log.read_text())
    return stays, before[:1]


def test_a_node_that_waits_for_others_keeps_its_workers_until_they_come(c: Cluster) -> None:
    _, kept = parked(c)
    start(c, "n3", nproc=1)
    assert pids(c.wait_for_round(1, workers=2))[0] == kept[0]


def test_parked_workers_end_after_a_while(c: Cluster) -> None:
    node, kept = parked(c, "--park-timeout=1", does=("stays",))
    c.wait_until("they have ended", lambda: not alive(kept[0]))
    assert node.process.poll() is None
    start(c, "n3", nproc=1)
    assert kept[0] not in pids(c.wait_for_round(1, workers=2))


@pytest.mark.parametrize("does", [(), ("stays",)], ids=["willing", "stubborn"])
def test_sigterm_of_an_agent_ends_parked_workers(c: Cluster, does: tuple[str, ...]) -> None:
    node, kept = parked(c, "--rdzv-conf=failure_stop_timeout=1", does=does)
    node.process.terminate()
    assert node.wait() == 128 + signal.SIGTERM
    assert not alive(kept[0])


@pytest.mark.parametrize(("verb", "code"), [("stop", 1), ("drain", 75)])
def test_operators_end_parked_workers(c: Cluster, verb: str, code: int) -> None:
    node, kept = parked(c)
    what = (JOB,) if verb == "stop" else (node.name, "--force")
    asked = c.run("rdzvctl", f"--server={c.endpoint}", verb, *what)
    assert asked.returncode == 0, asked
    assert node.wait() == code
    assert not alive(kept[0])


# ------------------------------------------------------------------ agents that are replaced


def config(c: Cluster) -> Path:
    return c.folder / "rdzvd.toml"


@pytest.fixture(name="d")
def _nodes(tmp_path: Path) -> Iterator[Nodes]:
    with cluster_without_server(tmp_path) as made:
        # Long, so that an agent that starts slowly on a busy machine is not given up meanwhile.
        config(made).write_text('[lease]\nduration = "60 s"\nlongest = "60 s"\n')
        made.start_server("--config", str(config(made)))
        try:
            yield Nodes(made)
        finally:
            made.kill_adopted()


def submitted(d: Nodes, *names: str, options: tuple[str, ...] = ()) -> list[int]:
    """Start agents and a job on them, with two workers each; return the workers' pids."""
    for name in names:
        d.agents[name] = d.start(name)
    nnodes = f"--nnodes={len(names)}"
    d.submit("job", nnodes, "--nproc-per-node=2", "--max-restarts=5", *options, WORKER)
    return pids(d.cluster.wait_for_round(0, workers=2 * len(names)))


def park_on_n1(d: Nodes, *options: str) -> list[int]:
    """Let the workers of n1 park by draining n2; return their pids."""
    before = submitted(d, "n1", "n2", options=options)
    stays = [pid for pid in before if d.node_of(pid) == "n1"]
    drained = d.cluster.run("rdzvctl", f"--server={d.cluster.endpoint}", "drain", "n2", "--force")
    assert drained.returncode == 0, drained
    # A node whose agent is killed before it has reported the stop is lost.
    d.until("n1 waits", lambda: is_waiting(d, "n1"))
    d.until("the others are gone", lambda: not any(map(alive, set(before) - set(stays))))
    return stays


def is_waiting(d: Nodes, name: str) -> bool:
    """Return whether the server shows a node as connected, and waiting for a round."""
    waits = any(n.node_id == name and n.state == "waiting" for n in d.status("job").nodes)
    return waits and d.node(name).get("state") == "connected"


def test_workers_are_kept_by_an_agent_that_has_adopted_them(d: Nodes) -> None:
    before = submitted(d, "n1")
    d.kill("n1")
    d.come_back("n1")
    os.kill(before[1], signal.SIGKILL)
    after = pids(d.cluster.wait_for_round(1, workers=2))
    assert after[0] == before[0]
    assert after[1] != before[1]


def test_an_agent_that_has_adopted_workers_restarts_them_warm(d: Nodes) -> None:
    before = submitted(d, "n1", options=("--warm=json",))
    d.until("workers can be warm", lambda: "can be warm" in d.agents["n1"].text)
    d.kill("n1")
    again = d.come_back("n1")
    os.kill(before[1], signal.SIGKILL)
    after = pids(d.cluster.wait_for_round(1, workers=2))
    assert after[0] == before[0]
    d.cluster.wait_for_text(again, "1 worker new (local_rank 1 warm")


def test_parked_workers_wait_for_the_next_agent(d: Nodes) -> None:
    stays = park_on_n1(d)
    d.kill("n1")
    d.come_back("n1")
    assert all(map(alive, stays))
    d.agents["n3"] = d.start("n3")
    assert set(stays) <= set(pids(d.cluster.wait_for_round(1, workers=4)))


def test_the_fence_ends_parked_workers_though_no_agent_is_there(d: Nodes) -> None:
    stays = park_on_n1(d, "--fence-after=4")
    d.kill("n1")
    d.until("the fence has come", lambda: not any(map(alive, stays)))
    d.agents["n1"] = d.launch("n1")
    d.until("n1 waits again", lambda: is_waiting(d, "n1"))


# ------------------------------------------------------------------ with the library


def test_a_training_goes_on_in_its_processes_from_the_step_before(c: Cluster) -> None:
    script = ROOT / "examples" / "train_kept.py"
    options = ("--max-restarts=2", "--redirects=3", "--warm=torch")
    args = ("--epochs=20", "--step-seconds=0.02")
    # rdzv.worker is found beside rdzv even if it is not installed.
    where = os.pathsep.join([str(ROOT / "worker"), os.environ["PYTHONPATH"]])
    node = c.start_node(
        "n1",
        *options,
        worker=str(script),
        args=args,
        nnodes="1",
        nproc=2,
        environ={"PYTHONPATH": where, **QUICK_TORCH, **FORK_ALL},
    )

    def printed(round_: int, text: str) -> list[str]:
        lines: list[str] = []
        for log in (c.folder / "logs").glob(f"*/n1/round_{round_}/0/stdout.log"):
            lines += [line for line in lines_of(log) if text in line]
        return lines

    first = c.wait_until("it trains", lambda: printed(0, "epoch 2"))[0]
    pid = int(first.rpartition("pid ")[2])
    (other,) = set(node.workers()) - {pid}
    os.kill(other, signal.SIGKILL)
    c.wait_for_text(node, "1 worker kept (local_rank 0)")
    (going_on,) = c.wait_until("it goes on", lambda: printed(1, "going on at step"))
    assert int(going_on.split()[4]) >= int(first.split(" | ")[1].split()[1])
    assert node.wait() == 0
    epochs = printed(1, "epoch ")
    assert epochs
    assert all(line.endswith(f"pid {pid}") for line in epochs)
