"""When an agent has its runner exchange copies of snapshots, and by which credentials."""

from __future__ import annotations

import asyncio
import hashlib
import ssl
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from rdzv.agent.core.events import SnapshotsChanged
from rdzv.agent.job.snapshots import CopiesOfSnapshots
from rdzv.agent.launch.launch import Launch
from rdzv.agent.runner_link import CopyCredentials
from rdzv.agent.system.owned_tasks import OwnedTasks
from rdzv.core.model import Snapshot, SnapshotMark
from rdzv.core.snapshots import CopyCarrier, MissingCopies
from tests.unit.agent.test_agent_machine import JOB, line

CARRIER = CopyCarrier(4711, "token")


class Runner:
    def __init__(self) -> None:
        self.asked: list[tuple[str, CopyCredentials]] = []
        self.was_asked = asyncio.Event()

    def carry_copies(
        self, argv: Sequence[str], env: Any, cwd: Any, identity: Any, credentials: CopyCredentials
    ) -> None:
        self.asked.append((argv[-1], credentials))
        self.was_asked.set()


class Story:
    def __init__(self, *, rate: int = 1_000, encrypted: bool = False) -> None:
        self.runner = Runner()
        launch = Launch(JOB, "train.py", snapshot_copy_rate=rate)
        self.copies = CopiesOfSnapshots(launch, encrypted=encrypted)
        self.context: Any = SimpleNamespace(
            runner=self.runner,
            tasks=OwnedTasks(lambda error: pytest.fail(repr(error))),
            decisions=SimpleNamespace(state=SimpleNamespace(assignment=line())),
        )

    async def note(
        self,
        shards: int = 2,
        copy_of: int | None = None,
        carrier: CopyCarrier | None = None,
        missing: str = "",
    ) -> None:
        mark = SnapshotMark(0, 40, "a", shards, 2)
        lacks = MissingCopies(mark, missing) if missing else None
        held = Snapshot(0, mark, 0, 1_000, "digest", copy_of)
        self.copies.note(self.context, SnapshotsChanged((held,), carrier, lacks))
        await asyncio.sleep(0)
        await self.context.tasks.close()


async def test_a_carrier_is_wanted_for_a_sharded_state_on_several_nodes() -> None:
    story = Story()
    await story.note(shards=1)
    await story.note(copy_of=0)
    assert not story.runner.asked
    story.context.decisions.state.assignment = line(group_world_size=1)
    await story.note()
    assert not story.runner.asked
    story.context.decisions.state.assignment = line()
    await story.note()
    ((rate, credentials),) = story.runner.asked
    assert rate == "1000" and len(credentials.token) > 40
    assert credentials.fingerprint == credentials.pem == ""


async def test_none_is_wanted_if_that_is_switched_off() -> None:
    story = Story(rate=0)
    await story.note()
    assert not story.runner.asked


async def test_each_round_has_a_token_of_its_own() -> None:
    story = Story()
    await story.note()
    await story.note(carrier=CARRIER)
    assert len(story.runner.asked) == 1
    story.context.decisions.state.assignment = line(round=7)
    await story.note(carrier=CARRIER)
    first, second = (credentials.token for _, credentials in story.runner.asked)
    assert first != second


async def test_a_carrier_that_has_ended_is_replaced_but_not_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    story = Story()
    await story.note()
    now[0] += 59
    await story.note()
    assert len(story.runner.asked) == 1
    now[0] += 2
    await story.note()
    assert len(story.runner.asked) == 2


async def test_it_is_encrypted_where_the_connection_to_the_server_is() -> None:
    story = Story(encrypted=True)
    story.copies.note(
        story.context,
        SnapshotsChanged((Snapshot(0, SnapshotMark(0, 40, "a", 2, 2), 0, 1_000, "d"),)),
    )
    async with asyncio.timeout(60):
        await story.runner.was_asked.wait()
    ((_, credentials),) = story.runner.asked
    begin = credentials.pem.index("-----BEGIN CERTIFICATE")
    der = ssl.PEM_cert_to_DER_cert(credentials.pem[begin:])
    assert hashlib.sha256(der).hexdigest() == credentials.fingerprint
    assert "PRIVATE KEY" in credentials.pem[:begin]


async def test_what_is_missing_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    story = Story()
    for _ in range(3):
        await story.note(missing="n2: Connection refused")
    (record,) = caplog.records
    assert record.getMessage().endswith(
        "this node could not get copies of step 40: n2: Connection refused"
    )
