"""A worker straggles if it is much slower than its role's others at each sample for a while."""

from __future__ import annotations

import logging

import pytest

from rdzv.core.evidence.progress_lag import RankProgress
from rdzv.core.evidence.stragglers import Pace, Sample, follow_rates
from rdzv.errors import InvalidRequestError
from rdzv.messages import Arrivals, GroupArrivals, Progress, RankArrivals
from rdzv.server.sessions.streams import Stream
from rdzv.view.answers import event_in
from tests.support.driven import FakeClock, Server, server, settle

AFTER_MS = 60_000


def group(*steps_s: float, role: str = "default", first: int = 0) -> list[Sample]:
    return [Sample(first + place, role, step_s) for place, step_s in enumerate(steps_s)]


@pytest.mark.parametrize(
    ("samples", "slow"),
    [
        pytest.param([], [], id="nobody"),
        pytest.param(group(9.0), [], id="one alone"),
        pytest.param(group(1.0, 2.0), [], id="just twice as long"),
        pytest.param(group(1.0, 2.1), [1], id="of two, the slower one"),
        pytest.param(group(1.0, 1.1, 0.9, 5.0), [3], id="one of four"),
        pytest.param(group(5.0, 5.0, 1.0), [], id="most are slow: then that is the pace"),
        pytest.param(group(1.0, 1.0, 1.0, 3.0, 4.0), [3, 4], id="two of five"),
        pytest.param(
            [*group(1.0, 1.0), *group(9.0, 9.0, role="reader", first=2)], [], id="by role"
        ),
        pytest.param(
            [*group(1.0, 1.0), *group(9.0, 30.0, role="reader", first=2)], [3], id="in its role"
        ),
    ],
)
def test_who_is_slow(samples: list[Sample], slow: list[int]) -> None:
    assert list(follow_rates(Pace(), samples, 0, AFTER_MS).slow_since_ms) == slow
    assert list(follow_rates(Pace(), samples, 0, 0).stragglers) == slow


def test_it_straggles_once_it_was_slow_for_a_while_and_until_it_has_caught_up() -> None:
    pace, told = Pace(), []
    steps_s = [3, 3, 3, 1, 3, 3, 3, 3, 1.8, 1.8, 1.4, 1.8, 1.8]
    for at, step_s in enumerate(steps_s):
        pace = follow_rates(pace, group(1.0, 1.0, step_s), at * 20_000, AFTER_MS)
        told.append(sorted(pace.stragglers))
    assert told == [[]] * 7 + [[2]] * 3 + [[]] * 3


def test_who_says_nothing_any_more_does_not_straggle() -> None:
    pace = follow_rates(Pace(), group(1.0, 3.0), 0, 0)
    assert list(pace.stragglers) == [1]
    assert follow_rates(pace, group(1.0), 1, 0) == Pace()


# ------------------------------------------------------------------ at the server


def say(s: Server, stream: Stream, first: int, *rates: float, age_ms: int = 0) -> None:
    ranks = tuple(RankProgress(first + place, 7, age_ms, rate) for place, rate in enumerate(rates))
    s.report(stream, Progress("job-7", "run-1", 0, ranks))


async def test_it_is_named_once_with_its_pace_and_once_when_it_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = FakeClock()
    async with server(clock=clock) as s:
        n1, n2 = await s.pair()
        with caplog.at_level(logging.INFO, "rdzv.events"):
            for _ in range(20):
                say(s, n1, 0, 2.0, 2.0)
                say(s, n2, 2, 2.0, 0.5)
                await clock.advance(5_000)
                s.driver.connections.heard(n1)
                s.driver.connections.heard(n2)
            (found,) = s.driver.rounds.stragglers(s.state("job-7"))
            assert (found.rank, found.step_s, found.median_s) == (3, 2.0, 0.5)
            assert found.age_ms == 95_000
            say(s, n2, 2, 2.0, 2.0)
            await clock.advance(5_000)
            say(s, n1, 0, 2.0, 2.0)
        assert s.driver.rounds.stragglers(s.state("job-7")) == ()
        await settle()
        rows = [event_in(row) for row in await s.driver.history.of("job-7", 1_000)]
        told = [(row.name, row.fields["rank"]) for row in rows if row.name.startswith("Rank")]
        assert told == [("RankStraggles", 3), ("RankCaughtUp", 3)]
        lines = [r.getMessage() for r in caplog.records if "straggles" in r.getMessage()]
        assert lines == [
            "job-7: RANK 3 on n2 straggles: 2 s a step, where the median is 0.5 s",
            "job-7: RANK 3 on n2 no longer straggles",
        ]


async def test_a_silent_one_is_not_slow_and_a_round_that_is_over_is_forgotten() -> None:
    clock = FakeClock()
    async with server(clock=clock) as s:
        n1, n2 = await s.pair()
        for _ in range(20):
            say(s, n1, 0, 2.0, 2.0)
            say(s, n2, 2, 2.0, 0.5, age_ms=100_000)
            await clock.advance(5_000)
            s.driver.connections.heard(n1)
            s.driver.connections.heard(n2)
        assert s.driver.rounds.stragglers(s.state("job-7")) == ()
        assert s.driver.rounds.find(s.state("job-7"))
        s.driver.connections.detach(n1)
        await clock.advance(60_000)
        assert s.driver.rounds.find(s.state("job-7")) is None


# ------------------------------------------------------------------ by when they enter collectives


def arrive(s: Server, stream: Stream, now_s: int, ranks: dict[int, int], round_: int = 0) -> None:
    """Report ten collectives of five seconds, entered this many milliseconds late by each rank."""
    entered = (
        RankArrivals(rank, tuple(1_000 * (1_000 * now_s + 500 * n + late_ms) for n in range(10)))
        for rank, late_ms in ranks.items()
    )
    sequences = tuple(2 * now_s + n for n in range(10))
    group = GroupArrivals("0", 2.0, 1_000, sequences, tuple(entered))
    s.report(stream, Arrivals("job-7", "run-1", round_, (group,)))


async def test_of_a_lock_step_training_it_is_the_one_that_the_others_wait_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """All have the same rate, and RANK 2 may even have the highest; that does not count."""
    clock = FakeClock()
    async with server(clock=clock) as s:
        n1, n2 = await s.pair()

        async def go_on(late_ms: int, times: int) -> None:
            for _ in range(times):
                now_s = clock.now_ms() // 1_000
                arrive(s, n1, now_s, {0: 0, 1: 1})
                arrive(s, n2, now_s, {2: 2, 3: late_ms})
                say(s, n1, 0, 0.1, 2.0)
                say(s, n2, 2, 2.0, 2.0)
                await clock.advance(5_000)
                s.driver.connections.heard(n1)
                s.driver.connections.heard(n2)

        with caplog.at_level(logging.INFO, "rdzv.events"):
            await go_on(100, 12)
            (found,) = s.driver.rounds.stragglers(s.state("job-7"))
            assert (found.rank, found.late_ms, found.clock_error_ms) == (3, 98.0, 1.0)
            await go_on(3, 12)
        assert s.driver.rounds.stragglers(s.state("job-7")) == ()
        lines = [r.getMessage() for r in caplog.records if "straggles" in r.getMessage()]
        assert lines == [
            "job-7: RANK 3 on n2 straggles: it enters collectives 98 ms after the others (95th "
            "percentile 98 ms, clock error ± 1 ms), which wait for it at least 20% of the time",
            "job-7: RANK 3 on n2 no longer straggles",
        ]


async def test_who_straggled_by_rate_no_longer_does_once_collectives_are_compared() -> None:
    """Workers that wait for each other in collectives all have the same rate."""
    clock = FakeClock()
    async with server(clock=clock) as s:
        n1, n2 = await s.pair()

        async def go_on(times: int, *, recorded: bool) -> None:
            for _ in range(times):
                say(s, n1, 0, 2.0, 2.0)
                say(s, n2, 2, 2.0, 0.5)
                if recorded:
                    now_s = clock.now_ms() // 1_000
                    arrive(s, n1, now_s, {0: 0, 1: 1})
                    arrive(s, n2, now_s, {2: 2, 3: 1})
                await clock.advance(5_000)
                s.driver.connections.heard(n1)
                s.driver.connections.heard(n2)

        await go_on(20, recorded=False)
        assert [one.rank for one in s.driver.rounds.stragglers(s.state("job-7"))] == [3]
        await go_on(2, recorded=True)
        assert s.driver.rounds.stragglers(s.state("job-7")) == ()


async def test_arrivals_of_another_round_or_node_do_not_count() -> None:
    async with server(clock=FakeClock()) as s:
        n1, _ = await s.pair()
        arrive(s, n1, 0, {0: 0, 1: 1}, round_=4)
        with pytest.raises(InvalidRequestError, match=r"arrivals of RANK 2: n1 has RANK 0\.\.1"):
            arrive(s, n1, 0, {0: 0, 2: 1})


async def test_rates_count_again_when_collectives_have_not_been_compared_for_long() -> None:
    clock = FakeClock()
    async with server(clock=clock) as s:
        n1, n2 = await s.pair()
        for at in range(40):
            if at < 3:
                arrive(s, n1, 5 * at, {0: 0, 1: 1})
                arrive(s, n2, 5 * at, {2: 0, 3: 1})
            say(s, n1, 0, 2.0, 2.0)
            say(s, n2, 2, 2.0, 0.5)
            await clock.advance(5_000)
            s.driver.connections.heard(n1)
            s.driver.connections.heard(n2)
            assert at > 20 or not s.driver.rounds.stragglers(s.state("job-7"))
        assert [one.rank for one in s.driver.rounds.stragglers(s.state("job-7"))] == [3]
