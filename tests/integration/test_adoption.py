"""A server that restarts with no memory, or an old one, adopts the jobs that its nodes run."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

from cluster import JOB, Cluster, alive

from rdzv.client import ControlClient, parse_endpoint
from rdzv.errors import UnknownJobError


def events(c: Cluster) -> list[str]:
    """Return the events of the job that this server knows; earlier ones are unknown to it."""
    with ControlClient(parse_endpoint(c.endpoint)) as client, suppress(UnknownJobError):
        return [event.name for event in client.events(JOB)]
    return []


def test_a_server_without_memory_goes_on_with_the_round_that_its_nodes_run(c: Cluster) -> None:
    c.kill_server()
    c.start_server("--store=memory")
    nodes = [c.start_node(f"n{i}", "--max-restarts=3") for i in (1, 2, 3)]
    first = c.wait_for_round(0, workers=3)
    os.kill(int(first[0]["pid"]), signal.SIGKILL)
    before = c.wait_for_round(1, workers=3)
    run = c.status().run
    c.kill_server()
    c.start_server("--store=memory")
    c.wait_until("all are adopted", lambda: events(c).count("NodeAdopted") == 3)
    status = c.wait_for_state("running")
    assert (status.run, status.round, status.restarts) == (run, 1, 1)
    assert [node.state for node in status.nodes] == ["seated"] * 3
    assert all(alive(int(report["pid"])) for report in before)
    os.kill(int(before[1]["pid"]), signal.SIGKILL)
    after = c.wait_for_round(2, workers=3)
    assert {report["TORCHELASTIC_RESTART_COUNT"] for report in after} == {"2"}
    c.finish()
    assert [node.wait() for node in nodes] == [0, 0, 0]
