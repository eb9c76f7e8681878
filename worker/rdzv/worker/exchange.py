"""Exchanges small values between a round's ranks, through the round's store."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from .rounds import Round


def exchange(store: Store, round_: Round, name: str, mine: Any) -> list[Any]:
    """Publish this rank's value under a name, and return all ranks' values, ordered by rank.

    Blocks until all ranks have published their values. Values are JSON.
    """
    store.set(f"{name}/{round_.rank}", json.dumps(mine))
    keys = [f"{name}/{rank}" for rank in range(round_.world_size)]
    return [json.loads(one) for one in store.multi_get(keys)]
