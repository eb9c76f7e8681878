"""Commands for a job's history: events, explain, trace."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rdzv.ctl.command_line import (
    answer,
    connection_options,
    job_argument,
    opened_client,
    output_option,
)
from rdzv.errors import InvalidRequestError, LimitExceededError

if TYPE_CHECKING:
    from rdzv.client import ControlClient
    from rdzv.view.answers import Event

_HISTORY_ROWS = 10_000
"""The number of history rows per job that a server keeps by default."""


@click.command("events")
@job_argument
@click.option(
    "-n",
    "--limit",
    type=click.IntRange(min=1, max=2**32 - 1),
    metavar="N",
    help="Only the newest N events.",
)
@click.option(
    "-f",
    "--follow",
    "followed",
    is_flag=True,
    help="Continue with new events until JOB has ended or Ctrl-C; with -o json one document "
    "per line.",
)
@output_option
@connection_options
def events_command(job: str, limit: int | None, followed: bool, output: str) -> str | None:
    """Show the events of JOB, oldest first.

    JOB is its rdzv_id. Times are in this machine's time zone.
    """
    from rdzv.ctl import as_text
    from rdzv.view import as_json

    with opened_client() as client:
        found = client.events(job, limit or 0)
        if followed:
            from rdzv.ctl.follow import follow_events

            with opened_client() as other:
                follow_events(client, other, job, found, output)
            return None
    return answer(
        output,
        lambda: as_json.events(job, found),
        lambda page: as_text.events(job, found, page),
    )


@click.command("explain")
@job_argument
@connection_options
def explain_command(job: str) -> str:
    """Explain in sentences what has happened to JOB, and what it is waiting for now.

    Shows what failed first, what each change of the group cost and, if no round is running, why.
    JOB is its rdzv_id; for a job that has ended, the last run is explained. Times are in this
    machine's time zone.
    """
    from rdzv.ctl import as_text_story
    from rdzv.ctl.layout import page_for

    with opened_client() as client:
        status, history = client.status(job), whole_history(client, job)
    return as_text_story.explain(status, history, page_for(sys.stdout))


@click.command("trace")
@job_argument
@click.option(
    "-o",
    "--output",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    metavar="FILE",
    help="Where to write it; - is standard output. An existing file is replaced.",
)
@connection_options
def trace_command(job: str, path: Path) -> str:
    """Write the history of JOB as a trace for ui.perfetto.dev.

    Rounds are slices on each node's track, with the cause that ended them; events are instants.
    """
    import time

    from rdzv.ctl.trace import trace

    with opened_client() as client:
        status, history = client.status(job), whole_history(client, job)
    document = trace(status, history, round(time.time() * 1000))
    if path == Path("-"):
        return document
    write_text(path, document + "\n")
    return f"{path} has the history of {job}; open it at https://ui.perfetto.dev"


def write_text(path: Path, text: str) -> None:
    """Write a file, and replace it if it exists."""
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
