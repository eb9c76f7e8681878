"""Workers that stay when a round ends: which are asked to park, offered, and ended.

The stories drive the pure core as those of `test_agent_machine` do.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rdzv.agent.core import events
from rdzv.agent.core.commands import (
    Command,
    EndKept,
    Exit,
    SayJoin,
    StartWorkers,
    StopStoreHost,
    StopWorkers,
)
from rdzv.agent.core.model import EXIT_FAILED, EXIT_TRY_AGAIN, Phase
from rdzv.core.commands import Fail, Leave, ReportStuck
from rdzv.core.model import Cause, Ended, Failure, KeptWorker, Result, RoundEnd
from rdzv.messages import Closed, Refused, RoundOver, Withdrawn
from rdzv.structs import replace
from tests.unit.agent.test_agent_machine import (
    CONNECTED,
    JOB,
    JOINED,
    LOST,
    RUNNER_LOST,
    SIGTERM,
    Node,
    closed,
    exited,
    gone,
    line,
    outcome_of,
    signalled,
)

KEEPING = replace(JOB, keep_timeout_ms=10_000, park_timeout_ms=60_000)
GRACE_MS = JOB.failure_stop_timeout_ms
FIRST, SECOND = KeptWorker(0, step=7, pid=100), KeptWorker(1, step=6, torn=True, pid=101)
NOTICE = events.NoticeGiven(20_000, "n1 is drained")


def running(round_: int = 0) -> Node:
    node = Node(KEEPING)
    node.hear(CONNECTED, JOINED, line(round_))
    node.now_ms += 1_000
    return node


def parked(*kept: KeptWorker) -> Node:
    """Return a node that waits for a round with these workers parked; by default both."""
    node = running()
    node.hear(over(), events.WorkersGone(0, kept=kept or (FIRST, SECOND)))
    return node


def over(*, keep: bool = True, culprits: tuple[int, ...] = ()) -> RoundOver:
    return RoundOver(
        "job-7", "r1", 0, RoundEnd(Cause.NODE_LOST, "n2 is lost", broken=True, keep=keep), culprits
    )


def suspected(local_rank: int = 0, age_ms: int = 0) -> events.WorkerSuspected:
    return events.WorkerSuspected(0, local_rank, 100 + local_rank, "Connection reset", "T", age_ms)


def failures_in(told: list[Command]) -> tuple[Failure, ...]:
    (said,) = [command for command in told if isinstance(command, Fail)]
    return said.failures


# ------------------------------------------------------------------ who is asked to park


def test_the_end_of_a_round_lets_workers_park_but_not_its_culprits() -> None:
    assert running().hear(over(culprits=(1,))) == [
        StopWorkers(0, GRACE_MS, keep_ms=10_000, not_kept=(1,))
    ]
    # A failed worker lets its siblings park as well.
    assert running().hear(exited(0, 1))[-1] == StopWorkers(0, GRACE_MS, keep_ms=10_000)


@pytest.mark.parametrize(
    ("node", "event"),
    [
        (running(), over(keep=False)),
        (running(), signalled()),
        (running(), Withdrawn("job-7", "r1", "stop")),
        (running(), closed(Result.STOPPED)),
        (running(), events.StartFailed(0, "no such file")),
    ],
    ids=["operator", "signal", "withdrawn", "closed", "start failed"],
)
def test_other_ends_keep_no_worker(node: Node, event: events.Event) -> None:
    (stop,) = [command for command in node.hear(event) if isinstance(command, StopWorkers)]
    assert stop.keep_ms is None
    assert stop.not_kept == ()


def test_a_drained_node_keeps_no_worker() -> None:
    node = running()
    node.hear(NOTICE)
    (stop,) = [command for command in node.hear(over()) if isinstance(command, StopWorkers)]
    assert stop.keep_ms is None


def test_without_a_time_to_park_no_worker_is_kept() -> None:
    node = Node(JOB)
    node.hear(CONNECTED, JOINED, line())
    assert node.hear(over(culprits=(1,))) == [StopWorkers(0, GRACE_MS)]


# ------------------------------------------------------------------ suspects


def test_a_suspect_ends_the_round_as_a_failure_that_may_be_a_peers() -> None:
    node = running()
    told = node.hear(suspected(0, age_ms=30))
    (failure,) = failures_in(told)
    assert failure == Failure(
        0, 2, 100, None, None, "Connection reset", "T", node.now_ms - 30, suspect=True
    )
    assert told[-1] == StopWorkers(0, GRACE_MS, keep_ms=10_000)
    assert node.state.alive == {0, 1}


def test_a_suspect_after_the_end_of_its_round_is_nothing_new() -> None:
    node = running()
    node.hear(over())
    assert node.hear(suspected()) == []
    assert node.state.failures == ()


@pytest.mark.parametrize("first", [suspected(0), over()], ids=["its own suspect", "elsewhere"])
@pytest.mark.parametrize("by_itself", [True, False])
def test_an_exit_that_no_stop_explains_is_reported(first: events.Event, by_itself: bool) -> None:
    node = running()
    node.hear(first)
    node.now_ms += 50
    assert node.hear(exited(1, None, by_itself=by_itself)) == []
    (join,) = [c for c in node.hear(gone(0)) if isinstance(c, SayJoin)]
    died = [failure.local_rank for failure in join.failures if not failure.suspect]
    assert died == ([1] if by_itself else [])


def test_a_suspect_that_exits_late_has_not_failed_a_second_time() -> None:
    node = running()
    node.hear(suspected(0), exited(0, None))
    assert [failure.suspect for failure in node.state.failures] == [True]


def test_a_suspect_on_a_node_that_leaves_lets_the_node_leave() -> None:
    node = running()
    node.hear(NOTICE)
    told = node.hear(suspected())
    assert isinstance(told[0], Leave)
    assert not any(isinstance(command, Fail) for command in told)


def test_a_node_without_server_does_not_judge_by_suspects() -> None:
    node = Node(replace(KEEPING, park_timeout_ms=10 * JOB.server_timeout_ms))
    node.hear(CONNECTED, JOINED, line())
    node.hear(suspected(), events.WorkersGone(0, kept=(FIRST,)), LOST)
    assert node.wait(JOB.server_timeout_ms) == [EndKept(GRACE_MS)]
    told = node.hear(events.KeptGone())
    assert outcome_of(told).exit_code == EXIT_TRY_AGAIN


# ------------------------------------------------------------------ offered, and kept


def test_parked_workers_are_offered_with_the_join() -> None:
    node = running()
    node.hear(over())
    told = node.hear(events.WorkersGone(0, kept=(FIRST, SECOND)))
    assert told == [StopStoreHost(0), SayJoin("r1", 0, (), kept=(FIRST, SECOND))]


def test_a_parked_worker_that_exits_is_offered_no_more() -> None:
    node = parked()
    assert node.hear(events.KeptExited(0, 100)) == [SayJoin("r1", 0, (), kept=(SECOND,))]
    assert node.hear(events.KeptExited(0, 100)) == []


def test_a_round_takes_the_kept_workers_and_nothing_is_parked_any_more() -> None:
    node = parked()
    assignment = line(1, kept=(0, 1), source=2, resume_step=7)
    assert node.hear(assignment) == [StartWorkers(assignment)]
    assert node.state.kept == ()
    assert node.state.alive == {0, 1}


def test_a_worker_that_died_while_the_round_was_announced_is_a_new_one() -> None:
    node = parked()
    node.hear(events.KeptExited(0, 100))
    (start,) = node.hear(line(1, kept=(0, 1)))
    assert start == StartWorkers(line(1, kept=(1,)))


def test_a_kept_worker_that_does_not_go_on_in_time_is_suspect() -> None:
    node = parked()
    node.hear(line(1, kept=(0, 1)))
    node.hear(events.WorkerResumed(1, 0))
    assert node.wait(599_999) == []
    said, stop = node.wait(1)
    assert isinstance(said, Fail)
    (failure,) = said.failures
    assert (failure.local_rank, failure.pid, failure.suspect) == (1, 101, True)
    assert "did not continue within 600 s" in failure.message
    assert stop == StopWorkers(1, GRACE_MS, keep_ms=10_000)
    # Nothing is due once all of them go on.
    node = parked()
    node.hear(line(1, kept=(0, 1)), events.WorkerResumed(1, 0), events.WorkerResumed(1, 1))
    assert node.wait(2_000_000) == []


def test_the_fence_ends_parked_workers_and_the_node_says_so() -> None:
    node = parked()
    assert node.hear(events.KeptGone()) == [SayJoin("r1", 0, ())]
    assert node.state.kept == ()


# ------------------------------------------------------------------ ended again


def test_parked_workers_without_a_round_end_after_a_while() -> None:
    node = parked()
    assert node.wait(KEEPING.park_timeout_ms - 1) == []
    assert node.wait(1) == [EndKept(GRACE_MS)]
    assert node.wait(KEEPING.park_timeout_ms) == []
    assert node.hear(events.KeptExited(0, 100), events.KeptExited(1, 101)) == []
    assert node.hear(events.KeptGone()) == [SayJoin("r1", 0, ())]


def test_a_round_that_comes_while_they_end_starts_new_workers() -> None:
    node = parked()
    node.wait(KEEPING.park_timeout_ms)
    (start,) = node.hear(line(1, kept=(0, 1)))
    assert start == StartWorkers(line(1))
    assert node.hear(events.KeptGone()) == []
    assert node.phase is Phase.RUNNING


ENDS: dict[str, tuple[Callable[[], events.Event], bool]] = {
    "signal": (signalled, True),
    "notice": (lambda: NOTICE, True),
    "withdrawn": (lambda: Withdrawn("job-7", "r1", "it runs elsewhere"), True),
    "closed": (closed, False),
    "refused": (lambda: Refused("job-7", "InvalidRequestError", "no"), False),
}


@pytest.mark.parametrize(("event", "says_leave"), ENDS.values(), ids=ENDS)
def test_parked_workers_end_before_nodes(
    event: Callable[[], events.Event], says_leave: bool
) -> None:
    node = parked()
    told = node.hear(event())
    assert told[-1] == EndKept(GRACE_MS)
    assert [type(command) for command in told[:-1]] == [Leave] * says_leave
    assert node.hear(event()) in ([], [EndKept(0)])
    assert node.hear(line(1, kept=(0, 1))) == []
    assert not any(isinstance(command, Exit) for command in node.hear(events.KeptExited(0, 100)))
    assert isinstance(node.hear(events.KeptGone())[-1], Exit)


def test_the_end_of_a_job_that_a_node_has_left_is_not_its_own() -> None:
    node = parked()
    node.hear(signalled())
    assert node.hear(closed(Result.STOPPED)) == []
    assert node.hear(signalled()) == [EndKept(0)]
    assert outcome_of(node.hear(events.KeptGone())).exit_code == 128 + SIGTERM


def test_workers_that_parked_while_the_node_began_to_leave_end_first() -> None:
    node = running()
    node.hear(over(), signalled())
    assert node.hear(events.WorkersGone(0, kept=(FIRST,))) == [EndKept(GRACE_MS)]
    told = node.hear(events.KeptGone())
    assert [type(command) for command in told] == [StopStoreHost, Leave, Exit]


def test_charged_suspects_of_a_failed_job_raise_their_exception() -> None:
    node = running()
    node.hear(suspected(1), events.WorkersGone(0, kept=(FIRST, SECOND)))
    told_of = tuple(
        Failure(local_rank, 0, 1, None, None, "Connection reset", "T", 0, node_id=node_id)
        for node_id, local_rank in (("n1", 1), ("n2", 0))
    )
    failed = Closed("job-7", "r1", Ended(Result.FAILED, "no restart is left", failures=told_of))
    assert node.hear(failed) == [EndKept(GRACE_MS, charged=(1,))]
    assert outcome_of(node.hear(events.KeptGone())).exit_code == EXIT_FAILED


def test_a_parked_worker_that_survives_sigkill_makes_the_node_stuck() -> None:
    node = parked()
    node.hear(signalled())
    assert node.hear(events.WorkersStuck(0, (100,))) == [ReportStuck("n1", 0, "r1", 0, (100,))]
    assert ReportStuck("n1", 0, "r1", 0, (100,)) in node.hear(CONNECTED)


def test_a_lost_runner_has_taken_its_parked_workers_with_it() -> None:
    node = parked()
    told = node.hear(RUNNER_LOST)
    assert isinstance(told[-1], Exit)
    assert not any(isinstance(command, EndKept) for command in told)


def test_workers_parked_since_before_a_round_that_was_never_heard_of_end() -> None:
    """Its other nodes have continued since, perhaps from another state."""
    node = parked()
    missed = RoundOver(
        "job-7", "r1", 1, RoundEnd(Cause.NODE_LOST, "n3 is lost", broken=True, keep=True)
    )
    told = node.hear(missed)
    assert told == [EndKept(GRACE_MS), SayJoin("r1", 1, (), kept=())]
    assert node.hear(missed) == []
    assert node.hear(events.KeptGone()) == [SayJoin("r1", 1, (), kept=())]
