"""Which server leads, by leases of an etcd whose answers come late: in virtual time."""

from __future__ import annotations

import asyncio
import itertools
import threading
from typing import Any

import pytest

from rdzv.errors import RendezvousConnectionError
from rdzv.etcd import etcd_pb2 as pb
from rdzv.stores import election, election_session
from rdzv.stores.election import Election
from rdzv.stores.election_session import LOOP_TTLS, ElectionSession, FencingToken
from rdzv.stores.etcd_client import KeyValue
from rdzv.stores.etcd_config import EtcdConfig

TTL_S = 10


class Etcd:
    """One lease: it runs from when a renewal is carried out, not from when that is answered."""

    def __init__(self) -> None:
        self.now_s = 1_000.0
        self.expires_s = self.now_s + TTL_S
        self.answers_after_s = [0.0]
        """How late each renewal is answered; later ones get no answer."""

    def keep_alive(self, lease: int, timeout_s: float) -> int:
        if not self.answers_after_s:
            # No further answer arrives: the caller's waiting time passes.
            self.now_s += timeout_s
            raise RendezvousConnectionError("no answer")
        self.expires_s = self.now_s + TTL_S
        self.now_s += self.answers_after_s.pop(0)
        return TTL_S

    def wait(self, timeout_s: float) -> bool:
        """Let time pass, as waiting for the end of the session does."""
        self.now_s += timeout_s
        return False

    @property
    def another_may_lead(self) -> bool:
        return self.now_s >= self.expires_s


@pytest.fixture
def etcd(monkeypatch: pytest.MonkeyPatch) -> Etcd:
    made = Etcd()
    monkeypatch.setattr(election_session, "now_s", lambda: made.now_s)
    return made


def leading(etcd: Etcd, monkeypatch: pytest.MonkeyPatch, *, sent_s: float) -> ElectionSession:
    client: Any = etcd
    session = ElectionSession(client, 1, TTL_S, sent_s)
    monkeypatch.setattr(session.stopped, "wait", etcd.wait)
    session.lead(FencingToken(b"/rdzv/leader", 1, 1), etcd.now_s)
    assert session.leads
    return session


@pytest.mark.parametrize("late_s", [0.0, 2.0, 3.0, 5.0])
async def test_a_renewal_that_is_answered_late_proves_nothing_for_longer(
    etcd: Etcd, monkeypatch: pytest.MonkeyPatch, late_s: float
) -> None:
    """Counted from its answer, a term would continue when the next server already leads."""
    etcd.answers_after_s = [late_s]
    session = leading(etcd, monkeypatch, sent_s=etcd.now_s - TTL_S / 2)
    session.renew_until_lost()
    await asyncio.sleep(0)
    assert "the last renewal is" in (session.lost or "")
    # By the clock alone, at every moment until another may lead, and from then on.
    proven_until_s = session.proven_until_s
    assert proven_until_s < etcd.expires_s
    etcd.now_s = etcd.expires_s
    assert etcd.another_may_lead
    assert not session.leads


async def test_a_lease_is_renewed_while_the_loop_is_late_and_not_while_it_stands_still(
    etcd: Etcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    etcd.answers_after_s = [0.0] * 1_000
    session = leading(etcd, monkeypatch, sent_s=etcd.now_s)
    turned_s = etcd.now_s
    # As in a thread, while the loop does not turn.
    session.renew_until_lost()
    await asyncio.sleep(0)
    assert "its event loop has stood still" in (session.lost or "")
    renewed_for_s = session.sent_s - turned_s
    assert LOOP_TTLS * TTL_S - session.every_s <= renewed_for_s <= LOOP_TTLS * TTL_S


class Member:
    """An etcd in which one server takes part."""

    def __init__(self, config: EtcdConfig) -> None:
        self.config = config
        self.is_revoked = False
        self.revisions = itertools.count(1)
        self.leases = itertools.count(1)
        self.may_revoke = threading.Event()

    async def run(self, call: Any, *args: Any) -> Any:
        return await asyncio.to_thread(call, *args)

    def grant(self, ttl_s: int) -> tuple[int, int]:
        return next(self.leases), ttl_s

    def txn(self, compare: Any, then: Any, otherwise: Any = ()) -> pb.TxnResponse:
        revision = next(self.revisions)
        put = then[0].request_put
        held = KeyValue(
            key=b"/rdzv/leader",
            value=put.value,
            create_revision=revision,
            mod_revision=revision,
            lease=put.lease,
        )
        read = pb.ResponseOp(response_range=pb.RangeResponse(kvs=[held]))
        header = pb.ResponseHeader(revision=revision)
        return pb.TxnResponse(header=header, succeeded=True, responses=[read])

    def get(self, key: bytes, timeout_s: float | None = None) -> tuple[None, int]:
        return None, 0

    def keep_alive(self, lease: int, timeout_s: float) -> int:
        return TTL_S

    def revoke(self, lease: int) -> None:
        self.may_revoke.wait()
        self.is_revoked = True

    def close(self) -> None:
        pass


CONFIG = EtcdConfig.parse("a:1")


async def test_a_server_that_has_no_session_resigns_at_once() -> None:
    etcd: Any = Member(CONFIG)
    async with asyncio.timeout(60):
        await Election(etcd, etcd, "n0:29400", "1").resign()


@pytest.mark.slow
async def test_a_term_is_over_once_it_was_resigned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever campaigns next would otherwise find the key that is about to be deleted."""
    etcd: Any = Member(CONFIG)
    monkeypatch.setattr(election, "EtcdClient", Member)
    async with asyncio.timeout(60), Election.running(etcd, "n0:29400") as one:
        await one.campaign()
        resigning = asyncio.create_task(one.resign())
        await asyncio.sleep(0)
        assert not one.proven
        assert not resigning.done()
        etcd.may_revoke.set()
        await resigning
        assert etcd.is_revoked
