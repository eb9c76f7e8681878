"""The workers of a round: `Workers.start` spawns them, and `stop` and `notify` signal them.

The runner holds one round at a time, from `start_workers` until `gone`. Descendants of workers that
exit by themselves keep running until a stop ends the round. A stop has three phases: a signal to
the workers alone, with a grace period while any of them is running; a short time in which what they
have started may end by itself; and then SIGKILL for every descendant until none remains
(killing.py).

A stop with `keep_s` asks workers that can be kept (worker_links.py) to park instead. The round ends
when each worker is gone or parked. Parked workers remain, with their descendants, and wait for the
next round (parked_workers.py).
"""

from __future__ import annotations

import os
import time
from functools import partial

from .child_exits import exit_fields
from .held_connections import HeldConnections
from .held_round import Round
from .kept_workers import KeptStart
from .parked_workers import ParkedWorkers
from .processes import signal_child
from .requests import (
    MAX_GRACE_S,
    RequestError,
    read_field,
    read_keep_spec,
    read_numbers,
    read_seconds,
    read_signal,
    read_worker_specs,
)
from .spawn import Program, reason_of
from .warm_forks import WarmStart
from .worker_links import LINK_VARIABLE, WorkerLink

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from .agent_link import AgentLink
    from .child_exits import Child, Children
    from .fence import Fence
    from .loop import Loop
    from .requests import KeepSpec, WorkerSpec
    from .snapshot_slots import SnapshotSlots
    from .warm_forks import Fork, WarmForks


class Workers:
    """Starts, signals and stops the workers of the round that the runner holds, if any."""

    def __init__(
        self,
        loop: Loop,
        children: Children,
        agent: AgentLink,
        fence: Fence,
        forks: WarmForks,
        slots: SnapshotSlots,
    ) -> None:
        self._loop = loop
        self._children = children
        self._agent = agent
        self._fence = fence
        self._forks = forks
        self._slots = slots
        self._connections = HeldConnections(children)
        self.parked = ParkedWorkers(children, agent)
        self.round: Round | None = None
        self.last_round: int | None = None
        """The round whose workers were last ordered to start."""

    # ------------------------------------------------------------------ starting

    def start(self, request: Mapping[str, object]) -> None:
        number = read_field(request, "round", int)
        specs = read_worker_specs(request)
        ranks = read_field(request, "warm", list) if "warm" in request else []
        keep = read_keep_spec(request)
        if self.round is not None:
            raise RequestError(f"round {number} cannot start: {self.round.number} is not gone")
        self.round = started = Round(number, has_links=keep is not None)
        self.last_round = number
        self.check_fence()
        if started.fenced:
            return
        self._slots.begin_round(None if keep is None or keep.source is None else keep.step)
        self._forks.restarts.begin_round(len(specs))
        new = []
        for spec in specs:
            link = self.parked.find(spec.local_rank)
            if link is None:
                new.append(spec)
            elif keep is not None and spec.local_rank in keep.kept and link.can_be_kept:
                KeptStart(self, self._children, started, spec, keep, link).begin()
            else:
                self._replace(started, spec, keep, link, ranks)
        self._start_new(started, new, ranks)

    def _replace(
        self,
        started: Round,
        spec: WorkerSpec,
        keep: KeepSpec | None,
        link: WorkerLink,
        warm: Collection[object],
    ) -> None:
        """Start a new worker once the parked one and its descendants are gone."""

        def start() -> None:
            if self.round is started and started.kill_at is None:
                self._start_new(started, [spec], warm)

        if keep is None:
            self.parked.end(link, 0.0, then=start)
        else:
            self.parked.end(link, keep.grace_s, charged=spec.local_rank in keep.charged, then=start)

    def _start_new(
        self, started: Round, specs: Sequence[WorkerSpec], warm: Collection[object]
    ) -> None:
        self._start_cold(started, [spec for spec in specs if spec.local_rank not in warm])
        self._start_warm(started, [spec for spec in specs if spec.local_rank in warm])

    def _start_cold(self, started: Round, specs: Iterable[WorkerSpec]) -> None:
        for spec in specs:
            if started.kill_at is not None:
                return  # It is already ending, e.g. because an earlier one failed to start.
            self._start_worker(started, spec)

    def _start_worker(self, started: Round, spec: WorkerSpec) -> None:
        name = f"round {started.number}: the worker of local_rank {spec.local_rank}"
        link = None
        try:
            link = self.new_link(started, spec)
            child = self._children.start(
                name,
                self._forks.restarts.watched(_program_of(spec, link)),
                partial(self.end_worker, started, spec),
                on_run=partial(self.report_start, started, spec, "cold"),
            )
        except OSError as error:
            if link is not None:
                link.close()
            self.fail_start(started, spec, f"{name} cannot be forked: {reason_of(error)}")
            return
        finally:
            if link is not None:
                link.theirs.close()
        started.add(child, link)

    def new_link(self, started: Round, spec: WorkerSpec) -> WorkerLink | None:
        """Create a worker's link, or return None if its round has no links. May raise `OSError`."""
        if not started.has_links:
            return None
        return WorkerLink(
            self._loop, self._agent, self._slots, self._connections, spec, started.number
        )

    def end_worker(self, of: Round, spec: WorkerSpec, child: Child, code: int) -> None:
        """Handle a worker's exit, whether or not its program ever ran."""
        if child.failure:
            of.forget(child)
            self.fail_start(of, spec, child.failure)
        else:
            self.report_exit(of, spec, child, code)

    def report_start(self, started: Round, spec: WorkerSpec, how: str, child: Child) -> None:
        """Report that a worker is running; `how` is kept, warm or cold."""
        started.pids[spec.local_rank] = child.pid
        fields = {"how": how} if started.has_links else {}
        self._agent.emit(
            "started", round=started.number, local_rank=spec.local_rank, pid=child.pid, **fields
        )
        if started.notified_by is not None:
            signal_child(child.pid, started.notified_by)

    def fail_start(self, failed: Round, spec: WorkerSpec, reason: str) -> None:
        """Begin to kill the round. Only the first reason is reported; others may follow from it."""
        failed.kill_at, failed.keeps = time.monotonic(), False
        self._forks.drop(self._wanted_warm())
        if not failed.failed:
            failed.failed = True
            self._agent.emit(
                "start_failed", round=failed.number, local_rank=spec.local_rank, reason=reason
            )

    def report_exit(self, of: Round, spec: WorkerSpec, child: Child, code: int) -> None:
        fields = {"by_itself": True} if of.forget(child) else {}
        of.exited[child.pid] = code
        self._agent.emit(
            "exited",
            round=of.number,
            local_rank=spec.local_rank,
            pid=child.pid,
            **exit_fields(code),
            age_ms=0,
            **fields,
        )

    # ------------------------------------------------------------------ warm

    def _start_warm(self, started: Round, specs: Sequence[WorkerSpec]) -> None:
        if not specs or started.kill_at is not None:
            return
        within_s = self._forks.within_s()
        if within_s is None:
            why = self._forks.zygote.not_ready_because or self._forks.restarts.cold_because
            self._start_all_cold(started, specs, why)
        else:
            self._forks.want(
                WarmWorker(self, started, spec, self._forks, within_s) for spec in specs
            )

    def start_cold_instead(self, starts: Sequence[WarmStart], reason: str) -> None:
        workers = [start for start in starts if isinstance(start, WarmWorker)]
        self._start_all_cold(workers[0].of, [worker.spec for worker in workers], reason)

    def _start_all_cold(self, started: Round, specs: Sequence[WorkerSpec], reason: str) -> None:
        if started.kill_at is None and not self._loop.shutting_down:
            ranks = [spec.local_rank for spec in specs]
            if reason:
                fields = {"round": started.number, "local_ranks": ranks, "reason": reason}
                self._agent.emit("started_cold", **fields)
            self._start_cold(started, specs)

    def _wanted_warm(self) -> list[WarmWorker]:
        return [start for start in self._forks.wanted() if isinstance(start, WarmWorker)]

    # ------------------------------------------------------------------ signals

    def stop(self, request: Mapping[str, object]) -> None:
        """Handle `stop_workers`. A second stop may shorten the grace period, but not extend it.

        Each signal is sent only once, so a running handler is not entered a second time. It is sent
        to the workers alone: one that saves its state may need the processes it has started, such
        as a DataLoader's.
        """
        number = read_field(request, "round", int)
        signum, grace_s = read_signal(request), read_seconds(request, "grace_s", MAX_GRACE_S)
        keep_s = None
        if request.get("keep_s") is not None:
            keep_s = read_seconds(request, "keep_s", MAX_GRACE_S)
        stopping = self.round
        if stopping is None or number < stopping.number:
            self._emit_gone(number)
            return
        if number > stopping.number:
            raise RequestError(f"round {number} cannot stop: it is round {stopping.number} here")
        if keep_s is not None:
            stopping.begin_parking(keep_s, read_numbers(request, "not_kept"))
        self.begin_stop(stopping, signum, grace_s, keep=keep_s is not None)

    def begin_stop(
        self, stopping: Round, signum: int, grace_s: float, *, keep: bool = False
    ) -> None:
        """Signal the workers of a round, which are killed when the grace period is over.

        With `keep`, workers that were asked to park are not signalled and have their own deadline.
        """
        kill_at = time.monotonic() + grace_s
        if stopping.kill_at is None or kill_at < stopping.kill_at:
            stopping.kill_at = kill_at
        # Workers that have not been forked never run. The others are signalled as if running.
        self._forks.drop([start for start in self._wanted_warm() if start.child is None])
        parking = set() if keep else stopping.keep_none()
        told = parking
        if signum not in stopping.signals_sent:
            stopping.signals_sent.add(signum)
            told = stopping.running - (stopping.parking() if keep else set())
        for pid in told:
            signal_child(pid, signum)

    def notify(self, request: Mapping[str, object]) -> None:
        """Handle `notify_workers`: signal each worker once, as soon as it is running.

        A stop with the same signal does not send it again.
        """
        number, signum = read_field(request, "round", int), read_signal(request)
        told = self.round
        if told is None or number != told.number or signum in told.signals_sent:
            return
        told.signals_sent.add(signum)
        told.notified_by = signum
        warm = {start.child.pid for start in self._wanted_warm() if start.child is not None}
        for pid in told.running - warm - self._children.launching():
            signal_child(pid, signum)

    # ------------------------------------------------------------------ the end

    def begin_kill(self) -> None:
        """Stop starting workers, because the round is about to be killed."""
        self._forks.drop(self._wanted_warm())
        if self.round is not None:
            self.round.verify_parked(self._agent)

    def stays(self, pid: int) -> bool:
        """Return whether a child of the runner outlives the round.

        Only parked workers and the processes they started do.
        """
        held = self.round
        if self._loop.shutting_down or held is None or not held.keeps:
            return False
        links = [*held.parked(), *self.parked.waiting()]
        if self._children.is_known(pid):
            return any(link.pid == pid for link in links)
        return any(link.owns(pid) for link in links)

    def end_round(self) -> None:
        """Release a round that has no remaining processes except its parked workers."""
        if self.round is None:
            return
        ended, self.round = self.round, None
        for link in ended.parked():
            self.parked.add(link)
        self.check_fence()
        self._emit_gone(ended.number)

    def _emit_gone(self, number: int) -> None:
        kept = [link.describe() for link in self.parked.waiting()]
        self._agent.emit("gone", round=number, **({"kept": kept} if kept else {}))

    # ------------------------------------------------------------------ time

    def check_fence(self) -> None:
        """Kill the workers if the fence has been reached, or set the alarm for that time."""
        self._fence.check(self.round, self.parked)

    def wake_times(self) -> Iterator[float | None]:
        """Yield the times at which `do_due` or the end of the round has something to do."""
        yield from self.parked.wake_times()
        yield from self._connections.wake_times()
        if self.round is not None:
            yield from self.round.wake_times()

    def do_due(self, now: float) -> None:
        """Kill workers that have not parked or ended in time, and release held connections."""
        if self.round is not None:
            self.round.kill_late(now, self._agent)
        self.parked.do_due(now)
        self._connections.do_due(now)


class WarmWorker(WarmStart):
    """A warm worker, which counts as running once it is about to run its script."""

    def __init__(
        self, owner: Workers, of: Round, spec: WorkerSpec, forks: WarmForks, within_s: float
    ) -> None:
        super().__init__(owner, within_s)
        self._workers = owner
        self._forks = forks
        self.of = of
        self.spec = spec
        self._ordered_at = 0.0

    @property
    def is_wanted(self) -> bool:
        """Whether the worker's round continues."""
        return self.of.kill_at is None

    def send_order(self, fork: Fork, child: Child) -> None:
        """Order the fork to become this worker."""
        link = self._workers.new_link(self.of, self.spec)
        self.of.add(child, link)
        self._ordered_at = time.monotonic()
        names = ("argv", "env", "cwd", "cpus", "stdout", "stderr")
        order = {name: getattr(self.spec, name) for name in names}
        zygote = self._forks.zygote.spec
        assert zygote is not None
        order |= {"given": zygote.env, "parent": os.getpid()}
        order |= {"watch": self._forks.restarts.report_to}
        if link is None:
            fork.send_order(order, (0, 1, 2))
            return
        with link.theirs:
            order |= {"env": link.environ(self.spec.env), "link_variable": LINK_VARIABLE}
            fork.send_order(order, (0, 1, 2, link.theirs.fileno()))

    def take_running(self, child: Child) -> None:
        self._workers.report_start(self.of, self.spec, "warm", child)

    def take_failure(self, reason: str) -> bool:
        """Begin to kill the round: a cold start would fail as well."""
        self._workers.fail_start(self.of, self.spec, reason)
        return True

    def take_exit(self, child: Child, code: int) -> None:
        if self.is_wanted and not self.of.exited:  # Otherwise another's exit may be the cause.
            self._forks.restarts.note_exit(child, code, self._ordered_at)
        self._workers.report_exit(self.of, self.spec, child, code)

    def forget(self, child: Child) -> None:
        """Record that the fork exited before it was running."""
        self.of.forget(child)


def _program_of(spec: WorkerSpec, link: WorkerLink | None) -> Program:
    env, fds = spec.env, []
    if link is not None:
        fds.append(link.theirs.fileno())
        env = link.environ(env, fd=fds[0])
    return Program(
        argv=spec.argv,
        env=env,
        pass_fds=fds,
        cwd=spec.cwd,
        shares_stdin=True,
        stdout=spec.stdout,
        stderr=spec.stderr,
        cpus=spec.cpus,
        identity=spec.identity,
    )
