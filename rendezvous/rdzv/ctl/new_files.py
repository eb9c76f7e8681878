"""Writes files, such as backups and certificates, completely or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from rdzv.errors import InvalidRequestError


@contextmanager
def new_file(path: Path, *, replace: bool, mode: int = 0o600) -> Iterator[BinaryIO]:
    """Yield a file, and name it `path` once the body has ended.

    If the body fails, nothing is left behind, and `path` is unchanged.
    """
    _check(path, replace)
    try:
        # It is created with mode 0600 in the same folder as `path`, so that it can be renamed.
        number, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        with os.fdopen(number, "w+b") as file:
            yield file
            file.flush()
            os.fchmod(number, mode)
            os.fsync(number)
        if replace:
            Path(name).replace(path)
        else:
            _name(name, path)
        _sync(path.parent)
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        Path(name).unlink(missing_ok=True)


def _check(path: Path, replace: bool) -> None:
    if not os.path.lexists(path):
        return
    if not path.is_file():
        raise InvalidRequestError(f"{path} is not a regular file; give the name of one")
    if not replace:
        raise InvalidRequestError(f"{path} already exists; give another name, or --force")


def _name(written: str, path: Path) -> None:
    """Give a file the name `path`, unless another file has that name."""
    try:
        os.link(written, path)
    except FileExistsError:
        # Another process has created it since the check.
        _check(path, replace=False)
        raise
    except OSError:
        # This file system does not support hard links.
        Path(written).replace(path)


def _sync(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _unwritable(path: Path, error: OSError) -> InvalidRequestError:
    return InvalidRequestError(
        f"{path} cannot be written: {error.strerror or error}; give a file in a writable "
        "folder with enough space"
    )
