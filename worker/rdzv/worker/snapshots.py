"""Saves a worker's state to memory that its runner holds, so that it outlives the worker.

A thread saves each step after its commit. Parameters change only in the next optimizer step, so
that step waits until they are copied, and for nothing else: the commit has already copied
everything else, and digest and header are computed later. Each rank has two slots: it writes to one
while the other holds an older step.

A state that is the same on all ranks is saved by LOCAL_RANK 0 on each node. The other ranks save
only their own values: random number generators and buffers. For a sharded state, each rank saves
its part.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .link import Announced
from .notice import before_leaving
from .rounds import warn
from .slot_format import NO_MARK, Header, Mark
from .snapshot_slot import Content, Slot, bytes_needed
from .staging import copiers, copy_all, events, mapped, set_aside

if TYPE_CHECKING:
    from .link import GivenSlots, Link
    from .rounds import Round
    from .sealing import Sealing

FINISH_TIMEOUT_S = 30.0
_SPARE = 1.1
"""How many times larger than its first snapshot a slot is made, because plain values grow."""
_SPARE_BYTES = 1 << 20


class HeldSlots:
    """This rank's two slots, mapped into this process."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.slots: list[Slot] = []
        self.reason = ""
        """Why there are no slots, or none that are large enough."""
        self.refused: int | None = None
        """The size that was refused. No request of that size or larger is made again in this round.
        """
        self.base: tuple[int, int] | None = None
        """The lineage and step of the snapshot that this training resumed from."""

    @property
    def size(self) -> int:
        return self.slots[0].size if self.slots else 0

    def ask(self, size: int) -> bool:
        """Request slots of at least `size` bytes; with 0, the existing slots that hold data.

        Returns whether there are such slots; if not, `reason` says why. Blocks while the kernel
        allocates memory, which takes about a second per new gigabyte.
        """
        if self.refused is not None and size >= self.refused:
            return False
        if not self._map(self.link.reserve(size)):
            self.refused = size or None
            return False
        return True

    def find(self) -> list[Slot]:
        """Map the slots that hold data. Returns copies that are intended for this rank."""
        given = self.link.reserve(0, copies=True)
        self._map(given)
        copies = []
        for fd in given.copies:
            try:
                copies.append(Slot(mapped(fd, os.fstat(fd).st_size)))
            except OSError as error:
                self.reason = f"cannot map a copy of a snapshot: {error.strerror}"
            finally:
                os.close(fd)
        return copies

    def _map(self, given: GivenSlots) -> bool:
        self.reason = given.reason
        try:
            # Each slot has its own thread, because the kernel takes longer to map a slot than to
            # copy it.
            with ThreadPoolExecutor(max(len(given.fds), 1)) as pool:
                memory = list(pool.map(mapped, given.fds, [given.size] * len(given.fds)))
            slots = [Slot(one) for one in memory]
        except OSError as error:
            self.reason, slots = f"cannot map their memory: {error.strerror}", []
        finally:
            for fd in given.fds:
                os.close(fd)
        if len(slots) == 2:
            self.slots = slots
        return len(slots) == 2

    def clear(self, number: int) -> None:
        self.slots[number].clear()
        self.link.saved(number)

    def clear_after(self, lineage: int, nonce: str, step: int) -> None:
        """Clear this lineage's snapshots after `step`, which is redone, and another training's."""
        for number, slot in enumerate(self.slots):
            header = slot.header()
            if header is None or header.lineage != lineage or header.mark.time == self.base:
                continue
            if header.step > step or header.nonce != nonce:
                self.clear(number)


def slot_to_write(
    held: Sequence[Header | None],
    lineage: int,
    base: tuple[int, int] | None,
    announced: Announced,
) -> int | None:
    """Return which of two slots may be overwritten, or None if neither may be.

    An empty slot is chosen, otherwise the one with the older step. The snapshot that this training
    resumed from (`base`: its lineage and step) is kept until the training has saved a step itself.
    If a step was announced as whole on all ranks, it is kept, but a newer step that was given up is
    overwritten. The step being written to disk is also kept.

    >>> def at(step: int) -> Header:
    ...     return Header(step, 3, shard=0, shards=1, rank=0, world_size=1, state="")
    >>> slot_to_write([at(20), at(30)], 3, None, Announced())
    0
    >>> slot_to_write([at(20), at(30)], 3, None, Announced(at(20).mark))
    >>> slot_to_write([at(20), at(30)], 3, None, Announced(at(20).mark, given_up=at(30).mark))
    1
    >>> slot_to_write([at(20), at(30)], 4, (3, 20), Announced())
    1
    >>> slot_to_write([at(20), at(30)], 3, None, Announced(pinned=at(20).mark))
    """
    marks = [NO_MARK if one is None else one.mark for one in held]
    number = _older_slot(marks, lineage, base, announced)
    is_pinned = number is not None and marks[number].time == announced.pinned.time != NO_MARK.time
    return None if is_pinned else number


def _older_slot(
    marks: list[Mark], lineage: int, base: tuple[int, int] | None, announced: Announced
) -> int | None:
    if NO_MARK in marks:
        return marks.index(NO_MARK)
    ours = [number for number, mark in enumerate(marks) if mark.lineage == lineage]
    if not ours:
        return next((1 - n for n, mark in enumerate(marks) if mark.time == base), 0)
    kept = max(ours, key=lambda number: marks[number].time)
    newest, whole = marks[kept], announced.whole
    if whole is not None and (
        (newest.lineage, newest.series) != (whole.lineage, whole.series) or newest.step > whole.step
    ):
        return kept if newest.time <= announced.given_up.time else None
    return 1 - kept


class Snapshots:
    """Saves a worker's state across rounds."""

    def __init__(self, sealing: Sealing, link: Link | None, every: int | None) -> None:
        """Save each step that is a multiple of `every`; without a link, save nothing."""
        self._sealing = sealing
        self._every = every
        self.held = None if link is None else HeldSlots(link)
        self._round: Round | None = None
        self._layout: tuple[str, str] | None = None
        self._thread: threading.Thread | None = None
        """Copies the last snapshot."""
        self._copied = threading.Event()
        """Set once the last snapshot's tensors are copied, so that the state may be changed."""
        self._begun_at = 0.0
        self._waits_since: float | None = None
        """When an optimizer's step began to wait for that, if one did."""
        self._saved: Mark | None = None
        """What was saved last in this round."""
        self._told: set[str] = set()

    def begin_round(self, round_: Round) -> None:
        self._round, self._layout, self._saved = round_, None, None
        if self.held is None:
            return
        self.finish()
        self.held.refused = None
        # In a new round, steps with these numbers may become whole.
        self.held.link.announced.given_up = NO_MARK
        if not self.held.slots:
            self.held.ask(0)
        self.clear_redone()

    def clear_redone(self) -> None:
        """Clear the snapshots of steps that will be redone, also by new processes."""
        if self.held is not None:
            self.finish()
            sealing = self._sealing
            self.held.clear_after(sealing.lineage, sealing.nonce, sealing.step or 0)

    def committed(self) -> None:
        if self._every is None or self.held is None:
            return
        if self._thread is None:
            self._begin(saves=False)  # Request the memory ahead of the first save.
        if (self._sealing.step or 0) % self._every == 0:
            self.save()

    def save(self) -> bool:
        """Begin to copy the sealed step, once the previous snapshot is done."""
        if self.held is None or not self._sealing.step:
            return False
        self._begun_at = time.monotonic()
        if not self.finish():
            self._say(f"skipping saves: the last one takes longer than {FINISH_TIMEOUT_S:.0f} s")
            return False
        if self.held.refused is not None and not self.held.slots:
            return False
        before_leaving[:] = [self.hand_over]
        if not self._has_saved():
            self._begin(saves=True)
        return True

    def hand_over(self) -> None:
        """Wait until the sealed step is saved, whole, and copied; at most 30 seconds for each."""
        assert self.held is not None
        link = self.held.link
        if not self._has_saved() and not self._sealing.is_in_step:
            # It was left out, because the one before it was not yet whole.
            if self._saved is not None:
                link.wait_until_whole(self._saved, FINISH_TIMEOUT_S)
            self.save()
        saved = self._saved if self._has_saved() else None
        if saved is None or not link.wait_until_whole(saved, FINISH_TIMEOUT_S):
            self._say("a node leaves before other nodes have all of the step that was saved")

    def _has_saved(self) -> bool:
        """Wait for the last snapshot, and return whether it is one of the sealed step."""
        at = (self._sealing.lineage, self._sealing.step)
        return self.finish() and self._saved is not None and self._saved.time == at

    def finish(self) -> bool:
        """Wait up to 30 seconds until the last snapshot is complete or has failed."""
        if self._thread is not None:
            self._thread.join(FINISH_TIMEOUT_S)
        return self._thread is None or not self._thread.is_alive()

    def _wait_for_copy(self) -> None:
        if not self._copied.is_set():
            self._waits_since = time.monotonic()
            self._copied.wait()

    def _begin(self, *, saves: bool) -> None:
        """Copy the sealed step in a thread; unless it `saves`, only request memory for that."""
        round_ = self._round
        assert round_ is not None
        content = self._sealing.content(with_state=round_.local_rank == 0)
        tensors, all_set_aside = content.tensors(), False
        if saves:
            tensors, all_set_aside = set_aside(tensors)
        # The events that the GPUs must reach before the tensors may be copied.
        ready, copied = events(tensors), threading.Event()
        if saves and not all_set_aside:
            self._sealing.wait_for_copy = self._wait_for_copy
        if self._thread is None:
            # A process that exits while a thread is using a tensor may abort.
            atexit.register(self.finish)
        header, self._copied, self._waits_since = self._header(round_, content), copied, None
        begun_s = time.monotonic() - self._begun_at

        def run() -> None:
            try:
                head = content.head()
                if self._has_room(bytes_needed(tensors, head)) and saves:
                    self._copy(header, tensors, head, ready, begun_s)
            except Exception as error:
                self._say(f"cannot save step {header.step}: {error}")
            finally:
                copied.set()

        self._thread = threading.Thread(target=run, name="rdzv snapshots", daemon=True)
        self._thread.start()

    def _header(self, round_: Round, content: Content) -> Header:
        sealing, parts = self._sealing, self._sealing.shards.parts
        if self._layout is None:
            part = "" if parts is None else parts.described()[1]
            self._layout = (sealing.contents.described()[1], part)
        place = sealing.shards.place
        return Header(
            step=sealing.step or 0,
            lineage=sealing.lineage,
            shard=place.shard,
            shards=place.shards if content.images else 0,
            rank=round_.rank,
            world_size=round_.world_size,
            state=self._layout[0],
            part=self._layout[1],
            nonce=sealing.nonce,
            round=round_.number,
        )

    # ------------------------------------------------------------------ in the thread

    def _has_room(self, needed: int) -> bool:
        held = self.held
        assert held is not None
        if needed <= held.size or held.ask(int(_SPARE * needed) + _SPARE_BYTES):
            return True
        self._say(f"cannot save snapshots: {held.reason}")
        return False

    def _copy(
        self,
        header: Header,
        tensors: list[Tensor],
        head: bytes,
        ready: list[Any],
        begun_s: float,
    ) -> None:
        held = self.held
        assert held is not None
        number = slot_to_write(
            [slot.header() for slot in held.slots],
            header.lineage,
            held.base,
            held.link.announced,
        )
        if number is None:
            self._say(
                "skipping saves while both snapshots in memory are needed: the newer one is not "
                "yet known to be whole on all nodes, or the older one is being written to disk"
            )
            return
        slot = held.slots[number]
        held.clear(number)
        copy_all(tensors, slot.begin(tensors), ready, copiers())
        waited_s = time.monotonic() - self._waits_since if self._waits_since else 0.0
        self._copied.set()
        written = slot.seal(header, tensors, head)
        self._saved = written.mark
        if written.shards:
            held.link.saved(
                number,
                mark=written.mark._asdict(),
                shard=written.shard,
                bytes=written.bytes,
                digest=slot.seal_digest,
                stopped_us=round(1e6 * (begun_s + waited_s)),
            )

    def _say(self, text: str) -> None:
        if text not in self._told and len(self._told) < 20:
            self._told.add(text)
            warn(self._round, text)
