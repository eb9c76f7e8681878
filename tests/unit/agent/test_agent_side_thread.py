"""Calls that may hang, and tasks with an owner: each wait is bounded, each error reaches one."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from rdzv.agent.system.side_thread import Aside, find_program, in_time
from rdzv.runtime.tasks import OwnedTasks

PATIENCE_S = 100.0


class Server:
    """A file server, which may hang."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.answers.set()
        self.asked = 0

    def read(self, text: str) -> str:
        self.asked += 1
        assert self.answers.wait(PATIENCE_S)
        return text


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    yield made
    made.answers.set()


async def test_what_is_read_or_raised_is_the_answer(server: Server) -> None:
    aside = Aside(PATIENCE_S)
    assert await aside.answer(server.read, "x") == "x"
    with pytest.raises(FileNotFoundError):
        await aside.answer(Path("/not/there").read_bytes)


@pytest.mark.slow
async def test_while_one_is_late_nothing_else_hangs(server: Server) -> None:
    aside = Aside(0.01)
    server.answers.clear()
    with pytest.raises(TimeoutError, match=r"no answer within 0\.01 s"):
        await aside.answer(server.read, "x")
    # Another caller does not even ask.
    with pytest.raises(TimeoutError, match=r"no answer within 0\.01 s"):
        await aside.answer(server.read, "y")
    assert server.asked == 1
    server.answers.set()
    while any(thread.name == "aside" for thread in threading.enumerate()):  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    assert await aside.answer(server.read, "z") == "z"


@pytest.mark.slow
async def test_who_gives_up_waiting_keeps_no_other_from_asking(server: Server) -> None:
    aside = Aside(PATIENCE_S)
    server.answers.clear()
    asking = asyncio.create_task(aside.answer(server.read, "x"))
    while not server.asked:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    asking.cancel()
    await asyncio.wait([asking])
    server.answers.set()
    assert await aside.answer(server.read, "y") == "y"


@pytest.mark.slow
async def test_the_loop_goes_on_meanwhile(server: Server) -> None:
    server.answers.clear()
    began_s = time.monotonic()
    with pytest.raises(TimeoutError, match=r"no answer within 0\.01 s from its file system"):
        await in_time(0.01, server.read, "x")
    assert time.monotonic() - began_s < PATIENCE_S / 2


async def test_a_file_server_that_gives_up_itself_says_so() -> None:
    def give_up() -> None:
        raise TimeoutError(110, "Connection timed out")

    with pytest.raises(TimeoutError, match="Connection timed out"):
        await in_time(PATIENCE_S, give_up)


@pytest.mark.parametrize(
    ("make", "why"),
    [(lambda _: None, "No such file"), (lambda path: path.touch(mode=0o600), "Permission denied")],
)
def test_a_program_that_can_not_be_started_says_why(
    tmp_path: Path, make: Callable[[Path], None], why: str
) -> None:
    make(tmp_path / "program")
    with pytest.raises(OSError, match=why):
        find_program(str(tmp_path / "program"))
    assert Path(find_program("sh")).is_absolute()


# ------------------------------------------------------------------ owned tasks


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
