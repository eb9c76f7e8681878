"""Commands for a job's workers: logs, stacks."""

from __future__ import annotations

import re

import click

from rdzv.ctl.command_line import (
    OK,
    REFUSED,
    answer,
    command,
    job_argument,
    opened_client,
)
from rdzv.errors import InvalidRequestError

_TAIL = re.compile(r"([0-9]{1,15})([kMG]?)")
_UNITS = {"k": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_MOST_LINES = 2**32 - 1


@command("logs")
@job_argument()
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
    with opened_client() as client:
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
    context.exit(OK if whole else REFUSED)


def _parsed_tail(text: str) -> tuple[int, int]:
    """Parse a number of lines or bytes. Return both, with 0 for the one not given.

    >>> _parsed_tail("100"), _parsed_tail("64k")
    ((100, 0), (0, 65536))

    Raises:
        InvalidRequestError: the text is neither.
    """
    found = _TAIL.fullmatch(text)
    count = int(found[1]) if found else 0
    if found is None or count == 0 or (not found[2] and count > _MOST_LINES):
        raise InvalidRequestError(
            f"--tail={text} is not a number of lines or bytes; give, for example, 100 or 64k"
        )
    return (0, count * _UNITS[found[2]]) if found[2] else (count, 0)


@command("stacks", output=True)
@job_argument()
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

    with opened_client() as client:
        found = client.stacks(job, number)
    return answer(
        output,
        found,
        lambda page: as_text_stacks.text(found, page, raw=raw),
    )
