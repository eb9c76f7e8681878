"""Summarizes the ledgers of many jobs, to show which causes and nodes cost most."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rdzv.structs import replace, struct
from rdzv.view.advice import Change, best_first, lost_work, of_job, without_worst_node
from rdzv.view.answers import ENDED, Event, JobSummary
from rdzv.view.ledger import Cost, Interval, Ledger, LedgerPhase, costs, ledgers_of, summed


@struct(frozen=True)
class JobLine:
    """A summary of how the runs of one job spent their time."""

    rdzv_id: str
    runs: int
    wall_ms: int
    goodput: float | None
    steps_reported: bool
    """Whether every run has reported steps; if not, `goodput` is an upper bound."""
    node_ms: int
    lost_node_ms: int
    lost_gpu_ms: int | None
    """GPU time without training, or None if a run's number of GPUs is unknown."""


@struct(frozen=True)
class Loss:
    """The cost of one cause, or of one node, for all jobs."""

    name: str
    """The cause or the node_id."""
    times: int
    ms: int
    node_ms: int
    gpu_ms: int | None
    """The GPU time lost, or None if the number of GPUs of an affected run is unknown."""


@struct(frozen=True)
class Report:
    """A summary of how all jobs spent a period of time."""

    from_unix_ms: int
    until_unix_ms: int
    phases: dict[str, int]
    goodput: float | None
    node_ms: int
    jobs: tuple[JobLine, ...]
    """One line per job, with the largest lost node time first."""
    causes: tuple[Loss, ...]
    nodes: tuple[Loss, ...]
    """The losses by node, for nodes to which a cause refers."""
    advice: tuple[Change, ...]
    """What changes would have saved, best first."""


@struct(frozen=True)
class JobShare:
    """One job's part of a report: its line, its time by phase, and its costs."""

    line: JobLine
    phases: dict[str, int]
    costs: tuple[tuple[Cost, int | None], ...]
    """Each cost, with the number of GPUs per node in its run."""
    changes: Sequence[Change]
    lost_work: Sequence[tuple[str, int]]
    """The work lost in each gap in training, with the node that its cause refers to."""
    nodes: int
    """The most nodes that it had at once."""


def clipped(ledger: Ledger, from_ms: int) -> tuple[Interval, ...]:
    """Return the intervals since `from_ms`; one that began before is cut, and so are its steps."""
    return tuple(
        one
        if one.from_unix_ms >= from_ms
        else replace(
            one,
            from_unix_ms=from_ms,
            steps=round(one.steps * (one.until_unix_ms - from_ms) / one.ms),
        )
        for one in ledger.intervals
        if one.until_unix_ms > from_ms
    )


def ended_before(job: JobSummary, since_ms: int) -> bool:
    return job.state in ENDED and job.state_age_ms > since_ms


def spent(
    job: JobSummary, past: Iterable[Event], from_ms: int, now_ms: int, snapshot_ms: int | None
) -> JobShare | None:
    """Like `spent_by`, from the job's history."""
    return spent_by(job, ledgers_of(past, now_ms, job.state), from_ms, snapshot_ms)


def spent_by(
    job: JobSummary, runs: Iterable[Ledger], from_ms: int, snapshot_ms: int | None = None
) -> JobShare | None:
    """Summarize the runs of one job since `from_ms`, or return None if it had no runs.

    `snapshot_ms` is the time for which a snapshot stops training, if known.
    """
    found = [(run, clipped(run, from_ms)) for run in runs]
    found = [(run, intervals) for run, intervals in found if intervals]
    if not found:
        return None
    every = [intervals for _, intervals in found]
    return JobShare(
        line=_line(job.rdzv_id, found),
        phases=summed(one for intervals in every for one in intervals),
        costs=tuple((cost, run.gpus_per_node) for run, its in found for cost in costs(its)),
        changes=of_job(job, every, snapshot_ms),
        lost_work=lost_work(every),
        nodes=max(one.nodes for intervals in every for one in intervals),
    )


def report(jobs: Iterable[JobShare | None], from_ms: int, until_ms: int) -> Report:
    found = [job for job in jobs if job is not None]
    lines = [job.line for job in found]
    owed = [cost for job in found for cost in job.costs]
    phases = {p.value: sum(job.phases[p] for job in found) for p in LedgerPhase}
    node_ms = sum(line.node_ms for line in lines)
    trained_ms = node_ms - sum(line.lost_node_ms for line in lines)
    lost = [work for job in found for work in job.lost_work]
    worst = without_worst_node(lost, max((job.nodes for job in found), default=0))
    return Report(
        from_unix_ms=from_ms,
        until_unix_ms=until_ms,
        phases=phases,
        goodput=trained_ms / node_ms if node_ms else None,
        node_ms=node_ms,
        jobs=tuple(sorted(lines, key=lambda line: (-line.lost_node_ms, line.rdzv_id))),
        causes=_losses((cost.cause, cost, gpus) for cost, gpus in owed),
        nodes=_losses((cost.node_id, cost, gpus) for cost, gpus in owed if cost.node_id),
        advice=best_first([*(change for job in found for change in job.changes), *worst]),
    )


def _line(rdzv_id: str, spent: Sequence[tuple[Ledger, tuple[Interval, ...]]]) -> JobLine:
    intervals = [one for _, found in spent for one in found]
    wall_ms = sum(one.ms for one in intervals)
    lost = [(run.gpus_per_node, _lost_node_ms(found)) for run, found in spent]
    return JobLine(
        rdzv_id=rdzv_id,
        runs=len(spent),
        wall_ms=wall_ms,
        goodput=summed(intervals)[LedgerPhase.TRAINING] / wall_ms if wall_ms else None,
        steps_reported=all(run.steps_reported for run, _ in spent),
        node_ms=sum(one.node_ms for one in intervals),
        lost_node_ms=sum(node_ms for _, node_ms in lost),
        lost_gpu_ms=_of_gpus(lost),
    )


def _lost_node_ms(intervals: Iterable[Interval]) -> int:
    return sum(one.node_ms for one in intervals if one.phase != LedgerPhase.TRAINING)


def _of_gpus(spent: Iterable[tuple[int | None, int]]) -> int | None:
    total = 0
    for gpus, node_ms in spent:
        if gpus is None:
            return None
        total += gpus * node_ms
    return total


def _losses(owed: Iterable[tuple[str, Cost, int | None]]) -> tuple[Loss, ...]:
    found: dict[str, list[tuple[Cost, int | None]]] = {}
    for name, cost, gpus in owed:
        found.setdefault(name, []).append((cost, gpus))
    losses = [
        Loss(
            name=name,
            times=sum(cost.times for cost, _ in parts),
            ms=sum(cost.ms for cost, _ in parts),
            node_ms=sum(cost.node_ms for cost, _ in parts),
            gpu_ms=_of_gpus((gpus, cost.node_ms) for cost, gpus in parts),
        )
        for name, parts in found.items()
    ]
    return tuple(sorted(losses, key=lambda loss: (-loss.node_ms, -loss.ms, loss.name)))
