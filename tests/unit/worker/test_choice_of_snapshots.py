"""Which slot is overwritten, and which snapshot new processes load."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rdzv.worker.link import Announced
from rdzv.worker.resuming import newest_whole
from rdzv.worker.slot_format import Header, Mark
from rdzv.worker.snapshots import HeldSlots, slot_to_write


def at(lineage: int, step: int, nonce: str = "n") -> Header:
    return Header(step, lineage, 0, 2, rank=0, world_size=2, state="s", part="p", nonce=nonce)


@pytest.mark.parametrize(
    ("held", "lineage", "base", "watermark", "slot"),
    [
        # An empty slot goes first, whatever the other one holds.
        ((None, None), 0, None, None, 0),
        ((at(0, 10), None), 0, None, 0, 1),
        ((None, at(0, 10)), 0, None, 0, 0),
        # Then the older one, if it is unknown which is complete.
        ((at(0, 20), at(0, 10)), 0, None, None, 1),
        ((at(0, 20), at(0, 30)), 0, None, None, 0),
        # If it is known, the newest complete one stays.
        ((at(0, 20), at(0, 30)), 0, None, 20, None),
        ((at(0, 20), at(0, 30)), 0, None, 30, 0),
        ((at(0, 20), at(0, 30)), 0, None, 40, 0),
        # The snapshot that was loaded stays until there is one of this training.
        ((at(0, 20), at(0, 30)), 4, (0, 20), None, 1),
        ((at(0, 20), at(0, 30)), 4, (0, 30), None, 0),
        ((at(0, 20), at(4, 30)), 4, (0, 20), None, 0),
        ((at(0, 20), at(4, 30)), 4, (0, 20), 20, None),
        # That a step was complete in another training says nothing about this one.
        ((at(0, 20), at(4, 3)), 4, (0, 20), (0, 20), None),
        # This training began with the script's checkpoint.
        ((at(0, 20), at(0, 30)), 4, None, None, 0),
    ],
)
def test_the_slot_that_is_overwritten(
    held: tuple[Header | None, Header | None],
    lineage: int,
    base: tuple[int, int] | None,
    watermark: int | tuple[int, int] | None,
    slot: int | None,
) -> None:
    whole = (lineage, watermark) if isinstance(watermark, int) else watermark
    said = Announced() if whole is None else Announced(at(*whole).mark)
    assert slot_to_write(held, lineage, base, said) == slot


@pytest.mark.parametrize(
    ("held", "slot"),
    [
        # The older one is whole, and the newer one is given up.
        ((at(0, 20), at(0, 30)), 1),
        ((at(0, 40), at(0, 20)), 0),
        # It was saved after the others had been given up, and may become whole.
        ((at(0, 20), at(0, 50)), None),
        # In another training, the same steps are others.
        ((at(0, 20), at(1, 30)), None),
    ],
)
def test_a_step_that_is_given_up_is_overwritten_in_place_of_the_whole_one(
    held: tuple[Header, Header], slot: int | None
) -> None:
    whole = Announced(at(0, 20).mark, given_up=at(0, 40).mark)
    lineage = max(one.lineage for one in held)
    assert slot_to_write(held, lineage, None, whole) == slot


def test_what_is_being_written_to_disk_is_not_overwritten() -> None:
    held = (at(0, 20), at(0, 30))
    whole, last = Announced(at(0, 30).mark, pinned=at(0, 20).mark), at(0, 30).mark
    assert slot_to_write(held, 0, None, whole) is None
    # The other slot has what is whole: it stays, too.
    assert slot_to_write(held, 0, None, replace(whole, pinned=last)) == 0
    assert slot_to_write((None, at(0, 30)), 0, None, replace(whole, pinned=last)) == 0


def test_two_trainings_with_the_same_number_are_of_two_series() -> None:
    """A server that was restored from a backup begins a lineage with a number it had used."""
    assert at(3, 20).series == at(3, 20).series != at(3, 20, "m").series


def test_a_step_that_another_round_saves_is_of_another_series() -> None:
    """Kept workers may repeat it, and nodes that were left out hold the first results."""
    assert replace(at(3, 20), round=4).series != replace(at(3, 20), round=3).series


OLD, NEW, OTHER = Mark(0, 20, "a", 2), Mark(0, 30, "a", 2), Mark(0, 30, "b", 2)
ALONE, LATER = Mark(0, 40, "c", 1), Mark(3, 10, "a", 2)


@pytest.mark.parametrize(
    ("found", "newest"),
    [
        ([], None),
        ([(ALONE, 0)], ALONE),
        ([(ALONE, 0), (ALONE, 0)], ALONE),
        # A part is missing.
        ([(NEW, 0)], None),
        ([(NEW, 0), (NEW, 0)], None),
        # Not all ranks saved the last step.
        ([(OLD, 0), (NEW, 0), (OLD, 1)], OLD),
        ([(OLD, 0), (NEW, 0), (OLD, 1), (NEW, 1)], NEW),
        # Parts of two layouts, or of two steps, are not one state.
        ([(NEW, 0), (OTHER, 1)], None),
        ([(OLD, 0), (NEW, 1)], None),
        # A later training wins over one that got further and was given up.
        ([(NEW, 0), (NEW, 1), (LATER, 0), (LATER, 1)], LATER),
        ([(NEW, 0), (NEW, 1), (LATER, 0)], NEW),
    ],
)
def test_the_newest_step_that_is_whole(found: list[tuple[Mark, int]], newest: Mark | None) -> None:
    assert newest_whole(found) == newest


@pytest.mark.parametrize(
    ("held", "left"),
    [
        ((at(0, 20), at(0, 30)), [at(0, 20), None]),
        ((at(0, 10), at(0, 20)), [at(0, 10), at(0, 20)]),
        ((at(0, 20, "another"), None), [None, None]),
        # Other lineages' steps are not redone; the last is the one that was loaded.
        ((at(1, 30), at(2, 30)), [at(1, 30), at(2, 30)]),
        ((at(0, 40), at(0, 30)), [at(0, 40), None]),
    ],
)
def test_snapshots_of_steps_that_are_redone_are_cleared(
    held: tuple[Header | None, Header | None], left: list[Header | None]
) -> None:
    class Held:
        """A slot of these two, or the link to the runner."""

        def __init__(self, header: Header | None = None) -> None:
            self.kept = header
            self.cleared: list[int] = []

        def header(self) -> Header | None:
            return self.kept

        def clear(self) -> None:
            self.kept = None

        def saved(self, number: int) -> None:
            self.cleared.append(number)

    link, slots = Held(), [Held(one) for one in held]
    kept = HeldSlots(link)  # type: ignore[arg-type]
    kept.slots, kept.base = slots, (0, 40)  # type: ignore[assignment]
    kept.clear_after(0, "n", 20)
    assert [one.kept for one in slots] == left
    assert link.cleared == [n for n, one in enumerate(left) if one != held[n]]
