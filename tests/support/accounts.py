"""What tests of accounts need: root's rights, to give up, and a folder that others can enter."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from rdzv.agent.system.accounts import Account, Identity

T = TypeVar("T", bound=Callable[..., Any])

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another account")


def slow_as_root(test: T) -> T:
    """Mark a slow test that acts as another account."""
    return pytest.mark.slow(needs_root(test))


ADA = Identity(uid=64_321, gid=64_322, groups=(64_322, 64_323), umask=0o027)
"""An unused account: to the kernel, an account is only its numbers."""

SECRET = "root:only root may read this"


def account(home: Path, identity: Identity = ADA) -> Account:
    return Account("ada", str(home), "/bin/sh", identity)


@contextmanager
def passable_folder() -> Iterator[Path]:
    """Create a folder that everyone can enter; pytest's belong only to root."""
    folder = Path(tempfile.mkdtemp(prefix="rdzv-accounts-", dir="/tmp"))
    folder.chmod(0o711)
    try:
        yield folder
    finally:
        # A failed test's leftovers may be too deep for Python.
        subprocess.run(["rm", "-rf", folder], check=True)


def own_folder(above: Path, name: str, identity: Identity = ADA) -> Path:
    """Create a folder that only one account may access."""
    folder = above / name
    folder.mkdir(mode=0o700)
    os.chown(folder, identity.uid, identity.gid)
    return folder


def roots_secret(above: Path) -> Path:
    """Write a file that only root may read, in a folder that everyone may enter."""
    path = above / "shadow"
    path.write_text(SECRET)
    path.chmod(0o600)
    return path
