"""Standbys: when a node without a seat starts its workers in advance, and what becomes of them.

The stories drive the pure core as those of `test_agent_parking` do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from unittest import mock

import pytest

from rdzv.agent.core import events
from rdzv.agent.core.commands import (
    EndKept,
    Exit,
    SayJoin,
    StartStandby,
    StartWorkers,
    StopWorkers,
)
from rdzv.agent.core.environ import without_round
from rdzv.agent.core.model import JobTerms, Phase
from rdzv.agent.job.round import LocalRound
from rdzv.agent.job.standby_workers import StandbyWorkers
from rdzv.agent.runner import requests
from rdzv.core.model import NO_STANDBY, Assignment, KeptWorker, Standby, StandbyState
from rdzv.messages import Joined
from rdzv.structs import replace
from tests.unit.agent.test_agent_machine import (
    CONNECTED,
    JOB,
    RUNNER_LOST,
    Node,
    closed,
    ended,
    line,
    signalled,
)

HOT = replace(JOB, keep_timeout_ms=10_000, park_timeout_ms=60_000, standby="hot")
PARKED = (KeptWorker(0, pid=200), KeptWorker(1, pid=201))
READY = Standby(StandbyState.READY, memory_bytes=1 << 28)
STARTING = Standby(StandbyState.STARTING)


def joined(script: str = "abc", renewed: int = 0) -> Joined:
    return Joined("job-7", "r1", 1, None, script, renewed)


def waiting(job: JobTerms = HOT) -> Node:
    node = Node(job)
    node.hear(CONNECTED, joined(""))
    return node


def starting() -> Node:
    node = waiting()
    node.hear(joined())
    return node


def ready() -> Node:
    node = starting()
    node.hear(events.StandbySettled(READY, PARKED))
    return node


def test_they_start_once_the_script_has_shown_that_it_can_have_some() -> None:
    node = waiting()
    assert node.hear(joined("")) == []
    start, say = node.hear(joined())
    assert start == StartStandby("abc")
    assert isinstance(say, SayJoin)
    assert say.standby == STARTING
    assert node.hear(joined()) == []  # Told again, as with each join.
    (say,) = node.hear(events.StandbySettled(READY, PARKED))
    assert isinstance(say, SayJoin)
    assert (say.standby, say.kept) == (READY, ())
    assert node.hear(joined()) == []
    # Their costs, once measured, are news once.
    costs = events.StandbySettled(replace(READY, cpus=0.1), PARKED)
    assert [type(one) for one in node.hear(costs)] == [SayJoin]
    assert node.hear(costs) == []


@pytest.mark.parametrize(
    ("job", "why"),
    [
        (replace(HOT, standby="cold"), "--standby=cold"),
        (replace(HOT, keep_timeout_ms=0), "--keep-timeout=0"),
    ],
)
def test_a_node_that_may_have_none_says_so_once(job: JobTerms, why: str) -> None:
    node = waiting(job)
    (say,) = node.hear(joined())
    assert isinstance(say, SayJoin)
    assert say.standby == Standby(StandbyState.OFF, why)
    assert node.hear(joined()) == []


def test_those_that_cannot_start_are_tried_again_with_another_script_only() -> None:
    node = starting()
    (say,) = node.hear(events.StandbySettled(Standby(why="no")))
    assert isinstance(say, SayJoin)
    assert say.standby == Standby(why="no")
    assert node.hear(joined()) == []
    assert node.hear(joined("def"))[0] == StartStandby("def")


def test_a_seat_takes_them_and_the_next_wait_starts_new_ones() -> None:
    node = ready()
    (start,) = node.hear(line())
    assert isinstance(start, StartWorkers)
    assert node.state.standby == READY
    assert node.state.kept == ()
    node.hear(events.WorkersGone(0))
    assert node.state.standby == NO_STANDBY
    assert node.hear(line(0)) == []


def test_a_seat_that_comes_too_early_waits_for_them() -> None:
    node = starting()
    node.hear(line())
    assert node.hear(events.StandbySettled(READY, PARKED)) == []
    assert (node.state.standby, node.state.kept) == (READY, ())


@pytest.mark.parametrize("news", [joined("def"), joined(renewed=3)], ids=["script", "restart"])
def test_outdated_ones_end_and_new_ones_start(news: Joined) -> None:
    node = ready()
    assert node.hear(news) == [EndKept(HOT.failure_stop_timeout_ms)]
    for pid in (200, 201):
        assert node.hear(events.KeptExited(pid - 200, pid, None, 15)) == []
    (say,) = node.hear(events.KeptGone())
    assert isinstance(say, SayJoin)
    assert say.standby == NO_STANDBY
    assert node.hear(news)[0] == StartStandby(news.script)


def test_workers_that_a_round_has_left_behind_make_room_for_standbys() -> None:
    node = waiting()
    node.hear(line())
    node.hear(ended(), events.WorkersGone(0, kept=PARKED))
    assert node.state.kept == PARKED
    assert node.hear(joined("")) == []
    assert node.hear(joined()) == [EndKept(HOT.failure_stop_timeout_ms)]
    node.hear(events.KeptGone())
    assert node.hear(joined())[0] == StartStandby("abc")


def test_a_round_of_new_processes_takes_none_that_were_started_before() -> None:
    node = ready()
    node.hear(line(4, renewed=4))
    assert node.state.standby == NO_STANDBY


def test_they_do_not_end_after_the_park_timeout() -> None:
    node = ready()
    assert node.wait(10 * HOT.park_timeout_ms) == []
    assert node.state.kept == PARKED


def test_one_that_ends_ends_the_others() -> None:
    node = ready()
    end, say = node.hear(events.KeptExited(1, 201, None, 9))
    assert end == EndKept(HOT.failure_stop_timeout_ms)
    assert isinstance(say, SayJoin)
    assert say.standby == NO_STANDBY
    node.hear(events.KeptExited(0, 200, None, 15))
    (say,) = node.hear(events.KeptGone())
    assert isinstance(say, SayJoin)
    assert say.standby == Standby(why="local_rank 1 had parked, and ended with signal 9")
    assert node.hear(joined()) == []
    assert len(node.wait(60_000)) == 1  # A join, which is answered so:
    assert node.hear(joined())[0] == StartStandby("abc")
    assert not any(isinstance(one, SayJoin) for one in node.wait(600_000))


@pytest.mark.parametrize("begin", [starting, ready])
@pytest.mark.parametrize("end", [signalled(), closed()], ids=["signal", "closed"])
def test_a_node_leaves_once_they_have_ended(begin: Callable[[], Node], end: events.Event) -> None:
    node = begin()
    assert any(isinstance(one, EndKept) for one in node.hear(end))
    assert node.state.phase is not Phase.ENDED
    node.hear(events.StandbySettled(NO_STANDBY))
    assert isinstance(node.hear(events.KeptGone())[-1], Exit)


def test_those_of_a_round_that_is_over_before_it_began_here_end() -> None:
    """Another round would take them for workers that its own script has made."""
    asked: list[object] = []
    job = mock.MagicMock()
    job.runner.ask = asked.append
    job.decisions.state = ready().state
    LocalRound(job, line()).stop_workers(StopWorkers(1, 0))
    assert [type(one) for one in asked] == [EndKept, StopWorkers]
    asked.clear()
    job.decisions.state = waiting().state
    LocalRound(job, line()).stop_workers(StopWorkers(1, 0))
    assert [type(one) for one in asked] == [StopWorkers]


@pytest.mark.parametrize(("assigned", "ends"), [(line(), False), (line(renewed=3), True)])
async def test_a_round_that_begins_ends_outdated_ones_even_if_it_starts_nothing(
    assigned: Assignment, ends: bool
) -> None:
    """They would be taken for those of the next wait."""
    node, job = starting(), mock.MagicMock()
    node.hear(assigned)
    job.decisions.state, job.ready = node.state, asyncio.Event()
    job.tasks.start = lambda task, _name: asyncio.ensure_future(task)
    job.launch.job = HOT
    job.standby = StandbyWorkers(job)
    job.standby.begin("abc")
    begun = LocalRound(job, assigned)
    begun.begin()
    begun.cancel()
    asked = [call.args[0] for call in job.runner.ask.mock_calls]
    assert asked == ([requests.EndKept(HOT.failure_stop_timeout_ms)] if ends else [])
    told = [call.args[0].standby.state for call in job.post.mock_calls]
    assert told == ([StandbyState.COLD] if ends else [])
    job.standby.cancel()


async def test_the_rounds_store_is_served_while_standbys_are_starting() -> None:
    """Peers connect to it, and the round ends if it is not ready within a minute."""
    job, told = mock.MagicMock(), asyncio.Event()
    job.unready = ""
    job.ready.wait = job.observers.snapshot_file.begin_round = mock.AsyncMock()
    job.workers.open_round = mock.AsyncMock(return_value=((), []))
    job.store_socket.take().getsockname.return_value = ("", line().master_port)
    job.runner.start_store_host = lambda *_: told.set()
    job.standby.settled = asyncio.Event().wait
    job.tasks.start = lambda task, _name: asyncio.ensure_future(task)
    begun = LocalRound(job, line(group_rank=0))
    begun.begin()
    async with asyncio.timeout(10):
        await told.wait()
    assert not job.runner.start_workers.called
    begun.cancel()


def test_without_a_runner_there_are_none() -> None:
    node = ready()
    node.hear(RUNNER_LOST)
    assert (node.state.standby, node.state.kept) == (NO_STANDBY, ())


def test_what_a_round_decides_is_a_word_and_all_else_stays() -> None:
    environ = {"RANK": "3", "MASTER_PORT": "29500", "LOCAL_RANK": "1", "PATH": "/bin"}
    found = without_round(environ)
    assert (found["RANK"], found["WORLD_SIZE"], found["MASTER_PORT"]) == ("standby",) * 3
    assert (found["LOCAL_RANK"], found["PATH"]) == ("1", "/bin")
