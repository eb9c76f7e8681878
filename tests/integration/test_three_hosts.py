"""An operator's day: three hosts with rdzv-agent, one with rdzvd, and submitted jobs.

Each host is a separate network namespace.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import alive
from hosts import HOSTS, Hosts, need_root, three_hosts

pytestmark = need_root


@pytest.fixture(name="hosts")
def _hosts(tmp_path: Path) -> Iterator[Hosts]:
    with three_hosts(tmp_path) as found:
        yield found


def test_jobs_of_two_users_run_in_the_promised_order(hosts: Hosts) -> None:
    hosts.submit("ada-1", "2")
    first = hosts.wait_running("ada-1", 2)
    hosts.submit("bob-1", "2")
    hosts.submit("ada-2", "1")
    hosts.submit("bob-2", "1", "--priority=1", "--labels=host=n1")
    free = next(host for host in HOSTS if host not in hosts.seated("ada-1"))
    assert f"1 is free ({free})" in str(hosts.status("bob-1").reason)
    # One node is free, and ada-2 needs only one: but bob-1 was there before, and could use it.
    assert f"{free}: kept for bob-1" in str(hosts.status("ada-2").reason)
    hosts.restart_server()
    assert hosts.wait_running("ada-1", 2) == first
    hosts.end_of("ada-1").touch()
    # n1 goes to the more urgent job; of the others bob-1 is first, and gets the remaining two.
    hosts.wait_running("bob-2", 1)
    hosts.wait_running("bob-1", 2)
    assert hosts.seated("bob-2") == ["n1"]
    assert hosts.seated("bob-1") == ["n2", "n3"]
    assert hosts.started("ada-2") == []
    for name in ("bob-2", "bob-1", "ada-2"):
        hosts.end_of(name).touch()
    for name in ("ada-1", "bob-2", "bob-1", "ada-2"):
        hosts.ctl("wait", name)
    assert hosts.status("bob-1").state == hosts.status("ada-2").state == "succeeded"


def test_a_day_with_rdzvctl(hosts: Hosts) -> None:
    hosts.submit("night", "2")
    before = hosts.wait_running("night", 2)
    follow = hosts.start_ctl("follow", "logs", "night", "-f", "--rank=1")
    hosts.wait("the first line", lambda: "rank 1 round 0 step 0\n" in follow.text)

    hosts.restart_server()
    assert hosts.wait_running("night", 2) == before

    hosts.wait("all agents are back", lambda: hosts.connected() == len(HOSTS))
    hosts.ctl("cordon", "n3", "--reason=fan")
    hosts.ctl("scale", "night", "2:3")
    shown = hosts.status("night")
    assert (shown.min_nodes, shown.max_nodes) == (2, 3)
    assert hosts.wait_running("night", 2) == before
    hosts.restart_server()
    assert "fan" in hosts.ctl("nodes")
    hosts.ctl("uncordon", "n3")
    grown = hosts.wait_running("night", 3)

    hosts.ctl("scale", "night", "2")
    hosts.wait_running("night", 2)
    assert not any(alive(pid) for pid in grown)
    free = next(host for host in HOSTS if host not in hosts.seated("night"))
    hosts.submit("beside", "1")
    hosts.wait_running("beside", 1)
    assert hosts.seated("beside") == [free]

    rounds = hosts.status("night").round
    assert rounds is not None
    hosts.ctl("restart", "night")
    hosts.wait("the next round runs", lambda: hosts.status("night").round == rounds + 1)
    hosts.wait_running("night", 2)
    assert hosts.status("night").restarts == 0

    hosts.restart_server()
    hosts.ctl("stop", "night")
    hosts.ctl("wait", "night", expect=3)
    follow.wait()
    # From the beginning of the round on, over rounds and servers, and to the last line.
    assert f"rank 1 round {rounds + 1} step 0\n" in follow.text
    assert f"rank 1 round {rounds + 1}: saved\n" in follow.text
    # Also after the job's end, from the nodes that ran it.
    assert "saved" in hosts.ctl("logs", "night", "--rank=0")

    hosts.end_of("beside").touch()
    hosts.ctl("wait", "beside")
    hosts.submit("broken", "1", script_args=("exit=7",))
    hosts.end_of("broken").touch()
    hosts.ctl("wait", "broken", expect=1)
    assert "exit code 7" in hosts.ctl("status", "broken")


def test_a_node_that_dies_is_replaced_and_the_queue_goes_on(hosts: Hosts) -> None:
    hosts.submit("night", "2")
    hosts.wait_running("night", 2)
    lost = hosts.seated("night")[1]
    os.kill(hosts.agent(lost).process.pid, signal.SIGKILL)
    hosts.wait("it is replaced", lambda: lost not in hosts.seated("night"))
    hosts.wait_running("night", 2)
    assert hosts.status("night").restarts == 0
    hosts.end_of("night").touch()
    hosts.ctl("wait", "night")
