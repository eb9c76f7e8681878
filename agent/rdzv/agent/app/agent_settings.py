"""rdzv-agent's configuration: the knobs that operators turn, and the `Config` that they make."""

from __future__ import annotations

import contextlib
import io
import os
import pwd
import re
import shutil
import socket
import stat
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from rdzv.agent.cli.options import parse_launch
from rdzv.agent.inventory.health import Check
from rdzv.agent.inventory.health_checks import Command, Disk, Gpus, Xids
from rdzv.agent.inventory.preemption import Preemption
from rdzv.agent.inventory.resources import NONE, NVML, parse_gpus
from rdzv.agent.inventory.xid import CODES, KMSG, Lifted
from rdzv.agent.launch.launch import Launch, check_startable
from rdzv.agent.server_link.placed_jobs import passed_on
from rdzv.agent.system.accounts import (
    EVERYONE,
    Accounts,
    SubmitterRule,
    own_account,
    parse_limits,
    parse_umask,
)
from rdzv.core.placement import Resources
from rdzv.errors import InvalidRequestError
from rdzv.launch_options.job_options import (
    LABEL,
    LABEL_CHARS,
    VARIABLE,
    WORKERS_OWN,
    check_printable,
)
from rdzv.settings.toml_settings import Kind, Knob, Knobs, Rule, Values, load
from rdzv.structs import struct
from rdzv.transport.channels import PLAIN, Credentials
from rdzv.transport.endpoints import Endpoint, Listen, parse_endpoints

DEFAULT_FILE = Path("/etc/rdzv/agent.toml")

HOUR = 3_600
DAY = 24 * HOUR
GIB = 1 << 30

PASSED_ON = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_*", "TZ", "TMPDIR"),
    "LD_LIBRARY_PATH",
)
"""What a job gets of the agent's own environment, unless the configuration says otherwise."""

_NODE_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:@-]{0,127}")
_PATTERN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\*?|\*")


# ---------------------------------------------------------------------- what a value may be


def _name(text: str) -> None:
    if not _NODE_ID.fullmatch(text):
        raise InvalidRequestError(
            "it is no name of a node; give 1 to 128 letters, digits and . _ : @ -, of which the "
            "first is a letter, a digit or _"
        )


def _printable(text: str) -> None:
    check_printable("it", text)


def _gpus(text: str) -> None:
    if text not in (NVML, NONE):
        parse_gpus(text)


def _pattern(text: str) -> None:
    if not _PATTERN.fullmatch(text):
        raise InvalidRequestError(
            f"{text!r} is no name of a variable; give one, which may end in a star, such as LC_*"
        )


def _check_labels(values: Values) -> str:
    for name, value in values.table("labels").items():
        if not LABEL.fullmatch(name):
            return (
                f"`labels` has the name {name!r}, which nobody could ask for; give 1 to 128 "
                "letters, digits and . _ / -, of which the first is a letter or a digit"
            )
        if len(value) > LABEL_CHARS:
            return (
                f"`labels` has a value of {len(value)} characters, that of {name}; give at most "
                f"{LABEL_CHARS}"
            )
    return ""


def _check_env(values: Values) -> str:
    for name, value in values.table("env").items():
        if not VARIABLE.fullmatch(name):
            return (
                f"`env` has {name!r}, which is no name of a variable; give letters, digits and _, "
                "not beginning with a digit"
            )
        if "\0" in value:
            return f"`env` has {name!r}, whose value has a NUL character; leave it out"
        if name in WORKERS_OWN:
            return f"`env` has {name}, of which every worker is given its own; leave it out"
        if name == "CUDA_VISIBLE_DEVICES":
            return f"`env` has {name}, but every job is given its GPUs; name those in `gpus`"
    return ""


def _check_python(values: Values) -> str:
    python = values.get("python", Path)
    if shutil.which(python) is None:
        return f"`python` = {str(python)!r} is no program on this node; name an interpreter"
    return ""


def _check_account(values: Values) -> str:
    account = values.maybe("account", str)
    if account is not None and values.tables("user"):
        return (
            f"`account` = {account!r} and [[user]] both say what submitted jobs run as; leave "
            "`account` out"
        )
    return ""


def why_not_here(values: Values) -> str:
    """Say why an rdzv-agent of this process's account does not start; empty: it does."""
    account, own = values.maybe("account", str), own_account()
    if account is not None and account != own:
        return (
            f"`account` = {account!r} is not the one that rdzv-agent runs as, {own}; leave it out, "
            f"run rdzv-agent as {account}, or run it as root with [[user]] entries that name "
            f"{account}"
        )
    if (
        account is None
        and os.geteuid() == 0
        and not (values.tables("job") or values.tables("user"))
    ):
        return (
            "rdzv-agent runs as root, and so would every job that anyone submits; say in [[user]] "
            "what they run as, run it as another user, or, if that is what you want, say account = "
            '"root"'
        )
    return ""


def _check_users(values: Values) -> str:
    users = values.tables("user")
    names = [user.get("name", str) for user in users]
    for name in names:
        if names.count(name) > 1:
            return f"two [[user]] have the name {name!r}; put the accounts of both into one"
    if users and values.tables("job"):
        return "[[user]] is for submitted jobs, and this agent has [[job]]; leave either out"
    for user in users if os.geteuid() != 0 else ():
        for account in user.strings("accounts"):
            if account != own_account():
                return (
                    f"[[user]] {user.get('name', str)!r} has the account {account!r}, but "
                    f"rdzv-agent runs as {own_account()}, and only root can start jobs as others; "
                    "run it as root, or leave that account out"
                )
    return ""


def _check_user(values: Values) -> str:
    try:
        parse_limits(values.table("limits"))
    except InvalidRequestError as error:
        return f"`limits`: {error}"
    if values.get("name", str) == EVERYONE and "root" in values.strings("accounts"):
        return (
            f"`accounts` gives root to {EVERYONE!r}, which is everyone; give it to submitters by "
            "their names"
        )
    return ""


def _check_metrics_listen(values: Values) -> str:
    text = values.maybe("metrics_listen", str)
    if text is None or Listen.parse(text).loopback or values.get("insecure", bool):
        return ""
    return (
        f"`metrics_listen` = {text!r} can be reached from other machines, and nothing there is "
        "encrypted or authenticated; listen on loopback, or say insecure = true if everyone who "
        "reaches it may read the numbers of this node"
    )


def _check_health(values: Values) -> str:
    if values.tables("health") and values.tables("job"):
        return (
            "`health` is for an agent that takes submitted jobs, and this one has `job`; leave "
            "either out"
        )
    return ""


# ---------------------------------------------------------------------- defaults


def default_state_dir() -> Path:
    """Return where runs are kept if nobody says otherwise."""
    return _place("STATE_DIRECTORY", "/var/lib", "XDG_STATE_HOME", "~/.local/state")


def default_runtime_dir() -> Path:
    """Return where this agent's own short-lived files are if nobody says otherwise."""
    return _place("RUNTIME_DIRECTORY", "/run", "XDG_RUNTIME_DIR", f"/tmp/rdzv-{os.geteuid()}")


def _place(of_systemd: str, of_root: str, of_user: str, else_: str) -> Path:
    if given := os.environ.get(of_systemd):
        return Path(given.split(":", maxsplit=1)[0])
    if os.geteuid() == 0:
        return Path(of_root) / "rdzv-agent"
    return Path(os.environ.get(of_user) or else_).expanduser() / "rdzv-agent"


def _default_log_level() -> str:
    level = os.environ.get("LOGLEVEL", "").lower()
    return level if level in _LEVELS else "info"


_LEVELS = ("debug", "info", "warning", "error")

_JOB = Knobs(
    "rdzv-agent",
    (
        Knob(
            key="args",
            kind=Kind.STRINGS,
            required=True,
            reason="rdzvrun's arguments, with --rdzv-id, the script and its own arguments.",
        ),
    ),
)

_OF_CHECK = {
    "command": ("command",),
    "disk": ("path", "min_free", "min_free_percent"),
    "gpu": ("count", "memory_used"),
    "xid": ("codes", "log"),
}
"""Which knobs each kind of check has beside its `name` and `timeout`."""


def _check_knobs_of_check(values: Values) -> str:
    kind = values.get("check", str)
    mine = ("check", "name", "timeout", *_OF_CHECK[kind])
    for key in values.sources:
        if key not in mine:
            return f"`{key}` is none of a check {kind}; leave it out, or see docs/health.md"
    if kind == "command" and not values.strings("command"):
        return "`command` is missing, or empty; give the program and its arguments"
    if kind == "disk":
        if values.maybe("path", Path) is None:
            return "`path` is missing; name a folder on the disk that is to have room"
        if not values.maybe("min_free", int) and not values.maybe("min_free_percent", float):
            return "`min_free` or `min_free_percent` is missing; say how much room there has to be"
    return ""


def _code(text: str) -> None:
    if not text.isascii() or not text.isdecimal():
        raise InvalidRequestError(f'{text!r} is no number of an Xid; give such as "79"')


_HEALTH = Knobs(
    "rdzv-agent",
    (
        Knob(
            key="check",
            kind=Kind.STR,
            required=True,
            choices=tuple(_OF_CHECK),
            reason="What is looked at: a command of yours, room on a disk, whether GPUs answer and "
            "are not in use, or the kernel's log of their errors.",
        ),
        Knob(
            key="name",
            kind=Kind.STR,
            parse=_printable,
            default_words="the kind, with the path or the program",
            reason="What the check is called where its result is shown.",
        ),
        Knob(
            key="timeout",
            kind=Kind.DURATION,
            default=10,
            least=0.1,
            most=15,
            reason="How long it may take; longer, and it has failed. The other nodes of a job wait "
            "for it when workers have failed here.",
        ),
        Knob(
            key="command",
            kind=Kind.STRINGS,
            reason="The program and its arguments. The node is well if it exits 0; what it printed "
            "last is the reason if not. RDZV_UNUSED_GPUS names the GPUs that no job has.",
        ),
        Knob(key="path", kind=Kind.PATH, reason="A folder on the disk that is to have room."),
        Knob(
            key="min_free",
            kind=Kind.SIZE,
            least=0,
            reason="How much of the disk has to be free for others than root.",
        ),
        Knob(
            key="min_free_percent",
            kind=Kind.FLOAT,
            unit="percent",
            least=0,
            most=100,
            reason="The same as a share of the disk.",
        ),
        Knob(
            key="count",
            kind=Kind.INT,
            default=0,
            least=0,
            most=1_024,
            unit="GPUs",
            reason="How many have to answer at least, beside those that there were at the agent's "
            "start.",
        ),
        Knob(
            key="memory_used",
            kind=Kind.SIZE,
            default=2 * GIB,
            least=0,
            reason="How much of a GPU's memory may be in use while no job has it: the driver's own "
            "share is some hundred MiB.",
        ),
        Knob(
            key="codes",
            kind=Kind.STRINGS,
            default=CODES,
            parse=_code,
            reason="The Xid errors after which a node gets no job until somebody has looked at it.",
        ),
        Knob(
            key="log",
            kind=Kind.PATH,
            default=KMSG,
            default_words=f"`{KMSG}`",
            reason="The kernel's log, or a file in its form.",
        ),
    ),
    (Rule(("check", "command", "path", "min_free", "min_free_percent"), _check_knobs_of_check),),
)

_USER = Knobs(
    "rdzv-agent",
    (
        Knob(
            key="name",
            kind=Kind.STR,
            required=True,
            parse=_printable,
            reason="Who submits, by the name that the server knows its callers by; `*` is everyone "
            "that has no entry.",
        ),
        Knob(
            key="accounts",
            kind=Kind.STRINGS,
            default_words="the account of the same name",
            parse=_printable,
            reason="The accounts of this node that its jobs may run as: the first, or the one that "
            "`rdzvctl submit --user` asks for. Root has to be named here, and never for `*`.",
        ),
        Knob(
            key="umask",
            kind=Kind.STR,
            default="0022",
            parse=parse_umask,
            reason="The umask of its processes, in octal.",
        ),
        Knob(
            key="limits",
            kind=Kind.TABLE,
            reason='The limits of its processes, such as nofile = "1024:65536", core = "0" or '
            'memlock = "unlimited", by the names of setrlimit(2). PAM has no say.',
        ),
    ),
    (Rule(("name", "accounts", "limits"), _check_user),),
)

KNOBS = Knobs(
    "rdzv-agent",
    (
        Knob(
            key="server",
            kind=Kind.STR,
            required=True,
            unit="HOST:PORT",
            parse=parse_endpoints,
            reason="Where rdzvd is; several with commas between them, if they share an etcd.",
        ),
        Knob(
            key="token_file",
            kind=Kind.PATH,
            default_words="`$RDZV_TOKEN_FILE` if set",
            reason="The token that rdzvd is sent, where nodes have no certificates of their own; "
            "only by TLS, or to this machine.",
        ),
        Knob(
            key="node_id",
            kind=Kind.STR,
            default=socket.gethostname(),
            default_words="the host name",
            parse=_name,
            reason="What this node is called in every job; no two nodes of a server have one name.",
        ),
        Knob(
            key="address",
            kind=Kind.STR,
            default_words="its address towards the server",
            parse=_printable,
            reason="Where other nodes reach this one: a host name or an address.",
        ),
        Knob(
            key="topology",
            kind=Kind.STR,
            parse=_printable,
            reason="This node's place in the network, such as its rack; a job's nodes are chosen "
            "from one place if possible, and sit together.",
        ),
        Knob(
            key="capacity",
            kind=Kind.INT,
            default=1,
            least=1,
            most=256,
            unit="jobs",
            reload=True,
            reason="How many submitted jobs run here at once; GPUs are shared out among them, "
            "CPUs and memory are not.",
        ),
        Knob(
            key="gpus",
            kind=Kind.STR,
            default=NVML,
            parse=_gpus,
            reason='The GPUs that jobs may have: "nvml" for all that NVML names, "none", or UUIDs '
            "as `nvidia-smi -L` shows them, with commas between them.",
        ),
        Knob(
            key="python",
            kind=Kind.PATH,
            default=Path(sys.executable),
            default_words="the interpreter that runs rdzv-agent",
            reload=True,
            reason="The interpreter of jobs whose environment sets no PYTHON_EXEC.",
        ),
        Knob(
            key="account",
            kind=Kind.STR,
            default_words="the agent's own, unless that is root",
            reason="The account that all submitted jobs run as. It can only be the agent's own; an "
            "agent that is root takes them only if this names root, or if there are [[user]] "
            "entries instead.",
        ),
        Knob(
            key="state_dir",
            kind=Kind.PATH,
            default=default_state_dir(),
            default_words="`$STATE_DIRECTORY`, else `/var/lib/rdzv-agent` for root, else "
            "`~/.local/state/rdzv-agent`",
            reason="Where the folders of submitted jobs are, with what their workers write.",
        ),
        Knob(
            key="runtime_dir",
            kind=Kind.PATH,
            default=default_runtime_dir(),
            default_words="`$RUNTIME_DIRECTORY`, else `/run/rdzv-agent` for root, else "
            "`$XDG_RUNTIME_DIR/rdzv-agent`",
            reason="Where the agent's short-lived files are; a local disk or memory.",
        ),
        Knob(
            key="restart_within",
            kind=Kind.DURATION,
            default=5 * 60,
            least=1,
            most=HOUR,
            reload=True,
            reason="When this agent is restarted on purpose: how long the server keeps its seats, "
            "and its workers run on, until the next one is there.",
        ),
        Knob(
            key="metrics_listen",
            kind=Kind.STR,
            unit="HOST:PORT",
            parse=Listen.parse,
            default_words="nowhere",
            reason="Answer /metrics and /healthz here; the server's /sd lists it, where others can "
            "reach it. Port 0 takes a free one. Other than loopback only with `insecure`.",
        ),
        Knob(
            key="insecure",
            kind=Kind.BOOL,
            default=False,
            reason="Listen beyond loopback although nothing is encrypted or authenticated: whoever "
            "reaches `metrics_listen` may read the numbers of this node.",
        ),
        Knob(
            key="pass_env",
            kind=Kind.STRINGS,
            default=PASSED_ON,
            parse=_pattern,
            reload=True,
            reason="The variables of the agent's own environment that submitted jobs get; a star "
            "at the end stands for any rest. They get no others.",
        ),
        Knob(
            key="log_level",
            kind=Kind.STR,
            default=_default_log_level(),
            default_words="`$LOGLEVEL`, else `info`",
            choices=_LEVELS,
            reload=True,
            reason="The least that is logged, to stderr.",
        ),
        Knob(
            key="log_format",
            kind=Kind.STR,
            default="human",
            choices=("human", "json"),
            reason="Lines for eyes, or one JSON object a line.",
        ),
        Knob(
            key="labels",
            kind=Kind.TABLE,
            parse=_printable,
            reload=True,
            reason="What submitted jobs may ask of a node by name, such as gpu = h100.",
        ),
        Knob(
            key="env",
            kind=Kind.TABLE,
            reload=True,
            reason="What is in the environment of every submitted job; what is submitted wins.",
        ),
        Knob(
            key="drain_deadline",
            kind=Kind.DURATION,
            default=60,
            least=0,
            most=DAY,
            reload=True,
            reason="How long workers have to save and exit when SIGTERM ends the agent; then they "
            "are ended.",
        ),
        Knob(
            key="tls.ca",
            kind=Kind.PATH,
            default_words="`$RDZV_TLS_CA` if set; else connections are plain",
            reason="Reach rdzvd by TLS: the CA of its certificate (PEM). These files "
            "are read anew for each connection, so that they may be renewed at any time.",
        ),
        Knob(
            key="tls.cert",
            kind=Kind.PATH,
            default_words="`$RDZV_TLS_CERT` if set",
            reason="The certificate that rdzvd is shown: of this node, by its `node_id`.",
        ),
        Knob(
            key="tls.key",
            kind=Kind.PATH,
            default_words="`$RDZV_TLS_KEY` if set",
            reason="The key of that certificate.",
        ),
        Knob(
            key="preemption.file",
            kind=Kind.PATH,
            reason="When this file appears, this machine is about to be taken away: workers are "
            "told, and the node leaves its jobs. Its first line may be the seconds that are left.",
        ),
        Knob(
            key="preemption.command",
            kind=Kind.STRINGS,
            reason="A program and its arguments that runs all the time, and exits with 0 when this "
            "machine is about to be taken away; its first line may be the seconds that are left. "
            "With any other code it is started again.",
        ),
        Knob(
            key="preemption.deadline",
            kind=Kind.DURATION,
            default=30,
            least=0,
            most=DAY,
            reason="How much time there is after such word if it is not said.",
        ),
        Knob(
            key="logs.keep",
            kind=Kind.DURATION,
            default=14 * DAY,
            least=0,
            most=3650 * DAY,
            reload=True,
            reason="How long the folder of a run is kept after its last change.",
        ),
        Knob(
            key="logs.keep_size",
            kind=Kind.SIZE,
            default=20 * GIB,
            least=0,
            reload=True,
            reason="How much the folders of all runs may take of the disk; above it, the oldest "
            "of those that have ended go.",
        ),
        Knob(
            key="health_interval",
            kind=Kind.DURATION,
            default=5 * 60,
            least=0,
            most=DAY,
            reason="How often the node looks at itself while no job is on it, so that `rdzvctl "
            "nodes` shows one that has become ill before a job is placed there; 0: only when "
            "there is need.",
        ),
        Knob(
            key="health",
            kind=Kind.TABLES,
            each=_HEALTH,
            reason="A check that the node has to pass before it takes up a submitted job, and "
            "before it goes on after a failure of its workers.",
        ),
        Knob(
            key="user",
            kind=Kind.TABLES,
            each=_USER,
            reason="What the jobs of a submitter run as, which takes an agent that is root. With "
            "any of these, this node declines the jobs of submitters that it has no account for.",
        ),
        Knob(
            key="job",
            kind=Kind.TABLES,
            each=_JOB,
            reason="A job that this node takes part in of its own accord, with the agent's own "
            "environment. An agent with such jobs takes no submitted ones, and ends with them.",
        ),
    ),
    rules=(
        Rule(("labels",), _check_labels),
        Rule(("env",), _check_env),
        Rule(("python",), _check_python),
        Rule(("account", "user"), _check_account),
        Rule(("user", "job"), _check_users),
        Rule(("health", "job"), _check_health),
        Rule(("metrics_listen", "insecure"), _check_metrics_listen),
    ),
)


# ---------------------------------------------------------------------- the whole


@struct(frozen=True)
class Config:
    """What one rdzv-agent is configured with."""

    values: Values
    endpoints: tuple[Endpoint, ...]
    launches: tuple[Launch, ...] = ()
    """The jobs that the file itself names; none: it takes submitted ones."""
    credentials: Credentials = PLAIN
    """What is trusted and shown when it connects."""

    @property
    def node_id(self) -> str:
        """What this node is called."""
        return self.values.get("node_id", str)

    @property
    def state_dir(self) -> Path:
        """Where the folders of runs are."""
        return self.values.get("state_dir", Path)

    @property
    def runtime_dir(self) -> Path:
        """Where short-lived files are."""
        return self.values.get("runtime_dir", Path)

    @property
    def log_level(self) -> str:
        """The least that is logged."""
        return self.values.get("log_level", str)

    @property
    def metrics_listen(self) -> Listen | None:
        """Where /metrics is answered; None: nowhere."""
        text = self.values.maybe("metrics_listen", str)
        return None if text is None else Listen.parse(text)

    @property
    def labels(self) -> Mapping[str, str]:
        """What jobs may ask of this node by name."""
        return self.values.table("labels")

    @property
    def drain_deadline_ms(self) -> int:
        """How long workers have when SIGTERM ends the agent."""
        return self.values.ms("drain_deadline")

    @property
    def preemption(self) -> Preemption:
        """Where word comes from that this machine is about to be taken away."""
        values = self.values
        return Preemption(
            file=values.maybe("preemption.file", Path),
            command=values.strings("preemption.command"),
            left_ms=values.ms("preemption.deadline"),
        )

    @property
    def capacity(self) -> int:
        """How many submitted jobs run here at once."""
        return self.values.get("capacity", int)

    @property
    def accounts(self) -> Accounts:
        """What submitted jobs run as."""
        return Accounts(
            [
                SubmitterRule(
                    submitter=user.get("name", str),
                    accounts=user.strings("accounts"),
                    umask=parse_umask(user.get("umask", str)),
                    limits=parse_limits(user.table("limits")),
                )
                for user in self.values.tables("user")
            ]
        )

    def checks(self, resources: Resources, own: Mapping[str, str]) -> list[Check]:
        """Return the checks that this node has to pass; commands get `own` environment."""
        return [self._check(values, resources, own) for values in self.values.tables("health")]

    def _check(self, values: Values, resources: Resources, own: Mapping[str, str]) -> Check:
        kind, timeout_s = values.get("check", str), values.ms("timeout") / 1000
        name = values.maybe("name", str)
        match kind:
            case "command":
                args = values.strings("command")
                name = name or f"command {Path(args[0]).name}"
                return Command(name, timeout_s, args, own)
            case "disk":
                path = values.get("path", Path)
                least = values.maybe("min_free", int) or 0
                percent = values.maybe("min_free_percent", float) or 0.0
                return Disk(name or f"disk {path}", timeout_s, path, least, percent)
            case "gpu":
                uuids = [gpu.uuid for gpu in resources.gpus]
                count, used = values.get("count", int), values.get("memory_used", int)
                return Gpus(name or "gpu", timeout_s, uuids, count, used)
            case _:
                lifted = Lifted(self.state_dir / "xid-lifted.json")
                log = values.get("log", Path)
                return Xids(name or "xid", timeout_s, values.strings("codes"), log, lifted)

    def job_environ(self, own: Mapping[str, str]) -> dict[str, str]:
        """Return what every submitted job gets, of `own` and beside it."""
        environ = {
            **_account_environ(),
            **passed_on(own, self.values.strings("pass_env")),
            **self.values.table("env"),
        }
        if "python" in self.values.sources:
            environ.setdefault("PYTHON_EXEC", str(self.values.get("python", Path)))
        return environ


def _account_environ() -> dict[str, str]:
    """Return what a login would set, for services that were started without it."""
    environ = {"PATH": os.defpath}
    try:
        account = pwd.getpwuid(os.geteuid())
    except KeyError:
        return environ
    names = {"USER": account.pw_name, "LOGNAME": account.pw_name}
    return environ | names | {"HOME": account.pw_dir, "SHELL": account.pw_shell or "/bin/sh"}


def check_state_dir(config: Config) -> None:
    """See whether the folder of runs can be made and written; none is made.

    The other folder is not looked at: what runs the agent as a service makes it at each start.

    Raises:
        InvalidRequestError: it can not.

    """
    path = config.state_dir
    if config.values.tables("user"):
        for place in (path, config.runtime_dir):
            _check_passable(place)
    above = next(place for place in (path, *path.parents) if os.path.lexists(place))
    try:
        # Whatever stands in the way, permissions are only a part of it.
        with tempfile.TemporaryFile(dir=above):
            pass
    except OSError as error:
        where = "" if above == path else f" in {above}"
        done = "written" if above == path else "made"
        raise InvalidRequestError(
            f"`state_dir` = {str(path)!r} can not be {done}{where}: {error.strerror}; give another"
        ) from error


def _check_passable(path: Path) -> None:
    """Refuse a folder that the accounts of jobs can not pass through to what is theirs below it."""
    for place in (path, *path.parents):
        if os.path.lexists(place) and not place.stat().st_mode & stat.S_IXOTH:
            raise InvalidRequestError(
                f"jobs run as the accounts of [[user]], which can not enter {str(place)!r} on "
                f"their way to their own folders in {str(path)!r}; let others pass: chmod o+x "
                f"{place} (in the unit: StateDirectoryMode=0711)"
            )


def read_config(path: Path, *, for_another: bool = False) -> Config:
    """Read and check a configuration; `for_another`: of an agent that another account starts.

    Raises:
        InvalidRequestError: it can not be read, or a value makes no sense; all that is wrong is
            named.

    """
    values = load(KNOBS, path)
    if not for_another and (why := why_not_here(values)):
        raise InvalidRequestError(f"{path}: {why}")
    endpoints = parse_endpoints(values.get("server", str))
    try:
        launches = _read_jobs(values, endpoints)
        credentials = Credentials.parse(_files(values), os.environ)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{path}: {error}") from error
    return Config(values, endpoints, launches, credentials)


def _files(values: Values) -> dict[str, Path | None]:
    keys = {"ca": "tls.ca", "cert": "tls.cert", "key": "tls.key", "token_file": "token_file"}
    return {name: values.maybe(key, Path) for name, key in keys.items()}


def _read_jobs(values: Values, endpoints: tuple[Endpoint, ...]) -> tuple[Launch, ...]:
    node_id = values.get("node_id", str)
    launches = tuple(
        _read_job(job.strings("args"), endpoints, node_id) for job in values.tables("job")
    )
    names = [launch.job.rdzv_id for launch in launches]
    for name in names:
        if names.count(name) > 1:
            raise InvalidRequestError(f"two [[job]] have the --rdzv-id {name}; rename one")
    return launches


def _read_job(args: tuple[str, ...], endpoints: tuple[Endpoint, ...], node_id: str) -> Launch:
    servers = ",".join(map(str, endpoints))
    given = list(args)
    said = io.StringIO()
    try:
        # A usage, or a help, of which only the reason is of use here.
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            launch, meeting = parse_launch(
                [
                    *("--rdzv-backend=rdzv", f"--rdzv-endpoint={servers}"),
                    *(f"--node-id={node_id}", *given),
                ]
            )
    except SystemExit as error:
        _, _, why = said.getvalue().rpartition("error: ") if error.code else ("", "", "")
        raise InvalidRequestError(
            f"args {given} are not rdzvrun's{': ' if why else ''}{why.strip()}; see rdzvrun --help "
            "for what it takes"
        ) from error
    if any((meeting.files or {}).values()):
        raise InvalidRequestError(
            f"args {given} have credentials of their own, and a node has one connection; leave "
            "--tls-* and --token-file to `tls` and `token_file`"
        )
    check_startable(launch)
    if launch.job.node_id != node_id or meeting.endpoints != endpoints:
        raise InvalidRequestError(
            f"args {given} name a node or a server of their own; leave --node-id, "
            "--rdzv-endpoint and --standalone to `node_id` and `server`"
        )
    return launch
