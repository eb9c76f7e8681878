"""Which server leads, by leases of an etcd whose answers come late: in virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rdzv.errors import RendezvousConnectionError
from rdzv.stores import election as election_module
from rdzv.stores.election import Election
from rdzv.stores.leader_key import Fence

TTL_S = 10.0


class Etcd:
    """One lease: it runs from when a renewal is carried out, not from when that is answered."""

    def __init__(self) -> None:
        self.now_s = 1_000.0
        self.expires_s = self.now_s + TTL_S
        self.answers_after_s = [0.0]
        """How late each renewal is answered; later ones get no answer."""

    class config:  # noqa: N801
        prefix = "/rdzv"

    async def keep_alive(self, lease: int, timeout_s: float) -> float:
        if not self.answers_after_s:
            # No further answer arrives: the caller's waiting time passes.
            self.now_s += timeout_s
            raise RendezvousConnectionError("no answer")
        self.expires_s = self.now_s + TTL_S
        self.now_s += self.answers_after_s.pop(0)
        return TTL_S

    @property
    def another_may_lead(self) -> bool:
        return self.now_s >= self.expires_s


@pytest.mark.parametrize("late_s", [0.0, 2.0, 3.0, 5.0])
async def test_a_renewal_that_is_answered_late_proves_nothing_for_longer(
    monkeypatch: pytest.MonkeyPatch, late_s: float
) -> None:
    """Counted from its answer, a term would continue when the next server already leads."""
    etcd = Etcd()
    etcd.answers_after_s = [late_s]

    async def happens(event: asyncio.Event, within_s: float) -> bool:
        await asyncio.sleep(0)
        etcd.now_s += 0 if event.is_set() else max(0.0, within_s)
        return event.is_set()

    monkeypatch.setattr(election_module, "_now_s", lambda: etcd.now_s)
    monkeypatch.setattr(election_module, "_happens", happens)
    client: Any = etcd
    first = Election(client, "first:1", "")
    session = election_module._Session(1, TTL_S, etcd.now_s - TTL_S / 2)
    session.lead(Fence(b"/rdzv/leader", 1, 1), etcd.now_s)
    first._session = session
    assert first.proven
    async with asyncio.timeout(60):
        await first._renew(session)
    # By the clock alone, at every moment until another may lead, and from then on.
    proven_until_s = session.proven_until_s
    assert proven_until_s < etcd.expires_s
    etcd.now_s = etcd.expires_s
    assert etcd.another_may_lead
    assert not first.proven
