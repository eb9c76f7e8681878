"""Chooses the parked workers that the next round keeps, and the one with the newest state.

A parked worker has survived the round that ended, and its node offers it with the join. It is
*kept* if it can continue from where the others are: it took part in the round that just ended, its
failure did not end that round, and it is within one step of the *source*, which is the kept worker
that has sealed the most steps. All other workers are *new*: they are started by their nodes and
healed by the source.

A state may be *sharded*, in which case each worker holds one part of it. The round resumes at the
newest step for which every part is held, and is divided anew if the number of workers changes. If
no worker holds some part, none is kept: the job must load a snapshot or its own checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import StrEnum

from rdzv.core.model import Cause, KeptWorker, Participant, Round, WaitingNode
from rdzv.core.root_cause import charged_failures, is_odd_replica
from rdzv.structs import replace, struct


class WhyNew(StrEnum):
    """The reason why a worker that could have been kept is new."""

    NOT_OFFERED = "not offered"
    OTHER_ROUND = "other round"
    NOBODY = "nobody"
    FAILED = "failed"
    CHARGED = "charged"
    NO_STEP = "no step"
    TORN = "torn"
    OUT_OF_STEP = "out of step"
    SHARD_LOST = "shard lost"


WHY_NEW: Mapping[str, str] = {
    WhyNew.NOT_OFFERED: "ended, or not parked in time",
    WhyNew.OTHER_ROUND: "not in the last round",
    WhyNew.NOBODY: "the end of the last round required new processes",
    WhyNew.FAILED: "failed in the last round",
    WhyNew.CHARGED: "a collective failed, with no other cause",
    WhyNew.NO_STEP: "kept workers sealed no step in a round that failed, or in two that broke",
    WhyNew.TORN: "a step is incomplete, and no worker has a whole state",
    WhyNew.OUT_OF_STEP: "more than one step away from the source",
    WhyNew.SHARD_LOST: "no kept worker holds a part of the sharded state, or not of the same step",
}


@struct(frozen=True)
class NotKept:
    """Workers that could have been kept but are new, identified by their RANKs in the new round."""

    why: WhyNew
    ranks: tuple[int, ...]


def kept_workers(round_: Round | None) -> int:
    """Return how many of a round's workers are the same processes as in the previous round."""
    return sum(len(p.kept) for p in round_.participants) if round_ is not None else 0


def keep(
    prior: Round | None, round_: Round, joins: Mapping[str, WaitingNode]
) -> tuple[Round, tuple[NotKept, ...]]:
    """Return a new round with the workers that it keeps, and why others are new.

    `prior` is the previous round of this run, if any; its end is settled. `joins` has an entry for
    each participant. Failures soon after the first one count as its consequences. If there is no
    source, the kept workers have sealed no step and start from the beginning like all others.
    """
    participants = round_.participants
    if not any(joins[p.node_id].kept for p in participants):
        return round_, ()
    last = _last_round(prior)
    able: dict[int, KeptWorker] = {}
    new: dict[int, WhyNew] = {}
    for participant in participants:
        joined = joins[participant.node_id]
        offers = {offer.local_rank: offer for offer in joined.kept}
        known = last.knows(participant, joined)
        for local_rank in range(participant.offer.local_world_size if known or offers else 0):
            rank, offer = participant.rank_first + local_rank, offers.get(local_rank)
            worker = (participant.node_id, local_rank)
            if not known:
                new |= {rank: WhyNew.OTHER_ROUND} if offer else {}
            elif worker in last.failed:
                new[rank] = WhyNew.FAILED
            elif offer is None:
                new[rank] = WhyNew.NOT_OFFERED
            elif not last.keeps:
                new[rank] = WhyNew.NOBODY
            elif worker == last.charged:
                new[rank] = WhyNew.CHARGED
            else:
                able[rank] = offer
    source, sealed = _resume(able)
    why_none = _why_none(prior, able, source)
    for rank, offer in able.items():
        if why_none is not None:
            new[rank] = why_none
        elif sealed is not None and abs(_sealed(offer) - sealed) > 1:
            new[rank] = WhyNew.OUT_OF_STEP
    kept = able.keys() - new.keys()
    round_ = replace(
        round_,
        participants=tuple(_written(p, kept, new) for p in participants),
        source=source if kept else None,
        resume_step=sealed if kept else None,
        fruitless=bool(kept) and _fruitless(prior, able),
    )
    return round_, _grouped(new)


@struct(frozen=True)
class _LastRound:
    number: int | None
    sizes: Mapping[str, int]
    failed: frozenset[tuple[str, int]]
    """Node and LOCAL_RANK of each worker that failed on its own rather than as a suspect."""
    charged: tuple[str, int] | None
    """The suspect to which the end is charged."""
    keeps: bool

    def knows(self, participant: Participant, joined: WaitingNode) -> bool:
        """Return whether a participant's workers took part in that round and in none since."""
        size = self.sizes.get(participant.node_id)
        return joined.left_round == self.number and size == participant.offer.local_world_size


def _last_round(prior: Round | None) -> _LastRound:
    if prior is None or prior.end is None:
        return _LastRound(None, {}, frozenset(), None, keeps=False)
    first = next(iter(charged_failures(prior)), None)
    return _LastRound(
        number=prior.number,
        sizes={p.node_id: p.offer.local_world_size for p in prior.participants},
        failed=frozenset(
            (f.node_id, f.local_rank) for f in prior.end.failures if not (f.suspect or f.finished)
        ),
        charged=(first.node_id, first.local_rank) if first and first.suspect else None,
        keeps=prior.end.keep,
    )


def _resume(able: Mapping[int, KeptWorker]) -> tuple[int | None, int | None]:
    """Return the source's RANK and the newest step for which every part of the state is held.

    Both are None if there is no such step.
    """
    shards = _shards(able)
    furthest: dict[int, int] = {}
    whole = {
        rank: offer
        for rank, offer in able.items()
        if not offer.torn and _sealed(offer) and offer.shards == shards
    }
    for offer in whole.values():
        furthest[offer.shard] = max(_sealed(offer), furthest.get(offer.shard, 0))
    step = min(furthest.values(), default=0)
    held = {offer.shard for offer in whole.values() if _oldest(offer) <= step <= _sealed(offer)}
    if len(held) < shards:
        return None, None
    return min(rank for rank, offer in whole.items() if _sealed(offer) == step), step


def _shards(able: Mapping[int, KeptWorker]) -> int:
    return max((offer.shards for offer in able.values()), default=1)


def _oldest(offer: KeptWorker) -> int:
    """Return the oldest step to which a worker can go back; at most one step is ever undone."""
    oldest = _sealed(offer) if offer.oldest_step is None else offer.oldest_step
    return max(oldest, _sealed(offer) - 1)


def _sealed(offer: KeptWorker) -> int:
    return offer.step or 0


def _fruitless(prior: Round | None, able: Mapping[int, KeptWorker]) -> bool:
    if prior is None or prior.end is None or not kept_workers(prior):
        return False
    furthest = max(map(_sealed, able.values()), default=0)
    return furthest <= (prior.resume_step or 0) and (prior.end.broken or prior.fruitless)


def _why_none(
    prior: Round | None, able: Mapping[int, KeptWorker], source: int | None
) -> WhyNew | None:
    if _fruitless(prior, able) and prior is not None and prior.end is not None:
        # After an odd replica, steps were sealed, and given up.
        failed = prior.end.cause is Cause.WORKER_FAILURE and not any(
            map(is_odd_replica, charged_failures(prior)[:1])
        )
        if failed or (prior.end.broken and prior.fruitless):
            return WhyNew.NO_STEP
    torn = any(offer.torn or _sealed(offer) for offer in able.values())
    if source is None and torn:
        return WhyNew.SHARD_LOST if _shards(able) > 1 else WhyNew.TORN
    return None


def _written(
    participant: Participant, kept: Collection[int], new: Mapping[int, WhyNew]
) -> Participant:
    first = participant.rank_first
    ranks = range(first, first + participant.offer.local_world_size)
    charged = tuple(rank - first for rank in ranks if new.get(rank) is WhyNew.CHARGED)
    return replace(
        participant,
        kept=tuple(rank - first for rank in ranks if rank in kept),
        charged_suspects=charged,
    )


def _grouped(new: Mapping[int, WhyNew]) -> tuple[NotKept, ...]:
    ranks: dict[WhyNew, list[int]] = {}
    for rank in sorted(new):
        ranks.setdefault(new[rank], []).append(rank)
    return tuple(NotKept(why, tuple(ranks[why])) for why in WhyNew if why in ranks)
