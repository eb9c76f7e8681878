"""Errors of command lines that click parses, in one line: program, value, reason, remedy."""

from __future__ import annotations

import re
import sys
from typing import Any

import click

from rdzv.errors import did_you_mean

USAGE = 2
INTERRUPTED = 130


class DaemonCommand(click.Command):
    """A daemon's command line."""

    def main(self, *args: Any, **more: Any) -> Any:
        try:
            super().main(*args, **{**more, "standalone_mode": False})
        except click.UsageError as error:
            from rdzv.runtime.log_format import complain

            complain(f"{self.name}: {usage_text(error)}")
            sys.exit(USAGE)
        except click.Abort:
            sys.exit(INTERRUPTED)
        sys.exit(0)


class CommandGroup(click.Group):
    """A command whose unknown subcommands are refused with a suggestion."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            remedy = did_you_mean(name, self.list_commands(ctx), _see(ctx))
            raise click.UsageError(f"{name} is not a command; {remedy}", ctx)
        return super().resolve_command(ctx, args)


class Choice(click.Choice[str]):
    """One of several words; another one is refused with a suggestion."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in self.choices:
            option = max(param.opts, key=len) if isinstance(param, click.Option) else ""
            given = f"{option}={value}" if option else value
            remedy = did_you_mean(value, self.choices, "give one of them")
            raise click.UsageError(
                f"{given} is not one of {', '.join(self.choices)}; {remedy}", ctx
            )
        return super().convert(value, param, ctx)


def usage_text(error: click.UsageError) -> str:
    text, context = error.format_message().rstrip("."), error.ctx
    if context is None or "; " in text:
        return text
    if isinstance(error, click.NoSuchOption):
        from rdzv.settings.toml_files import instead_of_option

        if instead := instead_of_option(error.option_name):
            return f"{error.option_name} was removed: {instead}"
        known = [name for param in context.command.get_params(context) for name in param.opts]
        remedy = did_you_mean(error.option_name, known, _see(context))
        return f"{error.option_name} is not an option; {remedy}"
    if isinstance(error, click.BadParameter) and error.param is not None:
        name = max(error.param.opts, key=len)
        if isinstance(error.param, click.Argument):
            name = error.param.make_metavar(context)
        reason = re.sub("valid (integer|float)( range)?", "number", error.message.rstrip("."))
        text = f"{name}: {reason}" if reason else f"{name} is missing"
    return f"{text}; {_see(context)}"


def _see(context: click.Context) -> str:
    return f"see {context.command_path} --help"
