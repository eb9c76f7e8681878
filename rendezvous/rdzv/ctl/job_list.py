"""`rdzvctl list`: selects jobs by name and state, sorts them, and formats them as lines."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from fnmatch import fnmatchcase

from rdzv.core.model import JobState
from rdzv.core.words import duration
from rdzv.ctl.as_text import UNKNOWN, number_text, only_watched, state_cell
from rdzv.ctl.layout import Cell, Columns, Page, Text
from rdzv.view.answers import ENDED, JobSummary

STATES = tuple(JobState)

ORDERS: dict[str, Callable[[JobSummary], tuple[object, ...]]] = {
    "name": lambda job: (job.rdzv_id,),
    "state": lambda job: (STATES.index(JobState(job.state)), job.rdzv_id),
    "age": lambda job: (job.state_age_ms, job.rdzv_id),
    "nodes": lambda job: (-job.nodes, job.rdzv_id),
    "restarts": lambda job: (-(job.restarts or 0), job.rdzv_id),
}
"""The sort key for each order. The latest change, most nodes and most restarts come first."""


def chosen(
    jobs: Sequence[JobSummary], states: Collection[str], name: str | None, order: str | None
) -> list[JobSummary]:
    """Return the jobs whose state is in `states` and whose name matches `name`, if given.

    Jobs that have ended come last. Without `order`, they are sorted by when they ended, and the
    others by name.
    """
    found = [
        job
        for job in jobs
        if (not states or job.state in states) and (name is None or fnmatchcase(job.rdzv_id, name))
    ]

    def place(job: JobSummary) -> tuple[object, ...]:
        ended = has_ended(job)
        return ended, ORDERS[order or ("age" if ended else "name")](job)

    return sorted(found, key=place)


def has_ended(job: JobSummary) -> bool:
    """Return whether a job's last run has ended."""
    return job.state in ENDED


def as_lines(
    server: str,
    summaries: Sequence[JobSummary],
    page: Page,
    store_away: str | None = None,
    *,
    most_ended: int | None = None,
    wide: bool = False,
) -> str:
    """Format the jobs, one per line; if changes are not being stored, say why.

    Jobs that have ended are shown separately, at most `most_ended` of them. A `wide` list, and one
    that does not go to a terminal, keeps all columns and the full reasons.
    """
    wide = wide or page.width is None
    away = page.sentence(store_away) if store_away else []
    if not summaries:
        return "\n".join([f"no jobs at {server}", *away])
    open_jobs = [job for job in summaries if not has_ended(job)]
    ended = [job for job in summaries if has_ended(job)]
    shown = ended if most_ended is None else ended[:most_ended]
    lines = _job_table(open_jobs, page, wide) if open_jobs else []
    lines += ["", "Ended:"] if open_jobs and shown else []
    lines += _job_table(shown, page, wide) if shown else []
    if len(shown) < len(ended):
        lines.append(f"... and {len(ended) - len(shown)} more have ended; --all shows them")
    return "\n".join([*lines, *away])


def _job_table(summaries: Sequence[JobSummary], page: Page, wide: bool) -> list[str]:
    # The BACKEND column is empty, and so omitted, if all jobs are the server's own.
    others = any(map(only_watched, summaries))
    columns: Columns[JobSummary] = {
        "JOB": lambda job: job.rdzv_id,
        "BACKEND": lambda job: job.backend if others else "",
        "STATE": lambda job: state_cell(job.state),
        "FOR": lambda job: duration(job.state_age_ms),
        "SEATED": _seated,
        "WORLD_SIZE": lambda job: number_text(job.world_size),
        "ROUND": lambda job: number_text(job.round),
        "RESTARTS": _budget,
        "WHY": lambda job: _why(job, wide),
    }
    expendable = () if wide else ("ROUND", "WORLD_SIZE", "RESTARTS")
    return page.table(summaries, columns, expendable=expendable, one_line=not wide)


def _why(job: JobSummary, wide: bool) -> Text:
    if job.hangs:
        return Cell(f"hangs: {job.hangs}", "red")
    return str(job.reason) if wide else job.reason.line


def _seated(job: JobSummary) -> str:
    if job.min_nodes is None or job.max_nodes is None:
        return str(job.nodes)
    return f"{job.nodes} of {job.min_nodes}:{job.max_nodes}"


def _budget(job: JobSummary) -> str:
    if job.restarts is None or job.max_restarts is None:
        return UNKNOWN
    return f"{job.restarts} of {job.max_restarts}"
