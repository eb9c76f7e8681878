"""Pushes updates to followers of the HTTP API, either about one job or about all jobs and nodes.

All followers of one subject are *readers* of one *feed*, which looks up and encodes each change
only once. A feed runs while it has readers. Each reader first receives the whole state, between
`begin` and `ready`, and then the changes.

A feed gathers changes for a moment and rests nine times as long as it has worked, so it never takes
more than a tenth of the event loop's time, no matter how much changes. Each reader has a bounded
queue. A reader that does not keep up is sent the reason and dropped.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from rdzv import errors
from rdzv.runtime.clock import sleep_ms
from rdzv.runtime.tasks import single_error
from rdzv.server.driver import Driver
from rdzv.server.operations.handlers import SLICE, Server
from rdzv.server.settings.server_settings import Limits
from rdzv.structs import replace
from rdzv.view import answers, as_json

log = logging.getLogger("rdzv.feeds")

ROWS = 200
"""The maximum number of jobs or nodes in one event; encoding them takes a few milliseconds."""

REST = 9
"""A feed rests this many times as long as it has worked."""

EVENTS = 200
"""The maximum number of events from a job's history shown in the job's feed."""

WATCHED_EVERY_MS = 2_000
"""How often a feed polls observed jobs, whose changes are not announced."""


def frame(event: str, document: str) -> bytes:
    """Encode one server-sent event. The document must be a single line."""
    return f"event: {event}\ndata: {document}\n\n".encode()


BEGIN, READY = (frame(event, as_json.document({}, indent=None)) for event in ("begin", "ready"))


REST_MS = 250
"""How long changes are gathered before readers of the stream see them."""

STREAM_FRAMES = 512
"""The number of events that may be queued for a reader of the stream: a minute's worth in a busy
fleet. Slower readers are dropped."""

STREAM_BYTES = 8 * 1024 * 1024
"""The size of the events queued for a reader: twice the initial state of 10,000 jobs."""


class Reader:
    """A reader of a feed, with a bounded queue."""

    def __init__(self) -> None:
        self._frames: deque[bytes] = deque()
        self._bytes = 0
        self._news = asyncio.Event()
        self.ended: errors.RendezvousError | None = None

    def put(self, frames: Iterable[bytes]) -> None:
        """Queue frames without waiting, and end the reader if too much is queued."""
        if self.ended is not None:
            return
        for one in frames:
            self._frames.append(one)
            self._bytes += len(one)
        if len(self._frames) > STREAM_FRAMES or self._bytes > STREAM_BYTES:
            self.end(
                errors.LimitExceededError(
                    f"{len(self._frames)} events of {self._bytes} bytes wait to be read, more than "
                    "are kept for one reader; connect again, and read faster"
                )
            )
        self._news.set()

    def end(self, error: errors.RendezvousError) -> None:
        """End the reader with this error and drop queued frames; only the first call counts."""
        if self.ended is None:
            self.ended = error
            self._frames.clear()
        self._news.set()

    async def next(self) -> bytes | None:
        while not self._frames:
            if self.ended is not None:
                return None
            self._news.clear()
            await self._news.wait()
        one = self._frames.popleft()
        self._bytes -= len(one)
        return one


class Feed:
    """The updates about one subject for all its readers. Created by `Feeds`."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.readers: set[Reader] = set()
        """Readers that have been sent the whole state."""
        self._fresh: set[Reader] = set()
        """Readers that have not been sent the whole state yet."""
        self._woken = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    def add(self, reader: Reader) -> None:
        self._fresh.add(reader)
        self._woken.set()

    def discard(self, reader: Reader) -> bool:
        self._fresh.discard(reader)
        self.readers.discard(reader)
        return not self._fresh and not self.readers

    def fail(self, error: errors.RendezvousError) -> None:
        for reader in (*self._fresh, *self.readers):
            reader.end(error)

    async def run(self) -> None:
        """Send updates to all readers until cancelled, or until an error ends them all."""
        try:
            driver = self._server.driver
            with driver.watchers.followed_by(lambda rdzv_id: self._heard(driver, rdzv_id)):
                while True:
                    self._check(driver)
                    self._woken.clear()
                    began_ms = self._server.clock.now_ms()
                    fresh, self._fresh = self._fresh, set()
                    self.readers |= fresh
                    await self._look(fresh)
                    await self._rest(self._server.clock.now_ms() - began_ms)
        except errors.RendezvousError as error:
            self.fail(error)
        except Exception:
            # The readers will reconnect; other feeds continue.
            log.exception("a bug in rdzvd, please report it: ending a stream of the HTTP API")
            self.fail(
                errors.RendezvousConnectionError("a bug in rdzvd, see its log; connect again")
            )

    def _check(self, driver: Driver) -> None:
        if self._server.driver is not driver:
            raise errors.RendezvousConnectionError("this server no longer leads; ask again")

    def _heard(self, driver: Driver, rdzv_id: str | None) -> None:
        try:
            self._check(driver)
        except errors.RendezvousConnectionError:
            # No more changes will follow; wake `run`, which ends the readers.
            self._woken.set()
        self._note(rdzv_id)

    async def _rest(self, worked_ms: int) -> None:
        """Rest in proportion to the time worked, and then wait for the next change."""
        rest_ms = max(REST_MS, REST * worked_ms)
        await sleep_ms(self._server.clock, rest_ms)
        waits = asyncio.ensure_future(self._woken.wait())
        looks_again = asyncio.ensure_future(sleep_ms(self._server.clock, WATCHED_EVERY_MS))
        try:
            waiting = {waits} if not self._looks_again() else {waits, looks_again}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waits.cancel()
            looks_again.cancel()

    def _looks_again(self) -> bool:
        return self._server.facade is not None

    def _note(self, rdzv_id: str | None) -> None:
        raise NotImplementedError

    async def _look(self, fresh: Collection[Reader]) -> None:
        """Send the whole state to `fresh` readers and changes to all others."""
        raise NotImplementedError


class FleetFeed(Feed):
    """The feed for all jobs and all nodes, with one row for each."""

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        self._told: dict[str, dict[str, object]] = {"jobs": {}, "nodes": {}}
        """The rows as last sent, without what changes by itself, by kind and name."""
        self._watched: set[str] = set()
        self._changed: set[str] = set()
        self._nodes_changed = False

    def _note(self, rdzv_id: str | None) -> None:
        if rdzv_id is not None:
            self._changed.add(rdzv_id)
        # A step in a job may change the states of its nodes.
        self._nodes_changed = True
        self._woken.set()

    async def _look(self, fresh: Collection[Reader]) -> None:
        _put_all(fresh, [BEGIN])
        jobs, gone = await self._jobs(everything=bool(fresh))
        contents: dict[str, object] = {}
        for name, job in jobs.items():
            contents[name] = replace(job, state_age_ms=0, reason=job.reason.without_times())
        await self._tell("jobs", jobs, contents, gone, fresh)
        if fresh or self._nodes_changed:
            self._nodes_changed = False
            now_ms = self._server.clock.now_ms()
            nodes = {node.node_id: node for node in self._server.nodes().nodes}
            contents = {name: _content(node, now_ms) for name, node in nodes.items()}
            await self._tell("nodes", nodes, contents, self._told["nodes"].keys() - nodes, fresh)
        _put_all(fresh, [READY])

    async def _jobs(self, *, everything: bool) -> tuple[dict[str, answers.JobSummary], set[str]]:
        rows = {row.rdzv_id: row for row in self._server.all_watched()}
        changed, self._changed = self._changed | (self._watched - rows.keys()), set()
        self._watched, gone = set(rows), set[str]()
        if everything:
            rows.clear()
            async for row in self._server.summaries():
                rows.setdefault(row.rdzv_id, row)
            return rows, self._told["jobs"].keys() - rows
        for number, rdzv_id in enumerate(changed, 1):
            try:
                rows[rdzv_id] = await self._server.summary(rdzv_id)
            except errors.UnknownJobError:
                gone.add(rdzv_id)
            except errors.RendezvousStateError as error:
                log.error("not showing job %s: %s", rdzv_id, error)
            except errors.RendezvousConnectionError:
                # Retry, because the store is unavailable. If this server no longer leads, `run`
                # finds out.
                self._changed.add(rdzv_id)
            if number % SLICE == 0:
                await asyncio.sleep(0)
        return rows, gone - self._watched

    async def _tell(
        self,
        kind: str,
        rows: Mapping[str, answers.JobSummary] | Mapping[str, answers.Node],
        contents: Mapping[str, object],
        gone: Set[str],
        fresh: Collection[Reader],
    ) -> None:
        sent, old = self._told[kind], self.readers.difference(fresh)
        news = [row for name, row in rows.items() if sent.get(name) != contents[name]]
        sent.update(contents)
        for readers, some in ((fresh, [*rows.values()]), (old, news)):
            for first in range(0, len(some) if readers else 0, ROWS):
                away = self._server.driver.trouble or None
                shown = {kind: some[first : first + ROWS], "store_away": away}
                _put_all(readers, [frame(kind, as_json.document(shown, indent=None))])
                await asyncio.sleep(0)
        if gone := gone & sent.keys():
            for name in gone:
                del sent[name]
            _put_all(
                old,
                [
                    frame(
                        "gone",
                        as_json.document(
                            {"jobs": [], "nodes": []} | {kind: sorted(gone)}, indent=None
                        ),
                    )
                ],
            )


_AGES = tuple(f"{of}_age_ms" for of in ("state", "drain", "cordon", "quarantine", "unhealthy"))
_DEADLINES = ("quarantine_left_ms", "drain_left_ms")


def _content(node: answers.Node, now_ms: int) -> object:
    """Return a node's data with times in place of ages, which would change at every look."""
    ages = {name: getattr(node, name) for name in _AGES}
    times: dict[str, Any] = {n: None if age is None else now_ms - age for n, age in ages.items()}
    for name in _DEADLINES:
        left_ms = getattr(node, name)
        # A deadline that has passed stays 0.
        times[name] = now_ms + left_ms if left_ms else left_ms
    return replace(node, **times)


class JobFeed(Feed):
    """The feed for one job: everything that `rdzvctl status` shows, and the job's history."""

    def __init__(self, server: Server, rdzv_id: str) -> None:
        super().__init__(server)
        self._rdzv_id = rdzv_id
        self._turn: object = None
        self._events = b""
        self._last = b""

    def _looks_again(self) -> bool:
        return self._server.watched(self._rdzv_id) is not None

    def _note(self, rdzv_id: str | None) -> None:
        # If a change to a node affects the job, the job's own rdzv_id is reported.
        if rdzv_id == self._rdzv_id:
            self._woken.set()

    async def _look(self, fresh: Collection[Reader]) -> None:
        old = self.readers.difference(fresh)
        status = await self._server.status(self._rdzv_id)
        sent = frame("job", as_json.document(status, indent=None))
        if sent != self._last:
            _put_all(old, [sent])
            self._last = sent
        turn = (status.run, self._server.driver.history.published_of(self._rdzv_id))
        if turn != self._turn or not self._events:
            rows = await self._server.history(self._rdzv_id, EVENTS)
            events = answers.EventList(self._rdzv_id, tuple(map(answers.event_in, rows)))
            written = frame("events", as_json.document(events, indent=None))
            self._turn = turn
            if written != self._events:
                _put_all(old, [written])
                self._events = written
        _put_all(fresh, [BEGIN, sent, self._events, READY])


def _put_all(readers: Iterable[Reader], frames: Sequence[bytes]) -> None:
    for reader in readers:
        reader.put(frames)


class Feeds:
    """All feeds of one server. Created by `running`."""

    def __init__(self, server: Server, limits: Limits, tasks: asyncio.TaskGroup) -> None:
        self._server = server
        self._tasks = tasks
        self._limits = limits
        self.by_rdzv_id: dict[str | None, Feed] = {}
        """The feeds, by rdzv_id. The key None is for the feed of all jobs and nodes."""
        self.readers = 0
        self._closed = False

    @classmethod
    @asynccontextmanager
    async def running(cls, server: Server, limits: Limits) -> AsyncIterator[Feeds]:
        with single_error():
            async with asyncio.TaskGroup() as tasks:
                feeds = cls(server, limits, tasks)
                try:
                    yield feeds
                finally:
                    feeds.close()
                    for feed in feeds.by_rdzv_id.values():
                        if feed.task is not None:
                            feed.task.cancel()

    @asynccontextmanager
    async def followed(self, rdzv_id: str | None) -> AsyncIterator[Reader]:
        """Follow one job, or all jobs and nodes if `rdzv_id` is None, until the body ends.

        Yields the reader that receives the frames.
        """
        if self._closed:
            raise errors.RendezvousConnectionError("this server is stopping; connect again")
        if self.readers >= self._limits.http_streams:
            raise errors.LimitExceededError(
                f"{self.readers} readers follow the stream here, which is the limit; close a "
                "page, or raise the limit `http_streams`"
            )
        self.readers += 1
        try:
            if rdzv_id is not None:
                await self._server.check_known(rdzv_id)
            else:
                _ = self._server.driver
            with self._joined(rdzv_id) as reader:
                yield reader
        finally:
            self.readers -= 1

    @contextmanager
    def _joined(self, rdzv_id: str | None) -> Iterator[Reader]:
        feed = self.by_rdzv_id.get(rdzv_id)
        if feed is None or feed.task is None or feed.task.done():
            new = FleetFeed(self._server) if rdzv_id is None else JobFeed(self._server, rdzv_id)
            feed = self.by_rdzv_id[rdzv_id] = new
            feed.task = self._tasks.create_task(feed.run())
        reader = Reader()
        feed.add(reader)
        try:
            yield reader
        finally:
            if feed.discard(reader):
                feed.task.cancel()
                if self.by_rdzv_id.get(rdzv_id) is feed:
                    del self.by_rdzv_id[rdzv_id]

    def close(self) -> None:
        self._closed = True
        for feed in self.by_rdzv_id.values():
            feed.fail(errors.RendezvousConnectionError("this server is stopping; connect again"))
