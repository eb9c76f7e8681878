"""A straggler is shown, and told in an event."""

from __future__ import annotations

import pytest

from rdzv.core.events import RankCaughtUp, RankStraggles
from rdzv.core.evidence.progress_lag import RankProgress
from rdzv.core.fleet.nodes import LeaseRules
from rdzv.messages import Progress
from rdzv.server.sessions.streams import Stream
from rdzv.view.answers import event_in
from rdzv.view.history import read as event_of
from tests.unit.server.test_driver import Server, server, settle

PATIENT = LeaseRules(duration_ms=600_000)


async def train(s: Server, n1: Stream, n2: Stream, for_s: int, slow: float) -> None:
    """Let four workers report, the last of which is this many times slower."""
    for _ in range(for_s):
        await s.clock.advance(1_000)
        rates = ((n1, 0, 1.0), (n1, 1, 1.0), (n2, 2, 1.0), (n2, 3, 1.0 / slow))
        for node, rank, rate in rates:
            said = Progress("job-7", "run-1", 0, (RankProgress(rank, 5, 0, rate),))
            s.driver.reports.take(node, said)
    await settle()


async def told(s: Server) -> list[object]:
    rows = [event_in(row) for row in await s.driver.history.of("job-7", 1_000)]
    found = [event_of(row.name, row.fields or {}) for row in rows]
    return [one for one in found if isinstance(one, RankStraggles | RankCaughtUp)]


@pytest.mark.slow
async def test_a_straggler_is_shown_and_told() -> None:
    async with server(lease=PATIENT) as s:
        n1, n2 = await s.pair()
        await train(s, n1, n2, 40, slow=3.0)
        assert [one.rank for one in s.driver.diagnosis.stragglers.shown(s.state("job-7"))] == [3]
        (began,) = await told(s)
        assert isinstance(began, RankStraggles)
        assert (began.rank, began.node_id) == (3, "n2")
