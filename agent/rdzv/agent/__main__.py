"""rdzv-agent: the daemon of a node, which runs the jobs that the server places on it."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import click

# isort: off
from rdzv.transport import grpc_forks  # noqa: F401  # before anything imports gRPC

# isort: on
from rdzv.agent.app.agent_config import DEFAULT_FILE, check_directories, read_config
from rdzv.agent.app.agent_settings import AgentSettings, why_not_here
from rdzv.agent.cli.backends import Meeting
from rdzv.agent.core.model import EXIT_FAILED, EXIT_SUCCESS, EXIT_TRY_AGAIN, EXIT_USAGE
from rdzv.agent.launch.launch import Launch
from rdzv.agent.run import EXIT_INTERRUPTED, set_up_logging
from rdzv.agent.workers.fates import summary
from rdzv.errors import InvalidRequestError, NodeSupersededError, RendezvousError
from rdzv.runtime import systemd
from rdzv.runtime.log_format import RepeatedWarnings, complain, formatter_for
from rdzv.runtime.usage import DaemonCommand
from rdzv.settings.rendering import render
from rdzv.settings.toml_files import Loaded
from rdzv.version import VERSION

log = logging.getLogger("rdzv.agent")


@click.command(
    "rdzv-agent",
    cls=DaemonCommand,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 96},
)
@click.option(
    "--config",
    "path",
    type=click.Path(path_type=Path),
    default=DEFAULT_FILE,
    show_default=True,
    metavar="FILE",
    help="The configuration file, in TOML; --print-config shows every setting.",
)
@click.option("--check-config", is_flag=True, help="Check the configuration and exit.")
@click.option(
    "--print-config",
    is_flag=True,
    help="Print the effective configuration with an explanation of each line, and exit.",
)
@click.version_option(
    VERSION,
    prog_name="rdzv-agent",
    message="%(prog)s %(version)s",
    help="Print the version and exit.",
)
def main(path: Path, check_config: bool, print_config: bool) -> NoReturn:
    """Run the jobs that are submitted to the server and placed on this node.

    \b
        server = "10.0.0.5:29400"             # or several, separated by commas
        node_id = "gpu-7"                     # default: the host name
        capacity = 2                          # jobs at once
        [labels]
        gpu = "h100"

    It keeps running without a job and without a server. SIGTERM ends it: its workers are told to
    save and exit within drain_deadline; a second SIGTERM ends the wait. SIGUSR2, like a restart by
    systemd, ends it but leaves its jobs running for the next rdzv-agent. SIGHUP reloads the
    configuration.

    \b
        [[job]]                               # a job without `rdzvctl submit`
        args = ["--rdzv-id=night", "--nnodes=2:4", "--nproc-per-node=8", "/srv/train.py"]

    With [[job]] it runs only these jobs, and exits when all have ended on this node.

    Exit codes: 0 ended by a signal; 1 another agent has taken over this node's name; 2 the
    configuration is wrong; 75 another error, and a restart may help. With [[job]]: rdzvrun's code
    if it is the same for all jobs, else 1.
    """
    set_up_logging("rdzv-agent")
    try:
        # Even if root runs the check, the unit may run the agent under another account.
        as_root = (check_config or print_config) and os.geteuid() == 0
        loaded, launches = read_config(path, for_another=as_root)
        settings = loaded.settings
        if as_root and (why := why_not_here(settings)):
            click.echo(
                f"rdzv-agent: warning: it cannot start as root, the account used here: {why}",
                err=True,
            )
        if check_config and not launches:
            check_directories(settings, for_another=as_root)
        if check_config or print_config:
            click.echo(
                render(loaded) if print_config else f"rdzv-agent: {path} is in order",
                nl=not print_config,
            )
            sys.exit(EXIT_SUCCESS)
        _set_up(settings)
        exit_code = asyncio.run(run_agent(path, loaded, launches))
    except InvalidRequestError as error:
        _fail(error, EXIT_USAGE)
    except (RendezvousError, OSError) as error:
        _fail(error, EXIT_FAILED)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    sys.exit(exit_code)


def _fail(error: Exception, exit_code: int) -> NoReturn:
    complain(f"rdzv-agent: {error}")
    sys.exit(exit_code)


def _set_up(settings: AgentSettings) -> None:
    faulthandler.enable()  # If the watchdog kills a hung agent, its stack will be in the journal.
    for handler in logging.getLogger("rdzv").handlers:
        handler.setFormatter(formatter_for(settings.log_format))
        handler.addFilter(RepeatedWarnings())
    _set_log_level(settings.log_level)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


async def run_agent(path: Path, loaded: Loaded[AgentSettings], launches: Sequence[Launch]) -> int:
    """Run this node's agent until it is told to end; return the exit code."""
    if launches:
        return await _take_part(loaded.settings, launches)
    from rdzv.agent.app.daemon import serve

    try:
        await serve(path, loaded, _set_log_level)
    except (InvalidRequestError, NodeSupersededError):
        raise
    except Exception:
        # A node is useless without its agent, and another attempt may succeed.
        log.exception("rdzv-agent cannot continue")
        return EXIT_TRY_AGAIN
    return EXIT_SUCCESS


def _set_log_level(level: str) -> None:
    log.setLevel(level.upper())


async def _take_part(settings: AgentSettings, launches: Sequence[Launch]) -> int:
    from rdzv.agent.node.node import take_part

    with systemd.watched():
        systemd.notify("READY=1", "STATUS=running the jobs named in its configuration")
        outcomes = await take_part(
            Meeting(settings.endpoints, rdzv_id=""),
            launches,
            settings.credentials(),
            preemption=settings.preemption,
        )
    for launch, outcome in zip(launches, outcomes, strict=True):
        log.info("%s", summary(launch.job.rdzv_id, outcome))
    exit_codes = {outcome.exit_code for outcome in outcomes}
    return exit_codes.pop() if len(exit_codes) == 1 else EXIT_FAILED


if __name__ == "__main__":
    main(prog_name="rdzv-agent")
