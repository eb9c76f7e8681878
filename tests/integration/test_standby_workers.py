"""Nodes that wait for a seat start their workers in advance, with real servers and processes.

The worker is `tests/support/linked_worker.py`, as in `test_kept_processes`.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import JOB, Cluster, Node, alive, cluster_without_server
from test_agent_restart import Nodes
from test_kept_processes import WORKER, pids, start

from rdzv.core.model import Standby, StandbyState

pytestmark = pytest.mark.slow


@pytest.fixture(name="d")
def _daemons(tmp_path: Path) -> Iterator[Nodes]:
    with cluster_without_server(tmp_path) as made:
        config = tmp_path / "rdzvd.toml"
        # Long, so that an agent that starts slowly on a busy machine is not given up meanwhile.
        config.write_text('[lease]\nduration = "60 s"\nlongest = "60 s"\n')
        made.start_server("--config", str(config))
        try:
            yield Nodes(made)
        finally:
            made.kill_adopted()


def spare(c: Cluster, *options: str, does: tuple[str, ...] = ("elastic",)) -> list[Node]:
    """Start n1, which is seated, and n2, which waits, with two workers each."""
    nodes = [start(c, "n1", *does, nnodes="1", nproc=2)]
    c.wait_for_round(0, workers=2)
    nodes.append(start(c, "n2", *does, options=options, nnodes="1", nproc=2))
    return nodes


def standby(c: Cluster, name: str = "n2") -> Standby | None:
    return next((n.standby for n in c.status().nodes if n.node_id == name), None)


def wait_for(c: Cluster, state: StandbyState, name: str = "n2") -> Standby:
    def reached() -> Standby | None:
        found = standby(c, name)
        return found if found is not None and found.state is state else None

    found: Standby = c.wait_until(f"the standby of {name} is {state}", reached)
    return found


def told(c: Cluster) -> str:
    return c.run("rdzvctl", f"--server={c.endpoint}", "status", JOB).stdout


def hot(c: Cluster, *names: str) -> list[int]:
    """Return the pids of the standbys of a waiting node."""
    (node,) = [node for node in c.nodes if node.name in names]
    return sorted(node.workers())


def lose(c: Cluster, node: Node, number: int) -> list[int]:
    node.kill_tree()
    return sorted(pids(c.wait_for_round(number, workers=2)))


def test_a_spare_has_its_workers_ready_and_they_take_the_seat(c: Cluster) -> None:
    n1, n2 = spare(c)
    wait_for(c, StandbyState.READY)
    first = hot(c, "n2")
    assert len(first) == 2
    assert "standby: ready" in told(c)
    start(c, "n3", "elastic", nnodes="1", nproc=2)
    wait_for(c, StandbyState.READY, "n3")
    second = hot(c, "n3")
    assert lose(c, n1, 1) == first
    c.wait_until("all have said so", lambda: c.status().hot is not None)
    status = c.status()
    assert (status.kept, status.hot, status.warm, status.cold) == (0, 2, 0, 0)
    assert standby(c) is None
    (log,) = (c.folder / "logs").glob("*/n2/round_1/0/stdout.log")
    c.wait_until("it writes there", lambda: "round 1 pid" in log.read_text())
    (log,) = (c.folder / "logs").glob("*/n2/standby/0/stdout.log")
    assert log.read_text() == "parked after round -1\n"
    reports = c.wait_for_round(1, workers=2)
    assert [(r["RANK"], r["WORLD_SIZE"], r["RDZV_ROUND"]) for r in reports] == [
        ("0", "2", "1"),
        ("1", "2", "1"),
    ]
    # And the second time: a standby of an earlier round serves a later one as well.
    assert lose(c, n2, 2) == second
    c.finish()
    assert c.nodes[2].wait() == 0


def test_a_newcomer_has_its_workers_ready_before_the_round_ends_for_it(c: Cluster) -> None:
    start(c, "n1", "elastic", nnodes="1:2", nproc=2)
    c.wait_for_round(0, workers=2)
    n2 = start(c, "n2", "elastic", nnodes="1:2", nproc=2)
    reports = c.wait_for_round(1, workers=4)
    assert {int(r["pid"]) for r in reports} >= set(n2.workers())
    c.wait_until("all have said so", lambda: c.status().hot is not None)
    assert (c.status().kept, c.status().hot) == (2, 2)


def test_a_script_without_elastic_is_never_started_without_ranks(c: Cluster) -> None:
    n1, n2 = spare(c, does=())
    c.wait_until("n2 waits", lambda: "n2" in [node.node_id for node in c.status().nodes])
    started = lose(c, n1, 1)
    assert standby(c) is None
    logs = sorted((c.folder / "logs").glob("*/n2/*"))
    assert [log.name for log in logs if log.is_dir() and not log.is_symlink()] == ["round_1"]
    assert set(started) <= set(n2.workers())


def test_a_standby_that_cannot_start_is_none_and_the_node_is_seated_cold(c: Cluster) -> None:
    file = c.folder / "unready"
    file.touch()
    n1, n2 = spare(c, does=("elastic", f"unready:{file}"))
    found = wait_for(c, StandbyState.COLD)
    assert found.why.startswith("before it has parked, local_rank ")
    assert "ValueError: no standby today" in found.why
    assert "1 cold spare" in told(c)
    c.wait_until("all have ended", lambda: not n2.workers())
    assert len(lose(c, n1, 1)) == 2
    c.wait_until("all have said so", lambda: c.status().hot is not None)
    assert (c.status().hot, c.status().cold) == (0, 2)
    assert c.status().restarts == 0


@pytest.mark.parametrize("option", ["--standby=cold", "--keep-timeout=0"])
def test_standbys_can_be_turned_off(c: Cluster, option: str) -> None:
    _, n2 = spare(c, option)
    assert wait_for(c, StandbyState.OFF).why == option
    assert not n2.workers()


def test_another_version_of_the_script_has_no_standby(c: Cluster) -> None:
    start(c, "n1", "elastic", nnodes="1", nproc=1)
    c.wait_for_round(0, workers=1)
    other = c.folder / "other.py"
    other.write_text(Path(WORKER).read_text() + "# another\n")
    options = ("--redirects=3", "--max-restarts=5")
    n2 = c.start_node("n2", *options, worker=str(other), args=("elastic",), nnodes="1", nproc=1)
    found = wait_for(c, StandbyState.COLD)
    assert found.why.startswith(f"the job runs another version of {other}")
    assert not n2.workers()


def test_a_standby_that_dies_ends_the_others_in_words(c: Cluster) -> None:
    _, n2 = spare(c)
    wait_for(c, StandbyState.READY)
    os.kill(hot(c, "n2")[0], signal.SIGKILL)
    found = wait_for(c, StandbyState.COLD)
    assert "had parked, and ended with signal 9" in found.why
    c.wait_until("the other has ended", lambda: not n2.workers())


def test_an_operators_restart_starts_standbys_anew(c: Cluster) -> None:
    n1, n2 = spare(c)
    wait_for(c, StandbyState.READY)
    before = hot(c, "n2")
    asked = c.run("rdzvctl", f"--server={c.endpoint}", "restart", JOB)
    assert asked.returncode == 0, asked
    c.wait_for_round(1, workers=2)

    def renewed() -> bool:
        found, now = standby(c), n2.workers()
        is_ready = found is not None and found.state is StandbyState.READY
        return is_ready and len(now) == 2 and not set(now) & set(before)

    c.wait_until("the standbys are new", renewed)
    assert lose(c, n1, 2) == hot(c, "n2")


def test_standbys_that_an_agent_was_starting_are_taken_over_by_the_next(d: Nodes) -> None:
    c, file = d.cluster, d.cluster.folder / "unready"
    file.touch()
    d.agents["n1"] = d.start("n1")
    size = ("--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=5")
    d.submit("job", *size, WORKER, "elastic", f"slow:{file}")
    c.wait_for_round(0, workers=1)
    d.agents["n2"] = d.start("n2")
    wait_for(c, StandbyState.STARTING)
    (first,) = c.wait_until("it runs", d.agents["n2"].workers)
    for _ in range(2):
        d.kill("n2")
        d.come_back("n2")
    assert alive(first)
    file.unlink()
    assert first in pids(c.wait_for_round(1, workers=2))
    c.wait_until("all have said so", lambda: c.status().hot is not None)
    assert (c.status().kept, c.status().hot) == (1, 1)


def test_those_that_an_agent_was_starting_end_if_the_script_is_another_by_then(d: Nodes) -> None:
    c, file = d.cluster, d.cluster.folder / "unready"
    file.touch()
    script = c.folder / "script.py"
    script.write_text(Path(WORKER).read_text())
    d.agents["n1"] = d.start("n1")
    size = ("--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=5")
    d.submit("job", *size, str(script), "elastic", f"slow:{file}")
    c.wait_for_round(0, workers=1)
    d.agents["n2"] = d.start("n2")
    wait_for(c, StandbyState.STARTING)
    (first,) = c.wait_until("it runs", d.agents["n2"].workers)
    d.kill("n2")
    script.write_text(f"{script.read_text()}# another\n")
    d.come_back("n2")
    reports = c.wait_for_round(1, workers=2)
    assert not alive(first)
    assert first not in pids(reports)


def test_an_agent_that_is_replaced_while_outdated_ones_end_has_its_round_all_the_same(
    d: Nodes,
) -> None:
    c, file = d.cluster, d.cluster.folder / "unready"
    file.touch()
    d.agents["n1"] = d.start("n1")
    size = ("--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=0")
    times = ("--shutdown-timeout=0.1", "--rdzv-conf=failure_stop_timeout=6")
    d.submit("job", *size, *times, WORKER, "elastic", "stays", f"slow:{file}")
    c.wait_for_round(0, workers=1)
    d.agents["n2"] = d.start("n2")
    wait_for(c, StandbyState.STARTING)
    (first,) = c.wait_until("it runs", d.agents["n2"].workers)
    c.wait_until("it ignores SIGTERM", lambda: ignores_sigterm(first))
    asked = c.run("rdzvctl", f"--server={c.endpoint}", "restart", JOB)
    assert asked.returncode == 0, asked
    c.wait_until("n2 is seated", lambda: "job: round 1: GROUP_RANK" in d.agents["n2"].text)
    d.kill("n2")
    assert alive(first)
    d.come_back("n2")
    reports = c.wait_for_round(1, workers=2)
    assert not alive(first)
    assert first not in pids(reports)
    assert (c.status().restarts, len(c.status().nodes)) == (0, 2)


def ignores_sigterm(pid: int) -> bool:
    (line,) = re.findall(r"^SigIgn:\s(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.M)
    return bool(int(line, 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.parametrize("how", ["SIGTERM", "drain", "success"])
def test_standbys_end_with_their_node(c: Cluster, how: str) -> None:
    _, n2 = spare(c)
    wait_for(c, StandbyState.READY)
    before = hot(c, "n2")
    if how == "SIGTERM":
        n2.process.terminate()
    elif how == "drain":
        c.run("rdzvctl", f"--server={c.endpoint}", "drain", "n2", "--force")
    else:
        c.finish()
    codes: dict[str, Any] = {"SIGTERM": 128 + signal.SIGTERM, "drain": 75, "success": 0}
    assert n2.wait() == codes[how]
    assert not any(alive(pid) for pid in before)
