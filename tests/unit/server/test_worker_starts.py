"""How the workers of a round were started is known once their nodes have reported it."""

from __future__ import annotations

import pytest

from rdzv import bounds
from rdzv.core.commands import Leave, Restart
from rdzv.core.model import Assignment, LeaveCause
from rdzv.errors import InvalidRequestError
from rdzv.messages import Joined, StartedWorker, WorkersStarted
from rdzv.server import wire
from rdzv.server.diagnosis.round_reports import Starts
from rdzv.stores.memory import MemoryStore
from rdzv.structs import replace
from rdzv.v1 import rdzv_pb2 as pb
from rdzv.view.answers import event_in
from tests.support.driven import FakeClock, Server, join, read, running, server, settle

pytestmark = pytest.mark.slow

LATE = "it did not park in time"


def said(*how: str, why: str = "", round_: int = 0) -> WorkersStarted:
    workers = tuple(
        StartedWorker(n, one, "" if one == "kept" else why) for n, one in enumerate(how)
    )
    return WorkersStarted("job-7", "run-1", round_, workers)


async def told(s: Server) -> list[str]:
    rows = [event_in(row) for row in await s.driver.history.of("job-7", 100)]
    return [row.text for row in rows if row.name == "WorkersStarted"]


async def test_they_are_recorded_once_all_nodes_have_said_so() -> None:
    async with server() as s:
        n1, n2 = await s.pair()
        s.report(n2, said("kept", "warm", why=LATE))
        assert s.starts("job-7") == {"n2": Starts(1, 1, 0)}
        assert not await told(s)
        for _ in range(2):
            s.report(n1, said("kept", "cold"))
        assert s.starts("job-7") == {"n1": Starts(1, 0, 1), "n2": Starts(1, 1, 0)}
        assert await told(s) == [
            f"workers of round 0: 2 kept, 1 warm, 1 cold: RANK 3 on n2 is warm ({LATE})"
        ]


async def test_waiting_nodes_hear_of_the_script_once_all_nodes_have_said_the_same() -> None:
    async with server() as s:
        n1, n2 = await s.pair()
        n3 = await s.connect("n3")
        await s.join(n3)
        read(n3)

        def heard() -> list[tuple[str, int]]:
            return [(one.script, one.renewed) for one in read(n3) if isinstance(one, Joined)]

        elastic = replace(said("cold", "cold"), script="abc")
        s.report(n1, said("cold", "cold"))
        s.report(n1, elastic)
        s.report(n2, said("cold", "cold"))
        assert heard() == []
        s.report(n2, elastic)
        assert heard() == [("abc", 0)]
        s.report(n2, replace(elastic, forks=True))
        assert heard() == [], "there is no news"
        await s.join(n3)
        assert heard() == [("abc", 0)]
        # An operator asks for new processes: what n3 has started by then is too old.
        state = s.driver.jobs.peek("job-7")
        assert state is not None
        run = state.membership.run
        await s.driver.operations.obey("job-7", Restart(run, 0, "new code"))
        for stream in (n1, n2):
            await s.hear(stream, replace(join(stream, (2, 2)), run=run, left_round=0))
        await settle()
        read(n3)
        await s.join(n3)
        assert heard() == [("", 1)]


async def test_nodes_with_different_scripts_give_nobody_a_standby() -> None:
    async with server() as s:
        n1, n2 = await s.pair()
        n3 = await s.connect("n3")
        for node, script in ((n1, "abc"), (n2, "def")):
            s.report(node, replace(said("cold", "cold"), script=script))
        await s.join(n3)
        assert [one.script for one in read(n3) if isinstance(one, Joined)] == [""]


async def test_a_newcomer_hears_whether_the_zygotes_of_all_nodes_serve_the_script() -> None:
    async with server() as s:
        n1, n2 = await s.pair()
        n3 = await s.connect("n3")

        async def heard() -> bool | None:
            await s.join(n3)
            (joined,) = [one for one in read(n3) if isinstance(one, Joined)]
            return joined.forks

        assert await heard() is False
        forks = replace(said("cold", "cold"), forks=True)
        s.report(n1, forks)
        assert await heard() is False
        s.report(n2, said("cold", "cold"))
        s.report(n2, forks)
        assert await heard() is True
        s.report(n1, said("cold", "cold"))
        assert await heard() is False, "it has lost its zygote"


async def test_each_node_that_loads_no_snapshots_is_named_once_in_a_round() -> None:
    async with server() as s:
        n1, n2 = await s.pair()
        lost = replace(said("cold", "cold"), not_loaded="step 3 is damaged")
        for stream, report in ((n1, said("cold", "cold")), (n1, lost), (n1, lost), (n2, lost)):
            s.report(stream, report)
        rows = [event_in(row) for row in await s.driver.history.of("job-7", 100)]
        assert [row.text for row in rows if row.name == "SnapshotsNotLoaded"] == [
            f"{node} did not load snapshots in round 0: step 3 is damaged" for node in ("n1", "n2")
        ]
        assert len(await told(s)) == 1


async def test_a_server_that_takes_over_hears_it_again() -> None:
    store, clock = MemoryStore(), FakeClock()
    line = Assignment("job-7", "run-1", 0, 0, 2, 0, 4, 0, 4, "h", 1, False, 0, 0)
    async with server(store, clock) as s:
        n1, _ = await s.pair()
    async with server(store, clock) as s:
        n1 = await s.connect("n1", running(n1, line), incarnation=n1.incarnation)
        assert s.starts("job-7") == {}
        s.report(n1, said("warm", "warm"))
        assert s.starts("job-7") == {"n1": Starts(0, 2, 0)}


async def test_a_round_that_ends_takes_them_along() -> None:
    async with server() as s:
        n1, n2 = await s.pair()
        s.report(n1, said("cold", "cold"))
        leaving = Leave("n2", n2.incarnation, "run-1", LeaveCause.SIGNAL, "bye", None)
        await s.hear(n2, leaving)
        s.report(n1, said("cold", "cold"))
        assert s.starts("job-7") == {}


@pytest.mark.quick
async def test_another_round_and_a_node_without_a_seat_are_passed_over() -> None:
    async with server() as s:
        n1, _ = await s.pair()
        spare = await s.connect("n3")
        await s.join(spare)
        s.report(spare, said("cold", "cold"))
        s.report(n1, said("cold", "cold", round_=1))
        assert s.starts("job-7") == {}


@pytest.mark.parametrize("how", [("cold",), ("cold",) * 3])
async def test_each_worker_of_the_node_is_named_once(how: tuple[str, ...]) -> None:
    async with server() as s:
        n1, _ = await s.pair()
        with pytest.raises(InvalidRequestError, match=r"n1 names \d, and has local_rank 0..1 in"):
            s.report(n1, said(*how))
        assert s.starts("job-7") == {}


@pytest.mark.quick
def test_a_report_is_bounded() -> None:
    message = pb.WorkersStarted(rdzv_id="job-7", run="feed", round=2)
    message.workers.add(local_rank=1, how="warm", why="a\nb" * 1_000)
    started = wire.report_of(pb.NodeMessage(workers_started=message))
    assert isinstance(started, WorkersStarted)
    (worker,) = started.workers
    assert worker.why.startswith("a ba b")
    assert len(worker.why) == bounds.LABEL_CHARS
    message.workers.extend(pb.StartedWorker() for _ in range(bounds.LOCAL_WORLD_SIZE))
    with pytest.raises(InvalidRequestError, match="workers 4097 are too many"):
        wire.report_of(pb.NodeMessage(workers_started=message))
