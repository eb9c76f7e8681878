"""Real servers, nodes and workers: what happens when they die, leave and arrive."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from cluster import FORK_ALL, JOB, QUICK_TORCH, Cluster, Node, alive, cluster

from rdzv.client import ControlClient, parse_endpoint
from rdzv.view.answers import Event

WARM = {**FORK_ALL, **QUICK_TORCH}


def start_three(c: Cluster, *options: str, **how: object) -> list[Node]:
    """Start n1, n2 and n3, so that the first round has all of them."""
    return [c.start_node(f"n{i}", *options, **how) for i in (1, 2, 3)]  # type: ignore[arg-type]


def ranks(reports: list[dict[str, str]]) -> list[tuple[str, ...]]:
    keys = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "GROUP_WORLD_SIZE")
    return [tuple(report[key] for key in keys) for report in reports]


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def control_events(c: Cluster) -> tuple[Event, ...]:
    with ControlClient(parse_endpoint(c.endpoint)) as client:
        return client.events(JOB)


def exit_codes(nodes: list[Node]) -> list[int]:
    return [node.wait() for node in nodes]


# ------------------------------------------------------------------ forming and ending


def test_three_nodes_form_one_round_with_exact_ranks_and_succeed(c: Cluster) -> None:
    nodes = start_three(c, nproc=2, nnodes="3")
    reports = c.wait_for_round(0, workers=6)
    assert ranks(reports) == [(str(r), str(r % 2), str(r // 2), "6", "3") for r in range(6)]
    assert len({(r["MASTER_ADDR"], r["MASTER_PORT"]) for r in reports}) == 1
    assert {r["TORCHELASTIC_USE_AGENT_STORE"] for r in reports} == {"True"}
    assert {r["TORCHELASTIC_RUN_ID"] for r in reports} == {JOB}
    assert {r["TORCHELASTIC_RESTART_COUNT"] for r in reports} == {"0"}
    status = c.wait_for_state("running")
    seats = [(n.node_id, n.state, n.group_rank, n.rank_first) for n in status.nodes]
    expected = [("n1", "seated", 0, 0), ("n2", "seated", 1, 2), ("n3", "seated", 2, 4)]
    assert seats == expected
    c.finish()
    assert exit_codes(nodes) == [0, 0, 0]
    assert c.status().state == "succeeded"


def test_pings_notice_a_machine_that_stands_still_before_its_lease_ends(tmp_path: Path) -> None:
    """With thousands of nodes leases are long, and gRPC answers pings by itself."""
    settings = tmp_path / "rdzvd.toml"
    settings.write_text(
        '[lease]\nduration = "10 min"\nlongest = "10 min"\n'
        "[timings]\nping_interval = 1\nping_timeout = 1\n"
    )
    with cluster(tmp_path, f"--config={settings}") as c:
        alone, stands_still = [c.start_node(f"n{i}", nnodes="1:2") for i in (1, 2)]
        c.wait_for_round(0, workers=2)
        stands_still.process.send_signal(signal.SIGSTOP)
        c.wait_for_event("NodeLost", "n2 was lost: its stream ended")
        c.wait_for_round(1, workers=1)
        stands_still.kill_tree()
        c.finish()
        assert alone.wait() == 0


# ------------------------------------------------------------------ failures


def test_a_killed_worker_restarts_the_group_and_spends_one_restart(c: Cluster) -> None:
    start_three(c, "--max-restarts=2", nproc=2, nnodes="3")
    first = c.wait_for_round(0, workers=6)
    os.kill(first[2]["pid"], signal.SIGKILL)
    second = c.wait_for_round(1, workers=6)
    assert ranks(second) == ranks(first)
    assert {r["TORCHELASTIC_RESTART_COUNT"] for r in second} == {"1"}
    assert not any(alive(r["pid"]) for r in first)
    status = c.wait_for_state("running")
    assert (status.restarts, status.max_restarts, status.round) == (1, 2, 1)
    assert status.last_failure is not None
    worst = status.last_failure.root_cause
    assert (worst.node_id, worst.rank, worst.signal) == ("n2", 2, signal.SIGKILL)


def test_when_the_budget_is_spent_every_node_fails_with_the_same_root_cause(c: Cluster) -> None:
    nodes = [c.start_node(f"n{i}", nnodes="2", args=("boom",)) for i in (1, 2)]
    assert exit_codes(nodes) == [1, 1]
    for node in nodes:
        assert "rank 1 (local_rank 0) on n2" in node.text
        before, _, summary = node.text.partition("Root cause, ")
        said = [line for line in before.splitlines() if " rdzvrun[" in line]
        assert sum("ValueError: boom" in line for line in said) == 1, "once, when it happened"
        assert "the job has failed: worker failure: RANK 1 on n2; restarts" in said[-1]
        assert "ValueError: boom, said rank 1" in summary
        assert "raise ValueError" in node.text
    status = c.status()
    assert (status.state, status.restarts, status.max_restarts) == ("failed", 0, 0)
    assert "ValueError: boom, said rank 1" in str(status.reason)


def test_a_killed_node_costs_no_restart_though_its_peers_fail_at_once(c: Cluster) -> None:
    """With max_restarts=0: the peers' connections end within milliseconds of the kill."""
    nodes = start_three(c, "--max-restarts=0", worker="joined.py")
    first = c.wait_for_round(0, workers=3)
    assert [r["GROUP_RANK"] for r in first] == ["0", "1", "2"]
    nodes[0].kill_tree()
    second = c.wait_for_round(1, workers=2)
    assert [r["RANK"] for r in second] == ["0", "1"]
    assert second[0]["MASTER_PORT"] != first[0]["MASTER_PORT"]
    status = c.wait_for_state("running")
    assert (status.restarts, status.world_size) == (0, 2)
    lost = [n for n in status.nodes if n.node_id == "n1"]
    assert [n.state for n in lost] == ["lost"]
    c.finish()
    assert exit_codes(nodes[1:]) == [0, 0]


# ------------------------------------------------------------------ coming and going


def test_a_node_that_gets_sigterm_leaves_and_lets_its_workers_save(c: Cluster) -> None:
    saved = c.folder / "saved"
    nodes = start_three(c, args=(f"term={saved}",))
    c.wait_for_round(0, workers=3)
    nodes[2].process.send_signal(signal.SIGTERM)
    assert nodes[2].wait() == 128 + signal.SIGTERM
    assert saved.read_text() == "saved"
    c.wait_for_round(1, workers=2)


def test_a_late_node_is_taken_in_by_one_free_restart(c: Cluster) -> None:
    now = "--rdzv-conf=last_call_timeout=0"
    nodes = [c.start_node(f"n{i}", now) for i in (1, 2)]
    c.wait_for_round(0, workers=2)
    nodes.append(c.start_node("n3", now))
    second = c.wait_for_round(1, workers=3)
    assert [r["RANK"] for r in second] == ["0", "1", "2"]
    assert {r["TORCHELASTIC_RESTART_COUNT"] for r in second} == {"0"}
    c.finish()
    assert exit_codes(nodes) == [0, 0, 0]


def test_a_spare_takes_the_seat_of_a_lost_node_and_ends_with_the_job(c: Cluster) -> None:
    nodes = [c.start_node(f"n{i}", nnodes="2") for i in (1, 2)]
    first = c.wait_for_round(0, workers=2)
    spare = c.start_node("n3", nnodes="2")
    c.wait_until("n3 is a spare", lambda: "spare" in [n.state for n in c.status().nodes])
    c.wait_until("n3 says so", lambda: "spare: all 2 seats are taken" in spare.text)
    nodes[0].kill_tree()
    second = c.wait_for_round(1, workers=2)
    assert spare.text.count("all 2 seats are taken") == 1
    seated = {n.node_id: n.group_rank for n in c.status().nodes if n.state == "seated"}
    assert seated == {"n3": 0, "n2": 1}
    assert ranks(second) == ranks(first)
    assert c.status().restarts == 0
    c.finish()
    assert exit_codes([nodes[1], spare]) == [0, 0]


# ------------------------------------------------------------------ the store


def test_a_killed_store_host_ends_the_round_and_spends_no_restart(c: Cluster) -> None:
    how = {"nnodes": "2", "worker": "all_reduce.py", "environ": WARM}
    nodes = [c.start_node(f"n{i}", "--warm=torch", **how) for i in (1, 2)]  # type: ignore[arg-type]
    c.wait_for_round(0, workers=2)
    (host,) = [pid for pid in nodes[0].descendants() if "store_host.py" in command_line(pid)]
    os.kill(host, signal.SIGKILL)
    second = c.wait_for_round(1, workers=2)
    assert {r["TORCHELASTIC_RESTART_COUNT"] for r in second} == {"0"}
    settled = [e.text for e in control_events(c) if e.name == "RoundSettled"]
    assert "store host: on n1" in settled[0]
    c.finish()
    assert exit_codes(nodes) == [0, 0]


def test_where_no_store_host_can_run_rank_0s_worker_serves_the_store(c: Cluster) -> None:
    python = c.folder / "python"
    python.write_text(
        f'#!/bin/sh\ncase "$*" in *find_spec*) exit 1;; esac\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    nodes = [
        c.start_node(
            f"n{i}", nnodes="2", worker="all_reduce.py", environ={"PYTHON_EXEC": str(python)}
        )
        for i in (1, 2)
    ]
    reports = c.wait_for_round(0, workers=2)
    assert {r["TORCHELASTIC_USE_AGENT_STORE"] for r in reports} == {"False"}
    c.finish()
    assert exit_codes(nodes) == [0, 0]


# ------------------------------------------------------------------ the control plane


def test_a_worker_that_fails_while_the_server_is_away_is_charged_when_it_is_back(
    c: Cluster,
) -> None:
    nodes = start_three(c, "--max-restarts=1")
    first = c.wait_for_round(0, workers=3)
    c.kill_server()
    os.kill(first[1]["pid"], signal.SIGKILL)
    c.wait_until("n2 has noticed", lambda: "on n2: signal 9" in nodes[1].text)
    c.start_server()
    second = c.wait_for_round(1, workers=3)
    assert {r["TORCHELASTIC_RESTART_COUNT"] for r in second} == {"1"}


def test_the_job_goes_on_without_a_node_whose_runner_was_killed(c: Cluster) -> None:
    """That counts as a node that has left: no restart is spent, and a retry makes sense."""
    others = [c.start_node(f"n{i}", "--max-restarts=0") for i in (1, 2)]
    third = c.start_node("n3", "--max-restarts=0", args=("child",))
    c.wait_for_round(0, workers=3)
    below = third.descendants()
    os.kill(below[0], signal.SIGKILL)
    assert third.wait() == 75
    assert "its runner was killed by SIGKILL" in third.text
    c.wait_until("nothing is left of it", lambda: not any(alive(pid) for pid in below))
    assert "the job has failed" not in third.text
    [ended] = [event for event in control_events(c) if event.name == "RoundEnded"]
    assert "n3: its runner was killed by SIGKILL" in ended.text
    assert "node left" in ended.text
    assert [r["WORLD_SIZE"] for r in c.wait_for_round(1, workers=2)] == ["2", "2"]
    c.finish()
    assert exit_codes(others) == [0, 0]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("start", "environ", "restarts"),
    [
        pytest.param("--warm=torch", WARM, 2, id="warm"),
        pytest.param("--warm", {}, 20, id="warm, twenty", marks=pytest.mark.campaign),
        pytest.param("", {}, 20, id="cold, twenty", marks=pytest.mark.campaign),
    ],
)
def test_many_restarts_in_a_row_all_initialise(
    c: Cluster, start: str, environ: dict[str, str], restarts: int
) -> None:
    """2 nodes, gloo: each attempt has a store that no other attempt has used."""
    flags = (*start.split(), f"--max-restarts={restarts}", "--restart-backoff=0")
    args = (f"die={restarts}",)
    how = {"nnodes": "2", "worker": "all_reduce.py", "args": args, "environ": environ}
    nodes = [c.start_node(f"n{i}", *flags, **how) for i in (1, 2)]  # type: ignore[arg-type]
    last = c.wait_until(
        "the last restart is up",
        lambda: [r for r in c.all_reports() if r["TORCHELASTIC_RESTART_COUNT"] == str(restarts)],
        timeout_s=800,
    )
    assert last
    c.finish()
    assert exit_codes(nodes) == [0, 0]
    by_attempt = [r["TORCHELASTIC_RESTART_COUNT"] for r in c.all_reports()]
    assert {attempt: by_attempt.count(attempt) for attempt in set(by_attempt)} == {
        str(attempt): 2 for attempt in range(restarts + 1)
    }
    assert {r["callers"] for r in c.all_reports()} == {1, 2}
