"""A Control service that returns a test's data, over real gRPC on loopback."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Protocol

import grpc
import pytest
from _pytest.capture import CaptureResult

from rdzv.errors import (
    ERROR_CODE_METADATA_KEY,
    LEADER_METADATA_KEY,
    NotLeaderError,
    RendezvousError,
    UnknownJobError,
)
from rdzv.v1 import rdzv_pb2 as pb
from rdzv.v1 import rdzv_pb2_grpc as pb_grpc

Capture = pytest.CaptureFixture[str]


class Ctl(Protocol):
    """Runs `rdzvctl` with these words, checks its exit code, and returns its output."""

    def __call__(self, *words: str, code: int = 0) -> CaptureResult[str]: ...


class FakeControl(pb_grpc.ControlServicer):
    """Knows the given jobs; every call ends with `error`, if set."""

    def __init__(self) -> None:
        self.jobs: dict[str, pb.JobStatus] = {}
        self.hanging: dict[str, str] = {}
        self.history: list[pb.Event] = []
        self.nodes: dict[str, pb.Node] = {}
        self.error: RendezvousError | grpc.StatusCode | None = None
        self.next_error: Callable[[], RendezvousError | None] | None = None
        """Returns the error of the next call, instead of `error`."""
        self.error_text = "no details"
        self.tokens_asked = 0
        self.hangs = False
        self.limits: list[int] = []
        self._released = threading.Event()

    def GetStatus(  # noqa: N802
        self, request: pb.GetStatusRequest, context: grpc.ServicerContext
    ) -> pb.JobStatus:
        self._misbehave(context)
        self._known(request.rdzv_id, context)
        return self.jobs[request.rdzv_id]

    def ListJobs(  # noqa: N802
        self, request: pb.ListJobsRequest, context: grpc.ServicerContext
    ) -> pb.ListJobsResponse:
        self._misbehave(context)
        return pb.ListJobsResponse(jobs=[self._line(job) for job in self.jobs.values()])

    def _line(self, job: pb.JobStatus) -> pb.JobSummary:
        line = summary(job)
        line.hangs = self.hanging.get(job.rdzv_id, "")
        return line

    def ListEvents(  # noqa: N802
        self, request: pb.ListEventsRequest, context: grpc.ServicerContext
    ) -> pb.ListEventsResponse:
        self._misbehave(context)
        self._known(request.rdzv_id, context)
        self.limits.append(request.limit)
        return pb.ListEventsResponse(events=self.history[-request.limit :])

    def ListNodes(  # noqa: N802
        self, request: pb.ListNodesRequest, context: grpc.ServicerContext
    ) -> pb.ListNodesResponse:
        self._misbehave(context)
        named = request.node_ids or list(self.nodes)
        return pb.ListNodesResponse(nodes=[self.nodes[one] for one in named if one in self.nodes])

    def CordonNode(  # noqa: N802
        self, request: pb.CordonNodeRequest, context: grpc.ServicerContext
    ) -> pb.Node:
        self._misbehave(context)
        node = self.nodes[request.node_id]
        node.cordoned, node.cordon_reason = True, request.reason
        return node

    def UncordonNode(  # noqa: N802
        self, request: pb.UncordonNodeRequest, context: grpc.ServicerContext
    ) -> pb.Node:
        self._misbehave(context)
        node = self.nodes[request.node_id]
        node.cordoned, node.cordon_reason = False, ""
        return node

    def CreateToken(  # noqa: N802
        self, request: pb.CreateTokenRequest, context: grpc.ServicerContext
    ) -> pb.CreateTokenResponse:
        self.tokens_asked += 1
        self._misbehave(context)
        return pb.CreateTokenResponse(token=pb.Token(name=request.name), text="secret")

    def release(self) -> None:
        self._released.set()

    def _misbehave(self, context: grpc.ServicerContext) -> None:
        if self.hangs:
            self._released.wait(100)
        if self.next_error is not None:
            self.error = self.next_error()
        if isinstance(self.error, RendezvousError):
            _abort(context, self.error)
        if isinstance(self.error, grpc.StatusCode):
            context.abort(self.error, self.error_text)

    def _known(self, rdzv_id: str, context: grpc.ServicerContext) -> None:
        if rdzv_id not in self.jobs:
            _abort(context, UnknownJobError(f"no job {rdzv_id} is known here"))


def _abort(context: grpc.ServicerContext, error: RendezvousError) -> None:
    trailing = [(ERROR_CODE_METADATA_KEY, error.code)]
    if isinstance(error, NotLeaderError):
        trailing.append((LEADER_METADATA_KEY, error.leader))
    context.set_trailing_metadata(tuple(trailing))
    context.abort(grpc.StatusCode[error.grpc_status], str(error))


def summary(job: pb.JobStatus) -> pb.JobSummary:
    return pb.JobSummary(
        rdzv_id=job.rdzv_id,
        run=job.run,
        state=job.state,
        reason=job.reason,
        round=job.round if job.HasField("round") else None,
        nodes=sum(1 for node in job.nodes if node.state == "seated"),
        min_nodes=job.min_nodes,
        max_nodes=job.max_nodes,
        world_size=job.world_size,
        restarts=job.restarts if job.HasField("restarts") else None,
        max_restarts=job.max_restarts if job.HasField("max_restarts") else None,
        state_age_ms=job.state_age_ms,
        backend=job.backend,
    )


@contextmanager
def serving(control: FakeControl) -> Iterator[str]:
    """Serve until the end of the block; the value is the endpoint."""
    server = grpc.server(futures.ThreadPoolExecutor(2))
    pb_grpc.add_ControlServicer_to_server(control, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        control.release()
        server.stop(None).wait()
