"""rdzv-agent's configuration: its settings and what they imply, validated on this machine."""

from __future__ import annotations

import logging
import os
import pwd
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from rdzv.agent.app.agent_settings import MEMORY_USED, AgentSettings, HealthCheck, why_not_here
from rdzv.agent.cli.options import parse_launch
from rdzv.agent.inventory.health import Check
from rdzv.agent.inventory.health_checks import Command, Disk, Gpus, Xids
from rdzv.agent.inventory.xid import CODES, KMSG, Lifted
from rdzv.agent.launch.launch import Launch, check_startable
from rdzv.agent.node.submitted_launch import passed_on
from rdzv.agent.system.accounts import (
    Accounts,
    SubmitterRule,
    name_of,
    parse_limits,
    parse_umask,
)
from rdzv.core.fleet.node_resources import Resources
from rdzv.errors import InvalidRequestError
from rdzv.launch_options import flags
from rdzv.settings.toml_files import Loaded, load
from rdzv.structs import struct
from rdzv.transport.channels import PLAIN, Credentials
from rdzv.transport.endpoints import Endpoint, parse_endpoints

log = logging.getLogger("rdzv.agent")

DEFAULT_FILE = Path("/etc/rdzv/agent.toml")


@struct(frozen=True)
class Config:
    """The configuration of one rdzv-agent."""

    loaded: Loaded[AgentSettings]
    endpoints: tuple[Endpoint, ...]
    launches: tuple[Launch, ...] = ()
    """The jobs listed in the file itself. If there are none, the agent takes submitted jobs."""
    credentials: Credentials = PLAIN
    """The TLS files and the token for the connection to the server."""

    @property
    def settings(self) -> AgentSettings:
        """The settings from the file, with defaults filled in."""
        return self.loaded.settings

    @property
    def accounts(self) -> Accounts:
        """The accounts under which submitted jobs run."""
        return Accounts(
            [
                SubmitterRule(
                    submitter=user.name,
                    accounts=user.accounts,
                    umask=parse_umask(user.umask),
                    limits=parse_limits(user.limits),
                )
                for user in self.settings.user
            ]
        )

    def checks(self, resources: Resources, own: Mapping[str, str]) -> list[Check]:
        """Return the checks that this node must pass. Commands run with the environment `own`."""
        return [self._check(check, resources, own) for check in self.settings.health]

    def _check(self, check: HealthCheck, resources: Resources, own: Mapping[str, str]) -> Check:
        name, timeout_s = check.name, check.timeout_ms / 1000
        match check.check:
            case "command":
                args = check.command or ()
                return Command(name or f"command {Path(args[0]).name}", timeout_s, args, own)
            case "disk":
                assert check.path is not None, "a rule demands it"
                least, percent = check.min_free_bytes or 0, check.min_free_percent or 0.0
                return Disk(name or f"disk {check.path}", timeout_s, check.path, least, percent)
            case "gpu":
                uuids = [gpu.uuid for gpu in resources.gpus]
                used = MEMORY_USED if check.memory_used_bytes is None else check.memory_used_bytes
                return Gpus(name or "gpu", timeout_s, uuids, check.count or 0, used)
            case "xid":
                codes = CODES if check.codes is None else check.codes
                lifted = Lifted(self.settings.state_dir / "xid-lifted.json")
                return Xids(name or "xid", timeout_s, codes, check.log or KMSG, lifted)

    def job_environ(self, own: Mapping[str, str]) -> dict[str, str]:
        """Return the environment for all submitted jobs, based on `own` and the settings."""
        settings = self.settings
        given = passed_on(own, settings.pass_env)
        environ = {**_account_environ(), **given, **settings.env}
        if settings.python is not None:
            environ.setdefault("PYTHON_EXEC", str(settings.python))
        return environ


def _account_environ() -> dict[str, str]:
    """Return the variables that a login would set, for services that start without one."""
    environ = {"PATH": os.defpath}
    try:
        account = pwd.getpwuid(os.geteuid())
    except KeyError:
        return environ
    names = {"USER": account.pw_name, "LOGNAME": account.pw_name}
    return environ | names | {"HOME": account.pw_dir, "SHELL": account.pw_shell or "/bin/sh"}


def check_directories(config: Config, *, for_another: bool = False) -> None:
    """Check whether the agent's directories can be created and used, without creating them.

    With `for_another`, the agent may run under another account, whom they may belong to.

    Raises:
        InvalidRequestError: one cannot be created or written to, or is not safe.
    """
    settings = config.settings
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

    Raises:
        InvalidRequestError: another account owns it, a directory above it, or a link to it.
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
    """Refuse a folder through which job accounts cannot reach their own folders below it."""
    for place in (path, *path.parents):
        if os.path.lexists(place) and not place.stat().st_mode & stat.S_IXOTH:
            raise InvalidRequestError(
                f"jobs run as the accounts of [[user]], which cannot enter {str(place)!r} on "
                f"their way to their own folders in {str(path)!r}; let others pass: chmod o+x "
                f"{place} (in the unit: StateDirectoryMode=0711)"
            )


def read_config(path: Path, *, for_another: bool = False) -> Config:
    """Read and check a configuration.

    With `for_another`, the agent will run under another account, so the current one is not checked.

    Raises:
        InvalidRequestError: it cannot be read, or has errors; the message lists them all.
    """
    loaded = load(AgentSettings, path)
    settings = loaded.settings
    if not for_another and (why := why_not_here(settings)):
        raise InvalidRequestError(f"{path}: {why}")
    endpoints = parse_endpoints(settings.server)
    tls = settings.tls
    files = {"ca": tls.ca, "cert": tls.cert, "key": tls.key, "token_file": settings.token_file}
    try:
        launches = _read_jobs(settings, endpoints)
        credentials = Credentials.parse(files, os.environ)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{path}: {error}") from error
    return Config(loaded, endpoints, launches, credentials)


def _read_jobs(settings: AgentSettings, endpoints: tuple[Endpoint, ...]) -> tuple[Launch, ...]:
    launches = tuple(_read_job(job.args, endpoints, settings.node_id) for job in settings.job)
    names = [launch.job.rdzv_id for launch in launches]
    for name in names:
        if names.count(name) > 1:
            raise InvalidRequestError(f"two [[job]] tables have the --rdzv-id {name}; rename one")
    return launches


def _read_job(args: tuple[str, ...], endpoints: tuple[Endpoint, ...], node_id: str) -> Launch:
    servers = ",".join(map(str, endpoints))
    given = list(args)
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
