"""A store that records the addresses that gloo's ranks publish for each other."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .gloo_addresses import Published

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


def recording_store(inner: Store, published: Published, refuse: Callable[[], None]) -> Store:
    """Return a store that forwards every call to `inner` and records addresses in `published`.

    `refuse` is called before each operation, and raises once the round is cut, so that no new group
    can be created. The store must live as long as the groups that use it, because torch calls into
    it.
    """
    store: Store = _store_class()(inner, published, refuse)
    return store


@functools.cache
def _store_class() -> Any:
    # The base class is torch's, and this module must be importable without torch.
    from torch._C._distributed_c10d import Store

    class RecordingStore(Store):
        def __init__(self, inner: Store, published: Published, refuse: Callable[[], None]) -> None:
            super().__init__()
            self._inner = inner
            self._published = published
            self._refuse = refuse

        def set(self, key: str, value: Any) -> None:
            self._refuse()
            self._published.note(_as_bytes(value), own=True)
            self._inner.set(key, value)

        def get(self, key: str) -> bytes:
            self._refuse()
            value = self._inner.get(key)
            self._published.note(value, own=False)
            return value

        def multi_get(self, keys: list[str]) -> list[bytes]:
            self._refuse()
            values = self._inner.multi_get(keys)
            for value in values:
                self._published.note(value, own=False)
            return values

        def multi_set(self, keys: list[str], values: Any) -> None:
            self._refuse()
            for value in values:
                self._published.note(_as_bytes(value), own=True)
            self._inner.multi_set(keys, values)  # type: ignore[attr-defined]

        def has_extended_api(self) -> bool:
            return True

        def clone(self) -> Any:
            return type(self)(
                self._inner.clone(),  # type: ignore[attr-defined]
                self._published,
                self._refuse,
            )

    for name in (
        *("add", "append", "check", "compare_set", "delete_key", "num_keys", "wait"),
        *("queue_push", "queue_pop", "queue_len", "list_keys", "set_timeout"),
    ):
        if hasattr(Store, name):
            setattr(RecordingStore, name, _forwarded(name))
    return RecordingStore


def _forwarded(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any) -> Any:
        self._refuse()
        return getattr(self._inner, name)(*args)

    method.__name__ = name
    return method


def _as_bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
