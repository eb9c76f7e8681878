"""Agents are listed with the address of their metrics; a lost one stays listed for an hour."""

from __future__ import annotations

import pytest

from rdzv.core.fleet.nodes import AgentKind
from rdzv.messages import Hello
from rdzv.server.scheduling.fleet import TARGET_KEPT_MS
from rdzv.server.settings.server_settings import Limits
from tests.support.driven import FlakyStore, Server, server


def note(s: Server, node_id: str, metrics: str) -> None:
    hello = Hello(node_id, "one", AgentKind.DAEMON, "10.0.0.1", 99, 0, 0, metrics=metrics)
    s.driver.fleet.note_hello(hello)


async def test_a_node_is_listed_where_it_says_until_an_hour_after_its_loss() -> None:
    async with server() as s:
        fleet = s.driver.fleet
        note(s, "g1", "10.0.0.1:1")
        note(s, "g2", "")
        for node_id in ("g1", "g2", "g3"):
            fleet.note_lost(node_id)
        await s.clock.pause(TARGET_KEPT_MS - 1)
        assert fleet.scrape_targets() == {"g1": "10.0.0.1:1"}
        await s.clock.pause(1)
        assert fleet.scrape_targets() == {}
        note(s, "g1", "10.0.0.1:1")
        fleet.note_lost("g1")
        note(s, "g1", "10.0.0.1:2")
        assert fleet.scrape_targets() == {"g1": "10.0.0.1:2"}
        # Its agent was restarted under another name.
        fleet.note_lost("g1")
        note(s, "new", "10.0.0.1:2")
        assert fleet.scrape_targets() == {"new": "10.0.0.1:2"}


async def test_those_lost_are_bounded_and_the_latest_are_kept() -> None:
    async with server(limits=Limits(nodes=3)) as s:
        for number in range(9):
            note(s, f"g{number}", f"10.0.0.{number}:1")
            s.driver.fleet.note_lost(f"g{number}")
        assert list(s.driver.fleet.scrape_targets()) == ["g6", "g7", "g8"]


@pytest.mark.slow
async def test_a_server_lists_those_that_are_away_and_those_lost() -> None:
    async with server(FlakyStore()) as s:
        g1 = await s.connect("g1", metrics="10.0.0.1:29481")
        await s.connect("g2")
        assert s.driver.fleet.scrape_targets() == {"g1": "10.0.0.1:29481"}
        s.driver.connections.detach(g1)
        await s.clock.advance(60_000)
        assert "g1" not in s.driver.leases.records
        assert s.driver.fleet.scrape_targets() == {"g1": "10.0.0.1:29481"}
