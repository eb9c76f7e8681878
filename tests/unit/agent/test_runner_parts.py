"""The runner's parts separately: signals, the alarm, failed starts, the socket for agents."""

from __future__ import annotations

import errno
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
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rdzv.agent.runner import zygote_process
from rdzv.agent.runner.agent_link import AgentLink
from rdzv.agent.runner.agent_replacement import NextAgent
from rdzv.agent.runner.channel import Channel
from rdzv.agent.runner.child_exits import SHM_MANAGER, SHM_MANAGER_S, Child, Children
from rdzv.agent.runner.descriptors import short_path
from rdzv.agent.runner.fence import Fence
from rdzv.agent.runner.held_round import Round
from rdzv.agent.runner.kept_workers import KeptStart
from rdzv.agent.runner.killing import HELPERS_S, QUIET_S, STUCK_AFTER_S, HelpersTime, Killing
from rdzv.agent.runner.loop import Loop
from rdzv.agent.runner.parked_workers import ParkedWorkers
from rdzv.agent.runner.processes import signal_relative
from rdzv.agent.runner.requests import ZygoteSpec
from rdzv.agent.runner.snapshot_slots import MAX_SHARDS, Mark, Snapshot, SnapshotSlots
from rdzv.agent.runner.spawn import NOT_STARTED, Program, reason_of
from rdzv.agent.runner.store_hosts import StoreHosts
from rdzv.agent.runner.system import Alarm, boottime_ms, libc
from rdzv.agent.runner.warm_forks import WarmForks
from rdzv.agent.runner.worker_links import PROTOCOL, WorkerLink
from rdzv.agent.runner.workers import Workers
from rdzv.agent.runner.zygote_process import NEEDS_BYTES
from tests.support.lingering import LINGER_S, lingering


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    if (listened := signal.set_wakeup_fd(-1)) >= 0:
        os.close(listened)  # Its other end is closed: later tests' children would be told of it.
    made.close()


@pytest.fixture
def agent(loop: Loop) -> AgentLink:
    return AgentLink(loop, lambda _request: None, lambda _was_in_charge: None)


def open_fds() -> int:
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


class NoChildren(Children):
    """Children that can never be forked."""

    def __init__(self, loop: Loop) -> None:
        super().__init__(loop)
        self.begun: list[str] = []

    def start(self, name: str, *_: Any, **__: Any) -> Child:
        self.begun.append(name)
        raise OSError(errno.EAGAIN, "no more processes")


def test_after_one_that_cannot_be_started_no_further_worker_is(
    loop: Loop, agent: AgentLink
) -> None:
    with closing(NoChildren(loop)) as children, closing(Fence(agent, children)) as fence:
        forks = WarmForks(loop, children, agent)
        workers = Workers(loop, children, agent, fence, forks, SnapshotSlots(agent))
        both = [{"local_rank": rank, "argv": ["true"], "env": {}} for rank in (0, 1)]
        workers.start({"round": 3, "workers": both})
        assert children.begun == ["round 3: the worker of local_rank 0"]


@pytest.mark.parametrize(("source", "resume_step"), [(1, 5), (None, None)])
def test_snapshots_hear_from_which_step_kept_workers_continue(
    loop: Loop, agent: AgentLink, source: int | None, resume_step: int | None
) -> None:
    told: list[int | None] = []

    class Told(SnapshotSlots):
        def begin_round(self, resume_step: int | None) -> None:
            told.append(resume_step)

    with closing(NoChildren(loop)) as children, closing(Fence(agent, children)) as fence:
        forks = WarmForks(loop, children, agent)
        workers = Workers(loop, children, agent, fence, forks, Told(agent))
        keep = {"kept": [], "source": source, "step": resume_step, "charged": [], "grace_s": 1.0}
        worker = {"local_rank": 0, "argv": ["true"], "env": {}}
        workers.start({"round": 3, "workers": [worker], "keep": keep})
    assert told == [resume_step]


def test_a_zygote_that_cannot_be_forked_is_tried_again(
    loop: Loop, agent: AgentLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = []
    monkeypatch.setattr(agent, "emit", lambda kind, **about: said.append((kind, about)))
    with closing(NoChildren(loop)) as children:
        zygote = WarmForks(loop, children, agent).zygote
        zygote.spec = ZygoteSpec(("python", "train.py"), {}, None, ())
        before = open_fds()
        for attempt, retry_s in ((zygote.begin, 1.0), (partial(zygote.do_due, math.inf), 2.0)):
            attempt()
            about = {"reason": "cannot start 'python': no more processes", "retry_s": retry_s}
            assert said.pop() == ("zygote_lost", about)
        assert open_fds() == before


def test_a_zygote_that_has_forked_is_replaced_soon_and_one_that_is_given_up_never(
    loop: Loop, agent: AgentLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[float | None] = []
    monkeypatch.setattr(agent, "emit", lambda _, **about: said.append(about["retry_s"]))
    with closing(NoChildren(loop)) as children:
        zygote = WarmForks(loop, children, agent).zygote
        zygote.spec = ZygoteSpec(("python", "train.py"), {}, None, ())
        zygote.begin()
        for _ in range(3):
            zygote.do_due(math.inf)
        assert said == [1.0, 2.0, 4.0, 8.0]
        zygote.has_forked()
        zygote.do_due(math.inf)
        assert said.pop() == 1.0
        zygote.give_up_for_good("the script changes OMP_NUM_THREADS")
        assert said.pop() is None
        zygote.do_due(math.inf)
        zygote.begin()
        assert said == [1.0, 2.0, 4.0, 8.0]
        assert not [at for at in zygote.wake_times() if at is not None]


@pytest.mark.parametrize(
    ("free", "begun"), [(None, True), (NEEDS_BYTES, True), (NEEDS_BYTES - 1, False)]
)
@pytest.mark.parametrize("after_import", [True, False])
def test_a_zygote_for_restarts_is_started_only_with_memory_to_spare(
    loop: Loop,
    agent: AgentLink,
    monkeypatch: pytest.MonkeyPatch,
    free: int | None,
    begun: bool,
    after_import: bool,
) -> None:
    """It is tried again later; a requested one is started however little memory is free."""
    said = []
    monkeypatch.setattr(agent, "emit", lambda kind, **about: said.append(about))
    monkeypatch.setattr(zygote_process, "free_bytes", lambda: free)
    with closing(NoChildren(loop)) as children:
        zygote = WarmForks(loop, children, agent).zygote
        zygote.spec = ZygoteSpec(("python",), {}, None, (), after_import=after_import)
        zygote.begin()
        assert bool(children.begun) == (begun or not after_import)
        if not children.begun:
            reason = "it is not started with less than 1024 MiB of memory free"
            assert said == [{"reason": reason, "retry_s": 1.0}]
            monkeypatch.setattr(zygote_process, "free_bytes", lambda: None)
            zygote.do_due(time.monotonic() + 1.1)
            assert children.begun


def test_a_store_host_whose_socket_was_lost_has_not_started(
    loop: Loop, agent: AgentLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = []
    monkeypatch.setattr(agent, "emit", lambda kind, **about: said.append((kind, about)))
    monkeypatch.setattr(AgentLink, "lost_fds", True)
    with closing(NoChildren(loop)) as children:
        hosts = StoreHosts(loop, children, agent, WarmForks(loop, children, agent))
        hosts.start({"round": 3})
    about = {"round": 3, "exit_code": NOT_STARTED, "signal": None}
    assert said == [("store_host_exited", about)]


@pytest.mark.parametrize(
    ("code", "rests"), [(errno.EMFILE, True), (errno.EAGAIN, False), (errno.ECONNABORTED, False)]
)
def test_a_socket_that_cannot_be_served_is_left_alone_for_a_while(
    loop: Loop,
    agent: AgentLink,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    rests: bool,
) -> None:
    """It would stay readable all the time, and the runner would spin."""

    def accept(_: socket.socket) -> None:
        raise OSError(code, os.strerror(code))

    path = tmp_path / "s"
    waiting = NextAgent(loop, agent, dict, lambda _grace_s: None)
    waiting.serve({"socket": str(path), "orphan_timeout_s": 9.0, "grace_s": 9.0})
    with closing(waiting), socket.socket(socket.AF_UNIX) as client, monkeypatch.context() as patch:
        with short_path(path) as short:
            client.connect(short)
        patch.setattr(socket.socket, "accept", accept)
        [call] = loop.wait(0)
        call()
        assert (not list(loop.wait(0))) == rests
        assert any(at is not None for at in waiting.wake_times()) == rests


# ---------------------------------------------------------------------- parked workers


class Parked:
    """The link of a parked worker, which a fork of the worker still holds open."""

    def __init__(self) -> None:
        self.local_rank, self.pid, self.is_open = 1, 4711, True
        self.child: Any = Child(4711, print, spared=False)
        self.killed, self.kill_at, self.hurries = False, None, False
        self.has_left, self.left = None, set[int]()

    def close(self) -> None:
        self.is_open = False


def test_the_link_of_a_parked_worker_is_closed_when_it_exits() -> None:
    """Its end alone would not close it where a descendant holds the other end."""
    told: list[dict[str, object]] = []
    agent: Any = type("Agent", (), {"emit": lambda _, kind, **fields: told.append(fields)})()
    children: Any = None
    parked, link = ParkedWorkers(children, agent), Parked()
    typed: Any = link
    parked.add(typed)
    link.child.on_exit(link.child, 3)
    assert not link.is_open
    assert parked.waiting() == []
    assert [(fields["local_rank"], fields["exit_code"]) for fields in told] == [(1, 3)]


def test_a_replacement_starts_once_nothing_is_left_of_the_parked_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rdzv.agent.runner.parked_workers.signal_child", lambda pid, signum: None)
    left: list[set[int]] = [{4712}, set()]
    agent: Any = type("Agent", (), {"emit": lambda _, kind, **fields: None})()
    children: Any = type("Children", (), {"kill_family": lambda _, *how: left.pop(0)})()
    parked, link = ParkedWorkers(children, agent), Parked()
    typed: Any = link
    replaced: list[bool] = []
    parked.add(typed)
    parked.end(typed, 5.0, then=lambda: replaced.append(True))
    now = time.monotonic()
    parked.do_due(now)
    assert replaced == []
    link.child.on_exit(link.child, 0)
    parked.do_due(now)  # A process that it has started is left.
    assert replaced == []
    parked.do_due(now)
    assert replaced == [True] and not parked


def test_a_second_request_to_end_parked_workers_shortens_and_never_lengthens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rdzv.agent.runner.parked_workers.signal_child", lambda pid, signum: None)
    unused: Any = None
    parked, link = ParkedWorkers(unused, unused), Parked()
    typed: Any = link
    parked.add(typed)
    for grace_s, left_s in ((60.0, 60.0), (3_600.0, 60.0), (5.0, 5.0), (60.0, 5.0)):
        parked.end_all(grace_s)
        assert link.kill_at is not None
        assert link.kill_at - time.monotonic() == pytest.approx(left_s, abs=2.5)


def test_that_all_parked_workers_are_gone_is_said_once_for_each_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rdzv.agent.runner.parked_workers.signal_child", lambda pid, signum: None)
    told: list[str] = []
    agent: Any = type("Agent", (), {"emit": lambda _, kind, **fields: told.append(kind)})()
    children: Any = type("Children", (), {"kill_family": lambda _, *how: []})()
    parked = ParkedWorkers(children, agent)
    for _ in range(2):
        link = Parked()
        typed: Any = link
        parked.add(typed)
        parked.end_all(5.0)
        link.child.on_exit(link.child, 0)
        for _ in range(3):
            parked.do_due(time.monotonic())
        assert told == ["kept_exited", "kept_gone"]
        told.clear()
    # One that ends for another reason is no answer to a request that was answered.
    link = Parked()
    typed = link
    parked.add(typed)
    parked.end(typed, 5.0)
    link.child.on_exit(link.child, 0)
    parked.do_due(time.monotonic())
    assert told == ["kept_exited"] and not parked


def test_without_a_grace_what_a_parked_worker_has_started_has_no_time_either() -> None:
    """The grace may also end once the worker has exited: at the fence."""
    given: list[bool] = []

    def kill_family(_: object, _owns: object, helpers: HelpersTime | None) -> list[int]:
        given.append(helpers is not None)
        return [4712]

    agent: Any = type("Agent", (), {"emit": lambda _, kind, **fields: None})()
    children: Any = type("Children", (), {"kill_family": kill_family})()
    parked, link = ParkedWorkers(children, agent), Parked()
    typed: Any = link
    parked.add(typed)
    link.child.on_exit(link.child, -15)
    parked.do_due(time.monotonic())
    parked.end_all(0)
    parked.do_due(time.monotonic())
    assert given == [True, False]


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

    def __init__(self) -> None:
        self.reports: list[str] = []
        self.loop, self.round = Loop(), Round(3)
        self.left, self.cleans = [4712], False
        self.given: list[HelpersTime | None] = []
        parts: list[Any] = [
            type("Part", (), methods)()
            for methods in (
                {"kill": self._kill, "cleaning": lambda _: self.cleans},
                {"emit": lambda _, kind, **fields: self.reports.append(kind)},
                {
                    "round": self.round,
                    "stays": None,
                    "begin_kill": lambda _: None,
                    "end_round": lambda _: self.reports.append("gone"),
                },
                {"drop": lambda _, starts: None, "wanted": lambda _: []},
            )
        ]
        children, agent, workers, forks = parts
        self.killing = Killing(self.loop, children, agent, workers, forks)

    def _kill(self, _stays: object, helpers: HelpersTime | None) -> list[int]:
        self.given.append(helpers)
        if helpers is not None:
            helpers.goes_on(self.left)
        return self.left


def test_at_the_fence_and_at_the_end_of_the_runner_nothing_that_is_left_has_time() -> None:
    for hurries in (False, True):
        ending = Ending()
        ending.round.kill_at, ending.round.fenced = 0.0, hurries
        ending.killing.advance()
        assert [helpers is None for helpers in ending.given] == [hurries]
        ending.loop.shutting_down = True
        ending.killing.advance()
        assert ending.given[1] is None
        ending.loop.close()


def test_a_round_is_stuck_only_after_the_time_for_what_is_left(
    signalled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ending = Ending()
    ending.round.kill_at = 0.0
    for after_s, reports in (0.0, 0), (HELPERS_S + STUCK_AFTER_S - 0.01, 0), (9.0, 1), (10.0, 1):
        monkeypatch.setattr(time, "monotonic", lambda now=100.0 + after_s: now)
        ending.killing.advance()
        assert ending.reports == ["stuck"] * reports
    assert ending.given[-1] is None
    ending.loop.close()


def test_a_runner_ends_once_nothing_is_left_and_nothing_cleans() -> None:
    ending = Ending()
    ending.loop.shutting_down, ending.left, ending.cleans = True, [], True
    assert not ending.killing.advance() and ending.killing.goes_on
    ending.cleans = False
    assert ending.killing.advance() and ending.reports == ["gone"]
    ending.loop.close()


@pytest.mark.slow
def test_torch_shm_manager_is_killed_only_if_it_takes_too_long(loop: Loop, tmp_path: Path) -> None:
    program = tmp_path / SHM_MANAGER
    shutil.copy("/bin/sleep", program)
    with closing(Children(loop)) as children, subprocess.Popen([program, "600"]) as process:
        try:
            assert children.kill(lambda pid: pid != process.pid) == []
            assert children.cleaning()
            children.do_due(time.monotonic() + SHM_MANAGER_S - 1)
            assert process.poll() is None
            children.do_due(time.monotonic() + SHM_MANAGER_S)
            assert not children.cleaning()
            assert process.wait() == -signal.SIGKILL
        finally:
            process.kill()


def test_a_round_reaches_its_fence_once(loop: Loop) -> None:
    told: list[str] = []
    agent: Any = type("Agent", (), {"emit": lambda _, kind, **fields: told.append(kind)})()
    nobody: Any = ()
    held = Round(3)
    with closing(NoChildren(loop)) as children, closing(Fence(agent, children)) as fence:
        for _ in range(2):
            fence.renew({"fence_at_ms": 1})
            fence.check(held, nobody)
    assert told == ["fenced"]
    assert children.begun == ["the guard of the fence"] * 2, "it is tried again"


class Guards(Children):
    """Starts only guards, whose pipes the test reads."""

    def __init__(self, loop: Loop) -> None:
        super().__init__(loop)
        self.begun: list[tuple[int, Any]] = []
        self.child: Any = type("Child", (), {"kill": lambda _: None})()

    def start(self, _name: str, program: Program, on_exit: Any, **_: Any) -> Child:
        (fd,) = program.pass_fds
        self.begun.append((os.dup(fd), on_exit))
        os.set_blocking(fd, False)
        return self.child  # type: ignore[no-any-return]

    def told(self) -> list[int]:
        """What the last guard was told since the last call."""
        try:
            said = os.read(self.begun[-1][0], 4096)
        except BlockingIOError:
            return []
        return [at_ms for (at_ms,) in struct.iter_unpack("q", said)]

    def close(self) -> None:
        super().close()
        for fd, _ in self.begun:
            os.close(fd)


def test_the_guard_of_the_fence_knows_its_time_while_there_is_a_worker(loop: Loop) -> None:
    agent: Any = type("Agent", (), {"emit": lambda _, kind, **fields: None})()
    nobody: Any = ()
    held, at_ms = Round(3), boottime_ms() + 60_000
    with closing(Guards(loop)) as children, closing(Fence(agent, children)) as fence:
        fence.renew({"fence_at_ms": at_ms})
        fence.check(None, nobody)
        fence.rest(None, nobody)
        assert children.told() == []
        for later in (0, 0, 5):
            fence.renew({"fence_at_ms": at_ms + later})
            fence.check(held, nobody)
            fence.rest(held, nobody)
        assert children.told() == [at_ms, at_ms + 5]
        for _ in range(2):
            fence.check(None, nobody)
            fence.rest(None, nobody)
        assert children.told() == [0]
        # The second time.
        fence.check(held, nobody)
        assert children.told() == [at_ms + 5]
        # One that has ended is replaced at the next renewal, and told.
        fence_of_old = children.begun[-1][1]
        fence_of_old(children.child, -9)
        fence.check(held, nobody)
        assert len(children.begun) == 1
        fence.renew({"fence_at_ms": at_ms + 6})
        fence.check(held, nobody)
        assert len(children.begun) == 2 and children.told() == [at_ms + 6]


def test_a_fence_that_is_reached_stays_guarded_until_no_worker_is_left(loop: Loop) -> None:
    agent: Any = type("Agent", (), {"emit": lambda _, kind, **fields: None})()
    nobody: Any = ()
    held = Round(3)
    with closing(Guards(loop)) as children, closing(Fence(agent, children)) as fence:
        at_ms = boottime_ms() + 20
        fence.renew({"fence_at_ms": at_ms})
        fence.check(held, nobody)
        while not held.fenced:
            fence.check(held, nobody)
        fence.renew({"fence_at_ms": at_ms + 60_000})
        fence.check(held, nobody)
        fence.rest(held, nobody)
        assert children.told() == [at_ms]
        fence.rest(None, nobody)
        assert children.told() == [0]


class Saving:
    """The runner's end of a worker's link, and what is noted of the worker's snapshots."""

    def __init__(self, loop: Loop, agent: AgentLink) -> None:
        self.noted: list[tuple[int, int, Snapshot | None]] = []
        slots: Any = type("Slots", (), {"note": lambda _, *what: self.noted.append(what)})()
        spec: Any = type("Spec", (), {"local_rank": 1, "env": {}})()
        held: Any = None
        self.link = WorkerLink(loop, agent, slots, held, spec, 0)
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
def test_a_worker_that_sends_a_descriptor_loses_its_link_and_keeps_nobody(
    loop: Loop, agent: AgentLink
) -> None:
    sent, peer = lingering()
    with closing(Saving(loop, agent)) as worker, peer:
        worker.hello()
        begun = time.monotonic()
        worker.say("saved", sent.detach(), slot=1)
        assert not worker.link.is_open and not worker.link.hung_up
        assert worker.noted == []
        assert time.monotonic() - begun < LINGER_S / 4


MARK = {"lineage": 4, "step": 50, "series": "a", "shards": 1, "world_size": 2}
SAVED = {"mark": MARK, "shard": 0, "bytes": 7, "digest": "d"}


def test_a_worker_that_has_said_hello_says_what_it_has_saved(loop: Loop, agent: AgentLink) -> None:
    with closing(Saving(loop, agent)) as worker:
        worker.say("saved", slot=1, **SAVED)
        worker.hello()
        worker.say("saved", slot=1, **SAVED)
        worker.say("saved", slot=0)
        assert worker.noted == [
            (1, 1, Snapshot(1, Mark(4, 50, "a", 1, 2), 0, 7, "d")),
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
        ({"world_size": 2**31 - 1}, {"world_size": 2**31}),
    ],
)
def test_a_number_that_no_snapshot_has_ends_the_link(
    loop: Loop, agent: AgentLink, taken: dict[str, int], refused: dict[str, int]
) -> None:
    with closing(Saving(loop, agent)) as worker:
        worker.hello()
        worker.say("saved", **with_(taken))
        assert worker.link.is_open and len(worker.noted) == 1
        worker.say("saved", **with_(refused))
        assert not worker.link.is_open and len(worker.noted) == 1


def test_all_that_a_worker_may_say_is_what_the_wire_can_carry(loop: Loop, agent: AgentLink) -> None:
    """Otherwise its agent fails, and blames itself."""
    told: list[dict[str, Any]] = []
    said: Any = type("Agent", (), {"emit": lambda _, kind, **fields: told.append(fields)})()
    with closing(Saving(loop, said)) as worker:
        worker.link.child = cast(Child, SimpleNamespace(pid=9))
        worker.hello()
        worker.say("suspect", round=0, message="\ud800 a", traceback="b \udfff")
        worker.say("saved", **{**SAVED, "mark": {**MARK, "series": "\ud800"}, "digest": "\udc00"})
        worker.say("resumed", round=0, step=2**53, source=2**31 - 1, init_ms=2**31 - 1)
        assert worker.link.is_open
        assert [one.get("message") or one.get("init_ms") for one in told] == ["? a", 2**31 - 1]
        assert told[0]["traceback"] == "b ?"
        ((_, _, saved),) = worker.noted
        assert saved is not None and (saved.mark.series, saved.digest) == ("?", "?")
        worker.say("stuck", round=0, place="\ud800 in all_reduce")
        assert worker.link.stuck_in == "? in all_reduce"


@pytest.mark.parametrize("name", ["source", "init_ms", "heal_ms"])
def test_a_worker_resumes_with_numbers_of_32_bits(loop: Loop, name: str) -> None:
    told: list[str] = []
    said: Any = type("Agent", (), {"emit": lambda _, kind, **fields: told.append(kind)})()
    with closing(Saving(loop, said)) as worker:
        worker.link.child = cast(Child, SimpleNamespace(pid=9))
        worker.hello()
        worker.say("resumed", round=0, **{name: 2**31})
        assert not worker.link.is_open and told == []


@pytest.mark.slow
def test_the_output_files_of_a_kept_worker_go_past_the_runner(loop: Loop, tmp_path: Path) -> None:
    """Closing a job's file may take as long as the job likes, so the runner never holds one."""
    out = tmp_path / "out"
    orders: list[tuple[int, ...]] = []
    link: Any = SimpleNamespace(child=object(), go=lambda *args: orders.append(args[-1]))
    held: Any = SimpleNamespace(kill_at=None, number=3, add=lambda *_: None)
    workers: Any = SimpleNamespace(
        parked=SimpleNamespace(waiting=lambda: [link], remove=lambda *_: None),
        end_worker=lambda *_: None,
        report_start=lambda *_: None,
        fail_start=lambda *args: orders.append(args),
    )
    spec: Any = SimpleNamespace(local_rank=0, stdout=str(out), stderr=str(out), identity=None)
    keep: Any = SimpleNamespace(source=None, step=None)
    with closing(Children(loop)) as children:
        children.listen()
        KeptStart(workers, children, held, spec, keep, link).begin()
        while not orders:
            for call in loop.wait(10.0):
                call()
        ((fd,),) = orders
        with socket.socket(fileno=fd) as opener:
            opener.setblocking(False)
            with pytest.raises(BlockingIOError):
                opener.recv(1)  # Nothing waits in a socket that the runner has held.
            assert not [one for one in Path("/proc/self/fd").iterdir() if one.resolve() == out]
            opener.settimeout(10.0)
            opener.send(b"0")
            _, fds, _, _ = socket.recv_fds(opener, 1, 2)
        for one in fds:
            os.write(one, b"x")
            os.close(one)
        while children.known():
            for call in loop.wait(10.0):
                call()
    assert len(fds) == 2 and out.read_text() == "xx"


def test_a_reason_names_the_limit_that_was_met() -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    reason = reason_of(OSError(errno.EMFILE, os.strerror(errno.EMFILE), "a file"))
    assert reason.startswith(f"Too many open files (this process may have {limit}: raise `ulimit")
    # This limit is the machine's.
    assert reason_of(OSError(errno.ENFILE, "No more")) == "No more"
