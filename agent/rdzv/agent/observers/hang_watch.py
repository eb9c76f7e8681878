"""Detects hung workers of one job on this node, for --hang-timeout, by `core/hang_decision`.

A worker is alive as long as it writes to the file named by RDZV_PROGRESS_FILE. If it has not done
so in this round, it is alive as long as it completes collectives, which its torch counts and is
asked for at long intervals. Hung workers are reported to the server, which stops them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rdzv.agent.core import hang_decision
from rdzv.agent.observers.collective_records import NoRecordError, RecordReader
from rdzv.agent.observers.flight_records import LEAST_ENTRIES
from rdzv.agent.observers.stack_sampling import process_state
from rdzv.agent.system.accounts import Identity, acting_as
from rdzv.core.evidence.hang_culprit import HangTimeout, HungWorker
from rdzv.core.evidence.stacks import STOPPED, ZOMBIE
from rdzv.core.model import Assignment
from rdzv.messages import Hung
from rdzv.runtime.clock import monotonic_ms

log = logging.getLogger("rdzv.agent")

LOOKS_PER_TIMEOUT = 10
LOOK_MOST_MS, LOOK_LEAST_MS = 1_000, 50
"""The bounds for the check interval, which is about a tenth of the time that workers may be silent.
"""
ASK_LEAST_MS = 1_000
"""The minimum interval at which workers are asked about their collectives, also about a tenth."""
BEGINS_MS = 120_000
"""How long after a worker's start a lack of collectives is not worth logging."""
ASK_TIMEOUT_S = 3.0
"""How long a worker's torch may take to respond."""
SAY_AGAIN_MS = 20_000
"""The interval at which reports of workers that still hang are repeated, in case one was lost."""


@dataclass(slots=True)
class _Worker:
    pid: int
    file: str
    activity: hang_decision.WorkerActivity
    hung: str = ""
    first: int | None = None
    """How many collectives it had completed when it first responded."""
    completed: int | None = None
    """The number in its last response, or None until it is known to complete any collectives."""
    answered_ms: int = 0


class HangWatch:
    """Watches one job's workers. Call `open_round` and `close_round` in each round."""

    def __init__(
        self,
        rdzv_id: str,
        timeout: HangTimeout | None,
        say: Callable[[Hung], None],
        records: RecordReader | None = None,
        identity: Identity | None = None,
        now_ms: Callable[[], int] = monotonic_ms,
    ) -> None:
        """Without a timeout, watch nothing; without `records`, ask nobody for collectives."""
        self._records = records
        self._asking: asyncio.Task[None] | None = None
        self._asked_ms = 0
        self._identity = identity
        self._rdzv_id = rdzv_id
        self._timeout = timeout
        self._say = say
        self._now_ms = now_ms
        self._assignment: Assignment | None = None
        self._workers: dict[int, _Worker] = {}
        self._longest_ms = 0
        self._timer: asyncio.TimerHandle | None = None
        self._looked_ms = 0
        self._said_ms = 0

    def open_round(self, assignment: Assignment) -> None:
        self.close_round()
        self._assignment = assignment
        self._begin_looking()

    def watch_anyway(self) -> None:
        """Watch with a learned limit, in this round and later ones, unless a timeout was given."""
        if self._timeout is None:
            log.info(
                "%s: workers use NCCL without torch's watchdog; using --hang-timeout=auto",
                self._rdzv_id,
            )
            self._timeout = HangTimeout()
            self._begin_looking()

    def worker_started(self, local_rank: int, pid: int, file: str) -> None:
        if self._assignment is not None:
            self._workers[local_rank] = _Worker(pid, file, hang_decision.WorkerActivity())

    def worker_exited(self, local_rank: int) -> None:
        worker = self._workers.pop(local_rank, None)
        if worker is not None and worker.hung:
            self._remember(worker)
            self._report()

    def close_round(self) -> None:
        self._disarm()
        if self._asking is not None:
            self._asking.cancel()
            self._asking = None
        for worker in self._hung().values():
            self._remember(worker)
        self._workers, self._assignment = {}, None

    def say_again(self) -> None:
        if self._hung():
            self._report()

    # ------------------------------------------------------------------ checks

    @property
    def watching(self) -> bool:
        """Whether workers are checked at intervals: in a round, if there is a timeout."""
        return self._timer is not None

    @property
    def _look_every_ms(self) -> int:
        assert self._timeout is not None
        every_ms = (self._timeout.ms or LOOK_MOST_MS * LOOKS_PER_TIMEOUT) // LOOKS_PER_TIMEOUT
        return min(max(every_ms, LOOK_LEAST_MS), LOOK_MOST_MS)

    def _begin_looking(self) -> None:
        if self._timeout is not None and self._assignment is not None:
            self._looked_ms = self._now_ms()
            self._arm()

    def _arm(self) -> None:
        self._disarm()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._look_every_ms / 1000, self.look)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def look(self) -> None:
        """A timer does this at intervals; it may be called in between."""
        assert self._timeout is not None
        now_ms = self._now_ms()
        # While this process was stopped it watched nothing, and perhaps nothing else was running,
        # either.
        passed_ms = min(now_ms - self._looked_ms, 2 * self._look_every_ms)
        self._looked_ms = now_ms
        self._ask(now_ms)
        changed = False
        for local_rank, worker in self._workers.items():
            before = worker.activity
            worker.activity = before.after(self._seen(worker), passed_ms)
            if worker.activity.intervals_ms is not before.intervals_ms:
                self._longest_ms = max(self._longest_ms, worker.activity.intervals_ms[-1])
            limit_ms = hang_decision.timeout_ms(self._timeout, worker.activity, self._longest_ms)
            hung = worker.activity.why_hung(limit_ms)
            if bool(hung) != bool(worker.hung):
                changed = True
                self._tell(local_rank, worker, hung)
            worker.hung = hung
        if changed or (self._hung() and now_ms - self._said_ms >= SAY_AGAIN_MS):
            self._report()
        self._arm()

    def _seen(self, worker: _Worker) -> hang_decision.Observation:
        state = process_state(worker.pid)
        switches = _switches(worker.pid) if state == hang_decision.UNINTERRUPTIBLE else None
        with acting_as(self._identity):
            report, exits = _last_report(worker.file), _is_over(worker.file, worker.pid)
        # Without a process, its exit is still to be handled.
        exits = exits or state in (ZOMBIE, "")
        if report is not None or worker.completed is None or exits:
            return hang_decision.Observation(report, state, switches, exits=exits)
        late_ms = 2 * self._ask_every_ms + int(ASK_TIMEOUT_S * 1000)
        # A worker stopped by a signal completes nothing, and does not respond.
        known = state == STOPPED or self._now_ms() - worker.answered_ms < late_ms
        return hang_decision.Observation(
            None, state, switches, worker.completed, self._ask_every_ms, known
        )

    # ------------------------------------------------------------------ counts of collectives

    @property
    def _ask_every_ms(self) -> int:
        assert self._timeout is not None
        return max(
            (self._timeout.ms or hang_decision.AUTO_LEAST_MS) // LOOKS_PER_TIMEOUT, ASK_LEAST_MS
        )

    def _ask(self, now_ms: int) -> None:
        reader, due = self._records, now_ms - self._asked_ms >= self._ask_every_ms
        if reader is None or not reader.on or not due or self._asking is not None:
            return
        self._asked_ms = now_ms
        asked = [worker for worker in self._workers.values() if worker.activity.report is None]
        if asked:
            self._asking = asyncio.get_running_loop().create_task(self._ask_all(reader, asked))

    async def _ask_all(self, reader: RecordReader, workers: Sequence[_Worker]) -> None:
        try:
            await asyncio.gather(*(self._count(reader, worker) for worker in workers))
        except Exception:
            log.exception("%s: cannot count its workers' collectives", self._rdzv_id)
        finally:
            if asyncio.current_task() is self._asking:
                self._asking = None

    async def _count(self, reader: RecordReader, worker: _Worker) -> None:
        """Ask how many collectives it has completed.

        If it completes none, and waits in none, they do not count: the script may use them only at
        its start.
        """
        try:
            begins = worker.activity.silent_ms < BEGINS_MS
            record = await reader.read(
                worker.file, worker.pid, LEAST_ENTRIES, ASK_TIMEOUT_S, begins=begins
            )
        except NoRecordError:
            return
        worker.answered_ms = self._now_ms()
        worker.first = record.completed if worker.first is None else worker.first
        if worker.completed is not None or record.waits or record.completed != worker.first:
            worker.completed = record.completed

    def _tell(self, local_rank: int, worker: _Worker, hung: str) -> None:
        assert self._assignment is not None
        who = (self._rdzv_id, self._assignment.rank_first + local_rank, worker.pid)
        if hung:
            log.error("%s: RANK %d (pid %d) hangs: %s; reported to the server", *who, hung)
        else:
            log.warning("%s: RANK %d (pid %d) no longer hangs", *who)

    def _remember(self, worker: _Worker) -> None:
        self._longest_ms = max(self._longest_ms, worker.activity.silent_ms)

    def _hung(self) -> Mapping[int, _Worker]:
        return {rank: worker for rank, worker in self._workers.items() if worker.hung}

    def _report(self) -> None:
        assignment = self._assignment
        if assignment is None:
            return
        self._said_ms = self._now_ms()
        workers = tuple(
            HungWorker(
                rank=assignment.rank_first + local_rank,
                local_rank=local_rank,
                pid=worker.pid,
                silent_ms=max(worker.activity.silent_ms, worker.activity.blocked_ms),
                reason=worker.hung,
            )
            for local_rank, worker in sorted(self._hung().items())
        )
        self._say(Hung(self._rdzv_id, assignment.run, assignment.round, workers))


def _last_report(file: str) -> tuple[int, ...] | None:
    """Return values that change with each write to a file, or None if there is no report."""
    with contextlib.suppress(OSError):
        if file and (found := Path(file).stat()).st_size:
            return found.st_ino, found.st_mtime_ns
    return None


def _is_over(file: str, pid: int) -> bool:
    """Return whether the script of the worker with this progress file is over, by its hook."""
    with contextlib.suppress(OSError, ValueError):
        return bool(file) and Path(file).with_name(f"collectives.{pid}.exits").exists()
    return False


def _switches(pid: int) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
        found = [int(line.split()[1]) for line in lines if "ctxt_switches:" in line]
        return sum(found) if found else None
    return None
