"""rdzvd: config, store, driver, server. It joins them and decides nothing else."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rdzv.server.config import Config
    from rdzv.stores.base import Store

log = logging.getLogger("rdzv.server")


def _print_version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        from importlib import metadata

        click.echo(f"rdzvd {metadata.version('rdzv')}")
        context.exit()


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 96})
@click.option(
    "--listen",
    default="127.0.0.1:29400",
    show_default=True,
    metavar="HOST:PORT",
    help="Where nodes and operators connect. Port 0 takes a free one; an IPv6 host stands in "
    "brackets. Other than loopback only with --insecure.",
)
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Where jobs are remembered; one rdzvd owns it. Default: $STATE_DIRECTORY if set (systemd "
    "does), /var/lib/rdzv for root, else $XDG_STATE_HOME/rdzv (~/.local/state/rdzv).",
)
@click.option(
    "--store",
    type=click.Choice(["sqlite", "memory"]),
    default="sqlite",
    show_default=True,
    help="sqlite survives restarts; memory forgets.",
)
@click.option(
    "--insecure",
    is_flag=True,
    help="Listen beyond loopback although nothing is encrypted or authenticated.",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    help="The least that is logged, to stderr.",
)
@click.option(
    "--log-format",
    type=click.Choice(["human", "json"]),
    default="human",
    show_default=True,
    help="Lines for eyes, or one JSON object a line.",
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version and exit.",
)
def main(
    listen: str, data_dir: Path | None, store: str, insecure: bool, log_level: str, log_format: str
) -> None:
    """Run the rendezvous server: it decides rounds and ranks, and pushes them to the nodes.

    When it is ready it says so in one line on stdout. SIGTERM or Ctrl-C ends it; running workers
    are not disturbed, and it takes up where it was when it is started again.

    Exit codes: 0 ended by a signal, 1 could not start or go on, 2 usage.
    """
    from rdzv.errors import InvalidRequestError, RendezvousError
    from rdzv.server.config import Config, Listen, default_data_dir
    from rdzv.server.observe import configure_logging

    try:
        config = Config(
            listen=Listen.parse(listen),
            data_dir=data_dir or default_data_dir(),
            store=store,
            insecure=insecure,
            log_level=log_level,
            log_format=log_format,
        )
        config.check()
    except InvalidRequestError as error:
        raise click.UsageError(str(error)) from error
    configure_logging(log_level, log_format)
    # What gRPC's core logs of its own is said better by the error that follows.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        asyncio.run(run(config))
    except RendezvousError as error:
        click.echo(f"rdzvd: {error}", err=True)
        sys.exit(1)


async def run(config: Config) -> None:
    """Run one server until SIGTERM or SIGINT.

    Raises:
        RendezvousError: it could not start.

    """
    from rdzv.server.clock import MonotonicClock
    from rdzv.server.driver import Driver
    from rdzv.server.service import serving

    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    clock = MonotonicClock()
    store = await _open_store(config)
    try:
        async with (
            Driver.running(store, clock, config) as driver,
            serving(driver, clock, config) as bound,
        ):
            click.echo(f"rdzvd ready: listening on {bound}, data in {store.place}")
            if not bound.loopback:
                log.warning("insecure: everyone who reaches %s may run and end jobs", bound)
            await stop.wait()
    finally:
        await store.close()


async def _open_store(config: Config) -> Store:
    if config.store == "memory":
        from rdzv.stores.memory import MemoryStore

        return MemoryStore(config.limits.history_rows)
    from rdzv.stores.sqlite import SqliteStore

    return await SqliteStore.open(config.data_dir, config.limits.history_rows)


if __name__ == "__main__":
    main(prog_name="rdzvd")
