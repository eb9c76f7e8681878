"""Restarts are warm by default: the zygote starts once workers have imported torch, or never.

Most jobs here import a stand-in for torch from the folder of their script, which takes no time.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from runners import PATIENCE_S, marked, until
from test_warm import LIGHT, WarmNode, cases, run_all

from rdzv.agent.core.events import (
    RunnerRefused,
    WorkerExited,
    WorkersStartedCold,
    ZygoteLost,
    ZygoteReady,
)
from rdzv.agent.runner.requests import BeginZygote, RenewFence, WorkerSpec, ZygoteSpec
from rdzv.agent.runner.zygote_process import SETTLE_S
from rdzv.agent.runner_link.runner_link import RunnerLink
from rdzv.agent.system.accounts import Identity
from tests.support.accounts import ADA, needs_root, own_folder, passable_folder

TORCH = """
import os
IMPORTED_BY = os.getpid()
IMPORTED_NICE = open("/proc/self/autogroup").read().split()[-1]
SEEN = os.environ.get("OMP_NUM_THREADS")
def initial_seed(): return 0
class default_generator:
    seed = staticmethod(int)
os.environ["TORCHINDUCTOR_CACHE_DIR"] = "/made up"
"""

SCRIPT = """
import json, os, signal, sys
from pathlib import Path
hidden = "torch" not in sys.modules
cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
exec(Path(__file__).with_name("before.py").read_text())
import importlib.util
found = importlib.util.find_spec("torch")
import torch.part
from torch import SEEN
exec(Path(__file__).with_name("after.py").read_text())
said = Path(__file__).with_name("said" + sys.argv[1])
said.with_suffix(".new").write_text(json.dumps({
    "warm": torch.IMPORTED_BY != os.getpid(), "hidden": hidden, "cache": cache, "seen": SEEN,
    "spec": [found.origin, found.submodule_search_locations, found.cached, found.name],
    "loader": torch.__spec__.loader is torch.__loader__, "own": sorted(vars(torch.__loader__)),
    "finders": len(sys.meta_path), "fds": len(os.listdir("/proc/self/fd")),
    "oom": Path("/proc/self/oom_score_adj").read_text(), "nice": os.nice(0),
}))
said.with_suffix(".new").rename(said)
signal.pause()
"""


class Job(WarmNode):
    """A job of two workers whose restarts should be warm."""

    def __init__(
        self, folder: Path, python: str = sys.executable, identity: Identity | None = None
    ) -> None:
        super().__init__(folder)
        self.python_ = python
        self.script = folder / "script.py"
        self.script.write_text(SCRIPT)
        (folder / "torch").mkdir()
        (folder / "torch" / "__init__.py").write_text(TORCH)
        (folder / "torch" / "part.py").touch()
        self.runs()
        self.spec_ = ZygoteSpec(
            argv=(python, "-u", str(self.script), "none"),
            env=self.env,
            cwd=None,
            modules=("torch", "torch.part"),
            identity=identity,
            after_import=True,
        )

    def runs(self, before: str = "", after: str = "") -> None:
        """Let the script run this before and after it imports torch."""
        (self.folder / "before.py").write_text(before)
        (self.folder / "after.py").write_text(after)

    def worker(self, local_rank: int = 0) -> WorkerSpec:
        spec = self.spec(self.python_, "-u", self.script, local_rank, local_rank=local_rank)
        return replace(spec, warm=True, identity=self.spec_.identity)

    async def round(self, number: int, workers: int = 2) -> list[dict[str, object]]:
        """Start a round; return its workers' output once they have imported torch."""
        await self.start(number, *map(self.worker, range(workers)))
        return [await self.said(rank) for rank in range(workers)]

    async def said(self, local_rank: int) -> dict[str, object]:
        file = self.folder / f"said{local_rank}"
        await until(file.exists)
        told: dict[str, object] = json.loads(file.read_text())
        file.unlink()
        return told

    async def obeyed(self) -> None:
        """Wait until the runner has carried out the request, and read the events before it."""
        count = len([event for event in self.events if isinstance(event, RunnerRefused)])
        self.link.ask(RenewFence(-1))
        await until(lambda: sum(isinstance(each, RunnerRefused) for each in self.events) > count)


@pytest.fixture
async def job(tmp_path: Path) -> AsyncIterator[Job]:
    job = Job(tmp_path)
    job.link = await RunnerLink.spawn(job.hear)
    job.link.ask(job.spec_)
    yield job
    await job.link.close(PATIENCE_S)
    assert marked(job.mark) == []


async def test_the_first_round_is_cold_and_the_second_is_warm(job: Job) -> None:
    first = await job.round(0)
    await job.heard(ZygoteReady)
    await job.stop(0)
    second = await job.round(1)
    assert [said["warm"] for said in (*first, *second)] == [False, False, True, True]
    # A script sees no difference, and nothing of the watch is left.
    for cold, warm in zip(first, second, strict=True):
        assert {**warm, "warm": False} == cold
        assert cold["hidden"] is True
        assert cold["cache"] is None
        assert cold["loader"] is True
    assert {type(event).__name__ for event in job.events} == {
        *("WorkerStarted", "ZygoteReady", "WorkersGone", "WorkerExited")
    }


async def test_the_first_round_is_warm_where_the_script_is_known_to_suit_a_zygote(job: Job) -> None:
    job.link.ask(BeginZygote())
    await job.heard(ZygoteReady)
    job.link.ask(BeginZygote())
    first = await job.round(0)
    await job.stop(0)
    second = await job.round(1)
    assert [said["warm"] for said in (*first, *second)] == [True] * 4
    assert len([event for event in job.events if isinstance(event, ZygoteReady)]) == 1


@needs_root
@pytest.mark.skipif(not Path("/usr/bin/python3").exists(), reason="there is no /usr/bin/python3")
async def test_workers_of_another_account_are_warm_as_well() -> None:
    with passable_folder() as shared:
        job = Job(own_folder(shared, "home"), "/usr/bin/python3", ADA)
        job.link = await RunnerLink.spawn(job.hear)
        job.link.ask(job.spec_)
        first = await job.round(0)
        await job.heard(ZygoteReady)
        await job.stop(0)
        second = await job.round(1)
        assert [said["warm"] for said in (*first, *second)] == [False, False, True, True]
        await job.link.close(PATIENCE_S)


async def test_without_an_import_of_torch_there_is_no_zygote(job: Job) -> None:
    job.runs(before="Path(__file__).with_name('said0').write_text('{}'); signal.pause()")
    pids = await job.start(0, job.worker())
    await job.said(0)
    await job.obeyed()
    assert marked(job.mark) == pids
    await job.stop(0)
    job.runs()
    [said] = await job.round(1, workers=1)
    assert said["warm"] is False
    [cold] = [event for event in job.events if isinstance(event, WorkersStartedCold)]
    assert cold.round == 1 and cold.reason.startswith("this job began ")
    await job.heard(ZygoteReady)


async def test_the_zygote_waits_for_the_imports_of_all_but_not_for_ever(job: Job) -> None:
    late = "import time\nif sys.argv[1] == '1': time.sleep(1000)"
    job.runs(before=late)
    await job.start(0, *map(job.worker, range(2)))
    await job.said(0)
    loop = asyncio.get_running_loop()
    since = loop.time()
    await job.obeyed()
    assert len(marked(job.mark)) == 2
    await job.heard(ZygoteReady)
    assert loop.time() - since > SETTLE_S / 2


BLOCKS = """
import pathlib, time
here = pathlib.Path(__file__).parent
if pathlib.Path("/proc/self/cmdline").read_bytes().startswith(b"rdzv zygote"):
    (here / "pid").write_text(str(os.getpid()))
    while not (here / "go").exists():
        time.sleep(0.01)
"""


async def test_a_zygote_that_workers_wait_for_has_as_much_cpu_as_they_would_have(
    tmp_path: Path,
) -> None:
    job = Job(tmp_path)
    torch = tmp_path / "torch"
    (torch / "__init__.py").write_text(TORCH + BLOCKS)
    job.link = await RunnerLink.spawn(job.hear)
    job.link.ask(replace(job.spec_, wait_s=PATIENCE_S))
    await job.round(0)
    await until(lambda: (torch / "pid").exists() and (torch / "pid").read_text())

    def nice() -> str:
        return Path(f"/proc/{(torch / 'pid').read_text()}/autogroup").read_text().split()[-1]

    assert nice() == "5"
    await job.stop(0)
    job.link.start_workers(1, [job.worker(0), job.worker(1)])
    await until(lambda: nice() == "0")
    (torch / "go").touch()
    assert [(await job.said(rank))["warm"] for rank in range(2)] == [True, True]
    await job.link.close(PATIENCE_S)


@pytest.mark.parametrize(
    "change",
    [
        "os.environ['OMP_NUM_THREADS'] = '3'",
        "os.environ.setdefault('TORCH_LOGS', '+dynamo')",
        "os.putenv('MKL_NUM_THREADS', '1')",
        "os.environ.update(CUDA_LAUNCH_BLOCKING='1')",
        "del os.environ['PYTORCH_SET_BEFORE']",
    ],
)
async def test_a_script_that_changes_what_torch_reads_on_import_stays_cold(
    job: Job, change: str
) -> None:
    job.env["PYTORCH_SET_BEFORE"] = "1"
    job.runs(before=change)
    await job.round(0)
    lost = await job.heard(ZygoteLost)
    [name] = [name for name in NAMES if name in change]
    assert lost.reason.startswith(f"the script changes '{name}' before it imports torch")
    assert lost.retry_s is None
    await job.stop(0)
    job.runs()
    assert [said["warm"] for said in await job.round(1)] == [False, False]
    cold = await job.heard(WorkersStartedCold)
    assert cold.reason == f"there is no zygote: {lost.reason}"
    assert len(marked(job.mark)) == 2
    assert [event for event in job.events if isinstance(event, ZygoteLost)] == [lost]


NAMES = (
    *("OMP_NUM_THREADS", "TORCH_LOGS", "MKL_NUM_THREADS", "CUDA_LAUNCH_BLOCKING"),
    "PYTORCH_SET_BEFORE",
)


async def test_what_torch_does_not_read_on_import_may_be_changed(job: Job) -> None:
    job.runs(
        before="os.environ.update(CUDA_VISIBLE_DEVICES='0', TORCH_NCCL_DEBUG='1', MINE='1')",
        after="os.environ['OMP_NUM_THREADS'] = '3'",
    )
    await job.round(0)
    await job.heard(ZygoteReady)
    await job.stop(0)
    assert [said["warm"] for said in await job.round(1)] == [True, True]
    await job.obeyed()
    assert not any(isinstance(event, ZygoteLost) for event in job.events)


async def test_a_change_in_a_warm_worker_is_the_last_that_is_lost(job: Job) -> None:
    """After a restart the script may do something else than at first."""
    await job.round(0)
    await job.heard(ZygoteReady)
    await job.stop(0)
    job.runs(before="os.environ['OMP_NUM_THREADS'] = '3'")
    seen = [(said["warm"], said["seen"]) for said in await job.round(1)]
    assert seen == [(True, None)] * 2
    assert "'OMP_NUM_THREADS' before it imports torch" in (await job.heard(ZygoteLost)).reason
    await job.stop(1)
    seen = [(said["warm"], said["seen"]) for said in await job.round(2)]
    assert seen == [(False, "3")] * 2
    assert len(marked(job.mark)) == 2


async def test_a_warm_worker_that_crashes_soon_is_the_last_one(job: Job) -> None:
    await job.round(0)
    await job.heard(ZygoteReady)
    await job.stop(0)
    job.runs(after="if sys.argv[1] == '0': os.abort()")
    await job.start(1, *map(job.worker, range(2)))
    assert (await job.heard(WorkerExited, round=1)).signal == signal.SIGABRT
    lost = await job.heard(ZygoteLost)
    assert lost.reason.startswith("a warm worker, pid ")
    assert " died of SIGABRT 0." in lost.reason
    assert lost.retry_s is None
    assert (await job.said(1))["warm"] is True
    await job.stop(1)
    job.runs()
    assert [said["warm"] for said in await job.round(2)] == [False, False]
    assert len(marked(job.mark)) == 2


async def test_a_warm_worker_that_is_killed_or_crashes_while_it_is_stopped_is_no_reason(
    job: Job,
) -> None:
    await job.round(0)
    await job.heard(ZygoteReady)
    await job.stop(0)
    job.runs(after="signal.signal(signal.SIGTERM, lambda *_: os.abort())")
    await job.round(1)
    pid = next(event.pid for event in job.events if getattr(event, "round", None) == 1)  # type: ignore[union-attr]
    os.kill(pid, signal.SIGKILL)
    await job.heard(WorkerExited, round=1, pid=pid)
    await job.stop(1)
    signals = [event.signal for event in job.events if isinstance(event, WorkerExited)]
    assert signals[-2:] == [signal.SIGKILL, signal.SIGABRT]
    assert [said["warm"] for said in await job.round(2)] == [True, True]


NONSENSE = """
import socket
with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
    for text in ("", "{", "[]", "{}", '{"changed": 1}', "[" * 9000):
        sender.sendto(text.encode(), "\\0" + sys.meta_path[0]._address)
"""


async def test_reports_of_nonsense_do_no_harm(job: Job) -> None:
    """The address is known to the user's own process, which may send anything there."""
    job.runs(before=NONSENSE)
    await job.round(0)
    await job.heard(ZygoteReady)


@needs_root
async def test_reports_of_another_account_are_not_believed(job: Job) -> None:
    job.runs(
        before="if os.fork() == 0:\n"
        "    os.setuid(65534)\n"
        "    os.environ['OMP_NUM_THREADS'] = '3'\n"
        "    sys.meta_path[0]._report(['OMP_NUM_THREADS'])\n"
        "    os._exit(0)\n"
        "os.wait()"
    )
    await job.round(0)
    await job.heard(ZygoteReady)
    assert not any(isinstance(event, ZygoteLost) for event in job.events)


async def test_a_watched_worker_is_as_any_other(tmp_path: Path) -> None:
    """Except for the finder, removed as torch is imported, and its start as shown by /proc."""
    node = WarmNode(tmp_path)
    node.link = await RunnerLink.spawn(node.hear)
    plain = await run_all(node, 0, cases(LIGHT), None)
    remove_logs(tmp_path)
    argv = next(iter(cases(LIGHT).values()))
    node.link.ask(replace(node.zygote(*argv, modules=["torch"]), after_import=True))
    watched = await run_all(node, 1, cases(LIGHT), None)
    await node.link.close(PATIENCE_S)
    for case in LIGHT:
        for seen in (plain[case], watched[case]):
            seen.stdout[:] = [line for line in seen.stdout if not line.startswith("proc ")]
        assert watched[case].stdout == plain[case].stdout
        assert watched[case] == plain[case]


@pytest.mark.parametrize("does", ["sys.customized = __file__", "raise ValueError('not today')"])
async def test_a_sitecustomize_of_the_sites_own_is_imported_in_a_watched_worker(
    job: Job, does: str
) -> None:
    own = job.folder / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text(f"import sys\n{does}\n")
    job.env["PYTHONPATH"] = os.fspath(own)
    code = (
        "import os, sys\n"
        "print(getattr(sys, 'customized', None), 'sitecustomize' in sys.modules, sys.path[:2])\n"
        "print(os.environ['PYTHONPATH'], [name for name in os.environ if 'WATCH' in name])\n"
        "print(type(sys.meta_path[0]).__name__, file=sys.stderr)\n"
    )
    argvs = {"it": (sys.executable, "-u", "-c", code)}
    watched = (await run_all(job, 0, argvs, None))["it"]
    assert watched.stdout[1] == f"{own} []"
    assert watched.stderr.pop() == "_Watch"
    remove_logs(job.folder)
    plain = WarmNode(job.folder)
    plain.env = job.env
    plain.link = await RunnerLink.spawn(plain.hear)
    seen = (await run_all(plain, 0, argvs, None))["it"]
    seen.stderr.pop()
    assert watched == seen
    await plain.link.close(PATIENCE_S)


def remove_logs(folder: Path) -> None:
    for log in folder.glob("*.cold.*"):
        log.unlink()


async def test_a_script_sees_no_difference_with_the_real_torch(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    node = WarmNode(tmp_path)
    node.env["OMP_NUM_THREADS"] = "2"
    node.link = await RunnerLink.spawn(node.hear)
    # test_warm.py has more of what a script may do with torch.
    argvs = cases(("state:torch", "recorded"))
    zygote = node.zygote(*next(iter(argvs.values())), modules=["torch"])
    zygote = replace(zygote, cwd=str(tmp_path), after_import=True)
    node.link.ask(zygote)
    cold = await run_all(node, 0, argvs, None)
    await node.heard(ZygoteReady)
    warm = await run_all(node, 1, argvs, zygote)
    await node.link.close(PATIENCE_S)
    assert warm == cold
    assert not any(isinstance(event, WorkersStartedCold | ZygoteLost) for event in node.events)


# ---------------------------------------------------------------------- through rdzvrun

FAILS_ONCE = """
import os, sys, time, torch
from pathlib import Path
attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
print(f"attempt {attempt} rank {rank} {torch.IMPORTED_BY == os.getpid()}", flush=True)
Path(f"said-{rank}").touch()
while attempt == "0" and not all(map(os.path.exists, ("go", "said-0", "said-1"))):
    time.sleep(0.01)
sys.exit(3 if (attempt, rank) == ("0", "1") else 0)
"""


def run_job(folder: Path, flags: Sequence[str], go_after: str) -> tuple[list[str], str]:
    """Run a job whose first round fails after a log line; return its sorted output, and the log."""
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(TORCH)
    (folder / "torch" / "_dynamo.py").touch()
    (folder / "train.py").write_text(FAILS_ONCE)
    command = [Path(sys.executable).with_name("rdzvrun"), "--standalone", "--nproc-per-node=2"]
    log: list[str] = []
    with (
        (folder / "out").open("w") as out,
        subprocess.Popen(
            [*command, "--max-restarts=1", *flags, "train.py"],
            **{"cwd": folder, "stdout": out, "stderr": subprocess.PIPE, "text": True},
        ) as process,
    ):
        alarm = threading.Timer(PATIENCE_S, process.kill)
        alarm.start()
        assert process.stderr is not None
        for line in process.stderr:
            log.append(line)
            if go_after in line:
                (folder / "go").touch()
        alarm.cancel()
    assert process.returncode == 0, log
    return sorted((folder / "out").read_text().splitlines()), "".join(log)


@pytest.mark.usefixtures("restarts_as_by_default")
def test_a_job_that_may_restart_restarts_warm_without_being_told_to(tmp_path: Path) -> None:
    out, log = run_job(
        tmp_path, (), go_after="workers can be warm: the zygote imported torch, torch._dynamo in "
    )
    assert out == [f"attempt {n} rank {rank} {n == 0}" for n in range(2) for rank in range(2)]
    assert "workers will start cold" not in log


@pytest.mark.usefixtures("restarts_as_by_default")
def test_with_no_warm_all_rounds_are_cold(tmp_path: Path) -> None:
    out, log = run_job(tmp_path, ["--no-warm"], go_after="round 0: GROUP_RANK 0 of 1")
    assert out == [f"attempt {n} rank {rank} True" for n in range(2) for rank in range(2)]
    assert "warm" not in log
