"""The job secret: all participants of a job show it, so that no other process can join.

It is said in the environment alone, or in a file that the environment names: a command line can be
read by everyone on the machine. Workers get neither it nor a token: what they print, many read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rdzv.errors import InvalidRequestError

VARIABLE = "RDZV_JOB_SECRET"
FILE_VARIABLE = "RDZV_JOB_SECRET_FILE"

SECRET_VARIABLES = frozenset({VARIABLE, "RDZV_TOKEN"})
"""The variables whose values are secrets themselves."""


def read_secret(environ: Mapping[str, str]) -> str:
    """Return the job's secret; empty if there is none.

    Raises:
        InvalidRequestError: the file that is named cannot be read, or is empty.

    """
    if not (name := environ.get(FILE_VARIABLE)):
        return environ.get(VARIABLE, "")
    try:
        secret = Path(name).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise InvalidRequestError(
            f"the job secret in {name} cannot be read: {reason}; {FILE_VARIABLE} names the file"
        ) from error
    if not secret:
        raise InvalidRequestError(
            f"the job secret in {name} is empty; put one into it, as `openssl rand -hex 32` makes"
        )
    return secret


def without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment as others may have it."""
    return {name: value for name, value in environ.items() if name not in SECRET_VARIABLES}
