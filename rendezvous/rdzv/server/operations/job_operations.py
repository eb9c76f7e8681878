"""Jobs and their workers at one leading server: what operators are shown, and what they change."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from rdzv import errors
from rdzv.core.commands import Command, Submit
from rdzv.core.events import WorkerStart
from rdzv.core.evidence.progress_lag import RankProgress, lags
from rdzv.core.evidence.stacks import CollectedStacks
from rdzv.core.evidence.stragglers import Straggler
from rdzv.core.model import NodeState, State
from rdzv.core.reason import ReasonItem
from rdzv.core.snapshots import SnapshotsKnown
from rdzv.core.words import listed
from rdzv.messages import LogsWanted
from rdzv.server.diagnosis.round_reports import Starts
from rdzv.server.security import roles
from rdzv.server.security.callers import ANYBODY, Caller
from rdzv.stores.base import Record
from rdzv.structs import replace
from rdzv.transport.wire import convert
from rdzv.view import answers
from rdzv.view.answers import JobStatus, LogLines
from rdzv.view.job_status import view

if TYPE_CHECKING:
    from rdzv.server.driver import Driver

WATCHERS = 1_000
"""The number of callers that watch jobs at once. Each costs a message for every change."""

SUMMARY_ITEMS = 4
"""How many items of its reason a job has in a list."""

NO_SNAPSHOTS = SnapshotsKnown()
_HERE = (NodeState.SEATED, NodeState.SUCCEEDED, NodeState.AWAY, NodeState.STOPPING)

log = logging.getLogger("rdzv.driver")


class JobOperations:
    """The jobs of one server. Methods that take an rdzv_id raise `UnknownJobError` for no job."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.watching = 0

    # ---------------------------------------------------------------- shown

    async def status(self, rdzv_id: str) -> JobStatus:
        return self.of(await self.state(rdzv_id))

    async def state(self, rdzv_id: str) -> State:
        state = await self._driver.jobs.look(rdzv_id)
        if not state.membership.run:
            store = self._driver.store
            if store.waiting(rdzv_id):
                trouble = store.trouble_of(rdzv_id)
                raise errors.RendezvousConnectionError(
                    f"job {rdzv_id} is not stored yet: {trouble}"
                )
            raise errors.UnknownJobError(
                f"no job {rdzv_id} is known here; `rdzvctl list` shows those that are"
            )
        return state

    def of(self, state: State) -> JobStatus:
        driver = self._driver
        return with_workers(
            self._without_workers(state),
            driver.clock.now_ms(),
            driver.rounds.progress(state),
            driver.rounds.stragglers(state),
            driver.rounds.starts(state),
            driver.snapshots.shown(state),
        )

    def _without_workers(self, state: State) -> JobStatus:
        driver, rdzv_id = self._driver, state.membership.rdzv_id
        store, wait = driver.store, driver.placer.queue_wait_of(rdzv_id)
        shown = view(state, driver.clock.now_ms(), wait, driver.fleet.drains())
        # The view shows the stored state; the reason names commands that are waiting to be stored.
        if state.membership.ended is not None and not store.waiting(rdzv_id):
            return shown
        if not (trouble := store.trouble_of(rdzv_id)):
            return shown
        items = (ReasonItem(trouble), *shown.reason.items)
        return replace(shown, reason=replace(shown.reason, items=items))

    def summary(self, state: State) -> answers.JobSummary:
        hangs = self._driver.hangs.shown(state.membership.rdzv_id)
        return summary_of(self._without_workers(state), hangs)

    async def watch(self, rdzv_id: str) -> AsyncGenerator[JobStatus, None]:
        """Yield a job's status now and after each change; a slow reader misses some of them."""
        if self.watching >= WATCHERS:
            raise errors.LimitExceededError(
                f"{self.watching} callers watch jobs here, which is the limit; try again later"
            )
        watchers = self._driver.watchers
        self.watching += 1
        try:
            while not watchers.closed:
                changed = watchers.next_change(rdzv_id)
                yield await self.status(rdzv_id)
                await changed.wait()
            raise errors.RendezvousConnectionError("this server no longer serves; ask again")
        finally:
            self.watching -= 1

    async def history(self, rdzv_id: str, limit: int) -> tuple[Record, ...]:
        await self.state(rdzv_id)
        return await self._driver.history.of(rdzv_id, limit)

    # ---------------------------------------------------------------- workers

    async def read_logs(self, rdzv_id: str, wanted: LogsWanted) -> AsyncGenerator[LogLines, None]:
        state = await self.state(rdzv_id)
        if self._driver.watchers.closed:
            raise errors.RendezvousConnectionError("this server no longer serves; ask again")
        reader = self._driver.logs.open(state, wanted)
        try:
            while (lines := await reader.next()) is not None:
                yield lines
        finally:
            reader.close()

    async def stacks(
        self, rdzv_id: str, run: str = "", number: int | None = None, *, why: str
    ) -> CollectedStacks:
        """Return a round's stacks, captured now or when the round hung; see `Control.TakeStacks`.

        `why` is the reason for capturing them; if it is empty, no node is asked.
        """
        state = await self.state(rdzv_id)
        membership, archive = state.membership, self._driver.stack_archive
        if run and run != membership.run:
            raise errors.RendezvousClosedError(
                f"run {run} of {rdzv_id} has ended, and another has begun: run {membership.run}"
            )
        last = membership.round
        live = last is not None and last.live and not membership.ended
        if why and last is not None and live and number in (None, last.number):
            return await self._driver.stacks.take(state, why)
        kept = await archive.rounds(rdzv_id, membership.run)
        wanted = number if number is not None else max(kept, default=None)
        if wanted is not None and wanted in kept:
            found = await archive.find(rdzv_id, membership.run, wanted)
            if found is not None:
                return found
        rounds = f"those of round {listed(kept)} are" if kept else "no round of this run has hung"
        if number is not None:
            present = f"; its workers are in round {last.number} now" if last and live else ""
            reason = f"no stacks of round {number} of {rdzv_id} are kept, {rounds}{present}"
        elif why:
            reason = (
                f"{rdzv_id} has no workers now, so there are no stacks to take, and none are "
                f"kept: {rounds}"
            )
        else:
            reason = (
                f"no stacks of {rdzv_id} are kept: no round of this run has hung; `rdzvctl stacks "
                f"{rdzv_id}` takes those of its workers now"
            )
        raise errors.InvalidRequestError(reason)

    # ---------------------------------------------------------------- changed

    async def submit_job(
        self, rdzv_id: str, command: Submit, caller: Caller = ANYBODY
    ) -> JobStatus:
        """Begin a run whose nodes the server chooses, and return the job's new status."""

        def guard(state: State) -> None:
            roles.refuse_others_job(caller, state, "submit")

        state = await self._driver.jobs.look(rdzv_id)
        if command.run != state.membership.run:
            self._driver.placer.check_placeable(command.spec)
        command = replace(command, spec=replace(command.spec, submitter=caller.name))
        await self._driver.engine.submit(rdzv_id, command, guard)
        await self._driver.placer.place()
        return await self.status(rdzv_id)

    async def obey(self, rdzv_id: str, command: Command) -> JobStatus:
        await self.state(rdzv_id)
        return self.of(await self._driver.engine.submit(rdzv_id, command))

    async def forget(self, rdzv_id: str) -> None:
        """Delete a job that has ended together with its history; see `Forgetting.forget`."""
        await self._driver.forgetting.forget(rdzv_id)
        try:
            await self._driver.stack_archive.forget(rdzv_id)
        except errors.RendezvousError as error:
            log.warning(
                "could not delete the stacks of %s, which are kept until newer ones replace them: "
                "%s",
                rdzv_id,
                error,
            )
        self._driver.watchers.job_changed(rdzv_id)


def summary_of(status: JobStatus, hangs: str = "") -> answers.JobSummary:
    return convert(
        answers.JobSummary,
        status,
        reason=replace(status.reason, items=status.reason.items[:SUMMARY_ITEMS]),
        nodes=sum(1 for n in status.nodes if n.group_rank is not None and n.state in _HERE),
        hangs=hangs or None,
    )


def with_workers(
    status: JobStatus,
    now_ms: int,
    progress: Sequence[RankProgress] = (),
    stragglers: tuple[Straggler, ...] = (),
    starts: Mapping[str, Starts] | None = None,
    snapshots: SnapshotsKnown = NO_SNAPSHOTS,
) -> JobStatus:
    starts = starts or {}
    started = sum(one.kept + one.hot + one.warm + one.cold for one in starts.values())
    known = list(starts.values()) if started == (status.world_size or 0) else []
    return replace(
        status,
        nodes=tuple(_node_with_workers(node, starts, snapshots) for node in status.nodes),
        progress=tuple(
            replace(one, behind=steps) for one, steps in zip(progress, lags(progress), strict=True)
        ),
        stragglers=stragglers,
        warm=sum(one.warm for one in known) if known else None,
        cold=sum(one.cold for one in known) if known else None,
        hot=sum(one.hot for one in known) if known else None,
        snapshot=_whole_snapshot(snapshots, progress, now_ms),
    )


def _node_with_workers(
    node: answers.NodeStatus, starts: Mapping[str, Starts], snapshots: SnapshotsKnown
) -> answers.NodeStatus:
    if (started := starts.get(node.node_id)) is not None:
        node = replace(node, **{how: getattr(started, how) for how in WorkerStart})
    if (held := snapshots.held.get(node.node_id)) is not None:
        node = replace(node, snapshots=held.snapshots, snapshot_bytes=held.bytes)
    return node


def _whole_snapshot(
    snapshots: SnapshotsKnown, progress: Collection[RankProgress], now_ms: int
) -> answers.WholeSnapshot | None:
    if (mark := snapshots.whole) is None:
        return None
    steps = [one.step for one in progress]
    node_loss = None
    if (found := snapshots.node_loss) is not None:
        node_loss = convert(
            answers.NodeLoss,
            found,
            step=None if found.whole is None else found.whole.step,
            lost_steps=snapshots.lost_steps_with_node(steps),
        )
    age_ms = max(now_ms - snapshots.whole_ms, 0)
    lost_steps = snapshots.lost_steps(steps)
    return answers.WholeSnapshot(
        mark.lineage, mark.step, mark.shards, age_ms, lost_steps, node_loss
    )
