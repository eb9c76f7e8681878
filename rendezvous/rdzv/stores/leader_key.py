"""The leader key in etcd: who leads, since when, and for how long its word counts.

A leader's claim rests on two things. Its *lease* holds as long as the leader renews it, and
otherwise expires. Its *word* holds for `word_ms` after each read that has shown the key to be its
own; only while its word holds does the leader send anything to nodes. So once another server has
overwritten the key, the former leader's word ends within `word_ms`, whether that leader is dead or
alive, and no server has to wait for the lease to expire.
"""

from __future__ import annotations

import msgspec

from rdzv.stores.etcd_values import Created, KeyValue, Leased
from rdzv.structs import replace, struct


@struct(frozen=True)
class Fence:
    """The leader key as created by one term; every write of that term is compared with it."""

    key: bytes
    create_revision: int
    lease: int

    @property
    def conditions(self) -> tuple[Created, Leased]:
        """The conditions that hold while the term lasts. A deposed key has lost its lease."""
        return Created(self.key, self.create_revision), Leased(self.key, self.lease)

    def matches(self, held: KeyValue | None) -> bool:
        """Return whether this is still the key of the term."""
        if held is None:
            return False
        return (held.create_revision, held.lease) == (self.create_revision, self.lease)


@struct(frozen=True)
class Leader:
    """The leader, as its key describes it. `since_unix_ms`, by its own clock, is only shown."""

    address: str
    since_unix_ms: int
    leadership: int
    """Its number; 0 until it has taken over the store."""
    word_ms: int = 0
    """How long its word may outlive its key; 0 for an older server, whose term ends with its lease.
    """
    deposed: bool = False
    """Another server has ended its term; this key is deleted once its word has ended."""


def read_leader(kv: KeyValue) -> Leader:
    """Return the leader that a key describes; if it is unreadable, the address is `unknown`."""
    try:
        return msgspec.json.decode(kv.value, type=Leader)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Leader("unknown", 0, 0)


def with_leadership(kv: KeyValue, number: int) -> bytes:
    """Return the value of a leader key after its leader has taken over as `number`."""
    return msgspec.json.encode(replace(read_leader(kv), leadership=number))
