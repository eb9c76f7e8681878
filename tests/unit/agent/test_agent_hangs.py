"""A worker hangs if it has reported progress and is then silent for too long.

Only time under observation counts. The limit may be learned from the worker's own intervals. Time
in a debugger does not count.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rdzv.agent.core.hang_decision import AUTO_INTERVALS, Observation, WorkerActivity, timeout_ms
from rdzv.agent.observers import hang_watch
from rdzv.agent.observers.hang_watch import HangWatch
from rdzv.core.evidence.hang_culprit import HangTimeout
from rdzv.core.model import Assignment
from rdzv.messages import Hung
from rdzv.runtime.clock import monotonic_ms

AUTO, FIXED = HangTimeout(None), HangTimeout(5_000)


def watched(*looks: Observation, every_ms: int = 1_000) -> WorkerActivity:
    activity = WorkerActivity()
    for look in looks:
        activity = activity.after(look, every_ms)
    return activity


def words(*numbers: int | None, state: str = "S") -> tuple[Observation, ...]:
    return tuple(Observation(None if n is None else (n,), state) for n in numbers)


# ------------------------------------------------------------------ a worker, look by look


@pytest.mark.parametrize(
    ("looks", "hung"),
    [
        pytest.param(words(*[None] * 60), "", id="never a word: nobody knows what it does"),
        pytest.param(words(1, 1, 1, 1, 1), "", id="4 s of silence"),
        pytest.param(words(1, 1, 1, 1, 1, 1), "no progress reported for 5 s, limit 5 s", id="5 s"),
        pytest.param(words(1, 1, 1, 1, 1, 1, 2), "", id="it has said something again"),
        pytest.param(
            words(1, *[None] * 5),
            "no progress reported for 5 s, limit 5 s",
            id="the file is gone",
        ),
        pytest.param(words(1, *[1] * 9, state="t"), "", id="a debugger holds it"),
        pytest.param(
            words(1, *[1] * 9, state="T"),
            "no progress reported for 9 s, limit 5 s",
            id="stopped",
        ),
    ],
)
def test_silence_after_a_word(looks: tuple[Observation, ...], hung: str) -> None:
    assert watched(*looks).why_hung(5_000) == hung


@pytest.mark.parametrize(
    ("looks", "hung"),
    [
        pytest.param(
            [Observation(None, "D", 7)] * 6,
            "in D state for 5 s without interruption",
            id="one sleep",
        ),
        pytest.param([Observation(None, "D", 7)] * 5, "", id="4 s"),
        pytest.param(
            [Observation(None, "D", n) for n in range(20)], "", id="many short ones: a slow disk"
        ),
        pytest.param([Observation(None, "D", None)] * 20, "", id="nobody knows whether it is one"),
        pytest.param(
            [
                *[Observation(None, "D", 7)] * 4,
                Observation(None, "S"),
                *[Observation(None, "D", 7)] * 5,
            ],
            "",
            id="broken",
        ),
    ],
)
def test_one_uninterruptible_sleep_is_a_hang(looks: list[Observation], hung: str) -> None:
    assert watched(*looks).why_hung(5_000) == hung


@pytest.mark.parametrize(
    ("intervals", "longest_ms", "expected_ms"),
    [
        pytest.param((), 0, 60_000, id="nothing is known"),
        pytest.param((1_000, 200, 300), 1_000, 60_000, id="never less than a minute"),
        pytest.param((1_000, 30_000, 900), 30_000, 600_000, id="20 times the longest"),
        pytest.param((1_000,), 300_000, 600_000, id="twice the longest pause ever seen"),
        pytest.param((1_000,), 86_400_000, 1_800_000, id="which counts for half an hour at most"),
        pytest.param((200_000,), 200_000, 4_000_000, id="its own steps count in full"),
    ],
)
def test_what_is_learned(intervals: tuple[int, ...], longest_ms: int, expected_ms: int) -> None:
    activity = WorkerActivity(report=(1,), intervals_ms=intervals)
    assert timeout_ms(AUTO, activity, longest_ms) == expected_ms
    assert timeout_ms(FIXED, activity, longest_ms) == 5_000


def test_intervals_are_those_between_words_and_the_first_from_the_start() -> None:
    activity = watched(*words(None, None, 1, 1, 2, 3))
    assert activity.intervals_ms == (3_000, 2_000, 1_000)
    many = watched(*words(*range(2 * AUTO_INTERVALS)))
    assert len(many.intervals_ms) == AUTO_INTERVALS


# ------------------------------------------------------------------ counts of collectives


def counts(*numbers: int | None, known: bool = True) -> tuple[Observation, ...]:
    return tuple(Observation(None, "S", None, n, 0, known) for n in numbers)


def test_a_worker_that_reports_nothing_is_judged_by_its_collectives() -> None:
    activity = watched(*counts(None, 10, 20, *[20] * 5))
    assert activity.why_hung(5_000) == "no collective completed for 5 s, limit 5 s"
    assert watched(*counts(None, 10, 20, *[20] * 5, 21)).why_hung(5_000) == ""


def test_a_worker_that_starts_slowly_does_not_hang_by_its_few_collectives() -> None:
    """It may import, wrap and compile between its first collectives."""
    assert watched(*counts(None, 1, 2, *[2] * 50)).why_hung(5_000) == ""
    assert "for 60 s, limit 60 s" in watched(*counts(None, 1, 2, *[2] * 60)).why_hung(5_000)


def test_a_worker_that_reports_progress_is_not_judged_by_its_collectives() -> None:
    activity = watched(*words(1, 1), *counts(10, 20, 30, 40))
    assert activity.why_hung(5_000) == "no progress reported for 5 s, limit 5 s"


def test_a_worker_that_cannot_be_asked_is_not_silent() -> None:
    assert watched(*counts(10, 20), *counts(*[20] * 60, known=False)).why_hung(5_000) == ""


def test_pauses_between_counts_are_no_longer_than_they_must_have_been() -> None:
    """Counted every 6 s: with 60 collectives in one interval, no single one takes 6 s."""
    looks = [Observation(None, "S", None, n, 6_000) for n in (10, 70, 70, 70, 130)]
    assert watched(*looks, every_ms=6_000).intervals_ms == (6_000, 100, 12_000)


@pytest.mark.parametrize("before", [words(1, *[1] * 4), counts(10, 20, *[20] * 4), counts(2, 3)])
def test_a_worker_after_its_script_has_a_minute(before: tuple[Observation, ...]) -> None:
    exits = Observation(None, "S", exits=True)
    assert watched(*before, *[exits] * 60).why_hung(5_000) == ""
    assert watched(*before, *[exits] * 61).why_hung(5_000) == (
        "its script has ended, but it has not exited for 60 s, limit 60 s"
    )
    assert watched(*before, *[exits] * 80).why_hung(90_000) == ""


# ------------------------------------------------------------------ files and processes


def assignment(round_: int) -> Assignment:
    return Assignment("job-7", "run-1", round_, 1, 2, 8, 16, 8, 16, "h", 1, True, 0, 3)


class Clock:
    """A clock that advances by half a second with each call, and by as much as the test says."""

    def __init__(self) -> None:
        self.at_ms = 0

    def __call__(self) -> int:
        self.at_ms += 500
        return self.at_ms


class Watch:
    def __init__(
        self,
        folder: Path,
        timeout: HangTimeout | None,
        pid: int,
        now_ms: Callable[[], int] | None = None,
    ) -> None:
        self.said: list[Hung] = []
        self.clock = Clock()
        self.file = folder / "progress"
        self.file.write_bytes(b"")
        self.watch = HangWatch("job-7", timeout, self.said.append, now_ms=now_ms or self.clock)
        self.watch.open_round(assignment(4))
        self.watch.worker_started(1, pid, str(self.file))

    def look(self, times: int = 1) -> None:
        for _ in range(times):
            self.watch.look()

    @property
    def reported(self) -> list[list[int]]:
        return [[worker.rank for worker in report.workers] for report in self.said]


@pytest.fixture(name="pid")
def _pid(monkeypatch: pytest.MonkeyPatch) -> int:
    """The pid of a worker whose process sleeps, as if waiting, at each observation.

    If memory is short, a real process may be in D state at all observations, which follow each
    other at once here.
    """
    monkeypatch.setattr(hang_watch, "process_state", lambda _: "S")
    return 4711


@pytest.fixture(name="stopped")
def _stopped() -> Iterator[int]:
    """The pid of a stopped process."""
    with subprocess.Popen(["sleep", "600"]) as process:
        process.send_signal(signal.SIGSTOP)
        yield process.pid
        process.kill()


@pytest.mark.slow
async def test_a_silent_worker_is_told_once_and_again_later(tmp_path: Path, pid: int) -> None:
    w = Watch(tmp_path, FIXED, pid)
    w.look(30)
    assert w.said == []
    w.file.write_bytes(b"7\n")
    w.look(1)
    assert w.said == []
    w.look(12)
    (report,) = w.said
    assert (report.run, report.round) == ("run-1", 4)
    (told,) = report.workers
    assert (told.rank, told.local_rank, told.pid) == (9, 1, pid)
    assert told.reason.startswith("no progress reported for ")
    w.watch.say_again()
    assert w.reported == [[9], [9]]
    w.clock.at_ms += hang_watch.SAY_AGAIN_MS
    w.look(1)
    assert w.reported == [[9]] * 3
    w.watch.close_round()


@pytest.mark.slow
async def test_the_same_step_once_more_is_a_sign_of_life(tmp_path: Path, pid: int) -> None:
    """This tells an evaluation or a long save from a hang."""
    w = Watch(tmp_path, FIXED, pid)
    w.file.write_bytes(b"7\n")
    w.look(13)
    assert w.reported == [[9]]
    other = tmp_path / "other"
    other.write_bytes(b"7\n")
    other.rename(w.file)
    w.look(1)
    assert w.reported == [[9], []]
    w.watch.say_again()
    assert w.reported == [[9], []]
    w.watch.close_round()


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [True, False], ids=["in this round", "from the next one on"])
async def test_unwatched_workers_get_a_learned_limit(
    tmp_path: Path, pid: int, at_once: bool
) -> None:
    w = Watch(tmp_path, None, pid)
    if at_once:
        w.watch.watch_anyway()
    else:
        w.watch.close_round()
        w.watch.watch_anyway()
        w.watch.open_round(assignment(4))
        w.watch.worker_started(1, pid, str(w.file))
    w.file.write_bytes(b"7\n")
    w.look(130)
    assert w.said[0].workers[0].reason == "no progress reported for 60 s, limit 60 s"
    w.watch.close_round()


@pytest.mark.slow
async def test_a_timeout_that_was_given_stays(tmp_path: Path, pid: int) -> None:
    w = Watch(tmp_path, FIXED, pid)
    w.watch.watch_anyway()
    w.file.write_bytes(b"7\n")
    w.look(13)
    assert w.reported == [[9]]
    w.watch.close_round()


async def test_a_pause_of_the_agent_is_no_silence(tmp_path: Path, pid: int) -> None:
    w = Watch(tmp_path, FIXED, pid)
    w.file.write_bytes(b"7\n")
    w.look(1)
    w.clock.at_ms += 3_600_000
    w.look(1)
    assert w.said == []
    w.watch.close_round()


async def test_who_has_exited_or_is_being_stopped_is_not_watched(tmp_path: Path, pid: int) -> None:
    w = Watch(tmp_path, FIXED, pid)
    w.file.write_bytes(b"7\n")
    w.look(1)
    w.watch.worker_exited(1)
    w.look(30)
    w.watch.close_round()
    w.watch.say_again()
    assert w.said == []


@pytest.mark.slow
async def test_a_hung_worker_that_exits_hangs_no_more(tmp_path: Path, pid: int) -> None:
    """Else its round would be ended for it: the end of a job may take longer than the limit."""
    w = Watch(tmp_path, FIXED, pid)
    w.file.write_bytes(b"7\n")
    w.look(13)
    assert w.reported == [[9]]
    w.watch.worker_exited(1)
    assert w.reported == [[9], []]
    w.watch.worker_exited(1)
    w.look(30)
    assert w.reported == [[9], []]
    w.watch.close_round()


@pytest.mark.parametrize("how", ["its hook says so", "Z", ""])
async def test_a_worker_that_exits_does_not_hang(
    how: str, tmp_path: Path, pid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = Watch(tmp_path, FIXED, pid)
    w.file.write_bytes(b"7\n")
    w.look(9)
    if how in ("Z", ""):
        monkeypatch.setattr(hang_watch, "process_state", lambda _: how)
    else:
        (tmp_path / f"collectives.{pid}.exits").touch()
    w.look(60)
    w.watch.close_round()
    assert w.said == []


async def test_without_a_timeout_nobody_is_watched(tmp_path: Path, pid: int) -> None:
    w = Watch(tmp_path, None, pid)
    assert not w.watch.watching
    w.watch.close_round()


@pytest.mark.slow
async def test_a_false_hang_is_remembered_in_the_next_round(tmp_path: Path, pid: int) -> None:
    """So a job whose evaluation takes longer than expected is not ended by it forever."""
    w = Watch(tmp_path, AUTO, pid)
    w.file.write_bytes(b"7\n")
    w.look(200)
    assert w.reported[0] == [9]
    silent_ms = w.said[0].workers[0].silent_ms
    w.watch.close_round()
    w.said.clear()
    w.watch.open_round(assignment(5))
    w.watch.worker_started(1, pid, str(w.file))
    while not w.said:
        w.look(1)
    assert w.said[0].workers[0].silent_ms >= 2 * silent_ms
    w.watch.close_round()


@pytest.mark.slow
async def test_the_timer_looks_by_itself(tmp_path: Path, stopped: int) -> None:
    w = Watch(tmp_path, HangTimeout(200), stopped, monotonic_ms)
    w.file.write_bytes(b"7\n")
    async with asyncio.timeout(100):
        while not w.said:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert w.reported == [[9]]
    w.watch.close_round()
