"""Code shared by rdzvctl's commands: exit codes, options, and opening a client."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from rdzv.errors import InvalidRequestError, RendezvousError
from rdzv.runtime.usage import Choice, CommandGroup

if TYPE_CHECKING:
    from rdzv.client import ControlClient
    from rdzv.ctl.layout import Page
    from rdzv.transport.channels import Credentials

PROGRAM = "rdzvctl"


# Repeated from rdzv.client, because importing it would slow down --help.
DEFAULT_SERVER = "127.0.0.1:29400"


_DEFAULT_TIMEOUT_S = 5.0


OK = 0
REFUSED = 1
UNREACHABLE = 75
DENIED = 77


def say(message: str) -> None:
    from rdzv.runtime.log_format import harmless

    click.echo(f"{PROGRAM}: {harmless(message)}", err=True)


def warn(message: str) -> None:
    say(f"warning: {message}")


def complain(message: str, exit_code: int) -> int:
    say(message)
    return exit_code


_T = TypeVar("_T")
_F = TypeVar("_F", bound=Callable[..., Any])

_FILE = click.Path(path_type=Path)


class _ConnectionOption(click.Option):
    """An option that is accepted both before and after a command's name; one after it wins.

    Its value goes to `connection` instead of the command. `rdzvctl --help` explains it, and in a
    command's help all share one line.
    """

    def __init__(self, flag: str, name: str, metavar: str, kind: Any, text: str) -> None:
        super().__init__(
            [flag, name],
            metavar=metavar,
            type=kind,
            help=text,
            expose_value=False,
            callback=self._keep,
        )

    def _keep(self, context: click.Context, _: click.Parameter, value: Any) -> None:
        if value is not None:
            connection(context)[self.name or ""] = value

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        if ctx.parent is None:
            return super().get_help_record(ctx)
        if self.name != "server":
            return None
        return "--server, --timeout, ...", "As before the command: rdzvctl --help explains them."


MAX_TIMEOUT_S = 86_400
_SECONDS = click.FloatRange(min=0, min_open=True, max=MAX_TIMEOUT_S)
# fmt: off
CONNECTION = (
    _ConnectionOption("--server", "server", "HOST:PORT", click.STRING, f"""
        The rdzvd to ask; default: RDZV_SERVER or, if unset, {DEFAULT_SERVER}. If several share a
        store, give some or all of them, separated by commas."""),
    _ConnectionOption("--timeout", "timeout_s", "SECONDS", _SECONDS, f"""
        How many seconds to wait for an answer; default: {_DEFAULT_TIMEOUT_S:g}."""),
    _ConnectionOption("--tls-ca", "ca", "FILE", _FILE, """
        The CA of rdzvd's certificate (PEM), for a TLS connection; default: RDZV_TLS_CA."""),
    _ConnectionOption("--tls-cert", "cert", "FILE", _FILE, """
        The client certificate for rdzvd (PEM); default: RDZV_TLS_CERT."""),
    _ConnectionOption("--tls-key", "key", "FILE", _FILE, """
        The key of that certificate; default: RDZV_TLS_KEY."""),
    _ConnectionOption("--token-file", "token_file", "FILE", _FILE, """
        The file with the token for rdzvd; default: RDZV_TOKEN_FILE, or the token in
        RDZV_TOKEN."""),
)
# fmt: on


def command(
    name: str, *, output: bool = False, of: click.Group | None = None
) -> Callable[[Callable[..., Any]], click.Command]:
    """Declare a command that asks a server; with `output`, -o chooses the form of its answer."""

    def declare(function: Callable[..., Any]) -> click.Command:
        made: click.Command = (of or click).command(name)(function)
        if output:
            made.params.append(
                click.Option(
                    ["-o", "--output"],
                    type=Choice(["text", "json", "yaml"]),
                    default="text",
                    show_default=True,
                    help="text for people, json or yaml for programs.",
                )
            )
        made.params += CONNECTION
        return made

    return declare


def connection(context: click.Context) -> dict[str, Any]:
    given: dict[str, Any] = context.meta.setdefault("rdzv.connection", {})
    return given


def credentials_of(context: click.Context) -> Credentials:
    from rdzv.transport.channels import Credentials

    return Credentials.parse(connection(context), os.environ)


def _server_named(context: click.Context) -> str | None:
    named: str | None = connection(context).get("server")
    return os.environ.get("RDZV_SERVER") or None if named is None else named


_SENTENCE = 200


def list_commands(
    formatter: click.HelpFormatter, title: str, commands: Iterable[click.Command]
) -> None:
    with formatter.section(title):
        formatter.write_dl([(c.name or "", c.get_short_help_str(_SENTENCE)) for c in commands])


class Subcommands(CommandGroup):
    """An rdzvctl command that has subcommands."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **{**more, "no_args_is_help": False})

    def format_commands(self, _: click.Context, formatter: click.HelpFormatter) -> None:
        list_commands(formatter, "Commands", self.commands.values())


reason_option = click.option(
    "--reason",
    metavar="TEXT",
    help="The reason, recorded together with your name.",
)


def job_argument(*, required: bool = True) -> Callable[[_F], _F]:
    return click.argument("job", required=required, shell_complete=partial(complete_names, "jobs"))


def node_argument(*, required: bool = True) -> Callable[[_F], _F]:
    return click.argument(
        "node", required=required, shell_complete=partial(complete_names, "nodes")
    )


COMPLETION_TIMEOUT_S = 1.0


def complete_names(
    kind: str, context: click.Context, _: click.Parameter, incomplete: str
) -> list[str]:
    """Complete a name by asking the server; if it does not respond, return no completions."""
    from rdzv.client import ControlClient, parse_endpoints

    try:
        endpoints = parse_endpoints(_server_named(context) or DEFAULT_SERVER)
        credentials = credentials_of(context)
        with ControlClient(endpoints[:1], COMPLETION_TIMEOUT_S, credentials, 0) as client:
            names = (
                [job.rdzv_id for job in client.jobs()]
                if kind == "jobs"
                else [node.node_id for node in client.nodes()]
            )
    except RendezvousError:
        return []
    return [name for name in names if name.startswith(incomplete) and name.isprintable()]


_UNITS_MS = {
    **{"ms": 1, "s": 1_000, "m": 60_000, "min": 60_000},
    **{"h": 3_600_000, "d": 24 * 3_600_000, "w": 7 * 24 * 3_600_000},
}


def parse_duration(option: str, text: str, *, least_ms: int = 1, unit: str = "") -> int:
    """Parse an option's value that is a time, and return milliseconds.

    `unit` is that of a number alone, which is refused by default.

    >>> [parse_duration("--since", text) for text in ("90s", "5m", "1.5h", "30d")]
    [90000, 300000, 5400000, 2592000000]
    """
    found = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,6})?) *([a-z]*)", text.strip())
    ms = round(float(found[1]) * _UNITS_MS.get(found[2] or unit, -1)) if found else -1
    if ms < least_ms:
        raise InvalidRequestError(
            f"{option}={text[:40]} is not a time; give one such as 90s, 5m, 12h or 30d"
        )
    return ms


def answer(output: str, found: Any, text: Callable[[Page], str]) -> str:
    """Format an answer as requested: as text for people, or as its document in JSON or YAML."""
    if output == "text":
        from rdzv.ctl.layout import page_for

        return text(page_for(sys.stdout))
    from rdzv.view.as_json import document

    return document(found) if output == "json" else as_yaml(document(found))


def as_yaml(document: str) -> str:
    """Convert a JSON document to YAML, with the same keys in the same order.

    Multi-line strings become blocks, unless they contain characters that need escaping. Like the
    JSON, the result is pure ASCII, so nothing in it can harm a terminal.
    """
    import json

    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    def text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
        style = "|" if "\n" in text else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Dumper.add_representer(str, text)
    written: str = yaml.dump(json.loads(document), Dumper=Dumper, sort_keys=False, width=100)
    return written.rstrip("\n")


def asked(
    output: str,
    ask: Callable[[ControlClient], _T],
    text: Callable[[_T, Page], str],
    key: str = "",
) -> str:
    """Ask the server, and format its answer; `key` is that of a list in its document."""
    with opened_client() as client:
        found = ask(client)
    return answer(output, {key: found} if key else found, lambda page: text(found, page))


@contextmanager
def opened_client() -> Iterator[ControlClient]:
    """Open a client for the server named on the command line, and name the server in any errors.

    An invalid endpoint or timeout is a usage error.
    """
    from rdzv.client import ControlClient, parse_endpoints

    context = click.get_current_context()
    named = _server_named(context)
    try:
        endpoints = parse_endpoints(DEFAULT_SERVER if named is None else named)
        within_s = connection(context).get("timeout_s", _DEFAULT_TIMEOUT_S)
        client = ControlClient(endpoints, within_s, credentials_of(context))
    except InvalidRequestError as error:
        raise click.UsageError(str(error), context) from None
    with client:
        try:
            yield client
        except RendezvousError as error:
            raise type(error)(_with_server(str(error), str(client.server), named)) from error


def _with_server(message: str, endpoint: str, named: str | None) -> str:
    """Add the server that was contacted to an error, because it is often not the intended one."""
    if named is None:
        hint = f" ({endpoint} is the default; --server or RDZV_SERVER names another)"
        # If two clients are open, an error passes through both.
        return message if message.endswith(hint) else message + hint
    return message if endpoint in message else f"{message} (asked {endpoint})"


def this_user() -> str:
    import getpass
    import socket

    try:
        who = getpass.getuser()
    except (KeyError, OSError):
        who = f"uid {os.getuid()}"
    return f"{who} at {socket.gethostname()}"


def by_whom(reason: str | None) -> str:
    return f"by {this_user()}" + (f": {reason}" if reason else "")
