"""`rdzvctl certs`: a small CA and its certificates, for users without one. It needs no server."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rdzv.ctl import command_line as cli
from rdzv.errors import InvalidRequestError
from rdzv.runtime.usage import Choice

if TYPE_CHECKING:
    from rdzv.ctl.authority import Made, Shown
    from rdzv.ctl.layout import Columns, Text


ROLES = ("read", "submit", "admin")
"""The roles for clients; `rdzvctl certs node` creates certificates with the node role."""

MOST_DAYS = 36_500

_dir = click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("rdzv-certs"),
    show_default=True,
    metavar="DIR",
    help="The folder of the CA.",
)
_force = click.option("--force", is_flag=True, help="Replace existing files.")


def _days(default: int, what: str = "it is valid") -> Callable[..., Any]:
    return click.option(
        "--days",
        type=click.IntRange(1, MOST_DAYS),
        default=default,
        show_default=True,
        help=f"How long {what}.",
    )


_server_names = click.option(
    "--server",
    "hosts",
    multiple=True,
    required=True,
    metavar="HOST,...",
    help="The names and addresses by which nodes and operators reach rdzvd; localhost is "
    "always included.",
)


@click.group("certs", cls=cli.Subcommands, context_settings={"help_option_names": ["-h", "--help"]})
def certs_command() -> None:
    """Create a small CA, and certificates for rdzvd, nodes and people."""


@certs_command.command("init")
@_dir
@_server_names
@_days(365, "the server's certificate is valid")
@click.option("--ca-days", type=click.IntRange(1, MOST_DAYS), default=3650, show_default=True,
    help="""
    How long the CA is valid.""")  # fmt: skip
@_force
def _init(folder: Path, hosts: tuple[str, ...], days: int, ca_days: int, force: bool) -> str:
    """Create a CA, and a certificate for rdzvd.

    ca.crt is for everyone. Anyone with ca.key can sign certificates, so it should stay where it was
    created. That machine need not run a server.
    """
    from rdzv.ctl.authority import Authority, parse_hosts

    names = parse_hosts(hosts)
    if days > ca_days:
        raise InvalidRequestError(
            f"--days {days} is longer than the CA is valid, --ca-days {ca_days}; give fewer"
        )
    made = Authority.make(folder, ca_days, replace=force).server(names, days, replace=force)
    ca = folder / "ca.crt"
    return (
        f"{ca}: the CA, for everyone; {folder / 'ca.key'} signs, and stays here\n"
        f"{_files(made)}: of rdzvd; start it with\n"
        f"  rdzvd --tls-cert {made.cert} --tls-key {made.key} --tls-client-ca {ca}"
    )


@certs_command.command("server")
@_dir
@_server_names
@_days(365)
@_force
def _server(folder: Path, hosts: tuple[str, ...], days: int, force: bool) -> str:
    """Create another certificate for rdzvd; with --force, replace the existing one.

    An rdzvd that uses these files presents the new certificate from its next connection on.
    """
    from rdzv.ctl.authority import Authority, parse_hosts

    names = parse_hosts(hosts)
    return f"{_files(Authority.open(folder).server(names, days, replace=force))}: of rdzvd"


@certs_command.command("node")
@click.argument("name")
@_dir
@_days(365)
@_force
def _node(name: str, folder: Path, days: int, force: bool) -> str:
    """Create a certificate for the node whose node_id is NAME."""
    from rdzv.ctl.authority import Authority

    made = Authority.open(folder).caller("node", name, ("node",), days, replace=force)
    return f"{_files(made)}: of node {name}; it needs them, and {folder / 'ca.crt'}"


@certs_command.command("client")
@click.argument("name")
@click.option("--role", "roles", multiple=True, required=True, type=Choice(ROLES), help="""
    What it may do; may be given several times.""")  # fmt: skip
@_dir
@_days(90)
@_force
def _client(name: str, roles: tuple[str, ...], folder: Path, days: int, force: bool) -> str:
    """Create a certificate for the person or program NAME."""
    from rdzv.ctl.authority import Authority

    made = Authority.open(folder).caller("client", name, roles, days, replace=force)
    return (
        f"{_files(made)}: of {name}, for {' and '.join(roles)}; in its environment:\n"
        f"  RDZV_TLS_CA={folder / 'ca.crt'} RDZV_TLS_CERT={made.cert} RDZV_TLS_KEY={made.key}"
    )


@certs_command.command("show")
@click.argument("files", nargs=-1, type=click.Path(path_type=Path))
@_dir
def _show(files: tuple[Path, ...], folder: Path) -> str:
    """Show the holders and validity of the certificates in FILES, by default those in --dir."""
    from rdzv.ctl.authority import show
    from rdzv.ctl.layout import Cell, page_for

    found = show(files or sorted(folder.glob("*.crt")))
    if not found:
        raise InvalidRequestError(f"no certificate is in {folder}; give --dir, or FILES")
    now = datetime.now(UTC)

    def expiry(one: Shown) -> Text:
        day = f"{one.not_after:%Y-%m-%d}"
        if one.not_after <= now:
            return Cell(f"{day} (expired)", "red")
        days = (one.not_after - now).days
        return Cell(f"{day} ({days} days)", "yellow" if days < 14 else "")

    columns: Columns[Shown] = {
        "FILE": lambda one: str(one.file),
        "KIND": lambda one: one.kind,
        "NAME": lambda one: one.name,
        "ROLES": lambda one: ",".join(one.roles),
        "VALID UNTIL": expiry,
        "ASKED FOR AS": lambda one: " ".join(one.hosts),
    }
    rows = sorted(found, key=lambda one: one.not_after)
    return "\n".join(page_for(sys.stdout).table(rows, columns))


def _files(made: Made) -> str:
    return f"{made.cert} and {made.key.name}"
