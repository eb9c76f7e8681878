"""Stacks are taken from outside; if py-spy cannot, a note says why, and in time."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rdzv.agent.core.model import AgentState, Assignment, JobTerms
from rdzv.agent.observers import stack_sampling
from rdzv.agent.observers.collective_records import RecordReader
from rdzv.agent.observers.stack_sampling import (
    StackAnswers,
    Target,
    parse_dump,
    process_state,
    take_all,
)
from rdzv.core.evidence.stacks import WorkerStack
from rdzv.core.model import Settings
from rdzv.messages import TakeStacks
from rdzv.structs import replace
from tests.support.accounts import ADA, needs_root, passable_folder
from tests.support.agent_jobs import until

pytestmark = pytest.mark.slow

ASKED = TakeStacks(5, "job-7", "run-1", 2, 10_000)
RUNS = AgentState(
    JobTerms("job-7", "n1", Settings(1, 1), local_world_size=2),
    assignment=Assignment("job-7", "run-1", 2, 0, 1, 0, 2, 0, 2, "h", 1, True, 0, 3),
    alive=frozenset({0}),
    workers_gone=False,
)
FRAME = {"name": "f", "filename": "/home/ada/train.py", "line": 3}


def dump(*threads: dict[str, object]) -> bytes:
    return json.dumps(list(threads)).encode()


def thread(
    name: str | None = "MainThread", tid: int | None = 7, frames: int = 1
) -> dict[str, object]:
    return {"thread_name": name, "os_thread_id": tid, "frames": [FRAME] * frames}


@pytest.fixture(name="sleeper")
def _sleeper() -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-S", "-c", "print(flush=True); input()"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


@pytest.fixture(name="py_spy")
def _py_spy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A py-spy that does what its test writes into it."""
    program = tmp_path / "py-spy"
    program.touch(0o755)
    monkeypatch.setattr(stack_sampling, "find_py_spy", lambda: str(program))
    return program


def write(py_spy: Path, text: str) -> None:
    py_spy.write_text(text)


async def take(*pids: int, timeout_s: float = 30.0) -> list[WorkerStack]:
    targets = [Target(8 + place, place, pid) for place, pid in enumerate(pids)]
    return [stack async for stack in take_all(targets, timeout_s)]


# ------------------------------------------------------------------ what py-spy says


@pytest.mark.quick
def test_the_main_thread_comes_first_by_its_id_then_by_its_name() -> None:
    by_id = parse_dump(dump(thread("MainThread", 9), thread("forked", 7)), pid=7)
    assert [(t.name, t.main) for t in by_id] == [("forked", True), ("MainThread", False)]
    by_name = parse_dump(dump(thread("side", None), thread("MainThread", None)), pid=7)
    assert [(t.name, t.main) for t in by_name] == [("MainThread", True), ("side", False)]
    first = parse_dump(dump(thread("a", 1), thread("b", 2)), pid=7)
    assert [(t.name, t.main) for t in first] == [("a", True), ("b", False)]
    assert parse_dump(dump(thread(None, 7)), pid=7)[0].name == "MainThread"


def test_long_ones_are_cut_and_the_main_thread_never_is() -> None:
    many = [thread(f"t{number}", number, frames=500) for number in range(200)]
    found = parse_dump(dump(*many), pid=199)
    assert found[0].name == "t199"
    assert all(len(t.frames) == stack_sampling.MAX_FRAMES for t in found)
    assert len(found) <= stack_sampling.MAX_THREADS
    said = sum(len(f.name) + len(f.file) for t in found[1:] for f in t.frames)
    assert said <= stack_sampling.MAX_BYTES


@pytest.mark.quick
@pytest.mark.parametrize(
    "text",
    [b"", b"{}", b"[]", b"null", b"[1]", b'[{"frames": 1}]', b'[{"frames": [{}]}]', b"[" * 9**5],
)
def test_what_is_no_dump_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError):
        parse_dump(text, 7)


# ------------------------------------------------------------------ the real one


@pytest.mark.quick
async def test_real_frames_of_a_real_process(sleeper: subprocess.Popen[bytes]) -> None:
    await until(lambda: process_state(sleeper.pid) == "S")
    (found,) = await take(sleeper.pid)
    assert found.note == ""
    assert (found.rank, found.local_rank, found.pid) == (8, 0, sleeper.pid)
    assert found.state in ("R", "S")
    assert [(f.name, f.file) for f in found.frames] == [("<module>", "<string>")]
    assert process_state(sleeper.pid) in ("R", "S")


async def test_one_that_is_stopped_stays_so(sleeper: subprocess.Popen[bytes]) -> None:
    await until(lambda: process_state(sleeper.pid) == "S")
    sleeper.send_signal(signal.SIGSTOP)
    await until(lambda: process_state(sleeper.pid) == "T")
    (found,) = await take(sleeper.pid)
    assert (found.state, found.note) == ("T", "")
    assert [f.name for f in found.frames] == ["<module>"]
    assert process_state(sleeper.pid) == "T"


async def test_one_that_has_exited_is_left_out(sleeper: subprocess.Popen[bytes]) -> None:
    gone = subprocess.Popen(["true"])  # noqa: ASYNC220
    gone.wait()
    await until(lambda: process_state(sleeper.pid) == "S")
    assert [one.rank for one in await take(gone.pid, sleeper.pid)] == [9]


async def test_what_is_no_python_is_told_by_the_kernel() -> None:
    process = subprocess.Popen(["sleep", "600"])  # noqa: ASYNC220
    try:
        await until(lambda: process_state(process.pid) == "S")
        (found,) = await take(process.pid)
    finally:
        process.kill()
        process.wait()
    assert found.threads == ()
    assert found.note.startswith("py-spy: ")
    assert found.state == "S"


# ------------------------------------------------------------------ what may go wrong


async def test_without_py_spy_a_note_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, sleeper: subprocess.Popen[bytes]
) -> None:
    monkeypatch.setattr(stack_sampling, "find_py_spy", lambda: None)
    (found,) = await take(sleeper.pid)
    assert "pip install py-spy" in found.note


async def test_an_endless_answer_is_cut_short(
    py_spy: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    write(py_spy, "#!/bin/sh\nexec yes\n")
    (found,) = await take(sleeper.pid)
    assert found.threads == ()
    assert "it has written more than 8 MiB" in found.note


@pytest.mark.parametrize("scope", [0, 1])
@needs_root
async def test_py_spy_is_the_workers_account_where_the_kernel_lets_it(
    scope: int, monkeypatch: pytest.MonkeyPatch, sleeper: subprocess.Popen[bytes]
) -> None:
    with passable_folder() as folder:
        program = folder / "py-spy"
        program.write_text(
            "#!/bin/sh\necho as $(id -u) $(id -G) $SECRET $(ulimit -v) >&2\nexit 1\n"
        )
        program.chmod(0o755)
        monkeypatch.setenv("SECRET", "of the agent")
        (folder / "scope").write_text(f"{scope}\n")
        monkeypatch.setattr(stack_sampling, "find_py_spy", lambda: str(program))
        monkeypatch.setattr(stack_sampling, "PTRACE_SCOPE", folder / "scope")
        stacks = take_all([Target(0, 0, sleeper.pid)], 30.0, identity=ADA)
        (found,) = [stack async for stack in stacks]
    who = "as 64321 64322 64323" if scope == 0 else "as 0 "
    assert "of the agent" not in found.note
    assert found.note.startswith(f"py-spy: {who}")
    assert found.note.endswith(" 1048576")


async def test_a_refusal_tries_the_other_way(
    py_spy: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    write(
        py_spy,
        "#!/bin/sh\n"
        'case "$*" in *--nonblocking*) ;; *) echo "Error: Permission denied" >&2; exit 1;; esac\n'
        f"echo '{dump(thread(tid=sleeper.pid)).decode()}'\n",
    )
    (found,) = await take(sleeper.pid)
    assert (found.note, [f.line for f in found.frames]) == ("", [3])
    write(py_spy, '#!/bin/sh\necho "Error: Permission denied" >&2\nexit 1\n')
    (found,) = await take(sleeper.pid)
    assert (found.threads, found.note) == ((), "py-spy: Permission denied")


@pytest.mark.parametrize(("scope", "remedy"), [("1\n", True), ("0\n", False), ("", False)])
async def test_a_kernel_that_forbids_it_is_named_with_the_remedy(
    py_spy: Path,
    sleeper: subprocess.Popen[bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    scope: str,
    remedy: bool,
) -> None:
    write(py_spy, '#!/bin/sh\necho "Error: Permission denied" >&2\nexit 1\n')
    write(tmp_path / "ptrace_scope", scope)
    monkeypatch.setattr(stack_sampling, "PTRACE_SCOPE", tmp_path / "ptrace_scope")
    owner = os.getuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner or 4711)
    if owner == 0:
        # Root may inspect any process, so this one belongs to another user.
        (found,) = await take(sleeper.pid)
        assert "it runs as uid 0, and this agent as uid 4711; give the agent CAP_SYS_PTRACE" in (
            found.note
        )
        monkeypatch.setattr(os, "stat", lambda _: os.stat_result((0,) * 4 + (4711,) + (0,) * 5))
    (found,) = await take(sleeper.pid)
    assert ("kernel.yama.ptrace_scope is 1; set it to 0" in found.note) is remedy


async def test_one_that_takes_too_long_costs_no_more_than_its_time(
    py_spy: Path, sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack_sampling, "PY_SPY_TIMEOUT_S", 0.2)
    write(py_spy, "#!/bin/sh\nexec sleep 600\n")
    (found,) = await take(sleeper.pid)
    assert (found.threads, found.note) == ((), "py-spy: py-spy took longer than 0.2 s")


async def test_a_worker_left_stopped_goes_on(
    py_spy: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    """py-spy stops the process it samples; if py-spy is killed, that process must continue."""
    stop = f"kill -STOP {sleeper.pid}"
    write(py_spy, f'#!/bin/sh\ncase "$*" in *--nonblocking*) ;; *) {stop};; esac\nexit 1\n')
    (found,) = await take(sleeper.pid)
    assert found.note == "py-spy: py-spy ended with 1"
    await until(lambda: process_state(sleeper.pid) == "S")


async def test_a_note_says_if_no_time_is_left(
    py_spy: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    write(py_spy, "#!/bin/sh\nexec sleep 600\n")
    found = await take(*[sleeper.pid] * 9, timeout_s=0.3)
    assert len(found) == 9
    assert any("no time left" in one.note for one in found)


async def test_an_answer_ends_with_its_last_word_whatever_happens(
    monkeypatch: pytest.MonkeyPatch, sleeper: subprocess.Popen[bytes]
) -> None:
    said: list[tuple[int, int, bool, str]] = []

    async def say(number: int, workers: tuple[WorkerStack, ...], last: bool, error: str) -> None:
        said.append((number, len(workers), last, error))

    answers = StackAnswers(say, RecordReader("j1", on=False))
    answers.answer(ASKED, replace(RUNS, alive=frozenset()), {})
    answers.answer(ASKED, RUNS, {0: Target(0, 0, sleeper.pid)})
    await until(lambda: len(said) == 3)
    assert said == [
        (5, 0, True, "its workers of round 2 have all exited"),
        (5, 1, False, ""),
        (5, 0, True, ""),
    ]
    said.clear()

    def fail(*_: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(stack_sampling, "process_state", fail)
    answers.answer(ASKED, RUNS, {0: Target(0, 0, sleeper.pid)})
    await until(lambda: bool(said))
    assert said == [(5, 0, True, "a bug in its agent: RuntimeError('boom')")]
    await answers.close()


async def test_who_asks_too_often_hears_so(py_spy: Path, sleeper: subprocess.Popen[bytes]) -> None:
    write(py_spy, "#!/bin/sh\nexec sleep 600\n")
    said: list[str] = []

    async def say(number: int, workers: tuple[WorkerStack, ...], last: bool, error: str) -> None:
        said.append(error)

    answers = StackAnswers(say, RecordReader("j1", on=False))
    for _ in range(stack_sampling.MAX_ASKED + 1):
        answers.answer(ASKED, RUNS, {0: Target(0, 0, sleeper.pid)})
    await until(lambda: bool(said))
    assert said == ["this node already answers 8 requests for stacks"]
    await answers.close()


async def test_a_stopped_worker_has_no_record(
    sleeper: subprocess.Popen[bytes], py_spy: Path
) -> None:
    """It would not answer, and the round of all others ends only when all stacks have arrived."""

    class NeverAnswered(RecordReader):
        async def read(self, *args: object, **more: object) -> Any:
            await asyncio.Event().wait()

    said: list[WorkerStack] = []

    async def say(number: int, workers: tuple[WorkerStack, ...], last: bool, error: str) -> None:
        said.extend(workers)

    write(py_spy, "#!/bin/sh\nexit 1\n")
    sleeper.send_signal(signal.SIGSTOP)
    await until(lambda: process_state(sleeper.pid) == "T")
    answers = StackAnswers(say, NeverAnswered("j1", on=True))
    answers.answer(ASKED, RUNS, {0: Target(0, 0, sleeper.pid)})
    await until(lambda: bool(said))
    assert said[0].no_record == "it is stopped by a signal, so it does not answer"
    await answers.close()
