"""Reports the state of the GPUs that one job's workers use, if NVML shows it.

The server shows it next to any worker that is slower than the others. NVML is queried every half
minute, or less often if it is slow, in a separate thread; a driver that hangs costs one thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from rdzv.agent.core.model import Assignment
from rdzv.agent.inventory.gpu_states import UsedGpu, look_at_gpus
from rdzv.agent.launch.numa import HIDES_ALL
from rdzv.agent.runner.linux.process_tree import session_of
from rdzv.agent.system.side_thread import Aside
from rdzv.core.gpu_state import GpuState
from rdzv.structs import struct

log = logging.getLogger("rdzv.agent")

FIRST_S, LEAST_S = 10.0, 30.0
"""The wait before the first query, and the minimum pause between queries."""
PAUSE_PER_LOOK = 250
"""The ratio of the pause to the duration of the last query, unless the minimum is longer."""
PER_NODE_S = 0.01
"""The minimum pause per node of a round, so that one job sends at most 100 reports a second."""
WITHIN_S = 20.0
"""How long one query may take."""


@struct(frozen=True)
class RankGpu:
    """One worker's GPU."""

    rank: int
    gpu: GpuState


@struct(frozen=True)
class GpuReport:
    """The GPUs of one round's workers on this node."""

    run: str
    round: int
    ranks: tuple[RankGpu, ...]


class GpuWatch:
    """Watches one job's GPUs. Call `open_round`, then `close_round`, for each round."""

    def __init__(
        self,
        rdzv_id: str,
        visible: str | None,
        local_world_size: int,
        say: Callable[[GpuReport], None],
        look_at: Callable[[], Sequence[UsedGpu]] = look_at_gpus,
    ) -> None:
        self._rdzv_id = rdzv_id
        self._visible = visible
        self._local_world_size = local_world_size
        self._say = say
        self._look_at = look_at
        self._aside = Aside(WITHIN_S)
        self._pids: dict[int, int] = {}
        self._watching: asyncio.Task[None] | None = None

    def open_round(self, assignment: Assignment) -> None:
        """Start watching a round's workers as they are started."""
        self.close_round()
        if self._visible not in HIDES_ALL and assignment.world_size > 1:
            self._watching = asyncio.get_running_loop().create_task(self._watch(assignment))

    def worker_started(self, local_rank: int, pid: int) -> None:
        if self._watching is not None:
            self._pids[local_rank] = pid

    def worker_exited(self, local_rank: int) -> None:
        self._pids.pop(local_rank, None)

    def close_round(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        self._pids = {}

    async def _watch(self, assignment: Assignment) -> None:
        wait_s, told = FIRST_S, False
        while True:
            await asyncio.sleep(max(wait_s, PER_NODE_S * assignment.group_world_size))
            begun_s = time.monotonic()
            try:
                there = await self._aside.answer(self._look_at)
                found = by_worker(self._pids, there, self._visible, self._local_world_size)
            except TimeoutError:
                found = {}  # The last known state is too old.
            except Exception:
                log.exception("%s: cannot report the state of its GPUs", self._rdzv_id)
                return
            else:
                if not there:
                    return
            if found or told:
                told = bool(found)
                self._say(_report(assignment, found))
            wait_s = max(PAUSE_PER_LOOK * (time.monotonic() - begun_s), LEAST_S)


def _report(assignment: Assignment, found: Mapping[int, GpuState]) -> GpuReport:
    ranks = tuple(RankGpu(assignment.rank_first + n, gpu) for n, gpu in sorted(found.items()))
    return GpuReport(assignment.run, assignment.round, ranks)


def by_worker(
    pids: Mapping[int, int], gpus: Sequence[UsedGpu], visible: str | None, local_world_size: int
) -> dict[int, GpuState]:
    """Return each worker's GPU by LOCAL_RANK; if it uses several, the one slowed down most.

    A worker uses the GPUs on which processes in its session compute; `pids` are the workers' own.
    In a container, NVML may report the host's pids. If none of these exists here, worker n is
    assumed to use the n-th `visible` GPU, provided that there are as many GPUs as workers.
    """
    local_ranks = {pid: local_rank for local_rank, pid in pids.items()}
    found: dict[int, GpuState] = {}
    seen = False
    for gpu in gpus:
        leaders = [leader for pid in gpu.pids or () if (leader := session_of(pid)) is not None]
        seen = seen or bool(leaders) or gpu.pids == ()
        users = {local_ranks[leader] for leader in leaders if leader in local_ranks}
        for local_rank in users:
            known = found.get(local_rank, gpu.state)
            found[local_rank] = min(known, gpu.state, key=lambda state: state.pace)
    if seen:
        return found
    in_order = _visible(visible, gpus)
    if len(in_order) != local_world_size:
        return {}
    return {local_rank: in_order[local_rank] for local_rank in pids}


def _visible(visible: str | None, gpus: Sequence[UsedGpu]) -> list[GpuState]:
    """Return the GPUs that a process with this CUDA_VISIBLE_DEVICES sees, in its order."""
    if visible is None:
        return [gpu.state for gpu in gpus]
    found = []
    for token in visible.split(","):
        number = int(token) if token.isdecimal() else None
        found += [
            gpu.state
            for index, gpu in enumerate(gpus)
            if (index == number if number is not None else gpu.state.uuid.startswith(token))
        ]
    return found
