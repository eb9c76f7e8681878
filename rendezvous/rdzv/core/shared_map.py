"""Immutable mappings whose changed copies share everything that has not changed.

A job of ten thousand nodes takes ten thousand steps to form, each of which changes one node's
place. If each step copied a dict, the total time would grow with the square of the number of nodes.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from typing import Any, TypeVar, cast

LARGE = 512
"""The size at which copying a dict begins to cost more than sharing it."""
CHANGES = 128
"""The maximum number of changes that a shared map holds on top of its shared base."""

_K = TypeVar("_K")
_V = TypeVar("_V")

_GONE: Any = object()
_NONE: Any = object()


def put(mapping: Mapping[_K, _V], key: _K, value: _V) -> Mapping[_K, _V]:
    """Return a mapping in which a key has the given value, ordered like a dict."""
    if len(mapping) < LARGE:
        return {**mapping, key: value}
    return _shared(mapping).put(key, value)


def without(mapping: Mapping[_K, _V], key: _K) -> Mapping[_K, _V]:
    """Return a mapping without the given key, or the same mapping if it has no such key."""
    if key not in mapping:
        return mapping
    if len(mapping) < LARGE:
        others = dict(mapping)
        del others[key]
        return others
    return _shared(mapping).without(key)


def put_all(mapping: Mapping[_K, _V], changes: Mapping[_K, _V]) -> Mapping[_K, _V]:
    """Return a mapping in which many keys have new values."""
    # Iterate over pairs, because unpacking a mapping other than a dict looks up each of its keys.
    return {**dict(mapping.items()), **changes}


def _shared(mapping: Mapping[_K, _V]) -> SharedMap[_K, _V]:
    if isinstance(mapping, SharedMap):
        return mapping
    return SharedMap(mapping, {}, {}, len(mapping))


class SharedMap(Mapping[_K, _V]):
    """A dict shared with other maps, plus a few changes to it. Created by `put` and `without`."""

    __slots__ = ("_added", "_base", "_over", "_size")

    def __init__(
        self, base: Mapping[_K, _V], over: dict[_K, _V], added: dict[_K, _V], size: int
    ) -> None:
        """`over` contains new values for keys of the base, or `_GONE`; `added` follows the base.

        A key of the base that was removed and then put again is in both.
        """
        self._base = base
        self._over = over
        self._added = added
        self._size = size

    def put(self, key: _K, value: _V) -> SharedMap[_K, _V]:
        over, added = self._over, self._added
        if key in added or key not in self:
            size = self._size + (key not in added)
            return self._changed(over, {**added, key: value}, size)
        return self._changed({**over, key: value}, added, self._size)

    def without(self, key: _K) -> SharedMap[_K, _V]:
        over, added = self._over, self._added
        if key in added:
            added = dict(added)
            del added[key]
            return self._changed(over, added, self._size - 1)
        return self._changed({**over, key: _GONE}, added, self._size - 1)

    def _changed(self, over: dict[_K, _V], added: dict[_K, _V], size: int) -> SharedMap[_K, _V]:
        changed = SharedMap(self._base, over, added, size)
        if len(over) + len(added) <= CHANGES:
            return changed
        # Where the base is unchanged, dicts merge without a look at each pair.
        whole = dict(changed._pairs()) if over else {**self._base, **added}
        return SharedMap(whole, {}, {}, size)

    def _pairs(self) -> Iterator[tuple[_K, _V]]:
        if over := self._over:
            for key, value in self._base.items():
                now = over.get(key, value)
                if now is not _GONE:
                    yield key, now
        else:
            yield from self._base.items()
        yield from self._added.items()

    def __getitem__(self, key: _K) -> _V:
        found = self.get(key, _NONE)
        if found is _NONE:
            raise KeyError(key)
        return cast("_V", found)

    def get(self, key: _K, default: Any = None) -> Any:
        if key in self._added:
            return self._added[key]
        found = self._over.get(key, _NONE)
        if found is _NONE:
            return self._base.get(key, default)
        return default if found is _GONE else found

    def __contains__(self, key: object) -> bool:
        return self.get(cast("_K", key), _NONE) is not _NONE

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[_K]:
        return (key for key, _ in self._pairs())

    def items(self) -> ItemsView[_K, _V]:
        return _Items(self)

    def values(self) -> ValuesView[_V]:
        return _Values(self)

    def __repr__(self) -> str:
        return repr(dict(self._pairs()))


class _Items(ItemsView[_K, _V]):
    _mapping: SharedMap[_K, _V]

    def __iter__(self) -> Iterator[tuple[_K, _V]]:
        return self._mapping._pairs()


class _Values(ValuesView[_V]):
    _mapping: SharedMap[Any, _V]

    def __iter__(self) -> Iterator[_V]:
        return (value for _, value in self._mapping._pairs())
