"""Shortens aiohttp's log lines about clients that use another protocol on an HTTP port."""

from __future__ import annotations

import logging

from aiohttp.http_exceptions import HttpProcessingError


def http_log(name: str, remedy: str) -> logging.Logger:
    """Return a logger for aiohttp that logs one line, with a remedy, if a client sends no HTTP.

    The mistake is the client's, so no traceback is logged. Such a client is usually a gRPC client
    using the wrong port, which retries forever.
    """

    def in_one_line(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            record.msg += f", which is not HTTP/1.1; {remedy}"
            record.levelno, record.levelname = logging.WARNING, "WARNING"
            record.exc_info = record.exc_text = None
        return True

    log = logging.getLogger(name)
    log.addFilter(in_one_line)
    return log
