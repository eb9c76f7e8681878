"""A worker falls silent: it is found, all stacks are taken and kept, and the job recovers.

With real py-spy on real processes.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from cluster import JOB, Cluster, alive


def stacks(c: Cluster, *options: str) -> dict[str, Any]:
    done = c.run("rdzvctl", "--server", c.endpoint, "stacks", JOB, "-o", "json", *options)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert isinstance(document, dict)
    return document


def test_what_two_nodes_are_doing_one_of_them_warm(c: Cluster) -> None:
    """Also of a stopped worker, which stays stopped."""
    c.start_node("n1", worker="steps.py", nnodes="2", nproc=2)
    c.start_node("n2", "--warm=json", worker="steps.py", nnodes="2", nproc=1)
    reports = c.wait_for_round(0, workers=3)

    def all_known() -> bool:
        return [len(one["threads"]) for one in stacks(c)["stacks"]] == [1, 1, 1]

    c.wait_until("all three have frames", all_known)
    os.kill(reports[1]["pid"], signal.SIGSTOP)
    found = stacks(c, "--raw")
    assert found["silent"] == []
    states = {one["rank"]: one["state"] for one in found["stacks"]}
    assert states[1] == "T"
    assert {0: reports[0]["pid"], 1: reports[1]["pid"], 2: reports[2]["pid"]} == {
        one["rank"]: one["pid"] for one in found["stacks"]
    }
    for one in found["stacks"]:
        names = [(Path(f["file"]).name, f["name"]) for f in one["threads"][0]["frames"]]
        assert ("steps.py", "<module>") in names, found
    (stopped,) = (group for group in found["groups"] if group["ranks"] == [1])
    assert stopped["where"].startswith("stopped by a signal, in ")
    text = c.run("rdzvctl", "--server", c.endpoint, "stacks", JOB).stdout
    assert "\nRANK 1 stopped by a signal, in " in text
    assert f"RANK 1 on n1, LOCAL_RANK 1, pid {reports[1]['pid']}, state T" in text
    os.kill(reports[1]["pid"], signal.SIGCONT)
    c.finish()
    assert [node.wait() for node in c.nodes] == [0, 0]
    refused = c.run("rdzvctl", "--server", c.endpoint, "stacks", JOB)
    assert refused.returncode == 1
    assert "has no workers now" in refused.stderr


def test_a_worker_that_hangs_ends_its_round_and_the_job_goes_on(c: Cluster) -> None:
    for name in ("n1", "n2"):
        options = ("--max-restarts=1", "--hang-timeout=5", "--rdzv-conf=failure_stop_timeout=1")
        c.start_node(name, *options, worker="steps.py", nnodes="2")
    reports = c.wait_for_round(0, workers=2)
    c.wait_until("both have steps", lambda: len(c.status().progress) == 2)
    hung = reports[1]["pid"]
    os.kill(hung, signal.SIGSTOP)
    c.wait_for_round(1, workers=2)
    assert not alive(hung)
    status = c.status()
    assert (status.round, status.restarts, status.state) == (1, 1, "running")
    assert status.last_failure is not None
    cause = status.last_failure.root_cause
    assert (cause.rank, cause.pid, cause.exit_code, cause.signal) == (1, hung, None, None)
    assert cause.message is not None
    assert "; RANK 1 stopped by a signal, in " in cause.message
    assert "(RANK 1: no progress reported for " in cause.message
    assert ", in <module>" in (cause.traceback or "")
    text = c.run("rdzvctl", "--server", c.endpoint, "status", JOB).stdout
    assert "  how          it hung\n" in text
    kept = stacks(c, "--round=0")
    assert kept["reason"].startswith("it hung: RANK 1: no progress reported for ")
    assert {one["rank"]: one["state"] for one in kept["stacks"]}[1] == "T"
    c.kill_server()
    c.start_server()
    c.wait_until("the nodes are back", lambda: c.status().state == "running")
    assert stacks(c, "--round=0")["groups"] == kept["groups"]
    c.finish()
    assert [node.wait() for node in c.nodes] == [0, 0]
    (node,) = {n.name for n in c.nodes if n.name == cause.node_id}
    log = next(n.text for n in c.nodes if n.name == node)
    assert f"RANK 1 (pid {hung}) hangs: no progress reported for " in log


@pytest.mark.slow
def test_a_rank_that_the_others_wait_for_is_named_by_when_it_enters_collectives(c: Cluster) -> None:
    """A plain script of torch, which reports nothing: both make the same steps."""
    config = c.folder / "rdzvd.toml"
    config.write_text("progress.straggler_after = 1\n")
    c.kill_server()
    c.start_server(f"--config={config}")
    c.start_node("n1", worker="lockstep.py", nnodes="1", nproc=2)
    c.wait_for_state("running")
    (found,) = c.wait_until("one straggles", lambda: c.status().stragglers, 200)
    assert (found.rank, found.step_s) == (1, None)
    assert (found.late_ms or 0) > 10
    assert (found.wait_share or 0) > 0.06
    text = c.run("rdzvctl", "--server", c.endpoint, "status", JOB).stdout
    assert "straggling   RANK 1 (" in text
    assert " after the others (" in text
    said = c.run("rdzvctl", "--server", c.endpoint, "report", JOB, "-o", "json").stdout
    ledger = json.loads(said)["ledger"]
    assert not ledger["steps_reported"]
    # Its imports are no training, although it reports no step.
    assert ledger["phases"]["starting"] > 500
    assert ledger["phases"]["training"] > 0
    (c.folder / "hurry").touch()
    c.wait_until("it has caught up", lambda: not c.status().stragglers)
    c.finish()
    assert c.nodes[0].wait() == 0
