"""A driver with scripted nodes, served by HTTP from its own thread.

For tests that block, as with a browser or schemathesis: the server continues meanwhile. Nodes have
streams and no processes, and all connected ones are heard.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Collection, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from ports import free_port

from rdzv.core.commands import Fail, Succeed
from rdzv.core.evidence.hang_culprit import HungWorker
from rdzv.core.evidence.progress_lag import RankProgress
from rdzv.core.evidence.stacks import StackFrame, ThreadStack, WorkerStack
from rdzv.core.model import KeptWorker, Settings, Snapshot, SnapshotMark
from rdzv.messages import (
    Announcement,
    Hung,
    LogPiece,
    LogPosition,
    Progress,
    ReadLog,
    SnapshotsHeld,
    Stacks,
    StartedWorker,
    TakeStacks,
    WorkersStarted,
)
from rdzv.runtime.clock import Clock
from rdzv.server.driver import Driver
from rdzv.server.http.listener import serving_http
from rdzv.server.operations import handlers
from rdzv.server.replication.replica import Replica
from rdzv.server.sessions.streams import Stream
from rdzv.server.settings import server_settings
from rdzv.server.telemetry.metrics_page import MetricsPage
from rdzv.server.telemetry.server_metrics import Metrics
from rdzv.stores.memory import MemoryStore
from rdzv.structs import replace
from rdzv.transport.endpoints import Listen
from tests.support.builders import report
from tests.support.driven import Server, join
from tests.support.settings import rdzvd_settings

T = TypeVar("T")

HEARD_EVERY_S = 0.5
DEADLINE_S = 100.0


class Served:
    """The server, and its scripted nodes. Its methods wait until the action is done."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, facade: Any = None, grafana: str | None = None
    ) -> None:
        self.url = ""
        self.logs: dict[str, bytes] = {}
        """By node: its workers' output."""
        self.lines: dict[int, int] = {}
        """By RANK: the line of train.py at which a worker is, if not 41."""
        self._looked_at = asyncio.Event()
        """Set: nodes that are asked for stacks answer."""
        self._loop = loop
        self._facade = facade
        self._grafana = grafana
        self._streams: dict[str, Stream] = {}
        self._readers: list[asyncio.Task[None]] = []
        self.stop = asyncio.Event()

    # ---------------------------------------------------------------- from any thread

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a function in the server's thread, and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(DEADLINE_S)

    def join(
        self, rdzv_id: str, *node_ids: str, nodes: tuple[int, int] | None = None, **more: Any
    ) -> None:
        """Let nodes join a job; they connect if they have not yet."""
        self.do(self._join(rdzv_id, node_ids, nodes or (len(node_ids), len(node_ids)), more))

    def join_each(self, jobs: dict[str, str]) -> None:
        """Let one node join each of these jobs, alone."""

        async def all_join() -> None:
            for rdzv_id, node_id in jobs.items():
                await self._join(rdzv_id, (node_id,), (1, 1), {})

        self.do(all_join())

    def fail(self, rdzv_id: str, node_id: str, message: str, traceback: str = "") -> None:
        """Let the first worker of a node fail; then all stop, and join again."""
        self.do(self._fail(rdzv_id, node_id, message, traceback))

    def lose(self, node_id: str) -> None:
        """End the stream of a node without a word."""
        self.do(self._lose(node_id))

    def succeed(self, rdzv_id: str) -> None:
        """Let the workers of all nodes of a job exit with 0."""
        self.do(self._succeed(rdzv_id))

    def progress(self, rdzv_id: str, node_id: str, *steps: tuple[int, int, float]) -> None:
        """Let workers report their progress: RANK, step, rate."""
        self.do(self._progress(rdzv_id, node_id, steps))

    def saved(self, rdzv_id: str, node_id: str, *parts: tuple[int, int]) -> None:
        """Let a node report what it holds in memory of a state in two parts: step, part."""
        self.do(self._saved(rdzv_id, node_id, parts))

    def started(self, rdzv_id: str, node_id: str, *how: str, why: str = "") -> None:
        """Let a node report how its workers were started: `kept`, `warm` or `cold`."""
        self.do(self._started(rdzv_id, node_id, how, why))

    def hang(self, rdzv_id: str, node_id: str, *ranks: int) -> None:
        """Let workers of a node hang; stacks are not sent before `let_look`."""
        self.do(self._hang(rdzv_id, node_id, ranks))

    def let_look(self) -> None:
        """Let nodes answer requests for stacks, now and later."""
        self._loop.call_soon_threadsafe(self._looked_at.set)

    def stop_http(self) -> None:
        """Stop the HTTP server, as if it had died; `start_http` brings it back."""
        self.do(self._turn_http(on=False))

    def expose(self, why: str) -> None:
        """Let the server report that everyone may do everything."""

        async def expose() -> None:
            self._replica.serve_as("10.0.0.5:29400", lambda leads: None, why)

        self.do(expose())

    def start_http(self) -> None:
        self.do(self._turn_http(on=True))

    # ---------------------------------------------------------------- in its thread

    async def serve(
        self, ready: asyncio.Future[None], progress: server_settings.ProgressSettings
    ) -> None:
        listen = Listen("127.0.0.1", free_port())
        config = rdzvd_settings(listen=listen, grafana=self._grafana, progress=progress)
        self._clock, self._config = Clock(), config
        self._replica = Replica(self._clock, "memory", "1.2.3")
        async with Driver.running(MemoryStore(), self._clock, config) as driver:
            self._replica.serve_as("127.0.0.1:29400", lambda leads: None)
            self._replica.lead(driver)
            self.driver = driver
            self._server = Server(driver, self._clock)  # type: ignore[arg-type]
            hearing = asyncio.create_task(self._hear())
            self._http = contextlib.AsyncExitStack()
            self._listen = config.listen
            await self._turn_http(on=True)
            ready.set_result(None)
            await self.stop.wait()
            await self._http.aclose()
            for task in (hearing, *self._readers):
                task.cancel()

    async def _turn_http(self, *, on: bool) -> None:
        if not on:
            await self._http.aclose()
            return
        page = MetricsPage(Metrics(), lambda: None, "memory", "1.2.3")
        shown = handlers.Server(self._replica, self._clock, self._config, self._facade)
        http = serving_http(shown, page, self._listen)
        self._listen = (await self._http.enter_async_context(http)).bound
        self.url = f"http://{self._listen}"

    async def _hear(self) -> None:
        while True:
            for stream in self._streams.values():
                if stream.open:
                    self.driver.connections.heard(stream)
            await asyncio.sleep(HEARD_EVERY_S)

    async def _stream(self, node_id: str) -> Stream:
        stream = self._streams.get(node_id)
        if stream is None or not stream.open:
            stream = self._server.attach(node_id, instance=f"i{len(self._readers)}")
            self._streams[node_id] = stream
            await self.driver.recovery.greet(stream, [])
            self._readers.append(asyncio.create_task(self._read(stream)))
        return stream

    async def _read(self, stream: Stream) -> None:
        """Receive a node's message, and answer if it asks for logs."""
        while several := await stream.outbox.take():
            for told in several:
                await self._take_in(stream, told)

    async def _take_in(self, stream: Stream, told: Announcement) -> None:
        if isinstance(told, ReadLog):
            # Where there is no more to follow, it does not answer yet.
            at = told.positions[0].offset if told.positions else 0
            data = self.logs.get(stream.node_id, b"")[at:] if told.positions else b""
            if data or not told.positions or not told.follow:
                end = LogPosition("", told.round or 0, 0, False, at + len(data))
                piece = LogPiece(told.request, told.round or 0, 0, told.rank or 0, data=data)
                last = bool(told.positions) and not data
                piece = replace(piece, last=last, offset=at, positions=(end,))
                self.driver.reports.take(stream, piece)
        elif isinstance(told, TakeStacks):
            await self._looked_at.wait()
            await self._say_stacks(stream, told)

    async def _say_stacks(self, stream: Stream, asked: TakeStacks) -> None:
        state = await self.driver.operations.status(asked.rdzv_id)
        (node,) = (node for node in state.nodes if node.node_id == stream.node_id)
        assert node.rank_first is not None
        workers = []
        for local_rank in range(node.local_world_size):
            rank = node.rank_first + local_rank
            frame = StackFrame("step", "/home/ada/train.py", self.lines.get(rank, 41))
            main = ThreadStack("MainThread", True, (frame, StackFrame("<module>", frame.file, 90)))
            workers.append(WorkerStack(rank, local_rank, 4700 + rank, "S", (main,)))
        self.driver.reports.take(stream, Stacks(asked.request, tuple(workers), last=True))

    async def _hang(self, rdzv_id: str, node_id: str, ranks: tuple[int, ...]) -> None:
        state = await self.driver.operations.status(rdzv_id)
        assert state.round is not None
        hung = tuple(HungWorker(rank, 0, 4700 + rank, 60_000, "no step") for rank in ranks)
        self.driver.reports.take(
            self._streams[node_id], Hung(rdzv_id, state.run, state.round, hung)
        )

    async def _started(self, rdzv_id: str, node_id: str, how: tuple[str, ...], why: str) -> None:
        state = await self.driver.operations.status(rdzv_id)
        assert state.round is not None
        workers = tuple(
            StartedWorker(n, one, "" if one == "kept" else why) for n, one in enumerate(how)
        )
        said = WorkersStarted(rdzv_id, state.run, state.round, workers)
        self.driver.reports.take(self._streams[node_id], said)

    async def _join(
        self, rdzv_id: str, node_ids: tuple[str, ...], nodes: tuple[int, int], more: dict[str, Any]
    ) -> None:
        settings = Settings(*nodes, max_restarts=3, last_call_timeout_ms=600_000)
        for node_id in node_ids:
            stream = await self._stream(node_id)
            await self.driver.commands.hear(
                stream, rdzv_id, join(stream, settings=settings, **more)
            )

    async def _fail(self, rdzv_id: str, node_id: str, message: str, traceback: str) -> None:
        state = await self.driver.operations.status(rdzv_id)
        assert state.round is not None
        stream = self._streams[node_id]
        (rank,) = (node.rank_first for node in state.nodes if node.node_id == node_id)
        assert rank is not None
        failed = report(rank=rank, message=message, traceback=traceback)
        fail = Fail(node_id, stream.incarnation, state.run, state.round, (failed,))
        await self.driver.commands.hear(stream, rdzv_id, fail)

    def rejoin(self, rdzv_id: str, kept_on: Collection[str] = ()) -> None:
        """Let every stopping node stop, or park on these nodes, and join again."""
        self.do(self._rejoin(rdzv_id, kept_on))

    async def _rejoin(self, rdzv_id: str, kept_on: Collection[str]) -> None:
        state = await self.driver.operations.status(rdzv_id)
        settings = Settings(
            state.min_nodes, state.max_nodes, max_restarts=3, last_call_timeout_ms=600_000
        )
        for node in state.nodes:
            stream = self._streams[node.node_id]
            if node.state == "stopping" and stream.open:
                workers = range(node.local_world_size if node.node_id in kept_on else 0)
                again = join(
                    stream,
                    settings=settings,
                    run=state.run,
                    left_round=state.round,
                    kept=tuple(KeptWorker(n, 100) for n in workers),
                )
                await self.driver.commands.hear(stream, rdzv_id, again)

    async def _lose(self, node_id: str) -> None:
        self.driver.connections.detach(self._streams[node_id])

    async def _succeed(self, rdzv_id: str) -> None:
        state = await self.driver.operations.status(rdzv_id)
        assert state.round is not None
        for node in state.nodes:
            stream = self._streams[node.node_id]
            succeed = Succeed(node.node_id, stream.incarnation, state.run, state.round)
            await self.driver.commands.hear(stream, rdzv_id, succeed)

    async def _progress(
        self, rdzv_id: str, node_id: str, steps: tuple[tuple[int, int, float], ...]
    ) -> None:
        state = await self.driver.operations.status(rdzv_id)
        assert state.round is not None
        said = tuple(RankProgress(rank, step, 0, rate or None) for rank, step, rate in steps)
        progress = Progress(rdzv_id, state.run, state.round, said)
        self.driver.reports.take(self._streams[node_id], progress)

    async def _saved(self, rdzv_id: str, node_id: str, parts: tuple[tuple[int, int], ...]) -> None:
        state = await self.driver.operations.status(rdzv_id)
        assert state.round is not None and state.world_size is not None
        held = tuple(
            Snapshot(0, SnapshotMark(state.round, step, "a", 2), part) for step, part in parts
        )
        said = SnapshotsHeld(rdzv_id, state.run, held)
        self.driver.reports.take(self._streams[node_id], said)


@contextmanager
def served(facade: Any = None, grafana: str | None = None, **progress: int) -> Iterator[Served]:
    """Run until the body ends."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        made = Served(loop, facade, grafana)

        async def begin() -> asyncio.Task[None]:
            ready = loop.create_future()
            serving = loop.create_task(
                made.serve(ready, server_settings.ProgressSettings(**progress))
            )
            await asyncio.wait([ready, serving], return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                await serving
            return serving

        async def end(serving: asyncio.Task[None]) -> None:
            made.stop.set()
            await serving

        serving = made.do(begin())
        try:
            yield made
        finally:
            made.do(end(serving))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
