"""rdzv-kube: the command-line interface."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from rdzv.version import VERSION
from rdzv_kube.plan import LEAVING_TAINTS, Rules

log = logging.getLogger("rdzv.kube")

F = TypeVar("F", bound=Callable[..., Any])


def _file(*names: str, reason: str) -> Callable[[F], F]:
    """Create a command-line option that takes a file path."""
    return click.option(
        *names, type=click.Path(path_type=Path), metavar="FILE", default=None, help=reason
    )


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 96})
@click.option(
    "--server",
    metavar="HOST:PORT",
    envvar="RDZV_SERVER",
    required=True,
    help="The rdzvd to connect to, or several that share a store, with commas. Else RDZV_SERVER.",
)
@_file("--tls-ca", "ca", reason="The CA of the server's certificate (PEM); else RDZV_TLS_CA.")
@_file("--tls-cert", "cert", reason="The client certificate (PEM); else RDZV_TLS_CERT.")
@_file("--tls-key", "key", reason="The key of the client certificate; else RDZV_TLS_KEY.")
@_file(
    "--token-file",
    reason="The token for rdzvd, with the role admin, read again for each call; else "
    "RDZV_TOKEN_FILE.",
)
@click.option(
    "--namespace",
    default="",
    metavar="NAME",
    help="Follow only the pods of this namespace.  [default: all]",
)
@click.option(
    "--pod-selector",
    default="rdzv=node",
    show_default=True,
    metavar="LABEL=VALUE",
    help="Follow pods with this label: those in which an rdzvrun runs.",
)
@click.option(
    "--taint",
    "taints",
    multiple=True,
    default=LEAVING_TAINTS,
    metavar="KEY",
    help=f"A taint that drains a node; may be repeated.  [default: {', '.join(LEAVING_TAINTS)}]",
)
@click.option(
    "--condition",
    "conditions",
    multiple=True,
    metavar="TYPE",
    help="A condition that drains a node while it is true, such as KernelDeadlock; may be "
    "repeated.  [default: none]",
)
@click.option(
    "--deadline",
    "deadline_s",
    type=click.FloatRange(1, 86_400),
    default=300,
    show_default=True,
    metavar="SECONDS",
    help="How long workers of an agent have when their node is about to go; those of a pod have "
    "its grace period.",
)
@_file("--kubeconfig", reason="Connect to the API server as this file says.  [default: as a pod]")
@click.option(
    "--log-format",
    type=click.Choice(["human", "json"]),
    default="human",
    show_default=True,
    help="Lines for people, or one JSON object a line.",
)
@click.version_option(VERSION, prog_name="rdzv-kube", message="%(prog)s %(version)s")
def main(
    server: str,
    namespace: str,
    pod_selector: str,
    taints: tuple[str, ...],
    conditions: tuple[str, ...],
    deadline_s: float,
    kubeconfig: Path | None,
    log_format: str,
    **files: Any,
) -> None:
    """Drain rdzvd's nodes before Kubernetes removes them.

    Nodes with one of the taints, and pods that are about to be deleted, are drained: their workers
    receive a notice and have time to save their state. Unschedulable nodes are cordoned.
    Afterwards, rdzv-kube lifts its own drains and cordons, but no others. SIGTERM or Ctrl-C ends
    it; its drains and cordons stay.

    It needs permission to get, list and watch nodes and pods.

    Exit codes: 0 ended by a signal; 2 usage or configuration error.
    """
    from rdzv.errors import RendezvousError
    from rdzv.runtime.log_format import complain

    try:
        _run(
            server,
            namespace,
            pod_selector,
            Rules(frozenset(taints), frozenset(conditions), deadline_s),
            kubeconfig,
            log_format,
            files,
        )
    except RendezvousError as error:
        complain(f"rdzv-kube: {error}")
        sys.exit(2)


def _run(
    server: str,
    namespace: str,
    selector: str,
    rules: Rules,
    kubeconfig: Path | None,
    log_format: str,
    files: dict[str, Path | None],
) -> None:
    from rdzv.client import ControlClient, parse_endpoints
    from rdzv.runtime.log_format import log_to_stderr
    from rdzv.transport.channels import Credentials
    from rdzv_kube.following import connected, following_of
    from rdzv_kube.reconciling import Reconciling

    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    endpoints = parse_endpoints(server)
    credentials = Credentials.parse(files, os.environ)
    api = connected(kubeconfig)
    log_to_stderr("info", log_format)
    stop, changed = threading.Event(), threading.Event()

    def end(*_: object) -> None:
        stop.set()
        changed.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    machines, pods = following_of(api, namespace, selector, changed.set)
    for following in (machines, pods):
        # Use daemon threads, because a watch may block for a minute and needs no cleanup.
        threading.Thread(target=following.run, args=(stop,), daemon=True).start()

    def client() -> ControlClient:
        return ControlClient(endpoints, credentials=credentials)

    log.info("watching nodes and pods on behalf of rdzvd at %s", server)
    Reconciling(machines, pods, client, rules, changed).run(stop)


if __name__ == "__main__":
    main(prog_name="rdzv-kube")
