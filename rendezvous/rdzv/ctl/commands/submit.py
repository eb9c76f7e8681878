"""`rdzvctl submit`: submits a job to the server, which runs it on free nodes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from rdzv.ctl.command_line import (
    answer,
    complain,
    connection,
    opened_client,
    this_user,
    warn,
)
from rdzv.errors import InvalidRequestError
from rdzv.runtime.usage import INTERRUPTED

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from rdzv.ctl.job_request import Request


class _Submit(click.Command):
    """A command whose arguments click does not parse, because it takes rdzvrun's flags."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Pass all arguments on to the command, unparsed."""
        ctx.params = {"words": tuple(args)}
        return args

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete flag names, and treat all other arguments as file names."""
        from click.shell_completion import CompletionItem

        from rdzv.ctl.job_request import option_names

        if not incomplete.startswith("-"):
            return [CompletionItem(incomplete, type="file")]
        return [CompletionItem(name) for name in option_names() if name.startswith(incomplete)]


@click.command("submit", cls=_Submit)
@click.pass_context
def submit_command(context: click.Context, words: tuple[str, ...]) -> str | int:
    """Submit a job to the server, which runs it on free nodes.

    Takes rdzvrun's flags, a script and the script's arguments; see rdzvctl submit --help.
    """
    from rdzv.ctl import job_request

    try:
        if job_request.wants_help(words):
            return job_request.help_text()
        request = job_request.read(words, job_request.CallerContext.here())
    except InvalidRequestError as error:
        raise click.UsageError(str(error), context) from None
    from rdzv.ctl.as_text import submitted, to_submit
    from rdzv.ctl.layout import page_for
    from rdzv.view import as_json

    for note in request.notes:
        warn(note)
    if request.dry_run:
        job = (request.rdzv_id, request.settings, request.spec)
        return answer(request.output, as_json.to_submit(*job), lambda page: to_submit(*job, page))
    connection(context).update(request.connection)
    with opened_client() as client:
        found = client.submit(
            request.rdzv_id, request.run, request.settings, request.spec, this_user()
        )
    if not request.follow:
        return answer(
            request.output,
            found,
            lambda page: submitted(found, request.connection.get("server"), page),
        )
    text = submitted(found, None, page_for(sys.stderr), followed=True)
    # Only the workers' output goes to stdout.
    click.echo(text, err=True)
    return _followed(request)


def _followed(request: Request) -> int:
    from rdzv.ctl.watch import follow

    rdzv_id, server = request.rdzv_id, request.connection.get("server")
    try:
        with opened_client() as logs, opened_client() as watcher:
            return follow(logs, watcher, rdzv_id, request.run, root_cause=request.root_cause_exit)
    except KeyboardInterrupt:
        option = f"--server={server} " if server else ""
        return complain(
            f"{rdzv_id} continues; `rdzvctl {option}logs -f {rdzv_id}` shows its output, "
            f"`rdzvctl {option}stop {rdzv_id}` stops it",
            INTERRUPTED,
        )
