"""The runner's parts separately: signals, the alarm, failed starts, the socket for agents."""

from __future__ import annotations

import errno
import gc
import math
import os
import resource
import shutil
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rdzv.agent.runner import zygote_process
from rdzv.agent.runner.agent_link import AgentLink
from rdzv.agent.runner.channel import Channel
from rdzv.agent.runner.child_exits import SHM_MANAGER, SHM_MANAGER_S, Child, Children
from rdzv.agent.runner.descriptors import short_path
from rdzv.agent.runner.frames import RequestError
from rdzv.agent.runner.killing import HELPERS_S, QUIET_S, STUCK_AFTER_S, HelpersTime
from rdzv.agent.runner.processes import signal_relative
from rdzv.agent.runner.requests import (
    MAX_SHARDS,
    STANDBY,
    KeepSpec,
    NotifyWorkers,
    RenewFence,
    Serve,
    Snapshot,
    StartStoreHost,
    StartWorkers,
    StateMark,
    StopWorkers,
    WorkerSpec,
    ZygoteSpec,
)
from rdzv.agent.runner.spawn import NOT_STARTED, Program, reason_of
from rdzv.agent.runner.system import Alarm, boottime_ms, libc
from rdzv.agent.runner.worker import PROTOCOL, Worker
from rdzv.agent.runner.workers import Round
from rdzv.agent.runner.zygote_process import NEEDS_BYTES
from tests.support.fake_runner import FakeRunner, NoChildren
from tests.support.lingering import LINGER_S, lingering


@pytest.fixture
def runner() -> Iterator[FakeRunner]:
    made = FakeRunner()
    yield made
    made.close()


def open_fds() -> int:
    gc.collect()  # What earlier tests have left must not be closed between two counts.
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_relative_is_signalled_and_leaves_no_descriptor() -> None:
    with subprocess.Popen(["sleep", "600"]) as child:
        before = open_fds()
        signal_relative(child.pid, signal.SIGTERM, {1})
        assert child.poll() is None
        signal_relative(child.pid, signal.SIGTERM, {os.getpid()})
        assert child.wait() == -signal.SIGTERM
        assert open_fds() == before


@pytest.mark.parametrize(
    ("at_ms", "told"), [(None, (0, 0, 0, 0)), (12_345, (0, 0, 12, 345_000_000))]
)
def test_an_alarm_is_set_to_its_millisecond_and_rings_once(
    at_ms: int | None, told: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = []

    def settime(fd: int, flags: int, spec: bytes, old: None) -> int:
        heard.append(struct.unpack("4l", spec))
        return 0

    with closing(Alarm()) as alarm, monkeypatch.context() as patch:
        patch.setattr(libc, "timerfd_settime", settime)
        alarm.set(at_ms)
    assert heard == [told]


def test_after_one_that_cannot_be_started_no_further_worker_is(runner: FakeRunner) -> None:
    both = tuple(WorkerSpec(rank, ("true",), {}) for rank in (0, 1))
    runner.workers.start(StartWorkers(3, both))
    assert runner.children.begun == ["round 3: the worker of local_rank 0"]


@pytest.mark.parametrize(("source", "resume_step"), [(1, 5), (None, None)])
def test_snapshots_hear_from_which_step_kept_workers_continue(
    runner: FakeRunner, source: int | None, resume_step: int | None
) -> None:
    told: list[int | None] = []
    runner.slots.begin_round = told.append
    keep = KeepSpec((), source, resume_step)
    runner.workers.start(StartWorkers(3, (WorkerSpec(0, ("true",), {}),), keep))
    assert told == [resume_step]


@pytest.fixture
def waits(runner: FakeRunner) -> FakeRunner:
    """Return a runner whose standbys are starting, and end for round 3 within five seconds."""
    runner.workers.round = Round(runner, STANDBY, 1, has_links=True)
    keep = KeepSpec((), None, None, grace_s=5.0)
    runner.workers.start(StartWorkers(3, (WorkerSpec(0, ("true",), {}),), keep))
    assert runner.children.begun == [] and runner.events == []
    assert 4.0 < runner.workers.round.kill_at - time.monotonic() <= 5.0
    assert runner.hello()["last_round"] == 3
    return runner


def test_a_round_begins_once_standbys_that_are_too_late_have_ended(waits: FakeRunner) -> None:
    waits.workers.notify(NotifyWorkers(3, signal.SIGUSR1))
    waits.workers.end_round()
    assert waits.events[0] == ("gone", {"round": STANDBY})
    assert waits.children.begun == ["round 3: the worker of local_rank 0"]
    assert waits.workers.round.notified_by == signal.SIGUSR1
    # It waits for nothing any more.
    waits.workers.stop(StopWorkers(3, 0))
    waits.workers.end_round()
    assert waits.kinds[-1] == "gone"
    waits.workers.start(StartWorkers(4, (WorkerSpec(0, ("true",), {}),)))
    assert waits.children.begun[1:] == ["round 4: the worker of local_rank 0"]


def test_a_round_that_is_stopped_before_standbys_have_ended_never_begins(waits: FakeRunner) -> None:
    with pytest.raises(RequestError, match="round 4 cannot start: 3 is not gone"):
        waits.workers.start(StartWorkers(4, ()))
    waits.workers.stop(StopWorkers(2, 0))
    waits.workers.stop(StopWorkers(3, 0))
    assert waits.events == [("gone", {"round": 2}), ("gone", {"round": 3})]
    waits.workers.start(StartWorkers(4, (WorkerSpec(0, ("true",), {}),)))
    waits.workers.end_round()
    assert waits.children.begun == ["round 4: the worker of local_rank 0"]


@pytest.mark.parametrize("part", ["agent.gave_up", "loop.shutting_down"])
def test_a_runner_that_ends_begins_no_round_after_its_standbys(
    waits: FakeRunner, part: str
) -> None:
    of, name = part.split(".")
    setattr(getattr(waits, of), name, True)
    waits.workers.end_round()
    assert waits.children.begun == [] and waits.workers.round is None


def lost(runner: FakeRunner) -> tuple[str, float | None]:
    """Return why the last zygote was lost, and when there will be another."""
    kind, fields = runner.events.pop()
    assert kind == "zygote_lost"
    return fields["reason"], fields["retry_s"]


def test_a_zygote_that_forked_is_replaced_and_one_given_up_is_not(runner: FakeRunner) -> None:
    zygote = runner.forks.zygote
    before = open_fds()
    zygote.keep(ZygoteSpec(("python", "train.py"), {}, None, ()))
    for retry_s in (1.0, 2.0, 4.0, 8.0):
        assert lost(runner) == ("cannot start 'python': no more processes", retry_s)
        runner.pass_time(math.inf)
    zygote.has_forked()
    runner.pass_time(math.inf)
    assert lost(runner)[1] == 1.0
    zygote.give_up_for_good("the script changes OMP_NUM_THREADS")
    assert lost(runner) == ("the script changes OMP_NUM_THREADS", None)
    runner.events.clear()
    runner.pass_time(math.inf)
    zygote.begin()
    assert runner.events == [] and open_fds() == before


@pytest.mark.parametrize(
    ("free", "begun"), [(None, True), (NEEDS_BYTES, True), (NEEDS_BYTES - 1, False)]
)
@pytest.mark.parametrize("after_import", [True, False])
def test_a_zygote_for_restarts_is_started_only_with_memory_to_spare(
    runner: FakeRunner,
    monkeypatch: pytest.MonkeyPatch,
    free: int | None,
    begun: bool,
    after_import: bool,
) -> None:
    """It is tried again later; a requested one is started however little memory is free."""
    monkeypatch.setattr(zygote_process, "free_bytes", lambda: free)
    zygote = runner.forks.zygote
    zygote.keep(ZygoteSpec(("python",), {}, None, (), after_import=after_import))
    zygote.begin()
    assert bool(runner.children.begun) == (begun or not after_import)
    if not runner.children.begun:
        assert lost(runner) == ("it is not started with less than 1024 MiB of memory free", 1.0)
        monkeypatch.setattr(zygote_process, "free_bytes", lambda: None)
        runner.pass_time(time.monotonic() + 1.1)
        assert runner.children.begun


def test_a_store_host_whose_socket_was_lost_has_not_started(
    runner: FakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AgentLink, "lost_fds", True)
    runner.store_hosts.start(StartStoreHost(3, ("python",), {}))
    about = {"round": 3, "exit_code": NOT_STARTED, "signal": None}
    assert runner.events == [("store_host_exited", about)]


@pytest.mark.parametrize(
    ("code", "rests"), [(errno.EMFILE, True), (errno.EAGAIN, False), (errno.ECONNABORTED, False)]
)
def test_a_socket_that_cannot_be_served_is_left_alone_for_a_while(
    runner: FakeRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, rests: bool
) -> None:
    """It would stay readable all the time, and the runner would spin."""

    def accept(_: socket.socket) -> None:
        raise OSError(code, os.strerror(code))

    path = tmp_path / "s"
    runner.agent.serve(Serve(str(path), 9.0, 9.0))
    with socket.socket(socket.AF_UNIX) as client, monkeypatch.context() as patch:
        with short_path(path) as short:
            client.connect(short)
        patch.setattr(socket.socket, "accept", accept)
        runner.turn()
        assert (not list(runner.loop.wait(0))) == rests
    runner.pass_time(time.monotonic() + 1.0)
    assert list(runner.loop.wait(0)), "it is served again"


# ---------------------------------------------------------------------- parked workers


class Parked(Worker):
    """A parked worker, whose link a fork of the worker still holds open."""

    def __init__(self, runner: FakeRunner) -> None:
        super().__init__(runner, Round(runner, 0, has_links=True), WorkerSpec(1, (), {}))
        self.child: Any = Child(4711, print, spared=False)

    def exit(self, code: int) -> None:
        self.child.on_exit(self.child, code)


@pytest.fixture
def link(runner: FakeRunner, monkeypatch: pytest.MonkeyPatch) -> Iterator[Parked]:
    monkeypatch.setattr("rdzv.agent.runner.parked_workers.signal_child", lambda pid, signum: None)
    made = Parked(runner)
    runner.workers.parked.add(made)
    yield made
    made.close()


def look(runner: FakeRunner, *left: int) -> list[bool]:
    """Look at what the exited workers have left. Return whether each had time to end."""
    given: list[bool] = []

    def kill_family(_owns: object, helpers: HelpersTime | None) -> list[int]:
        given.append(helpers is not None)
        return [*left]

    runner.children.kill_family = kill_family
    runner.workers.parked.do_due(time.monotonic())
    return given


def test_the_link_of_a_parked_worker_ends_with_it(runner: FakeRunner, link: Parked) -> None:
    """Its end alone would not close it where a descendant holds the other end."""
    link.exit(3)
    assert not link.is_open
    assert runner.workers.parked.waiting() == []
    [(kind, fields)] = runner.events
    assert (kind, fields["local_rank"], fields["exit_code"]) == ("kept_exited", 1, 3)


def test_a_replacement_starts_once_nothing_is_left(runner: FakeRunner, link: Parked) -> None:
    parked, replaced = runner.workers.parked, list[bool]()
    parked.end(link, 5.0, then=lambda: replaced.append(True))
    look(runner)
    assert replaced == []
    link.exit(0)
    look(runner, 4712)
    assert replaced == []
    look(runner)
    assert replaced == [True] and not parked


def test_a_second_request_only_shortens(runner: FakeRunner, link: Parked) -> None:
    for grace_s, left_s in ((60.0, 60.0), (3_600.0, 60.0), (5.0, 5.0), (60.0, 5.0)):
        runner.workers.parked.end_all(grace_s)
        assert link.kill_at is not None
        assert link.kill_at - time.monotonic() == pytest.approx(left_s, abs=2.5)


def test_the_time_in_which_a_worker_had_to_park_is_not_its_time_to_end(
    runner: FakeRunner, link: Parked
) -> None:
    link.kill_at = time.monotonic()
    runner.workers.parked.add(link)
    runner.workers.parked.end(link, 60.0)
    assert link.kill_at > time.monotonic() + 30


def test_the_end_of_parked_workers_is_said_once(runner: FakeRunner, link: Parked) -> None:
    parked = runner.workers.parked
    for _ in range(2):
        parked.end_all(5.0)
        link.exit(0)
        for _ in range(3):
            look(runner)
        assert runner.kinds == ["kept_exited", "kept_gone"]
        runner.events.clear()
        parked.add(link := Parked(runner))
    # One that ends for another reason is no answer to a request that was answered.
    parked.end(link, 5.0)
    link.exit(0)
    look(runner)
    assert runner.kinds == ["kept_exited"] and not parked


def test_without_a_grace_helpers_have_none_either(runner: FakeRunner, link: Parked) -> None:
    """The grace may also end once the worker has exited: at the fence."""
    link.exit(-15)
    assert look(runner, 4712) == [True]
    runner.workers.parked.end_all(0)
    assert look(runner, 4712) == [False]


# ---------------------------------------------------------------------- what workers have started


@pytest.fixture
def signalled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the processes that get SIGTERM, each in its own group; let time stand still."""
    sent: list[int] = []
    killing = "rdzv.agent.runner.killing"
    monkeypatch.setattr(f"{killing}.descendants_of", lambda children: [1, 2, 3, 4, *children])
    monkeypatch.setattr(f"{killing}.signal_relative", lambda pid, _, family: sent.append(pid))
    monkeypatch.setattr(os, "getpgid", lambda pid: pid)
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    return sent


def test_what_is_left_of_a_worker_gets_a_signal_once_according_to_its_end(
    signalled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {signal.SIGTERM}
    helpers = HelpersTime({1: 0, 2: -signal.SIGTERM, 3: 1, 4: -signal.SIGKILL}, told)
    assert helpers.goes_on([9])
    assert signalled == [2]
    for after_s, goes_on in (QUIET_S - 0.01, True), (QUIET_S, True), (HELPERS_S - 0.01, True):
        monkeypatch.setattr(time, "monotonic", lambda now=100.0 + after_s: now)
        assert helpers.goes_on([9]) == goes_on
        assert signalled == ([2] if after_s < QUIET_S else [2, 3, 4])
    monkeypatch.setattr(time, "monotonic", lambda: 100.0 + HELPERS_S)
    assert not helpers.goes_on([9])


class Ending:
    """A runner whose round is ending, and what is left of it at each look."""

    def __init__(self, runner: FakeRunner) -> None:
        self.runner = runner
        self.round = runner.workers.round = Round(runner, 3)
        self.left, self.cleans = [4712], False
        self.given: list[HelpersTime | None] = []
        runner.children.kill, runner.children.cleaning = self._kill, lambda: self.cleans

    def _kill(self, _stays: object, helpers: HelpersTime | None) -> list[int]:
        self.given.append(helpers)
        if helpers is not None:
            helpers.goes_on(self.left)
        return self.left


def test_at_the_fence_and_at_the_end_nothing_that_is_left_has_time(runner: FakeRunner) -> None:
    for hurries in (False, True):
        ending = Ending(runner)
        ending.round.kill_at, ending.round.fenced = 0.0, hurries
        runner.killing.advance()
        assert [helpers is None for helpers in ending.given] == [hurries]
        runner.loop.shutting_down = True
        runner.killing.advance()
        assert ending.given[1] is None
        runner.loop.shutting_down = False


def test_a_round_is_stuck_only_after_the_time_for_what_is_left(
    runner: FakeRunner, signalled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ending = Ending(runner)
    ending.round.kill_at = 0.0
    for after_s, reports in (0.0, 0), (HELPERS_S + STUCK_AFTER_S - 0.01, 0), (9.0, 1), (10.0, 1):
        monkeypatch.setattr(time, "monotonic", lambda now=100.0 + after_s: now)
        runner.killing.advance()
        assert runner.kinds == ["stuck"] * reports
    assert ending.given[-1] is None


def test_a_runner_ends_once_nothing_is_left_and_nothing_cleans(runner: FakeRunner) -> None:
    ending = Ending(runner)
    runner.loop.shutting_down, ending.left, ending.cleans = True, [], True
    assert not runner.killing.advance() and runner.killing.goes_on
    ending.cleans = False
    assert runner.killing.advance() and runner.kinds == ["gone"]


@pytest.mark.slow
def test_a_slow_torch_shm_manager_is_killed(runner: FakeRunner, tmp_path: Path) -> None:
    program = tmp_path / SHM_MANAGER
    shutil.copy("/bin/sleep", program)
    with (
        closing(Children(runner.loop)) as children,
        subprocess.Popen([program, "600"]) as process,
    ):
        try:
            assert children.kill(lambda pid: pid != process.pid) == []
            assert children.cleaning()
            runner.pass_time(time.monotonic() + SHM_MANAGER_S - 1)
            assert process.poll() is None
            runner.pass_time(time.monotonic() + SHM_MANAGER_S)
            assert not children.cleaning()
            assert process.wait() == -signal.SIGKILL
        finally:
            process.kill()


def test_a_round_reaches_its_fence_once(runner: FakeRunner) -> None:
    runner.workers.round = Round(runner, 3)
    for _ in range(2):
        runner.fence.renew(RenewFence(1))
    assert runner.kinds == ["fenced"]
    assert runner.children.begun == ["the guard of the fence"] * 2, "it is tried again"


class Guards(NoChildren):
    """Starts only guards, whose pipes the test reads."""

    def __init__(self, runner: FakeRunner) -> None:
        super().__init__(runner)
        self.guards: list[tuple[int, Any]] = []
        self.child: Any = SimpleNamespace(kill=lambda: None)

    def start(self, _name: str, program: Program, on_exit: Any, **_: Any) -> Any:
        (fd,) = program.pass_fds
        self.guards.append((os.dup(fd), on_exit))
        os.set_blocking(fd, False)
        return self.child

    def told(self) -> list[int]:
        """What the last guard was told since the last call."""
        try:
            said = os.read(self.guards[-1][0], 4096)
        except BlockingIOError:
            return []
        return [at_ms for (at_ms,) in struct.iter_unpack("q", said)]

    def close(self) -> None:
        super().close()
        for fd, _ in self.guards:
            os.close(fd)


def test_the_guard_of_the_fence_knows_its_time_while_there_is_a_worker(runner: FakeRunner) -> None:
    held, at_ms = Round(runner, 3), boottime_ms() + 60_000
    runner.children.close()
    runner.children, fence = Guards(runner), runner.fence
    guards = runner.children
    fence.renew(RenewFence(at_ms))
    fence.rest()
    assert guards.told() == []
    runner.workers.round = held
    for later in (0, 0, 5):
        fence.renew(RenewFence(at_ms + later))
        fence.rest()
    assert guards.told() == [at_ms, at_ms + 5]
    runner.workers.round = None
    for _ in range(2):
        fence.check()
        fence.rest()
    assert guards.told() == [0]
    # The second time.
    runner.workers.round = held
    fence.check()
    assert guards.told() == [at_ms + 5]
    # One that has ended is replaced at the next renewal, and told.
    guards.guards[-1][1](guards.child, -9)
    fence.check()
    assert len(guards.guards) == 1
    fence.renew(RenewFence(at_ms + 6))
    assert len(guards.guards) == 2 and guards.told() == [at_ms + 6]


def test_a_fence_that_is_reached_stays_guarded_until_no_worker_is_left(runner: FakeRunner) -> None:
    runner.children.close()
    guards = runner.children = Guards(runner)
    held = runner.workers.round = Round(runner, 3)
    at_ms = boottime_ms() + 20
    runner.fence.renew(RenewFence(at_ms))
    while not held.fenced:
        runner.fence.check()
    runner.fence.renew(RenewFence(at_ms + 60_000))
    runner.fence.rest()
    assert guards.told() == [at_ms]
    runner.workers.round = None
    runner.fence.rest()
    assert guards.told() == [0]


class Saving:
    """The runner's end of a worker's link, and what is noted of the worker's snapshots."""

    def __init__(self, runner: FakeRunner) -> None:
        self.noted: list[tuple[int, int, Snapshot | None]] = []
        runner.slots.note = lambda *what: self.noted.append(what)
        self.link = Worker(runner, Round(runner, 0, has_links=True), WorkerSpec(1, (), {}))
        assert self.link.theirs is not None
        self._worker = Channel(self.link.theirs)

    def say(self, kind: str, *fds: int, **fields: object) -> None:
        self._worker.send({"type": kind, **fields}, *fds)
        self.link.read()

    def hello(self) -> None:
        self.say("hello", protocol=PROTOCOL)

    def close(self) -> None:
        self.link.close()
        self._worker.close()


@pytest.mark.slow
def test_a_worker_that_sends_a_descriptor_loses_its_link(runner: FakeRunner) -> None:
    sent, peer = lingering()
    with closing(Saving(runner)) as worker, peer:
        worker.hello()
        begun = time.monotonic()
        worker.say("saved", sent.detach(), slot=1)
        assert not worker.link.is_open and not worker.link.hung_up
        assert worker.noted == []
        assert time.monotonic() - begun < LINGER_S / 4


MARK = {"lineage": 4, "step": 50, "series": "a", "shards": 1}
SAVED = {"mark": MARK, "shard": 0, "bytes": 7, "digest": "d"}


def test_a_worker_that_has_said_hello_says_what_it_has_saved(runner: FakeRunner) -> None:
    with closing(Saving(runner)) as worker:
        worker.say("saved", slot=1, **SAVED)
        worker.hello()
        worker.say("saved", slot=1, **SAVED)
        worker.say("saved", slot=0)
        assert worker.noted == [
            (1, 1, Snapshot(1, StateMark(4, 50, "a", 1), 0, 7, "d")),
            (1, 0, None),
        ]


def with_(numbers: dict[str, int]) -> dict[str, Any]:
    mark = {name: numbers.get(name, value) for name, value in MARK.items()}
    return {**SAVED, "mark": mark, "shard": numbers.get("shard", 0)}


@pytest.mark.parametrize(
    ("taken", "refused"),
    [
        ({"step": 2**53}, {"step": 2**53 + 1}),
        ({"step": 0}, {"step": -1}),
        ({"shard": 1, "shards": 2}, {"shard": 2, "shards": 2}),
        ({"shards": MAX_SHARDS}, {"shards": MAX_SHARDS + 1}),
        ({"lineage": 2**31 - 1}, {"lineage": 2**31}),
    ],
)
def test_a_number_that_no_snapshot_has_ends_the_link(
    runner: FakeRunner, taken: dict[str, int], refused: dict[str, int]
) -> None:
    with closing(Saving(runner)) as worker:
        worker.hello()
        worker.say("saved", **with_(taken))
        assert worker.link.is_open and len(worker.noted) == 1
        worker.say("saved", **with_(refused))
        assert not worker.link.is_open and len(worker.noted) == 1


def test_all_that_a_worker_may_say_is_what_the_wire_can_carry(runner: FakeRunner) -> None:
    """Otherwise its agent fails, and blames itself."""
    with closing(Saving(runner)) as worker:
        worker.link.child = cast(Child, SimpleNamespace(pid=9))
        worker.hello()
        worker.say("suspect", round=0, message="\ud800 a", traceback="b \udfff")
        worker.say("saved", **{**SAVED, "mark": {**MARK, "series": "\ud800"}, "digest": "\udc00"})
        worker.say("resumed", round=0, step=2**53, source=2**31 - 1, init_ms=2**31 - 1)
        assert worker.link.is_open
        told = [fields for _, fields in runner.events]
        assert [one.get("message") or one.get("init_ms") for one in told] == ["? a", 2**31 - 1]
        assert told[0]["traceback"] == "b ?"
        ((_, _, saved),) = worker.noted
        assert saved is not None and (saved.mark.series, saved.digest) == ("?", "?")
        worker.say("stuck", round=0, place="\ud800 in all_reduce")
        assert worker.link.stuck_in == "? in all_reduce"


@pytest.mark.parametrize("name", ["source", "init_ms", "heal_ms"])
def test_a_worker_resumes_with_numbers_of_32_bits(runner: FakeRunner, name: str) -> None:
    with closing(Saving(runner)) as worker:
        worker.link.child = cast(Child, SimpleNamespace(pid=9))
        worker.hello()
        worker.say("resumed", round=0, **{name: 2**31})
        assert not worker.link.is_open and runner.events == []


def test_a_reason_names_the_limit_that_was_met() -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    reason = reason_of(OSError(errno.EMFILE, os.strerror(errno.EMFILE), "a file"))
    assert reason.startswith(f"Too many open files (this process may have {limit}: raise `ulimit")
    # This limit is the machine's.
    assert reason_of(OSError(errno.ENFILE, "No more")) == "No more"
