"""rdzv-agent's configuration: its settings and what they imply, validated on this machine."""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from pathlib import Path

from rdzv.agent.app.agent_settings import AgentSettings, why_not_here
from rdzv.agent.cli.options import parse_launch
from rdzv.agent.launch.launch import Launch, check_startable
from rdzv.agent.system.accounts import (
    name_of,
)
from rdzv.errors import InvalidRequestError
from rdzv.launch_options import flags
from rdzv.settings.toml_files import Loaded, load

log = logging.getLogger("rdzv.agent")

DEFAULT_FILE = Path("/etc/rdzv/agent.toml")


def check_directories(settings: AgentSettings, *, for_another: bool = False) -> None:
    """Refuse directories that cannot be used, creating none; not those `for_another` account."""
    for key, path in (("state_dir", settings.state_dir), ("runtime_dir", settings.runtime_dir)):
        if settings.user:
            _check_passable(path)
        if settings.user or not for_another:
            check_own(key, path, strictly=bool(settings.user))
        above = next(place for place in (path, *path.parents) if os.path.lexists(place))
        try:
            # Only an actual attempt reveals every obstacle; permissions are just one of them.
            with tempfile.TemporaryFile(dir=above):
                pass
        except OSError as error:
            if key == "runtime_dir" and above != path and isinstance(error, PermissionError):
                continue  # The service manager creates it at each start.
            where = "" if above == path else f" in {above}"
            what = "write to" if above == path else "create"
            raise InvalidRequestError(
                f"cannot {what} `{key}` = {str(path)!r}{where}: {error.strerror}; give another"
            ) from error


def check_own(key: str, path: Path, *, strictly: bool) -> None:
    """Refuse a directory that another account may have created or could replace.

    It need not exist yet. The agent trusts its contents: it removes files, and kills a dead
    runner's processes. A world-writable directory is refused if `strictly`; otherwise a warning is
    logged, because the agent may be alone in its container. A directory below another account's
    folder is refused as well. Unless `strictly`, that applies only where anyone could have created
    the folder, as in /tmp; elsewhere, root must have allowed it, as with a home directory inside a
    group's folder.
    """
    path = path.absolute()
    ends = (path, path.resolve())
    # This includes "/": in a container, root may have any uid.
    trusted = {0, os.geteuid(), Path("/").lstat().st_uid}
    for place in dict.fromkeys(above for end in ends for above in (end, *end.parents)):
        if not os.path.lexists(place):
            continue
        found = place.lstat()
        anybodys = place in ends or place.parent.stat().st_mode & stat.S_IWOTH
        if found.st_uid not in trusted and (strictly or anybodys):
            raise InvalidRequestError(
                f"`{key}` = {str(path)!r} is not safe: {place} belongs to "
                f"{name_of(found.st_uid)}, who could put anything in its place; remove "
                "it, or give another directory"
            )
        # The entries of a sticky folder, such as /tmp, are safe.
        safe = stat.S_ISLNK(found.st_mode) or (found.st_mode & stat.S_ISVTX and place not in ends)
        if found.st_mode & stat.S_IWOTH and not safe:
            why = f"`{key}` = {str(path)!r} is not safe: everyone may write to {place}"
            if strictly:
                raise InvalidRequestError(f"{why}; chmod o-w {place}, or give another")
            log.warning("%s; run `chmod o-w %s`, unless only this agent can use it", why, place)


def _check_passable(path: Path) -> None:
    for place in (path, *path.parents):
        if os.path.lexists(place) and not place.stat().st_mode & stat.S_IXOTH:
            raise InvalidRequestError(
                f"jobs run as the accounts of [[user]], which cannot enter {str(place)!r} on "
                f"their way to their own folders in {str(path)!r}; let others pass: chmod o+x "
                f"{place} (in the unit: StateDirectoryMode=0711)"
            )


def read_config(
    path: Path, *, for_another: bool = False
) -> tuple[Loaded[AgentSettings], tuple[Launch, ...]]:
    """Return the configuration, and the jobs that are listed in it.

    The current account is not checked if the agent will run under another one (`for_another`).
    """
    loaded = load(AgentSettings, path)
    try:
        if not for_another and (why := why_not_here(loaded.settings)):
            raise InvalidRequestError(why)
        loaded.settings.credentials()
        return loaded, _read_jobs(loaded.settings)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{path}: {error}") from error


def _read_jobs(settings: AgentSettings) -> tuple[Launch, ...]:
    launches = tuple(_read_job(list(job.args), settings) for job in settings.job)
    names = [launch.job.rdzv_id for launch in launches]
    for name in names:
        if names.count(name) > 1:
            raise InvalidRequestError(f"two [[job]] tables have the --rdzv-id {name}; rename one")
    return launches


def _read_job(given: list[str], settings: AgentSettings) -> Launch:
    node_id, endpoints = settings.node_id, settings.endpoints
    servers = ",".join(map(str, endpoints))
    try:
        flags.refuse_answers(given)
        launch, meeting = parse_launch(
            [
                *("--rdzv-backend=rdzv", f"--rdzv-endpoint={servers}"),
                *(f"--node-id={node_id}", *given),
            ]
        )
    except InvalidRequestError as error:
        raise InvalidRequestError(f"args {given}: {error}") from error
    if any((meeting.files or {}).values()):
        raise InvalidRequestError(
            f"args {given} include credentials, but all jobs of a node share one "
            "connection; replace --tls-* and --token-file by the settings `tls` and "
            "`token_file`"
        )
    check_startable(launch)
    if launch.job.node_id != node_id or meeting.endpoints != endpoints:
        raise InvalidRequestError(
            f"args {given} name their own node or server; replace --node-id, "
            "--rdzv-endpoint and --standalone by the settings `node_id` and `server`"
        )
    return launch
