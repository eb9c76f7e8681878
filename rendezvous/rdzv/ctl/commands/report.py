"""The command that shows how jobs spent their time."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rdzv.ctl.command_line import (
    answer,
    complete_names,
    connection_options,
    opened_client,
    output_option,
    parse_duration,
)
from rdzv.ctl.commands.history import whole_history, write_text
from rdzv.errors import UnknownJobError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rdzv.client import ControlClient
    from rdzv.view.answers import Event, JobStatus
    from rdzv.view.ledger import Ledger
    from rdzv.view.reports import Report

_SINCE = "7d"


@click.command("report")
@click.argument(
    "job", required=False, shell_complete=lambda *asked: complete_names(*asked, kind="jobs")
)
@click.option(
    "--run",
    "number",
    type=click.IntRange(min=1, max=2**32 - 1),
    metavar="N",
    help="Run N of JOB; default: its last one.",
)
@click.option(
    "--since",
    metavar="TIME",
    help=f"Without JOB: how far back to look, such as 12h; default: {_SINCE}.",
)
@click.option(
    "--html",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write an HTML page with plots instead.",
)
@output_option
@connection_options
def report_command(
    job: str | None, number: int | None, since: str | None, html: Path | None, output: str
) -> str:
    """Show how JOB spent its time, and what its failures cost.

    Without JOB, all jobs are summed up, with the causes and nodes that cost most. JOB is its
    rdzv_id. Every moment is counted once: as queued, waiting for nodes, forming, starting, loading,
    training, redoing lost steps, detecting a failure, or stopping. Goodput is the share spent
    training.
    """
    if job is not None and since is not None:
        raise click.UsageError("give JOB or --since, not both")
    if job is None and number is not None:
        raise click.UsageError("--run needs a JOB")
    now_ms = round(time.time() * 1000)
    with opened_client() as client:
        if job is None:
            return _shown_all(_all(client, since or _SINCE, now_ms), output, html)
        runs = _ledgers(client, job, now_ms)
        return _shown(job, runs, number, output, html)


def _ledgers(client: ControlClient, job: str, now_ms: int) -> list[Ledger]:
    from rdzv.view.ledger import ledgers_of

    status = client.status(job)
    past = whole_history(client, job)
    return ledgers_of(past, servers_now_ms(status, past, now_ms), status.state)


def servers_now_ms(status: JobStatus, past: Sequence[Event], own_ms: int) -> int:
    """Return the time by the server's clock, or `own_ms` if the history does not show it."""
    for event in reversed(past):
        if event.name == "RunBegan" and event.run == status.run:
            return event.unix_ms + status.run_age_ms
    return own_ms


def _shown(job: str, runs: list[Ledger], number: int | None, output: str, html: Path | None) -> str:
    from rdzv.ctl import as_text_report, report_page
    from rdzv.view import as_json
    from rdzv.view.ledger import chosen, run_numbers

    run = chosen(job, runs, number)
    others = [one for one in runs if one is not run]
    if html is not None:
        write_text(html, report_page.ledger(job, run, others))
        return f"{html} has the ledger of {job}; open it in a browser"
    return answer(
        output,
        lambda: as_json.ledger(job, run_numbers(runs), run),
        lambda page: as_text_report.ledger(job, run, others, page),
    )


def _all(client: ControlClient, since: str, now_ms: int) -> Report:
    """Sum up all jobs, except those deleted in the meantime."""
    from rdzv.view.ledger import ledgers_of
    from rdzv.view.reports import ended_before, report, spent_by

    since_ms = parse_duration("--since", since)
    spent = []
    for job in client.jobs():
        if ended_before(job.state, job.state_age_ms, since_ms):
            continue
        try:
            history = whole_history(client, job.rdzv_id)
        except UnknownJobError:
            continue
        runs = ledgers_of(history, now_ms, job.state)
        spent.append(spent_by(job.rdzv_id, runs, now_ms - since_ms))
    return report(spent, now_ms - since_ms, now_ms)


def _shown_all(found: Report, output: str, html: Path | None) -> str:
    from rdzv.ctl import as_text_report, report_page
    from rdzv.view import as_json

    if html is not None:
        write_text(html, report_page.report(found))
        return f"{html} has the report; open it in a browser"
    return answer(
        output, lambda: as_json.document(found), lambda page: as_text_report.report(found, page)
    )
