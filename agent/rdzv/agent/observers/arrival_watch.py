"""Reports when this node's workers in one job enter collectives, from torch's record of them.

How much is reported hardly depends on how many collectives there were: `chosen` selects the same
ones on every node. One on GPUs is recorded when it is enqueued, which says little, so it is
reported only if torch measured its duration (TORCH_NCCL_ENABLE_TIMING=1).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from rdzv.agent.observers.collective_records import NoRecordError, RecordReader
from rdzv.agent.observers.flight_records import GroupTimes
from rdzv.agent.observers.server_clock import Reading
from rdzv.agent.observers.stack_sampling import Target
from rdzv.core.evidence.stragglers import chosen
from rdzv.core.model import Assignment
from rdzv.messages import Arrivals, GroupArrivals, RankArrivals

log = logging.getLogger("rdzv.agent")

LEAST_S, MOST_S = 1.0, 5.0
"""The bounds for the pause between two reads."""
PAUSE_PER_LOOK = 250
"""The ratio of the pause to the duration of the last read, within these bounds."""
PER_NODE_S = 0.002
"""The minimum pause per node of a round, so that one job sends at most 500 reports a second."""
ASK_TIMEOUT_S = 3.0
MOST, MOST_OF_ALL_RANKS = 64, 4_096
"""The maximum number of one group's collectives in one report, and over all of a group's ranks."""
LEAST = 4


class ArrivalWatch:
    """Watches one job's workers. Call `open_round` and `close_round` in each round."""

    def __init__(
        self,
        rdzv_id: str,
        records: RecordReader,
        running: Mapping[int, Target],
        say: Callable[[Arrivals], None],
        read_clock: Callable[[], Reading | None],
    ) -> None:
        self._rdzv_id = rdzv_id
        self._records = records
        self._say = say
        self._read_clock = read_clock
        self._running = running
        self._reported: dict[str, int] = {}
        self._watching: asyncio.Task[None] | None = None

    def open_round(self, assignment: Assignment) -> None:
        self.close_round()
        if self._records.on and assignment.world_size > 1:
            self._watching = asyncio.get_running_loop().create_task(self._watch(assignment))

    def close_round(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        self._reported = {}

    async def _watch(self, assignment: Assignment) -> None:
        pause_s = LEAST_S
        while True:
            await asyncio.sleep(max(pause_s, PER_NODE_S * assignment.group_world_size))
            begun_s = time.monotonic()
            try:
                await self._look(assignment)
            except Exception:
                log.exception("%s: cannot report its workers' collectives", self._rdzv_id)
                return
            pause_s = min(max(PAUSE_PER_LOOK * (time.monotonic() - begun_s), LEAST_S), MOST_S)

    async def _look(self, assignment: Assignment) -> None:
        # The response improves the estimate for the next read.
        clock = self._read_clock() if assignment.group_world_size > 1 else None
        workers = [worker for worker in self._running.values() if worker.file]
        times = await asyncio.gather(*(self._times(worker) for worker in workers))
        by_rank = {worker.rank: groups for worker, groups in zip(workers, times, strict=True)}
        most = min(max(MOST_OF_ALL_RANKS // assignment.world_size, LEAST), MOST)
        found = arrivals(by_rank, self._reported, most, clock)
        if found:
            self._say(Arrivals(assignment.rdzv_id, assignment.run, assignment.round, tuple(found)))

    async def _times(self, worker: Target) -> Mapping[str, GroupTimes]:
        with contextlib.suppress(NoRecordError):
            return await self._records.times(worker.file, worker.pid, ASK_TIMEOUT_S)
        return {}


def arrivals(
    by_rank: Mapping[int, Mapping[str, GroupTimes]],
    reported: dict[str, int],
    most: int,
    clock: Reading | None,
) -> list[GroupArrivals]:
    """Return what is new since `reported`, and update that. Each comes with the next one."""
    found = []
    for name in sorted({name for groups in by_rank.values() for name in groups}):
        of = {rank: groups[name] for rank, groups in by_rank.items() if name in groups}
        common = set.intersection(*(set(times.at_us) for times in of.values()))
        new = sorted(n for n in common if n > reported.get(name, 0))
        if len(new) < 2:
            continue
        reported[name] = new[-2]
        firsts = [n for n in chosen(new[0], new[-2], most) if n in common and n + 1 in common]
        sequences = tuple(sorted({*firsts, *(n + 1 for n in firsts)}))
        if sequences:
            found.append(_group(name, of, sequences, (new[0], new[-1]), clock))
    return found


def _group(
    name: str,
    of: Mapping[int, GroupTimes],
    sequences: Sequence[int],
    new: tuple[int, int],
    clock: Reading | None,
) -> GroupArrivals:
    some = next(iter(of.values()))
    passed_us = some.recorded_us[new[1]] - some.recorded_us[new[0]]
    # Times relative to the common end need no clock.
    offset_us = 0 if clock is None or some.by_duration else clock.offset_us
    return GroupArrivals(
        group=name,
        per_second=(new[1] - new[0]) * 1e6 / max(passed_us, 1),
        error_us=0 if some.by_duration else None if clock is None else clock.error_us,
        sequences=tuple(sequences),
        ranks=tuple(
            RankArrivals(rank, tuple(times.at_us[n] + offset_us for n in sequences))
            for rank, times in sorted(of.items())
        ),
    )
