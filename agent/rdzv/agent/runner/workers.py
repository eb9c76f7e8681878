"""The workers of a round: `Workers.start` starts them, and `stop` and `notify` signal them.

The runner holds one round at a time, from `start_workers` until `gone`. Descendants of workers that
exit by themselves keep running until a stop ends the round. A stop has three phases: a signal to
the workers alone, with a grace period while any of them is running; a short time in which what they
have started may end by itself; and then SIGKILL for every descendant until none remains
(killing.py).

A stop with `keep_s` asks workers that can be kept (worker.py) to park instead. The round ends
when each worker is gone or parked. Parked workers remain, with their descendants, and wait for the
next round (parked_workers.py).

The workers of the round `STANDBY` were started before their node has a seat, so they have no ranks.
They park by themselves before their first round, and the round ends once all of them have. If
another round is to start before, they are ended first.
"""

from __future__ import annotations

import os
import signal
import time
from functools import partial

from .child_exits import exit_fields
from .frames import RequestError
from .parked_workers import ParkedWorkers
from .processes import signal_child
from .requests import STANDBY
from .spawn import reason_of
from .warm_forks import WarmStart
from .worker import LINK_VARIABLE, Worker

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from .child_exits import Child
    from .requests import EndKept, KeepSpec, NotifyWorkers, StartWorkers, StopWorkers, WorkerSpec
    from .runner import Runner
    from .warm_forks import Fork


class Round:
    """A round, from its start until all its workers are gone or parked."""

    def __init__(
        self, runner: Runner, number: int, size: int = 0, *, has_links: bool = False
    ) -> None:
        """Create a round with no workers yet. `has_links` gives them links, so they can be kept."""
        self._runner = runner
        self.number = number
        self._size = size
        self.has_links = has_links
        self.pids: dict[int, int] = {}
        self.workers: dict[int, Worker] = {}
        self.exited: dict[int, int] = {}
        """The exit codes, negative for a signal, of the workers that have exited, by pid; processes
        that they have started may remain.
        """
        self.failed = False
        self.signals_sent: set[int] = set()
        self.notified_by: int | None = None
        """The signal that notified the workers that the node is about to leave, if one was sent."""
        self.kill_at: float | None = None
        """When the stop's grace period ends; None if no stop was requested."""
        self.fenced = False
        self.keeps = number == STANDBY
        """Whether parked workers remain when the round ends."""

    def forget(self, worker: Worker) -> bool:
        """Remove a worker that has exited. Returns whether it exited by itself.

        It did if it received nothing but the request to park, and still had time to do so.
        """
        self.workers.pop(worker.pid, None)
        worker.read()  # It may have parked or reported a failure before it was killed.
        worker.close()
        if self.notified_by is not None or worker.killed:
            return False
        if self.kill_at is None:
            return self.has_links
        if worker.kill_at is None or worker.parked is not None:
            return False
        return self.keeps and time.monotonic() < worker.kill_at

    @property
    def is_to_be_killed(self) -> bool:
        """Whether a stop was requested, and its grace is over or no worker still needs it."""
        if self.kill_at is None:
            return self.number == STANDBY and len(self.parked()) == self._size
        return time.monotonic() >= max((at for _, at in self._deadlines()), default=0.0)

    def _deadlines(self) -> list[tuple[Worker, float]]:
        """Return the workers that have not parked, and when each is killed."""
        if self.kill_at is None:
            return []
        parked, deadlines = self.parked(), []
        for worker in self.workers.values():
            at = self.kill_at if worker.kill_at is None else worker.kill_at
            if worker not in parked:
                stuck = worker.kill_at is not None and worker.stuck_in
                deadlines.append((worker, 0.0 if stuck else at))
        return deadlines

    # ------------------------------------------------------------------ parking

    def begin_parking(self, keep_s: float, not_kept: Collection[int]) -> None:
        if self.kill_at is not None:
            return  # It is already ending. A later stop keeps no more workers than the first.
        self.keeps = True
        for worker in self.workers.values():
            if worker.local_rank in not_kept and worker.is_linked:
                self._kill(worker)
                worker.close()
            elif worker.can_be_kept or worker.hung_up:
                worker.kill_at = time.monotonic() + keep_s
                if worker.parked is None:
                    worker.ask_to_park()

    def parking(self) -> set[int]:
        return {pid for pid, worker in self.workers.items() if worker.kill_at is not None}

    def parked(self) -> list[Worker]:
        if not self.keeps:
            return []
        workers = self.workers.values()
        return [worker for worker in workers if worker.parked is not None and worker.is_open]

    def keep_none(self) -> set[int]:
        """Stop keeping workers. Returns the pids of those that have parked or were asked to."""
        self.keeps = False
        parking = set()
        for pid, worker in self.workers.items():
            if worker.kill_at is not None or worker.parked is not None:
                parking.add(pid)
                worker.kill_at = None
                worker.close()
        return parking

    def verify_parked(self) -> None:
        for worker in self.parked():
            if to := worker.connected_to():
                worker.close()
                self._report_not_kept(worker, f"it has parked, but is still connected to {to}")

    # ------------------------------------------------------------------ time

    def wake_times(self) -> Iterator[float]:
        for worker, at in self._deadlines():
            if not worker.killed:
                yield at

    def kill_late(self, now: float) -> None:
        """Kill workers that missed the deadline to park, or to exit while others may still park."""
        if not self.keeps:
            return
        for worker in self.workers.values():
            if worker.kill_at is not None and not worker.is_open and not worker.hung_up:
                # It can no longer report that it has parked. If it has hung up, it is exiting.
                worker.kill_at = None
                signal_child(worker.pid, signal.SIGTERM)
        for worker, at in self._deadlines():
            if now >= at and not worker.killed:
                self._kill(worker)
                if worker.kill_at is not None:
                    place = worker.stuck_in
                    why = f"it waits in {place} for an operation that gloo has lost"
                    self._report_not_kept(worker, why if place else "it did not park in time")

    def _kill(self, worker: Worker) -> None:
        worker.killed = True
        signal_child(worker.pid, signal.SIGKILL)

    def _report_not_kept(self, worker: Worker, reason: str) -> None:
        fields = {"local_rank": worker.local_rank, "pid": worker.pid, "reason": reason}
        self._runner.agent.emit("not_kept", round=self.number, **fields)


class Workers:
    """Starts, signals and stops the workers of the round that the runner holds, if any."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.parked = ParkedWorkers(runner)
        self.round: Round | None = None
        self.last_round: int | None = None
        """The round whose workers were last ordered to start."""
        self._later: list[Callable[[], None]] = []
        """The requests for that round while it waits for the end of `STANDBY`."""

    # ------------------------------------------------------------------ starting

    def start(self, request: StartWorkers) -> None:
        is_standby = request.round == STANDBY
        if is_standby and self.round is None and self.parked.waiting():
            self._emit_gone(STANDBY)  # Another agent has started them.
            return
        keep, size = request.keep, len(request.workers)
        if self.round is not None:
            if is_standby and self.round.number == STANDBY:
                return
            number = self.last_round if self._later else self.round.number
            if number != STANDBY:
                raise RequestError(f"round {request.round} cannot start: {number} is not gone")
            self.last_round = request.round
            self._later.append(partial(self.start, request))
            self.begin_stop(self.round, signal.SIGTERM, 0.0 if keep is None else keep.grace_s)
            return
        self.round = started = Round(self._runner, request.round, size, has_links=keep is not None)
        if not is_standby:
            self.last_round = request.round
        self._runner.fence.check()
        if started.fenced:
            return
        if not is_standby:
            step = None if keep is None or keep.source is None else keep.step
            self._runner.slots.begin_round(step)
        self._runner.forks.restarts.begin_round(len(request.workers))
        new = []
        for spec in request.workers:
            worker = self.parked.find(spec.local_rank)
            if worker is None:
                new.append(spec)
            elif (
                keep is not None
                and spec.local_rank in keep.kept
                and worker.then is None
                and worker.can_be_kept
            ):
                self._keep(started, spec, keep, worker)
            else:
                self._replace(started, spec, keep, worker)
        self._start_new(started, new)

    def _keep(self, started: Round, spec: WorkerSpec, keep: KeepSpec, worker: Worker) -> None:
        assert worker.child is not None
        self.parked.remove(worker)
        how = "hot" if worker.of.number == STANDBY else "kept"
        worker.child.on_exit = partial(self.end_worker, worker)
        worker.go(started, spec, keep)
        self.report_start(worker, how, worker.child)

    def _replace(
        self, started: Round, spec: WorkerSpec, keep: KeepSpec | None, worker: Worker
    ) -> None:
        def start() -> None:
            if self.round is started and started.kill_at is None:
                self._start_new(started, [spec])

        if keep is None:
            self.parked.end(worker, 0.0, then=start)
        else:
            charged = spec.local_rank in keep.charged
            self.parked.end(worker, keep.grace_s, charged=charged, then=start)

    def _start_new(self, started: Round, specs: Sequence[WorkerSpec]) -> None:
        self._start_cold(started, [spec for spec in specs if not spec.warm])
        warm = [spec for spec in specs if spec.warm]
        if not warm or started.kill_at is not None:
            return
        forks = self._runner.forks
        within_s = forks.within_s()
        if within_s is None:
            why = forks.zygote.not_ready_because or forks.restarts.cold_because
            self._start_all_cold(started, warm, why)
        else:
            forks.want(WarmWorker(self._runner, started, spec, within_s) for spec in warm)

    def _start_cold(self, started: Round, specs: Iterable[WorkerSpec]) -> None:
        for spec in specs:
            if started.kill_at is not None:
                return  # It is already ending, e.g. because an earlier one failed to start.
            self._start_worker(started, spec)

    def _start_worker(self, started: Round, spec: WorkerSpec) -> None:
        name = f"round {started.number}: the worker of local_rank {spec.local_rank}"
        worker = None
        try:
            worker = Worker(self._runner, started, spec)
            child = self._runner.children.start(
                name,
                self._runner.forks.restarts.watched(worker.program()),
                partial(self.end_worker, worker),
                on_run=partial(self.report_start, worker, "cold"),
            )
        except OSError as error:
            if worker is not None:
                worker.close()
            self.fail_start(started, spec, f"{name} cannot be forked: {reason_of(error)}")
            return
        worker.begin(child)

    def start_cold_instead(self, starts: Sequence[WarmStart], reason: str) -> None:
        workers = [start for start in starts if isinstance(start, WarmWorker)]
        self._start_all_cold(workers[0].of, [worker.spec for worker in workers], reason)

    def _start_all_cold(self, started: Round, specs: Sequence[WorkerSpec], reason: str) -> None:
        if started.kill_at is None and not self._runner.loop.shutting_down:
            ranks = [spec.local_rank for spec in specs]
            if reason:
                fields = {"round": started.number, "local_ranks": ranks, "reason": reason}
                self._runner.agent.emit("started_cold", **fields)
            self._start_cold(started, specs)

    def _wanted_warm(self) -> list[WarmWorker]:
        return [start for start in self._runner.forks.wanted() if isinstance(start, WarmWorker)]

    # ------------------------------------------------------------------ what becomes of them

    def report_start(self, worker: Worker, how: str, child: Child) -> None:
        """Report that a worker is running; `how` is kept, hot, warm or cold."""
        started, local_rank = worker.of, worker.local_rank
        started.pids[local_rank] = child.pid
        fields = {"how": how} if started.has_links else {}
        self._runner.agent.emit(
            "started", round=started.number, local_rank=local_rank, pid=child.pid, **fields
        )
        if started.notified_by is not None:
            signal_child(child.pid, started.notified_by)

    def fail_start(self, failed: Round, spec: WorkerSpec, reason: str) -> None:
        """Begin to kill the round. Only the first reason is reported; others may follow from it."""
        failed.kill_at, failed.keeps = time.monotonic(), False
        self._runner.forks.drop(self._wanted_warm())
        if not failed.failed:
            failed.failed = True
            self._runner.agent.emit(
                "start_failed", round=failed.number, local_rank=spec.local_rank, reason=reason
            )

    def end_worker(self, worker: Worker, child: Child, code: int) -> None:
        of = worker.of
        by_itself = of.forget(worker)
        if child.failure:
            self.fail_start(of, worker.spec, child.failure)
            return
        of.exited[child.pid] = code
        fields = {"by_itself": True} if by_itself else {}
        self._runner.agent.emit(
            "exited",
            round=of.number,
            local_rank=worker.local_rank,
            pid=child.pid,
            **exit_fields(code),
            age_ms=0,
            **fields,
        )

    # ------------------------------------------------------------------ signals

    def stop(self, request: StopWorkers) -> None:
        """Begin to end a round. A second stop may shorten the grace period, but not extend it.

        Each signal is sent only once, so a running handler is not entered a second time. It is sent
        to the workers alone: one that saves its state may need the processes it has started, such
        as a DataLoader's.
        """
        number, stopping = request.round, self.round
        if stopping is None or number < stopping.number or number > stopping.number == STANDBY:
            if number == self.last_round:
                self._later.clear()
            self._emit_gone(number)
            return
        if number > stopping.number:
            raise RequestError(f"round {number} cannot stop: it is round {stopping.number} here")
        if request.keep_ms is not None:
            stopping.begin_parking(request.keep_ms / 1000, request.not_kept)
        signum = signal.SIGTERM if request.signum is None else request.signum
        keep = request.keep_ms is not None
        self.begin_stop(stopping, signum, request.grace_ms / 1000, keep=keep)

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
        self._runner.forks.drop([start for start in self._wanted_warm() if start.child is None])
        parking = set() if keep else stopping.keep_none()
        signalled = parking
        if signum not in stopping.signals_sent:
            stopping.signals_sent.add(signum)
            signalled = stopping.workers.keys() - (stopping.parking() if keep else set())
        for pid in signalled:
            signal_child(pid, signum)

    def end_kept(self, request: EndKept) -> None:
        grace_s = request.grace_ms / 1000
        self.parked.end_all(grace_s, request.charged)
        if self.round is not None and self.round.number == STANDBY:
            self.begin_stop(self.round, signal.SIGTERM, grace_s)

    def notify(self, request: NotifyWorkers) -> None:
        """Signal each worker once, as soon as it is running.

        A stop with the same signal does not send it again.
        """
        signum, round_ = request.signum, self.round
        if self._later and request.round == self.last_round:
            self._later.append(partial(self.notify, request))
            return
        if round_ is None or request.round != round_.number or signum in round_.signals_sent:
            return
        round_.signals_sent.add(signum)
        round_.notified_by = signum
        warm = {start.child.pid for start in self._wanted_warm() if start.child is not None}
        for pid in round_.workers.keys() - warm - self._runner.children.launching():
            signal_child(pid, signum)

    # ------------------------------------------------------------------ the end

    def begin_kill(self) -> None:
        self._runner.forks.drop(self._wanted_warm())
        if self.round is not None:
            self.round.verify_parked()

    def stays(self, pid: int) -> bool:
        """Return whether a child of the runner outlives the round.

        Only parked workers and the processes they started do.
        """
        held = self.round
        if self._runner.loop.shutting_down or held is None or not held.keeps:
            return False
        workers = [*held.parked(), *self.parked.waiting()]
        if self._runner.children.is_known(pid):
            return any(worker.pid == pid for worker in workers)
        return any(worker.owns(pid) for worker in workers)

    def end_round(self) -> None:
        if self.round is None:
            return
        ended, self.round = self.round, None
        for worker in ended.parked():
            self.parked.add(worker)
        self._runner.fence.check()
        self._emit_gone(ended.number)
        if ended.number == STANDBY:
            self.parked.do_due(time.monotonic())
        later, self._later = self._later, []
        if not (self._runner.loop.shutting_down or self._runner.agent.gave_up):
            for request in later:
                request()

    def _emit_gone(self, number: int) -> None:
        of_standby = number == STANDBY
        waiting = (w for w in self.parked.waiting() if (w.of.number == STANDBY) is of_standby)
        kept = [worker.describe() for worker in waiting]
        self._runner.agent.emit("gone", round=number, **({"kept": kept} if kept else {}))

    # ------------------------------------------------------------------ time

    def wake_times(self) -> Iterator[float | None]:
        yield from self.parked.wake_times()
        if self.round is not None:
            yield from self.round.wake_times()

    def do_due(self, now: float) -> None:
        if self.round is not None:
            self.round.kill_late(now)
        self.parked.do_due(now)


class WarmWorker(WarmStart):
    """A warm worker, which counts as running once it is about to run its script."""

    def __init__(self, runner: Runner, of: Round, spec: WorkerSpec, within_s: float) -> None:
        super().__init__(runner.workers, within_s)
        self._runner = runner
        self.of = of
        self.spec = spec
        self._worker: Worker | None = None
        self._ordered_at = 0.0

    @property
    def is_wanted(self) -> bool:
        return self.of.kill_at is None

    def send_order(self, fork: Fork, child: Child) -> None:
        self._worker = worker = Worker(self._runner, self.of, self.spec)
        self._ordered_at = time.monotonic()
        names = ("argv", "cwd", "cpus", "stdout", "stderr")
        order = {name: getattr(self.spec, name) for name in names}
        zygote = self._runner.forks.zygote.spec
        assert zygote is not None
        order |= {"env": worker.environ(), "given": zygote.env, "parent": os.getpid()}
        order |= {"watch": self._runner.forks.restarts.report_to}
        fds = [0, 1, 2]
        if worker.theirs is not None:
            order |= {"link_variable": LINK_VARIABLE}
            fds.append(worker.theirs.fileno())
        try:
            fork.send_order(order, fds)
        finally:
            worker.begin(child)

    def take_running(self, child: Child) -> None:
        assert self._worker is not None
        self._runner.workers.report_start(self._worker, "warm", child)

    def take_failure(self, reason: str) -> bool:
        """Begin to kill the round: a cold start would fail as well."""
        self._runner.workers.fail_start(self.of, self.spec, reason)
        return True

    def take_exit(self, child: Child, code: int) -> None:
        assert self._worker is not None
        if self.is_wanted and not self.of.exited:  # Otherwise another's exit may be the cause.
            self._runner.forks.restarts.note_exit(child, code, self._ordered_at)
        self._runner.workers.end_worker(self._worker, child, code)

    def forget(self, child: Child) -> None:
        if self._worker is not None and self._worker.child is child:
            self.of.forget(self._worker)
