"""Converts nodes' reports about their workers to bounded and validated values."""

from __future__ import annotations

import math

from rdzv.server.messages import (
    Arrivals,
    GroupArrivals,
    Progress,
    RankProgress,
    StartedWorker,
    WorkersStarted,
)
from rdzv.server.settings import bounds
from rdzv.v1 import rdzv_pb2 as pb


def progress_of(message: pb.Progress) -> Progress:
    """Parse the progress of workers. Whether the node has these workers is checked later."""
    ranks = tuple(_rank_progress(one) for one in message.ranks)
    if len(ranks) > bounds.LOCAL_WORLD_SIZE:
        most = f"at most {bounds.LOCAL_WORLD_SIZE}"
        raise bounds.refusal("progress", len(ranks), "are too many workers of one node", most)
    if len({one.rank for one in ranks}) < len(ranks):
        raise bounds.refusal("progress", len(ranks), "workers have fewer RANKs", "name each once")
    return Progress(
        rdzv_id=bounds.rdzv_id_of(message.rdzv_id),
        run=bounds.uid("run", message.run),
        round=message.round,
        ranks=ranks,
    )


def _rank_progress(message: pb.RankProgress) -> RankProgress:
    if not 0 <= message.rate < math.inf:
        raise bounds.refusal("rate", message.rate, "is no rate", "give steps a second, from 0 on")
    age_ms = min(message.age_ms, bounds.TIMEOUT_MS)
    return RankProgress(message.rank, message.step, age_ms, message.rate)


def started_of(message: pb.WorkersStarted) -> WorkersStarted:
    """Parse how workers were started. Whether the node has these workers is checked later."""
    if len(message.workers) > bounds.LOCAL_WORLD_SIZE:
        most = f"at most {bounds.LOCAL_WORLD_SIZE}"
        given = len(message.workers)
        raise bounds.refusal("workers", given, "are too many workers of one node", most)
    return WorkersStarted(
        rdzv_id=bounds.rdzv_id_of(message.rdzv_id),
        run=bounds.uid("run", message.run),
        round=message.round,
        workers=tuple(
            StartedWorker(
                one.local_rank,
                bounds.label("how", one.how),
                bounds.sentence(one.why)[: bounds.LABEL_CHARS],
            )
            for one in message.workers
        ),
        not_loaded=bounds.sentence(message.not_loaded),
        forks=message.forks,
    )


def arrivals_of(message: pb.Arrivals) -> Arrivals:
    """Parse when workers entered collectives. Whether they exist is checked later."""
    groups = message.groups[: bounds.RECORD_GROUPS]
    told = sum(len(rank.entered_us) for group in groups for rank in group.ranks)
    if told > bounds.ARRIVALS:
        raise bounds.refusal("arrivals", told, "are too many", f"send at most {bounds.ARRIVALS}")
    return Arrivals(
        rdzv_id=bounds.rdzv_id_of(message.rdzv_id),
        run=bounds.uid("run", message.run),
        round=message.round,
        groups=tuple(_group_arrivals(one) for one in groups),
    )


def _group_arrivals(message: pb.GroupArrivals) -> GroupArrivals:
    if not 0 <= message.per_second < math.inf:
        raise bounds.refusal("per_second", message.per_second, "is no rate", "give one from 0 on")
    entered: dict[int, dict[int, int]] = {}
    for rank in message.ranks:
        if len(rank.entered_us) != len(message.sequences):
            most = f"send one time for each of the {len(message.sequences)} sequences"
            raise bounds.refusal("entered_us", len(rank.entered_us), "do not fit", most)
        for sequence, at_us in zip(message.sequences, rank.entered_us, strict=True):
            entered.setdefault(sequence, {})[rank.rank] = at_us
    error_us = message.error_us if message.HasField("error_us") else None
    return GroupArrivals(message.group[: bounds.LABEL_CHARS], message.per_second, error_us, entered)
