"""A straggler is shown with its GPU's latest state, of the present round only."""

from __future__ import annotations

import pytest

from rdzv.core.events import RankCaughtUp, RankStraggles
from rdzv.core.fleet.nodes import NodesTuning
from rdzv.core.gpu_state import GpuState
from rdzv.errors import InvalidRequestError
from rdzv.server.messages import Progress, RankProgress, WorkerGpus
from rdzv.server.rpc.node_messages import NodeMessages
from rdzv.server.sessions.streams import Stream
from rdzv.server.settings import bounds
from rdzv.server.wire import inbound_reports
from rdzv.v1 import rdzv_pb2 as pb
from rdzv.view.answers import event_in
from rdzv.view.history import read as event_of
from tests.unit.server.test_driver import Server, server, settle

FULL_SPEED = GpuState("GPU-a", 1_980, 1_980, (), 0, 60)
HOT = GpuState("GPU-b", 600, 1_980, ("hardware thermal slowdown",), 0, 91)

PATIENT = NodesTuning(lease_ms=600_000)


async def train(s: Server, n1: Stream, n2: Stream, for_s: int, slow: float) -> None:
    """Let four workers report, the last of which is this many times slower."""
    for _ in range(for_s):
        await s.clock.advance(1_000)
        rates = ((n1, 0, 1.0), (n1, 1, 1.0), (n2, 2, 1.0), (n2, 3, 1.0 / slow))
        for node, rank, rate in rates:
            said = Progress("job-7", "run-1", 0, (RankProgress(rank, 5, 0, rate),))
            s.driver.reports.note_progress(node, said)
    await settle()


def gpus(by_rank: dict[int, GpuState], number: int = 0) -> WorkerGpus:
    return WorkerGpus("job-7", "run-1", number, by_rank)


def shown(s: Server) -> list[tuple[int, GpuState | None]]:
    return [(one.rank, one.gpu) for one in s.driver.views.stragglers("job-7")]


async def told(s: Server) -> list[object]:
    rows = [event_in(row) for row in await s.driver.history.of("job-7", 1_000)]
    found = [event_of(row.name, row.fields or {}) for row in rows]
    return [one for one in found if isinstance(one, RankStraggles | RankCaughtUp)]


@pytest.mark.slow
async def test_a_straggler_is_shown_with_the_latest_state_of_its_gpu() -> None:
    async with server(nodes_tuning=PATIENT) as s:
        n1, n2 = await s.pair()
        s.driver.reports.note_gpus(n1, gpus({0: FULL_SPEED}))
        s.driver.reports.note_gpus(n2, gpus({2: FULL_SPEED, 3: HOT}))
        await train(s, n1, n2, 40, slow=3.0)
        assert shown(s) == [(3, HOT)]
        (began,) = await told(s)
        assert isinstance(began, RankStraggles)
        assert (began.rank, began.gpu) == (3, HOT)
        s.driver.reports.note_gpus(n2, gpus({2: FULL_SPEED, 3: FULL_SPEED}))
        assert shown(s) == [(3, FULL_SPEED)]
        # A report of another round is ignored; its node may no longer know that round.
        s.driver.reports.note_gpus(n2, gpus({3: HOT}, number=1))
        assert shown(s) == [(3, FULL_SPEED)]
        s.driver.reports.note_gpus(n2, gpus({}))
        assert shown(s) == [(3, None)]


@pytest.mark.slow
async def test_those_who_watch_a_job_hear_of_a_stragglers_gpu_alone() -> None:
    async with server(nodes_tuning=PATIENT) as s:
        n1, n2 = await s.pair()
        await train(s, n1, n2, 40, slow=3.0)
        heard: list[str] = []
        s.driver.watchers.job_progressed = heard.append  # type: ignore[method-assign]
        s.driver.reports.note_gpus(n1, gpus({0: FULL_SPEED, 1: FULL_SPEED}))
        assert heard == []
        s.driver.reports.note_gpus(n2, gpus({2: FULL_SPEED, 3: HOT}))
        assert heard == ["job-7"]


async def test_a_node_speaks_of_its_own_workers_alone(caplog: pytest.LogCaptureFixture) -> None:
    """A wrong report leads to a warning only: the data is for people."""
    async with server() as s:
        n1, _n2 = await s.pair()
        with pytest.raises(InvalidRequestError, match="a GPU of RANK 3: n1 has no such"):
            s.driver.reports.note_gpus(n1, gpus({0: HOT, 3: HOT}))
        messages = NodeMessages(s.driver, n1, s.clock)
        said = pb.WorkerGpus(rdzv_id="job-7", run="run-1", ranks=[pb.RankGpu(rank=3)])
        messages.take(pb.NodeMessage(worker_gpus=said))
        assert "n1: ignoring an invalid report: a GPU of RANK 3" in caplog.text


def test_what_a_node_says_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rdzv.server.settings.bounds.LOCAL_WORLD_SIZE", 2)
    job = {"rdzv_id": "job-7", "run": "feed", "round": 2}
    reasons = [f"reason {n}" for n in range(40)]
    state = pb.GpuState(uuid="GPU-a", clock_reasons=reasons, uncorrected_errors=2**64 - 1)
    said = pb.WorkerGpus(**job, ranks=[pb.RankGpu(rank=1, gpu=state)])
    (gpu,) = inbound_reports.gpus_of(said).by_rank.values()
    assert gpu.clock_reasons == tuple(reasons[: bounds.CLOCK_REASONS])
    assert gpu.uncorrected_errors == bounds.STEPS
    assert (gpu.clock_mhz, gpu.temperature_c) == (None, None)
    many = pb.WorkerGpus(**job, ranks=[pb.RankGpu(rank=n) for n in range(3)])
    with pytest.raises(InvalidRequestError, match="too many workers of one node; at most 2"):
        inbound_reports.gpus_of(many)
