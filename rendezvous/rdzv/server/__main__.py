"""rdzvd: assembles configuration, store, driver and server, but makes no decisions itself."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
import tomllib
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from rdzv.runtime import systemd
from rdzv.runtime.usage import Choice, DaemonCommand
from rdzv.server.settings.configuration import DEFAULT_FILE, Configuration
from rdzv.server.settings.server_settings import RdzvdSettings
from rdzv.settings.setting_types import settings_of
from rdzv.structs import replace
from rdzv.version import VERSION

if TYPE_CHECKING:
    from rdzv.c10d.facade import Facade
    from rdzv.server.operations.handlers import Server
    from rdzv.server.security.service_accounts import ServiceAccounts
    from rdzv.server.security.tls import Tls
    from rdzv.server.settings.server_settings import RdzvdSettings
    from rdzv.server.telemetry.server_metrics import Metrics
    from rdzv.stores.base import Store
    from rdzv.stores.etcd_client import EtcdClient
    from rdzv.transport.endpoints import Listen

log = logging.getLogger("rdzv.server")

_CIPHER_SUITES = "GRPC_SSL_CIPHER_SUITES"
_NO_TLS_1_2 = "PSK-AES128-CBC-SHA"
"""gRPC has no option for the TLS version. This limits its TLS 1.2 suites to one that needs a
pre-shared key, which no client has, so TLS 1.2 is never negotiated. TLS 1.3 has suites of its own.
"""

_GC_EVERY = (20_000, 10, 50)
"""Thresholds for the cyclic garbage collector. An open stream consists of hundreds of objects; with
Python's default of 700, a server with thousands of streams would rescan all of them repeatedly
while nodes connect."""

F = TypeVar("F", bound=Callable[..., Any])


_SETTINGS = settings_of(RdzvdSettings)


def _flag(name: str, **more: Any) -> Callable[[F], F]:
    setting = _SETTINGS[_key(name.removeprefix("--").replace("-", "_"))]
    options: dict[str, Any] = {"metavar": setting.unit or "TEXT", "default": None}
    if setting.choices:
        options = {"type": Choice(setting.choices), "default": None}
    elif setting.kind is Path:
        options |= {"metavar": "FILE", "type": click.Path(path_type=Path)}
    elif setting.kind is int:
        options |= {"metavar": setting.unit.upper(), "type": int}
    elif setting.kind is bool:
        options = {"is_flag": True, "default": False}
    default = "" if setting.kind is bool else f"  [default: {setting.default_text}]"
    text = f"{setting.reason}{default}".replace("`", "").replace('"', "")
    return click.option(name, **{**options, "help": text, **more})


def _key(parameter: str) -> str:
    """Return the key of the setting that an option sets, such as `etcd.ttl` for `etcd_ttl`."""
    dotted = parameter.replace("_", ".", 1)
    return dotted if dotted in _SETTINGS else parameter


@click.command(
    "rdzvd",
    cls=DaemonCommand,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 96},
)
@click.option(
    "--config",
    "file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="TOML: all options below, and more; see --print-config. The command line overrides it.  "
    f"[default: {DEFAULT_FILE}, if it is there]",
)
@_flag("--listen")
@_flag("--data-dir", metavar="DIR")
@_flag("--store")
@_flag("--etcd-endpoints", metavar="HOST:PORT,...")
@_flag("--etcd-prefix", metavar="PREFIX")
@_flag("--etcd-user", metavar="NAME")
@_flag("--etcd-password-file")
@_flag("--etcd-ca")
@_flag("--etcd-cert")
@_flag("--etcd-key")
@_flag("--etcd-ttl")
@_flag("--advertise")
@_flag("--http")
@_flag("--insecure")
@_flag("--auth")
@_flag("--init-admin-token")
@_flag("--tls-cert")
@_flag("--tls-key")
@_flag("--tls-client-ca")
@_flag("--tls-http-client-auth")
@_flag("--tls-token-listen")
@_flag("--c10d")
@_flag("--c10d-python", metavar="PATH")
@_flag("--log-level")
@_flag("--log-format")
@click.option("--check-config", is_flag=True, help="Check the configuration, and exit.")
@click.option(
    "--print-config",
    is_flag=True,
    help="Print the resulting configuration, with an explanation of each setting, and exit.",
)
@click.option(
    "--check",
    is_flag=True,
    help="Check the configuration and the stored data without changing them, and exit; also "
    "beside a running rdzvd.",
)
@click.option(
    "--restore",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Fill an empty store from a file written by `rdzvctl backup`, and exit.",
)
@click.version_option(VERSION, prog_name="rdzvd", message="%(prog)s %(version)s")
def main(
    file: Path | None,
    check_config: bool,
    print_config: bool,
    check: bool,
    restore: Path | None,
    **given: Any,
) -> None:
    """Run the rendezvous server, which decides rounds and ranks and pushes them to the nodes.

    When it is ready, it prints one line to stdout. SIGTERM or Ctrl-C ends it; workers keep running,
    and the server continues from its stored state when it is started again. SIGHUP reloads the
    configuration; the log lists what has changed and what needs a restart.

    Exit codes: 0 ended by a signal; 1 could not start or continue, or --check found a problem; 2
    usage or configuration error.
    """
    # This must come before any import of gRPC, which reads the variable only once.
    if not reaches_etcd_by_tls(file, given):
        os.environ.setdefault(_CIPHER_SUITES, _NO_TLS_1_2)
    from rdzv.errors import InvalidRequestError, RendezvousError
    from rdzv.runtime.log_format import complain, log_to_stderr
    from rdzv.settings.rendering import render

    wanted = {
        "--check": check,
        "--check-config": check_config,
        "--print-config": print_config,
        "--restore": restore is not None,
    }
    if len(named := [name for name, is_wanted in wanted.items() if is_wanted]) > 1:
        raise click.UsageError(f"{' and '.join(named)} do not go together; give one of them")
    try:
        configuration = Configuration(file, _given(given))
    except InvalidRequestError as error:
        complain(f"rdzvd: {error}")
        sys.exit(2)
    if check_config or print_config:
        in_order = f"rdzvd: the configuration is in order: {configuration.source}"
        click.echo(render(configuration.loaded) if print_config else in_order, nl=check_config)
        return
    config = configuration.settings
    log_to_stderr(config.log_level, config.log_format)
    # Our own errors say more than the log lines of gRPC's core.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        if check:
            sys.exit(asyncio.run(_check(config)))
        asyncio.run(run(configuration) if restore is None else _restore(config, restore))
    except RendezvousError as error:
        complain(f"rdzvd: {error}")
        sys.exit(1)


def reaches_etcd_by_tls(file: Path | None, given: dict[str, Any]) -> bool:
    """Return whether etcd is reached over TLS.

    Connections to etcd use the same cipher suites, and many etcd servers speak only TLS 1.2. This
    must run before gRPC is imported, and reading the whole configuration would import it.
    """
    table: Any = None
    # Errors in the file are reported later, by the code that reads all of it.
    with suppress(OSError, ValueError):
        table = tomllib.loads((file or DEFAULT_FILE).read_text(encoding="utf-8")).get("etcd")
    etcd = table if isinstance(table, dict) else {}
    if any(given.get(f"etcd_{name}") or etcd.get(name) for name in ("ca", "cert")):
        return True
    return "https://" in f"{given.get('etcd_endpoints')} {etcd.get('endpoints')}"


def _given(options: dict[str, Any]) -> dict[str, object]:
    if (endpoints := options.get("etcd_endpoints")) is not None:
        options = options | {"etcd_endpoints": endpoints.split(",")}
    # A flag that is not given sets nothing, so that the file may set it.
    return {_key(name): value for name, value in options.items() if value is not False}


async def run(configuration: Configuration) -> None:
    from rdzv.runtime.tasks import single_error

    gc.set_threshold(*_GC_EVERY)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    # Unusable files are refused here, before any port is bound.
    tls = _tls(configuration.settings)
    loop.add_signal_handler(signal.SIGHUP, _reload, configuration, tls)
    with systemd.watched(), single_error():
        async with AsyncExitStack() as stack:
            await _start(configuration.settings, tls, stack)
            await stop.wait()
            systemd.notify("STOPPING=1")


async def _start(config: RdzvdSettings, tls: Tls | None, stack: AsyncExitStack) -> None:
    from rdzv.c10d.facade import serving_c10d
    from rdzv.runtime.clock import Clock
    from rdzv.runtime.tasks import beside
    from rdzv.server.driver import Driver
    from rdzv.server.operations.handlers import Server
    from rdzv.server.replication.replica import Replica
    from rdzv.server.rpc.grpc_listener import serving
    from rdzv.server.security.roles import Gate
    from rdzv.server.telemetry.server_metrics import Metrics

    clock, metrics, enter = Clock(), Metrics(), stack.enter_async_context
    python = str(config.c10d_python or sys.executable)
    facade = await enter(serving_c10d(config.c10d, python, clock))
    store: Store | None = None
    client: EtcdClient | None = None
    if (etcd := config.etcd.config()) is None:
        store = await _open_store(config)
        stack.push_async_callback(store.close)
        place = store.place
    else:
        from rdzv.stores.etcd_client import EtcdClient

        client = await enter(EtcdClient.connected(etcd))
        place = etcd.place
    replica = Replica(clock, place, VERSION)
    accounts: ServiceAccounts | None = None
    if config.oidc.issuer is not None:
        from rdzv.server.security.service_accounts import proving

        accounts = await enter(proving(config.oidc))
    gate = Gate(replica, clock, config, metrics, accounts)
    if config.notify.url_file is not None:
        from rdzv.server.telemetry.notifications import notifying

        metrics.notifications = await enter(notifying(config.notify))
    if store is not None:
        replica.lead(await enter(Driver.running(store, clock, config, metrics=metrics)))
    server = Server(replica, clock, config, facade, tls, gate)
    bound = await enter(serving(server))
    http = await enter(_http(server, metrics))
    if client is not None:
        from rdzv.stores.election import Election

        # Lead while elected among the servers that share the etcd, else name the leader.
        at, page = str(config.advertise or bound), _page(config, http, tls)
        election = await enter(Election.running(client, at, VERSION, page))
        await enter(beside(replica.campaign(client, election, config, metrics)))
    _say_ready(config, bound, f"data in {place}", facade, http)


def _tls(config: RdzvdSettings) -> Tls | None:
    if config.tls.pair is None:
        return None
    from rdzv.server.security.tls import Tls

    if os.environ.get(_CIPHER_SUITES) != _NO_TLS_1_2:
        log.warning(
            "clients may connect with TLS 1.2, because gRPC has a single setting for clients and "
            "etcd, and etcd may not support anything newer; if it supports TLS 1.3, set %s=%s",
            *(_CIPHER_SUITES, _NO_TLS_1_2),
        )
    return Tls(config.tls)


def _reload(configuration: Configuration, tls: Tls | None) -> None:
    from rdzv.runtime.log_format import log_to_stderr

    systemd.notify(systemd.reloading())
    if tls is not None:
        tls.refresh()
    in_order = configuration.reload(log_to_stderr)
    outcome = "configuration reloaded" if in_order else "the configuration has errors, see the log"
    systemd.notify("READY=1", f"STATUS={outcome}")


@asynccontextmanager
async def _http(server: Server, metrics: Metrics) -> AsyncIterator[Listen | None]:
    config, facade, tls = server.config, server.facade, server.tls
    if config.http is None:
        yield None
        return
    from rdzv.server.http.listener import serving_http
    from rdzv.server.telemetry.metrics_page import MetricsPage

    c10d = facade.views if facade is not None else None
    expires = tls.expires if tls is not None else None
    page = MetricsPage(metrics, server.replica.proven_driver, config.store, VERSION, c10d, expires)
    page.add_process()
    async with serving_http(server, page, config.http) as serving:
        yield serving.bound


def _page(config: RdzvdSettings, http: Listen | None, tls: Tls | None) -> str:
    if http is None:
        return ""
    everywhere = http.unspecified and config.advertise is not None
    host = config.advertise.host if everywhere and config.advertise is not None else http.host
    scheme = "https" if tls is not None and tls.http is not None else "http"
    return f"{scheme}://{replace(http, host=host)}"


def _say_ready(
    config: RdzvdSettings, bound: Listen, data: str, facade: Facade | None, http: Listen | None
) -> None:
    also = f", c10d on {facade.bound}" if facade else ""
    also += f", http on {http}" if http else ""
    if config.exposed:
        reached = [listen for listen in (bound, http) if listen and not listen.loopback]
        where = " or ".join(map(str, reached))
        log.warning(
            "insecure: %s; anyone who can reach %s can run and end jobs", config.exposed, where
        )
    click.echo(f"rdzvd ready: listening on {bound}, {data}{also}")
    systemd.notify("READY=1", f"STATUS=listening on {bound}, {data}")


async def _check(config: RdzvdSettings) -> int:
    from rdzv.runtime.log_format import complain
    from rdzv.server.replication import offline

    found = await offline.check(config)
    click.echo("\n".join(found.lines))
    for problem in found.problems:
        complain(f"rdzvd: {problem}")
    return 1 if found.problems else 0


async def _restore(config: RdzvdSettings, file: Path) -> None:
    from rdzv.server.replication import offline

    click.echo(await offline.restore(config, file))


async def _open_store(config: RdzvdSettings) -> Store:
    if config.store == "memory":
        from rdzv.stores.memory import MemoryStore

        return MemoryStore()
    from rdzv.stores.sqlite import SqliteStore

    return await SqliteStore.open(config.data_folder)


if __name__ == "__main__":
    main(prog_name="rdzvd")
