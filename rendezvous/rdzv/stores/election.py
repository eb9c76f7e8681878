"""Leader election among several rdzvd servers on one etcd, and the proof of leadership.

async with (
    EtcdClient.connected(config) as client,
    Election.running(client, address="10.0.0.1:29400", version="0.1.0") as election,
):
    while True:
        fence = await election.campaign()             # follow until then: election.leader
        store = EtcdStore(client, fence)              # one store for each term
        ...                                           # serve
        reason = await election.lost()                # close every stream, keep campaigning
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec

from rdzv.errors import RendezvousConnectionError
from rdzv.etcd import etcd_pb2 as pb
from rdzv.runtime.tasks import single_error
from rdzv.stores.election_session import (
    MARGIN,
    RETRY_S,
    ElectionSession,
    FencingToken,
    Leader,
    now_s,
    read_leader,
)
from rdzv.stores.etcd_client import (
    EtcdClient,
    KeyValue,
    below,
    created,
    delete,
    found_by,
    get,
    modified,
    put,
)
from rdzv.structs import replace, struct

log = logging.getLogger("rdzv.election")

RESIGN_S = 1.0
"""The time for which to try to revoke the lease before leaving it to expire."""

READ_EVERY_S = 0.05
"""How often each server reads the leader key, whether it leads or not."""


@struct(frozen=True)
class Candidate:
    """One rdzvd server that takes part in the election, whether or not it leads."""

    address: str
    version: str
    started_unix_ms: int
    page: str = ""
    """The URL of its web page, or empty if it serves none."""


class Election:
    """One server's part in the election. Created by `Election.running`."""

    def __init__(
        self, client: EtcdClient, own: EtcdClient, address: str, version: str, page: str = ""
    ) -> None:
        """Use `own` for the calls of threads, which nothing else that is sent may delay."""
        self._client = client
        self._own = own
        self.address = address
        self._replica = Candidate(address, version, _unix_ms(), page)
        self._prefix = client.config.prefix
        self._key = f"{self._prefix}/leader".encode()
        self._session: ElectionSession | None = None
        self._held: KeyValue | None = None
        """The leader key as last seen, ..."""
        self._seen_revision = -1
        """... at this revision, or -1 if it was never seen."""
        self._news = _News()
        """An object that is notified whenever any of the above changes."""
        self._last_loss = "this server has not led yet"
        self._away = False
        self._loop = asyncio.get_running_loop()
        self._stopped = threading.Event()

    @classmethod
    @asynccontextmanager
    async def running(
        cls, client: EtcdClient, address: str, version: str = "", page: str = ""
    ) -> AsyncIterator[Election]:
        """Take part as `address` until the body ends, and then resign and deregister at once.

        This returns as soon as the tasks are running; etcd need not be reachable. The election
        survives every temporary failure of etcd, and logs when etcd becomes unreachable and when it
        is back.
        """
        own = EtcdClient(client.config)
        election = cls(client, own, address, version, page)
        reader = threading.Thread(target=election._read_until_stopped, name="word", daemon=True)
        try:
            with single_error():
                async with asyncio.TaskGroup() as group:
                    tasks = (
                        group.create_task(election._hold_sessions()),
                        group.create_task(election._lift_deposals()),
                    )
                    reader.start()
                    try:
                        yield election
                    finally:
                        for task in tasks:
                            task.cancel()
        finally:
            election._stopped.set()
            await election._end_session("this server is stopping")
            await asyncio.to_thread(own.close)
            await asyncio.to_thread(reader.join)

    @property
    def leader(self) -> Leader | None:
        """The leader as last seen, or None if there is none or none has been seen yet."""
        leader = read_leader(self._held) if self._held else None
        return None if leader is None or leader.deposed else leader

    @property
    def proven(self) -> bool:
        """Whether this process leads and can currently prove it.

        This is True only between `campaign` and the end of `lost`, and not if the newest renewal is
        too old, even if `lost` has not returned yet. It never blocks, so it may be called before
        every message that only a leader may send.
        """
        return self._session is not None and self._session.leads

    @property
    def may_speak(self) -> bool:
        """Whether this process leads and no other can lead yet, even by deposing this one.

        Unlike `proven`, this may be False for a moment, until etcd has responded to the next read.
        """
        return self._session is not None and self._session.may_speak

    async def regain_word(self) -> bool:
        """Wait until this process may speak or no longer leads, and return whether it may speak."""
        if not self.may_speak:
            await self._news.until(lambda: self.may_speak or not self.proven)
        return self.may_speak

    async def depose(self, leader: Leader) -> bool:
        """End the term of a leader found to be dead, and return whether this call ended it.

        This is safe even if the leader is alive. Its writes are refused from now on, and its key is
        deleted, allowing another server to lead, only once its word has expired.

        Raises:
            RendezvousConnectionError: the term may have been ended.

        """
        held, session = self._held, self._session
        if held is None or self.leader != leader or not leader.word_ms:
            return False
        if session is not None and held.lease == session.lease:
            return False
        value = msgspec.json.encode(replace(leader, deposed=True))
        done = await self._client.run(
            self._client.txn,
            (modified(self._key, held.mod_revision),),
            (put(self._key, value), get(self._key)),
            (get(self._key),),
        )
        self._note_answer(done)
        return done.succeeded

    async def campaign(self, head_start_s: Callable[[], float] = lambda: 0.0) -> FencingToken:
        """Wait until this process leads, and return the fence of its term.

        `head_start_s` is called once no server leads. It returns how long to leave the leadership
        to other servers. `campaign` may be cancelled and called again. During a term, it returns
        that term's fence immediately.
        """
        while True:
            await self._news.until(self._may_lead)
            if self._held is None and (head_start := head_start_s()) > 0:
                await asyncio.sleep(head_start)
                if not self._may_lead():
                    continue
            sent_s = now_s()
            session = self._session
            assert session is not None, "a server that may lead has a session"
            if session.fence is not None:
                return session.fence
            try:
                fence = await self._create(session)
            except RendezvousConnectionError as error:
                self._note_outage(error)
                await asyncio.sleep(RETRY_S)
                continue
            if fence is not None and session.lost is None:
                session.lead(fence, sent_s)
                self._news.tell()
                log.info("%s became the leader at revision %d", self.address, fence.create_revision)
                return fence

    def _may_lead(self) -> bool:
        session = self._session
        if session is None or session.lost is not None or self._seen_revision < 0:
            return False
        return self._held is None or self._held.lease == session.lease

    async def _create(self, session: ElectionSession) -> FencingToken | None:
        """Create the leader key if it does not exist; return its fence if it is this session's."""
        value = msgspec.json.encode(
            Leader(self.address, _unix_ms(), 0, round(1000 * session.word_s))
        )
        done = await self._client.run(
            self._client.txn,
            (created(self._key, 0),),
            (put(self._key, value, session.lease), get(self._key)),
            (get(self._key),),
        )
        held = self._note_answer(done)
        # An earlier attempt that was cancelled or had an unknown outcome may have succeeded.
        if held is None or held.lease != session.lease:
            return None
        return FencingToken(self._key, held.create_revision, session.lease)

    async def lost(self) -> str:
        """Wait until leadership can no longer be proven, and return the reason.

        There are three possible reasons. The newest renewal is older than the TTL minus a margin,
        measured by this machine's clock from when it was *sent*; another server can therefore lead
        no earlier than one margin later. Or etcd reports that the lease or the leader key is gone.
        Or this process has resigned. Returns immediately if this process does not lead.
        """
        session = self._session
        if session is None or session.fence is None:
            return self._last_loss
        await session.over.wait()
        assert session.lost is not None, "a lost session has a reason"
        return session.lost

    async def changed(self, seen: Leader | None) -> Leader | None:
        """Wait until the leader differs from `seen`, and return the new one."""
        await self._news.until(lambda: self.leader != seen)
        return self.leader

    async def resign(self) -> None:
        """End this process's term, if any, so that another server can lead at once.

        This never raises an exception; if etcd cannot be reached, the lease expires.
        """
        session = self._session
        if session is None or session.fence is None:
            return
        session.lose("this server has resigned")
        self._news.tell()
        await self._news.until(lambda: self._session is not session)

    async def replicas(self) -> tuple[Candidate, ...]:
        """Return all participating servers, sorted by address."""
        folder = below(f"{self._prefix}/replicas/")
        pages = await self._client.run(lambda: list(self._client.scan(*folder)))
        found = (replica for page in pages for kv in page if (replica := _read_replica(kv)))
        return tuple(sorted(found, key=lambda replica: replica.address))

    # ---------------------------------------------------------------- the session

    async def _hold_sessions(self) -> None:
        while True:
            try:
                session = await self._begin_session()
            except RendezvousConnectionError as error:
                self._note_outage(error)
                await asyncio.sleep(RETRY_S)
                continue
            self._session = session
            session.start()
            self._news.tell()
            while not await _happens(session.over, session.every_s):
                session.turned()
            await self._end_session("")

    async def _begin_session(self) -> ElectionSession:
        sent_s = now_s()
        lease, ttl_s = await self._client.run(self._client.grant, self._client.config.ttl_s)
        key = f"{self._prefix}/replicas/{lease:016x}".encode()
        record = put(key, msgspec.json.encode(self._replica), lease)
        await self._client.run(self._client.txn, (), (record,))
        self._note_outage(None)
        return ElectionSession(self._own, lease, ttl_s, sent_s)

    async def _end_session(self, reason: str) -> None:
        if (session := self._session) is None:
            return
        session.lose(reason)
        self._news.tell()
        if session.fence is not None:
            self._last_loss = session.lost or reason
            log.info("%s is no longer the leader: %s", self.address, self._last_loss)
        try:
            async with asyncio.timeout(RESIGN_S):
                await self._client.run(self._client.revoke, session.lease)
        except (RendezvousConnectionError, TimeoutError) as error:
            log.info("cannot revoke lease %x, so it will expire: %s", session.lease, error)
        await session.ended()
        self._session = None
        self._news.tell()

    # ---------------------------------------------------------------- the leader key

    def _read_until_stopped(self) -> None:
        """Read the leader key again and again, in a thread.

        A thread, so that a leader keeps its word while its event loop is late. Reads, and no watch:
        a leader must read its key anyway, and what a member no longer sends is noticed at once.
        """
        while not self._stopped.is_set():
            sent_s, session = now_s(), self._session
            try:
                word_s = session.word_s if session is not None else None
                held, revision = self._own.get(self._key, word_s)
            except RendezvousConnectionError as error:
                self._in_loop(self._note_outage, error)
            else:
                if session is not None:
                    session.note_read(held, sent_s)
                self._in_loop(self._note_read, held, revision)
            self._stopped.wait(READ_EVERY_S)

    def _in_loop(self, call: Callable[..., None], *given: object) -> None:
        if not self._stopped.is_set():
            self._loop.call_soon_threadsafe(call, *given)

    def note_leader_key(self, held: KeyValue | None, revision: int) -> None:
        """Record the leader key as of a revision, unless a newer revision has been seen."""
        if revision <= self._seen_revision:
            return
        self._seen_revision = revision
        self._held = held
        session = self._session
        if session is not None and session.fence is not None and not session.fence.matches(held):
            deposed = held is not None and read_leader(held).deposed
            session.lose("another server has deposed it" if deposed else "its leader key is gone")
        self._news.tell()

    def _note_answer(self, done: pb.TxnResponse) -> KeyValue | None:
        (held,) = found_by(done)
        self.note_leader_key(held, done.header.revision)
        return held

    def _note_read(self, held: KeyValue | None, revision: int) -> None:
        """Record a read of the leader key, which may have extended this leader's word."""
        self._note_outage(None)
        self.note_leader_key(held, revision)
        self._news.tell()

    def _note_outage(self, error: RendezvousConnectionError | None) -> None:
        if error is not None and not self._away:
            log.warning("the election is paused: %s", error)
        elif error is None and self._away:
            log.warning("the election has resumed: etcd is responding again")
        self._away = error is not None

    async def _lift_deposals(self) -> None:
        """Delete a deposed leader's key once its word must have expired by this machine's clock."""
        while True:
            await self._news.until(lambda: self._deposed() is not None)
            held = self._deposed()
            assert held is not None, "nothing was awaited since"
            await asyncio.sleep(read_leader(held).word_ms / 1000 * (1 + MARGIN))
            if self._deposed() != held:
                continue
            try:
                done = await self._client.run(
                    self._client.txn,
                    (modified(self._key, held.mod_revision),),
                    (delete(self._key), get(self._key)),
                    (get(self._key),),
                )
                self._note_answer(done)
            except RendezvousConnectionError as error:
                self._note_outage(error)

    def _deposed(self) -> KeyValue | None:
        return self._held if self._held and read_leader(self._held).deposed else None


class _News:
    """Wakes waiters whenever something has changed, so that they recheck their conditions."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self._changed.wait()


# ------------------------------------------------------------------------------------ values


def _read_replica(kv: KeyValue) -> Candidate | None:
    try:
        return msgspec.json.decode(kv.value, type=Candidate)
    except (msgspec.DecodeError, UnicodeDecodeError):
        log.warning("cannot read the replica's record at %s", kv.key.decode(errors="replace"))
        return None


async def _happens(event: asyncio.Event, within_s: float) -> bool:
    try:
        async with asyncio.timeout(within_s):
            await event.wait()
    except TimeoutError:
        return False
    return True


def _unix_ms() -> int:
    return time.time_ns() // 1_000_000
