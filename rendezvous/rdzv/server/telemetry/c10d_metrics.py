"""Metrics for the jobs that rendezvous through torch's own store."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric

from rdzv.core.model import JobState, NodeState
from rdzv.view.answers import JobStatus

_LIVE = (JobState.JOINING, JobState.RUNNING)
_HERE = (NodeState.SEATED, NodeState.WAITING, NodeState.SPARE, NodeState.LOST)
"""The node states to count. Lost nodes count, because losing one does not re-form the group."""


def c10d_metrics(views: Iterable[JobStatus]) -> Iterator[Metric]:
    live = [view for view in views if view.state in _LIVE]
    jobs = Tally(view.state for view in live)
    family = GaugeMetricFamily(
        "rdzv_c10d_jobs", "Jobs in torch's own store that are not closed.", labels=("state",)
    )
    for state in _LIVE:
        family.add_metric((state,), jobs[state])
    yield family
    nodes = GaugeMetricFamily(
        "rdzv_c10d_job_nodes",
        "Nodes of a job in torch's own store.",
        labels=("rdzv_id", "state"),
    )
    rounds = GaugeMetricFamily(
        "rdzv_c10d_job_round",
        "Number of the last round that was completed in torch's own store.",
        labels=("rdzv_id",),
    )
    for view in live:
        found = Tally(node.state for node in view.nodes)
        for node_state in _HERE:
            nodes.add_metric((view.rdzv_id, node_state), found[node_state])
        if view.round is not None:
            rounds.add_metric((view.rdzv_id,), view.round)
    yield nodes
    yield rounds
