"""Feeds a job's events to the agent core, and carries out its decisions; it never blocks.

The runner and the server answer with events. A `LocalRound`, one task, owns a round's workers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from rdzv import messages
from rdzv.agent.core import Decision, begin, commands, events
from rdzv.agent.core.model import EXIT_FAILED, AgentState, Leaving, Phase
from rdzv.agent.core.server_contact import server_due_ms
from rdzv.agent.core.standbys import has_hot_standby
from rdzv.agent.core.stopping import rejoin, said_leave
from rdzv.agent.handover import handover_state, leaked_processes
from rdzv.agent.job.decisions import Decisions, log_event
from rdzv.agent.job.from_runner import RunnerEvents
from rdzv.agent.job.round import LocalRound
from rdzv.agent.job.snapshots import CopiesOfSnapshots, SnapshotReports, SnapshotsOnDisk
from rdzv.agent.job.standby_workers import StandbyWorkers
from rdzv.agent.job.worker_observers import WorkerObservers
from rdzv.agent.job.worker_starts import LocalStarts
from rdzv.agent.launch.launch import Launch, has_torch, reachable_host_name
from rdzv.agent.observers.server_clock import Reading
from rdzv.agent.observers.stack_sampling import StackAnswers
from rdzv.agent.output.run_files import Written
from rdzv.agent.runner import requests, spawn
from rdzv.agent.runner.processes import become_subreaper
from rdzv.agent.runner_link.found_runner import FoundRunner
from rdzv.agent.runner_link.runner_link import RunnerHello, RunnerLink, StartedRunner
from rdzv.agent.server_link import encoding
from rdzv.agent.server_link.link import ServerLink
from rdzv.agent.system.side_thread import Aside
from rdzv.agent.workers.event_log import EventLog
from rdzv.agent.workers.fates import FateRecorder, NodeOutcome
from rdzv.agent.workers.worker_group import LocalWorkerGroup
from rdzv.core.evidence.stacks import WorkerStack
from rdzv.core.model import LeaveCause, Offer, StandbyState
from rdzv.errors import InvalidRequestError
from rdzv.runtime.clock import monotonic_ms
from rdzv.runtime.tasks import OwnedTasks
from rdzv.structs import replace
from rdzv.transport.addresses import StoreSocket, machine_id
from rdzv.transport.endpoints import is_loopback
from rdzv.v1 import rdzv_pb2 as pb

log = logging.getLogger("rdzv.agent")

ERROR_FILE_WITHIN_S = 2.0
"""How long a failed worker's exit waits for its error file to be read."""
RUNNER_CLOSE_TIMEOUT_S = 10.0
LET_GO_TIMEOUT_S = 2.0
"""How long a runner may take to read the state for the next agent before this process exits."""


class JobDriver:
    """Drives a job on this node until it `ended` there. An error ends only this job."""

    _noted = ""
    """The reason for waiting that was logged last."""

    def __init__(
        self,
        launch: Launch,
        link: ServerLink,
        run: str = "",
        keeping: handover_state.HandoverPlan | None = None,
        examine: Callable[[], Awaitable[str]] | None = None,
        started: StartedRunner | None = None,
    ) -> None:
        """Drive this launch. `run` is the run in which it takes part, if already known.

        With `keeping`, the workers outlive this process and the next agent continues the job.
        `examine` returns what is wrong with this node, if anything; after a failure on this node,
        it is called once the workers are gone and before the node joins the next round. `started`
        is a runner that was started in advance; without it, the driver starts its own.
        """
        self.rdzv_id = launch.job.rdzv_id
        self.fence_after_ms = launch.job.fence_after_ms
        self.local_world_size = size = launch.job.local_world_size
        self.counts = link.counts.job(size)
        socket = None if keeping is None else keeping.socket
        if socket is not None:
            mark = leaked_processes.mark_of(socket)
            launch = replace(launch, environ={**launch.environ, leaked_processes.RUNNER: mark})
        self.launch = launch
        self.offer = Offer(address="")
        """This node's offer for each round, without a port."""
        self.store_socket = StoreSocket(loopback_only=True)
        """The socket that is reserved for the next round's store."""
        self.ready = asyncio.Event()
        """Set once it is known whether workers can be started here, or why not (`unready`)."""
        self.unready = ""
        self.joined = self.handed_over = False
        self.ended: asyncio.Future[NodeOutcome] = asyncio.get_running_loop().create_future()
        self.examine = examine
        self.error_files = Aside(ERROR_FILE_WITHIN_S)
        self.tasks = OwnedTasks(self._fail)
        self.decisions = Decisions(begin(launch.job, monotonic_ms(), run), self._act, self._fail)
        self.disk = SnapshotsOnDisk(launch)
        self.copies = CopiesOfSnapshots(launch, encrypted=link.encrypts)
        self._link = link
        self._keeping = keeping
        self._keeper: handover_state.StateKeeper | None = None
        self._started = started
        self._linked: RunnerLink | None = None
        self._last_round: LocalRound | None = None
        self._zygote_begun = self._preparing = False
        self._snapshot_reports = SnapshotReports(self.report)
        self.observers = WorkerObservers(launch, self.report, self._read_clock)
        self._stacks = StackAnswers(self._say_stacks, self.observers.records)
        progress, notice = self.observers.progress, self.observers.notice
        self.workers = LocalWorkerGroup(launch, progress.file, notice.path)
        who, watched = (self.rdzv_id, size), not launch.warm
        self.starts = LocalStarts(
            *who, monotonic_ms, self.report, lambda: self.workers.script, watched=watched
        )
        self.event_log = EventLog(launch, monotonic_ms(), lambda n: self.round.outputs[n].error)
        self.fates = FateRecorder(self.event_log, size, monotonic_ms)
        self.standby = StandbyWorkers(self)
        self._events = RunnerEvents(self, socket)

    # ------------------------------------------------------------------ life cycle

    async def prepare(self) -> None:
        """Get ready to join: determine this node's offer and start its runner."""
        await self.event_log.open()
        await self.workers.prepare()
        self._set_offer(await _make_offer(self.launch))
        become_subreaper()
        if self._started is not None:
            runner = self._started.link(self._events.hear)
        else:
            runner = await RunnerLink.spawn(self._events.hear)
        self.counts.has_runner = True
        self.ready.set()
        # The placement is stored before anything is started, so the next agent always finds it.
        self._take_charge(runner)
        if self._keeper is not None:
            self._keeper.keep_placement()
            self.keep()
        if self.workers.zygote is not None:
            # The zygote is started now, so it can import while this node waits for the others.
            runner.ask(self.workers.zygote)
            self._zygote_begun = not self.workers.zygote.after_import
            if self._zygote_begun:
                self.standby.zygote_settled.clear()
        self._preparing = self.workers.zygote is not None or has_hot_standby(self.launch.job)
        self._serve_server()
        self.post(events.Ticked())
        if self.decisions.state.phase is Phase.JOINING:
            # If a stream is already open, its Hello did not include this job.
            self.decisions.guard(self._join, rejoin(self.decisions.state))

    def resume(self, found: FoundRunner, kept: handover_state.KeptState) -> None:
        """`found` is the adopted runner, whose held events are handled now. `get_ready` is next."""
        state = kept.state
        if state.disconnected_since_ms is None:
            state = replace(state, disconnected_since_ms=monotonic_ms())
        self.decisions.state, self.joined = state, kept.joined
        self._set_offer(kept.offer)
        assignment = state.assignment
        self.observers.resume_round(
            kept.progress_folder, None if state.workers_gone else assignment
        )
        if state.notice is not None and state.notice.due_ms is not None:
            self._link.drain.remember(state.notice.due_ms, state.notice.reason)
        if assignment is not None:
            self._last_round = LocalRound(self, assignment)
            # Otherwise its workers were never requested, and the round begins here.
            started = found.hello.last_round == assignment.round
            self.fates.begin(assignment, found.hello.workers if started else {})
            if started or state.phase is not Phase.RUNNING:
                self._last_round.resume(kept, found.hello)
        become_subreaper()
        running = () if state.workers_gone else tuple(found.hello.workers)
        self.counts.adopted(running, assignment.restarts if assignment else None)
        self._take_charge(found.link(self._events.hear))
        self._serve_server()
        self.decisions.guard(self._redo, kept, found.hello)
        self.post(events.Ticked())

    def _redo(self, kept: handover_state.KeptState, hello: RunnerHello) -> None:
        """Repeat any decisions of the previous agent that it may not have carried out."""
        state, assignment = self.decisions.state, self.decisions.state.assignment
        if state.outcome is not None and state.phase is Phase.ENDED:
            self._do(commands.Exit(state.outcome))
        needs_store = state.phase not in (Phase.JOINING, Phase.ENDED)
        needed = assignment.round if needs_store and assignment is not None else None
        for round_ in hello.store_hosts - {needed}:
            self.runner.ask(requests.StopStoreHost(round_))
        if state.ending_kept:
            self._do(commands.EndKept(state.job.failure_stop_timeout_ms))
        elif state.standby.state is StandbyState.STARTING:
            self.standby.begin(state.standby_of[0])
        if assignment is None or state.workers_gone:
            return
        if state.phase is Phase.RUNNING and hello.last_round != assignment.round:
            self.round.begin()
        elif state.phase is not Phase.RUNNING:
            stop = kept.stop
            if stop is None or stop.command.round != assignment.round:
                # The fence has ended the round. `WorkersGone` may have arrived, but the previous
                # agent had no time to record it.
                stop = handover_state.KeptStop(
                    commands.StopWorkers(assignment.round, 0), monotonic_ms()
                )
            again, spent_ms = stop.command, monotonic_ms() - stop.at_ms
            keep_ms = None if again.keep_ms is None else max(again.keep_ms - spent_ms, 0)
            self._do(replace(again, grace_ms=max(again.grace_ms - spent_ms, 0), keep_ms=keep_ms))

    def _take_charge(self, runner: RunnerLink) -> None:
        self._linked = runner
        runner.ask(requests.HoldSnapshots(self.launch.snapshot_memory))
        if self._keeping is not None:
            grace_ms = self.launch.job.shutdown_timeout_ms
            self._keeper = handover_state.StateKeeper(self._keeping, runner, grace_ms)
            self._keeper.outlive(self._link.orphan_timeout_ms)

    def _serve_server(self) -> None:
        self._link.add(self)
        self._link.log_reader.serve(self.rdzv_id, self.workers.written)

    async def get_ready(self, why_not: str = "") -> None:
        """After `resume`, get ready for the next rounds, or make them fail because of `why_not`.

        An error has the same effect. The current round's workers keep running, supervised.
        """
        unready = why_not
        if not why_not:
            try:
                await self.event_log.open()
                await self.workers.prepare()
            except (InvalidRequestError, OSError) as error:
                unready = str(error)
            except Exception as error:
                log.exception(
                    "%s: cannot prepare for further rounds because of a bug in rdzv-agent",
                    self.rdzv_id,
                )
                unready = f"a bug in its rdzv-agent: {error!r}"
        if unready:
            text = "%s: this node cannot start further rounds; its workers keep running: %s"
            log.error(text, self.rdzv_id, unready)
        self.unready = unready
        self.ready.set()
        if self.workers.zygote is not None:
            self.runner.ask(self.workers.zygote)

    async def hand_over(self, within_ms: int) -> None:
        if self._keeper is None:
            return
        self._keeper.outlive(within_ms)
        # From here on the next agent decides.
        self.decisions.stop()
        self.handed_over = True
        if self._last_round is not None:
            self._last_round.cancel()
        await self.runner.let_go(LET_GO_TIMEOUT_S)

    async def close(self) -> None:
        """End all that remains of the job on this node. May be called again if that fails."""
        self.decisions.cancel_tick()
        if self._last_round is not None:
            self._last_round.cancel()
        self.store_socket.release()
        self.observers.stop_watching()
        self._snapshot_reports.close()
        await self._stacks.close()
        if self._linked is not None:
            state = self.decisions.state
            if state.workers_gone:
                await self.disk.write_last(self._linked, state.watermark, state.run)
            await self._linked.close(RUNNER_CLOSE_TIMEOUT_S)
        await self._events.leftovers_ended(RUNNER_CLOSE_TIMEOUT_S)
        await self.tasks.close()
        self.observers.close()
        await self.workers.close()
        await self.event_log.close()
        self.counts.closed()

    # ------------------------------------------------------------------ state

    @property
    def runner(self) -> RunnerLink:
        assert self._linked is not None
        return self._linked

    @property
    def round(self) -> LocalRound:
        assert self._last_round is not None
        return self._last_round

    def round_of(self, number: int) -> LocalRound | None:
        """Return the last round if it has this number, or None, because an older round is over."""
        last = self._last_round
        return last if last is not None and last.assignment.round == number else None

    @property
    def leaving(self) -> bool:
        return self.decisions.state.leaving is not None or self.ended.done()

    def describe(self) -> str:
        state = self.decisions.state
        if state.assignment is None:
            return str(state.phase)
        return f"{state.phase}, round {state.assignment.round}"

    @property
    def runner_pid(self) -> int | None:
        return None if self._linked is None else self._linked.pid

    @property
    def written(self) -> Written:
        return self.workers.written

    # ------------------------------------------------------------------ the server's side

    def belief(self) -> pb.Belief | None:
        """Return everything that this node believes about the job, or None once it has ended."""
        try:
            if self.decisions.stopped or self.decisions.state.phase is Phase.ENDED:
                return None
            if (offer := self._current_offer()) is None:
                return None
            join = self._encoded_join(None, offer)
            return encoding.belief(self.decisions.state, join, monotonic_ms())
        except Exception as error:
            self._fail(error)
            return None

    def say_failed(self, reason: str) -> None:
        """Tell the server that this node, which has no workers, cannot continue and is leaving."""
        state = self.decisions.state
        left_round = None if state.assignment is None else state.assignment.round
        leaving = Leaving(LeaveCause.START_FAILED, reason, EXIT_FAILED)
        self.report(said_leave(state, leaving, left_round))

    def report(self, said: messages.Said | messages.Report) -> None:
        self._link.say(encoding.report(said, self.rdzv_id, monotonic_ms()))

    def renew_fence(self, heard_at_ms: int) -> None:
        if self.fence_after_ms:
            self.runner.ask(requests.RenewFence(heard_at_ms + self.fence_after_ms))

    def waits_ms(self) -> int | None:
        """None if it never gives up."""
        due_ms = server_due_ms(self.decisions.state)
        return None if due_ms is None else max(due_ms - monotonic_ms(), 0)

    def note(self, reason: str) -> None:
        if reason != self._noted:
            log.info("%s: %s", self.rdzv_id, reason)
        self._noted = reason

    def take_stacks(self, asked: messages.TakeStacks) -> None:
        state = self.decisions.state
        if state.assignment is not None and state.assignment.round == asked.round:
            self.observers.held_exits.note_asked()
        self.decisions.guard(self._stacks.answer, asked, state, self.observers.running)

    async def _say_stacks(
        self, request: int, workers: tuple[WorkerStack, ...], last: bool, error: str
    ) -> None:
        await self._link.say_after_all(
            encoding.report(messages.Stacks(request, workers, last, error))
        )

    def _read_clock(self) -> Reading | None:
        self._link.ask_clock()
        return self._link.server_clock.read(time.monotonic_ns())

    def _set_offer(self, offer: Offer) -> None:
        self.offer = offer
        self.store_socket = StoreSocket(
            loopback_only=_on_loopback_only(offer), listens=offer.can_host_store
        )

    def _current_offer(self) -> Offer | None:
        """Reserve a port if this node waits for a round; if there is none, make the node leave."""
        if self.decisions.state.phase is not Phase.JOINING:
            return self.offer
        if not self.launch.local_addr:
            link = self._link
            self.offer = replace(self.offer, address=link.address, host_name=link.host_name)
            self.store_socket.confine(loopback_only=_on_loopback_only(self.offer))
        try:
            return replace(self.offer, store_port=self.store_socket.port)
        except OSError as error:
            why = f"no port can be bound for the c10d store: {spawn.reason_of(error)}"
            self.post(events.RunnerLost(why))
            return None

    def _join(self, say: commands.SayJoin) -> None:
        if (offer := self._current_offer()) is not None:
            self._link.say(pb.NodeMessage(join=self._encoded_join(say, offer)))

    def _encoded_join(self, say: commands.SayJoin | None, offer: Offer) -> pb.Join:
        return encoding.join(
            say,
            self.decisions.state,
            offer,
            monotonic_ms(),
            refuse_reuse=self.launch.refuse_reuse,
            secret=self.launch.secret,
            preparing=self._preparing,
        )

    def _prepare(self, forks: bool | None) -> None:
        """Start the zygote before the first round if those of other nodes serve the script."""
        if forks is None or self._zygote_begun or not self._preparing:
            return
        if forks and self.workers.zygote is not None:
            self._zygote_begun = True
            self.standby.zygote_settled.clear()
            self.runner.ask(requests.BeginZygote())
        else:
            self.prepared()

    def prepared(self) -> None:
        """Tell the server that no zygote is importing any more, as a running round may wait."""
        self.standby.zygote_settled.set()
        was, self._preparing = self._preparing, False
        state = self.decisions.state
        if was and state.phase is Phase.JOINING and state.left_round is None:
            self._join(rejoin(state))

    # ------------------------------------------------------------------ events to the core

    def post(self, event: events.Event) -> None:
        self.decisions.post(event)

    def _fail(self, error: Exception) -> None:
        if self.ended.done():
            log.error("%s: an error occurred after the job had ended", self.rdzv_id, exc_info=error)
        else:
            self.decisions.stop()
            self.ended.set_exception(error)

    def _act(self, event: events.Event, before: AgentState, decided: Decision) -> None:
        """Store the decision in the runner for the next agent, and then carry it out."""
        log_event(event, before, joined=self.joined)
        if isinstance(event, messages.Joined):
            self.joined = True
            self._prepare(event.forks)
        for command in decided.commands:
            if isinstance(command, commands.StopWorkers):
                self.round.kept_stop = handover_state.KeptStop(command, monotonic_ms())
        self.keep()
        self.fates.note(event, decided.state, decided.commands)
        for command in decided.commands:
            self._do(command)
        if isinstance(event, events.ServerConnected):
            self.observers.say_again()
            self.starts.say_again()
        if self._keeper is not None:
            self._keeper.outlive(self._link.orphan_timeout_ms)

    def keep(self) -> None:
        if self._keeper is None:
            return
        assignment = self.decisions.state.assignment
        # Between a round's announcement and its start, `last_round` is still the previous one.
        round_ = None if assignment is None else self.round_of(assignment.round)
        self._keeper.keep(
            handover_state.KeptState(
                state=self.decisions.state,
                offer=self.offer,
                joined=self.joined,
                stop=None if round_ is None else round_.kept_stop,
                outputs=()
                if round_ is None
                else tuple(replace(one, teed={}, environ={}) for one in round_.outputs),
                progress_folder=self.observers.progress.folder,
            )
        )

    # ------------------------------------------------------------------ the core's commands

    def _do(self, command: commands.Command) -> None:
        self.counts.decided(command)
        self.starts.decided(command)
        match command:
            case commands.SayJoin():
                self._join(command)
            case commands.StartWorkers():
                self._last_round = LocalRound(self, command.assignment)
                self._last_round.begin()
            case commands.StartStandby():
                self.standby.begin(command.script)
            case commands.StopWorkers():
                self.round.stop_workers(command)
            case messages.SnapshotsHeld():
                assignment = self.decisions.state.assignment
                nodes = 1 if assignment is None else assignment.group_world_size
                self._snapshot_reports.report(command, nodes)
            case messages.SnapshotWatermark():
                runner, assignment = self.runner, self.decisions.state.assignment
                runner.ask(command)
                self.disk.announced(runner, command.mark, command.whole_ms, assignment)
            case messages.KeepCopies() | commands.StopStoreHost():
                self.runner.ask(command)
            case commands.EndKept():
                self.standby.cancel()
                self.runner.ask(command)
            case commands.NotifyWorkers():
                self.round.notify_workers(command)
                state = self.decisions.state
                self.disk.write(self.runner, state.watermark, state.run)
            case commands.TakeBackNotice():
                self.observers.notice.take_back()
            case commands.Exit():
                self.written.end()
                if not self.ended.done():
                    self.ended.set_result(self.fates.outcome(command.outcome))
            case _:
                self.report(command)


async def _make_offer(launch: Launch) -> Offer:
    """Return this node's offer without a port; without --local-addr, it has no address either."""
    address = launch.local_addr
    return Offer(
        address=address,
        local_world_size=launch.job.local_world_size,
        role=launch.role,
        topology=launch.topology,
        host_name=await reachable_host_name(address),
        machine=machine_id(),
        can_host_store=await has_torch(launch.python, launch.environ, launch.account),
        shutdown_timeout_ms=max(launch.job.shutdown_timeout_ms, launch.job.keep_timeout_ms),
    )


def _on_loopback_only(offer: Offer) -> bool:
    return is_loopback(offer.address) and not offer.host_name
