"""The round that the runner holds: its workers, and the times at which they are killed."""

from __future__ import annotations

import signal
import time

from .processes import signal_child

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from .agent_link import AgentLink
    from .child_exits import Child
    from .worker_links import WorkerLink


class Round:
    """A round, from its start until all its workers are gone or parked."""

    def __init__(self, number: int, *, has_links: bool = False) -> None:
        """Create a round with no workers yet. `has_links` gives them links, so they can be kept."""
        self.number = number
        self.has_links = has_links
        self.pids: dict[int, int] = {}
        """The pids of the workers that have been started, by local_rank."""
        self.running: set[int] = set()
        """The pids of the workers that have not exited."""
        self.exited: dict[int, int] = {}
        """The exit codes, negative for a signal, of the workers that have exited, by pid; processes
        that they have started may remain.
        """
        self.links: dict[int, WorkerLink] = {}
        """The links of the running workers, by pid."""
        self.failed = False
        """Whether a worker of the round could not be started."""
        self.signals_sent: set[int] = set()
        self.notified_by: int | None = None
        """The signal that notified the workers that the node is about to leave, if one was sent."""
        self.kill_at: float | None = None
        """When the stop's grace period ends; None if no stop was requested."""
        self.fenced = False
        """Whether the round has reached the fence."""
        self.keeps = False
        """Whether parked workers remain when the round ends."""
        self._killed: set[int] = set()
        """The pids of the workers that were killed before the others."""

    def add(self, child: Child, link: WorkerLink | None) -> None:
        self.running.add(child.pid)
        if link is not None:
            link.child = child
            self.links[child.pid] = link

    def forget(self, child: Child) -> bool:
        """Remove a worker that has exited. Returns whether it exited by itself.

        It did if it received nothing but the request to park, and still had time to do so.
        """
        self.running.discard(child.pid)
        link = self.links.pop(child.pid, None)
        if link is not None:
            link.read()  # It may have parked or reported a failure before it was killed.
            link.close()
        if self.notified_by is not None or child.pid in self._killed:
            return False
        if self.kill_at is None:
            return self.has_links
        if link is None or link.kill_at is None or link.parked is not None:
            return False
        return self.keeps and time.monotonic() < link.kill_at

    @property
    def is_to_be_killed(self) -> bool:
        """Whether a stop was requested, and its grace is over or no worker still needs it."""
        if self.kill_at is None:
            return False
        return time.monotonic() >= max(self._deadlines().values(), default=0.0)

    def _deadlines(self) -> dict[int, float]:
        """Return the times at which workers that have not parked are killed, by pid."""
        if self.kill_at is None:
            return {}
        deadlines = dict.fromkeys(self.running, self.kill_at)
        for link in self.links.values():
            if link.kill_at is not None:
                deadlines[link.pid] = 0.0 if link.stuck_in else link.kill_at
        for link in self.parked():
            del deadlines[link.pid]
        return deadlines

    # ------------------------------------------------------------------ parking

    def begin_parking(self, keep_s: float, not_kept: Collection[int]) -> None:
        """Ask workers that can be kept to park; kill those whose local_rank is in `not_kept`."""
        if self.kill_at is not None:
            return  # It is already ending. A later stop keeps no more workers than the first.
        self.keeps = True
        for link in self.links.values():
            if link.local_rank in not_kept:
                self._kill(link.pid)
                link.close()
            elif link.can_be_kept or link.hung_up:
                link.kill_at = time.monotonic() + keep_s
                if link.parked is None:
                    link.ask_to_park()

    def parking(self) -> set[int]:
        """Return the pids of the workers that were asked to park."""
        return {link.pid for link in self.links.values() if link.kill_at is not None}

    def parked(self) -> list[WorkerLink]:
        if not self.keeps:
            return []
        return [link for link in self.links.values() if link.parked is not None and link.is_open]

    def keep_none(self) -> set[int]:
        """Stop keeping workers. Returns the pids of those that have parked or were asked to."""
        self.keeps = False
        parking = set()
        for link in self.links.values():
            if link.kill_at is not None or link.parked is not None:
                parking.add(link.pid)
                link.kill_at = None
                link.close()
        return parking

    def verify_parked(self, agent: AgentLink) -> None:
        for link in self.parked():
            if to := link.connected_to():
                link.close()
                self._report(agent, link, f"it has parked, but is still connected to {to}")

    # ------------------------------------------------------------------ time

    def wake_times(self) -> Iterator[float]:
        for pid, at in self._deadlines().items():
            if pid not in self._killed:
                yield at

    def kill_late(self, now: float, agent: AgentLink) -> None:
        """Kill workers that missed the deadline to park, or to exit while others may still park."""
        if not self.keeps:
            return
        for link in self.links.values():
            if link.kill_at is not None and not link.is_open and not link.hung_up:
                # It can no longer report that it has parked. If it has hung up, it is exiting.
                link.kill_at = None
                signal_child(link.pid, signal.SIGTERM)
        for pid, at in self._deadlines().items():
            if now >= at and pid not in self._killed:
                self._kill(pid)
                link_of = self.links.get(pid)
                if link_of is not None and link_of.kill_at is not None:
                    self._report(agent, link_of, _why_killed(link_of))

    def _kill(self, pid: int) -> None:
        self._killed.add(pid)
        signal_child(pid, signal.SIGKILL)

    def _report(self, agent: AgentLink, link: WorkerLink, reason: str) -> None:
        agent.emit(
            "not_kept",
            round=self.number,
            local_rank=link.local_rank,
            pid=link.pid,
            reason=reason,
        )


def _why_killed(link: WorkerLink) -> str:
    if link.stuck_in:
        return f"it waits in {link.stuck_in} for an operation that gloo has lost"
    return "it did not park in time"
