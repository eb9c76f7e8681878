"""Memory for snapshots: how much a worker gets, for how long, and what the agent is told."""

from __future__ import annotations

import doctest
import errno
import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rdzv.agent.runner import snapshot_slots
from rdzv.agent.runner.agent_link import AgentLink
from rdzv.agent.runner.frames import RequestError, decode
from rdzv.agent.runner.loop import Loop
from rdzv.agent.runner.requests import HoldSnapshots, Snapshot, SnapshotWatermark, StateMark
from rdzv.agent.runner.snapshot_copies import SnapshotCopies
from rdzv.agent.runner.snapshot_slots import (
    REPORTS_A_SECOND,
    REPORTS_AT_ONCE,
    SnapshotSlots,
)

MIB = 1 << 20
MARK = StateMark(3, 10, "abc", 1)


def saved(step: int = 10) -> Snapshot:
    return Snapshot(0, replace(MARK, step=step), 0, MIB, "d")


SAVED = saved()


class Link:
    """The part of a worker's link that slots use."""

    def __init__(self, local_rank: int) -> None:
        self.local_rank = local_rank
        self.given: list[tuple[int, list[int]]] = []
        self.refused: list[str] = []
        self.copies: list[int] = []
        self.watermarks: list[Any] = []
        self.pinned: list[Any] = []

    def tell(self, kind: str, fds: Sequence[int] = (), **fields: Any) -> None:
        if kind == "slots":
            self.given.append((fields["bytes"], list(fds[:2])))
            self.copies += fds[2:]
        elif kind == "no_slots":
            self.refused.append(fields["reason"])
            self.copies += fds
        elif kind == "watermark":
            self.watermarks.append(fields)
        else:
            self.pinned.append(fields["mark"])

    def inodes(self) -> list[int]:
        """The files that it was given last."""
        return [os.fstat(fd).st_ino for fd in self.given[-1][1]]


class Agent(AgentLink):
    """The agent in charge; it records the events it receives."""

    def __init__(self, loop: Loop) -> None:
        super().__init__(SimpleNamespace(loop=loop))  # type: ignore[arg-type]
        self.in_charge = True
        self.told: list[dict[str, Any]] = []

    def send(self, message: Any) -> None:
        self.told.append(dict(message))


class Story:
    def __init__(self, free: int | None = 100 * MIB) -> None:
        self.free = free
        self.loop = Loop()
        self.agent = Agent(self.loop)
        self.slots = SnapshotSlots(self, lambda: self.free)  # type: ignore[arg-type]
        self.copies: Any = SnapshotCopies(self)  # type: ignore[arg-type]
        self.links: list[Link] = []

    def ask(self, local_rank: int, size: int) -> Link:
        self.links.append(Link(local_rank))
        self.slots.give(self.links[-1], size)  # type: ignore[arg-type]
        return self.links[-1]


@pytest.fixture
def story() -> Iterator[Story]:
    made = Story()
    yield made
    made.slots.close()
    for link in made.links:
        for _, fds in link.given:
            for fd in fds:
                os.close(fd)
    names = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # It was the limit of this folder.
            names.append(str(link.readlink()))
    assert not [name for name in names if "rdzv snapshot" in name]


@pytest.mark.slow
def test_the_examples_hold() -> None:
    assert doctest.testmod(snapshot_slots).failed == 0


def test_a_worker_can_write_to_its_slots_and_change_nothing_else_of_them(story: Story) -> None:
    link = story.ask(0, MIB)
    ((size, fds),) = link.given
    assert size == MIB and not link.watermarks
    for fd in fds:
        assert os.pwrite(fd, b"x", MIB - 1) == 1
        assert not os.get_inheritable(fd)
        for length in (MIB - 1, MIB + 1):
            with pytest.raises(OSError, match="not permitted") as refused:
                os.ftruncate(fd, length)
            assert refused.value.errno == errno.EPERM


def test_the_next_worker_of_the_same_local_rank_gets_the_same_slots(story: Story) -> None:
    first, other = story.ask(0, MIB), story.ask(1, MIB)
    assert story.ask(0, MIB // 2).inodes() == first.inodes() != other.inodes()
    # Slots are given to load from once they hold something.
    assert story.ask(0, 0).refused == ["no snapshot is held"]
    story.slots.note(0, 1, None)
    assert story.ask(0, 0).inodes() == first.inodes()
    assert story.ask(1, 0).refused and story.ask(2, 0).refused


def test_slots_too_small_are_held_until_the_new_ones_are_filled(story: Story) -> None:
    small = story.ask(0, MIB).inodes()
    large = story.ask(0, 2 * MIB).inodes()
    assert not set(small) & set(large)
    # They were empty, so they are gone.
    larger = story.ask(0, 3 * MIB).inodes()
    story.slots.note(0, 0, SAVED)
    largest = story.ask(0, 4 * MIB).inodes()
    assert story.ask(0, 0).inodes() == larger
    story.slots.note(0, 0, SAVED)
    assert story.ask(0, 0).inodes() == largest


def test_slots_without_a_snapshot_are_not_held_beside_new_ones(story: Story) -> None:
    story.slots.hold(HoldSnapshots(24 * MIB))
    first = ask_and_close(story, 1)
    story.slots.note(0, 0, SAVED)
    for _ in range(2):
        for size in (2, 3, 4, 5):
            ask_and_close(story, size)
            # Reported, but without a snapshot.
            story.slots.note(0, 0, None)
        # Those that hold a snapshot, and the newest.
        assert held_in_memory() == 2 * (1 + 5) * MIB
        assert ask_and_close(story, 0) == first
    assert story.ask(0, 8 * MIB).refused
    story.slots.note(0, 0, SAVED)
    assert held_in_memory() == 2 * 5 * MIB


def ask_and_close(story: Story, mib: int) -> list[int]:
    """Ask for slots as a worker that has ended since; return their files."""
    link = story.ask(0, mib * MIB)
    found = link.inodes()
    for fd in link.given.pop()[1]:
        os.close(fd)
    return found


def held_in_memory() -> int:
    """Return the size of all the slots that this process holds."""
    found = {}
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            if "rdzv snapshot" in str(fd.readlink()):
                stat = fd.stat()
                found[stat.st_ino] = stat.st_size
    return sum(found.values())


def reports(story: Story) -> list[dict[str, Any]]:
    return [told for told in story.agent.told if told["type"] == "snapshots_held"]


def test_many_changes_share_a_report_and_the_last_is_never_missed(story: Story) -> None:
    story.ask(0, MIB)
    story.slots.hold(HoldSnapshots(None))
    story.agent.told.clear()
    begun = time.monotonic()
    for round_ in range(2):
        for step in range(1000):
            story.slots.note(0, 0, saved(1000 * round_ + step))
        most = REPORTS_AT_ONCE + (time.monotonic() - begun) * REPORTS_A_SECOND + 1
        assert round_ < len(reports(story)) <= most
        (call,) = story.loop.due(time.monotonic() + 1.0)
        call()
        assert list(story.loop.due(math.inf)) == []
        assert reports(story)[-1]["snapshots"][0]["mark"]["step"] == 1000 * round_ + 999


def test_a_new_agent_is_told_at_once(story: Story) -> None:
    story.ask(0, MIB)
    story.slots.hold(HoldSnapshots(None))
    for step in range(1000):
        story.slots.note(0, 0, saved(step))
    story.agent.told.clear()
    story.slots.hold(HoldSnapshots(None))
    assert reports(story)[0]["snapshots"][0]["mark"]["step"] == 999


@pytest.mark.parametrize(
    ("free", "limit", "asked", "reason"),
    [
        # Half of what is free at first, for all workers together.
        (100, None, (12, 13), ""),
        (100, None, (12, 14), "need 29.4 MB, but only 27.3 MB of the 52.4 MB that snapshots may"),
        (100, None, (12, 14), "may use on this node are left"),
        (None, None, (1000,), ""),
        (None, 4, (2,), ""),
        (None, 4, (2, 1), "only 0.0 MB of the 4.2 MB that snapshots may use on this node are left"),
        (100, 0, (1,), "of the 0.0 MB"),
        # Memory handed to workers counts as used, though no page of it exists yet.
        (50, 60, (12, 12), ""),
        (50, 60, (12, 14), "two slots need 29.4 MB, but only 27.3 MB of memory are free"),
    ],
)
def test_memory_is_bounded(
    story: Story, free: int | None, limit: int | None, asked: tuple[int, ...], reason: str
) -> None:
    story.free = None if free is None else free * MIB
    story.slots.hold(HoldSnapshots(None if limit is None else limit * MIB))
    links = [story.ask(rank, size * MIB) for rank, size in enumerate(asked)]
    assert all(link.given for link in links[:-1])
    assert bool(links[-1].refused) == bool(reason)
    if reason:
        assert reason in links[-1].refused[0]
        told = story.agent.told[-1]
        assert (told["type"], told["reason"]) == ("snapshot_refused", links[-1].refused[0])


@pytest.mark.parametrize("has_spare", [True, False])
def test_memory_that_holds_no_copy_is_freed_for_slots(story: Story, has_spare: bool) -> None:
    class Copies:
        """Copies of other nodes' snapshots, all of whose memory may be spare."""

        held = 9 * MIB
        spare = held if has_spare else 0

        def free(self) -> bool:
            freed, self.spare = self.spare, 0
            self.held -= freed
            return freed > 0

        def reserved(self) -> int:
            return self.held

        def untouched(self) -> int:
            return 0

        def send_slots(self, *_: object) -> None: ...

    story.free = None
    story.slots.hold(HoldSnapshots(10 * MIB))
    none, story.copies = story.copies, Copies()
    assert bool(story.ask(0, 4 * MIB).refused) is not has_spare
    story.copies = none


@pytest.mark.parametrize("call", ["memfd_create", "ftruncate"])
def test_a_lack_of_descriptors_or_of_memory_is_said(
    story: Story, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    story.slots.hold(HoldSnapshots(None))
    with monkeypatch.context() as patched:
        patched.setattr(os, call, lambda *_: (_ for _ in ()).throw(OSError(24, "Too many open")))
        (reason,) = story.ask(0, MIB).refused
    assert reason.startswith("Too many open (this process may have ")
    assert story.agent.told[-1]["reason"] == reason
    assert story.ask(0, MIB).given


def test_only_an_agent_that_has_asked_is_told_and_first_of_all_that_is_held(story: Story) -> None:
    story.ask(0, MIB)
    story.slots.note(0, 0, SAVED)
    assert not story.agent.told
    story.slots.hold(HoldSnapshots(None))
    first = asdict(SAVED)
    more = {"carrier": None, "missing": None}
    assert story.agent.told == [{"type": "snapshots_held", "snapshots": [first], **more}]
    # A part that is no complete state is held but not reported; nor is a slot being written.
    story.ask(1, MIB)
    story.slots.note(1, 0, None)
    newer = saved(20)
    story.slots.note(0, 1, newer)
    second = asdict(saved(20))
    assert story.agent.told[-1]["snapshots"] == [first, second]
    story.slots.note(0, 0, None)
    assert story.agent.told[-1]["snapshots"] == [second]
    # A worker that has asked for no memory cannot have saved anything.
    count = len(story.agent.told)
    story.slots.note(7, 0, SAVED)
    assert len(story.agent.told) == count


def test_workers_hear_which_step_is_whole(story: Story) -> None:
    link = story.ask(0, MIB)
    given_up = replace(MARK, step=40)
    told = {"mark": asdict(MARK), "given_up": None}
    story.slots.announce(SnapshotWatermark(MARK))
    assert link.watermarks == [told] == story.ask(0, MIB).watermarks
    # What is given up is so only in this round.
    link = story.ask(0, MIB)
    story.slots.announce(SnapshotWatermark(MARK, given_up))
    assert link.watermarks[-1]["given_up"] == asdict(given_up)
    assert story.ask(1, MIB).watermarks[-1]["given_up"] == asdict(given_up)
    story.slots.begin_round(None)
    assert story.ask(2, MIB).watermarks == [told]


@pytest.mark.parametrize("limit", [-1, "1", 1 << 60, True])
def test_a_limit_that_is_none_is_refused(story: Story, limit: object) -> None:
    with pytest.raises(RequestError, match="limit_bytes"):
        story.slots.hold(decode(HoldSnapshots, {"limit_bytes": limit}))
    assert not story.agent.hears_of_snapshots


def test_what_is_written_to_disk_is_pinned_also_for_workers_that_come_later(story: Story) -> None:
    first = story.ask(0, MIB)
    for number, step in enumerate((10, 20)):
        story.slots.note(0, number, saved(step))
    mark = saved(20).mark
    (fd,) = story.slots.copies_of(mark)
    assert os.fstat(fd).st_ino == first.inodes()[1]
    os.close(fd)
    assert story.slots.copies_of(replace(mark, series="other")) == ()
    story.slots.pin(mark)
    assert first.pinned == [asdict(mark)]
    assert story.ask(0, 0).pinned == [asdict(mark)]
    story.slots.pin(None)
    assert story.links[-1].pinned == [asdict(mark), None]
