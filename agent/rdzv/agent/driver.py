"""One job on one node: takes events to the agent core, and does what it decides.

Everything here runs in one event loop and nothing blocks it: the core answers at once, the runner
and the server are told by messages, and what comes of it comes back as events.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections import deque
from dataclasses import replace
from functools import partial

from rdzv.agent import runner_link, wire
from rdzv.agent.core import begin, commands, events, step
from rdzv.agent.core.model import Assignment, Phase
from rdzv.agent.errors import describe_exit, read_error
from rdzv.agent.fates import NodeOutcome
from rdzv.agent.launch import (
    Launch,
    check_startable,
    has_torch,
    local_address,
    reachable_host_name,
)
from rdzv.agent.progress import ProgressFiles, Report
from rdzv.agent.runner import WorkerSpec
from rdzv.agent.server_link import ServerLink
from rdzv.agent.witness import Witness
from rdzv.agent.worker_group import LocalWorkerGroup
from rdzv.client import Endpoint
from rdzv.core.model import Offer
from rdzv.errors import InvalidRequestError
from rdzv.meeting import StoreSocket, is_loopback, machine_id
from rdzv.v1 import rdzv_pb2 as pb

log = logging.getLogger("rdzv.agent")

RUNNER_CLOSE_TIMEOUT_S = 10.0


class JobDriver:
    """Drives one job on this node until it has ended for it."""

    def __init__(self, launch: Launch, link: ServerLink) -> None:
        self.rdzv_id = launch.job.rdzv_id
        self.fence_after_ms = launch.job.fence_after_ms
        self._launch = launch
        self._link = link
        self._state = begin(launch.job, _now_ms())
        self._progress = ProgressFiles(self._say_progress)
        self._workers = LocalWorkerGroup(launch, self._progress.file)
        self._witness = Witness(launch, _now_ms, self._workers.error_file)
        self._inbox: deque[events.Event] = deque()
        self._busy = False
        self._timer: asyncio.TimerHandle | None = None
        self._offer = Offer(address="")
        self._store_socket = StoreSocket(loopback_only=True)
        self._runner: runner_link.RunnerLink | None = None
        self._ended: asyncio.Future[NodeOutcome] = asyncio.get_running_loop().create_future()

    async def prepare(self, endpoint: Endpoint) -> None:
        """Get ready to join: find out what this node offers, and start its runner."""
        await self._witness.open()
        await self._workers.prepare()
        self._offer = await self._make_offer(endpoint)
        runner_link.become_subreaper()
        self._runner = await runner_link.RunnerLink.spawn(self._hear_runner)
        self._link.add(self)
        self._link.log_reading.serve(self.rdzv_id, self._workers.written)
        self.post(events.Ticked())

    async def wait(self) -> NodeOutcome:
        """Wait until the job has ended for this node."""
        return await self._ended

    async def close(self) -> None:
        """End whatever is left of the job on this node."""
        if self._timer is not None:
            self._timer.cancel()
        self._store_socket.release()
        if self._runner is not None:
            await self._runner.close(RUNNER_CLOSE_TIMEOUT_S)
        self._progress.close()
        await self._workers.close()
        await self._witness.close()

    async def _make_offer(self, endpoint: Endpoint) -> Offer:
        launch = self._launch
        address = launch.local_addr or await local_address(endpoint)
        host_name = await reachable_host_name() if is_loopback(address) else ""
        self._store_socket = StoreSocket(loopback_only=is_loopback(address) and not host_name)
        return Offer(
            address=address,
            local_world_size=launch.job.local_world_size,
            role=launch.role,
            topology=launch.topology,
            host_name=host_name,
            machine=machine_id(),
            can_host_store=await has_torch(launch.python),
            shutdown_timeout_ms=launch.job.shutdown_timeout_ms,
        )

    # ------------------------------------------------------------------ the server's side

    def belief(self) -> pb.Belief | None:
        """Say all that this node believes about the job; None once it has ended."""
        if self._state.phase is Phase.ENDED or not self._holds_port():
            return None
        reuse = self._launch.refuse_reuse
        return wire.belief(self._state, self._current_offer(), _now_ms(), refuse_reuse=reuse)

    def renew_fence(self, heard_at_ms: int) -> None:
        """Take note that the server has heard this node at that time, or later."""
        if self.fence_after_ms:
            self._owner.renew_fence(heard_at_ms + self.fence_after_ms)

    def note(self, reason: str) -> None:
        """Tell the user why there are no workers to run."""
        log.info("%s: %s", self.rdzv_id, reason)

    def post(self, event: events.Event) -> None:
        """Take note of an event, after those that came before it."""
        self._inbox.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._inbox:
                self._handle(self._inbox.popleft())
        finally:
            self._busy = False

    def _handle(self, event: events.Event) -> None:
        self._tell(event)
        transition = step(self._state, event, _now_ms())
        self._state = transition.state
        self._witness.note(event, transition.state, transition.commands)
        for command in transition.commands:
            self._do(command)
        if isinstance(event, events.ServerConnected):
            self._progress.say_again()
        self._arm(transition.wake_at_ms)

    def _arm(self, wake_at_ms: int | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if wake_at_ms is not None:
            delay_s = max(wake_at_ms - _now_ms(), 0) / 1000
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(delay_s, self.post, events.Ticked())

    def _holds_port(self) -> bool:
        """Hold a port ready for the next round's store, if one is waited for."""
        try:
            return self._state.phase is not Phase.JOINING or self._store_socket.port > 0
        except OSError as error:
            self.post(events.RunnerLost(f"no port can be bound for the c10d store: {error}"))
            return False

    def _current_offer(self) -> Offer:
        """Return the offer with the port that is held ready now."""
        if self._state.phase is not Phase.JOINING:
            return self._offer
        return replace(self._offer, store_port=self._store_socket.port)

    # ------------------------------------------------------------------ commands

    def _do(self, command: commands.Command) -> None:
        match command:
            case commands.SayJoin():
                self._join(command)
            case commands.StartWorkers():
                self._start(command.assignment)
            case commands.StopWorkers():
                signum = signal.SIGTERM if command.signum is None else command.signum
                # Those that were about to be started are not: their socket is not offered again.
                self._store_socket.release()
                self._owner.stop_workers(command.round, signum, command.grace_ms)
            case commands.StopStoreHost():
                self._owner.stop_store_host(command.round)
            case commands.Exit():
                self._workers.written.end()
                if not self._ended.done():
                    self._ended.set_result(self._witness.outcome(command.outcome))
            case _:
                self._link.say(wire.report(command, self.rdzv_id, _now_ms()))

    def _say_progress(self, report: Report) -> None:
        self._link.say(wire.progress(report, self.rdzv_id))

    @property
    def _owner(self) -> runner_link.RunnerLink:
        assert self._runner is not None
        return self._runner

    def _join(self, say: commands.SayJoin) -> None:
        if not self._holds_port():
            return
        reuse = self._launch.refuse_reuse
        join = wire.join(say, self._state, self._current_offer(), _now_ms(), refuse_reuse=reuse)
        self._link.say(pb.NodeMessage(join=join))

    def _start(self, assignment: Assignment) -> None:
        """Start the round's store host, if it is ours, and the workers."""
        try:
            # Again before each round: what was there at the join may have gone since.
            check_startable(self._launch)
        except InvalidRequestError as error:
            self._fail_start(assignment, str(error))
            return
        self._progress.open_round(assignment, self._launch.job.local_world_size)
        self._workers.open_round(assignment, partial(self._start_in, assignment))

    def _start_in(self, assignment: Assignment, workers: list[WorkerSpec] | OSError) -> None:
        """Start the workers where they are to write, unless the round has ended meanwhile."""
        if self._state.phase is not Phase.RUNNING or self._state.assignment != assignment:
            return
        if isinstance(workers, OSError):
            self._fail_start(assignment, str(workers))
            return
        self._start_store_host(assignment)
        self._owner.start_workers(assignment.round, workers)

    def _fail_start(self, assignment: Assignment, reason: str) -> None:
        self._store_socket.release()
        self.post(events.StartFailed(assignment.round, reason))
        self.post(events.WorkersGone(assignment.round))

    def _start_store_host(self, assignment: Assignment) -> None:
        """Give the socket that was offered to the store host, or free its port."""
        listening = self._store_socket.take()
        if listening is None:
            return
        with listening:
            if assignment.hosts_store:
                self._owner.start_store_host(
                    assignment.round, listening, self._launch.python, dict(os.environ)
                )

    # ------------------------------------------------------------------ the runner's side

    def _hear_runner(self, event: runner_link.RunnerEvent) -> None:
        match event:
            case runner_link.WorkerStarted():
                log.debug("local_rank %d is pid %d", event.local_rank, event.pid)
                self._witness.worker_started(event.local_rank, event.pid)
            case runner_link.WorkersStartFailed():
                self.post(events.StartFailed(event.round, event.reason))
            case runner_link.WorkerExited():
                self.post(self._explain_exit(event))
            case runner_link.WorkersGone():
                self._workers.close_round()
                self._progress.close_round()
                self.post(events.WorkersGone(event.round))
            case runner_link.WorkersStuck():
                self.post(events.WorkersStuck(event.round, tuple(event.pids)))
            case runner_link.WorkersFenced():
                age_ms = max(runner_link.boottime_ms() - event.at_ms, 0)
                self.post(events.Fenced(event.round, age_ms))
            case runner_link.StoreHostReady():
                self.post(events.StoreHostReady(event.round))
            case runner_link.StoreHostExited():
                how = describe_exit(event.exit_code, event.signal)
                self.post(events.StoreHostExited(event.round, how))
            case runner_link.RunnerRefused():
                log.error("%s: its runner refuses to go on: %s", self.rdzv_id, event.reason)
                self._owner.kill()
            case runner_link.RunnerExited():
                self._lose_runner(event)

    def _lose_runner(self, event: runner_link.RunnerExited) -> None:
        """Kill what a dead runner has left behind, before anyone is told that it is gone."""
        if not self._ended.done():
            runner_link.sweep_orphans()
            reason = f"its runner exited unexpectedly ({event.exit_code})"
            self.post(events.RunnerLost(reason))

    def _explain_exit(self, event: runner_link.WorkerExited) -> events.WorkerExited:
        """Add to an exit what the worker's error file says of it."""
        succeeded = event.exit_code == 0
        error_file = self._workers.error_file(event.local_rank)
        error = read_error(error_file, event.signal, event.pid)
        return events.WorkerExited(
            round=event.round,
            local_rank=event.local_rank,
            pid=event.pid,
            exit_code=event.exit_code,
            signal=event.signal,
            message="" if succeeded else error.message,
            traceback="" if succeeded else error.traceback,
            age_ms=max(event.age_ms, error.age_ms),
        )

    # ------------------------------------------------------------------ the user's side

    def _tell(self, event: events.Event) -> None:
        """Write one line for what a user wants to know of an event."""
        match event:
            case events.Joined() if event.run != self._state.run:
                log.info("joined %s (run %s)", self.rdzv_id, event.run)
            case events.RoundCompleted() if event.assignment != self._state.assignment:
                self._tell_round(event.assignment)
            case events.RoundEnded():
                text = "%s: round %d ended (%s): %s"
                log.warning(text, self.rdzv_id, event.round, event.cause, event.reason)
            case events.WorkerExited() if event.exit_code != 0:
                if self._state.phase is Phase.RUNNING:
                    how = describe_exit(event.exit_code, event.signal)
                    text = "%s: worker local_rank %d (pid %d) failed: %s: %s"
                    worker = (event.local_rank, event.pid)
                    log.warning(text, self.rdzv_id, *worker, how, event.message)
            case events.WorkersStuck():
                pids = ", ".join(str(pid) for pid in event.pids)
                log.error("%s: processes survive SIGKILL: pid %s", self.rdzv_id, pids)
            case events.Fenced():
                log.error(
                    "%s: fenced: the server was out of reach for %g s (--fence-after), so the "
                    "workers of round %d are killed, lest they run on beside others that take "
                    "their place; this node joins again once the server answers",
                    self.rdzv_id,
                    self.fence_after_ms / 1000,
                    event.round,
                )
            case events.StoreHostExited() if self._serves(event.round):
                text = "%s: the store host of round %d exited: %s"
                log.warning(text, self.rdzv_id, event.round, event.reason)
            case events.Signalled():
                log.warning("%s: received %s; leaving the job", self.rdzv_id, event.name)
            case _:
                log.debug("%s", event)

    def _serves(self, round_: int) -> bool:
        """Whether this node is to serve the store of a round that is not over."""
        line, phase = self._state.assignment, self._state.phase
        return line is not None and line.round == round_ and phase is Phase.RUNNING

    def _tell_round(self, line: Assignment) -> None:
        last = line.rank_first + self._launch.job.local_world_size - 1
        log.info(
            "%s: round %d: GROUP_RANK %d of %d, RANK %d..%d of %d, MASTER %s:%d, restarts %d of %d",
            self.rdzv_id,
            line.round,
            line.group_rank,
            line.group_world_size,
            line.rank_first,
            last,
            line.world_size,
            line.master_addr,
            line.master_port,
            line.restarts,
            line.max_restarts,
        )


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
