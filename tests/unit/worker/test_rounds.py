"""An exception that a peer may have caused is told from the script's own."""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from rdzv.worker.rounds import follows_from_cut, is_suspect, round_of

GLOO = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
    "[127.0.0.1]:7564. This is typically caused by a remote worker crashing."
)


def caught(raising: Callable[[], object]) -> BaseException:
    with pytest.raises(BaseException) as info:
        raising()
    return info.value


def from_collective(error: BaseException, *, hidden: bool = False) -> Callable[[], None]:
    def raising() -> None:
        try:
            raise RuntimeError(GLOO)
        except RuntimeError as cause:
            if hidden:
                raise error from None
            raise error from cause

    return raising


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(GLOO),
        RuntimeError(f"Got the following error when running the callback: RuntimeError: {GLOO}"),
        RuntimeError("Gloo connectFullMesh failed with ..."),
        RuntimeError("Application timeout caused pair closure"),
        RuntimeError("NCCL communicator was aborted on rank 1."),
        caught(from_collective(ValueError("wrapped"))),
        caught(from_collective(ValueError("wrapped"), hidden=True)),
    ],
)
def test_a_collective_anywhere_in_the_chain_is_suspect(error: BaseException) -> None:
    assert is_suspect(error)
    assert follows_from_cut(error)


@pytest.mark.parametrize(
    "error",
    [
        ValueError(GLOO),
        RuntimeError("DataLoader worker (pid 4711) is killed by signal: Killed."),
        RuntimeError("CUDA out of memory"),
        RuntimeError("the file gloo/notes.txt is missing"),
        ConnectionResetError("Connection closed by peer"),
        caught(from_collective(SystemExit(3))),
        caught(from_collective(KeyboardInterrupt())),
    ],
)
def test_anything_else_is_the_scripts_own(error: BaseException) -> None:
    assert not is_suspect(error)
    assert not follows_from_cut(error)


def test_an_error_of_torchs_own_type_for_collectives_is_suspect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class DistError(RuntimeError):
        """As in torch.distributed, which this test does not import."""

    monkeypatch.setitem(sys.modules, "torch.distributed", SimpleNamespace(DistError=DistError))
    assert is_suspect(DistError("the peer has gone"))
    assert not is_suspect(RuntimeError("the peer has gone"))


def test_a_group_that_was_aborted_follows_from_the_cut_alone() -> None:
    error = ValueError("Default process group has not been initialized, please call init ...")
    assert follows_from_cut(error)
    assert not is_suspect(error)


class Handler:
    def __call__(self, number: int, frame: object) -> None:
        raise RuntimeError(GLOO)

    def method(self, number: int, frame: object) -> None:
        self(number, frame)


def function(number: int, frame: object) -> None:
    raise RuntimeError(GLOO)


@pytest.mark.parametrize(
    "handler", [function, Handler(), Handler().method, functools.partial(function)]
)
def test_what_a_signal_handler_raises_is_never_suspect(
    handler: Callable[[int, object], None],
) -> None:
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        error = caught(lambda: os.kill(os.getpid(), signal.SIGUSR1))
        assert not is_suspect(error)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_node_leaves_once_its_notice_is_there(tmp_path: Path) -> None:
    notice = tmp_path / "notice"
    told, untold = round_of({"RDZV_NOTICE_FILE": str(notice)}), round_of({})
    assert not told.leaving
    assert not untold.leaving
    notice.touch()
    assert told.leaving
    assert not untold.leaving
