"""Memory for snapshots: two slots per LOCAL_RANK, which outlive workers and agents.

A slot is a memfd whose size is sealed. A worker requests its two slots over its link
(worker.py), writes its state into the two alternately, and reports each snapshot. The runner
never reads a slot; it only records the reports for the agent. A worker started later with the same
LOCAL_RANK gets the same slots. Slots are freed when the runner ends, and have no name by which
another process could open them.

Copies of other nodes' snapshots are kept separately (snapshot_copies.py).

The worker allocates the pages in a thread, because that takes about one second per gigabyte and
would block the runner. Slots therefore count as used from the moment they are handed over.
"""

from __future__ import annotations

import fcntl
import os
import time
from dataclasses import asdict, replace

from .descriptors import close_fds, dup_fds
from .frames import RequestError
from .requests import MAX_SLOT_BYTES
from .spawn import reason_of
from .system import free_bytes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from .requests import HoldSnapshots, Snapshot, SnapshotWatermark, StateMark
    from .runner import Runner
    from .worker import Worker

SLOTS = 2
REPORTS_AT_ONCE = 20
REPORTS_A_SECOND = 50.0
"""Each report lists the snapshots of all workers, so changes that come faster share one."""

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class NoSlotsError(Exception):
    """Raised if no slots can be provided; the message gives the reason."""


class Slots:
    """The two slots of one LOCAL_RANK."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.fds: list[int] = []
        self.snapshots: list[Snapshot | None] = [None] * SLOTS
        self.is_used = False
        try:
            for number in range(SLOTS):
                self.fds.append(memory_file(f"rdzv snapshot {number}", size))
        except OSError:
            self.close()
            raise

    @property
    def untouched(self) -> int:
        return SLOTS * self.size - sum(512 * os.fstat(fd).st_blocks for fd in self.fds)

    def close(self) -> None:
        close_fds(self.fds)
        self.fds = []


def memory_file(name: str, size: int) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd


class SnapshotSlots:
    """Manages the slots of all workers of this runner."""

    def __init__(self, runner: Runner, free: Callable[[], int | None] = free_bytes) -> None:
        """Report to the agent on request. `free` returns the free memory, or None if unknown."""
        self._runner = runner
        self._free = free
        self._slots: dict[int, Slots] = {}
        self._replaced: dict[int, Slots] = {}
        """Slots that have become too small, kept until the larger ones hold a snapshot."""
        self._links: dict[int, Worker] = {}
        self._limit: int | None = None
        self._watermark: SnapshotWatermark | None = None
        self._pinned: StateMark | None = None
        self._reports_left = float(REPORTS_AT_ONCE)
        self._counted_at = time.monotonic()

    # ------------------------------------------------------------------ the agent's requests

    def hold(self, request: HoldSnapshots) -> None:
        if (limit := request.limit_bytes) is not None:
            if limit > MAX_SLOT_BYTES:
                raise RequestError(f"limit_bytes: expected 0 to {MAX_SLOT_BYTES}, got {limit}")
            self._limit = limit
        self._runner.agent.hears_of_snapshots = True
        self._report()

    def announce(self, request: SnapshotWatermark) -> None:
        self._watermark = request
        for link in self._links.values():
            self._send_watermark(link)

    def _send_watermark(self, link: Worker) -> None:
        if self._watermark is not None:
            link.tell("watermark", **asdict(self._watermark))

    def _send_pinned(self, link: Worker) -> None:
        link.tell("pinned", mark=None if self._pinned is None else asdict(self._pinned))

    def begin_round(self, resume_step: int | None) -> None:
        """Forget the steps that the last round gave up, and the steps that will be redone.

        Kept workers, if any, continue from `resume_step` and redo the later steps. They clear their
        own slots once all of them have reached that step. Copies are freed, so that an earlier part
        is never loaded together with a part of a redone step.
        """
        if self._watermark is not None:
            self._watermark = replace(self._watermark, given_up=None)
        if resume_step is None:
            return
        for slots in (*self._slots.values(), *self._replaced.values()):
            for number, snapshot in enumerate(slots.snapshots):
                if snapshot is not None and snapshot.mark.step > resume_step:
                    slots.snapshots[number] = None
        self._runner.copies.drop_after(resume_step)
        self.tell()

    # ------------------------------------------------------------------ writing to disk

    def copies_of(self, mark: StateMark) -> tuple[int, ...]:
        found = [
            fd
            for slots in (*self._slots.values(), *self._replaced.values())
            for fd, one in zip(slots.fds, slots.snapshots, strict=True)
            if one is not None and one.mark == mark
        ]
        return dup_fds(*found)

    def has_memory_for_copies(self, fds: Iterable[int]) -> bool:
        try:
            self.refuse_too_large("a copy needs", sum(os.fstat(fd).st_size for fd in fds))
        except NoSlotsError:
            return False
        return True

    def pin(self, mark: StateMark | None) -> None:
        """Forbid workers to overwrite a step, until the next call. None forbids nothing."""
        self._pinned = mark
        for link in self._links.values():
            self._send_pinned(link)

    # ------------------------------------------------------------------ the workers' frames

    def give(self, link: Worker, size: int, *, with_copies: bool = False) -> None:
        """Give a worker slots of at least `size` bytes, or the reason for refusing them.

        With 0, the worker gets the slots that already hold data. If its existing slots are too
        small, it gets new ones, and the smaller ones are freed once the new ones hold a snapshot.
        With `with_copies`, it also gets the copies of other nodes' snapshots that are intended for
        it.
        """
        self._links[link.local_rank] = link
        copies: tuple[int, ...] = ()
        try:
            if with_copies:
                copies = self._runner.copies.for_worker(link.local_rank)
            slots = self._reserved(link.local_rank, size) if size else self._used(link.local_rank)
            fds = dup_fds(*slots.fds)
        except (NoSlotsError, OSError) as error:
            reason = reason_of(error) if isinstance(error, OSError) else str(error)
            link.tell("no_slots", copies, reason=reason)
            agent = self._runner.agent
            if size and agent.hears_of_snapshots:
                agent.tell("snapshot_refused", local_rank=link.local_rank, reason=reason)
        else:
            self._send_watermark(link)
            if self._pinned is not None:
                self._send_pinned(link)
            link.tell("slots", (*fds, *copies), bytes=slots.size)

    def note(self, local_rank: int, number: int, snapshot: Snapshot | None) -> None:
        slots = self._slots.get(local_rank)
        if slots is None:
            return
        slots.is_used, slots.snapshots[number] = True, snapshot
        replaced = self._replaced.get(local_rank)
        if snapshot is not None and replaced is not None:
            del self._replaced[local_rank]
            replaced.close()
        self.tell()

    # ------------------------------------------------------------------ the copies

    def all(self) -> Iterator[tuple[int, int, list[int]]]:
        for local_rank, slots in self._slots.items():
            yield local_rank, slots.size, slots.fds

    def is_outdated(self, mark: StateMark) -> bool:
        if self._watermark is None:
            return False
        known = self._watermark.mark
        return (known.lineage, known.step) > (mark.lineage, mark.step)

    # ------------------------------------------------------------------ memory

    def close(self) -> None:
        self._runner.copies.close()
        for slots in (*self._slots.values(), *self._replaced.values()):
            slots.close()

    def _used(self, local_rank: int) -> Slots:
        slots = self._replaced.get(local_rank) or self._slots.get(local_rank)
        if slots is None or not slots.is_used:
            raise NoSlotsError("no snapshot is held")
        return slots

    def _reserved(self, local_rank: int, size: int) -> Slots:
        held = self._slots.get(local_rank)
        if held is not None and held.size >= size:
            return held
        self.refuse_too_large("two slots need", SLOTS * size)
        self._slots[local_rank] = made = Slots(size)
        if held is not None:
            # Of slots that were replaced before, only the first hold snapshots: theirs are closed
            # as soon as later ones do.
            if held.is_used and local_rank not in self._replaced:
                self._replaced[local_rank] = held
            else:
                held.close()
        self._runner.copies.send_slots(local_rank, size, made.fds)
        return made

    def refuse_too_large(self, what: str, wanted: int) -> None:
        """Raise `NoSlotsError` if memory is short, even after freeing memory that holds no copy."""
        try:
            self._refuse_too_large(what, wanted)
        except NoSlotsError:
            if not self._runner.copies.free():
                raise
            self._refuse_too_large(what, wanted)

    def _refuse_too_large(self, what: str, wanted: int) -> None:
        free = self._free()
        if self._limit is None and free is not None:
            self._limit = free // 2
        all_slots = [*self._slots.values(), *self._replaced.values()]
        reserved = sum(SLOTS * slots.size for slots in all_slots)
        untouched = sum(slots.untouched for slots in all_slots)
        reserved += self._runner.copies.reserved()
        untouched += self._runner.copies.untouched()
        if self._limit is not None and reserved + wanted > self._limit:
            raise NoSlotsError(
                f"{what} {_amount(wanted)}, but only {_amount(max(self._limit - reserved, 0))} "
                f"of the {_amount(self._limit)} that snapshots may use on this node are left"
            )
        if free is not None and wanted > (left := free - untouched):
            raise NoSlotsError(
                f"{what} {_amount(wanted)}, but only {_amount(max(left, 0))} of memory are free"
            )

    def tell(self) -> None:
        """Report all snapshots to the agent, now or soon, if it has asked for reports."""
        now = time.monotonic()
        more = (now - self._counted_at) * REPORTS_A_SECOND
        self._reports_left = min(self._reports_left + more, REPORTS_AT_ONCE)
        self._counted_at = now
        if self._reports_left >= 1:
            self._reports_left -= 1
            self._report()
        elif self._runner.loop.time_of(self._report) is None:
            self._runner.loop.call_at(now + 1 / REPORTS_A_SECOND, self._report)

    def _report(self) -> None:
        self._runner.loop.call_at(None, self._report)
        if self._runner.agent.hears_of_snapshots:
            snapshots = [
                snapshot
                for _, slots in sorted((self._slots | self._replaced).items())
                for snapshot in slots.snapshots
                if snapshot is not None
            ]
            copies = self._runner.copies
            held = [asdict(one) for one in (*snapshots, *copies.held())]
            self._runner.agent.tell("snapshots_held", snapshots=held, **copies.described())


def _amount(count: int) -> str:
    """Format a number of bytes for a message.

    >>> _amount(3_210_000_000), _amount(1_000_000_000), _amount(1_500_000)
    ('3.2 GB', '1.0 GB', '1.5 MB')
    """
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
