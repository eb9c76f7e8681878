"""The leader key in etcd, and a server's lease, which a thread of its own renews.

A leader's claim rests on two things. Its *lease* holds as long as the leader renews it, and
otherwise expires. Its *word* holds for `word_ms` after each read that showed the key to be its own;
the leader sends messages to nodes only while its word holds. So once another server has overwritten
the key, no server has to wait for the lease to expire (ARCHITECTURE.md, *Several servers*).
"""

from __future__ import annotations

import asyncio
import threading
import time

import msgspec

from rdzv.errors import RendezvousConnectionError
from rdzv.etcd import etcd_pb2 as pb
from rdzv.stores.etcd_client import EtcdClient, KeyValue, created, leased
from rdzv.structs import replace, struct

RENEWALS_PER_TTL = 6
"""The number of renewals in each TTL, enough to repeat a lost one with another member even while
etcd elects its own leader."""

ANSWER_S = 0.5
"""The minimum time a member has to respond to a renewal before the next member is asked."""

RETRY_S = 0.1
"""The pause after a failed request to etcd."""

WORDS_PER_TTL = 5
"""A word lasts for this fraction of the TTL: long enough for etcd to respond late to a read, but
short enough that another server need not wait long for its end."""

LOOP_TTLS = 2
"""An event loop that has not turned for this many TTLs is hanging, and its lease is not renewed."""

MARGIN = 1 / 6
"""The fraction of the TTL that allows for clock drift and for closing streams."""


@struct(frozen=True)
class FencingToken:
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


class ElectionSession:
    """One lease of this process, and at most one term under it. Losing the term ends the session.

    The event loop calls `start` once, and `turned` from then on. The thread ends after `lose`;
    `ended` waits for that.
    """

    def __init__(self, client: EtcdClient, lease: int, ttl_s: int, sent_s: float) -> None:
        self.lease = lease
        self.ttl_s = ttl_s
        self.fence: FencingToken | None = None
        self.lost: str | None = None
        """The reason why the session ended, or None while it holds."""
        self.over = asyncio.Event()
        self.word_until_s = 0.0
        self.word_s = ttl_s / WORDS_PER_TTL
        self.every_s = ttl_s / RENEWALS_PER_TTL
        self._client = client
        self._loop = asyncio.get_running_loop()
        self._turned_s = now_s()
        self.stopped = threading.Event()
        """Set when the session has ended; its thread waits for it."""
        self._thread = threading.Thread(target=self.renew_until_lost, name="lease", daemon=True)
        self._renewed(sent_s)

    def start(self) -> None:
        self._thread.start()

    def turned(self) -> None:
        self._turned_s = now_s()

    async def ended(self) -> None:
        """Wait until the thread has ended, which takes at most as long as one call to etcd."""
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)

    def lead(self, fence: FencingToken, sent_s: float) -> None:
        """Begin the term created by a transaction that was sent at the given time."""
        self.fence = fence
        self.word_until_s = sent_s + self.word_s

    @property
    def leads(self) -> bool:
        return self.fence is not None and self.lost is None and now_s() < self.proven_until_s

    @property
    def may_speak(self) -> bool:
        """Whether the term holds and no other server can lead yet, even by deposing this one."""
        return self.leads and now_s() < self.word_until_s

    def lose(self, reason: str) -> None:
        """End the session for a reason. If it has already ended, the first reason stands."""
        if self.lost is None:
            self.lost = reason
            self.over.set()
            self.stopped.set()

    # ---------------------------------------------------------------- in threads

    def note_read(self, held: KeyValue | None, sent_s: float) -> None:
        """Extend the leader's word if a read sent at this time showed the key to be its own."""
        if self.fence is not None and self.fence.matches(held):
            self.word_until_s = sent_s + self.word_s

    def _renewed(self, sent_s: float) -> None:
        """Count from the time when the renewal was sent; etcd counts from a later time."""
        self.sent_s = sent_s
        self.proven_until_s = sent_s + self.ttl_s * (1 - MARGIN)

    def renew_until_lost(self) -> None:
        """Renew the lease until it is lost, and report the reason.

        Runs in a thread of this session.
        """
        trouble = ""
        while True:
            wait_s = RETRY_S if trouble else self.sent_s + self.every_s - now_s()
            left_s = self.proven_until_s - now_s()
            if self.stopped.wait(max(min(wait_s, left_s), 0)):
                return
            sent_s = now_s()
            left_s = self.proven_until_s - sent_s
            # After a pause of this process or of the machine, there is nothing left to renew.
            if left_s <= 0:
                age_s = sent_s - self.sent_s
                why = f": {trouble}" if trouble else ""
                self._end(f"the last renewal is {age_s:.1f} s old{why}")
                return
            still_s = sent_s - self._turned_s
            if still_s > LOOP_TTLS * self.ttl_s:
                trouble = f"its event loop has stood still for {still_s:.1f} s"
                continue
            try:
                ttl_s = self._client.keep_alive(
                    self.lease, min(max(self.every_s, ANSWER_S), left_s)
                )
            except RendezvousConnectionError as error:
                trouble = str(error)
                continue
            trouble = ""
            if ttl_s <= 0:
                self._end("its lease has expired")
                return
            self._renewed(sent_s)

    def _end(self, reason: str) -> None:
        if not self.stopped.is_set():
            self._loop.call_soon_threadsafe(self.lose, reason)


def now_s() -> float:
    """Return a time in seconds that, like etcd's clock, advances while the machine is asleep."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
