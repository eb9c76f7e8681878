"""What a worker that stays takes into its next round, and what it leaves behind."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rdzv.worker import session as session_module
from rdzv.worker.groups import Options
from rdzv.worker.link import Go
from rdzv.worker.rounds import Round, RoundOver, WorkerError
from rdzv.worker.session import Session

CUT = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer"


class Link:
    """The link of a worker whose runner always says that the round is over."""

    is_closed = False

    def __init__(self) -> None:
        self.resumed_as: list[dict[str, Any]] = []

    def is_over(self) -> bool:
        return True

    def resumed(self, **what: Any) -> None:
        self.resumed_as.append(what)


class Groups:
    """Groups of a round, without torch."""

    is_unwatched = False

    def __init__(self, round_: Round, *_: object) -> None:
        self.round = round_
        self.store = SimpleNamespace(add=lambda *_: 1, set=lambda *_: None, wait=lambda *_: None)

    def open(self) -> None:
        pass

    def watch(self) -> None:
        pass

    def close(self) -> None:
        pass


class Worker:
    """A session in which the next round follows each that is over.

    It also stands in for the snapshots that the session's process has resumed from.
    """

    not_loaded: tuple[str, ...] = ()

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.redone: list[bool] = []
        self.given_up = 0
        numbers = iter(range(9))
        sealing = SimpleNamespace(
            step=3, is_redo=False, begin_round=lambda *_: None, end_round=lambda: None
        )
        state = SimpleNamespace(
            _sealing=sealing, _snapshot_every=None, _verify_every=None, _on_park=[]
        )
        monkeypatch.setattr(session_module, "RoundGroups", Groups)
        monkeypatch.setattr(session_module, "Parts", lambda *_: None)
        monkeypatch.setattr(session_module, "free_groups", lambda *_: None)
        monkeypatch.setattr(session_module, "refuse_groups_from_outside", lambda: None)
        monkeypatch.setattr(
            session_module,
            "round_of",
            lambda _, kept=False: Round(next(numbers), 0, 2, 0, 0, "", kept),
        )
        monkeypatch.setattr(session_module, "prepare", lambda _: "")
        monkeypatch.setattr(session_module, "heal", self._heal)
        monkeypatch.setattr(session_module, "Resuming", lambda *_: self)
        monkeypatch.setattr(Session, "park", lambda _, over: Go(over.round.number + 1, {}))
        monkeypatch.setattr(Session, "has_returned", False)
        self.session = Session(state, Options("gloo", None), Link())  # type: ignore[arg-type]
        self.session.snapshots = SimpleNamespace(  # type: ignore[assignment]
            held=None, begin_round=lambda _: None
        )

    def _heal(self, sealing: Any, _: str, round_: Round, *given: Any) -> Any:
        self.redone.append(sealing.is_redo)
        if not round_.kept:
            given[2]()
        return SimpleNamespace(step=3, source=0, received=False)

    def give_up(self) -> None:
        self.given_up += 1

    def run(self, *rounds: Callable[[], Any]) -> Any:
        return self.session.run(lambda round_: rounds[round_.number]())


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    yield Worker(monkeypatch)


def test_each_round_is_written_to_its_own_files(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def ends() -> None:
        worker.session.check(between_steps=True)

    def writes() -> None:
        os.write(1, b"x")
        (tmp_path / "round_1").rename(tmp_path / "former")
        (tmp_path / "round_1").write_text("no folder")
        ends()

    log = str(tmp_path / "round_1" / "out")
    monkeypatch.setattr(Session, "park", lambda *_: Go(1, {}, stdout=log))
    before = os.dup(1)
    try:
        with pytest.raises(OSError, match="round_1"):
            worker.run(ends, writes)
    finally:
        os.dup2(before, 1)
        os.close(before)
    assert (tmp_path / "former" / "out").read_text() == "x"


def test_a_round_that_ended_within_a_step_is_followed_by_the_same_step(worker: Worker) -> None:
    """The flag that the round before ended between steps is not taken along."""

    def between_steps() -> None:
        worker.session.check(between_steps=True)

    def in_a_collective() -> None:
        raise RuntimeError(CUT)

    def caught_and_gone_on() -> None:
        with pytest.raises(RoundOver):
            worker.session.check(between_steps=True)
        worker.session.check(between_steps=False)

    def last() -> None:
        raise ValueError("of the script")

    with pytest.raises(ValueError, match="of the script"):
        worker.run(between_steps, in_a_collective, between_steps, caught_and_gone_on, last)
    # Of new processes nothing is redone.
    assert worker.redone == [False, False, True, False, True]


@pytest.mark.parametrize(("rounds", "given_up"), [(0, 1), (1, 0)])
def test_snapshots_are_given_up_by_the_round_that_has_loaded_them_and_by_no_later_one(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, rounds: int, given_up: int
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise WorkerError("no part of this shape is held")

    monkeypatch.setattr(session_module, "add_parts", refuse)
    with pytest.raises(WorkerError):
        worker.run(
            *[lambda: worker.session.check(between_steps=True)] * rounds,
            lambda: worker.session.add({}, hold_last=True),
        )
    assert worker.given_up == given_up
