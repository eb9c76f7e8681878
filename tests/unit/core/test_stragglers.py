"""A worker straggles that is much slower than the others of its role at every look for a while."""

from __future__ import annotations

import logging

import pytest

from rdzv.core.stragglers import Pace, Sample, follow
from rdzv.server.messages import Progress, RankProgress
from rdzv.server.sessions.streams import Stream
from tests.unit.server.test_driver import FakeClock, Server, server

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
    assert list(follow(Pace(), samples, 0, AFTER_MS).slow_since_ms) == slow
    assert list(follow(Pace(), samples, 0, 0).stragglers) == slow


def test_it_straggles_once_it_was_slow_for_a_while_and_until_it_has_caught_up() -> None:
    pace, told = Pace(), []
    steps_s = [3, 3, 3, 1, 3, 3, 3, 3, 1.8, 1.8, 1.4, 1.8, 1.8]
    for at, step_s in enumerate(steps_s):
        pace = follow(pace, group(1.0, 1.0, step_s), at * 20_000, AFTER_MS)
        told.append(sorted(pace.stragglers))
    assert told == [[]] * 7 + [[2]] * 3 + [[]] * 3


def test_who_says_nothing_any_more_does_not_straggle() -> None:
    pace = follow(Pace(), group(1.0, 3.0), 0, 0)
    assert list(pace.stragglers) == [1]
    assert follow(pace, group(1.0), 1, 0) == Pace()


# ------------------------------------------------------------------ at the server


def say(s: Server, stream: Stream, first: int, *rates: float, age_ms: int = 0) -> None:
    ranks = tuple(RankProgress(first + place, 7, age_ms, rate) for place, rate in enumerate(rates))
    s.driver.reports.note_progress(stream, Progress("job-7", "run-1", 0, ranks))


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
            (found,) = s.driver.views.stragglers("job-7")
            assert (found.rank, found.step_s, found.median_s) == (3, 2.0, 0.5)
            assert s.driver.figures().straggling(s.driver.jobs.peek("job-7")) == 1  # type: ignore[arg-type]
            say(s, n2, 2, 2.0, 2.0)
            await clock.advance(5_000)
            say(s, n1, 0, 2.0, 2.0)
        assert s.driver.views.stragglers("job-7") == ()
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
        assert s.driver.views.stragglers("job-7") == ()
        assert s.driver.diagnosis.stragglers.jobs
        s.driver.connections.detach(n1)
        await clock.advance(60_000)
        assert s.driver.diagnosis.stragglers.jobs == 0
