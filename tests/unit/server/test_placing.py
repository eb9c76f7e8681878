"""Submitted jobs at a server: placed, sent, withdrawn, remembered. The test moves the clock."""

from __future__ import annotations

from functools import partial

import pytest

from rdzv import errors, messages
from rdzv.core import model
from rdzv.core.commands import Decline, Join, Leave, Resume, Scale, Stop, Submit, Succeed
from rdzv.core.fleet.node_resources import FailingCheck, Gpu, NodeResources
from rdzv.server.sessions.streams import Stream
from rdzv.stores.memory import MemoryStore
from rdzv.structs import replace
from rdzv.view.answers import event_in
from tests.support.driven import FakeClock, FlakyStore, Server, read, server, settle

pytestmark = pytest.mark.slow

HELD = messages.Holdings((messages.Holding("job-7", "sub-1", 1),))
HAS = NodeResources(
    cpus=8, memory_bytes=1 << 30, gpus=(Gpu("u0", "H100", 1),), labels=(("zone", "a"),)
)
SPEC = model.JobSpec(args=("train.py",), env=(("TOKEN", "secret"),), local_world_size=1)
QUIET_MS = 100


def submission(run: str = "sub-1", nodes: tuple[int, int] = (2, 2), **spec: object) -> Submit:
    return Submit(run, model.Settings(*nodes), replace(SPEC, **spec), "ada at head")  # type: ignore[arg-type]


async def daemons(s: Server, *names: str, **more: object) -> list[Stream]:
    """Nodes that accept submitted jobs; their messages so far have been read."""
    s.driver.placer.settled_at_ms = 0
    streams = [await s.connect(name, resources=HAS, **more) for name in names]
    await s.clock.advance(QUIET_MS)
    for stream in streams:
        read(stream)
    return streams


def placements(stream: Stream) -> list[messages.Placed | messages.Withdrawn]:
    return [told for told in read(stream) if isinstance(told, messages.Placed | messages.Withdrawn)]


async def take_up(
    s: Server, stream: Stream, placed: messages.Announcement, nodes: tuple[int, int] = (2, 2)
) -> None:
    """Accept a placement, and join the job."""
    assert isinstance(placed, messages.Placed)
    await s.driver.reports.note_holdings(stream, (messages.Holding(placed.rdzv_id, placed.run, 1),))
    offer = model.Offer(f"10.0.0.{stream.node_id[1:]}", 1, machine=stream.node_id, store_port=4711)
    join = Join(stream.node_id, stream.incarnation, placed.run, model.Settings(*nodes), offer)
    await s.hear(stream, join, placed.rdzv_id)
    await settle()


async def reason(s: Server, rdzv_id: str) -> str:
    return str((await s.status(rdzv_id)).reason)


@pytest.mark.quick
async def test_a_submitted_job_is_placed_joined_and_run() -> None:
    async with server() as s:
        n1, n2 = await daemons(s, "n1", "n2")
        shown = await s.driver.operations.submit_job("job-7", submission())
        assert shown.submission is not None
        assert shown.submission.placed == ("n1", "n2")
        assert [(n.node_id, n.state) for n in shown.nodes] == [("n1", "waiting"), ("n2", "waiting")]
        for stream in (n1, n2):
            (placed,) = placements(stream)
            assert placed == messages.Placed("job-7", "sub-1", SPEC)
            await take_up(s, stream, placed)
        assert all(isinstance(read(stream)[-1], model.Assignment) for stream in (n1, n2))
        assert (await s.status()).state == "running"


async def test_a_job_waits_for_its_nodes_and_says_so() -> None:
    async with server() as s:
        shown = await s.driver.operations.submit_job("job-7", submission())
        assert shown.reason.headline == "needs 2 nodes, and no rdzv-agent is connected"
        (n1,) = await daemons(s, "n1")
        assert await reason(s, "job-7") == (
            "needs 2 nodes, 1 is free (n1); if all other jobs had ended it would still lack 1 node"
        )
        assert placements(n1) == []
        await daemons(s, "n2")
        assert (await s.status()).submission.placed == ("n1", "n2")  # type: ignore[union-attr]


@pytest.mark.quick
async def test_what_is_submitted_again_is_submitted_once() -> None:
    async with server() as s:
        await s.driver.operations.submit_job("job-7", submission())
        await s.driver.operations.submit_job("job-7", submission())
        assert (await s.status()).run_number == 1
        with pytest.raises(
            errors.JobExistsError, match=r"a job job-7 already exists, submitted by ada"
        ):
            await s.driver.operations.submit_job("job-7", submission("sub-2"))


@pytest.mark.quick
async def test_a_job_that_no_node_could_ever_take_is_refused() -> None:
    async with server() as s:
        await daemons(s, "n1")
        with pytest.raises(
            errors.InvalidRequestError, match=r"the best match: n1 has zone=a\. Ask for less"
        ):
            await s.driver.operations.submit_job("job-7", submission(labels=(("zone", "b"),)))
        with pytest.raises(errors.InvalidRequestError, match="n1 has 1 GPU"):
            await s.driver.operations.submit_job("job-7", submission(gpus_per_node=2))
        assert await s.listed() == []
        # The right one of a server that has just started may be on its way.
        s.driver.placer.settled_at_ms = s.clock.now_ms() + 1
        await s.driver.operations.submit_job("job-7", submission(gpus_per_node=2))


async def test_the_next_job_gets_the_nodes_once_nothing_is_left_on_them() -> None:
    async with server() as s:
        n1, n2 = await daemons(s, "n1", "n2")
        await s.driver.operations.submit_job("job-7", submission())
        await s.driver.operations.submit_job("job-8", submission("sub-2"))
        assert await reason(s, "job-8") == ("needs 2 nodes, none are free; n1, n2: taken by job-7")
        for stream in (n1, n2):
            await take_up(s, stream, placements(stream)[0])
        for stream in (n1, n2):
            succeed = Succeed(stream.node_id, stream.incarnation, "sub-1", 0)
            await s.hear(stream, succeed)
        assert all(isinstance(read(stream)[-1], messages.Closed) for stream in (n1, n2))
        await s.clock.advance(QUIET_MS)
        # The job has ended; its processes may not be gone yet.
        assert [placements(stream) for stream in (n1, n2)] == [[], []]
        assert await reason(s, "job-8") == ("needs 2 nodes, none are free; n1, n2: taken by job-7")
        for stream in (n1, n2):
            await s.driver.reports.note_holdings(stream, ())
        await s.clock.advance(QUIET_MS)
        assert [placements(stream)[0].run for stream in (n1, n2)] == ["sub-2", "sub-2"]


@pytest.mark.quick
async def test_a_node_that_declines_is_replaced() -> None:
    async with server() as s:
        n1, _, n3 = await daemons(s, "n1", "n2", "n3")
        await s.driver.operations.submit_job("job-7", submission())
        why = "the folder /data is not on this node"
        await s.hear(n1, Decline("n1", "sub-1", why))
        await s.clock.advance(QUIET_MS)
        assert isinstance(placements(n3)[0], messages.Placed)
        shown = (await s.status()).submission
        assert shown is not None
        assert shown.placed == ("n2", "n3")
        assert [(d.node_id, d.reason) for d in shown.declined] == [("n1", why)]


async def test_a_job_that_no_node_could_run_has_failed() -> None:
    async with server() as s:
        (n1,) = await daemons(s, "n1")
        await s.live(40_000, n1)
        await s.driver.operations.submit_job("job-7", submission(nodes=(1, 1)))
        await s.hear(n1, Decline("n1", "sub-1", "no such folder"))
        await s.clock.advance(QUIET_MS)
        shown = await s.status()
        assert (shown.state, shown.reason.headline) == (
            "failed",
            "no node could run it: n1: no such folder",
        )


async def test_nodes_that_could_not_run_it_for_one_reason_are_told_together() -> None:
    async with server() as s:
        nodes = await daemons(s, "n1", "n2")
        await s.live(40_000, *nodes)
        await s.driver.operations.submit_job("job-7", submission(nodes=(2, 2)))
        for name, node in zip(("n1", "n2"), nodes, strict=True):
            await s.hear(node, Decline(name, "sub-1", "no such folder"))
        await s.clock.advance(QUIET_MS)
        shown = await s.status()
        assert shown.reason.headline == "no node could run it: n1, n2: no such folder"


async def test_a_node_that_is_lost_before_it_joined_is_replaced() -> None:
    async with server() as s:
        n1, n2, n3 = await daemons(s, "n1", "n2", "n3")
        await s.driver.operations.submit_job("job-7", submission())
        s.driver.connections.detach(n2)
        await s.live(model.DAEMON_RETURN_MS + 1_000, n1, n3)
        assert (await s.status()).submission.placed == ("n1", "n3")  # type: ignore[union-attr]
        assert isinstance(placements(n3)[0], messages.Placed)


async def test_what_a_lost_node_had_for_jobs_is_lost_with_it() -> None:
    async with server() as s:
        (n1,) = await daemons(s, "n1")
        s.driver.connections.detach(n1)
        await s.clock.advance(60_000)
        assert not s.driver.fleet.reported


async def test_a_node_that_comes_back_hears_what_it_has_missed() -> None:
    async with server() as s:
        (n1,) = await daemons(s, "n1")
        await s.driver.operations.submit_job("job-7", submission(nodes=(1, 1)))
        s.driver.connections.detach(n1)
        again = await s.connect("n1", resources=HAS)
        assert placements(again) == [messages.Placed("job-7", "sub-1", SPEC)]
        s.driver.connections.detach(again)
        held = await s.connect("n1", resources=HAS, holdings=HELD)
        assert placements(held) == []


async def test_a_node_that_holds_what_is_over_is_told_so() -> None:
    async with server() as s:
        (n1,) = await daemons(s, "n1")
        await s.driver.operations.submit_job("job-7", submission(nodes=(1, 1)))
        s.driver.connections.detach(n1)
        await s.driver.operations.obey("job-7", Stop("sub-1", "stopped by ada"))
        again = await s.connect("n1", resources=HAS, holdings=HELD)
        assert placements(again) == [messages.Withdrawn("job-7", "sub-1", "the job has stopped")]


async def test_stopping_a_job_withdraws_those_who_have_not_joined() -> None:
    async with server() as s:
        n1, n2 = await daemons(s, "n1", "n2")
        await s.driver.operations.submit_job("job-7", submission())
        await take_up(s, n1, placements(n1)[0])
        read(n1)
        assert [type(told) for told in placements(n2)] == [messages.Placed]
        await s.driver.operations.obey("job-7", Stop("sub-1", "stopped by ada"))
        assert isinstance(read(n1)[-1], messages.Closed)
        assert placements(n2) == [messages.Withdrawn("job-7", "sub-1", "the job has stopped")]


@pytest.mark.quick
async def test_a_server_that_takes_over_goes_on_with_the_queue() -> None:
    store, clock = MemoryStore(), FakeClock()
    async with server(store, clock) as s:
        await daemons(s, "n1")
        await s.driver.operations.submit_job("job-7", submission(nodes=(1, 1)))
        await s.driver.operations.submit_job("job-8", submission("sub-2", (1, 1)))
    async with server(store, clock) as s:
        n2, n1 = await s.connect("n2", resources=HAS), await s.connect("n1", resources=HAS)
        assert placements(n1) == [messages.Placed("job-7", "sub-1", SPEC)]
        await s.clock.advance(QUIET_MS)
        assert placements(n2) == [messages.Placed("job-8", "sub-2", SPEC)]


async def test_who_never_comes_back_after_a_take_over_is_replaced() -> None:
    store, clock = MemoryStore(), FakeClock()
    async with server(store, clock) as s:
        await daemons(s, "n1")
        await s.driver.operations.submit_job("job-7", submission(nodes=(1, 1)))
    async with server(store, clock) as s:
        n2 = await s.connect("n2", resources=HAS)
        await s.live(20_000, n2)
        assert placements(n2) == []
        await s.live(11_000, n2)
        assert placements(n2) == [messages.Placed("job-7", "sub-1", SPEC)]


async def test_a_stopping_job_lets_go_of_who_never_comes_back() -> None:
    store, clock = MemoryStore(), FakeClock()
    async with server(store, clock) as s:
        n1, _ = await daemons(s, "n1", "n2")
        await s.driver.operations.submit_job("job-7", submission(nodes=(1, 2)))
        placed = placements(n1)[0]
        await take_up(s, n1, placed, (1, 2))
        await s.clock.advance(11_000)
        await s.driver.operations.obey("job-7", Stop("sub-1", "stopped by ada"))
        assert (await s.status()).state == "stopping"
    async with server(store, clock) as s:
        n1 = s.attach("n1", incarnation=n1.incarnation, resources=HAS)
        resume = Resume("n1", n1.incarnation, "sub-1", 0)
        belief = messages.Belief("job-7", "sub-1", 0, has_workers=True, commands=(resume,))
        await s.driver.recovery.greet(n1, [belief])
        await s.driver.operations.submit_job("job-8", submission("sub-2", (3, 3)))
        await s.live(35_000, n1)
        shown = await s.status()
        assert (shown.state, shown.submission and shown.submission.placed) == ("stopping", ("n1",))
        assert (await s.status("job-8")).reason.headline.startswith("needs 3 nodes")
        await s.live(60_000, n1)
        assert (await s.status()).state == "stopped"


async def test_a_cordoned_node_gets_nothing_more_and_stays_so() -> None:
    store, clock = MemoryStore(), FakeClock()
    async with server(store, clock) as s:
        (n1,) = await daemons(s, "n1")
        await s.driver.fleet.cordon("n1", "fan")
        shown = s.node("n1")
        assert (shown.cordoned, shown.cordon_reason, shown.state) == (True, "fan", "connected")
        await s.driver.operations.submit_job("job-7", submission(nodes=(1, 1)))
        assert await reason(s, "job-7") == (
            "needs 1 node, none is free; if all other jobs had ended it would still lack 1 node; "
            "n1 (cordoned): fan; `rdzvctl uncordon` lifts that"
        )
    async with server(store, clock) as s:
        assert [(n.node_id, n.state) for n in s.nodes()] == [("n1", "gone")]
        # It need not be there to be cordoned or uncordoned.
        assert not (await s.change_node("uncordon", "n1")).cordoned
        assert s.nodes() == []
    await store.swap_document("nodes", b'{"cordons":{"n1":{"reason":"fan","at_ms":5}}}', 2)
    async with server(store, clock) as s:
        (n1,) = await daemons(s, "n1")
        assert placements(n1) == []
        with pytest.raises(errors.UnknownNodeError, match=r"no node n9 .*`rdzvctl nodes`"):
            await s.driver.fleet.cordon("n9", "")
        await s.driver.fleet.uncordon("n1")
        await s.clock.advance(QUIET_MS)
        assert placements(n1) == [messages.Placed("job-7", "sub-1", SPEC)]


@pytest.mark.quick
async def test_what_was_not_stored_is_not_cordoned() -> None:
    class Full(MemoryStore):
        async def swap_document(self, name: str, data: bytes, revision: int) -> int:
            raise errors.RendezvousConnectionError("the disk is full")

    async with server(Full()) as s:
        await daemons(s, "n1")
        with pytest.raises(errors.RendezvousConnectionError, match="the disk is full"):
            await s.driver.fleet.cordon("n1", "fan")
        assert not s.nodes()[0].cordoned


@pytest.mark.quick
async def test_restrictions_that_can_not_be_read_are_left_alone() -> None:
    store = MemoryStore()
    await store.swap_document("nodes", b"[1]", 0)
    with pytest.raises(errors.RendezvousStateError, match="the record nodes cannot be read"):
        async with server(store):
            pass
    assert await store.load_document("nodes") == (b"[1]", 1)


# ------------------------------------------------------------------ drains


def drains(stream: Stream) -> list[messages.DrainNode | messages.UndrainNode]:
    return [
        told for told in read(stream) if isinstance(told, messages.DrainNode | messages.UndrainNode)
    ]


async def running_pair(s: Server, nodes: tuple[int, int] = (2, 2)) -> list[Stream]:
    """Let n1 and n2 run job-7, with n3 free."""
    streams = await daemons(s, "n1", "n2", "n3")
    await s.driver.operations.submit_job("job-7", submission(nodes=nodes))
    for stream in streams[:2]:
        await take_up(s, stream, placements(stream)[0], nodes)
        read(stream)
    return streams


@pytest.mark.quick
async def test_a_drained_node_is_told_and_another_is_placed_before_it_leaves() -> None:
    async with server() as s:
        n1, n2, n3 = await running_pair(s)
        await s.driver.fleet.drain("n1", 60_000, "by ada: new kernel", force=True)
        shown = s.node("n1")
        (told,) = drains(n1)
        assert told == messages.DrainNode(60_000, "drained by ada: new kernel", told.number)  # type: ignore[union-attr]
        assert (shown.drain, shown.drain_left_ms, shown.cordoned) == ("draining", 60_000, True)
        await s.clock.advance(QUIET_MS)
        (placed,) = placements(n3)
        await take_up(s, n3, placed)
        view = await s.status()
        assert str(view.reason) == (
            "2 nodes and 2 workers run round 0; n1 (drained): by ada: new kernel; it leaves in "
            "1 min 0 s"
        )
        assert view.reason.items[0].left_ms == 59_900
        states = {node.node_id: node.state for node in view.nodes}
        assert states == {"n1": "seated", "n2": "seated", "n3": "spare"}
        for left_round in (None, 0):
            leave = Leave(
                "n1", n1.incarnation, "sub-1", model.LeaveCause.SIGNAL, "drained", left_round
            )
            await s.hear(n1, leave)
        await s.driver.reports.note_holdings(n1, ())
        offer = model.Offer("10.0.0.2", 1, machine="n2", store_port=4712)
        again = Join("n2", n2.incarnation, "sub-1", model.Settings(2, 2), offer, left_round=0)
        await s.hear(n2, again)
        line = next(told for told in read(n3) if isinstance(told, model.Assignment))
        assert (line.round, line.group_rank, line.restarts) == (1, 0, 0)
        assert s.node("n1").drain == "drained"
        texts = [event_in(row).text for row in await s.driver.operations.history("job-7", 99)]
        assert "n1 leaves within 1 min 0 s: drained by ada: new kernel" in texts


async def test_a_drain_outlives_the_server_and_is_told_again_with_what_is_left() -> None:
    store, clock = MemoryStore(), FakeClock()
    async with server(store, clock) as s:
        await daemons(s, "n1")
        await s.driver.fleet.drain("n1", 60_000, "fan", force=True)
        number = clock.now_ms()
    await clock.advance(10_000)
    async with server(store, clock) as s:
        n1 = await s.connect("n1", resources=HAS)
        (told,) = drains(n1)
        assert told == messages.DrainNode(
            60_000 - (clock.now_ms() - number), "drained: fan", number
        )
        await s.driver.operations.submit_job("job-7", submission(nodes=(1, 1)))
        await s.clock.advance(QUIET_MS)
        assert placements(n1) == []
        assert "n1 (drained): fan" in await reason(s, "job-7")
        # It is told that it may stay, and gets jobs again.
        assert (await s.change_node("undrain", "n1")).drain is None
        await s.clock.advance(QUIET_MS)
        assert [type(told) for told in read(n1)] == [messages.UndrainNode, messages.Placed]


@pytest.mark.quick
async def test_who_was_away_when_its_drain_was_lifted_hears_that_it_may_stay() -> None:
    async with server() as s:
        told = messages.Draining(60_000, "", number=7, own=False)
        n1 = await s.connect("n1", resources=HAS, draining=told)
        assert drains(n1) == [messages.UndrainNode()]
        n2 = await s.connect("n2", resources=HAS)
        assert drains(n2) == []


async def test_a_second_drain_has_another_deadline_and_a_cordon_lifts_none() -> None:
    async with server() as s:
        (n1,) = await daemons(s, "n1")
        await s.driver.fleet.drain("n1", 60_000, "fan", force=True)
        await s.clock.advance(1_000)
        await s.driver.fleet.drain("n1", 5_000, "fire", force=True)
        first, second = drains(n1)
        assert isinstance(first, messages.DrainNode)
        assert isinstance(second, messages.DrainNode)
        assert (second.left_ms, second.reason) == (5_000, "drained: fire")
        assert first.number != second.number
        assert (await s.change_node("cordon", "n1", "loud")).drain_reason == "fire"
        assert drains(n1) == []
        assert not (await s.change_node("uncordon", "n1")).cordoned
        assert drains(n1) == [messages.UndrainNode()]


async def test_a_drain_leaves_the_cordon_of_its_node_alone() -> None:
    """Whichever came first, and whoever lifts the drain; also a second time."""
    store, clock = MemoryStore(), FakeClock()
    async with server(store, clock) as s:
        (n1, n2) = await daemons(s, "n1", "n2")
        drain = partial(s.change_node, "drain")
        assert not (await s.change_node("cordon", "n1", "fan")).cordoned_besides
        await clock.advance(7_000)
        shown = await drain("n1", 60_000, "roll")
        assert (shown.cordon_age_ms, shown.drain_age_ms) == (7_000, 0)
        assert (shown.cordon_reason, shown.drain_reason) == ("fan", "roll")
        assert shown.cordoned_besides
        await drain("n1", 5_000, "roll, sooner")
        assert not (await drain("n2", 60_000, "roll")).cordoned_besides
        assert (await s.change_node("cordon", "n2", "disk")).cordoned_besides
    async with server(store, clock) as s:
        (n1, n2) = await daemons(s, "n1", "n2")
        for node, why in ((n1, "fan"), (n2, "disk")):
            for _ in range(2):
                await s.driver.fleet.undrain(node.node_id)
                shown = s.node(node.node_id)
                assert (shown.drain, shown.cordoned, shown.cordon_reason) == (None, True, why)
                assert not shown.cordoned_besides
            assert drains(node)[-1] == messages.UndrainNode()
        await s.driver.operations.submit_job("job-7", submission(nodes=(1, 1)))
        await s.clock.advance(QUIET_MS)
        assert "n1 (cordoned): fan; `rdzvctl uncordon` lifts that; n2" in await reason(s, "job-7")
        # What is uncordoned as well is in service again.
        assert not (await s.change_node("undrain", "n1", cordon=True)).cordoned
        await s.driver.fleet.drain("n1", 5_000, "roll", force=True)
        assert not (await s.change_node("undrain", "n1")).cordoned
        await s.driver.fleet.drain("n2", 5_000, "roll", force=True)
        assert not (await s.change_node("uncordon", "n2")).cordoned


async def test_who_watches_a_job_sees_at_once_that_one_of_its_nodes_is_to_leave() -> None:
    async with server() as s:
        n1, *_ = await running_pair(s)
        told = list[str | None]()
        with s.driver.watchers.followed_by(told.append):
            await s.driver.fleet.drain("n1", 5_000, "fan", force=True)
            assert told.count("job-7") == 1
            await s.driver.fleet.undrain("n1")
            assert told.count("job-7") == 2
            told.clear()
            s.report(n1, messages.Draining(30_000, "preempted", 0, own=True))
            assert told == ["job-7"]


async def test_a_node_that_wishes_to_leave_gets_nothing_more_until_it_is_gone() -> None:
    async with server() as s:
        n1, _, n3 = await running_pair(s)
        s.report(n1, messages.Draining(30_000, "preempted", 0, own=True))
        await s.clock.advance(QUIET_MS)
        assert isinstance(placements(n3)[0], messages.Placed)
        assert "n1 (about to leave): preempted; it leaves in 30 s" in await reason(s, "job-7")
        shown = s.node("n1")
        assert (shown.drain, shown.drained_by_operator, shown.cordoned) == (
            "draining",
            False,
            False,
        )
        # It repeats its wish in each hello; it has had it since the first time.
        age_ms = shown.drain_age_ms
        assert age_ms is not None
        await s.clock.advance(5_000)
        s.driver.fleet.note_draining("n1", messages.Draining(25_000, "preempted", 0, own=True))
        assert s.node("n1").drain_age_ms == age_ms + 5_000
        # Another instance of its agent does not wish to leave any more.
        s.driver.connections.detach(n1)
        await s.connect("n1", instance="two", resources=HAS)
        assert s.node("n1").drain is None


async def test_of_a_drain_and_the_nodes_own_wish_the_server_shows_the_earlier() -> None:
    async with server() as s:
        n1, n2 = await daemons(s, "n1", "n2")
        for node, left_ms in ((n1, 30_000), (n2, 90_000)):
            s.report(node, messages.Draining(left_ms, "preempted", 0, own=True))
            await s.driver.fleet.drain(node.node_id, 60_000, "fan", force=True)
        shown = s.nodes("n1", "n2")
        assert [(node.drain_reason, node.drain_left_ms) for node in shown] == [
            ("preempted", 30_000),
            ("fan", 60_000),
        ]


async def test_where_it_has_not_joined_yet_a_placement_is_taken_back() -> None:
    async with server() as s:
        n1, n2 = await daemons(s, "n1", "n2")
        await s.driver.operations.submit_job("job-7", submission(nodes=(1, 1)))
        (placed,) = placements(n1)
        assert isinstance(placed, messages.Placed)
        await s.driver.fleet.drain("n1", 60_000, "by ada", force=True)
        await s.clock.advance(QUIET_MS)
        (taken,) = placements(n1)
        assert taken == messages.Withdrawn("job-7", "sub-1", "n1: by ada")
        assert isinstance(placements(n2)[0], messages.Placed)


async def test_a_roll_waits_until_each_job_can_do_without_the_node() -> None:
    async with server() as s:
        _, _, n3 = await running_pair(s)
        assert (await s.change_node("drain", "n3", 1_000, "roll")).drain == "drained"
        with pytest.raises(
            errors.TooFewNodesError,
            match=(
                r"^job-7 would have 1 of the 2 nodes that it needs, and 0 others free for it: it "
                r"stops until others are free$"
            ),
        ):
            await s.driver.fleet.drain("n1", 1_000, "roll")
        assert s.node("n1").drain is None
        await s.driver.fleet.undrain("n3")
        read(n3)
        # n3 would be placed for it.
        assert (await s.change_node("drain", "n1", 1_000, "roll")).drain == "draining"
        # And it is, for n1: there is none for n2.
        with pytest.raises(errors.TooFewNodesError):
            await s.driver.fleet.drain("n2", 1_000, "roll")


async def test_a_cordoned_node_is_none_that_a_roll_could_count_on() -> None:
    async with server() as s:
        await running_pair(s)
        await s.driver.fleet.cordon("n3", "broken fan")
        with pytest.raises(errors.TooFewNodesError, match="and 0 others free for it"):
            await s.driver.fleet.drain("n1", 1_000, "roll")


async def test_a_node_that_is_away_is_none_that_a_roll_could_count_on() -> None:
    async with server() as s:
        n1, n2 = await s.pair()
        n3 = await s.connect("n3")
        await s.join(n3)
        s.driver.connections.detach(n2)
        await settle()
        with pytest.raises(
            errors.TooFewNodesError, match="would have 1 of the 2 nodes that it needs"
        ):
            await s.driver.fleet.drain("n1", 1_000, "roll")
        assert drains(n1) == []
        await s.join(await s.connect("n4"))
        assert (await s.change_node("drain", "n1", 1_000, "roll")).drain == "draining"
        assert len(drains(n1)) == 1


async def test_a_job_of_rdzvrun_is_kept_at_its_min_as_well() -> None:
    async with server() as s:
        n1, n2 = await s.pair()
        # No node is placed for it, so free nodes are not mentioned.
        short = (
            "^job-7 would have 1 of the 2 nodes that it needs: it stops, and ends unless others "
        )
        with pytest.raises(errors.TooFewNodesError, match=short):
            await s.driver.fleet.drain("n1", 1_000, "roll")
        n3 = await s.connect("n3")
        await s.join(n3)
        assert (await s.change_node("drain", "n1", 1_000, "roll")).drain == "draining"
        assert len(drains(n1)) == 1
        assert drains(n2) == []


@pytest.mark.quick
async def test_what_was_not_stored_is_not_drained() -> None:
    class Full(MemoryStore):
        async def swap_document(self, name: str, data: bytes, revision: int) -> int:
            raise errors.RendezvousConnectionError("the disk is full")

    async with server(Full()) as s:
        (n1,) = await daemons(s, "n1")
        with pytest.raises(errors.RendezvousConnectionError, match="the disk is full"):
            await s.driver.fleet.drain("n1", 1_000, "fan", force=True)
        assert drains(n1) == []
        with pytest.raises(errors.UnknownNodeError, match="no node n9"):
            await s.driver.fleet.drain("n9", 1_000, "fan", force=True)


@pytest.mark.quick
async def test_what_was_stored_after_all_is_told() -> None:
    class Unsure(MemoryStore):
        async def swap_document(self, name: str, data: bytes, revision: int) -> int:
            await super().swap_document(name, data, revision)
            raise errors.RendezvousConnectionError("no answer")

    async with server(Unsure()) as s:
        (n1,) = await daemons(s, "n1")
        with pytest.raises(errors.RendezvousConnectionError, match="no answer"):
            await s.driver.fleet.drain("n1", 1_000, "fan", force=True)
        assert [type(told) for told in drains(n1)] == [messages.DrainNode]
        assert s.node("n1").drain == "drained"


async def test_while_the_store_is_away_nothing_is_placed() -> None:
    store = FlakyStore()
    async with server(store) as s:
        await s.driver.operations.submit_job("job-7", submission(nodes=(1, 1)))
        store.next_write = "lost before"
        (n1,) = await daemons(s, "n1")
        assert placements(n1) == []
        store.away, store.next_write = None, ""
        await s.clock.advance(3_000)
        assert placements(n1) == [messages.Placed("job-7", "sub-1", SPEC)]


async def test_while_a_placement_is_in_doubt_its_nodes_are_given_to_nobody_else() -> None:
    store = FlakyStore()
    async with server(store) as s:
        (n1,) = await daemons(s, "n1")
        s.driver.placer.stopped = True
        await s.driver.engine.submit("job-7", submission(nodes=(1, 1)))
        s.driver.placer.stopped = False
        store.next_write = "lost after"
        await s.driver.placer.place()
        store.away, store.next_write = None, ""
        urgent = submission("sub-2", (1, 1), priority=1)
        shown = await s.driver.operations.submit_job("job-8", urgent)
        assert shown.submission is not None
        assert shown.submission.placed == ()
        assert [told.rdzv_id for told in placements(n1)] == ["job-7"]


async def test_a_new_instance_of_a_node_is_placed_once_its_former_self_is_lost() -> None:
    async with server() as s:
        (n1,) = await daemons(s, "n1")
        await s.driver.operations.submit_job("job-7", submission(nodes=(1, 1)))
        await take_up(s, n1, placements(n1)[0], (1, 1))
        s.driver.connections.detach(n1)
        again = await s.connect("n1", instance="two", resources=HAS)
        await s.clock.advance(QUIET_MS)
        placed = messages.Placed("job-7", "sub-1", SPEC)
        assert [told for told in placements(again) if isinstance(told, messages.Placed)] == [placed]


async def test_who_loses_its_placement_as_it_leaves_is_told_so() -> None:
    """It may have accepted the job again meanwhile, and would hold it forever."""
    async with server() as s:
        (n1,) = await daemons(s, "n1")
        await s.driver.operations.submit_job("job-7", submission(nodes=(1, 1)))
        await take_up(s, n1, placements(n1)[0], (1, 1))
        read(n1)
        s.driver.placer.stopped = True
        for left_round in (None, 0):
            leave = Leave(
                "n1", n1.incarnation, "sub-1", model.LeaveCause.SIGNAL, "SIGTERM", left_round
            )
            await s.hear(n1, leave)
        assert placements(n1) == [messages.Withdrawn("job-7", "sub-1", "SIGTERM")]


async def test_who_lets_go_of_a_job_before_it_has_joined_is_placed_anew() -> None:
    """Its leaving, or its decline, was sent to a server that died before it was stored."""
    async with server() as s:
        n1, _ = await daemons(s, "n1", "n2")
        await s.driver.operations.submit_job("job-7", submission())
        (placed,) = placements(n1)
        await s.driver.reports.note_holdings(n1, (messages.Holding("job-7", "sub-1", 1),))
        await s.driver.reports.note_holdings(n1, ())
        reason = "nothing of the job is left on it"
        assert placements(n1) == [messages.Withdrawn("job-7", "sub-1", reason)]
        await s.clock.advance(QUIET_MS)
        assert placements(n1) == [placed]


async def test_who_lets_go_of_a_job_that_it_has_joined_is_in_it_no_more() -> None:
    """It had learned that the run is closed, and then met a server that does not know that."""
    async with server() as s:
        n1, n2 = await daemons(s, "n1", "n2")
        await s.driver.operations.submit_job("job-7", submission())
        for stream in (n1, n2):
            await take_up(s, stream, placements(stream)[0])
        await s.driver.reports.note_holdings(n1, ())
        over = next(said for said in read(n2) if isinstance(said, messages.RoundOver))
        assert over.end.reason == "n1: nothing of the job is left on it"
        assert (await s.states())["n1"] is model.NodeState.LOST


async def test_who_has_said_that_it_leaves_lets_go_of_nothing_more() -> None:
    async with server() as s:
        n1, n2 = await daemons(s, "n1", "n2")
        await s.driver.operations.submit_job("job-7", submission())
        for stream in (n1, n2):
            await take_up(s, stream, placements(stream)[0])
        leave = Leave("n1", n1.incarnation, "sub-1", model.LeaveCause.SIGNAL, "SIGTERM", 0)
        await s.hear(n1, leave)
        read(n1)
        await s.driver.reports.note_holdings(n1, ())
        assert placements(n1) == []
        assert (await s.states())["n1"] is model.NodeState.LEFT


async def test_who_is_told_that_its_run_is_over_gives_back_its_place_in_a_run_of_before() -> None:
    """A restored store brought back a run with the seat of a node that is in another run.

    It is the same instance of the node, so only its belief shows that it is not there.
    """
    store, clock = MemoryStore(), FakeClock()
    async with server(store, clock) as s:
        (n1,) = await daemons(s, "n1")
        await s.driver.operations.submit_job("job-7", submission(nodes=(1, 1)))
        await take_up(s, n1, placements(n1)[0], (1, 1))
        assert isinstance(read(n1)[-1], model.Assignment)
    async with server(store, clock) as s:
        resume = Resume("n1", n1.incarnation, "sub-9", 0)
        belief = messages.Belief("job-7", "sub-9", 0, has_workers=True, commands=(resume,))
        holding = messages.Holding("job-7", "sub-9", 1)
        known = {
            "resources": HAS,
            "incarnation": n1.incarnation,
            "holdings": messages.Holdings((holding,)),
        }
        stream = await s.connect("n1", belief, **known)
        heard = read(stream)
        assert next(said for said in heard if isinstance(said, messages.Closed)).run == "sub-9"
        assert (await s.states())["n1"] is model.NodeState.LOST
        # Once it has nothing left of what it held, it accepts its present placement.
        await s.driver.reports.note_holdings(stream, ())
        await s.live(31_000, stream)
        assert messages.Placed("job-7", "sub-1", SPEC) in read(stream)


async def test_a_job_that_is_scaled_up_grows_and_scaled_down_gives_back() -> None:
    async with server() as s:
        n1, n2 = await daemons(s, "n1", "n2")
        await s.driver.operations.submit_job("job-7", submission(nodes=(1, 1)))
        await take_up(s, n1, placements(n1)[0], (1, 1))
        await s.driver.operations.obey("job-7", Scale("sub-1", 1, 2, "scaled"))
        await s.clock.advance(QUIET_MS)
        assert isinstance(placements(n2)[0], messages.Placed)
        await s.driver.operations.obey("job-7", Scale("sub-1", 1, 1, "scaled"))
        await s.clock.advance(QUIET_MS)
        assert placements(n2) == [messages.Withdrawn("job-7", "sub-1", "the job was scaled down")]


async def test_nodes_are_shown_with_their_jobs() -> None:
    async with server() as s:
        n1, _, n3 = await daemons(s, "n1", "n2", "n3")
        await s.connect("n4")
        await s.driver.operations.submit_job("job-7", submission())
        await take_up(s, n1, placements(n1)[0])
        await s.driver.reports.note_holdings(n3, (messages.Holding("old", "r", 1),))
        shown = {n.node_id: n for n in s.nodes()}
        assert [(j.rdzv_id, j.gpus, j.state) for j in shown["n1"].jobs] == [("job-7", 1, "waiting")]
        assert [(j.rdzv_id, j.gpus, j.state) for j in shown["n2"].jobs] == [("job-7", 1, "placed")]
        assert [(j.rdzv_id, j.gpus, j.state) for j in shown["n3"].jobs] == [("old", 1, "holding")]
        assert (shown["n1"].gpus_free, shown["n4"].program, shown["n4"].resources) == (
            0,
            "rdzvrun",
            None,
        )


# ---------------------------------------------------------------- nodes that are not well

FULL = (FailingCheck("disk /data", "has 1 % free"),)


async def test_nothing_is_placed_on_a_node_that_is_not_well_until_it_is() -> None:
    async with server() as s:
        n1, _ = await daemons(s, "n1", "n2")
        s.report(n1, messages.Health(FULL))
        await s.driver.operations.submit_job("job-7", submission())
        assert await reason(s, "job-7") == (
            "needs 2 nodes, 1 is free (n2); if all other jobs had ended it would still lack "
            "1 node; n1 (unhealthy): disk /data has 1 % free; it gets jobs once its checks pass"
        )
        await s.clock.advance(500)
        shown = {n.node_id: (n.unhealthy, n.unhealthy_age_ms) for n in s.nodes()}
        assert shown == {"n1": ("disk /data has 1 % free", 500), "n2": (None, None)}
        s.report(n1, messages.Health())
        await s.clock.advance(QUIET_MS)
        assert (await s.status()).submission.placed == ("n1", "n2")  # type: ignore[union-attr]


async def test_what_is_wrong_is_heard_in_the_hello_too_and_since_when_is_kept() -> None:
    async with server() as s:
        (n1,) = await daemons(s, "n1", health=messages.Health(FULL))
        await s.driver.operations.submit_job("job-7", submission(nodes=(1, 1)))
        assert "n1 (unhealthy): disk /data has 1 % free" in await reason(s, "job-7")
        s.driver.connections.detach(n1)
        await daemons(s, "n1", health=messages.Health(FULL))
        (shown,) = s.nodes()
        assert shown.unhealthy_age_ms >= 2 * QUIET_MS
        await daemons(s, "n1")
        await s.clock.advance(QUIET_MS)
        assert (await s.status()).submission.placed == ("n1",)  # type: ignore[union-attr]


async def test_a_node_that_declines_for_now_is_chosen_again_when_it_is_well() -> None:
    async with server() as s:
        n1, n2 = await daemons(s, "n1", "n2")
        await s.driver.operations.submit_job("job-7", submission(nodes=(1, 1)))
        assert isinstance(placements(n1)[0], messages.Placed)
        s.report(n1, messages.Health(FULL))
        await s.hear(n1, Decline("n1", "sub-1", "unhealthy", passing=True))
        await s.clock.advance(QUIET_MS)
        status = (await s.status()).submission
        assert status is not None
        assert (status.placed, status.declined) == (("n2",), ())
        await s.hear(n2, Decline("n2", "sub-1", "no such folder"))
        s.report(n1, messages.Health())
        await s.clock.advance(QUIET_MS)
        assert (await s.status()).submission.placed == ("n1",)  # type: ignore[union-attr]
        assert isinstance(placements(n1)[-1], messages.Placed)


async def test_who_has_a_seat_declines_nothing_for_now() -> None:
    async with server() as s:
        n1, _ = await daemons(s, "n1", "n2")
        await s.driver.operations.submit_job("job-7", submission(nodes=(1, 1)))
        await take_up(s, n1, placements(n1)[0], (1, 1))
        await s.hear(n1, Decline("n1", "sub-1", "unhealthy", passing=True))
        await s.clock.advance(QUIET_MS)
        assert (await s.status()).state == "running"


async def test_an_operator_has_a_node_look_again() -> None:
    async with server() as s:
        (n1,) = await daemons(s, "n1", health=messages.Health(FULL))
        await s.driver.fleet.uncordon("n1")
        assert messages.LookAgain() in read(n1)


async def test_a_job_keeps_no_other_node_back_for_one_that_is_not_well() -> None:
    """It is unknown how long this lasts: three idle nodes should not wait for a repair."""
    async with server() as s:
        n1, n2, _ = await daemons(s, "n1", "n2", "n3")
        s.report(n1, messages.Health(FULL))
        await s.live(40_000, n1, n2)
        await s.driver.operations.submit_job("large", submission(nodes=(3, 3)))
        await s.driver.operations.submit_job("small", submission("sub-2", nodes=(1, 1)))
        await s.clock.advance(QUIET_MS)
        assert (await s.status("small")).submission.placed  # type: ignore[union-attr]
