"""HTTP and gRPC give the same answers: each value is read back unchanged from its message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from samples import bare, full

from rdzv.core.model import JobSpec, Membership, NodeState, Settings, State, SubmittedRun
from rdzv.errors import UnknownJobError
from rdzv.server.operations.job_operations import SUMMARY_ITEMS, summary_of
from rdzv.structs import field_names, replace
from rdzv.transport.wire import read, write
from rdzv.v1 import rdzv_pb2 as pb
from rdzv.view import answers
from rdzv.view.job_status import view
from tests.support.driven import server

NOW_MS = 1_000_000
ANSWERS = (
    *(answers.JobStatus, answers.JobSummary, answers.Node, answers.Server, answers.Token),
    *(answers.StackReport, answers.LogLines, answers.Event),
)


@pytest.mark.parametrize("kind", ANSWERS)
@pytest.mark.parametrize("make", [full, bare])
def test_each_value_is_read_back_from_its_message(
    kind: type, make: Callable[[type], object]
) -> None:
    value, message = make(kind), getattr(pb, kind.__name__)()
    assert set(field_names(kind)) == set(message.DESCRIPTOR.fields_by_name)
    sent = write(message, value, NOW_MS).SerializeToString()
    assert read(kind, type(message).FromString(sent), now_ms=NOW_MS) == value


def test_a_line_counts_the_nodes_that_are_there_and_have_a_rank() -> None:
    here = replace(bare(answers.NodeStatus), state=NodeState.SEATED, group_rank=0)
    nodes = (here, replace(here, state=NodeState.LOST), replace(here, group_rank=None))
    status = replace(full(answers.JobStatus), nodes=nodes)
    items = status.reason.items * SUMMARY_ITEMS
    line = summary_of(replace(status, reason=replace(status.reason, items=items)), "RANK 3")
    assert (line.nodes, line.hangs, line.reason.items) == (1, "RANK 3", items[:SUMMARY_ITEMS])
    same = set(field_names(answers.JobSummary)) - {"nodes", "hangs", "reason"}
    assert {getattr(line, name) == getattr(status, name) for name in same} == {True}
    assert summary_of(status).hangs is None


def test_values_of_the_environment_are_not_told() -> None:
    spec = JobSpec(("train.py",), env=(("TOKEN", "hunter2"),))
    submission = SubmittedRun(spec, "ada at head", 4_000)
    stored = Membership("job-7", "run-1", 1, Settings(1, 2), 0, submission=submission)
    shown: Any = view(State(stored), NOW_MS).submission
    assert shown.env_names == ("TOKEN",)
    assert "hunter2" not in repr(shown)


async def test_whether_a_job_is_there_costs_no_view_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with server() as s:
        await s.pair()

        def views(*arguments: object) -> object:
            raise AssertionError("all nodes were looked at")

        monkeypatch.setattr("rdzv.server.operations.job_operations.view", views)
        with pytest.raises(AssertionError, match="all nodes"):
            await s.status()
        assert (await s.driver.operations.state("job-7")).membership.run
        assert await s.driver.operations.history("job-7", 10)
        with pytest.raises(UnknownJobError):
            await s.driver.operations.history("nobody", 10)
