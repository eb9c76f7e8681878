"""The line that says, round by round, which workers are kept, which are new, and why."""

from __future__ import annotations

import logging

import pytest

from rdzv.agent.core import commands
from rdzv.agent.core.model import KeptWorker
from rdzv.agent.job.start_log import StartLog
from rdzv.agent.runner_link import (
    KeptExited,
    WorkerExited,
    WorkerNotKept,
    WorkerResumed,
    WorkersGone,
    WorkerStarted,
)
from tests.unit.agent.test_agent_machine import line


class Story:
    """A job with three workers, and its clock."""

    def __init__(self) -> None:
        self.now_ms = 1_000
        self.log = StartLog("job", 3, lambda: self.now_ms)
        self.start(0, "cold", "cold", "cold")

    def start(self, round_: int, *how: str) -> None:
        self.log.decided(commands.StartWorkers(line(round_)))
        self.now_ms += 50
        for local_rank, one in enumerate(how):
            self.log.runner_said(WorkerStarted(round_, local_rank, 100 + local_rank, one))

    def stop(self, round_: int) -> None:
        self.log.decided(commands.StopWorkers(round_, 5_000, None, 10_000))
        self.now_ms += 120

    def resume(self, round_: int, *local_ranks: int) -> None:
        for local_rank in local_ranks:
            said = WorkerResumed(round_, local_rank, 100 + local_rank, 7, 0, False, 3, 0)
            self.log.runner_said(said)


@pytest.fixture
def s(caplog: pytest.LogCaptureFixture) -> Story:
    caplog.set_level(logging.INFO, "rdzv.agent")
    return Story()


def test_the_first_round_has_no_line(s: Story, caplog: pytest.LogCaptureFixture) -> None:
    assert not caplog.messages


def test_kept_and_new_workers_are_told_apart(s: Story, caplog: pytest.LogCaptureFixture) -> None:
    s.log.runner_said(WorkerExited(0, 2, 102, None, 9, 0))
    s.stop(0)
    s.log.runner_said(WorkersGone(0, (KeptWorker(0, 100), KeptWorker(1, 101))))
    s.start(1, "kept", "kept", "warm")
    assert not caplog.messages
    s.resume(1, 0, 1)
    assert caplog.messages == [
        "job: round 1: 2 workers kept (local_rank 0, 1), parked in 0.12 s and gone on in 0.05 s, "
        "1 worker new (local_rank 2 is warm: its worker ended with signal 9 (SIGKILL))"
    ]


def test_each_reason_is_that_of_its_round(s: Story, caplog: pytest.LogCaptureFixture) -> None:
    s.stop(0)
    s.log.runner_said(WorkerNotKept(0, 0, 100, "it has not parked in time"))
    s.log.runner_said(WorkerExited(0, 0, 100, None, 9, 0))
    s.log.runner_said(WorkersGone(0, (KeptWorker(1, 101), KeptWorker(2, 102))))
    s.log.runner_said(KeptExited(1, 101, None, 9))
    s.start(1, "cold", "cold", "kept")
    s.resume(1, 2)
    s.stop(1)
    s.log.runner_said(WorkersGone(1))
    s.start(2, "cold", "cold", "cold")
    parked = "local_rank 1 is cold: its worker was parked, and has ended"
    assert caplog.messages == [
        "job: round 1: 1 worker kept (local_rank 2), parked in 0.12 s and gone on in 0.05 s, "
        f"2 workers new (local_rank 0 is cold: it has not parked in time; {parked})",
        "job: round 2: 3 workers new (local_rank 0 is cold; local_rank 1 is cold; "
        "local_rank 2 is cold)",
    ]


def test_a_round_that_ends_before_all_go_on_has_none(
    s: Story, caplog: pytest.LogCaptureFixture
) -> None:
    s.stop(0)
    s.start(1, "kept", "kept", "kept")
    s.stop(1)
    s.resume(1, 0, 1, 2)
    assert not caplog.messages
