"""Summarizes the ledgers of many jobs, to show which causes and nodes cost most."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rdzv.structs import replace, struct
from rdzv.view.advice import Change, best_first, of_job, without_worst_node
from rdzv.view.answers import ENDED, Event, JobSummary
from rdzv.view.ledger import (
    Cost,
    Interval,
    Ledger,
    LedgerPhase,
    added,
    costs,
    gpu_total,
    ledgers_of,
    summed,
)


@struct(frozen=True)
class JobLine:
    """A summary of how the runs of one job spent their time."""

    rdzv_id: str
    runs: int
    wall_ms: int
    goodput: float | None
    steps_reported: bool
    """Whether every run that trained has reported steps; if not, `goodput` is an upper bound."""
    node_ms: int
    lost_node_ms: int
    lost_gpu_ms: int | None
    """GPU time without training, or None if a run's number of GPUs is unknown."""


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
    causes: tuple[Cost, ...]
    nodes: tuple[Cost, ...]
    """The costs by node, for nodes to which a cause refers."""
    advice: tuple[Change, ...]
    """What changes would have saved, best first."""


@struct(frozen=True)
class JobShare:
    """One job's part of a report: its line, its time by phase, and what each gap has cost."""

    line: JobLine
    phases: dict[str, int]
    costs: Sequence[Cost]
    changes: Sequence[Change]
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


def spent(job: JobSummary, past: Iterable[Event], from_ms: int, now_ms: int) -> JobShare | None:
    """Like `spent_by`, from the job's history."""
    return spent_by(job, ledgers_of(past, now_ms, job.state), from_ms)


def spent_by(job: JobSummary, runs: Iterable[Ledger], from_ms: int) -> JobShare | None:
    """Summarize the runs of one job since `from_ms`, or return None if it had no runs."""
    found = [(run, clipped(run, from_ms)) for run in runs]
    found = [(run, intervals) for run, intervals in found if intervals]
    if not found:
        return None
    every = [intervals for _, intervals in found]
    whole = [one for intervals in every for one in intervals]
    owed = [cost for run, its in found for cost in costs(its, run.gpus_per_node)]
    phases, wall_ms = summed(whole), sum(one.ms for one in whole)
    line = JobLine(
        rdzv_id=job.rdzv_id,
        runs=len(found),
        wall_ms=wall_ms,
        goodput=phases[LedgerPhase.TRAINING] / wall_ms if wall_ms else None,
        steps_reported=all(
            run.steps_reported
            for run, intervals in found
            if any(one.phase == LedgerPhase.TRAINING for one in intervals)
        ),
        node_ms=sum(one.node_ms for one in whole),
        lost_node_ms=sum(cost.node_ms for cost in owed),
        lost_gpu_ms=gpu_total(cost.gpu_ms for cost in owed),
    )
    snapshots = sum(run.snapshots for run, _ in found)
    stopped_ms = sum(run.snapshots_ms for run, _ in found)
    snapshot_ms = stopped_ms / snapshots if snapshots else None
    most = round(max(one.nodes for one in whole))
    return JobShare(line, phases, owed, of_job(job, every, snapshot_ms), most)


def report(jobs: Iterable[JobShare | None], from_ms: int, until_ms: int) -> Report:
    found = [job for job in jobs if job is not None]
    lines = [job.line for job in found]
    owed = [cost for job in found for cost in job.costs]
    phases = {p.value: sum(job.phases[p] for job in found) for p in LedgerPhase}
    node_ms = sum(line.node_ms for line in lines)
    goodput = 1 - sum(line.lost_node_ms for line in lines) / node_ms if node_ms else None
    most = max((job.nodes for job in found), default=0)
    worst = without_worst_node(owed, most, goodput or 0)
    return Report(
        from_unix_ms=from_ms,
        until_unix_ms=until_ms,
        phases=phases,
        goodput=goodput,
        node_ms=node_ms,
        jobs=tuple(sorted(lines, key=lambda line: (-line.lost_node_ms, line.rdzv_id))),
        causes=added(owed, lambda cost: (cost.cause, "")),
        nodes=added((cost for cost in owed if cost.node_id), lambda cost: ("", cost.node_id)),
        advice=best_first([*(change for job in found for change in job.changes), *worst]),
    )
