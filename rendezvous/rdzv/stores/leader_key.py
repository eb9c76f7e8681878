"""The leader key in etcd: who leads, since when, and for how long its word holds.

A leader's claim rests on two things. Its *lease* holds as long as the leader renews it, and
otherwise expires. Its *word* holds for `word_ms` after each read that showed the key to be its own;
the leader sends messages to nodes only while its word holds. Once another server has overwritten
the key, the former leader's word therefore expires within `word_ms`, whether that leader is dead or
alive, and no server has to wait for the lease to expire.
"""

from __future__ import annotations

import msgspec

from rdzv.etcd import etcd_pb2 as pb
from rdzv.stores.etcd_wire import KeyValue, created, leased
from rdzv.structs import replace, struct


@struct(frozen=True)
class Fence:
    """The leader key as created by one term. Every write of that term is compared with it."""

    key: bytes
    create_revision: int
    lease: int

    @property
    def conditions(self) -> tuple[pb.Compare, ...]:
        """The conditions that hold while the term lasts. A deposed key has lost its lease."""
        return created(self.key, self.create_revision), leased(self.key, self.lease)

    def matches(self, held: KeyValue | None) -> bool:
        if held is None:
            return False
        return (held.create_revision, held.lease) == (self.create_revision, self.lease)


@struct(frozen=True)
class Leader:
    """The leader as described by its key.

    `since_unix_ms` is by its own clock, and only for display.
    """

    address: str
    since_unix_ms: int
    leadership: int
    """Its leadership number, or 0 until it has taken over the store."""
    word_ms: int = 0
    """The time for which its word may outlive its key, or 0 if that is unknown."""
    deposed: bool = False
    """Whether another server has ended its term. This key is deleted once its word has expired."""


def read_leader(kv: KeyValue) -> Leader:
    """Return the leader described by a key. If the key is unreadable, the address is `unknown`."""
    try:
        return msgspec.json.decode(kv.value, type=Leader)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Leader("unknown", 0, 0)


def with_leadership(kv: KeyValue, number: int) -> bytes:
    """Return the new value of a leader key after its leader has taken over as `number`."""
    return msgspec.json.encode(replace(read_leader(kv), leadership=number))
