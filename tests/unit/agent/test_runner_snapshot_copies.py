"""Copies that a runner keeps: its memory for them, and a carrier that lies, stalls or dies.

The carriers are real processes, each with a runner's loop in this one.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rdzv.agent.job.snapshots import certified
from rdzv.agent.runner.child_exits import Children
from rdzv.agent.runner.frames import RequestError, decode
from rdzv.agent.runner.loop import Loop
from rdzv.agent.runner.requests import (
    MAX_SLOT_BYTES,
    CarryCopies,
    HoldSnapshots,
    KeepCopies,
    Snapshot,
    SnapshotWatermark,
)
from rdzv.agent.runner.snapshot_copies import SnapshotCopies
from rdzv.agent.runner.snapshot_slots import SnapshotSlots
from tests.unit.agent.test_runner_snapshot_slots import MIB, Agent, Link
from tests.unit.worker.test_copy_snapshots import SIZE, asked, snapshot

pytestmark = pytest.mark.slow

PATIENCE_S = 60.0
SLOT = SIZE + 4096


class Node:
    """A runner as far as it deals with copies."""

    def __init__(self, loop: Loop, children: Children, *, free: int = 1000 * MIB) -> None:
        self.loop, self.children = loop, children
        self.agent: Any = Agent(loop)
        self.slots = SnapshotSlots(self, lambda: free)  # type: ignore[arg-type]
        self.copies = SnapshotCopies(self)  # type: ignore[arg-type]
        self.link = Link(0)
        self.slots.hold(HoldSnapshots(None))

    def give(self, token: str, pem: str = "", fingerprint: str = "", argv: Any = None) -> None:
        """Give the carrier credentials, and start it before if there is none."""
        argv = argv or (sys.executable, "-m", "rdzv.worker.copy_snapshots")
        env = dict(os.environ)
        self.copies.carry(CarryCopies(argv, env, None, None, token, fingerprint, pem))

    def carry(self, token: str, pem: str = "", fingerprint: str = "") -> None:
        """Give the carrier credentials, and wait until it uses them."""
        self.give(token, pem, fingerprint)
        self.until(lambda: self.said["carrier"] is not None)
        self.until(lambda: self.said["carrier"]["token"] == token)

    def until(self, holds: Callable[[], Any]) -> None:
        """Run the loop until something holds."""
        end = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < end, self.said
            for call in self.loop.wait(0.05):
                call()

    @property
    def said(self) -> dict[str, Any]:
        """What the agent was told last."""
        return [one for one in self.agent.told if one["type"] == "snapshots_held"][-1]

    def save(self, *steps: int) -> None:
        """Save as this node's worker does."""
        self.slots.give(self.link, SLOT)  # type: ignore[arg-type]
        _, fds = self.link.given[-1]
        for number, step in enumerate(steps):
            os.pwrite(fds[number], snapshot(step), 0)
            self.slots.note(0, number, decode(Snapshot, {**asked(step), "local_rank": 0}))

    def order(self, source: Node, step: int, **other: Any) -> None:
        """Order to fetch a step of another node."""
        wanted = {**asked(step), "local_rank": 0, "copy_of": 1, **other}
        address = {"node_id": "n1", "address": "127.0.0.1", **source.said["carrier"]}
        sources = [{**address, "snapshots": [wanted]}]
        order = {"mark": wanted["mark"], "sources": sources}
        self.copies.fetch(decode(KeepCopies, order))

    def copied(self) -> list[int]:
        """Return the steps of which copies are there."""
        return [one["mark"]["step"] for one in self.said["snapshots"] if one["copy_of"] is not None]

    def read(self) -> list[bytes]:
        """Return the copies as a worker gets them."""
        fds = self.copies.for_worker(0)
        found = [os.pread(fd, SIZE, 0) for fd in fds]
        for fd in fds:
            os.close(fd)
        return found

    def close(self) -> None:
        self.slots.close()
        for _, fds in self.link.given:
            for fd in fds:
                os.close(fd)


@pytest.fixture
def pair() -> Iterator[tuple[Node, Node]]:
    before = open_files()
    loop = Loop()
    children = Children(loop)
    children.listen()
    one, two = Node(loop, children), Node(loop, children)
    yield one, two
    one.close()
    two.close()
    one.until(lambda: not children.known())
    signal.set_wakeup_fd(-1)
    children.close()
    loop.close()
    assert open_files() <= before


def open_files() -> set[str]:
    """List what this process has open of rdzv's."""
    names = set()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # It was the list itself.
            names.add(str(link.readlink()))
    return {name for name in names if "rdzv" in name}


def test_a_copy_is_exact_and_replaced_once_a_newer_one_is(pair: tuple[Node, Node]) -> None:
    one, two = pair
    one.carry("secret"), two.carry("another")
    one.save(40, 50)
    two.order(one, 40)
    two.until(lambda: two.copied() == [40])
    assert two.read() == [bytes(snapshot(40))] and two.said["missing"] is None
    two.order(one, 50)
    assert two.copied() == [40]
    two.until(lambda: two.copied() == [50])
    assert two.read() == [bytes(snapshot(50))]


def test_the_copy_stays_if_a_newer_one_does_not_come(pair: tuple[Node, Node]) -> None:
    one, two = pair
    one.carry("secret"), two.carry("another")
    one.save(40, 50)
    two.order(one, 40)
    two.until(lambda: two.copied() == [40])
    two.order(one, 60)
    two.until(lambda: two.said["missing"] is not None)
    assert two.said["missing"]["mark"]["step"] == 60
    assert two.said["missing"]["reason"] == "n1: it does not hold part 1 of step 60 any more"
    assert two.copied() == [40] and two.read() == [bytes(snapshot(40))]


def test_steps_that_are_redone_are_forgotten_with_copies(pair: tuple[Node, Node]) -> None:
    """Else an earlier part of step 60 could be loaded beside one of the step 60 that is redone."""
    one, two = pair
    one.carry("secret"), two.carry("another")
    one.save(50, 60)
    two.save(50, 60)
    two.order(one, 60)
    two.until(lambda: two.copied() == [60])
    two.slots.begin_round(60)
    assert two.copied() == [60]
    two.slots.begin_round(50)
    assert [
        (said["mark"]["step"], said["copy_of"] is not None) for said in two.said["snapshots"]
    ] == [(50, False)]
    assert two.read() == []
    # One that is still under way is not kept either, unless its step is not redone.
    assert one.copies.carrier is not None
    os.kill(one.copies.carrier.pid, signal.SIGSTOP)
    two.order(one, 60)
    assert not two.copies.free()
    two.slots.begin_round(50)
    assert two.copies.free() and two.copies.reserved() == 0
    two.order(one, 60)
    two.slots.begin_round(60)
    assert not two.copies.free()
    os.kill(one.copies.carrier.pid, signal.SIGCONT)
    two.until(lambda: two.copied() == [60])
    assert two.read() == [bytes(snapshot(60))]


def test_with_certificates_copies_are_encrypted(pair: tuple[Node, Node]) -> None:
    one, two = pair
    (one_print, one_pem), (print_, pem) = certified(), certified()
    one.carry("secret", one_pem, one_print)
    two.carry("another", pem, print_)
    one.save(40, 50)
    two.order(one, 40)
    two.until(lambda: two.copied() == [40])
    assert two.read() == [bytes(snapshot(40))]
    port = one.said["carrier"]["port"]
    with socket.create_connection(("127.0.0.1", port)) as plain:
        plain.settimeout(PATIENCE_S)
        plain.sendall(bytes(64))
        heard = b""
        with suppress(ConnectionError):
            heard = plain.recv(4096)
        assert b"rdzvcpy" not in heard
    # Somebody else at that address, though it knows the token.
    one.agent.told[-1]["carrier"]["fingerprint"] = print_
    two.order(one, 50)
    two.until(lambda: two.said["missing"] is not None)
    reason = "n1: its certificate is not the one that it reported to the server"
    assert two.said["missing"]["reason"] == reason
    one.agent.told[-1]["carrier"]["fingerprint"] = ""
    two.order(one, 50)
    two.until(lambda: two.said["missing"]["reason"] != reason)
    assert two.said["missing"]["reason"] == "n1: it does not encrypt, and this node does"


def test_a_copy_begun_for_one_agent_is_told_the_next(pair: tuple[Node, Node]) -> None:
    one, two = pair
    one.carry("secret"), two.carry("another")
    one.save(40, 50)
    os.kill(one.copies.carrier.pid, signal.SIGSTOP)  # type: ignore[union-attr]
    two.order(one, 40)
    two.agent.hears_of_snapshots = False  # It is gone.
    os.kill(one.copies.carrier.pid, signal.SIGCONT)  # type: ignore[union-attr]
    two.until(two.copies.held)
    assert two.copied() == []
    two.slots.hold(HoldSnapshots(None))
    assert two.copied() == [40] and two.read() == [bytes(snapshot(40))]
    two.order(one, 50)
    two.until(lambda: two.copied() == [50])


def test_a_killed_carrier_is_said_and_may_be_started_again(pair: tuple[Node, Node]) -> None:
    one, two = pair
    one.carry("secret"), two.carry("another")
    one.save(40, 50)
    two.order(one, 40)
    two.until(lambda: two.copied() == [40])
    # It stands still, as it may for lack of memory, and is killed.
    assert one.copies.carrier is not None and two.copies.carrier is not None
    pid, peer = two.copies.carrier.pid, one.copies.carrier.pid
    os.kill(peer, signal.SIGSTOP)
    two.order(one, 50)
    os.kill(pid, signal.SIGKILL)
    two.until(lambda: two.said["carrier"] is None)
    assert two.said["missing"]["mark"]["step"] == 50
    assert two.copied() == [40] and two.read() == [bytes(snapshot(40))]
    two.order(one, 50)
    assert two.said["missing"]["reason"] == "the process that fetches them is not running"
    os.kill(peer, signal.SIGCONT)
    two.until(lambda: two.copies.carrier is None)
    two.carry("a third")
    two.order(one, 50)
    two.until(lambda: two.copied() == [50])


def test_what_a_carrier_reads_late_reaches_it(pair: tuple[Node, Node]) -> None:
    one, two = pair
    one.carry("secret"), two.carry("another")
    one.save(40)
    assert two.copies.carrier is not None
    os.kill(two.copies.carrier.pid, signal.SIGSTOP)
    for number in range(1000):  # More than the socket takes.
        two.give(f"{number:0>1000}")
    two.order(one, 40)
    os.kill(two.copies.carrier.pid, signal.SIGCONT)
    two.until(two.copied)
    assert two.read() == [bytes(snapshot(40))]


def test_no_carrier_is_started_before_the_one_that_is_being_killed_is_gone() -> None:
    """It might still write to memory that another one would be given."""
    started: list[tuple[Any, socket.socket]] = []

    def start(_name: str, program: Any, on_exit: Any, *, spared: bool) -> Any:
        child = SimpleNamespace(pid=len(started), kill=lambda: None, failure="")
        child.reap = lambda: on_exit(child, -9)
        started.append((child, socket.socket(fileno=os.dup(program.pass_fds[0]))))
        return child

    loop = Loop()
    children = SimpleNamespace(start=start)
    slots = SimpleNamespace(tell=lambda: None, all=list)
    runner: Any = SimpleNamespace(loop=loop, children=children, slots=slots)
    copies = SnapshotCopies(runner)
    request = CarryCopies(("carrier",), {}, None, None, "t", "", "")
    copies.carry(request)
    child, link = started[0]
    link.sendall(b"\xff" * 100)
    for call in loop.wait(0):
        call()
    copies.carry(request)
    assert len(started) == 1
    child.reap()
    copies.carry(request)
    assert len(started) == 2
    copies.close()
    for _, link in started:
        link.close()
    loop.close()


@pytest.mark.parametrize(
    "nonsense", [b"\xff" * 100, b'\0\0\0\x35{"type":"listening","port":1099511627776,"token":"x"}']
)
def test_a_carrier_that_sends_nonsense_is_killed(
    pair: tuple[Node, Node], capfd: pytest.CaptureFixture[str], nonsense: bytes
) -> None:
    """It is a process of the job, which the job may have changed."""
    one, two = pair
    one.carry("secret")
    one.save(40, 50)
    program = f"import os, sys, time; os.write(int(sys.argv[-1]), {nonsense!r}); time.sleep(600)"
    two.give("x", argv=[sys.executable, "-c", program])
    two.until(lambda: two.copies.carrier is None)
    said = "cannot exchange copies of snapshots: the process that fetches them closed its socket"
    assert capfd.readouterr().err == f"rdzv: warning: {said}\n"
    two.order(one, 40)
    assert two.said["missing"]["reason"] == "the process that fetches them is not running"


def test_copies_have_the_memory_that_a_limit_leaves(pair: tuple[Node, Node]) -> None:
    """What is whole is not given up for what is not; once it is outdated, its memory is used."""
    one, two = pair
    one.carry("secret"), two.carry("another")
    one.save(40, 50)
    two.slots.hold(HoldSnapshots(8 * MIB))
    two.order(one, 40)
    two.until(lambda: two.copied() == [40])
    two.order(one, 50)
    reason = two.said["missing"]["reason"]
    assert reason.startswith("there is no memory for them: a copy needs 4.5 MB, but only")
    assert two.copied() == [40]
    two.slots.announce(decode(SnapshotWatermark, {"mark": asked(50)["mark"]}))
    two.order(one, 50)
    two.until(lambda: two.copied() == [50])
    assert two.said["missing"] is None


def wanted(size: int) -> dict[str, Any]:
    """Return a source with one snapshot of this size, all the rest of which is in order."""
    text = dict.fromkeys(("node_id", "address", "token", "fingerprint"), "x")
    mark = {"lineage": 1, "step": 40, "series": "a", "shards": 1}
    snapshot = {"local_rank": 0, "copy_of": 1, "shard": 0, "mark": mark, "bytes": size}
    return {**text, "port": 1, "snapshots": [{**snapshot, "digest": ""}]}


@pytest.mark.parametrize(
    ("sources", "reason"),
    [
        (None, "sources"),
        ([], "sources: expected 1 to"),
        ([{"node_id": 1}], "node_id"),
        (["n1"], "sources: expected an object, got 'n1'"),
        ([wanted(-1)], "bytes: expected Number, got -1"),
        ([wanted(MAX_SLOT_BYTES + 1)], "bytes: expected at most"),
        ([wanted(9), wanted(9)], "sources: expected 1 to"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(
    pair: tuple[Node, Node], sources: object, reason: str
) -> None:
    with pytest.raises(RequestError, match=reason):
        pair[0].copies.fetch(decode(KeepCopies, {"mark": asked()["mark"], "sources": sources}))


def test_links_offer_copies_to_workers_that_know_them(pair: tuple[Node, Node]) -> None:
    one, two = pair
    one.carry("secret"), two.carry("another")
    one.save(40, 50)
    two.order(one, 40)
    two.until(lambda: two.copied() == [40])
    for with_copies in (False, True):
        two.slots.give(two.link, 0, with_copies=with_copies)  # type: ignore[arg-type]
        # It has saved nothing itself.
        assert two.link.refused[-1] == "no snapshot is held"
        assert len(two.link.copies) == with_copies
    for fd in two.link.copies:
        os.close(fd)
