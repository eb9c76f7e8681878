"""Reads the options on `torchrun`'s command line that concern this node.

`--rdzv-conf` keys that torchrun also has keep their names, defaults and units.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import math
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.rendezvous.api import RendezvousParameters

from rdzv.core.model import ScaleUp, Settings
from rdzv.errors import InvalidRequestError
from rdzv.launch_options.job_options import parse_scale_up, unknown_key_warning
from rdzv.structs import struct
from rdzv.transport.channels import PLAIN, Credentials
from rdzv.transport.endpoints import Endpoint, parse_endpoints, refuse_link_local
from rdzv.transport.job_secret import read_secret

log = logging.getLogger("rdzv.torchrun")

_handlers = itertools.count(1)
"""Numbers this process's handlers, each of which is a node."""

MAX_CONF_S = 30 * 24 * 3600

KNOWN_KEYS = (
    "join_timeout",
    "last_call_timeout",
    "close_timeout",
    "read_timeout",
    "scale_up",
    "reuse",
    "node_id",
    "topology",
    "tls_ca",
    "tls_cert",
    "tls_key",
    "token_file",
)


@struct(frozen=True)
class Options:
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


def read_options(params: RendezvousParameters) -> Options:
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
    config = launch_config()
    scale_up, scale_up_after_ms = _scale_up(conf.get("scale_up", ScaleUp.EAGER.value))
    return Options(
        rdzv_id=params.run_id,
        node_id=conf.get("node_id") or _own_name(),
        endpoints=_endpoints(params.endpoint, params.local_addr or ""),
        credentials=_credentials(conf),
        settings=Settings(
            min_nodes=params.min_nodes,
            max_nodes=params.max_nodes,
            # torch's agent counts restarts separately on each node.
            max_restarts=None,
            join_timeout_ms=round(_seconds(conf, "join_timeout", 600) * 1000) or 1,
            last_call_timeout_ms=round(_seconds(conf, "last_call_timeout", 30) * 1000),
            scale_up=scale_up,
            scale_up_after_ms=scale_up_after_ms,
        ),
        local_addr=params.local_addr or "",
        local_world_size=config.nproc_per_node if config else 1,
        role=config.role if config else "default",
        topology=conf.get("topology", ""),
        refuse_reuse=not _bool(conf, "reuse", default=True),
        secret=_secret(),
        close_timeout_s=_seconds(conf, "close_timeout", 30),
        read_timeout_s=_seconds(conf, "read_timeout", 60),
    )


def _own_name() -> str:
    """Return a default node name that this process has not used before."""
    number = next(_handlers)
    return f"{socket.gethostname()}-{os.getpid()}" + (f"-{number}" if number > 1 else "")


def agent_has_run() -> bool:
    """Return whether `run` has returned in the calling launch's agent."""
    from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
    from torch.distributed.launcher.api import launch_agent

    run = inspect.unwrap(SimpleElasticAgent.run).__code__
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not launch_agent.__code__:
        if frame.f_code is run:
            return False
        frame = frame.f_back
    return frame is not None


def launch_config() -> Any | None:
    """Return the calling launch's `LaunchConfig`, or None if there is none.

    torch does not pass the number of workers to a backend (`RendezvousParameters`), but the server
    should show it. Ranks do not depend on it, because torch's agents assign them among themselves.
    """
    from torch.distributed.launcher.api import LaunchConfig, launch_agent

    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not launch_agent.__code__:
        frame = frame.f_back
    config = frame.f_locals.get("config") if frame is not None else None
    return config if isinstance(config, LaunchConfig) else None


def _warn_of_unknown(config: Mapping[str, Any]) -> None:
    for key, value in config.items():
        # `LaunchConfig.__post_init__` always adds `timeout`, as a number.
        if key not in KNOWN_KEYS and not (key == "timeout" and isinstance(value, int)):
            log.warning("%s", unknown_key_warning(key, KNOWN_KEYS))


def _endpoints(text: str, local_addr: str) -> tuple[Endpoint, ...]:
    if not text.strip():
        raise ValueError(
            "--rdzv-endpoint is missing: --rdzv-backend=rdzv needs a server; start rdzvd and give "
            "its address as --rdzv-endpoint=HOST:PORT"
        )
    try:
        endpoints = parse_endpoints(text)
        refuse_link_local(endpoints, local_addr)
        return endpoints
    except InvalidRequestError as error:
        raise ValueError(f"--rdzv-endpoint: {error}") from error


def _secret() -> str:
    """Return the job secret, which is read only from the environment."""
    try:
        return read_secret(os.environ)
    except InvalidRequestError as error:
        raise ValueError(str(error)) from None


def _credentials(conf: Mapping[str, str]) -> Credentials:
    keys = {"ca": "tls_ca", "cert": "tls_cert", "key": "tls_key", "token_file": "token_file"}
    given = {name: Path(conf[key]) for name, key in keys.items() if key in conf}
    try:
        return Credentials.parse(given, os.environ)
    except InvalidRequestError as error:
        raise ValueError(f"--rdzv-conf: {error}") from error


def _seconds(conf: Mapping[str, str], key: str, default_s: float) -> float:
    text = conf.get(key, str(default_s))
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= MAX_CONF_S:
        raise ValueError(
            f"--rdzv-conf: {key}={text} is not a number of seconds; give one from 0 to {MAX_CONF_S}"
        )
    return seconds


def _bool(conf: Mapping[str, str], key: str, *, default: bool) -> bool:
    text = conf.get(key, str(default)).lower()
    if text not in ("true", "false", "1", "0"):
        raise ValueError(f"--rdzv-conf: {key}={text} is not true or false")
    return text in ("true", "1")


def _scale_up(text: str) -> tuple[ScaleUp, int]:
    try:
        return parse_scale_up(text)
    except InvalidRequestError as error:
        raise ValueError(str(error)) from error
