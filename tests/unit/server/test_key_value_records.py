"""A server's key-value record: after a failed write, the server knows what is really stored."""

from __future__ import annotations

from typing import cast

import msgspec
import pytest

from rdzv import errors
from rdzv.server.engine.store_access import KeyValueRecord, StoreAccess
from rdzv.stores.memory import MemoryStore


class Store(MemoryStore):
    """Fails once, before or after it has written, and may be away then."""

    error: Exception | None = None
    writes_first = False
    away = False

    async def load_document(self, name: str) -> tuple[bytes, int] | None:
        if self.away:
            raise errors.RendezvousConnectionError("away")
        return await super().load_document(name)

    async def swap_document(self, name: str, data: bytes, revision: int) -> int:
        error, self.error = self.error, None
        if error is not None and not self.writes_first:
            raise error
        written = await super().swap_document(name, data, revision)
        if error is not None:
            raise error
        return written


def document(store: Store) -> KeyValueRecord[dict[str, int]]:
    def read(data: bytes) -> dict[str, int]:
        return msgspec.json.decode(data, type=dict[str, int])

    return KeyValueRecord(cast(StoreAccess, store), "numbers", read)


async def swap(of: KeyValueRecord[dict[str, int]], **value: int) -> None:
    await of.swap(value, msgspec.json.encode(value))


async def test_what_was_written_is_known_and_read_again() -> None:
    store = Store()
    one = document(store)
    assert await one.known() == {}
    await swap(one, a=1)
    await swap(one, a=2)
    assert (one.value, one.revision) == ({"a": 2}, 2)
    assert await document(store).known() == {"a": 2}


async def test_what_another_has_written_is_read_anew_and_to_be_tried_again() -> None:
    store = Store()
    one, other = document(store), document(store)
    await swap(other, b=1)
    with pytest.raises(errors.StoreRefusedError, match="try again"):
        await swap(one, a=1)
    assert one.value == {"b": 1}
    await swap(one, a=1)
    assert await document(store).known() == {"a": 1}


@pytest.mark.parametrize("written", [False, True])
async def test_what_was_perhaps_written_is_read_anew(*, written: bool) -> None:
    store = Store()
    one = document(store)
    store.error, store.writes_first = errors.RendezvousConnectionError("who knows"), written
    with pytest.raises(errors.RendezvousConnectionError, match="who knows"):
        await swap(one, a=1)
    assert one.value == ({"a": 1} if written else {})


async def test_what_was_refused_changes_nothing() -> None:
    store = Store()
    one = document(store)
    await swap(one, a=1)
    store.error = errors.LimitExceededError("too large")
    with pytest.raises(errors.LimitExceededError):
        await swap(one, a=2)
    assert (await one.known(), one.revision) == ({"a": 1}, 1)


async def test_what_can_not_be_read_anew_is_read_before_it_is_used() -> None:
    store = Store()
    one = document(store)
    store.error, store.writes_first = errors.RendezvousConnectionError("who knows"), True
    store.away = True
    with pytest.raises(errors.RendezvousConnectionError, match="away"):
        await swap(one, a=1)
    store.away = False
    assert await one.known() == {"a": 1}


async def test_what_can_not_be_read_is_told_and_left() -> None:
    store = Store()
    await store.swap_document("numbers", b"nonsense", 0)
    with pytest.raises(errors.RendezvousStateError, match="record numbers cannot be read"):
        await document(store).known()
