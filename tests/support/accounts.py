"""What tests of accounts need: root's rights to give up, and a folder that others can enter."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rdzv.agent.system.accounts import Account, Identity

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another account")

ADA = Identity(uid=64_321, gid=64_322, groups=(64_322, 64_323), umask=0o027)
"""Nobody's: an account is no more than its numbers to the kernel."""

SECRET = "root:only root may read this"


def account(home: Path, identity: Identity = ADA) -> Account:
    return Account("ada", str(home), "/bin/sh", identity)


@contextmanager
def passable_folder() -> Iterator[Path]:
    """Make a folder that everybody can enter; those of pytest are root's alone."""
    folder = Path(tempfile.mkdtemp(prefix="rdzv-accounts-", dir="/tmp"))
    folder.chmod(0o711)
    try:
        yield folder
    finally:
        # What a failed test has left may be too deep for Python.
        subprocess.run(["rm", "-rf", folder], check=True)


def own_folder(above: Path, name: str, identity: Identity = ADA) -> Path:
    """Make a folder that belongs to an account alone."""
    folder = above / name
    folder.mkdir(mode=0o700)
    os.chown(folder, identity.uid, identity.gid)
    return folder


def roots_secret(above: Path) -> Path:
    """Write a file that root alone may read, in a folder that everybody may enter."""
    path = above / "shadow"
    path.write_text(SECRET)
    path.chmod(0o600)
    return path
