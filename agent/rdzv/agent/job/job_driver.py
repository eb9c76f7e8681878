"""One job on one node: takes events to the agent core, and does what it decides.

Everything here runs in one event loop and nothing blocks it: the core answers at once, the runner
and the server are told by messages, and what comes of it comes back as events.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import ParamSpec

from rdzv.agent import runner_link
from rdzv.agent.agent_metrics_hooks import JobMeter
from rdzv.agent.core import begin, commands, events, step
from rdzv.agent.core.machine import EXIT_FAILED, rejoin, rejoins_after_failure
from rdzv.agent.core.model import Assignment, Leaving, Phase
from rdzv.agent.handover import leaked_processes
from rdzv.agent.handover.handover_state import (
    PLACEMENT,
    STATE,
    Keeping,
    KeptState,
    KeptStop,
    encode,
    keep_output,
    kept_output,
)
from rdzv.agent.launch.launch import (
    Launch,
    has_torch,
    local_address,
    reachable_host_name,
)
from rdzv.agent.observers.hang_watch import HangWatch, HungReport
from rdzv.agent.observers.notice import NoticeFile
from rdzv.agent.observers.progress_files import ProgressFiles, Report
from rdzv.agent.observers.snapshot import Snapshot
from rdzv.agent.observers.stack_sampling import StackAnswers, StacksAsked, Target
from rdzv.agent.output.run_files import Written
from rdzv.agent.runner.requests import WorkerSpec
from rdzv.agent.server_link import encoding
from rdzv.agent.server_link.link import ServerLink
from rdzv.agent.system.error_files import (
    WorkerError,
    describe_exit,
    read_error,
    signal_name,
    unread,
)
from rdzv.agent.system.side_thread import Aside, in_time
from rdzv.agent.workers.fates import NodeOutcome
from rdzv.agent.workers.witness import Witness
from rdzv.agent.workers.worker_group import LocalWorkerGroup
from rdzv.core.model import MAX_RESTART_AGES, LeaveCause, Moved, Offer
from rdzv.core.stacks import WorkerStack
from rdzv.core.words import duration
from rdzv.errors import InvalidRequestError
from rdzv.structs import replace
from rdzv.transport.addresses import StoreSocket, is_loopback, machine_id
from rdzv.transport.endpoints import Endpoint
from rdzv.v1 import rdzv_pb2 as pb

log = logging.getLogger("rdzv.agent")

RUNNER_CLOSE_TIMEOUT_S = 10.0
ERROR_FILE_WITHIN_S = 2.0
"""How long the end of a round waits for a word of why a worker has failed."""
SWEEP_WITHIN_S = 10.0
"""How long it may take to find and kill what a dead runner has left: the kernel may be slow."""
SWEEP_AGAIN_S = 1.0
"""How soon it is looked again where it could not be: until then they count as there."""
LET_GO_TIMEOUT_S = 2.0
"""How long a runner may take to read what it is to keep, before this process ends without it."""

_P = ParamSpec("_P")


class JobDriver:
    """Drives one job on this node until it has ended for it.

    What goes wrong in it is its own end, never that of others: `wait` raises it.
    """

    def __init__(
        self,
        launch: Launch,
        link: ServerLink,
        run: str = "",
        keeping: Keeping | None = None,
        examine: Callable[[], Awaitable[str]] | None = None,
        started: runner_link.StartedRunner | None = None,
    ) -> None:
        """Drive this launch; `run` is the run that it takes part in, if that is known before.

        With `keeping` its workers outlive this process, for the agent after it to go on with.
        `examine` says what is wrong with this node, if anything is: it is asked once the workers
        of a round are gone that ended by a failure here, before the node joins the next.
        `started` is a runner for it that was started ahead; without one it starts its own.
        """
        self.rdzv_id = launch.job.rdzv_id
        self.fence_after_ms = launch.job.fence_after_ms
        self.local_world_size = launch.job.local_world_size
        if keeping is not None:
            marked = {
                **launch.environ,
                leaked_processes.RUNNER: leaked_processes.mark_of(keeping.socket),
            }
            launch = replace(launch, environ=marked)
        self._launch = launch
        self._link = link
        self._state = begin(launch.job, _now_ms(), run)
        self._joined = False
        self._progress = ProgressFiles(self._say_progress, launch.progress_dir, launch.identity)
        self._notice = NoticeFile(self._progress.beside, launch.identity)
        self._workers = LocalWorkerGroup(launch, self._progress.file, self._notice.path)
        self._snapshot = Snapshot(launch.snapshot, identity=launch.identity)
        self._witness = Witness(launch, _now_ms, self._workers.error_file)
        self._pids: dict[int, int] = {}
        """By LOCAL_RANK: the workers of this round that have been started."""
        self._examine = examine
        self._examining: asyncio.Task[None] | None = None
        self._error_files = Aside(ERROR_FILE_WITHIN_S)
        self._losing: asyncio.Task[None] | None = None
        """Ends what a dead runner has left behind."""
        self._stacks = StackAnswers(self._say_stacks)
        self._hangs = HangWatch(self.rdzv_id, launch.hang_timeout, self._say_hung, launch.identity)
        self._inbox: deque[events.Event] = deque()
        self._busy = False
        self.meter = JobMeter()
        self._failed = False
        """Whether something went wrong that must not: nothing more is decided."""
        self._notified_by: int | None = None
        """The signal by which the workers of the round were told that the node leaves."""
        self._timer: asyncio.TimerHandle | None = None
        self._offer = Offer(address="")
        self._store_socket = StoreSocket(loopback_only=True)
        self._started = started
        self._runner: runner_link.RunnerLink | None = None
        self._keeping = keeping
        self._kept: KeptState | None = None
        self._stop: KeptStop | None = None
        """How the workers of the last round were told to end last."""
        self._orphan_timeout_ms = 0
        self._handed_over = False
        self._ready = asyncio.Event()
        """Whether workers can be started."""
        self._unready = ""
        """Why that can not be, after all."""
        self._deferred: Assignment | None = None
        """The round that is to start once this is ready."""
        self._ended: asyncio.Future[NodeOutcome] = asyncio.get_running_loop().create_future()

    async def prepare(self, endpoint: Endpoint) -> None:
        """Get ready to join: find out what this node offers, and start its runner."""
        await self._witness.open()
        await self._workers.prepare()
        self._offer = await self._make_offer(endpoint)
        runner_link.become_subreaper()
        if self._started is not None:
            self._runner = self._started.link(self._hear_runner)
        else:
            self._runner = await runner_link.RunnerLink.spawn(self._hear_runner)
        self.meter.runner_started()
        self._ready.set()
        if self._keeping is not None:
            # Before anything is started: it is there for the next agent from the first moment on.
            self._outlive()
            self._runner.keep(PLACEMENT, encode(self._keeping.placement))
            self._keep()
        if self._workers.zygote is not None:
            # Now, so that it imports while the other nodes are waited for.
            self._runner.keep_zygote(self._workers.zygote)
        self._link.add(self)
        self._link.log_reading.serve(self.rdzv_id, self._workers.written)
        self.post(events.Ticked())
        if self._state.phase is Phase.JOINING:
            # Where a stream is open its Hello has not told of this job.
            self._guard(self._join, rejoin(self._state))

    def resume(self, found: runner_link.FoundRunner, kept: KeptState) -> None:
        """Go on where the agent before this one has left the job; it is in every Hello from now on.

        Its runner was adopted. What has happened meanwhile is acted upon as if just heard.
        `get_ready` is to follow.
        """
        state, size = kept.state, self._launch.job.local_world_size
        if state.disconnected_since_ms is None:
            state = replace(state, disconnected_since_ms=_now_ms())
        self._state, self._joined, self._stop = state, kept.joined, kept.stop
        self._offer = kept.offer
        self._store_socket = StoreSocket(loopback_only=_only_loopback(kept.offer))
        if state.assignment is not None and kept.outputs:
            self._workers.resume_round(state.assignment, tuple(map(kept_output, kept.outputs)))
            self._witness.resume(state.assignment, found.hello.workers)
            self._pids.update(found.hello.workers)
        folder = None if kept.progress_folder is None else Path(kept.progress_folder)
        self._progress.resume(folder, None if state.workers_gone else state.assignment, size)
        self._notice.open_round()
        if state.notice is not None and state.notice.due_ms is not None:
            self._link.drain.remember(state.notice.due_ms, state.notice.reason)
        if state.phase is Phase.RUNNING and state.assignment is not None:
            self._hangs.open_round(state.assignment)
            for local_rank in state.alive & found.hello.workers.keys():
                pid, file = found.hello.workers[local_rank], self._progress.file(local_rank)
                self._hangs.worker_started(local_rank, pid, file)
        runner_link.become_subreaper()
        running = () if state.workers_gone else tuple(found.hello.workers)
        self.meter.adopted(running, state.assignment.restarts if state.assignment else None)
        self._runner = found.link(self._hear_runner)
        self._outlive()
        self._link.add(self)
        self._link.log_reading.serve(self.rdzv_id, self._workers.written)
        self._guard(self._redo, found.hello)
        self.post(events.Ticked())

    def _redo(self, hello: runner_link.Hello) -> None:
        """Do what the agent before has decided, and may not have done any more."""
        state = self._state
        line = state.assignment
        if state.outcome is not None and state.phase is Phase.ENDED:
            self._do(commands.Exit(state.outcome))
        needed = None if state.phase in (Phase.JOINING, Phase.ENDED) else line and line.round
        for round_ in hello.store_hosts - {needed}:
            self._owner.stop_store_host(round_)
        if line is None or state.workers_gone:
            return
        if state.phase is Phase.RUNNING and hello.last_round != line.round:
            self._start(line)
        elif state.phase is not Phase.RUNNING:
            stop = self._stop
            if stop is None or stop.round != line.round:
                # The fence has come. That nothing is left may have been heard, and not been noted.
                stop = KeptStop(line.round, 0, None, _now_ms())
            left_ms = max(stop.at_ms + stop.grace_ms - _now_ms(), 0)
            self._do(commands.StopWorkers(stop.round, left_ms, stop.signum))

    async def get_ready(self, why_not: str = "") -> None:
        """After `resume`: get ready for the rounds to come, unless something speaks against it.

        What does, or goes wrong, is why the next round fails to start. Meanwhile the workers run
        on, and are looked after.
        """
        self._unready = why_not
        if not why_not:
            try:
                await self._witness.open()
                await self._workers.prepare()
            except (InvalidRequestError, OSError) as error:
                self._unready = str(error)
            except Exception as error:
                log.exception("%s: a bug of rdzv-agent", self.rdzv_id)
                self._unready = f"a bug of its rdzv-agent: {error!r}"
        if self._unready:
            text = "%s: no further round can be started here; its workers run on: %s"
            log.error(text, self.rdzv_id, self._unready)
        self._ready.set()
        if self._workers.zygote is not None:
            self._owner.keep_zygote(self._workers.zygote)
        line = self._state.assignment
        if self._deferred is not None and line == self._deferred:
            self._guard(self._start, line)

    async def hand_over(self, within_ms: int) -> None:
        """Leave the job to the agent after this one, which is there within that time."""
        if self._runner is None or self._keeping is None:
            return
        self._orphan_timeout_ms = within_ms
        self._serve()
        if self._timer is not None:
            self._timer.cancel()
        # From here on it is for the next agent to decide.
        self._failed = self._handed_over = True
        await self._runner.let_go(LET_GO_TIMEOUT_S)

    async def wait(self) -> NodeOutcome:
        """Wait until the job has ended for this node."""
        return await self._ended

    @property
    def leaving(self) -> bool:
        """Whether this node leaves the job for good, or has left it."""
        return self._state.leaving is not None or self._ended.done()

    @property
    def joined(self) -> bool:
        """Whether the server has admitted this node to the job."""
        return self._joined

    @property
    def handed_over(self) -> bool:
        """Whether the job is left to another agent, and nothing of it is to be ended here."""
        return self._handed_over

    def describe(self) -> str:
        """Say how things are with the job on this node."""
        line = self._state.assignment
        return f"{self._state.phase}{'' if line is None else f', round {line.round}'}"

    @property
    def runner_pid(self) -> int | None:
        """The process that starts its workers; None while there is none yet."""
        return None if self._runner is None else self._runner.pid

    @property
    def written(self) -> Written:
        """What the workers write on this node."""
        return self._workers.written

    def say_failed(self, reason: str) -> None:
        """Tell the server that this node leaves, once nothing is left, because it can not go on."""
        line = self._state.assignment
        leaving = Leaving(LeaveCause.START_FAILED, reason, EXIT_FAILED)
        say = commands.SayLeave(self._state.run, leaving, None if line is None else line.round)
        self._link.say(encoding.report(say, self.rdzv_id, _now_ms()))

    async def close(self) -> None:
        """End whatever is left of the job on this node; may be called again if that fails.

        Raises:
            TimeoutError: its runner, or a process of it, survives SIGKILL.

        """
        if self._timer is not None:
            self._timer.cancel()
        if self._examining is not None:
            self._examining.cancel()
        self._store_socket.release()
        self._hangs.close_round()
        await self._stacks.close()
        if self._runner is not None:
            await self._runner.close(RUNNER_CLOSE_TIMEOUT_S)
        if self._losing is not None:
            async with asyncio.timeout(RUNNER_CLOSE_TIMEOUT_S):
                await asyncio.shield(self._losing)
        self._progress.close()
        await self._workers.close()
        await self._witness.close()
        self.meter.closed()

    async def _make_offer(self, endpoint: Endpoint) -> Offer:
        launch = self._launch
        address = launch.local_addr or await local_address(endpoint)
        host_name = await reachable_host_name() if is_loopback(address) else ""
        offer = Offer(
            address=address,
            local_world_size=launch.job.local_world_size,
            role=launch.role,
            topology=launch.topology,
            host_name=host_name,
            machine=machine_id(),
            can_host_store=await has_torch(launch.python, launch.environ, launch.account),
            shutdown_timeout_ms=launch.job.shutdown_timeout_ms,
        )
        self._store_socket = StoreSocket(loopback_only=_only_loopback(offer))
        return offer

    # ------------------------------------------------------------------ the server's side

    def belief(self) -> pb.Belief | None:
        """Say all that this node believes about the job; None once it has ended."""
        try:
            if self._failed or self._state.phase is Phase.ENDED or not self._holds_port():
                return None
            return encoding.belief(
                self._state,
                self._current_offer(),
                _now_ms(),
                refuse_reuse=self._launch.refuse_reuse,
                secret=self._launch.secret,
            )
        except Exception as error:
            self._fail(error)
            return None

    def renew_fence(self, heard_at_ms: int) -> None:
        """Take note that the server has heard this node at that time, or later."""
        if self.fence_after_ms:
            self._owner.renew_fence(heard_at_ms + self.fence_after_ms)

    def note(self, reason: str) -> None:
        """Tell the user why there are no workers to run."""
        log.info("%s: %s", self.rdzv_id, reason)

    def post(self, event: events.Event) -> None:
        """Take note of an event, after those that came before it."""
        if self._failed:
            return
        self._inbox.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._inbox and not self._failed:
                self._guard(self._handle, self._inbox.popleft())
        finally:
            self._busy = False

    def _guard(self, do: Callable[_P, None], *args: _P.args, **kwargs: _P.kwargs) -> None:
        """Do something for this job; if it fails, that is the end of this job here."""
        try:
            do(*args, **kwargs)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        if self._ended.done():
            log.error("%s: something went wrong after its end", self.rdzv_id, exc_info=error)
        else:
            self._failed = True
            self._ended.set_exception(error)

    def _handle(self, event: events.Event) -> None:
        self._tell(event)
        transition = step(self._state, event, _now_ms())
        self._state = transition.state
        for command in transition.commands:
            if isinstance(command, commands.StopWorkers):
                self._stop = KeptStop(command.round, command.grace_ms, command.signum, _now_ms())
        # Before it is done: whoever goes on after this process must know of it.
        self._keep()
        self._witness.note(event, transition.state, transition.commands)
        for command in transition.commands:
            self._do(command)
        if isinstance(event, events.ServerConnected):
            self._progress.say_again()
            self._hangs.say_again()
        self._outlive()
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

    # ------------------------------------------------------------------ the agent after this

    def _keep(self) -> None:
        """Have the runner keep what this driver knows, where that has changed."""
        if self._keeping is None or self._runner is None:
            return
        folder = self._progress.folder
        kept = KeptState(
            state=self._state,
            offer=self._offer,
            joined=self._joined,
            stop=self._stop,
            outputs=tuple(map(keep_output, self._workers.outputs)),
            progress_folder=None if folder is None else str(folder),
        )
        if kept != self._kept:
            self._kept = kept
            self._runner.keep(STATE, encode(kept))

    def _outlive(self) -> None:
        """Let the runner live for as long without an agent as the server waits for one."""
        if self._keeping is not None and self._orphan_timeout_ms != self._link.tolerated_ms:
            self._orphan_timeout_ms = self._link.tolerated_ms
            self._serve()

    def _serve(self) -> None:
        assert self._keeping is not None
        grace_ms = self._launch.job.shutdown_timeout_ms
        orphan_timeout_s = self._orphan_timeout_ms / 1000
        self._owner.serve(self._keeping.socket, orphan_timeout_s, grace_ms / 1000)

    # ------------------------------------------------------------------ commands

    def _do(self, command: commands.Command) -> None:
        self.meter.decided(command)
        match command:
            case commands.SayJoin():
                self._join(command)
            case commands.StartWorkers():
                self._start(command.assignment)
            case commands.StopWorkers():
                signum = signal.SIGTERM if command.signum is None else command.signum
                self._hangs.close_round()
                # Those that were about to be started are not: their socket is not offered again.
                self._store_socket.release()
                self._owner.stop_workers(command.round, signum, command.grace_ms)
            case commands.NotifyWorkers():
                self._notify(command)
            case commands.TakeBackNotice():
                self._notice.take_back()
            case commands.StopStoreHost():
                self._owner.stop_store_host(command.round)
            case commands.Exit():
                self._workers.written.end()
                if not self._ended.done():
                    self._ended.set_result(self._witness.outcome(command.outcome))
            case _:
                self._link.say(encoding.report(command, self.rdzv_id, _now_ms()))

    def _notify(self, command: commands.NotifyWorkers) -> None:
        """Tell the workers that this node is about to leave; who is not started yet hears it then.

        The file is there before the signal, so that a handler finds it.
        """
        self._notice.write(command.left_ms, command.reason)
        if command.signum is not None:
            self._notified_by = command.signum
            self._owner.notify_workers(command.round, command.signum)

    def _say_progress(self, report: Report) -> None:
        self._link.say(encoding.progress(report, self.rdzv_id))

    def _say_hung(self, report: HungReport) -> None:
        self._link.say(encoding.hung(report, self.rdzv_id))

    def take_stacks(self, asked: StacksAsked) -> None:
        """Begin to look what the workers of a round do, and say it."""
        self._guard(self._stacks.answer, asked, *self._whom_to_look_at(asked))

    def _whom_to_look_at(self, asked: StacksAsked) -> tuple[tuple[Target, ...], str]:
        """Return the workers of a round that have not exited; if there are none, why."""
        line = self._state.assignment
        if line is None or (line.run, line.round) != (asked.run, asked.round):
            return (), f"it has no workers of round {asked.round}"
        if self._state.workers_gone or not self._state.alive:
            return (), f"its workers of round {asked.round} have all exited"
        targets = tuple(
            Target(line.rank_first + local_rank, local_rank, pid)
            for local_rank, pid in sorted(self._pids.items())
            if local_rank in self._state.alive
        )
        return targets, "" if targets else "its workers are about to be started"

    async def _say_stacks(
        self, request: int, workers: tuple[WorkerStack, ...], last: bool, error: str
    ) -> None:
        await self._link.say_after_all(encoding.stacks(request, workers, last=last, error=error))

    @property
    def _owner(self) -> runner_link.RunnerLink:
        assert self._runner is not None
        return self._runner

    def _join(self, say: commands.SayJoin) -> None:
        if not self._holds_port():
            return
        join = encoding.join(
            say,
            self._state,
            self._current_offer(),
            _now_ms(),
            refuse_reuse=self._launch.refuse_reuse,
            secret=self._launch.secret,
        )
        self._link.say(pb.NodeMessage(join=join))

    def _start(self, assignment: Assignment) -> None:
        """Start the round's store host, if it is ours, and the workers."""
        if not self._ready.is_set():
            self._deferred = assignment
            return
        if self._unready:
            self._fail_start(assignment, self._unready)
            return
        self._pids.clear()
        self._progress.open_round(assignment, self._launch.job.local_world_size)
        self._notified_by = None
        self._notice.open_round()
        self._snapshot.begin_round(lambda: self._guard(self._open_round, assignment))

    def _open_round(self, assignment: Assignment) -> None:
        """Make room for what the workers write, unless the round has ended meanwhile."""
        if self._runs(assignment):
            self._workers.open_round(
                assignment, lambda workers: self._guard(self._start_in, assignment, workers)
            )

    def _start_in(self, assignment: Assignment, workers: list[WorkerSpec] | Exception) -> None:
        """Start the workers where they are to write, unless the round has ended meanwhile."""
        if not self._runs(assignment):
            return
        if isinstance(workers, InvalidRequestError | OSError):
            self._fail_start(assignment, str(workers))
            return
        if isinstance(workers, Exception):
            raise workers
        self._keep()
        self._start_store_host(assignment)
        self._hangs.open_round(assignment)
        self._owner.start_workers(assignment.round, workers)
        if self._notified_by is not None:
            # The runner did not know of the round yet.
            self._owner.notify_workers(assignment.round, self._notified_by)

    def _runs(self, assignment: Assignment) -> bool:
        """Whether the workers of this round are still to run."""
        return self._state.phase is Phase.RUNNING and self._state.assignment == assignment

    def _fail_start(self, assignment: Assignment, reason: str) -> None:
        self._store_socket.release()
        self.post(events.StartFailed(assignment.round, reason))
        self.post(events.WorkersGone(assignment.round))

    def _start_store_host(self, assignment: Assignment) -> None:
        """Give the socket that was offered to the store host, or free its port."""
        listening = self._store_socket.take()
        if listening is None:
            if assignment.hosts_store:
                self._lack_store_socket(assignment)
            return
        with listening:
            if assignment.hosts_store and listening.getsockname()[1] != assignment.master_port:
                self._lack_store_socket(assignment)
            elif assignment.hosts_store:
                self._owner.start_store_host(
                    assignment.round,
                    listening,
                    self._launch.python,
                    self._launch.environ,
                    self._launch.identity,
                )

    def _lack_store_socket(self, assignment: Assignment) -> None:
        """The socket of an announced store is gone with the agent that had offered it."""
        port = assignment.master_port
        reason = f"the agent that had offered port {port} was restarted before the round began"
        self.post(events.StoreHostExited(assignment.round, reason))

    # ------------------------------------------------------------------ the runner's side

    def _hear_runner(self, event: runner_link.RunnerEvent) -> asyncio.Future[None] | None:
        """Take what the runner says; return what is done when it is taken, if it is not yet."""
        match event:
            case runner_link.WorkerExited() if event.exit_code != 0:
                taken = asyncio.get_running_loop().create_future()
                self._guard(self._explain_exit, event, taken)
                return taken
            case runner_link.RunnerExited():
                lost = self._lose_runner(event)
                self._losing = asyncio.create_task(lost, name=f"runner of {self.rdzv_id}")
                self._losing.add_done_callback(self._note_failure)
                return self._losing
            case _:
                self._guard(self._take_from_runner, event)
                return None

    def _take_from_runner(self, event: runner_link.RunnerEvent) -> None:
        self.meter.runner_said(event)
        match event:
            case runner_link.WorkerStarted():
                log.debug("local_rank %d is pid %d", event.local_rank, event.pid)
                self._pids[event.local_rank] = event.pid
                file = self._progress.file(event.local_rank)
                self._hangs.worker_started(event.local_rank, event.pid, file)
                self._witness.worker_started(event.local_rank, event.pid)
            case runner_link.WorkersStartFailed():
                self.post(events.StartFailed(event.round, event.reason))
            case runner_link.WorkerExited():
                self._take_exit(event, WorkerError("", "", 0))
            case runner_link.WorkersGone():
                self._workers.close_round()
                self._hangs.close_round()
                step = self._progress.furthest()
                self._progress.close_round()
                self._snapshot.end_round(
                    lambda changed: self._workers_gone(event.round, Moved(step, snapshot=changed))
                )
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
            case runner_link.ServeFailed():
                pass  # Its workers end with this process; nothing else depends on it.
            case runner_link.RunnerRefused():
                log.error("%s: its runner refuses to go on: %s", self.rdzv_id, event.reason)
                self._owner.kill()

    def _workers_gone(self, round_: int, moved: Moved) -> None:
        """Take note that none is left: at once, or when the node was looked at that is to rejoin.

        Until then its seat is kept, and no round is formed with a node that is not well.
        """
        gone = events.WorkersGone(round_, moved)
        if self._examine is None or not rejoins_after_failure(self._state, round_):
            self.post(gone)
        elif self._examining is None or self._examining.done():
            examined = self._examined(self._examine, gone)
            self._examining = asyncio.create_task(examined, name=f"examine {self.rdzv_id}")

    async def _examined(
        self, examine: Callable[[], Awaitable[str]], gone: events.WorkersGone
    ) -> None:
        try:
            reason = await examine()
        except Exception:
            log.exception("%s: whether this node is well can not be found out", self.rdzv_id)
            reason = ""
        if self.handed_over:
            # The agent after this one looks, too.
            return
        if reason:
            self.post(events.Unhealthy(gone.round, reason))
        self.post(gone)

    async def _lose_runner(self, event: runner_link.RunnerExited) -> None:
        """Kill what a dead runner has left behind, before anyone is told that it is gone."""
        self.meter.runner_said(event)
        if event.exit_code != 0 or not self._ended.done():
            while not await self._end_leftovers():  # noqa: ASYNC110
                await asyncio.sleep(SWEEP_AGAIN_S)
        if not self._ended.done():
            self.post(events.RunnerLost(f"its runner {_how_lost(event.exit_code)}"))

    def _note_failure(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self._fail(error)

    async def _end_leftovers(self) -> bool:
        """Kill what a dead runner has left; say whether all processes could be looked at."""
        try:
            await runner_link.sweep_orphans()
            if self._keeping is not None:
                # Was it adopted, they are init's.
                mark = leaked_processes.mark_of(self._keeping.socket)
                await in_time(SWEEP_WITHIN_S, leaked_processes.kill_strays, mark)
        except OSError as error:
            text = "%s: what its dead runner has left behind can not be looked for: %s"
            log.error(text, self.rdzv_id, error)
            return False
        return True

    def _explain_exit(self, event: runner_link.WorkerExited, taken: asyncio.Future[None]) -> None:
        """Take a failed worker's exit when its error file was read, or does not answer."""
        heard_ms = _now_ms()

        def take(error: WorkerError | Exception) -> None:
            if isinstance(error, Exception):
                error = unread(error)
            late = replace(event, age_ms=event.age_ms + _now_ms() - heard_ms)
            self.meter.runner_said(late)
            self._guard(self._take_exit, late, error)
            if not taken.done():
                taken.set_result(None)

        file = self._workers.error_file(event.local_rank)
        self._error_files.call(
            take, read_error, file, event.signal, event.pid, self._launch.identity
        )

    def _take_exit(self, event: runner_link.WorkerExited, error: WorkerError) -> None:
        self._hangs.worker_exited(event.local_rank)
        self.post(
            events.WorkerExited(
                round=event.round,
                local_rank=event.local_rank,
                pid=event.pid,
                exit_code=event.exit_code,
                signal=event.signal,
                message=error.message,
                traceback=error.traceback,
                age_ms=max(event.age_ms, error.age_ms),
            )
        )

    # ------------------------------------------------------------------ the user's side

    def _tell(self, event: events.Event) -> None:
        """Write one line for what a user wants to know of an event."""
        match event:
            case events.Joined() if not self._joined or event.run != self._state.run:
                self._joined = True
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
            case events.Unhealthy():
                text = "%s: leaving the job, for this node is unhealthy: %s"
                log.warning(text, self.rdzv_id, event.reason)
            case events.Withdrawn():
                log.warning("%s: withdrawn from this node: %s", self.rdzv_id, event.reason)
            case events.NoticeGiven() if self._state.notice is None:
                self._tell_notice(event)
            case events.NoticeLifted() if self._state.notice is not None:
                text = "%s: this node may stay; workers that were told to leave may still exit"
                log.warning(text, self.rdzv_id)
            case _:
                log.debug("%s", event)

    def _tell_notice(self, event: events.NoticeGiven) -> None:
        if self._state.workers_gone:
            log.warning("%s: leaving the job: %s", self.rdzv_id, event.reason)
            return
        log.warning(
            "%s: its workers are told that this node leaves, and have %s to exit: %s",
            self.rdzv_id,
            duration(event.left_ms),
            event.reason,
        )

    def _serves(self, round_: int) -> bool:
        """Whether this node is to serve the store of a round that is not over."""
        line, phase = self._state.assignment, self._state.phase
        return line is not None and line.round == round_ and phase is Phase.RUNNING

    def _tell_round(self, line: Assignment) -> None:
        last = line.rank_first + self._launch.job.local_world_size - 1
        log.info(
            "%s: round %d: GROUP_RANK %d of %d, RANK %d..%d of %d, MASTER %s:%d, restarts %s",
            self.rdzv_id,
            line.round,
            line.group_rank,
            line.group_world_size,
            line.rank_first,
            last,
            line.world_size,
            line.master_addr,
            line.master_port,
            _restarts(line, self._launch.job.settings.restart_window_ms),
        )


def _restarts(line: Assignment, window_ms: int) -> str:
    """Say how many restarts count against how many, as the server does; and how many there were."""
    if not window_ms:
        return f"{line.restarts} of {line.max_restarts}"
    # An older server does not tell; one that does tells of no more than these.
    counted = 0 if line.tally is None else len(line.tally.restart_ages_ms)
    more = " or more" if counted == MAX_RESTART_AGES else ""
    within = f"in the last {duration(window_ms)}"
    return f"{counted}{more} of {line.max_restarts} {within}, {line.restarts} in all"


def _how_lost(exit_code: int | None) -> str:
    """Say how a runner has ended that was not to end."""
    if exit_code is not None and exit_code < 0:
        return f"was killed by {signal_name(-exit_code)}, and its workers with it"
    how = "" if exit_code is None else f" with exit code {exit_code}"
    return f"ended unexpectedly{how}, and its workers with it"


def _only_loopback(offer: Offer) -> bool:
    """Whether only this machine can reach what is offered."""
    return is_loopback(offer.address) and not offer.host_name


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
