"""Limits on what any one caller can use of a server; anything beyond is refused."""

from __future__ import annotations

import asyncio
import resource

import pytest

from rdzv.server.http.connection_limits import ConnectionLimits
from rdzv.server.rpc.grpc_listener import OTHER_FILES, connections_at_once
from rdzv.server.rpc.node_messages import RateLimit
from rdzv.server.settings.server_settings import Limits


@pytest.mark.parametrize(
    ("times_ms", "expected"),
    [
        ([0, 0, 0], "yyn"),
        ([0, 0, 99, 100, 100], "yynyn"),
        ([0, 0, 10_000, 10_000, 10_000], "yyyyn"),
        ([0, 0, 50, 100], "yyny"),
    ],
)
def test_a_burst_is_allowed_and_then_a_rate(times_ms: list[int], expected: str) -> None:
    allowed = RateLimit(burst=2, per_second=10)
    assert "".join("y" if allowed.take(at) else "n" for at in times_ms) == expected


class Connection(asyncio.Transport):
    def __init__(self, peer: str) -> None:
        super().__init__({"peername": (peer, 4711)})
        self._closed = False

    def close(self) -> None:
        self._closed = True

    def is_closing(self) -> bool:
        return self._closed


def test_one_address_has_a_part_of_the_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rdzv.server.http.connection_limits.CONNECTIONS", 3)
    monkeypatch.setattr("rdzv.server.http.connection_limits.CONNECTIONS_PER_PEER", 2)
    limits = ConnectionLimits(asyncio.Protocol)
    first = [Connection(peer) for peer in "aab"]
    assert list(map(limits.refusal_of, first)) == ["", "", ""]
    assert limits.refusal_of(Connection("c")) == "this server has 3 connections; try again later"
    first[2].close()
    assert limits.refusal_of(Connection("a")) == "a has 2 connections here; close some"
    assert limits.refusal_of(Connection("c")) == ""
    first[0].close()
    assert limits.refusal_of(Connection("a")) == ""


@pytest.mark.parametrize(
    ("files", "expected"),
    [(resource.RLIM_INFINITY, 32_768), (524_288, 32_768), (4_096, 4_096 - OTHER_FILES), (256, 128)],
)
def test_connections_leave_files_for_the_store(
    monkeypatch: pytest.MonkeyPatch, files: int, expected: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))
    assert connections_at_once(Limits()) == expected
