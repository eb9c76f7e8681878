"""Warm workers, forked from a zygote, compared with cold ones: a script sees no difference.

Each case of warm_scripts/cases.py runs under the same runner once cold and once warm; exit, stdout
and stderr must be the same, line by line.
"""

from __future__ import annotations

import asyncio
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from runners import PATIENCE_S, Node, marked, state_of, until

from rdzv.agent.core.events import (
    Fenced,
    RunnerExited,
    RunnerRefused,
    StartFailed,
    WorkerExited,
    WorkersGone,
    WorkersStartedCold,
    WorkerStarted,
    ZygoteLost,
    ZygoteReady,
)
from rdzv.agent.runner.processes import children_of
from rdzv.agent.runner.requests import RenewFence, WorkerSpec, ZygoteSpec
from rdzv.agent.runner.system import boottime_ms
from rdzv.agent.runner.warm_forks import FORK_TIMEOUT_S, MAX_FORKS_AT_ONCE
from rdzv.agent.runner.zygote_process import STILL_IMPORTING
from rdzv.agent.runner_link.runner_link import RunnerLink

SCRIPTS = Path(__file__).with_name("warm_scripts")
CASES = str(SCRIPTS / "cases.py")

LIGHT = (
    *("interpreter", "process", "environment", "streams", "uncaught", "exit_text", "exit_code"),
    *("exit_at_once", "interrupted", "by_signal", "by_fault", "handled", "threads", "warned"),
    *("imports", "processes"),
)
"""Cases whose zygote preloads next to nothing."""

HEAVY = (
    *("state:torch._dynamo", "randomness", "randomness:random", "torch_threads", "loader"),
    *("recorded", "sharing"),
)
"""Cases whose zygote preloads torch, as --warm does."""


# ---------------------------------------------------------------------- tools


class WarmNode(Node):
    """A runner that keeps a zygote."""

    patience_s = 100.0  # On a busy machine `import torch` takes its time.

    def zygote(self, *argv: str | Path, modules: Sequence[str] = ("json",)) -> ZygoteSpec:
        env = {**self.env, "ONLY_THE_ZYGOTE": "1"}
        return ZygoteSpec(tuple(map(str, argv)), env, None, tuple(modules))

    async def keep(self, zygote: ZygoteSpec) -> ZygoteReady:
        self.link.ask(zygote)
        return await self.heard(ZygoteReady)

    async def end_of(self, number: int, workers: Sequence[WorkerSpec]) -> list[WorkerExited]:
        """Run a round until all workers have exited."""
        self.link.start_workers(number, workers)
        ends = [
            await self.heard(WorkerExited, round=number, local_rank=worker.local_rank)
            for worker in workers
        ]
        await self.stop(number)
        return ends


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[WarmNode]:
    node = WarmNode(tmp_path)
    node.link = await RunnerLink.spawn(node.hear)
    yield node
    await node.link.close(PATIENCE_S)
    assert marked(node.mark) == []
    assert state_of(node.link.pid) == ""
    assert [event for event in node.events if isinstance(event, RunnerExited)] == node.events[-1:]


@dataclass(frozen=True)
class Seen:
    """A worker's exit status and output."""

    end: tuple[int | None, int | None]
    stdout: list[str]
    stderr: list[str]


def read(path: Path) -> list[str]:
    """Return lines without the parts that differ each time."""
    text = path.read_text(errors="backslashreplace")
    text = re.sub(r"0x[0-9a-f]+", "0x", text)
    text = re.sub(r"(pid|PID|process)[ :=(]*\d+", r"\1 N", text)
    return [line for line in text.splitlines() if not line.startswith("Extension modules:")]


async def run_all(
    node: WarmNode, number: int, argvs: Mapping[str, Sequence[str]], zygote: ZygoteSpec | None
) -> dict[str, Seen]:
    """Run command lines side by side, by name, as workers of one round."""
    kind = "cold" if zygote is None else "warm"
    workers = []
    for local_rank, (name, argv) in enumerate(argvs.items()):
        worker = replace(
            node.spec(*argv, local_rank=local_rank),
            env={**node.env, "RANK": "7", "ODD": os.fsdecode(b"\xff\xc3\xa4"), "EMPTY": ""},
            cwd=str(node.folder),
            stdout=str(node.folder / f"{name}.{kind}.out"),
            stderr=str(node.folder / f"{name}.{kind}.err"),
            warm=zygote is not None,
        )
        worker.env["TORCHELASTIC_ERROR_FILE"] = str(node.folder / f"{name}.json")  # type: ignore
        workers.append(worker)
    ends = await node.end_of(number, workers)
    return {
        name: Seen(
            (end.exit_code, end.signal),
            read(node.folder / f"{name}.{kind}.out"),
            read(node.folder / f"{name}.{kind}.err"),
        )
        for name, end in zip(argvs, ends, strict=True)
    }


Both = Mapping[str, tuple[Seen, Seen]]


def run_both(
    folder: Path, argvs: Mapping[str, Sequence[str]], modules: Sequence[str], **env: str
) -> Both:
    """Run command lines cold, then warm; return the output and exit of each."""

    async def run() -> Both:
        node = WarmNode(folder)
        node.env |= env
        node.link = await RunnerLink.spawn(node.hear)
        try:
            cold = await run_all(node, 0, argvs, None)
            zygote = node.zygote(*next(iter(argvs.values())), modules=modules)
            zygote = replace(zygote, cwd=str(folder))
            await node.keep(zygote)
            warm = await run_all(node, 1, argvs, zygote)
            assert not any(isinstance(event, WorkersStartedCold) for event in node.events)
        finally:
            await node.link.close(PATIENCE_S)
        assert marked(node.mark) == []
        return {name: (cold[name], warm[name]) for name in argvs}

    return asyncio.run(run())


def cases(names: Sequence[str]) -> dict[str, Sequence[str]]:
    return {name: (sys.executable, "-u", CASES, name) for name in names}


# ---------------------------------------------------------------------- as in a fresh interpreter


@pytest.fixture(scope="module", name="light")
def _light(tmp_path_factory: pytest.TempPathFactory) -> Both:
    return run_both(tmp_path_factory.mktemp("light"), cases(LIGHT), ["json"])


@pytest.fixture(scope="module", name="heavy")
def _heavy(tmp_path_factory: pytest.TempPathFactory) -> Both:
    pytest.importorskip("torch", reason="torch is not installed")
    modules = ["torch", "torch._dynamo"]
    env = {"OMP_NUM_THREADS": "2", "PYTHONPATH": os.environ["PYTHONPATH"]}
    return run_both(tmp_path_factory.mktemp("heavy"), cases(HEAVY), modules, **env)


ENDS: Mapping[str, tuple[int | None, int | None]] = {
    "uncaught": (1, None),
    "exit_text": (1, None),
    "exit_code": (7, None),
    "exit_at_once": (9, None),
    "interrupted": (None, signal.SIGINT),
    "by_signal": (None, signal.SIGTERM),
    "by_fault": (None, signal.SIGABRT),
    "handled": (5, None),
    "recorded": (1, None),
}
"""How the unsuccessful cases end: exit code and signal."""


@pytest.mark.parametrize("case", LIGHT)
def test_a_script_sees_no_difference(case: str, light: Both) -> None:
    cold, warm = light[case]
    assert warm == cold
    assert cold.end == ENDS.get(case, (0, None)), cold.stderr
    assert cold.stdout or cold.stderr or case in ("exit_at_once", "exit_code", "by_signal")


@pytest.mark.parametrize("case", HEAVY)
def test_a_script_sees_no_difference_with_torch(case: str, heavy: Both) -> None:
    cold, warm = heavy[case]
    if case.startswith("randomness"):
        # Values that differ between processes anyway.
        assert len(cold.stderr) == len(warm.stderr) == 8
        cold, warm = replace(cold, stderr=[]), replace(warm, stderr=[])
    assert warm == cold
    assert cold.end == ENDS.get(case, (0, None)), cold.stderr
    assert cold.stdout or cold.stderr


def test_no_two_workers_draw_the_same(heavy: Both) -> None:
    """Values that differ between fresh interpreters; the generators of GPUs are among them."""
    seen = [*heavy["randomness"], *heavy["randomness:random"]]
    drawn = [*zip(*(each.stderr for each in seen), strict=True)]
    assert [len(set(values)) for values in drawn] == [4, 4, 4, 4, 4, 1, 4, 4]


# ---------------------------------------------------------------------- ways to run a script

SAY_ALL = """
import sys, traceback
print(sys.argv, sys.orig_argv, sys.path[:2], __name__, __spec__ and __spec__.name, __package__)
print(globals().get("__file__"), type(__loader__).__name__ if __loader__ else None)
traceback.print_stack(file=sys.stdout)
from inside import VALUE
print(VALUE)
class Own: pass
import pickle
print(pickle.loads(pickle.dumps(Own())).__class__, sys.modules["__main__"].Own is Own)
raise SystemExit(f"ended by {sys.argv[1]}")
"""

RUN_PATH = (
    "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
)


def make_ways(folder: Path) -> dict[str, list[str]]:
    """Write the same script in each form that can be run; return how it is run."""
    for parent in (folder / "plain", folder / "package", folder / "app", folder):
        parent.mkdir(exist_ok=True)
        (parent / "inside.py").write_text(f"VALUE = {parent.name!r}\n")
    (folder / "plain" / "script.py").write_text(SAY_ALL)
    (folder / "link.py").symlink_to("plain/script.py")
    (folder / "package" / "__init__.py").touch()
    (folder / "package" / "__main__.py").write_text(SAY_ALL)
    (folder / "package" / "part.py").write_text(SAY_ALL)
    (folder / "app" / "__main__.py").write_text(SAY_ALL)
    with zipfile.ZipFile(folder / "app.pyz", "w") as archive:
        archive.write(folder / "app" / "__main__.py", "__main__.py")
        archive.writestr("inside.py", "VALUE = 'zipped'\n")
    (folder / "broken.py").write_text("def f(:\n")
    return {
        "path": ["plain/script.py"],
        "link": [str(folder / "link.py")],
        "module": ["-m", "package.part"],
        "package": ["-m", "package"],
        "folder": ["app"],
        "zip": ["app.pyz"],
        "run path": ["-c", RUN_PATH, "plain/script.py"],
        "syntax error": ["broken.py"],
        "not there": ["nowhere.py"],
        "no module": ["-m", "no_such"],
    }


async def test_every_way_to_run_a_script_is_as_cold(tmp_path: Path) -> None:
    """One zygote each, since it is started as its workers are."""
    ways = make_ways(tmp_path)

    async def one(name: str, words: Sequence[str]) -> tuple[str, Seen, Seen]:
        node = WarmNode(tmp_path)
        node.link = await RunnerLink.spawn(node.hear)
        argvs = {name: (sys.executable, "-u", *words, "the argument")}
        cold = (await run_all(node, 0, argvs, None))[name]
        zygote = replace(node.zygote(sys.executable, "-u", *words, "another"), cwd=str(tmp_path))
        await node.keep(zygote)
        warm = (await run_all(node, 1, argvs, zygote))[name]
        assert not any(isinstance(event, WorkersStartedCold) for event in node.events)
        await node.link.close(PATIENCE_S)
        return name, cold, warm

    for name, cold, warm in await asyncio.gather(*(one(*way) for way in ways.items())):
        assert warm == cold, name
        assert cold.end in ((1, None), (2, None)), name
        assert cold.stdout or name in ("syntax error", "not there", "no module")


async def test_a_sitecustomize_of_the_sites_own_is_imported_as_ever(node: WarmNode) -> None:
    own = node.folder / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import sys\nsys.customized = __file__\n")
    node.env["PYTHONPATH"] = os.fspath(own)
    code = (
        "import os, sys, sitecustomize as s\n"
        "print(sys.customized, s.__file__, sys.path[1], os.environ['PYTHONPATH'])"
    )
    argvs = {"it": (sys.executable, "-u", "-c", code)}
    cold = await run_all(node, 0, argvs, None)
    zygote = replace(node.zygote(*argvs["it"]), cwd=str(node.folder))
    await node.keep(zygote)
    warm = await run_all(node, 1, argvs, zygote)
    assert warm == cold
    assert cold["it"].stdout == [f"{own}/sitecustomize.py {own}/sitecustomize.py {own} {own}"]


async def test_what_a_module_sets_on_import_is_still_set(node: WarmNode) -> None:
    """In the environment, which each worker gets separately; but explicit values win."""
    (node.folder / "setter.py").write_text(
        "import os\nos.environ.setdefault('RANK', 'none')\nos.environ['SET_ON_IMPORT'] = 'yes'\n"
        "os.environ.pop('ONLY_THE_ZYGOTE')\n"
    )
    script = node.folder / "script.py"
    script.write_text(
        "import os, subprocess, setter\n"
        "print(os.environ['RANK'], os.environ['SET_ON_IMPORT'], 'ONLY_THE_ZYGOTE' in os.environ)\n"
        "subprocess.run(['sh', '-c', 'echo $RANK $SET_ON_IMPORT'])\n"
    )
    argv = (sys.executable, "-u", str(script))
    zygote = node.zygote(*argv, modules=["setter"])
    await node.keep(zygote)
    seen = await run_all(node, 0, {"it": argv}, zygote)
    assert seen["it"].stdout == ["7 yes False", "7 yes"]


# ---------------------------------------------------------------------- as a child of the runner


def pausing(node: WarmNode, zygote: ZygoteSpec | None, local_rank: int = 0) -> WorkerSpec:
    ready = str(node.folder / f"ready{local_rank}")
    spec = node.spec(sys.executable, "-u", CASES, "pause", ready, local_rank=local_rank)
    return replace(spec, warm=zygote is not None)


async def start_pausing(node: WarmNode, number: int, zygote: ZygoteSpec) -> list[int]:
    node.link.ask(zygote)
    pids = await node.start(number, *(pausing(node, zygote, rank) for rank in range(2)))
    for rank in range(2):
        ready = node.folder / f"ready{rank}"
        await until(ready.exists)
        ready.unlink()
    return pids


@pytest.fixture(name="zygote")
async def _zygote(node: WarmNode) -> ZygoteSpec:
    zygote = node.zygote(sys.executable, "-u", CASES, "pause", "nothing")
    await node.keep(zygote)
    return zygote


async def test_the_runner_is_the_parent_and_a_stop_ends_all(
    node: WarmNode, zygote: ZygoteSpec
) -> None:
    for number in range(2):
        pids = await start_pausing(node, number, zygote)
        assert set(pids) <= set(children_of(node.link.pid))
        os.kill(pids[0], signal.SIGKILL)
        end = await node.heard(WorkerExited, round=number, local_rank=0)
        assert end == WorkerExited(number, 0, pids[0], None, signal.SIGKILL, 0)
        await node.stop(number)
        end = await node.heard(WorkerExited, round=number, local_rank=1)
        assert end.signal == signal.SIGTERM
        assert len(marked(node.mark)) == 1  # The zygote.
    assert not any(isinstance(event, WorkersStartedCold) for event in node.events)


async def test_descendants_of_a_warm_worker_end_with_the_round(node: WarmNode) -> None:
    tree = SCRIPTS.with_name("runner_scripts") / "tree.py"
    zygote = node.zygote(sys.executable, "-u", tree, node.folder, "stay")
    ready = await node.keep(zygote)
    await node.start(
        0, replace(node.spec(sys.executable, "-u", tree, node.folder, "stay"), warm=True)
    )
    await until((node.folder / "ready").exists)
    assert len(marked(node.mark)) == 5
    await node.stop(0, grace_ms=50)
    assert marked(node.mark) == [ready.pid]


async def test_zygote_and_workers_die_with_the_runner(node: WarmNode, zygote: ZygoteSpec) -> None:
    await start_pausing(node, 0, zygote)
    assert len(marked(node.mark)) == 3
    os.kill(node.link.pid, signal.SIGKILL)
    await node.heard(RunnerExited)
    await until(lambda: marked(node.mark) == [])


async def test_signals_to_a_whole_job_step_leave_the_zygote_alone(
    node: WarmNode, zygote: ZygoteSpec
) -> None:
    pid = (await node.heard(ZygoteReady)).pid
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
        os.kill(pid, signum)
    await start_pausing(node, 0, zygote)
    assert not any(isinstance(event, ZygoteLost) for event in node.events)


async def test_many_workers_at_once(node: WarmNode) -> None:
    """More descriptors than fit into one message."""
    zygote = node.zygote(sys.executable, "-u", CASES, "exit_code")
    await node.keep(zygote)
    count = MAX_FORKS_AT_ONCE + 3
    argv = (sys.executable, "-u", CASES, "exit_code")
    workers = [replace(node.spec(*argv, local_rank=n), warm=True) for n in range(count)]
    assert [end.exit_code for end in await node.end_of(0, workers)] == [7] * count
    assert not any(isinstance(event, WorkersStartedCold) for event in node.events)


async def test_large_environments_arrive(node: WarmNode) -> None:
    code = "import os; raise SystemExit(sum(map(len, os.environ.values())) < 1_000_000)"
    zygote = node.zygote(sys.executable, "-u", "-c", code)
    await node.keep(zygote)
    large = {f"LARGE_{index}": "x" * 100_000 for index in range(10)}
    spec = replace(node.spec(*zygote.argv), env={**node.env, **large}, warm=True)
    [end] = await node.end_of(0, [spec])
    assert end.exit_code == 0


def missing_cwd(spec: WorkerSpec, _: Path) -> WorkerSpec:
    return replace(spec, cwd="/nonexistent")


def log_under_a_file(spec: WorkerSpec, folder: Path) -> WorkerSpec:
    (folder / "file").touch()
    return replace(spec, stdout=str(folder / "file" / "log"))


@pytest.mark.parametrize(
    ("breaks", "reason"),
    [
        (missing_cwd, "cwd '/nonexistent': No such file or directory"),
        (log_under_a_file, "stdout '{folder}/file/log': its folder '{folder}/file': File exists"),
    ],
)
async def test_a_worker_that_can_not_be_started_says_so_as_cold(
    node: WarmNode, zygote: ZygoteSpec, breaks: object, reason: str
) -> None:
    for number, kept in enumerate((None, zygote)):
        broken = breaks(pausing(node, kept, 1), node.folder)  # type: ignore[operator]
        node.link.start_workers(number, [pausing(node, kept), broken])
        failed = await node.heard(StartFailed, round=number)
        assert failed.reason == reason.format(folder=node.folder)
        await node.heard(WorkersGone, round=number)
    assert len(marked(node.mark)) == 1


# ---------------------------------------------------------------------- never worse than cold


@pytest.mark.parametrize("wait_s", [0.0, 0.1])
async def test_workers_do_not_wait_for_a_zygote_that_imports(node: WarmNode, wait_s: float) -> None:
    (node.folder / "slow.py").write_text("import time\ntime.sleep(1000)\n")
    script = shutil.copy(CASES, node.folder)
    zygote = node.zygote(sys.executable, "-u", script, "pause", "x", modules=["slow"])
    await start_pausing(node, 0, replace(zygote, wait_s=wait_s))

    def cold() -> list[WorkersStartedCold]:
        return [event for event in node.events if isinstance(event, WorkersStartedCold)]

    # Those whose waits end together are named together.
    await until(lambda: sorted(rank for one in cold() for rank in one.local_ranks) == [0, 1])
    assert {one.reason for one in cold()} == {STILL_IMPORTING}


async def test_workers_wait_for_a_zygote_if_they_are_to(node: WarmNode) -> None:
    (node.folder / "slow.py").write_text(
        "import pathlib, time\nwhile not pathlib.Path(__file__).with_name('go').exists():\n"
        "    time.sleep(0.01)\n"
    )
    argv = (sys.executable, "-u", shutil.copy(CASES, node.folder), "exit_code")
    zygote = replace(node.zygote(*argv, modules=["slow"]), wait_s=60.0)
    node.link.ask(zygote)
    node.link.start_workers(0, [replace(node.spec(*argv), warm=True)])
    await until(lambda: len(marked(node.mark)) == 1)
    (node.folder / "go").touch()
    assert (await node.heard(WorkerExited)).exit_code == 7
    assert not any(isinstance(event, WorkersStartedCold) for event in node.events)
    await node.stop(0)


async def test_a_zygote_that_dies_is_replaced_and_meanwhile_all_start_cold(
    node: WarmNode, zygote: ZygoteSpec
) -> None:
    first = (await node.heard(ZygoteReady)).pid
    os.kill(first, signal.SIGKILL)
    lost = await node.heard(ZygoteLost)
    assert lost == ZygoteLost("it was killed by signal 9", 1.0)
    await start_pausing(node, 0, zygote)
    cold = await node.heard(WorkersStartedCold)
    assert cold.reason == "there is no zygote: it was killed by signal 9"
    await node.stop(0)
    await until(lambda: [type(event) for event in node.events].count(ZygoteReady) == 2)
    node.events.clear()
    await start_pausing(node, 1, zygote)
    assert not any(isinstance(event, WorkersStartedCold) for event in node.events)


async def test_a_zygote_that_hangs_is_killed_and_its_workers_start_cold(
    node: WarmNode, zygote: ZygoteSpec
) -> None:
    os.kill((await node.heard(ZygoteReady)).pid, signal.SIGSTOP)
    await start_pausing(node, 0, zygote)
    cold = await node.heard(WorkersStartedCold)
    assert cold.reason == f"it has not forked within {FORK_TIMEOUT_S:g} s"
    assert (await node.heard(ZygoteLost)).reason == cold.reason


async def test_a_stop_does_not_wait_for_a_fork_and_what_comes_late_runs_nothing(
    node: WarmNode, zygote: ZygoteSpec
) -> None:
    pid = (await node.heard(ZygoteReady)).pid
    os.kill(pid, signal.SIGSTOP)
    node.link.start_workers(0, [pausing(node, zygote), pausing(node, zygote, 1)])
    await node.stop(0)
    os.kill(pid, signal.SIGCONT)
    await start_pausing(node, 1, zygote)
    told = [type(event) for event in node.events]
    assert told == [ZygoteReady, WorkersGone, WorkerStarted, WorkerStarted]
    await node.stop(1)
    await until(lambda: marked(node.mark) == [pid])
    assert not (node.folder / "ready0").exists()


async def test_a_fence_ends_workers_that_are_being_forked(
    node: WarmNode, zygote: ZygoteSpec
) -> None:
    pid = (await node.heard(ZygoteReady)).pid
    os.kill(pid, signal.SIGSTOP)
    node.link.ask(RenewFence(boottime_ms() + 300))
    node.link.start_workers(0, [pausing(node, zygote)])
    await node.heard(Fenced)
    await node.heard(WorkersGone)
    os.kill(pid, signal.SIGCONT)
    await until(lambda: marked(node.mark) == [pid])
    assert not (node.folder / "ready0").exists()


async def test_a_fork_that_can_not_become_the_worker_is_replaced_by_a_cold_one(
    node: WarmNode, zygote: ZygoteSpec
) -> None:
    other = shutil.copy(CASES, node.folder / "other.py")
    argv = (sys.executable, "-u", other, "exit_code")
    [end] = await node.end_of(0, [replace(node.spec(*argv), warm=True)])
    assert end.exit_code == 7
    reason = (await node.heard(WorkersStartedCold)).reason
    assert reason.startswith("the zygote runs [")
    assert len(marked(node.mark)) == 1


# ---------------------------------------------------------------------- spare forks


async def with_spare_forks(node: WarmNode) -> tuple[ZygoteSpec, int, set[int]]:
    """Keep a zygote with two forks ahead; return its pid and theirs."""
    zygote = replace(node.zygote(sys.executable, "-u", CASES, "pause", "nothing"), spare_forks=2)
    pid = (await node.keep(zygote)).pid
    return zygote, pid, await two_spare_forks(node, pid)


async def two_spare_forks(node: WarmNode, zygote: int, *others: int) -> set[int]:
    """Wait until two further forks exist, and zygote and runner have no more to do; return them.

    A fork of which the runner does not know yet would end with the round, like any such process.
    """
    known, children = {zygote, *others}, set[int]()

    def there() -> bool:
        nonlocal children
        children = {*children_of(node.link.pid)} - known
        if len(children) != 2 or {*marked(node.mark)} != children | known:
            return False
        return state_of(zygote) == state_of(node.link.pid) == "S"

    await until(there)
    return children


async def test_workers_are_forks_that_were_there_before(node: WarmNode) -> None:
    zygote, pid, forks = await with_spare_forks(node)
    for number in range(2):
        pids = await start_pausing(node, number, zygote)
        assert set(pids) == forks
        forks = await two_spare_forks(node, pid, *pids)
        await node.stop(number)
        await until(lambda forks=forks: {*marked(node.mark)} == {pid, *forks})
    assert not any(isinstance(event, WorkersStartedCold) for event in node.events)


async def test_more_workers_than_spare_forks_are_forked_as_well(node: WarmNode) -> None:
    zygote, _, forks = await with_spare_forks(node)
    pids = await node.start(0, *(pausing(node, zygote, rank) for rank in range(4)))
    assert set(pids) > forks
    assert not any(isinstance(event, WorkersStartedCold) for event in node.events)


async def test_spare_forks_need_no_zygote_to_become_workers(node: WarmNode) -> None:
    zygote, pid, forks = await with_spare_forks(node)
    os.kill(pid, signal.SIGSTOP)
    assert set(await start_pausing(node, 0, zygote)) == forks
    assert not any(isinstance(event, WorkersStartedCold) for event in node.events)


@pytest.mark.parametrize("whose", ["the runner's", "the zygote's"])
async def test_spare_forks_end_with_who_has_them(node: WarmNode, whose: str) -> None:
    _, pid, forks = await with_spare_forks(node)
    os.kill(pid if whose == "the zygote's" else node.link.pid, signal.SIGKILL)
    await until(lambda: not any(map(state_of, forks)))


async def test_a_spare_fork_that_dies_is_missed_by_nobody(node: WarmNode) -> None:
    zygote, pid, forks = await with_spare_forks(node)
    for fork in forks:
        os.kill(fork, signal.SIGKILL)
    await until(lambda: marked(node.mark) == [pid])
    await start_pausing(node, 0, zygote)
    assert not any(isinstance(event, WorkersStartedCold) for event in node.events)


async def test_a_spare_fork_that_hangs_is_replaced_by_a_cold_worker(node: WarmNode) -> None:
    zygote, _, forks = await with_spare_forks(node)
    for fork in forks:
        os.kill(fork, signal.SIGSTOP)
    pids = await start_pausing(node, 0, zygote)
    assert not set(pids) & forks
    assert (await node.heard(WorkersStartedCold)).reason.startswith("its fork was not ready within")
    assert not any(map(state_of, forks))


async def test_a_spare_fork_that_dies_when_it_is_needed_is_replaced_by_another(
    node: WarmNode,
) -> None:
    zygote, _, forks = await with_spare_forks(node)
    for fork in forks:
        os.kill(fork, signal.SIGSTOP)
    node.link.start_workers(0, [pausing(node, zygote)])
    # Once this is answered, the request before it has been carried out.
    node.link.ask(RenewFence(-1))
    await node.heard(RunnerRefused)
    for fork in forks:
        os.kill(fork, signal.SIGKILL)
    await node.heard(WorkerStarted)
    assert not any(isinstance(event, WorkersStartedCold) for event in node.events)


HELD_BEFORE_IT_TELLS = """
import os, time
from pathlib import Path
zygote, go = os.getpid(), Path(__file__).with_name("go")
forks = []
def hold():
    forks.append(1)
    # The first fork is the one that proves that forks work.
    while os.getpid() == zygote and len(forks) > 1 and not go.exists():
        time.sleep(0.01)
os.register_at_fork(after_in_parent=hold)
"""


async def test_the_end_of_a_round_while_forks_are_made_ahead_costs_the_next_nothing(
    node: WarmNode,
) -> None:
    (node.folder / "held.py").write_text(HELD_BEFORE_IT_TELLS)
    script = shutil.copy(CASES, node.folder)
    zygote = node.zygote(sys.executable, "-u", script, "pause", "nothing", modules=["held"])
    zygote = replace(zygote, spare_forks=2)
    pid = (await node.keep(zygote)).pid
    forks = await two_spare_forks(node, pid)  # The runner does not know their pids yet.
    node.link.start_workers(0, [node.spec("true")])
    await node.heard(WorkerExited)
    await node.stop(0)
    assert not any(map(state_of, forks))
    worker = node.spec(sys.executable, "-u", script, "pause", node.folder / "ready0")
    node.link.start_workers(1, [replace(worker, warm=True)])
    node.link.ask(RenewFence(-1))
    await node.heard(RunnerRefused)
    (node.folder / "go").touch()
    await node.heard(WorkerStarted, round=1)
    assert [event for event in node.events if isinstance(event, WorkersStartedCold)] == []


# ---------------------------------------------------------------------- what is refused

LEAVES: Mapping[str, tuple[str, str]] = {
    "is not there": ("import not_there_either", "No module named 'not_there_either'"),
    "fails": ("1 / 0", "import leaves: ZeroDivisionError: division by zero"),
    "exits": ("raise SystemExit(3)", "import leaves: SystemExit: 3"),
    "a thread of Python": (
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(99,), name='sleepy', daemon=True).start()",
        "import leaves starts Python threads (sleepy)",
    ),
    "a thread": (
        "import ctypes, time\nthread = ctypes.c_ulong()\nlibc = ctypes.CDLL(None)\n"
        "libc.pthread_create(ctypes.byref(thread), None, libc.sleep, ctypes.c_void_p(99))",
        "import leaves leaves 2 threads (",
    ),
    "a process": (
        "import subprocess\nprocess = subprocess.Popen(['sleep', '99'])",
        "import leaves starts processes (pid ",
    ),
    "a socket": ("import socket\nends = socket.socketpair()", "import leaves opens socket:["),
    "an epoll": ("import select\nown = select.epoll()", "opens anon_inode:[eventpoll] ("),
    "CUDA": (
        "import sys, types\ntorch = sys.modules['torch'] = types.ModuleType('torch')\n"
        "torch.cuda = types.SimpleNamespace(is_initialized=lambda: True)",
        "import leaves initialises CUDA, which no fork can use",
    ),
    "a fork that dies": (
        "import os\nos.register_at_fork(after_in_child=os.abort)",
        "a fork of it is killed by signal 6",
    ),
    "a fork without CUDA": (
        "import sys, types\ntorch = sys.modules['torch'] = types.ModuleType('torch')\n"
        "def no(): return False\ndef yes(): return True\n"
        "torch.cuda = types.SimpleNamespace(is_initialized=no, _is_in_bad_fork=yes)\n"
        "torch.initial_seed = int",
        "a fork of it does not work: torch.cuda was initialised before",
    ),
    "a broken sitecustomize": ("", "its sitecustomize: ValueError: not today"),
}


@pytest.mark.parametrize("case", LEAVES)
async def test_a_preload_that_no_fork_survives_is_refused(node: WarmNode, case: str) -> None:
    code, reason = LEAVES[case]
    (node.folder / "leaves.py").write_text(code)
    if "sitecustomize" in case:
        node.env["PYTHONPATH"] = str(node.folder)
        (node.folder / "sitecustomize.py").write_text("raise ValueError('not today')\n")
    script = shutil.copy(CASES, node.folder)
    zygote = node.zygote(sys.executable, "-u", script, "pause", "x", modules=["leaves"])
    node.link.ask(zygote)
    lost = await node.heard(ZygoteLost)
    assert reason in lost.reason
    assert lost.retry_s is None
    await start_pausing(node, 0, zygote)
    assert (await node.heard(WorkersStartedCold)).reason == f"there is no zygote: {lost.reason}"


async def test_a_thread_that_outlives_a_fork_is_refused_also_in_what_may_start_some(
    node: WarmNode,
) -> None:
    """The threads that numpy and torch start on import end at every fork; a plug-in's may not."""
    (node.folder / "numpy.py").write_text(LEAVES["a thread"][0])
    script = shutil.copy(CASES, node.folder)
    zygote = node.zygote(sys.executable, "-u", script, "pause", "x", modules=["numpy"])
    node.link.ask(zygote)
    assert "the imports leave 2 threads (" in (await node.heard(ZygoteLost)).reason


async def test_an_interpreter_that_is_not_there_is_told(node: WarmNode) -> None:
    zygote = node.zygote("/nonexistent/python", "-u", CASES)
    node.link.ask(zygote)
    lost = await node.heard(ZygoteLost)
    assert lost.reason.startswith("cannot start '/nonexistent/python': ")
    await start_pausing(node, 0, zygote)


async def test_a_zygote_at_its_limit_of_descriptors_forks_again_later(node: WarmNode) -> None:
    script = node.folder / "short.py"
    script.write_text("")
    zygote = node.zygote(sys.executable, "-u", script)
    worker = replace(node.spec(*zygote.argv), warm=True)
    ready = await node.keep(zygote)
    before = resource.prlimit(ready.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(ready.pid, resource.RLIMIT_NOFILE, (3, before[1]))
    [end] = await node.end_of(0, [worker])
    assert end.exit_code == 0
    cold = await node.heard(WorkersStartedCold, round=0)
    assert cold.reason == "fork: Too many open files"
    resource.prlimit(ready.pid, resource.RLIMIT_NOFILE, before)
    [end] = await node.end_of(1, [worker])
    assert end.exit_code == 0
    assert [event for event in node.events if isinstance(event, WorkersStartedCold)] == [cold]
    assert not any(isinstance(event, ZygoteLost) for event in node.events)


async def test_a_stop_reaches_a_fork_that_leads_no_group_yet(node: WarmNode) -> None:
    """A module's own fork hooks run before everything that the fork does itself."""
    module = "import os, time\nos.register_at_fork(after_in_child=lambda: time.sleep(1.0))\n"
    (node.folder / "slow_at_fork.py").write_text(module)
    node.env["PYTHONPATH"] = str(node.folder)
    script = node.folder / "waits.py"
    script.write_text("import signal\nsignal.pause()\n")
    zygote = node.zygote(sys.executable, "-u", script, modules=["slow_at_fork"])
    ready = await node.keep(zygote)
    node.link.start_workers(0, [replace(node.spec(*zygote.argv), warm=True)])

    def adopted() -> list[int]:
        children = {*children_of(node.link.pid)} - {ready.pid}
        return [pid for pid in children if has_pidfd_of(node.link.pid, pid)]

    await until(adopted)
    await node.stop(0)


def has_pidfd_of(holder: int, pid: int) -> bool:
    """Whether a process is the subreaper of another one."""
    for info in Path(f"/proc/{holder}/fdinfo").iterdir():
        with suppress(OSError):
            if f"\nPid:\t{pid}\n" in info.read_text():
                return True
    return False


# ---------------------------------------------------------------------- through rdzvrun

FAIL_ONCE = """
import os, sys, time, tracing
print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], "of rank", os.environ["RANK"])
print("imported by", "another" if tracing.PID != os.getpid() else "itself")
print("args", *sys.argv[1:])
print(sys.stdout.isatty(), sys.stdout.seekable(), sys.stdout.buffer.seekable())
sys.stdout.flush()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
    while not os.path.exists("rank 0 has printed"):
        time.sleep(0.01)
    sys.exit(3)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    import signal
    open("rank 0 has printed", "w").close()
    signal.pause()
"""


def rdzvrun(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [Path(sys.executable).with_name("rdzvrun"), "--standalone", *argv],
        cwd=folder,
        env={**os.environ, "RDZV_WARM_WAIT": "60"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_a_job_with_warm_workers_restarts_warm(tmp_path: Path) -> None:
    (tmp_path / "tracing.py").write_text("import os\nPID = os.getpid()\n")
    (tmp_path / "train.py").write_text(FAIL_ONCE)
    flags = ("--nproc-per-node=2", "--max-restarts=1", "--warm=tracing", "--log-dir=logs", "-r3")
    ended = rdzvrun(tmp_path, *flags, "train.py", "--rank=${local_rank}")
    assert ended.returncode == 0, ended.stderr
    for attempt in range(2):
        for rank in range(2):
            [out] = tmp_path.rglob(f"attempt_{attempt}/{rank}/stdout.log")
            assert out.read_text().splitlines() == [
                f"attempt {attempt} of rank {rank}",
                "imported by another",
                f"args --rank={rank}",
                "False True True",  # The zygote's own is a pipe.
            ]
    assert ended.stderr.count("workers can be warm: the zygote imported tracing in ") == 1
    assert "cold" not in ended.stderr


def test_a_module_that_is_not_there_is_refused_before_the_node_joins(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    ended = rdzvrun(tmp_path, "--warm=json,nowhere_to_be_found", "train.py")
    assert ended.returncode == 2
    why = "has no nowhere_to_be_found: No module named 'nowhere_to_be_found'; install it there"
    assert why in ended.stderr
    assert "joined" not in ended.stderr
