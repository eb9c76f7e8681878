"""Reads the options on `torchrun`'s command line that concern this node.

`--rdzv-conf` keys that torchrun also has keep their names, defaults and units.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import os
import socket
from collections.abc import Mapping
from dataclasses import field
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

from rdzv.core.model import Settings
from rdzv.errors import InvalidRequestError
from rdzv.launch_options import kinds
from rdzv.launch_options.declared_flags import CONF, Keys, read_keys, unknown_key
from rdzv.structs import struct
from rdzv.transport import grpc_forks
from rdzv.transport.channels import PLAIN, Credentials
from rdzv.transport.endpoints import Endpoint, parse_endpoints, refuse_link_local
from rdzv.transport.job_secret import read_secret

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous.api import RendezvousParameters

log = logging.getLogger("rdzv.torchrun")

_handlers = itertools.count(1)
"""Numbers this process's handlers, each of which is a node."""

FILES = {"tls_ca": "ca", "tls_cert": "cert", "tls_key": "key", "token_file": "token_file"}
"""The keys for credentials, and the names of `Credentials` for them."""

KEYS: Keys = {
    "join_timeout": (kinds.timeout, "600", ""),
    "close_timeout": (kinds.timeout, "30", ""),
    "read_timeout": (kinds.timeout, "60", ""),
    **{key: CONF[key] for key in ("last_call_timeout", "scale_up", "reuse")},
    "node_id": (kinds.text, "", ""),
    "topology": (kinds.text, "", ""),
    **dict.fromkeys(FILES, (kinds.path, None, "")),
}


@struct(frozen=True)
class PluginOptions:
    """One torchrun's options."""

    rdzv_id: str
    node_id: str
    endpoints: tuple[Endpoint, ...]
    settings: Settings
    credentials: Credentials = PLAIN
    local_addr: str = ""
    local_world_size: int = 1
    role: str = "default"
    topology: str = ""
    refuse_reuse: bool = False
    secret: str = field(default="", repr=False)
    """The job secret, which every participant presents; empty if there is none."""
    close_timeout_s: float = 30.0
    """How long a node whose workers have succeeded waits for the end of the job."""
    read_timeout_s: float = 60.0
    """How long a round's nodes may take to meet in its store."""


def read_options(params: RendezvousParameters) -> PluginOptions:
    """Parse the parameters that torchrun passes to a rendezvous backend.

    Raises:
        ValueError: a value is not valid; the message names it, the reason, and a remedy.
    """
    conf = {key: str(value) for key, value in params.config.items() if value is not None}
    _warn_of_unknown(params.config)
    if params.run_id in ("", "none"):
        raise ValueError(
            "--rdzv-id is missing; without it this job could be mixed up with another; "
            "give all nodes of this job the same --rdzv-id=NAME"
        )
    if not params.endpoint.strip():
        raise ValueError(
            "--rdzv-endpoint is missing: --rdzv-backend=rdzv needs a server; start rdzvd and give "
            "its address as --rdzv-endpoint=HOST:PORT"
        )
    try:
        return _read(params, read_keys(KEYS, conf))
    except InvalidRequestError as error:
        raise ValueError(str(error)) from error


def _read(params: RendezvousParameters, conf: Mapping[str, Any]) -> PluginOptions:
    config = launch_config()
    if grpc_forks.TOO_LATE and config and config.start_method == "fork":
        log.warning(
            "something imported gRPC before rdzv, with its fork handlers, so workers that are "
            "forked may die of SIGSEGV: set %s=0 before gRPC is imported, or launch with "
            "start_method='spawn'",
            grpc_forks.OPTION,
        )
    files = {name: conf[key] for key, name in FILES.items()}
    endpoints, local_addr = parse_endpoints(params.endpoint), params.local_addr or ""
    refuse_link_local(endpoints, local_addr)
    scale_up, scale_up_after_ms = conf["scale_up"]
    return PluginOptions(
        rdzv_id=params.run_id,
        node_id=conf["node_id"] or _own_name(),
        endpoints=endpoints,
        credentials=Credentials.parse(files, os.environ),
        settings=Settings(
            min_nodes=params.min_nodes,
            max_nodes=params.max_nodes,
            # torch's agent counts restarts separately on each node.
            max_restarts=None,
            join_timeout_ms=conf["join_timeout"] or 1,
            last_call_timeout_ms=conf["last_call_timeout"],
            scale_up=scale_up,
            scale_up_after_ms=scale_up_after_ms,
        ),
        local_addr=local_addr,
        local_world_size=config.nproc_per_node if config else 1,
        role=config.role if config else "default",
        topology=conf["topology"],
        refuse_reuse=not conf["reuse"],
        secret=read_secret(os.environ),
        close_timeout_s=conf["close_timeout"] / 1000,
        read_timeout_s=conf["read_timeout"] / 1000,
    )


def _own_name() -> str:
    number = next(_handlers)
    return f"{socket.gethostname()}-{os.getpid()}" + (f"-{number}" if number > 1 else "")


def agent_has_run() -> bool:
    """Return whether `run` has returned in the calling launch's agent."""
    from torch.distributed.elastic.agent.server.api import SimpleElasticAgent

    run = inspect.unwrap(SimpleElasticAgent.run).__code__
    launch, inner = _launch()
    return launch is not None and run not in inner


def launch_config() -> Any | None:
    """Return the calling launch's `LaunchConfig`, or None if there is none.

    torch does not pass the number of workers to a backend (`RendezvousParameters`), but the server
    should show it. Ranks do not depend on it, because torch's agents assign them among themselves.
    """
    from torch.distributed.launcher.api import LaunchConfig

    launch, _ = _launch()
    config = launch.f_locals.get("config") if launch is not None else None
    return config if isinstance(config, LaunchConfig) else None


def _launch() -> tuple[FrameType | None, list[CodeType]]:
    """Return the frame of the calling launch, and the code of those that it has called since."""
    from torch.distributed.launcher.api import launch_agent

    inner, frame = list[CodeType](), inspect.currentframe()
    while frame is not None and frame.f_code is not launch_agent.__code__:
        inner.append(frame.f_code)
        frame = frame.f_back
    return frame, inner


def _warn_of_unknown(config: Mapping[str, Any]) -> None:
    for key, value in config.items():
        # `LaunchConfig.__post_init__` always adds `timeout`, as a number.
        if key not in KEYS and not (key == "timeout" and isinstance(value, int)):
            log.warning("%s", unknown_key(key, KEYS))
