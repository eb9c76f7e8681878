"""Posts notifications to a webhook when a run ends, a node is quarantined, or a job waits too long.

Notifications are created from the same rows as the log and the history, and are posted as JSON. No
step waits for a post: notifications go into a bounded queue, and a task posts them one at a time. A
failed post is retried a few times, then dropped and logged.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager

import aiohttp
import msgspec
from yarl import URL

from rdzv.server.settings.server_settings import Notify
from rdzv.stores.base import Record
from rdzv.structs import struct
from rdzv.view.answers import event_in

log = logging.getLogger("rdzv.notifications")

WAITING = 200
"""How many notifications can be queued; any further ones are dropped."""

WITHIN_S = 10.0
"""How long the webhook may take to answer."""

RETRY_AFTER_S = (1.0, 5.0, 30.0)
"""How long to wait before each retry of a failed post."""

CLOSE_WITHIN_S = 2.0
"""How long a server that is stopping continues to post."""

_REPORTED = ("RunEnded", "NodeQuarantined")


@struct(frozen=True)
class Notification:
    """A notification, as its JSON is posted; `text` is a sentence for people."""

    text: str
    event: str
    rdzv_id: str
    unix_ms: int
    fields: Mapping[str, object]


Post = Callable[[Notification], Awaitable[None]]
"""Posts a notification; raises `OSError`, `aiohttp.ClientError` or `TimeoutError` on failure."""


class Notifications:
    """Creates notifications from history rows and posts them. Use `notifying` to create one."""

    def __init__(self, post: Post, queued_after_s: float) -> None:
        """Report a job once it has been queued for `queued_after_s`; 0 disables these reports."""
        self._post = post
        self._queued_after_s = queued_after_s
        self._waiting: deque[Notification] = deque()
        self._news = asyncio.Event()
        self._dropped = 0
        self._queued: dict[str, asyncio.TimerHandle] = {}

    def recorded(self, rows: Sequence[Record]) -> None:
        for row in rows:
            for notification in self._of(row):
                self._put(notification)

    def forget_jobs(self) -> None:
        """Stop watching for jobs that wait too long, because another server now reports them."""
        for timer in self._queued.values():
            timer.cancel()
        self._queued.clear()

    def _of(self, row: Record) -> Iterator[Notification]:
        event = event_in(row)
        fields = event.fields or {}
        match row.name:
            case "RunBegan":
                self._begin_to_wait(row, "")
            case "JobQueued":
                self._begin_to_wait(row, str(fields.get("reason", "")))
            case "NodesPlaced" | "NodeJoined" | "RunEnded":
                self._end_wait(row.rdzv_id)
        if row.name in _REPORTED:
            text = f"{row.rdzv_id}: {event.text}"
            yield Notification(text, row.name, row.rdzv_id, row.unix_ms, fields)

    def _begin_to_wait(self, row: Record, reason: str) -> None:
        self._end_wait(row.rdzv_id)
        if self._queued_after_s:
            loop = asyncio.get_running_loop()
            self._queued[row.rdzv_id] = loop.call_later(
                self._queued_after_s, self._report_queued, row, reason
            )

    def _end_wait(self, rdzv_id: str) -> None:
        if (timer := self._queued.pop(rdzv_id, None)) is not None:
            timer.cancel()

    def _report_queued(self, row: Record, reason: str) -> None:
        del self._queued[row.rdzv_id]
        text = f"{row.rdzv_id}: it has waited in the queue for {self._queued_after_s:g} s"
        text += f" ({reason})" if reason else ""
        text += f"; `rdzvctl status {row.rdzv_id}` shows what it waits for"
        self._put(Notification(text, "JobQueued", row.rdzv_id, row.unix_ms, {"reason": reason}))

    def _put(self, notification: Notification) -> None:
        if len(self._waiting) == WAITING:
            self._dropped += 1
            return
        self._waiting.append(notification)
        self._news.set()

    @property
    def queued(self) -> tuple[str, ...]:
        return tuple(self._queued)

    async def run(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            await self.drain()

    async def drain(self) -> None:
        while self._waiting:
            await self._deliver(self._waiting[0])
            self._waiting.popleft()
            if self._dropped:
                log.warning("dropped %d notifications: too many at once", self._dropped)
                self._dropped = 0

    async def _deliver(self, notification: Notification) -> None:
        for wait_s in (*RETRY_AFTER_S, None):
            try:
                await self._post(notification)
                return
            except (OSError, aiohttp.ClientError, TimeoutError) as error:
                why = str(error) or type(error).__name__
            if wait_s is None:
                log.warning("dropped a notification (%s): %s", why, notification.text)
            else:
                await asyncio.sleep(wait_s)


@asynccontextmanager
async def notifying(notify: Notify) -> AsyncIterator[Notifications]:
    """Post notifications until the body ends, then queued ones for up to `CLOSE_WITHIN_S`."""
    url, timeout = URL(notify.read_url()), aiohttp.ClientTimeout(total=WITHIN_S)
    async with aiohttp.ClientSession(timeout=timeout, trust_env=True) as session:

        async def post(notification: Notification) -> None:
            body = msgspec.to_builtins(notification)
            async with session.post(url, json=body, allow_redirects=False) as answer:
                if answer.status >= 300:
                    raise OSError(f"{url.host} answers {answer.status} {answer.reason}")

        notifications = Notifications(post, notify.queued_after_ms / 1000)
        async with asyncio.TaskGroup() as tasks:
            posting = tasks.create_task(notifications.run())
            try:
                yield notifications
            finally:
                notifications.forget_jobs()
                posting.cancel()
                await asyncio.wait([posting])
                await _finish(notifications)


async def _finish(notifications: Notifications) -> None:
    try:
        async with asyncio.timeout(CLOSE_WITHIN_S):
            await notifications.drain()
    except TimeoutError:
        log.warning(
            "dropped the last notifications because the webhook did not accept them in time"
        )
