"""A real rdzvd: a process, its sockets, its files, and nodes that are scripts."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from cluster import fork_rdzvd, run_forked
from forked_programs import CONSTANTS, Forked
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from rdzv.errors import ERROR_CODE_METADATA_KEY
from rdzv.v1 import rdzv_pb2 as pb
from rdzv.v1 import rdzv_pb2_grpc as pb_grpc

READY = re.compile(r"rdzvd ready: listening on (\S+), data in (.+)\n")


@dataclass
class Rdzvd:
    process: Forked
    ready: str
    stderr: Path

    @property
    def address(self) -> str:
        found = READY.fullmatch(self.ready)
        assert found, f"{self.ready!r} {self.stderr.read_text()}"
        return found[1]

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=90)


PATIENT = '[lease]\nduration = "10 min"\nlongest = "10 min"\n'
"""For scripted nodes, which send no heartbeats: a slow machine must not take them for lost."""


@contextmanager
def rdzvd(
    tmp_path: Path,
    *options: str,
    listen: str = "127.0.0.1:0",
    config: str | None = PATIENT,
    constants: Mapping[str, int] = MappingProxyType({}),
) -> Iterator[Rdzvd]:
    """Run a server, with some of its constants changed, until the body ends.

    Its log is shown if the test fails.
    """
    args = ["--listen", listen, "--data-dir", str(tmp_path / "data"), *options]
    if config is not None:
        file = tmp_path / "rdzvd.toml"
        file.write_text(config)
        args += ["--config", str(file)]
    stderr = tmp_path / "stderr"
    environ = {CONSTANTS: json.dumps({**constants})} if constants else {}
    process = fork_rdzvd(args, {**os.environ, **environ}, stderr)
    assert process.stdout is not None
    try:
        yield Rdzvd(process, process.stdout.readline(), stderr)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stdout.close()
        print(stderr.read_text())


def refused(*options: str) -> tuple[int, str]:
    """Run a server that cannot start; return its exit code and output."""
    done = run_forked("rdzvd", options, os.environ)
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    return done.returncode, " ".join(done.stderr.split())


# ---------------------------------------------------------------- a node, by script

Call = grpc.aio.StreamStreamCall[pb.NodeMessage, pb.ServerMessage]


@dataclass
class Node:
    """A node that sends what the test says, and keeps what it receives."""

    node_id: str
    call: Call
    welcome: pb.Welcome
    heard: list[pb.ServerMessage] = field(default_factory=list)

    async def say(self, **body: object) -> None:
        await self.call.write(pb.NodeMessage(**body))  # type: ignore[arg-type]

    async def join(self, rdzv_id: str, nodes: tuple[int, int] = (2, 2), **more: object) -> None:
        await self.say(join=join(rdzv_id, nodes, **more))

    async def hear(self, kind: str) -> pb.ServerMessage:
        """Wait for the next message of a kind; keep the others in `heard`."""
        while True:
            message = await self.call.read()
            assert isinstance(message, pb.ServerMessage), f"stream ended, heard {self.heard}"
            self.heard.append(message)
            if message.WhichOneof("body") == kind:
                return message

    async def line(self) -> pb.Assignment:
        return (await self.hear("round_completed")).round_completed


def join(rdzv_id: str, nodes: tuple[int, int] = (2, 2), **more: object) -> pb.Join:
    return pb.Join(
        rdzv_id=rdzv_id,
        settings=pb.Settings(
            min_nodes=nodes[0], max_nodes=nodes[1], join_timeout_ms=600_000, max_restarts=3
        ),
        offer=pb.Offer(
            address="127.0.0.1", machine="here", local_world_size=2, store_port=4711, role="r"
        ),
        **more,  # type: ignore[arg-type]
    )


def hello(node_id: str, instance: str = "one", **more: object) -> pb.Hello:
    body: dict[str, object] = {
        "protocol_version": 1,
        "node_id": node_id,
        "instance": instance,
        "kind": pb.AGENT_KIND_DAEMON,
        "address": "127.0.0.1",
        "pid": 4711,
    }
    return pb.Hello(**{**body, **more})  # type: ignore[arg-type]


async def opened(channel: grpc.aio.Channel, message: pb.Hello) -> Call:
    # The generated stubs do not declare what they return on a channel of asyncio.
    call: Call = cast(Any, pb_grpc.RendezvousStub(channel)).Attach()
    await call.write(pb.NodeMessage(hello=message))
    return call


def control(channel: grpc.aio.Channel) -> Any:
    return pb_grpc.ControlStub(channel)


@asynccontextmanager
async def attached(
    address: str, message: pb.Hello, options: Sequence[tuple[str, int]] = ()
) -> AsyncIterator[Node]:
    async with asyncio.timeout(240), grpc.aio.insecure_channel(address, options) as channel:
        call = await opened(channel, message)
        first = await call.read()
        assert isinstance(first, pb.ServerMessage)
        assert first.WhichOneof("body") == "welcome"
        yield Node(message.node_id, call, first.welcome)
        call.cancel()


async def status(address: str, rdzv_id: str) -> pb.JobStatus:
    async with grpc.aio.insecure_channel(address) as channel:
        request = pb.GetStatusRequest(rdzv_id=rdzv_id)
        return cast(pb.JobStatus, await control(channel).GetStatus(request))


# ---------------------------------------------------------------- start and stop


def test_it_says_in_one_line_when_and_where_it_is_ready(tmp_path: Path) -> None:
    with rdzvd(tmp_path) as server:
        found = READY.fullmatch(server.ready)
        assert found
        assert found[2] == f"{tmp_path}/data (sqlite)"
        assert server.stop() == 0
        assert server.process.stdout is not None
        assert server.process.stdout.read() == ""


def test_a_port_in_use_is_named_with_a_remedy(tmp_path: Path) -> None:
    with rdzvd(tmp_path) as server:
        code, said = refused("--listen", server.address, "--data-dir", str(tmp_path / "other"))
    assert code == 1
    assert f"cannot listen on {server.address}: another program does already" in said
    assert "--listen" in said


def test_an_address_of_another_machine_is_refused_with_the_reason(tmp_path: Path) -> None:
    code, said = refused("--listen", "192.0.2.1:0", "--insecure", "--data-dir", str(tmp_path))
    assert (code, "192.0.2.1:0: Cannot assign requested address" in said) == (1, True)


@pytest.mark.parametrize("listen", ["0.0.0.0:29400", "[::]:29400", "example.org:29400"])
def test_other_than_loopback_needs_to_be_said(listen: str) -> None:
    code, said = refused("--listen", listen)
    assert (code, "--insecure" in said) == (2, True)


@pytest.mark.parametrize(
    ("listen", "remedy"),
    [
        ("29400", "write HOST:PORT"),
        (":29400", "write HOST or HOST:PORT"),
        ("::1:29400", "write IPv6 as [ADDRESS]:PORT"),
        ("host:http", "a port is a number from 0 to 65535"),
        ("[::1]:99999", "a port is a number from 0 to 65535"),
    ],
)
def test_an_address_that_is_none_is_a_usage_error(listen: str, remedy: str) -> None:
    code, said = refused("--listen", listen)
    assert (code, remedy in said) == (2, True)


def test_ipv6_loopback(tmp_path: Path) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    with rdzvd(tmp_path, listen="[::1]:0") as server:
        assert server.address.startswith("[::1]:")
        assert asyncio.run(_is_serving(server.address))


async def _is_serving(address: str) -> bool:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="rdzv.v1.Rendezvous")
        answer = await stub.Check(request)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def test_health_and_reflection_answer(tmp_path: Path) -> None:
    with rdzvd(tmp_path) as server:
        assert await _is_serving(server.address)
        async with grpc.aio.insecure_channel(server.address) as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            call = stub.ServerReflectionInfo()
            await call.write(reflection_pb2.ServerReflectionRequest(list_services="*"))
            answer = await call.read()
            names = {service.name for service in answer.list_services_response.service}
            assert {"rdzv.v1.Rendezvous", "rdzv.v1.Control", "grpc.health.v1.Health"} <= names
            await call.done_writing()
            assert await call.read() is grpc.aio.EOF
            # An invalid message is the sender's fault, and no bug of ours.
            call = channel.stream_stream(
                "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
            )()
            await call.write(b"\xff\xff\xff")
            with pytest.raises(grpc.aio.AioRpcError, match="cannot be read") as refused:
                await call.read()
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_sigterm_ends_it_cleanly_with_streams_open(tmp_path: Path) -> None:
    with rdzvd(tmp_path) as server:
        async with attached(server.address, hello("n1")) as node:
            await node.join("job-7")
            await node.hear("waiting")
            server.process.terminate()
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                while await node.call.read() is not grpc.aio.EOF:
                    pass
            assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "this server is stopping" in (ended.value.details() or "")
            assert await asyncio.to_thread(server.process.wait, 90) == 0


# ---------------------------------------------------------------- rounds


async def test_a_stopped_server_loses_nobody_when_it_goes_on(tmp_path: Path) -> None:
    """SIGSTOP beyond a lease, then SIGCONT: silence that it could not hear proves nothing."""
    with rdzvd(tmp_path, config='[lease]\nduration = "5 s"\n') as server:
        async with attached(server.address, hello("n1")) as n1:
            await n1.join("job-7", (1, 1))
            line = await n1.line()
            server.process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(n1.welcome.lease_ms / 1000 + 1)
            server.process.send_signal(signal.SIGCONT)
            await n1.say(heartbeat=pb.Heartbeat())
            seen = await status(server.address, "job-7")
            assert (seen.state, seen.round) == ("running", line.round)
            assert [n.state for n in seen.nodes] == ["seated"]
        assert "was blocked for" in server.stderr.read_text()


# ---------------------------------------------------------------- refusals at the door


@pytest.mark.parametrize(
    ("message", "status_code", "code", "says"),
    [
        (hello("n 1"), "INVALID_ARGUMENT", "InvalidRequestError", "node_id 'n 1'"),
        (hello("n1", protocol_version=7), "INVALID_ARGUMENT", "InvalidRequestError", "protocol 7"),
        (hello("n1", leadership=2**62), "UNAVAILABLE", "RendezvousConnectionError", "superseded"),
    ],
)
async def test_a_refused_hello_ends_the_call_with_its_code(
    tmp_path: Path, message: pb.Hello, status_code: str, code: str, says: str
) -> None:
    with rdzvd(tmp_path, "--store", "memory") as server:
        async with grpc.aio.insecure_channel(server.address) as channel:
            call = await opened(channel, message)
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call.read()
    assert error.value.code().name == status_code
    assert says in (error.value.details() or "")
    assert (ERROR_CODE_METADATA_KEY, code) in tuple(error.value.trailing_metadata() or ())


async def test_what_is_no_message_ends_the_stream_with_its_code(tmp_path: Path) -> None:
    with rdzvd(tmp_path, "--store", "memory") as server:
        async with grpc.aio.insecure_channel(server.address) as channel:
            greeting = pb.NodeMessage(hello=hello("n1")).SerializeToString()
            for said in ([b"\xff\xff"], [greeting, b"\xff\xff"], [b""]):
                call: Any = channel.stream_stream("/rdzv.v1.Rendezvous/Attach")()
                for message in said:
                    await call.write(message)
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    while await call.read() is not grpc.aio.EOF:
                        pass
                assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "Traceback" not in server.stderr.read_text()


def test_default_data_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from rdzv.server.settings.server_settings import default_data_dir

    monkeypatch.setenv("STATE_DIRECTORY", "/var/lib/a:/var/lib/b")
    assert default_data_dir() == Path("/var/lib/a")
    monkeypatch.delenv("STATE_DIRECTORY")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert default_data_dir() == Path("/var/lib/rdzv")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_data_dir() == tmp_path / "rdzv"
    monkeypatch.setenv("XDG_STATE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_data_dir() == tmp_path / ".local/state/rdzv"
