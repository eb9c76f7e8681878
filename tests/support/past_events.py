"""Events of a job's past, and its line in a list, as received by a client."""

from __future__ import annotations

import json

import msgspec

from rdzv.transport.wire import read
from rdzv.v1 import rdzv_pb2 as pb
from rdzv.view.answers import Event, JobSummary
from rdzv.view.history import Kept
from rdzv.view.sentences import sentence


def an_event(kept: Kept, run: str | None = "r", at_ms: int = 0) -> Event:
    fields = json.loads(msgspec.json.encode(kept))
    return Event(at_ms, run, type(kept).__name__, sentence(kept), fields)


def a_summary(rdzv_id: str, min_nodes: int = 0, max_nodes: int = 0) -> JobSummary:
    """A running job's line in a list. Bounds of 0 are unknown."""
    bounds = {"min_nodes": min_nodes, "max_nodes": max_nodes} if min_nodes else {}
    return read(JobSummary, pb.JobSummary(rdzv_id=rdzv_id, state="running", **bounds))
