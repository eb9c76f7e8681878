"""A server notes a round's first step, the last lost step redone, and its last step: once each."""

from __future__ import annotations

import pytest

from rdzv.core.commands import Fail, Join
from rdzv.core.evidence.progress_lag import RankProgress
from rdzv.core.model import Assignment, Moved, Settings
from rdzv.messages import Arrivals, GroupArrivals, Progress, RankArrivals
from rdzv.server.sessions.streams import Stream
from rdzv.stores.memory import MemoryStore
from rdzv.view.answers import event_in
from rdzv.view.ledger import Ledger, ledgers_of
from tests.support.builders import report
from tests.support.driven import FakeClock, Server, join, running, server, settle

SETTINGS = Settings(2, 2, max_restarts=3)
FACTS = ("FirstCollectiveMade", "FirstStepMade", "LostStepsRedone", "LastStepMade")


def said(step: int, number: int, rank: int = 0, age_ms: int = 0) -> Progress:
    return Progress("job-7", "run-1", number, (RankProgress(rank, step, age_ms, 1.0),))


async def hear(s: Server, stream: Stream, command: Join | Fail) -> None:
    await s.hear(stream, command)
    await settle()


async def facts(s: Server) -> list[tuple[str, dict[str, object]]]:
    rows = [event_in(row) for row in await s.driver.history.of("job-7", 1_000)]
    return [(row.name, row.fields or {}) for row in rows if row.name in FACTS]


async def ledger(s: Server) -> Ledger:
    rows = [event_in(row) for row in await s.driver.history.of("job-7", 1_000)]
    (found,) = ledgers_of(rows, s.clock.now_ms())
    return found


async def test_the_steps_that_a_ledger_needs_are_noted_once() -> None:
    async with server() as s:
        n1, n2 = await s.connect("n1"), await s.connect("n2")
        for node in (n1, n2):
            await hear(s, node, join(node, settings=SETTINGS))
        await s.clock.advance(3_000)
        s.report(n2, said(1, 0, rank=2, age_ms=200))
        for step in range(2, 41):
            await s.clock.advance(100)
            s.report(n1, said(step, 0))
        await s.clock.advance(500)
        failed = report(message="boom", pid=99, at_ms=s.clock.now_ms() - 150)
        await hear(s, n1, Fail("n1", n1.incarnation, "run-1", 0, (failed,)))
        assert await facts(s) == [
            ("FirstStepMade", {"round": 0, "node_id": "n2", "rank": 2, "step": 1, "age_ms": 200}),
            ("LastStepMade", {"round": 0, "step": 40, "age_ms": 500}),
        ]
        for node in (n1, n2):
            again = join(node, settings=SETTINGS, run="run-1", left_round=0, moved=Moved(41))
            await hear(s, node, again)
        await s.clock.advance(2_000)
        s.report(n1, said(31, 1))
        await s.clock.advance(1_000)
        # One report a second: the lost step was reached between two of them.
        s.report(n1, said(51, 1))
        s.report(n1, said(52, 1))
        assert (await facts(s))[2:] == [
            ("FirstStepMade", {"round": 1, "node_id": "n1", "rank": 0, "step": 31, "age_ms": 0}),
            ("LostStepsRedone", {"round": 1, "step": 41, "age_ms": 500}),
        ]
        await s.clock.advance(700)
        found = await ledger(s)
        phases = found.phases
        assert (phases["starting"], phases["loading"], phases["redoing"]) == (2_800, 2_000, 500)
        assert (phases["detecting"], phases["training"]) == (150, 200 + 3_900 + 350 + 500 + 700)
        assert found.steps_redone == 11


async def test_a_server_that_is_restarted_takes_no_later_step_for_the_first() -> None:
    """It notes the first step that it receives; the ledger uses the first note of a round."""
    store, clock = MemoryStore(), FakeClock()
    line = Assignment("job-7", "run-1", 0, 0, 2, 0, 4, 0, 4, "h", 1, False, 0, 0)
    async with server(store, clock) as s:
        n1, _ = await s.pair()
        await clock.advance(1_000)
        s.report(n1, said(1, 0))
        await clock.advance(9_000)
    async with server(store, clock) as s:
        n1 = await s.connect("n1", running(n1, line), incarnation=n1.incarnation)
        s.report(n1, said(90, 0, age_ms=100))
        assert [fields["step"] for _, fields in await facts(s)] == [1, 90]
        phases = (await ledger(s)).phases
        assert (phases["starting"], phases["training"]) == (1_000, 9_000)


def arrived(number: int, entered_ms: int, error_us: int | None = 500) -> Arrivals:
    first, second = 1_000 * entered_ms, 1_000 * entered_ms + 9_000
    ranks = (RankArrivals(0, (first,)), RankArrivals(1, (second,)))
    group = GroupArrivals("0", 2.0, error_us, (7,), ranks)
    return Arrivals("job-7", "run-1", number, (group,))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("entered_ago_ms", "error_us", "age_ms"),
    [
        pytest.param(400, 500, 400, id="by the server's clock"),
        pytest.param(400, None, 0, id="no clock"),
        pytest.param(10**7, 500, 0, id="too old"),
        pytest.param(-400, 500, 0, id="in the future"),
    ],
)
async def test_the_first_collective_of_a_round_is_noted_once(
    entered_ago_ms: int, error_us: int | None, age_ms: int
) -> None:
    async with server() as s:
        n1, n2 = await s.connect("n1"), await s.connect("n2")
        for node in (n1, n2):
            await hear(s, node, join(node, settings=SETTINGS))
        await s.clock.advance(2_000)
        s.report(n1, arrived(1, 0))
        assert await facts(s) == []
        entered_ms = s.clock.now_ms() - entered_ago_ms
        for number in (0, 0):
            s.report(n1, arrived(number, entered_ms, error_us))
        noted = ("FirstCollectiveMade", {"round": 0, "node_id": "n1", "age_ms": age_ms})
        assert await facts(s) == [noted]
        await s.clock.advance(1_000)
        found = await ledger(s)
        assert found.phases["starting"] == 2_000 - age_ms
        assert found.phases["training"] == 1_000 + age_ms
        assert not found.steps_reported
