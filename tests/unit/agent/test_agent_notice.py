"""A node about to leave: its workers are notified first, and it leaves when they have exited.

Whether an operator's drain or the node itself is the cause makes no difference here. The stories
drive the pure core as those of `test_agent_machine` do, and then the parts around it: what the node
knows of its own preemption, and the file in which workers find the notice.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from rdzv.agent.core import events
from rdzv.agent.core.commands import (
    NotifyWorkers,
    SayJoin,
    StopStoreHost,
    StopWorkers,
    TakeBackNotice,
)
from rdzv.agent.core.model import EXIT_TRY_AGAIN, Leaving, Phase
from rdzv.agent.job.worker_observers import NoticeFile
from rdzv.agent.server_link.node_drain import Event, NodeDrain
from rdzv.core.commands import Leave
from rdzv.core.model import LeaveCause, Result
from rdzv.structs import replace
from tests.unit.agent.test_agent_machine import (
    CONNECTED,
    JOB,
    JOINED,
    SIGTERM,
    Node,
    closed,
    ended,
    exited,
    gone,
    joining,
    leave_of,
    line,
    outcome_of,
    rejoining,
    running,
    signalled,
    stopping,
    sweeping,
)

WHY = "drained by ada: new kernel"
GIVEN = events.NoticeGiven(60_000, WHY)
LIFTED = events.NoticeLifted()
LEAVES = Leaving(LeaveCause.SIGNAL, WHY, EXIT_TRY_AGAIN)
DONE = replace(LEAVES, exited_zero=True)


def told(notice: events.NoticeGiven = GIVEN) -> Node:
    """Return a node whose workers were notified a moment ago."""
    node = running()
    assert node.hear(notice) == [NotifyWorkers(0, notice.left_ms, WHY, SIGTERM)]
    node.now_ms += 10
    return node


# ------------------------------------------------------------------ the workers exit in time


def test_workers_are_told_and_train_on() -> None:
    node = told()
    assert node.phase is Phase.RUNNING
    assert node.wake_at_ms == 62_000
    assert node.wait(59_000) == []


def test_the_node_leaves_when_all_workers_have_exited() -> None:
    node = told()
    assert node.hear(exited(0)) == []
    assert node.hear(exited(1)) == []
    # If they had finished, those of other nodes would have, too, and the server would know.
    assert node.wait(500) == [leave_of("r1", DONE, None), StopWorkers(0, 0)]
    end = node.hear(gone())
    assert end[:2] == [StopStoreHost(0), leave_of("r1", DONE, 0)]
    assert outcome_of(end).exit_code == EXIT_TRY_AGAIN
    assert outcome_of(end).text == WHY


def test_a_worker_that_exits_other_than_with_0_is_no_failure() -> None:
    node = told()
    assert node.hear(exited(0, None)) == [leave_of("r1", LEAVES, None), StopWorkers(0, 30_000)]
    assert node.state.failures == ()
    # The other one saves its state, and is not hurried.
    assert node.hear(exited(1, 1)) == []
    assert node.hear(gone())[1] == leave_of("r1", LEAVES, 0)


def test_the_others_have_no_longer_than_until_the_deadline() -> None:
    node = told(events.NoticeGiven(4_000, WHY))
    assert node.hear(exited(0, 1))[1] == StopWorkers(0, 3_990)


def test_what_has_failed_before_the_notice_is_a_failure() -> None:
    node = told()
    said, stop = node.hear(exited(0, 1, age_ms=500))
    assert type(said).__name__ == "Fail"
    assert stop == StopWorkers(0, 5_000)
    # The node does not take part in the next round.
    assert leave_of("r1", LEAVES, 0) in node.hear(gone())
    assert node.phase is Phase.ENDED


@pytest.mark.parametrize("signum", [0, 10])
def test_the_signal_is_the_one_of_the_launch_or_none(signum: int) -> None:
    node = Node(replace(JOB, notice_signum=signum))
    node.hear(CONNECTED, JOINED, line())
    assert node.hear(GIVEN) == [NotifyWorkers(0, 60_000, WHY, signum or None)]


# ------------------------------------------------------------------ they do not


@pytest.mark.parametrize(("signum", "grace_ms"), [(15, 0), (10, 5_000), (0, 5_000)])
def test_at_the_deadline_workers_are_ended(signum: int, grace_ms: int) -> None:
    node = Node(replace(JOB, notice_signum=signum))
    node.hear(CONNECTED, JOINED, line(), GIVEN)
    late = replace(LEAVES, reason=f"{WHY}; its workers had not exited by the deadline")
    assert node.wait(60_000) == [leave_of("r1", late, None), StopWorkers(0, grace_ms)]
    assert node.phase is Phase.LEAVING


def test_another_deadline_is_told_but_no_signal_is_sent_again() -> None:
    node = told()
    assert node.hear(events.NoticeGiven(5_000, WHY)) == [NotifyWorkers(0, 5_000, WHY)]
    assert node.wait(4_999) == []
    assert [type(command) for command in node.wait(1)] == [Leave, StopWorkers]


def test_what_is_said_again_changes_nothing() -> None:
    node = told()
    assert node.hear(GIVEN, events.NoticeGiven(59_900, WHY)) == []


def test_a_signal_to_the_agent_ends_the_wait() -> None:
    node = told()
    told_leave, stop = node.hear(signalled())
    assert isinstance(told_leave, Leave)
    assert stop == StopWorkers(0, 30_000, SIGTERM)


# ------------------------------------------------------------------ without workers


@pytest.mark.parametrize("make", [Node, joining, rejoining], ids=["new", "joining", "rejoining"])
def test_a_node_without_workers_leaves_at_once(make: type[Node]) -> None:
    node = make()
    run, left = node.state.run, node.state.left_round
    end = node.hear(GIVEN)
    assert leave_of(run, LEAVES, left) in end
    assert outcome_of(end).text.startswith(WHY)
    assert node.phase is Phase.ENDED


def test_a_node_that_stops_does_not_join_again() -> None:
    node = stopping()
    assert node.hear(GIVEN) == []
    assert leave_of("r1", LEAVES, 0) in node.hear(gone())
    assert node.phase is Phase.ENDED


def test_a_round_that_ends_meanwhile_is_the_last_one() -> None:
    node = told()
    # Broken or not, its workers save as requested, and are in no collective.
    assert node.hear(ended(broken=True)) == [
        leave_of("r1", LEAVES, None),
        StopWorkers(0, 30_000),
    ]
    assert leave_of("r1", LEAVES, 0) in node.hear(exited(0), exited(1, 1), gone())


def test_a_job_that_ends_meanwhile_has_its_own_result() -> None:
    node = told()
    node.hear(closed(Result.FAILED))
    assert outcome_of(node.hear(gone())).result is Result.FAILED


def test_a_node_that_has_succeeded_leaves_as_soon_as_nothing_is_left() -> None:
    node = sweeping()
    assert node.hear(GIVEN) == []
    assert leave_of("r1", LEAVES, 0) in node.hear(gone())


def test_who_serves_the_store_stays_until_the_deadline() -> None:
    node = running(group_rank=0)
    node.hear(events.StoreHostReady(0), exited(0), exited(1), gone())
    assert node.hear(GIVEN) == []
    assert node.wait(59_999) == []
    assert StopStoreHost(0) in node.wait(1)


# ------------------------------------------------------------------ it is lifted


def test_a_lifted_notice_ends_nobody() -> None:
    node = told()
    assert node.hear(LIFTED) == [TakeBackNotice(0)]
    assert node.wait(600_000) == []
    assert node.phase is Phase.RUNNING
    assert node.state.notice is None


def test_who_exits_because_it_was_told_has_left_all_the_same() -> None:
    for exit_code, leaving in ((0, DONE), (1, LEAVES)):
        node = told()
        node.hear(LIFTED)
        node.hear(exited(0))
        said = node.hear(exited(1, exit_code)) + node.wait(500)
        assert leave_of("r1", leaving, None) in said


def test_who_exits_long_after_has_failed() -> None:
    node = told()
    node.hear(LIFTED)
    node.wait(30_000)
    assert type(node.hear(exited(0, 1))[0]).__name__ == "Fail"


def test_after_a_lifted_notice_the_node_joins_the_next_round() -> None:
    node = told()
    node.hear(LIFTED, ended())
    assert node.hear(gone()) == [StopStoreHost(0), SayJoin("r1", 0, ())]
    assert node.hear(line(1))[0].assignment == line(1)  # type: ignore[union-attr]
    assert node.state.notice is None


def test_a_notice_that_comes_back_is_told_without_the_signal() -> None:
    node = told()
    node.hear(LIFTED)
    assert node.hear(GIVEN) == [NotifyWorkers(0, 60_000, WHY)]


# ------------------------------------------------------------------ what the node knows of it


class Knows:
    """What a node knows of its own preemption, and what its jobs receive."""

    def __init__(self) -> None:
        self.now_ms = 1_000
        self.heard: list[Event] = []
        self.drain = NodeDrain(lambda: self.now_ms, self.heard.append)

    def news(self) -> list[Event]:
        heard, self.heard[:] = list(self.heard), []
        return heard


def test_a_drain_keeps_its_deadline_however_often_it_is_repeated() -> None:
    node = Knows()
    node.drain.take_from_server(7, 60_000, WHY)
    assert node.news() == [GIVEN]
    # As sent by a server whose clock is an hour ahead.
    node.drain.take_from_server(7, 0, WHY)
    assert node.news() == []
    node.now_ms += 1_000
    assert node.drain.event() == events.NoticeGiven(59_000, WHY)
    # Another drain has another one.
    node.drain.take_from_server(8, 90_000, "longer")
    assert node.news() == [events.NoticeGiven(90_000, "longer")]


def test_of_a_drain_and_the_nodes_own_wish_the_earlier_counts() -> None:
    node = Knows()
    assert node.drain.note_wish(30_000, "preempted")
    node.drain.take_from_server(7, 60_000, WHY)
    assert node.news() == [events.NoticeGiven(30_000, "preempted")]
    node.drain.lift()
    assert node.news() == []
    assert node.drain.present is not None
    # A later notice does not extend the deadline.
    assert not node.drain.note_wish(60_000, "preempted")
    assert node.drain.note_wish(1_000, "SIGTERM")


def test_a_drain_that_is_lifted_is_over() -> None:
    node = Knows()
    node.drain.take_from_server(7, 60_000, WHY)
    node.drain.lift()
    assert node.news() == [GIVEN, LIFTED]
    assert node.drain.event() is None
    node.drain.lift()
    assert node.news() == []


def test_what_a_former_agent_was_told_is_lifted_or_said_anew() -> None:
    for lifted in (True, False):
        node = Knows()
        node.drain.remember(31_000, WHY)
        # Its jobs know.
        assert node.news() == []
        assert node.drain.event() == events.NoticeGiven(30_000, WHY)
        if lifted:
            node.drain.lift()
            assert node.news() == [LIFTED]
        else:
            node.drain.take_from_server(7, 25_000, WHY)
            assert node.news() == [events.NoticeGiven(25_000, WHY)]


# ------------------------------------------------------------------ where workers find it


def test_workers_find_deadline_and_reason_in_one_line(tmp_path: Path) -> None:
    file = NoticeFile(lambda: tmp_path)
    path = Path(file.path())
    assert not path.exists()
    file.write(60_000, "drained by ada: nöw\nkernel")
    (written,) = path.read_text().splitlines()
    notice = json.loads(written)
    assert notice["reason"] == "drained by ada: nöw\nkernel"
    assert abs(notice["deadline_unix"] - time.time() - 60) < 60
    file.write(5_000, "sooner")
    assert json.loads(path.read_text())["reason"] == "sooner"
    assert [entry.name for entry in tmp_path.iterdir()] == ["notice"]
    file.take_back()
    file.take_back()
    assert not path.exists()


def test_without_a_place_there_is_no_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = NoticeFile(lambda: None)
    file.write(60_000, WHY)
    file.take_back()
    assert file.path() == ""
    gone_folder = NoticeFile(lambda: tmp_path / "gone")
    gone_folder.write(60_000, WHY)
    assert "cannot write the notice file" in caplog.text
