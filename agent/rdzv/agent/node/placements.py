"""The jobs assigned to this node.

Each is accepted when the server places it, and is run by its own driver.

::

    Placed --> waits for its folder, its GPUs --> JobDriver: joins, runs --> last process gone
       \\--> Declined: it cannot run here           \\--> Withdrawn: leaves in order

A job is *held* from its placement until nothing of it is left, and is reported to the server during
that time (`Holdings`). Each job runs in its own task, so its failure affects neither other jobs nor
the stream. The `GpuLedger` assigns GPUs and places, and is authoritative about which are free.

A job outlives this process: its runner keeps it for the next agent, which *adopts* it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from rdzv.agent.core import events
from rdzv.agent.core.model import JobTerms
from rdzv.agent.handover.handover_state import HandoverPlan, KeptPlacement
from rdzv.agent.handover.runner_adoption import AdoptedRunner, RunnerAdoption, RunnerRecords
from rdzv.agent.inventory.health import NodeHealth, describe
from rdzv.agent.job.job_driver import JobDriver
from rdzv.agent.launch.launch import Launch, check_chdir, check_startable
from rdzv.agent.node import submitted_launch
from rdzv.agent.node.gpu_assignments import GpuLedger
from rdzv.agent.output.run_folders import RunFolder, RunFolders
from rdzv.agent.server_link.link import ServerLink
from rdzv.agent.system.accounts import Accounts
from rdzv.agent.system.side_thread import ANSWER_WITHIN_S, Aside, in_time, log_long_wait
from rdzv.agent.workers.fates import NodeOutcome
from rdzv.core.fleet.node_resources import FailingCheck, NodeResources, gpus_needed
from rdzv.errors import InvalidRequestError
from rdzv.messages import Holding, Placed, Withdrawn
from rdzv.structs import replace, struct

log = logging.getLogger("rdzv.agent")

CLOSE_AGAIN_S = 10.0
"""The delay before the next attempt to end processes that survive SIGKILL."""

ADOPT_WITHIN_S = 1.0
"""How long it may take to open an adopted job's folder; the server is waiting for this node."""

_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass(eq=False, slots=True)
class _Held:
    placed: Placed
    gpus: int
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    driver: JobDriver | None = None
    """The driver, while it determines how the job ends."""
    closing: bool = False
    """Whether its driver is done and the job's remaining processes are being ended."""
    given_back: str = ""
    """Why the node gives the job back, through no fault of the job; empty if it does not."""

    @property
    def name(self) -> str:
        return self.placed.rdzv_id


@struct(frozen=True)
class Occupancy:
    """The number of this node's submitted jobs and GPUs in each state."""

    jobs: Mapping[str, int]
    gpus: Mapping[str, int]


class _UnhealthyError(Exception):
    """This node is unhealthy and is not accepting jobs at the moment."""


class Placements:
    """Accepts the jobs that the server places on this node, until `leave`."""

    def __init__(
        self,
        link: ServerLink,
        resources: NodeResources,
        around: submitted_launch.Surroundings,
        folders: RunFolders,
        runners: RunnerRecords,
        adoption: RunnerAdoption,
        health: NodeHealth | None = None,
        accounts: Accounts | None = None,
    ) -> None:
        """While one of `health`'s checks fails, no job is accepted."""
        self._accounts = accounts or Accounts()
        self._link = link
        self.resources = resources
        self._around = around
        self._folders = folders
        self._runners = runners
        self._adoption = adoption
        self.ledger = GpuLedger.of(resources)
        self._health = health or NodeHealth(())
        self._health.unused_gpus = lambda: frozenset(self.ledger.free)
        self._health.is_idle = lambda: not self._held
        self._health.on_change = link.say_health
        self._held: dict[_Held, None] = {}
        self._leaving = False
        self._handed_over = False
        self._drained = ""
        """Why this node is about to leave all its jobs; empty if it is not."""

    # ------------------------------------------------------------------ for the link

    def holdings(self) -> tuple[Holding, ...]:
        """Return the jobs that may still have processes on this node, without duplicates."""
        return tuple(
            {
                held.placed.key: Holding(held.placed.rdzv_id, held.placed.run, held.gpus)
                for held in self._held
            }.values()
        )

    @property
    def failing(self) -> tuple[FailingCheck, ...]:
        return self._health.failing

    def look_again(self) -> None:
        self._health.look_again()

    def placed(self, placed: Placed) -> None:
        if self._leaving or self._handed_over:
            log.info("%s: placed here, but this agent is about to exit", placed.rdzv_id)
            return
        if self._drained:
            # The server withdraws it as soon as it is informed.
            log.info("%s: placed here, but this node is leaving: %s", placed.rdzv_id, self._drained)
            return
        if any(held.placed.key == placed.key and not held.given_back for held in self._held):
            return
        held = _Held(placed, gpus_needed(placed.spec, self.resources))
        log.info("%s: placed here (run %s)", placed.rdzv_id, placed.run)
        before = [other for other in self._held if other.name == held.name]
        self._hold(held, lambda: self._take_part(held), before)
        self._link.say_holdings()

    def withdrawn(self, withdrawn: Withdrawn) -> None:
        key = withdrawn.rdzv_id, withdrawn.run
        for held in [one for one in self._held if one.placed.key == key]:
            self._give_back(held, withdrawn.reason, withdrawn)

    def noticed(self, event: events.NoticeGiven | events.NoticeLifted) -> None:
        """Accept no more jobs while this node leaves. The link notifies the drivers itself."""
        if isinstance(event, events.NoticeLifted):
            self._drained = ""
            for held in self._held:
                if held.driver is not None and not held.driver.leaving:
                    held.given_back = ""
            return
        self._drained = event.reason
        for held in tuple(self._held):
            first, held.given_back = not held.given_back, held.given_back or event.reason
            if first and held.driver is None and not held.closing and held.task is not None:
                held.task.cancel()

    # ------------------------------------------------------------------ from agent to agent

    async def adopt(self, adopted: Iterable[AdoptedRunner]) -> None:
        """Call this before anything is sent to the server."""
        for one in adopted:
            try:
                await self._adopt(one)
            except Exception:
                # Another agent may succeed while the runner is still waiting for one.
                log.exception(
                    "%s: cannot adopt it; its workers continue until the server gives this "
                    "node up, unless an agent that can adopt them starts before that",
                    one.placement.rdzv_id,
                )
                one.runner.leave()

    async def _adopt(self, one: AdoptedRunner) -> None:
        kept, found = one.placement, one.runner
        placed = Placed(kept.rdzv_id, kept.run, kept.spec)
        job = one.state.state.job
        launch, folder, why_not = await self._launch_again(kept, placed, job)
        driver = self._new_driver(launch, folder, HandoverPlan(found.path, kept))
        held = _Held(placed, kept.gpus)
        self.ledger.take_over(held, kept.granted)
        try:
            driver.resume(found, one.state)
        except BaseException:
            self.ledger.release(held)
            self._link.remove(driver)
            await driver.hand_over(self._link.orphan_timeout_ms)
            raise
        self._runners.note(found.hello.pid)
        held.driver = driver
        log.info(
            "%s: adopted, with runner pid %d: %s", held.name, found.hello.pid, driver.describe()
        )
        self._hold(held, lambda: self._go_on(held, driver, folder, why_not))

    async def _launch_again(
        self, kept: KeptPlacement, placed: Placed, job: JobTerms
    ) -> tuple[Launch, RunFolder, str]:
        """The reason why no round can start is empty unless this node would decline the job now."""
        identity = None if kept.account is None else kept.account.identity
        folder, why_not = self._folders.folder(placed.rdzv_id, placed.run), ""
        # The job keeps GPUs that the configuration no longer names.
        gpus = kept.granted if kept.granted or self.resources.gpus else None
        share = submitted_launch.Share(gpus, folder.path, kept.account)
        around = replace(self._around, environ=kept.environ)
        try:
            await in_time(ADOPT_WITHIN_S, self._folders.open, placed.rdzv_id, placed.run, identity)
            launch = await submitted_launch.make_launch(placed, around, share, job.local_world_size)
        except (InvalidRequestError, OSError) as error:
            why_not = str(error)
        except Exception as error:
            log.exception(
                "%s: cannot launch the job because of a bug in rdzv-agent", placed.rdzv_id
            )
            why_not = f"a bug in its rdzv-agent: {error!r}"
        if why_not:
            launch = submitted_launch.bare_launch(placed, around, share, job)
        return replace(launch, job=job), folder, why_not

    async def _go_on(self, held: _Held, driver: JobDriver, folder: RunFolder, why_not: str) -> None:
        try:
            await self._see_through(held, driver, driver.get_ready(why_not))
        finally:
            self._folders.release(folder)

    async def hand_over(self, within_ms: int) -> None:
        self._handed_over = True
        for held in tuple(self._held):
            if held.driver is not None:
                await held.driver.hand_over(within_ms)

    # ------------------------------------------------------------------ for the daemon

    def change(self, resources: NodeResources, environ: Mapping[str, str]) -> None:
        """GPUs do not change, and jobs beyond the new capacity continue."""
        self.resources = resources
        self._around = replace(self._around, environ=environ)
        self.ledger.capacity = resources.capacity
        self.ledger.grant()

    def take_no_more(self) -> None:
        self._leaving = True

    def leave(self, signum: int, name: str) -> None:
        """Leave all jobs in order, and accept no more; a second call cuts the grace short."""
        self._leaving = True
        reason = f"its agent received {name}"
        for held in tuple(self._held):
            self._give_back(held, reason, events.Signalled(signum, name))

    def occupancy(self) -> Occupancy:
        jobs = Counter({"waiting": 0, "running": 0, "ending": 0})
        gpus = Counter({"free": len(self.ledger.free), "running": 0, "ending": 0})
        for held in self._held:
            ends = held.closing or held.given_back
            jobs["ending" if ends else "running" if held.driver is not None else "waiting"] += 1
            gpus["ending" if ends else "running"] += len(self.ledger.held_by(held))
        return Occupancy(jobs, gpus)

    async def all_gone(self) -> None:
        while self._held:
            await next(iter(self._held)).gone.wait()

    # ------------------------------------------------------------------ one job

    def _give_back(self, held: _Held, reason: str, event: events.Event) -> None:
        """End a job, either through its driver, or at once if it does not have one yet."""
        first = not held.given_back
        held.given_back = held.given_back or reason
        if held.driver is not None:
            held.driver.post(event)
        elif first and not held.closing and held.task is not None:
            held.task.cancel()

    def _hold(
        self, held: _Held, body: Callable[[], Awaitable[None]], before: Iterable[_Held] = ()
    ) -> None:
        """Hold a job until its task is done; the task begins once the jobs in `before` are gone."""
        self._held[held] = None
        held.task = asyncio.create_task(self._live(held, body, before), name=f"job {held.name}")
        # The task itself cannot do this, because it runs no code if it is cancelled before its
        # start.
        held.task.add_done_callback(lambda _: self._let_go(held))

    async def _live(
        self, held: _Held, body: Callable[[], Awaitable[None]], before: Iterable[_Held]
    ) -> None:
        try:
            for other in before:
                await other.gone.wait()
            await body()
        except _UnhealthyError as error:
            log.warning("%s: declined for now: %s", held.name, error)
            self._link.decline_for_now(held.placed.rdzv_id, held.placed.run, str(error))
        except (InvalidRequestError, OSError) as error:
            self._decline(held, str(error))
        except asyncio.CancelledError:
            if not self._handed_over:
                log.info(
                    "%s: not started here: %s", held.name, held.given_back or "this agent is ending"
                )
        except Exception as error:
            log.exception("%s: ended on this node because of a bug in rdzv-agent", held.name)
            self._decline(held, f"a bug in its rdzv-agent: {error!r}")

    def _let_go(self, held: _Held) -> None:
        del self._held[held]
        held.gone.set()
        self.ledger.release(held)
        self._link.say_holdings()

    def _decline(self, held: _Held, reason: str) -> None:
        log.warning("%s: declined: %s", held.name, reason)
        self._link.decline(held.placed.rdzv_id, held.placed.run, reason)

    async def _take_part(self, held: _Held) -> None:
        placed = held.placed
        await self._runners.former_gone()
        spec = placed.spec
        account = await _answered(
            held.name, "its account", self._accounts.account_for, spec.submitter, spec.account
        )
        identity = None if account is None else account.identity
        chdir = submitted_launch.working_directory(placed, self._around, account)
        await _answered(held.name, f"the folder {chdir}", check_chdir, chdir, identity)
        gpus = await self.ledger.wait(held, held.gpus, held.name)
        if failing := await self._health.look(frozenset(gpus)):
            raise _UnhealthyError(f"this node is unhealthy: {describe(failing)}")
        try:
            folder = await _answered(
                held.name, "its folder", self._folders.open, placed.rdzv_id, placed.run, identity
            )
        except OSError as error:
            raise InvalidRequestError(
                f"cannot create its folder in the agent's state_dir: {error}"
            ) from error
        try:
            share = submitted_launch.Share(
                gpus if self.resources.gpus else None, folder.path, account
            )
            launch = await submitted_launch.make_launch(placed, self._around, share)
            await _answered(held.name, "its script, program or logs", check_startable, launch)
            await self._drive(held, launch, folder, gpus)
        finally:
            self._folders.release(folder)

    async def _drive(
        self, held: _Held, launch: Launch, folder: RunFolder, gpus: tuple[str, ...]
    ) -> None:
        placed = held.placed
        kept = KeptPlacement(
            node_id=self._around.node_id,
            instance=self._adoption.instance.instance,
            rdzv_id=placed.rdzv_id,
            run=placed.run,
            spec=placed.spec,
            gpus=held.gpus,
            granted=gpus,
            environ=dict(self._around.environ),
            account=launch.account,
        )
        driver = self._new_driver(launch, folder, HandoverPlan(self._adoption.new_socket(), kept))
        await self._see_through(held, driver, self._begin(held, driver))

    def _new_driver(self, launch: Launch, folder: RunFolder, plan: HandoverPlan) -> JobDriver:
        kept = plan.placement
        driver = JobDriver(launch, self._link, kept.run, plan, self._examine(kept.granted))
        noting = Aside(ANSWER_WITHIN_S)

        async def note() -> None:
            try:
                await noting.answer(folder.note, driver.written)
            except Exception as error:
                text = "%s: cannot record where its logs are, so they may not be found later: %s"
                log.warning(text, driver.rdzv_id, error)

        driver.written.listeners.add(lambda: driver.tasks.start(note(), "logs"))
        return driver

    def _examine(self, gpus: Iterable[str]) -> Callable[[], Awaitable[str]]:
        """Return a health check of this node, to run when the workers on these GPUs are gone."""
        mine = frozenset(gpus)

        async def examine() -> str:
            # An earlier result does not count, because workers were still running then.
            return describe(await self._health.look(mine, fresh_s=0.0))

        return examine

    async def _begin(self, held: _Held, driver: JobDriver) -> None:
        # From here on, requests to end the job go to the driver.
        await driver.prepare()
        held.driver = driver
        assert driver.runner_pid is not None, "a driver that is ready has a runner"
        self._runners.note(driver.runner_pid)

    async def _see_through(self, held: _Held, driver: JobDriver, begin: Awaitable[None]) -> None:
        bug: Exception | None = None
        try:
            await begin
            self._tell(held, driver, await driver.ended)
        except Exception as error:
            if held.driver is None:
                raise
            log.exception("%s: ended on this node because of a bug in rdzv-agent", held.name)
            bug = error
        finally:
            held.driver, held.closing = None, True
            if not driver.handed_over:
                await self._close(held, driver)
            if bug is not None:
                driver.say_failed(f"a bug in its rdzv-agent: {bug!r}")
            self._link.remove(driver)
            self._link.log_reader.forget(held.name)
        if bug is not None and not driver.joined:
            self._decline(held, f"a bug in its rdzv-agent: {bug!r}")

    async def _close(self, held: _Held, driver: JobDriver) -> None:
        while True:
            try:
                await driver.close()
            except TimeoutError:
                log.error("%s: processes survived SIGKILL; its GPUs remain reserved", held.name)
                if self._leaving:
                    return
                await asyncio.sleep(CLOSE_AGAIN_S)
                continue
            except Exception:
                # Its processes had already ended, so the GPUs are free.
                log.exception("%s: cleanup failed", held.name)
            if driver.runner_pid is not None:
                self._runners.forget(driver.runner_pid)
            return

    def _tell(self, held: _Held, driver: JobDriver, outcome: NodeOutcome) -> None:
        """Log how the job ended; if it never joined, decline it so that the server is informed."""
        level = logging.INFO if outcome.exit_code == 0 or held.given_back else logging.WARNING
        text = outcome.text.partition("\n")[0]
        log.log(level, "%s: ended on this node: %s", held.name, text)
        if outcome.result is None and not driver.joined and not held.given_back:
            self._decline(held, outcome.text)


async def _answered(
    rdzv_id: str,
    what: str,
    function: Callable[_P, _R],
    *args: _P.args,
    **kwargs: _P.kwargs,
) -> _R:
    """Call a function that may hang on a directory service or file server."""
    try:
        with log_long_wait(f"{rdzv_id}: {what}"):
            return await in_time(ANSWER_WITHIN_S, function, *args, **kwargs)
    except TimeoutError as error:
        raise InvalidRequestError(f"cannot check {what}: {error}") from error
