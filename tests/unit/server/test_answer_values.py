"""HTTP and gRPC give the same answers: each value is read back unchanged from its message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.message import Message

from rdzv.core.evidence.progress_lag import RankProgress
from rdzv.core.evidence.stacks import (
    Group,
    Report,
    SilentNode,
    StackFrame,
    ThreadStack,
    WorkerStack,
)
from rdzv.core.evidence.stragglers import Straggler
from rdzv.core.fleet.job_queue import QueuedWait
from rdzv.core.fleet.node_resources import Gpu
from rdzv.core.model import (
    DeclinedNode,
    Failure,
    JobSpec,
    Membership,
    Settings,
    State,
    Submission,
)
from rdzv.core.reason import Reason, ReasonItem
from rdzv.errors import UnknownJobError
from rdzv.server.diagnosis.worker_starts import Starts
from rdzv.server.operations.job_operations import summary_of, with_workers
from rdzv.server.security.tokens import Token
from rdzv.structs import replace
from rdzv.transport.wire import convert, read, write
from rdzv.v1 import rdzv_pb2 as pb
from rdzv.view import answers
from rdzv.view.answers import LogLines
from rdzv.view.explain import view
from tests.unit.server.test_driver import server
from tests.unit.server.test_wire import NODE, VIEW

NOW_MS = 10_000
BARE = replace(
    VIEW,
    **{"run": None, "run_number": None, "reason": Reason(), "round": None, "world_size": None},
    **{"restarts": None, "max_restarts": None, "nodes": (), "master_addr": None},
    **{"master_port": None, "budgets": None, "last_failure": None, "no_progress": False},
    ended_by_failure=False,
)
ZEROS = replace(VIEW, round=0, restarts=0, max_restarts=0, min_nodes=None, max_nodes=None)
FAILED = (
    Failure(0, 0, 4711, 0, None, "m", "t", 9_000, node_id="n1", address="10.0.0.1"),
    Failure(1, 9, 0, None, 9, "", "", 9_100, node_id="n2"),
)
SPEC = JobSpec(
    args=("train.py", "--epochs=9"),
    env=(("TOKEN", "hunter2"),),
    chdir="/home/ada",
    labels=(("gpu", "h100"), ("spare", "")),
    priority=-3,
    gpus_per_node=0,
    submitter="ada",
    account="ada",
)
SUBMITTED = Submission(SPEC, "ada at head", 4_000, ("n1", "n2"), (DeclinedNode("n3", "no /data"),))
STORED = Membership(
    *("job-7", "run-1", 1, Settings(1, 2), 0), submission=SUBMITTED, last_failures=FAILED
)
SHOWN = view(State(STORED), NOW_MS, QueuedWait(Reason("needs 1 node"), 0))
FULL = replace(
    VIEW,
    reason=Reason(
        "waiting for 1 more node",
        "gives up in",
        0,
        (
            ReasonItem("preempted", "n2", "about to leave", "it leaves in", 9),
            ReasonItem("the store is away"),
        ),
    ),
    nodes=(NODE, replace(NODE, role=None, address=None)),
    last_failure=replace(SHOWN.last_failure, age_ms=1_000),
    submission=SHOWN.submission,
    backend="c10d",
    owner="ada",
    has_secret=True,
    closed=True,
)
PLAIN_NODE = answers.Node(
    *("n1", "gone", None, None, None, None, None, None, (), False, None, None),
)
HAS = answers.Resources(
    *(8, 1 << 36, (Gpu("GPU-1", "H100", 80 << 30), Gpu("GPU-2", None, None))),
    *({"zone": "a"}, 2, "rack 1"),
)
NO_RESOURCES = answers.Resources(None, None, (), {}, 1, None)
EMPTY_NODE = replace(PLAIN_NODE, resources=NO_RESOURCES, gpus_free=0)
FULL_NODE = answers.Node(
    *("n1", "connected", 5, "rdzv-agent", "10.0.0.1", "0.1.0", HAS, 0),
    *((answers.NodeJob("job-7", 2, "holding"),), True, "disk", 9),
    metrics="10.0.0.1:29481",
    **{"quarantine": "at fault", "quarantine_age_ms": 1, "quarantine_left_ms": 0},
    **{"unhealthy": "disk /data", "unhealthy_age_ms": 0, "drain": "drained"},
    **{"drain_reason": "kernel", "drain_left_ms": 0, "drained_by_operator": True},
    **{"drain_age_ms": 3, "cordoned_besides": True},
)
STACK = WorkerStack(
    3,
    1,
    99,
    "D",
    (ThreadStack("main", True, (StackFrame("step", "train.py", None),)),),
    "n",
    ("futex",),
    "n1",
)
REPORT = Report(
    "job-7", "feed", 2, 9_000, "why", (Group((0, 1), "in step"),), (STACK, WorkerStack(4, 0, 0)), 7,
    (SilentNode("n2", 8, 8, "away"),),
)  # fmt: skip
PROGRESS = (RankProgress(0, 1_200, 10, 2.5), RankProgress(1, 1_190, 300, None))
SLOW = (
    Straggler(3, 9_500, 2.5, 0.5),
    Straggler(4, 9_500, late_ms=19.5, late_p95_ms=35.0, clock_error_ms=2.0, wait_share=0.125),
)
STARTS = {"n1": Starts(1, 0, 7)}


def into(kind: type[Message]) -> Callable[[object], Message]:
    return lambda value: write(kind(), value)


@pytest.mark.parametrize(
    ("value", "into", "kind"),
    [
        *(
            (with_workers(view, NOW_MS), into(pb.JobStatus), answers.JobStatus)
            for view in (VIEW, BARE, ZEROS, FULL)
        ),
        (
            with_workers(FULL, NOW_MS, PROGRESS, SLOW, STARTS),
            into(pb.JobStatus),
            answers.JobStatus,
        ),
        *(
            (summary_of(view, hangs), into(pb.JobSummary), answers.JobSummary)
            for view, hangs in ((VIEW, ""), (BARE, "RANK 3"), (ZEROS, ""), (FULL, "RANK 3"))
        ),
        *(
            (node, into(pb.Node), answers.Node)
            for node in (PLAIN_NODE, FULL_NODE, EMPTY_NODE)
        ),
        *(
            (view, into(pb.Server), answers.Server)
            for view in (
                answers.Server("h:1", False, None, "memory", "0.1.0", 5),
                answers.Server("h:1", True, 7, "sqlite", "0.1.0", 0, "no auth", "away", 9, "http://h:2"),
            )
        ),
        *(
            (token.shown(NOW_MS), into(pb.Token), answers.Token)
            for token in (
                Token("id", "ada", ("read",), "x", 4_000),
                Token("id", "ada", ("read", "operate"), "x", 4_000, 9_000, 10_001),
            )
        ),
        (
            convert(answers.StackReport, REPORT, age_ms=1_000),
            into(pb.StackReport),
            answers.StackReport,
        ),
        *(
            (lines, into(pb.LogLines), answers.LogLines)
            for lines in (
                LogLines("n1", "feed", 3, 1, True, 2, 4_711, b"x\xff"),
                LogLines("", "feed", note="nothing came"),
            )
        ),
    ],
)  # fmt: skip
def test_each_value_is_read_back_from_its_message(
    value: object, into: Callable[[Any], Message], kind: type
) -> None:
    message = into(value)
    assert read(kind, type(message).FromString(message.SerializeToString())) == value


def test_values_of_the_environment_are_not_told() -> None:
    assert SHOWN.submission is not None
    assert SHOWN.submission.env_names == ("TOKEN",)
    assert "hunter2" not in repr(SHOWN)


async def test_whether_a_job_is_there_costs_no_view_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with server() as s:
        await s.pair()

        def views(*arguments: object) -> object:
            raise AssertionError("all nodes were looked at")

        monkeypatch.setattr("rdzv.server.operations.job_operations.view", views)
        with pytest.raises(AssertionError, match="all nodes"):
            await s.driver.operations.status("job-7")
        assert (await s.driver.operations.state("job-7")).membership.run
        assert await s.driver.operations.history("job-7", 10)
        with pytest.raises(UnknownJobError):
            await s.driver.operations.history("nobody", 10)
