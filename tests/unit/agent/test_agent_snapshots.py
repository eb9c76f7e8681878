"""A node's snapshots are reported, and its workers learn which are complete.

The stories drive the pure core as those of `test_agent_machine` do.
"""

from __future__ import annotations

import pytest

from rdzv.agent.core import events
from rdzv.agent.core.commands import SayJoin, StartWorkers
from rdzv.agent.core.model import Phase
from rdzv.agent.server_link import encoding
from rdzv.core import commands as asked
from rdzv.core.model import Snapshot, SnapshotMark
from rdzv.core.snapshots import CopyCarrier, CopySource, MissingCopies
from rdzv.messages import KeepCopies, SnapshotsHeld, SnapshotWatermark
from rdzv.structs import replace
from rdzv.v1 import rdzv_pb2 as pb
from tests.unit.agent import test_agent_encoding, test_agent_machine
from tests.unit.agent.test_agent_encoding import NOW_MS, OFFER, heard
from tests.unit.agent.test_agent_parking import over


def mark(step: int, lineage: int = 0) -> SnapshotMark:
    return SnapshotMark(lineage, step, f"{lineage}.a", 2)


def held(*steps: int) -> tuple[Snapshot, ...]:
    return tuple(Snapshot(n, mark(step), n, 1_000, "f00") for n, step in enumerate(steps))


def running(**given: object) -> test_agent_machine.Node:
    node = test_agent_machine.Node()
    node.hear(
        test_agent_machine.CONNECTED, test_agent_machine.JOINED, test_agent_machine.line(**given)
    )
    return node


def whole(step: int, lineage: int = 0, run: str = "r1") -> SnapshotWatermark:
    return SnapshotWatermark("job-7", run, mark(step, lineage))


def test_each_change_is_reported_and_all_of_it_after_a_reconnect() -> None:
    node = running()
    assert node.hear(events.SnapshotsChanged(held(40))) == [SnapshotsHeld("job-7", "r1", held(40))]
    assert node.hear(events.SnapshotsChanged(held(40))) == []
    assert node.hear(events.SnapshotsChanged(held(40, 50))) == [
        SnapshotsHeld("job-7", "r1", held(40, 50))
    ]
    assert SnapshotsHeld("job-7", "r1", held(40, 50)) in node.hear(
        test_agent_machine.LOST, test_agent_machine.CONNECTED
    )


def test_where_copies_are_fetched_and_which_are_missing_is_reported_with_it() -> None:
    node, carrier = running(), CopyCarrier(40_000, "secret")
    assert node.hear(events.SnapshotsChanged((), carrier)) == [
        SnapshotsHeld("job-7", "r1", (), carrier)
    ]
    assert SnapshotsHeld("job-7", "r1", (), carrier) in node.hear(
        test_agent_machine.LOST, test_agent_machine.CONNECTED
    )
    missing = MissingCopies(mark(40), "n2: it does not know the token")
    assert node.hear(events.SnapshotsChanged(held(40), carrier, missing)) == [
        SnapshotsHeld("job-7", "r1", held(40), carrier, missing)
    ]
    # A node that waits joins again for what it holds alone.
    node.hear(over(), events.WorkersGone(0))
    assert node.hear(events.SnapshotsChanged(held(40), None, missing)) == []
    node.hear(test_agent_machine.line(round=1), test_agent_machine.RUNNER_LOST)
    assert node.state.carrier is None and node.state.missing_copies is None


def test_copies_are_fetched_while_workers_run() -> None:
    sources = (CopySource("n2", "10.0.0.2", 40_000, "secret", held(40)),)
    node = running()
    assert node.hear(KeepCopies("job-7", "r1", mark(40), sources)) == [
        KeepCopies("job-7", "r1", mark(40), sources)
    ]
    assert node.hear(KeepCopies("job-7", "r0", mark(40), sources)) == []
    node.hear(over())
    assert node.hear(KeepCopies("job-7", "r1", mark(40), sources)) == []


def test_a_node_whose_workers_have_succeeded_keeps_copies_for_those_that_run_on() -> None:
    """Otherwise the server waits for these copies, and no newer step is ever whole."""
    sources = (CopySource("n2", "10.0.0.2", 40_000, "secret", held(40)),)
    node = running()
    node.hear(test_agent_machine.exited(0), test_agent_machine.exited(1), test_agent_machine.gone())
    assert node.phase is Phase.SUCCEEDED
    assert node.hear(KeepCopies("job-7", "r1", mark(40), sources)) == [
        KeepCopies("job-7", "r1", mark(40), sources)
    ]


def test_a_node_that_waits_says_it_with_its_join() -> None:
    node = running()
    node.hear(events.SnapshotsChanged(held(40)))
    node.hear(over(), events.WorkersGone(0))
    (said,) = node.hear(events.SnapshotsChanged(held(40, 50)))
    assert isinstance(said, SayJoin)
    assert said.left_round == 0
    # The join, like the belief, is made from the state, so a reconnect needs no report.
    message = encoding.join(said, node.state, OFFER, NOW_MS, refuse_reuse=False)
    command = heard(pb.NodeMessage(join=message))
    assert isinstance(command, asked.Join)
    assert command.snapshots == held(40, 50)
    assert not any(
        isinstance(one, SnapshotsHeld)
        for one in node.hear(test_agent_machine.LOST, test_agent_machine.CONNECTED)
    )


def test_workers_hear_of_newer_marks_alone() -> None:
    node = running()
    assert node.hear(whole(40)) == [SnapshotWatermark("job-7", "r1", mark(40))]
    assert node.hear(whole(40), whole(30), whole(90, run="r0")) == []
    assert node.hear(whole(20, lineage=1)) == [SnapshotWatermark("job-7", "r1", mark(20, 1))]
    assert node.hear(whole(50)) == []


def test_workers_hear_which_newer_steps_are_given_up() -> None:
    node = running()
    node.hear(whole(40))
    told = replace(whole(40), given_up=mark(60))
    assert node.hear(told) == [SnapshotWatermark("job-7", "r1", mark(40), given_up=mark(60))]
    assert node.hear(replace(whole(30), given_up=mark(60))) == []


def test_workers_hear_once_which_steps_are_given_up() -> None:
    """A server that has forgotten what it announced announces it again."""
    node = running()
    told = replace(whole(40), given_up=mark(60))
    assert node.hear(told) == [SnapshotWatermark("job-7", "r1", mark(40), given_up=mark(60))]
    assert node.hear(told, whole(40), replace(whole(40), given_up=mark(50))) == []
    later = replace(whole(40), given_up=mark(70))
    assert node.hear(later) == [SnapshotWatermark("job-7", "r1", mark(40), given_up=mark(70))]
    # The next round gives up steps of its own, perhaps those that are redone.
    node.hear(over(), events.WorkersGone(0), test_agent_machine.line(1, snapshot=mark(40)))
    assert node.hear(told) == [SnapshotWatermark("job-7", "r1", mark(40), given_up=mark(60))]


def test_a_round_brings_the_mark_that_it_begins_with() -> None:
    node, loads = (
        test_agent_machine.Node(),
        test_agent_machine.line(snapshot=mark(40), snapshot_loads=1),
    )
    told = node.hear(test_agent_machine.CONNECTED, test_agent_machine.JOINED, loads)
    assert told == [StartWorkers(loads), SnapshotWatermark("job-7", "r1", mark(40))]
    # Kept workers may repeat the last step; then the mark goes back.
    node.hear(whole(50), over(), events.WorkersGone(0))
    again = test_agent_machine.line(1, snapshot=mark(40))
    assert node.hear(again) == [
        StartWorkers(again),
        SnapshotWatermark("job-7", "r1", mark(40)),
    ]
    assert node.hear(whole(50)) == [SnapshotWatermark("job-7", "r1", mark(50))]


def test_what_the_round_begins_with_is_repeated_to_a_server_that_has_forgotten_it() -> None:
    given = {"snapshot": mark(40), "snapshot_loads": 2, "origin": 1, "lineage": 2}
    node = running(round_=3, **given)
    belief = test_agent_encoding.belief_of(node.state)
    speaker = test_agent_encoding.SPEAKER
    (resume,) = test_agent_encoding.wire.belief_of(belief, speaker, 0).commands
    assert isinstance(resume, asked.Resume)
    report = resume.recovery
    assert report is not None
    assert {name: getattr(report.assignment, name) for name in given} == given


@pytest.mark.parametrize(
    "end",
    [test_agent_machine.RUNNER_LOST, test_agent_machine.signalled(test_agent_machine.SIGTERM)],
)
def test_nothing_is_reported_at_the_end(end: events.Event) -> None:
    node = running()
    node.hear(events.SnapshotsChanged(held(40)), end)
    assert node.hear(events.SnapshotsChanged(held(40, 50))) == []
