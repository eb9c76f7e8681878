"""Nodes are asked to keep copies, and a step is announced once they do, or give it up."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from rdzv.core.model import Assignment, Offer, Snapshot, SnapshotMark
from rdzv.core.snapshots import CopyCarrier, CopySource, MissingCopies
from rdzv.messages import KeepCopies, SnapshotsHeld, SnapshotWatermark
from rdzv.server.sessions.streams import Stream
from rdzv.structs import replace
from tests.support.driven import Server, join, read, server, settle

pytestmark = pytest.mark.slow


def mark(step: int) -> SnapshotMark:
    return SnapshotMark(0, step, "a", 2)


def part(shard: int, step: int, copy_of: int | None = None) -> Snapshot:
    return Snapshot(0, mark(step), shard, 1_000, f"{shard} at {step}", copy_of)


def says(*held: Snapshot, port: int | None = 7000, missing: str = "") -> SnapshotsHeld:
    carrier = None if port is None else CopyCarrier(port, f"token {port}")
    given_up = MissingCopies(held[0].mark, missing) if missing else None
    return SnapshotsHeld("job-7", "run-1", held, carrier, given_up)


class Pair:
    """Two nodes of different topologies; n1 has part 0 and RANK 0, n2 part 1 and RANK 2."""

    def __init__(self, server: Server, n1: Stream, n2: Stream) -> None:
        self.server, self.n1, self.n2 = server, n1, n2

    def note(self, stream: Stream, said: SnapshotsHeld) -> None:
        self.server.driver.reports.take(stream, said)

    def missing(self) -> dict[str, str]:
        """Return why there are no copies, by the node that alone holds a part."""
        loss = self.server.snapshots("job-7").node_loss
        assert loss is not None and loss.sole_holder_count == len(loss.sole_holders)
        return {one.node_id: one.reason for one in loss.sole_holders}

    def heard(self, stream: Stream) -> list[object]:
        """Return what a node was sent of snapshots, without its times."""
        heard = [one for one in read(stream) if isinstance(one, SnapshotWatermark | KeepCopies)]
        return [
            replace(one, whole_ms=0) if isinstance(one, SnapshotWatermark) else one for one in heard
        ]


@asynccontextmanager
async def pair() -> AsyncIterator[Pair]:
    async with server() as s:
        n1, n2 = await s.connect("n1"), await s.connect("n2")
        for stream, address, topology in ((n1, "10.0.0.1", "a"), (n2, "10.0.0.2", "b")):
            offer = Offer(address, 2, topology=topology, machine="m1", store_port=4711)
            await s.hear(stream, join(stream, offer=offer))
        await settle()
        assert [type(read(stream)[-1]) for stream in (n1, n2)] == [Assignment, Assignment]
        yield Pair(s, n1, n2)


WHOLE_40 = [SnapshotWatermark("job-7", "run-1", mark(40))]
FROM_N1 = CopySource("n1", "10.0.0.1", 7000, "token 7000", (part(0, 40, copy_of=0),))
FROM_N2 = CopySource("n2", "10.0.0.2", 7001, "token 7001", (part(1, 40, copy_of=2),))


@pytest.mark.quick
async def test_a_step_is_announced_once_copies_are_kept() -> None:
    async with pair() as p:
        p.note(p.n1, says(part(0, 40)))
        p.note(p.n2, says(part(1, 40), port=7001))
        assert p.heard(p.n1) == [KeepCopies("job-7", "run-1", mark(40), (FROM_N2,))]
        assert p.heard(p.n2) == [KeepCopies("job-7", "run-1", mark(40), (FROM_N1,))]
        p.note(p.n1, says(part(0, 40), part(1, 40, copy_of=2)))
        assert p.heard(p.n1) == p.heard(p.n2) == []
        p.note(p.n2, says(part(1, 40), part(0, 40, copy_of=0), port=7001))
        assert p.heard(p.n1) == p.heard(p.n2) == WHOLE_40


async def test_why_there_are_no_copies_is_known_for_each_node() -> None:
    async with pair() as p:
        p.note(p.n1, says(part(0, 40)))
        p.note(p.n2, says(part(1, 40), port=None))
        none = "the nodes that could keep copies for it exchange none"
        own = "it exchanges no copies: its log says why, or --snapshot-copy-rate is 0"
        assert p.missing() == {"n1": none, "n2": own}
        p.note(p.n2, says(part(1, 40), port=7001))
        assert p.missing() == {"n1": "n2 is fetching a copy", "n2": "n1 is fetching a copy"}
        p.note(p.n1, says(part(0, 40), missing="there is no memory"))
        p.note(p.n2, says(part(1, 40), part(1, 50), part(0, 40, copy_of=0), port=7001))
        assert p.missing() == {"n2": "n1 keeps no copy: there is no memory"}
        p.note(p.n1, says(part(0, 40), part(0, 50)))
        p.note(p.n1, says(part(0, 50), part(0, 60)))
        p.note(p.n2, says(part(1, 50), part(1, 60), part(0, 50, copy_of=0), port=7001))
        assert p.missing() == dict.fromkeys(("n1", "n2"), "step 50 is copied first")


async def test_a_keeper_whose_process_has_ended_is_named() -> None:
    async with pair() as p:
        p.note(p.n1, says(part(0, 40)))
        p.note(p.n2, says(part(1, 40), port=7001))
        p.note(p.n1, says(part(0, 40), port=None))
        ended = "n1 keeps no copy: it exchanges copies no longer; its log says why"
        assert p.missing() == {"n1": "n2 is fetching a copy", "n2": ended}


async def test_a_copy_with_another_digest_does_not_count() -> None:
    async with pair() as p:
        p.note(p.n1, says(part(0, 40)))
        p.note(p.n2, says(part(1, 40), port=7001))
        p.note(p.n1, says(part(0, 40), replace(part(1, 40, copy_of=2), digest="another")))
        p.note(p.n2, says(part(1, 40), part(0, 40, copy_of=0), port=7001))
        assert not [one for one in p.heard(p.n1) if isinstance(one, SnapshotWatermark)]


@pytest.mark.quick
async def test_what_is_given_up_holds_nothing_up() -> None:
    async with pair() as p:
        p.note(p.n1, says(part(0, 40)))
        p.note(p.n2, says(part(1, 40), port=7001))
        p.note(p.n1, says(part(0, 40), missing="no memory is left"))
        p.heard(p.n1)
        # The other one's process has ended.
        p.note(p.n2, says(part(1, 40), port=None))
        assert p.heard(p.n1) == WHOLE_40


async def test_a_node_whose_process_has_ended_is_asked_nothing_more() -> None:
    async with pair() as p:
        p.note(p.n1, says(part(0, 40)))
        p.note(p.n2, says(part(1, 40), port=7001))
        p.note(p.n1, says(part(0, 40), part(1, 40, copy_of=2)))
        p.note(p.n2, says(part(1, 40), port=None))
        p.heard(p.n1), p.heard(p.n2)
        p.note(p.n1, says(part(0, 50)))
        p.note(p.n2, says(part(1, 50), port=None))
        whole = [SnapshotWatermark("job-7", "run-1", mark(50))]
        assert p.heard(p.n1) == p.heard(p.n2) == whole


async def test_a_newer_step_waits_for_the_copies_of_the_last() -> None:
    async with pair() as p:
        p.note(p.n1, says(part(0, 40)))
        p.note(p.n2, says(part(1, 40), port=7001))
        p.heard(p.n1), p.heard(p.n2)
        p.note(p.n1, says(part(0, 40), part(0, 50), part(1, 40, copy_of=2)))
        p.note(p.n2, says(part(1, 40), part(1, 50), port=7001))
        assert p.heard(p.n1) == p.heard(p.n2) == []
        both = (part(1, 40), part(1, 50), part(0, 40, copy_of=0))
        p.note(p.n2, says(*both, port=7001))
        asked = KeepCopies(
            "job-7", "run-1", mark(50), (replace(FROM_N1, snapshots=(part(0, 50, copy_of=0),)),)
        )
        assert p.heard(p.n2) == [asked, *WHOLE_40]


@pytest.mark.quick
async def test_nodes_without_a_carrier_are_asked_nothing() -> None:
    async with pair() as p:
        p.note(p.n1, says(part(0, 40), port=None))
        p.note(p.n2, says(part(1, 40), port=None))
        assert p.heard(p.n1) == p.heard(p.n2) == WHOLE_40


async def test_copies_are_asked_for_once_a_carrier_is_there() -> None:
    """It starts after the first snapshot, which may stay the last for long."""
    async with pair() as p:
        p.note(p.n1, says(part(0, 40), port=None))
        p.note(p.n2, says(part(1, 40), port=None))
        assert p.heard(p.n1) == p.heard(p.n2) == WHOLE_40
        p.note(p.n1, says(part(0, 40)))
        assert p.heard(p.n1) == p.heard(p.n2) == []
        p.note(p.n2, says(part(1, 40), port=7001))
        assert p.heard(p.n1) == [KeepCopies("job-7", "run-1", mark(40), (FROM_N2,))]
        assert p.heard(p.n2) == [KeepCopies("job-7", "run-1", mark(40), (FROM_N1,))]


@pytest.mark.parametrize("order", ["renewed first", "given up first"])
async def test_what_a_node_could_not_fetch_with_an_old_token_is_asked_for_again(order: str) -> None:
    """With each round nodes renew their tokens, and may report what they hold before that."""
    async with pair() as p:
        p.note(p.n1, says(part(0, 40)))
        p.note(p.n2, says(part(1, 40), port=7001))
        p.note(p.n1, says(part(0, 40), part(1, 40, copy_of=2)))
        p.heard(p.n1), p.heard(p.n2)
        renewed = says(part(0, 40), part(1, 40, copy_of=2), port=7005)
        given_up = says(part(1, 40), port=7001, missing="n1: the other side closed the connection")
        in_order = [(p.n1, renewed), (p.n2, given_up)]
        for stream, said in in_order if order == "renewed first" else reversed(in_order):
            p.note(stream, said)
        again = replace(FROM_N1, port=7005, token="token 7005")
        asked = [one for one in p.heard(p.n2) if isinstance(one, KeepCopies)]
        assert asked == [KeepCopies("job-7", "run-1", mark(40), (again,))]


async def test_a_node_is_asked_once_on_each_of_its_streams() -> None:
    async with pair() as p:
        p.note(p.n1, says(part(0, 40)))
        p.note(p.n2, says(part(1, 40), port=7001))
        assert len(p.heard(p.n2)) == 1
        p.note(p.n2, says(part(1, 40), port=7001))
        assert p.heard(p.n2) == []
        p.server.driver.connections.detach(p.n2)
        again = await p.server.come_back("n2")
        read(again)
        p.note(again, says(part(1, 40), port=7001))
        assert p.heard(again) == [KeepCopies("job-7", "run-1", mark(40), (FROM_N1,))]
