"""Settings and options that were removed, and what to do in place of each."""

from __future__ import annotations

from typing import Any

import click

REMOVED = {
    "relay": "nodes connect to the servers themselves, each of which holds 10,000; leave it out, "
    "and give agents the addresses of the servers",
    "upstream": "it was for `relay`, which was removed as well; leave it out",
}
"""What to do in place of each removed setting, by its key or that of its table."""


def instead_of(key: str) -> str:
    """Return what to do in place of a removed setting, or "" if `key` does not name one."""
    return REMOVED.get(key) or REMOVED.get(key.partition(".")[0], "")


class CommandOfSettings(click.Command):
    """A command with options for settings, which recognizes those that were removed."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> Any:
        """Parse the arguments; for a removed option, say what to do instead."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            key = error.option_name.removeprefix("--").replace("-", "_")
            if instead := instead_of(key) or instead_of(key.replace("_", ".", 1)):
                raise click.UsageError(f"{error.option_name} was removed: {instead}") from error
            raise
