"""Which account of this node a submitted job runs as, and acting with that account's rights.

`[[user]]` in agent.toml maps the names of submitters to accounts; without any, jobs run as the
agent itself. The agent has to be root to start anything as somebody else. Nothing of a job's is
opened, made or run with root's rights: its processes by `started_as`, its files inside of
`acting_as`. So whatever links or pipes a job puts in the agent's way, they lead no further than its
account could go by itself.
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
from typing import Any

from rdzv.agent.runner.linux.identity import Identity, acting_as
from rdzv.errors import InvalidRequestError
from rdzv.structs import struct

__all__ = [
    "EVERYONE",
    "Account",
    "Accounts",
    "Identity",
    "SubmitterRule",
    "acting_as",
    "identity_of_owner",
    "name_of",
    "open_untrusted",
    "own_account",
    "started_as",
    "write_anew",
]

EVERYONE = "*"
"""Stands for every submitter that no other entry names."""

LEAST_UID = 1_000
"""Uids below it are accounts of services, which no submitter gets by name alone."""

UNLIMITED = "unlimited"

LIMITS = tuple(
    sorted(name.removeprefix("RLIMIT_").lower() for name in dir(resource) if "RLIMIT_" in name)
)
"""Resource limits that can be set, as in limits.conf(5) and systemd's `LimitNOFILE=`."""


@struct(frozen=True)
class Account:
    """An account of this node that a job runs as."""

    name: str
    home: str
    shell: str
    identity: Identity

    @property
    def environ(self) -> dict[str, str]:
        """Return what a login would set."""
        names = {"USER": self.name, "LOGNAME": self.name}
        return names | {"HOME": self.home, "SHELL": self.shell}


@struct(frozen=True)
class SubmitterRule:
    """Which accounts one submitter may have."""

    submitter: str
    """Or `EVERYONE`."""
    accounts: tuple[str, ...] = ()
    """The first is what a job runs as unless it asks for another; none: the one of that name."""
    umask: int = 0o022
    limits: tuple[tuple[str, int, int], ...] = ()

    def may_have(self, submitter: str) -> tuple[str, ...]:
        """Name the accounts that this gives to a submitter."""
        return self.accounts or (submitter,)


class Accounts:
    """The mapping of this node."""

    def __init__(
        self,
        rules: Sequence[SubmitterRule] = (),
        find: Callable[[str], pwd.struct_passwd] = pwd.getpwnam,
        own_uid: int | None = None,
    ) -> None:
        """Follow these rules; `find` and `own_uid` are this machine's."""
        self._rules = {rule.submitter: rule for rule in rules}
        self._find = find
        self._own_uid = os.geteuid() if own_uid is None else own_uid

    def account_for(self, submitter: str, wanted: str = "") -> Account | None:
        """Return what a submitter's job runs as; None: the account of the agent itself.

        `wanted` is the account that the job asks for. May wait for a directory service.

        Raises:
            InvalidRequestError: this node has none for it; says what would help.

        """
        if not self._rules:
            if wanted not in ("", own_account()):
                raise InvalidRequestError(
                    f"it asks for the account {wanted!r}, but jobs run here as {own_account()}, "
                    "the account of rdzv-agent; leave --user out, or map its submitter in [[user]] "
                    "of agent.toml"
                )
            return None
        if not submitter:
            raise InvalidRequestError(
                "nobody knows who submitted it, and this node maps submitters to accounts; submit "
                "it to a server that authenticates its callers"
            )
        rule = self._rules.get(submitter) or self._rules.get(EVERYONE)
        if rule is None:
            raise InvalidRequestError(
                f"no account is mapped to its submitter {submitter!r} on this node; an operator "
                "may add a [[user]] to agent.toml"
            )
        given = rule.may_have(submitter)
        name = wanted or given[0]
        if name not in given:
            raise InvalidRequestError(
                f"its submitter {submitter!r} may not run jobs as {name!r} on this node, only as "
                f"{', '.join(given)}"
            )
        return self._look_up(name, rule)

    def _look_up(self, name: str, rule: SubmitterRule) -> Account | None:
        try:
            found = self._find(name)
        except (KeyError, ValueError) as error:
            raise InvalidRequestError(
                f"this node has no account {name!r}; make one, or map its submitter to another"
            ) from error
        named = rule.submitter != EVERYONE and name in rule.accounts
        if found.pw_uid == 0 and not named:
            raise InvalidRequestError(
                f"it would run as root, for that is what {name!r} is here; an operator may give "
                f"it to a submitter by name: accounts = [{name!r}] in its [[user]]"
            )
        if found.pw_uid < LEAST_UID and not rule.accounts and rule.submitter == EVERYONE:
            raise InvalidRequestError(
                f"{name!r} is an account of a service here (uid {found.pw_uid}), which nobody has "
                "by name alone; an operator may map it in a [[user]] of its own"
            )
        if self._own_uid != 0:
            if found.pw_uid != self._own_uid:
                raise InvalidRequestError(
                    f"it would run as {name!r}, but rdzv-agent runs as {own_account()} here, and "
                    "only root can start jobs as others; run rdzv-agent as root"
                )
            return None
        groups = tuple(os.getgrouplist(found.pw_name, found.pw_gid))
        identity = Identity(found.pw_uid, found.pw_gid, groups, rule.umask, rule.limits)
        shell = found.pw_shell or "/bin/sh"
        return Account(found.pw_name, found.pw_dir or "/", shell, identity)


def own_account() -> str:
    """Return the name of the account that this process runs as."""
    return name_of(os.geteuid())


def name_of(uid: int) -> str:
    """Return the name of an account; its number if it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


# ---------------------------------------------------------------------- what a rule says


def parse_limits(table: Mapping[str, str]) -> tuple[tuple[str, int, int], ...]:
    """Read limits: a number or "unlimited" for both, or SOFT:HARD.

    >>> parse_limits({"nofile": "1024:4096", "core": "0", "memlock": "unlimited"})
    (('nofile', 1024, 4096), ('core', 0, 0), ('memlock', -1, -1))

    Raises:
        InvalidRequestError: one is none that this system knows, or has no such value.

    """
    return tuple((name, *_parse_limit(name, text)) for name, text in table.items())


def _parse_limit(name: str, text: str) -> tuple[int, int]:
    if name not in LIMITS:
        raise InvalidRequestError(f"{name!r} cannot be limited; give one of {', '.join(LIMITS)}")
    first, _, second = text.partition(":")
    soft, hard = _parse_number(name, text, first), _parse_number(name, text, second or first)
    if hard >= 0 and not 0 <= soft <= hard:
        raise InvalidRequestError(f"{name} = {text!r} has a soft limit above the hard one; swap it")
    return soft, hard


def _parse_number(name: str, text: str, part: str) -> int:
    if part == UNLIMITED:
        return resource.RLIM_INFINITY
    if not part.isascii() or not part.isdecimal() or int(part) >= 1 << 63:
        raise InvalidRequestError(
            f'{name} = {text!r} is no limit; give a number, "{UNLIMITED}", or SOFT:HARD'
        )
    return int(part)


def parse_umask(text: str) -> int:
    """Read a umask in octal.

    >>> parse_umask("0027")
    23

    Raises:
        InvalidRequestError: it is none.

    """
    if not text or set(text) - set("01234567") or int(text, 8) > 0o777:
        raise InvalidRequestError(f'{text!r} is no umask; give octal digits, such as "0027"')
    return int(text, 8)


# ---------------------------------------------------------------------- acting as an account


@contextmanager
def started_as(account: Account | None, chdir: Path | None = None) -> Iterator[dict[str, Any]]:
    """Say how to start a process as an account, in a folder; for what `subprocess` starts inside.

    Raises:
        OSError: the account cannot enter the folder.

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
                raise PermissionError(None, f"it cannot be entered by {account.name}", str(chdir))
        # By its descriptor: what the name leads to may have changed before root follows it.
        yield {**how, "umask": identity.umask, "cwd": f"/proc/self/fd/{folder}"}


def identity_of_owner(path: Path, *, with_groups: bool = True) -> Identity | None:
    """Return as whom the files of a folder are to be handled; None: as this process.

    `with_groups` asks a directory service, which may take its time; what is the account's own does
    not need them. The folder lies in one of this agent's own, or its owner could be anybody.

    Raises:
        OSError: it is not there.

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
    """Open a regular file in a folder that others may write to; it cannot be made to wait.

    Raises:
        OSError: it cannot be opened, or is a link, a pipe, a device or the like.

    """
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    fd = os.open(path, flags, mode)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(None, "it is no regular file", str(path))
    return fd


def write_anew(path: Path, content: bytes) -> None:
    """Write a file in a folder that others may write to; `OSError` if it cannot be."""
    fd = open_untrusted(path, os.O_WRONLY | os.O_CREAT, 0o666)
    with os.fdopen(fd, "wb") as file:
        file.truncate()
        file.write(content)
