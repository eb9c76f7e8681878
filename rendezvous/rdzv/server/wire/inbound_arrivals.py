"""Converts reports of when workers entered collectives to values, bounded and validated."""

from __future__ import annotations

import math

from rdzv.server.messages import Arrivals, GroupArrivals
from rdzv.server.settings import bounds
from rdzv.server.settings.config import Limits
from rdzv.v1 import rdzv_pb2 as pb


def arrivals_of(message: pb.Arrivals, limits: Limits) -> Arrivals:
    """Read when a node's workers entered collectives. The job knows which workers it has."""
    groups = message.groups[: limits.record_groups]
    told = sum(len(rank.entered_us) for group in groups for rank in group.ranks)
    if told > limits.arrivals:
        raise bounds.refusal("arrivals", told, "are too many", f"send at most {limits.arrivals}")
    return Arrivals(
        rdzv_id=bounds.rdzv_id_of(message.rdzv_id, limits),
        run=bounds.uid("run", message.run, limits),
        round=message.round,
        groups=tuple(_group_arrivals(one, limits) for one in groups),
    )


def _group_arrivals(message: pb.GroupArrivals, limits: Limits) -> GroupArrivals:
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
    return GroupArrivals(message.group[: limits.label_chars], message.per_second, error_us, entered)
