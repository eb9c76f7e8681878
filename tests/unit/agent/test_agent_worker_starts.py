"""How a round's workers were started: what the server is sent, and the line in the log."""

from __future__ import annotations

import logging

import pytest

from rdzv.agent.core import commands, events
from rdzv.agent.job.worker_starts import LocalStarts
from rdzv.core.model import KeptWorker
from rdzv.messages import StartedWorker, WorkersStarted
from rdzv.structs import replace
from tests.unit.agent.test_agent_machine import line


class Story:
    """A job with three workers, and its clock."""

    def __init__(self) -> None:
        self.now_ms = 1_000
        self.reports: list[WorkersStarted] = []
        self.starts = LocalStarts("job", 3, lambda: self.now_ms, self.reports.append, watched=True)
        self.start(0, "cold", "cold", "cold")

    def start(self, round_: int, *how: str) -> None:
        self.starts.decided(commands.StartWorkers(line(round_)))
        self.now_ms += 50
        for local_rank, one in enumerate(how):
            self.starts.runner_said(events.WorkerStarted(round_, local_rank, 100 + local_rank, one))

    def stop(self, round_: int) -> None:
        self.starts.decided(commands.StopWorkers(round_, 5_000, None, 10_000))
        self.now_ms += 120

    def resume(self, round_: int, *local_ranks: int) -> None:
        for local_rank in local_ranks:
            self.starts.runner_said(events.WorkerResumed(round_, local_rank))


@pytest.fixture
def s(caplog: pytest.LogCaptureFixture) -> Story:
    caplog.set_level(logging.INFO, "rdzv.agent")
    return Story()


def test_the_first_round_has_no_line(s: Story, caplog: pytest.LogCaptureFixture) -> None:
    assert not caplog.messages


READY = events.ZygoteReady(pid=7, modules=("torch",), threads=1, memory_kb=1, seconds=5.0)
LOST = events.ZygoteLost("it was killed by signal 9", retry_s=1.0)


def test_a_zygote_that_serves_the_script_is_reported_until_it_is_lost(s: Story) -> None:
    s.starts.runner_said(READY)
    s.stop(0)
    s.starts.runner_said(LOST)
    s.starts.runner_said(READY)
    s.start(1, "warm", "warm", "warm")
    s.starts.runner_said(LOST)
    told = [(report.round, report.forks) for report in s.reports]
    assert told == [(0, False), (0, True), (1, True), (1, False)]


def test_a_zygote_that_the_launch_asks_for_shows_nothing(s: Story) -> None:
    s.starts = LocalStarts("job", 3, lambda: s.now_ms, s.reports.append, watched=False)
    s.start(0, "warm", "warm", "warm")
    s.starts.runner_said(READY)
    assert not any(report.forks for report in s.reports)


def test_kept_and_new_workers_are_told_apart(s: Story, caplog: pytest.LogCaptureFixture) -> None:
    s.starts.runner_said(events.WorkerExited(0, 2, 102, None, 9, 0))
    s.stop(0)
    s.starts.runner_said(
        events.WorkersGone(0, kept=(KeptWorker(0, pid=100), KeptWorker(1, pid=101)))
    )
    s.start(1, "kept", "kept", "warm")
    assert not caplog.messages
    s.resume(1, 0, 1)
    assert caplog.messages == [
        "job: round 1: 2 workers kept (local_rank 0, 1), parked in 0.12 s and continued in 0.05 s, "
        "1 worker new (local_rank 2 warm: its worker ended with signal 9 (SIGKILL))"
    ]


def test_each_reason_is_that_of_its_round(s: Story, caplog: pytest.LogCaptureFixture) -> None:
    s.stop(0)
    s.starts.runner_said(events.WorkerNotKept(0, 0, 100, "it did not park in time"))
    s.starts.runner_said(events.WorkerExited(0, 0, 100, None, 9, 0))
    s.starts.runner_said(
        events.WorkersGone(0, kept=(KeptWorker(1, pid=101), KeptWorker(2, pid=102)))
    )
    s.starts.runner_said(events.KeptExited(1, 101, None, 9))
    s.start(1, "cold", "cold", "kept")
    s.resume(1, 2)
    s.stop(1)
    s.starts.runner_said(events.WorkersGone(1))
    s.start(2, "cold", "cold", "cold")
    parked = "local_rank 1 cold: its worker was parked, and has ended"
    assert caplog.messages == [
        "job: round 1: 1 worker kept (local_rank 2), parked in 0.12 s and continued in 0.05 s, "
        f"2 workers new (local_rank 0 cold: it did not park in time; {parked})",
        "job: round 2: 3 workers new (local_rank 0-2 cold)",
    ]


def test_a_round_that_ends_early_has_none(s: Story, caplog: pytest.LogCaptureFixture) -> None:
    s.stop(0)
    s.start(1, "kept", "kept", "kept")
    s.stop(1)
    s.resume(1, 0, 1, 2)
    assert not caplog.messages


def test_the_server_is_told_of_each_round(s: Story) -> None:
    s.starts.runner_said(events.WorkerExited(0, 2, 102, None, 9, 0))
    s.stop(0)
    s.start(1, "kept", "kept", "warm")
    s.resume(1, 0, 1)
    cold = tuple(StartedWorker(local_rank, "cold") for local_rank in range(3))
    died = StartedWorker(2, "warm", "its worker ended with signal 9 (SIGKILL)")
    kept = (StartedWorker(0, "kept"), StartedWorker(1, "kept"))
    run = line(0).run
    assert s.reports == [
        WorkersStarted("job-7", run, 0, cold),
        WorkersStarted("job-7", run, 1, (*kept, died)),
    ]


def test_a_worker_that_was_to_be_warm_and_is_cold_has_a_reason(s: Story) -> None:
    s.stop(0)
    s.start(1)
    s.starts.runner_said(events.WorkersStartedCold(1, (0, 2), "no zygote"))
    for local_rank, how in enumerate(("cold", "warm", "cold")):
        s.starts.runner_said(events.WorkerStarted(1, local_rank, 100, how))
    why = [one.why for one in s.reports[-1].workers]
    assert why == ["not warm: no zygote", "", "not warm: no zygote"]


def test_a_new_server_is_told_again_while_the_round_runs(s: Story) -> None:
    s.starts.say_again()
    assert s.reports == [s.reports[0]] * 2
    s.stop(0)
    s.starts.say_again()
    assert len(s.reports) == 2


def test_the_server_hears_of_unloaded_snapshots(s: Story, caplog: pytest.LogCaptureFixture) -> None:
    def resume(round_: int, local_rank: int, reason: str) -> None:
        said = events.WorkerResumed(round_, local_rank, not_loaded=reason)
        s.starts.runner_said(said)

    resume(0, 1, "")
    assert len(s.reports) == 1
    resume(0, 0, "step 3 is damaged")
    resume(0, 2, "and so is step 2")
    s.starts.say_again()
    first, *again = s.reports
    assert (first.not_loaded, again) == ("", [replace(first, not_loaded="step 3 is damaged")] * 2)
    assert caplog.messages == ["job: round 0: step 3 is damaged"]
    # The next round has a report of its own.
    s.stop(0)
    s.start(1, "cold", "cold", "cold")
    resume(0, 0, "too late")
    assert s.reports[-1].not_loaded == ""
    resume(1, 0, "again")
    assert s.reports[-1].not_loaded == "again"


def test_nothing_is_told_where_a_runner_of_an_older_version_does_not_say(s: Story) -> None:
    s.stop(0)
    s.start(1, "", "", "")
    s.starts.say_again()
    assert len(s.reports) == 1
