"""Which process a start becomes: the fork that says it is ready, however soon, or a cold one."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from rdzv.agent.runner.channel import Channel
from rdzv.agent.runner.loop import Loop
from rdzv.agent.runner.warm_forks import Fork, WarmForks, WarmStart


class Children:
    """Processes that exist only as numbers."""

    def __init__(self) -> None:
        self.taken: dict[int, Any] = {}

    def take(self, pid: int, on_exit: Callable[[Any, int], None], *, spared: bool) -> Any:
        killed: list[int] = []
        child = SimpleNamespace(pid=pid, spared=spared, killed=killed)
        child.kill = lambda: killed.append(9)
        child.reap = lambda code: on_exit(child, code)
        self.taken[pid] = child
        return child


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


class Runner:
    """The forks of a runner, the zygote and the processes being the test's own."""

    def __init__(self) -> None:
        self._loop = Loop()
        self.children, self.zygote, self.owner = Children(), Zygote(), Owner()
        unused: Any = None
        self.forks = WarmForks(self._loop, self.children, unused)  # type: ignore[arg-type]
        self.forks.zygote = self.zygote  # type: ignore[assignment]
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
        self.forks.forked(batch, pids, "")
        return self.zygote.asked[batch][0]

    def close(self) -> None:
        for start in self._starts:
            if start.fork is not None:
                start.fork.close()
        for links in self.zygote.asked.values():
            for link in links:
                link.close()
        self._loop.close()


def heard(link: Channel) -> Mapping[str, object] | None:
    link.receive()
    return link.next_message()


@pytest.fixture
def runner() -> Iterator[Runner]:
    made = Runner()
    yield made
    made.close()


def test_a_script_whose_exit_comes_before_its_word_that_it_is_ready_has_run(
    runner: Runner,
) -> None:
    start = runner.want()
    runner.forked(11).send({"ready": True})
    runner.children.taken[11].reap(3)
    assert (start.ran, start.exits, runner.owner.cold) == ([11], [3], [])
    assert runner.forks.wanted() == []


def test_a_fork_that_dies_without_that_word_has_run_nothing(runner: Runner) -> None:
    start = runner.want()
    link = runner.forked(11)
    assert heard(link) == {"run": "train.py"}
    runner.children.taken[11].reap(-9)
    assert (start.ran, start.exits) == ([], [])
    assert runner.owner.cold == [(start, "its fork died before it ran anything")]


def test_a_fork_that_was_not_asked_anything_yet_is_not_read(runner: Runner) -> None:
    """A spare fork is killed as a start takes another: its link is closed by then."""
    start = runner.want()
    runner.forked(11).send({"refused": "no"})
    runner.children.taken[11].reap(1)
    assert start.exits == []
    assert runner.owner.cold == [(start, "no")]


@pytest.mark.parametrize("outlives_rounds", [False, True])
def test_with_its_order_a_fork_is_what_the_end_of_a_round_kills(
    runner: Runner, outlives_rounds: bool
) -> None:
    runner.want(outlives_rounds=outlives_rounds)
    runner.forked(11)
    assert runner.children.taken[11].spared is outlives_rounds


def test_a_fork_whose_start_was_dropped_before_it_existed_runs_nothing(runner: Runner) -> None:
    runner.forks.drop([runner.want()])
    link = runner.forked(11)
    assert runner.children.taken == {}
    with pytest.raises(EOFError):
        heard(link)


def test_a_spare_fork_that_died_unasked_is_replaced_by_another_and_only_by_one(
    runner: Runner,
) -> None:
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


def test_a_fork_asked_for_by_name_is_replaced_by_a_cold_start_at_once(runner: Runner) -> None:
    start = runner.want()
    runner.forked()
    assert [one for one, _ in runner.owner.cold] == [start]
    assert len(runner.zygote.asked) == 1
