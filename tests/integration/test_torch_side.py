"""The user's own event handlers and logs specs: whatever they do, training goes on or says why.

A few lines stand in for torch, so that nothing here waits for its import; the conformance table
uses the real one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cluster import BIN, alive, cluster

from rdzv.agent.core.model import JobTerms
from rdzv.agent.launch.launch import EventSink, Launch, Output
from rdzv.agent.output import logs_specs
from rdzv.agent.output.console_tee import OutputStream, Tee
from rdzv.agent.output.logs_specs import LogsSpecs
from rdzv.agent.output.run_files import RoundOutput
from rdzv.agent.system import side_process
from rdzv.agent.system.side_process import SideProcess
from rdzv.agent.workers import event_log
from rdzv.agent.workers.event_log import EventLog
from rdzv.agent.workers.fates import NodeOutcome, WorkerFate
from rdzv.agent.workers.worker_group import LocalWorkerGroup
from rdzv.core.model import Assignment, Result, Settings
from rdzv.errors import InvalidRequestError
from rdzv.structs import replace
from tests.support.accounts import (
    ADA,
    SECRET,
    account,
    needs_root,
    own_folder,
    passable_folder,
    roots_secret,
)

PYTHON = "/usr/bin/python3"
"""An interpreter that every account may run, which the tests' own may not be."""

LINE = Assignment("job-7", "r", 0, 0, 1, 0, 2, 0, 2, "a", 1, True, 0, 1)

TORCH = {
    "distributed/elastic/events/__init__.py": """
import enum, json, os, time
from pathlib import Path
from torch.distributed.elastic.events import handlers
EventSource = enum.Enum("EventSource", "AGENT WORKER")
class Event:
    def __init__(self, name, source, timestamp=0, metadata=None):
        self.name, self.source, self.metadata = name, source, metadata
def record(event, destination):
    handlers._log_handlers[destination](event)
""",
    "distributed/elastic/events/handlers.py": """
import json, os, time
from pathlib import Path
def write(event):
    data = [event.name, event.source.name, event.metadata]
    with Path(os.environ["EVENTS"]).open("a") as file:
        file.write(json.dumps(data) + "\\n")
def fail_once(event):
    if event.name.endswith("RENDEZVOUS"):
        raise RuntimeError("no room")
    write(event)
_log_handlers = {
    "write": write,
    "fail_once": fail_once,
    "die": lambda event: os._exit(7),
    "hang": lambda event: time.sleep(600),
    "console": write,
}
""",
    "distributed/elastic/rendezvous/__init__.py": "",
    "distributed/elastic/multiprocessing/__init__.py": """
import enum
class Std(enum.IntFlag):
    NONE, OUT, ERR, ALL = range(4)
""",
}

SPECS = """
import os, time
from pathlib import Path
from types import SimpleNamespace

class Specs:
    def __init__(self, **asked):
        self.asked = asked
        if "refuse" in os.environ["SPECS"]:
            raise ValueError("no place for logs")
    def reify(self, envs):
        how = os.environ["SPECS"]
        if how == "hang":
            time.sleep(600)
        if how == "die":
            os._exit(7)
        if how == "fail":
            raise OSError("the disk is full")
        if how == "garbage":
            envs[0]["RANK"] = 7
        folder = Path(self.asked["log_dir"])
        for rank, env in envs.items():
            env["SEEN"] = repr((self.asked, sorted(env)))
        return SimpleNamespace(
            stdouts={rank: folder / f"{env['RANK']}.out" for rank, env in envs.items()},
            stderrs={rank: "" for rank in envs},
            tee_stdouts={0: folder / "0.out"},
            tee_stderrs={},
            error_files={rank: folder / f"{rank}.json" for rank in envs},
        )
"""


@pytest.fixture(autouse=True)
def torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in TORCH.items():
        path = tmp_path / "fake" / "torch" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        for folder in path.parents:
            if folder.name != "fake" and folder.is_relative_to(tmp_path / "fake"):
                (folder / "__init__.py").touch()
    (tmp_path / "fake" / "my_specs.py").write_text(SPECS)
    info = tmp_path / "fake" / "mine-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[torchrun.logs_specs]\nmine = my_specs:Specs\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))
    monkeypatch.setenv("EVENTS", str(tmp_path / "events"))
    monkeypatch.setenv("SPECS", "")


def launch(handler: str = "null", specs: str = "", log_dir: Path | None = None) -> Launch:
    output = Output(log_dir, redirects={0: 1, 1: 1}, tee={0: 1, 1: 0}, logs_specs=specs)
    job = JobTerms("job-7", "n1", Settings(1, 1), local_world_size=2)
    return Launch(job, "t.py", output=output, event_log=EventSink(handler))


def recorded(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    lines = (folder / "events").read_text().splitlines()
    return [(json.loads(line)[0].rpartition(".")[2], json.loads(line)[2]) for line in lines]


def play(log: EventLog, *, failed: bool = False) -> None:
    workers = tuple(WorkerFate(n, n, n, 70 + n) for n in range(2))
    log.round_complete(LINE, 0)
    for fate in workers:
        log.worker_started(fate)
        fate.exit_code, fate.failed = int(failed), failed
    log.ended(NodeOutcome(int(failed), "", result=Result.SUCCEEDED, workers=workers), 0)


NAMES = ["RENDEZVOUS", "ASSIGN_WORKER_RANKS", "START", "START", *["SUCCEEDED"] * 3]


# ---------------------------------------------------------------------- events


@pytest.mark.parametrize("handler", ["write", "console"])
async def test_every_event_reaches_the_handler_before_the_agent_ends(
    handler: str, tmp_path: Path
) -> None:
    log = EventLog(launch(handler), 0, lambda rank: Path("/nowhere"))
    await log.open()
    play(log)
    await log.close()
    found = recorded(tmp_path)
    assert [name for name, _ in found] == NAMES
    assert all(data["hostname"] for _, data in found)


async def test_what_a_failed_worker_has_left_goes_with_its_event(tmp_path: Path) -> None:
    (tmp_path / "0").write_text('{"message": "gone", "timestamp": 7}')
    log = EventLog(launch("write"), 0, lambda rank: tmp_path / str(rank))
    await log.open()
    play(log, failed=True)
    await log.close()
    errors = [data["raw_error"] for name, data in recorded(tmp_path) if name == "FAILED"]
    assert json.loads(errors[0]) == {"message": "gone", "timestamp": 7}
    assert json.loads(errors[1])["errorTraits"]["category"] == "system_terminated_error"


async def test_without_a_handler_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SideProcess, "start", None)
    log = EventLog(launch(), 0, lambda rank: Path("/nowhere"))
    await log.open()
    play(log)
    await log.close()


async def test_an_event_that_a_handler_can_not_take_costs_no_other(tmp_path: Path) -> None:
    log = EventLog(launch("fail_once"), 0, lambda rank: Path("/nowhere"))
    await log.open()
    play(log)
    await log.close()
    assert [name for name, _ in recorded(tmp_path)] == NAMES[1:]


async def test_a_handler_that_nobody_knows_is_refused_with_the_remedy() -> None:
    log = EventLog(launch("mine"), 0, lambda rank: Path("/nowhere"))
    with pytest.raises(InvalidRequestError) as refusal:
        await log.open()
    await log.close()
    told = str(refusal.value)
    assert told.startswith(
        f"--event-log-handler=mine: {sys.executable} answers: torch knows no event"
    )
    assert "only console, die, fail_once, hang, write; have a module" in told


async def test_a_handler_that_dies_takes_nothing_with_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = EventLog(launch("die"), 0, lambda rank: Path("/nowhere"))
    await log.open()
    play(log)
    async with asyncio.timeout(100):
        while "no longer receives events" not in caplog.text:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    play(log)
    await log.close()
    told = [record.getMessage() for record in caplog.records]
    assert told[0].startswith("the event handler no longer receives events: its process has ended")
    # All of the second time, and of the first those that came after its death.
    missed = [text.split()[5] for text in told if text.startswith("the event handler has missed")]
    assert [7 <= int(number) <= 14 for number in missed] == [True]


async def test_a_handler_that_hangs_fills_no_memory_and_keeps_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(event_log, "CLOSE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(side_process, "MAX_UNSENT_BYTES", 1_000)
    log = EventLog(launch("hang"), 0, lambda rank: Path("/nowhere"))
    await log.open()
    for _ in range(500):
        play(log)
    await log.close()
    told = " ".join(record.getMessage() for record in caplog.records)
    assert "had to be killed" in told
    assert "has missed" in told


async def test_an_interpreter_without_torch_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "fake" / "torch" / "__init__.py").write_text("raise ImportError('no torch here')")
    log = EventLog(launch("write"), 0, lambda rank: Path("/nowhere"))
    with pytest.raises(InvalidRequestError, match="ImportError: no torch here"):
        await log.open()
    await log.close()


def test_an_agent_that_is_killed_leaves_no_process_behind(tmp_path: Path) -> None:
    code = """
import asyncio, sys
from rdzv.agent.system.side_process import SideProcess
async def main():
    side = await SideProcess.start(sys.executable, {"role": "events", "name": "hang",
        "logs_specs": ""})
    await side.ready("x")
    side.send({"name": "x", "source": "AGENT", "metadata": {}, "error_file": None})
    print(side._process.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
    agent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert agent.stdout is not None
    with agent.stdout:
        pid = int(agent.stdout.readline())
        agent.kill()
        agent.wait()
    deadline = time.monotonic() + 30
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(pid)


SAYS = """#!/usr/bin/env python3
import socket, sys
agent = socket.socket(fileno=int(sys.argv[-1]))
if agent.family == socket.AF_UNIX:
    sys.exit("descriptors could be passed")
agent.recv(100)  # The options.
agent.sendall(b'{"ready": true}\\n' * FIRST)
try:
    while True:
        agent.sendall(NOISE)
except OSError:
    pass
"""


@pytest.mark.parametrize(
    ("first", "noise", "why"),
    [
        (0, 'b"x\\n" * 100_000', "a line that is no answer"),
        (0, 'b"[]\\n"', "a line that is no answer"),
        (1, """b'{"round": 7}\\n'""", "more than was asked for"),
        (0, 'b"x"', "a line of more than 1,048,576 bytes"),
    ],
)
async def test_the_first_line_that_is_no_answer_ends_the_process(
    first: int, noise: str, why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    says = tmp_path / "says"
    says.write_text(SAYS.replace("FIRST", str(first)).replace("NOISE", noise))
    says.chmod(0o755)
    told: list[str] = []
    ended = asyncio.Event()

    def end() -> None:
        told.append("ended")
        ended.set()

    side = await SideProcess.start(str(says), {}, end)
    async with asyncio.timeout(20):
        await ended.wait()
    assert not side.send({})
    assert bool(side.refusal) is not bool(first)
    await side.close(0)
    assert told == ["ended"]
    [warning] = [r.getMessage() for r in caplog.records if r.name == "rdzv.agent"]
    assert f"it sent {why}: " in warning
    assert len(warning) < 500


async def test_each_request_has_one_answer(tmp_path: Path) -> None:
    says = tmp_path / "says"
    noise = """agent.recv(100) and b'{"n": 1}\\n'"""
    says.write_text(SAYS.replace("FIRST", "1").replace("NOISE", noise))
    says.chmod(0o755)
    side = await SideProcess.start(str(says), {})
    async with asyncio.timeout(20):
        await side.ready("x")
        for _ in range(2):
            assert await side.ask({}) == {"n": 1}
        assert side.send({})
        assert await side.answer() is None
    await side.close(0)


# ---------------------------------------------------------------------- logs specs


async def reify(specs: LogsSpecs, round_: int = 0) -> RoundOutput | OSError:
    environs = {rank: {"RANK": str(rank + 4)} for rank in range(2)}
    async with asyncio.timeout(100):
        try:
            return await specs.reify(round_, environs)
        except OSError as error:
            return error


async def test_the_class_says_where_workers_write_and_may_change_their_environment(
    tmp_path: Path,
) -> None:
    specs = LogsSpecs(2)
    (tmp_path / "4.out").write_text("of a former attempt")
    await specs.open(launch(specs="mine", log_dir=tmp_path))
    output = await reify(specs)
    await specs.close()
    assert isinstance(output, RoundOutput)
    first, second = output.workers
    assert (first.stdout, first.stderr) == (tmp_path / "4.out", None)
    assert (first.teed, second.teed) == ({OutputStream.OUT: tmp_path / "0.out"}, {})
    assert (first.error, second.error) == (tmp_path / "0.json", tmp_path / "1.json")
    assert output.filtered == {
        OutputStream.OUT: Path(os.devnull),
        OutputStream.ERR: Path(os.devnull),
    }
    assert (tmp_path / "4.out").read_text() == ""
    assert first.environ["RANK"] == "4"
    assert first.environ["SEEN"] == repr(
        (
            {
                "log_dir": str(tmp_path),
                "redirects": 1,
                "tee": {0: 1, 1: 0},
                "local_ranks_filter": None,
            },
            ["RANK"],
        )
    ).replace("'redirects': 1", "'redirects': <Std.OUT: 1>").replace(
        "{0: 1, 1: 0}", "{0: <Std.OUT: 1>, 1: <Std.NONE: 0>}"
    )


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("fail", "--logs-specs: OSError: the disk is full"),
        ("die", "--logs-specs: its process has ended"),
        ("hang", "--logs-specs: it has not answered within 0.3 s"),
        (
            "garbage",
            "--logs-specs: its answer is invalid: "
            "TypeError('a value of the environment is not a string')",
        ),
    ],
)
async def test_a_class_that_does_not_answer_is_told(
    how: str, told: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SPECS", how)
    monkeypatch.setattr(logs_specs, "REIFY_TIMEOUT_S", 0.3 if how == "hang" else 30)
    monkeypatch.setattr(logs_specs, "CLOSE_TIMEOUT_S", 0.2)
    specs = LogsSpecs(2)
    await specs.open(launch(specs="mine", log_dir=tmp_path))
    answer = await reify(specs)
    assert str(answer) == told
    if how == "die":
        assert str(await reify(specs, 1)) == told
    await specs.close()


@needs_root
@pytest.mark.skipif(not Path(PYTHON).exists(), reason=f"there is no {PYTHON}")
async def test_files_that_a_class_names_are_emptied_with_the_rights_of_its_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with passable_folder() as shared:
        fake = shared / "fake"
        shutil.copytree(tmp_path / "fake", fake)
        home, secret = own_folder(shared, "home"), roots_secret(shared)
        (home / "4.out").symlink_to(secret)
        (home / "5.out").write_text("of a former attempt")
        os.chown(home / "5.out", ADA.uid, ADA.gid)
        environ = {"PYTHONPATH": str(fake), "SPECS": "", "PATH": os.environ["PATH"]}
        made = launch(specs="mine", log_dir=home)
        made = replace(made, account=account(home), python=PYTHON, environ=environ, chdir=home)
        specs = LogsSpecs(2)
        await specs.open(made)
        output = await reify(specs)
        await specs.close()
        assert isinstance(output, RoundOutput)
        assert secret.read_text() == SECRET
        assert (home / "5.out").read_text() == ""


async def test_a_path_that_is_relative_is_seen_from_where_the_workers_start(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    specs = LogsSpecs(2)
    await specs.open(replace(launch(specs="mine", log_dir=Path("logs")), chdir=home))
    output = await reify(specs)
    await specs.close()
    assert isinstance(output, RoundOutput)
    assert output.workers[0].stdout == home / "logs" / "4.out"


async def test_what_a_class_has_teed_is_not_copied_where_there_is_no_console(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A submitted job may name any file, and the agent's console is root's log."""
    followed: list[Path] = []
    monkeypatch.setattr(Tee, "follow", lambda _, path, *__: followed.append(path))
    for console in (False, True):
        made = replace(launch(specs="mine", log_dir=tmp_path), script=__file__)
        group = LocalWorkerGroup(
            replace(made, output=replace(made.output, console=console)), lambda _: ""
        )
        await group.prepare()
        async with asyncio.timeout(100):
            _, workers = await group.open_round(LINE, "127.0.0.1")
        assert len(workers) == 2
        assert followed == [tmp_path / "0.out"] * console
        await group.close()


async def test_an_answer_that_comes_too_late_is_nobodys(tmp_path: Path) -> None:
    specs = LogsSpecs(2)
    await specs.open(launch(specs="mine", log_dir=tmp_path))
    first = asyncio.create_task(specs.reify(0, {rank: {"RANK": "0"} for rank in range(2)}))
    await asyncio.sleep(0)
    first.cancel()
    second = await reify(specs, 1)
    await specs.close()
    assert isinstance(second, RoundOutput)


@pytest.mark.parametrize(
    ("name", "how", "reason"),
    [
        ("yours", "", "there is no entry point 'yours' in the group torchrun.logs_specs"),
        ("mine", "refuse", "ValueError: no place for logs"),
    ],
)
async def test_a_class_that_can_not_be_made_is_refused(
    name: str, how: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECS", how)
    specs = LogsSpecs(2)
    with pytest.raises(InvalidRequestError, match=f"--logs-specs={name}: .* answers: .*{reason}"):
        await specs.open(launch(specs=name))
    await specs.close()


def rdzvrun(folder: Path, *options: str, environ: dict[str, str]) -> subprocess.Popen[str]:
    script = folder / "t.py"
    script.write_text("from pathlib import Path; Path('ran').touch()")
    return subprocess.Popen(
        [str(BIN / "rdzvrun"), "--standalone", f"--log-dir={folder}", *options, str(script)],
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, **environ},
    )


@contextlib.contextmanager
def ended(process: subprocess.Popen[str]) -> Any:
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_signal_ends_a_node_whose_class_does_not_answer(tmp_path: Path) -> None:
    environ = {"SPECS": "hang"}
    with ended(rdzvrun(tmp_path, "--logs-specs=mine", environ=environ)) as process:
        assert process.stderr is not None
        told = ""
        while "round 0: GROUP_RANK" not in told:
            line = process.stderr.readline()
            assert line, told
            told += line
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=120)
        assert process.returncode == 143
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("option", "code", "reason"),
    [
        ("--logs-specs=mine", 1, "--logs-specs: OSError: the disk is full"),
        ("--event-log-handler=mine", 2, "torch knows no event handler 'mine' there"),
    ],
)
def test_what_fails_at_the_start_ends_its_node_with_the_reason(
    option: str, code: int, reason: str, tmp_path: Path
) -> None:
    with ended(rdzvrun(tmp_path, option, environ={"SPECS": "fail"})) as process:
        _, told = process.communicate(timeout=120)
        assert process.returncode == code
    assert reason in told
    assert not (tmp_path / "ran").exists()


def test_a_handler_goes_on_when_a_dead_runner_is_swept_up_after(tmp_path: Path) -> None:
    """The agent kills what a dead runner leaves behind, but no unrelated process."""
    script = tmp_path / "kill_parent.py"
    script.write_text("import os, signal; os.kill(os.getppid(), signal.SIGKILL)")
    with cluster(tmp_path) as c:
        command = [str(BIN / "rdzvrun"), "--standalone", "--event-log-handler=write", str(script)]
        assert c.start("n1", command, cwd=tmp_path).wait() == 75
    assert recorded(tmp_path)[-1][0] == "FAILED"
