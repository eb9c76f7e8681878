"""/metrics: a scripted history has a golden file, and the counts agree with `status`."""

from __future__ import annotations

import asyncio
import itertools
import re
import shutil
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from grafana import documented_metrics
from prometheus_client.parser import text_string_to_metric_families

from rdzv.c10d import observations as c10d
from rdzv.core import model
from rdzv.core.commands import Fail, Join, Stop, Submit, Succeed, Tick
from rdzv.core.events import HangOver, NodeLost, RunBegan, StacksTaken, WorkersStarted
from rdzv.core.evidence.progress_lag import RankProgress
from rdzv.core.fleet.node_resources import Gpu, NodeResources
from rdzv.core.life.runs import vacant
from rdzv.core.rendezvous import step
from rdzv.core.snapshots import SnapshotsKnown
from rdzv.errors import LimitExceededError, RendezvousConnectionError, RendezvousError
from rdzv.messages import Progress
from rdzv.server.driver import Driver
from rdzv.server.engine.history import records
from rdzv.server.sessions.streams import Stream
from rdzv.server.settings.server_settings import RdzvdSettings
from rdzv.server.telemetry.job_metrics_page import (
    JOB_METRICS,
    missing_nodes,
    node_states,
    why_not_running,
)
from rdzv.server.telemetry.metrics_page import SLICE_JOBS, MetricsPage
from rdzv.server.telemetry.server_metrics import ENDED_JOB_MS, ENDED_JOBS, Metrics
from rdzv.structs import replace
from rdzv.view.answers import JobStatus
from rdzv.view.job_status import node_views, view
from tests.support.builders import report
from tests.support.driven import FakeClock, FlakyStore, Server, join, settle
from tests.support.settings import rdzvd_settings
from tests.unit.core import test_small_scope as small_scope
from tests.unit.core.test_small_scope import SETTINGS, everything_said

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).parents[1] / "golden" / "metrics"
EXPIRES = datetime(2027, 3, 1, tzinfo=UTC)
CONFIG = rdzvd_settings()


class Scraped(Server):
    """A server with its metrics, and nodes that send what they are told to."""

    def __init__(self, driver: Driver, clock: FakeClock, page: MetricsPage) -> None:
        super().__init__(driver, clock)
        self.page, self.metrics = page, page.metrics

    async def say(self, stream: Stream, command: Join | Fail | Succeed) -> None:
        await self.driver.commands.hear(stream, "job-7", command)
        await settle()

    async def let_pass(self, for_ms: int, *silent: str) -> None:
        """Let time pass in which every connected node but these is heard."""
        for left_ms in range(for_ms, 0, -1_000):
            for node_id, stream in self.driver.streams.open.items():
                if node_id not in silent:
                    self.driver.connections.heard(stream)
            await self.clock.advance(min(left_ms, 1_000))

    def tell(self, stream: Stream, number: int, *ranks: RankProgress) -> None:
        """Workers of this node report their step in a round."""
        self.driver.reports.take(stream, Progress("job-7", "run-1", number, ranks))

    async def fail(self, stream: Stream, number: int) -> None:
        """A worker of this node fails in a round."""
        failed = report(message="no")
        run = "run-1"
        await self.say(stream, Fail(stream.node_id, stream.incarnation, run, number, (failed,)))

    async def stopped(self, stream: Stream, number: int, nodes: tuple[int, int]) -> None:
        """This node has stopped its workers of a round."""
        await self.say(stream, join(stream, nodes, run="run-1", left_round=number))

    async def values(self) -> dict[str, float]:
        return values(await self.page.text())


def values(text: bytes) -> dict[str, float]:
    """Read every sample as `name{label=value}`."""
    return {
        s.name + "".join(f"{{{k}={v}}}" for k, v in sorted(s.labels.items())): s.value
        for family in text_string_to_metric_families(text.decode())
        for s in family.samples
    }


@asynccontextmanager
async def scraped(
    store: FlakyStore | None = None, config: RdzvdSettings = CONFIG
) -> AsyncIterator[Scraped]:
    """Run a driver with metrics."""
    clock = FakeClock()
    held: list[Driver] = []
    metrics = Metrics(now_s=lambda: clock.at_ms / 1000)
    page = MetricsPage(
        metrics,
        lambda: held[0] if held else None,
        config.store,
        version="1.2.3",
        c10d=torchs_own,
        expires=lambda: EXPIRES,
    )
    uids = (f"run-{number}" for number in itertools.count(1))
    async with Driver.running(
        store or FlakyStore(), clock, config, new_uid=lambda: next(uids), metrics=metrics
    ) as driver:
        held.append(driver)
        yield Scraped(driver, clock, page)
        held.clear()


async def history(s: Scraped) -> None:
    """A failed worker; a lost node, whose seat a spare takes; one job waits; one is done."""
    nodes = (2, 2)
    settings = replace(SETTINGS, min_nodes=2, max_nodes=2, max_restarts=3)
    n1, n2, n3 = [await s.connect(name) for name in ("n1", "n2", "n3")]
    for stream in (n1, n2, n3):
        await s.say(stream, join(stream, nodes, settings=settings))
        await s.let_pass(1_000)
    await s.let_pass(20_000)
    await s.fail(n2, 0)
    await s.let_pass(250)
    for stream in (n1, n2):
        await s.say(stream, join(stream, nodes, settings=settings, run="run-1", left_round=0))
        await s.let_pass(500)
    await s.let_pass(30_000)

    n9 = await s.connect("n9")
    cold = model.Standby(why="it has another version of the script")
    await s.hear(n9, replace(join(n9, (2, 4)), standby=cold), "waits")
    await s.hear(n9, join(n9, (1, 1)), "done")
    run = (await s.status("done")).run
    await s.let_pass(2_000)
    await s.hear(n9, Succeed("n9", n9.incarnation, run, 0), "done")

    # n2 falls silent. Once n1 has stopped, n3 takes the seat.
    await s.let_pass(6_000, "n2")
    await s.say(n1, join(n1, nodes, settings=settings, run="run-1", left_round=1))
    await s.let_pass(10_000, "n2")
    s.tell(n1, 2, RankProgress(0, 120, 0, 2.5), RankProgress(1, 121, 0, None))
    await submitted_jobs(s)
    s.tell(n3, 2, RankProgress(2, 118, 0, 2.25))
    await s.let_pass(1_500)


async def submitted_jobs(s: Scraped) -> None:
    """One job is placed on the only eligible node; the other waits for two."""
    s.driver.placer.settled_at_ms = 0
    gpus = tuple(Gpu(f"u{number}", "H100", 1) for number in range(4))
    for node_id in ("g1", "g2"):
        await s.connect(node_id, resources=NodeResources(gpus=gpus, capacity=2))
    await s.driver.fleet.cordon("g2", "its fan is loud")
    spec = model.JobSpec(("train.py",), local_world_size=3)
    for rdzv_id, nodes in (("eval", 1), ("later", 2)):
        await s.driver.engine.submit(
            rdzv_id, Submit(f"{rdzv_id}-1", model.Settings(nodes, nodes), spec, "ada")
        )
    await s.let_pass(1_000)


async def test_budgets_are_told_beside_what_is_spent_of_them() -> None:
    async with scraped() as s:
        n1, n2 = [await s.connect(name) for name in ("n1", "n2")]
        own = {"max_preemptions": 5, "max_store_failures": 2, "no_progress_restarts": 7}
        settings = replace(SETTINGS, min_nodes=1, max_nodes=2, max_restarts=9, **own)
        for stream in (n1, n2):
            await s.say(stream, join(stream, (1, 2), settings=settings))
        for number in range(3):
            await s.let_pass(1_000)
            await s.fail(n2, number)
            for stream in (n1, n2):
                again = join(stream, (1, 2), settings=settings, run="run-1", left_round=number)
                await s.say(stream, again)
            await s.let_pass(10_000)
        # n2 falls silent, and n1 continues alone.
        await s.let_pass(10_000, "n2")
        await s.say(n1, join(n1, (1, 2), settings=settings, run="run-1", left_round=3))
        await s.let_pass(2_000, "n2")
        told = await s.values()
        await s.hear(n1, join(n1, (1, 1)), "free")
        free = await s.values()
    found = {name: told[f"rdzv_job_{name}{{rdzv_id=job-7}}"] for name in BUDGETS}
    assert found == dict(zip(BUDGETS, (1, 5, 0, 2, 2, 7), strict=True))
    without = {name for name in BUDGETS if f"rdzv_job_{name}{{rdzv_id=free}}" in free}
    assert without == {"preemptions_spent", "store_failures_spent", "restarts_without_progress"}


BUDGETS = (
    *("preemptions_spent", "max_preemptions", "store_failures_spent", "max_store_failures"),
    *("restarts_without_progress", "no_progress_restarts"),
)


async def test_nodes_that_leave_are_counted_by_whether_something_is_left_on_them() -> None:
    async with scraped() as s:
        s.driver.placer.settled_at_ms = 0
        await s.connect("g2", resources=NodeResources(capacity=2))
        n1 = await s.connect("n1")
        await s.say(n1, join(n1, (1, 1)))

        async def counted() -> tuple[float, float]:
            told = await s.values()
            states = (f"rdzv_node_drains{{state={name}}}" for name in ("draining", "drained"))
            return tuple(told[name] for name in states)  # type: ignore[return-value]

        assert await counted() == (0, 0)
        await s.driver.fleet.drain("g2", 60_000, "its fan is loud", force=True)
        assert await counted() == (0, 1), "nothing is on it"
        await s.driver.fleet.drain("n1", 60_000, "so is its own", force=True)
        assert await counted() == (1, 1), "it has a seat"
        await s.driver.fleet.undrain("g2")
        assert await counted() == (1, 0)


def torchs_own() -> tuple[JobStatus, ...]:
    """Two jobs in torch's own store, one of which is closed."""
    watch = c10d.Watch()
    nodes = [f"10.0.0.1_4711_{number}" for number in range(3)]
    runs = c10d.State(
        round=3,
        complete=True,
        closed=False,
        last_call=False,
        participants={nodes[0]: 0, nodes[1]: 1},
        waiting=frozenset(nodes[2:]),
        spare=frozenset(),
        heartbeats={},
    )
    watch.take({"runs": runs, "over": replace(runs, closed=True)}, (), 0)
    return watch.views(0)


@pytest.mark.quick
async def test_a_history_has_these_metrics(request: pytest.FixtureRequest) -> None:
    async with scraped() as s:
        await history(s)
        text = (await s.page.text()).decode()
    text = re.sub(r'python="[^"]*"', 'python="3"', text)
    path = GOLDEN / "history.txt"
    if request.config.getoption("--rewrite"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), "review the diff, then: pytest --rewrite"


@pytest.mark.slow
async def test_promtool_finds_nothing_to_improve() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian's package prometheus has it)")
    async with scraped() as s:
        s.page.add_process()
        await history(s)
        text = await s.page.text()
    pipe = asyncio.subprocess.PIPE
    check = await asyncio.create_subprocess_exec(
        promtool, "check", "metrics", stdin=pipe, stdout=pipe, stderr=pipe
    )
    async with asyncio.timeout(100):
        said = await check.communicate(text)
    assert (check.returncode, said) == (0, (b"", b""))


@pytest.mark.quick
async def test_every_metric_is_documented_and_no_other() -> None:
    async with scraped() as s:
        await history(s)
        families = text_string_to_metric_families((await s.page.text()).decode())
        told = {f.name + ("_total" if f.type == "counter" else "") for f in families}
    written = documented_metrics()
    assert told == {name for name in written if not name.startswith("rdzv_agent_")}


async def test_no_label_is_called_job() -> None:
    async with scraped() as s:
        await history(s)
        families = text_string_to_metric_families((await s.page.text()).decode())
        labels = {name for f in families for sample in f.samples for name in sample.labels}
    assert labels == {
        *("rdzv_id", "state", "cause", "kind", "phase", "reason", "result", "operation", "le"),
        *("by", "collector", "version", "python", "store"),
    }


def leading(*states: model.State) -> Any:
    """A server that leads, with these jobs and nothing else."""
    rounds = SimpleNamespace(progress=lambda _: (), stragglers=lambda _: ())
    snapshots = SimpleNamespace(shown=lambda _: SnapshotsKnown())
    return SimpleNamespace(
        clock=FakeClock(),
        leadership=1,
        jobs=SimpleNamespace(states=states),
        leases=SimpleNamespace(records={}, lease_ms=0),
        streams=SimpleNamespace(open={}),
        operations=SimpleNamespace(watching=0),
        store=SimpleNamespace(away_ms=0),
        fleet=SimpleNamespace(drains=dict, hosts=lambda _: (), ordered=()),
        quarantine=SimpleNamespace(nodes=()),
        rounds=rounds,
        snapshots=snapshots,
    )


def standing_by() -> MetricsPage:
    return MetricsPage(Metrics(), lambda: None, "memory", "1.2.3")


async def test_what_fails_is_told_and_harms_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> tuple[JobStatus, ...]:
        raise OSError("no store")

    state = vacant("job-7", model.Tuning())
    began = step(state, _first_join(), 0)
    leads = leading(began.state)
    page = MetricsPage(Metrics(), lambda: leads, "memory", "1.2.3", c10d=broken)
    page.metrics.count_step(state, began.state, began.events, 0)
    for _ in range(2):
        found = values(await page.text())
        assert found["rdzv_collector_success{collector=c10d}"] == 0
        assert found["rdzv_collector_success{collector=jobs}"] == 1
        assert found["rdzv_job_min_nodes{rdzv_id=job-7}"] == 2
    assert len(caplog.records) == 1, "it is logged once, and not at each scrape"

    def lost(*_: object) -> tuple[RankProgress, ...]:
        raise KeyError("job-7")

    healthy, leads.rounds.progress = leads.rounds.progress, lost
    found = values(await page.text())
    assert found["rdzv_collector_success{collector=jobs}"] == 0
    assert found["rdzv_leads"] == 1
    leads.rounds.progress = healthy
    assert values(await page.text())["rdzv_collector_success{collector=jobs}"] == 1


async def test_a_server_without_torchs_store_tells_nothing_of_one() -> None:
    assert not any("c10d" in name for name in values(await standing_by().text()))


async def test_streams_and_the_nodes_that_are_lost_are_counted() -> None:
    async with scraped() as s:
        await s.pair()
        await s.let_pass(4_000, "n2")
        found = await s.values()
        assert found["rdzv_streams_opened_total"] == 2
        assert found["rdzv_node_silence_seconds"] >= 3
        assert found["rdzv_lease_seconds"] == 5
        await s.let_pass(6_000, "n2")
        assert (await s.values())["rdzv_nodes_lost_total"] == 1


async def test_who_stands_by_tells_of_no_jobs() -> None:
    found = values(await standing_by().text())
    assert found["rdzv_leads"] == 0
    assert not any(name.startswith(("rdzv_job", "rdzv_leadership")) for name in found)
    assert found["rdzv_runs_ended_total{result=failed}"] == 0


# ------------------------------------------------------------------ counts


async def test_a_suspect_is_a_failure_only_where_it_is_charged() -> None:
    async with scraped() as s:
        n1, n2 = await s.connect("n1"), await s.connect("n2")
        settings = replace(join(n1, (2, 2)).settings, max_restarts=3)
        for node in (n1, n2):
            await s.say(node, join(node, (2, 2), settings=settings))
        suspect = report(exit_code=None, message="connection closed", pid=99, suspect=True)
        own = report(rank=1, message="no", local_rank=1, pid=98)
        again = join(n1, (2, 2), settings=settings, run="run-1")
        for number, reports in enumerate(((suspect, own), (suspect,))):
            await s.say(n1, Fail("n1", n1.incarnation, "run-1", number, reports))
            for node in (n1, n2):
                command = replace(again, node_id=node.node_id, incarnation=node.incarnation)
                kept = (model.KeptWorker(0, number + 7), model.KeptWorker(1, number + 7))
                await s.say(node, replace(command, left_round=number, kept=kept))
            found = await s.values()
            assert found["rdzv_worker_failures_total"] == number + 1


async def test_a_restart_is_counted_where_it_is_charged() -> None:
    async with scraped() as s:
        n1 = await s.connect("n1")
        settings = replace(join(n1, (1, 1)).settings, max_restarts=1)
        await s.say(n1, join(n1, (1, 1), settings=settings))
        await s.let_pass(4_000)
        await s.fail(n1, 0)
        await s.clock.advance(500)
        await s.say(n1, join(n1, (1, 1), settings=settings, run="run-1", left_round=0))
        await s.let_pass(6_000)
        found = await s.values()
        job = "{rdzv_id=job-7}"
        assert found[f"rdzv_job_restarts_total{job}"] == 1
        assert found[f"rdzv_job_restarts_spent{job}"] == 1
        assert found[f"rdzv_job_rounds_ended_total{{cause=worker failure}}{job}"] == 1
        assert found[f"rdzv_job_worker_failures_total{job}"] == 1
        assert found[f"rdzv_job_recovery_seconds_sum{{phase=stop}}{job}"] == 0.5
        assert found[f"rdzv_job_formation_seconds_sum{job}"] == 0.5
        assert found[f"rdzv_job_formation_seconds_count{job}"] == 2
        assert found[f"rdzv_job_running_seconds_total{job}"] == 10
        assert found[f"rdzv_job_elapsed_seconds_total{job}"] == 10.5
        # The budget is spent: the next failure ends the run, and is no restart.
        await s.fail(n1, 1)
        await s.say(n1, join(n1, (1, 1), settings=settings, run="run-1", left_round=1))
        found = await s.values()
        assert found[f"rdzv_job_restarts_total{job}"] == 1
        assert found[f"rdzv_job_worker_failures_total{job}"] == 2
        assert found[f"rdzv_job_state{job}{{state=failed}}"] == 1
        assert found["rdzv_runs_ended_total{result=failed}"] == 1


async def test_a_job_that_has_ended_is_shown_for_a_while_and_no_longer() -> None:
    async with scraped() as s:
        n1 = await s.connect("n1")
        await s.say(n1, join(n1, (1, 1)))
        await s.driver.engine.submit("job-7", Stop("run-1", "an operator"))
        await s.say(n1, join(n1, (1, 1), run="run-1", left_round=0))
        found = await s.values()
        assert found["rdzv_job_state{rdzv_id=job-7}{state=stopped}"] == 1
        assert "rdzv_job_min_nodes{rdzv_id=job-7}" not in found
        await s.clock.advance(ENDED_JOB_MS)
        assert not any("job-7" in name for name in await s.values())
        assert not s.metrics.tallies
        assert not s.metrics.ended


async def test_a_job_that_begins_again_counts_from_zero() -> None:
    async with scraped() as s:
        n1 = await s.connect("n1")
        await s.say(n1, join(n1, (1, 1)))
        await s.driver.engine.submit("job-7", Stop("run-1", "an operator"))
        await s.say(n1, join(n1, (1, 1), run="run-1", left_round=0))
        await s.clock.advance(1_000)
        await s.say(n1, join(n1, (1, 1)))
        found = await s.values()
        assert found["rdzv_job_state{rdzv_id=job-7}{state=running}"] == 1
        assert found["rdzv_job_elapsed_seconds_total{rdzv_id=job-7}"] == 0
        assert found["rdzv_job_membership_changes_total{kind=joined}{rdzv_id=job-7}"] == 1


async def test_a_server_that_starts_counts_what_it_sees_of_jobs_that_run() -> None:
    store = FlakyStore()
    async with scraped(store) as s:
        n1 = await s.connect("n1")
        await s.say(n1, join(n1, (1, 1)))
        await s.let_pass(60_000)
    async with scraped(store) as s:
        await s.clock.advance(2_000)
        found = await s.values()
    assert found["rdzv_job_running_seconds_total{rdzv_id=job-7}"] == 2
    assert found["rdzv_job_elapsed_seconds_total{rdzv_id=job-7}"] == 2
    assert found["rdzv_job_nodes{rdzv_id=job-7}{state=away}"] == 1


async def test_progress_is_told_by_its_extremes_while_the_round_is_live() -> None:
    async with scraped() as s:
        n1, n2 = await s.pair()
        s.tell(n1, 0, RankProgress(0, 7, 0, None), RankProgress(1, 9, 0, 3.5))
        await s.let_pass(2_000)
        s.tell(n2, 0, RankProgress(2, 8, 500, 4.5))
        found = await s.values()
        expected = {
            "min_step": 7,
            "median_step": 8,
            "max_step": 9,
            "steps_per_second": 3.5,
            "median_steps_per_second": 3.5,
            "max_steps_per_second": 4.5,
            "progress_age_seconds": 0.5,
            "max_progress_age_seconds": 2,
            "progress_workers": 3,
        }
        names = tuple(expected)
        told = {name: found[f"rdzv_job_{name}{{rdzv_id=job-7}}"] for name in names}
        assert told == expected
        await s.fail(n1, 0)
        found = await s.values()
        assert not [name for name in names if f"rdzv_job_{name}{{rdzv_id=job-7}}" in found]


async def test_a_store_that_is_away_is_told_and_counted() -> None:
    store = FlakyStore()
    async with scraped(store) as s:
        n1 = await s.connect("n1")
        store.away = RendezvousConnectionError("no answer")
        said = asyncio.ensure_future(s.hear(n1, join(n1, (1, 1))))
        await s.clock.advance(2_500)
        found = await s.values()
        assert found["rdzv_store_away_seconds"] == 2.5
        assert found["rdzv_store_errors_total{operation=read}"] >= 2
        assert found["rdzv_commit_seconds_count"] == 0
        store.away = None
        await s.clock.advance(1_000)
        await said
        found = await s.values()
        assert found["rdzv_store_away_seconds"] == 0
        assert found["rdzv_commit_seconds_count"] == 1


async def test_a_pause_of_the_loop_is_in_the_histogram() -> None:
    async with scraped() as s:
        await s.clock.advance(1_000)
        await s.clock.pause(3_000)
        found = await s.values()
    assert (
        found["rdzv_loop_lag_seconds_bucket{le=+Inf}"]
        > found["rdzv_loop_lag_seconds_bucket{le=1.0}"]
    )


async def test_ended_jobs_are_bounded() -> None:
    metrics = Metrics()
    for number in range(ENDED_JOBS + 10):
        state = vacant(f"job-{number}", model.Tuning())
        began = step(state, _first_join(), 0)
        ended = step(began.state, Stop("run-1", "an operator"), 1)
        metrics.count_step(state, began.state, began.events, 0)
        metrics.count_step(began.state, ended.state, ended.events, 1)
    assert len(metrics.ended) == ENDED_JOBS
    # Events that arrive after the job was forgotten create nothing again.
    first = vacant("job-0", model.Tuning())
    ended = step(step(first, _first_join(), 0).state, Stop("run-1", "an operator"), 1)
    assert ended.state.membership.ended
    metrics.count_step(ended.state, ended.state, (NodeLost("n1", "too late"),), 2)
    assert not metrics.tallies


def _first_join() -> Join:
    return Join("n1", 1, "", SETTINGS, model.Offer("10.0.0.1", machine="m1"), new_run="run-1")


# ------------------------------------------------------------------ gauges say what status says

REASON_IN_WORDS = {
    "queued": "no nodes were chosen",
    "too few nodes": "waiting for ",
    "nodes away": "to come back",
    "last call": "last call",
    "gathering": "gathering newcomers",
    "back-off": "backing off",
    "adoption": "other nodes may still be running it",
    "stopping": " to stop",
}


def agrees(state: model.State, now_ms: int) -> str:
    """Check that the gauges of a state agree with `status`; return why it does not run."""
    shown = Counter(v.state for v in node_views(state, now_ms))
    if state.membership.ended is None:
        assert +node_states(state) == shown
    reason = why_not_running(state)
    assert bool(reason) is (
        model.job_state(state) in (model.JobState.JOINING, model.JobState.STOPPING)
    )
    if reason:
        assert REASON_IN_WORDS[reason] in view(state, now_ms).reason.line
    if model.job_state(state) is model.JobState.JOINING:
        assert bool(missing_nodes(state)) is (state.ready < state.membership.min_nodes)
    return reason


def test_who_leaves_is_missing_although_its_workers_still_stop() -> None:
    seats = {"n1": model.Seat(1, 0, leaving="SIGTERM"), "n2": model.Seat(2, 0)}
    began = step(vacant("job-7", model.Tuning()), _first_join(), 0).state
    settings = model.Settings(min_nodes=3, max_nodes=3)
    state = replace(
        began, membership=replace(began.membership, settings=settings), waiting={}, seats=seats
    )
    assert missing_nodes(state) == 2
    assert missing_nodes(replace(state, away={"n2": model.Away(0, 5_000, firm=False)})) == 3


@pytest.mark.parametrize(
    "beginning",
    [
        "vacant",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("at_last_call", "failing", "with_a_spare", "half_done", "taken_over")
        ),
    ],
)
def test_the_gauges_say_what_status_says(beginning: str) -> None:
    job = getattr(small_scope, beginning)()
    metrics = Metrics()
    met, queue = {repr(job.state)}, [(job.state, job.now_ms, job.wake_at_ms)]
    for before, then_ms, wake_at_ms in itertools.islice(_growing(queue), 25):
        for command in everything_said(before):
            now_ms = then_ms
            if isinstance(command, Tick):
                now_ms = then_ms + 100 if wake_at_ms is None else wake_at_ms
            try:
                after = step(before, command, now_ms)
            except RendezvousError:
                continue
            metrics.forget_jobs()
            metrics.loaded(before, now_ms)
            metrics.count_step(before, after.state, after.events, now_ms)
            counts_what_lives(metrics, after.state)
            if after.state.membership.run and (key := repr(after.state)) not in met:
                met.add(key)
                agrees(after.state, now_ms)
                queue.append((after.state, now_ms, after.wake_at_ms))
    assert len(met) > 10


def counts_what_lives(metrics: Metrics, state: model.State) -> None:
    """Check that a job is counted until it has ended, and that its time runs until then."""
    membership = state.membership
    tally = metrics.tallies.get(membership.rdzv_id)
    assert (tally is not None) is (bool(membership.run) and membership.ended is None)
    if tally is not None:
        live = model.job_state(state) is model.JobState.RUNNING
        assert (tally.running_since_ms is not None) is live


def _growing(queue: list[tuple[model.State, int, int | None]]) -> object:
    for number in itertools.count():
        if number == len(queue):
            return
        yield queue[number]


# ------------------------------------------------------------------ many jobs


@pytest.mark.slow
async def test_many_jobs_leave_the_event_loop_to_others() -> None:
    states, metrics = [], Metrics()
    for number in range(2_000):
        state = vacant(f"job-{number}", model.Tuning())
        began = step(state, _first_join(), 0)
        states.append(began.state)
        metrics.count_step(state, began.state, (RunBegan("run-1", 1, ""),), 0)
    page = MetricsPage(metrics, lambda: leading(*states), "memory", "1.2.3")
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.ensure_future(others())
    try:
        text = await page.text()
    finally:
        other.cancel()
    assert text.count(b"rdzv_job_min_nodes{") == 2_000
    # One turn for each slice of jobs, and one for each metric.
    assert turns >= 2_000 // SLICE_JOBS + len(JOB_METRICS) - 2


async def test_readers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rdzv.server.telemetry.metrics_page.SCRAPES", 2)
    page = MetricsPage(Metrics(), leading, "memory", "1.2.3")
    answers = await asyncio.gather(*(page.text() for _ in range(3)), return_exceptions=True)
    assert [type(answer) for answer in answers] == [bytes, bytes, LimitExceededError]
    assert isinstance(await page.text(), bytes)


@pytest.mark.parametrize("name", ['a"b', "a\\b", "a\nb", "é"])
async def test_any_name_of_a_job_is_written_so_that_it_can_be_read(name: str) -> None:
    state = vacant(name, model.Tuning())
    began = step(state, _first_join(), 0)
    page = MetricsPage(Metrics(), lambda: leading(began.state), "memory", "1.2.3")
    page.metrics.count_step(state, began.state, began.events, 0)
    assert values(await page.text())[f"rdzv_job_min_nodes{{rdzv_id={name}}}"] == 2


async def test_hangs_and_the_ways_in_which_workers_began_are_counted() -> None:
    page = standing_by()
    told = (
        *(StacksTaken(0, "x", cause) for cause in ("absent", "")),
        HangOver(0),
        *(WorkersStarted(0, 0, 0, 4), WorkersStarted(1, 3, 1, 0)),
    )
    page.metrics.recorded(records("job-7", "run-1", told, 0), told)
    found = values(await page.text())
    causes = [found[f"rdzv_hangs_total{{cause={kind}}}"] for kind in ("absent", "none", "gil_held")]
    assert causes == [1, 1, 0]
    kinds = ("kept", "warm", "cold")
    assert [found[f"rdzv_workers_started_total{{kind={kind}}}"] for kind in kinds] == [3, 1, 4]


@pytest.mark.quick
def test_results_and_states_have_the_same_words() -> None:
    assert {r.value for r in model.Result} < {s.value for s in model.JobState}
