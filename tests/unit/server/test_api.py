"""The JSON API and its stream: rdzvctl's documents, over HTTP, pushed when they change.

A real HTTP server on loopback, above a driver whose clock the test moves, so timing is not a matter
of luck. Answers are compared with what `rdzvctl -o json` would print.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
from yarl import URL

from rdzv.core.commands import Fail, Succeed
from rdzv.core.evidence.hang_culprit import HungWorker
from rdzv.core.evidence.progress_lag import RankProgress
from rdzv.core.evidence.stacks import CollectedStacks, Group, StackFrame, ThreadStack, WorkerStack
from rdzv.core.life.runs import vacant
from rdzv.core.model import JobState, Tuning
from rdzv.errors import RendezvousConnectionError
from rdzv.messages import Hung, LogPiece, Progress, ReadLog, Stacks, TakeStacks
from rdzv.server.driver import Driver
from rdzv.server.http import state_feeds as feeds_module
from rdzv.server.http.listener import Serving, serving_http
from rdzv.server.http.openapi import document
from rdzv.server.http.page_files import FOLDER, POLICY
from rdzv.server.http.state_feeds import Reader
from rdzv.server.operations import handlers
from rdzv.server.operations.table import LOG_BYTES, OPERATIONS, PREFIX
from rdzv.server.replication.replica import Replica
from rdzv.server.security.roles import AUDIT
from rdzv.server.sessions.streams import Stream
from rdzv.server.settings.server_settings import Limits
from rdzv.server.telemetry.metrics_page import MetricsPage
from rdzv.server.telemetry.server_metrics import Metrics
from rdzv.stores.base import Page
from rdzv.structs import replace
from rdzv.transport.endpoints import Listen
from rdzv.view.job_status import view
from tests.support.builders import report
from tests.support.driven import FakeClock, FlakyStore, Server, join, read, settle
from tests.support.settings import rdzvd_settings

pytestmark = pytest.mark.slow

CONFIG = rdzvd_settings()
OPENAPI = Path(__file__).parents[3] / "docs" / "openapi.json"
WAIT_S = 20.0
"""How long anything may take on a busy machine."""


class Events:
    """The events of one stream."""

    def __init__(self, content: aiohttp.StreamReader, server: Asked) -> None:
        self._content = content
        self._server = server

    async def next(self) -> tuple[str, Any]:
        """Return the next event that is no beat; time passes until it comes.

        Meanwhile every connected node is heard, however long that takes.
        """
        async with asyncio.timeout(WAIT_S):
            while True:
                lines = (await self._read()).decode().strip().splitlines()
                fields = dict(line.split(": ", 1) for line in lines)
                if fields["event"] != "beat":
                    return fields["event"], json.loads(fields["data"])

    async def _read(self) -> bytes:
        reading = asyncio.ensure_future(self._content.readuntil(b"\n\n"))
        try:
            while not reading.done():
                for stream in self._server.driver.streams.open.values():
                    self._server.driver.connections.heard(stream)
                await self._server.clock.advance(250)
                await asyncio.wait([reading], timeout=0.005)
            return await reading
        finally:
            reading.cancel()

    async def until(self, wanted: str) -> Any:
        """Return the content of the next event with this name."""
        async with asyncio.timeout(WAIT_S):
            while True:
                name, said = await self.next()
                if name == wanted:
                    return said

    async def first(self) -> dict[str, list[Any]]:
        """Return all initial events, by name."""
        assert (await self.next())[0] == "begin"
        found: dict[str, list[Any]] = {}
        while True:
            name, said = await self.next()
            if name == "ready":
                return found
            found.setdefault(name, []).append(said)


async def until(holds: Callable[[], bool]) -> None:
    """Wait until a condition holds that no event announces."""
    for _ in range(int(WAIT_S / 0.01)):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it does not come to hold")


def ageless(document: Any) -> Any:
    """Return a document without ages: time passes between two answers."""
    if isinstance(document, list):
        return [ageless(one) for one in document]
    if not isinstance(document, dict):
        return document
    return {key: ageless(one) for key, one in document.items() if not key.endswith("age_ms")}


class Asked(Server):
    """A server to send HTTP requests to."""

    def __init__(
        self,
        driver: Driver,
        clock: FakeClock,
        replica: Replica,
        session: aiohttp.ClientSession,
        serving: Serving,
    ) -> None:
        super().__init__(driver, clock)
        self.replica = replica
        self.session = session
        self.url = f"http://127.0.0.1:{serving.bound.port}"
        self.feeds = serving.feeds

    async def get(self, path: str, status: int = 200, method: str = "GET", **headers: str) -> Any:
        """Return the document at a path below /api/v1, which is not encoded any further."""
        url = URL(f"{self.url}{PREFIX}{path}", encoded=True)
        async with self.session.request(method, url, headers=headers) as answer:
            text = await answer.text()
            assert answer.status == status, text
            if answer.content_type == "application/json":
                return json.loads(text)
            assert answer.content_type == "text/plain"
            return text

    @asynccontextmanager
    async def stream(self, query: str = "") -> AsyncIterator[Events]:
        url = URL(f"{self.url}{PREFIX}/stream{query}", encoded=True)
        async with self.session.get(url) as answer:
            assert answer.status == 200, await answer.text()
            assert answer.content_type == "text/event-stream"
            yield Events(answer.content, self)


@asynccontextmanager
async def asked(
    limits: Limits | None = None,
    store: FlakyStore | None = None,
    facade: Any = None,
    listen: str = "127.0.0.1",
) -> AsyncIterator[Asked]:
    config = replace(CONFIG, limits=limits or Limits())
    clock = FakeClock()
    uids = (f"run-{number}" for number in itertools.count(1))
    page = MetricsPage(Metrics(), lambda: None, "memory", "1.2.3")
    replica = Replica(clock, "memory", "1.2.3")
    async with Driver.running(
        store or FlakyStore(), clock, config, new_uid=lambda: next(uids)
    ) as driver:
        replica.lead(driver)
        shown = handlers.Server(replica, clock, config, facade)
        async with (
            serving_http(shown, page, Listen(listen, 0)) as serving,
            aiohttp.ClientSession() as session,
        ):
            yield Asked(driver, clock, replica, session, serving)


# ------------------------------------------------------------------ documents


@pytest.mark.quick
async def test_a_job_is_answered_as_rdzvctl_shows_it() -> None:
    async with asked() as s:
        n1, _ = await s.pair()
        said = Progress("job-7", "run-1", 0, (RankProgress(0, 41, 100, 2.5),))
        s.report(n1, said)
        job = await s.get("/jobs/job-7")
        assert (job["version"], job["state"], job["round"], job["world_size"]) == (
            1,
            "running",
            0,
            4,
        )
        assert [(n["node_id"], n["state"], n["rank_first"]) for n in job["nodes"]] == [
            ("n1", "seated", 0),
            ("n2", "seated", 2),
        ]
        assert job["progress"][0]["step"] == 41
        assert job["last_failure"] is None and job["submission"] is None
        (row,) = (await s.get("/jobs"))["jobs"]
        assert (row["rdzv_id"], row["nodes"], row["reason"]) == ("job-7", 2, job["reason"])


async def test_the_documents_are_those_of_rdzvctl() -> None:
    """Both call the same function; only the values could differ."""
    from rdzv.view import as_json

    async with asked() as s:
        await s.pair()
        server = handlers.Server(s.replica, s.clock, CONFIG)
        status = await server.status("job-7")
        assert await s.get("/jobs/job-7") == json.loads(as_json.document(status))
        assert await s.get("/nodes") == json.loads(as_json.document(server.nodes()))
        found = json.loads(as_json.document({"servers": await s.replica.servers()}))
        served = await s.get("/servers")
        # The machine's own clock advances between the two.
        before_ms, after_ms = (d["servers"][0].pop("unix_ms") for d in (found, served))
        assert 0 < before_ms <= after_ms
        assert served == found


async def test_history_nodes_and_servers_are_answered() -> None:
    async with asked() as s:
        await s.pair()
        events = await s.get("/jobs/job-7/events")
        assert events["rdzv_id"] == "job-7"
        assert [e["name"] for e in events["events"]][-1] == "RoundCompleted"
        assert events["events"][-1]["fields"]["round"] == 0
        (last,) = (await s.get("/jobs/job-7/events?limit=1"))["events"]
        assert last == events["events"][-1]
        nodes = (await s.get("/nodes"))["nodes"]
        assert [(n["node_id"], n["state"]) for n in nodes] == [
            ("n1", "connected"),
            ("n2", "connected"),
        ]
        one = await s.get("/nodes/n1")
        assert one["jobs"][0]["rdzv_id"] == "job-7"
        assert one["without_it"].startswith("job-7 would have 1 of the 2 nodes that it needs")
        assert {node["without_it"] for node in (await s.get("/nodes"))["nodes"]} == {None}
        (server,) = (await s.get("/servers"))["servers"]
        assert server["leads"] and server["version"] == "1.2.3"


async def test_the_ledger_of_a_run_is_answered() -> None:
    async with asked() as s:
        await s.pair()
        await s.clock.advance(4_000)
        found = await s.get("/jobs/job-7/ledger")
        assert (found["version"], found["rdzv_id"], found["run_numbers"]) == (1, "job-7", [1])
        assert found["ledger"]["phases"]["training"] == found["ledger"]["wall_ms"] == 4_000
        (interval,) = found["ledger"]["intervals"]
        assert (interval["phase"], interval["round"]) == ("training", 0)
        assert (interval["nodes"], interval["seats"]) == (2, 2)
        assert await s.get("/jobs/job-7/ledger?run=1") == found
        error = await s.get("/jobs/job-7/ledger?run=2", 404)
        assert "run 2 of job-7 is not kept; runs that are: 1" in error["message"]


async def test_what_all_jobs_have_spent_is_answered() -> None:
    async with asked() as s:
        await s.pair()
        await s.clock.advance(4_000)
        found = await s.get("/report")
        assert found["until_unix_ms"] - found["from_unix_ms"] == 168 * 3_600_000
        (job,) = found["jobs"]
        assert (job["rdzv_id"], job["wall_ms"], found["node_ms"]) == ("job-7", 4_000, 8_000)
        assert (found["goodput"], found["causes"], found["nodes"]) == (1.0, [], [])


async def test_stacks_are_taken_for_no_page_of_another_site() -> None:
    path, asks = "/jobs/job-7/stacks", "POST"
    async with asked() as s:
        n1, n2 = await s.pair()
        for elsewhere in ("http://evil.test", "null", "http://127.0.0.1:1"):
            await s.get(path, 403, asks, Origin=elsewhere)
        taking = asyncio.ensure_future(s.get(path, method=asks, Origin=s.url))
        for stream, rank in ((n1, 0), (n2, 2)):
            requests: list[TakeStacks] = []
            while not requests:
                requests = [one for one in read(stream) if isinstance(one, TakeStacks)]
                await asyncio.sleep(0.01)
            (request,) = requests
            stacks = (WorkerStack(rank, 0, 4711, "S", ()), WorkerStack(rank + 1, 1, 4712, "S", ()))
            s.report(stream, Stacks(request.request, stacks, last=True))
        report = await taking
        assert [stack["rank"] for stack in report["stacks"]] == [0, 1, 2, 3]
        assert (report["round"], report["reason"]) == (0, "an operator asked for them")
        (row,) = await s.driver.history.of(AUDIT, 10)
        assert row.data.startswith("take stacks job-7, by ")
        await s.get("/jobs/nobody/stacks", 404, asks)
        assert len(await s.driver.history.of(AUDIT, 10)) == 1


async def test_what_has_happened_on_a_node_is_told_of_all_jobs() -> None:
    async with asked() as s:
        _, n2 = await s.pair()
        failed = report(message="no")
        fail = Fail("n2", n2.incarnation, "run-1", 0, (failed,))
        await s.hear(n2, fail)
        found = await s.get("/nodes/n2/events")
        names = [event["name"] for event in found["events"]]
        assert "WorkerFailed" in names
        assert {event["rdzv_id"] for event in found["events"]} == {"job-7"}
        assert not any("n1 joined" in event["text"] for event in found["events"])
        assert len((await s.get("/nodes/n2/events?limit=1"))["events"]) == 1
        assert (await s.get("/nodes/nobody/events"))["events"] == []


async def test_the_stacks_that_a_hang_has_left_are_answered_and_none_are_taken() -> None:
    frame = StackFrame("step", "/home/ada/train.py", 41)
    stack = WorkerStack(0, 0, 4711, "S", (ThreadStack("MainThread", True, (frame,)),), node_id="n1")
    async with asked() as s:
        n1, _ = await s.pair()
        error = await s.get("/jobs/job-7/stacks", 400)
        assert "no round of this run has hung; `rdzvctl stacks job-7` takes" in error["message"]
        for number in (0, 3):
            where = (Group((0,), f"in step of round {number}"),)
            await s.driver.stack_archive.keep(
                CollectedStacks("job-7", "run-1", number, s.clock.at_ms, "it hung", where, (stack,))
            )
        told = await s.get("/jobs/job-7/stacks")
        assert (told["version"], told["round"], told["reason"]) == (1, 3, "it hung")
        assert told["groups"] == [{"ranks": [0], "where": "in step of round 3"}]
        (shown,) = told["stacks"]
        assert (shown["node_id"], shown["pid"]) == ("n1", 4711)
        assert shown["threads"][0]["frames"][0]["line"] == 41
        assert (await s.get("/jobs/job-7/stacks?round=0"))["round"] == 0
        assert "no stacks of round 1" in (await s.get("/jobs/job-7/stacks?round=1", 400))["message"]
        assert not any(isinstance(one, TakeStacks) for one in read(n1))


# ------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("path", "status", "code", "words"),
    [
        ("/jobs/nobody", 404, "UnknownJobError", "no job nobody is known here"),
        ("/jobs/nobody/events", 404, "UnknownJobError", "nobody"),
        ("/jobs/nobody/ledger", 404, "UnknownJobError", "nobody"),
        ("/jobs/nobody/logs", 404, "UnknownJobError", "nobody"),
        ("/nodes/nobody", 404, "UnknownNodeError", "no node nobody is known here"),
        ("/jobs/nobody/stacks", 404, "UnknownJobError", "no job nobody is known here"),
        ("/jobs/job-7/stacks?round=-1", 400, "InvalidRequestError", "round='-1' is not a whole"),
        ("/stream?job=nobody", 404, "UnknownJobError", "nobody"),
        ("/jobs/job-7/events?limit=0", 400, "InvalidRequestError", "a number from 1 to"),
        ("/jobs/job-7/events?limit=x", 400, "InvalidRequestError", "limit='x' is not a whole"),
        ("/jobs/job-7/events?limit=1&limit=2", 400, "InvalidRequestError", "more than once"),
        ("/jobs/job-7/logs?rank=-1", 400, "InvalidRequestError", "rank='-1' is not a whole"),
        ("/jobs/job-7/logs?rank=9", 400, "InvalidRequestError", "has no RANK 9 in round 0"),
        ("/jobs/job-7/logs?follow=yes", 400, "InvalidRequestError", "true or false"),
        ("/jobs?limit=3", 400, "InvalidRequestError", "no parameter 'limit' here"),
        ("/jobs/a%2Fb", 400, "InvalidRequestError", "a/b"),
        ("/jobs/%3Cimg%20src=x%3E", 400, "InvalidRequestError", "<img src=x>"),
        ("/jobs/%22%7D", 400, "InvalidRequestError", '"}'),
        ("/jobs/%FF%0A", 400, "InvalidRequestError", "rdzv_id"),
        ("/nodes/%00", 400, "InvalidRequestError", "node_id"),
        ("/jobs/job-7/nothing", 404, "HttpError", "openapi.json says what there is"),
        ("/", 404, "HttpError", "there is nothing at"),
    ],
)
async def test_errors_are_documents_with_a_code(
    path: str, status: int, code: str, words: str
) -> None:
    async with asked() as s:
        await s.pair()
        error = await s.get(path, status)
        assert (error["version"], error["code"], error["leader"]) == (1, code, None)
        assert words in error["message"]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
async def test_nothing_can_be_changed(method: str) -> None:
    async with asked() as s, s.session.request(method, f"{s.url}{PREFIX}/jobs") as answer:
        assert answer.status == 405
        assert set(answer.headers["Allow"].split(",")) == {"GET", "HEAD"}
        error = await answer.json()
    assert error["code"] == "HttpError" and "use GET" in error["message"]


async def test_a_server_that_stands_by_names_the_one_that_leads() -> None:
    class Election:
        proven = False

        class leader:  # noqa: N801
            address = "10.0.0.9:29400"

    async with asked() as s:
        s.replica.election = Election()  # type: ignore[assignment]
        for path in ("/jobs", "/jobs/job-7", "/nodes", "/stream", "/jobs/job-7/logs"):
            error = await s.get(path, 503)
            assert (error["code"], error["leader"]) == ("NotLeaderError", "10.0.0.9:29400")
            assert "the one at 10.0.0.9:29400 leads" in error["message"]


async def test_more_requests_at_once_than_the_limit_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rdzv.server.http.api.REQUESTS", 1)
    async with asked(store=(store := FlakyStore())) as s:
        await s.pair()
        store.gate = asyncio.Event()
        listing = asyncio.Event()

        pages = store.pages

        async def slow() -> AsyncGenerator[Page, None]:
            listing.set()
            assert store.gate is not None
            await store.gate.wait()
            async for page in pages():
                yield page

        store.pages = slow  # type: ignore[method-assign]
        first = asyncio.ensure_future(s.get("/jobs"))
        await listing.wait()
        error = await s.get("/jobs", 429)
        assert (
            error["code"] == "LimitExceededError"
            and "requests are being answered" in error["message"]
        )
        store.gate.set()
        assert len((await first)["jobs"]) == 1
        assert len((await s.get("/jobs"))["jobs"]) == 1


async def test_a_bug_is_an_error_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with asked() as s:
        monkeypatch.setattr(handlers.Server, "nodes", lambda *_: 1 / 0)
        error = await s.get("/nodes", 500)
    assert error["code"] == "RendezvousError" and "bug" in error["message"]
    assert "ZeroDivisionError" not in json.dumps(error)
    assert "ZeroDivisionError" in caplog.text


# ------------------------------------------------------------------ who may ask


async def test_a_stranger_name_for_this_machine_is_refused_on_loopback_alone() -> None:
    async with asked() as s:
        for host in ("127.0.0.1:80", "localhost:1234", "[::1]:80", "page.localhost"):
            await s.get("/jobs", 200, Host=host)
        for host in ("evil.example", "localhost.evil.example:80", "a b", ""):
            error = await s.get("/jobs", 400, Host=host)
            assert "ask for 127.0.0.1" in error["message"]
        async with s.session.get(f"{s.url}/healthz", headers={"Host": "probe.example"}) as answer:
            assert answer.status == 200
    async with asked(listen="0.0.0.0") as s:
        await s.get("/jobs", 200, Host="rdzv.example")


async def test_what_is_answered_can_not_be_taken_for_something_else() -> None:
    async with asked() as s:
        for path in ("/", f"{PREFIX}/jobs", f"{PREFIX}/jobs/x", "/web/app.js"):
            async with s.session.get(s.url + path) as answer:
                headers = answer.headers
                assert headers["X-Content-Type-Options"] == "nosniff"
                assert headers["X-Frame-Options"] == "DENY"
                assert "Access-Control-Allow-Origin" not in headers
                assert headers["Cache-Control"] == ("no-store" if "api" in path else "no-cache")


async def test_every_file_of_the_page_is_served_with_its_policy() -> None:
    async with asked() as s:
        names = [path.name for path in FOLDER.iterdir() if path.suffix in (".js", ".css", ".svg")]
        assert "app.js" in names
        for path in ("/", *(f"/web/{name}" for name in names)):
            async with s.session.get(s.url + path) as answer:
                assert answer.status == 200
                assert answer.headers["Content-Security-Policy"] == POLICY
                tag = answer.headers["ETag"]
                await answer.read()
            async with s.session.get(s.url + path, headers={"If-None-Match": tag}) as answer:
                assert answer.status == 304
        async with s.session.get(f"{s.url}/web/..%2F..%2Fclient.py") as answer:
            assert answer.status == 404


# ------------------------------------------------------------------ logs


async def ask_of(stream: Stream) -> ReadLog:
    """Wait until a node is asked for logs."""
    async with asyncio.timeout(WAIT_S):
        while several := await stream.outbox.take():
            for told in several:
                if isinstance(told, ReadLog):
                    return told
    raise AssertionError("the stream has ended")


async def answer_of(
    s: Server, stream: Stream, rank: int, text: bytes = b"", **more: Any
) -> ReadLog:
    """Wait until a node is asked for logs, and answer once."""
    request = await ask_of(stream)
    piece = LogPiece(request.request, 0, rank % 2, rank, data=text, **more)
    s.report(stream, piece)
    return request


async def test_logs_of_all_ranks_say_whose_lines_they_are() -> None:
    async with asked() as s:
        n1, n2 = await s.pair()
        reading = asyncio.ensure_future(s.get("/jobs/job-7/logs?tail=7"))
        first = await answer_of(s, n1, 0, b"one\ntw")
        assert (first.tail_lines, first.tail_bytes, first.follow) == (7, LOG_BYTES, False)
        await answer_of(s, n1, 0, b"o\n\xff<b>\n")
        await answer_of(s, n1, 0, last=True)
        await answer_of(s, n2, 2, last=True, error="no such folder")
        text = await reading
    assert text.splitlines() == [
        "[rank 0] one",
        "[rank 0] two",
        "[rank 0] �<b>",
        "rdzv: n2: no such folder",
    ]


async def test_logs_of_one_rank_are_its_lines_alone_and_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rdzv.server.http.api.LOG_BYTES", 40)
    async with asked() as s:
        n1, _ = await s.pair()
        reading = asyncio.ensure_future(s.get("/jobs/job-7/logs?rank=1&round=0"))
        request = await answer_of(s, n1, 1, b"twenty characters...\n")
        assert (request.rank, request.round, request.tail_lines) == (1, 0, 200)
        await answer_of(s, n1, 1, b"twenty characters...\n")
        lines = (await reading).splitlines()
    assert lines[:2] == ["twenty characters..."] * 2
    assert lines[2].startswith("rdzv: more than 40 bytes were written")


async def test_logs_that_are_followed_come_as_they_are_written() -> None:
    async with asked() as s:
        n1, _ = await s.pair()
        url = f"{s.url}{PREFIX}/jobs/job-7/logs?rank=0&follow=true"
        async with asyncio.TaskGroup() as tasks:
            opening = tasks.create_task(s.session.get(url).__aenter__())
            await answer_of(s, n1, 0, b"one\n")
            answer = await opening
            async with asyncio.timeout(WAIT_S):
                assert await answer.content.readline() == b"one\n"
                await answer_of(s, n1, 0, b"two\n")
                assert await answer.content.readline() == b"two\n"
        answer.close()
        # A client that has gone delays nothing.
        await until(lambda: s.driver.logs.statistics == (0, 0))


@pytest.mark.slow
async def test_who_follows_logs_and_leaves_before_the_first_text_is_no_bug(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """# A running generator was closed, and "a bug in rdzvd" was logged."""
    async with asked() as s:
        n1, _ = await s.pair()
        url = f"{s.url}{PREFIX}/jobs/job-7/logs?rank=0&follow=true"
        opening = asyncio.ensure_future(s.session.get(url).__aenter__())
        await ask_of(n1)
        await until(lambda: s.driver.logs.statistics == (1, 1))
        # The headers are sent after a moment without a text; it leaves before and after that.
        answer = await opening
        answer.close()
        await until(lambda: s.driver.logs.statistics == (0, 0))
        opening = asyncio.ensure_future(s.session.get(url).__aenter__())
        await until(lambda: s.driver.logs.statistics == (1, 1))
        opening.cancel()
        await until(lambda: s.driver.logs.statistics == (0, 0))
    assert "bug" not in caplog.text
    assert "asynchronous generator" not in caplog.text


# ------------------------------------------------------------------ the stream


async def test_the_fleet_is_pushed_whole_and_then_what_changes() -> None:
    async with asked() as s:
        _, n2 = await s.pair()
        async with s.stream() as events:
            found = await events.first()
            (jobs,), (nodes,) = found["jobs"], found["nodes"]
            assert ageless(jobs) == ageless(await s.get("/jobs"))
            assert [n["node_id"] for n in nodes["nodes"]] == ["n1", "n2"]
            failed = report(message="no")
            await s.hear(n2, Fail("n2", n2.incarnation, "run-1", 0, (failed,)))
            (row,) = (await events.until("jobs"))["jobs"]
            assert (row["rdzv_id"], row["state"]) == ("job-7", "stopping")
            told = await events.until("nodes")
            assert [n["jobs"][0]["state"] for n in told["nodes"]] == ["stopping"] * 2
            await s.connect("n3")
            (node,) = (await events.until("nodes"))["nodes"]
            assert node["node_id"] == "n3"


async def test_a_job_that_is_forgotten_and_a_node_that_is_lost_are_gone() -> None:
    async with asked() as s:
        n1 = await s.connect("n1")
        await s.join(n1, (1, 1))
        async with s.stream() as events:
            await events.first()
            await s.hear(n1, Succeed("n1", n1.incarnation, "run-1", 0))
            (row,) = (await events.until("jobs"))["jobs"]
            assert row["state"] == "succeeded"
            s.driver.connections.detach(n1)
            gone = await events.until("gone")
            assert (gone["jobs"], gone["nodes"]) == ([], ["n1"])
            await s.driver.operations.forget("job-7")
            gone = await events.until("gone")
            assert (gone["jobs"], gone["nodes"]) == (["job-7"], [])


async def test_what_an_operator_says_of_a_node_is_pushed() -> None:
    async with asked() as s:
        await s.pair()
        async with s.stream() as events:
            await events.first()
            await s.driver.fleet.cordon("n1", "its fan is loud")
            (node,) = (await events.until("nodes"))["nodes"]
            assert (node["node_id"], node["cordon_reason"]) == ("n1", "its fan is loud")
            await s.driver.fleet.uncordon("n1")
            (node,) = (await events.until("nodes"))["nodes"]
            assert not node["cordoned"]


@pytest.mark.quick
async def test_one_job_is_pushed_with_its_history() -> None:
    async with asked() as s:
        n1, _ = await s.pair()
        async with s.stream("?job=job-7") as events:
            found = await events.first()
            (job,), (history,) = found["job"], found["events"]
            assert (job["rdzv_id"], job["state"]) == ("job-7", "running")
            assert history["events"][-1]["name"] == "RoundCompleted"
            s.report(n1, Progress("job-7", "run-1", 0, (RankProgress(0, 41, 100, 2.5),)))
            assert (await events.until("job"))["progress"][0]["step"] == 41
            failed = report(message="no")
            await s.hear(n1, Fail("n1", n1.incarnation, "run-1", 0, (failed,)))
            assert (await events.until("job"))["state"] == "stopping"
            names = [e["name"] for e in (await events.until("events"))["events"]]
            assert "RoundEnded" in names


async def test_what_happens_elsewhere_is_not_pushed_to_who_follows_one_job() -> None:
    async with asked() as s:
        await s.pair()
        async with s.stream("?job=job-7") as events:
            await events.first()
            n9 = await s.connect("n9")
            await s.hear(n9, join(n9, (1, 1)), "job-8")
            await s.hear(n9, join(n9))
            # The first event is of job-7, and has n9 as a spare.
            name, job = await events.next()
            assert name == "job"
            assert [n["node_id"] for n in job["nodes"]] == ["n1", "n2", "n9"]


async def test_who_comes_later_sees_everything_and_the_others_nothing_twice() -> None:
    async with asked() as s:
        await s.pair()
        async with s.stream() as one:
            await one.first()
            async with s.stream() as two:
                found = await two.first()
                assert ageless(found["jobs"]) == ageless([await s.get("/jobs")])
                await s.connect("n3")
                assert (await one.next())[0] == (await two.next())[0] == "nodes"


async def test_a_large_fleet_comes_in_parts() -> None:
    async with asked() as s:
        n1 = await s.connect("n1")
        for number in range(feeds_module.ROWS + 1):
            await s.hear(n1, join(n1, (2, 2)), f"job-{number:04d}")
        async with s.stream() as events:
            parts = (await events.first())["jobs"]
        assert [len(part["jobs"]) for part in parts] == [feeds_module.ROWS, 1]
        names = [job["rdzv_id"] for job in (await s.get("/jobs"))["jobs"]]
        assert [row["rdzv_id"] for part in parts for row in part["jobs"]] == names


async def test_a_stream_that_is_silent_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rdzv.server.http.api.STREAM_BEAT_S", 0.02)
    async with asked() as s:
        async with s.session.get(f"{s.url}{PREFIX}/stream") as answer:
            async with asyncio.timeout(WAIT_S):
                said = await answer.content.readuntil(b"event: beat\ndata: ")
        assert b": still here\n" in said


async def test_a_reader_that_is_too_slow_is_dropped_and_told_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rdzv.server.http.state_feeds.STREAM_FRAMES", 3)
    monkeypatch.setattr("rdzv.server.http.state_feeds.STREAM_BYTES", 10)
    reader = Reader()
    reader.put([b"1", b"2", b"3"])
    assert await reader.next() == b"1"
    reader.put([b"4"])
    assert reader.ended is None
    reader.put([b"5"])
    assert reader.ended is not None
    assert "read faster" in str(reader.ended)
    assert await reader.next() is None
    reader = Reader()
    reader.put([b"123456", b"123456"])
    assert reader.ended is not None


async def test_a_slow_reader_hears_of_it_and_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rdzv.server.http.state_feeds.STREAM_FRAMES", 4)
    async with asked() as s:
        await s.pair()
        async with s.stream("?job=job-7") as slow:
            await slow.first()
            (feed,) = s.feeds.by_rdzv_id.values()
            (reader,) = feed.readers
            # As if its connection took nothing: events that are put wait.
            reader.put([feeds_module.READY] * 5)
            error = await slow.until("end")
            assert error["code"] == "LimitExceededError"
        async with s.stream("?job=job-7") as again:
            assert (await again.first())["job"]


async def test_what_happens_beside_any_step_is_pushed_too() -> None:
    """A hang changes nothing of the job until its stacks are taken."""
    async with asked() as s:
        n1, _ = await s.pair()
        async with s.stream("?job=job-7") as events:
            await events.first()
            hung = HungWorker(0, 0, 4711, 60_000, "no step")
            s.report(n1, Hung("job-7", "run-1", 0, (hung,)))
            told = await events.until("events")
            assert told["events"][-1]["name"] == "WorkersHang"


async def test_more_readers_than_the_limit_are_refused_and_those_gone_do_not_count() -> None:
    async with asked(Limits(http_streams=1)) as s:
        await s.pair()
        async with s.stream() as events:
            await events.first()
            error = await s.get("/stream", 429)
            assert "`http_streams`" in error["message"]
        await until(
            lambda: not (s.feeds.readers or s.feeds.by_rdzv_id or s.driver.watchers.followers)
        )


async def test_who_follows_a_job_that_nobody_knows_gives_the_place_back() -> None:
    async with asked(Limits(http_streams=1)) as s:
        await s.pair()
        for _ in range(3):
            assert (await s.get("/stream?job=job-8", 404))["code"] == "UnknownJobError"
        async with s.stream("?job=job-7") as events:
            assert (await events.first())["job"][0]["state"] == "running"


async def test_streams_end_with_a_reason_when_the_server_stops() -> None:
    async with asked() as s:
        await s.pair()
        async with s.stream() as events, s.stream("?job=job-7") as other:
            await events.first()
            await other.first()
            s.replica.stand_by(RendezvousConnectionError("it stops"))
            for one in (events, other):
                error = await one.until("end")
                assert error["code"] == "NotLeaderError"


async def test_streams_end_when_http_is_closed() -> None:
    async with asyncio.timeout(WAIT_S):
        async with asked() as s:
            await s.pair()
            opened = s.stream()
            events = await opened.__aenter__()
            await events.first()
            ending = asyncio.ensure_future(events.until("end"))
            s.feeds.close()
            assert (await ending)["code"] == "RendezvousConnectionError"
            with pytest.raises(AssertionError, match="stopping"):
                async with s.stream():
                    pass


async def test_a_store_that_is_away_ends_no_stream() -> None:
    async with asked(store=(store := FlakyStore())) as s:
        n1, _ = await s.pair()
        async with s.stream() as fleet, s.stream("?job=job-7") as job:
            await fleet.first()
            await job.first()
            store.away = RendezvousConnectionError("no answer")
            await s.connect("n3")
            assert [n["node_id"] for n in (await fleet.until("nodes"))["nodes"]] == ["n3"]
            s.report(n1, Progress("job-7", "run-1", 0, (RankProgress(0, 41, 100, 2.5),)))
            assert (await job.until("job"))["progress"][0]["step"] == 41


async def test_a_job_that_could_not_be_read_is_pushed_when_the_store_is_back() -> None:
    """It was postponed, and nothing woke the task that sends it."""
    store = FlakyStore()
    async with asked(store=store) as s:
        n1, n2 = await s.pair()
        async with s.stream() as fleet:
            await fleet.first()
            for stream in (n1, n2):
                succeed = Succeed(stream.node_id, stream.incarnation, "run-1", 0)
                await s.hear(stream, succeed)
            # An ended job is not in memory: it has to be read for this.
            store.away = RendezvousConnectionError("no answer")
            while not s.driver.trouble:
                await s.clock.advance(250)
                await asyncio.sleep(0.01)
            store.away = None
            while (await fleet.until("jobs"))["jobs"][-1]["state"] != "succeeded":
                pass


# ------------------------------------------------------------------ jobs that are only watched


class Watching:
    """A facade whose jobs have names chosen by strangers."""

    def __init__(self, *names: str) -> None:
        self.names = list(names)

    def view(self, rdzv_id: str) -> Any:
        if rdzv_id not in self.names:
            return None
        shown = view(vacant(rdzv_id, Tuning()), 0)
        return replace(shown, run="c10d", backend="c10d", state=JobState.RUNNING)

    def views(self) -> tuple[Any, ...]:
        return tuple(self.view(name) for name in self.names)


ODD = ("<script>alert(1)</script>", 'a"b\\c', "a/b?c#d&e=f%2F", "jöb 🚀", "new\nline", "'")


@pytest.mark.parametrize("name", ODD)
async def test_jobs_with_odd_names_are_answered_and_pushed(name: str) -> None:
    async with asked(facade=Watching(name)) as s:
        path = quote(name, safe="")
        assert (await s.get(f"/jobs/{path}"))["rdzv_id"] == name
        assert (await s.get(f"/jobs/{path}/events"))["events"] == []
        assert "only watched" in (await s.get(f"/jobs/{path}/logs", 400))["message"]
        assert [j["rdzv_id"] for j in (await s.get("/jobs"))["jobs"]] == [name]
        async with s.stream(f"?job={path}") as events:
            ((job,), (history,)) = (await events.first()).values()
            assert job["rdzv_id"] == history["rdzv_id"] == name


async def test_watched_jobs_that_come_and_go_are_pushed() -> None:
    watching = Watching("one")
    async with asked(facade=watching) as s:
        await s.pair()
        async with s.stream() as events:
            (jobs,) = (await events.first())["jobs"]
            assert [(j["rdzv_id"], j["backend"]) for j in jobs["jobs"]] == [
                ("job-7", "rdzv"),
                ("one", "c10d"),
            ]
            watching.names = ["two"]
            assert [j["rdzv_id"] for j in (await events.until("jobs"))["jobs"]] == ["two"]
            assert (await events.until("gone"))["jobs"] == ["one"]


# ------------------------------------------------------------------ the document of it all


def test_the_openapi_document_is_current(request: pytest.FixtureRequest) -> None:
    """`pytest --rewrite` updates it."""
    wanted = json.dumps(document(), indent=2) + "\n"
    if request.config.getoption("--rewrite"):
        OPENAPI.write_text(wanted)
    assert OPENAPI.read_text() == wanted, "run: pytest tests/unit/server/test_api.py --rewrite"


async def test_the_openapi_document_is_served_and_names_every_route() -> None:
    async with asked() as s:
        served = await s.get("/openapi.json")
    assert served == json.loads(OPENAPI.read_text())
    assert set(served["paths"]) == {one.http.path for one in OPERATIONS if one.http}
    for path in served["paths"].values():
        responses = path["get"]["responses"]
        assert {"200", "400", "429", "503"} <= responses.keys()


async def test_the_page_and_probes_stay_what_they_are() -> None:
    async with asked() as s:
        async with s.session.get(f"{s.url}/readyz") as answer:
            assert (await answer.text()).startswith("leads")
        async with s.session.get(f"{s.url}/nothing") as answer:
            assert answer.status == 404
            assert answer.content_type == "text/plain"
    await settle()
