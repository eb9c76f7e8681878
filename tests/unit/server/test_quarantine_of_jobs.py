"""Quarantine at a server: a node that fails repeatedly is removed from its job, and stays away.

Three daemons, two of which train. n2's worker fails three times; in the step that settles the third
round the job removes it, and n3 takes the seat. The test moves the clock.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from rdzv.core.commands import Bar, Fail, Join, Place, ReportStuck
from rdzv.core.events import NodeJoined, NodesPlaced
from rdzv.core.fleet.nodes import AgentKind
from rdzv.core.fleet.quarantine import QuarantineRules
from rdzv.core.model import Assignment, Offer, Settings
from rdzv.errors import RendezvousConnectionError, UnknownNodeError
from rdzv.messages import Placed, Withdrawn
from rdzv.server.driver import Driver
from rdzv.server.sessions.streams import Stream
from rdzv.stores.memory import MemoryStore
from rdzv.structs import replace
from rdzv.view.answers import Node
from tests.support.builders import Job, report
from tests.support.driven import FakeClock, FlakyStore, Server, read, settle
from tests.support.settings import rdzvd_settings
from tests.unit.server.test_placing import QUIET_MS, daemons, submission

pytestmark = pytest.mark.slow

SETTINGS = Settings(2, 2, max_restarts=9, restart_backoff_ms=0)
HOUR_MS = 3_600_000


class Documents(FlakyStore):
    """A store whose key-value records cannot always be written."""

    def __init__(self) -> None:
        super().__init__()
        self.refuse: list[str] = []
        """How the next writes of a record fail."""

    async def swap_document(self, name: str, data: bytes, revision: int) -> int:
        how = self.refuse.pop(0) if self.refuse else ""
        if how == "lost before":
            raise RendezvousConnectionError("no answer")
        new = await super().swap_document(name, data, revision)
        if how == "lost after":
            raise RendezvousConnectionError("no answer")
        return new


@asynccontextmanager
async def server(
    store: MemoryStore | None = None, clock: FakeClock | None = None, **tuning: int
) -> AsyncIterator[Server]:
    config = rdzvd_settings(quarantine=QuarantineRules(**tuning))
    clock = clock or FakeClock()
    async with Driver.running(store or MemoryStore(), clock, config) as driver:
        yield Server(driver, clock)


def offer(stream: Stream) -> Offer:
    return Offer(f"10.0.0.{stream.node_id[1:]}", 1, machine=stream.node_id, store_port=4711)


async def join(s: Server, stream: Stream, left_round: int | None = None) -> None:
    run = (await s.status()).run
    asked = Join(stream.node_id, stream.incarnation, run, SETTINGS, offer(stream), left_round)
    # While the store is away, its message waits.
    s.driver.tasks.start(s.hear(stream, asked))
    await settle()


async def training(s: Server, streams: Sequence[Stream], run: str = "sub-1") -> None:
    """Submit a job, and let the nodes that get it run its first round."""
    await s.driver.operations.submit_job("job-7", replace(submission(run), settings=SETTINGS))
    await s.clock.advance(QUIET_MS)
    placed = (await s.status()).submission
    assert placed is not None
    for stream in streams:
        if stream.node_id in placed.placed:
            await join(s, stream)


def lines(stream: Stream) -> list[Assignment]:
    return [told for told in read(stream) if isinstance(told, Assignment)]


async def fails(
    s: Server,
    at_fault: Stream,
    others: Sequence[Stream],
    message: str = "uncorrectable ECC error",
    signal: int | None = 7,
) -> None:
    """A worker of one node fails; all stop and come back, that node first."""
    status = await s.status()
    number = status.round
    assert status.state == "running" and number is not None
    failed = report(rank=1, exit_code=None if signal else 1, message=message, pid=99, signal=signal)
    fail = Fail(at_fault.node_id, at_fault.incarnation, status.run, number, (failed,))
    await s.hear(at_fault, fail)
    for stream in (at_fault, *others):
        await join(s, stream, number)
    await s.clock.advance(QUIET_MS)


async def shown(s: Server, node_id: str) -> Node:
    return next(node for node in s.nodes() if node.node_id == node_id)


async def quarantined(s: Server) -> list[str]:
    return [node.node_id for node in s.nodes() if node.quarantine]


@pytest.mark.quick
async def test_who_fails_three_times_is_let_go_of_and_another_takes_the_seat(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with server() as s:
        n1, n2, n3 = await daemons(s, "n1", "n2", "n3")
        await training(s, (n1, n2))
        for _ in range(2):
            await fails(s, n2, [n1])
            assert lines(n2)
            assert not await quarantined(s)
        with caplog.at_level(logging.WARNING):
            await fails(s, n2, [n1])
        why = (
            "at fault 3 times within 0.2 s, last in job-7: rank 1 (local_rank 0) on n2: signal 7: "
            "uncorrectable ECC error"
        )
        assert f"n2 is quarantined for 12 h 0 min: {why}" in caplog.text
        told = read(n2)
        # No round was formed with it, and it is removed.
        assert not any(isinstance(message, Assignment) for message in told)
        assert Withdrawn("job-7", "sub-1", f"quarantined: {why}") in told
        assert any(isinstance(message, Placed) for message in read(n3))
        await join(s, n3)
        status = await s.status()
        assert (status.state, [n.node_id for n in status.nodes][:2]) == ("running", ["n1", "n3"])
        # The third failure was charged like every other.
        assert status.restarts == 3
        assert (await shown(s, "n2")).quarantine == why
        assert (await shown(s, "n2")).quarantine_left_ms > 11 * HOUR_MS
        names = [row.name for row in await s.driver.operations.history("job-7", 100)]
        assert "NodeQuarantined" in names


async def test_the_last_to_stop_is_let_go_of_in_the_same_step() -> None:
    async with server(failures=1) as s:
        n1, n2, n3 = await daemons(s, "n1", "n2", "n3")
        await training(s, (n1, n2))
        status = await s.status()
        failed = report(rank=1, exit_code=None, pid=99, signal=7)
        await s.hear(n2, Fail("n2", n2.incarnation, status.run, 0, (failed,)))
        await join(s, n1, 0)
        read(n2)
        await join(s, n2, 0)
        assert not lines(n2)
        assert (await s.status()).state == "joining"
        await s.clock.advance(QUIET_MS)
        assert any(isinstance(message, Placed) for message in read(n3))


async def test_a_job_that_waits_says_that_its_node_is_quarantined() -> None:
    async with server(failures=1) as s:
        n1, n2 = await daemons(s, "n1", "n2")
        await training(s, (n1, n2))
        await fails(s, n2, [n1])
        reason = str((await s.status()).reason)
        assert "; n2 (quarantined): at fault once, last in job-7: " in reason


@pytest.mark.quick
async def test_a_job_that_loses_its_minimum_gives_back_the_rest_at_once() -> None:
    """Another job gets n1 in the meantime."""
    async with server(failures=1) as s:
        n1, n2 = await daemons(s, "n1", "n2")
        await training(s, (n1, n2))
        await fails(s, n2, [n1])
        status = await s.status()
        assert (status.state, status.submission.placed) == ("queued", ())  # type: ignore[union-attr]
        assert any(isinstance(told, Withdrawn) for told in read(n1))
        names = [row.name for row in await s.driver.operations.history("job-7", 100)]
        assert names.count("JobQueued") == 1
        alone = replace(submission("sub-2"), settings=Settings(1, 1))
        await s.driver.operations.submit_job("job-8", alone)
        await s.clock.advance(QUIET_MS)
        assert any(isinstance(told, Placed) for told in read(n1))


@pytest.mark.quick
def test_who_is_barred_since_it_was_chosen_is_not_placed() -> None:
    """Otherwise it would be placed and withdrawn in the same step."""
    job = Job()
    job.do(submission())
    job.do(Bar((("n1", "quarantined: it is slow"),)))
    assert job.do(Place("sub-1", ("n1",))) == ()
    assert job.do(Place("sub-1", ("n1", "n2"))) == (NodesPlaced(("n2",), was_queued=True),)


@pytest.mark.quick
def test_the_echo_of_a_join_lets_nobody_in_who_is_barred() -> None:
    """Otherwise it would be admitted and withdrawn in the same step."""
    job = Job()
    job.do(submission())
    job.do(Place("sub-1", ("n1", "n2")))
    settings = job.membership.settings
    job.join("n1", run="sub-1", settings=settings)
    job.do(Bar((("n1", "quarantined: it is slow"),)))
    assert job.state.placed == ("n2",)
    assert job.join("n1", run="sub-1", settings=settings) == ()


@pytest.mark.quick
def test_a_new_instance_of_a_node_that_is_barred_is_not_let_in() -> None:
    """Its former one, whose workers are stopping, still has the seat."""
    job = Job()
    job.do(submission())
    job.do(Place("sub-1", ("n1", "n2")))
    settings = job.membership.settings
    job.join("n1", "n2", run="sub-1", settings=settings)
    job.do(Bar((("n1", "quarantined: it is slow"),)))
    assert "n1" in job.state.seats
    events = job.join("n1", incarnation=2, run="sub-1", settings=settings)
    assert not any(isinstance(event, NodeJoined) for event in events)
    assert "n1" not in job.state.seats and "n1" not in job.state.waiting


async def test_an_operator_lifts_it() -> None:
    async with server(failures=1) as s:
        n1, n2 = await daemons(s, "n1", "n2")
        await training(s, (n1, n2))
        await fails(s, n2, [n1])
        assert await quarantined(s) == ["n2"]
        summary = await s.change_node("uncordon", "n2")
        assert not summary.quarantine
        read(n2)
        await s.clock.advance(QUIET_MS)
        assert (await s.status()).submission.placed == ("n1", "n2")  # type: ignore[union-attr]
        await join(s, n1)
        await join(s, n2)
        assert lines(n2)
        with pytest.raises(UnknownNodeError):
            await s.driver.fleet.uncordon("n9")


async def test_it_is_lifted_of_a_node_that_is_gone() -> None:
    store, clock = MemoryStore(), FakeClock()
    async with server(failures=1, store=store, clock=clock) as s:
        n1, n2 = await daemons(s, "n1", "n2")
        await training(s, (n1, n2))
        await fails(s, n2, [n1])
    async with server(failures=1, store=store, clock=clock) as s:
        assert [(n.node_id, n.state) for n in s.nodes() if n.quarantine] == [("n2", "gone")]
        assert not (await s.change_node("uncordon", "n2")).quarantine


async def test_it_ends_with_its_time() -> None:
    async with server(failures=1, ttl_ms=60_000) as s:
        n1, n2 = await daemons(s, "n1", "n2")
        await training(s, (n1, n2))
        await fails(s, n2, [n1])
        await s.live(59_000, n1, n2)
        assert (await s.status()).submission.placed == ()  # type: ignore[union-attr]
        changes: list[str | None] = []
        with s.driver.watchers.followed_by(changes.append):
            await s.live(2_000, n1, n2)
        assert None in changes  # The list of nodes is shown anew.
        assert not await quarantined(s)
        assert (await s.status()).submission.placed == ("n1", "n2")  # type: ignore[union-attr]


@pytest.mark.quick
async def test_it_outlives_the_server() -> None:
    store, clock = MemoryStore(), FakeClock()
    async with server(store, clock, failures=1) as s:
        n1, n2 = await daemons(s, "n1", "n2")
        await training(s, (n1, n2))
        await fails(s, n2, [n1])
    async with server(store, clock) as s:
        # Also before the node has come back.
        assert await quarantined(s) == ["n2"]
        gone = await shown(s, "n2")
        assert (gone.state, gone.state_age_ms) == ("gone", None)
        n1, n2 = await daemons(s, "n1", "n2")
        await s.clock.advance(QUIET_MS)
        assert (await s.status()).submission.placed == ()  # type: ignore[union-attr]


async def test_a_node_that_another_job_trains_on_keeps_its_seat_until_it_has_stopped() -> None:
    """Two jobs share two nodes. One has n2 quarantined; the other removes it at its next end."""
    async with server(failures=2, max_nodes=2) as s:
        roomy = replace_capacity(2)
        s.driver.placer.settled_at_ms = 0
        n1, n2, n3 = [await s.connect(name, resources=roomy) for name in ("n1", "n2", "n3")]
        await s.clock.advance(QUIET_MS)
        await training(s, (n1, n2, n3))
        other = replace(submission("sub-2"), settings=SETTINGS)
        await s.driver.operations.submit_job("job-8", other)
        await s.clock.advance(QUIET_MS)
        second = (await s.status("job-8")).submission
        assert second is not None
        shared = next(n for n in (n1, n2, n3) if n.node_id in second.placed)
        mate = next(n for n in (n1, n2, n3) if n.node_id in second.placed and n is not shared)
        first = (await s.status()).submission
        assert first is not None and shared.node_id in first.placed
        for stream in (shared, mate):
            asked = Join(stream.node_id, stream.incarnation, "sub-2", SETTINGS, offer(stream))
            await s.hear(stream, asked, "job-8")
        await settle()
        peer = next(n for n in (n1, n2, n3) if n.node_id in first.placed and n is not shared)
        for _ in range(2):
            await fails(s, shared, [peer])
        assert await quarantined(s) == [shared.node_id]
        status = await s.status("job-8")
        assert status.state == "running"
        assert {n.node_id for n in status.nodes} == set(second.placed)
        failed = report(rank=1, exit_code=None, pid=99, signal=7)
        fail = Fail(mate.node_id, mate.incarnation, "sub-2", 0, (failed,))
        await s.hear(mate, fail, "job-8")
        for stream in (mate, shared):
            asked = Join(stream.node_id, stream.incarnation, "sub-2", SETTINGS, offer(stream), 0)
            await s.hear(stream, asked, "job-8")
        await s.clock.advance(QUIET_MS)
        status = await s.status("job-8")
        assert shared.node_id not in status.submission.placed  # type: ignore[union-attr]
        assert status.state == "joining"


def replace_capacity(capacity: int):  # type: ignore[no-untyped-def]
    from tests.unit.server.test_placing import HAS

    gpus = tuple(replace(HAS.gpus[0], uuid=f"u{number}") for number in range(capacity))
    return replace(HAS, capacity=capacity, gpus=gpus)


async def test_a_bug_of_the_user_takes_no_node_out_of_service(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with server(failures=3) as s:
        n1, n2 = await daemons(s, "n1", "n2")
        await training(s, (n1, n2))
        with caplog.at_level(logging.WARNING):
            for _ in range(4):
                await fails(s, n2, [n1], "KeyError: 'lr'", None)
        assert not await quarantined(s)
        assert "only job-7 failed there" in caplog.text
        rows = await s.driver.operations.history("job-7", 100)
        assert {row.name for row in rows if "Quarantined" in row.name} == {"NodeNotQuarantined"}
        assert (await s.status()).state == "running"


async def test_a_job_that_crashes_everywhere_has_one_node_quarantined_and_then_is_told_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with server(failures=1, max_nodes=3) as s:
        n1, n2, n3 = await daemons(s, "n1", "n2", "n3")
        await training(s, (n1, n2))
        await fails(s, n2, [n1])
        await join(s, n3)
        with caplog.at_level(logging.WARNING):
            await fails(s, n3, [n1])
        assert await quarantined(s) == ["n2"]
        assert "so the job itself is more likely at fault" in caplog.text
        rows = await s.driver.operations.history("job-7", 100)
        assert [row.name for row in rows if "Quarantined" in row.name] == [
            "NodeQuarantined",
            "NodeNotQuarantined",
        ]
        assert (await s.status()).state == "running"


async def test_the_failure_that_ends_the_run_counts_as_well() -> None:
    async with server(failures=1) as s:
        n1, n2 = await daemons(s, "n1", "n2")
        await s.driver.operations.submit_job("job-7", submission())
        await s.clock.advance(QUIET_MS)
        for stream in (n1, n2):
            asked = Join(stream.node_id, stream.incarnation, "sub-1", Settings(2, 2), offer(stream))
            await s.hear(stream, asked)
        await settle()
        failed = report(rank=1, exit_code=None, pid=99, signal=7)
        await s.hear(n2, Fail("n2", n2.incarnation, "sub-1", 0, (failed,)))
        for stream in (n1, n2):
            ask = Join(
                stream.node_id, stream.incarnation, "sub-1", Settings(2, 2), offer(stream), 0
            )
            await s.hear(stream, ask)
        await settle()
        assert (await s.status()).state == "failed"
        assert await quarantined(s) == ["n2"]


async def test_processes_that_survive_sigkill_count_as_a_failure() -> None:
    async with server(failures=1) as s:
        n1, n2 = await daemons(s, "n1", "n2")
        await training(s, (n1, n2))
        stuck = ReportStuck("n2", n2.incarnation, "sub-1", 0, (99,))
        await s.hear(n2, stuck)
        await s.clock.advance(QUIET_MS)
        assert await quarantined(s) == ["n2"]
        status = await s.status()
        # It is removed once its processes are gone.
        assert ("n2", "stopping") in [(n.node_id, n.state) for n in status.nodes]
        await join(s, n2, 0)
        status = await s.status()
        assert ("n2", "left") in [(n.node_id, n.state) for n in status.nodes]


async def test_nodes_of_rdzvrun_are_not_judged() -> None:
    async with server(failures=1) as s:
        await daemons(s, "n3", "n4")
        n1 = await s.connect("n1", kind=AgentKind.FOREGROUND)
        n2 = await s.connect("n2", kind=AgentKind.FOREGROUND)
        for stream in (n1, n2):
            asked = Join(stream.node_id, stream.incarnation, "", SETTINGS, offer(stream))
            await s.hear(stream, asked)
        await settle()
        await fails(s, n2, [n1])
        assert not await quarantined(s)
        assert (await s.status()).state == "running"


async def test_a_node_that_runs_a_job_of_its_own_is_judged_and_not_stopped() -> None:
    """The server must not take a node from the job of an agent.toml."""
    async with server(failures=1) as s:
        n1, n2 = await daemons(s, "n1", "n2")
        for stream in (n1, n2):
            asked = Join(stream.node_id, stream.incarnation, "", SETTINGS, offer(stream))
            await s.hear(stream, asked)
        await settle()
        await fails(s, n2, [n1])
        assert await quarantined(s) == ["n2"]
        assert (await s.status()).state == "running"
        assert lines(n2)


@pytest.mark.parametrize("how", ["lost before", "lost after"])
async def test_nothing_follows_before_it_is_stored_and_nothing_counts_twice(how: str) -> None:
    store = Documents()
    async with server(store, failures=2) as s:
        n1, n2, n3 = await daemons(s, "n1", "n2", "n3")
        await training(s, (n1, n2))
        store.refuse = [how]
        await fails(s, n2, [n1])
        await s.live(3_000, n1, n2, n3)
        # The round was settled once the strike was stored; it counts once.
        assert (await s.status()).state == "running"
        assert not await quarantined(s)
        store.refuse = [how]
        await fails(s, n2, [n1])
        await s.live(3_000, n1, n2, n3)
        assert await quarantined(s) == ["n2"]
        status = await s.status()
        assert status.restarts == 2
        assert status.submission.placed == ("n1", "n3")  # type: ignore[union-attr]


async def test_a_commit_of_the_job_that_fails_is_judged_again_to_the_same_end() -> None:
    store = Documents()
    async with server(store, failures=1) as s:
        n1, n2, n3 = await daemons(s, "n1", "n2", "n3")
        await training(s, (n1, n2))
        status = await s.status()
        failed = report(rank=1, exit_code=None, pid=99, signal=7)
        await s.hear(n2, Fail("n2", n2.incarnation, status.run, 0, (failed,)))
        await join(s, n2, 0)
        store.next_write = "lost before"
        await join(s, n1, 0)
        assert await quarantined(s) == ["n2"]
        store.away = None
        await s.live(3_000, n1, n2, n3)
        status = await s.status()
        assert status.restarts == 1
        assert status.submission.placed == ("n1", "n3")  # type: ignore[union-attr]
        rows = await s.driver.operations.history("job-7", 100)
        assert [row.name for row in rows].count("NodeQuarantined") == 1
