"""Holds back the exit of a worker whose collective has failed, until all ranks have been queried.

A collective that times out fails on the ranks that have entered it. The rank that has not is still
running, and its stack shows what it is doing instead. So the timeout is reported as a hang, and the
server ends the round because of the rank that the others wait for. If it finds nothing, or is away,
the exit is soon processed like any other. Peers lose their connections at the first exit, and hold
back theirs for a moment, too.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable

from rdzv.agent.observers.collective_records import RecordReader
from rdzv.core.evidence.collectives import MIN_WAIT_MS
from rdzv.core.evidence.hang_culprit import HungWorker
from rdzv.core.model import Assignment
from rdzv.messages import Hung

log = logging.getLogger("rdzv.agent")

HELD_S = 6.0
"""How long an exit is held back for the server to find whom its collective waited for."""
CUT_S = 1.0
"""The same for a lost connection, unless the server asks: it most often follows an exit."""


class HeldExits:
    """Holds back one job's exits. Call `open_round` and `close_round` in each round."""

    def __init__(self, rdzv_id: str, records: RecordReader, say: Callable[[Hung], None]) -> None:
        self._rdzv_id = rdzv_id
        self._records = records
        self._say = say
        self._assignment: Assignment | None = None
        self._over = asyncio.Event()
        self._limit: asyncio.Timeout | None = None

    def open_round(self, assignment: Assignment) -> None:
        self.close_round()
        if self._records.on and assignment.world_size > 1:
            self._assignment, self._over = assignment, asyncio.Event()

    def close_round(self) -> None:
        """Process the exit that is being held back, if any, and stop holding back exits."""
        self._assignment = None
        self._over.set()

    def note_asked(self) -> None:
        """Record that the server is taking the round's stacks, so that its verdict may follow."""
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time() + HELD_S)

    async def hold(self, local_rank: int, pid: int, file: str, signum: int | None) -> str:
        """If its collective has failed, hold the exit for the round to end; return which it is.

        If the collective waited only for a moment, the exit is not held back.
        """
        assignment, left = self._assignment, self._records.left(file, pid)
        if left is None:
            return ""
        place = left.record.place if left.error else ""
        if assignment is None or left.record.waiting_ms < MIN_WAIT_MS:
            return place
        # NCCL's watchdog aborts the worker. Another signal says nothing of its collective.
        timed_out = left.record.timed_out and (bool(left.error) or signum == signal.SIGABRT)
        if timed_out:
            rank, waited_ms = assignment.rank_first + local_rank, left.record.waiting_ms
            reason = f"its collective timed out after {waited_ms // 1000} s"
            log.error("%s: RANK %d (pid %d): %s", self._rdzv_id, rank, pid, reason)
            worker = HungWorker(rank, local_rank, pid, waited_ms, reason, timed_out=True)
            self._say(Hung(assignment.rdzv_id, assignment.run, assignment.round, (worker,)))
        try:
            async with asyncio.timeout(HELD_S if timed_out else CUT_S) as self._limit:
                await self._over.wait()
        except TimeoutError:
            # The other workers' exits are no more informative than this one's.
            self.close_round()
        finally:
            self._limit = None
        return place
