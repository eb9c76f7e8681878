"""The job secret, which every participant must present so that no other process can join the job.

It is passed only in the environment, or in a file named by the environment, because anyone on a
machine can read command lines. Workers get neither the secret nor a token, because many people read
their output.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rdzv.errors import InvalidRequestError

VARIABLE = "RDZV_JOB_SECRET"
FILE_VARIABLE = "RDZV_JOB_SECRET_FILE"

SECRET_VARIABLES = frozenset({VARIABLE, "RDZV_TOKEN"})
"""The variables whose values are themselves secrets rather than names of files."""


def read_secret(environ: Mapping[str, str]) -> str:
    """Return the job's secret, or an empty string if there is none."""
    if not (name := environ.get(FILE_VARIABLE)):
        return environ.get(VARIABLE, "")
    try:
        secret = Path(name).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise InvalidRequestError(
            f"the job secret in {name} cannot be read: {reason}; {FILE_VARIABLE} names the file"
        ) from error
    if not secret:
        raise InvalidRequestError(
            f"the job secret in {name} is empty; put one into it, as `openssl rand -hex 32` makes"
        )
    return secret


def without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in SECRET_VARIABLES}
