"""Commands for servers, and for who may call them: servers, backup, audit, tokens."""

from __future__ import annotations

import os
from pathlib import Path

import click

from rdzv.ctl.command_line import (
    Subcommands,
    answer,
    command,
    opened_client,
    parse_duration,
)
from rdzv.runtime.usage import Choice
from rdzv.structs import as_dict


@command("servers", output=True)
def servers_command(output: str) -> str:
    """Show the servers that share a store, and which of them leads."""
    from rdzv.ctl import as_text_lists

    with opened_client() as client:
        found = client.servers()
    return answer(output, {"servers": found}, lambda page: as_text_lists.servers(found, page))


@command("backup")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
def backup_command(file: Path, force: bool) -> str:
    """Write a backup of the server's store to FILE while the server is running.

    `rdzvd --restore FILE` restores it into a store of any kind. Only the current user can read
    FILE. --timeout limits how long to wait without receiving any data.
    """
    from rdzv.ctl.new_files import new_file

    with new_file(file, replace=force) as written, opened_client() as client:
        found = client.backup(written).trailer
        size = written.seek(0, os.SEEK_END)
    return f"{file}: {found.jobs} jobs, {found.events} events, {size} bytes"


@command("audit", output=True)
@click.option("-n", "--limit", type=click.IntRange(min=1, max=2**32 - 1), metavar="N", help="""
    Only the newest N changes.""")  # fmt: skip
def audit_command(limit: int | None, output: str) -> str:
    """Show who changed which jobs, nodes and tokens, oldest first.

    For admins only. Times are in this machine's time zone.
    """
    from rdzv.ctl import as_text_lists

    with opened_client() as client:
        found = client.audit(limit or 0)
    return answer(
        output,
        {"events": found},
        lambda page: as_text_lists.events(found, page, "no changes are recorded", "CALL"),
    )


_ROLES = ("read", "submit", "node", "admin")


@click.group("tokens", cls=Subcommands)
def tokens_command() -> None:
    """Create, list and revoke tokens, which identify callers without a certificate."""


@command("create", output=True, of=tokens_command)
@click.argument("name")
@click.option("--role", "roles", multiple=True, required=True, type=Choice(_ROLES), help="""
    What its owner may do; may be given more than once.""")  # fmt: skip
@click.option("--expires", metavar="TIME", help="""
    How long it is valid, such as 12h or 30d; without this option, forever.""")  # fmt: skip
def _create_token(name: str, roles: tuple[str, ...], expires: str | None, output: str) -> str:
    """Create a token for the caller NAME, and write its text to stdout.

    The text cannot be shown again, so store it where only NAME can read it. A name may have several
    tokens, so that a new one can be handed out before the old one is revoked.
    """
    from rdzv.ctl import as_text_lists

    life_ms = 0 if expires is None else parse_duration("--expires", expires)
    with opened_client() as client:
        token, text = client.create_token(name, roles, life_ms)
    if output == "text":
        click.echo(as_text_lists.made(token), err=True)
    return answer(output, {**as_dict(token), "text": text}, lambda _: text)


@command("list", output=True, of=tokens_command)
def _list_tokens(output: str) -> str:
    """List all tokens, without their text. Expired tokens remain listed for a while."""
    from rdzv.ctl import as_text_lists

    with opened_client() as client:
        found = client.tokens()
    return answer(output, {"tokens": found}, lambda page: as_text_lists.tokens(found, page))


@command("revoke", output=True, of=tokens_command)
@click.argument("id_or_name", metavar="ID|NAME")
def _revoke_tokens(id_or_name: str, output: str) -> str:
    """Revoke the token ID, or all tokens of the caller NAME.

    Nodes that use them are disconnected.
    """
    from rdzv.ctl import as_text_lists

    with opened_client() as client:
        found = client.revoke_tokens(id_or_name)
    return answer(output, {"tokens": found}, lambda _: as_text_lists.revoked(found))
