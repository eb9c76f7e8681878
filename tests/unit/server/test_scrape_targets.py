"""Agents are listed with the address of their metrics; a lost one stays listed for an hour."""

from __future__ import annotations

import pytest

from rdzv.server.telemetry import scrape_targets
from rdzv.server.telemetry.scrape_targets import KEPT_MS, ScrapeTargets
from tests.support.driven import FlakyStore, server


def test_a_node_is_listed_from_its_hello_until_an_hour_after_its_loss() -> None:
    targets = ScrapeTargets(most=10)
    targets.note("g1", "10.0.0.1:29481")
    targets.note("g2", "")
    assert targets.listed(0) == {"g1": "10.0.0.1:29481"}
    targets.lose("g1", 1_000)
    targets.lose("g2", 1_000)
    targets.lose("g3", 1_000)
    assert targets.listed(999 + KEPT_MS) == {"g1": "10.0.0.1:29481"}
    assert targets.listed(1_000 + KEPT_MS) == {}


def test_who_comes_back_is_where_it_says_now() -> None:
    targets = ScrapeTargets(most=10)
    targets.note("g1", "10.0.0.1:1")
    targets.lose("g1", 0)
    targets.note("g1", "10.0.0.1:2")
    assert targets.listed(2 * KEPT_MS) == {"g1": "10.0.0.1:2"}
    targets.note("g1", "")
    assert targets.listed(0) == {}


def test_no_place_is_listed_twice() -> None:
    """An agent was restarted under another name."""
    targets = ScrapeTargets(most=10)
    targets.note("old", "10.0.0.1:1")
    targets.lose("old", 0)
    targets.note("new", "10.0.0.1:1")
    assert targets.listed(1) == {"new": "10.0.0.1:1"}


def test_those_lost_are_bounded_and_the_latest_are_kept() -> None:
    targets = ScrapeTargets(most=3)
    for number in range(9):
        targets.note(f"g{number}", f"10.0.0.{number}:1")
        targets.lose(f"g{number}", number)
    assert list(targets.listed(10)) == ["g6", "g7", "g8"]


@pytest.mark.slow
async def test_a_server_lists_those_that_are_away_and_those_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # An hour has very many heartbeats.
    monkeypatch.setattr(scrape_targets, "KEPT_MS", 60_000)
    async with server(FlakyStore()) as s:
        g1 = await s.connect("g1", metrics="10.0.0.1:29481")
        await s.connect("g2")
        assert s.driver.agents() == {"g1": "10.0.0.1:29481"}
        s.driver.connections.detach(g1)
        await s.clock.advance(60_000)
        assert "g1" not in s.driver.leases.records
        assert s.driver.agents() == {"g1": "10.0.0.1:29481"}
        await s.clock.advance(60_000)
        assert s.driver.agents() == {}
