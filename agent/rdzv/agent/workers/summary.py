"""The final summary of a job on this node: how it ended, and which failure ended it.

It distinguishes between workers that failed, workers that failed as a consequence, and workers that
the agent ended.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence

from rdzv.agent.core.model import (
    EXIT_DENIED,
    EXIT_FAILED,
    EXIT_NO_PROGRESS,
    EXIT_TRY_AGAIN,
)
from rdzv.agent.system.error_files import describe_exit, signal_name
from rdzv.agent.workers.fates import NodeOutcome, Stop, WorkerFate
from rdzv.core.model import Failure
from rdzv.core.root_cause import is_connection_error
from rdzv.core.words import counted, duration
from rdzv.launch_options.job_options import root_cause_exit


def summary(rdzv_id: str, outcome: NodeOutcome) -> str:
    """Describe the outcome and, after a failure, which worker failed first in the last round."""
    lines = [f"{rdzv_id}: {outcome.text}"]
    if outcome.failures:
        first, *others = outcome.failures
        lines += ["Root cause, the first failure of the last round:", *_indented(_in_full(first))]
        if is_connection_error(first):
            lines.append("It is itself a broken connection: look at its other end.")
        followed = [failure for failure in others if is_connection_error(failure)]
        beside = [failure for failure in others if not is_connection_error(failure)]
        if followed:
            lines += ["Failed because of it, when their connections broke:", *_in_short(followed)]
        if beside:
            lines += ["Failed at the same time, perhaps because of it:", *_in_short(beside)]
        if outcome.restarts:
            before = f"Workers had failed before ({counted(outcome.restarts, 'restart')})"
            lines.append(f"{before}: see `round N ended` above, or `rdzvctl explain`.")
    if outcome.exit_code != 0:
        lines += _stopped(outcome.workers)
    return "\n".join(lines)


def root_cause_exit_code(outcome: NodeOutcome) -> tuple[int, str]:
    """Return the exit code that --exit-code=root-cause asks for, and why it is 1 all the same.

    Every node of a job that has failed knows the same root cause.
    """
    if outcome.exit_code != EXIT_FAILED:
        return outcome.exit_code, ""
    cause = outcome.failures[0] if outcome.failures else None
    ended = (cause.exit_code, cause.signal) if cause is not None else (None, None)
    return root_cause_exit(*ended, own=(EXIT_TRY_AGAIN, EXIT_DENIED, EXIT_NO_PROGRESS))


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _in_full(failure: Failure) -> list[str]:
    return [_worker(failure), failure.message, *failure.traceback.splitlines()]


def _in_short(failures: Sequence[Failure]) -> list[str]:
    return _indented(
        f"{_worker(failure)}: {failure.message.partition(chr(10))[0]}" for failure in failures
    )


def _worker(failure: Failure) -> str:
    where = f"rank {failure.rank} (local_rank {failure.local_rank}) on {failure.node_id}"
    how = describe_exit(failure.exit_code, failure.signal)
    return f"{where} ({failure.address}), pid {failure.pid}: {how}"


def _stopped(workers: Sequence[WorkerFate]) -> list[str]:
    by_end: dict[str, list[int]] = {}
    for fate in workers:
        if fate.stopped is not None and fate.pid is not None:
            by_end.setdefault(_end(fate, fate.stopped), []).append(fate.local_rank)
    if not by_end:
        return []
    ended = counted(sum(map(len, by_end.values())), "worker")
    ends = (f"local_rank {ranges(ranks)}: {end}" for end, ranks in by_end.items())
    return [
        f"Ended by this node's agent ({ended} of {len(workers)}):",
        *_indented(ends),
    ]


def _end(fate: WorkerFate, stop: Stop) -> str:
    sent = signal_name(stop.signum)
    if fate.exit_code is None and fate.signal is None:
        return f"{sent}; not seen to end"
    if fate.signal == signal.SIGKILL and fate.why_killed:
        return f"SIGKILL: {fate.why_killed}"
    if stop.signum in (signal.SIGKILL, fate.signal):
        return sent
    if fate.signal == signal.SIGKILL:
        return f"{sent}, and SIGKILL {duration(fate.ended_ms - stop.at_ms)} later"
    return f"{sent}, which it answered with {describe_exit(fate.exit_code, fate.signal)}"


def ranges(numbers: Iterable[int]) -> str:
    """Format numbers as a list of ranges.

    >>> ranges([0, 2, 3, 4, 7, 8])
    '0, 2-4, 7, 8'
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts: list[str] = []
    for run in runs:
        parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run)
    return ", ".join(parts)
