"""Jobs with a history, as a client sees them: the decisions of a real server, in simulated time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC

from rdzv.core.commands import Leave, Stop
from rdzv.core.model import LeaveCause
from rdzv.ctl.layout import Page
from rdzv.structs import replace
from rdzv.transport.wire import read, write
from rdzv.v1 import rdzv_pb2 as pb
from rdzv.view.answers import Event, JobStatus, event_in
from tests.support.driven import join, settle
from tests.unit.core.test_small_scope import SETTINGS
from tests.unit.server.test_metrics import Scraped, history, scraped


@dataclass(frozen=True)
class Told:
    """The `status` and `events` of one job at one moment."""

    status: JobStatus
    history: tuple[Event, ...]
    now_ms: int

    def page(self, width: int | None = 100) -> Page:
        return Page(width=width, colour=False, now_s=self.now_ms / 1000, zone=UTC)


async def told(
    story: Callable[[Scraped], Awaitable[None]], rdzv_id: str = "job-7", limit: int = 10_000
) -> Told:
    """Run a story, and return the status and events of one of its jobs."""
    async with scraped() as s:
        await story(s)
        now_ms = s.clock.now_ms()
        status = await s.driver.operations.status(rdzv_id)
        rows = await s.driver.operations.history(rdzv_id, limit)
    assert read(JobStatus, write(pb.JobStatus(), status)) == status, (
        "gRPC carries what HTTP answers"
    )
    return Told(status, tuple(map(event_in, rows)), now_ms)


async def crashing(s: Scraped, rounds: int = 20) -> None:
    """A worker fails in every round; then an operator stops the job."""
    n1 = await s.connect("n1")
    # Without any backoff, which would be longer than the story.
    own = {"min_nodes": 1, "max_nodes": 1, "max_restarts": 100, "restart_backoff_ms": 0}
    settings = replace(SETTINGS, **own)
    await s.say(n1, join(n1, (1, 1), settings=settings))
    for number in range(rounds):
        await s.let_pass(2_000)
        await s.fail(n1, number)
        await s.let_pass(500)
        await s.say(n1, join(n1, (1, 1), settings=settings, run="run-1", left_round=number))
    await s.driver.engine.submit("job-7", Stop("run-1", "stopped by ada at head: it only crashes"))
    await s.say(n1, join(n1, (1, 1), settings=settings, run="run-1", left_round=rounds))
    await settle()


async def fenced(s: Scraped) -> None:
    """Two nodes are cut off after half a minute, kill their workers, and are back 22 s later."""
    n1, n2 = await s.connect("n1"), await s.connect("n2")
    for stream in (n1, n2):
        await s.say(stream, join(stream, (2, 2)))
    await s.let_pass(52_000)
    for stream in (n1, n2):
        back = join(stream, (2, 2), run="run-1", left_round=0)
        await s.say(stream, replace(back, fenced=True, fenced_age_ms=22_000))
    await s.let_pass(26_000)


async def failing(s: Scraped) -> None:
    """The budget is spent by a failure of two workers at once, after another node has gone."""
    nodes = (2, 3)
    settings = replace(SETTINGS, min_nodes=2, max_nodes=3, max_restarts=1)
    n1, n2, n3 = [await s.connect(name) for name in ("n1", "n2", "n3")]
    for stream in (n1, n2, n3):
        await s.say(stream, join(stream, nodes, settings=settings))
    await s.let_pass(60_000)
    leave = Leave("n3", n3.incarnation, "run-1", LeaveCause.SIGNAL, "received SIGTERM", 0)
    await s.say(n3, leave)
    for stream in (n1, n2):
        await s.say(stream, join(stream, nodes, settings=settings, run="run-1", left_round=0))
        await s.let_pass(1_500)
    for number in (1, 2):
        await s.let_pass(30_000)
        await s.fail(n2, number)
        await s.fail(n1, number)
        for stream in (n1, n2):
            again = join(stream, nodes, settings=settings, run="run-1", left_round=number)
            await s.say(stream, again)
            await s.let_pass(500)


async def many_nodes(s: Scraped) -> None:
    """Ten nodes form a round, of which a line names eight; an unnamed one is lost."""
    nodes = (9, 10)
    streams = [await s.connect(f"n{number:02}") for number in range(10)]
    for stream in streams:
        await s.say(stream, join(stream, nodes))
    await s.let_pass(30_000)
    await s.let_pass(6_000, "n09")
    for stream in streams[:-1]:
        await s.say(stream, join(stream, nodes, run="run-1", left_round=0))
    await s.let_pass(1_000)


async def second_run(s: Scraped) -> None:
    """The job was stopped, and begins again."""
    await crashing(s, rounds=1)
    n2 = await s.connect("n2")
    await s.let_pass(3_000)
    await s.say(n2, join(n2, (2, 2)))
    await s.let_pass(1_000)


STORIES = {
    "recovers": (history, "job-7"),
    "waits": (history, "waits"),
    "queued": (history, "later"),
    "succeeded": (history, "done"),
    "crashes": (crashing, "job-7"),
    "large": (many_nodes, "job-7"),
    "again": (second_run, "job-7"),
    "failed": (failing, "job-7"),
    "fenced": (fenced, "job-7"),
}
