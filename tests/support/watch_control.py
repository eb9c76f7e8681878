"""A Control service with one watched job, and the job's updates."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import grpc
from fake_control import FakeControl

from rdzv.v1 import rdzv_pb2 as pb
from rdzv.view.answers import Event

NOON_S = 1_700_049_600.0
RUN = "5f3a9c21"


class WatchControl(FakeControl):
    """Pushes a test's updates, the last one when it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.pushed: list[pb.JobStatus] = []
        self.go_on = threading.Event()
        self.asked_for_events = threading.Event()

    def GetStatus(  # noqa: N802
        self, request: pb.GetStatusRequest, context: grpc.ServicerContext
    ) -> pb.JobStatus:
        self._misbehave(context)
        return self.pushed[0]

    def WatchJob(  # noqa: N802
        self, request: pb.GetStatusRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.JobStatus]:
        self._misbehave(context)
        *first, last = self.pushed
        yield from first
        self.go_on.wait(100)
        yield last

    def ListEvents(  # noqa: N802
        self, request: pb.ListEventsRequest, context: grpc.ServicerContext
    ) -> pb.ListEventsResponse:
        self.asked_for_events.set()
        return super().ListEvents(request, context)


def event(age_s: float, name: str, text: str, run: str = RUN) -> Event:
    return Event(round((NOON_S - age_s) * 1000), run, name, text)


HISTORY = (
    event(99_000, "RoundCompleted", "round 9 of a run before", "other"),
    event(1_000, "RunBegan", f"run 1 ({RUN}) began: n1 is there"),
    event(990, "NodeJoined", "n1 joined from 10.0.0.1 with 8 workers"),
    event(970, "LastCallBegan", "last call: 3 nodes ready; waiting up to 30 s for more"),
    event(900, "RoundCompleted", "round 1 complete: n1=0..7 n2=8..15 n3=16..23, world_size 24"),
    event(400, "RoundEnded", "round 1 ended (node lost): n2 was lost: lease expired"),
    event(399, "RoundSettled", "round 1 is charged to node lost: n2 was lost"),
    event(350, "RoundCompleted", "round 2 complete: n1=0..7 n3=8..15 n4=16..23, world_size 24"),
)
