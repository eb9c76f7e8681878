"""The server knows which parts of a job's state each node holds, and announces complete ones."""

from __future__ import annotations

import pytest

from rdzv.core import model
from rdzv.core.commands import Fail
from rdzv.core.events import RoundCompleted
from rdzv.core.evidence.progress_lag import RankProgress
from rdzv.core.snapshots import (
    NodeHolding,
    RemainingSnapshots,
    SnapshotsKnown,
    SoleHolder,
    WhyNotLoaded,
)
from rdzv.messages import Announcement, SnapshotsHeld, SnapshotWatermark
from rdzv.server.diagnosis.snapshot_tracking import SnapshotTracking
from rdzv.server.operations.job_operations import with_workers
from rdzv.server.sessions.streams import Stream
from rdzv.server.telemetry.job_metrics_page import JobPage
from rdzv.stores.memory import MemoryStore
from rdzv.structs import replace
from rdzv.view import answers
from rdzv.view.history import fields_in, written
from rdzv.view.sentences import sentence_of
from tests.support.builders import report
from tests.support.driven import FakeClock, Server, read, running, server, settle

pytestmark = pytest.mark.slow

SAME_MACHINE = "all nodes are on one machine, and of one topology"


def mark(step: int, lineage: int = 0) -> model.SnapshotMark:
    return model.SnapshotMark(lineage, step, "a", 2)


def holds(shard: int, *marks: model.SnapshotMark, run: str = "run-1") -> SnapshotsHeld:
    held = tuple(model.Snapshot(n, one, shard, 1_000) for n, one in enumerate(marks))
    return SnapshotsHeld("job-7", run, held)


def heard(stream: Stream) -> list[Announcement]:
    told = [one for one in read(stream) if isinstance(one, SnapshotWatermark)]
    assert all(one.whole_ms > 0 for one in told)
    return [replace(one, whole_ms=0) for one in told]


def whole(s: Server) -> model.SnapshotMark | None:
    return s.snapshots("job-7").whole


def whole_at(step: int) -> list[SnapshotWatermark]:
    return [SnapshotWatermark("job-7", "run-1", mark(step))]


async def test_all_participants_hear_of_a_step_that_is_whole() -> None:
    async with server() as s:
        n1, n2 = await s.pair()
        s.report(n1, holds(0, mark(40)))
        assert (heard(n1), heard(n2), whole(s)) == ([], [], None)
        await s.clock.advance(3)
        s.report(n2, holds(1, mark(40)))
        assert heard(n1) == heard(n2) == whole_at(40)
        assert s.snapshots("job-7") == SnapshotsKnown(
            mark(40),
            s.clock.now_ms(),
            {"n1": NodeHolding(1, 1_000), "n2": NodeHolding(1, 1_000)},
            RemainingSnapshots(
                None, (SoleHolder("n1", SAME_MACHINE), SoleHolder("n2", SAME_MACHINE)), 2
            ),
        )
        # Once each; and again when the next one is complete.
        s.report(n2, holds(1, mark(40), mark(50)))
        assert (heard(n1), heard(n2)) == ([], [])
        s.report(n1, holds(0, mark(40), mark(50)))
        assert heard(n1) == heard(n2) == whole_at(50)
        assert s.snapshots("job-7").held["n1"] == NodeHolding(2, 2_000)


async def test_what_saving_has_cost_is_recorded_when_the_round_ends() -> None:
    """All ranks wait for the slowest; a step that not all have saved does not count."""

    async def costs(s: Server) -> list[str]:
        rows = await s.driver.history.of("job-7", 1_000)
        return [answers.event_in(row).text for row in rows if row.name == "SnapshotsSaved"]

    async with server() as s:
        nodes = await s.pair()
        for shard, stream in enumerate(nodes):
            for step, stopped_us in ((40, 300_000 + shard), (50, 1_200_000 - shard)):
                held = model.Snapshot(0, mark(step), shard, stopped_us=stopped_us)
                s.report(stream, SnapshotsHeld("job-7", "run-1", (held,)))
                s.report(stream, SnapshotsHeld("job-7", "run-1", (held,)))
        s.report(nodes[0], holds(0, mark(60)))
        assert await costs(s) == []
        failed = report(message="boom", pid=99, at_ms=s.clock.now_ms())
        await s.hear(nodes[0], Fail("n1", nodes[0].incarnation, "run-1", 0, (failed,)))
        await settle()
        said = ["round 0 saved 1 snapshot, which stopped training for 1.2 s"]
        assert await costs(s) == said


async def test_nothing_is_known_of_a_job_that_has_ended() -> None:
    async with server() as s:
        await s.pair()
        state = s.driver.jobs.peek("job-7")
        assert state is not None and state.membership.round is not None
        held = replace(state.membership, round=replace(state.membership.round, snapshot=mark(40)))
        over = replace(held, ended=model.Ended(model.Result.SUCCEEDED, "all workers exited 0", 7))
        tracking = SnapshotTracking(lambda _node, _said: True, lambda *_: None)
        assert tracking.shown(replace(state, membership=held)).whole == mark(40)
        assert tracking.shown(replace(state, membership=over)) == SnapshotsKnown()


async def test_who_has_no_seat_and_other_runs_do_not_count() -> None:
    async with server() as s:
        n1, n2 = await s.pair()
        spare = await s.connect("n3")
        await s.join(spare)
        s.report(n1, holds(0, mark(40)))
        s.report(spare, holds(1, mark(40)))
        s.report(n2, holds(1, mark(40), run="run-9"))
        assert (heard(n1), whole(s)) == ([], None)


async def test_a_node_that_missed_it_hears_of_it_when_it_is_back() -> None:
    async with server() as s:
        n1, n2 = await s.pair()
        s.report(n1, holds(0, mark(40)))
        s.driver.connections.detach(n1)
        s.report(n2, holds(1, mark(40)))
        assert heard(n2) == whole_at(40)
        line = next(one for one in [*read(n1), A_LINE] if isinstance(one, model.Assignment))
        n1 = await s.connect("n1", running(n1, line), incarnation=n1.incarnation)
        s.report(n1, holds(0, mark(40)))
        assert heard(n1) == whole_at(40)
        # Also if it had heard of it on the stream that has ended.
        s.driver.connections.detach(n1)
        n1 = await s.connect("n1", running(n1, line), incarnation=n1.incarnation)
        for told in (whole_at(40), []):
            s.report(n1, holds(0, mark(40)))
            assert heard(n1) == told


def saved(shard: int, *steps: int) -> SnapshotsHeld:
    """What one rank holds in its two slots."""
    held = tuple(model.Snapshot(0, mark(step), shard, 1_000) for step in steps)
    return SnapshotsHeld("job-7", "run-1", held)


async def test_ranks_that_hold_different_steps_are_told_that_these_are_given_up() -> None:
    """One heard that 40 is whole before it was to save 50, and the other only after."""
    async with server() as s:
        n1, n2 = await s.pair()
        for stream, shard in ((n1, 0), (n2, 1)):
            s.report(stream, saved(shard, 30, 40))
        assert heard(n1) == heard(n2) == whole_at(40)
        s.report(n1, saved(0, 40, 50))
        assert (heard(n1), heard(n2)) == ([], [])
        s.report(n2, saved(1, 40, 60))
        given_up = [SnapshotWatermark("job-7", "run-1", mark(40), given_up=mark(60))]
        assert heard(n1) == heard(n2) == given_up
        for stream, shard in ((n1, 0), (n2, 1)):
            s.report(stream, saved(shard, 40))
            s.report(stream, saved(shard, 40, 70))
        last = [SnapshotWatermark("job-7", "run-1", mark(70), given_up=mark(60))]
        assert heard(n1) == heard(n2) == last


async def test_a_step_that_is_whole_again_in_the_next_round_is_told_again() -> None:
    """Kept workers may redo a step that was announced before."""
    async with server() as s:
        await s.pair()
        state = s.driver.jobs.peek("job-7")
        assert state is not None and state.membership.round is not None
        told: list[str] = []
        tracking = SnapshotTracking(lambda name, _: told.append(name) is None, lambda *_: None)
        again = replace(state.membership.round, number=1, resume_step=30)
        for now in (state, replace(state, membership=replace(state.membership, round=again))):
            told.clear()
            for shard, node_id in enumerate(now.seats):
                tracking.note(now, node_id, saved(shard, 40), 1)
            assert told == ["n1", "n2"]


@pytest.mark.quick
async def test_it_is_shown_with_what_a_failure_would_cost() -> None:
    async with server() as s:
        n1, n2 = await s.pair()
        s.report(n1, holds(0, mark(40)))
        s.report(n2, holds(1, mark(40), mark(50)))
        await s.clock.advance(3_000)
        known = s.snapshots("job-7")
        progress = tuple(RankProgress(rank, 50 + rank, 0, None) for rank in range(4))
        view, now_ms = await s.status(), s.clock.now_ms()
        shown = with_workers(view, now_ms, progress, snapshots=known)
        sole = tuple(answers.SoleHolder(name, SAME_MACHINE) for name in ("n1", "n2"))
        alone = answers.NodeLoss(None, None, sole, 2)
        assert shown.snapshot == answers.WholeSnapshot(0, 40, 2, 3_000, 13, alone)
        assert [(n.snapshots, n.snapshot_bytes) for n in shown.nodes] == [(1, 1_000), (2, 2_000)]
        unknown = with_workers(view, now_ms, snapshots=known)
        assert unknown.snapshot == answers.WholeSnapshot(0, 40, 2, 3_000, None, alone)
        page, state = JobPage(), s.driver.jobs.peek("job-7")
        assert state is not None
        page.add_snapshots(state, known, progress, now_ms)
        lines = b"".join(page.parts()).decode().splitlines()
        assert [line for line in lines if line.startswith("rdzv_job_snapshot")] == [
            'rdzv_job_snapshot_step{rdzv_id="job-7"} 40',
            'rdzv_job_snapshot_age_seconds{rdzv_id="job-7"} 3.0',
            'rdzv_job_snapshot_lost_steps{rdzv_id="job-7"} 13',
            'rdzv_job_snapshots{rdzv_id="job-7"} 3',
            'rdzv_job_snapshot_bytes{rdzv_id="job-7"} 3000',
        ]


async def test_a_step_that_is_whole_without_any_one_node_is_shown_beside_the_newest() -> None:
    async with server() as s:
        n1, n2 = await s.pair()
        for stream, shard in ((n1, 0), (n2, 1)):
            copy = holds(1 - shard, mark(40)).snapshots
            own = holds(shard, mark(40), mark(50)).snapshots
            said = SnapshotsHeld("job-7", "run-1", (*own, *copy))
            s.report(stream, said)
        known, now_ms = s.snapshots("job-7"), s.clock.now_ms()
        progress = tuple(RankProgress(rank, 53, 0, None) for rank in range(4))
        view = await s.status()
        shown = with_workers(view, now_ms, progress, snapshots=known)
        assert shown.snapshot is not None and shown.snapshot.node_loss is not None
        loss = shown.snapshot.node_loss
        assert (shown.snapshot.step, shown.snapshot.lost_steps) == (50, 3)
        assert (loss.step, loss.lost_steps, loss.sole_holder_count) == (40, 13, 2)
        page, state = JobPage(), s.driver.jobs.peek("job-7")
        assert state is not None
        page.add_snapshots(state, known, progress, now_ms)
        assert b'\nrdzv_job_snapshot_step_without_a_node{rdzv_id="job-7"} 40\n' in b"".join(
            page.parts()
        )


@pytest.mark.quick
@pytest.mark.parametrize(
    ("loads", "why_not", "said"),
    [
        (1, None, "; all continue from the snapshots of step 40 in memory"),
        (0, None, ""),
        (
            0,
            WhyNotLoaded.NOT_WHOLE,
            "; snapshots in memory are not loaded: no step has all parts",
        ),
    ],
)
def test_a_round_says_what_is_loaded_or_why_nothing_is(
    loads: int, why_not: WhyNotLoaded | None, said: str
) -> None:
    participants = (model.Participant("n1", 1, model.Offer("h", local_world_size=2), 0, 0, 2),)
    round_ = model.Round(
        1, participants, "h", 1, True, 0, 5, snapshot=mark(40), snapshot_loads=loads
    )
    fields = fields_in(written(RoundCompleted(round_, not_loaded=why_not)))
    assert fields is not None
    text = sentence_of("RoundCompleted", fields)
    assert text == f"round 1 complete: n1=0..1, world_size 2, MASTER h:1{said}"


A_LINE = model.Assignment("job-7", "run-1", 0, 0, 2, 0, 4, 0, 4, "h", 1, False, 0, 0)


async def test_a_server_that_takes_over_learns_it_again() -> None:
    store, clock = MemoryStore(), FakeClock()
    async with server(store, clock) as s:
        n1, n2 = await s.pair()
        s.report(n1, holds(0, mark(40)))
        s.report(n2, holds(1, mark(40)))
    async with server(store, clock) as s:
        n1 = await s.connect("n1", running(n1, A_LINE), incarnation=n1.incarnation)
        second = replace(A_LINE, group_rank=1, rank_first=2)
        n2 = await s.connect("n2", running(n2, second), incarnation=n2.incarnation)
        assert whole(s) is None
        s.report(n1, holds(0, mark(30), mark(40)))
        s.report(n2, holds(1, mark(30), mark(40)))
        assert heard(n1) == heard(n2) == whole_at(40)
