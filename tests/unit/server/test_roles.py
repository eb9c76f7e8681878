"""Which role may do what: every call and every path, with every role, at a real server.

The expected table is written again here, independently of the one under test.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import aiohttp
import grpc
import grpc.aio
import pytest
from grpc_reflection.v1alpha import reflection

from rdzv.core.commands import Tick
from rdzv.errors import ERROR_CODE_METADATA_KEY, DeniedError, NotLeaderError, UnauthenticatedError
from rdzv.server.driver import Driver
from rdzv.server.http import listener
from rdzv.server.http.listener import serving_http
from rdzv.server.operations.handlers import Server
from rdzv.server.replication.replica import Replica
from rdzv.server.rpc import calls, grpc_listener
from rdzv.server.rpc.grpc_listener import serving
from rdzv.server.security import roles
from rdzv.server.security.callers import Role
from rdzv.server.telemetry.metrics_page import MetricsPage
from rdzv.server.telemetry.server_metrics import Metrics
from rdzv.stores.memory import MemoryStore
from rdzv.v1 import rdzv_pb2 as pb
from tests.support.driven import FakeClock
from tests.support.settings import rdzvd_settings

pytestmark = pytest.mark.slow

ADMIN = frozenset({"admin"})
READERS = frozenset({"read", "submit", "admin"})
SUBMITTERS = frozenset({"submit", "admin"})
OPEN = frozenset({None, *Role})

EXPECTED = {
    "Attach": frozenset({"node", "submit", "admin"}),
    **dict.fromkeys(("GetStatus", "WatchJob", "ListJobs", "ListEvents"), READERS),
    **dict.fromkeys(("ListServers", "ListNodes", "ServerReflectionInfo"), READERS),
    **dict.fromkeys(("ReadLogs", "TakeStacks", "StopJob", "RestartJob", "ScaleJob"), SUBMITTERS),
    **dict.fromkeys(("SubmitJob", "ForgetJob"), SUBMITTERS),
    **dict.fromkeys(("CordonNode", "UncordonNode", "DrainNode", "UndrainNode", "Backup"), ADMIN),
    **dict.fromkeys(("CreateToken", "ListTokens", "RevokeTokens", "ListAudit"), ADMIN),
    **dict.fromkeys(("Check", "Watch"), OPEN),
    **dict.fromkeys(("/", "/web/app.js", "/healthz", "/readyz"), OPEN),
    "/metrics/nodes/{node_id}": READERS,
    **dict.fromkeys(("/metrics", "/sd", "/api/v1/jobs", "/api/v1/jobs/{rdzv_id}"), READERS),
    **dict.fromkeys(("/api/v1/jobs/{rdzv_id}/events", "/api/v1/nodes", "/api/v1/stream"), READERS),
    **dict.fromkeys(("/api/v1/jobs/{rdzv_id}/ledger", "/api/v1/report"), READERS),
    "/api/v1/jobs/{rdzv_id}/restarts": READERS,
    **dict.fromkeys(("/api/v1/nodes/{node_id}", "/api/v1/nodes/{node_id}/events"), READERS),
    **dict.fromkeys(("/api/v1/servers", "/api/v1/openapi.json"), READERS),
    **dict.fromkeys(("/api/v1/jobs/{rdzv_id}/logs", "/api/v1/jobs/{rdzv_id}/stacks"), SUBMITTERS),
}
"""Callers with these roles may make this call or request; others may not."""

REFUSALS = {grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED}
WHO_IS_LET_IN_HEARS = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND}


@dataclass
class Guarded:
    """A server that requires authentication, with a token for each role and for some people."""

    driver: Driver
    clock: FakeClock
    target: str
    url: str
    routes: list[str]
    methods: list[str]
    tokens: dict[str, str]

    def channel(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(self.target)

    def header(self, name: str | None) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.tokens[name]}"),) if name else ()


@asynccontextmanager
async def guarded(monkeypatch: pytest.MonkeyPatch, **config_as: Any) -> AsyncIterator[Guarded]:
    made: list[Any] = []
    methods: list[str] = []
    seen = calls.Interceptor.intercept_service

    async def noting(self: Any, continuation: Any, details: Any) -> Any:
        methods.append(details.method)
        return await seen(self, continuation, details)

    monkeypatch.setattr(calls.Interceptor, "intercept_service", noting)
    application = aiohttp.web.Application
    monkeypatch.setattr(
        aiohttp.web,
        "Application",
        lambda *args, **more: made.append(application(*args, **more)) or made[-1],
    )
    clock = FakeClock()
    config = rdzvd_settings(auth="required", **config_as)
    replica = Replica(clock, "memory", "1.2.3")
    page = MetricsPage(Metrics(), lambda: None, "memory", "1.2.3")
    async with Driver.running(MemoryStore(), clock, config, metrics=page.metrics) as driver:
        replica.lead(driver)
        gate = roles.Gate(replica, clock, config, page.metrics)
        guarded = Server(replica, clock, config, gate=gate)
        async with (
            serving(guarded) as grpc_bound,
            serving_http(guarded, page, config.listen) as http,
        ):
            tokens = {}
            for name in (*Role, "ada", "bob"):
                role = Role(name) if name in set(Role) else Role.SUBMIT
                _, tokens[name] = await driver.tokens.create(name, [role], 0)
            routes = [str(r.resource.canonical) for r in made[0].router.routes() if r.resource]
            url = f"http://{http.bound}"
            yield Guarded(driver, clock, str(grpc_bound), url, routes, methods, tokens)


async def refusal(guarded: Guarded, method: str, name: str | None) -> str | None:
    """Make an empty call; return the error code of its refusal.

    The only message is sent with the call, also where a stream is possible: gRPC's client reports a
    write after the refusal as INTERNAL, and the refusal is lost.
    """
    async with guarded.channel() as channel:
        call: Any = channel.unary_stream(method)
        found = call(b"", metadata=guarded.header(name), timeout=60)
        try:
            await found.read()
            return None
        except grpc.aio.AioRpcError as error:
            if error.code() in REFUSALS:
                return dict(error.trailing_metadata() or ())[ERROR_CODE_METADATA_KEY]
            # A permitted caller is told what is wrong with its empty call.
            assert error.code() in WHO_IS_LET_IN_HEARS, f"{name}: {error.code()} {error.details()}"
            return None
        finally:
            found.cancel()


def every_method() -> list[str]:
    """Return the full names of all methods of a server."""
    own = [
        f"/{one.full_name}/{method.name}"
        for one in pb.DESCRIPTOR.services_by_name.values()
        for method in one.methods
    ]
    health, asking = grpc_listener.health.SERVICE_NAME, reflection.SERVICE_NAME
    return [*own, f"/{health}/Check", f"/{health}/Watch", f"/{asking}/ServerReflectionInfo"]


@pytest.mark.quick
def test_every_call_has_a_row_and_no_row_is_of_nothing() -> None:
    assert set(calls.CALLS) == set(every_method())


async def test_every_call_with_every_role(monkeypatch: pytest.MonkeyPatch) -> None:
    async with guarded(monkeypatch) as server:
        for method in every_method():
            found = {who: await refusal(server, method, who) for who in (None, *Role)}
            assert method in server.methods, "the gate stands before it"
            allowed = {who for who, code in found.items() if code is None}
            assert allowed == EXPECTED[method.rpartition("/")[2]], method
            if None not in allowed:
                assert found.pop(None) == UnauthenticatedError.code
            assert set(found.values()) <= {DeniedError.code, None}


@pytest.mark.parametrize(
    ("who", "code"), [(None, UnauthenticatedError.code), ("node", NotLeaderError.code)]
)
async def test_a_stream_is_refused_once_its_first_message_is_here(
    who: str | None, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stand_by(self: Replica) -> None:
        raise NotLeaderError("this one stands by")

    monkeypatch.setattr(Replica, "settled_driver", stand_by)
    async with guarded(monkeypatch) as server, server.channel() as channel:
        call: Any = channel.stream_stream("/rdzv.v1.Rendezvous/Attach")
        stream = call(metadata=server.header(who), timeout=60)
        answer = asyncio.create_task(stream.read())
        assert await asyncio.wait({answer}, timeout=0.05) == (set(), {answer})
        await stream.write(b"")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await answer
        assert dict(refused.value.trailing_metadata() or ())[ERROR_CODE_METADATA_KEY] == code


async def test_a_stream_that_says_nothing_is_refused_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calls, "FIRST_MESSAGE_S", 0.001)
    async with guarded(monkeypatch) as server, server.channel() as channel:
        call: Any = channel.stream_stream("/rdzv.v1.Rendezvous/Attach")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(timeout=60).read()
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_status_that_is_no_refusal_is_not_taken_for_being_let_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with guarded(monkeypatch) as server:
        with pytest.raises(AssertionError, match="UNIMPLEMENTED"):
            await refusal(server, "/rdzv.v1.Control/Nothing", "admin")


async def test_every_path_with_every_role(monkeypatch: pytest.MonkeyPatch) -> None:
    async with guarded(monkeypatch) as server, aiohttp.ClientSession() as session:
        # Reading stacks and collecting them need the same role.
        asked = {("POST", "/api/v1/jobs/{rdzv_id}/stacks"), *(("GET", at) for at in server.routes)}
        for method, path in asked:
            statuses = {}
            for who in (None, *Role):
                url = server.url + path.format(rdzv_id="nobodys", node_id="n1")
                headers = dict(server.header(who))
                async with session.request(method, url, headers=headers) as answer:
                    statuses[who] = answer.status
            allowed = {who for who, status in statuses.items() if status not in (401, 403)}
            is_file = path.startswith("/web/")
            assert allowed == EXPECTED["/web/app.js" if is_file else path], path
            assert None in allowed or statuses[None] == 401, path
        assert {path for _, path in asked} >= {path for path in EXPECTED if path.startswith("/")}


@pytest.mark.quick
async def test_a_path_without_a_row_is_open_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(listener.PATHS, "GET /healthz")
    monkeypatch.delitem(calls.CALLS, "/rdzv.v1.Control/ListJobs")
    async with guarded(monkeypatch) as server, aiohttp.ClientSession() as session:
        async with session.get(f"{server.url}/healthz") as answer:
            assert answer.status == 403
        denied = await refusal(server, "/rdzv.v1.Control/ListJobs", "admin")
        assert denied == DeniedError.code


# ------------------------------------------------------------------ whose job, whose node


async def control(server: Guarded, who: str, method: str, request: Any) -> Any:
    async with server.channel() as channel:
        call: Any = channel.unary_unary(
            f"/rdzv.v1.Control/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=lambda data: data,
        )
        return await call(request, metadata=server.header(who), timeout=60)


async def denied(server: Guarded, who: str, method: str, request: Any) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await control(server, who, method, request)
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
    return refused.value.details() or ""


def submission(rdzv_id: str, run: str) -> pb.SubmitJobRequest:
    return pb.SubmitJobRequest(
        rdzv_id=rdzv_id,
        run=run,
        settings=pb.Settings(
            min_nodes=1,
            max_nodes=1,
            max_restarts=0,
            join_timeout_ms=60_000,
            scale_up=pb.SCALE_UP_EAGER,
        ),
        spec=pb.JobSpec(args=["train.py"], submitter="root"),
        submitted_by="root at head-1",
    )


@pytest.mark.slow
async def test_a_job_is_its_owners_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with guarded(monkeypatch) as server:
        await control(server, "ada", "SubmitJob", submission("job-7", "r1"))
        state = await server.driver.jobs.look("job-7")
        assert state.membership.owner == "ada"
        assert state.membership.submission is not None
        assert state.membership.submission.spec.submitter == "ada", "whatever the caller says"

        run = {"rdzv_id": "job-7", "run": "r1"}
        stop = pb.StopJobRequest(**run, reason="enough")  # type: ignore[arg-type]
        scale = pb.ScaleJobRequest(**run, min_nodes=1, max_nodes=2)  # type: ignore[arg-type]
        assert "it belongs to ada" in await denied(server, "bob", "StopJob", stop)
        await denied(server, "bob", "ScaleJob", scale)
        await denied(server, "bob", "TakeStacks", pb.TakeStacksRequest(rdzv_id="job-7"))
        await denied(server, "bob", "ReadLogs", pb.ReadLogsRequest(rdzv_id="job-7"))
        await denied(server, "bob", "SubmitJob", submission("job-7", "r2"))
        await denied(server, "bob", "ForgetJob", pb.ForgetJobRequest(rdzv_id="job-7"))
        # Every reader sees that it exists and whose it is.
        assert await control(server, "bob", "GetStatus", pb.GetStatusRequest(rdzv_id="job-7"))

        await control(server, "ada", "ScaleJob", scale)
        await control(server, "ada", "StopJob", stop)
        # The name stays hers until she or an admin gives it up.
        await denied(server, "bob", "SubmitJob", submission("job-7", "r2"))
        await control(server, "admin", "SubmitJob", submission("job-7", "r3"))
        state = await server.driver.jobs.look("job-7")
        assert state.membership.owner == "ada"
        assert state.membership.submission is not None
        assert state.membership.submission.spec.submitter == "admin", "it runs as who submits it"
        await control(server, "ada", "StopJob", pb.StopJobRequest(rdzv_id="job-7", run="r3"))
        await control(server, "ada", "ForgetJob", pb.ForgetJobRequest(rdzv_id="job-7"))
        await control(server, "bob", "SubmitJob", submission("job-7", "r4"))
        assert (await server.driver.jobs.look("job-7")).membership.owner == "bob"


@pytest.mark.parametrize("what", ["logs", "stacks"])
async def test_what_workers_write_and_do_is_the_owners_by_http_too(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with guarded(monkeypatch) as server, aiohttp.ClientSession() as session:
        await control(server, "ada", "SubmitJob", submission("job-7", "r1"))
        found = {}
        for who in ("ada", "bob", "admin", "read"):
            url = f"{server.url}/api/v1/jobs/job-7/{what}"
            async with session.get(url, headers=dict(server.header(who))) as answer:
                found[who] = answer.status == 403
        assert found == {"ada": False, "admin": False, "bob": True, "read": True}


class Node:
    """One node's stream, over the network."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def say(self, **body: Any) -> None:
        await self._call.write(pb.NodeMessage(**body).SerializeToString())

    async def hear(self) -> pb.ServerMessage:
        async with asyncio.timeout(100):
            return pb.ServerMessage.FromString(await self._call.read())

    async def hear_of_job(self) -> pb.ServerMessage:
        while (said := await self.hear()).WhichOneof("body") in ("welcome", "lease"):
            pass
        return said

    async def end(self) -> str:
        """Wait until the server ends the stream, and return why."""
        try:
            async with asyncio.timeout(100):
                while await self._call.read() is not grpc.aio.EOF:
                    pass
        except grpc.aio.AioRpcError as error:
            return error.details() or ""
        return ""


def join_of(rdzv_id: str, secret: str = "") -> pb.Join:
    return pb.Join(
        rdzv_id=rdzv_id,
        settings=pb.Settings(
            min_nodes=1,
            max_nodes=2,
            max_restarts=0,
            join_timeout_ms=600_000,
            last_call_timeout_ms=60_000,
            scale_up=pb.SCALE_UP_EAGER,
        ),
        offer=pb.Offer(
            address="10.0.0.1", machine="m", local_world_size=1, store_port=4711, role="default"
        ),
        secret=secret,
    )


@asynccontextmanager
async def node(
    server: Guarded, who: str | None, node_id: str, kind: Any = pb.AGENT_KIND_FOREGROUND
) -> AsyncIterator[Node]:
    async with server.channel() as channel:
        call = channel.stream_stream("/rdzv.v1.Rendezvous/Attach")(
            metadata=server.header(who), timeout=120
        )
        made = Node(call)
        hello = pb.Hello(
            protocol_version=1,
            node_id=node_id,
            instance=f"i-{node_id}-{who}",
            kind=kind,
            address="10.0.0.1",
            pid=1,
        )
        # It may be refused before it has been sent.
        with suppress(grpc.aio.AioRpcError):
            await made.say(hello=hello)
        try:
            yield made
        finally:
            call.cancel()


@pytest.mark.parametrize(
    ("who", "node_id", "kind", "says"),
    [
        ("node", "node", pb.AGENT_KIND_DAEMON, ""),
        ("node", "n2", pb.AGENT_KIND_DAEMON, "acts only for the node of its own name"),
        ("node", "node-4711", pb.AGENT_KIND_FOREGROUND, ""),
        ("node", "node-4711", pb.AGENT_KIND_DAEMON, "acts only for the node of its own name"),
        ("ada", "head-4711", pb.AGENT_KIND_FOREGROUND, ""),
        ("ada", "ada", pb.AGENT_KIND_DAEMON, "needs the role node"),
        ("admin", "n2", pb.AGENT_KIND_DAEMON, ""),
        ("read", "read", pb.AGENT_KIND_FOREGROUND, "needs the role submit or node"),
    ],
)
async def test_a_node_speaks_for_itself_alone(
    who: str, node_id: str, kind: Any, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with guarded(monkeypatch) as server, node(server, who, node_id, kind) as stream:
        if says:
            assert says in await stream.end()
        else:
            assert (await stream.hear()).HasField("welcome")


@pytest.mark.quick
async def test_another_user_does_not_take_over_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    async with guarded(monkeypatch) as server, node(server, "ada", "head-1") as stream:
        assert (await stream.hear()).HasField("welcome")
        async with node(server, "bob", "head-1") as other:
            assert "may not act for node head-1: ada does" in await other.end()


async def test_who_may_bring_nodes_into_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        guarded(monkeypatch) as server,
        node(server, "ada", "head-1") as ada,
        node(server, "bob", "head-2") as bob,
        node(server, "node", "node", pb.AGENT_KIND_DAEMON) as daemon,
    ):
        await ada.say(join=join_of("job-7"))
        assert (await ada.hear_of_job()).HasField("joined")
        assert (await server.driver.jobs.look("job-7")).membership.owner == "ada"

        await bob.say(join=join_of("job-7"))
        refused = (await bob.hear_of_job()).refused
        assert refused.code == DeniedError.code
        assert "bob (token" in refused.message
        assert "it belongs to ada" in refused.message

        await daemon.say(join=join_of("job-7"))
        refused = (await daemon.hear_of_job()).refused
        assert "the server has not placed it there" in refused.message

        # A job that nodes begin by themselves has no owner, and no user may join it.
        await daemon.say(join=join_of("nightly"))
        assert (await daemon.hear_of_job()).HasField("joined")
        assert (await server.driver.jobs.look("nightly")).membership.owner == ""
        await bob.say(join=join_of("nightly"))
        assert "it has no owner" in (await bob.hear_of_job()).refused.message
        # Not even once it has ended: who could begin its next run would own its logs.
        run = (await server.driver.jobs.look("nightly")).membership.run
        await control(server, "admin", "StopJob", pb.StopJobRequest(rdzv_id="nightly", run=run))
        assert (await server.driver.jobs.look("nightly")).membership.ended is not None
        await bob.say(join=join_of("nightly"))
        assert "it has no owner" in (await bob.hear_of_job()).refused.message


async def test_a_revoked_token_ends_the_streams_that_it_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with (
        guarded(monkeypatch) as server,
        node(server, "ada", "head-1") as ada,
        node(server, "bob", "head-2") as bob,
    ):
        assert (await ada.hear()).HasField("welcome")
        assert (await bob.hear()).HasField("welcome")
        await control(server, "admin", "RevokeTokens", pb.RevokeTokensRequest(id_or_name="ada"))
        assert "was revoked" in await ada.end()
        await bob.say(join=join_of("job-7"))
        assert (await bob.hear_of_job()).HasField("joined")


# ------------------------------------------------------------------ audit


async def audited(server: Guarded) -> list[str]:
    answer = await control(server, "admin", "ListAudit", pb.ListAuditRequest())
    return [event.text for event in pb.ListEventsResponse.FromString(answer).events]


async def test_who_did_what_is_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    async with guarded(monkeypatch) as server:
        await control(server, "ada", "SubmitJob", submission("job-7", "r1"))
        stop = pb.StopJobRequest(rdzv_id="job-7", run="r1", reason="enough")
        await denied(server, "bob", "StopJob", stop)
        scale = pb.ScaleJobRequest(
            rdzv_id="job-7", run="r1", min_nodes=2, max_nodes=3, reason="by night rate"
        )
        await control(server, "ada", "ScaleJob", scale)
        await control(server, "ada", "StopJob", stop)
        forget = pb.ForgetJobRequest(rdzv_id="job-7", reason="by root at head-1")
        await control(server, "ada", "ForgetJob", forget)
        made = await control(
            server, "admin", "CreateToken", pb.CreateTokenRequest(name="eve", roles=["read"])
        )
        rows = await audited(server)
        id_ = server.tokens["ada"].split("_")[1]
        at = f"[ada (token {id_})], from 127.0.0.1"
        assert rows[0] == f"submit job job-7 (unknown -> queued): by root at head-1 {at}"
        assert rows[1] == f"scale job job-7 (1:1 nodes -> 2:3 nodes): by night rate {at}"
        assert rows[2] == f"stop job job-7 (queued -> stopped): enough {at}"
        assert rows[3] == (f"forget job job-7 (stopped -> forgotten): by root at head-1 {at}")
        made = pb.CreateTokenResponse.FromString(made)
        assert rows[4].startswith(
            f"create token eve (nothing -> token {made.token.id} with read), by admin (token "
        )
        secret = made.text
        assert secret.split("_", 2)[2] not in "".join(rows)


async def test_a_change_whose_caller_does_not_wait_for_it_is_written_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with guarded(monkeypatch) as server:
        await control(server, "ada", "SubmitJob", submission("job-7", "r1"))
        store = server.driver.store.store
        swap, append = store.compare_and_swap, store.append
        reached, gate, written = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def held_up(*what: Any) -> int:
            reached.set()
            await gate.wait()
            return await swap(*what)

        async def appended(records: Any) -> None:
            await append(records)
            written.set()

        monkeypatch.setattr(store, "compare_and_swap", held_up)
        monkeypatch.setattr(store, "append", appended)
        stop = pb.StopJobRequest(rdzv_id="job-7", run="r1", reason="enough")
        asked = asyncio.ensure_future(control(server, "ada", "StopJob", stop))
        await reached.wait()
        asked.cancel()
        await asyncio.wait([asked])
        async with asyncio.timeout(60):
            await written.wait()
        rows = await audited(server)
        id_ = server.tokens["ada"].split("_")[1]
        assert rows[1:] == [
            f"stop job job-7: enough [ada (token {id_})], from 127.0.0.1; the outcome is unknown"
        ]
        # It was, since a change is never interrupted halfway.
        gate.set()
        assert (await server.driver.engine.submit("job-7", Tick())).membership.ended is not None


async def test_the_history_of_a_job_names_who_did_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with guarded(monkeypatch) as server:
        await control(server, "ada", "SubmitJob", submission("job-7", "r1"))
        stop = pb.StopJobRequest(rdzv_id="job-7", run="r1", reason="enough")
        await control(server, "ada", "StopJob", stop)
        rows = {row.name: row.data for row in await server.driver.operations.history("job-7", 10)}
        id_ = server.tokens["ada"].split("_")[1]
        assert "submitted by root at head-1" in rows["RunBegan"]
        assert "[ada]" in rows["RunBegan"]
        assert f"enough [ada (token {id_})]" in rows["RunEnded"]


async def test_refused_calls_are_counted_and_logged_now_and_then(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with guarded(monkeypatch) as server:
        for who in ("read", "read", None):
            await refusal(server, "/rdzv.v1.Control/Backup", who)
        assert len([r for r in caplog.records if r.name == "rdzv.access"]) == 1
        await server.clock.advance(roles.LOG_EVERY_MS)
        await refusal(server, "/rdzv.v1.Control/Backup", "read")
        lines = [r.getMessage() for r in caplog.records if r.name == "rdzv.access"]
        assert "2 more were refused" in lines[-1]
        # Those that were told of once are not counted again.
        await server.clock.advance(roles.LOG_EVERY_MS)
        await refusal(server, "/rdzv.v1.Control/Backup", "read")
        lines = [r.getMessage() for r in caplog.records if r.name == "rdzv.access"]
        assert len(lines) == 3
        assert "more were refused" not in lines[-1]
        assert "needs the role admin, and it has read" in lines[-1]
        async with aiohttp.ClientSession() as session:
            url = f"{server.url}/metrics"
            async with session.get(url, headers=dict(server.header("read"))) as answer:
                text = await answer.text()
        assert 'rdzv_refused_calls_total{reason="DeniedError"} 4' in text
        assert 'rdzv_refused_calls_total{reason="UnauthenticatedError"} 1' in text


async def test_where_nobody_proves_anything_everybody_may_do_everything() -> None:
    clock = FakeClock()
    config = rdzvd_settings()
    replica = Replica(clock, "memory", "1.2.3")
    async with Driver.running(MemoryStore(), clock, config) as driver:
        replica.lead(driver)
        async with serving(Server(replica, clock, config)) as bound:
            server = Guarded(driver, clock, str(bound), "", [], [], {"": "rdzv_nonsense"})
            await control(server, "", "SubmitJob", submission("job-7", "r1"))
            state = await driver.jobs.look("job-7")
            assert state.membership.owner == ""
            assert state.membership.submission is not None
            assert state.membership.submission.spec.submitter == ""
            with pytest.raises(grpc.aio.AioRpcError, match="would protect nothing"):
                request = pb.CreateTokenRequest(name="ada", roles=["read"])
                await control(server, "", "CreateToken", request)
            rows = [row.data for row in await driver.history.of(roles.AUDIT, 10)]
            assert rows == [
                "submit job job-7 (unknown -> queued): by root at head-1, from 127.0.0.1"
            ]
