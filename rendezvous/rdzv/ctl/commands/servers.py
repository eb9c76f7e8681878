"""Commands for servers: servers, backup."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from rdzv.ctl.command_line import as_asked, connection_options, opened_client, output_option


@click.command("servers")
@output_option
@connection_options
def servers_command(output: str, server: str | None, timeout_s: float | None) -> str:
    """Show the servers that share a store, and which of them leads."""
    from rdzv.ctl import as_text
    from rdzv.ctl.layout import page_for
    from rdzv.view import as_json

    with opened_client(server, timeout_s) as client:
        found = client.servers()
    if output != "text":
        return as_asked(output, as_json.servers(found))
    return as_text.servers(found, page_for(sys.stdout))


@click.command("backup")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@connection_options
def backup_command(file: Path, force: bool, server: str | None, timeout_s: float | None) -> str:
    """Write a backup of the server's store to FILE while the server is running.

    `rdzvd --restore FILE` restores it into a store of any kind. Only the current user can read
    FILE. --timeout limits how long to wait without receiving any data.
    """
    from rdzv.ctl.new_files import new_file

    with new_file(file, replace=force) as written, opened_client(server, timeout_s) as client:
        found = client.backup(written).trailer
        size = written.seek(0, os.SEEK_END)
    return f"{file}: {found.jobs} jobs, {found.events} events, {size} bytes"
