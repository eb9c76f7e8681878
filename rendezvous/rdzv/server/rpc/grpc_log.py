"""Suppresses gRPC log lines caused by malformed input."""

from __future__ import annotations

import logging

NO_TEXT = "Invalid encoding on"
"""The beginning of gRPC's log line about metadata that is not text. The line contains a traceback
and quotes the value, which may be a damaged token. It is not needed, because the call is refused
and the refusal is logged."""


def quiet_grpc() -> None:
    """Prevent gRPC from quoting callers' metadata in the log."""
    logging.getLogger("grpc._cython.cygrpc").addFilter(_quotes_nobody)


def _quotes_nobody(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(NO_TEXT)
