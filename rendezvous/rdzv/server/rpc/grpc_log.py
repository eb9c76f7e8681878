"""gRPC log lines caused by malformed input."""

from __future__ import annotations

import logging

NO_TEXT = "Invalid encoding on"
"""Begins what it logs, with a traceback, of metadata that are no text: the value is quoted in full,
which may be a token that came damaged. Who sends that is refused, and that is logged."""


def quiet_grpc() -> None:
    """Keep gRPC from quoting metadata of callers in the log."""
    logging.getLogger("grpc._cython.cygrpc").addFilter(_quotes_nobody)


def _quotes_nobody(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(NO_TEXT)
