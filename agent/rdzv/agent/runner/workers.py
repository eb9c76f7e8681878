"""The workers of a round: `Workers.start` spawns them, `stop` and `notify` signal them.

A round is held from `start_workers` until `gone`, and only one at a time. Descendants of workers
that exit by themselves keep running; only a stop ends a round. It has two phases: the signal and
its grace while a worker runs, then SIGKILL for every descendant until none is left (killing.py).
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from functools import partial

from .children import exit_fields
from .linux.process_tree import signal_group, signal_relative
from .requests import (
    MAX_GRACE_S,
    RequestError,
    read_field,
    read_seconds,
    read_signal,
    read_worker_specs,
)
from .spawn import Program, reason_of
from .warm_forks import WarmStart

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from .agent_link import AgentLink
    from .children import Child, Children
    from .fence import Fence
    from .loop import Loop
    from .requests import WorkerSpec
    from .warm_forks import Fork, WarmForks


class Round:
    """The round whose processes are here, from its start until they are gone."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.pids: dict[int, int] = {}
        """The workers that have been started, by local_rank."""
        self.running: set[int] = set()
        """The workers, by pid, that have not exited."""
        self.exited: set[int] = set()
        """The workers, by pid, that have exited; others may still be in their process groups."""
        self.failed = False
        """Whether one of its workers could not be started."""
        self.signals_sent: set[int] = set()
        self.notified_by: int | None = None
        """The signal that notified its workers that the node is about to leave."""
        self.kill_at: float | None = None
        """When the grace of the stop is over; None while no stop has been asked for."""
        self.fenced = False
        """Whether it has reached the fence."""

    @property
    def is_to_be_killed(self) -> bool:
        """Whether a stop was asked for, and its grace is over or no worker is left to use it."""
        if self.kill_at is None:
            return False
        return not self.running or time.monotonic() >= self.kill_at


class Workers:
    """The workers of the round that is held, if any."""

    def __init__(
        self, loop: Loop, children: Children, agent: AgentLink, fence: Fence, forks: WarmForks
    ) -> None:
        self._loop = loop
        self._children = children
        self._agent = agent
        self._fence = fence
        self._forks = forks
        self.round: Round | None = None
        self.last_round: int | None = None
        """The round whose workers were last ordered to start."""

    # ------------------------------------------------------------------ starting

    def start(self, request: Mapping[str, object]) -> None:
        """Obey `start_workers`."""
        number = read_field(request, "round", int)
        specs = read_worker_specs(request)
        ranks = read_field(request, "warm", list) if "warm" in request else []
        if self.round is not None:
            raise RequestError(f"round {number} cannot start: {self.round.number} is not gone")
        self.round = started = Round(number)
        self.last_round = number
        self._fence.check(started)
        if started.fenced:
            return
        self._start_cold(started, [spec for spec in specs if spec.local_rank not in ranks])
        self._start_warm(started, [spec for spec in specs if spec.local_rank in ranks])

    def _start_cold(self, started: Round, specs: Iterable[WorkerSpec]) -> None:
        for spec in specs:
            if started.kill_at is not None:
                return  # It is ending already, e.g. because an earlier one failed to start.
            self._start_worker(started, spec)

    def _start_worker(self, started: Round, spec: WorkerSpec) -> None:
        name = f"round {started.number}: the worker of local_rank {spec.local_rank}"
        try:
            child = self._children.start(
                name,
                _program_of(spec),
                partial(self._end_worker, started, spec),
                on_run=partial(self.report_start, started, spec),
            )
        except OSError as error:
            self.fail_start(started, spec, f"{name} cannot be forked: {reason_of(error)}")
            return
        started.running.add(child.pid)

    def _end_worker(self, of: Round, spec: WorkerSpec, child: Child, code: int) -> None:
        if child.failure:
            of.running.discard(child.pid)
            self.fail_start(of, spec, child.failure)
        else:
            self.report_exit(of, spec, child, code)

    def report_start(self, started: Round, spec: WorkerSpec, child: Child) -> None:
        """Note that a worker runs."""
        started.pids[spec.local_rank] = child.pid
        self._agent.emit("started", round=started.number, local_rank=spec.local_rank, pid=child.pid)
        if started.notified_by is not None:
            signal_group(child.pid, started.notified_by)

    def fail_start(self, failed: Round, spec: WorkerSpec, reason: str) -> None:
        """Begin to kill the round. The first reason is reported: others may follow from it."""
        failed.kill_at = time.monotonic()
        self._forks.drop(self._wanted_warm())
        if not failed.failed:
            failed.failed = True
            self._agent.emit(
                "start_failed", round=failed.number, local_rank=spec.local_rank, reason=reason
            )

    def report_exit(self, of: Round, spec: WorkerSpec, child: Child, code: int) -> None:
        """Note that a worker has exited."""
        of.running.discard(child.pid)
        of.exited.add(child.pid)
        self._agent.emit(
            "exited",
            round=of.number,
            local_rank=spec.local_rank,
            pid=child.pid,
            **exit_fields(code),
            age_ms=0,
        )

    # ------------------------------------------------------------------ warm

    def _start_warm(self, started: Round, specs: Sequence[WorkerSpec]) -> None:
        """Fork workers, now or once the zygote is ready; else start them cold."""
        if not specs or started.kill_at is not None:
            return
        within_s = self._forks.within_s()
        if within_s is None:
            self._start_all_cold(started, specs, self._forks.zygote.not_ready_because)
        else:
            self._forks.want(
                WarmWorker(self, started, spec, self._forks, within_s) for spec in specs
            )

    def start_cold_instead(self, starts: Sequence[WarmStart], reason: str) -> None:
        """Start these workers cold."""
        workers = [start for start in starts if isinstance(start, WarmWorker)]
        self._start_all_cold(workers[0].of, [worker.spec for worker in workers], reason)

    def _start_all_cold(self, started: Round, specs: Sequence[WorkerSpec], reason: str) -> None:
        if started.kill_at is None and not self._loop.shutting_down:
            ranks = [spec.local_rank for spec in specs]
            self._agent.emit("started_cold", round=started.number, local_ranks=ranks, reason=reason)
            self._start_cold(started, specs)

    def _wanted_warm(self) -> list[WarmWorker]:
        return [start for start in self._forks.wanted() if isinstance(start, WarmWorker)]

    # ------------------------------------------------------------------ signals

    def stop(self, request: Mapping[str, object]) -> None:
        """Obey `stop_workers`. A second stop may shorten the grace, never lengthen it.

        A signal is sent once, so that a handler that runs is not entered twice.
        """
        number = read_field(request, "round", int)
        signum, grace_s = read_signal(request), read_seconds(request, "grace_s", MAX_GRACE_S)
        stopping = self.round
        if stopping is None or number < stopping.number:
            self._agent.emit("gone", round=number)
            return
        if number > stopping.number:
            raise RequestError(f"round {number} cannot stop: it is round {stopping.number} here")
        self.begin_stop(stopping, signum, grace_s)

    def begin_stop(self, stopping: Round, signum: int, grace_s: float) -> None:
        """Signal the workers of a round, which is killed when the grace is over."""
        kill_at = time.monotonic() + grace_s
        if stopping.kill_at is None or kill_at < stopping.kill_at:
            stopping.kill_at = kill_at
        # Workers that are not forked yet never run. The others are signalled as if they ran.
        self._forks.drop([start for start in self._wanted_warm() if start.child is None])
        if signum not in stopping.signals_sent:
            stopping.signals_sent.add(signum)
            self._signal_groups(stopping, signum)

    def notify(self, request: Mapping[str, object]) -> None:
        """Obey `notify_workers`: signal each worker once; those that do not run yet, once they do.

        A stop with the same signal does not repeat it.
        """
        number, signum = read_field(request, "round", int), read_signal(request)
        told = self.round
        if told is None or number != told.number or signum in told.signals_sent:
            return
        told.signals_sent.add(signum)
        told.notified_by = signum
        warm = {start.child.pid for start in self._wanted_warm() if start.child is not None}
        self._signal_groups(told, signum, but=warm | self._children.launching())

    def _signal_groups(self, stopping: Round, signum: int, but: Collection[int] = ()) -> None:
        """Signal the process groups of a round's workers, also of those that have exited."""
        for pid in stopping.running.difference(but):
            signal_group(pid, signum)
        if not stopping.exited:
            return
        with suppress(OSError):  # They are killed after the grace anyway.
            found = self._children.descendants()
            family = {os.getpid(), *found}
            for pid in found:
                with suppress(ProcessLookupError):
                    if os.getpgid(pid) in stopping.exited:
                        signal_relative(pid, signum, family)

    # ------------------------------------------------------------------ the end

    def begin_kill(self) -> None:
        """Start no more of its workers: the round is about to be killed."""
        self._forks.drop(self._wanted_warm())

    def end_round(self) -> None:
        """Release the round, which has no processes left."""
        if self.round is not None:
            number, self.round = self.round.number, None
            self._fence.check(None)
            self._agent.emit("gone", round=number)


class WarmWorker(WarmStart):
    """A warm worker; it counts as running once it is about to run its script."""

    def __init__(
        self, owner: Workers, of: Round, spec: WorkerSpec, forks: WarmForks, within_s: float
    ) -> None:
        super().__init__(owner, within_s)
        self._workers = owner
        self._forks = forks
        self.of = of
        self.spec = spec

    @property
    def is_wanted(self) -> bool:
        """Whether its round continues."""
        return self.of.kill_at is None

    def send_order(self, fork: Fork, child: Child) -> None:
        """Order its fork to become this worker."""
        self.of.running.add(child.pid)
        names = ("argv", "env", "cwd", "cpus", "stdout", "stderr")
        order = {name: getattr(self.spec, name) for name in names}
        zygote = self._forks.zygote.spec
        assert zygote is not None
        order |= {"given": zygote.env, "parent": os.getpid()}
        fork.send_order(order, (0, 1, 2))

    def take_running(self, child: Child) -> None:
        """Report that it runs."""
        self._workers.report_start(self.of, self.spec, child)

    def take_failure(self, reason: str) -> bool:
        """Begin to kill the round: a cold start would fail as well."""
        self._workers.fail_start(self.of, self.spec, reason)
        return True

    def take_exit(self, child: Child, code: int) -> None:
        """Report its exit."""
        self._workers.report_exit(self.of, self.spec, child, code)

    def forget(self, child: Child) -> None:
        """Note that its fork has exited before it ran."""
        self.of.running.discard(child.pid)


def _program_of(spec: WorkerSpec) -> Program:
    return Program(
        argv=spec.argv,
        env=spec.env,
        cwd=spec.cwd,
        shares_stdin=True,
        stdout=spec.stdout,
        stderr=spec.stderr,
        cpus=spec.cpus,
        identity=spec.identity,
    )
