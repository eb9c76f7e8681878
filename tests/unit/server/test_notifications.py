"""Notifications: what is posted to a webhook, when, and the effects of a failing webhook."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from aiohttp import web

from rdzv.errors import InvalidRequestError
from rdzv.server.settings.server_settings import Notify
from rdzv.server.telemetry import notifications as module
from rdzv.server.telemetry.notifications import Notification, Notifications, notifying
from rdzv.stores.base import Record

BEGAN = Record(1, "job-7", "r1", "RunBegan", '{"run":"r1","run_number":1,"reason":"submitted"}')
QUEUED = Record(2, "job-7", "r1", "JobQueued", '{"reason":"n3 was lost"}')
PLACED = Record(3, "job-7", "r1", "NodesPlaced", '{"nodes":1,"node_ids":["n1"]}')
JOINED = Record(
    3,
    "job-7",
    "r1",
    "NodeJoined",
    '{"node_id":"n1","incarnation":1,"address":"a","local_world_size":1}',
)
ENDED = Record(9, "job-7", "r1", "RunEnded", '{"run":"r1","result":"failed","reason":"n1: boom"}')
QUARANTINED = Record(
    4, "job-7", "r1", "NodeQuarantined", '{"node_id":"n3","for_ms":600000,"reason":"3 failures"}'
)


class Webhook:
    """Accepts posts; the first few fail as the test says."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.posted: list[Notification] = []
        self.told = asyncio.Event()

    async def __call__(self, notification: Notification) -> None:
        if self.failures:
            raise self.failures.pop(0)
        self.posted.append(notification)
        self.told.set()


async def posted(rows: Sequence[Record], webhook: Webhook) -> list[str]:
    notifications = Notifications(webhook, 0)
    notifications.recorded(rows)
    await notifications.drain()
    return [notification.text for notification in webhook.posted]


async def test_the_end_of_a_run_and_a_quarantine_are_posted_and_nothing_else() -> None:
    texts = await posted([BEGAN, JOINED, QUARANTINED, PLACED, ENDED], Webhook())
    assert len(texts) == 2
    assert texts[0].startswith("job-7: ")
    assert "n3" in texts[0]
    assert "n1: boom" in texts[1]


async def test_a_post_that_fails_is_repeated_and_the_order_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "RETRY_AFTER_S", (0.0, 0.0))
    texts = await posted([QUARANTINED, ENDED], Webhook(OSError("refused"), TimeoutError()))
    assert ["n3" in texts[0], "boom" in texts[1]] == [True, True]


async def test_after_the_last_attempt_it_is_dropped_and_the_next_is_posted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "RETRY_AFTER_S", (0.0,))
    texts = await posted([QUARANTINED, ENDED], Webhook(OSError("refused"), OSError("gone")))
    assert len(texts) == 1
    assert "boom" in texts[0]
    assert "dropped a notification (gone): job-7: " in caplog.text


async def test_too_many_at_once_are_dropped_and_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "WAITING", 3)
    assert len(await posted([ENDED] * 5, Webhook())) == 3
    assert "dropped 2 notifications: too many at once" in caplog.text


@pytest.mark.parametrize("begins", [BEGAN, QUEUED], ids=["at first", "again"])
async def test_a_job_that_waits_for_long_is_reported_once(begins: Record) -> None:
    webhook = Webhook()
    notifications = Notifications(webhook, 0.01)
    notifications.recorded([begins])
    posting = asyncio.create_task(notifications.run())
    async with asyncio.timeout(60):
        await webhook.told.wait()
    posting.cancel()
    (notification,) = webhook.posted
    assert notification.event == "JobQueued"
    assert "has waited in the queue for 0.01 s" in notification.text
    assert "rdzvctl status job-7" in notification.text


@pytest.mark.parametrize("ends", [PLACED, JOINED, ENDED], ids=lambda row: row.name)
async def test_a_job_that_no_longer_waits_is_not(ends: Record) -> None:
    notifications = Notifications(Webhook(), 60)
    notifications.recorded([QUEUED])
    assert notifications.queued == ("job-7",)
    notifications.recorded([ends])
    assert not notifications.queued


async def test_a_server_that_no_longer_leads_reports_no_queue() -> None:
    notifications = Notifications(Webhook(), 60)
    notifications.recorded([QUEUED])
    notifications.forget_jobs()
    assert not notifications.queued


# ---------------------------------------------------------------------- over HTTP


@pytest.fixture
async def received() -> AsyncIterator[tuple[str, list[object]]]:
    """Run a webhook: its address, and the bodies it has received."""
    bodies: list[object] = []

    async def take(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        return web.Response(status=204)

    app = web.Application()
    app.router.add_post("/hook/secret", take)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}", bodies
    await runner.cleanup()


@pytest.mark.slow
async def test_what_waits_is_posted_before_the_server_ends(
    tmp_path: Path, received: tuple[str, list[object]]
) -> None:
    address, bodies = received
    file = tmp_path / "webhook"
    file.write_text(f"{address}/hook/secret\n")
    async with notifying(Notify(file)) as notifications:
        notifications.recorded([ENDED])
    assert bodies == [
        {
            "text": "job-7: run r1 failed: n1: boom",
            "event": "RunEnded",
            "rdzv_id": "job-7",
            "unix_ms": 9,
            "fields": {"run": "r1", "result": "failed", "reason": "n1: boom"},
        }
    ]


@pytest.mark.slow
async def test_an_answer_that_is_no_success_is_a_failure_without_the_secret(
    tmp_path: Path,
    received: tuple[str, list[object]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(module, "RETRY_AFTER_S", ())
    file = tmp_path / "webhook"
    file.write_text(f"{received[0]}/wrong/secret\n")
    async with notifying(Notify(file)) as notifications:
        notifications.recorded([ENDED])
    assert "127.0.0.1 answers 404 Not Found" in caplog.text
    assert "secret" not in caplog.text


@pytest.mark.parametrize("text", ["", "\n", "ftp://a/b", "chat.example.com/hook", "http://"])
def test_a_file_without_an_address_is_refused_without_showing_it(tmp_path: Path, text: str) -> None:
    file = tmp_path / "webhook"
    file.write_text(text)
    with pytest.raises(InvalidRequestError, match=r"notify.url_file") as refused:
        Notify(file).read_url()
    assert "chat.example" not in str(refused.value)


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="nowhere"):
        Notify(tmp_path / "nowhere").read_url()
