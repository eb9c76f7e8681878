"""Random histories of the whole system: whatever fails, it keeps every guarantee, and recovers.

Their number is such that two idle cores need about five seconds; `make campaigns` and `make sim`
run more. A seed that once failed stays here after the fix.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from rdzv.core.fleet import nodes
from rdzv.v1 import rdzv_pb2 as pb
from rdzv.view.answers import Event
from tests.sim.checkers import Judge, SafetyError
from tests.sim.ledgers import with_steps
from tests.sim.loop import Agenda
from tests.sim.network import UP, End, Network
from tests.sim.world import World

ROOT = Path(__file__).parents[2]
HISTORIES = int(os.environ.get("SEEDS", "80"))


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the simulator as by hand, in separate processes."""
    return subprocess.run(
        [sys.executable, "-m", "tests.sim", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "seeds",
    [f"0:{HISTORIES}", pytest.param(f"{HISTORIES}:400", marks=pytest.mark.campaign)],
)
def test_no_history_breaks_a_promise(seeds: str) -> None:
    done = simulate("--seeds", seeds, "--processes", "2")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_seed_is_a_history() -> None:
    one, other = simulate("4711", "--trace"), simulate("4711", "--trace")
    assert one.returncode == 0, one.stdout + one.stderr
    assert one.stdout == other.stdout
    assert "as its rendezvous heard it" in one.stdout


@pytest.mark.parametrize(
    ("latest", "may_go_back"),
    [
        pytest.param(2, True, id="a successor has numbered the node since"),
        pytest.param(1, False, id="nobody has"),
    ],
)
def test_an_incarnation_goes_back_only_at_a_deposed_server(latest: int, may_go_back: bool) -> None:
    failures: list[Exception] = []
    world: Any = SimpleNamespace(count=lambda what: None, log=None, fail=failures.append)
    judge = Judge(world)
    judge.leadership = latest
    server = nodes.Nodes(leadership=1)
    with judge.watching():
        expected = nodes.Expect("n1", (2 << 32) + 1, "old", fence_after_ms=1_000)
        server = nodes.step(server, expected, 0).nodes
        connect = nodes.Connect("n1", "new", nodes.AgentKind.FOREGROUND, "n1.net", 4711, 1)
        (event,) = nodes.step(server, connect, 3_000).events
    assert event.incarnation == (1 << 32) + 1
    assert [type(each) for each in failures] == ([] if may_go_back else [SafetyError])


def test_the_simulated_server_takes_all_that_nodes_say() -> None:
    """A refusal would end the node's part in its job, and so hide all that follows."""
    world, heard = World(4711, only=()), []
    with world.judge.watching():
        world.begin()
        world.run(5_000)
        (agent, *_) = (one for one in world.agents if one.greeted)
        agent.take = lambda connection, message: heard.append(message)  # type: ignore[method-assign]
        for body in set(pb.NodeMessage.DESCRIPTOR.fields_by_name) - {"hello"}:
            message = pb.NodeMessage()
            getattr(message, body).SetInParent()
            agent.say(message)
        world.run(5_000)
    refusals = [one.refused.message for one in heard if one.HasField("refused")]
    assert any("rdzv_id" in said for said in refusals), "an empty message names no job"
    assert not [said for said in refusals if "has no place here" in said]


def test_a_broken_connection_delivers_nothing_after_a_lost_message() -> None:
    """A server would refuse a message whose Hello was lost, which no real stream can deliver."""
    heard: list[Any] = []
    agenda = Agenda()
    network = Network(agenda, Random(0))
    network.latencies_ms = (10,)
    node: Any = SimpleNamespace(name="n1")
    server: Any = SimpleNamespace(number=0, accepting=True, process=None)
    server.take = lambda connection, message: heard.append(message)
    connection = network.connect(node, server)
    assert connection is not None
    network.cut("n1", 0, UP)
    connection.up("hello")
    agenda.run(5, lambda: None)
    connection.up("join")
    agenda.run(12, lambda: None)
    connection.end_by_node(in_order=False)
    agenda.run(20, lambda: None)
    network.mend("n1", 0)
    agenda.run(40, lambda: None)
    assert heard == [End()]


def test_no_step_is_made_up_for_a_run_that_has_not_begun() -> None:
    past = [Event(0, "run-1", name, "", {}) for name in ("NodeNotQuarantined", "RunBegan")]
    stories = [with_steps(past, Random(seed)) for seed in range(20)]
    assert all(story[:2] == past for story in stories)
    assert any(story != past for story in stories)
