"""Which process a start becomes: the fork that says it is ready, however soon, or a cold one.

A fork is the job's own process; it cannot make the runner hold much for it.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rdzv.agent.runner.channel import MAX_JOB_FRAME_BYTES, Channel
from rdzv.agent.runner.loop import Loop
from rdzv.agent.runner.runner import Runner
from rdzv.agent.runner.warm_forks import Fork, WarmStart
from rdzv.agent.runner.zygote_process import Forked, WarmRestarts
from tests.support.fake_runner import FakeRunner


class Zygote:
    """A zygote that has imported, and is told of its forks by the test."""

    is_ready, imports = True, False

    def __init__(self) -> None:
        self.spec = SimpleNamespace(spare_forks=0, wait_s=1.0, identity=None)
        self.asked: dict[int, list[Channel]] = {}

    def ask(self, batch: int, links: Sequence[int]) -> None:
        self.asked[batch] = [Channel(socket.socket(fileno=os.dup(fd))) for fd in links]

    def has_forked(self) -> None:
        pass


class Owner:
    def __init__(self) -> None:
        self.cold: list[tuple[WarmStart, str]] = []

    def start_cold_instead(self, starts: Sequence[WarmStart], reason: str) -> None:
        self.cold += [(start, reason) for start in starts]


class Start(WarmStart):
    def __init__(self, owner: Owner, *, outlives_rounds: bool = False) -> None:
        super().__init__(owner, 5.0)
        self.outlives_rounds = outlives_rounds
        self.ran: list[int] = []
        self.exits: list[int] = []

    def send_order(self, fork: Fork, child: Any) -> None:
        fork.send_order({"run": "train.py"}, ())

    def take_running(self, child: Any) -> None:
        self.ran.append(child.pid)

    def take_exit(self, child: Any, code: int) -> None:
        self.exits.append(code)


class Forking(FakeRunner):
    """A runner whose zygote and forks are the test's own."""

    def __init__(self) -> None:
        super().__init__()
        self.zygote, self.owner = Zygote(), Owner()
        self.forks.zygote = self.zygote
        self._starts: list[Start] = []

    def want(self, **more: bool) -> Start:
        start = Start(self.owner, **more)
        self._starts.append(start)
        self.forks.want([start])
        self.forks.fork_wanted()
        return start

    def forked(self, *pids: int) -> Channel:
        """Let the zygote answer its last request; return the first fork's end of its link."""
        batch = max(self.zygote.asked)
        self.forks.forked(Forked(batch, pids, ""))
        return self.zygote.asked[batch][0]

    def close(self) -> None:
        for start in self._starts:
            if start.fork is not None:
                start.fork.close()
        for links in self.zygote.asked.values():
            for link in links:
                link.close()
        super().close()


def heard(link: Channel) -> Mapping[str, object] | None:
    link.receive()
    return link.next_message()


@pytest.fixture
def runner() -> Iterator[Forking]:
    made = Forking()
    yield made
    made.close()


def test_a_script_that_exits_before_it_is_ready_has_run(runner: Forking) -> None:
    start = runner.want()
    runner.forked(11).send({"ready": True})
    runner.children.taken[11].reap(3)
    assert (start.ran, start.exits, runner.owner.cold) == ([11], [3], [])
    assert runner.forks.wanted() == []


@pytest.mark.parametrize(("wait_s", "within_s"), [(0.0, 2.0), (7.0, 7.0)])
def test_a_zygote_that_imports_is_awaited_as_long_as_asked_or_as_it_is_worth(
    runner: Forking, monkeypatch: pytest.MonkeyPatch, wait_s: float, within_s: float
) -> None:
    monkeypatch.setattr(WarmRestarts, "worth_waiting_s", 2.0)
    monkeypatch.setattr(Zygote, "is_ready", False)
    runner.zygote.spec.wait_s = wait_s
    assert runner.forks.within_s() is None  # There is no zygote.
    monkeypatch.setattr(Zygote, "imports", True)
    assert runner.forks.within_s() == within_s
    monkeypatch.setattr(WarmRestarts, "worth_waiting_s", 0.0)
    assert runner.forks.within_s() == (wait_s or None)


def test_a_fork_that_dies_without_that_word_has_run_nothing(runner: Forking) -> None:
    start = runner.want()
    link = runner.forked(11)
    assert heard(link) == {"run": "train.py"}
    runner.children.taken[11].reap(-9)
    assert (start.ran, start.exits) == ([], [])
    assert runner.owner.cold == [(start, "its fork died before it ran anything")]


def test_a_fork_that_was_not_asked_anything_yet_is_not_read(runner: Forking) -> None:
    """A spare fork is killed as a start takes another: its link is closed by then."""
    start = runner.want()
    runner.forked(11).send({"refused": "no"})
    runner.children.taken[11].reap(1)
    assert start.exits == []
    assert runner.owner.cold == [(start, "no")]


@pytest.mark.parametrize("outlives_rounds", [False, True])
def test_a_fork_with_its_order_ends_with_a_round(runner: Forking, outlives_rounds: bool) -> None:
    runner.want(outlives_rounds=outlives_rounds)
    runner.forked(11)
    assert runner.children.taken[11].spared is outlives_rounds


def test_a_fork_whose_start_was_dropped_before_it_existed_runs_nothing(runner: Forking) -> None:
    runner.forks.drop([runner.want()])
    link = runner.forked(11)
    assert runner.children.taken == {}
    with pytest.raises(EOFError):
        heard(link)


def test_a_spare_fork_that_died_unasked_is_replaced_by_one(runner: Forking) -> None:
    runner.zygote.spec.spare_forks = 1
    runner.forks.zygote_ready()
    runner.forked(21)
    start = runner.want()
    assert len(runner.zygote.asked) == 1
    runner.children.taken[21].reap(-9)
    assert runner.owner.cold == []
    runner.forks.fork_wanted()
    runner.forked(22).send({"ready": True})
    runner.children.taken[22].reap(0)
    assert (start.ran, start.exits) == ([22], [0])


def test_a_fork_asked_for_by_name_is_replaced_by_a_cold_start_at_once(runner: Forking) -> None:
    start = runner.want()
    runner.forked()
    assert [one for one, _ in runner.owner.cold] == [start]
    assert len(runner.zygote.asked) == 1


# ---------------------------------------------------------------------- the link of a fork


class Told:
    """A fork that has received its order, and its own end of the link."""

    def __init__(self) -> None:
        ours, self.fork_end = socket.socketpair()
        self._loop = Loop()
        self.fork = Fork(self._loop, ours, None, lambda _fork, _answer: None)
        self.fork.send_order({}, ())
        self.fork_end.recv(64)

    def read(self) -> None:
        self.fork.read()

    @property
    def is_open(self) -> bool:
        return self.fork.is_open

    def close(self) -> None:
        self.fork.close()
        self.fork_end.close()
        self._loop.close()


@pytest.fixture
def told() -> Iterator[Told]:
    made = Told()
    yield made
    made.close()


def open_fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_runner_that_is_closed_leaves_no_descriptor() -> None:
    before = open_fds()
    ours, theirs = socket.socketpair()
    with theirs:
        Runner(Channel(ours)).close()
    assert open_fds() == before


@pytest.mark.parametrize("is_private", [False, True])
def test_a_fork_with_an_account_of_its_own_gets_nothing_of_the_agents_log(is_private: bool) -> None:
    (ours, fork_end), (own, their) = socket.socketpair(), os.pipe()
    loop = Loop()
    fork = Fork(loop, ours, None, lambda _fork, _answer: None)
    fork.is_private = is_private
    fork.send_order({}, (0, 1, 2, own, their))
    _, fds, *_ = socket.recv_fds(fork_end, 64, 5)
    shown, given = (
        [str(Path(f"/proc/self/fd/{fd}").readlink()) for fd in each]
        for each in (fds, (0, 1, 2, own, their))
    )
    fork.close()
    fork_end.close()
    loop.close()
    for fd in (*fds, own, their):
        os.close(fd)
    if is_private:
        given[1:3] = [os.devnull] * 2
    assert shown == given


def test_a_fork_that_sends_descriptors_has_its_link_closed(told: Told) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    before = open_fds()
    told.fork_end.send(struct.pack(">I", 1_000))
    told.read()
    assert told.is_open, "its frame is not complete"
    socket.send_fds(told.fork_end, [b"x"], [nothing] * 16)
    told.read()
    assert not told.is_open
    assert open_fds() == before - 1
    os.close(nothing)


def test_the_frame_of_a_fork_is_short_or_its_link_is_closed(told: Told) -> None:
    told.fork_end.sendall(struct.pack(">I", MAX_JOB_FRAME_BYTES + 1) + b"x")
    told.read()
    assert not told.is_open


def test_a_frame_of_the_agent_may_be_longer_and_bring_a_descriptor() -> None:
    ours, theirs = socket.socketpair()
    agent, heard = Channel(ours), Channel(theirs)
    fd = os.open(os.devnull, os.O_RDONLY)
    agent.send({"text": "x" * 2 * MAX_JOB_FRAME_BYTES}, fd)
    message = None
    while message is None:
        heard.receive()
        agent.flush()
        message = heard.next_message()
    taken = heard.take_fd()
    assert taken is not None
    os.close(taken)
    agent.close()
    heard.close()
