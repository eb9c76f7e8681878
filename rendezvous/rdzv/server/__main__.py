"""rdzvd: config, store, driver, server. It joins them and decides nothing else."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rdzv.c10d.facade import Facade
    from rdzv.server.clock import Clock
    from rdzv.server.config import Config, Listen
    from rdzv.server.metrics import Metrics
    from rdzv.server.replica import Replica
    from rdzv.stores.base import Store
    from rdzv.stores.etcd_client import EtcdConfig

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
    type=click.Choice(["sqlite", "memory", "etcd"]),
    default="sqlite",
    show_default=True,
    help="sqlite survives restarts; memory forgets; etcd is shared by several rdzvd, of which one "
    "leads and any other takes over.",
)
@click.option(
    "--etcd-endpoints",
    metavar="HOST:PORT,...",
    help="The members of the etcd v3 cluster, for --store=etcd; with https:// in front for TLS.",
)
@click.option(
    "--etcd-prefix",
    default="/rdzv",
    show_default=True,
    metavar="PREFIX",
    help="Where all keys lie; servers with the same prefix share their jobs.",
)
@click.option("--etcd-user", metavar="NAME", help="Who rdzvd is to etcd.")
@click.option(
    "--etcd-password-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Its password: the first line of this file.",
)
@click.option("--etcd-ca", type=click.Path(path_type=Path), metavar="FILE", help="etcd's CA (PEM).")
@click.option(
    "--etcd-cert",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="rdzvd's certificate for etcd (PEM).",
)
@click.option(
    "--etcd-key", type=click.Path(path_type=Path), metavar="FILE", help="Its private key (PEM)."
)
@click.option(
    "--etcd-ttl",
    default=3,
    show_default=True,
    metavar="SECONDS",
    help="How long after a leader was last heard another takes over.",
)
@click.option(
    "--advertise",
    metavar="HOST:PORT",
    help="Where nodes and operators reach this rdzvd, if not where it listens.",
)
@click.option(
    "--http",
    metavar="HOST:PORT",
    help="Answer /healthz, /readyz, /metrics and /sd here. Other than loopback only with "
    "--insecure.",
)
@click.option(
    "--insecure",
    is_flag=True,
    help="Listen beyond loopback although nothing is encrypted or authenticated.",
)
@click.option(
    "--c10d",
    metavar="HOST:PORT",
    help="Serve torch's own store here too, for torchrun --rdzv-backend=c10d; `rdzvctl` shows its "
    "jobs. They do not outlive this rdzvd. Other than loopback only with --insecure.",
)
@click.option(
    "--c10d-python",
    default=sys.executable,
    metavar="PATH",
    help="The interpreter that serves it; it needs torch. Default: the one that runs rdzvd.",
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
    "--check",
    is_flag=True,
    help="Say whether the configuration and the stored data are in order, and exit; nothing is "
    "changed. Also beside a running rdzvd.",
)
@click.option(
    "--restore",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Fill an empty store from a file that `rdzvctl backup` has written, and exit.",
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
    listen: str,
    data_dir: Path | None,
    store: str,
    etcd_endpoints: str | None,
    etcd_prefix: str,
    etcd_user: str | None,
    etcd_password_file: Path | None,
    etcd_ca: Path | None,
    etcd_cert: Path | None,
    etcd_key: Path | None,
    etcd_ttl: int,
    advertise: str | None,
    http: str | None,
    insecure: bool,
    c10d: str | None,
    c10d_python: str,
    log_level: str,
    log_format: str,
    check: bool,
    restore: Path | None,
) -> None:
    """Run the rendezvous server: it decides rounds and ranks, and pushes them to the nodes.

    When it is ready it says so in one line on stdout. SIGTERM or Ctrl-C ends it; running workers
    are not disturbed, and it takes up where it was when it is started again.

    Exit codes: 0 ended by a signal, 1 could not start or go on, or --check has found something
    that is not in order, 2 usage.
    """
    from rdzv.errors import InvalidRequestError, RendezvousError
    from rdzv.server.config import Config, Listen, default_data_dir
    from rdzv.server.observe import configure_logging

    if check and restore is not None:
        raise click.UsageError("--check changes nothing, --restore does; give one of them")
    try:
        config = Config(
            listen=Listen.parse(listen),
            data_dir=data_dir or default_data_dir(),
            store=store,
            advertise=Listen.parse(advertise) if advertise is not None else None,
            etcd=_etcd(
                etcd_endpoints,
                prefix=etcd_prefix,
                user=etcd_user or "",
                password=_password(etcd_password_file),
                ca=etcd_ca,
                cert=etcd_cert,
                key=etcd_key,
                ttl_s=etcd_ttl,
            ),
            http=Listen.parse(http) if http is not None else None,
            insecure=insecure,
            c10d=Listen.parse(c10d) if c10d is not None else None,
            c10d_python=c10d_python,
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
        if check:
            sys.exit(asyncio.run(_check(config)))
        asyncio.run(run(config) if restore is None else _restore(config, restore))
    except RendezvousError as error:
        click.echo(f"rdzvd: {error}", err=True)
        sys.exit(1)


def _etcd(endpoints: str | None, **given: object) -> EtcdConfig | None:
    if endpoints is None:
        return None
    from rdzv.stores.etcd_client import EtcdConfig

    return EtcdConfig.parse(endpoints, **given)


def _password(file: Path | None) -> str:
    """Read it from a file: the command line can be seen by everyone on the machine."""
    if file is None:
        return ""
    from rdzv.stores.etcd_client import first_line

    return first_line(file)


async def run(config: Config) -> None:
    """Run one server until SIGTERM or SIGINT.

    Raises:
        RendezvousError: it could not start.

    """
    from rdzv.c10d.facade import serving_c10d
    from rdzv.server.clock import MonotonicClock

    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    clock = MonotonicClock()
    async with serving_c10d(config, clock) as facade:
        if config.etcd is None:
            await _run_alone(config, clock, facade, stop)
        else:
            await _run_replica(config, config.etcd, clock, facade, stop)


async def _run_alone(
    config: Config, clock: Clock, facade: Facade | None, stop: asyncio.Event
) -> None:
    """Serve from a store that belongs to this process."""
    from rdzv.server.driver import Driver
    from rdzv.server.replica import Replica
    from rdzv.server.service import server_version, serving

    store = await _open_store(config)
    replica = Replica(clock, store.place, server_version())
    metrics = _metrics(replica, config)
    try:
        async with Driver.running(store, clock, config, meter=metrics) as driver:
            replica.lead(driver)
            async with (
                serving(replica, clock, config, facade) as bound,
                _http(replica, metrics, config) as http,
            ):
                _say_ready(bound, f"data in {store.place}", facade, http)
                await stop.wait()
    finally:
        await store.close()


async def _run_replica(
    config: Config,
    etcd: EtcdConfig,
    clock: Clock,
    facade: Facade | None,
    stop: asyncio.Event,
) -> None:
    """Serve whenever elected among those that share an etcd, and point to who leads otherwise."""
    from rdzv.concurrency import single_error
    from rdzv.server.replica import Replica
    from rdzv.server.service import server_version, serving
    from rdzv.stores.election import Election
    from rdzv.stores.etcd_client import EtcdClient

    version = server_version()
    replica = Replica(clock, etcd.place, version)
    metrics = _metrics(replica, config)
    with single_error():
        async with (
            EtcdClient.connected(etcd) as client,
            serving(replica, clock, config, facade) as bound,
            _http(replica, metrics, config) as http,
            Election.running(client, str(config.advertise or bound), version) as election,
            asyncio.TaskGroup() as tasks,
        ):
            campaign = tasks.create_task(replica.campaign(client, election, config, metrics))
            _say_ready(bound, f"data in {etcd.place}", facade, http)
            await stop.wait()
            campaign.cancel()


def _metrics(replica: Replica, config: Config) -> Metrics | None:
    """Count what happens, where somebody can ask for it."""
    if config.http is None:
        return None
    from rdzv.server.metrics import Metrics
    from rdzv.server.service import server_version

    metrics = Metrics(replica.figures, config, server_version())
    metrics.add_process()
    return metrics


@asynccontextmanager
async def _http(
    replica: Replica, metrics: Metrics | None, config: Config
) -> AsyncIterator[Listen | None]:
    if config.http is None or metrics is None:
        yield None
        return
    from rdzv.server.http import serving_http

    async with serving_http(replica, metrics, config, config.http) as bound:
        yield bound


def _say_ready(bound: Listen, data: str, facade: Facade | None, http: Listen | None) -> None:
    also = f", c10d on {facade.bound}" if facade else ""
    also += f", http on {http}" if http else ""
    click.echo(f"rdzvd ready: listening on {bound}, {data}{also}")
    if not bound.loopback:
        log.warning("insecure: everyone who reaches %s may run and end jobs", bound)


async def _check(config: Config) -> int:
    """Say what is in order and what is not; return the exit code."""
    from rdzv.server import offline

    found = await offline.check(config)
    click.echo("\n".join(found.lines))
    for problem in found.problems:
        click.echo(f"rdzvd: {problem}", err=True)
    return 1 if found.problems else 0


async def _restore(config: Config, file: Path) -> None:
    from rdzv.server import offline

    click.echo(await offline.restore(config, file))


async def _open_store(config: Config) -> Store:
    if config.store == "memory":
        from rdzv.stores.memory import MemoryStore

        return MemoryStore(config.limits.history_rows)
    from rdzv.stores.sqlite import SqliteStore

    return await SqliteStore.open(config.data_dir, config.limits.history_rows)


if __name__ == "__main__":
    main(prog_name="rdzvd")
