"""What training frameworks get: progress, a notice, the checkpoint to continue from."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rdzv.worker import exit_if_leaving, notice, should_stop
from rdzv.worker.integrations import newest_checkpoint, report_step


@pytest.fixture(autouse=True)
def _no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RDZV_PROGRESS_FILE", raising=False)
    monkeypatch.delenv("RDZV_NOTICE_FILE", raising=False)


@pytest.fixture(autouse=True)
def _no_notice() -> Iterator[None]:
    """Let the notice of one test not be that of the next."""
    yield
    notice.restore_sigterm()


def checkpoint(folder: Path, step: int, state: str | None) -> str:
    made = folder / f"checkpoint-{step}"
    made.mkdir()
    if state is not None:
        (made / "trainer_state.json").write_text(state)
    return str(made)


def test_the_newest_checkpoint_is_the_newest_that_is_whole(tmp_path: Path) -> None:
    checkpoint(tmp_path, 9, "{}")
    newest = checkpoint(tmp_path, 10, json.dumps({"global_step": 10}))
    checkpoint(tmp_path, 11, None)
    checkpoint(tmp_path, 12, '{"global_st')
    (tmp_path / "checkpoint-13").touch()
    (tmp_path / "checkpoint-x").mkdir()
    assert newest_checkpoint(tmp_path) == newest


def test_without_a_whole_one_there_is_none(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path / "missing") is None
    checkpoint(tmp_path, 5, None)
    assert newest_checkpoint(tmp_path) is None


def test_a_step_is_written_over_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "progress"
    file.touch()
    monkeypatch.setenv("RDZV_PROGRESS_FILE", str(file))
    report_step(1_000_000)
    report_step(7)
    assert file.read_bytes() == b"%20d\n" % 7


def test_without_rdzvrun_a_step_is_reported_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    report_step(1)
    monkeypatch.setenv("RDZV_PROGRESS_FILE", "/nowhere/progress")
    report_step(1)


@pytest.mark.slow
def test_ranks_agree_on_a_notice_every_so_many_calls_of_their_group(tmp_path: Path) -> None:
    script = f"""
import os, sys
import torch.distributed as dist
from rdzv.worker import should_stop

rank = int(sys.argv[1])
assert not should_stop(every=3)  # There is no group, so each process answers for itself.
for number in range(2):
    dist.init_process_group("gloo", f"file://{tmp_path}/{{number}}", rank=rank, world_size=2)
    told = rank == number
    if told:
        os.environ["RDZV_NOTICE_FILE"] = __file__
    agreed = [number for number in range(7) if should_stop(every=3)]
    assert agreed == [2, 5]
    os.environ.pop("RDZV_NOTICE_FILE", None)
    dist.destroy_process_group()
try:
    should_stop(every=0)
except ValueError as error:
    assert "every=0" in str(error)
"""
    (tmp_path / "script.py").write_text(script)
    command = [sys.executable, tmp_path / "script.py"]
    ranks = [subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE) for rank in (0, 1)]
    assert [(rank.communicate(timeout=60)[1], rank.returncode) for rank in ranks] == [(b"", 0)] * 2


def test_sigterm_is_a_notice_until_the_handler_is_given_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    notice.catch_sigterm()
    assert not should_stop()
    os.kill(os.getpid(), signal.SIGTERM)
    assert should_stop()
    notice.restore_sigterm()
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.slow
def test_a_worker_ends_with_0_if_its_node_leaves_and_as_by_sigterm_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RDZV_NOTICE_FILE", str(tmp_path / "notice"))
    assert not should_stop()
    exit_if_leaving()  # Another rank got the notice.
    os.kill(os.getpid(), signal.SIGTERM)
    assert should_stop()
    with pytest.raises(SystemExit) as ended:
        exit_if_leaving()
    assert ended.value.code == 143
    (tmp_path / "notice").touch()
    with pytest.raises(SystemExit) as ended:
        exit_if_leaving()
    assert ended.value.code == 0


@pytest.mark.slow
@pytest.mark.parametrize("when", ["in the training", "while Python ends"])
def test_a_worker_whose_training_has_failed_ends_by_sigterm_at_once(when: str) -> None:
    send = "os.kill(os.getpid(), signal.SIGTERM)"
    script = f"""
import atexit, os, signal
from rdzv.worker import should_stop

if {when!r} == "while Python ends":
    atexit.register(lambda: {send})
should_stop()
if {when!r} == "in the training":
    {send}
raise RuntimeError("Connection closed by peer")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == -signal.SIGTERM
    assert "Connection closed by peer" in done.stderr
