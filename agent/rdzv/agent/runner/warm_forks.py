"""Processes that are forked from the zygote instead of being started cold.

A fork is a child of the runner like any other. Its process is started cold instead if anything goes
wrong: while the zygote is still importing, after it has died, or if it does not fork in time. Since
forking takes a while, *spare forks* are made in advance and wait for an order.

A `WarmStart` is a requested process. A `Fork` is a process made by the zygote, which turns into the
process named in its order. workers.py, store_hosts.py and snapshot_writers.py define the kinds of
`WarmStart`.
"""

from __future__ import annotations

import os
import socket
import time
from abc import ABC, abstractmethod
from collections import deque
from contextlib import ExitStack, suppress
from functools import partial

from .channel import Link
from .descriptors import dup_fds
from .frames import RequestError
from .zygote_process import STILL_IMPORTING, WarmRestarts, ZygoteProcess

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import Protocol

    from .child_exits import Child
    from .loop import Loop
    from .runner import Runner
    from .system import Identity
    from .zygote_process import Forked

    class ColdStarter(Protocol):
        """The owner of warm starts of one kind."""

        def start_cold_instead(self, starts: Sequence[WarmStart], reason: str) -> None:
            """Start these processes cold, because their forks no longer exist."""


FORK_TIMEOUT_S = 5.0
"""How long the zygote may take to fork, and a fork to become ready, before it counts as hung."""

SPARE_FORKS_AFTER_S = 1.0
"""The delay between a start and the next spare forks, which leaves the CPUs to the start."""

MAX_FORKS_AT_ONCE = 64
"""The most forks in one request: their descriptors must fit into one message, and their pids into a
pipe.
"""


class Fork(Link):
    """A process requested from the zygote, until it is reaped or known never to have existed.

    It is the link to it, too. A fork without an order exits when that is closed.
    """

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        start: WarmStart | None,
        on_answer: Callable[[Fork, Mapping[str, object]], None],
    ) -> None:
        super().__init__(loop, sock, partial(on_answer, self), lambda _: None)
        self.start = start
        self.child: Child | None = None
        self.made_ahead = start is None
        """Whether the fork was requested as a spare fork, whatever it has become since then."""
        self.has_order = False
        self.is_private = False
        """Whether the fork has an account of its own, which must not write to the agent's log."""

    def send_order(self, order: Mapping[str, object], fds: Iterable[int]) -> None:
        """Send the fork its order. If the fork is already gone, its exit will reveal that."""
        self.has_order = True
        self.watch()
        null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        try:
            copies = dup_fds(*(null if self.is_private and fd in (1, 2) else fd for fd in fds))
        finally:
            os.close(null)
        with suppress(ConnectionError):
            self.send(order, *copies)
            self._loop.watch_channel(self)

    def send_program(self, kind: str, program: Mapping[str, object], fds: Iterable[int]) -> None:
        order = {**program, "cpus": sorted(os.sched_getaffinity(0)), "parent": os.getpid()}
        stdin = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.send_order({kind: order}, (stdin, 1, 2, *fds))
        finally:
            os.close(stdin)


class WarmStart(ABC):
    """A process to be forked, until it is running or given up."""

    outlives_rounds = False
    replaced_after_exit = False

    def __init__(self, owner: ColdStarter, within_s: float) -> None:
        self.owner = owner
        self.give_up_at = time.monotonic() + within_s
        self.fork: Fork | None = None
        """The fork for this start; None while it is waiting for a zygote to finish its imports."""
        self.runs = False
        self.given_up_because = ""
        """Why the process will be started cold as soon as its fork is gone, or an empty string."""

    @property
    def child(self) -> Child | None:
        return None if self.fork is None else self.fork.child

    @property
    def is_wanted(self) -> bool:
        return True

    @abstractmethod
    def send_order(self, fork: Fork, child: Child) -> None:
        """Send the order to the fork, which exists. May raise `OSError` or `ValueError`."""

    @abstractmethod
    def take_running(self, child: Child) -> None:
        """Record that the process is running."""

    def take_failure(self, reason: str) -> bool:
        """Handle a failed warm start. Returns False if a cold start might succeed."""
        return False

    @abstractmethod
    def take_exit(self, child: Child, code: int) -> None:
        """Handle the exit of the process after it was running."""

    def forget(self, child: Child) -> None:
        """Handle the exit of the fork before it was running."""
        return

    def close(self) -> None:
        """Release the resources of a process that will not be started."""
        return


class WarmForks:
    """Manages requested warm starts, the forks for them, and the spare forks."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._loop = runner.loop
        self.zygote = ZygoteProcess(runner)
        self.restarts = WarmRestarts(runner.loop, self.zygote)
        self._wanted: list[WarmStart] = []
        self._spares: deque[Fork] = deque()
        self._asked: dict[int, list[Fork]] = {}
        self._batches = 0

    # ------------------------------------------------------------------ requested starts

    def within_s(self) -> float | None:
        if self.zygote.is_ready:
            return FORK_TIMEOUT_S
        spec = self.zygote.spec
        if spec is None or not self.zygote.imports:
            return None
        return spec.wait_s or self.restarts.worth_waiting_s or None

    def has_imported(self, module: str, python: str, identity: Identity | None) -> bool:
        spec = self.zygote.spec
        if spec is None or not self.zygote.is_ready:
            return False
        return (spec.argv[0], spec.identity) == (python, identity) and module in spec.modules

    def wanted(self) -> list[WarmStart]:
        return list(self._wanted)

    def want(self, starts: Iterable[WarmStart]) -> None:
        """Fork these processes at the end of this turn of the loop, or once the zygote is ready."""
        self._wanted += starts
        if not self.zygote.is_ready:
            self.zygote.hurry()

    def drop(self, starts: Iterable[WarmStart]) -> None:
        for start in starts:
            self._wanted.remove(start)
            self._end_fork_of(start)
            start.close()

    def fork_wanted(self) -> None:
        if not self.zygote.is_ready:
            return
        starts = deque(start for start in self._wanted if start.fork is None)
        coming = self._coming()
        while starts and (self._spares or coming):
            start = starts.popleft()
            fork = self._spares.popleft() if self._spares else coming.popleft()
            start.fork, start.give_up_at = fork, time.monotonic() + FORK_TIMEOUT_S
            fork.start = start
            if fork.child is not None:
                self._send_order(start, fork, fork.child)
        if starts:
            try:
                self._ask_for(starts)
            except OSError as error:
                self._give_up(starts, f"the request to the zygote failed: {error}")

    def wake_times(self) -> Iterator[float | None]:
        for start in self._wanted:
            yield start.give_up_at

    def do_due(self, now: float) -> None:
        late = [start for start in self._wanted if now >= start.give_up_at]
        if any(start.fork is not None and start.child is None for start in late):
            # Such a zygote must not get any more requests.
            self.zygote.give_up(f"it has not forked within {FORK_TIMEOUT_S:g} s")
        waiting = [start for start in late if start.fork is None]
        self._give_up(waiting, STILL_IMPORTING)
        self._give_up(late, f"its fork was not ready within {FORK_TIMEOUT_S:g} s")

    def _give_up(self, starts: Iterable[WarmStart], reason: str) -> None:
        """Start these processes cold, which is safe because they have not run any user code."""
        cold = []
        for start in [start for start in starts if start in self._wanted]:
            child = start.child
            if child is None or not start.replaced_after_exit:
                self._wanted.remove(start)
                self._end_fork_of(start)
                cold.append(start)
            else:
                start.given_up_because = reason
                start.give_up_at = time.monotonic() + FORK_TIMEOUT_S
                if start.fork is not None:
                    start.fork.close()
                child.kill()
        for owner in dict.fromkeys(start.owner for start in cold):
            owner.start_cold_instead([start for start in cold if start.owner is owner], reason)

    def _end_fork_of(self, start: WarmStart) -> None:
        """End a start's fork, or make it exit as soon as it exists."""
        if start.fork is not None:
            start.fork.close()
        if start.child is not None:
            start.child.spared = False
            start.child.kill()

    # ------------------------------------------------------------------ requested forks

    def _ask_for(self, starts: Iterable[WarmStart | None]) -> None:
        """Request one fork for each of these starts, where None stands for a spare fork."""
        waiting = deque(starts)
        while waiting:
            forks: list[Fork] = []
            with ExitStack() as stack:
                fds = []
                while waiting and len(forks) < MAX_FORKS_AT_ONCE:
                    ours, theirs = socket.socketpair()
                    stack.enter_context(theirs)
                    fds.append(theirs.fileno())
                    start = waiting.popleft()
                    fork = Fork(self._loop, ours, start, self._handle_answer)
                    forks.append(fork)
                    if start is not None:
                        start.fork, start.give_up_at = fork, time.monotonic() + FORK_TIMEOUT_S
                self._batches += 1
                self.zygote.ask(self._batches, fds)
            self._asked[self._batches] = forks

    def _coming(self) -> deque[Fork]:
        return deque(fork for forks in self._asked.values() for fork in forks if not fork.start)

    def _make_spares(self) -> None:
        spec = self.zygote.spec
        if spec is None or not self.zygote.is_ready or self._loop.shutting_down:
            return
        missing = spec.spare_forks - len(self._spares) - len(self._coming())
        # If this fails, it is retried after the next process is forked without a spare fork.
        with suppress(OSError):
            self._ask_for([None] * missing)

    # ------------------------------------------------------------------ what the zygote reports

    def zygote_ready(self) -> None:
        self._make_spares()

    def zygote_lost(self, reason: str) -> None:
        """Release forks that do not exist yet or have no order; start waiting processes cold."""
        self._loop.call_at(None, self._make_spares)
        for fork in (*self._spares, *self._coming()):
            fork.close()
            if fork.child is not None:
                fork.child.spared = False
        self._spares.clear()
        self._asked.clear()
        if not self._loop.shutting_down:
            self._give_up([start for start in self._wanted if start.child is None], reason)

    def forked(self, answer: Forked) -> None:
        """Take over the forks that were made, and replace those that could not be made."""
        forks, reason = self._asked.pop(answer.forked, None), answer.reason
        if forks is None:
            raise RequestError(f"forked: there is no request {answer.forked}")
        for fork, pid in zip(forks, answer.pids, strict=False):
            # A start that was given up has none, and its fork exits.
            if fork.start is None or fork.start in self._wanted:
                try:
                    self._handle_fork(fork, pid)
                except OSError as error:
                    reason = reason or str(error)
        if not reason:
            self.zygote.has_forked()
        for fork in forks:
            if fork.child is None:
                fork.close()
        starts = [fork.start for fork in forks if fork.start is not None and fork.child is None]
        self._replace_forks(starts, reason)

    def _handle_fork(self, fork: Fork, pid: int) -> None:
        fork.child = self._runner.children.take(pid, partial(self._end_fork, fork), spared=True)
        if fork.start is None:
            self._spares.append(fork)
        else:
            self._send_order(fork.start, fork, fork.child)

    def _replace_forks(self, starts: Sequence[WarmStart], reason: str) -> None:
        """Request new forks to replace dead ones that were made in advance; give up other starts.

        A fork made in advance can die for unrelated reasons. The end of a round kills every unknown
        process, and a fork is unknown until the zygote has reported its pid. Besides, anyone may
        kill a process that has been waiting for a long time.
        """
        given_up = []
        for start in starts:
            may_ask = self.zygote.is_ready and start.is_wanted and start in self._wanted
            if may_ask and start.fork is not None and start.fork.made_ahead:
                start.fork, start.give_up_at = None, time.monotonic() + FORK_TIMEOUT_S
            else:
                given_up.append(start)
        self._give_up(given_up, reason)

    # ------------------------------------------------------------------ existing forks

    def _send_order(self, start: WarmStart, fork: Fork, child: Child) -> None:
        child.spared = start.outlives_rounds
        spec = self.zygote.spec
        fork.is_private = spec is not None and spec.identity is not None
        try:
            start.send_order(fork, child)
        except (OSError, ValueError, BufferError) as error:
            self._give_up([start], str(error))

    def _handle_answer(self, fork: Fork, answer: Mapping[str, object]) -> None:
        start, child = fork.start, fork.child
        assert start is not None
        assert child is not None
        if "ready" in answer:
            self._wanted.remove(start)
            fork.close()
            start.runs = True
            spec = self.zygote.spec
            if spec is not None and spec.spare_forks:
                self._loop.call_at(time.monotonic() + SPARE_FORKS_AFTER_S, self._make_spares)
            start.take_running(child)
        elif not ("failed" in answer and start.take_failure(str(answer["failed"]))):
            self._give_up([start], str(answer.get("refused")))

    def _end_fork(self, fork: Fork, child: Child, code: int) -> None:
        start = fork.start
        if start in self._wanted and fork.has_order and fork.is_open:
            fork.read()  # It may have become ready, and its script may have been short.
        fork.close()
        if start is None:
            if fork in self._spares:
                self._spares.remove(fork)
        elif start.runs:
            start.take_exit(child, code)
        else:
            fork.child = None
            start.forget(child)
            if start.given_up_because and start in self._wanted:
                self._wanted.remove(start)
                start.owner.start_cold_instead([start], start.given_up_because)
            else:
                self._replace_forks([start], "its fork died before it ran anything")
