"""Every rpc of both services, called with any content that their messages can hold.

A step is one message: of a node's stream, where they follow each other, or of a separate call.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from rdzv.v1 import rdzv_pb2 as pb
from tests.fuzz.messages import JOBS, known, make
from tests.fuzz.server import Served, talking
from tests.fuzz.surface import HANG_S, FoundError, Input, Step, Surface, Take, check_text

METHODS: dict[str, MethodDescriptor] = {
    method.name: method
    for service in pb.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
STREAM = "Attach"
_METHODS = sorted(METHODS)

HARMLESS = frozenset(
    {
        *(grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION),
        *(grpc.StatusCode.NOT_FOUND, grpc.StatusCode.ABORTED, grpc.StatusCode.CANCELLED),
        *(grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE),
        *(grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED),
    }
)
"""The codes of the error table that cannot be the store's fault."""

_SENTENCES = frozenset({"reason", "text", "summary", "note"})
"""Fields of the server's messages that are one line for people."""

READ = 20
"""How many messages of a stream are read; a followed one has no end."""
READ_S = 0.05
ANSWER_S = 0.02
"""How long a step waits for messages that the step before has caused."""


def _message(dice: random.Random, method: str) -> Step:
    return method, make(dice, METHODS[method].input_type).SerializeToString()


def _inputs(dice: random.Random) -> Input:
    """Mostly messages of a node, beginning with its hello, and calls in between."""
    steps: list[Step] = []
    if dice.random() < 0.9:
        steps.append((STREAM, _said(hello=make(dice, pb.Hello.DESCRIPTOR))))
    for _ in range(dice.randint(1, 8)):
        which = dice.random()
        if which < 0.3:
            steps.append((STREAM, _said(join=make(dice, pb.Join.DESCRIPTOR))))
        else:
            steps.append(_message(dice, STREAM if which < 0.6 else dice.choice(_METHODS)))
    return tuple(steps)


def _said(**body: Any) -> bytes:
    return pb.NodeMessage(**body).SerializeToString()


async def _talk(served: Served, steps: Input) -> None:
    runs: dict[str, str] = {}
    stream: Any = None
    hearing: asyncio.Task[None] | None = None
    heard = asyncio.Event()
    try:
        for method, made in steps:
            data = _with_runs(method, made, runs)
            if method != STREAM:
                await _call(served, method, data, runs)
                continue
            if stream is None:
                stream = served.channel.stream_stream("/rdzv.v1.Rendezvous/Attach")()
                hearing = asyncio.create_task(_hear(stream, runs, heard))
            heard.clear()
            with suppress(grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
                await stream.write(data)
            with suppress(TimeoutError):
                async with asyncio.timeout(ANSWER_S):
                    await heard.wait()
    finally:
        if stream is not None:
            stream.cancel()
    if hearing is not None:
        await hearing
        _check(STREAM, await stream.code(), await stream.details())


async def _hear(stream: Any, runs: dict[str, str], heard: asyncio.Event) -> None:
    with suppress(grpc.RpcError, grpc.aio.BaseError, asyncio.CancelledError):
        while (data := await stream.read()) is not grpc.aio.EOF:
            _learn(pb.ServerMessage.FromString(data), runs)
            heard.set()
    heard.set()


async def _call(served: Served, method: str, data: bytes, runs: dict[str, str]) -> None:
    described = METHODS[method]
    path = f"/{described.containing_service.full_name}/{method}"
    answer = GetMessageClass(described.output_type)
    try:
        if not described.server_streaming:
            said = await served.channel.unary_unary(path)(data, timeout=HANG_S)
            _learn(answer.FromString(said), runs)
            return
        call = served.channel.unary_stream(path)(data, timeout=HANG_S)
        try:
            async with asyncio.timeout(READ_S):
                for _ in range(READ):
                    if (said := await call.read()) is grpc.aio.EOF:
                        break
                    _learn(answer.FromString(said), runs)
        except TimeoutError:
            pass
        finally:
            call.cancel()
    except grpc.aio.AioRpcError as error:
        _check(method, error.code(), error.details() or "")
    except asyncio.CancelledError:
        # The call cancelled itself; the input as a whole is never cancelled.
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise


def _check(method: str, code: grpc.StatusCode, details: str | None) -> None:
    if code is grpc.StatusCode.OK or code in HARMLESS:
        return
    if details == "Internal error from Core":
        # The client's own error, for a message that it could no longer send.
        return
    raise FoundError(f"{method}: {code.name}: {details}")


def _learn(message: Message, runs: dict[str, str]) -> None:
    """Note the uids of runs in the server's messages; check that texts for people are harmless."""
    fields = {field.name: value for field, value in message.ListFields()}
    name, run = fields.get("rdzv_id"), fields.get("run")
    if name in JOBS and isinstance(run, str):
        runs[name] = run
    for field, value in message.ListFields():
        if field.message_type is not None:
            for part in value if field.is_repeated else (value,):
                _learn(part, runs)
        elif field.name in _SENTENCES and isinstance(value, str):
            check_text(f"{field.full_name}", value, lines=False)


def _with_runs(method: str, data: bytes, runs: dict[str, str]) -> bytes:
    message = GetMessageClass(METHODS[method].input_type)()
    try:
        message.ParseFromString(data)
    except DecodeError:
        return data
    known(message, runs)
    return message.SerializeToString()


@contextmanager
def _open(_: Path) -> Iterator[Take]:
    with talking(_talk) as take:
        yield take


RPC = Surface(
    name="rpc",
    promise="every call ends as the error table says; the server serves on, and keeps nothing",
    make=_inputs,
    open=_open,
)
