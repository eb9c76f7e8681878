"""Commands for a single job or all jobs: status, list, wait, stop, restart, scale, forget."""

from __future__ import annotations

import click

from rdzv.ctl.command_line import (
    answer,
    by_whom,
    command,
    job_argument,
    opened_client,
    reason_option,
)
from rdzv.errors import InvalidRequestError, did_you_mean
from rdzv.runtime.usage import Choice

# Repeated from rdzv.core.model, because importing it would slow down --help.
_STATES = ("queued", "joining", "running", "stopping", "succeeded", "failed", "stopped")

MOST_WAIT_S = 30 * 86_400

MOST_ENDED = 10
"""How many ended jobs a list shows without --all."""


@command("status", output=True)
@job_argument()
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

    with opened_client() as client:
        # A watch waits for a lost server, but a server that was never there is an immediate error.
        found = client.status(job)
        if watched:
            from rdzv.ctl.watch import show

            with opened_client() as other:
                show(client, other, job, output, everything=everything)
            return None
    return answer(
        output,
        found,
        lambda page: as_text.status(found, page, everything=everything),
    )


@command("list")
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

    with opened_client() as client:

        def shown() -> str:
            found = as_text_lists.chosen(client.jobs(), states, name, order)
            if output == "name":
                return "\n".join(harmless(job.rdzv_id) for job in found)
            where = str(client.server) if not (states or name) else f"{client.server} match that"
            return answer(
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


@command("wait")
@job_argument()
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
    with opened_client() as client:
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


@command("stop")
@job_argument()
@reason_option
def stop_command(job: str, reason: str | None) -> str:
    """Stop JOB: its workers receive SIGTERM and time to save, and all its nodes leave."""
    with opened_client() as client:
        run = client.status(job).run or ""
        found = client.stop(job, run, f"stopped {by_whom(reason)}")
    return f"{job} is {found.state}"


@command("restart")
@job_argument()
@reason_option
def restart_command(job: str, reason: str | None) -> str:
    """Stop JOB's workers, giving them time to save, and form a new round.

    This does not count as a restart.
    """
    from rdzv.view.answers import ENDED

    with opened_client() as client:
        before = client.status(job)
        if before.round is None or before.state != "running":
            has = "has" if before.state in ENDED else "is"
            raise InvalidRequestError(
                f"{job} {has} {before.state}: there are no workers to restart"
            )
        client.restart(job, before.run or "", before.round, f"restarted {by_whom(reason)}")
    return f"{job}: round {before.round} ends, and another forms"


@command("scale")
@job_argument()
@click.argument("bounds", metavar="MIN:MAX")
@reason_option
def scale_command(job: str, bounds: str, reason: str | None) -> str:
    """Allow JOB to have MIN to MAX nodes, overriding its launch options; N alone means N:N.

    If more than MAX nodes are seated, the group re-forms and the highest GROUP_RANKs become spares.
    If fewer than MIN are seated, they continue until their round ends by itself.
    """
    least, colon, most = bounds.partition(":")
    if not (least.isdigit() and (most if colon else least).isdigit()):
        raise click.UsageError(f"{bounds!r} is not MIN:MAX; give two numbers, as in 2:4")
    from rdzv.ctl.as_text import scaled

    with opened_client() as client:
        before = client.status(job)
        why = f"scaled {by_whom(reason)}"
        most = most if colon else least
        found = client.scale(job, before.run or "", int(least), int(most), why)
    return scaled(before, found)


@command("forget")
@job_argument()
def forget_command(job: str) -> str:
    """Delete JOB and its history. The job must have ended; `rdzvctl stop` ends it."""
    with opened_client() as client:
        client.forget(job, by_whom(None))
    return f"{job} is forgotten"
