"""The command line of rdzvctl: options, commands, exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import click

from rdzv.ctl.certs_command import certs
from rdzv.errors import (
    DeniedError,
    InvalidRequestError,
    LimitExceededError,
    RendezvousConnectionError,
    RendezvousError,
    TooFewNodesError,
    UnauthenticatedError,
    UnknownNodeError,
    short,
)
from rdzv.structs import struct
from rdzv.version import VERSION

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from rdzv.client import ControlClient
    from rdzv.transport.channels import Credentials
    from rdzv.view.answers import Event

_PROGRAM = "rdzvctl"
# Repeated from rdzv.client, whose import would slow down --help.
_DEFAULT_SERVER = "127.0.0.1:29400"
_DEFAULT_TIMEOUT_S = 5.0

_HISTORY_ROWS = 10_000
"""What a server keeps of each job's history, unless its configuration says otherwise."""

_OK = 0
_REFUSED = 1
_USAGE = 2
_UNREACHABLE = 75
_DENIED = 77
_INTERRUPTED = 130

_ROLES = ("read", "submit", "node", "admin")

_EPILOG = """\b
Exit codes:
  0   ok
  1   what was asked for is not there, or the server refused
  2   the command line is wrong
  75  the server can not be reached; the same command may succeed later
  77  the server does not let this caller do that
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
    except (DeniedError, UnauthenticatedError) as error:
        return _complain(str(error), _DENIED)
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
    from rdzv.view.log_lines import harmless

    click.echo(f"{_PROGRAM}: {harmless(message)}", err=True)
    return exit_code


def _drop_output() -> None:
    """Let what is still buffered go nowhere, so that the interpreter's exit does not fail on it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


# ------------------------------------------------------------------------------------ options


@struct(frozen=True)
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
    return server(timeout(_credentials_options(command)))


_CREDENTIALS = {
    "ca": ("--tls-ca", "Reach rdzvd by TLS: the CA of its certificate (PEM); else RDZV_TLS_CA."),
    "cert": ("--tls-cert", "The certificate that rdzvd is shown (PEM); else RDZV_TLS_CERT."),
    "key": ("--tls-key", "The key of that certificate; else RDZV_TLS_KEY."),
    "token_file": (
        "--token-file",
        "The token that rdzvd is sent; else RDZV_TOKEN_FILE, or the token in RDZV_TOKEN.",
    ),
}
"""The options that say how to connect, by the fields of `Credentials`."""

_META = "rdzv.credentials"


def _credentials_options(command: Callable[_P, _R]) -> Callable[_P, _R]:
    """Add the options of `Credentials`, whose values no command needs: `_credentials` finds them.

    What stands after the name of a command wins over what stands before it.
    """

    def keep(context: click.Context, option: click.Parameter, value: Path | None) -> None:
        if value is not None:
            context.meta.setdefault(_META, {})[option.name] = value

    for name, (flag, text) in reversed(_CREDENTIALS.items()):
        option = click.option(
            flag,
            name,
            type=click.Path(path_type=Path),
            metavar="FILE",
            expose_value=False,
            callback=keep,
            help=text,
        )
        command = option(command)
    return command


def _credentials(context: click.Context) -> Credentials:
    """Return what the command line and the environment say of how to connect."""
    from rdzv.transport.channels import Credentials

    return Credentials.parse(context.meta.get(_META, {}), os.environ)


_output_option = click.option(
    "-o",
    "--output",
    type=click.Choice(["text", "json", "yaml"]),
    default="text",
    show_default=True,
    help="text for people, json or yaml for programs.",
)

_job_argument = click.argument("job", shell_complete=lambda *asked: _names(*asked, kind="jobs"))
_node_argument = click.argument("node", shell_complete=lambda *asked: _names(*asked, kind="nodes"))

_COMPLETION_TIMEOUT_S = 1.0
"""Who presses the tabulator waits no longer."""


def _names(context: click.Context, _: click.Parameter, incomplete: str, *, kind: str) -> list[str]:
    """Complete a name by asking the server; one that does not answer completes nothing."""
    from rdzv.client import ControlClient, parse_endpoints

    named = context.params.get("server")
    if named is None and context.parent is not None:
        named = context.parent.params.get("server")
    try:
        endpoints = parse_endpoints(named or os.environ.get("RDZV_SERVER") or _DEFAULT_SERVER)
        credentials = _credentials(context)
        with ControlClient(endpoints[:1], _COMPLETION_TIMEOUT_S, credentials, 0) as client:
            names = (
                [job.rdzv_id for job in client.jobs()]
                if kind == "jobs"
                else [node.node_id for node in client.nodes()]
            )
    except RendezvousError:
        return []
    return [name for name in names if name.startswith(incomplete) and name.isprintable()]


def _document(output: str, json: str) -> str:
    """Return a document of `as_json` as it was asked for."""
    if output == "json":
        return json
    from rdzv.ctl import as_yaml

    return as_yaml.document(json)


@contextmanager
def _client(server: str | None, timeout_s: float | None) -> Iterator[ControlClient]:
    """Open a client to the server that the command line means; errors that leave name it.

    An endpoint or a timeout that makes no sense is an error of the command line.
    """
    from rdzv.client import ControlClient, parse_endpoints

    context = click.get_current_context()
    before = context.find_object(_Connection) or _Connection(None, None)
    named = before.server if server is None else server
    try:
        endpoints = parse_endpoints(_DEFAULT_SERVER if named is None else named)
        within_s = timeout_s or before.timeout_s or _DEFAULT_TIMEOUT_S
        client = ControlClient(endpoints, within_s, _credentials(context))
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
        hint = f" ({endpoint} is the default; --server or RDZV_SERVER names another)"
        # Where two clients are open, an error leaves both.
        return message if message.endswith(hint) else message + hint
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
    """See what the jobs of an rdzvd do, and why; submit, stop, restart and scale them."""
    if server is None:
        server = os.environ.get("RDZV_SERVER") or None
    context.obj = _Connection(server, timeout_s)
    if context.invoked_subcommand is None:
        raise click.UsageError("a command is missing", context)


rdzvctl.add_command(certs)


@rdzvctl.command("status")
@_job_argument
@click.option("--all", "everything", is_flag=True, help="Abbreviate nothing.")
@click.option(
    "-w",
    "--watch",
    "watched",
    is_flag=True,
    help="Show it anew whenever it changes, until it has ended or Ctrl-C; with -o json one "
    "document a line, with -o yaml one after each ---.",
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
    from rdzv.ctl import as_text
    from rdzv.ctl.layout import page_for
    from rdzv.view import as_json

    with _client(server, timeout_s) as client:
        # A watch waits for a server that went away; one that was never there is told at once.
        found = client.status(job)
        if watched:
            from rdzv.ctl.watch import show

            with _client(server, timeout_s) as other:
                show(client, other, job, output, everything=everything)
            return None
    if output != "text":
        return _document(output, as_json.status(found))
    return as_text.status(found, page_for(sys.stdout), everything=everything)


@rdzvctl.command("list")
@_output_option
@_connection_options
def _list(output: str, server: str | None, timeout_s: float | None) -> str:
    """Show every job, one line each."""
    from rdzv.ctl import as_text
    from rdzv.ctl.layout import page_for
    from rdzv.view import as_json

    with _client(server, timeout_s) as client:
        found = client.jobs()
    if output != "text":
        return _document(output, as_json.jobs(found, store_away=client.store_away))
    page = page_for(sys.stdout)
    return as_text.jobs(str(client.server), found, page, client.store_away)


@rdzvctl.command("events")
@_job_argument
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
    from rdzv.ctl import as_text
    from rdzv.ctl.layout import page_for
    from rdzv.view import as_json

    with _client(server, timeout_s) as client:
        found = client.events(job, limit or 0)
    if output != "text":
        return _document(output, as_json.events(job, found))
    return as_text.events(job, found, page_for(sys.stdout))


@rdzvctl.command("audit")
@click.option(
    "-n",
    "--limit",
    type=click.IntRange(min=1, max=2**32 - 1),
    metavar="N",
    help="Only the newest N changes.",
)
@_output_option
@_connection_options
def _audit(limit: int | None, output: str, server: str | None, timeout_s: float | None) -> str:
    """Show who has changed what, of all jobs, nodes and tokens, oldest first.

    It is for admins. Times are local ones of this machine.
    """
    from rdzv.ctl import as_text_access
    from rdzv.ctl.layout import page_for
    from rdzv.view import as_json

    with _client(server, timeout_s) as client:
        found = client.audit(limit or 0)
    if output != "text":
        return _document(output, as_json.audit(found))
    return as_text_access.audit(found, page_for(sys.stdout))


@rdzvctl.group("tokens")
def _tokens() -> None:
    """Make, show and revoke tokens, by which callers without a certificate prove who they are."""


@_tokens.command("create")
@click.argument("name")
@click.option(
    "--role",
    "roles",
    multiple=True,
    required=True,
    type=click.Choice(_ROLES),
    help="What its owner may do; may be given more than once.",
)
@click.option(
    "--expires",
    metavar="TIME",
    help="How long it is good, such as 12h or 30d; for ever if not given.",
)
@_output_option
@_connection_options
def _create_token(
    name: str,
    roles: tuple[str, ...],
    expires: str | None,
    output: str,
    server: str | None,
    timeout_s: float | None,
) -> str:
    """Make a token for the caller NAME, and write its text to stdout.

    Nobody shows it again: put it where only NAME can read it. There may be several of one name, so
    that the next can be handed out before the last is revoked.
    """
    from rdzv.ctl import as_text_access
    from rdzv.ctl.as_text_access import parse_life
    from rdzv.view import as_json

    life_ms = 0 if expires is None else parse_life(expires)
    with _client(server, timeout_s) as client:
        token, text = client.create_token(name, roles, life_ms)
    if output != "text":
        return _document(output, as_json.token_made(token, text))
    click.echo(as_text_access.made(token), err=True)
    return text


@_tokens.command("list")
@_output_option
@_connection_options
def _list_tokens(output: str, server: str | None, timeout_s: float | None) -> str:
    """Show every token, but for its text; those that have expired, for a while."""
    from rdzv.ctl import as_text_access
    from rdzv.ctl.layout import page_for
    from rdzv.view import as_json

    with _client(server, timeout_s) as client:
        found = client.tokens()
    if output != "text":
        return _document(output, as_json.tokens(found))
    return as_text_access.tokens(found, page_for(sys.stdout))


@_tokens.command("revoke")
@click.argument("id_or_name", metavar="ID|NAME")
@_output_option
@_connection_options
def _revoke_tokens(
    id_or_name: str, output: str, server: str | None, timeout_s: float | None
) -> str:
    """Revoke the token ID, or all of the caller NAME; nodes that show them are cut off."""
    from rdzv.ctl import as_text_access
    from rdzv.view import as_json

    with _client(server, timeout_s) as client:
        found = client.revoke_tokens(id_or_name)
    if output != "text":
        return _document(output, as_json.tokens(found))
    return as_text_access.revoked(found)


@rdzvctl.command("explain")
@_job_argument
@_connection_options
def _explain(job: str, server: str | None, timeout_s: float | None) -> str:
    """Tell in sentences what has happened to JOB, and what it waits for now.

    What failed first, what each change of the group cost, and why there is no round at present, if
    there is none. JOB is its rdzv_id; of a job that has ended, the last run is told of. Times are
    local ones of this machine.
    """
    from rdzv.ctl import explain_text
    from rdzv.ctl.layout import page_for

    with _client(server, timeout_s) as client:
        status, history = client.status(job), _history(client, job)
    return explain_text.explain(status, history, page_for(sys.stdout))


@rdzvctl.command("trace")
@_job_argument
@click.option(
    "-o",
    "--output",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    metavar="FILE",
    help="Where to write it; - is standard output. A file that is there is replaced.",
)
@_connection_options
def _trace(job: str, path: Path, server: str | None, timeout_s: float | None) -> str:
    """Write the life of JOB as a trace, which ui.perfetto.dev shows.

    Rounds are slices on the track of each node, with what ended them; events are instants.
    """
    import time

    from rdzv.ctl.trace import trace

    with _client(server, timeout_s) as client:
        status, history = client.status(job), _history(client, job)
    document = trace(status, history, round(time.time() * 1000))
    if path == Path("-"):
        return document
    try:
        path.write_text(document + "\n", encoding="ascii")
    except OSError as error:
        raise InvalidRequestError(
            f"{path} can not be written: {error.strerror}; give another file"
        ) from error
    return f"{path} has the life of {job}; open it at https://ui.perfetto.dev"


def _history(client: ControlClient, job: str) -> tuple[Event, ...]:
    """Return all that is kept of a job's history; the newest, where the server gives no more."""
    try:
        return client.events(job, _HISTORY_ROWS)
    except (InvalidRequestError, LimitExceededError):
        return client.events(job)


@rdzvctl.command("wait")
@_job_argument
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
    4 it goes on after --for SECONDS, 93 failed without progress.
    """
    from rdzv.ctl.watch import wait

    with _client(server, timeout_s) as client:
        text, code = wait(client, job, wait_s)
    click.echo(text)
    context.exit(code)


@rdzvctl.command("logs")
@_job_argument
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
    from rdzv.ctl.logs_text import parse_tail, show

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


@rdzvctl.command("stacks")
@_job_argument
@click.option(
    "--round",
    "number",
    type=click.IntRange(0, 2**32 - 1),
    metavar="N",
    help="This round, of which they were kept when it hung; the present one if not given.",
)
@click.option("--raw", is_flag=True, help="All threads of all workers, not of one of each group.")
@_output_option
@_connection_options
def _stacks(
    job: str,
    number: int | None,
    raw: bool,
    output: str,
    server: str | None,
    timeout_s: float | None,
) -> str:
    """Show what the workers of JOB are doing: where in their code each of them is.

    Workers that are at the same place are put together. Those that run are looked at now, by py-spy
    on their nodes, which stops each for some milliseconds; nodes that do not answer within 10 s are
    named. If none run, what was kept of the last hang is shown.
    """
    from rdzv.ctl import stacks_text
    from rdzv.ctl.layout import page_for
    from rdzv.view import as_json

    with _client(server, timeout_s) as client:
        found = client.stacks(job, number)
    if output != "text":
        return _document(output, as_json.stacks(found))
    return stacks_text.text(found, page_for(sys.stdout), raw=raw)


@rdzvctl.command("forget")
@_job_argument
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
@_job_argument
@_reason_option
@_connection_options
def _stop(job: str, reason: str | None, server: str | None, timeout_s: float | None) -> str:
    """End JOB: its workers get SIGTERM and time to save, and every node of it leaves."""
    with _client(server, timeout_s) as client:
        run = client.status(job).run or ""
        found = client.stop(job, run, f"stopped {_by_whom(reason)}")
    return f"{job} is {found.state}"


@rdzvctl.command("restart")
@_job_argument
@_reason_option
@_connection_options
def _restart(job: str, reason: str | None, server: str | None, timeout_s: float | None) -> str:
    """Have JOB stop its workers, which get time to save, and form a new round.

    No restart is spent.
    """
    with _client(server, timeout_s) as client:
        before = client.status(job)
        if before.round is None or before.state != "running":
            has = "has" if before.state in ("succeeded", "failed", "stopped") else "is"
            raise InvalidRequestError(
                f"{job} {has} {before.state}: there are no workers to restart"
            )
        client.restart(job, before.run or "", before.round, f"restarted {_by_whom(reason)}")
    return f"{job}: round {before.round} ends, and another forms"


@rdzvctl.command("scale")
@_job_argument
@click.argument("bounds", metavar="MIN:MAX")
@_reason_option
@_connection_options
def _scale(
    job: str, bounds: str, reason: str | None, server: str | None, timeout_s: float | None
) -> str:
    """Let JOB have MIN to MAX nodes, whatever it was launched with; N alone means N:N.

    If more than MAX are seated, the group re-forms and the highest GROUP_RANKs become spares. Fewer
    than MIN run on until their round ends by itself.
    """
    least, colon, most = bounds.partition(":")
    if not (least.isdigit() and (most if colon else least).isdigit()):
        raise click.UsageError(f"{bounds!r} is not MIN:MAX; give two numbers, as in 2:4")
    from rdzv.ctl.as_text import scaled

    with _client(server, timeout_s) as client:
        before = client.status(job)
        why = f"scaled {_by_whom(reason)}"
        most = most if colon else least
        found = client.scale(job, before.run or "", int(least), int(most), why)
    return scaled(before, found)


def _who() -> str:
    """Say who asks: at night nobody remembers."""
    import getpass
    import socket

    try:
        who = getpass.getuser()
    except (KeyError, OSError):
        who = f"uid {os.getuid()}"
    return f"{who} at {socket.gethostname()}"


def _by_whom(reason: str | None) -> str:
    return f"by {_who()}" + (f": {reason}" if reason else "")


class _Submit(click.Command):
    """A command with rdzvrun's flags, which are read as rdzvrun reads them."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Leave all words to the command."""
        ctx.params = {"words": tuple(args)}
        return args

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete flags by their names, and all else as files."""
        from click.shell_completion import CompletionItem

        from rdzv.ctl.submit_command import option_names

        if not incomplete.startswith("-"):
            return [CompletionItem(incomplete, type="file")]
        return [CompletionItem(name) for name in option_names() if name.startswith(incomplete)]


@rdzvctl.command("submit", cls=_Submit)
@click.pass_context
def _submit(context: click.Context, words: tuple[str, ...]) -> str | int:
    """Hand a job to the server, which runs it on nodes that are free.

    It takes rdzvrun's flags, a script and the script's arguments; see rdzvctl submit --help.
    """
    from rdzv.ctl import submit_command

    try:
        if submit_command.wants_help(words):
            return submit_command.help_text()
        request = submit_command.read(words, submit_command.Caller.here())
    except InvalidRequestError as error:
        raise click.UsageError(str(error), context) from None
    from rdzv.ctl.as_text import submitted, to_submit
    from rdzv.ctl.layout import page_for
    from rdzv.view import as_json

    for note in request.notes:
        _complain(note, _OK)
    if request.dry_run:
        if request.output == "text":
            return to_submit(request.rdzv_id, request.settings, request.spec, page_for(sys.stdout))
        document = as_json.to_submit(request.rdzv_id, request.settings, request.spec)
        return _document(request.output, document)
    context.meta.setdefault(_META, {}).update(request.credentials)
    with _client(request.server, request.timeout_s) as client:
        found = client.submit(request.rdzv_id, request.run, request.settings, request.spec, _who())
    if request.output != "text":
        return _document(request.output, as_json.status(found))
    page = page_for(sys.stderr if request.follow else sys.stdout)
    text = submitted(found, request.server, page, followed=request.follow)
    if not request.follow:
        return text
    # What the workers write is alone on stdout.
    click.echo(text, err=True)
    return _followed(request.rdzv_id, request.run, request.server, request.timeout_s)


def _followed(rdzv_id: str, run: str, server: str | None, timeout_s: float | None) -> int:
    from rdzv.ctl.follow import follow

    try:
        with _client(server, timeout_s) as logs, _client(server, timeout_s) as watcher:
            return follow(logs, watcher, rdzv_id, run)
    except KeyboardInterrupt:
        option = f"--server={server} " if server else ""
        return _complain(
            f"{rdzv_id} goes on; `rdzvctl {option}logs -f {rdzv_id}` shows what it writes, "
            f"`rdzvctl {option}stop {rdzv_id}` ends it",
            _INTERRUPTED,
        )


@rdzvctl.command("nodes")
@click.argument("node", required=False, shell_complete=lambda *asked: _names(*asked, kind="nodes"))
@_output_option
@_connection_options
def _nodes(node: str | None, output: str, server: str | None, timeout_s: float | None) -> str:
    """Show every node, one line each; or all that is known of NODE.

    Nodes that are connected, away, cordoned or quarantined. GPUS_FREE are those that no job has, of
    how many.
    """
    from rdzv.ctl import as_text_nodes
    from rdzv.ctl.layout import page_for
    from rdzv.view import as_json

    with _client(server, timeout_s) as client:
        found = client.nodes()
        if node is not None:
            one = next((one for one in found if one.node_id == node), None)
            if one is None:
                raise UnknownNodeError(
                    f"no node {short(node)} is known; `rdzvctl nodes` shows those that are"
                )
            if output != "text":
                return _document(output, as_json.node(one))
            return as_text_nodes.node(one, page_for(sys.stdout))
    if output != "text":
        return _document(output, as_json.nodes(found, store_away=client.store_away))
    page = page_for(sys.stdout)
    return as_text_nodes.nodes(str(client.server), found, page, client.store_away)


@rdzvctl.command("cordon")
@_node_argument
@_reason_option
@_output_option
@_connection_options
def _cordon(
    node: str, reason: str | None, output: str, server: str | None, timeout_s: float | None
) -> str:
    """Have no more submitted jobs placed on NODE; those that are there go on.

    It stays cordoned, over restarts of itself and of the server, until it is uncordoned.
    """
    from rdzv.ctl.as_text_nodes import cordoned
    from rdzv.view import as_json

    with _client(server, timeout_s) as client:
        found = client.cordon(node, _by_whom(reason))
    return cordoned(found) if output == "text" else _document(output, as_json.node(found))


@rdzvctl.command("uncordon")
@_node_argument
@_output_option
@_connection_options
def _uncordon(node: str, output: str, server: str | None, timeout_s: float | None) -> str:
    """Let submitted jobs be placed on NODE again; this lifts a quarantine, too."""
    from rdzv.ctl.as_text_nodes import uncordoned
    from rdzv.view import as_json

    with _client(server, timeout_s) as client:
        found = client.uncordon(node)
    return uncordoned(found) if output == "text" else _document(output, as_json.node(found))


@rdzvctl.command("drain")
@click.argument("node", required=False, shell_complete=lambda *asked: _names(*asked, kind="nodes"))
@click.option(
    "--deadline",
    default="5m",
    show_default=True,
    metavar="TIME",
    help="How long the workers have to save and exit, such as 90s or 5m; then they are ended.",
)
@_reason_option
@click.option("--wait", "waits", is_flag=True, help="Return when nothing of a job is left there.")
@click.option(
    "--all-of",
    metavar="LABEL=VALUE",
    help="In place of NODE: all nodes with this label, one after another. Each only when its jobs "
    "keep their min_nodes without it, and the next only when they run again.",
)
@click.option(
    "--undrain-after",
    "command",
    metavar="COMMAND",
    help="With --all-of: run this for each node that is empty, with RDZV_NODE in its environment; "
    "if it succeeds, the drain of the node is lifted.",
)
@_output_option
@_connection_options
@click.pass_context
def _drain(
    context: click.Context,
    node: str | None,
    deadline: str,
    reason: str | None,
    waits: bool,
    all_of: str | None,
    command: str | None,
    output: str,
    server: str | None,
    timeout_s: float | None,
) -> str | int:
    """Empty NODE: its workers are told, and leave; nothing more is placed there.

    Workers get the notice signal of their job (SIGTERM), and find why in the file that
    RDZV_NOTICE_FILE names. The node leaves its jobs when they have exited, or at the deadline; a
    spare takes the seat, and no restart is spent. It stays drained, over restarts of itself and of
    the server, until it is undrained. Drained again, the deadline is another.

    \b
    Exit codes: 0 done, 1 refused, 3 the COMMAND failed, 130 Ctrl-C: what is
    drained stays drained.
    """
    from rdzv.ctl import drain_command

    if (node is None) == (all_of is None):
        raise click.UsageError("name a NODE, or give --all-of LABEL=VALUE", context)
    if command is not None and all_of is None:
        raise click.UsageError("--undrain-after goes with --all-of", context)
    if all_of is not None and output != "text":
        raise click.UsageError("--all-of tells what it does, in text alone", context)
    try:
        deadline_ms = drain_command.parse_deadline(deadline)
        label = drain_command.parse_label(all_of) if all_of is not None else ("", "")
    except InvalidRequestError as error:
        raise click.UsageError(str(error), context) from None
    try:
        with _client(server, timeout_s) as client:
            if node is None:
                rolling = drain_command.Rolling(label, deadline_ms, _by_whom(reason), command)
                return drain_command.roll(client, rolling, click.echo)
            return _drain_one(client, node, deadline_ms, reason, output, waits=waits)
    except KeyboardInterrupt:
        return _complain("what is drained stays drained; `rdzvctl undrain` lifts it", _INTERRUPTED)


def _drain_one(
    client: ControlClient,
    node: str,
    deadline_ms: int,
    reason: str | None,
    output: str,
    *,
    waits: bool,
) -> str:
    from rdzv.ctl import drain_command
    from rdzv.ctl.as_text_nodes import drained
    from rdzv.view import as_json

    try:
        found = client.drain(node, deadline_ms, _by_whom(reason), keep_min=True)
    except TooFewNodesError as error:
        # One who names the node means it; what it costs is said.
        found = client.drain(node, deadline_ms, _by_whom(reason))
        _complain(f"without {node}, {error}", _OK)
    if waits:
        found = (
            drain_command.wait_empty(client, node, lambda text: click.echo(text, err=True)) or found
        )
    return drained(found) if output == "text" else _document(output, as_json.node(found))


@rdzvctl.command("undrain")
@_node_argument
@_output_option
@_connection_options
def _undrain(node: str, output: str, server: str | None, timeout_s: float | None) -> str:
    """Lift the drain of NODE, and let submitted jobs be placed there again.

    Workers that are still there are told nothing more, and are not ended; those that exit because
    they were told to, leave their job.
    """
    from rdzv.ctl.as_text_nodes import undrained
    from rdzv.view import as_json

    with _client(server, timeout_s) as client:
        found = client.undrain(node)
    return undrained(found) if output == "text" else _document(output, as_json.node(found))


@rdzvctl.command("version")
def _version() -> str:
    """Show the version of rdzvctl."""
    return f"{_PROGRAM} {VERSION}"


@rdzvctl.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def _completion(shell: str) -> str:
    """Print what completes rdzvctl's commands and options, and names of jobs and nodes, in SHELL.

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
    from rdzv.ctl import as_text
    from rdzv.ctl.layout import page_for
    from rdzv.view import as_json

    with _client(server, timeout_s) as client:
        found = client.servers()
    if output != "text":
        return _document(output, as_json.servers(found))
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
    from rdzv.ctl.backup_file import new_file

    with new_file(file, replace=force) as written, _client(server, timeout_s) as client:
        found = client.backup(written)
        size = written.seek(0, os.SEEK_END)
    return f"{file}: {found.jobs} jobs, {found.events} events, {size} bytes"


if __name__ == "__main__":
    main()
