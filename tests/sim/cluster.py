"""The servers of a simulation: the real driver, jobs, streams and cores, on one simulated store.

`Server` is one rdzvd and its endpoint: `Connection`s replace the gRPC of `rdzv.server.rpc`, and
everything behind them is the code of `rdzv.server`. Several servers may believe that they lead; the
store refuses the writes of all but the latest leader.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

from rdzv.core.events import RoundCompleted
from rdzv.core.model import Membership
from rdzv.errors import RendezvousConnectionError, RendezvousError, StoreRefusedError
from rdzv.runtime.tasks import Tasks
from rdzv.server import wire
from rdzv.server.driver import Driver
from rdzv.server.engine.decide_persist_publish import Engine
from rdzv.server.engine.jobs import Job, Step
from rdzv.server.rpc.node_messages import NodeMessages
from rdzv.server.sessions.streams import Stream
from rdzv.server.telemetry.server_metrics import Metrics
from rdzv.stores.base import Page, Record, Stored
from rdzv.stores.memory import MemoryStore
from rdzv.structs import replace
from rdzv.v1 import rdzv_pb2 as pb
from tests.sim.loop import Looks, Process
from tests.sim.network import Connection, End
from tests.support.settings import rdzvd_settings

if TYPE_CHECKING:
    from tests.sim.world import World

CONFIG = rdzvd_settings(store="memory")
HISTORY_ROWS = 1_000

T = TypeVar("T")


# ------------------------------------------------------------------ the store


class Disk:
    """The store that all servers share, and what survives of it."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.kept = MemoryStore(HISTORY_ROWS)
        self.backup: MemoryStore | None = None
        self.leader = 0
        """The latest leadership; writes of any other are refused."""
        self.latencies_ms: tuple[int, ...] = (0,)
        self.refuses = 0.0
        """How often a call fails before it has done anything."""
        self.loses_answer = 0.0
        """How often the outcome of a write is unknown."""
        self.away = False

    def back_up(self) -> None:
        self.backup = copy.deepcopy(self.kept)

    def forget(self) -> None:
        """Lose everything, as a store in memory does."""
        self.kept, self.leader = MemoryStore(HISTORY_ROWS), 0

    def history(self, rdzv_id: str) -> tuple[Record, ...]:
        """Return the stored part of a job's history."""
        return tuple(self.kept.records.get(rdzv_id, ()))

    def document(self, name: str) -> bytes:
        """Return a key-value record as last written; empty if it never was."""
        return self.kept.documents.get(name, (b"{}", 0))[0]

    def restore(self) -> None:
        """Go back to the last backup, if there is one."""
        if self.backup is not None:
            self.kept, self.leader = copy.deepcopy(self.backup), 0


class SimStore:
    """One server's access to the disk: slow, away, or unsure of a write's outcome."""

    def __init__(self, disk: Disk, server: Server) -> None:
        self._disk = disk
        self._server = server
        self._world = server.world
        self.leadership = 0

    @property
    def place(self) -> str:
        return "the simulated disk"

    async def load(self, rdzv_id: str) -> Stored | None:
        await self._reach()
        return await self._disk.kept.load(rdzv_id)

    async def compare_and_swap(
        self,
        rdzv_id: str,
        membership: Membership,
        revision: int,
        records: Sequence[Record] = (),
    ) -> int:
        async def write() -> int:
            kept = self._disk.kept
            new = await kept.compare_and_swap(rdzv_id, membership, revision, records)
            self._world.judge.committed(self._server, membership)
            self._world.judge.recorded(kept, records)
            return new

        return await self._write(write)

    async def _write(self, write: Callable[[], Awaitable[int]]) -> int:
        await self._reach()
        disk = self._disk
        if self.leadership != disk.leader:
            self._world.count("store: refused a deposed server")
            raise StoreRefusedError(f"leadership {self.leadership} is deposed by {disk.leader}")
        lost = disk.loses_answer > 0 and disk.random.random() < disk.loses_answer
        if lost and disk.random.random() < 0.5:
            self._world.count("store: write lost, unknown")
            await self._late()
            raise RendezvousConnectionError("no answer; it was not written")
        new = await write()
        await self._late()
        if lost:
            self._world.count("store: write done, unknown")
            raise RendezvousConnectionError("no answer; it was written")
        return new

    async def list(self) -> tuple[str, ...]:
        await self._reach()
        return await self._disk.kept.list()

    async def pages(self) -> AsyncGenerator[Page, None]:
        await self._reach()
        async for page in self._disk.kept.pages():
            yield page

    async def append(self, records: Sequence[Record]) -> None:
        await self._reach()
        await self._disk.kept.append(records)

    async def history(self, rdzv_id: str, limit: int) -> tuple[Record, ...]:
        await self._reach()
        return await self._disk.kept.history(rdzv_id, limit)

    async def load_document(self, name: str) -> tuple[bytes, int] | None:
        await self._reach()
        return await self._disk.kept.load_document(name)

    async def swap_document(self, name: str, data: bytes, revision: int) -> int:
        return await self._write(lambda: self._disk.kept.swap_document(name, data, revision))

    async def list_documents(self) -> tuple[str, ...]:
        await self._reach()
        return await self._disk.kept.list_documents()

    async def delete(self, rdzv_id: str, revision: int) -> None:
        """Refuse: no history is so long that a job is pruned."""
        raise AssertionError(f"{rdzv_id} is deleted")

    async def take_over(self, at_least: int = 0) -> int:
        await self._reach()
        self.leadership = self._disk.leader = await self._disk.kept.take_over(at_least)
        self._world.judge.took_over(self._server, self.leadership)
        self._world.took_over(self._server)
        return self.leadership

    async def close(self) -> None:
        """Do nothing: the disk belongs to no server."""

    async def _reach(self) -> None:
        disk = self._disk
        await self._late()
        if disk.away:
            self._world.count("store: away")
            raise StoreRefusedError("the store is away")
        if disk.refuses > 0 and disk.random.random() < disk.refuses:
            self._world.count("store: refused")
            raise StoreRefusedError("the store is busy")

    async def _late(self) -> None:
        in_ms = self._disk.random.choice(self._disk.latencies_ms)
        if in_ms:
            done = self._server.process.create_future()
            clock = self._server.process
            clock.call_at(clock.now_ms() + in_ms, lambda: done.done() or done.set_result(None))
            await done


# ------------------------------------------------------------------ a server


class _WatchedEngine(Engine):
    _driver: WatchedDriver

    def publish(self, job: Job, steps: Sequence[Step], *, stored: bool) -> None:
        self._driver.last = steps[-1]
        super().publish(job, steps, stored=stored)


class WatchedDriver(Driver):
    """The real driver, whose published events are observed."""

    world: World
    server: Server
    last: Step
    """The last of the steps that are published together."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.engine = _WatchedEngine(self)

    def publish(self, job: Job, step: Step) -> None:
        self.world.judge.published(self.server, step, last=step is self.last)
        super().publish(job, step)
        if any(isinstance(event, RoundCompleted) for event in step.events):
            self.world.round_completed(self.server)


@dataclass(eq=False)
class _Group:
    """The owner of a process's tasks; an error in one of them would have ended the process."""

    process: Process

    def create_task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        return self.process.create_task(work)


class _Door:
    """The server's end of a connection; see `rendezvous_service`."""

    def __init__(self, connection: Connection, stream: Stream, messages: NodeMessages) -> None:
        self.connection = connection
        self.stream = stream
        self.messages = messages
        self.tasks: list[asyncio.Task[None]] = []


class Server:
    """One rdzvd: up, starting, paused or down."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.process = Process(world.agenda)
        self.process.kill()
        self.clock_offset_ms = 0
        self.accepting = False
        self.era = 0
        self._doors: dict[Connection, _Door] = {}
        self._backlog: list[Callable[[], None]] = []
        self._read_ms = -1
        """Until when messages that arrived during the last pause are being read."""
        self.driver: WatchedDriver
        self.store: SimStore

    # -------------------------------------------------------------- life

    @property
    def up(self) -> bool:
        return self.process.alive

    def start(self) -> None:
        if self.up:
            return
        world = self.world
        if world.agenda.now_ms < world.servers_from_ms:
            world.agenda.after(world.servers_from_ms - world.agenda.now_ms, self.start)
            return
        self.process = Process(world.agenda, self.clock_offset_ms)
        self.process.on_error, self.process.name = world.fail, str(self.number)
        self.era = world.judge.era
        self._doors, self._backlog, self._read_ms = {}, [], -1
        self.process.enter(self._boot)

    def _boot(self) -> None:
        world, tasks = self.world, Tasks(_Group(self.process))  # type: ignore[arg-type]
        self.store = SimStore(world.disk, self)
        # Not by `running`, which stops in order: a killed process does nothing any more.
        config = replace(CONFIG, quarantine=world.swarm.quarantine)
        self.driver = WatchedDriver(
            self.store, self.process, config, tasks, world.new_uid, Metrics()
        )
        self.driver.world, self.driver.server = world, self
        watch = self.driver.loop_watch
        watch.timer = self.process.looks = Looks(self.process, watch.every_ms, watch.look)
        self.process.create_task(self._serve())

    async def _serve(self) -> None:
        try:
            await self.driver.start()
        except RendezvousError:
            self.world.count("server: could not start")
            self.crash(back_in_ms=1_000)
            return
        self.world.count("server: serves")
        self.accepting = True

    def crash(
        self, *, silent: bool = False, reset: bool = False, back_in_ms: int | None = None
    ) -> None:
        """Die at once, between any two steps; with the machine if `silent`."""
        if not self.up:
            return
        self.process.kill()
        self.accepting = False
        for connection in list(self._doors):
            connection.die_with_server(silent=silent, reset=reset)
        self._doors = {}
        if back_in_ms is not None:
            self.world.agenda.after(back_in_ms, self.start)

    def stop(self, back_in_ms: int) -> None:
        """Stop in order: every stream is told to reconnect."""
        if self.up and self.accepting and not self.process.paused:
            error = RendezvousConnectionError("this server is stopping; connect again")
            self.accepting = False
            self.process.enter(self.driver.close_streams, error)
            self.world.agenda.after(50, lambda: self.crash(back_in_ms=back_in_ms))

    def pause(self, for_ms: int) -> None:
        """Stand still, as the whole process does under SIGSTOP; connections stay open."""
        if not self.up or self.process.paused:
            return
        process = self.process
        process.pause()

        def resume() -> None:
            if self.process is process and self.up:
                process.resume()
                # Messages that arrived meanwhile are read within a moment, after overdue timers.
                backlog, self._backlog = self._backlog, []
                in_ms = 0
                for do in backlog:
                    in_ms = min(in_ms + self.world.random.choice((0, 0, 1, 20)), 400)
                    self.world.agenda.after(in_ms, lambda do=do: self._do(process, do))
                self._read_ms = self.world.agenda.now_ms + in_ms

        self.world.agenda.after(for_ms, resume)

    def connection_of(self, stream: int) -> Connection | None:
        """Return the connection that carries a stream, if it is open."""
        for connection, door in self._doors.items():
            if door.stream.number == stream:
                return connection
        return None

    # -------------------------------------------------------------- connections

    def take(self, connection: Connection, message: Any) -> None:
        """Receive a message as soon as the process runs."""
        process, agenda = self.process, self.world.agenda
        if process.paused:
            self._backlog.append(lambda: self._hear(connection, message))
        elif agenda.now_ms <= self._read_ms:
            # Nothing overtakes messages that arrived during a pause.
            in_ms = self._read_ms - agenda.now_ms
            agenda.after(in_ms, lambda: self._do(process, lambda: self._hear(connection, message)))
        else:
            self._do(process, lambda: self._hear(connection, message))

    def _do(self, process: Process, do: Callable[[], None]) -> None:
        if process is not self.process or not process.alive:
            return
        if process.paused:
            self._backlog.append(do)
        else:
            process.enter(do)

    def _hear(self, connection: Connection, message: Any) -> None:
        door = self._doors.get(connection)
        if door is None:
            if isinstance(message, pb.NodeMessage) and connection.server_open:
                self._attach(connection, message)
        elif isinstance(message, End):
            door.messages.finish()
        elif door.stream.open:
            door.messages.take(message)

    def _attach(self, connection: Connection, message: pb.NodeMessage) -> None:
        try:
            hello = wire.hello_of(message.hello)
            stream = self.driver.connections.attach(hello)
        except RendezvousError as error:
            self.world.count(f"attach refused: {error.code}")
            self.world.judge.turned_away(self, connection.node)  # type: ignore[arg-type]
            connection.end_by_server(error)
            return
        self.world.judge.welcomed(self, connection.node, stream.incarnation)  # type: ignore[arg-type]
        messages = NodeMessages(self.driver, stream, self.process)
        door = self._doors[connection] = _Door(connection, stream, messages)
        create, beliefs = self.process.create_task, message.hello.beliefs
        door.tasks = [create(messages.obey(beliefs)), create(self._write(door, stream))]
        create(self._end(door, stream))

    async def _write(self, door: _Door, stream: Stream) -> None:
        while several := await stream.outbox.take():
            for told in several:
                message = wire.server_message(
                    [told], self.driver.leadership, "simulated", self.process.now_ms()
                )
                door.connection.down(message)

    async def _end(self, door: _Door, stream: Stream) -> None:
        error = await stream.ended()
        for task in door.tasks:
            task.cancel()
        self._doors.pop(door.connection, None)
        self.driver.connections.detach(stream)
        door.connection.end_by_server(error)
