"""The parked workers, which are waiting for the next round or being ended.

A worker is listed here from the end of its round until it enters the next one, or until the worker
and all its descendants are gone. Processes that a parked worker started are not killed. A process
is matched to a worker by its parents, otherwise by its session, and otherwise by the mark in its
environment.
"""

from __future__ import annotations

import signal
import time
from functools import partial

from .child_exits import exit_fields
from .killing import STUCK_AFTER_S, HelpersTime
from .processes import SWEEP_INTERVAL_S, signal_child
from .requests import STANDBY

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from .child_exits import Child
    from .runner import Runner
    from .worker import Worker

CHARGED_GRACE_S = 5.0
"""The minimum time that a charged suspect has to raise its exception and write its traceback."""


class ParkedWorkers:
    """The parked workers, by local_rank, until they have entered another round or are gone.

    Workers that are ending or have exited stay listed until their descendants are gone.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._workers: dict[int, Worker] = {}
        self._says_gone = False
        self._look_at: float | None = None

    def __bool__(self) -> bool:
        return bool(self._workers)

    def waiting(self) -> list[Worker]:
        return [worker for worker in self._workers.values() if worker.then is None]

    def find(self, local_rank: int) -> Worker | None:
        """Return the worker with this local_rank, even if it is ending, or None."""
        return self._workers.get(local_rank)

    def add(self, worker: Worker) -> None:
        assert worker.child is not None
        self._workers[worker.local_rank] = worker
        worker.kill_at = None  # The time to park is over.
        worker.child.on_exit = partial(self._reap, worker)

    def remove(self, worker: Worker) -> None:
        del self._workers[worker.local_rank]

    # ------------------------------------------------------------------ the end

    def end(
        self,
        worker: Worker,
        grace_s: float,
        *,
        charged: bool = False,
        then: Callable[[], None] | None = None,
    ) -> None:
        """End a worker and its descendants, and call `then` once they are gone.

        A charged worker ends by raising the exception that it reported. Without a grace period
        there is none for its descendants either.
        """
        worker.hurries = worker.hurries or not grace_s
        if worker.then is None:
            worker.then = []
            if charged:
                grace_s = max(grace_s, CHARGED_GRACE_S)
                worker.release("its collective failed, and no other cause was found")
            else:
                worker.close()
                signal_child(worker.pid, signal.SIGTERM)
        kill_at = time.monotonic() + grace_s
        if not worker.killed and (worker.kill_at is None or kill_at < worker.kill_at):
            worker.kill_at = kill_at
        if then is not None:
            worker.then.append(then)

    def end_all(self, grace_s: float, charged: Collection[int] = ()) -> None:
        """End all parked workers, and notify the agent when they are gone.

        A second call may shorten the grace period, but not extend it.
        """
        self._says_gone = True
        self._look_at = time.monotonic()
        for worker in list(self._workers.values()):
            self.end(worker, grace_s, charged=worker.local_rank in charged)

    def _reap(self, worker: Worker, child: Child, code: int) -> None:
        worker.close()
        worker.then = worker.then or []
        worker.helpers = HelpersTime({child.pid: code}, (signal.SIGTERM,))
        self._look_at = time.monotonic()
        self._runner.agent.emit(
            "kept_exited", local_rank=worker.local_rank, pid=child.pid, **exit_fields(code)
        )

    # ------------------------------------------------------------------ time

    def wake_times(self) -> Iterator[float | None]:
        yield self._look_at
        for worker in self._workers.values():
            if worker.then is not None and worker.helpers is None:
                yield worker.kill_at

    def do_due(self, now: float) -> None:
        """Kill workers whose grace period is over, and what exited ones have left behind."""
        self._look_at = None
        for worker in [worker for worker in self._workers.values() if worker.then is not None]:
            if worker.helpers is None:
                self._kill_late(worker, now)
                continue
            try:
                helpers = None if worker.hurries else worker.helpers
                worker.left = set(self._runner.children.kill_family(worker.has_left, helpers))
            except OSError:
                worker.left.add(worker.pid)  # They will be listed again.
            if worker.left:
                self._look_at = now + SWEEP_INTERVAL_S
                continue
            self.remove(worker)
            for follow in worker.then or ():
                follow()
        held = self._runner.workers.round
        if self._says_gone and not self._workers and (held is None or held.number != STANDBY):
            self._says_gone = False
            self._runner.agent.emit("kept_gone")

    def _kill_late(self, worker: Worker, now: float) -> None:
        if worker.kill_at is None or now < worker.kill_at:
            return
        if not worker.killed:
            worker.killed = True
            signal_child(worker.pid, signal.SIGKILL)
            worker.kill_at = now + STUCK_AFTER_S
        else:
            worker.kill_at = None
            self._runner.agent.emit("stuck", round=worker.of.number, pids=[worker.pid])
