"""How the link's thread detects that the main thread waits for gloo after the cut."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from rdzv.worker import cutting
from rdzv.worker.cutting import LOST_AFTER_S, LostWait

BACKWARD = "/venv/torch/autograd/graph.py"
BUFFERS = "/venv/torch/nn/parallel/distributed.py"


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The main thread: in `file`, having used `ticks`, at `now_s`."""
    at = SimpleNamespace(file=BACKWARD, ticks=5, now_s=100.0, cuda=False)
    code = SimpleNamespace(f_lineno=979)

    def frames() -> dict[int | None, Any]:
        code.f_code = SimpleNamespace(co_filename=at.file)
        return {threading.main_thread().ident: code}

    torch = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: at.cuda))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(cutting.sys, "_current_frames", frames)
    monkeypatch.setattr(cutting, "cpu_ticks", lambda: (str(at.ticks), "0"))
    monkeypatch.setattr(cutting.time, "monotonic", lambda: at.now_s)
    return at


@pytest.mark.parametrize("file", [BACKWARD, BUFFERS])
def test_a_thread_that_does_nothing_in_a_collective_of_ddp_waits_in_vain(
    main: SimpleNamespace, file: str
) -> None:
    main.file = file
    wait = LostWait()
    assert wait.place() == ""
    main.now_s += LOST_AFTER_S / 2
    assert wait.place() == ""
    main.now_s += LOST_AFTER_S / 2
    assert wait.place() == f"{file}:979"


def test_a_thread_that_computes_does_not(main: SimpleNamespace) -> None:
    wait = LostWait()
    for _ in range(5):
        main.now_s += LOST_AFTER_S * 0.9
        main.ticks += 1
        assert wait.place() == ""


@pytest.mark.parametrize("file", ["/home/ada/train.py", "/venv/torch/utils/data/dataloader.py"])
def test_nor_does_one_that_waits_for_anything_else(main: SimpleNamespace, file: str) -> None:
    wait = LostWait()
    main.file = file
    for _ in range(5):
        assert wait.place() == ""
        main.now_s += LOST_AFTER_S


def test_nor_one_that_may_wait_for_a_gpu(main: SimpleNamespace) -> None:
    wait = LostWait()
    main.cuda = True
    for _ in range(5):
        assert wait.place() == ""
        main.now_s += LOST_AFTER_S


def test_the_kernel_tells_the_cpu_time_of_this_process() -> None:
    user, system = cutting.cpu_ticks()
    assert int(user) + int(system) >= 0
