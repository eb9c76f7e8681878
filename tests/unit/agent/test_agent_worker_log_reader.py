"""How one node reads its workers' output for others: each file once, in order, bounded."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest

from rdzv.agent.launch.launch import NO_FILES
from rdzv.agent.output import worker_log_reader
from rdzv.agent.output.run_files import RoundOutput, WorkerOutput, Written
from rdzv.agent.output.worker_log_reader import WorkerLogReader, tail
from rdzv.core.model import Assignment
from rdzv.messages import LogPiece, LogPosition, ReadLog
from rdzv.structs import replace
from tests.support.agent_jobs import LINE, PATIENCE_S

pytestmark = pytest.mark.slow

EVERYTHING = ReadLog(1, "job-7", None, None, True, True, False, 0, 0, 64 * 1024, runs=("feed",))


class Node:
    """The logs of one job on one node, and the pieces sent to readers that ask on and on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.written = Written()
        self.reading = WorkerLogReader(self._say)
        self.reading.serve("job-7", self.written)
        self.pieces: list[LogPiece] = []
        self._numbers = itertools.count(1)
        self._asked: dict[int, ReadLog] = {}
        self.slow: set[int] = set()
        """The readers that do not ask for another piece by themselves."""
        self._came = asyncio.Event()

    async def _say(self, piece: LogPiece) -> None:
        self.pieces.append(piece)
        self._came.set()
        if not piece.last and piece.request not in self.slow:
            asyncio.get_running_loop().call_soon(self.go_on, piece.request)

    def go_on(self, number: int) -> None:
        """Ask for the next piece of a reader."""
        piece, asked = self.of(number)[-1], self._asked[number]
        self._asked[number] = replace(
            asked, round=piece.round, positions=piece.positions, tail_bytes=0, tail_lines=0
        )
        self.reading.read(replace(self._asked[number], wait_ms=60_000))

    def path(self, number: int, local_rank: int, name: str = "stdout") -> Path:
        return self.folder / f"round_{number}" / str(local_rank) / f"{name}.log"

    def begin(self, number: int, rank_first: int = 4, *, files: bool = True) -> None:
        """Begin a round of two workers; the runner has created their files, or will."""
        outputs = []
        for local_rank in (0, 1):
            paths = [self.path(number, local_rank, name) for name in ("stdout", "stderr")]
            paths[0].parent.mkdir(parents=True)
            for path in paths if files else ():
                path.touch()
            outputs.append(WorkerOutput(*paths, error=NO_FILES))
        self.written.begin(line(number, rank_first), RoundOutput(tuple(outputs), {}))

    def write(self, text: str, number: int, local_rank: int = 0, name: str = "stdout") -> None:
        with self.path(number, local_rank, name).open("a") as file:
            file.write(text)

    def ask(self, *, slow: bool = False, **wanted: object) -> int:
        number = next(self._numbers)
        self._asked[number] = replace(EVERYTHING, request=number, **wanted)
        if slow:
            self.slow.add(number)
        self.reading.read(self._asked[number])
        return number

    async def until(self, text: str, request: int = 1) -> None:
        """Wait until exactly this has been sent."""

        def is_all() -> bool:
            assert text.startswith(self.text(request)), self.text(request)
            return self.text(request) == text

        await self.came(is_all)

    async def came(self, holds: Callable[[], bool]) -> None:
        """Wait until this holds for the pieces received."""
        async with asyncio.timeout(PATIENCE_S):
            while not holds():
                self._came.clear()
                await self._came.wait()

    async def last(self, request: int = 1) -> LogPiece:
        """Wait for the last piece."""
        await self.came(lambda: any(piece.last for piece in self.of(request)))
        await idle()
        assert [piece.last for piece in self.of(request)].index(True) == len(self.of(request)) - 1
        return self.of(request)[-1]

    def of(self, request: int) -> list[LogPiece]:
        return [piece for piece in self.pieces if piece.request == request]

    def text(self, request: int = 1) -> str:
        return b"".join(piece.data for piece in self.of(request)).decode()


def line(number: int, rank_first: int = 4) -> Assignment:
    return replace(
        LINE, run="feed", round=number, rank_first=rank_first, world_size=6, group_world_size=3
    )


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    made = Node(tmp_path)
    yield made
    made.reading.stop_all()


async def idle() -> None:
    """Let everything happen that can happen now."""
    for _ in range(20):
        await asyncio.sleep(0.001)


# ------------------------------------------------------------------ what is there


@pytest.mark.quick
async def test_all_that_was_written_is_sent_and_named(node: Node) -> None:
    node.begin(0)
    node.write("one\ntwo", 0, 0)
    node.write("three", 0, 1, "stderr")
    request = node.ask()
    assert await node.last() == LogPiece(request, last=True)
    assert [(piece.round, piece.data) for piece in node.pieces[:1]] == [(0, b"")]
    assert {
        (piece.rank, piece.local_rank, piece.stderr): (piece.offset, piece.data)
        for piece in node.pieces[1:-1]
    } == {(4, 0, False): (0, b"one\ntwo"), (5, 1, True): (0, b"three")}


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        ({"rank": 5, "stderr": False}, "out1"),
        ({"rank": 4, "stdout": False}, "err0"),
        ({"rank": 4}, "out0err0"),
        ({"rank": 9}, ""),
    ],
)
async def test_only_what_is_wanted_is_sent(node: Node, wanted: dict[str, int], text: str) -> None:
    node.begin(0)
    for local_rank, name in itertools.product((0, 1), ("stdout", "stderr")):
        node.write(f"{name[3:]}{local_rank}", 0, local_rank, name)
    node.ask(**wanted)
    assert (await node.last()).error == ""
    assert node.text() == text
    # If nothing is requested of a round, only its end is reported.
    assert len(node.pieces) == (1 if not text else 2 + len(text) // 4)


async def test_an_earlier_round_is_read_by_its_number(node: Node) -> None:
    node.begin(3, rank_first=0)
    node.write("before", 3, 1)
    node.begin(4)
    node.write("now", 4, 1)
    node.ask(round=3, rank=1)
    await node.last()
    assert node.text() == "before"
    second = node.ask(rank=5)
    await node.last(second)
    assert node.text(second) == "now"
    third = node.ask(round=7)
    await node.last(third)
    assert len(node.of(third)) == 1


async def test_what_is_written_while_it_is_read_is_not_waited_for(node: Node) -> None:
    """Otherwise a worker that writes faster than the reader would be read forever."""
    node.begin(0)
    node.write("x" * 100, 0)
    request = node.ask(rank=4, stderr=False, max_bytes=50, slow=True)
    await node.came(lambda: len(node.pieces) == 1)
    node.write("y" * 100, 0)
    node.slow.clear()
    node.go_on(request)
    await node.last()
    assert node.text() == "x" * 100


@pytest.mark.quick
@pytest.mark.parametrize("step", [1, 3, 64 * 1024])
def test_the_tail_of_a_file(tmp_path: Path, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_log_reader, "BLOCK_BYTES", step)
    path = tmp_path / "x.log"
    cases = {b"": [b""] * 3, b"\n\n\n": [b"\n", b"\n\n", b"\n\n\n"]}
    cases[b"one\ntwo\nthree\n"] = [b"three\n", b"two\nthree\n", b"one\ntwo\nthree\n"]
    cases[b"one\ntwo\nthree"] = [b"three", b"two\nthree", b"one\ntwo\nthree"]
    for content, tails in cases.items():
        path.write_bytes(content)
        for lines, expected in enumerate(tails, 1):
            assert content[tail(path, len(content), 0, lines) :] == expected
        assert tail(path, len(content), 0, 9) == 0
        assert tail(path, len(content), 0, 0) == 0
        assert content[tail(path, len(content), 2, 0) :] == content[-2:]
        assert tail(path, len(content), 99, 0) == 0
    # Whichever is less.
    assert content[tail(path, len(content), 3, 2) :] == b"ree"
    assert content[tail(path, len(content), 12, 1) :] == b"three"


async def test_a_tail_of_lines_is_bounded(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_log_reader, "TAIL_BYTES", 10)
    node.begin(0)
    node.write("x" * 100, 0)
    node.ask(rank=4, tail_lines=1)
    await node.last()
    assert node.text() == "x" * 10


# ------------------------------------------------------------------ following


async def test_what_is_written_is_sent_as_it_comes_also_in_later_rounds(node: Node) -> None:
    node.begin(0, files=False)
    node.ask(rank=4, stderr=False, follow=True)
    node.write("a", 0)
    await node.until("a")
    node.write("b", 0)
    await node.until("ab")
    # RANK 4 is on another node in the next round, and back in the one after it.
    node.write("c", 0)
    node.written.end_round()
    node.begin(1, rank_first=0)
    node.write("nobody's", 1)
    node.written.end_round()
    await node.until("abc")
    node.begin(2, rank_first=3)
    node.write("d", 2, 1)
    await node.until("abcd")
    node.write("e", 2, 1)
    node.written.end()
    await node.last()
    assert node.text() == "abcde"
    assert [(piece.round, piece.offset) for piece in node.pieces if piece.data][-1] == (2, 1)


async def test_following_begins_with_the_round_or_its_tail(node: Node) -> None:
    node.begin(0)
    node.write("one\ntwo\n", 0)
    node.ask(rank=4, follow=True, tail_lines=1)
    await node.until("two\n")
    node.begin(1)
    node.write("three\nfour\n", 1)
    await node.until("two\nthree\nfour\n")


async def test_following_before_the_first_round_is_answered_at_once(node: Node) -> None:
    request = node.ask(follow=True, rank=4)
    await node.came(lambda: bool(node.pieces))
    await idle()
    assert node.pieces == [LogPiece(request, 0)]
    node.begin(6)
    node.write("x", 6)
    await node.until("x")


async def test_a_reader_goes_on_where_it_was(node: Node) -> None:
    node.begin(0)
    node.write("one two", 0, 0)
    node.write("three four", 0, 1)
    node.begin(1)
    node.write("five", 1, 1)
    places = (LogPosition("", 0, 0, False, 4), LogPosition("", 0, 1, False, 6))
    node.ask(round=0, stderr=False, follow=True, positions=places)
    await node.came(lambda: "five" in node.text())
    assert sorted(piece.data for piece in node.pieces if piece.data) == [b"five", b"four", b"two"]


async def test_a_file_that_has_become_shorter_begins_anew(node: Node) -> None:
    node.begin(0)
    node.write("long ago", 0)
    node.ask(rank=4, stderr=False, follow=True)
    await node.until("long ago")
    node.path(0, 0).write_text("new")
    await node.until("long agonew")


async def test_nothing_is_opened_without_need(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.begin(0)
    node.ask(follow=True)
    await idle()
    opened: list[Path] = []
    open_untrusted = worker_log_reader.open_untrusted

    def counted(path: Path, flags: int) -> int:
        opened.append(path)
        return open_untrusted(path, flags)

    monkeypatch.setattr(worker_log_reader, "open_untrusted", counted)
    await idle()
    assert not opened
    node.write("x", 0)
    await node.until("x")
    assert opened


# ------------------------------------------------------------------ what cannot be read


async def test_what_goes_to_the_console_is_an_error_that_says_what_helps(node: Node) -> None:
    nowhere = WorkerOutput(None, None, error=NO_FILES)
    node.written.begin(line(0), RoundOutput((nowhere, nowhere), {}))
    node.ask(follow=True)
    error = (await node.last()).error
    assert "RANK 4, 5: stdout goes to the console of its rdzvrun and to no file" in error
    assert "RANK 4, 5: stderr" in error
    assert "--redirects=3 or --tee=3, and with --log-dir" in error


async def test_what_is_kept_nowhere_is_named_and_the_rest_comes(node: Node) -> None:
    node.begin(0)
    kept = WorkerOutput(node.path(0, 0), None, error=NO_FILES)
    dropped = WorkerOutput(NO_FILES, NO_FILES, error=NO_FILES)
    node.written.begin(line(0), RoundOutput((kept, dropped), {}))
    node.write("x", 0)
    node.ask()
    assert (await node.last()).error == ""
    assert node.text() == "x"
    (error,) = [piece.error for piece in node.pieces if piece.error]
    assert [reason.split(" ")[0] for reason in error.split("; RANK")] == ["RANK", "", ""]
    assert error.count("--log-dir=/dev/null") == 2


async def test_a_file_that_is_gone_is_named_and_the_rest_comes(node: Node) -> None:
    node.begin(0)
    node.write("x", 0, 1)
    node.path(0, 0).unlink()
    node.written.end_round()
    node.ask(stderr=False)
    await node.last()
    assert node.text() == "x"
    (error,) = [piece.error for piece in node.pieces if piece.error]
    assert error == f"{node.path(0, 0)} no longer exists"


async def test_only_the_files_that_workers_write_are_read(node: Node, tmp_path: Path) -> None:
    """If a worker has replaced its file by a link or a pipe, nothing is read through it."""
    secret = tmp_path / "secret"
    secret.write_text("secret")
    node.begin(0)
    node.path(0, 0).unlink()
    node.path(0, 0).symlink_to(secret)
    node.path(0, 1).unlink()
    os.mkfifo(node.path(0, 1))
    node.ask(stderr=False, follow=True)
    await node.came(lambda: len([piece for piece in node.pieces if piece.error]) == 2)
    assert node.text() == ""
    errors = "".join(piece.error for piece in node.pieces)
    assert "Too many levels of symbolic links" in errors
    assert "not a regular file" in errors


def remember(node: Node) -> None:
    """Let the job end, with its rounds known from before."""
    rounds = [found for number in range(8) if (found := node.written.at(number)) is not None]

    def past(name: str, runs: Sequence[str]) -> Written | None:
        return Written.before(rounds) if (name, runs) == ("job-7", ("feed",)) else None

    node.reading.past = past


async def test_a_job_that_has_ended_is_read_from_what_is_known_of_it(node: Node) -> None:
    node.begin(2)
    node.begin(3)
    node.write("before\n", 3)
    remember(node)
    node.reading.forget("job-7")
    node.ask()
    assert (await node.last()).error == ""
    assert node.text() == "before\n"
    node.ask(follow=True)
    assert (await node.last(2)).error == ""
    assert node.text(2) == "before\n"


async def test_an_earlier_run_is_read_while_another_is_here(node: Node) -> None:
    node.begin(2)
    node.write("before\n", 2)
    remember(node)
    now = Written()
    node.reading.serve("job-7", now)
    node.written = now
    node.begin(5)
    node.write("now\n", 5)
    node.ask(round=2)
    node.ask()
    node.ask(round=4)
    for number, text in ((1, "before\n"), (2, "now\n"), (3, "")):
        assert (await node.last(number)).error == ""
        assert node.text(number) == text


async def test_another_job_of_the_same_name_shows_nothing_of_this_one(node: Node) -> None:
    """As after `rdzvctl forget`, while this node has not heard of it yet."""
    node.begin(0)
    node.write("mine\n", 0)
    remember(node)
    for wanted in ({}, {"round": 0}, {"follow": True}):
        request = node.ask(runs=("r2",), **wanted)
        if wanted.get("follow"):
            node.written.end()
        last = await node.last(request)
        assert node.text(request) == ""
        assert (last.error, last.data) == ("", b"")
    # A server that names no run may read what runs here, and nothing older.
    assert (await node.last(node.ask(runs=()))).error == ""
    assert node.text(4) == "mine\n"
    node.reading.forget("job-7")
    for runs in ((), ("r2",)):
        assert "takes no part" in (await node.last(node.ask(runs=runs))).error
    await node.last(node.ask())
    assert node.text(7) == "mine\n"


async def test_a_reader_hears_of_a_bug(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: object) -> None:
        raise ValueError("embedded null byte")

    node.reading.past = fail
    node.reading.forget("job-7")
    assert (await node.last(node.ask())).error == (
        "a bug in its agent: ValueError('embedded null byte')"
    )
    assert "cannot read logs of job-7" in caplog.text


async def test_what_was_removed_meanwhile_is_said_to_be_gone(node: Node) -> None:
    node.begin(2, files=False)
    remember(node)
    node.reading.forget("job-7")
    node.ask()
    await node.last()
    errors = [piece.error for piece in node.of(1) if piece.error]
    assert len(errors) == 4
    assert "no longer exists" in errors[0]


@pytest.mark.quick
async def test_a_job_that_is_not_here_is_refused(node: Node) -> None:
    node.reading.read(replace(EVERYTHING, rdzv_id="job-8"))
    assert (await node.last()).error == "this node takes no part in job-8"


async def test_requests_are_bounded(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_log_reader, "MAX_READERS", 2)
    node.begin(0)
    node.ask(follow=True)
    second = node.ask(follow=True)
    third = node.ask(follow=True)
    assert "already answers 2 readers" in (await node.last(third)).error
    node.reading.stop(second)
    fourth = node.ask()
    assert (await node.last(fourth)).error == ""


# ------------------------------------------------------------------ bounds, and the end


@pytest.mark.quick
async def test_each_request_is_answered_by_one_piece(node: Node) -> None:
    node.begin(0)
    node.write("x" * 1_000, 0)
    request = node.ask(rank=4, stderr=False, max_bytes=400, slow=True)
    for sizes in ([0], [0, 400], [0, 400, 400], [0, 400, 400, 200], [0, 400, 400, 200, 0]):
        await node.came(lambda sizes=sizes: len(node.pieces) == len(sizes))  # type: ignore[misc]
        await idle()
        assert [len(piece.data) for piece in node.pieces] == sizes
        node.go_on(request)


async def test_who_follows_hears_within_its_time_that_there_is_nothing_new(node: Node) -> None:
    node.begin(0)
    node.write("x", 0)
    request = node.ask(rank=4, stderr=False, follow=True, slow=True)
    await node.came(lambda: len(node.pieces) == 1)
    at_end = replace(node.pieces[0].positions[0], offset=1)
    asked = replace(EVERYTHING, request=request, round=0, rank=4, stderr=False, follow=True)
    asked = replace(asked, positions=(at_end,), wait_ms=10)
    node.reading.read(asked)
    await node.came(lambda: len(node.pieces) == 2)
    assert node.pieces[1] == LogPiece(request, 0, positions=(at_end,))
    node.written.end_round()
    node.reading.read(asked)
    await node.came(lambda: len(node.pieces) == 3)
    assert node.pieces[2] == LogPiece(request, 1), "round 0 has been read"


async def test_pieces_are_of_a_bounded_size_and_files_take_turns(node: Node) -> None:
    node.begin(0)
    for local_rank in (0, 1):
        node.write("x" * 200_000, 0, local_rank)
    node.ask(stderr=False)
    await node.last()
    sizes = [len(piece.data) for piece in node.pieces if piece.data]
    assert (max(sizes), sum(sizes)) == (64 * 1024, 400_000)
    assert [piece.local_rank for piece in node.pieces if piece.data][:4] == [0, 1, 0, 1]


async def test_a_request_that_is_cancelled_says_nothing_more(node: Node) -> None:
    node.begin(0)
    first, second = node.ask(follow=True, rank=4), node.ask(follow=True, rank=4)
    await idle()
    node.reading.stop(first)
    node.write("x", 0)
    await node.until("x", second)
    assert node.text(first) == ""
    await idle()
    assert len(node.written.listeners) == 1
    node.reading.stop_all()
    await idle()
    assert not node.written.listeners


async def test_the_end_of_the_job_waits_for_the_last_lines_but_not_for_ever(node: Node) -> None:
    node.begin(0)
    quick = node.ask(follow=True, rank=4, stderr=False)
    slow = node.ask(follow=True, rank=4, stderr=False, slow=True)
    node.write("bye", 0)
    node.written.end()
    await node.reading.finish(0.5)
    assert node.text(quick) == "bye"
    assert node.text(slow) == ""


async def test_a_job_whose_files_hang_keeps_nobody_from_reading_another(node: Node) -> None:
    answers = threading.Event()

    def hang(*_: object) -> None:
        answers.wait(PATIENCE_S)

    node.reading.past = hang
    node.reading.read(replace(EVERYTHING, request=99, rdzv_id="far"))
    await idle()
    node.begin(0)
    node.write("one\n", 0, 0)
    assert (await node.last(node.ask())).error == ""
    assert node.of(99) == []
    answers.set()
    assert "takes no part in far" in (await node.last(99)).error
