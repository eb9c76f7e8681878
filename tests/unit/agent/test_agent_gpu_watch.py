"""The GPU state that NVML shows is reported with the worker whose processes use the GPU."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from rdzv.agent.inventory.gpu_states import UsedGpu
from rdzv.agent.observers import gpu_watch
from rdzv.agent.observers.gpu_watch import GpuReport, GpuWatch, RankGpu, by_worker
from rdzv.core.gpu_state import GpuState
from rdzv.structs import replace
from tests.unit.agent.test_agent_adoption import LINE

pytestmark = pytest.mark.slow

A, B, C = (
    GpuState(f"GPU-{name}", mhz, 2_000) for name, mhz in (("a", 2_000), ("b", 600), ("c", 900))
)
WORKERS = {0: 50, 1: 60}
"""The processes of two workers by LOCAL_RANK; each leads a session."""
SESSIONS = {50: 50, 51: 50, 60: 60, 70: 70}


@pytest.fixture(autouse=True)
def _sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_watch, "session_of", SESSIONS.get)


@pytest.mark.parametrize(
    ("gpus", "visible", "found"),
    [
        pytest.param(
            (UsedGpu(A, (60,)), UsedGpu(B, (51, 70))), None, {1: A, 0: B}, id="by their processes"
        ),
        pytest.param((UsedGpu(A, (50,)), UsedGpu(B, (50,))), None, {0: B}, id="the slower of two"),
        pytest.param((UsedGpu(A, (70,)), UsedGpu(B, ())), None, {}, id="another program's"),
        pytest.param((UsedGpu(A, ()), UsedGpu(B, ())), None, {}, id="a job that uses none"),
        pytest.param(
            (UsedGpu(A, (9,)), UsedGpu(B, None)), None, {0: A, 1: B}, id="numbers of a host"
        ),
        pytest.param(
            (UsedGpu(A, (9,)), UsedGpu(B, (8,)), UsedGpu(C, (7,))), None, {}, id="three for two"
        ),
        pytest.param(
            (UsedGpu(A, (9,)), UsedGpu(B, (8,)), UsedGpu(C, (7,))), "2,0", {0: C, 1: A}, id="chosen"
        ),
        pytest.param(
            (UsedGpu(A, (9,)), UsedGpu(B, (8,)), UsedGpu(C, (7,))),
            "GPU-c,GPU-b",
            {0: C, 1: B},
            id="named",
        ),
    ],
)
def test_whose_gpu_it_is(
    gpus: Sequence[UsedGpu], visible: str | None, found: dict[int, GpuState]
) -> None:
    assert by_worker(WORKERS, gpus, visible, 2) == found


class Nvml:
    """Returns these GPUs."""

    def __init__(self, *gpus: UsedGpu) -> None:
        self.gpus = gpus
        self.looks = 0

    def look(self) -> tuple[UsedGpu, ...]:
        assert threading.current_thread() is not threading.main_thread()
        self.looks += 1
        return self.gpus


@pytest.fixture(name="said")
def _said(monkeypatch: pytest.MonkeyPatch) -> asyncio.Queue[GpuReport]:
    monkeypatch.setattr(gpu_watch, "FIRST_S", 0.01)
    monkeypatch.setattr(gpu_watch, "LEAST_S", 0.01)
    monkeypatch.setattr(gpu_watch, "PAUSE_PER_LOOK", 0)
    return asyncio.Queue()


def watch(nvml: Nvml, said: asyncio.Queue[GpuReport], visible: str | None = None) -> GpuWatch:
    made = GpuWatch("job", visible, 2, said.put_nowait, nvml.look)
    made.open_round(replace(LINE, rank_first=4))
    for local_rank, pid in WORKERS.items():
        made.worker_started(local_rank, pid)
    return made


async def test_the_gpus_of_a_round_are_reported_and_once_that_there_are_none(
    said: asyncio.Queue[GpuReport],
) -> None:
    nvml = Nvml(UsedGpu(A, (50,)), UsedGpu(B, (60,)))
    watching = watch(nvml, said)
    assert await said.get() == GpuReport(LINE.run, LINE.round, (RankGpu(4, A), RankGpu(5, B)))
    watching.worker_exited(0)
    while len((report := await said.get()).ranks) == 2:
        pass
    assert report.ranks == (RankGpu(5, B),)
    nvml.gpus = (UsedGpu(A, ()), UsedGpu(B, ()))
    while (await said.get()).ranks:
        pass
    await asyncio.sleep(0.1)
    nvml.gpus = (UsedGpu(A, ()), UsedGpu(B, (60,)))
    assert (await said.get()).ranks == (RankGpu(5, B),)
    watching.close_round()


async def test_a_driver_that_hangs_is_asked_once_and_what_was_known_is_taken_back(
    said: asyncio.Queue[GpuReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_watch, "WITHIN_S", 0.1)
    hangs, goes_on = threading.Event(), threading.Event()

    class Hanging(Nvml):
        def look(self) -> tuple[UsedGpu, ...]:
            found = super().look()
            if hangs.is_set():
                goes_on.wait(10)
            return found

    nvml = Hanging(UsedGpu(A, (50,)))
    watching = watch(nvml, said)
    assert (await said.get()).ranks == (RankGpu(4, A),)
    hangs.set()
    while (await said.get()).ranks:
        pass
    looked = nvml.looks
    await asyncio.sleep(0.1)
    assert (nvml.looks, said.empty()) == (looked, True)
    goes_on.set()
    assert (await said.get()).ranks == (RankGpu(4, A),)
    watching.close_round()


async def test_an_nvml_that_fails_in_an_unknown_way_is_asked_nothing_more_and_that_is_logged(
    said: asyncio.Queue[GpuReport], caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(Nvml):
        def look(self) -> tuple[UsedGpu, ...]:
            super().look()
            raise RuntimeError("an error that nobody has seen before")

    before = asyncio.all_tasks()
    nvml = Failing()
    watching = watch(nvml, said)
    (looking,) = asyncio.all_tasks() - before
    async with asyncio.timeout(60):
        await looking
    assert caplog.messages == ["job: cannot report the state of its GPUs"]
    assert "an error that nobody has seen before" in caplog.text
    assert (nvml.looks, said.empty()) == (1, True)
    watching.close_round()


@pytest.mark.parametrize("visible", ["", "-1"])
async def test_a_job_without_gpus_asks_nothing(
    said: asyncio.Queue[GpuReport], visible: str
) -> None:
    nvml = Nvml(UsedGpu(A, (50,)))
    watch(nvml, said, visible)
    await asyncio.sleep(0.05)
    assert nvml.looks == 0


async def test_where_there_is_no_nvml_it_is_asked_once_a_round(
    said: asyncio.Queue[GpuReport],
) -> None:
    nvml = Nvml()
    watch(nvml, said)
    await asyncio.sleep(0.1)
    assert (nvml.looks, said.empty()) == (1, True)
