"""What nodes hold of a job's state is known to the server, and nodes hear what is whole."""

from __future__ import annotations

from rdzv.core.model import Snapshot, SnapshotMark
from rdzv.server.diagnosis.snapshot_tracking import Held
from rdzv.server.messages import Announcement, Assignment, SnapshotsHeld, SnapshotWatermark
from rdzv.server.sessions.streams import Stream
from rdzv.stores.memory import MemoryStore
from rdzv.structs import replace
from tests.unit.server.test_driver import FakeClock, Server, read, running, server


def mark(step: int, lineage: int = 0, world_size: int = 4) -> SnapshotMark:
    return SnapshotMark(lineage, step, "a", 2, world_size)


def holds(shard: int, *marks: SnapshotMark, run: str = "run-1") -> SnapshotsHeld:
    held = tuple(Snapshot(n, one, shard, 1_000) for n, one in enumerate(marks))
    return SnapshotsHeld("job-7", run, held)


def heard(stream: Stream) -> list[Announcement]:
    return [told for told in read(stream) if isinstance(told, SnapshotWatermark)]


def whole(s: Server) -> tuple[SnapshotMark, int] | None:
    state = s.driver.jobs.peek("job-7")
    assert state is not None
    return s.driver.diagnosis.snapshots.whole(state)


def whole_at(step: int) -> list[SnapshotWatermark]:
    return [SnapshotWatermark("job-7", "run-1", mark(step))]


async def test_all_participants_hear_of_a_step_that_is_whole() -> None:
    async with server() as s:
        n1, n2 = await s.pair()
        s.driver.reports.note_snapshots(n1, holds(0, mark(40)))
        assert (heard(n1), heard(n2), whole(s)) == ([], [], None)
        await s.clock.advance(3)
        s.driver.reports.note_snapshots(n2, holds(1, mark(40)))
        assert heard(n1) == heard(n2) == whole_at(40)
        assert whole(s) == (mark(40), s.clock.now_ms())
        # Once each; and again when the next is whole.
        s.driver.reports.note_snapshots(n2, holds(1, mark(40), mark(50)))
        assert (heard(n1), heard(n2)) == ([], [])
        s.driver.reports.note_snapshots(n1, holds(0, mark(40), mark(50)))
        assert heard(n1) == heard(n2) == whole_at(50)
        state = s.driver.jobs.peek("job-7")
        assert state is not None
        assert s.driver.diagnosis.snapshots.held(state, "n1") == Held(2, 2_000)


async def test_who_has_no_seat_and_other_runs_do_not_count() -> None:
    async with server() as s:
        n1, n2 = await s.pair()
        spare = await s.connect("n3")
        await s.join(spare)
        s.driver.reports.note_snapshots(n1, holds(0, mark(40)))
        s.driver.reports.note_snapshots(spare, holds(1, mark(40)))
        s.driver.reports.note_snapshots(n2, holds(1, mark(40), run="run-9"))
        assert (heard(n1), whole(s)) == ([], None)


async def test_a_node_that_missed_it_hears_of_it_when_it_is_back() -> None:
    async with server() as s:
        n1, n2 = await s.pair()
        s.driver.reports.note_snapshots(n1, holds(0, mark(40)))
        s.driver.connections.detach(n1)
        s.driver.reports.note_snapshots(n2, holds(1, mark(40)))
        assert heard(n2) == whole_at(40)
        line = next(one for one in [*read(n1), A_LINE] if isinstance(one, Assignment))
        n1 = await s.connect("n1", running(n1, line), incarnation=n1.incarnation)
        s.driver.reports.note_snapshots(n1, holds(0, mark(40)))
        assert heard(n1) == whole_at(40)


A_LINE = Assignment("job-7", "run-1", 0, 0, 2, 0, 4, 0, 4, "h", 1, False, 0, 0)


async def test_a_server_that_takes_over_learns_it_again() -> None:
    store, clock = MemoryStore(), FakeClock()
    async with server(store, clock) as s:
        n1, n2 = await s.pair()
        s.driver.reports.note_snapshots(n1, holds(0, mark(40)))
        s.driver.reports.note_snapshots(n2, holds(1, mark(40)))
    async with server(store, clock) as s:
        n1 = await s.connect("n1", running(n1, A_LINE), incarnation=n1.incarnation)
        second = replace(A_LINE, group_rank=1, rank_first=2)
        n2 = await s.connect("n2", running(n2, second), incarnation=n2.incarnation)
        assert whole(s) is None
        s.driver.reports.note_snapshots(n1, holds(0, mark(30), mark(40)))
        s.driver.reports.note_snapshots(n2, holds(1, mark(30), mark(40)))
        assert heard(n1) == heard(n2) == whole_at(40)
