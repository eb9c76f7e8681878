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

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from .child_exits import Child
    from .requests import EndKept
    from .runner import Runner
    from .worker_links import WorkerLink

CHARGED_GRACE_S = 5.0
"""The minimum time that a charged suspect has to raise its exception and write its traceback."""


class ParkedWorkers:
    """The parked workers, by local_rank, until they have entered another round or are gone.

    Workers that are ending or have exited stay listed until their descendants are gone.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._links: dict[int, WorkerLink] = {}
        self._ending: dict[WorkerLink, list[Callable[[], None]]] = {}
        """Workers that are ending, and the functions to call once they are gone."""
        self._exited: dict[WorkerLink, HelpersTime] = {}
        """Workers that have exited, and the time for the processes that they have started."""
        self._says_gone = False
        """Whether the agent must be notified once all parked workers are gone."""
        self._look_at: float | None = None

    def __bool__(self) -> bool:
        return bool(self._links)

    def waiting(self) -> list[WorkerLink]:
        return [link for link in self._links.values() if link not in self._ending]

    def find(self, local_rank: int) -> WorkerLink | None:
        """Return the worker with this local_rank, even if it is ending, or None."""
        return self._links.get(local_rank)

    def can_go(self, link: WorkerLink) -> bool:
        return link not in self._ending and link.can_be_kept

    def add(self, link: WorkerLink) -> None:
        assert link.child is not None
        self._links[link.local_rank] = link
        link.child.on_exit = partial(self._reap_parked, link)

    def remove(self, link: WorkerLink, on_exit: Callable[[Child, int], None]) -> Child:
        """Hand a worker over to a round, which handles its exit by `on_exit`."""
        assert link.child is not None
        del self._links[link.local_rank]
        link.child.on_exit = on_exit
        return link.child

    # ------------------------------------------------------------------ the end

    def end(
        self,
        link: WorkerLink,
        grace_s: float,
        *,
        charged: bool = False,
        then: Callable[[], None] | None = None,
    ) -> None:
        """End a worker and its descendants, and call `then` once they are gone.

        A charged worker ends by raising the exception that it reported. Without a grace period
        there is none for its descendants either.
        """
        link.hurries = link.hurries or not grace_s
        if link not in self._ending:
            self._ending[link] = []
            if charged:
                grace_s = max(grace_s, CHARGED_GRACE_S)
                link.release("its collective failed, and no other cause was found")
            else:
                link.close()
                signal_child(link.pid, signal.SIGTERM)
        kill_at = time.monotonic() + grace_s
        if not link.killed and (link.kill_at is None or kill_at < link.kill_at):
            link.kill_at = kill_at
        if then is not None:
            self._ending[link].append(then)

    def handle_end(self, request: EndKept) -> None:
        self.end_all(request.grace_ms / 1000, request.charged)

    def end_all(self, grace_s: float, charged: Collection[int] = ()) -> None:
        """End all parked workers, and notify the agent when they are gone.

        A second call may shorten the grace period, but not extend it.
        """
        self._says_gone = True
        self._look_at = time.monotonic()
        for link in list(self._links.values()):
            self.end(link, grace_s, charged=link.local_rank in charged)

    def _reap_parked(self, link: WorkerLink, child: Child, code: int) -> None:
        link.close()
        self._ending.setdefault(link, [])
        self._exited[link] = HelpersTime({child.pid: code}, (signal.SIGTERM,))
        self._look_at = time.monotonic()
        self._runner.agent.emit(
            "kept_exited", local_rank=link.local_rank, pid=child.pid, **exit_fields(code)
        )

    # ------------------------------------------------------------------ time

    def wake_times(self) -> Iterator[float | None]:
        yield self._look_at
        for link in self._ending.keys() - self._exited.keys():
            yield link.kill_at

    def do_due(self, now: float) -> None:
        self._look_at = None
        for link in list(self._ending):
            if link not in self._exited:
                self._kill_late(link, now)
                continue
            try:
                helpers = None if link.hurries else self._exited[link]
                link.left = set(self._runner.children.kill_family(link.has_left, helpers))
            except OSError:
                link.left.add(link.pid)  # They will be listed again.
            if link.left:
                self._look_at = now + SWEEP_INTERVAL_S
            else:
                self._forget(link)
        if self._says_gone and not self._links:
            self._says_gone = False
            self._runner.agent.emit("kept_gone")

    def _kill_late(self, link: WorkerLink, now: float) -> None:
        if link.kill_at is None or now < link.kill_at:
            return
        if not link.killed:
            link.killed = True
            link.kill()
            link.kill_at = now + STUCK_AFTER_S
        else:
            link.kill_at = None
            self._runner.agent.emit("stuck", round=link.round, pids=[link.pid])

    def _forget(self, link: WorkerLink) -> None:
        del self._exited[link]
        del self._links[link.local_rank]
        for follow in self._ending.pop(link):
            follow()
