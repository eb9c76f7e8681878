"""The streams of the nodes behind one relay, all carried by the relay's single call.

Each stream is served like a node's own call: its caller is checked, and a `Conversation` serves it.
If the relay's call ends or falls silent, that proves nothing about its nodes: they are away, and
will reconnect another way. A node itself has ended its stream only if the relay reports that it
has.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc.aio
from google.protobuf.message import DecodeError

from rdzv.errors import (
    DeniedError,
    InvalidRequestError,
    LimitExceededError,
    RendezvousConnectionError,
    RendezvousError,
    UnauthenticatedError,
)
from rdzv.runtime.clock import Clock, Timer
from rdzv.server.driver import Driver
from rdzv.server.rpc.gate_interceptor import host_of
from rdzv.server.rpc.node_calls import NodeCall, RelayedCall
from rdzv.server.security import callers, roles
from rdzv.server.security.callers import Caller
from rdzv.server.security.role_gate import Gate, verb_of
from rdzv.server.settings.config import OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION, Config
from rdzv.transport.batches import Batches
from rdzv.v1 import rdzv_pb2 as pb

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[pb.FromRelay, pb.ToRelay]

BEATS = 5
"""The number of heartbeats that a relay sends within the time after which it counts as silent."""

SILENT_MOST_MS = 10_000
"""How long a relay may be silent before its call is ended. A relay that is merely busy is not cut
off earlier, because all its nodes would reconnect at once and make it even busier. If its machine
is gone, the nodes will have noticed by this time."""

ATTACH = "/rdzv.v1.Rendezvous/Attach"

log = logging.getLogger("rdzv.service")


class RelayedStreams:
    """A call from a relay, handled by the driver that was leading when the call was opened."""

    def __init__(
        self,
        driver: Driver,
        gate: Gate,
        converse: Callable[[NodeCall, Caller], Awaitable[None]],
        clock: Clock,
        config: Config,
    ) -> None:
        """Use `converse` to serve a node's stream; it raises the error that ended the stream."""
        self._driver = driver
        self._gate = gate
        self._converse = converse
        self._clock = clock
        self._limits = config.limits
        self._hello_s = config.timings.hello_timeout_ms / 1000
        self._relay = callers.present.get()
        lease_ms = config.nodes_tuning.lease_ms
        self._quiet_ms = config.nodes_tuning.quiet_for(lease_ms)
        """How long the relay may be silent before its nodes' silence proves nothing. No lease can
        have expired by then."""
        self._calls: dict[int, RelayedCall] = {}
        self._serving: dict[int, asyncio.Task[None]] = {}
        self._outgoing = Batches[pb.ToNode]()
        self._heard_ms = clock.now_ms()
        self._silence = Timer(clock, self._look)
        self._ended: asyncio.Future[RendezvousError | None] = (
            asyncio.get_running_loop().create_future()
        )

    async def hold(self, context: Context) -> None:
        """Serve the relay's nodes until either side ends the call.

        Raises:
            RendezvousError: the reason why this server ended the call.

        """
        await self._greet(context)
        name = f"the relay at {host_of(context.peer())}, {self._relay}"
        log.info("%s: its call is open", name)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks_of_call = [
                    tasks.create_task(self._read(context, tasks)),
                    tasks.create_task(self._write(context)),
                ]
                try:
                    end = await self._ended
                finally:
                    # This also runs if the relay has died, because gRPC then cancels the call.
                    log.info(
                        "%s: its call has ended, along with %d streams", name, len(self._calls)
                    )
                    self._cut()
                    for task in tasks_of_call:
                        task.cancel()
        finally:
            self._silence.cancel()
        if end is not None:
            raise end

    def _cut(self) -> None:
        for call in self._calls.values():
            call.cut = True
        for task in self._serving.values():
            task.cancel()

    def _end(self, error: RendezvousError | None = None) -> None:
        if not self._ended.done():
            self._ended.set_result(error)

    async def _greet(self, context: Context) -> None:
        try:
            async with asyncio.timeout(self._hello_s):
                first = await _receive(context)
        except TimeoutError:
            first = None
        if first is None or not first.HasField("hello"):
            raise InvalidRequestError("the first message of a relay must have a hello")
        version = first.hello.protocol_version
        if not OLDEST_PROTOCOL_VERSION <= version <= PROTOCOL_VERSION:
            raise InvalidRequestError(
                f"the relay speaks protocol {version}, and this server {PROTOCOL_VERSION}; give "
                "both the same version of rdzvd"
            )
        welcome = pb.RelayWelcome(
            leadership=self._driver.leadership, beat_ms=max(self._quiet_ms // BEATS, 1)
        )
        await context.write(pb.ToRelay(welcome=welcome))
        self._hear()

    # ---------------------------------------------------------------- from the relay

    async def _read(self, context: Context, tasks: asyncio.TaskGroup) -> None:
        try:
            while (message := await _receive(context)) is not None:
                self._hear()
                self._check_still_welcome()
                for frame in message.frames:
                    self._take(frame, tasks)
        except RendezvousError as error:
            self._end(error)
        else:
            self._end()

    def _check_still_welcome(self) -> None:
        if self._driver.streams.closed:
            raise RendezvousConnectionError("this server is stopping; connect again")
        if self._relay.token and not self._driver.tokens.has(self._relay.token):
            raise UnauthenticatedError("the token of this relay was revoked")

    def _take(self, frame: pb.FromNode, tasks: asyncio.TaskGroup) -> None:
        number = frame.stream
        body = frame.WhichOneof("body")
        if body == "opened":
            self._open(number, frame.opened, tasks)
            return
        call = self._calls.get(number)
        if call is None:
            return  # This server has ended the stream, but the relay does not know yet.
        match body:
            case "message":
                try:
                    call.put(frame.message)
                except LimitExceededError as error:
                    self._drop(number)
                    self._tell_end(number, error)
            case "finished":
                call.finish()
            case "broken":
                self._drop(number)

    def _drop(self, number: int) -> None:
        del self._calls[number]
        self._serving.pop(number).cancel()

    def _open(self, number: int, opened: pb.RelayedCaller, tasks: asyncio.TaskGroup) -> None:
        if number in self._calls:
            raise InvalidRequestError(f"the relay opens stream {number} twice")
        if len(self._calls) >= self._limits.nodes:
            over = f"the relay carries {self._limits.nodes} streams; raise the limit `nodes`"
            self._tell_end(number, LimitExceededError(over))
            return
        call = RelayedCall(number, self._outgoing, self._limits.inbox)
        self._calls[number] = call
        self._serving[number] = tasks.create_task(self._serve(number, call, opened))

    async def _serve(self, number: int, call: RelayedCall, opened: pb.RelayedCaller) -> None:
        """Serve one node until its stream ends, and report the reason to the relay."""
        error: RendezvousError | None = None
        try:
            caller = await self._checked_caller(opened)
            await self._converse(call, caller)
        except RendezvousError as ended:
            error = ended
        except Exception:
            # End only this stream, as gRPC would end the node's own call.
            log.exception("an error in this server has ended a relayed stream")
            error = RendezvousError("an error in this server has ended the stream; see its log")
        self._calls.pop(number, None)
        self._serving.pop(number, None)
        self._tell_end(number, error)
        if error is not None and self._driver.streams.closed:
            self._end(error)

    async def _checked_caller(self, opened: pb.RelayedCaller) -> Caller:
        """Return the caller that opened a stream.

        Raises:
            UnauthenticatedError: the caller's credentials are not valid.
            DeniedError: the caller has no role that permits a node's stream.

        """

        def certified() -> Caller | None:
            return callers.relayed(opened.name, opened.roles, relay) if opened.name else None

        caller, verb, relay = callers.NOBODY, verb_of(ATTACH), str(self._relay)
        try:
            caller = await self._gate.caller(opened.authorization or None, certified)
            row = roles.CALLS[ATTACH]
            assert row is not None
            await self._gate.admit(caller, row, verb, None)
        except (UnauthenticatedError, DeniedError) as error:
            who = f"{caller} at {opened.address[:64]}, by {relay}"
            self._gate.note_refusal(who, error.code, f"{verb}: {error}")
            raise
        return caller

    def _hear(self) -> None:
        self._heard_ms = self._clock.now_ms()
        if self._silence.due_ms is None:
            self._silence.arm(self._heard_ms + self._quiet_ms)

    def _look(self, due_ms: int) -> None:
        """Excuse the nodes of a silent relay, or end its call if it has been silent for too long.

        After a pause of this server, wait until all input has been read.
        """
        watch, now_ms = self._driver.loop_watch, self._clock.now_ms()
        if watch.late(due_ms):
            self._silence.arm(watch.settled_ms)
            return
        silent_ms = now_ms - self._heard_ms
        if silent_ms >= max(SILENT_MOST_MS, self._quiet_ms):
            self._end(
                RendezvousConnectionError(
                    f"nothing was heard of the relay for {silent_ms / 1000:.1f} s; connect again"
                )
            )
            return
        if silent_ms < self._quiet_ms:
            self._silence.arm(self._heard_ms + self._quiet_ms)
        else:
            node_ids = frozenset(call.node_id for call in self._calls.values())
            self._driver.leases.excuse(node_ids, 2 * self._quiet_ms)
            self._silence.arm(now_ms + self._quiet_ms)

    # ---------------------------------------------------------------- to the relay

    def _tell_end(self, number: int, error: RendezvousError | None) -> None:
        ended = pb.RelayedEnd(code=error.code, message=str(error)) if error else pb.RelayedEnd()
        self._outgoing.put_now(pb.ToNode(stream=number, ended=ended), len(ended.message))

    async def _write(self, context: Context) -> None:
        async def write(frames: list[pb.ToNode]) -> None:
            await context.write(pb.ToRelay(frames=frames))

        try:
            await self._outgoing.write_all(write)
        except grpc.aio.BaseError:
            self._end()


async def _receive(context: Context) -> pb.FromRelay | None:
    """Wait for a relay's next message; return None if its call has ended for any reason.

    Raises:
        InvalidRequestError: the bytes are not a message.

    """
    try:
        message: Any = await context.read()
    except DecodeError as error:
        raise InvalidRequestError(f"a message of a relay cannot be read: {error}") from error
    except grpc.aio.BaseError:
        return None
    return message if isinstance(message, pb.FromRelay) else None
