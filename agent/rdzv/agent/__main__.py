"""rdzv-agent: the agent of a node, which takes part in the jobs that its configuration names."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import tomllib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import click

from rdzv.agent.core.machine import EXIT_FAILED, EXIT_SUCCESS, EXIT_USAGE
from rdzv.agent.launch import Launch, check_startable
from rdzv.agent.options import parse_launch
from rdzv.agent.run import EXIT_INTERRUPTED, set_up_logging
from rdzv.agent.summary import summary
from rdzv.client import Endpoint, parse_endpoint
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
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
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
    try:
        return _check_config(document)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{path}: {error}") from error


def _check_config(document: dict[str, Any]) -> Config:
    _check_keys("", document, _KEYS)
    node_id = document.get("node_id", socket.gethostname())
    if not isinstance(node_id, str) or not node_id:
        raise InvalidRequestError(f"`node_id` {node_id!r} is no name; give a string")
    endpoints = _read_servers(document)
    jobs = document.get("job", [])
    if not isinstance(jobs, list) or not all(isinstance(job, dict) for job in jobs):
        raise InvalidRequestError(f"`job` {jobs!r:.80} is no list of tables; begin with [[job]]")
    if not jobs:
        raise InvalidRequestError("there is no [[job]]; name at least one")
    launches = [_read_job(job, endpoints, node_id) for job in jobs]
    names = [launch.job.rdzv_id for launch in launches]
    for name in names:
        if names.count(name) > 1:
            raise InvalidRequestError(f"two [[job]] have the --rdzv-id {name}; rename one")
    return Config(node_id, tuple(endpoints), tuple(launches))


def _check_keys(where: str, table: dict[str, Any], known: Collection[str]) -> None:
    for key in table:
        if key not in known:
            names = ", ".join(sorted(known))
            raise InvalidRequestError(f"{where}unknown key {key!r}; known: {names}")


def _read_servers(document: dict[str, Any]) -> list[Endpoint]:
    given = document.get("server", [])
    servers = given.split(",") if isinstance(given, str) else given
    if not _is_list_of_strings(servers):
        raise InvalidRequestError(
            f"`server` {given!r} is no address; give HOST:PORT of an rdzvd, or a list of them"
        )
    endpoints = [parse_endpoint(text) for text in servers if text.strip()]
    if not endpoints:
        raise InvalidRequestError("`server` is missing; give HOST:PORT of an rdzvd")
    return endpoints


def _load(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise InvalidRequestError(
            f"the configuration {path} can not be read: {error.strerror}; write it, or name "
            "another with --config"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"{path} is not TOML: {error}; correct it") from error


def _is_list_of_strings(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _read_job(job: dict[str, Any], endpoints: list[Endpoint], node_id: str) -> Launch:
    _check_keys("[[job]]: ", job, ("args",))
    args = job.get("args")
    if not isinstance(args, list) or not _is_list_of_strings(args):
        raise InvalidRequestError("a [[job]] needs `args`, a list of rdzvrun's arguments")
    servers = ",".join(map(str, endpoints))
    try:
        launch, meeting = parse_launch(
            [
                "--rdzv-backend=rdzv",
                f"--rdzv-endpoint={servers}",
                f"--node-id={node_id}",
                *args,
            ]
        )
    except SystemExit as error:
        raise InvalidRequestError(
            f"args {args} are not rdzvrun's; see rdzvrun --help for what it takes"
        ) from error
    check_startable(launch)
    if launch.job.node_id != node_id or list(meeting.endpoints) != endpoints:
        raise InvalidRequestError(
            f"args {args} name a node or a server of their own; leave --node-id, "
            "--rdzv-endpoint and --standalone to `node_id` and `server`"
        )
    return launch


if __name__ == "__main__":
    main(prog_name="rdzv-agent")
