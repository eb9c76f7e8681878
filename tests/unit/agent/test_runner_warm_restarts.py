"""When a runner starts the zygote: which workers' reports it accepts, and how many."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from rdzv.agent.runner import zygote_process
from rdzv.agent.runner.loop import Loop
from rdzv.agent.runner.zygote_process import (
    MAX_REPORTS_PER_WORKER,
    SETTLE_S,
    YOUNG_S,
    WarmRestarts,
)
from tests.support.lingering import LINGER_S, lingering


class Zygote:
    def __init__(self) -> None:
        self.spec = SimpleNamespace(after_import=True, identity=None)
        self.begun = self.given_up = False
        self.reason = ""

    def begin(self) -> None:
        self.begun = True

    def give_up_for_good(self, reason: str) -> None:
        self.given_up, self.reason = True, reason


class Watched:
    """Warm restarts of a round of two workers, which report."""

    def __init__(self) -> None:
        self.loop, self.zygote = Loop(), Zygote()
        self.restarts = WarmRestarts(self.loop, self.zygote)  # type: ignore[arg-type]
        self.restarts.begin_round(2)

    def report(self, changed: object = ()) -> None:
        assert self.restarts.report_to is not None
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as worker:
            data = json.dumps({"changed": changed}).encode()
            worker.sendto(data, f"\0{self.restarts.report_to}")
        self.turn()

    def turn(self) -> None:
        for call in self.loop.wait(0):
            call()

    def begins_within(self, seconds: float) -> bool:
        """Let time pass. Return whether the zygote has begun."""
        for call in self.loop.due(time.monotonic() + seconds):
            call()
        return self.zygote.begun


@pytest.fixture
def watched() -> Iterator[Watched]:
    made = Watched()
    yield made
    made.restarts.close()
    made.loop.close()


def exited(watched: Watched, code: int, age_s: float) -> None:
    child: Any = SimpleNamespace(pid=4711)
    watched.restarts.note_exit(child, code, time.monotonic() - age_s)


def test_the_first_import_waits_for_the_others_but_not_for_ever(watched: Watched) -> None:
    watched.report()
    watched.report()  # The same process again is still one worker.
    assert not watched.begins_within(SETTLE_S / 2)
    assert watched.begins_within(SETTLE_S)


def test_when_all_have_imported_it_starts_at_once() -> None:
    alone = Watched()
    alone.restarts.begin_round(1)
    alone.report()
    assert alone.begins_within(0)
    alone.restarts.close()


def test_workers_wait_for_a_zygote_that_is_due_before_a_cold_start_would_be(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    monkeypatch.setattr(zygote_process, "time", SimpleNamespace(monotonic=lambda: now))
    watched.restarts.begin_round(1)
    assert watched.restarts.worth_waiting_s == 0
    now += 3
    watched.report()
    assert watched.begins_within(3)
    waits = []
    for age_s in (0, 2, 4, 6):
        watched.restarts.begin_round(1)  # The worker has failed.
        waits.append((age_s, round(watched.restarts.worth_waiting_s, 3)))
        now += 2
    assert waits == [(0, 0), (2, 0), (4, 2), (6, 0)]


@pytest.mark.slow
def test_reports_are_received_up_to_a_number_and_again_in_the_next_round(watched: Watched) -> None:
    address = watched.restarts.report_to
    watched.restarts.begin_round(2)
    assert watched.restarts.report_to == address
    for _ in range(2 * MAX_REPORTS_PER_WORKER - 1):
        watched.report(changed=7)  # Nonsense counts as well.
    assert watched.restarts.report_to == address
    watched.report()
    assert watched.restarts.report_to is None
    watched.restarts.begin_round(2)
    assert watched.restarts.report_to not in (None, address)
    # A round that has used some of its reports leaves all of them to the next one.
    address = watched.restarts.report_to
    for _ in range(2):
        for _ in range(2 * MAX_REPORTS_PER_WORKER - 1):
            watched.report(changed=7)
        watched.restarts.begin_round(2)
    assert watched.restarts.report_to == address


REPORTS = """
import socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as worker:
    worker.sendto(b'{"changed": []}', "\\0" + sys.argv[1])
"""


@pytest.mark.slow
def test_imports_of_the_round_before_do_not_count(watched: Watched) -> None:
    address = watched.restarts.report_to
    assert address is not None
    subprocess.run([sys.executable, "-S", "-c", REPORTS, address], check=True, timeout=60)
    watched.turn()
    watched.restarts.begin_round(2)
    watched.report()
    assert not watched.begins_within(0), "one of two has imported"


def test_a_change_that_a_fork_would_not_see_is_named(watched: Watched) -> None:
    watched.report(changed=["OMP_NUM_THREADS"])
    assert watched.zygote.reason.startswith("the script changes 'OMP_NUM_THREADS' before it")
    assert watched.restarts.report_to is None
    watched.restarts.begin_round(2)
    assert watched.restarts.report_to is None


@pytest.mark.parametrize(("code", "age_s"), [(1, 0), (-9, 0), (-11, 60)])
def test_other_exits_show_nothing_of_a_fork(watched: Watched, code: int, age_s: float) -> None:
    exited(watched, code, age_s)
    assert not watched.zygote.given_up


def test_a_crash_soon_after_the_fork_is_the_last(watched: Watched) -> None:
    exited(watched, -11, 1)
    assert watched.zygote.reason.startswith("a warm worker, pid 4711, died of SIGSEGV 1.0 s after")


def test_a_report_with_a_descriptor_keeps_nobody_and_ends_the_reports(watched: Watched) -> None:
    sent, peer = lingering()
    address = f"\0{watched.restarts.report_to}"
    with peer, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as worker:
        worker.connect(address)
        begun = time.monotonic()
        socket.send_fds(worker, [b"{}"], [sent.fileno()])
        sent.close()
        watched.turn()
        assert time.monotonic() - begun < LINGER_S / 4
    assert watched.restarts.report_to is None and not watched.zygote.given_up


def test_a_cold_restart_says_why(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    assert watched.restarts.cold_because == ""  # The first round is no restart.
    watched.restarts.begin_round(2)
    began = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: began + 20.2)
    assert watched.restarts.cold_because.startswith("this job began 20 s ago on this node; ")
    monkeypatch.setattr(time, "monotonic", lambda: began + YOUNG_S)
    assert watched.restarts.cold_because == ""


def test_a_restart_with_another_reason_tells_no_age(watched: Watched) -> None:
    watched.restarts.begin_round(2)
    watched.zygote.begun = True
    assert watched.restarts.cold_because == ""
    watched.zygote.begun, watched.zygote.given_up = False, True
    assert watched.restarts.cold_because == ""
