"""rdzvctl's command line: the list of its commands, and the exit codes for its errors."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

import click

from rdzv.ctl.command_line import (
    CONNECTION,
    DENIED,
    OK,
    PROGRAM,
    REFUSED,
    UNREACHABLE,
    complain,
    list_commands,
)
from rdzv.errors import (
    DeniedError,
    RendezvousConnectionError,
    RendezvousError,
    UnauthenticatedError,
)
from rdzv.runtime.usage import INTERRUPTED, USAGE, Choice, CommandGroup, usage_text
from rdzv.version import VERSION

_EPILOG = """\b
Examples:
  rdzvctl list -s running           which jobs are running, and on how many nodes
  rdzvctl status gpt -w             one job, as it changes
  rdzvctl explain gpt               what happened to it, in sentences
  rdzvctl logs gpt --rank 3 -f      what one worker writes
  rdzvctl drain n7 --deadline 5m    empty a node for maintenance

\b
Exit codes:
  0   ok
  1   not found, or refused by the server
  2   the command line is wrong
  75  the server cannot be reached; the same command may succeed later
  77  permission denied
"""


def main() -> None:
    # gRPC's own log lines would only repeat the error, less clearly.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    for stream in (sys.stdout, sys.stderr):
        # Escape characters that the locale cannot encode, instead of failing.
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; print each error as one line on stderr.

    A command either returns the text to print, or prints its output itself and returns an exit
    code, as --help does.
    """
    try:
        result = rdzvctl.main(list(arguments), prog_name=PROGRAM, standalone_mode=False)
        if isinstance(result, str):
            # This is not printed by the command, because click would treat a closed pipe as a
            # failure.
            click.echo(result)
            sys.stdout.flush()
    except click.UsageError as error:
        return complain(usage_text(error), USAGE)
    except RendezvousConnectionError as error:
        return complain(str(error), UNREACHABLE)
    except (DeniedError, UnauthenticatedError) as error:
        return complain(str(error), DENIED)
    except RendezvousError as error:
        return complain(str(error), REFUSED)
    except click.Abort:
        return INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return OK  # The reader, such as `head`, has closed the pipe.
    except OSError as error:
        _drop_output()
        return complain(f"cannot write the output: {error.strerror}", REFUSED)
    return result if isinstance(result, int) else OK


def _drop_output() -> None:
    """Discard buffered output, which the interpreter would otherwise fail to write at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


SECTIONS: dict[str, dict[str, str | None]] = {
    "See what jobs do, and why": {
        **{"list": "jobs", "status": "jobs", "explain": "history", "events": "history"},
        **{"logs": "jobs", "stacks": "jobs", "trace": "history", "report": "history"},
        "wait": "jobs",
    },
    "Run and change jobs": dict.fromkeys(("submit", "stop", "restart", "scale", "forget"), "jobs"),
    "Nodes": dict.fromkeys(("nodes", "cordon", "uncordon", "drain", "undrain"), "nodes"),
    "Server and access": {
        **dict.fromkeys(("servers", "backup", "audit", "tokens"), "nodes"),
        "certs": "certs",
    },
    "When something is wrong": {"doctor": "support", "support-bundle": "support"},
    "This machine": {"demo": "support", "docs": "support", "completion": None, "version": None},
}
"""All commands, grouped by task, with the module of `commands` that has each; None: here."""


class _Rdzvctl(CommandGroup):
    """The group of all commands: imports a command's module when the command is used."""

    def list_commands(self, _: click.Context) -> list[str]:
        return sorted(name for commands in SECTIONS.values() for name in commands)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        for commands in SECTIONS.values():
            if module := commands.get(cmd_name):
                function = f"{cmd_name.replace('-', '_')}_command"
                command = getattr(import_module(f"rdzv.ctl.commands.{module}"), function)
                assert isinstance(command, click.Command)
                return command
        return super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, names in SECTIONS.items():
            commands = (self.get_command(ctx, name) for name in names)
            list_commands(formatter, title, filter(None, commands))


@click.group(
    cls=_Rdzvctl,
    invoke_without_command=True,
    epilog=_EPILOG,
    params=list(CONNECTION),
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(VERSION, message=f"{PROGRAM} %(version)s")
@click.pass_context
def rdzvctl(context: click.Context) -> None:
    """Show an rdzvd's jobs and why each is in its state; submit, stop and scale jobs."""
    if context.invoked_subcommand is None:
        # This is an error, because a script with an empty variable has not done what was intended.
        click.echo(context.get_help(), err=True)
        context.exit(USAGE)


@rdzvctl.command("version")
def _version() -> str:
    """Show rdzvctl's version."""
    return f"{PROGRAM} {VERSION}"


@rdzvctl.command("completion")
@click.argument("shell", type=Choice(["bash", "zsh", "fish"]))
def _completion(shell: str) -> str:
    """Print the script that lets SHELL complete rdzvctl's commands, options, jobs and nodes.

    \b
    bash: eval "$(rdzvctl completion bash)"
    zsh:  eval "$(rdzvctl completion zsh)"
    fish: rdzvctl completion fish | source
    """
    from click.shell_completion import get_completion_class

    completion = get_completion_class(shell)
    assert completion is not None, "click knows all three"
    return completion(rdzvctl, {}, PROGRAM, "_RDZVCTL_COMPLETE").source()


if __name__ == "__main__":
    main()
