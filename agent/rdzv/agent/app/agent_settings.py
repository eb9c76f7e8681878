"""The settings in agent.toml: their types, bounds and defaults, and when to change them."""

# The annotations are read at run time, so they are not postponed.
import json
import os
import pwd
import re
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from msgspec import field

from rdzv import bounds
from rdzv.agent.inventory.health_checks import Command, Disk, Gpus, NodeCheck, Xids
from rdzv.agent.inventory.preemption import Preemption
from rdzv.agent.inventory.resources import NONE, NVML, parse_gpus
from rdzv.agent.inventory.xid import CODES, KMSG, Lifted
from rdzv.agent.node.submitted_launch import passed_on
from rdzv.agent.system.accounts import (
    EVERYONE,
    NOTHING,
    Accounts,
    User,
    own_account,
    parse_limits,
)
from rdzv.core.fleet.node_resources import NodeResources
from rdzv.errors import InvalidRequestError
from rdzv.launch_options import kinds
from rdzv.settings.setting_types import Rule, Table
from rdzv.structs import Duration, Size, setting
from rdzv.transport.channels import Credentials
from rdzv.transport.endpoints import Endpoint, parse_endpoints

SECOND = 1_000
MINUTE = 60 * SECOND
HOUR = 60 * MINUTE
DAY = 24 * HOUR
GIB = 1 << 30

PASSED_ON = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_*", "TZ", "TMPDIR"),
    "LD_LIBRARY_PATH",
)
"""The variables in the agent's environment that jobs get by default."""

MEMORY_USED = 2 * GIB
"""How many bytes of an idle GPU's memory may be in use by default."""

_PATTERN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\*?|\*")


# ---------------------------------------------------------------------- checks of a text


def _name(text: str) -> None:
    bounds.name("the name", text)


def _check_default_node_id(settings: "AgentSettings") -> str:
    """Check the node's name even if it comes from the environment or the host name."""
    bounds.name("`node_id`, which may come from RDZV_NODE_ID or the host name:", settings.node_id)
    return ""


def _printable(text: str) -> None:
    bounds.label("the text", text)


def _gpus(text: str) -> None:
    if text not in (NVML, NONE):
        parse_gpus(text)


def _pattern(text: str) -> None:
    if not _PATTERN.fullmatch(text):
        raise InvalidRequestError(
            f"{text!r} is not a variable name; give one, optionally ending in a star, such as LC_*"
        )


def _code(text: str) -> None:
    if not text.isascii() or not text.isdecimal():
        raise InvalidRequestError(f'{text!r} is not an Xid number; give one such as "79"')


# ---------------------------------------------------------------------- defaults


def _state_dir() -> Path:
    return _folder("STATE_DIRECTORY", "/var/lib", "XDG_STATE_HOME", "~/.local/state")


def _runtime_dir() -> Path:
    return _folder("RUNTIME_DIRECTORY", "/run", "XDG_RUNTIME_DIR", f"/tmp/rdzv-{os.geteuid()}")


def _folder(of_systemd: str, of_root: str, of_user: str, else_: str) -> Path:
    if given := os.environ.get(of_systemd):
        return Path(given.split(":", maxsplit=1)[0])
    if os.geteuid() == 0:
        return Path(of_root) / "rdzv-agent"
    return Path(os.environ.get(of_user) or else_).expanduser() / "rdzv-agent"


def _log_level() -> Literal["debug", "info", "warning", "error"]:
    match os.environ.get("LOGLEVEL", "").lower():
        case "debug" | "warning" | "error" as level:
            return level
    return "info"


# ---------------------------------------------------------------------- tables in lists
# Each setting is one paragraph: name, type, bounds, and the reason to change it.
# fmt: off


_OF_CHECK = {
    "command": ("command",),
    "disk": ("path", "min_free_bytes", "min_free_percent"),
    "gpu": ("count", "memory_used_bytes"),
    "xid": ("codes", "log"),
}
"""The settings of each kind of check, in addition to `name` and `timeout`."""


def _check_of_kind(check: "HealthCheck") -> str:
    mine = _OF_CHECK[check.check]
    for name in (name for names in _OF_CHECK.values() for name in names):
        if name not in mine and getattr(check, name) is not None:
            return (
                f"`{name.removesuffix('_bytes')}` is not a setting of {check.check} checks; leave "
                "it out, or see docs/health.md"
            )
    if check.check == "command" and not check.command:
        return "`command` is missing, or empty; give the program and its arguments"
    if check.check == "disk":
        if check.path is None:
            return "`path` is missing; name a folder on the disk to check"
        if not check.min_free_bytes and not check.min_free_percent:
            return "`min_free` or `min_free_percent` is missing; say how much space must be free"
    return ""


class HealthCheck(Table, frozen=True):
    """A health check that the node must pass."""

    rules = (Rule(("check", "command", "path", "min_free", "min_free_percent"), _check_of_kind),)

    check: Annotated[Literal["command", "disk", "gpu", "xid"], setting(reason="""
        The kind of check: "command" runs a program, "disk" checks free space, "gpu" checks that
        GPUs answer and that unused ones are idle, "xid" searches the kernel's log for GPU errors.
        """)]
    name: Annotated[str | None, setting(
        check=_printable, default_words="the kind, with the path or the program", reason="""
        The name of the check in its results.""")] = None
    timeout_ms: Annotated[Duration, setting(ge=100, le=15 * SECOND, reason="""
        A check that takes longer fails. After a worker failure on this node, the job's other nodes
        wait for it.""")] = 10 * SECOND
    command: Annotated[tuple[str, ...] | None, setting(reason="""
        The program and its arguments. Exit code 0 means that the node is healthy; otherwise the
        last line of output is the reason. RDZV_UNUSED_GPUS lists the GPUs that no job uses.
        """)] = None
    path: Annotated[Path | None, setting(reason="""
        A folder on the disk to check.""")] = None
    min_free_bytes: Annotated[Size | None, setting(ge=0, reason="""
        How much space must be free on the disk for accounts other than root.""")] = None
    min_free_percent: Annotated[float | None, setting(ge=0, le=100, unit="percent", reason="""
        The same, as a percentage of the disk.""")] = None
    count: Annotated[int | None, setting(
        ge=0, le=1_024, unit="GPUs", default_words="`0`", reason="""
        How many GPUs must answer at least, besides all those present when the agent started.
        """)] = None
    memory_used_bytes: Annotated[Size | None, setting(ge=0, default_words='`"2 GiB"`', reason="""
        How much of a GPU's memory may be in use while no job uses the GPU: the driver itself takes
        a few hundred MiB.""")] = None
    codes: Annotated[tuple[str, ...] | None, setting(
        check=_code, default_words=f"`{json.dumps(CODES)}`", reason="""
        The Xid errors that take a node out of service until an operator has looked at it.
        """)] = None
    log: Annotated[Path | None, setting(default_words=f"`{KMSG}`", reason="""
        The kernel's log, or a file in the same format.""")] = None


class ListedJob(Table, frozen=True):
    """A job listed in the file itself."""

    args: Annotated[tuple[str, ...], setting(reason="""
        The arguments of rdzvrun: --rdzv-id, the script and the script's own arguments.""")]


# ---------------------------------------------------------------------- tables


class TlsFiles(Table, frozen=True):
    """The files for the agent's TLS connection."""

    ca: Annotated[Path | None, setting(
        default_words="`$RDZV_TLS_CA` if set; else connections are plain", reason="""
        The CA of rdzvd's certificate (PEM); if set, the agent connects with TLS. The TLS files are
        read again for each connection, so they can be renewed at any time.""")] = None
    cert: Annotated[Path | None, setting(default_words="`$RDZV_TLS_CERT` if set", reason="""
        This node's certificate for rdzvd, which contains its `node_id`.""")] = None
    key: Annotated[Path | None, setting(default_words="`$RDZV_TLS_KEY` if set", reason="""
        The private key of that certificate.""")] = None


class Logs(Table, frozen=True):
    """The retention of run folders."""

    keep_ms: Annotated[Duration, setting(ge=0, le=3650 * DAY, reload=True, reason="""
        How long the folder of a run is kept after its last change.""")] = 14 * DAY
    keep_size_bytes: Annotated[Size, setting(ge=0, reload=True, reason="""
        How much disk space the folders of all runs may use; above it, the oldest folders of ended
        runs are removed.""")] = 20 * GIB
# fmt: on


# ---------------------------------------------------------------------- rules


def _check_labels(settings: "AgentSettings") -> str:
    bounds.labels("`labels`", settings.labels.items())
    return ""


def _check_env(settings: "AgentSettings") -> str:
    kinds.environment("`env`", settings.env, "name those to use in `gpus`")
    return ""


def _check_python(settings: "AgentSettings") -> str:
    if settings.python is not None and shutil.which(settings.python) is None:
        return (
            f"`python` = {str(settings.python)!r} is not a program on this node; give the "
            "path of a Python interpreter"
        )
    return ""


def _check_account(settings: "AgentSettings") -> str:
    if settings.account is not None and settings.user:
        return (
            f"`account` = {settings.account!r} and [[user]] both set the account of "
            "submitted jobs; leave `account` out"
        )
    return ""


def why_not_here(settings: "AgentSettings") -> str:
    account, own = settings.account, own_account()
    if account is not None and account != own:
        return (
            f"`account` = {account!r} is not the account that rdzv-agent runs as, {own}; "
            f"leave it out, run rdzv-agent as {account}, or run it as root with [[user]] "
            f"entries that name {account}"
        )
    if account is None and os.geteuid() == 0 and not (settings.job or settings.user):
        return (
            "rdzv-agent runs as root, and so would every job that anyone submits; name "
            "the jobs' accounts in [[user]], run rdzv-agent as another user, or, if you "
            'do want this, set account = "root"'
        )
    return ""


def _check_users(settings: "AgentSettings") -> str:
    names = [user.name for user in settings.user]
    for name in names:
        if names.count(name) > 1:
            return f"two [[user]] entries are named {name!r}; list the accounts of both in one"
    if settings.user and settings.job:
        return (
            "[[user]] applies to submitted jobs, and an agent with [[job]] takes none; leave "
            "either out"
        )
    for user in settings.user:
        parse_limits(user.limits)
        if user.name == EVERYONE and "root" in user.accounts:
            return (
                f"[[user]] {EVERYONE!r} has the account root, and means everyone; give it only to "
                "submitters listed by name"
            )
    for user in settings.user if os.geteuid() != 0 else ():
        for account in user.accounts:
            if account != own_account():
                return (
                    f"[[user]] {user.name!r} has the account {account!r}, but rdzv-agent "
                    f"runs as {own_account()}, and only root can start jobs under other "
                    "accounts; run it as root, or leave that account out"
                )
    return ""


def _check_health(settings: "AgentSettings") -> str:
    if settings.health and settings.job:
        return (
            "`health` applies to submitted jobs, and an agent with [[job]] takes none; "
            "leave either out"
        )
    return ""


# fmt: off
class AgentSettings(Table, frozen=True, kw_only=True):
    """All the settings in agent.toml."""

    program = "rdzv-agent"
    rules = (
        Rule(("node_id",), _check_default_node_id),
        Rule(("labels",), _check_labels),
        Rule(("env",), _check_env),
        Rule(("python",), _check_python),
        Rule(("account", "user"), _check_account),
        Rule(("user", "job"), _check_users),
        Rule(("health", "job"), _check_health),
    )

    server: Annotated[str, setting(unit="HOST:PORT", check=parse_endpoints, reason="""
        The address of rdzvd; several, separated by commas, if they share an etcd.""")]
    token_file: Annotated[Path | None, setting(default_words="`$RDZV_TOKEN_FILE` if set", reason="""
        The token for rdzvd, for nodes without their own certificates; it is sent only over TLS, or
        to this machine.""")] = None
    node_id: Annotated[str, setting(
        check=_name, default_words="`$RDZV_NODE_ID` if set, else the host name", reason="""
        This node's name in every job; it must be unique among the nodes of a server.""",
    )] = os.environ.get("RDZV_NODE_ID") or socket.gethostname()
    address: Annotated[str | None, setting(
        check=_printable, default_words="its address towards the server", reason="""
        The host name or address by which other nodes reach this one.""")] = None
    topology: Annotated[str | None, setting(check=_printable, reason="""
        This node's position in the network, such as its rack; a job gets nodes of one position if
        possible, with adjacent ranks.""")] = None
    capacity: Annotated[int, setting(ge=1, le=256, unit="jobs", reload=True, reason="""
        How many submitted jobs may run here at once. GPUs are divided among them; CPUs and memory
        are not.""")] = 1
    snapshot_memory_bytes: Annotated[Size | None, setting(
        ge=0, default_words="half of what is free when a job first saves", reason="""
        The most memory for snapshots of submitted jobs on this node. Each job may use an equal
        share, by the `capacity` that the agent has started with, or less, by its own
        --snapshot-memory. 0: none.""")] = None
    gpus: Annotated[str, setting(check=_gpus, reason="""
        The GPUs that jobs may use: "nvml" for all that NVML lists, "none", or UUIDs as shown by
        `nvidia-smi -L`, separated by commas.""")] = NVML
    python: Annotated[Path | None, setting(
        reload=True, default_words="the interpreter that runs rdzv-agent", reason="""
        The interpreter for jobs whose environment does not set PYTHON_EXEC.""")] = None
    account: Annotated[str | None, setting(
        default_words="the agent's own, unless that is root", reason="""
        The account that all submitted jobs run as. It can only be the agent's own. An agent that
        runs as root takes submitted jobs only if this is "root", or if there are [[user]] entries
        instead.""",
    )] = None
    state_dir: Annotated[Path, setting(
        default_words="`$STATE_DIRECTORY`, else `/var/lib/rdzv-agent` for root, else "
        "`~/.local/state/rdzv-agent`", reason="""
        Where the folders of submitted jobs are kept, with their workers' output.""",
    )] = _state_dir()
    runtime_dir: Annotated[Path, setting(
        default_words="`$RUNTIME_DIRECTORY`, else `/run/rdzv-agent` for root, else "
        "`$XDG_RUNTIME_DIR/rdzv-agent`", reason="""
        Where the agent keeps short-lived files; use a local disk or memory.""")] = _runtime_dir()
    restart_within_ms: Annotated[Duration, setting(ge=SECOND, le=HOUR, reload=True, reason="""
        After a deliberate restart of this agent: how long the server keeps the node's seats, and
        its workers keep running, while no agent runs.""")] = 5 * MINUTE
    pass_env: Annotated[tuple[str, ...], setting(check=_pattern, reload=True, reason="""
        The variables of the agent's own environment that submitted jobs get; a star at the end
        matches any suffix. Jobs get no others.""")] = PASSED_ON
    log_level: Annotated[Literal["debug", "info", "warning", "error"], setting(
        reload=True, default_words="`$LOGLEVEL`, else `info`", reason="""
        The lowest level logged to stderr.""")] = _log_level()
    log_format: Annotated[Literal["human", "json"], setting(reason="""
        Log lines for people, or one JSON object per line.""")] = "human"
    labels: Annotated[Mapping[str, str], setting(check=_printable, reload=True, reason="""
        Labels that submitted jobs may ask for, such as gpu = h100.""")] = NOTHING
    env: Annotated[Mapping[str, str], setting(reload=True, reason="""
        Environment variables for every submitted job; those set by the submission take precedence.
        """)] = NOTHING
    drain_deadline_ms: Annotated[Duration, setting(ge=0, le=DAY, reload=True, reason="""
        How long workers may take to save and exit after a SIGTERM to the agent; then they are
        killed.""",
    )] = MINUTE
    tls: TlsFiles = field(default_factory=TlsFiles)
    preemption: Preemption = field(default_factory=Preemption)
    logs: Logs = field(default_factory=Logs)
    health_interval_ms: Annotated[Duration, setting(ge=0, le=DAY, reason="""
        How often the node checks itself while it has no job, so that `rdzvctl nodes` shows an
        unhealthy node before a job is placed there; 0: only when needed.""",
    )] = 5 * MINUTE
    health: Annotated[tuple[HealthCheck, ...], setting(reason="""
        A check that the node must pass before it takes a submitted job, and before it continues
        after a failure of its workers.""")] = ()
    user: Annotated[tuple[User, ...], setting(reason="""
        The accounts of a submitter's jobs; this requires an agent that runs as root. With any such
        entry, this node declines the jobs of submitters without an account.""")] = ()
    job: Annotated[tuple[ListedJob, ...], setting(reason="""
        A job that this node joins on its own, with the agent's own environment. An agent with such
        jobs takes no submitted ones, and exits when its jobs have ended.""")] = ()
    # fmt: on

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        return parse_endpoints(self.server)

    def credentials(self) -> Credentials:
        tls = self.tls
        files = {"ca": tls.ca, "cert": tls.cert, "key": tls.key, "token_file": self.token_file}
        return Credentials.parse(files, os.environ)

    def accounts(self) -> Accounts:
        return Accounts(self.user)

    def checks(self, resources: NodeResources, own: Mapping[str, str]) -> list[NodeCheck]:
        """Commands run with the environment `own`."""
        return [self._check(check, resources, own) for check in self.health]

    def _check(
        self, check: HealthCheck, resources: NodeResources, own: Mapping[str, str]
    ) -> NodeCheck:
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
                lifted = Lifted(self.state_dir / "xid-lifted.json")
                return Xids(name or "xid", timeout_s, codes, check.log or KMSG, lifted)

    def job_environ(self, own: Mapping[str, str]) -> dict[str, str]:
        environ = {**_account_environ(), **passed_on(own, self.pass_env), **self.env}
        if self.python is not None:
            environ.setdefault("PYTHON_EXEC", str(self.python))
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
