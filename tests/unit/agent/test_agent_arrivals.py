"""The times at which workers enter collectives: on the server's clock, alike on each node."""

from __future__ import annotations

import asyncio

import pytest

from rdzv.agent.observers import arrival_watch
from rdzv.agent.observers.arrival_watch import ArrivalWatch, arrivals
from rdzv.agent.observers.collective_records import NoRecordError, RecordReader
from rdzv.agent.observers.flight_records import GroupTimes
from rdzv.agent.observers.server_clock import KEPT, Reading, ServerClock
from rdzv.agent.observers.stack_sampling import Target
from rdzv.messages import Arrivals, GroupArrivals, RankArrivals
from tests.unit.agent.test_agent_adoption import LINE

MS = 1_000_000


def steps(first: int, last: int, late_us: int = 0, *, by_duration: bool = False) -> GroupTimes:
    recorded_us = {n: 100_000 * n + late_us for n in range(first, last + 1)}
    at_us = dict.fromkeys(recorded_us, -50) if by_duration else recorded_us
    return GroupTimes(at_us, recorded_us, by_duration)


def test_what_is_new_is_told_once_by_the_servers_clock() -> None:
    reported: dict[str, int] = {}
    both = {4: {"0": steps(1, 4)}, 5: {"0": steps(1, 5, 7)}}
    (told,) = arrivals(both, reported, 64, Reading(1_000, 30))
    assert told == GroupArrivals(
        "0",
        10.0,
        30,
        (1, 2, 3, 4),
        (
            RankArrivals(4, (101_000, 201_000, 301_000, 401_000)),
            RankArrivals(5, (101_007, 201_007, 301_007, 401_007)),
        ),
    )
    assert arrivals(both, reported, 64, None) == []
    (told,) = arrivals({4: {"0": steps(2, 6)}}, reported, 64, None)
    assert (told.sequences, told.error_us) == ((4, 5, 6), None)


def test_it_is_bounded_and_each_comes_with_the_next() -> None:
    (told,) = arrivals({0: {"0": steps(1, 2_000)}}, {}, 16, None)
    assert 16 <= len(told.sequences) <= 32
    assert all(n - 1 in told.sequences or n + 1 in told.sequences for n in told.sequences)
    assert told.per_second == 10.0


def test_durations_need_no_clock() -> None:
    (told,) = arrivals({0: {"0": steps(1, 3, by_duration=True)}}, {}, 64, Reading(1_000, 30))
    assert (told.error_us, told.ranks[0].entered_us) == (0, (-50, -50, -50))


def test_the_fastest_answer_counts_until_it_is_old() -> None:
    clock = ServerClock()
    assert clock.read(0) is None
    clock.note(0, 10 * MS, 1_000_005_000)
    clock.note(100 * MS, 101 * MS, 1_000_100_500)
    clock.note(200 * MS, 240 * MS, 1_000_220_000)
    assert clock.read(240 * MS) == Reading(1_000_000_500, 1_006)
    # A hundred seconds later it may be off by five more milliseconds.
    assert clock.read(100_101 * MS) == Reading(1_000_000_500, 6_000)
    for _ in range(KEPT):
        clock.note(300 * MS, 320 * MS, 1_000_310_000)
    assert clock.read(320 * MS) == Reading(1_000_000_500, 10_500)
    clock.forget()
    assert clock.read(0) is None


class Reader(RecordReader):
    """Has a record of pid 1 only."""

    async def times(self, file: str, pid: int, timeout_s: float) -> dict[str, GroupTimes]:
        if pid != 1:
            raise NoRecordError("no torch")
        return {"0": steps(1, 9)}


async def test_a_worker_without_a_record_hides_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrival_watch, "LEAST_S", 0.01)
    told: asyncio.Queue[Arrivals] = asyncio.Queue()
    first = LINE.rank_first
    running = {n: Target(first + n, n, n + 1, f"/{n}/progress") for n in range(2)}
    reader = Reader("job", on=True)
    watch = ArrivalWatch("job", reader, running, told.put_nowait, lambda: Reading(0, 1))
    watch.open_round(LINE)
    report = await told.get()
    assert (report.run, report.round) == (LINE.run, LINE.round)
    assert [one.rank for one in report.groups[0].ranks] == [LINE.rank_first]
    watch.close_round()


async def test_a_round_of_one_worker_is_not_watched_nor_any_without_records() -> None:
    off = ArrivalWatch("job", Reader("job", on=False), {}, lambda _: None, lambda: None)
    off.open_round(LINE)
    before = len(asyncio.all_tasks())
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == before == 1
