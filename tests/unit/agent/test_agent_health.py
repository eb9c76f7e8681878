"""The health of a node: what each check finds, and when it runs again.

Stand-in checks return what the test sets. Checks of disks and GPUs examine files that the test
creates; no GPU is touched, and no real kernel log is read.
"""

from __future__ import annotations

import asyncio
import os
import sys
import textwrap
from pathlib import Path

import pytest

from rdzv.agent.inventory import health, xid
from rdzv.agent.inventory.health import NodeHealth
from rdzv.agent.inventory.health_checks import Command, Disk, Gpus, Xids, look_at_gpus
from rdzv.core.fleet.node_resources import FailingCheck
from tests.support.agent_jobs import PATIENCE_S, is_alive, until

pytestmark = pytest.mark.slow

NONE: frozenset[str] = frozenset()


# ---------------------------------------------------------------- when it is looked


class Fake:
    """A check that returns what the test sets, and counts its calls."""

    def __init__(self, name: str = "fan") -> None:
        self.name, self.timeout_s = name, 5.0
        self.wrong = ""
        self.asked: list[frozenset[str]] = []
        self.lifted = 0
        self.gate: asyncio.Event | None = None

    async def look(self, unused_gpus: frozenset[str]) -> str:
        self.asked.append(unused_gpus)
        if self.gate is not None:
            await self.gate.wait()
        return self.wrong

    async def lift(self) -> None:
        self.lifted += 1


@pytest.fixture(name="quick")
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries follow at once, and no deadline is far away."""
    monkeypatch.setattr(health, "FIRST_RETRY_S", 0.01)
    monkeypatch.setattr(health, "LONGEST_RETRY_S", 0.02)
    monkeypatch.setattr(health, "END_S", 0.05)


@pytest.mark.quick
async def test_a_node_without_checks_is_well() -> None:
    assert await NodeHealth(()).look() == ()


@pytest.mark.quick
async def test_all_that_fails_is_told_and_who_is_concerned_hears_of_each_change() -> None:
    fan, disk, heard = Fake("fan"), Fake("disk /"), list[tuple[FailingCheck, ...]]()
    node = NodeHealth((fan, disk), on_change=lambda: heard.append(node.failing))
    assert await node.look() == ()
    fan.wrong, disk.wrong = "stands still", "is full"
    found = await node.look(fresh_s=0.0)
    assert health.describe(found) == "fan stands still; disk / is full"
    await node.look(fresh_s=0.0)
    assert heard == [found]
    fan.wrong = disk.wrong = ""
    assert await node.look(fresh_s=0.0) == ()
    assert heard == [found, ()]


@pytest.mark.quick
async def test_what_was_just_found_holds_for_the_next_job_but_not_after_a_failure() -> None:
    fan = Fake()
    node = NodeHealth((fan,))
    for _ in range(3):
        await node.look()
    assert len(fan.asked) == 1
    await node.look(fresh_s=0.0)
    assert len(fan.asked) == 2


async def test_those_who_ask_at_once_ask_once() -> None:
    fan = Fake()
    fan.gate = asyncio.Event()
    node = NodeHealth((fan,))
    asking = [asyncio.create_task(node.look()) for _ in range(5)]
    await until(lambda: bool(fan.asked))
    fan.gate.set()
    await asyncio.gather(*asking)
    assert len(fan.asked) == 1


@pytest.mark.quick
async def test_the_gpus_of_who_asks_count_as_unused_and_are_looked_at() -> None:
    fan = Fake()
    node = NodeHealth((fan,), lambda: frozenset({"GPU-b"}))
    await node.look()
    await node.look(frozenset({"GPU-a"}))
    assert fan.asked == [{"GPU-b"}, {"GPU-a", "GPU-b"}]


@pytest.mark.usefixtures("quick")
async def test_what_fails_is_tried_again_until_it_is_well_and_that_is_told() -> None:
    fan, heard = Fake(), list[bool]()
    node = NodeHealth((fan,), on_change=lambda: heard.append(bool(node.failing)))
    await node.look()
    running = asyncio.create_task(node.run())
    fan.wrong = "stands still"
    await node.look(fresh_s=0.0)
    await until(lambda: len(fan.asked) > 5)
    fan.wrong = ""
    await until(lambda: heard == [True, False])
    running.cancel()


@pytest.mark.quick
async def test_a_node_that_is_well_is_not_looked_at_without_need() -> None:
    fan = Fake()
    node = NodeHealth((fan,))
    await node.look()
    running = asyncio.create_task(node.run())
    for _ in range(50):
        await asyncio.sleep(0)
    assert len(fan.asked) == 1
    # An operator requests a check.
    node.look_again()
    await until(lambda: len(fan.asked) == 2)
    assert fan.lifted == 1
    running.cancel()


@pytest.mark.usefixtures("quick")
async def test_a_node_without_a_job_is_looked_at_now_and_then() -> None:
    fan, heard = Fake(), list[bool]()
    node = NodeHealth((fan,), on_change=lambda: heard.append(bool(node.failing)))
    node.idle_interval_s = 0.01
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(node.run())
        await until(lambda: len(fan.asked) > 2)
        # The node fails without a request, then recovers.
        fan.wrong = "stands still"
        await until(lambda: heard == [True])
        fan.wrong = ""
        await until(lambda: heard == [True, False])
        running.cancel()


async def test_while_a_job_is_there_only_need_has_it_looked_at() -> None:
    fan, passed = Fake(), list[int]()
    node = NodeHealth((fan,))
    node.idle_interval_s = 0.01

    def is_idle() -> bool:
        passed.append(len(fan.asked))
        return len(passed) > 3

    node.is_idle = is_idle
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(node.run())
        await until(lambda: len(fan.asked) > 1)
        running.cancel()
    # Once at the start, and then only after the end of the job.
    assert passed[:4] == [1, 1, 1, 1]


@pytest.mark.usefixtures("quick")
async def test_one_that_hangs_fails_and_is_not_asked_again_before_it_has_come_back() -> None:
    nfs, fan = Fake("nfs"), Fake()
    nfs.timeout_s, nfs.gate = 0.05, asyncio.Event()
    node = NodeHealth((nfs, fan))
    (found,) = await node.look()
    assert str(found) == "nfs did not return within 0.05 s"
    (found,) = await node.look(fresh_s=0.0)
    assert "has not returned for" in found.reason
    assert (len(nfs.asked), len(fan.asked)) == (1, 2)
    nfs.gate.set()
    async with asyncio.timeout(PATIENCE_S):
        while await node.look(fresh_s=0.0):
            assert len(nfs.asked) == 1
    assert len(nfs.asked) == 2
    node.close()


async def test_a_bug_of_a_check_is_a_check_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    broken = Disk("disk", 5.0, path=None)  # type: ignore[arg-type]
    (found,) = await NodeHealth((broken,)).look()
    assert "failed because of a bug: TypeError" in found.reason
    assert " raised an exception" in caplog.text


# ---------------------------------------------------------------- a command


def command(script: str, timeout_s: float = 10.0) -> Command:
    args = (sys.executable, "-c", textwrap.dedent(script))
    return Command("command nfs", timeout_s, args, dict(os.environ))


@pytest.mark.parametrize(
    ("script", "wrong"),
    [
        ("print('all is well')", ""),
        ("import sys; print('looking'); sys.exit('the mount is stale')", "exited 1: the mount is"),
        ("import os, sys; sys.exit(os.environ['RDZV_UNUSED_GPUS'])", "exited 1: GPU-a,GPU-b"),
        ("import os; os.kill(os.getpid(), 9)", "ended by signal 9"),
        ("import sys; print('x' * 100_000); sys.exit(2)", "exited 2: xxx"),
    ],
)
async def test_a_command_says_by_its_exit_whether_all_is_well(script: str, wrong: str) -> None:
    found = await command(script).look(frozenset({"GPU-b", "GPU-a"}))
    assert found.startswith(wrong) if wrong else not found
    assert len(found) < 300


async def test_a_command_that_does_not_end_is_ended_with_all_that_it_began(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    # A shell starts in a moment, on any machine.
    script = f"sleep 600 & echo $! >'{pid}'; echo waits for ever; wait"
    found = await Command("command sh", 1.0, ("/bin/sh", "-c", script), {}).look(NONE)
    assert found == "did not end within 1 s: waits for ever"
    await until(lambda: not is_alive(int(pid.read_text())))


@pytest.mark.quick
async def test_a_command_that_is_not_there_fails() -> None:
    check = Command("command x", 1.0, ("/no/such/program",), {})
    assert await check.look(NONE) == "cannot be started: No such file or directory"


# ---------------------------------------------------------------- disks


async def test_a_disk_has_room_or_says_how_much_it_has(tmp_path: Path) -> None:
    assert await Disk("disk", 5.0, tmp_path, min_free_bytes=1).look(NONE) == ""
    found = await Disk("disk", 5.0, tmp_path, min_free_percent=100.0).look(NONE)
    assert "% free (" in found and found.endswith("but 100 % are required")
    found = await Disk("disk", 5.0, tmp_path, min_free_bytes=1 << 60).look(NONE)
    assert found.endswith(" free, but 1048576 TiB are required")
    found = await Disk("disk", 5.0, tmp_path / "gone", min_free_bytes=1).look(NONE)
    assert found == "cannot be checked: No such file or directory"


# ---------------------------------------------------------------- GPUs

GIB = 1 << 30


def gpus(used: dict[str, int], wrong: tuple[str, ...] = (), **more: int) -> Gpus:
    check = Gpus("gpu", 0.2, ("GPU-a", "GPU-b"), memory_used=GIB, **more)
    check.look_at = lambda: (used, list(wrong))
    return check


BOTH = {"GPU-a": 40 * GIB, "GPU-b": GIB}


@pytest.mark.quick
@pytest.mark.parametrize(
    ("used", "errors", "count", "unused", "wrong"),
    [
        (BOTH, (), 0, {"GPU-b"}, ""),
        (BOTH, (), 0, set(BOTH), "GPU-a: 40 GiB are in use, but no job uses it"),
        (
            {"GPU-a": 0},
            ("number 1: GPU is lost",),
            0,
            set(),
            "GPU-b does not answer: number 1: GPU is lost",
        ),
        ({}, ("NVML: gone",), 0, set(), "GPU-a, GPU-b do not answer: NVML: gone"),
        (BOTH, (), 8, set(), "2 GPUs of 8 answer"),
    ],
)
async def test_gpus_answer_and_are_not_in_use_where_no_job_is(
    used: dict[str, int], errors: tuple[str, ...], count: int, unused: set[str], wrong: str
) -> None:
    assert await gpus(used, errors, count=count).look(frozenset(unused)) == wrong


async def test_memory_that_is_being_given_back_is_waited_for() -> None:
    check, asked = gpus({}), list[int]()
    check.timeout_s = 10.0

    def look_at() -> tuple[dict[str, int], list[str]]:
        asked.append(1)
        return {"GPU-a": 0, "GPU-b": 0 if len(asked) > 2 else 3 * GIB}, []

    check.look_at = look_at
    assert await check.look(frozenset({"GPU-b"})) == ""
    assert len(asked) == 3


@pytest.mark.quick
def test_each_gpu_is_asked_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that has fallen off the bus does not hide another."""
    (tmp_path / "pynvml.py").write_text(
        textwrap.dedent(
            """
            from types import SimpleNamespace
            class NVMLError(Exception): pass
            def nvmlInit(): pass
            def nvmlShutdown(): pass
            def nvmlDeviceGetCount(): return 3
            def nvmlDeviceGetHandleByIndex(index):
                if index == 1: raise NVMLError("GPU is lost")
                return index
            def nvmlDeviceGetMigMode(handle): raise NVMLError("not supported")
            def nvmlDeviceGetUUID(handle): return f"GPU-{handle}"
            def nvmlDeviceGetMemoryInfo(handle): return SimpleNamespace(used=handle * 100)
            """
        )
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    assert look_at_gpus() == ({"GPU-0": 0, "GPU-2": 200}, ["number 1: GPU is lost"])
    del sys.modules["pynvml"]  # monkeypatch would put this one back for later tests.


# ---------------------------------------------------------------- the kernel's log

RECORDS = """\
6,800,5000000,-;nvidia 0000:3b:00.0: enabling device (0000 -> 0002)
 SUBSYSTEM=pci
4,801,6000000,-;NVRM: Xid (PCI:0000:3b:00): 31, pid=811, name=python, Ch 00000008, MMU Fault
4,802,7000000,-;NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off
4,803,7000001,c;NVRM: Xid (PCI:0000:3b:00): 79, pid=811, name=python, GPU has fallen off the bus.
4,804,8000000,-;NVRM: Xid (PCI:0000:86:00): 95, Uncontained: LTC TAG (0x7,0x0)
NVRM: Xid (PCI:0000:86:00): 48, no record
"""


@pytest.mark.quick
def test_errors_that_matter_are_told_once_for_each_gpu() -> None:
    found = list(xid.parse(RECORDS.splitlines()))
    assert [(x.number, x.code) for x in found] == [
        *((801, "31"), (802, "79"), (803, "79"), (804, "95"))
    ]
    assert xid.describe(found, xid.CODES, -1) == (
        "79 on 0000:3b:00: pid=811, name=python, GPU has fallen off the bus.; 95 on 0000:86:00: "
        "Uncontained: LTC TAG (0x7,0x0)"
    )
    assert xid.describe(found, ("31",), -1).startswith("31 on 0000:3b:00: pid=811")
    assert xid.describe(found, xid.CODES, 804) == ""


async def test_what_an_operator_lifts_does_not_count_until_a_boot(tmp_path: Path) -> None:
    log, boot = tmp_path / "kmsg", tmp_path / "boot_id"
    log.write_text(RECORDS)
    boot.write_text("first\n")
    check = Xids("xid", 5.0, log=log, lifted=xid.Lifted(tmp_path / "lifted.json", boot))
    assert (await check.look(NONE)).startswith("79 on 0000:3b:00")
    await check.lift()
    assert await check.look(NONE) == ""
    # The next agent remembers it, and counts only what comes later.
    check = Xids("xid", 5.0, log=log, lifted=xid.Lifted(tmp_path / "lifted.json", boot))
    assert await check.look(NONE) == ""
    log.write_text(RECORDS + "4,805,9000000,-;NVRM: Xid (PCI:0000:86:00): 79, fell off\n")
    assert await check.look(NONE) == "79 on 0000:86:00: fell off"
    boot.write_text("second\n")
    assert "95 on 0000:86:00" in await check.look(NONE)


@pytest.mark.quick
async def test_a_log_that_can_not_be_read_is_a_reason(tmp_path: Path) -> None:
    found = await Xids("xid", 5.0, log=tmp_path / "kmsg").look(NONE)
    assert found == (
        f"cannot read the log {tmp_path / 'kmsg'}: No such file or directory; give the agent "
        "CAP_SYSLOG, or remove this check"
    )


@pytest.mark.quick
def test_records_come_from_a_device_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Like /dev/kmsg: one record per read, a gap where some were overwritten, and then the end."""
    answers = [b"4,1,9,-;one\n SUBSYSTEM=pci\n", BrokenPipeError(), b"4,7,9,-;two\n"]

    def read(fd: int, size: int) -> bytes:
        if not answers:
            raise BlockingIOError
        answer = answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    monkeypatch.setattr(os, "read", read)
    assert xid.read_records(Path("/dev/null")) == ["4,1,9,-;one", "4,7,9,-;two"]
