"""Commands for nodes, for servers, and for who may call them: drain, backup, tokens, ..."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rdzv.ctl import command_line as cli
from rdzv.errors import InvalidRequestError, TooFewNodesError, UnknownNodeError, short
from rdzv.runtime.usage import INTERRUPTED, Choice
from rdzv.structs import as_dict

if TYPE_CHECKING:
    from rdzv.client import ControlClient


@cli.command("nodes", output=True)
@cli.node_argument(required=False)
def nodes_command(node: str | None, output: str) -> str:
    """Show every node, one line each; or everything known about NODE.

    Lists nodes that are connected, away, cordoned or quarantined. GPUS_FREE is the number of GPUs
    not used by any job, and the total.
    """
    from rdzv.ctl import as_text_nodes

    with cli.opened_client() as client:
        found = client.nodes()
    if node is None:
        server, away = str(client.server), client.store_away
        return cli.answer(
            output,
            {"nodes": found, "store_away": away},
            lambda page: as_text_nodes.nodes(server, found, page, away),
        )
    one = next((one for one in found if one.node_id == node), None)
    if one is None:
        raise UnknownNodeError(
            f"no node {short(node)} is known; `rdzvctl nodes` lists the known ones"
        )
    return cli.answer(output, one, lambda page: as_text_nodes.node(one, page))


@cli.command("cordon", output=True)
@cli.node_argument()
@cli.reason_option
def cordon_command(node: str, reason: str | None, output: str) -> str:
    """Stop scheduling submitted jobs onto NODE; jobs already there continue.

    NODE stays cordoned across restarts of the node and of the server, until it is uncordoned.
    """
    from rdzv.ctl.as_text_nodes import cordoned

    return cli.asked(output, lambda it: it.cordon(node, cli.by_whom(reason)), cordoned)


@cli.command("uncordon", output=True)
@cli.node_argument()
def uncordon_command(node: str, output: str) -> str:
    """Allow submitted jobs on NODE again. This also lifts a quarantine."""
    from rdzv.ctl.as_text_nodes import uncordoned

    return cli.asked(output, lambda it: it.uncordon(node, cli.by_whom(None)), uncordoned)


@cli.command("drain", output=True)
@cli.node_argument(required=False)
@click.option("--deadline", default="5m", show_default=True, metavar="TIME", help="""
    How long the workers have to save and exit, such as 90s or 5m; then they are
    killed.""")  # fmt: skip
@cli.reason_option
@click.option(
    "--wait", "waits", is_flag=True, help="Return when nothing of a job is left on the node."
)
@click.option(
    "--force", is_flag=True, help="Drain it even if a job is left with too few nodes, and stops."
)
@click.option("--all-of", metavar="LABEL=VALUE", help="""
    Instead of NODE: all nodes with this label, one after another: each only if its jobs keep their
    min_nodes without it, and the next only when they run again.""")  # fmt: skip
@click.option("--undrain-after", "command", metavar="COMMAND", help="""
    With --all-of: run this for each empty node, with RDZV_NODE in its environment; if it succeeds,
    the drain of the node is lifted.""")  # fmt: skip
@click.pass_context
def drain_command(
    context: click.Context,
    node: str | None,
    deadline: str,
    reason: str | None,
    waits: bool,
    force: bool,
    all_of: str | None,
    command: str | None,
    output: str,
) -> str | int:
    """Empty NODE: its workers are notified and leave, and nothing more is placed there.

    Workers get the notice signal of their job (SIGTERM), and find the reason in the file named by
    RDZV_NOTICE_FILE. The node leaves its jobs when they have exited, or at the deadline; a spare
    takes the seat, and no restart is spent. The node stays drained across restarts of the node and
    of the server, until it is undrained. Draining it again changes the deadline. A drain that would
    leave a job with fewer nodes than its MIN is refused without --force.

    \b
    Exit codes: 0 done, 1 refused, 3 the COMMAND failed, 130 Ctrl-C: drained
    nodes stay drained.
    """
    from rdzv.ctl import rolling_drain

    if (node is None) == (all_of is None):
        raise click.UsageError("name a NODE, or give --all-of LABEL=VALUE", context)
    if command is not None and all_of is None:
        raise click.UsageError("--undrain-after goes with --all-of", context)
    if all_of is not None and force:
        raise click.UsageError("--all-of waits for its jobs; leave --force out", context)
    if all_of is not None and output != "text":
        raise click.UsageError("--all-of reports its progress as text only", context)
    try:
        deadline_ms = rolling_drain.parse_deadline(deadline)
        label = rolling_drain.parse_label(all_of) if all_of is not None else ("", "")
    except InvalidRequestError as error:
        raise click.UsageError(str(error), context) from None
    try:
        with cli.opened_client() as client:
            if node is None:
                rolling = rolling_drain.Rolling(label, deadline_ms, cli.by_whom(reason), command)
                return rolling_drain.roll(client, rolling, click.echo)
            return _drain_one(client, node, deadline_ms, reason, output, waits=waits, force=force)
    except KeyboardInterrupt:
        return cli.complain("drained nodes stay drained; `rdzvctl undrain` lifts that", INTERRUPTED)


def _drain_one(
    client: ControlClient,
    node: str,
    deadline_ms: int,
    reason: str | None,
    output: str,
    *,
    waits: bool,
    force: bool,
) -> str:
    from rdzv.ctl import rolling_drain
    from rdzv.ctl.as_text_nodes import drained

    try:
        found = client.drain(node, deadline_ms, cli.by_whom(reason), force=force)
    except TooFewNodesError as error:
        raise TooFewNodesError(
            f"{node} is not drained: without it, {error}; --force drains it anyway"
        ) from None
    if waits:
        found = (
            rolling_drain.wait_empty(client, node, lambda text: click.echo(text, err=True)) or found
        )
    return cli.answer(output, found, lambda _: drained(found))


@cli.command("undrain", output=True)
@cli.node_argument()
def undrain_command(node: str, output: str) -> str:
    """Lift the drain of NODE, and allow submitted jobs there again unless it is cordoned.

    Workers that are still there get no further notice and are not killed. Workers that exit because
    of the notice leave their job.
    """
    from rdzv.ctl.as_text_nodes import undrained

    return cli.asked(output, lambda it: it.undrain(node, cli.by_whom(None)), undrained)


@cli.command("servers", output=True)
def servers_command(output: str) -> str:
    """Show the servers that share a store, and which of them leads."""
    from rdzv.ctl import as_text_lists

    return cli.asked(output, lambda it: it.servers(), as_text_lists.servers, "servers")


@cli.command("backup")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
def backup_command(file: Path, force: bool) -> str:
    """Write a backup of the server's store to FILE while the server is running.

    `rdzvd --restore FILE` restores it into a store of any kind. Only the current user can read
    FILE. --timeout limits how long to wait without receiving any data.
    """
    from rdzv.ctl.new_files import new_file

    with new_file(file, replace=force) as written, cli.opened_client() as client:
        found = client.backup(written).trailer
        size = written.seek(0, os.SEEK_END)
    return f"{file}: {found.jobs} jobs, {found.events} events, {size} bytes"


@cli.command("audit", output=True)
@click.option("-n", "--limit", type=click.IntRange(min=1, max=2**32 - 1), metavar="N", help="""
    Only the newest N changes.""")  # fmt: skip
def audit_command(limit: int | None, output: str) -> str:
    """Show who changed which jobs, nodes and tokens, oldest first.

    For admins only. Times are in this machine's time zone.
    """
    from rdzv.ctl import as_text_lists

    text = partial(as_text_lists.events, none="no changes are recorded", title="CALL")
    return cli.asked(output, lambda it: it.audit(limit or 0), text, "events")


_ROLES = ("read", "submit", "node", "admin")


@click.group("tokens", cls=cli.Subcommands)
def tokens_command() -> None:
    """Create, list and revoke tokens, which identify callers without a certificate."""


@cli.command("create", output=True, of=tokens_command)
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

    life_ms = 0 if expires is None else cli.parse_duration("--expires", expires)
    with cli.opened_client() as client:
        token, text = client.create_token(name, roles, life_ms)
    if output == "text":
        click.echo(as_text_lists.made(token), err=True)
    return cli.answer(output, {**as_dict(token), "text": text}, lambda _: text)


@cli.command("list", output=True, of=tokens_command)
def _list_tokens(output: str) -> str:
    """List all tokens, without their text. Expired tokens remain listed for a while."""
    from rdzv.ctl import as_text_lists

    return cli.asked(output, lambda it: it.tokens(), as_text_lists.tokens, "tokens")


@cli.command("revoke", output=True, of=tokens_command)
@click.argument("id_or_name", metavar="ID|NAME")
def _revoke_tokens(id_or_name: str, output: str) -> str:
    """Revoke the token ID, or all tokens of the caller NAME.

    Nodes that use them are disconnected.
    """
    from rdzv.ctl import as_text_lists

    revoked = as_text_lists.revoked
    return cli.asked(output, lambda it: it.revoke_tokens(id_or_name), revoked, "tokens")
