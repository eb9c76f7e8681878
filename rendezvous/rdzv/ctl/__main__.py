"""rdzvctl's command line: the list of its commands, and the exit codes for its errors."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click

from rdzv.ctl.command_line import (
    DENIED,
    INTERRUPTED,
    OK,
    PROGRAM,
    REFUSED,
    UNREACHABLE,
    USAGE,
    Connection,
    complain,
    connection_options,
    list_commands,
)
from rdzv.ctl.commands.access import audit_command, tokens
from rdzv.ctl.commands.certs import certs
from rdzv.ctl.commands.demo import demo_command
from rdzv.ctl.commands.docs import docs_command
from rdzv.ctl.commands.history import events_command, explain_command, trace_command
from rdzv.ctl.commands.jobs import (
    forget_command,
    list_command,
    restart_command,
    scale_command,
    status_command,
    stop_command,
    wait_command,
)
from rdzv.ctl.commands.nodes import (
    cordon_command,
    drain_command,
    nodes_command,
    uncordon_command,
    undrain_command,
)
from rdzv.ctl.commands.report import report_command
from rdzv.ctl.commands.servers import backup_command, servers_command
from rdzv.ctl.commands.submit import submit_command
from rdzv.ctl.commands.support import doctor_command, support_bundle_command
from rdzv.ctl.commands.workers import logs_command, stacks_command
from rdzv.errors import (
    DeniedError,
    RendezvousConnectionError,
    RendezvousError,
    UnauthenticatedError,
)
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
    """Run this process's command line and exit."""
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
        command = error.ctx.command_path if error.ctx else PROGRAM
        return complain(f"{error.format_message().rstrip('.')}; see {command} --help", USAGE)
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


@click.command("version")
def _version() -> str:
    """Show rdzvctl's version."""
    return f"{PROGRAM} {VERSION}"


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
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


SECTIONS: dict[str, tuple[click.Command, ...]] = {
    "See what jobs do, and why": (
        *(list_command, status_command, explain_command, events_command, logs_command),
        *(stacks_command, trace_command, report_command, wait_command),
    ),
    "Run and change jobs": (
        *(submit_command, stop_command, restart_command, scale_command, forget_command),
    ),
    "Nodes": (nodes_command, cordon_command, uncordon_command, drain_command, undrain_command),
    "Server and access": (servers_command, backup_command, audit_command, tokens, certs),
    "When something is wrong": (doctor_command, support_bundle_command),
    "This machine": (demo_command, docs_command, _completion, _version),
}
"""All commands, grouped by task."""


class _Rdzvctl(click.Group):
    """The group of all commands, whose help lists them by task."""

    def format_commands(self, _: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands, grouped by task."""
        for title, commands in SECTIONS.items():
            list_commands(formatter, title, commands)


@click.group(
    cls=_Rdzvctl,
    invoke_without_command=True,
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@connection_options
@click.version_option(package_name="rdzv", message=f"{PROGRAM} %(version)s")
@click.pass_context
def rdzvctl(context: click.Context, server: str | None, timeout_s: float | None) -> None:
    """Show an rdzvd's jobs and why each is in its state; submit, stop and scale jobs."""
    if server is None:
        server = os.environ.get("RDZV_SERVER") or None
    context.obj = Connection(server, timeout_s)
    if context.invoked_subcommand is None:
        # This is an error, because a script with an empty variable has not done what was intended.
        click.echo(context.get_help(), err=True)
        context.exit(USAGE)


for _command in (command for section in SECTIONS.values() for command in section):
    rdzvctl.add_command(_command)
if __name__ == "__main__":
    main()
