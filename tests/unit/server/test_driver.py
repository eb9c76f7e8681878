"""The driver: decide, persist, publish. The test moves the clock; the store fails on demand."""

from __future__ import annotations

import asyncio
import logging
import typing
from collections.abc import AsyncGenerator, Sequence

import pytest

from rdzv import errors
from rdzv.core import events, model, rendezvous
from rdzv.core.commands import (
    Command,
    Fail,
    Join,
    Leave,
    MarkLost,
    Resume,
    Scale,
    Stop,
    Succeed,
    Tick,
)
from rdzv.core.fleet.node_resources import FailingCheck
from rdzv.core.fleet.nodes import AgentKind, LeaseRules
from rdzv.core.life import runs
from rdzv.core.reason import ReasonItem
from rdzv.messages import (
    Announcement,
    Belief,
    Closed,
    Draining,
    Health,
    Holding,
    Hung,
    Joined,
    Lease,
    LogPiece,
    Refused,
    RoundOver,
    Servers,
    Stacks,
    Waiting,
    Welcome,
)
from rdzv.runtime import log_format
from rdzv.runtime.clock import Timer
from rdzv.server.engine import decide_persist_publish as engine_module
from rdzv.server.engine.history import log_events, records
from rdzv.server.engine.jobs import RECONNECT_MS, Job
from rdzv.server.sessions import announcements as told
from rdzv.server.sessions.streams import Stream
from rdzv.server.settings.server_settings import Limits
from rdzv.stores.base import Page, Record, Stored
from rdzv.stores.memory import MemoryStore
from rdzv.structs import replace
from rdzv.view.answers import event_in
from rdzv.view.history import kept
from rdzv.view.sentences import sentence
from tests.support.builders import report
from tests.support.driven import (
    FakeClock,
    FlakyStore,
    Server,
    end_of,
    join,
    last,
    read,
    running,
    server,
    settle,
)

TUNING = model.Tuning()


# ---------------------------------------------------------------- decide, persist, publish


async def test_a_round_is_stored_before_anyone_hears_of_it() -> None:
    store = FlakyStore()
    async with server(store) as s:
        n1, n2 = await s.connect("n1"), await s.connect("n2")
        heard: list[Announcement] = []
        store.before_write = lambda: heard.extend(read(n1) + read(n2))
        await s.join(n1)
        await s.join(n2)
        assert not any(isinstance(message, model.Assignment) for message in heard)
        lines = [read(stream)[-1] for stream in (n1, n2)]
        assert [(x.group_rank, x.rank_first, x.world_size) for x in lines] == [  # type: ignore[union-attr]
            (0, 0, 4),
            (1, 2, 4),
        ]


async def test_a_node_hears_that_it_is_in_then_why_it_waits_then_its_line() -> None:
    async with server() as s:
        n1 = await s.connect("n1")
        await s.join(n1)
        welcome, joined, waiting = read(n1)
        assert isinstance(welcome, Welcome)
        assert joined == Joined("job-7", "run-1", 1)
        assert isinstance(waiting, Waiting)
        assert "waiting for 1 more node" in waiting.reason
        n2 = await s.connect("n2")
        await s.join(n2)
        assert [type(message) for message in read(n2)] == [Welcome, Joined, model.Assignment]


async def test_nodes_are_told_which_servers_stand_by_and_of_each_change() -> None:
    async with server() as s:
        n1 = await s.connect("n1")
        assert [type(message) for message in read(n1)] == [Welcome]
        for addresses in (("b:1", "c:1"), ("b:1", "c:1"), ("c:1",)):
            s.driver.connections.note_standing_by(addresses)
        assert read(n1) == [Servers(("b:1", "c:1")), Servers(("c:1",))]
        assert read(await s.connect("n2"))[1:] == [Servers(("c:1",))]
        s.driver.connections.note_standing_by(())
        assert read(n1) == [Servers(())]


async def test_who_came_first_is_told_a_longer_lease_when_many_have_come() -> None:
    async with server(lease=LeaseRules(nodes=1, longest_nodes=2)) as s:
        n1 = await s.connect("n1")
        assert read(n1) == [Welcome(n1.incarnation, 1_666, 5_000)]
        n2 = await s.connect("n2")
        assert read(n2) == [Welcome(n2.incarnation, 15_000, 30_000)]
        s.driver.connections.heard(n1)
        s.driver.connections.heard(n2)
        await s.clock.advance(1_000)
        assert (read(n1), read(n2)) == ([Lease(15_000, 30_000)], [])


async def test_a_refused_join_leaves_no_job_behind() -> None:
    async with server() as s:
        n1 = await s.connect("n1")
        await s.hear(n1, join(n1, left_round=3, run="feed"))
        await s.hear(n1, Leave("n1", 1, "x", model.LeaveCause.SIGNAL, "bye"), "job-8")
        assert "job-8" not in s.driver.jobs.in_memory
        with pytest.raises(errors.UnknownJobError, match=r"no job job-8 .*`rdzvctl list`"):
            await s.status("job-8")
        assert s.driver.jobs.in_memory.keys() == {"job-7"}


async def test_a_job_that_has_ended_is_forgotten_but_not_lost() -> None:
    async with server() as s:
        n1, n2 = await s.pair()
        for stream in (n1, n2):
            succeed = Succeed(stream.node_id, stream.incarnation, "run-1", 0)
            await s.hear(stream, succeed)
        for stream in (n1, n2):
            closed = last(stream, Closed)
            assert closed.ended.result is model.Result.SUCCEEDED
        assert not s.driver.jobs.in_memory
        assert not s.driver.node_jobs.node_ids
        assert (await s.status()).state == "succeeded"
        assert [view.rdzv_id for view in await s.listed()] == ["job-7"]


async def test_a_caller_that_is_cancelled_does_not_cut_a_commit_in_two() -> None:
    store = FlakyStore()
    async with server(store) as s:
        n1 = await s.connect("n1")
        store.gate = asyncio.Event()
        caller = asyncio.ensure_future(s.driver.engine.submit("job-7", join(n1, (1, 1))))
        await settle()
        caller.cancel()
        await asyncio.wait([caller])
        store.gate.set()
        await settle()
        assert isinstance(read(n1)[-1], model.Assignment)
        assert await s.states() == {"n1": model.NodeState.SEATED}


@pytest.mark.slow
async def test_what_is_said_while_a_commit_is_under_way_shares_the_next_one() -> None:
    store = FlakyStore()
    async with server(store) as s:
        streams = [await s.connect(f"n{number:02}") for number in range(40)]
        store.gate = asyncio.Event()
        said = [asyncio.ensure_future(s.hear(stream, join(stream, (40, 40)))) for stream in streams]
        await settle()
        before = store.writes
        store.gate.set()
        await asyncio.gather(*said)
        # One for the run, which the first join began, and one for the round.
        assert store.writes - before <= 2
        assert [read(stream)[-1].group_rank for stream in streams] == list(range(40))


async def test_a_refusal_among_what_shares_a_commit_concerns_nobody_else() -> None:
    store = FlakyStore()
    async with server(store) as s:
        n1, n2, n3, n4 = [await s.connect(f"n{number}") for number in range(1, 5)]
        store.gate = asyncio.Event()
        said = [
            asyncio.ensure_future(s.hear(stream, join(stream, bounds)))
            for stream, bounds in ((n1, (3, 3)), (n2, (3, 3)), (n3, (2, 2)), (n4, (3, 3)))
        ]
        await settle()
        store.gate.set()
        await asyncio.gather(*said)
        assert isinstance(read(n3)[-1], Refused)
        assert all(isinstance(read(stream)[-1], model.Assignment) for stream in (n1, n2, n4))


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["lost before", "lost after"])
async def test_all_that_shares_a_commit_in_doubt_is_announced_once_or_done_anew(lost: str) -> None:
    store = FlakyStore()
    async with server(store) as s:
        streams = n1, n2, n3 = [await s.connect(f"n{number}") for number in range(1, 4)]
        await s.join(n1, (3, 3))
        store.gate = asyncio.Event()
        others = (n2, n3)
        said = [asyncio.ensure_future(s.hear(stream, join(stream, (3, 3)))) for stream in others]
        store.next_write = lost
        await settle()
        store.gate.set()
        await s.clock.advance(2_500)
        assert not any(isinstance(m, model.Assignment) for stream in streams for m in read(stream))
        store.away = None
        await s.clock.advance(2_500)
        await asyncio.gather(*said)
        lines = [m for stream in streams for m in read(stream) if isinstance(m, model.Assignment)]
        assert [(line.round, line.group_rank) for line in lines] == [(0, 0), (0, 1), (0, 2)]
        names = [row.name for row in await s.driver.operations.history("job-7", 100)]
        assert (names.count("RoundCompleted"), names.count("NodeJoined")) == (1, 3)


async def test_refusals_are_told_and_change_nothing() -> None:
    async with server() as s:
        n1, n2 = await s.connect("n1"), await s.connect("n2")
        await s.join(n1, (2, 3))
        await s.join(n2, (2, 4))
        refused = last(n2, Refused)
        assert refused.code == errors.SettingsMismatchError.code
        assert n2.open
        assert list(await s.states()) == ["n1"]


@pytest.mark.slow
async def test_n_joins_cost_about_n_messages() -> None:
    async with server() as s:
        streams = [await s.connect(f"n{number}") for number in range(30)]
        for stream in streams:
            await s.join(stream, (40, 40))
        assert sum(len(read(stream)) for stream in streams) <= 4 * len(streams)


async def test_jobs_are_bounded() -> None:
    async with server(limits=Limits(jobs=1)) as s:
        n1 = await s.connect("n1")
        await s.join(n1)
        with pytest.raises(
            errors.LimitExceededError, match=r"job-8 is over .*; try again when others have"
        ):
            await s.driver.engine.submit("job-8", join(n1))


async def test_the_jobs_of_a_node_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rdzv.bounds.JOBS_PER_NODE", 1)
    async with server() as s:
        n1 = await s.connect("n1")
        await s.join(n1)
        await s.join(n1)  # As can happen at any time.
        read(n1)
        await s.hear(n1, join(n1), "job-8")
        (refused,) = read(n1)
        assert isinstance(refused, Refused)
        assert refused.message.startswith("n1 is already in 1 jobs, and the limit is 1; leave one")


async def test_nodes_are_bounded() -> None:
    async with server(limits=Limits(nodes=1)) as s:
        await s.connect("n1")
        with pytest.raises(errors.LimitExceededError, match="n2 is over the limit"):
            s.attach("n2")


async def test_a_job_that_needs_more_nodes_than_the_server_holds_is_refused() -> None:
    async with server(limits=Limits(nodes=2)) as s:
        n1 = await s.connect("n1")
        await s.join(n1, (3, 4))
        refused = last(n1, Refused)
        assert refused.message == (
            "--nnodes: min_nodes 3 is above the 2 nodes that this server holds; lower it, or raise "
            "the server's limit `nodes`"
        )
        await s.join(n1, (2, 4))
        assert any(isinstance(message, Joined) for message in read(n1))
        with pytest.raises(errors.InvalidRequestError, match="min_nodes 3 is above the 2 nodes"):
            await s.driver.engine.submit("job-7", Scale("feed", 3, 4, ""))


async def test_a_slow_reader_loses_its_stream_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rdzv.server.sessions.streams.OUTBOX", 3)
    async with server() as s:
        n1, n2 = await s.connect("n1"), await s.connect("n2")
        for _ in range(4):
            await s.hear(n1, join(n1, run="x y"))
            n1.send(Refused("job-7", "code", "text"))
        assert isinstance(await end_of(n1), errors.LimitExceededError)
        assert n2.open


# ---------------------------------------------------------------- the store fails


async def test_while_the_store_is_away_nothing_is_decided_and_no_stream_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = FlakyStore()
    async with server(store) as s:
        n1, n2 = await s.connect("n1"), await s.connect("n2")
        await s.join(n1)
        store.away = errors.StoreRefusedError("disk full")
        said = asyncio.ensure_future(s.hear(n2, join(n2)))
        for _ in range(4):
            await s.clock.advance(1_000)
            s.driver.connections.heard(n1)
            s.driver.connections.heard(n2)
        waiting = last(n2, Waiting)
        assert "disk full" in waiting.reason
        assert n1.open
        assert n2.open
        assert caplog.text.count("the store is away") == 1
        with pytest.raises(errors.RendezvousConnectionError):
            await s.driver.engine.submit("job-7", join(n2))

        store.away = None
        await s.clock.advance(2_000)
        await said
        assert [type(read(stream)[-1]) for stream in (n1, n2)] == [
            model.Assignment,
            model.Assignment,
        ]
        assert "the store is back" in caplog.text


async def test_after_a_doubtful_commit_that_has_happened_no_row_of_history_is_there_twice() -> None:
    store = FlakyStore()
    async with server(store) as s:
        n1, n2 = await s.pair()
        # History rows without a step are written with the next commit, which is the doubtful one.
        s.driver.history.note("job-7", (events.NodeStuck("n9", 0, (4711,)),))
        store.next_write = "lost after"
        failed = report(rank=2, message="boom", pid=99)
        fail = Fail("n2", n2.incarnation, "run-1", 0, (failed,))
        said = asyncio.ensure_future(s.hear(n2, fail))
        await s.clock.advance(500)
        store.away = None
        await s.clock.advance(2_500)
        await said
        # All that was kept for another commit is written with this one.
        await s.hear(n1, Leave("n1", n1.incarnation, "run-1", model.LeaveCause.SIGNAL, "x"))
        await settle()
    rows = [(row.name, row.data) for row in await store.history("job-7", 100)]
    assert {"NodeStuck", "WorkerFailed", "RoundEnded"} <= {name for name, _ in rows}
    assert len(rows) == len(set(rows)), rows


@pytest.mark.slow
async def test_while_the_store_is_away_all_that_is_shown_says_so_and_what_waits_for_it() -> None:
    """A worker had died, and for 45 s all answers to operators showed a healthy job."""
    store = FlakyStore()
    async with server(store) as s:
        n1, n2 = await s.pair()
        n9 = await s.connect("n9")
        views = s.driver.operations.watch("job-7")
        await anext(views)
        store.away, store.reads = errors.StoreRefusedError("disk full"), True
        failed = report(rank=2, message="boom", pid=99)
        fail = Fail("n2", n2.incarnation, "run-1", 0, (failed,))
        said = asyncio.ensure_future(s.hear(n2, fail))
        joins = asyncio.ensure_future(s.hear(n9, join(n9, (1, 1)), "job-9"))
        for _ in range(12):
            await s.clock.advance(1_000)
            for stream in (n1, n2, n9):
                s.driver.connections.heard(stream)
        away = "the store has been away for 12 s (disk full); workers continue"
        waits = "nothing new is decided; not stored yet: workers of n2 have failed"
        trouble = ReasonItem(f"{away}, {waits}")
        shown = [await s.status(), *await s.listed()]
        assert [view.reason.items for view in shown] == [(trouble,), (trouble,)]
        assert shown[0].reason.headline == "2 nodes and 4 workers run round 0"
        # Watchers are informed unasked.
        assert (await anext(views)).reason.items == (trouble,)
        waiting = "not stored yet: workers of n2 have failed (job-7), n9 joins (job-9)"
        assert s.driver.trouble == f"{away}, nothing new is decided; {waiting}"
        with pytest.raises(
            errors.RendezvousConnectionError, match=r"job job-9 is not stored yet: .* n9 joins$"
        ):
            await s.status("job-9")
        # The node that failed is informed, once.
        (told,) = read(n2)
        assert isinstance(told, Waiting)
        assert "cannot store this node's report, and retries: disk full" in told.reason

        store.away = None
        await s.clock.advance(2_000)
        await asyncio.gather(said, joins)
        assert s.driver.trouble == ""
        assert "the store" not in str((await s.status()).reason)
        assert (await s.status("job-9")).state == "running"
        await views.aclose()


@pytest.mark.slow
async def test_what_waits_for_the_store_is_forgotten_with_the_node_that_said_it() -> None:
    store = FlakyStore()
    async with server(store) as s:
        await s.pair()
        n9 = await s.connect("n9")
        store.away, store.reads = errors.StoreRefusedError("disk full"), True
        joins = asyncio.ensure_future(s.hear(n9, join(n9, (1, 1)), "job-9"))
        await s.clock.advance(1_500)
        assert "n9 joins (job-9)" in s.driver.trouble
        joins.cancel()
        await s.live(5_000, n9)
        assert "n9" not in s.driver.trouble
        assert not s.driver.store.waiting("job-9")


async def test_a_store_that_nobody_writes_to_is_found_to_be_back() -> None:
    """An operator's refused request was the last write for hours: it was away all that time."""

    class Full(MemoryStore):
        full = False

        async def swap_document(self, name: str, data: bytes, revision: int) -> int:
            if self.full:
                raise errors.StoreRefusedError("disk full")
            return await super().swap_document(name, data, revision)

    store = Full()
    async with server(store) as s:
        await s.pair()
        store.full = True
        with pytest.raises(errors.StoreRefusedError):
            await s.driver.fleet.cordon("n1", "a fan is broken")
        await s.clock.advance(5_000)
        assert "disk full" in s.driver.trouble
        store.full = False
        await s.clock.advance(2_000)
        assert s.driver.trouble == ""


@pytest.mark.parametrize("lost", ["lost before", "lost after"])
async def test_a_commit_in_doubt_is_announced_once_it_is_known_to_have_happened(lost: str) -> None:
    store = FlakyStore()
    async with server(store) as s:
        n1, n2 = await s.connect("n1"), await s.connect("n2")
        await s.join(n1)
        read(n1), read(n2)
        store.next_write = lost
        said = asyncio.ensure_future(s.hear(n2, join(n2)))
        await s.clock.advance(2_500)
        assert not any(isinstance(m, model.Assignment | Joined) for m in read(n1) + read(n2))
        store.away = None
        await s.clock.advance(2_500)
        await said
        lines = [m for stream in (n1, n2) for m in read(stream) if isinstance(m, model.Assignment)]
        assert [(line.round, line.group_rank) for line in lines] == [(0, 0), (0, 1)]
        stored = await store.load("job-7")
        assert stored is not None
        assert stored.revision == store.writes
        assert s.driver.jobs.doubtful == ()
        names = [row.name for row in await s.driver.operations.history("job-7", 100)]
        assert names.count("RoundCompleted") == 1


async def test_a_commit_in_doubt_gives_way_to_what_another_server_has_stored() -> None:
    """The job is read again before anything else of it is written in vain."""
    tried: list[str] = []

    class Watched(FlakyStore):
        async def compare_and_swap(
            self,
            rdzv_id: str,
            membership: model.Membership,
            revision: int,
            records: Sequence[Record] = (),
        ) -> int:
            tried.append(membership.run)
            return await super().compare_and_swap(rdzv_id, membership, revision, records)

    store = Watched()
    async with server(store) as s:
        n1, n2 = await s.connect("n1"), await s.connect("n2")
        await s.join(n1)
        before = await store.load("job-7")
        assert before is not None
        store.next_write = "lost before"
        said = asyncio.ensure_future(s.hear(n2, join(n2)))
        await settle()
        others = replace(before.membership, run="run-of-another")
        await MemoryStore.compare_and_swap(store, "job-7", others, before.revision)
        store.away = None
        tried.clear()
        await s.clock.advance(2_500)
        await asyncio.wait([said])
        assert before.membership.run not in tried
        assert (await s.driver.jobs.look("job-7")).membership.run == "run-of-another"


async def test_a_server_that_has_stopped_does_not_look_for_its_store() -> None:
    """It was deposed, and a call that was under way fails only later."""
    store = FlakyStore()
    async with server(store) as s:
        store.away = errors.StoreRefusedError("another server leads")
    with pytest.raises(errors.StoreRefusedError):
        await s.driver.store.load("job-7")
    # A timer of it would start a task in a group that is over.
    await s.clock.advance(60_000)
    assert not s.driver.tasks.running


async def test_a_loss_while_the_store_is_away_is_not_forgotten() -> None:
    store = FlakyStore()
    async with server(store) as s:
        n1, n2 = await s.pair()
        store.away = errors.StoreRefusedError("disk full")
        s.driver.connections.detach(n2)
        await s.live(16_000, n1)
        assert read(n1) == []
        store.away = None
        await s.clock.advance(2_000)
        (over,) = read(n1)
        assert isinstance(over, RoundOver)
        assert over.end.cause is model.Cause.NODE_LOST


async def test_who_has_become_another_before_its_join_is_stored_is_lost() -> None:
    """It kept a seat forever: when the other came, the job did not know the first one yet."""
    store = FlakyStore()
    async with server(store) as s:
        await s.connect("n1")
        store.gate = asyncio.Event()
        former = s.attach("n2")
        joining = asyncio.ensure_future(s.hear(former, join(former)))
        await settle()
        s.driver.connections.detach(former)
        await s.clock.advance(10_000)
        await s.connect("n2", instance="two")
        store.gate.set()
        await joining
        await s.clock.advance(1_000)
        assert (await s.states()).get("n2") is not model.NodeState.SPARE
        names = [row.name for row in await s.driver.operations.history("job-7", 100)]
        assert names[-2:] == ["NodeJoined", "NodeLost"]


async def test_each_new_reason_for_which_the_store_is_away_is_shown() -> None:
    shown: list[str | None] = []
    async with server() as s:
        with s.driver.watchers.followed_by(shown.append):
            for why in ("no answer", "no answer", "it has no leader"):
                s.driver.store.failed(errors.RendezvousConnectionError(why), 0, writes=False)
    assert shown == [None, None]


async def test_what_is_written_to_try_the_store_may_be_there_from_an_earlier_time() -> None:
    async with server() as s:
        await s.clock.advance(5_000)
        for _ in range(2):
            store = s.driver.store
            store.failed(
                errors.RendezvousConnectionError("no answer"), s.clock.now_ms(), writes=True
            )
            await s.clock.advance(5_000)
            assert not store.unwritable


async def test_after_a_conflict_the_job_is_read_anew_and_who_is_not_in_it_says_hello_again() -> (
    None
):
    store = FlakyStore()
    async with server(store) as s:
        n1, n2 = await s.connect("n1"), await s.connect("n2")
        await s.join(n1)
        read(n1), read(n2)
        store.next_write = "conflict"
        said = asyncio.ensure_future(s.hear(n2, join(n2)))
        await s.clock.advance(1_500)
        await said
        (refused,) = read(n1)
        assert isinstance(refused, Refused)
        assert refused.code == "UnknownNodeError"
        assert "send Hello again" in refused.message


async def test_a_reload_disturbs_no_running_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    async with server() as s:
        n1, n2 = await s.pair()
        monkeypatch.setattr(engine_module, "violations", lambda *_: ["barrier: broken"])
        with pytest.raises(errors.InvariantError, match=r"a bug in rdzvd.*Leave.*barrier: broken"):
            leave = Leave("n1", n1.incarnation, "run-1", model.LeaveCause.SIGNAL, "bye")
            await s.driver.engine.submit("job-7", leave)
        timer = s.driver.jobs.in_memory["job-7"].timer
        assert timer.due_ms == s.driver.jobs.retry_at_ms() > s.clock.now_ms()
        monkeypatch.undo()
        await s.live(60_000, n1, n2)
        assert set((await s.states()).values()) == {model.NodeState.SEATED}
        assert read(n1) == read(n2) == []


async def test_a_bug_in_the_core_is_refused_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with server() as s:
        n1, _ = await s.pair()

        def broken(*_: object) -> rendezvous.Transition:
            raise ZeroDivisionError("oops")

        with monkeypatch.context() as patched:
            patched.setattr(rendezvous, "step", broken)
            with pytest.raises(errors.InvariantError, match="oops"):
                await s.driver.engine.submit("job-7", join(n1))
        assert "ZeroDivisionError" in caplog.text
        assert set((await s.states()).values()) == {model.NodeState.SEATED}


async def test_history_that_waits_for_a_commit_is_shown_and_written_at_the_end() -> None:
    store = MemoryStore()
    async with server(store) as s:
        n1, _ = await s.pair()
        s.driver.connections.detach(n1)
        await settle()
        names = [row.name for row in await s.driver.operations.history("job-7", 100)]
        assert names[-1] == "NodeWentAway"
        assert "NodeWentAway" not in [row.name for row in await store.history("job-7", 100)]
    assert "NodeWentAway" in [row.name for row in await store.history("job-7", 100)]


async def test_a_job_that_can_not_be_read_leaves_the_others_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = MemoryStore()
    async with server(store) as s:
        await s.pair()
    store.jobs["bad"] = (b"?", 1)
    async with server(store) as s:
        assert await s.states() == {"n1": model.NodeState.AWAY, "n2": model.NodeState.AWAY}
        assert "leaving job bad alone" in caplog.text
        assert [view.rdzv_id for view in await s.listed()] == ["job-7"]
        with pytest.raises(errors.RendezvousStateError, match="job bad"):
            await s.status("bad")
    assert store.jobs["bad"] == (b"?", 1)


# ---------------------------------------------------------------- nodes


async def test_a_silent_node_is_lost_and_the_others_hear_why() -> None:
    async with server() as s:
        n1, n2 = await s.pair()
        await s.live(7_000, n1)
        (over,) = read(n1)
        assert isinstance(over, RoundOver)
        assert over.end.cause is model.Cause.NODE_LOST
        assert "lease expired" in over.end.reason
        assert isinstance(await end_of(n2), errors.RendezvousConnectionError)


async def test_the_end_of_a_stream_keeps_the_seat_for_a_lease() -> None:
    async with server() as s:
        n1, n2 = await s.pair()
        s.driver.connections.detach(n2)
        await settle()
        assert (await s.states())["n2"] is model.NodeState.AWAY
        await s.clock.advance(3_000)
        s.driver.connections.heard(n1)
        await s.come_back("n2")
        assert (await s.states())["n2"] is model.NodeState.SEATED
        assert read(n1) == []


async def test_a_node_that_comes_back_without_a_job_has_left_it() -> None:
    """It ended there while no stream was open, so its message was lost."""
    async with server() as s:
        n1, n2 = await s.pair()
        s.driver.connections.detach(n2)
        await s.connect("n2")
        over = last(n1, RoundOver)
        assert over.end.reason == "n2: it has returned, and no longer takes part"
        assert (await s.states())["n2"] is model.NodeState.LOST


async def test_a_belief_that_can_not_be_read_is_one_all_the_same() -> None:
    async with server() as s:
        _, n2 = await s.pair()
        s.driver.connections.detach(n2)
        await s.driver.recovery.greet(s.attach("n2"), [], unread=["job-7"])
        await settle()
        assert (await s.states())["n2"] is model.NodeState.SEATED


@pytest.mark.parametrize(("store_name", "waits"), [("memory", True), ("sqlite", False)])
async def test_a_server_without_memory_forms_no_round_before_nodes_could_come_back(
    store_name: str, *, waits: bool
) -> None:
    """A node that was faster formed a round alone, and the run of the others was not known."""

    def formed(stream: Stream) -> bool:
        return any(isinstance(message, model.Assignment) for message in read(stream))

    async with server(store_name=store_name) as s:
        await s.clock.advance(RECONNECT_MS - 2_000)
        n1 = await s.connect("n1")
        settings = model.Settings(1, 2, last_call_timeout_ms=1_000)
        await s.hear(n1, join(n1, settings=settings))
        await s.clock.advance(1_999)
        assert formed(n1) is not waits
        await s.clock.advance(1)
        assert formed(n1) is waits


async def test_a_stale_stream_of_the_same_instance_is_closed() -> None:
    async with server() as s:
        old = await s.connect("n1")
        new = await s.connect("n1")
        error = await end_of(old)
        assert isinstance(error, errors.RendezvousConnectionError)
        s.driver.connections.detach(old)
        assert new.open
        assert new.incarnation == old.incarnation
        with pytest.raises(errors.RendezvousConnectionError, match=r"in use by 10\.0\.0\.1 pid 99"):
            s.attach("n1", "two")


async def test_a_new_instance_takes_over_the_seat_that_it_speaks_for() -> None:
    """A daemon was restarted: its workers are adopted, and no node is lost."""
    async with server() as s:
        n1, n2 = await s.pair()
        line = next(told.assignments(*_round(s), 0))[1]
        s.driver.connections.detach(n1)
        stream = s.attach("n1", "two")
        await settle()
        await s.driver.recovery.greet(stream, [running(stream, line)])
        await settle()
        assert stream.incarnation > n1.incarnation
        assert read(stream)[1:] == [line]
        assert read(n2) == []
        assert set((await s.states()).values()) == {model.NodeState.SEATED}


def _round(s: Server) -> tuple[model.Membership, model.Round]:
    state = s.driver.jobs.peek("job-7")
    assert state is not None
    assert state.membership.round is not None
    return state.membership, state.membership.round


async def test_a_new_instance_that_knows_nothing_gives_its_former_self_up() -> None:
    async with server() as s:
        n1, n2 = await s.pair()
        s.driver.connections.detach(n1)
        await s.connect("n1", instance="two")
        (over,) = read(n2)
        assert isinstance(over, RoundOver)
        assert "a new instance of the node took its place" in over.end.reason


async def test_a_new_instance_that_dies_before_it_has_spoken_is_lost_all_the_same() -> None:
    async with server() as s:
        n1, n2 = await s.pair()
        s.driver.connections.detach(n1)
        s.driver.connections.detach(s.attach("n1", "two"))
        await s.live(16_000, n2)
        assert isinstance(read(n2)[0], RoundOver)


async def test_a_line_is_for_the_instance_that_has_the_seat() -> None:
    """A newly connected instance would start workers in place of its predecessor."""
    store = FlakyStore()
    async with server(store) as s:
        n1, former = await s.connect("n1"), await s.connect("n2")
        await s.join(n1)
        store.gate = asyncio.Event()
        completing = asyncio.ensure_future(s.hear(former, join(former)))
        await settle()
        s.driver.connections.detach(former)
        later = s.attach("n2", instance="two")
        store.gate.set()
        await completing
        await settle()
        assert any(isinstance(message, model.Assignment) for message in read(n1))
        assert not any(isinstance(message, model.Assignment) for message in read(later))


async def test_a_node_that_has_not_taken_in_its_line_hears_it_again() -> None:
    """It joins again from an older round, and is seated already."""
    async with server() as s:
        n1, n2 = await s.pair()
        await s.hear(n1, join(n1, run="run-1", left_round=0))
        await s.hear(n2, join(n2, run="run-1", left_round=0))
        (line,) = [message for message in read(n1) if isinstance(message, model.Assignment)]
        assert line.round == 1
        await s.hear(n1, join(n1, run="run-1", left_round=0))
        assert line in read(n1)


async def test_a_planned_absence_is_waited_for() -> None:
    async with server() as s:
        n1, n2 = await s.pair()
        s.driver.connections.plan_away(n1, 60_000)
        s.driver.connections.detach(n1)
        await s.live(50_000, n2)
        assert (await s.states())["n1"] is model.NodeState.AWAY
        await s.come_back("n1")
        assert (await s.states())["n1"] is model.NodeState.SEATED
        assert read(n2) == []


async def test_a_pause_of_the_server_proves_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with server() as s:
        n1, n2 = await s.pair()
        await s.clock.pause(20_000)
        assert "was blocked for" in caplog.text
        s.driver.connections.heard(n1)
        await s.clock.advance(4_000)
        s.driver.connections.heard(n2)
        assert set((await s.states()).values()) == {model.NodeState.SEATED}
        assert n1.open
        assert n2.open


@pytest.mark.slow
async def test_a_deadline_that_passed_in_a_pause_is_kept_while_steps_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each step sets the job's timer to the deadline again, which is no other pause."""
    async with server() as s:
        n1 = await s.connect("n1")
        await s.join(n1, (1, 2))
        await s.clock.pause(31_000)
        for number in range(10):
            offer = model.Offer("10.0.0.1", 2, machine="m1", store_port=5_000 + number)
            await s.hear(n1, join(n1, (1, 2), offer=offer))
            await s.clock.pause(400)
        assert caplog.text.count("was blocked for") == 1
        assert any(isinstance(message, model.Assignment) for message in read(n1))


@pytest.mark.slow
async def test_an_attempt_to_connect_during_a_pause_is_no_return_and_no_departure() -> None:
    """The node gave up waiting for a Welcome, and retries a little later."""
    async with server() as s:
        n1 = await s.connect("n1", kind=AgentKind.FOREGROUND)
        await s.join(n1, (1, 1))
        s.driver.connections.detach(n1)
        await s.clock.pause(12_000)
        attempt = s.attach("n1", kind=AgentKind.FOREGROUND, incarnation=n1.incarnation)
        s.driver.connections.detach(attempt)
        await s.clock.advance(20_000)
        assert await s.states() == {"n1": model.NodeState.AWAY}
        await s.come_back("n1", kind=AgentKind.FOREGROUND, incarnation=n1.incarnation)
        assert await s.states() == {"n1": model.NodeState.SEATED}


async def test_no_deadline_of_a_job_counts_before_input_is_read_after_a_pause() -> None:
    """The stop deadline passes while the server stands still; a message waits in the socket."""
    async with server() as s:
        n1, n2 = await s.pair()
        failure = report(message="boom", pid=99)
        await s.hear(n1, Fail("n1", n1.incarnation, "run-1", 0, (failure,)))
        await s.clock.pause(120_000)
        for stream in (n1, n2):
            await s.hear(stream, join(stream, run="run-1", left_round=0))
        await s.clock.advance(3_000)
        status = await s.status()
        assert status.state == "failed"
        assert (status.last_failure.root_cause.message, status.last_failure.others) == ("boom", ())
        names = [row.name for row in await s.driver.operations.history("job-7", 100)]
        assert "NodeLost" not in names


async def test_a_server_that_stops_moves_nobody() -> None:
    store = FlakyStore()
    async with server(store) as s:
        n1, n2 = await s.pair()
        writes = store.writes
        s.driver.close_streams(errors.RendezvousConnectionError("stopping"))
        for stream in (n1, n2):
            assert isinstance(await end_of(stream), errors.RendezvousConnectionError)
            s.driver.connections.detach(stream)
        with pytest.raises(errors.RendezvousConnectionError, match="stopping"):
            s.attach("n3")
    assert store.writes == writes


# ---------------------------------------------------------------- a new server


async def test_after_a_restart_seats_are_kept_for_the_grace_and_no_longer() -> None:
    store, clock = MemoryStore(), FakeClock()
    async with server(store, clock) as s:
        n1, _ = await s.pair()
        first = s.driver.leadership
    async with server(store, clock) as s:
        assert s.driver.leadership > first
        await clock.advance(20_000)
        assert await s.states() == {"n1": model.NodeState.AWAY, "n2": model.NodeState.AWAY}
        back = await s.come_back("n1", incarnation=n1.incarnation)
        assert back.incarnation == n1.incarnation
        await s.live(14_000, back)
        over = last(back, RoundOver)
        assert "n2" in over.end.reason
        assert (await s.states())["n2"] is model.NodeState.LOST


@pytest.mark.parametrize(
    ("answered", "becomes"), [(True, model.NodeState.LOST), (False, model.NodeState.AWAY)]
)
async def test_a_stream_is_a_nodes_own_once_the_welcome_is_answered(
    answered: bool, becomes: model.NodeState
) -> None:
    """Before, its end was an attempt that failed, also where all others have come back."""
    store, clock = MemoryStore(), FakeClock()
    async with server(store, clock) as s:
        n1 = await s.connect("n1", kind=AgentKind.FOREGROUND)
        await s.join(n1, (1, 1))
    async with server(store, clock) as s:
        back = await s.come_back("n1", kind=AgentKind.FOREGROUND, incarnation=n1.incarnation)
        if answered:
            s.driver.connections.heard(back)
        s.driver.connections.detach(back)
        await clock.advance(1_000)
        assert await s.states() == {"n1": becomes}


async def test_after_a_restart_a_node_hears_the_same_line() -> None:
    store, clock = MemoryStore(), FakeClock()
    async with server(store, clock) as s:
        n1, _ = await s.pair()
        line = next(told.assignments(*_round(s), 0))[1]
    async with server(store, clock) as s:
        stream = s.attach("n1", incarnation=n1.incarnation)
        await s.driver.recovery.greet(stream, [running(stream, line)])
        assert read(stream)[1:] == [line]


async def test_a_server_that_was_superseded_says_so() -> None:
    async with server() as s:
        with pytest.raises(
            errors.RendezvousConnectionError, match=r"superseded .* another endpoint"
        ):
            s.attach("n1", leadership=s.driver.leadership + 1)


async def test_a_job_that_is_not_known_stops_no_worker(caplog: pytest.LogCaptureFixture) -> None:
    async with server() as s:
        stream = s.attach("n1")
        resume = Resume("n1", stream.incarnation, "feed", 4)
        await s.driver.recovery.greet(stream, [Belief("job-9", "feed", 4, True, (resume,))])
        assert [type(message) for message in read(stream)] == [Welcome]
        assert "n1 is running round 4 of job job-9, run feed" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("incarnation", [0, 1])
async def test_who_was_not_told_its_incarnation_is_taken_back_at_once(incarnation: int) -> None:
    """A server is killed as a round completes: it was stored, but its nodes did not receive it.

    They know no incarnation, or only that of the server before.
    """
    store = MemoryStore()
    async with server(store) as s:
        await s.pair()
    async with server(store) as s:
        await s.come_back("n1", incarnation=incarnation)
        await s.come_back("n2", incarnation=incarnation)
        assert set((await s.states()).values()) == {model.NodeState.SEATED}


async def test_another_instance_waits_where_a_seat_was_not_heard() -> None:
    store = MemoryStore()
    async with server(store) as s:
        await s.pair()
    async with server(store) as s:
        with pytest.raises(errors.RendezvousConnectionError, match="admitted after 30 s"):
            s.attach("n1", "another")


async def test_the_successor_of_a_fenced_agent_waits_for_the_fence_alone() -> None:
    store = MemoryStore()
    async with server(store) as s:
        n1, n2 = await s.connect("n1", fence_after_ms=4_000), await s.connect("n2")
        await s.join(n1)
        await s.join(n2)
    async with server(store) as s:
        with pytest.raises(errors.RendezvousConnectionError, match=r"fence .* admitted after 5 s"):
            s.attach("n1", "another")
        await s.clock.advance(5_000)
        s.attach("n1", "another")


# ---------------------------------------------------------------- workers that may still run

MAY_RUN = "its workers may still run until it reports"


async def given_up(s: Server, *, silent: bool = False, **more: object) -> None:
    """Give n1 up, by silence or by the end of its stream, while n2 waits for another round."""
    n1 = await s.connect("n1", **more)
    n2 = await s.connect("n2")
    await s.join(n1)
    await s.join(n2)
    if not silent:
        s.driver.connections.detach(n1)
    await s.live(16_000, n2)
    stopped = join(n2, run="run-1", left_round=0)
    await s.hear(n2, stopped)
    await settle()


async def why_gone(s: Server) -> str:
    """Return what `status` says about n1."""
    return (await s.status()).reason.by_node["n1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "silent", "fence_after_ms", "may_run"),
    [
        (AgentKind.DAEMON, False, 0, True),
        (AgentKind.DAEMON, True, 0, True),
        (AgentKind.FOREGROUND, True, 0, True),
        (AgentKind.FOREGROUND, False, 0, False),
        (AgentKind.DAEMON, False, 4_000, False),
        (AgentKind.FOREGROUND, True, 4_000, False),
    ],
)
async def test_who_is_given_up_unheard_may_have_workers(
    kind: AgentKind,
    silent: bool,
    fence_after_ms: int,
    may_run: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Those of a foreground agent die with it, and a fence kills them in time."""
    async with server() as s:
        await given_up(s, silent=silent, kind=kind, fence_after_ms=fence_after_ms)
        assert (MAY_RUN in await why_gone(s)) is may_run
        assert (MAY_RUN in caplog.text) is may_run


async def test_who_is_heard_again_without_workers_has_none() -> None:
    async with server() as s:
        await given_up(s)
        await s.connect("n1", instance="another")
        assert MAY_RUN not in await why_gone(s)
        assert "n1" not in s.driver.node_jobs.node_ids


async def test_after_a_restart_of_the_server_it_is_still_not_known_until_it_is_heard() -> None:
    store = MemoryStore()
    async with server(store) as s:
        await given_up(s)
    async with server(store) as s:
        await s.connect("n2")
        assert MAY_RUN in await why_gone(s)
        await s.connect("n1", instance="another")
        assert MAY_RUN not in await why_gone(s)


@pytest.mark.slow
async def test_a_run_that_is_stopped_ends_when_the_successor_of_a_dead_agent_joins() -> None:
    """The join has to wait for the run's end, which waits for a message of the joining node."""
    async with server() as s:
        await given_up(s)
        await s.driver.operations.obey("job-7", Stop("run-1", "an operator"))
        assert (await s.status()).state == "stopping"
        n1 = s.attach("n1", "another")
        await s.driver.recovery.greet(n1, [asks_for("job-7", n1)])
        await settle()
        shown = await s.status()
        assert (shown.state, shown.run_number) == ("joining", 2)


@pytest.mark.slow
async def test_a_run_that_has_ended_hears_of_a_node_that_was_given_up() -> None:
    async with server() as s:
        await given_up(s)
        await s.driver.operations.obey("job-7", Stop("run-1", "an operator"))
        await s.clock.advance(90_000)
        assert (await s.status()).state == "stopped"
        assert MAY_RUN in await why_gone(s)
        await s.connect("n1", instance="another")
        assert MAY_RUN not in await why_gone(s)
        assert "n1" not in s.driver.node_jobs.node_ids


# ---------------------------------------------------------------- one job that fails, and others


class UnreadableStore(FlakyStore):
    """A store in which, on request, one job can no longer be read."""

    def __init__(self) -> None:
        super().__init__()
        self.unreadable = ""

    async def load(self, rdzv_id: str) -> Stored | None:
        if rdzv_id == self.unreadable:
            raise errors.RendezvousStateError(f"{rdzv_id} cannot be read")
        return await super().load(rdzv_id)


def broken_for(monkeypatch: pytest.MonkeyPatch, rdzv_id: str, kind: type) -> None:
    """Let each command of this kind break an invariant in one job, and in no other."""
    decided: list[Command] = []
    step = rendezvous.step

    def watched(state: model.State, command: Command, now_ms: int) -> rendezvous.Transition:
        decided.append(command)
        return step(state, command, now_ms)

    def violations(before: model.State, after: model.State) -> list[str]:
        breaks = isinstance(decided[-1], kind) and after.membership.rdzv_id == rdzv_id
        return ["a promise"] if breaks and after is not before else []

    monkeypatch.setattr(rendezvous, "step", watched)
    monkeypatch.setattr(engine_module, "violations", violations)


def asks_for(rdzv_id: str, stream: Stream) -> Belief:
    """The belief of a node that asks for a place in a job."""
    return Belief(rdzv_id, "", None, has_workers=False, commands=(join(stream),))


async def test_a_broken_guarantee_of_one_job_is_no_matter_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken_for(monkeypatch, "job-8", Join)
    async with server() as s:
        await s.join(await s.connect("n2"))
        n1 = s.attach("n1")
        await s.driver.recovery.greet(n1, [asks_for("job-7", n1), asks_for("job-8", n1)])
        await settle()
        said = read(n1)
        assert n1.open and any(isinstance(message, model.Assignment) for message in said)
        [waits] = [m for m in said if isinstance(m, Waiting) and m.rdzv_id == "job-8"]
        assert "can decide nothing about this job: a bug in rdzvd" in waits.reason
        assert not any(isinstance(message, Refused) for message in said)


async def test_who_has_no_other_job_says_everything_again_after_a_bug(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken_for(monkeypatch, "job-8", Join)
    async with server() as s:
        n1 = s.attach("n1")
        await s.driver.recovery.greet(n1, [asks_for("job-8", n1)])
        assert [m.code for m in read(n1) if isinstance(m, Refused)] == [errors.InvariantError.code]


async def test_a_broken_guarantee_about_who_came_back_without_a_job_ends_no_stream(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with server() as s:
        n1, _ = await s.pair()
        s.driver.connections.detach(n1)
        broken_for(monkeypatch, "job-7", MarkLost)
        again = s.attach("n1")
        await s.driver.recovery.greet(again, [asks_for("job-8", again)])
        assert again.open and again.greeted
        assert "job job-7: could not record the state of n1: a bug in rdzvd" in caplog.text
        assert (await s.driver.jobs.look("job-8")).present("n1")


async def test_a_refusal_that_can_not_be_explained_ends_no_stream() -> None:
    """The job could be read when the node was refused, and no longer when the reason is sent."""
    store = UnreadableStore()
    async with server(store) as s:
        _, n2 = await s.pair()
        await s.hear(n2, join(n2), "job-9")
        store.unreadable = "job-8"
        ended = Belief("job-8", "run-9", 0, has_workers=False)
        await s.driver.commands.refuse(n2, ended, errors.RendezvousClosedError("its run has ended"))
        assert n2.open
        [waits] = [m for m in read(n2) if isinstance(m, Waiting) and m.rdzv_id == "job-8"]
        assert "job-8 cannot be read" in waits.reason


async def test_what_a_node_holds_no_more_of_a_broken_job_ends_no_stream(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with server() as s:
        n1, _ = await s.pair()
        s.driver.fleet.note_holdings("n1", (Holding("job-7", "run-1", 0),))
        broken_for(monkeypatch, "job-7", MarkLost)
        await s.driver.reports.note_holdings(n1, ())
        assert n1.open
        assert "job job-7: could not record the state of n1: a bug in rdzvd" in caplog.text


# ---------------------------------------------------------------- what is kept, and for how long


@pytest.mark.slow
async def test_a_stream_keeps_nothing_of_jobs_that_are_over() -> None:
    async with server() as s:
        n1, n2 = await s.connect("n1"), await s.connect("n2")
        for number in range(20):
            rdzv_id = f"job-{number}"
            for stream in (n1, n2):
                await s.hear(stream, join(stream), rdzv_id)
            await settle()
            run = (await s.driver.jobs.look(rdzv_id)).membership.run
            for stream in (n1, n2):
                done = Succeed(stream.node_id, stream.incarnation, run, 0)
                await s.hear(stream, done, rdzv_id)
            await settle()
            assert (await s.driver.jobs.look(rdzv_id)).membership.ended is not None
            read(n1)
            read(n2)
        assert not n1.last_announced and not n2.last_announced
        assert not s.driver.node_jobs.node_ids


async def test_a_start_that_fails_leaves_no_timer_behind() -> None:
    """A job has been read when the store goes away."""
    store, clock = MemoryStore(), FakeClock()
    async with server(store, clock) as s:
        await s.pair()
    pages = store.pages

    async def cut_short() -> AsyncGenerator[Page, None]:
        async for page in pages():
            yield page
        raise errors.RendezvousConnectionError("the store has gone")

    store.pages = cut_short  # type: ignore[method-assign]
    before = [call for _, _, call in clock.calls if not call.cancelled]
    with pytest.raises(errors.RendezvousConnectionError, match="has gone"):
        async with server(store, clock):
            raise AssertionError("it cannot start")
    assert [call for _, _, call in clock.calls if not call.cancelled] == before


# ---------------------------------------------------------------- a stream that another followed


async def test_word_of_a_superseded_stream_changes_nothing() -> None:
    async with server() as s:
        former, _ = await s.pair()
        present = s.attach("n1", incarnation=former.incarnation)
        assert former.number != present.number
        fleet, hangs = s.driver.fleet, s.driver.hangs
        noted: list[str] = []
        relays = (
            (fleet, "note_health"),
            (fleet, "note_draining"),
            (fleet, "note_holdings"),
            (hangs, "take_report"),
            (s.driver.requests, "take"),
            (s.driver.stacks, "take_in"),
        )
        for owner, name in relays:
            setattr(owner, name, lambda *_, name=name: noted.append(name))

        async def say_all(stream: Stream) -> None:
            driver = s.driver
            driver.reports.take(stream, Health((FailingCheck("disk", "it is full"),)))
            driver.reports.take(stream, Draining(1_000, "preempted", 0, own=True))
            await driver.reports.note_holdings(stream, ())
            driver.reports.take(stream, Hung("job-7", "run-1", 0, ()))
            driver.reports.take(stream, LogPiece(1))
            driver.reports.take(stream, Stacks(1, last=True))

        await say_all(former)
        assert noted == []
        await say_all(present)
        assert sorted(noted) == sorted(name for _, name in relays)


# ---------------------------------------------------------------- a run that goes on as another


def waits(stream: Stream, run: str) -> Belief:
    """The belief of a node that has joined this run, and had no round of it."""
    return Belief("job-7", run, None, has_workers=False, commands=(join(stream, run=run),))


def runs_elsewhere(stream: Stream) -> Belief:
    """The belief of a node in a round that a server without memory does not know."""
    offer = join(stream).offer
    line = model.Assignment("job-7", "former", 3, 1, 2, 2, 4, 2, 4, "n1.net", 4711, True, 0, 0)
    claim = model.RecoveryReport(line, model.Settings(2, 2), offer)
    resume = Resume(stream.node_id, stream.incarnation, "former", 3, claim)
    return Belief("job-7", "former", 3, has_workers=True, commands=(resume,))


async def test_who_joins_in_the_commit_that_adopts_another_run_waits_in_that_one() -> None:
    """It was taken for a node that comes back without the job, and waited forever."""
    async with server() as s:
        n1, n2 = s.attach("n1"), s.attach("n2")
        await asyncio.gather(
            s.driver.recovery.greet(n1, [waits(n1, "first")]),
            s.driver.recovery.greet(n2, [runs_elsewhere(n2)]),
        )
        await settle()
        told_n1 = [message for message in read(n1) if not isinstance(message, Welcome)]
        joined = [message.run for message in told_n1 if isinstance(message, Joined)]
        assert joined == ["first", "former"], "both were decided at once"
        assert not any(isinstance(message, Closed) for message in told_n1)
        assert (await s.states())["n1"] is model.NodeState.SPARE


async def test_who_reconnects_before_that_commit_waits_in_the_adopted_run_all_the_same() -> None:
    """Its message on its new stream belongs to the run that has just ended for it."""
    store = FlakyStore()
    async with server(store) as s:
        store.gate = asyncio.Event()
        n1, n2 = s.attach("n1"), s.attach("n2")
        former = asyncio.ensure_future(s.driver.recovery.greet(n1, [waits(n1, "first")]))
        adopting = asyncio.ensure_future(s.driver.recovery.greet(n2, [runs_elsewhere(n2)]))
        await settle()
        former.cancel()
        s.driver.connections.detach(n1)
        n1 = s.attach("n1")
        store.gate.set()
        await s.driver.recovery.greet(n1, [waits(n1, "first")])
        await adopting
        await settle()
        told_n1 = read(n1)
        assert {message.run for message in told_n1 if isinstance(message, Joined)} >= {"former"}
        assert not any(isinstance(message, Closed) for message in told_n1)
        assert (await s.states())["n1"] is model.NodeState.SPARE


async def test_who_has_not_heard_that_its_run_goes_on_as_another_hears_it_later() -> None:
    """It was told that its run is over, though it had a place in the one that had followed."""
    async with server() as s:
        n1 = s.attach("n1")
        await s.driver.recovery.greet(n1, [waits(n1, "first")])
        s.driver.connections.detach(n1)
        n2 = s.attach("n2")
        await s.driver.recovery.greet(n2, [runs_elsewhere(n2)])
        n1 = s.attach("n1")
        await s.driver.recovery.greet(n1, [waits(n1, "first")])
        await settle()
        welcome, joined, waiting = read(n1)
        assert isinstance(welcome, Welcome)
        assert joined == Joined("job-7", "former", 2, forks=False)
        assert isinstance(waiting, Waiting)
        assert (await s.states())["n1"] is model.NodeState.SPARE
        s.driver.connections.detach(n1)
        n1 = s.attach("n1")
        leave = Leave("n1", n1.incarnation, "first", model.LeaveCause.SIGNAL, "bye")
        await s.driver.recovery.greet(n1, [replace(waits(n1, "first"), commands=(leave,))])
        assert (await s.states())["n1"] is model.NodeState.LEFT


async def test_who_comes_back_in_the_commit_that_adopts_its_run_waits_in_it() -> None:
    """Its run was unknown when its message came, and present when it was answered: by nothing."""
    store = FlakyStore()
    async with server(store) as s:
        n1, n2, n3 = (s.attach(node_id) for node_id in ("n1", "n2", "n3"))
        store.gate = asyncio.Event()
        fresh = asyncio.ensure_future(s.hear(n3, join(n3)))
        adopting = asyncio.ensure_future(s.driver.recovery.greet(n2, [runs_elsewhere(n2)]))
        await settle()
        back = asyncio.ensure_future(s.driver.recovery.greet(n1, [waits(n1, "former")]))
        await settle()
        store.gate.set()
        await asyncio.gather(fresh, adopting, back)
        await settle()
        assert [type(message) for message in read(n1)] == [Welcome, Joined, Waiting]
        assert (await s.states())["n1"] is model.NodeState.SPARE


@pytest.mark.parametrize("looks", [True, False], ids=["in that commit", "before it"])
async def test_who_is_refused_before_its_run_is_adopted_says_hello_again(looks: bool) -> None:
    """It was told that its run is over, and ended, though that run was the present one by then."""
    async with server() as s:
        n1, n2, n3 = (s.attach(node_id) for node_id in ("n1", "n2", "n3"))
        said = [(n3, waits(n3, "")), (n1, waits(n1, "former"))]
        # A reader that asks for the job first is refused with the claim, and otherwise just before.
        await asyncio.gather(
            *(
                s.driver.recovery.greet(stream, [belief])
                if looks
                else s.hear(stream, belief.commands[0])
                for stream, belief in said
            ),
            s.driver.recovery.greet(n2, [runs_elsewhere(n2)]),
        )
        await settle()
        refused = last(n1, Refused)
        assert refused.code == "UnknownNodeError", "no final refusal"
        s.driver.connections.detach(n1)
        n1 = s.attach("n1")
        await s.driver.recovery.greet(n1, [waits(n1, "former")])
        await settle()
        assert [type(message) for message in read(n1)] == [Welcome, Joined, Waiting]
        assert (await s.states())["n1"] is model.NodeState.SPARE


# ---------------------------------------------------------------- who is owed what


def step(state: model.State, *commands: typing.Any, now_ms: int = 1_000) -> model.State:
    for command in commands:
        state = rendezvous.step(state, command, now_ms).state
    return state


def a_join(node_id: str, **more: object) -> Join:
    offer = model.Offer("10.0.0.1", 2, machine="m1", store_port=4711)
    command = Join(node_id, 1, "", model.Settings(2, 2), offer, new_run="run-1")
    return replace(command, **more)  # type: ignore[arg-type]


VACANT = runs.vacant("job-7", TUNING)
JOINING = step(VACANT, a_join("n1"))
RUNNING = step(JOINING, a_join("n2"))
SPARE = step(RUNNING, a_join("n3"))
ENDED = step(SPARE, Leave("n2", 1, "run-1", model.LeaveCause.SIGNAL, "bye", 0))
N1_STOPPED = step(ENDED, a_join("n1", run="run-1", left_round=0))
SUCCEEDED = step(RUNNING, Succeed("n1", 1, "run-1", 0), Succeed("n2", 1, "run-1", 0))


def believes(round_: int | None, run: str = "run-1", *, has_workers: bool = True) -> Belief:
    return Belief("job-7", run, round_, has_workers)


@pytest.mark.parametrize(
    ("state", "node_id", "belief", "expected"),
    [
        pytest.param(VACANT, "n1", believes(0), [], id="unknown job: left alone"),
        pytest.param(JOINING, "n1", believes(None, has_workers=False), [Waiting], id="waits"),
        pytest.param(RUNNING, "n1", believes(0), [model.Assignment], id="runs"),
        pytest.param(
            RUNNING, "n1", believes(None, has_workers=False), [model.Assignment], id="missed it"
        ),
        pytest.param(RUNNING, "n1", believes(7), [], id="ahead: left alone, though seated"),
        pytest.param(RUNNING, "n9", believes(7), [], id="ahead: left alone"),
        pytest.param(RUNNING, "n9", believes(0), [RoundOver], id="no seat in it"),
        pytest.param(SPARE, "n3", believes(None, has_workers=False), [Waiting], id="spare"),
        pytest.param(ENDED, "n1", believes(0), [RoundOver], id="missed the end"),
        pytest.param(ENDED, "n2", believes(0), [RoundOver], id="seat given up"),
        pytest.param(
            N1_STOPPED, "n1", believes(0), [RoundOver, model.Assignment], id="in the next round"
        ),
        pytest.param(N1_STOPPED, "n2", believes(0), [RoundOver], id="an older round"),
        pytest.param(SUCCEEDED, "n1", believes(0), [Closed], id="closed"),
        pytest.param(RUNNING, "n1", believes(0, "feed"), [Closed], id="superseded run"),
        pytest.param(RUNNING, "n9", believes(None, "", has_workers=False), [], id="a stranger"),
    ],
)
def test_owed(state: model.State, node_id: str, belief: Belief, expected: list[type]) -> None:
    assert [type(message) for message in told.missed(state, node_id, belief, 2_000)] == expected


def test_who_joins_from_an_old_round_hears_that_its_seat_is_of_one_that_has_ended() -> None:
    assert N1_STOPPED.membership.round is not None
    seated = N1_STOPPED
    ended = step(seated, Fail("n1", 1, "run-1", 1, (report(pid=5),)))
    late = a_join("n1", run="run-1", left_round=0)
    assert isinstance(told.missed_assignment(seated, late, 0), model.Assignment)
    assert isinstance(told.missed_assignment(ended, late, 0), RoundOver)
    assert told.missed_assignment(ended, replace(late, left_round=1), 0) is None


def test_who_joins_the_next_run_does_not_hear_that_the_last_was_closed() -> None:
    ended = events.RunEnded("old", model.Ended(model.Result.STOPPED, "everyone was gone", 0))
    joined = events.NodeJoined("n1", 1, "10.0.0.1", 2)
    assert list(told.after_step(VACANT, JOINING, [ended, joined], 0)) == []
    heard = list(told.after_step(VACANT, VACANT, [joined, ended], 0))
    assert [(node_id, type(message)) for node_id, message in heard] == [("n1", Closed)]


# ---------------------------------------------------------------- words and timers


@pytest.mark.slow
async def test_a_pause_costs_one_task_for_a_job_however_many_nodes_it_has() -> None:
    """Otherwise each pause of a busy server would make it busier, endlessly."""
    store, clock = MemoryStore(), FakeClock()
    async with server(store, clock) as s:
        for number in range(40):
            await s.join(await s.connect(f"n{number}"), (40, 40))
    async with server(store, clock) as s:
        for _ in range(5):
            s.driver.leases.renew(1_000)
            assert s.driver.tasks.running <= 2
        await settle()
        assert set((await s.states()).values()) == {model.NodeState.AWAY}


def every_event() -> list[events.Event]:
    _, round_ = RUNNING.membership, RUNNING.membership.round
    assert round_ is not None
    failure = model.Failure(
        3, 11, 99, None, 9, "two\nlines\x1b[2J", "t", 0, node_id="n2", address="10.0.0.6"
    )
    ended = model.Ended(model.Result.FAILED, "spent", 0)
    return [
        events.RunBegan("run-1", 1, "first"),
        events.NodeJoined("n1", 1, "10.0.0.1", 1),
        events.NodeStopped("n1", 0),
        events.NodeSucceeded("n1", 0),
        events.NodeLeaving("n1", "drained"),
        events.NodeLeft("n1", "drained"),
        events.NodeWentAway("n1", 5_000),
        events.NodeCameBack("n1", 120),
        events.NodeLost("n1", "lease expired"),
        events.NodeStuck("n1", 0, "D state"),
        events.WorkerFailed(0, failure),
        events.LastCallBegan(2, 30_000),
        events.RoundCompleted(round_),
        events.RoundAdopted(round_),
        events.NodeAdopted("n1", 0, 0),
        events.RoundEnded(0, model.RoundEnd(model.Cause.NODE_LOST, "n2 was lost", 0, True)),
        events.RoundSettled(0, model.Cause.NODE_LOST, "n2 was lost", 0, 3),
        events.JobScaled(1, 2, "scaled by root at head"),
        events.NodesPlaced(("n1", "n2")),
        events.NodesWithdrawn(("n1",), "the job was scaled down"),
        events.NodeDeclined("n1", "the folder /data is not there"),
        events.NodeQuarantined("n1", 43_200_000, "at fault 3 times within 20 s, last in a: x"),
        events.NodeNotQuarantined("n1", "at fault once", "no other node is known"),
        events.NodeDrained("n1", "drained by ada: new kernel", 300_000),
        events.NodeUndrained("n1"),
        events.JobQueued("join timeout"),
        events.WorkersHang(0, "n1", "RANK 3: no progress reported for 61 s"),
        events.StacksTaken(0, "RANK 0-2 in all_reduce at train.py:41; RANK 3 in read at data.py:7"),
        events.HangOver(0),
        events.RankStraggles(0, 3, "n1", 2.1, 0.5),
        events.RankStraggles(0, 3, "n1", None, None, 19.5, 35.0, 2.0, 0.125),
        events.RankCaughtUp(0, 3, "n1"),
        events.WorkersStarted(1, 5, 1, 0, (events.NewWorker(3, "n2", "warm", "it was late"),)),
        events.SnapshotsNotLoaded(1, "n2", "the snapshot of step 3 in memory is damaged"),
        events.FirstCollectiveMade(1, "n1", 40),
        events.FirstStepMade(1, "n1", 3, 101, 300),
        events.LostStepsRedone(1, 140, 200),
        events.LastStepMade(1, 190, 1_400),
        events.SnapshotsSaved(1, 19, 2_300),
        events.RunEnded("run-1", ended),
    ]


def test_every_event_has_words_on_one_line() -> None:
    assert {type(event) for event in every_event()} == set(typing.get_args(events.Event))
    for event in every_event():
        text = sentence(kept(event))
        assert text
        assert text.isprintable()


def test_a_round_is_told_in_one_line_however_large() -> None:
    state = VACANT
    for number in range(12):
        state = step(state, a_join(f"n{number:02}", settings=model.Settings(12, 12)))
    assert state.membership.round is not None
    text = sentence(kept(events.RoundCompleted(state.membership.round)))
    assert text.startswith("round 0 complete: n00=0..1 n01=2..3 ")
    assert text.endswith("n07=14..15 and 4 more nodes, world_size 24, MASTER 10.0.0.1:4711")


def test_log_and_history_say_the_same(caplog: pytest.LogCaptureFixture) -> None:
    happened = every_event()
    rows = records("job-7", "run-1", happened, 5)
    with caplog.at_level(logging.DEBUG, "rdzv.events"):
        for row, event in zip(rows, happened, strict=True):
            log_events(Job("job-7", Timer(FakeClock(), print)), [row], [event], [kept(event)])
    for record, row in zip(caplog.records, rows, strict=True):
        assert record.getMessage() == f"job-7: {event_in(row).text}"
    line = log_format.JsonFormatter().format(caplog.records[0])
    assert '"rdzv_id": "job-7", "run": "run-1", "event": "RunBegan"' in line
    assert (
        log_format.HumanFormatter()
        .format(caplog.records[0])
        .endswith("INFO    job-7: run 1 (run-1) began: first")
    )


def test_the_log_has_a_failure_once_and_none_of_those_that_follow_from_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    job = Job("j", Timer(FakeClock(), print))

    def logged(*happened: events.Event) -> list[str]:
        """Return the lines of one step, at INFO."""
        caplog.clear()
        with caplog.at_level(logging.INFO, "rdzv.events"):
            rows = records("j", "r", happened, 5)
            log_events(job, rows, happened, [kept(event) for event in happened])
        return [record.getMessage() for record in caplog.records]

    reason = "rank 3 (local_rank 1) on n2: exit code 1: boom"
    boom = model.Failure(1, 3, 77, 1, None, "boom", "", 0, node_id="n2")
    follows = replace(boom, node_id="n1", rank=0)
    end = model.RoundEnd(model.Cause.WORKER_FAILURE, reason)
    failures = events.WorkerFailed(0, boom), events.WorkerFailed(0, follows)
    assert logged(events.RoundEnded(0, end), *failures, events.NodeStopped("n1", 0)) == [
        f"j: round 0 ended (worker failure): {reason}"
    ]
    settled = events.RoundSettled(0, end.cause, reason, 1, 3, boom)
    assert logged(settled) == [
        "j: round 0 is charged to worker failure (RANK 3 on n2); restarts spent: 1 of 3"
    ]
    # A root cause that is found later has its reason here, and nowhere else.
    assert logged(replace(settled, reason="rank 0 on n1: earlier")) == [
        "j: round 0 is charged to worker failure: rank 0 on n1: earlier; restarts spent: 1 of 3"
    ]
    gone = model.RoundEnd(model.Cause.NODE_LOST, "n1: lease expired", cause_node_id="n1")
    assert logged(events.RoundEnded(1, gone), events.NodeLost("n1", "lease expired")) == [
        "j: round 1 ended (node lost)",
        "j: n1 was lost: lease expired",
    ]
    assert logged(events.RoundSettled(1, gone.cause, gone.reason, 1, 3, cause_node_id="n1")) == [
        "j: round 1 is charged to node lost (n1); restarts spent: 1 of 3"
    ]


async def test_a_timer_fires_once_at_its_last_time() -> None:
    clock = FakeClock()
    fired: list[int] = []
    timer = Timer(clock, fired.append)
    timer.arm(clock.at_ms + 10)
    timer.arm(clock.at_ms + 20)
    timer.arm_by(clock.at_ms + 30)
    due_ms = clock.at_ms + 20
    await clock.advance(100)
    assert fired == [due_ms]
    timer.arm(clock.at_ms + 10)
    timer.arm(None)
    await clock.advance(100)
    assert fired == [due_ms]


async def test_a_tick_that_is_early_does_nothing() -> None:
    async with server() as s:
        await s.pair()
        assert (await s.driver.engine.submit("job-7", Tick())).membership.round is not None
