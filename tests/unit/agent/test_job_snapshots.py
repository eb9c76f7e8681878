"""When an agent has its runner write snapshots to disk, and exchange copies of them."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import ssl
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rdzv.agent.core.events import SnapshotsChanged, SnapshotsWritten
from rdzv.agent.job.snapshots import CopiesOfSnapshots, SnapshotsOnDisk
from rdzv.agent.launch.launch import Launch, SnapshotFiles
from rdzv.agent.runner.requests import CarryCopies, StateMark, WriteSnapshots
from rdzv.core.model import Snapshot, SnapshotMark
from rdzv.core.snapshots import CopyCarrier, MissingCopies
from rdzv.runtime.tasks import OwnedTasks
from tests.unit.agent.test_agent_machine import JOB, line

FOLDER = Path("/data/run7")


class Runner:
    def __init__(self) -> None:
        self.asked: list[tuple[StateMark, list[str]]] = []

    def ask(self, request: WriteSnapshots) -> None:
        self.asked.append((request.mark, list(request.argv)))


def mark(step: int, shards: int = 1) -> SnapshotMark:
    return SnapshotMark(0, step, "a", shards)


def disk(every_s: float = 10) -> SnapshotsOnDisk:
    return SnapshotsOnDisk(Launch(JOB, "train.py", snapshot_files=SnapshotFiles(FOLDER, every_s)))


def written(step: int, reason: str = "") -> SnapshotsWritten:
    return SnapshotsWritten(mark(step), reason)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("every_s", "group_rank", "shards", "whole_ms", "steps"),
    [
        # The first of each period; when the first one began is not known.
        (10, 0, 1, [11_000, 19_999, 20_000, 21_000, 45_000, 49_000], [3, 5]),
        # All nodes write their parts of a sharded state, and one a state that all have alike.
        (10, 1, 2, [11_000, 20_000], [2]),
        (10, 1, 1, [11_000, 20_000], []),
        # A mark of which nobody knows since when it is whole, as that of a round.
        (10, 0, 1, [11_000, 0, 19_000], []),
        (0, 0, 1, [11_000, 20_000], []),
    ],
)
async def test_the_first_mark_of_a_period_is_written(
    every_s: float, group_rank: int, shards: int, whole_ms: list[int], steps: list[int]
) -> None:
    found, runner = disk(every_s), Runner()
    a_line = line(group_rank=group_rank)
    for number, at_ms in enumerate(whole_ms, 1):
        found.announced(runner, mark(number, shards), at_ms, a_line)  # type: ignore[arg-type]
        found.note(written(number))
    assert [one.step for one, _ in runner.asked] == steps


async def test_one_at_a_time_is_written(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    found, runner = disk(), Runner()
    found.write(runner, mark(10), "run-1")  # type: ignore[arg-type]
    found.write(runner, mark(20), "run-1")  # type: ignore[arg-type]
    last = asyncio.create_task(found.write_last(runner, mark(30), "run-1"))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    assert [one.step for one, _ in runner.asked] == [10]
    found.note(written(10))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [one.step for one, _ in runner.asked] == [10, 30]
    assert runner.asked[0][1][1:] == [
        *("-m", "rdzv.worker.write_snapshots", str(FOLDER), "--run", "run-1", "--keep", "2")
    ]
    found.note(written(30, "its writer ended with exit code 1"))
    await last
    assert "wrote the snapshot of step 10 to /data/run7" in caplog.text
    assert "step 30 was not written to /data/run7: its writer ended with" in caplog.text
    # What is there already is not written again, and after a failure it is tried again.
    for step in (10, 30):
        found.write(runner, mark(step), "run-1")  # type: ignore[arg-type]
    assert [one.step for one, _ in runner.asked] == [10, 30, 30]


@pytest.mark.parametrize("why", ["no option", "no mark", "its runner dies"])
async def test_nothing_is_waited_for_that_does_not_come(why: str) -> None:
    found, runner = disk(), Runner()
    if why == "no option":
        found = SnapshotsOnDisk(Launch(JOB, "train.py"))
    it = None if why == "no mark" else mark(10)
    last = asyncio.create_task(found.write_last(runner, it, "run-1"))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    if why == "its runner dies":
        found.note_runner_gone()
    async with asyncio.timeout(60):
        await last


# ------------------------------------------------------------------ copies

CARRIER = CopyCarrier(4711, "token")


class Carrying:
    def __init__(self) -> None:
        self.asked: list[tuple[str, CarryCopies]] = []
        self.was_asked = asyncio.Event()

    def ask(self, request: CarryCopies) -> None:
        self.asked.append((request.argv[-1], request))
        self.was_asked.set()


class Story:
    def __init__(self, *, rate: int = 1_000, encrypted: bool = False) -> None:
        self.runner = Carrying()
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
        mark = SnapshotMark(0, 40, "a", shards)
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


async def test_an_ended_carrier_is_replaced_later(monkeypatch: pytest.MonkeyPatch) -> None:
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
        SnapshotsChanged((Snapshot(0, SnapshotMark(0, 40, "a", 2), 0, 1_000, "d"),)),
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
