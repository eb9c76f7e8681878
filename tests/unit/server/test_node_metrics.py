"""Metrics of nodes: whose are listed, and how a node is asked for them on its own stream."""

from __future__ import annotations

import asyncio

import pytest

from rdzv.core.fleet.node_resources import NodeResources
from rdzv.errors import RendezvousConnectionError
from rdzv.messages import LogPiece, NodeMetrics, ReadMetrics
from rdzv.server.diagnosis.node_requests import METRICS_MS
from rdzv.server.http.listener import agent_labels
from rdzv.server.scheduling.fleet import TARGET_KEPT_MS
from rdzv.server.sessions.streams import Stream
from rdzv.server.settings.server_settings import Limits
from rdzv.structs import replace
from tests.support.driven import FlakyStore, Server, hello, read, server, settle

AGENT = {"resources": NodeResources(capacity=1)}


def note(s: Server, node_id: str, *, agent: bool = True) -> None:
    said = replace(hello(node_id), resources=AGENT["resources"] if agent else None)
    s.driver.fleet.note_hello(said)


async def test_an_agent_is_listed_until_an_hour_after_its_loss_and_rdzvrun_never() -> None:
    async with server() as s:
        fleet = s.driver.fleet
        note(s, "g1")
        note(s, "run", agent=False)
        assert fleet.agents() == ["g1"]
        for node_id in ("g1", "run", "never-known"):
            fleet.note_lost(node_id)
        await s.clock.pause(TARGET_KEPT_MS - 1)
        assert fleet.agents() == ["g1"]
        note(s, "g1")
        assert fleet.agents() == ["g1"]
        fleet.note_lost("g1")
        await s.clock.pause(TARGET_KEPT_MS)
        assert fleet.agents() == []


async def test_those_lost_are_bounded_and_the_latest_are_kept() -> None:
    async with server(limits=Limits(nodes=3)) as s:
        for number in range(9):
            note(s, f"g{number}")
            s.driver.fleet.note_lost(f"g{number}")
        assert s.driver.fleet.agents() == ["g6", "g7", "g8"]


@pytest.mark.slow
async def test_a_server_lists_those_that_are_away_and_those_lost() -> None:
    async with server(FlakyStore()) as s:
        g1 = await s.connect("g1", **AGENT)
        await s.connect("n2")
        s.driver.connections.detach(g1)
        assert s.driver.fleet.agents() == ["g1"]
        await s.clock.advance(60_000)
        assert "g1" not in s.driver.leases.records
        assert s.driver.fleet.agents() == ["g1"]


def test_very_many_agents_are_read_less_often() -> None:
    """So that a server of ten thousand nodes spends a few percent of a CPU on it."""
    names = [f"n{number}" for number in range(10_000)]
    assert not any("__scrape_interval__" in one for one in agent_labels(names[:1_500]))
    for few, interval in ((1_501, "16s"), (10_000, "100s")):
        found = {one["__scrape_interval__"] for one in agent_labels(names[:few])}
        assert found == {interval}


def asked(stream: Stream) -> int:
    (request,) = [told.request for told in read(stream) if isinstance(told, ReadMetrics)]
    return request


async def test_a_node_answers_for_itself_alone_and_each_request_once() -> None:
    async with server() as s:
        g1, g2 = await s.connect("g1", **AGENT), await s.connect("g2", **AGENT)
        reads = [asyncio.create_task(s.driver.requests.read_metrics("g1")) for _ in range(2)]
        await settle()
        first, second = (t.request for t in read(g1) if isinstance(t, ReadMetrics))
        s.report(g2, NodeMetrics(first, b"forged"))
        s.report(g1, LogPiece(first, data=b"not metrics"))
        for request in (second, first, first, 4_711):
            s.report(g1, NodeMetrics(request, f"request {request}".encode()))
        assert await asyncio.gather(*reads) == [b"request 1", b"request 2"]
        assert not s.driver.requests.unanswered


async def test_a_node_that_does_not_answer_or_goes_is_said_to() -> None:
    async with server() as s:
        with pytest.raises(RendezvousConnectionError, match="the agent of g1 is not connected"):
            await s.driver.requests.read_metrics("g1")
        g1 = await s.connect("g1", **AGENT)
        late = asyncio.create_task(s.driver.requests.read_metrics("g1"))
        await settle()
        request = asked(g1)
        await s.clock.pause(METRICS_MS)
        with pytest.raises(RendezvousConnectionError, match="g1 has not answered within 5 s"):
            await late
        s.report(g1, NodeMetrics(request, b"too late"))
        cut = asyncio.create_task(s.driver.requests.read_metrics("g1"))
        await settle()
        s.driver.connections.detach(g1)
        with pytest.raises(RendezvousConnectionError, match="not connected"):
            await cut
        assert not s.driver.requests.unanswered
