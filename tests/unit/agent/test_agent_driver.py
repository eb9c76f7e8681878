"""The driver of one job, with a fake link and a fake runner: what it reports, and how it fails."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from rdzv.agent.core import events
from rdzv.agent.core.model import AgentState, JobTerms, LeaveCause, Leaving, Phase
from rdzv.agent.job import decisions, from_runner
from rdzv.agent.job.decisions import log_event
from rdzv.agent.job.job_driver import JobDriver
from rdzv.agent.job.snapshots import SnapshotReports
from rdzv.agent.launch.launch import Launch, Output
from rdzv.agent.runner.requests import ZygoteSpec
from rdzv.agent.runner_link import agent_children
from rdzv.agent.system.side_thread import in_thread
from rdzv.agent.workers.worker_group import LocalWorkerGroup
from rdzv.core.model import Cause, Failure, RoundEnd, Settings, Snapshot, SnapshotMark, Tally
from rdzv.messages import Joined, RoundOver, SnapshotsHeld, TakeStacks, Withdrawn
from rdzv.structs import replace
from rdzv.v1 import rdzv_pb2 as pb
from tests.support.agent_jobs import (
    LINE,
    PATIENCE_S,
    FakeLink,
    FakeRunner,
    a_launch,
    round_over,
    until,
    use_runner,
)

pytestmark = pytest.mark.slow


async def well() -> str:
    """Find no fault with the node."""
    return ""


class Fixture:
    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.link, self.runner = FakeLink(), FakeRunner()
        use_runner(monkeypatch, self.runner)
        self.launch = a_launch(folder)
        self.look: Callable[[], Awaitable[str]] = well
        self.driver = self.new_driver(self.launch)

    def new_driver(self, launch: Launch) -> JobDriver:
        return JobDriver(launch, self.link, "r1", examine=self.examine)  # type: ignore[arg-type]

    async def examine(self) -> str:
        return await self.look()


WARM = ZygoteSpec(argv=("python",), env={}, cwd=None, modules=("torch",))
FOR_RESTARTS = ZygoteSpec(argv=("python",), env={}, cwd=None, modules=("torch",), after_import=True)


warm = pytest.mark.parametrize("zygote", [WARM], ids=["warm"])
for_restarts = pytest.mark.parametrize("zygote", [FOR_RESTARTS], ids=["for restarts"])


@pytest.fixture
def zygote() -> ZygoteSpec | None:
    return None


@pytest.fixture
async def f(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zygote: ZygoteSpec | None
) -> AsyncIterator[Fixture]:
    made = Fixture(tmp_path, monkeypatch)

    async def specify(workers: LocalWorkerGroup) -> None:
        workers.zygote = zygote

    if zygote is not None:
        monkeypatch.setattr(LocalWorkerGroup, "prepare", specify)
    await made.driver.prepare()
    yield made
    await made.driver.close()


async def test_it_offers_the_connections_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Fixture(tmp_path, monkeypatch)
    made.driver = made.new_driver(replace(made.launch, local_addr=""))
    await made.driver.prepare()

    def offered() -> str:
        belief = made.driver.belief()
        assert belief is not None
        return belief.join.offer.address

    assert offered() == "10.0.0.5"
    made.link.address = "10.0.0.6"
    assert offered() == "10.0.0.6"
    made.driver.post(LINE)
    made.link.address = "10.0.0.7"
    assert offered() == "10.0.0.6", "the round goes on with what was offered for it"
    await made.driver.close()


@pytest.mark.quick
async def test_it_joins_its_run_at_once_where_a_stream_is_open(f: Fixture) -> None:
    (join,) = f.link.of("join")
    assert (join.rdzv_id, join.run, join.HasField("left_round")) == ("job-7", "r1", False)
    assert f.link.jobs == [f.driver]
    belief = f.driver.belief()
    assert belief is not None
    assert (belief.phase, belief.join.run) == (pb.Belief.JOINING, "r1")


READY = events.ZygoteReady(pid=7, modules=("torch",), threads=1, memory_kb=1, seconds=5.0)
LOST = events.ZygoteLost("it was killed by signal 9", retry_s=1.0)


@warm
@pytest.mark.parametrize("over", [READY, LOST])
async def test_it_prepares_until_its_zygote_is_ready_or_lost(
    f: Fixture, over: events.RunnerEvent
) -> None:
    assert f.runner.asked == [("zygote", False)]
    assert f.driver.belief().join.preparing  # type: ignore[union-attr]
    for forks in (False, True):  # What zygotes do elsewhere.
        f.driver.post(Joined("job-7", "r1", 1, forks))
    assert joins(f) == [True]
    f.runner.tell(over)
    f.runner.tell(READY)  # Of its replacement, perhaps: it is ready once.
    assert joins(f) == [True, False]
    assert not f.driver.belief().join.preparing  # type: ignore[union-attr]
    assert f.runner.asked == [("zygote", False)]


def joins(f: Fixture) -> list[bool]:
    return [join.preparing for join in f.link.of("join")]


@for_restarts
async def test_it_starts_its_zygote_at_once_where_zygotes_serve_the_script(f: Fixture) -> None:
    for forks in (None, True, True, False):
        f.driver.post(Joined("job-7", "r1", 1, forks))
    assert f.runner.asked == [("zygote", True), ("begin",)]
    assert joins(f) == [True]
    f.runner.tell(READY)
    f.driver.post(Joined("job-7", "r1", 1, True))
    assert joins(f) == [True, False]
    assert f.runner.asked == [("zygote", True), ("begin",)]


@for_restarts
async def test_it_joins_as_it_is_where_zygotes_may_not_serve_the_script(f: Fixture) -> None:
    for forks in (False, True):
        f.driver.post(Joined("job-7", "r1", 1, forks))
    assert joins(f) == [True, False]
    assert f.runner.asked == [("zygote", True)]


@warm
async def test_nobody_hears_of_its_zygote_once_it_has_workers(f: Fixture) -> None:
    f.driver.post(Joined("job-7", "r1", 1))
    f.driver.post(LINE)
    f.runner.tell(READY)
    assert joins(f) == [True]


@warm
async def test_nobody_hears_of_its_zygote_once_it_has_left_a_round(f: Fixture) -> None:
    f.driver.post(Joined("job-7", "r1", 1))
    f.driver.post(LINE)
    f.driver.post(round_over())
    f.driver.post(events.WorkersGone(0))
    assert joins(f) == [True, False]
    f.runner.tell(READY)
    assert joins(f) == [True, False]


async def test_its_join_is_said_once(f: Fixture, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "rdzv.agent")
    assert not f.driver.joined
    f.driver.post(Joined("job-7", "r1", 1))
    f.driver.post(Joined("job-7", "r1", 1))
    assert f.driver.joined
    assert caplog.text.count("joined job-7 (run r1)") == 1


async def test_its_machine_is_asked_when_due(f: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[events.Event] = []

    def wishing(state: Any, event: events.Event, now_ms: int) -> Any:
        heard.append(event)
        wake_at_ms = now_ms + 1 if isinstance(event, Joined) else None
        return replace(step(state, event, now_ms), wake_at_ms=wake_at_ms)

    step = decisions.step
    monkeypatch.setattr(decisions, "step", wishing)
    f.driver.post(Joined("job-7", "r1", 1))
    await until(lambda: events.Ticked() in heard)


@pytest.mark.quick
async def test_workers_start_in_the_jobs_folder_with_the_jobs_environment(f: Fixture) -> None:
    f.driver.post(LINE)
    await until(lambda: f.runner.asked)
    assert f.runner.asked == [("start", 0, 1)]
    (worker,) = f.runner.workers
    assert worker.cwd == str(f.launch.chdir)
    assert worker.env["OWN"] == "1"
    assert "HOME" not in worker.env
    assert worker.stdout == str(f.launch.chdir / "run" / "round_0" / "0" / "stdout.log")
    assert Path(worker.env["RDZV_PROGRESS_FILE"]).is_relative_to(f.launch.chdir)
    written = f.driver.written.at(0)
    assert written is not None
    assert str(written.workers[0].stdout) == worker.stdout


async def test_stacks_are_refused_with_a_reason_before_the_first_round(f: Fixture) -> None:
    f.driver.take_stacks(TakeStacks(5, "job-7", "r1", 2, 900))
    sampled = (await said(f, "stacks")).stacks
    assert (sampled.request, sampled.error) == (5, "it has no workers of round 2")
    assert f.driver.belief() is not None


async def test_what_goes_wrong_in_it_is_its_own_end(f: Fixture) -> None:
    f.driver.post(LINE)
    f.runner.start_workers = f.runner.ask = None  # type: ignore[method-assign, assignment]
    f.driver.post(events.Signalled(15, "SIGTERM"))
    f.driver.post(events.Ticked())
    with pytest.raises(TypeError):
        await f.driver.ended
    assert f.driver.belief() is None
    f.driver.say_failed("a bug")
    leave = f.link.said[-1].leave
    assert (leave.cause, leave.run, leave.reason) == (pb.Leave.START_FAILED, "r1", "a bug")
    assert (leave.HasField("left_round"), leave.left_round) == (True, 0)


async def test_what_goes_wrong_with_its_runner_is_its_own_end(f: Fixture) -> None:
    f.driver.post(LINE)
    f.runner.tell(events.WorkerExited(0, 7, 1, 0, None, 0))
    with pytest.raises(IndexError):
        await f.driver.ended


async def test_it_ends_as_soon_as_it_is_withdrawn_without_workers(f: Fixture) -> None:
    f.driver.post(Withdrawn("job-7", "r1", "scaled down"))
    async with asyncio.timeout(PATIENCE_S):
        outcome = await f.driver.ended
    assert (outcome.exit_code, outcome.text) == (75, "scaled down")
    assert f.link.said[-1].leave.cause == pb.Leave.SIGNAL
    assert f.driver.belief() is None


async def test_closing_can_be_tried_again(f: Fixture) -> None:
    f.runner.survives = 1
    with pytest.raises(TimeoutError):
        await f.driver.close()
    await f.driver.close()
    assert f.runner.closes == 2


# ---------------------------------------------------------------- a node that is not well


def fail(f: Fixture, wrong: str) -> list[asyncio.Event]:
    """Let a worker of the first round fail on a node whose health check gives this result."""
    looked, may_answer = asyncio.Event(), asyncio.Event()

    async def examine() -> str:
        looked.set()
        await may_answer.wait()
        return wrong

    f.look = examine
    f.driver.post(LINE)
    f.driver.post(events.WorkerExited(0, 0, 99, 3, None, 0, message="no"))
    f.runner.tell(events.WorkersGone(0))
    return [looked, may_answer]


async def said(f: Fixture, body: str) -> pb.NodeMessage:
    async with asyncio.timeout(PATIENCE_S):
        while f.link.bodies()[-1] != body:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    return f.link.said[-1]


async def test_a_node_whose_worker_failed_joins_again_when_it_was_found_well(f: Fixture) -> None:
    looked, may_answer = fail(f, "")
    await looked.wait()
    # Its seat stays its own meanwhile, even at a server that it has to send Hello to.
    assert f.link.bodies()[-1] == "failed"
    belief = f.driver.belief()
    assert belief is not None
    assert belief.phase == pb.Belief.STOPPING
    may_answer.set()
    assert (await said(f, "join")).join.left_round == 0


async def test_a_node_that_is_found_unwell_leaves_in_place_of_joining_again(f: Fixture) -> None:
    _, may_answer = fail(f, "disk /data has 1 % free")
    may_answer.set()
    async with asyncio.timeout(PATIENCE_S):
        outcome = await f.driver.ended
    assert outcome.exit_code == 75
    assert outcome.text.startswith("unhealthy: disk /data has 1 % free; no server could be")
    leave = f.link.said[-1].leave
    assert (leave.cause, leave.left_round) == (pb.Leave.FAILED, 0)
    assert leave.reason == "unhealthy: disk /data has 1 % free"
    assert "join" not in f.link.bodies()[-3:]


async def test_who_leaves_anyway_is_not_looked_at(f: Fixture) -> None:
    async def examine() -> str:
        raise AssertionError("nobody wants to know")

    f.look = examine
    f.driver.post(LINE)
    f.driver.post(events.Signalled(15, "SIGTERM"))
    f.runner.tell(events.WorkersGone(0))
    async with asyncio.timeout(PATIENCE_S):
        await f.driver.ended


async def test_what_goes_wrong_in_the_look_keeps_nobody_from_going_on(f: Fixture) -> None:
    async def examine() -> str:
        raise ValueError("a bug")

    f.look = examine
    f.driver.post(LINE)
    f.driver.post(events.WorkerExited(0, 0, 99, 3, None, 0, message="no"))
    f.runner.tell(events.WorkersGone(0))
    assert (await said(f, "join")).join.left_round == 0


@pytest.mark.parametrize(
    ("most", "window_ms", "tally", "said"),
    [
        (3, 0, None, "restarts 4 of 3"),
        (None, 0, None, "restarts 4 of 0"),
        (3, 30_000, Tally(restarts_ms=(2_000,)), "restarts 1 of 3 in the last 30 s, 4 in all"),
        (3, 30_000, None, "restarts 0 of 3 in the last 30 s, 4 in all"),
    ],
)
async def test_restarts_are_counted_as_the_server_counts_them(
    f: Fixture,
    caplog: pytest.LogCaptureFixture,
    most: int | None,
    window_ms: int,
    tally: Tally | None,
    said: str,
) -> None:
    caplog.set_level("INFO", "rdzv.agent")
    settings = Settings(1, 1, max_restarts=3, restart_window_ms=window_ms)
    launch = replace(f.launch, job=replace(f.launch.job, settings=settings))
    driver = f.new_driver(launch)
    driver.post(replace(LINE, restarts=4, max_restarts=most, tally=tally))
    assert caplog.text.rstrip().endswith(said)
    await driver.close()


@pytest.fixture
def in_the_loop(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Calls made by this thread, the event loop's, on a path below `remote`."""
    made: list[str] = []
    loop = threading.get_ident()

    def watched(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            paths = [str(arg) for arg in args if isinstance(arg, str | Path)]
            if threading.get_ident() == loop and any("/remote" in path for path in paths):
                made.append(f"{name}{args}")
            return real(*args, **kwargs)

        return call

    for name in (
        *("access", "chmod", "chown", "link", "listdir", "lstat", "mkdir", "open", "readlink"),
        *("rename", "replace", "rmdir", "scandir", "stat", "statvfs", "symlink", "truncate"),
        *("unlink", "utime"),
    ):
        monkeypatch.setattr(os, name, watched(name, getattr(os, name)))
    monkeypatch.setattr("io.open", watched("open", open))
    monkeypatch.setattr("builtins.open", watched("open", open))
    return made


async def test_the_event_loop_touches_nothing_that_may_be_on_a_file_server(
    f: Fixture, tmp_path: Path, in_the_loop: list[str]
) -> None:
    """A round from start to failure, and the next one."""
    remote = tmp_path / "remote"

    def make_files() -> None:
        remote.mkdir()
        (remote / "train.py").touch()

    await in_thread(make_files)
    launch = replace(
        f.launch,
        script="train.py",
        no_python=False,
        chdir=remote,
        output=Output(redirects={0: 3}, log_dir=remote / "logs"),
        snapshot=remote / "snapshot.pt",
    )
    driver = f.new_driver(launch)
    await driver.prepare()
    driver.post(LINE)
    await until(lambda: f.runner.asked)
    await f.runner.tell(events.WorkerExited(0, 0, 100, 1, None, 0))
    (failed,) = f.link.of("failed")
    assert failed.failures[0].message.startswith("no error file")
    f.runner.tell(events.WorkersGone(0))
    await until(lambda: f.link.bodies()[-1] == "join")
    driver.post(replace(LINE, round=1, restarts=1))
    await until(lambda: f.runner.asked[-1][:2] == ("start", 1))
    await driver.close()
    assert in_the_loop == []


@pytest.mark.parametrize("nodes", [1, 2])
async def test_loopback_is_said_to_be_no_peers_address_among_several_nodes(
    f: Fixture, tmp_path: Path, nodes: int
) -> None:
    f.driver.post(replace(LINE, group_world_size=nodes))
    await until(lambda: f.runner.asked)
    why = "[/gloo/transport/tcp/pair.cc:152] timed out connecting: refused, remote=[127.0.1.1]:28$1"
    error = tmp_path / "run" / "round_0" / "0" / "error.json"
    error.write_text(json.dumps({"message": f"RuntimeError: {why}"}))
    await f.runner.tell(events.WorkerExited(0, 0, 100, 1, None, 0))
    (failed,) = f.link.of("failed")
    assert ("127.0.1.1 is loopback" in failed.failures[0].message) is (nodes > 1)


# ---------------------------------------------------------------- a round is a task


@pytest.fixture
def opening(f: Fixture, monkeypatch: pytest.MonkeyPatch) -> list[asyncio.Future[Any]]:
    """The file system's answers when the files of a round are created; the test decides."""
    asked: list[asyncio.Future[Any]] = []

    async def open_round(*_: Any) -> Any:
        asked.append(asyncio.get_running_loop().create_future())
        return await asked[-1]

    monkeypatch.setattr(LocalWorkerGroup, "open_round", open_round)
    return asked


async def test_no_worker_starts_once_they_stop(
    f: Fixture, opening: list[asyncio.Future[Any]]
) -> None:
    """Not even if the files appear at that very moment and the start would go on next."""
    f.driver.post(LINE)
    await until(lambda: opening)
    opening[0].set_result(((), []))
    f.driver.post(round_over())
    for _ in range(10):
        await asyncio.sleep(0)
    assert [what for what, *_ in f.runner.asked] == ["stop"]
    f.runner.tell(events.WorkersGone(0))
    await until(lambda: f.link.bodies().count("join") == 2)


async def test_an_unopened_round_starts_nothing(
    f: Fixture, opening: list[asyncio.Future[Any]]
) -> None:
    f.driver.post(LINE)
    f.driver.post(round_over())
    f.runner.tell(events.WorkersGone(0))
    await until(lambda: f.link.bodies().count("join") == 2)
    assert opening == []
    assert [what for what, *_ in f.runner.asked if what == "start"] == []


async def test_a_failed_start_leaves_the_job(
    f: Fixture, opening: list[asyncio.Future[Any]]
) -> None:
    f.driver.post(LINE)
    await until(lambda: opening)
    opening[0].set_exception(OSError("the disk is full"))
    await until(lambda: f.runner.asked)
    assert f.runner.asked[-1][:2] == ("stop", 0)
    f.runner.tell(events.WorkersGone(0))
    async with asyncio.timeout(PATIENCE_S):
        outcome = await f.driver.ended
    assert "the disk is full" in outcome.text
    assert f.link.said[-1].leave.cause == pb.Leave.START_FAILED


async def test_a_bug_in_a_rounds_task_ends_it(
    f: Fixture, opening: list[asyncio.Future[Any]]
) -> None:
    f.driver.post(LINE)
    await until(lambda: opening)
    opening[0].set_exception(ValueError("a bug"))
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(ValueError, match="a bug"):
            await f.driver.ended


async def test_the_end_of_an_older_round_closes_nothing_of_the_present_one(f: Fixture) -> None:
    f.driver.post(LINE)
    await until(lambda: f.runner.asked)
    assert not f.driver.written.is_over(0)
    f.driver.post(round_over())
    f.runner.tell(events.WorkersGone(0))
    await until(lambda: f.link.bodies().count("join") == 2)
    assert f.driver.written.is_over(0)
    f.driver.post(replace(LINE, round=1))
    await until(lambda: f.runner.asked[-1][:2] == ("start", 1))
    f.runner.tell(events.WorkersGone(0))
    await asyncio.sleep(0.01)
    assert not f.driver.written.is_over(1)
    (worker,) = f.runner.workers
    assert await in_thread(Path(worker.env["RDZV_PROGRESS_FILE"]).exists)


# ---------------------------------------------------------------- what its runner says


@pytest.mark.parametrize("is_unwatched", [True, False])
async def test_workers_without_a_watchdog_are_watched_for_hangs(
    f: Fixture, monkeypatch: pytest.MonkeyPatch, is_unwatched: bool
) -> None:
    watched: list[bool] = []
    monkeypatch.setattr(f.driver.observers, "watch_for_hangs", lambda: watched.append(True))
    f.driver.post(LINE)
    f.runner.tell(events.WorkerResumed(0, 0, is_unwatched))
    assert watched == [True] * is_unwatched


@pytest.mark.parametrize(
    ("exit_code", "how"),
    [
        (-9, "was killed by SIGKILL"),
        (3, "ended unexpectedly with exit code 3"),
        # An adopted runner is another process's child.
        (None, "ended unexpectedly"),
    ],
)
async def test_the_end_of_a_runner_is_told_once_its_processes_are_killed(
    f: Fixture,
    exit_code: int | None,
    how: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    swept: list[int] = []

    async def sweep_orphans() -> None:
        assert not f.driver.ended.done()
        swept.append(1)
        if len(swept) == 1:
            raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(agent_children, "sweep_orphans", sweep_orphans)
    monkeypatch.setattr(from_runner, "SWEEP_AGAIN_S", 0.0)
    await f.runner.tell(events.RunnerExited(exit_code))
    outcome = await f.driver.ended
    assert outcome.text.startswith(f"its runner {how}, and its workers with it")
    assert len(swept) == 2
    assert "cannot search for processes left behind by the job's dead runner" in caplog.text


# ---------------------------------------------------------------- reports on snapshots


def held(step: int) -> SnapshotsHeld:
    return SnapshotsHeld("job-7", "run-1", (Snapshot(0, SnapshotMark(0, step, "a")),))


async def test_the_latest_report_on_snapshots_is_sent_late(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[SnapshotsHeld] = []
    delays: list[float] = []
    call_later = asyncio.get_running_loop().call_later

    def soon(delay: float, *rest: Any) -> asyncio.TimerHandle:
        delays.append(delay)
        return call_later(0, *rest)

    monkeypatch.setattr(asyncio.get_running_loop(), "call_later", soon)
    reports = SnapshotReports(sent.append)
    for step in (10, 20, 30):
        reports.report(held(step), nodes=2)
    assert sent == [held(10)]
    await until(lambda: len(sent) == 2)
    await asyncio.sleep(0)
    await asyncio.sleep(0.01)
    reports.report(held(40), nodes=1_000)
    assert sent == [held(10), held(30), held(40)]
    assert {0.1, 1.0} <= set(delays)
    reports.report(held(50), nodes=2)
    reports.close()
    reports.close()
    await asyncio.sleep(0.01)
    assert sent[-1] == held(40), "nothing is sent after the end"


# ---------------------------------------------------------------- what the log says of signals

RUNS = AgentState(
    JobTerms("job-7", "n1", Settings(1, 1), local_world_size=2, shutdown_timeout_ms=20_000),
    Phase.RUNNING,
    run="r1",
    assignment=LINE,
    alive=frozenset({0, 1}),
    workers_gone=False,
)
LEAVES = replace(RUNS, leaving=Leaving(LeaveCause.SIGNAL, "its agent received SIGINT", 130))
WAITS = "leaving the job; waiting up to 20 s for 2 workers to exit; a second"


@pytest.mark.parametrize(
    ("state", "name", "follows"),
    [
        (AgentState(RUNS.job), "SIGINT", "leaving the job"),
        (RUNS, "SIGINT", f"{WAITS} Ctrl-C kills them at once"),
        (RUNS, "SIGTERM", f"{WAITS} SIGTERM kills them at once"),
        (LEAVES, "SIGINT", "killing the workers at once"),
        (replace(LEAVES, workers_gone=True), "SIGINT", "the job is ending"),
    ],
)
def test_the_first_signal_says_what_it_waits_for_and_the_second_that_it_kills(
    state: AgentState, name: str, follows: str, caplog: pytest.LogCaptureFixture
) -> None:
    log_event(events.Signalled(2, name), state, joined=True)
    assert caplog.messages == [f"job-7: received {name}; {follows}"]


def test_the_error_of_a_worker_is_logged_once_before_the_summary(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def lines(reason: str, *failures: Failure) -> list[str]:
        caplog.clear()
        stops = replace(RUNS, phase=Phase.STOPPING, failures=failures)
        end = RoundEnd(Cause.WORKER_FAILURE, reason)
        log_event(RoundOver("job-7", "r1", 0, end), stops, joined=True)
        return caplog.messages

    boom = events.WorkerExited(0, 1, 77, 3, None, 0, message="ValueError:\nboom")
    log_event(boom, RUNS, joined=True)
    reason = "rank 1 (local_rank 1) on n1: exit code 3: ValueError: boom"
    assert caplog.messages == [f"job-7: worker failed: {reason}"]
    failed = events.ended_worker(boom, LINE, 0)
    ended = "job-7: round 0 ended (worker failure)"
    assert lines(reason, failed) == [f"{ended}: RANK 1 on n1"]
    # These were not logged yet: the failure of another node, a later one, and a suspect.
    other = reason.replace("n1", "n2")
    assert lines(other, failed) == [f"{ended}: {other}"]
    assert lines(reason, replace(failed, local_rank=0, rank=0), failed) == [f"{ended}: {reason}"]
    suspected = "rank 1 (local_rank 1) on n1: a collective failed: ValueError: boom"
    suspect = replace(failed, suspect=True, exit_code=None)
    assert lines(suspected, suspect) == [f"{ended}: {suspected}"]
