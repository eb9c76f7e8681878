"""rdzv-agent: the agent of a node, which takes part in the jobs that its configuration names."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import click

from rdzv.agent.core.machine import EXIT_FAILED, EXIT_SUCCESS, EXIT_USAGE
from rdzv.agent.launch import Launch, check_startable
from rdzv.agent.options import parse_launch
from rdzv.agent.run import set_up_logging, summary
from rdzv.client import Endpoint
from rdzv.errors import InvalidRequestError, RendezvousError

log = logging.getLogger("rdzv.agent")

DEFAULT_CONFIG = Path("/etc/rdzv/agent.toml")

_KEYS = {"server", "node_id", "job"}


@dataclass(frozen=True, slots=True)
class Config:
    """What one rdzv-agent was configured with."""

    node_id: str
    endpoints: tuple[Endpoint, ...]
    launches: tuple[Launch, ...]


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 96})
@click.option(
    "--config",
    "path",
    type=click.Path(path_type=Path),
    default=DEFAULT_CONFIG,
    show_default=True,
    metavar="FILE",
    help="TOML: `server`, `node_id`, and a [[job]] for each job.",
)
@click.option("--check-config", is_flag=True, help="Check the configuration and exit.")
def main(path: Path, check_config: bool) -> NoReturn:
    """Take part in all jobs of the configuration, over one stream to the server.

    \b
        server = "10.0.0.5:29400"             # or several, as a list
        node_id = "gpu-7"                     # default: the host name
        [[job]]
        args = ["--rdzv-id=night", "--nnodes=2:4", "--nproc-per-node=8", "/srv/train.py"]

    `args` are rdzvrun's. SIGTERM makes the node leave all its jobs in order. The agent ends when
    every job has ended for this node, and its workers end with it.

    Exit codes: 0 all jobs succeeded, 1 one failed or the agent could not go on, 2 the
    configuration is wrong, 75 and 128+n as rdzvrun's, where all jobs agree.
    """
    set_up_logging("rdzv-agent")
    try:
        config = read_config(path)
    except InvalidRequestError as error:
        click.echo(f"rdzv-agent: {error}", err=True)
        sys.exit(EXIT_USAGE)
    if check_config:
        click.echo(f"rdzv-agent: {path} is in order")
        sys.exit(EXIT_SUCCESS)
    try:
        exit_code = asyncio.run(_run(config))
    except (RendezvousError, OSError) as error:
        click.echo(f"rdzv-agent: {error}", err=True)
        sys.exit(EXIT_FAILED)
    sys.exit(exit_code)


async def _run(config: Config) -> int:
    from rdzv.agent.node import take_part

    outcomes = await take_part(config.node_id, config.endpoints, config.launches)
    for launch, outcome in zip(config.launches, outcomes, strict=True):
        log.info("%s", summary(launch.job.rdzv_id, outcome))
    exit_codes = {outcome.exit_code for outcome in outcomes}
    return exit_codes.pop() if len(exit_codes) == 1 else EXIT_FAILED


def read_config(path: Path) -> Config:
    """Read and check a configuration.

    Raises:
        InvalidRequestError: it can not be read, or a value makes no sense.
    """
    document = _load(path)
    unknown = sorted(document.keys() - _KEYS)
    if unknown:
        raise InvalidRequestError(
            f"{path}: unknown key {unknown[0]!r}; known: {', '.join(sorted(_KEYS))}"
        )
    node_id = str(document.get("node_id", socket.gethostname()))
    servers = document.get("server", [])
    endpoint = ",".join([servers] if isinstance(servers, str) else servers)
    if not endpoint:
        raise InvalidRequestError(f"{path}: `server` is missing; give HOST:PORT of an rdzvd")
    jobs = document.get("job", [])
    if not jobs:
        raise InvalidRequestError(f"{path}: there is no [[job]]; name at least one")
    launches: list[Launch] = []
    endpoints: Sequence[Endpoint] = ()
    for job in jobs:
        launch, endpoints = _read_job(path, job, endpoint, node_id)
        if launch.job.rdzv_id in {other.job.rdzv_id for other in launches}:
            raise InvalidRequestError(
                f"{path}: two [[job]] have the --rdzv-id {launch.job.rdzv_id}; rename one"
            )
        launches.append(launch)
    return Config(node_id, tuple(endpoints), tuple(launches))


def _load(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise InvalidRequestError(
            f"the configuration {path} can not be read: {error.strerror}; write it, or name "
            "another with --config"
        ) from error
    except tomllib.TOMLDecodeError as error:
        raise InvalidRequestError(f"{path} is not TOML: {error}") from error


def _read_job(
    path: Path, job: dict[str, Any], endpoint: str, node_id: str
) -> tuple[Launch, Sequence[Endpoint]]:
    args = job.get("args")
    if not isinstance(args, list) or not all(isinstance(arg, str) for arg in args):
        raise InvalidRequestError(f"{path}: a [[job]] needs `args`, a list of rdzvrun's arguments")
    try:
        launch, endpoints = parse_launch(
            [f"--rdzv-endpoint={endpoint}", f"--node-id={node_id}", *args]
        )
        check_startable(launch)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{path}: {error}") from error
    except SystemExit as error:
        raise InvalidRequestError(f"{path}: args {args} are not rdzvrun's") from error
    if launch.job.node_id != node_id or not endpoints:
        raise InvalidRequestError(
            f"{path}: args {args} name a node or a server of their own; leave --node-id, "
            "--rdzv-endpoint and --standalone to `node_id` and `server`"
        )
    return launch, endpoints


if __name__ == "__main__":
    main(prog_name="rdzv-agent")
