"""The settings of rdzv-agent: the content of agent.toml, with bounds, defaults and reasons."""

# The annotations are data, so they are not postponed.
import json
import os
import re
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal

from rdzv.agent.inventory.resources import NONE, NVML, parse_gpus
from rdzv.agent.inventory.xid import CODES, KMSG
from rdzv.agent.system.accounts import EVERYONE, own_account, parse_limits, parse_umask
from rdzv.errors import InvalidRequestError
from rdzv.launch_options.job_options import (
    LABEL,
    LABEL_CHARS,
    VARIABLE,
    WORKERS_OWN,
    check_printable,
)
from rdzv.settings.setting_types import Duration, Rule, Size, Table, setting
from rdzv.transport.endpoints import Listen, parse_endpoints

MINUTE = 60
HOUR = 60 * MINUTE
DAY = 24 * HOUR
GIB = 1 << 30
NOTHING: Mapping[str, str] = MappingProxyType({})

PASSED_ON = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_*", "TZ", "TMPDIR"),
    "LD_LIBRARY_PATH",
)
"""The variables of the agent's environment that jobs get by default."""

MEMORY_USED = 2 * GIB
"""The part of an unused GPU's memory that may be in use by default."""

_NODE_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:@-]{0,127}")
_PATTERN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\*?|\*")


# ---------------------------------------------------------------------- checks of a text


def _name(text: str) -> None:
    if not _NODE_ID.fullmatch(text):
        raise InvalidRequestError(
            "it is not a name of a node; give 1 to 128 letters, digits and . _ : @ -, of which the "
            "first is a letter, a digit or _"
        )


def _check_default_node_id(settings: "AgentSettings") -> str:
    """Check the name also where it comes from the environment, or from the host."""
    try:
        _name(settings.node_id)
    except InvalidRequestError as error:
        return f"`node_id` is {settings.node_id!r}, by RDZV_NODE_ID or the host name: {error}"
    return ""


def _printable(text: str) -> None:
    check_printable("it", text)


def _gpus(text: str) -> None:
    if text not in (NVML, NONE):
        parse_gpus(text)


def _pattern(text: str) -> None:
    if not _PATTERN.fullmatch(text):
        raise InvalidRequestError(
            f"{text!r} is not a name of a variable; give one, which may end in a star, such as LC_*"
        )


def _code(text: str) -> None:
    if not text.isascii() or not text.isdecimal():
        raise InvalidRequestError(f'{text!r} is not a number of an Xid; give one such as "79"')


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
# Each setting reads as one paragraph: name, type, bounds, and the reason to change it.
# fmt: off


_OF_CHECK = {
    "command": ("command",),
    "disk": ("path", "min_free", "min_free_percent"),
    "gpu": ("count", "memory_used"),
    "xid": ("codes", "log"),
}
"""The settings of each kind of check, besides `name` and `timeout`."""


def _check_of_kind(check: "HealthCheck") -> str:
    mine = _OF_CHECK[check.check]
    for name in (name for names in _OF_CHECK.values() for name in names):
        if name not in mine and getattr(check, name) is not None:
            return f"`{name}` is not for a check {check.check}; leave it out, or see docs/health.md"
    if check.check == "command" and not check.command:
        return "`command` is missing, or empty; give the program and its arguments"
    if check.check == "disk":
        if check.path is None:
            return "`path` is missing; name a folder on the disk that is to have room"
        if not check.min_free and not check.min_free_percent:
            return "`min_free` or `min_free_percent` is missing; say how much room there has to be"
    return ""


class HealthCheck(Table, frozen=True):
    """A check that the node has to pass."""

    rules = (Rule(("check", "command", "path", "min_free", "min_free_percent"), _check_of_kind),)

    check: Annotated[Literal["command", "disk", "gpu", "xid"], setting(reason="""
        The kind: a command of yours, room on a disk, whether GPUs answer and are not in use, or the
        kernel's log of their errors.""")]
    name: Annotated[str | None, setting(
        check=_printable, default_words="the kind, with the path or the program", reason="""
        The name of the check where its result is shown.""")] = None
    timeout: Annotated[Duration, setting(ge=0.1, le=15, reason="""
        A check that takes longer has failed. The other nodes of a job wait for it when workers have
        failed here.""")] = 10
    command: Annotated[tuple[str, ...] | None, setting(reason="""
        The program and its arguments. The node is healthy if it exits with 0; if not, the last line
        it printed is the reason. RDZV_UNUSED_GPUS names the GPUs that no job has.""")] = None
    path: Annotated[Path | None, setting(reason="""
        A folder on the disk that is to have room.""")] = None
    min_free: Annotated[Size | None, setting(ge=0, reason="""
        How much of the disk has to be free for accounts other than root.""")] = None
    min_free_percent: Annotated[float | None, setting(ge=0, le=100, unit="percent", reason="""
        The same as a share of the disk.""")] = None
    count: Annotated[int | None, setting(
        ge=0, le=1_024, unit="GPUs", default_words="`0`", reason="""
        How many GPUs have to answer at least, beside those that were there at the agent's start.
        """)] = None
    memory_used: Annotated[Size | None, setting(ge=0, default_words='`"2 GiB"`', reason="""
        How much of a GPU's memory may be in use while no job has it: the driver itself uses some
        hundred MiB.""")] = None
    codes: Annotated[tuple[str, ...] | None, setting(
        check=_code, default_words=f"`{json.dumps(CODES)}`", reason="""
        The Xid errors after which a node gets no job until a person has looked at it.""")] = None
    log: Annotated[Path | None, setting(default_words=f"`{KMSG}`", reason="""
        The kernel's log, or a file in its form.""")] = None


def _check_user(user: "User") -> str:
    try:
        parse_limits(user.limits)
    except InvalidRequestError as error:
        return f"`limits`: {error}"
    if user.name == EVERYONE and "root" in user.accounts:
        return (
            f"`accounts` gives root to {EVERYONE!r}, which is everyone; give it to submitters by "
            "their names"
        )
    return ""


class User(Table, frozen=True):
    """The accounts that a submitter's jobs run as."""

    rules = (Rule(("name", "accounts", "limits"), _check_user),)

    name: Annotated[str, setting(check=_printable, reason="""
        The submitter, by the name that the server knows its callers by; `*` is everyone without an
        entry.""")]
    accounts: Annotated[tuple[str, ...], setting(
        check=_printable, default_words="the account of the same name", reason="""
        The accounts of this node that its jobs may run as: the first, or the one that `rdzvctl
        submit --user` asks for. Root has to be named here, and never for `*`.""")] = ()
    umask: Annotated[str, setting(check=parse_umask, reason="""
        The umask of its processes, in octal.""")] = "0022"
    limits: Annotated[Mapping[str, str], setting(reason="""
        The limits of its processes, such as nofile = "1024:65536", core = "0" or memlock =
        "unlimited", by the names of setrlimit(2). PAM is not consulted.""")] = NOTHING


class Job(Table, frozen=True):
    """A job named in the file itself."""

    args: Annotated[tuple[str, ...], setting(reason="""
        The arguments of rdzvrun, with --rdzv-id, the script and its own arguments.""")]


# ---------------------------------------------------------------------- tables


class Tls(Table, frozen=True):
    """The files for the agent's TLS connection."""

    ca: Annotated[Path | None, setting(
        default_words="`$RDZV_TLS_CA` if set; else connections are plain", reason="""
        Reach rdzvd by TLS: the CA of its certificate (PEM). These files are read again for each
        connection, so they may be renewed at any time.""")] = None
    cert: Annotated[Path | None, setting(default_words="`$RDZV_TLS_CERT` if set", reason="""
        The certificate of this node for rdzvd, with its `node_id`.""")] = None
    key: Annotated[Path | None, setting(default_words="`$RDZV_TLS_KEY` if set", reason="""
        The key of that certificate.""")] = None


class PreemptionSettings(Table, frozen=True):
    """How the agent learns that this machine is about to be taken away."""

    file: Annotated[Path | None, setting(reason="""
        When this file appears, this machine is about to be taken away: workers get a notice, and
        the node leaves its jobs. Its first line may be the seconds that are left.""")] = None
    command: Annotated[tuple[str, ...], setting(reason="""
        A program and its arguments that runs all the time, and exits with 0 when this machine is
        about to be taken away; its first line may be the seconds that are left. With any other code
        it is started again.""")] = ()
    deadline: Annotated[Duration, setting(ge=0, le=DAY, reason="""
        How much time is left after such a notice, if it does not tell.""")] = 30


class Logs(Table, frozen=True):
    """The retention of run folders."""

    keep: Annotated[Duration, setting(ge=0, le=3650 * DAY, reload=True, reason="""
        How long the folder of a run is kept after its last change.""")] = 14 * DAY
    keep_size: Annotated[Size, setting(ge=0, reload=True, reason="""
        How much of the disk the folders of all runs may take; above it, the oldest of the ended
        ones are removed.""")] = 20 * GIB
# fmt: on


# ---------------------------------------------------------------------- rules


def _check_labels(settings: "AgentSettings") -> str:
    for name, value in settings.labels.items():
        if not LABEL.fullmatch(name):
            return (
                f"`labels` has the name {name!r}, which no job could ask for; give 1 to 128 "
                "letters, digits and . _ / -, of which the first is a letter or a digit"
            )
        if len(value) > LABEL_CHARS:
            return (
                f"`labels` has a value of {len(value)} characters, that of {name}; give at most "
                f"{LABEL_CHARS}"
            )
    return ""


def _check_env(settings: "AgentSettings") -> str:
    for name, value in settings.env.items():
        if not VARIABLE.fullmatch(name):
            return (
                f"`env` has {name!r}, which is not a name of a variable; give letters, digits and "
                "_, not beginning with a digit"
            )
        if "\0" in value:
            return f"`env` has {name!r}, whose value has a NUL character; leave it out"
        if name in WORKERS_OWN:
            return f"`env` has {name}, of which every worker gets its own; leave it out"
        if name == "CUDA_VISIBLE_DEVICES":
            return f"`env` has {name}, but every job is given its GPUs; name those in `gpus`"
    return ""


def _check_python(settings: "AgentSettings") -> str:
    if settings.python is not None and shutil.which(settings.python) is None:
        return (
            f"`python` = {str(settings.python)!r} is not a program on this node; name an "
            "interpreter"
        )
    return ""


def _check_account(settings: "AgentSettings") -> str:
    if settings.account is not None and settings.user:
        return (
            f"`account` = {settings.account!r} and [[user]] both say what submitted jobs run as; "
            "leave `account` out"
        )
    return ""


def why_not_here(settings: "AgentSettings") -> str:
    """Return why an rdzv-agent under this process's account cannot start; empty if it can."""
    account, own = settings.account, own_account()
    if account is not None and account != own:
        return (
            f"`account` = {account!r} is not the one that rdzv-agent runs as, {own}; leave it out, "
            f"run rdzv-agent as {account}, or run it as root with [[user]] entries that name "
            f"{account}"
        )
    if account is None and os.geteuid() == 0 and not (settings.job or settings.user):
        return (
            "rdzv-agent runs as root, and so would every job that anyone submits; say in [[user]] "
            "what they run as, run it as another user, or, if that is what you want, say account = "
            '"root"'
        )
    return ""


def _check_users(settings: "AgentSettings") -> str:
    names = [user.name for user in settings.user]
    for name in names:
        if names.count(name) > 1:
            return f"two [[user]] have the name {name!r}; put the accounts of both into one"
    if settings.user and settings.job:
        return "[[user]] is for submitted jobs, and this agent has [[job]]; leave either out"
    for user in settings.user if os.geteuid() != 0 else ():
        for account in user.accounts:
            if account != own_account():
                return (
                    f"[[user]] {user.name!r} has the account {account!r}, but rdzv-agent runs as "
                    f"{own_account()}, and only root can start jobs as others; run it as root, or "
                    "leave that account out"
                )
    return ""


def _check_metrics_listen(settings: "AgentSettings") -> str:
    listen = settings.metrics_listen
    if listen is None or listen.loopback or settings.insecure:
        return ""
    return (
        f"`metrics_listen` = {str(listen)!r} can be reached from other machines, and nothing there "
        "is encrypted or authenticated; listen on loopback, or say insecure = true if everyone who "
        "reaches it may read the numbers of this node"
    )


def _check_health(settings: "AgentSettings") -> str:
    if settings.health and settings.job:
        return (
            "`health` is for an agent that takes submitted jobs, and this one has `job`; leave "
            "either out"
        )
    return ""


# fmt: off
class AgentSettings(Table, frozen=True, kw_only=True):
    """All settings of agent.toml."""

    program = "rdzv-agent"
    rules = (
        Rule(("node_id",), _check_default_node_id),
        Rule(("labels",), _check_labels),
        Rule(("env",), _check_env),
        Rule(("python",), _check_python),
        Rule(("account", "user"), _check_account),
        Rule(("user", "job"), _check_users),
        Rule(("health", "job"), _check_health),
        Rule(("metrics_listen", "insecure"), _check_metrics_listen),
    )

    server: Annotated[str, setting(unit="HOST:PORT", check=parse_endpoints, reason="""
        The address of rdzvd; several with commas between them, if they share an etcd.""")]
    token_file: Annotated[Path | None, setting(default_words="`$RDZV_TOKEN_FILE` if set", reason="""
        The token for rdzvd, where nodes have no certificates of their own; it is sent only by TLS,
        or to this machine.""")] = None
    node_id: Annotated[str, setting(
        check=_name, default_words="`$RDZV_NODE_ID` if set, else the host name", reason="""
        The name of this node in every job; no two nodes of a server have the same.""",
    )] = os.environ.get("RDZV_NODE_ID") or socket.gethostname()
    address: Annotated[str | None, setting(
        check=_printable, default_words="its address towards the server", reason="""
        The host name or address at which other nodes reach this one.""")] = None
    topology: Annotated[str | None, setting(check=_printable, reason="""
        This node's place in the network, such as its rack; a job gets nodes of one place if
        possible, and their ranks are next to each other.""")] = None
    capacity: Annotated[int, setting(ge=1, le=256, unit="jobs", reload=True, reason="""
        How many submitted jobs run here at once; GPUs are divided among them, CPUs and memory are
        not.""")] = 1
    gpus: Annotated[str, setting(check=_gpus, reason="""
        The GPUs that jobs may have: "nvml" for all that NVML names, "none", or UUIDs as
        `nvidia-smi -L` shows them, with commas between them.""")] = NVML
    python: Annotated[Path | None, setting(
        reload=True, default_words="the interpreter that runs rdzv-agent", reason="""
        The interpreter of jobs whose environment sets no PYTHON_EXEC.""")] = None
    account: Annotated[str | None, setting(
        default_words="the agent's own, unless that is root", reason="""
        The account that all submitted jobs run as. It can only be the agent's own; an agent that is
        root takes them only if this names root, or if there are [[user]] entries instead.""",
    )] = None
    state_dir: Annotated[Path, setting(
        default_words="`$STATE_DIRECTORY`, else `/var/lib/rdzv-agent` for root, else "
        "`~/.local/state/rdzv-agent`", reason="""
        The place of the folders of submitted jobs, with what their workers write.""",
    )] = _state_dir()
    runtime_dir: Annotated[Path, setting(
        default_words="`$RUNTIME_DIRECTORY`, else `/run/rdzv-agent` for root, else "
        "`$XDG_RUNTIME_DIR/rdzv-agent`", reason="""
        The place of the agent's short-lived files; a local disk or memory.""")] = _runtime_dir()
    restart_within: Annotated[Duration, setting(ge=1, le=HOUR, reload=True, reason="""
        When this agent is restarted on purpose: how long the server keeps its seats, and its
        workers run on, until the next agent starts.""")] = 5 * MINUTE
    metrics_listen: Annotated[Listen | None, setting(
        unit="HOST:PORT", default_words="nowhere", reason="""
        Serve /metrics and /healthz here; the server's /sd lists it, if other machines can reach it.
        Port 0 takes a free one. Any address but loopback needs `insecure`.""")] = None
    insecure: Annotated[bool, setting(reason="""
        Listen beyond loopback without encryption or authentication: everyone who reaches
        `metrics_listen` may read the numbers of this node.""")] = False
    pass_env: Annotated[tuple[str, ...], setting(check=_pattern, reload=True, reason="""
        The variables of the agent's own environment that submitted jobs get; a star at the end
        stands for any rest. They get no others.""")] = PASSED_ON
    log_level: Annotated[Literal["debug", "info", "warning", "error"], setting(
        reload=True, default_words="`$LOGLEVEL`, else `info`", reason="""
        The lowest level that is logged, to stderr.""")] = _log_level()
    log_format: Annotated[Literal["human", "json"], setting(reason="""
        Lines for people, or one JSON object a line.""")] = "human"
    labels: Annotated[Mapping[str, str], setting(check=_printable, reload=True, reason="""
        Labels that submitted jobs may ask for, such as gpu = h100.""")] = NOTHING
    env: Annotated[Mapping[str, str], setting(reload=True, reason="""
        Variables for every submitted job; those of the submission win.""")] = NOTHING
    drain_deadline: Annotated[Duration, setting(ge=0, le=DAY, reload=True, reason="""
        How long workers have to save and exit when SIGTERM ends the agent; then they are ended.""",
    )] = MINUTE
    tls: Tls
    preemption: PreemptionSettings
    logs: Logs
    health_interval: Annotated[Duration, setting(ge=0, le=DAY, reason="""
        How often the node checks itself while it has no job, so that `rdzvctl nodes` shows an
        unhealthy one before a job is placed there; 0: only when there is need.""",
    )] = 5 * MINUTE
    health: Annotated[tuple[HealthCheck, ...], setting(reason="""
        A check that the node has to pass before it takes a submitted job, and before it goes on
        after a failure of its workers.""")] = ()
    user: Annotated[tuple[User, ...], setting(reason="""
        What the jobs of a submitter run as; this needs an agent that is root. With any of these,
        this node declines the jobs of submitters that it has no account for.""")] = ()
    job: Annotated[tuple[Job, ...], setting(reason="""
        A job that this node takes part in of its own accord, with the agent's own environment. An
        agent with such jobs takes no submitted ones, and ends with them.""")] = ()
