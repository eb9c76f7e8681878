"""Converts a run's tally, which the server sends with a round and nodes may send back."""

from __future__ import annotations

from rdzv.core.spent import MAX_RESTART_AGES, Spent, Tally
from rdzv.v1 import rdzv_pb2 as pb

MAX_AGE_MS = 1 << 62
"""The largest age: longer than any clock has run, although a stored time can be this far back."""


def tally_message(tally: Tally, since_ms: int = 0) -> pb.Tally:
    """Encode a tally that was created `since_ms` ago."""
    spent = tally.spent
    return pb.Tally(
        preemptions=spent.preemptions,
        store_failures=spent.store_failures,
        soon=spent.soon,
        in_vain=spent.in_vain,
        furthest_step=spent.step,
        restart_ages_ms=[age_ms + since_ms for age_ms in tally.restart_ages_ms],
    )


def tally_of(message: pb.Tally) -> Tally:
    """Decode a tally, limiting the number and size of its restart ages."""
    return Tally(
        Spent(
            preemptions=message.preemptions,
            store_failures=message.store_failures,
            soon=message.soon,
            in_vain=message.in_vain,
            step=message.furthest_step if message.HasField("furthest_step") else None,
        ),
        tuple(min(age_ms, MAX_AGE_MS) for age_ms in message.restart_ages_ms[-MAX_RESTART_AGES:]),
    )
