"""Commands for the history of jobs: events, explain, trace, report."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rdzv.ctl import command_line as cli
from rdzv.errors import InvalidRequestError, LimitExceededError, UnknownJobError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rdzv.client import ControlClient
    from rdzv.view.answers import Event, JobStatus
    from rdzv.view.reports import Report


_SINCE = "7d"
_HISTORY_ROWS = 10_000
"""The number of history rows per job that a server keeps by default."""


@cli.command("events", output=True)
@cli.job_argument()
@click.option("-n", "--limit", type=click.IntRange(min=1, max=2**32 - 1), metavar="N", help="""
    Only the newest N events.""")  # fmt: skip
@click.option("-f", "--follow", "followed", is_flag=True, help="""
    Continue with new events until JOB has ended or Ctrl-C; with -o json one
    document per line.""")  # fmt: skip
def events_command(job: str, limit: int | None, followed: bool, output: str) -> str | None:
    """Show the events of JOB, oldest first.

    JOB is its rdzv_id. Times are in this machine's time zone.
    """
    from rdzv.ctl import as_text_lists

    with cli.opened_client() as client:
        found = client.events(job, limit or 0)
        if followed:
            from rdzv.ctl.watch import follow_events

            with cli.opened_client() as other:
                follow_events(client, other, job, found, output)
            return None
    return cli.answer(
        output,
        {"rdzv_id": job, "events": found},
        lambda page: as_text_lists.events(found, page, f"no events of {job} are kept"),
    )


@cli.command("explain")
@cli.job_argument()
def explain_command(job: str) -> str:
    """Explain in sentences what has happened to JOB, and what it is waiting for now.

    Shows what failed first, what each change of the group cost and, if no round is running, why.
    JOB is its rdzv_id; for a job that has ended, the last run is explained. Times are in this
    machine's time zone.
    """
    from rdzv.ctl import as_text_story
    from rdzv.ctl.layout import page_for

    with cli.opened_client() as client:
        status, history = client.status(job), whole_history(client, job)
    return as_text_story.explain(status, history, page_for(sys.stdout))


@cli.command("trace")
@cli.job_argument()
@click.option("-o", "--output", "path", type=click.Path(path_type=Path, dir_okay=False),
    required=True, metavar="FILE", help="""
    Where to write it; - is standard output. An existing file is replaced.""")  # fmt: skip
def trace_command(job: str, path: Path) -> str:
    """Write the history of JOB as a trace for ui.perfetto.dev.

    Rounds are slices on each node's track, with the cause that ended them; events are instants.
    """
    from rdzv.ctl.trace import trace

    with cli.opened_client() as client:
        status, history = client.status(job), whole_history(client, job)
    document = trace(status, history, round(time.time() * 1000))
    if path == Path("-"):
        return document
    write_text(path, document + "\n")
    return f"{path} has the history of {job}; open it at https://ui.perfetto.dev"


def write_text(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidRequestError(
            f"{path} cannot be written: {error.strerror}; give another file"
        ) from error


def whole_history(client: ControlClient, job: str) -> tuple[Event, ...]:
    """Return a job's whole history, or the newest part if the server refuses to send it all."""
    try:
        return client.events(job, _HISTORY_ROWS)
    except (InvalidRequestError, LimitExceededError):
        return client.events(job)


@cli.command("report", output=True)
@cli.job_argument(required=False)
@click.option("--run", "number", type=click.IntRange(min=1, max=2**32 - 1), metavar="N", help="""
    Run N of JOB; default: its last one.""")  # fmt: skip
@click.option("--since", metavar="TIME", help=f"""
    Without JOB, or with --advice: how far back to look, such as 12h; default:
    {_SINCE}.""")  # fmt: skip
@click.option("--advice", is_flag=True, help="""
    Show what other spares, snapshot intervals and nodes would have saved.""")  # fmt: skip
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="""
    Write an HTML page with plots instead.""")  # fmt: skip
def report_command(
    job: str | None,
    number: int | None,
    since: str | None,
    advice: bool,
    html: Path | None,
    output: str,
) -> str:
    """Show how JOB spent its time, and what its failures cost.

    Without JOB, all jobs are summed up, with the causes and nodes that cost most. JOB is its
    rdzv_id. Every moment is counted once: as queued, waiting for nodes, forming, starting, loading,
    training, redoing lost steps, detecting a failure, or stopping. Goodput is the share spent
    training.
    """
    if job is not None and since is not None and not advice:
        raise click.UsageError("give JOB or --since, not both, unless with --advice")
    if number is not None and (job is None or advice):
        raise click.UsageError("--run needs a JOB, and no --advice")
    from rdzv.ctl import as_text_report, report_page
    from rdzv.view import restart_picture
    from rdzv.view.ledger import chosen, ledgers_of, run_numbers

    since_ms = cli.parse_duration("--since", since or _SINCE)
    now_ms = round(time.time() * 1000)
    with cli.opened_client() as client:
        if job is None or advice:
            found = _all(client, job, since_ms, now_ms)
            if html is not None:
                write_text(html, report_page.report(found))
                return f"{html} has the report; open it in a browser"
            text = as_text_report.advice if advice else as_text_report.report
            return cli.answer(output, found, lambda page: text(found, page))
        status, past = client.status(job), whole_history(client, job)
        now_ms = servers_now_ms(status, past, now_ms)
        runs = ledgers_of(past, now_ms, status.state)
        run = chosen(job, runs, number)
    others = [one for one in runs if one is not run]
    if html is not None:
        drawn = restart_picture.of_run(past, run.run, status, now_ms)
        write_text(html, report_page.ledger(job, run, others, drawn))
        return f"{html} has the ledger of {job}; open it in a browser"
    return cli.answer(
        output,
        {"rdzv_id": job, "run_numbers": run_numbers(runs), "ledger": run},
        lambda page: as_text_report.ledger(job, run, others, page),
    )


def servers_now_ms(status: JobStatus, past: Sequence[Event], own_ms: int) -> int:
    """Return the time by the server's clock, or `own_ms` if the history does not show it."""
    for event in reversed(past):
        if event.name == "RunBegan" and event.run == status.run:
            return event.unix_ms + status.run_age_ms
    return own_ms


def _all(client: ControlClient, job: str | None, since_ms: int, now_ms: int) -> Report:
    """Sum up one job or all jobs, except those deleted in the meantime."""
    from rdzv.view.reports import ended_before, report, spent

    if job is not None:
        client.status(job)  # It says what is wrong with the name.
    found, from_ms = [], now_ms - since_ms
    for one in client.jobs():
        if job not in (None, one.rdzv_id) or ended_before(one, since_ms):
            continue
        try:
            history = whole_history(client, one.rdzv_id)
        except UnknownJobError:
            continue
        found.append(spent(one, history, from_ms, now_ms))
    return report(found, from_ms, now_ms)
