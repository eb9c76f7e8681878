"""The budgets that a run has spent, as stored and as its nodes remember them."""

from __future__ import annotations

from rdzv.structs import struct


@struct(frozen=True)
class Spent:
    """How a run's rounds have ended, in numbers; restarts are kept separately, with their times."""

    preemptions: int = 0
    """Rounds that ended because a node was lost or left."""
    store_failures: int = 0
    """Rounds that ended because their store host failed."""
    soon: int = 0
    """Consecutive rounds that failed soon and without progress."""
    in_vain: int = 0
    """Consecutive restarts without progress."""
    step: int | None = None
    """The highest step that the job has ever reached."""


MAX_RESTART_AGES = 64
"""The most restart ages sent to each node; older restarts are all given the oldest of these ages.
"""


@struct(frozen=True)
class Tally:
    """The budgets that a run had spent when a round was announced, apart from restarts.

    The run's nodes keep it, so that a server without memory learns it from their recovery reports.
    """

    spent: Spent = Spent()
    restart_ages_ms: tuple[int, ...] = ()
    """Ages of the spent restarts that still lie within `restart_window`, oldest first; empty
    without a window, because then all restarts count."""
