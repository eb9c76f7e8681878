"""Commands for jobs: list, status, wait, submit, stop, ..., and their workers' logs and stacks."""

from __future__ import annotations

import re
import sys
from functools import partial
from typing import TYPE_CHECKING

import click

from rdzv.ctl import command_line as cli
from rdzv.errors import InvalidRequestError, did_you_mean
from rdzv.runtime.usage import INTERRUPTED, Choice

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from rdzv.ctl.job_request import Request


# Repeated from rdzv.core.model, because importing it would slow down --help.
_STATES = ("queued", "joining", "running", "stopping", "succeeded", "failed", "stopped")

MOST_WAIT_S = 30 * 86_400

MOST_ENDED = 10


@cli.command("status", output=True)
@cli.job_argument()
@click.option("--all", "everything", is_flag=True, help="Abbreviate nothing.")
@click.option("-w", "--watch", "watched", is_flag=True, help="""
    Show it again whenever it changes, until it has ended or Ctrl-C; with -o json one document per
    line, with -o yaml one after each ---.""")  # fmt: skip
def status_command(job: str, everything: bool, watched: bool, output: str) -> str | None:
    """Show the state of JOB, and the reason for it.

    JOB is its rdzv_id. For a job that has ended, the last run is shown. Long tracebacks are
    abbreviated, and so are lists of more than 40 nodes; nodes that are not seated come first.
    """
    from rdzv.ctl import as_text

    with cli.opened_client() as client:
        # A watch waits for a lost server, but a server that was never there is an immediate error.
        found = client.status(job)
        if watched:
            from rdzv.ctl.watch import show

            with cli.opened_client() as other:
                show(client, other, job, output, everything=everything)
            return None
    return cli.answer(
        output,
        found,
        lambda page: as_text.status(found, page, everything=everything),
    )


@cli.command("list")
@click.argument("name", metavar="[NAME]", required=False)
@click.option("-s", "--state", "states", multiple=True, type=Choice(_STATES), help="""
    Only jobs in this state; may be repeated.""")  # fmt: skip
@click.option("--sort", "order", type=Choice(["name", "state", "age", "nodes", "restarts"]),
    help="""
    Sort by name or state, or with the latest change, most nodes or most restarts first. Default: by
    name, and ended jobs by when they ended.""")  # fmt: skip
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help=f"List all ended jobs, not only the latest {MOST_ENDED}.",
)
@click.option("-w", "--watch", "watched", is_flag=True, help="Repeat every 2 s until Ctrl-C.")
@click.option("-o", "--output", type=Choice(["text", "wide", "name", "json", "yaml"]),
    default="text", show_default=True, help="""
    text for people; wide: all columns and full reasons; name: only names; json or yaml for
    programs, with all ended jobs.""")  # fmt: skip
def list_command(
    name: str | None,
    states: tuple[str, ...],
    order: str | None,
    everything: bool,
    watched: bool,
    output: str,
) -> str | None:
    """Show every job, or those whose name matches NAME, one line each.

    NAME may contain * and ?, as in 'gpt-*'. Jobs that have ended are listed separately.

    \b
    rdzvctl list -s running -s queued --sort nodes
    rdzvctl list 'sweep-*' -s failed -o name
    """
    from rdzv.ctl import as_text_lists
    from rdzv.runtime.log_format import harmless

    with cli.opened_client() as client:

        def shown() -> str:
            found = as_text_lists.chosen(client.jobs(), states, name, order)
            if output == "name":
                return "\n".join(harmless(job.rdzv_id) for job in found)
            where = str(client.server) if not (states or name) else f"{client.server} match that"
            return cli.answer(
                "text" if output == "wide" else output,
                {"jobs": found, "store_away": client.store_away},
                lambda page: as_text_lists.jobs(
                    where,
                    found,
                    page,
                    client.store_away,
                    most_ended=None if everything else MOST_ENDED,
                    wide=output == "wide",
                ),
            )

        if not watched:
            return shown()
        from rdzv.ctl.watch import show_again

        show_again(shown, as_screen=output in ("text", "wide"))
        return None


@cli.command("wait")
@cli.job_argument()
@click.option("--for", "waits", multiple=True, metavar="running|SECONDS", help="""
    running: wait until JOB is running, instead of until it has ended. SECONDS: give up after that
    time; default: never. Both may be given: --for=running --for=600.""")  # fmt: skip
@click.option("--exit-code", "failed_code", type=Choice(["1", "root-cause"]), default="1", help="""
    The exit code if JOB has failed: 1, or that of the worker whose failure ended
    it.""")  # fmt: skip
@click.pass_context
def wait_command(
    context: click.Context, job: str, waits: tuple[str, ...], failed_code: str
) -> None:
    """Wait until JOB has ended, or until it is running.

    Its state and the reason are shown on stderr at once, and again whenever they change.

    \b
    Exit codes: 0 it has succeeded or, with --for=running, is running;
    1 failed, 3 stopped, 4 none of these after --for=SECONDS,
    93 failed without progress.
    """
    from rdzv.ctl.watch import wait

    seconds = [_wait_s(text, context) for text in waits if text != "running"]
    with cli.opened_client() as client:
        text, code = wait(
            client,
            job,
            min(seconds, default=None),
            root_cause=failed_code != "1",
            until_running="running" in waits,
        )
    click.echo(text)
    context.exit(code)


def _wait_s(text: str, context: click.Context) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MOST_WAIT_S:
        valid = f"neither `running` nor a number of seconds above 0, at most {MOST_WAIT_S}"
        remedy = did_you_mean(text, ["running"], "give one of them")
        raise click.UsageError(f"--for={text} is {valid}; {remedy}", context)
    return seconds


@cli.command("stop")
@cli.job_argument()
@cli.reason_option
def stop_command(job: str, reason: str | None) -> str:
    """Stop JOB: its workers receive SIGTERM and time to save, and all its nodes leave."""
    with cli.opened_client() as client:
        run = client.status(job).run or ""
        found = client.stop(job, run, f"stopped {cli.by_whom(reason)}")
    return f"{job} is {found.state}"


@cli.command("restart")
@cli.job_argument()
@cli.reason_option
def restart_command(job: str, reason: str | None) -> str:
    """Stop JOB's workers, giving them time to save, and form a new round.

    This does not count as a restart.
    """
    from rdzv.view.answers import ENDED

    with cli.opened_client() as client:
        before = client.status(job)
        if before.round is None or before.state != "running":
            has = "has" if before.state in ENDED else "is"
            raise InvalidRequestError(
                f"{job} {has} {before.state}: there are no workers to restart"
            )
        client.restart(job, before.run or "", before.round, f"restarted {cli.by_whom(reason)}")
    return f"{job}: round {before.round} ends, and another forms"


@cli.command("scale")
@cli.job_argument()
@click.argument("bounds", metavar="MIN:MAX")
@cli.reason_option
def scale_command(job: str, bounds: str, reason: str | None) -> str:
    """Allow JOB to have MIN to MAX nodes, overriding its launch options; N alone means N:N.

    If more than MAX nodes are seated, the group re-forms and the highest GROUP_RANKs become spares.
    If fewer than MIN are seated, they continue until their round ends by itself.
    """
    least, colon, most = bounds.partition(":")
    if not (least.isdigit() and (most if colon else least).isdigit()):
        raise click.UsageError(f"{bounds!r} is not MIN:MAX; give two numbers, as in 2:4")
    from rdzv.ctl.as_text import scaled

    with cli.opened_client() as client:
        before = client.status(job)
        why = f"scaled {cli.by_whom(reason)}"
        most = most if colon else least
        found = client.scale(job, before.run or "", int(least), int(most), why)
    return scaled(before, found)


@cli.command("forget")
@cli.job_argument()
def forget_command(job: str) -> str:
    """Delete JOB and its history. The job must have ended; `rdzvctl stop` ends it."""
    with cli.opened_client() as client:
        client.forget(job, cli.by_whom(None))
    return f"{job} is forgotten"


_TAIL = re.compile(r"([0-9]{1,15})([kMG]?)")
_UNITS = {"k": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_MOST_LINES = 2**32 - 1


@cli.command("logs")
@cli.job_argument()
@click.option("-f", "--follow", is_flag=True, help="Continue with new output until the job ends.")
@click.option("--rank", type=click.IntRange(0, 2**32 - 1), metavar="R", help="""
    Only the worker with this RANK, without a prefix.""")  # fmt: skip
@click.option("--round", "number", type=click.IntRange(0, 2**32 - 1), metavar="N", help="""
    This round; default: the last.""")  # fmt: skip
@click.option("--stdout", is_flag=True, help="Only standard output.")
@click.option("--stderr", is_flag=True, help="Only standard error.")
@click.option("--tail", metavar="N", help="""
    Only the last N lines of each file or, with a suffix k, M or G, that many
    bytes.""")  # fmt: skip
@click.pass_context
def logs_command(
    context: click.Context,
    job: str,
    follow: bool,
    rank: int | None,
    number: int | None,
    stdout: bool,
    stderr: bool,
    tail: str | None,
) -> None:
    """Show the output of JOB's workers, read from the nodes that have it.

    Every line begins with its worker's RANK, unless only one RANK is requested. With --follow, the
    round is shown from its beginning, or its --tail, and then every later round. Exits with 1 if
    anything could not be shown; the reason is on stderr.
    """
    from rdzv.ctl.watch import show_logs

    try:
        tail_lines, tail_bytes = _parsed_tail(tail) if tail else (0, 0)
    except InvalidRequestError as error:
        raise click.UsageError(str(error), context) from None
    with cli.opened_client() as client:
        pieces = client.logs(
            job,
            rank=rank,
            number=number,
            stdout=stdout or not stderr,
            stderr=stderr or not stdout,
            follow=follow,
            tail_lines=tail_lines,
            tail_bytes=tail_bytes,
        )
        whole = show_logs(pieces, one_rank=rank is not None, one_stream=stdout is not stderr)
    context.exit(cli.OK if whole else cli.REFUSED)


def _parsed_tail(text: str) -> tuple[int, int]:
    """Parse a number of lines or bytes. Return both, with 0 for the one not given.

    >>> _parsed_tail("100"), _parsed_tail("64k")
    ((100, 0), (0, 65536))
    """
    found = _TAIL.fullmatch(text)
    count = int(found[1]) if found else 0
    if found is None or count == 0 or (not found[2] and count > _MOST_LINES):
        raise InvalidRequestError(
            f"--tail={text} is not a number of lines or bytes; give, for example, 100 or 64k"
        )
    return (0, count * _UNITS[found[2]]) if found[2] else (count, 0)


@cli.command("stacks", output=True)
@cli.job_argument()
@click.option("--round", "number", type=click.IntRange(0, 2**32 - 1), metavar="N", help="""
    The round whose stacks were kept when it hung; default: the present one.""")  # fmt: skip
@click.option(
    "--raw", is_flag=True, help="All threads of all workers, not just one worker of each group."
)
def stacks_command(job: str, number: int | None, raw: bool, output: str) -> str:
    """Show where in their code JOB's workers are.

    Workers at the same place are grouped. Running workers are inspected now by py-spy on their
    nodes, which pauses each for a few milliseconds. Nodes that do not respond within 10 s are
    listed. If no workers are running, the stacks kept from the last hang are shown.
    """
    from rdzv.ctl import as_text_stacks

    text = partial(as_text_stacks.text, raw=raw)
    return cli.asked(output, lambda it: it.stacks(job, number), text)


class _Submit(click.Command):
    """A command whose arguments click does not parse, because it takes rdzvrun's flags."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.params = {"words": tuple(args)}
        return args

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
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
        cli.warn(note)
    if request.dry_run:
        job = (request.rdzv_id, request.settings, request.spec)
        return cli.answer(
            request.output, as_json.to_submit(*job), lambda page: to_submit(*job, page)
        )
    cli.connection(context).update(request.connection)
    with cli.opened_client() as client:
        found = client.submit(
            request.rdzv_id, request.run, request.settings, request.spec, cli.this_user()
        )
    if not request.follow:
        return cli.answer(
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
        with cli.opened_client() as logs, cli.opened_client() as watcher:
            return follow(logs, watcher, rdzv_id, request.run, root_cause=request.root_cause_exit)
    except KeyboardInterrupt:
        option = f"--server={server} " if server else ""
        return cli.complain(
            f"{rdzv_id} continues; `rdzvctl {option}logs -f {rdzv_id}` shows its output, "
            f"`rdzvctl {option}stop {rdzv_id}` stops it",
            INTERRUPTED,
        )
