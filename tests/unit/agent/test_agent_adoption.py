"""A new agent continues where the previous one was killed, at whatever moment that was.

The runner is a fake: it records requests, and keeps the state it is given. An agent dies by doing
nothing any more; its successor knows only what the runner can report.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rdzv.agent.core import events
from rdzv.agent.core.commands import StopWorkers
from rdzv.agent.core.model import AgentState, JobTerms, Leaving, Outcome, Phase
from rdzv.agent.handover import handover_state, runner_adoption
from rdzv.agent.handover.handover_state import HandoverPlan, KeptPlacement, KeptState, KeptStop
from rdzv.agent.handover.runner_adoption import RunnerAdoption
from rdzv.agent.job.job_driver import JobDriver
from rdzv.agent.node.node import daemon_identity
from rdzv.agent.output.run_files import WorkerOutput
from rdzv.agent.runner_link.found_runner import NotAdoptableError, SilentRunnerError
from rdzv.agent.runner_link.runner_link import RunnerHello
from rdzv.agent.server_link.link import ServerLink
from rdzv.client import Endpoint
from rdzv.core import model
from rdzv.messages import Closed, Joined, SnapshotWatermark, Withdrawn
from rdzv.runtime.clock import monotonic_ms
from rdzv.structs import replace
from rdzv.v1 import rdzv_pb2 as pb
from tests.support.agent_jobs import (
    PATIENCE_S,
    FakeLink,
    FakeRunner,
    a_launch,
    is_alive,
    round_over,
    until,
    use_runner,
)

pytestmark = pytest.mark.slow

JOB = JobTerms("job", "n1", model.Settings(1, 2), local_world_size=2)
LINE = model.Assignment("job-7", "r1", 4, 1, 2, 2, 4, 2, 4, "127.0.0.1", 29500, True, 1, 3)
PLACEMENT = KeptPlacement(
    "n1",
    "instance-1",
    "job",
    "r1",
    model.JobSpec(args=("train.py",), env=(("A", "b"),), chdir="/srv", local_world_size=2),
    gpus=2,
    granted=("GPU-a", "GPU-b"),
    environ={"PATH": "/bin", "BYTES": "\udcff"},
)
FULL = KeptState(
    state=AgentState(
        JOB,
        phase=Phase.LEAVING,
        run="r1",
        assignment=LINE,
        left_round=3,
        alive=frozenset({1}),
        workers_gone=False,
        failures=(model.Failure(0, 2, 99, None, 9, "killed", "a \udcff trace", 12),),
        stopping_since_ms=13,
        stuck_pids=(99,),
        fenced=True,
        store_host_due_ms=5,
        store_host_failed="it exited",
        disconnected_since_ms=None,
        idle_since_ms=3,
        leaving=Leaving(model.LeaveCause.SIGNAL, "told to", 143),
        outcome=Outcome(
            1,
            "failed",
            (model.Failure(0, 0, 7, 1, None, "boom", "", 5, node_id="n2", address="10.0.0.2"),),
            model.Result.FAILED,
        ),
    ),
    offer=model.Offer("10.0.0.1", 2, topology="rack-1", host_name="n1.lan", machine="boot/net"),
    joined=True,
    stop=KeptStop(StopWorkers(4, 5_000, 15), 14),
    outputs=(WorkerOutput(Path("/a/stdout.log"), Path("/a/stderr.log"), Path("/a/error.json")),),
    progress_folder=Path("/run/rdzv_progress_1"),
)


# ---------------------------------------------------------------------- what is kept


@pytest.mark.quick
def test_all_that_is_kept_is_read_again() -> None:
    assert handover_state.decode_placement(handover_state.encode(PLACEMENT)) == PLACEMENT
    assert handover_state.decode_state(handover_state.encode(FULL)) == FULL


@pytest.mark.quick
def test_what_a_later_version_adds_is_passed_over() -> None:
    raw = json.loads(handover_state.encode(FULL))
    raw["later"] = raw["state"]["later"] = {"a": 1}
    assert handover_state.decode_state(json.dumps(raw)) == FULL


@pytest.mark.quick
@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "it keeps no placement, because its job had not begun"),
        ("{", "cannot read its placement"),
        ("[]", "cannot read its placement"),
        ("{}", "cannot read its placement: .*node_id"),
    ],
)
def test_what_can_not_be_read_says_why(text: str | None, why: str) -> None:
    with pytest.raises(NotAdoptableError, match=why):
        handover_state.decode_placement(text)


# ---------------------------------------------------------------------- the instance


@pytest.mark.quick
async def test_without_a_runner_to_adopt_it_is_a_new_instance(tmp_path: Path) -> None:
    first = RunnerAdoption(tmp_path, "n1")
    assert await first.adopt_runners() == []
    first.note_welcome(7, 2, 60_000)
    assert (tmp_path / "instance.json").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "runners").stat().st_mode & 0o777 == 0o700
    second = RunnerAdoption(tmp_path, "n1")
    assert await second.adopt_runners() == []
    assert second.instance.instance != first.instance.instance
    assert second.instance.incarnation == 0


def found(path: Path, placement: KeptPlacement = PLACEMENT) -> Any:
    def note(what: str) -> None:
        made.did.append(what)

    keeps = {
        handover_state.PLACEMENT: handover_state.encode(placement),
        handover_state.STATE: handover_state.encode(FULL),
    }
    made = SimpleNamespace(path=path, did=[])
    made.hello = RunnerHello(1, None, {}, frozenset(), kept=keeps)
    made.adopt, made.leave = lambda: note("adopt"), lambda: note("leave")
    return made


@pytest.fixture
def meets(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Set which runner answers at which socket."""
    there: dict[str, Any] = {}

    async def meet(path: Path, timeout_s: float = 0.0) -> Any:
        answer = there.get(path.name)
        if isinstance(answer, list):
            answer = answer.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(runner_adoption.FoundRunner, "meet", meet)
    return there


async def heir(
    folder: Path, instance: str = "instance-1", said: dict[str, Any] | None = None
) -> RunnerAdoption:
    """Return the runtime directory of an agent that was killed."""
    former = RunnerAdoption(folder, "n1")
    former.instance = replace(former.instance, instance=instance)
    (folder / "runners").mkdir(exist_ok=True)
    former.note_welcome(7, 2, 60_000)
    (folder / "runners" / "a.sock").touch()
    if said:
        file = folder / "instance.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **said}))
    return RunnerAdoption(folder, "n1")


async def test_with_a_runner_it_is_the_same_instance(tmp_path: Path, meets: dict[str, Any]) -> None:
    adopting = await heir(tmp_path)
    (tmp_path / "runners" / "stale.sock").touch()
    meets["a.sock"] = found(tmp_path / "a")
    (orphan,) = await adopting.adopt_runners()
    assert (orphan.placement, orphan.state) == (PLACEMENT, FULL)
    assert meets["a.sock"].did == ["adopt"]
    assert adopting.instance == runner_adoption.NodeInstance("instance-1", 7, 2, 60_000)
    assert [path.name for path in (tmp_path / "runners").iterdir()] == ["a.sock"]
    # Runners wait for a lease, also if their agent has not reached a server.
    who = daemon_identity("n1", adopting.instance)
    link = ServerLink([Endpoint("127.0.0.1", 1)], who)
    assert (link.tolerated_ms, link.orphan_timeout_ms) == (60_000, 60_000)
    link = ServerLink([Endpoint("127.0.0.1", 1)], replace(who, lease_ms=None))
    assert (link.tolerated_ms, link.orphan_timeout_ms) == (5_000, 15_000)


async def test_a_lease_that_is_unknown_is_the_usual(tmp_path: Path, meets: dict[str, Any]) -> None:
    said = {"instance": "instance-1", "incarnation": 7, "leadership": 2, "lease_ms": None}
    adopting = await heir(tmp_path, said={"instance": said})
    meets["a.sock"] = found(tmp_path / "a")
    await adopting.adopt_runners()
    assert adopting.instance == runner_adoption.NodeInstance("instance-1", 7, 2)


@pytest.mark.parametrize(
    ("said", "placement", "why"),
    [
        ({"boot_id": "another"}, PLACEMENT, "belongs to instance instance-1 of this node, not to"),
        (
            {},
            replace(PLACEMENT, instance="other"),
            "belongs to instance other of this node, not to",
        ),
        ({}, replace(PLACEMENT, node_id="n9"), "it belongs to node n9, and this one is n1"),
        ({"instance": "x"}, PLACEMENT, "belongs to instance instance-1 of this node, not to"),
    ],
)
async def test_a_runner_of_somebody_else_is_left_to_its_end(
    tmp_path: Path,
    meets: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
    said: dict[str, Any],
    placement: KeptPlacement,
    why: str,
) -> None:
    adopting = await heir(tmp_path, said=said)
    meets["a.sock"] = found(tmp_path / "a", placement)
    assert await adopting.adopt_runners() == []
    assert meets["a.sock"].did == ["leave"]
    assert why in caplog.text
    assert adopting.instance.instance != "instance-1"


async def test_one_that_can_not_be_adopted_keeps_nobody_from_the_others(
    tmp_path: Path, meets: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    adopting = await heir(tmp_path)
    (tmp_path / "runners" / "b.sock").touch()
    meets["a.sock"] = NotAdoptableError("pid 4 speaks version 9")
    meets["b.sock"] = found(tmp_path / "b")
    assert len(await adopting.adopt_runners()) == 1
    assert "is not adopted; it ends after its orphan timeout: pid 4 speaks version 9" in caplog.text


@pytest.fixture
def hung() -> Iterator[subprocess.Popen[bytes]]:
    """A process that does not answer, and has a child that has left its session."""
    script = "setsid env -i sleep 600 & echo $!; exec sleep 600"
    with subprocess.Popen(["/bin/sh", "-c", script], stdout=subprocess.PIPE) as process:
        yield process
        process.kill()


def child_of(process: subprocess.Popen[bytes]) -> int:
    assert process.stdout is not None
    return int(process.stdout.readline())


async def test_a_runner_that_hangs_is_killed_with_its_descendants(
    tmp_path: Path, meets: dict[str, Any], hung: subprocess.Popen[bytes]
) -> None:
    """It would never end, and the node would start no job before it has."""
    adopting, child = await heir(tmp_path), child_of(hung)
    meets["a.sock"] = [SilentRunnerError(hung.pid, 3.0), SilentRunnerError(hung.pid, 16.0), None]
    assert await adopting.adopt_runners() == []
    await until(lambda: hung.poll() is not None)
    assert hung.returncode == -signal.SIGKILL and not is_alive(child)
    await until(lambda: not list((tmp_path / "runners").iterdir()))


async def test_a_runner_that_answers_late_is_left_to_its_end(
    tmp_path: Path, meets: dict[str, Any], hung: subprocess.Popen[bytes]
) -> None:
    adopting, child, late = await heir(tmp_path), child_of(hung), found(tmp_path / "a")
    meets["a.sock"] = [SilentRunnerError(hung.pid, 3.0), late]
    assert await adopting.adopt_runners() == []
    await until(lambda: late.did)
    assert late.did == ["leave"] and hung.poll() is None and is_alive(child)
    os.kill(child, signal.SIGKILL)


# ---------------------------------------------------------------------- one job


class Story:
    """One job on one node, whose agent dies now and then."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runner = FakeRunner()
        self.launch = a_launch(folder, JOB)
        self.drivers: list[JobDriver] = []
        self.new_agent()

    @property
    def driver(self) -> JobDriver:
        return self.drivers[-1]

    @property
    def kept(self) -> KeptState:
        return handover_state.decode_state(self.runner.keeps[handover_state.STATE])

    def new_agent(self) -> None:
        self.link = FakeLink()
        keeping = HandoverPlan(self.folder / "socket", PLACEMENT)
        self.drivers.append(JobDriver(self.launch, self.link, "r1", keeping))  # type: ignore[arg-type]

    async def die_and_come_back(self, why_not: str = "") -> None:
        """Let the agent die without a word, and start its successor."""
        self.runner.tell = None
        self.runner.deaf_to.clear()
        self.new_agent()
        self.driver.resume(self.runner, self.kept)  # type: ignore[arg-type]
        await self.driver.get_ready(why_not)

    async def all_gone(self) -> None:
        """Let no worker of round 0 be left, and wait until the node joins again."""
        self.runner.tell(events.WorkersGone(0))
        await until(lambda: self.belief().phase == pb.Belief.JOINING)

    def belief(self) -> pb.Belief:
        belief = self.driver.belief()
        assert belief is not None
        return belief

    async def begin_round(self, line: model.Assignment) -> None:
        """Complete a round, and wait until the workers' files exist or the round has failed."""
        said = len(self.link.said)
        self.driver.post(line)
        await until(
            lambda: len(self.link.said) > said or self.driver.written.at(line.round) is not None
        )

    def line(self, round_: int = 0, **changes: Any) -> model.Assignment:
        line = model.Assignment("job-7", "r1", round_, 1, 2, 2, 4, 2, 4, "127.0.0.1", 1, True, 0, 3)
        return replace(line, **changes)


@pytest.fixture
async def s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Story]:
    made = Story(tmp_path)

    use_runner(monkeypatch, made.runner)
    await made.driver.prepare()
    yield made
    for driver in made.drivers:
        await driver.close()


async def test_a_node_that_waits_goes_on_waiting(s: Story) -> None:
    s.driver.post(Joined("job-7", "r1", 1))
    await s.die_and_come_back()
    assert (s.belief().phase, s.driver.joined) == (pb.Belief.JOINING, True)
    await s.begin_round(s.line())
    assert s.runner.asked == [("start", 0, 2)]


@pytest.mark.quick
async def test_a_round_runs_on_and_is_believed_in(s: Story) -> None:
    await s.begin_round(s.line())
    before = s.belief()
    await s.die_and_come_back()
    assert (s.belief().phase, s.belief().round) == (pb.Belief.RUNNING, before.round)
    assert s.runner.asked == [("start", 0, 2)]
    written = s.driver.written.at(0)
    assert written is not None and not s.driver.written.is_over(0)
    assert str(written.workers[1].stdout) == str(s.folder / "run/round_0/1/stdout.log")


async def test_what_is_held_in_memory_is_known_to_the_next_agent(s: Story) -> None:
    mark = model.SnapshotMark(0, 40, "f00d")
    await s.begin_round(s.line())
    # Workers may not overwrite a step that is whole.
    s.driver.post(SnapshotWatermark("job-7", "r1", mark))
    assert s.runner.announced == [(mark, None)]
    s.runner.tell(events.SnapshotsChanged((model.Snapshot(0, mark, bytes=1_000, digest="d"),)))
    await s.die_and_come_back()
    (held,) = s.belief().join.snapshots
    assert (held.mark.step, held.mark.series, held.bytes) == (40, "f00d", 1_000)
    # The next agent asks for all held snapshots, and receives them again.
    assert s.runner.held_for == [None, None]


async def test_an_agent_that_dies_before_a_start_leaves_it_to_the_next(s: Story) -> None:
    s.runner.deaf_to.add("start")
    await s.begin_round(s.line())
    assert s.runner.asked == []
    await s.die_and_come_back()
    await until(lambda: s.runner.asked)
    assert s.runner.asked == [("start", 0, 2)]


async def test_a_round_whose_files_are_not_made_keeps_none_of_the_round_before(s: Story) -> None:
    await s.begin_round(s.line())
    s.runner.store_hosts.add(0)
    s.driver.post(round_over())
    assert s.runner.store_hosts == {0}
    await s.all_gone()
    assert s.runner.store_hosts == set()
    s.driver.post(s.line(1))
    assert (s.kept.state.assignment, s.kept.outputs) == (s.line(1), ())
    await s.driver.hand_over(60_000)
    await s.die_and_come_back()
    await until(lambda: s.runner.asked[-1][0] == "start")
    assert s.runner.asked[-1] == ("start", 1, 2)
    written = s.driver.written.at(1)
    assert written is not None
    assert str(written.workers[1].stdout) == str(s.folder / "run/round_1/1/stdout.log")


async def test_a_store_whose_socket_died_with_the_agent_ends_its_round(s: Story) -> None:
    (join,) = s.link.of("join")
    port = join.offer.store_port
    await s.die_and_come_back()
    await s.begin_round(s.line(group_rank=0, master_port=port))
    (failed,) = [m.store_host_failed for m in s.link.said if m.HasField("store_host_failed")]
    assert f"the agent that offered port {port} was restarted before the" in failed.reason
    assert s.runner.store_hosts == set()


async def test_an_agent_that_dies_before_a_stop_leaves_it_to_the_next(s: Story) -> None:
    await s.begin_round(s.line())
    s.runner.deaf_to.add("stop")
    s.driver.post(round_over())
    # Before the workers are told: the next agent would give them another grace period.
    stop = s.kept.stop
    assert stop is not None
    assert (stop.command.round, stop.command.grace_ms) == (0, JOB.failure_stop_timeout_ms)
    await s.die_and_come_back()
    ((what, round_, signum, grace_ms),) = s.runner.asked[1:]
    assert (what, round_, signum) == ("stop", 0, None)
    # The rest of the grace period, which began with the decision.
    assert 0 <= grace_ms <= JOB.failure_stop_timeout_ms
    assert s.belief().phase == pb.Belief.STOPPING
    await s.all_gone()
    assert s.link.bodies()[-1] == "join"


async def test_a_round_that_the_fence_has_ended_is_over_also_for_the_next_agent(s: Story) -> None:
    """An agent may have received the exit and died before it recorded it."""
    await s.begin_round(s.line())
    s.driver.post(events.Fenced(0, monotonic_ms() - 10))
    await s.die_and_come_back()
    assert s.runner.asked[1:] == [("stop", 0, None, 0)]
    await s.all_gone()
    (join,) = s.link.of("join")
    assert join.fenced


async def test_a_failure_that_is_heard_after_the_adoption_is_one(s: Story) -> None:
    await s.begin_round(s.line())
    await s.die_and_come_back()
    (s.folder / "run/round_0/0/error.json").write_text('{"message": "boom", "timestamp": 1}')
    await s.runner.tell(events.WorkerExited(0, 0, 100, 3, None, 2_000))
    (failed,) = s.link.of("failed")
    (failure,) = failed.failures
    assert (failure.local_rank, failure.exit_code) == (0, 3)
    assert failure.message == "boom"
    assert failure.age_ms >= 0
    assert s.runner.asked[1][:2] == ("stop", 0)


async def test_a_failure_that_the_former_agent_has_heard_is_in_the_belief(s: Story) -> None:
    await s.begin_round(s.line())
    await s.runner.tell(events.WorkerExited(0, 0, 100, 3, None, 2_000))
    await s.die_and_come_back()
    assert [failure.exit_code for failure in s.belief().failures] == [3]
    # The runner sends it again, since the previous agent died before it acknowledged it.
    await s.runner.tell(events.WorkerExited(0, 0, 100, 3, None, 4_000))
    assert len(s.belief().failures) == 1


@pytest.mark.quick
async def test_success_is_remembered(s: Story) -> None:
    await s.begin_round(s.line())
    for local_rank in (0, 1):
        s.runner.tell(events.WorkerExited(0, local_rank, 100 + local_rank, 0, None, 0))
    await s.die_and_come_back()
    assert s.belief().phase == pb.Belief.SUCCEEDED
    s.runner.tell(events.WorkersGone(0))
    s.driver.post(Closed("job-7", "r1", model.Ended(model.Result.SUCCEEDED, "all did")))
    async with asyncio.timeout(PATIENCE_S):
        assert (await s.driver.ended).exit_code == 0


async def test_a_withdrawal_goes_on(s: Story) -> None:
    await s.begin_round(s.line())
    s.driver.post(Withdrawn("job-7", "r1", "scaled down"))
    await s.die_and_come_back()
    belief = s.belief()
    assert (belief.phase, belief.leave.reason) == (pb.Belief.LEAVING, "scaled down")
    s.runner.tell(events.WorkersGone(0))
    async with asyncio.timeout(PATIENCE_S):
        assert (await s.driver.ended).text.startswith("scaled down; no server could be informed")


async def test_what_has_ended_has_ended(s: Story) -> None:
    await s.begin_round(s.line())
    s.runner.store_hosts.add(0)
    s.runner.deaf_to.add("stop")
    s.driver.post(events.Signalled(15, "SIGTERM"))
    s.runner.tell(events.WorkersGone(0))
    await until(lambda: s.driver.belief() is None)
    await s.die_and_come_back()
    assert s.driver.belief() is None
    assert s.runner.store_hosts == set()
    async with asyncio.timeout(PATIENCE_S):
        assert (await s.driver.ended).exit_code == 143


async def test_progress_is_read_from_where_the_workers_write_it(s: Story) -> None:
    await s.begin_round(s.line())
    (file,) = s.folder.glob("rdzv_progress_*/0/progress")
    await s.die_and_come_back()
    file.write_text("17\n")
    async with asyncio.timeout(PATIENCE_S):
        while "progress" not in s.link.bodies():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    (said,) = s.link.of("progress")
    assert [(rank.rank, rank.step) for rank in said.ranks] == [(2, 17)]


async def test_the_runner_waits_as_long_as_the_server_does(s: Story) -> None:
    assert s.runner.served == [(15.0, 30.0)]
    s.link.orphan_timeout_ms = 20_000
    s.driver.post(events.ServerConnected())
    s.driver.post(events.ServerConnected())
    assert s.runner.served[1:] == [(20.0, 30.0)]


async def test_a_job_that_is_handed_over_is_left_alone(s: Story) -> None:
    await s.begin_round(s.line())
    await s.driver.hand_over(60_000)
    assert s.driver.handed_over
    assert s.runner.served[-1] == (60.0, 30.0)
    assert s.runner.asked == [("start", 0, 2), ("let go",)]
    s.driver.post(events.Signalled(15, "SIGTERM"))
    assert s.runner.asked[2:] == []
    assert s.driver.belief() is None


async def test_workers_run_on_of_which_no_more_would_be_started_today(
    s: Story, caplog: pytest.LogCaptureFixture
) -> None:
    await s.begin_round(s.line())
    await s.die_and_come_back("its arguments are refused")
    assert (
        "this node cannot start further rounds; its workers keep running: its arguments"
        in caplog.text
    )
    assert s.belief().phase == pb.Belief.RUNNING
    assert s.runner.asked == [("start", 0, 2)]
    # The next round fails here and says why; nothing else happens.
    s.driver.post(round_over())
    await s.all_gone()
    s.driver.post(s.line(1))
    await until(lambda: ("stop", 1) in [asked[:2] for asked in s.runner.asked])
    s.runner.tell(events.WorkersGone(1))
    async with asyncio.timeout(PATIENCE_S):
        outcome = await s.driver.ended
    assert "its arguments are refused" in outcome.text
    assert [asked[:2] for asked in s.runner.asked if asked[0] == "start"] == [("start", 0)]
