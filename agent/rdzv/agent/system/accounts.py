"""This node's accounts under which submitted jobs run, and how to act with their rights.

`[[user]]` in agent.toml maps submitters' names to accounts; without any such entry, jobs run as the
agent itself. Only root can start processes under another account. No file of a job is opened or
created, and no program of a job is run, with root's rights: processes are started through
`started_as`, and files are accessed inside `acting_as`. So links or pipes created by a job give it
no access that its account does not have.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import resource
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

from rdzv import bounds
from rdzv.agent.runner.system import Identity, acting_as
from rdzv.errors import InvalidRequestError
from rdzv.structs import setting, struct

__all__ = [
    "EVERYONE",
    "Account",
    "Accounts",
    "Identity",
    "User",
    "acting_as",
    "identity_of_owner",
    "name_of",
    "open_untrusted",
    "own_account",
    "started_as",
    "write_anew",
]

EVERYONE = "*"
"""Matches every submitter that no other entry names."""

LEAST_UID = 1_000
"""Lower uids are service accounts, which no submitter can use merely by having the same name."""

UNLIMITED = "unlimited"

NOTHING: Mapping[str, str] = MappingProxyType({})

LIMITS = tuple(
    sorted(name.removeprefix("RLIMIT_").lower() for name in dir(resource) if "RLIMIT_" in name)
)
"""Resource limits that can be set, as in limits.conf(5) and systemd's `LimitNOFILE=`."""


@struct(frozen=True)
class Account:
    """An account on this node under which a job runs."""

    name: str
    home: str
    shell: str
    identity: Identity

    @property
    def environ(self) -> dict[str, str]:
        names = {"USER": self.name, "LOGNAME": self.name}
        return names | {"HOME": self.home, "SHELL": self.shell}


def parse_limits(table: Mapping[str, str]) -> tuple[tuple[str, int, int], ...]:
    """Parse limits: a number or "unlimited" for both, or SOFT:HARD.

    >>> parse_limits({"nofile": "1024:4096", "core": "0", "memlock": "unlimited"})
    (('nofile', 1024, 4096), ('core', 0, 0), ('memlock', -1, -1))
    """
    return tuple((name, *_parse_limit(name, text)) for name, text in table.items())


def _parse_limit(name: str, text: str) -> tuple[int, int]:
    if name not in LIMITS:
        raise InvalidRequestError(f"{name!r} cannot be limited; give one of {', '.join(LIMITS)}")
    first, _, second = text.partition(":")
    soft, hard = _parse_number(name, text, first), _parse_number(name, text, second or first)
    if hard >= 0 and not 0 <= soft <= hard:
        raise InvalidRequestError(
            f"{name} = {text!r} has a soft limit above the hard one; swap them"
        )
    return soft, hard


def _parse_number(name: str, text: str, part: str) -> int:
    if part == UNLIMITED:
        return resource.RLIM_INFINITY
    if not part.isascii() or not part.isdecimal() or int(part) >= 1 << 63:
        raise InvalidRequestError(
            f'{name} = {text!r} is not a limit; give a number, "{UNLIMITED}", or SOFT:HARD'
        )
    return int(part)


def parse_umask(text: str) -> int:
    """Parse an octal umask.

    >>> parse_umask("0027")
    23
    """
    if not text or set(text) - set("01234567") or int(text, 8) > 0o777:
        raise InvalidRequestError(f'{text!r} is not a umask; give octal digits, such as "0027"')
    return int(text, 8)


def _printable(text: str) -> None:
    bounds.label("the text", text)


# fmt: off
@struct(frozen=True)
class User:
    """The accounts under which a submitter's jobs run, as [[user]] in agent.toml says."""

    name: Annotated[str, setting(check=_printable, reason="""
        The submitter's name, as the server knows it; `*` stands for every submitter without an
        entry.""")]
    accounts: Annotated[tuple[str, ...], setting(
        check=_printable, default_words="the account of the same name", reason="""
        The accounts of this node that the submitter's jobs may run as: the first one, unless
        `rdzvctl submit --user` asks for another. Root must be listed explicitly, and never for `*`.
        """)] = ()
    umask: Annotated[str, setting(check=parse_umask, reason="""
        The umask of the jobs' processes, in octal.""")] = "0022"
    limits: Annotated[Mapping[str, str], setting(reason="""
        The resource limits of the jobs' processes, by the names of setrlimit(2), such as nofile =
        "1024:65536", core = "0" or memlock = "unlimited". PAM is not consulted.""")] = NOTHING
# fmt: on


class Accounts:
    """This node's mapping of submitters to accounts."""

    def __init__(
        self,
        users: Sequence[User] = (),
        find: Callable[[str], pwd.struct_passwd] = pwd.getpwnam,
        own_uid: int | None = None,
    ) -> None:
        """Map submitters by `users`; `find` looks up an account, on this machine by default."""
        self._rules = {user.name: user for user in users}
        self._find = find
        self._own_uid = os.geteuid() if own_uid is None else own_uid

    def account_for(self, submitter: str, wanted: str = "") -> Account | None:
        """Return the account for a submitter's job, or None for the agent's own account.

        `wanted` is the account that the job requests. May wait for a directory service. Raises
        `InvalidRequestError` if this node has no account for it; the message says what would help.
        """
        if not self._rules:
            if wanted not in ("", own_account()):
                raise InvalidRequestError(
                    f"it asks for the account {wanted!r}, but jobs run here as "
                    f"{own_account()}, the account of rdzv-agent; leave --user out, or "
                    "map its submitter in [[user]] of agent.toml"
                )
            return None
        if not submitter:
            raise InvalidRequestError(
                "its submitter is unknown, but this node maps submitters to accounts; "
                "submit it to a server that authenticates its callers"
            )
        rule = self._rules.get(submitter) or self._rules.get(EVERYONE)
        if rule is None:
            raise InvalidRequestError(
                f"no account is mapped to its submitter {submitter!r} on this node; an "
                "operator may add a [[user]] to agent.toml"
            )
        given = rule.accounts or (submitter,)
        name = wanted or given[0]
        if name not in given:
            raise InvalidRequestError(
                f"its submitter {submitter!r} may not run jobs as {name!r} on this node, only as "
                f"{', '.join(given)}"
            )
        return self._look_up(name, rule)

    def _look_up(self, name: str, rule: User) -> Account | None:
        try:
            found = self._find(name)
        except (KeyError, ValueError) as error:
            raise InvalidRequestError(
                f"this node has no account {name!r}; create one, or map its submitter to another"
            ) from error
        named = rule.name != EVERYONE and name in rule.accounts
        if found.pw_uid == 0 and not named:
            raise InvalidRequestError(
                f"it would run as root, because {name!r} is root here; an operator may "
                f"allow it for a submitter listed by name: accounts = [{name!r}] in its "
                "[[user]]"
            )
        if found.pw_uid < LEAST_UID and not rule.accounts and rule.name == EVERYONE:
            raise InvalidRequestError(
                f"{name!r} is a service account here (uid {found.pw_uid}), which no "
                "submitter gets by name alone; an operator may map it explicitly in a "
                "[[user]]"
            )
        if self._own_uid != 0:
            if found.pw_uid != self._own_uid:
                raise InvalidRequestError(
                    f"it would run as {name!r}, but rdzv-agent runs as {own_account()} "
                    "here, and only root can start jobs under other accounts; run "
                    "rdzv-agent as root"
                )
            return None
        groups = tuple(os.getgrouplist(found.pw_name, found.pw_gid))
        umask, limits = parse_umask(rule.umask), parse_limits(rule.limits)
        identity = Identity(found.pw_uid, found.pw_gid, groups, umask, limits)
        shell = found.pw_shell or "/bin/sh"
        return Account(found.pw_name, found.pw_dir or "/", shell, identity)


def own_account() -> str:
    return name_of(os.geteuid())


def name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


# ---------------------------------------------------------------------- acting as an account


@contextmanager
def started_as(account: Account | None, chdir: Path | None = None) -> Iterator[dict[str, Any]]:
    """Yield keyword arguments for `subprocess` to start a process under an account.

    They are valid only inside the body. Raises `OSError` if the account cannot enter the folder.
    """
    if account is None:
        yield {"cwd": chdir}
        return
    identity = account.identity
    how = {"user": identity.uid, "group": identity.gid, "extra_groups": identity.groups}
    with contextlib.ExitStack() as stack:
        with acting_as(identity):
            flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
            folder = os.open(chdir or "/", flags)
            stack.callback(os.close, folder)
            if not os.access(".", os.X_OK, dir_fd=folder, effective_ids=True):
                raise PermissionError(None, f"{account.name} cannot enter it", str(chdir))
        # The folder is named by its descriptor, because the path may lead elsewhere by the time
        # root follows it.
        yield {**how, "umask": identity.umask, "cwd": f"/proc/self/fd/{folder}"}


def identity_of_owner(path: Path, *, with_groups: bool = True) -> Identity | None:
    """Return the identity for accessing a folder's files, or None for this process's own.

    `with_groups` queries a directory service, which may be slow; the account's own files do not
    need its groups. The folder must be inside one of this agent's own folders, or its owner could
    be anybody. Raises `OSError` if it does not exist.
    """
    found = path.lstat()
    if os.geteuid() != 0 or found.st_uid == 0:
        return None
    groups: Sequence[int] = ()
    if with_groups:
        with contextlib.suppress(KeyError, OSError):
            groups = os.getgrouplist(pwd.getpwuid(found.st_uid).pw_name, found.st_gid)
    return Identity(found.st_uid, found.st_gid, tuple(groups))


def open_untrusted(path: str | Path, flags: int, mode: int = 0o600) -> int:
    """Open a regular file in a folder that others may write to. Never blocks on a pipe.

    Raises `OSError` if it cannot be opened, or is a link, a pipe, a device or the like.
    """
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    fd = os.open(path, flags, mode)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(None, "it is not a regular file", str(path))
    return fd


def write_anew(path: Path, content: bytes) -> None:
    """Replace a file in a folder that others may write to; raises `OSError` if that fails."""
    fd = open_untrusted(path, os.O_WRONLY | os.O_CREAT, 0o666)
    with os.fdopen(fd, "wb") as file:
        file.truncate()
        file.write(content)
