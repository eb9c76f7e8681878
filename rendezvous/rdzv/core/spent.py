"""The budgets that a run has spent, as stored and as remembered by its nodes."""

from __future__ import annotations

from operator import itemgetter
from typing import Annotated

from rdzv.bounds import Age, Cut, Flat
from rdzv.structs import struct


@struct(frozen=True)
class Spent:
    """Counts of how a run's rounds ended. Restarts are kept separately, with their times."""

    preemptions: int = 0
    """The number of rounds that ended because a node was lost or left."""
    store_failures: int = 0
    """The number of rounds that ended because their store host failed."""
    soon: int = 0
    """The number of consecutive rounds that failed soon and without progress."""
    in_vain: int = 0
    """The number of consecutive restarts without progress."""
    furthest_step: int | None = None
    """The highest step that the job has ever reached."""


MAX_RESTART_AGES = 64
"""The maximum number of restart ages sent to each node. Older restarts are given the oldest of
these ages."""
LATEST = slice(-MAX_RESTART_AGES, None)


@struct(frozen=True)
class Tally:
    """The budgets, other than restarts, that a run had spent when a round was announced.

    The run's nodes keep it so that a server without memory can learn it from their recovery
    reports.
    """

    spent: Annotated[Spent, Flat] = Spent()
    restarts_ms: Annotated[tuple[int, ...], Age("restart_ages_ms"), Cut(itemgetter(LATEST))] = ()
    """Times of the spent restarts that are still within `restart_window`, oldest first, by the
    holder's clock. Empty without a window, because all restarts then count."""
