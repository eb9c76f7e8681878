"""Calls that may hang: each wait is bounded and reported once, and only one may be late."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from rdzv.agent.system.side_thread import Aside, find_program, in_time

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


class Told:
    """The results that callers get."""

    def __init__(self) -> None:
        self.news: asyncio.Queue[object] = asyncio.Queue()

    def take(self, what: object) -> None:
        self.news.put_nowait(what)

    async def next(self) -> object:
        async with asyncio.timeout(PATIENCE_S):
            return await self.news.get()


async def test_what_is_read_is_told_from_the_loop(server: Server) -> None:
    told, aside = Told(), Aside(PATIENCE_S)
    aside.call(told.take, server.read, "x")
    assert told.news.empty()
    assert await told.next() == "x"


async def test_what_is_raised_is_told(server: Server) -> None:
    told, aside = Told(), Aside(PATIENCE_S)
    aside.call(told.take, Path("/not/there").read_bytes)
    assert isinstance(await told.next(), FileNotFoundError)


@pytest.mark.slow
async def test_one_that_is_late_is_told_once_and_nothing_else_hangs(server: Server) -> None:
    told, aside = Told(), Aside(0.01)
    server.answers.clear()
    aside.call(told.take, server.read, "x")
    late = await told.next()
    assert isinstance(late, TimeoutError)
    assert "no answer within 0.01 s" in str(late)
    # Another caller does not even ask.
    aside.call(told.take, server.read, "y")
    assert isinstance(await told.next(), TimeoutError)
    assert server.asked == 1
    server.answers.set()
    while any(thread.name == "aside" for thread in threading.enumerate()):  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    aside.call(told.take, server.read, "z")
    assert await told.next() == "z"
    assert told.news.empty()


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
