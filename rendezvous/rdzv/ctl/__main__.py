"""The command line of rdzvctl: options, commands, exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import click

from rdzv.errors import InvalidRequestError, RendezvousConnectionError, RendezvousError

if TYPE_CHECKING:
    from rdzv.client import ControlClient

_PROGRAM = "rdzvctl"
# Repeated from rdzv.client, whose import would slow down --help.
_DEFAULT_SERVER = "127.0.0.1:29400"
_DEFAULT_TIMEOUT_S = 5.0

_OK = 0
_REFUSED = 1
_USAGE = 2
_UNREACHABLE = 75
_INTERRUPTED = 130

_EPILOG = """\b
Exit codes:
  0   ok
  1   what was asked for is not there, or the server refused
  2   the command line is wrong
  75  the server can not be reached; the same command may succeed later
"""


def main() -> None:
    """Run the command line of this process and exit."""
    # gRPC's own log lines say on stderr, less clearly, what the error says.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    for stream in (sys.stdout, sys.stderr):
        # What the locale can not write is shown escaped rather than ending the program.
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; every error is one line on stderr.

    A command returns what is to be printed; --help and the like print it, and return a code.
    """
    try:
        result = rdzvctl.main(list(arguments), prog_name=_PROGRAM, standalone_mode=False)
        if isinstance(result, str):
            # Not in the command: click would take a closed pipe for a failure.
            click.echo(result)
            sys.stdout.flush()
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else _PROGRAM
        return _complain(f"{error.format_message().rstrip('.')}; see {command} --help", _USAGE)
    except RendezvousConnectionError as error:
        return _complain(str(error), _UNREACHABLE)
    except RendezvousError as error:
        return _complain(str(error), _REFUSED)
    except click.Abort:
        return _INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return _OK  # The reader, say `head`, has seen enough.
    except OSError as error:
        _drop_output()
        return _complain(f"can not write the output: {error.strerror}", _REFUSED)
    return result if isinstance(result, int) else _OK


def _complain(message: str, exit_code: int) -> int:
    from rdzv.ctl.layout import harmless

    click.echo(f"{_PROGRAM}: {harmless(message)}", err=True)
    return exit_code


def _drop_output() -> None:
    """Let what is still buffered go nowhere, so that the interpreter's exit does not fail on it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


# ------------------------------------------------------------------------------------ options


@dataclass(frozen=True, slots=True)
class _Connection:
    """What was said before the name of the command; None where nothing was."""

    server: str | None
    timeout_s: float | None


_P = ParamSpec("_P")
_R = TypeVar("_R")


def _connection_options(command: Callable[_P, _R]) -> Callable[_P, _R]:
    """Add the options that are understood after the name of a command as well as before."""
    server = click.option(
        "--server",
        metavar="HOST:PORT",
        help=f"The rdzvd to ask; else RDZV_SERVER, else {_DEFAULT_SERVER}. Of several that share a "
        "store, some or all, with commas.",
    )
    timeout = click.option(
        "--timeout",
        "timeout_s",
        type=click.FloatRange(min=0, min_open=True, max=86_400),
        metavar="SECONDS",
        help=f"How long to wait for an answer; {_DEFAULT_TIMEOUT_S:g} if not given.",
    )
    return server(timeout(command))


_output_option = click.option(
    "-o",
    "--output",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="text for people, json for programs.",
)


@contextmanager
def _client(server: str | None, timeout_s: float | None) -> Iterator[ControlClient]:
    """Open a client to the server that the command line means; errors that leave name it.

    An endpoint or a timeout that makes no sense is an error of the command line.
    """
    from rdzv.client import ControlClient, parse_endpoints

    context = click.get_current_context()
    before = context.find_object(_Connection) or _Connection(None, None)
    named = server or before.server
    try:
        endpoints = parse_endpoints(named or _DEFAULT_SERVER)
        client = ControlClient(endpoints, timeout_s or before.timeout_s or _DEFAULT_TIMEOUT_S)
    except InvalidRequestError as error:
        raise click.UsageError(str(error), context) from None
    with client:
        try:
            yield client
        except RendezvousError as error:
            raise type(error)(_with_server(str(error), str(client.server), named)) from error


def _with_server(message: str, endpoint: str, named: str | None) -> str:
    """Say which server was asked: at night, often not the one that was meant."""
    if named is None:
        return f"{message} ({endpoint} is the default; --server or RDZV_SERVER names another)"
    return message if endpoint in message else f"{message} (asked {endpoint})"


# ------------------------------------------------------------------------------------ commands


@click.group(
    invoke_without_command=True,
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@_connection_options
@click.version_option(package_name="rdzv", message=f"{_PROGRAM} %(version)s")
@click.pass_context
def rdzvctl(context: click.Context, server: str | None, timeout_s: float | None) -> None:
    """See what the jobs of an rdzvd do, and why; stop, restart and scale them."""
    context.obj = _Connection(server or os.environ.get("RDZV_SERVER") or None, timeout_s)
    if context.invoked_subcommand is None:
        raise click.UsageError("a command is missing", context)


@rdzvctl.command("status")
@click.argument("job")
@click.option("--all", "everything", is_flag=True, help="Abbreviate nothing.")
@click.option(
    "-w",
    "--watch",
    "watched",
    is_flag=True,
    help="Show it anew whenever it changes, until it has ended or Ctrl-C; with -o json, one "
    "document a line.",
)
@_output_option
@_connection_options
def _status(
    job: str,
    everything: bool,
    watched: bool,
    output: str,
    server: str | None,
    timeout_s: float | None,
) -> str | None:
    """Show what JOB does, and why.

    JOB is its rdzv_id. Of a job that has ended, the last run is shown. Nodes beyond 40 and long
    tracebacks are abbreviated, nodes that are not seated first.
    """
    from rdzv.ctl import as_json, as_text
    from rdzv.ctl.layout import page_for

    with _client(server, timeout_s) as client:
        if watched:
            from rdzv.ctl.watch import show

            show(client, job, as_documents=output == "json", everything=everything)
            return None
        found = client.status(job)
    if output == "json":
        return as_json.status(found)
    return as_text.status(found, page_for(sys.stdout), everything=everything)


@rdzvctl.command("list")
@_output_option
@_connection_options
def _list(output: str, server: str | None, timeout_s: float | None) -> str:
    """Show every job, one line each."""
    from rdzv.ctl import as_json, as_text
    from rdzv.ctl.layout import page_for

    with _client(server, timeout_s) as client:
        found = client.jobs()
    if output == "json":
        return as_json.jobs(found)
    return as_text.jobs(str(client.server), found, page_for(sys.stdout))


@rdzvctl.command("events")
@click.argument("job")
@click.option(
    "-n",
    "--limit",
    type=click.IntRange(min=1, max=2**32 - 1),
    metavar="N",
    help="Only the newest N events.",
)
@_output_option
@_connection_options
def _events(
    job: str, limit: int | None, output: str, server: str | None, timeout_s: float | None
) -> str:
    """Show what has happened to JOB, oldest first.

    JOB is its rdzv_id. Times are local ones of this machine.
    """
    from rdzv.ctl import as_json, as_text
    from rdzv.ctl.layout import page_for

    with _client(server, timeout_s) as client:
        found = client.events(job, limit or 0)
    if output == "json":
        return as_json.events(job, found)
    return as_text.events(job, found, page_for(sys.stdout))


@rdzvctl.command("wait")
@click.argument("job")
@click.option(
    "--for",
    "wait_s",
    type=click.FloatRange(min=0, min_open=True, max=30 * 86_400),
    metavar="SECONDS",
    help="Give up after so long; without it, never.",
)
@_connection_options
@click.pass_context
def _wait(
    context: click.Context,
    job: str,
    wait_s: float | None,
    server: str | None,
    timeout_s: float | None,
) -> None:
    """Wait until JOB has ended.

    \b
    Exit codes: 0 it has succeeded, 1 failed, 3 stopped,
    4 it goes on after --for SECONDS.
    """
    from rdzv.ctl.watch import wait

    with _client(server, timeout_s) as client:
        text, code = wait(client, job, wait_s)
    click.echo(text)
    context.exit(code)


@rdzvctl.command("logs")
@click.argument("job")
@click.option(
    "-f", "--follow", is_flag=True, help="Go on with what is written, until the job ends."
)
@click.option(
    "--rank",
    type=click.IntRange(0, 2**32 - 1),
    metavar="R",
    help="Only the worker with this RANK, as it is.",
)
@click.option(
    "--round",
    "number",
    type=click.IntRange(0, 2**32 - 1),
    metavar="N",
    help="This round; the last if not given.",
)
@click.option("--stdout", is_flag=True, help="Only standard output.")
@click.option("--stderr", is_flag=True, help="Only standard error.")
@click.option(
    "--tail",
    metavar="N",
    help="Only the last N lines of each file or, with a k, M or G behind it, so many bytes.",
)
@_connection_options
@click.pass_context
def _logs(
    context: click.Context,
    job: str,
    follow: bool,
    rank: int | None,
    number: int | None,
    stdout: bool,
    stderr: bool,
    tail: str | None,
    server: str | None,
    timeout_s: float | None,
) -> None:
    """Show what the workers of JOB have written, from the nodes that have it.

    Every line begins with its worker's RANK, unless only one RANK is asked for. With --follow the
    round is shown from its beginning, or its --tail, and then every later one. Exits with 1 if
    anything could not be shown; why is on stderr.
    """
    from rdzv.ctl.logs import parse_tail, show

    try:
        tail_lines, tail_bytes = parse_tail(tail) if tail else (0, 0)
    except InvalidRequestError as error:
        raise click.UsageError(str(error), context) from None
    with _client(server, timeout_s) as client:
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
        whole = show(pieces, one_rank=rank is not None, one_stream=stdout is not stderr)
    context.exit(_OK if whole else _REFUSED)


@rdzvctl.command("forget")
@click.argument("job")
@_connection_options
def _forget(job: str, server: str | None, timeout_s: float | None) -> str:
    """Delete JOB and its history. It has to have ended: `rdzvctl stop` ends it."""
    with _client(server, timeout_s) as client:
        client.forget(job)
    return f"{job} is forgotten"


_reason_option = click.option(
    "--reason", metavar="TEXT", help="Why, for those who ask later; who asks is added."
)


@rdzvctl.command("stop")
@click.argument("job")
@_reason_option
@_connection_options
def _stop(job: str, reason: str | None, server: str | None, timeout_s: float | None) -> str:
    """End JOB: its workers get SIGTERM and time to save, and every node of it leaves."""
    with _client(server, timeout_s) as client:
        run = client.status(job).run or ""
        found = client.stop(job, run, _by_whom("stopped", reason))
    return f"{job} is {found.state}"


@rdzvctl.command("restart")
@click.argument("job")
@_reason_option
@_connection_options
def _restart(job: str, reason: str | None, server: str | None, timeout_s: float | None) -> str:
    """Have JOB stop its workers, which get time to save, and form a new round.

    No restart is spent.
    """
    with _client(server, timeout_s) as client:
        before = client.status(job)
        if before.round is None or before.state != "running":
            raise InvalidRequestError(f"{job} is {before.state}, and has no workers to restart")
        client.restart(job, before.run or "", before.round, _by_whom("restarted", reason))
    return f"{job}: round {before.round} ends, and another forms"


@rdzvctl.command("scale")
@click.argument("job")
@click.argument("bounds", metavar="MIN:MAX")
@_reason_option
@_connection_options
def _scale(
    job: str, bounds: str, reason: str | None, server: str | None, timeout_s: float | None
) -> str:
    """Let JOB have MIN to MAX nodes, whatever it was launched with.

    If more than MAX are seated, the group re-forms and the highest GROUP_RANKs become spares. Fewer
    than MIN run on until their round ends by itself.
    """
    least, colon, most = bounds.partition(":")
    if not (least.isdigit() and (most if colon else least).isdigit()):
        raise click.UsageError(f"{bounds!r} is not MIN:MAX; give two numbers, as in 2:4")
    with _client(server, timeout_s) as client:
        run = client.status(job).run or ""
        why = _by_whom("scaled", reason)
        found = client.scale(job, run, int(least), int(most if colon else least), why)
    return f"{job} may have {found.min_nodes}:{found.max_nodes} nodes"


def _by_whom(what: str, reason: str | None) -> str:
    """Say who asks: at night nobody remembers."""
    import getpass
    import socket

    try:
        who = getpass.getuser()
    except (KeyError, OSError):
        who = f"uid {os.getuid()}"
    return f"{what} by {who} at {socket.gethostname()}" + (f": {reason}" if reason else "")


@rdzvctl.command("version")
def _version() -> str:
    """Show the version of rdzvctl."""
    from importlib import metadata

    return f"{_PROGRAM} {metadata.version('rdzv')}"


@rdzvctl.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def _completion(shell: str) -> str:
    """Print what completes rdzvctl's commands and options in SHELL.

    \b
    bash: eval "$(rdzvctl completion bash)"
    zsh:  eval "$(rdzvctl completion zsh)"
    fish: rdzvctl completion fish | source
    """
    from click.shell_completion import get_completion_class

    completion = get_completion_class(shell)
    assert completion is not None, "click knows all three"
    return completion(rdzvctl, {}, _PROGRAM, "_RDZVCTL_COMPLETE").source()


@rdzvctl.command("servers")
@_output_option
@_connection_options
def _servers(output: str, server: str | None, timeout_s: float | None) -> str:
    """Show the servers that share a store, and which of them leads."""
    from rdzv.ctl import as_json, as_text
    from rdzv.ctl.layout import page_for

    with _client(server, timeout_s) as client:
        found = client.servers()
    if output == "json":
        return as_json.servers(found)
    return as_text.servers(found, page_for(sys.stdout))


@rdzvctl.command("backup")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--force", is_flag=True, help="Replace FILE if it is there.")
@_connection_options
def _backup(file: Path, force: bool, server: str | None, timeout_s: float | None) -> str:
    """Write all that the server remembers into FILE, while it runs.

    `rdzvd --restore FILE` brings it back, into a store of any kind. Only who runs this can read
    FILE. --timeout is how long to wait while nothing comes.
    """
    from rdzv.ctl.backup import new_file

    with new_file(file, replace=force) as written, _client(server, timeout_s) as client:
        found = client.backup(written)
        size = written.seek(0, os.SEEK_END)
    return f"{file}: {found.jobs} jobs, {found.events} events, {size} bytes"


if __name__ == "__main__":
    main()
