"""Submitted jobs on one node: accepted, kept apart, given back, and never interfering.

The drivers are fakes: each does what its story says.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rdzv.agent.core import events
from rdzv.agent.core.model import AgentState, JobTerms
from rdzv.agent.handover.handover_state import KeptPlacement, KeptState
from rdzv.agent.handover.runner_adoption import AdoptedRunner, RunnerAdoption
from rdzv.agent.inventory.health import NodeHealth, describe
from rdzv.agent.launch.launch import Launch
from rdzv.agent.node import placements as module
from rdzv.agent.node.placements import Placements
from rdzv.agent.node.submitted_launch import Surroundings
from rdzv.agent.output.run_files import Written
from rdzv.agent.output.run_folders import RunFolders
from rdzv.agent.workers.fates import NodeOutcome
from rdzv.client import Endpoint
from rdzv.core.fleet.node_resources import Gpu, NodeResources
from rdzv.core.model import JobSpec, Offer, Result, Settings
from rdzv.errors import InvalidRequestError
from rdzv.messages import Placed, Withdrawn
from tests.support.agent_jobs import PATIENCE_S, until

pytestmark = pytest.mark.slow

BUG = ZeroDivisionError("a bug")
BUG_TOLD = "a bug in its rdzv-agent: ZeroDivisionError('a bug')"
SUCCEEDED = NodeOutcome(0, "the job has succeeded", result=Result.SUCCEEDED)


class Driver:
    """A job's driver, controlled by the story."""

    def __init__(self, node: Node, launch: Launch, run: str, _: Any, examine: Any) -> None:
        self.examine = examine
        self.rdzv_id, self.run, self.launch = launch.job.rdzv_id, run, launch
        self.written = Written()
        self.joined = self.handed_over = False
        self.leaving = False
        self.posted: list[events.Event] = []
        self.failed = ""
        self.closing = False
        self.closed = 0
        self.trouble: Exception | None = None
        node.made.append(self)
        self.runner_pid = 100 + len(node.made)
        self.survives = 0
        """How often its processes survive SIGKILL."""
        self._node = node
        self.ended: asyncio.Future[NodeOutcome] = asyncio.get_running_loop().create_future()

    async def prepare(self) -> None:
        await self._node.ready.wait()
        self.resume()

    def resume(self, *_: Any) -> None:
        if self._node.trouble is not None:
            raise self._node.trouble
        self.joined = True
        self._node.drivers[self.rdzv_id, self.run] = self

    async def get_ready(self, why_not: str = "") -> None:
        self.why_not = why_not

    def describe(self) -> str:
        return "running"

    async def hand_over(self, within_ms: int) -> None:
        self.handed_over = True
        self.posted.append(Withdrawn("job-7", self.run, f"within {within_ms} ms"))

    def post(self, event: events.Event) -> None:
        self.posted.append(event)
        if not self.ended.done():
            self.end(NodeOutcome(75, "it leaves"))

    def end(self, outcome: NodeOutcome | Exception = SUCCEEDED) -> None:
        if isinstance(outcome, Exception):
            self.ended.set_exception(outcome)
        else:
            self.ended.set_result(outcome)

    async def close(self) -> None:
        self.closing = True
        await self._node.may_close.wait()
        self.closed += 1
        if self.survives >= self.closed:
            raise TimeoutError
        if self.trouble is not None:
            raise self.trouble

    def say_failed(self, reason: str) -> None:
        self.failed = reason


class Reading:
    def __init__(self) -> None:
        self.forgotten: list[str] = []

    def forget(self, rdzv_id: str) -> None:
        self.forgotten.append(rdzv_id)


class Check:
    """A check that returns what the story says."""

    name, timeout_s, wrong = "fan", 5.0, ""

    def __init__(self) -> None:
        self.unused: list[frozenset[str]] = []

    async def look(self, unused_gpus: frozenset[str]) -> str:
        self.unused.append(unused_gpus)
        return self.wrong

    async def lift(self) -> None:
        self.wrong = ""


class Node:
    """One node: its placements, and the messages that the server gets."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **resources: Any) -> None:
        self.folder = folder
        self.drivers: dict[tuple[str, str], Driver] = {}
        self.declined: list[tuple[str, str, str]] = []
        self.removed: list[str] = []
        self.said: list[set[str]] = []
        self.log_reader = Reading()
        self.ready, self.may_close = asyncio.Event(), asyncio.Event()
        self.former_are_gone = asyncio.Event()
        self.former_are_gone.set()
        self.ready.set()
        self.may_close.set()
        self.trouble: Exception | None = None
        self.made: list[Driver] = []
        self.runners: set[int] = set()
        monkeypatch.setattr(module, "JobDriver", lambda made, _, *more: Driver(self, made, *more))
        monkeypatch.setattr(module, "CLOSE_AGAIN_S", 0.001)
        around = Surroundings("n1", (Endpoint("head", 1),), {"PATH": "/usr/bin:/bin"})
        has = NodeResources(**{"capacity": 2, **resources})
        self.check = Check()
        self.health = NodeHealth((self.check,))
        self.not_now: list[tuple[str, str, str]] = []
        self.failing_said: list[str] = []
        self.placements = Placements(
            self,  # type: ignore[arg-type]
            has,
            around,
            RunFolders(folder),
            self,  # type: ignore[arg-type]
            RunnerAdoption(folder, "n1"),
            self.health,
        )

    # ------------------------------------------------------------------ what a link has

    def say_holdings(self) -> None:
        self.said.append(self.held())

    def decline(self, rdzv_id: str, run: str, reason: str) -> None:
        self.declined.append((rdzv_id, run, reason))

    def decline_for_now(self, rdzv_id: str, run: str, reason: str) -> None:
        self.not_now.append((rdzv_id, run, reason))

    def say_health(self) -> None:
        self.failing_said.append(describe(self.placements.failing))

    def remove(self, driver: Driver) -> None:
        self.removed.append(driver.rdzv_id)

    # ------------------------------------------------------------------ what remembers runners

    def note(self, pid: int) -> None:
        self.runners.add(pid)

    def forget(self, pid: int) -> None:
        self.runners.discard(pid)

    async def former_gone(self) -> None:
        await self.former_are_gone.wait()

    # ------------------------------------------------------------------ the story's side

    def place(self, rdzv_id: str = "job", *args: str, run: str = "r1", **spec: Any) -> None:
        given = {"chdir": str(self.folder), "local_world_size": 1, **spec}
        made = JobSpec(args=("--no-python", *args, "/bin/true"), **given)
        self.placements.placed(Placed(rdzv_id, run, made))

    def held(self) -> set[str]:
        return {holding.rdzv_id for holding in self.placements.holdings()}

    async def driver(self, rdzv_id: str = "job", run: str = "r1") -> Driver:
        """Wait until a job runs."""
        await until(lambda: (rdzv_id, run) in self.drivers)
        return self.drivers[rdzv_id, run]

    async def until_free(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self.placements.all_gone()


@contextlib.asynccontextmanager
async def a_node(
    folder: Path, monkeypatch: pytest.MonkeyPatch, **resources: Any
) -> AsyncIterator[Node]:
    node = Node(folder, monkeypatch, **resources)
    yield node
    node.ready.set()
    node.may_close.set()
    node.placements.leave(signal.SIGTERM, "SIGTERM")
    await node.until_free()


@pytest.fixture
async def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Node]:
    async with a_node(tmp_path, monkeypatch) as made:
        yield made


@pytest.fixture
async def gpu_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Node]:
    gpus = tuple(Gpu(f"GPU-{letter}", "", 0) for letter in "abc")
    async with a_node(tmp_path, monkeypatch, gpus=gpus, capacity=3) as made:
        yield made


# ------------------------------------------------------------------ from placed to gone


async def test_a_job_is_held_from_when_it_is_heard_of_until_nothing_is_left(node: Node) -> None:
    node.may_close.clear()
    node.place()
    assert node.said == [{"job"}]
    driver = await node.driver()
    driver.end()
    await asyncio.sleep(0)
    assert node.held() == {"job"}
    assert node.runners == {driver.runner_pid}
    node.may_close.set()
    await node.until_free()
    assert node.runners == set()
    assert node.said[-1] == set()
    assert (driver.closed, node.removed, node.log_reader.forgotten) == (1, ["job"], ["job"])
    assert node.declined == []


async def test_whatever_is_heard_while_processes_are_killed_hastens_nothing(node: Node) -> None:
    node.may_close.clear()
    node.place()
    driver = await node.driver()
    driver.end()
    await until(lambda: driver.closing)
    node.placements.withdrawn(Withdrawn("job", "r1", "the job has succeeded"))
    node.placements.leave(signal.SIGTERM, "SIGTERM")
    await asyncio.sleep(0.01)
    assert node.held() == {"job"}
    node.may_close.set()
    await node.until_free()
    assert (driver.closed, node.removed) == (1, ["job"])


@pytest.mark.quick
async def test_a_placement_that_is_repeated_changes_nothing(node: Node) -> None:
    await node.placements.adopt([orphan(node)])
    node.place("old")
    node.place()
    await node.driver()
    node.place()
    await asyncio.sleep(0.01)
    assert len(node.made) == 2


async def test_a_later_run_waits_until_nothing_is_left_of_the_one_before(node: Node) -> None:
    node.place(run="r1")
    first = await node.driver(run="r1")
    node.may_close.clear()
    node.place(run="r2")
    first.end()
    await asyncio.sleep(0.01)
    assert ("job", "r2") not in node.drivers
    assert {holding.run for holding in node.placements.holdings()} == {"r1", "r2"}
    node.may_close.set()
    (await node.driver(run="r2")).end()
    await node.until_free()


async def test_the_folder_of_a_run_is_its_own(node: Node) -> None:
    node.place("a:b")
    driver = await node.driver("a:b")
    assert driver.launch.output.run_dir == node.folder / "runs" / "a:b" / "r1"


# ------------------------------------------------------------------ what cannot be taken up


@pytest.mark.quick
async def test_a_folder_that_is_not_there_is_declined_by_name(node: Node) -> None:
    node.place(chdir="/no/such")
    await node.until_free()
    ((rdzv_id, run, reason),) = node.declined
    assert (rdzv_id, run) == ("job", "r1")
    assert reason.startswith("the folder '/no/such' cannot be used on this node (No such file")
    assert node.drivers == {}
    assert not (node.folder / "runs").exists()


@pytest.mark.quick
async def test_more_gpus_than_there_are_is_declined(gpu_node: Node) -> None:
    gpu_node.place(gpus_per_node=4)
    await gpu_node.until_free()
    ((_, _, reason),) = gpu_node.declined
    assert "4 GPUs are requested, but this node has 3" in reason


@pytest.mark.parametrize(
    "trouble",
    [InvalidRequestError("no such handler"), OSError(24, "Too many open files"), KeyError("bug")],
)
async def test_trouble_before_it_has_joined_is_declined(node: Node, trouble: Exception) -> None:
    node.place("other")
    other = await node.driver("other")
    node.trouble = trouble
    node.place()
    await until(lambda: node.held() == {"other"})
    assert [(rdzv_id, run) for rdzv_id, run, _ in node.declined] == [("job", "r1")]
    other.end()
    await node.until_free()
    assert len(node.declined) == 1


@pytest.mark.parametrize(
    ("joined", "end", "failed", "declined"),
    [
        pytest.param(
            False, NodeOutcome(2, "settings differ"), "", ["settings differ"], id="refused"
        ),
        pytest.param(True, BUG, BUG_TOLD, [], id="a bug after it has joined"),
        pytest.param(False, BUG, BUG_TOLD, [BUG_TOLD], id="a bug before it has heard that it has"),
    ],
)
async def test_what_ends_badly_is_said_and_declined_unless_it_has_joined(
    node: Node, joined: bool, end: NodeOutcome | Exception, failed: str, declined: list[str]
) -> None:
    node.place()
    driver = await node.driver()
    driver.joined = joined
    driver.end(end)
    await node.until_free()
    assert (driver.closed, driver.failed) == (1, failed)
    assert node.declined == [("job", "r1", reason) for reason in declined]


async def test_what_can_not_be_put_away_holds_up_nothing(node: Node) -> None:
    node.place()
    driver = await node.driver()
    driver.trouble = KeyError("bug")
    driver.end()
    await node.until_free()
    assert (driver.closed, node.removed, node.runners) == (1, ["job"], set())


# ------------------------------------------------------------------ GPUs and places


def visible(driver: Driver) -> str:
    return driver.launch.environ["CUDA_VISIBLE_DEVICES"]


@pytest.mark.quick
async def test_no_gpu_is_given_twice_and_jobs_wait_for_those_held(gpu_node: Node) -> None:
    gpu_node.place("two", gpus_per_node=2)
    two = await gpu_node.driver("two")
    gpu_node.place("again", gpus_per_node=2)
    gpu_node.place("one")
    one = await gpu_node.driver("one")
    assert (visible(two), visible(one)) == ("GPU-a,GPU-b", "GPU-c")
    assert gpu_node.held() == {"two", "again", "one"}
    gpu_node.may_close.clear()
    two.end()
    await asyncio.sleep(0.01)
    assert ("again", "r1") not in gpu_node.drivers
    gpu_node.may_close.set()
    assert visible(await gpu_node.driver("again")) == "GPU-a,GPU-b"


async def test_a_job_without_gpus_sees_none_and_one_that_is_counted_all(gpu_node: Node) -> None:
    gpu_node.place("none", gpus_per_node=0)
    assert visible(await gpu_node.driver("none")) == ""
    gpu_node.place("counted", "--nproc-per-node=cpu", local_world_size=0)
    assert visible(await gpu_node.driver("counted")) == "GPU-a,GPU-b,GPU-c"


async def test_who_waits_for_gpus_is_served_in_order(gpu_node: Node) -> None:
    gpu_node.place("all", gpus_per_node=3)
    holder = await gpu_node.driver("all")
    for name in ("first", "second"):
        gpu_node.place(name, gpus_per_node=3)
    # They examine their folders in threads; either may finish first.
    queue = gpu_node.placements.ledger
    await until(lambda: len(queue.waiting) == 2)
    order = [held.name for held in queue.waiting]
    holder.end()
    served = await gpu_node.driver(order[0])
    assert (order[1], "r1") not in gpu_node.drivers
    served.end()
    await gpu_node.driver(order[1])


async def test_processes_that_survive_sigkill_keep_their_gpus(gpu_node: Node) -> None:
    gpu_node.place("stuck", gpus_per_node=3)
    driver = await gpu_node.driver("stuck")
    driver.survives = 3
    driver.end()
    await gpu_node.until_free()
    assert driver.closed == 4


async def test_a_node_of_more_capacity_takes_those_who_wait(node: Node) -> None:
    for name in ("a", "b", "c"):
        node.place(name)
    await until(lambda: len(node.drivers) == 2)
    (waiting,) = {"a", "b", "c"} - {rdzv_id for rdzv_id, _ in node.drivers}
    node.placements.change(NodeResources(capacity=3), {"PATH": "/bin", "NEW": "1"})
    driver = await node.driver(waiting)
    assert driver.rdzv_id == waiting
    node.drivers["a", "r1"].end()
    node.place("d")
    assert (await node.driver("d")).launch.environ["NEW"] == "1"


# ------------------------------------------------------------------ withdrawn


async def test_a_job_that_gets_ready_is_withdrawn_at_once(node: Node) -> None:
    node.ready.clear()
    node.place()
    node.placements.withdrawn(Withdrawn("job", "r1", "scaled down"))
    await node.until_free()
    node.place()
    await until(lambda: node.made)
    node.placements.withdrawn(Withdrawn("job", "r1", "scaled down"))
    await node.until_free()
    assert (node.drivers, node.declined, node.said[-1]) == ({}, [], set())


async def test_a_job_that_waits_for_gpus_is_withdrawn_at_once(gpu_node: Node) -> None:
    gpu_node.place("all", gpus_per_node=3)
    await gpu_node.driver("all")
    gpu_node.place("waits")
    await until(lambda: gpu_node.placements.ledger.waiting)
    gpu_node.placements.withdrawn(Withdrawn("waits", "r1", "cancelled"))
    await until(lambda: gpu_node.held() == {"all"})
    assert not gpu_node.placements.ledger.waiting


async def test_a_job_that_runs_is_withdrawn_by_its_driver(node: Node) -> None:
    node.place()
    driver = await node.driver()
    # What is not here changes nothing.
    node.placements.withdrawn(Withdrawn("job", "r2", "another run"))
    node.placements.withdrawn(Withdrawn("other", "r1", "another job"))
    assert driver.posted == []
    node.placements.withdrawn(Withdrawn("job", "r1", "scaled down"))
    await node.until_free()
    assert driver.posted == [Withdrawn("job", "r1", "scaled down")]
    assert node.declined == []


async def test_a_job_that_was_withdrawn_can_be_placed_again(node: Node) -> None:
    node.place()
    first = await node.driver()
    node.may_close.clear()
    node.placements.withdrawn(Withdrawn("job", "r1", "scaled down"))
    node.place()
    node.may_close.set()
    await until(lambda: node.drivers["job", "r1"] is not first)
    assert first.closed == 1


# ------------------------------------------------------------------ the end


async def test_a_signal_makes_every_job_leave_and_takes_up_no_other(node: Node) -> None:
    node.place("a")
    node.place("b")
    drivers = [await node.driver(name) for name in ("a", "b")]
    node.may_close.clear()
    node.placements.leave(signal.SIGTERM, "SIGTERM")
    node.placements.leave(signal.SIGINT, "SIGINT")
    node.place("c")
    node.may_close.set()
    await node.until_free()
    told = [
        events.Signalled(signal.SIGTERM, "SIGTERM"),
        events.Signalled(signal.SIGINT, "SIGINT"),
    ]
    assert [driver.posted for driver in drivers] == [told, told]
    assert ("c", "r1") not in node.drivers


async def test_an_agent_that_ends_does_not_wait_for_what_survives_sigkill(node: Node) -> None:
    node.place()
    driver = await node.driver()
    driver.survives = 1_000_000
    node.placements.leave(signal.SIGTERM, "SIGTERM")
    await node.until_free()


# ------------------------------------------------------------------ a node that is not well


async def test_a_node_that_is_not_well_takes_nothing_up_for_now_and_says_why(node: Node) -> None:
    node.check.wrong = "stands still"
    node.place()
    await until(lambda: bool(node.not_now))
    assert node.not_now == [("job", "r1", "this node is unhealthy: fan stands still")]
    # The server first learns that nothing more may be placed here.
    assert node.failing_said == ["fan stands still"]
    await node.until_free()
    assert (node.made, node.declined) == ([], [])
    # It recovers: a job declined for the time being is accepted when it comes again.
    node.check.wrong = ""
    await node.health.look(fresh_s=0.0)
    assert node.failing_said == ["fan stands still", ""]
    node.place()


# ------------------------------------------------------------------ from agent to agent


def orphan(node: Node, *gpus: str, args: tuple[str, ...] = ("--no-python", "/bin/true")) -> Any:
    """Return an adopted runner of a job that has these GPUs."""
    spec = JobSpec(args=args, chdir=str(node.folder), local_world_size=1)
    placement = KeptPlacement("n1", "i1", "old", "r1", spec, len(gpus), gpus, {"OF": "before"})
    job = JobTerms("old", "n1", Settings(1, 1), local_world_size=3)
    state = KeptState(AgentState(job, run="r1"), Offer("127.0.0.1", 3))
    left: list[bool] = []
    runner = SimpleNamespace(
        path=node.folder / "socket",
        hello=SimpleNamespace(pid=77),
        left=left,
        leave=lambda: left.append(True),
    )
    return AdoptedRunner(runner, placement, state)  # type: ignore[arg-type]


async def test_an_adopted_job_keeps_its_gpus_and_its_place(gpu_node: Node) -> None:
    await gpu_node.placements.adopt([orphan(gpu_node, "GPU-b", "GPU-c")])
    assert gpu_node.held() == {"old"}
    assert gpu_node.runners == {77}
    old = gpu_node.drivers["old", "r1"]
    assert old.launch.job.local_world_size == 3
    assert visible(old) == "GPU-b,GPU-c"
    assert old.launch.environ["OF"] == "before"
    gpu_node.place("one", gpus_per_node=1)
    gpu_node.place("two", gpus_per_node=2)
    assert visible(await gpu_node.driver("one")) == "GPU-a"
    assert ("two", "r1") not in gpu_node.drivers
    old.end()
    assert visible(await gpu_node.driver("two")) == "GPU-b,GPU-c"


async def test_workers_run_on_whose_arguments_are_refused_today(node: Node) -> None:
    """As by a stricter parser after an upgrade: they start no round, and none is ended."""
    await node.placements.adopt([orphan(node, args=("--no-such-flag", "/bin/true"))])
    assert node.held() == {"old"}
    driver = node.drivers["old", "r1"]
    assert driver.launch.job.local_world_size == 3
    await asyncio.sleep(0)
    assert "--no-such-flag" in driver.why_not


@pytest.mark.parametrize("gpus", [("a", "b"), ()])
async def test_workers_keep_gpus_that_the_configuration_names_no_more(
    gpus: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has = tuple(Gpu(f"GPU-{letter}", "", 0) for letter in gpus)
    async with a_node(tmp_path, monkeypatch, gpus=has) as node:
        await keep_gpus(node)


async def keep_gpus(node: Node) -> None:
    await node.placements.adopt([orphan(node, "GPU-a", "GPU-gone")])
    driver = node.drivers["old", "r1"]
    assert visible(driver) == "GPU-a,GPU-gone"
    await asyncio.sleep(0)
    assert driver.why_not == ""


async def test_an_unusable_folder_stops_nobody(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RunFolders, "open", full)
    await node.placements.adopt([orphan(node)])
    driver = node.drivers["old", "r1"]
    await asyncio.sleep(0)
    assert "No space left" in driver.why_not


async def test_one_that_can_not_be_gone_on_with_is_left_to_another_agent_and_not_held(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    node.trouble = ValueError("of a state that makes no sense")
    lost = orphan(node)
    await node.placements.adopt([lost])
    assert lost.runner.left == [True]
    assert "old: cannot adopt it; its workers continue until the server gives" in caplog.text
    assert (node.held(), node.runners) == (set(), set())
    node.trouble = None
    await node.placements.adopt([orphan(node)])


async def test_nothing_begins_while_somebody_of_a_former_agent_is_left(node: Node) -> None:
    node.former_are_gone.clear()
    node.place()
    await asyncio.sleep(0.01)
    assert node.made == []
    assert node.held() == {"job"}
    node.former_are_gone.set()
    await node.driver()


async def test_a_job_is_asked_after_on_its_own_gpus_before_it_goes_on(gpu_node: Node) -> None:
    gpu_node.place("other")
    await gpu_node.driver("other")
    gpu_node.place()
    driver = await gpu_node.driver()
    gpu_node.check.wrong = "GPU-b is lost"
    # Findings from before its workers failed are outdated.
    assert await driver.examine() == "fan GPU-b is lost"
    assert gpu_node.check.unused[-1] == {"GPU-b", "GPU-c"}


async def test_what_is_handed_over_is_not_ended_here(node: Node) -> None:
    node.place("one")
    one = await node.driver("one")
    await node.placements.hand_over(9_000)
    node.place("two")
    assert [str(event) for event in one.posted] == [str(Withdrawn("job-7", "r1", "within 9000 ms"))]
    (task,) = [task for task in asyncio.all_tasks() if task.get_name() == "job one"]
    task.cancel()
    await asyncio.wait([task])
    assert one.closed == 0
    assert ("two", "r1") not in node.drivers
    await node.until_free()


# ------------------------------------------------------------------ a node that is about to leave

GIVEN = events.NoticeGiven(60_000, "drained by ada")


async def test_a_node_about_to_leave_takes_up_and_declines_nothing(node: Node) -> None:
    node.ready.clear()
    node.place("early")
    await until(lambda: node.made)
    node.placements.noticed(GIVEN)
    await node.until_free()
    node.place("late")
    assert node.held() == set()
    # It is able to run them: they may be placed here again another time.
    assert node.declined == []
    node.ready.set()
    node.placements.noticed(events.NoticeLifted())
    node.place("late")
    assert node.held() == {"late"}


async def test_a_job_that_runs_ends_by_its_own_driver(node: Node) -> None:
    node.place()
    driver = await node.driver()
    node.placements.noticed(GIVEN)
    # The link has sent the decline; nothing has to be ended here.
    assert (driver.posted, node.held()) == ([], {"job"})
    driver.joined = False
    driver.end(NodeOutcome(75, "drained by ada"))
    await node.until_free()
    assert node.declined == []


async def test_what_a_lifted_drain_has_not_ended_may_decline_again(node: Node) -> None:
    node.place()
    driver = await node.driver()
    node.placements.noticed(GIVEN)
    node.placements.noticed(events.NoticeLifted())
    driver.joined = False
    driver.end(NodeOutcome(1, "no such script"))
    await node.until_free()
    assert node.declined == [("job", "r1", "no such script")]
