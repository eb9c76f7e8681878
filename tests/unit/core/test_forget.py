"""Ended jobs are forgotten: at an operator's request, and automatically after a time."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator

import pytest

from rdzv.core import model
from rdzv.core.commands import Fail, Leave, Succeed
from rdzv.core.life import restoring
from rdzv.core.life.restoring import not_after
from rdzv.errors import (
    InvalidRequestError,
    RendezvousConnectionError,
    RendezvousError,
    StoreRefusedError,
    UnknownJobError,
)
from rdzv.runtime.clock import DAY_MS
from rdzv.server.engine.forgetting import PRUNE_EVERY_MS, outlived, refuse_to_forget
from rdzv.server.settings.server_settings import Retention
from rdzv.stores.base import Record, RevisionConflictError, Stored
from rdzv.stores.memory import MemoryStore
from rdzv.structs import as_dict, replace
from tests.support.builders import report
from tests.support.driven import FakeClock, Server, join, last, server, settle

HOUR_MS = PRUNE_EVERY_MS
NOW_MS = 100 * DAY_MS


class DeletingStore(MemoryStore):
    """A store whose deletions can be delayed, and can fail before or after they happen."""

    def __init__(self) -> None:
        super().__init__()
        self.deleted: list[str] = []
        self.before: RendezvousError | None = None
        self.after: RendezvousError | None = None
        self.gate: asyncio.Event | None = None

    async def delete(self, rdzv_id: str, revision: int) -> None:
        if self.gate:
            await self.gate.wait()
        if self.before:
            raise self.before
        await super().delete(rdzv_id, revision)
        self.deleted.append(rdzv_id)
        if self.after:
            raise self.after


@pytest.fixture
def clock() -> FakeClock:
    clock = FakeClock()
    clock.at_ms = NOW_MS
    return clock


@pytest.fixture
def store() -> DeletingStore:
    return DeletingStore()


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """The log lines about forgotten jobs are added to it."""
    seen: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if any(word in record.getMessage() for word in ("forget", "forgot")):
                seen.append(f"{record.levelname} {record.getMessage()}")

    caplog.set_level(logging.INFO, "rdzv.jobs")
    logger = logging.getLogger("rdzv.jobs")
    handler = Lines()
    logger.addHandler(handler)
    yield seen
    logger.removeHandler(handler)


async def stored(store: MemoryStore, rdzv_id: str, ended_at_ms: int | None) -> None:
    ended = (
        None if ended_at_ms is None else model.Ended(model.Result.SUCCEEDED, "done", ended_at_ms)
    )
    membership = model.Membership(rdzv_id, "run", 1, model.Settings(1, 1), 0, ended=ended)
    await store.compare_and_swap(
        rdzv_id, membership, 0, [Record(0, rdzv_id, "run", "RunEnded", "x")]
    )


async def begun(s: Server, rdzv_id: str) -> tuple[str, int, model.Assignment]:
    """Let one node run a round of a job; return its identity and its assignment."""
    stream = await s.connect(f"node-of-{rdzv_id}")
    await s.hear(stream, join(stream, (1, 1)), rdzv_id)
    await settle()
    line = last(stream, model.Assignment)
    return stream.node_id, stream.incarnation, line


async def finished(s: Server, rdzv_id: str = "job-7") -> model.Assignment:
    node_id, incarnation, line = await begun(s, rdzv_id)
    await s.driver.engine.submit(rdzv_id, Succeed(node_id, incarnation, line.run, line.round))
    await settle()
    return line


class CountingStore(DeletingStore):
    """A store that counts the jobs that are read one by one."""

    reads = 0

    async def load(self, rdzv_id: str) -> Stored | None:
        self.reads += 1
        return await super().load(rdzv_id)


async def test_ended_jobs_are_not_read_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    """2,000 of them made a start and each list a second longer."""
    store = CountingStore()
    for number in range(300):
        await stored(store, f"old-{number}", ended_at_ms=1_000)
    await stored(store, "open", None)
    await stored(store, "spoilt", None)
    store.jobs["spoilt"] = (b"{", 1)
    async with server(store) as s:
        assert len(s.driver.jobs.ended) == 300
        assert store.reads == 1
        assert "leaving job spoilt alone: job spoilt in memory cannot be read" in caplog.text
        caplog.clear()
        listed = await s.listed()
        assert store.reads == 1
        assert [view.rdzv_id for view in listed if view.state != "succeeded"] == ["open"]
        assert len(listed) == 301
        assert "not listing job spoilt" in caplog.text


# ---------------------------------------------------------------- at an operator's word


async def test_what_joins_by_a_forgotten_name_is_a_new_job(
    store: DeletingStore, lines: list[str]
) -> None:
    async with server(store) as s:
        for run_number in (1, 2):
            await finished(s)
            assert (await s.status()).run_number == run_number
        await s.driver.forgetting.forget("job-7")
        with pytest.raises(UnknownJobError):
            await s.status()
        assert (await store.list(), await store.history("job-7", 10)) == ((), ())
        assert not s.driver.jobs.in_memory
        assert not s.driver.jobs.ended
        assert (await finished(s)).round == 0
        assert (await s.status()).run_number == 1
    assert lines == ["INFO forgot job job-7: an operator requested it"]


async def test_history_that_waits_for_a_commit_is_forgotten_too(store: DeletingStore) -> None:
    async with server(store) as s:
        await finished(s)
        async with s.driver.jobs.claim("job-7") as job:
            job.pending = (Record(0, "job-7", "run-1", "NodeLeft", "late"),)
        await s.driver.forgetting.forget("job-7")
    assert await store.history("job-7", 10) == ()


async def test_a_job_that_nobody_has_joined_is_not_known(store: DeletingStore) -> None:
    async with server(store) as s:
        with pytest.raises(UnknownJobError, match=r"no job job-7 .*`rdzvctl list`"):
            await s.driver.forgetting.forget("job-7")
        assert not s.driver.jobs.in_memory
    assert store.deleted == []


async def test_a_job_that_has_not_ended_is_not_forgotten(store: DeletingStore) -> None:
    async with server(store) as s:
        node_id, incarnation, line = await begun(s, "job-7")
        with pytest.raises(
            InvalidRequestError,
            match="job-7 is running and cannot be forgotten; stop it first, with `rdzvctl stop ",
        ):
            await s.driver.forgetting.forget("job-7")
        stream = await s.connect("n8")
        await s.hear(stream, join(stream, (2, 2)), "job-8")
        with pytest.raises(InvalidRequestError, match="job job-8 is joining"):
            await s.driver.forgetting.forget("job-8")
        assert (await s.status()).state == "running"
        leave = Leave(node_id, incarnation, line.run, model.LeaveCause.SIGNAL, "bye")
        await s.driver.engine.submit("job-7", leave)
        with pytest.raises(InvalidRequestError, match="job job-7 is stopping"):
            await s.driver.forgetting.forget("job-7")
        await s.driver.engine.submit("job-7", replace(leave, left_round=line.round))
        await s.driver.forgetting.forget("job-7")
    assert store.deleted == ["job-7"]


def test_a_job_that_somebody_is_in_is_not_forgotten() -> None:
    ended = model.Ended(model.Result.STOPPED, "an operator said so", NOW_MS)
    membership = model.Membership("job-7", "run", 1, model.Settings(1, 1), 0, ended=ended)
    refuse_to_forget(model.State(membership))
    with pytest.raises(InvalidRequestError, match="it is stopped, and n1 is still in it; wait"):
        refuse_to_forget(model.State(membership, seats={"n1": model.Seat(1, NOW_MS)}))


async def test_a_store_that_refuses_keeps_the_job(store: DeletingStore) -> None:
    async with server(store) as s:
        await finished(s)
        store.before = StoreRefusedError("full")
        with pytest.raises(StoreRefusedError, match="full"):
            await s.driver.forgetting.forget("job-7")
        assert s.driver.trouble
        assert (await s.status()).state == "succeeded"
        store.before = None
        await s.driver.forgetting.forget("job-7")
        assert not s.driver.trouble
    assert await store.list() == ()


@pytest.mark.parametrize("happened", [True, False])
async def test_after_a_deletion_of_which_nobody_knows_the_store_tells(
    store: DeletingStore, happened: bool
) -> None:
    async with server(store) as s:
        await finished(s)
        unknown = RendezvousConnectionError("no answer")
        store.before, store.after = (None, unknown) if happened else (unknown, None)
        with pytest.raises(RendezvousConnectionError, match="no answer"):
            await s.driver.forgetting.forget("job-7")
        store.before = store.after = None
        assert [view.rdzv_id for view in await s.listed()] == ([] if happened else ["job-7"])
        # Repeated, as by a client that got no answer.
        if happened:
            with pytest.raises(UnknownJobError):
                await s.driver.forgetting.forget("job-7")
        else:
            await s.driver.forgetting.forget("job-7")
        assert (await finished(s)).round == 0


async def test_who_waits_for_a_deletion_of_which_nobody_knows_reads_the_job_anew(
    store: DeletingStore,
) -> None:
    async with server(store) as s:
        await finished(s)
        stream = await s.connect("n1")
        store.gate, store.after = asyncio.Event(), RendezvousConnectionError("no answer")
        caller = asyncio.ensure_future(s.driver.forgetting.forget("job-7"))
        await settle()
        joining = asyncio.ensure_future(s.driver.engine.submit("job-7", join(stream, (1, 1))))
        await settle()
        assert s.driver.jobs.in_memory["job-7"].claims == 2
        store.gate.set()
        with pytest.raises(RendezvousConnectionError, match="no answer"):
            await caller
        assert (await joining).membership.run_number == 1


async def test_a_job_that_was_written_by_somebody_else_is_read_anew(store: DeletingStore) -> None:
    async with server(store) as s:
        await finished(s)
        store.before = RevisionConflictError("somebody else has written it")
        with pytest.raises(RendezvousConnectionError, match=r"somebody else .*; try again"):
            await s.driver.forgetting.forget("job-7")
        store.before = None
        await s.driver.forgetting.forget("job-7")
    assert store.deleted == ["job-7"]


async def test_a_caller_that_is_cancelled_does_not_cut_a_deletion_in_two(
    store: DeletingStore,
) -> None:
    async with server(store) as s:
        await finished(s)
        stream = await s.connect("n1")
        store.gate = asyncio.Event()
        caller = asyncio.ensure_future(s.driver.forgetting.forget("job-7"))
        await settle()
        caller.cancel()
        await asyncio.wait([caller])
        # A client that comes meanwhile waits, and finds a new job.
        joining = asyncio.ensure_future(s.driver.engine.submit("job-7", join(stream, (1, 1))))
        await settle()
        assert s.driver.jobs.in_memory["job-7"].claims == 2
        store.gate.set()
        membership = (await joining).membership
        assert (membership.rdzv_id, membership.run_number) == ("job-7", 1)
    assert store.deleted == ["job-7"]


# ---------------------------------------------------------------- by themselves


@pytest.mark.parametrize(
    ("most", "kept_ms", "goes"),
    [
        (4, 100, []),
        (3, 100, ["b"]),
        (2, 100, ["b", "c"]),
        (0, 100, ["b", "c", "a", "d"]),
        (4, 60, []),
        (4, 59, ["b", "c"]),
        (3, 59, ["b", "c"]),
        (1, 59, ["b", "c", "a"]),
        (4, 0, ["b", "c", "a"]),
    ],
)
def test_what_ended_first_goes_first(most: int, kept_ms: int, goes: list[str]) -> None:
    ended_at_ms = {"a": 50, "b": 40, "c": 40, "d": 200}
    assert [name for name, _ in outlived(ended_at_ms, 100, most, kept_ms)] == goes


def test_each_is_forgotten_for_its_own_reason() -> None:
    ended_at_ms = {"old": 0, "many": 20 * DAY_MS, "new": 30 * DAY_MS}
    assert outlived(ended_at_ms, 31 * DAY_MS, most=1, kept_ms=30 * DAY_MS) == (
        ("old", "it ended more than 30 days ago"),
        ("many", "1 other jobs have ended since"),
    )


async def test_at_a_start_what_is_too_old_goes(
    store: DeletingStore, clock: FakeClock, lines: list[str]
) -> None:
    kept_ms = Retention().ended_for_ms
    await stored(store, "old", NOW_MS - kept_ms - 1)
    await stored(store, "older", NOW_MS - kept_ms - 2)
    await stored(store, "new", NOW_MS - kept_ms)
    await stored(store, "open", None)
    async with server(store, clock) as s:
        await settle()
        assert [view.rdzv_id for view in await s.listed()] == ["new", "open"]
    assert store.deleted == ["older", "old"]
    assert await store.history("old", 10) == ()
    assert lines == [
        f"INFO forgot job {name}: it ended more than 30 days ago" for name in ("older", "old")
    ]


async def test_at_a_start_what_is_too_many_goes(store: DeletingStore, clock: FakeClock) -> None:
    for number in range(5):
        await stored(store, f"job-{number}", NOW_MS - number)
    await stored(store, "open", None)
    async with server(store, clock, retention=Retention(ended_jobs=2)):
        await settle()
    assert store.deleted == ["job-4", "job-3", "job-2"]
    assert await store.list() == ("job-0", "job-1", "open")


async def test_it_is_looked_again_every_hour(store: DeletingStore, clock: FakeClock) -> None:
    async with server(store, clock, retention=Retention(ended_jobs=1)) as s:
        for rdzv_id in ("job-7", "job-8", "job-9"):
            await finished(s, rdzv_id)
            await clock.advance(1)
        await clock.pause(HOUR_MS - 100)
        assert store.deleted == []
        await clock.pause(100)
        assert store.deleted == ["job-7", "job-8"]
        await clock.pause(Retention().ended_for_ms)
        assert store.deleted == ["job-7", "job-8", "job-9"]
    # And none once the server has stopped.
    await stored(store, "job-10", 0)
    await clock.pause(2 * HOUR_MS)
    assert await store.list() == ("job-10",)


async def test_a_job_that_can_not_be_read_is_left_alone(
    store: DeletingStore, clock: FakeClock
) -> None:
    await stored(store, "bad", 0)
    await stored(store, "old", 0)
    store.jobs["bad"] = (b"{}", 1)
    async with server(store, clock):
        await settle()
    assert store.deleted == ["old"]
    assert await store.list() == ("bad",)


async def test_a_job_that_somebody_is_still_in_is_not_pruned(
    store: DeletingStore, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stored(store, "old", 0)
    seat = {"n1": model.Seat(1, NOW_MS)}
    restore = restoring.restore
    monkeypatch.setattr(
        restoring, "restore", lambda *given: replace(restore(*given), waiting={}, seats=seat)
    )
    async with server(store, clock):
        await settle()
    assert store.deleted == []


async def test_a_job_that_has_begun_another_run_meanwhile_stays(
    store: DeletingStore, clock: FakeClock
) -> None:
    for rdzv_id in ("job-6", "job-7", "job-8", "job-9"):
        await stored(store, rdzv_id, {"job-6": 0}.get(rdzv_id, 1))
    store.gate = asyncio.Event()
    async with server(store, clock) as s:
        # The first is delayed while two of the others go on.
        await settle()
        await begun(s, "job-7")
        await finished(s, "job-8")
        store.gate.set()
        await settle()
        assert store.deleted == ["job-6", "job-9"]
        assert (await s.status()).state == "running"
        assert (await s.status("job-8")).run_number == 2


async def test_while_the_store_is_away_it_waits_for_the_next_hour(
    store: DeletingStore, clock: FakeClock, lines: list[str]
) -> None:
    await stored(store, "job-7", 0)
    await stored(store, "job-8", 0)
    store.before = StoreRefusedError("full")
    async with server(store, clock):
        await settle()
        assert lines == ["WARNING could not forget ended jobs: full; will retry"]
        store.before = None
        await clock.pause(HOUR_MS)
        assert store.deleted == ["job-7", "job-8"]
    assert len(lines) == 3


async def test_a_clock_that_was_stepped_ahead_has_nothing_forgotten(
    store: DeletingStore, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Restarted with a clock 40 days ahead, a server deleted every ended job for good."""
    async with server(store, clock) as s:
        await finished(s)
    clock.at_ms += 40 * DAY_MS
    # Nor at the next start, if the clock seems to have run evenly, ...
    for rdzv_id in ("job-8", "job-9"):
        async with server(store, clock) as s:
            await settle()
            await finished(s, rdzv_id)
        assert store.deleted == []
    assert caplog.text.count("the clock is 40 d 0 h ahead") == 1
    # ... nor when it is corrected and goes on: ten days are counted.
    clock.at_ms -= 30 * DAY_MS
    async with server(store, clock):
        await settle()
    assert store.deleted == []
    assert "the clock is 30 d 0 h behind" in caplog.text
    # Once the retention time has passed with a server running, the job is forgotten.
    clock.at_ms += 30 * DAY_MS
    for _ in range(32):
        clock.at_ms += DAY_MS
        async with server(store, clock):
            await settle()
    assert "job-7" in store.deleted


async def test_a_clock_that_was_stepped_back_lets_ages_go_on(clock: FakeClock) -> None:
    """A run's age stood at 0.0 s for an hour, and no restart was forgotten in that time."""
    store = MemoryStore()
    async with server(store, clock) as s:
        stream = await s.connect("n1")
        settings = model.Settings(1, 1, max_restarts=1, restart_window_ms=30_000)
        await s.hear(stream, join(stream, (1, 1), settings=settings))
        line = last(stream, model.Assignment)
        failed = report(message="boom", pid=99)
        speaker = (stream.node_id, stream.incarnation)
        await s.hear(stream, Fail(*speaker, line.run, line.round, (failed,)))
        again = join(stream, (1, 1), settings=settings, run=line.run, left_round=line.round)
        await s.hear(stream, again)
    clock.at_ms -= HOUR_MS
    async with server(store, clock) as s:
        # Memory and store agree: a step makes the times count as of now.
        await clock.advance(0)
        view = await s.status()
        assert (view.run_age_ms, view.restarts) == (0, 1)
        clock.at_ms += 40_000
        view = await s.status()
        assert (view.run_age_ms, view.restarts) == (40_000, 0)


def test_nothing_of_a_run_lies_in_the_future() -> None:
    failure = model.Failure(0, 0, 9, 1, None, "", "", 99, node_id="n1", address="a")
    end = model.RoundEnd(model.Cause.WORKER_FAILURE, "x", 99, True, (failure,))
    membership = model.Membership(
        "job-7",
        "run",
        1,
        model.Settings(1, 1),
        99,
        round=model.Round(0, (), "a", 1, True, 0, 99, end=end),
        restarts=(5, 99),
        last_failures=(failure,),
        departures=(model.Departure("n2", model.NodeState.LOST, "x", 99, "a", 1, "r"),),
        resumed_at_ms=99,
        submission=model.SubmittedRun(model.JobSpec(()), "ada", 99),
    )
    assert not_after(membership, 99) is membership
    clamped = not_after(membership, 50)
    assert clamped.restarts == (5, 50)
    told = json.dumps(as_dict(clamped), default=str)
    # Whatever time may be added to it: none was skipped.
    assert "99" not in told.replace('"pid": 9', "")
    assert told.count("50") == json.dumps(as_dict(membership), default=str).count("99")


async def test_a_start_does_not_wait_for_what_is_forgotten(
    store: DeletingStore, clock: FakeClock
) -> None:
    await stored(store, "old", 0)
    store.gate = asyncio.Event()
    async with server(store, clock) as s:
        await begun(s, "job-7")
        assert store.deleted == []
        store.gate.set()
    assert store.deleted == ["old"]


def test_each_time_of_a_round_that_is_to_come_is_taken_for_the_present() -> None:
    """Written by a server whose clock was ahead."""
    settled = model.Round(0, (), "10.0.0.1", 4711, False, 0, 5)
    end = model.RoundEnd(model.Cause.NODE_LOST, "n1 is lost", 6, True)
    late_end = replace(end, at_ms=NOW_MS + 1)
    for round_, expected in (
        (replace(settled, at_ms=NOW_MS + 1), replace(settled, at_ms=NOW_MS)),
        (replace(settled, end=late_end), replace(settled, end=replace(end, at_ms=NOW_MS))),
    ):
        membership = model.Membership("job-7", "run-1", 1, model.Settings(1, 1), 0, round=round_)
        assert not_after(membership, NOW_MS).round == expected
