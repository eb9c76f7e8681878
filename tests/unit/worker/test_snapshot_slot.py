"""A slot: written data is read back, and nothing else is ever taken for a snapshot."""

from __future__ import annotations

import hashlib
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from rdzv.worker import CannotBroadcastError
from rdzv.worker.contents import Image
from rdzv.worker.slot_format import TENSORS_AT, Header, SnapshotError
from rdzv.worker.snapshot_slot import Content, Slot, bytes_needed
from rdzv.worker.staging import digest, sums_at_once, sums_of_columns

pytestmark = pytest.mark.slow

HEADER = Header(20, 3, shard=0, shards=1, rank=1, world_size=2, state="abc")
SIZE = TENSORS_AT + (32 << 10)


def content(step: int = 20, **small: Any) -> Content:
    generator = torch.Generator().manual_seed(step)
    parameters = {
        "model.weight": torch.randn(33, 7, generator=generator),
        "model.empty": torch.empty(0, 3),
        "model.scalar": torch.tensor(2.5, dtype=torch.float64),
        "model.half": torch.randn(5, generator=generator).to(torch.bfloat16),
        "model.complex": torch.randn(3, dtype=torch.complex64, generator=generator),
        "model.transposed": torch.randn(4, 6, generator=generator).t(),
    }
    held: list[Any] = [
        (("optimizer", 0, "exp_avg"), torch.randn(33, 7, generator=generator), False),
        (("optimizer", 0, "step"), 17, False),
    ]
    rest = {"buffers": {"mean": torch.ones(3)}, "objects": {}, "values": {"step": step}, **small}
    return Content(
        {"rng": {"torch": torch.get_rng_state()}}, {"state": Image(step, parameters, held, rest)}
    )


def write(slot: Slot, what: Content, header: Header = HEADER) -> Header:
    tensors = what.tensors()
    for place, one in zip(slot.begin(tensors), tensors, strict=True):
        place.copy_(one)
    return slot.seal(header, tensors, what.head())


def same(one: Content, other: Content) -> bool:
    return all(
        torch.equal(mine, its) and mine.dtype == its.dtype
        for mine, its in zip(one.tensors(), other.tensors(), strict=True)
    ) and str(one.images["state"].small) == str(other.images["state"].small)


def test_what_was_written_is_read_again() -> None:
    memory, what = bytearray(SIZE), content()
    assert Slot(memory).header() is None
    header = write(Slot(memory), what)
    slot = Slot(memory)
    assert slot.header() == header
    unwritten = replace(header, tensors_bytes=0, head_bytes=0, tensors_digest="", digest="")
    assert unwritten == HEADER
    assert header.bytes <= SIZE and slot.is_sound(header)
    read = slot.read(header)
    assert same(read, what)
    assert read.images["state"].optimizers[1] == what.images["state"].optimizers[1]
    assert torch.equal(read.own["rng"]["torch"], what.own["rng"]["torch"])
    # Optimizers hold copies: the slot is written again while they change their state.
    write(slot, content(30))
    assert torch.equal(read.images["state"].optimizers[0][1], what.images["state"].optimizers[0][1])


def test_a_snapshot_that_is_being_written_is_none() -> None:
    """Wherever the process is killed: before the seal there is nothing, after it everything."""
    memory = bytearray(SIZE)
    slot = Slot(memory)
    old = write(slot, content(20))
    what = content(30)
    places = slot.begin(what.tensors())
    assert Slot(memory).header() is None
    for place, one in zip(places, what.tensors(), strict=True):
        place.copy_(one)
        assert Slot(memory).header() is None
    slot.seal(replace(HEADER, step=30), what.tensors(), what.head())
    found = Slot(memory).header()
    assert found is not None and found.step == 30
    assert not slot.is_sound(old)


@pytest.mark.parametrize("seed", range(5))
def test_a_bit_that_flips_is_found_wherever_it_is(seed: int) -> None:
    memory = bytearray(SIZE)
    header = write(Slot(memory), content())
    dice = random.Random(seed)
    end_of_header = memory.index(b"}") + 1
    places = [*range(end_of_header), *dice.sample(range(TENSORS_AT, header.bytes), 200)]
    for place in places:
        bit = 1 << dice.randrange(8)
        memory[place] ^= bit
        slot = Slot(memory)
        found = slot.header()
        assert found is None or not slot.is_sound(found), place
        memory[place] ^= bit
    assert Slot(memory).is_sound(header)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("words", [0, 1, 28671, 28672, 2 * 28672 + 5, (1 << 23) + 28672 + 1])
def test_the_sum_of_bits_is_what_the_format_says(words: int, threads: int) -> None:
    """Each word counts as often as its place says, with all factors written out."""
    octets = torch.randint(0, 256, (4 * words + 3,), dtype=torch.uint8)
    factor, wide, total = 0x2545F4914F6CDD1D, 28672, torch.zeros((), dtype=torch.int64)
    odd = 2 * torch.arange(wide) + 1
    for part in torch.split(octets[: 4 * words].view(torch.int32), 1 << 23):
        sums, rest = torch.zeros(wide, dtype=torch.int64), part[:0]
        for row in torch.split(part, wide):
            if len(row) == wide:
                sums = sums * 0x2545F491 + row
            else:
                rest = row
        total = total * factor + (sums.to(torch.int32) * odd).sum() * factor
        total += (rest * odd[: len(rest)]).sum()
    for octet in octets[4 * words :].to(torch.int64):
        total = total * factor + octet
    said = hashlib.blake2b(f"a|torch.uint8|({len(octets)},)\n".encode(), digest_size=16)
    said.update(repr([int(total)]).encode())
    assert digest([("a", octets)], threads) == said.hexdigest()


def test_a_gpu_sums_as_a_cpu_does() -> None:
    grid = torch.randint(-(1 << 31), 1 << 31, (9, 28672), dtype=torch.int32)
    assert torch.equal(sums_at_once(grid), sums_of_columns(grid))


@pytest.mark.parametrize("exchanged", [(0, 8), (8, 4096), (64, 128)])
def test_parts_that_were_exchanged_are_found(exchanged: tuple[int, int]) -> None:
    memory = bytearray(SIZE)
    header = write(
        Slot(memory), Content({}, {"state": Image(1, {"a": torch.arange(2048)}, [], {})})
    )
    one, two = (TENSORS_AT + place for place in exchanged)
    held = memory[one : one + 8]
    memory[one : one + 8] = memory[two : two + 8]
    memory[two : two + 8] = held
    assert not Slot(memory).is_sound(header)


@pytest.mark.parametrize(
    "memory",
    [
        bytearray(SIZE),
        bytearray(b"\xff" * SIZE),
        bytearray(b"rdzvsnap" + bytes(SIZE - 8)),
        bytearray(b"rdzvsnap" + b"\xff" * (SIZE - 8)),
        bytearray(b"rdzvsnap\0\0\0\1\0\0\0\5" + bytes(32) + bytes(SIZE - 48)),
    ],
)
def test_other_memory_is_no_snapshot(memory: bytearray) -> None:
    assert Slot(memory).header() is None


def test_one_that_claims_more_than_the_slot_has_is_none() -> None:
    memory = bytearray(SIZE)
    header = write(Slot(memory), content())
    assert Slot(memory[: header.bytes]).header() == header
    assert Slot(memory[: header.bytes - 1]).header() is None


def test_what_does_not_fit_is_refused_and_what_was_there_is_gone() -> None:
    what = content()
    needed = bytes_needed(what.tensors(), what.head())
    small = Slot(bytearray(TENSORS_AT + 64))
    with pytest.raises(SnapshotError, match="does not fit into 65600"):
        small.begin(what.tensors())
    nearly = Slot(bytearray(needed - 1))
    with pytest.raises(SnapshotError, match="does not fit"):
        write(nearly, what)
    assert nearly.header() is None
    assert write(Slot(bytearray(needed)), what).bytes == needed


def test_a_value_that_cannot_be_pickled_is_named() -> None:
    with pytest.raises(CannotBroadcastError, match=r"state\.score cannot be sent .*Keep it out"):
        content(values={"score": lambda x: x}).head()
