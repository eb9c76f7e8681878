"""--fence-after: a node that is cut off has no workers left when the others continue."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, Node, alive, cluster
from tcp_proxy import TcpProxy, proxy_to

FENCE_S = 3
LEASE_S = 8
"""Long enough that a busy machine has the time to kill the workers of a fenced node."""
FENCE = f"--fence-after={FENCE_S}"


@pytest.fixture(name="c")
def _cluster(tmp_path: Path) -> Iterator[Cluster]:
    config = tmp_path / "rdzvd.toml"
    config.write_text(f'[lease]\nduration = "{LEASE_S} s"\n')
    with cluster(tmp_path, f"--config={config}") as made:
        yield made


@pytest.fixture(name="link")
def _link(c: Cluster) -> Iterator[TcpProxy]:
    """The connection of one node to the server."""
    host, _, port = c.endpoint.rpartition(":")
    with proxy_to(host, int(port)) as proxy:
        yield proxy


def start_two(
    c: Cluster, link: TcpProxy, worker: str = "report.py", fence_s: int = FENCE_S
) -> tuple[Node, Node]:
    """Start n1, and n2 whose link can be broken; neither may spend a restart."""
    fence, way = f"--fence-after={fence_s}", f"--rdzv-endpoint={link.endpoint}"
    near = c.start_node("n1", fence, nnodes="1:2", worker=worker)
    far = c.start_node("n2", fence, way, nnodes="1:2", worker=worker)
    return near, far


def worker_of(reports: list[dict[str, Any]], group_rank: int) -> int:
    [pid] = [r["pid"] for r in reports if r["GROUP_RANK"] == str(group_rank)]
    return int(pid)


def wait_for_seats(c: Cluster, round_: int) -> None:
    """Wait until the server has completed a round."""

    def complete() -> bool:
        found = c.status().round
        return found is not None and found >= round_

    c.wait_until(f"round {round_} is complete", complete)


def wait_for_both(c: Cluster) -> None:
    """Wait until workers of both nodes have met again."""

    def together() -> bool:
        later = [r for r in c.all_reports() if r["RDZV_ROUND"] != "0"]
        return len([r for r in later if r["WORLD_SIZE"] == "2"]) >= 2

    c.wait_until("both nodes are in one round again", together)


def end_well(c: Cluster, *nodes: Node) -> None:
    """Let the job end: it has succeeded, and no restart was spent."""
    assert c.status().restarts == 0
    c.finish()
    assert [node.wait() for node in nodes] == [0] * len(nodes)
    assert c.status().state == "succeeded"


# ------------------------------------------------------------------ cut off


OTHERS = [pytest.param(name, marks=pytest.mark.campaign) for name in ("all_reduce.py", "report.py")]


@pytest.mark.parametrize("worker", ["joined.py", *OTHERS])
def test_a_node_behind_a_black_hole_has_no_worker_left_when_the_other_is_seated_again(
    c: Cluster, link: TcpProxy, worker: str
) -> None:
    """It joins again when the link is back. With connected workers the other's breaks first."""
    near, far = start_two(c, link, worker)
    cut_off = worker_of(c.wait_for_round(0, workers=2), group_rank=1)
    link.black_hole()
    wait_for_seats(c, 1)
    assert not alive(cut_off)
    c.wait_for_text(far, "fenced: the server was unreachable for 3 s (--fence-after)")
    [alone] = c.wait_for_round(1, workers=1)
    assert (alone["GROUP_WORLD_SIZE"], alone["TORCHELASTIC_RESTART_COUNT"]) == ("1", "0")
    link.restore()
    wait_for_both(c)
    end_well(c, near, far)


def test_a_stopped_agent_is_fenced_by_its_runner(c: Cluster, link: TcpProxy) -> None:
    """When it resumes, it does not start what it was sent meanwhile."""
    near, far = start_two(c, link)
    cut_off = worker_of(c.wait_for_round(0, workers=2), group_rank=1)
    far.process.send_signal(signal.SIGSTOP)
    wait_for_seats(c, 1)
    assert not alive(cut_off)
    far.process.send_signal(signal.SIGCONT)
    wait_for_both(c)
    end_well(c, near, far)


@pytest.mark.parametrize(
    "worker", ["report.py", pytest.param("all_reduce.py", marks=pytest.mark.campaign)]
)
def test_without_any_server_all_are_fenced_and_a_server_that_comes_back_joins_them(
    c: Cluster, link: TcpProxy, worker: str
) -> None:
    """With all_reduce.py, the later one's worker has failed before its own fence comes."""
    near, far = start_two(c, link, worker)
    workers = [r["pid"] for r in c.wait_for_round(0, workers=2)]
    c.kill_server()
    c.wait_until("all are fenced", lambda: not any(map(alive, workers)))
    assert near.process.poll() is None
    c.start_server()
    wait_for_both(c)
    end_well(c, near, far)


@pytest.mark.parametrize(
    "worker", ["joined.py", pytest.param("all_reduce.py", marks=pytest.mark.campaign)]
)
def test_who_is_back_right_behind_its_fence_is_the_reason_why_the_others_broke(
    c: Cluster, link: TcpProxy, worker: str
) -> None:
    """The lease is not over, so it never was lost; and the other's worker has failed by then."""
    near, far = start_two(c, link, worker)
    c.wait_for_round(0, workers=2)
    link.black_hole()
    # On a very busy machine the lease may be over first: then it was lost, also for free.
    c.wait_until(
        "the other's worker has broken",
        lambda: "failed: " in near.text or "n2 was lost" in c.server_log,
    )
    link.restore()
    link.reset()
    wait_for_both(c)
    end_well(c, near, far)


# ------------------------------------------------------------------ refused


def test_a_fence_that_comes_too_late_for_the_lease_is_refused(c: Cluster) -> None:
    node = c.start_node("n1", "--fence-after=7.5", nnodes="1")
    assert node.wait() == 2
    assert "--fence-after=7.5 is too long: the server gives this node up" in node.text
    assert "give at most 7" in node.text


def test_a_node_with_a_server_of_its_own_has_no_fence(c: Cluster) -> None:
    script = c.folder / "script.py"
    script.touch()
    ended = c.run("rdzvrun", "--standalone", FENCE, str(script))
    assert ended.returncode == 2
    assert ended.stderr.startswith("rdzvrun: --fence-after=3 has no effect here")
