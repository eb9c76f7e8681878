"""Formats lists as text: jobs, a job's events, the audit log, servers and tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from fnmatch import fnmatchcase

from rdzv.core.model import JobState
from rdzv.core.words import duration
from rdzv.ctl.as_text import EVENT_STYLES, UNKNOWN, number_text, only_watched, state_cell
from rdzv.ctl.layout import Cell, Columns, Page, Text, dim
from rdzv.view.answers import ENDED, Event, JobSummary, Server, Token
from rdzv.view.history import KINDS

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
        ended = job.state in ENDED
        return ended, ORDERS[order or ("age" if ended else "name")](job)

    return sorted(found, key=place)


def jobs(
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
    open_jobs = [job for job in summaries if job.state not in ENDED]
    ended = [job for job in summaries if job.state in ENDED]
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


# ------------------------------------------------------------------------------------ events


def events(history: Sequence[Event], page: Page, none: str, title: str = "EVENT") -> str:
    """Format events, or the entries of the audit log, oldest first; `none` is said if none is."""
    if not history:
        return "\n".join(page.sentence(none))
    columns: Columns[Event] = {
        "TIME": lambda event: page.at(event.unix_ms),
        title: _event_name,
        "TEXT": lambda event: event.text,
    }
    return "\n".join(page.table(history, columns))


def event_lines(history: Sequence[Event], page: Page) -> str:
    """Format events as lines that others may follow.

    There is no header, and the columns are wide enough for any event name.
    """
    width = max(map(len, KINDS))
    return "\n".join(
        page.line(page.at(event.unix_ms), _event_name(event, width), event.text)
        for event in history
    )


def _event_name(event: Event, width: int = 0) -> Cell:
    return Cell(event.name.ljust(width), EVENT_STYLES.get(event.name, ""))


# ------------------------------------------------------------------------------------ servers


def servers(found: Sequence[Server], page: Page) -> str:
    if not found:
        return page.line(dim("no server is known here"))
    columns: Columns[Server] = {
        "SERVER": lambda server: server.address,
        "STATE": lambda server: Cell("leads", "green") if server.leads else "stands by",
        "FOR": lambda server: duration(server.state_age_ms),
        "LEADERSHIP": lambda server: number_text(server.leadership),
        "VERSION": lambda server: server.version,
        "DATA": lambda server: server.store,
    }
    lines = page.table(found, columns)
    for server in found:
        if server.insecure:
            text = f"insecure: {server.insecure}; anyone who can reach {server.address} can run "
            lines.append(page.line(Cell(f"{text}and end jobs", "red")))
    away = [f"{server.address}: {server.store_away}" for server in found if server.store_away]
    return "\n".join(lines + [line for text in away for line in page.sentence(text)])


# ------------------------------------------------------------------------------------ tokens


def tokens(found: Sequence[Token], page: Page) -> str:
    if not found:
        return "\n".join(page.sentence("there are no tokens; `rdzvctl tokens create` creates one"))
    columns: Columns[Token] = {
        "ID": lambda token: token.id,
        "NAME": lambda token: token.name,
        "ROLES": lambda token: ", ".join(token.roles),
        "AGE": lambda token: duration(token.age_ms),
        "USED": _used,
        "EXPIRES": _expires,
    }
    return "\n".join(page.table(found, columns))


def _used(token: Token) -> str:
    # The server does not record the time any more precisely.
    if token.used_age_ms is None:
        return "never"
    within_the_hour = token.used_age_ms < 3_600_000
    return "lately" if within_the_hour else f"{duration(token.used_age_ms)} ago"


def _expires(token: Token) -> Text:
    if token.expires_in_ms is None:
        return "never"
    if token.expires_in_ms == 0:
        return Cell("has expired", "red")
    return f"in {duration(token.expires_in_ms)}"


def made(token: Token) -> str:
    """Describe a new token, for stderr; only the token's text goes to stdout."""
    until = "does not expire"
    if token.expires_in_ms is not None:
        until = f"expires in {duration(token.expires_in_ms)}"
    return (
        f"token {token.id} of {token.name} ({', '.join(token.roles)}) {until}. Its text "
        "is shown only once; store it in a file that only its owner can read, for "
        "--token-file"
    )


def revoked(found: Sequence[Token], _: Page) -> str:
    return "\n".join(f"token {token.id} of {token.name} is revoked" for token in found)
