"""Compares replicas: a digest of parameters and optimizer state, on all ranks, every few steps.

Replicas of one step are equal bit for bit, whatever random numbers the script draws, because all of
them apply the same averaged gradients. If one of three or more differs, its node has changed a bit
or computed wrongly. The others have averaged its gradients since, so they go back to the last step
at which all were equal.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from .healing import digest_of
from .rounds import (
    MismatchError,
    OddReplicaError,
    ReplicasDifferError,
    UnsupportedError,
    exchange,
)
from .staging import digest

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from .healing import StateOffer
    from .rounds import Round
    from .sealing import Sealing

_NAMED = 4
"""How many ranks or entries are named."""


def majority(digests: Mapping[int, str]) -> tuple[list[int], list[int]]:
    """Return the ranks with the digest of more than half, if there is one, and all other ranks.

    >>> majority({0: "a", 1: "b", 2: "a"})
    ([0, 2], [1])
    >>> majority({0: "a", 1: "b"})
    ([], [0, 1])
    """
    [(most, count)] = Counter(digests.values()).most_common(1)
    if 2 * count <= len(digests):
        return [], sorted(digests)
    agree = [rank for rank, one in digests.items() if one == most]
    return sorted(agree), sorted(digests.keys() - set(agree))


def gather(mine: str, world_size: int) -> list[str]:
    """Return all ranks' digests, by an all-gather in the default group."""
    device = "cpu" if "gloo" in str(dist.get_backend_config()) else torch.device("cuda")
    sent = torch.tensor(list(bytes.fromhex(mine)), dtype=torch.uint8, device=device)
    came = [torch.empty_like(sent) for _ in range(world_size)]
    dist.all_gather(came, sent)
    return [bytes(one.tolist()).hex() for one in came]


class Verifying:
    """Verifies a state across rounds; with `every` None, it does nothing."""

    def __init__(
        self,
        sealing: Sealing,
        every: int | None,
        clear_redone: Callable[[], None],
        leave_round: Callable[[str], NoReturn],
    ) -> None:
        self._sealing = sealing
        self._clear_redone = clear_redone
        self._leave_round = leave_round
        self._every = every or 0
        self._round: Round | None = None
        self._store: Store | None = None
        self._is_first = True
        """Whether no step of this round has been verified."""
        self._is_proven = False
        """Whether the replicas have been equal after a step. Otherwise they may be none."""
        self._last_odd: list[Any] = []
        """Rank, host and step of an odd replica, until that step has been redone."""

    def offered(self) -> dict[str, Any]:
        return {
            "verify_every": self._every,
            "is_proven": self._is_proven,
            "last_odd": self._last_odd,
        }

    def compare(self, offers: Sequence[StateOffer], round_: Round, store: Store) -> None:
        """Judge what kept ranks offer, before it becomes everyone's.

        Raises `MismatchError` if ranks verify at different steps, as they would wait forever.
        """
        self._round, self._store, self._is_first = round_, store, True
        for rank, one in enumerate(offers):
            if one.verify_every != offers[0].verify_every:
                raise MismatchError(
                    f"verify_every is {one.verify_every or None} on rank {rank}, and "
                    f"{offers[0].verify_every or None} on rank 0: give the same on every rank"
                )
        if not self._every:
            return
        self._is_proven = any(one.is_proven for one in offers)
        self._last_odd = max(one.last_odd for one in offers)  # All others know of none.
        whole = {rank: one for rank, one in enumerate(offers) if one.kept and one.digest}
        newest = max((one.sealed for one in whole.values()), default=0)
        digests = {rank: one.digest for rank, one in whole.items() if one.sealed == newest}
        if digests:
            self._judge(digests, newest)

    def refuse_shards(self) -> None:
        if self._every:
            raise UnsupportedError(
                "state.add() was called on a State with verify_every: the parts of a sharded model "
                "differ between ranks, and replicas of one part (HSDP) are not compared. Remove "
                "verify_every"
            )

    def begin_round(self) -> None:
        if self._every:
            self._hold()

    def committed(self) -> None:
        """Compare all replicas, if it is their step."""
        round_, sealing = self._round, self._sealing
        assert round_ is not None
        step = sealing.step or 0
        if not self._every or round_.world_size == 1:
            return
        if step % self._every and not self._is_first:
            return
        try:
            digests = gather(digest_of(sealing.image({})), round_.world_size)
        except Exception:
            # Others may know that the replicas differ, so this step is not offered to anyone.
            sealing.go_back()
            raise
        self._judge(dict(enumerate(digests)), step)
        self._is_first, self._is_proven = False, True
        if self._last_odd and step >= self._last_odd[2]:
            self._last_odd = []
        self._hold()

    def _hold(self) -> None:
        assert self._round is not None
        # The other ranks of a node are healed, as by its snapshot.
        self._sealing.hold_verified(with_tensors=self._round.local_rank == 0)

    def _judge(self, digests: Mapping[int, str], step: int) -> None:
        """Go back and leave the round, unless all are equal. All ranks must call it together.

        Raises `OddReplicaError` on the ranks that differ from the others, and `ReplicasDifferError`
        if nothing shows which are right.
        """
        most, others = majority(digests)
        if not others:
            return
        round_, store, sealing = self._round, self._store, self._sealing
        assert round_ is not None and store is not None
        reference = (most or others)[0]
        odd = [rank for rank in others if rank != reference]
        entries = {}
        if round_.rank in (reference, *odd):
            tensors = sealing.image({}).tensors()
            entries = {name: digest([(name, one)]) for name, one in tensors}
        verified = sealing.go_back()
        if sealing.has_begun:
            self._clear_redone()
        published = entries if round_.rank == reference else {}
        published_by = exchange(store, round_, f"replicas {step}", [platform.node(), published])
        hosts = [host for host, _ in published_by]
        nobody = self._why_nobody(most, others, hosts)
        if not nobody:
            self._last_odd = [odd[0], hosts[odd[0]], step]
        where = " differs from that of ".join(
            _listed(f"rank {rank} ({hosts[rank]}, {digests[rank][:8]})" for rank in ranks)
            for ranks in (odd, most or [reference])
        )
        if round_.rank not in odd:
            self._leave_round(f"replica digest: after step {step}, the state of {where}")
        differing = [
            name for name, one in entries.items() if published_by[reference][1].get(name) != one
        ]
        cause = nobody or "A bit was changed there, or computed wrongly"
        raise (ReplicasDifferError if nobody else OddReplicaError)(
            f"replica digest: after step {step}, {_listed(differing) or 'a digest'} of {where}; "
            f"all were equal at step {verified}. {cause}"
        )

    def _why_nobody(self, most: list[int], others: list[int], hosts: list[str]) -> str:
        """Say why no node is blamed; empty if those of the `others` are."""
        if not self._is_proven:
            return (
                "But they have not been equal after any step, so they are no replicas: the script "
                "trains them differently (experts, an average that one rank updates), or kinds of "
                "hardware differ. Keep such entries out of State, or remove verify_every"
            )
        if not most and len(others) == 2:
            return (
                "Both nodes are suspected: one has changed a bit or computes wrongly, and two "
                "replicas do not show which; three would"
            )
        if not most:
            return "No majority agrees, so no node is blamed: the script itself may differ"
        rank, host, _ = self._last_odd or (None, "", 0)
        if rank == others[0] and host != hosts[rank]:
            return f"So did it on {host} before: the script changes it, and no node is blamed"
        return ""


def _listed(names: Iterable[str]) -> str:
    shown = list(names)
    more = [f"{len(shown) - _NAMED} more"] if len(shown) > _NAMED else []
    return ", ".join([*shown[:_NAMED], *more])
