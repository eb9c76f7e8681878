"""Tasks whose errors reach their owner, and which end with it."""

from __future__ import annotations

import asyncio

from rdzv.agent.system.owned_tasks import OwnedTasks


async def test_an_error_reaches_the_owner() -> None:
    heard: list[Exception] = []
    tasks = OwnedTasks(heard.append)

    async def fail() -> None:
        raise ValueError("a bug")

    await asyncio.wait([tasks.start(fail(), "fails")])
    assert [str(error) for error in heard] == ["a bug"]


async def test_what_still_runs_ends_with_its_owner_without_an_error() -> None:
    heard: list[Exception] = []
    tasks = OwnedTasks(heard.append)
    task = tasks.start(asyncio.sleep(100), "sleeps")
    await tasks.close()
    assert task.cancelled()
    assert heard == []
    await tasks.close()
