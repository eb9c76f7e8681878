"""A client that speaks another protocol at the HTTP port costs one log line, and no traceback."""

from __future__ import annotations

import logging
import sys

import pytest
from aiohttp.http_exceptions import BadHttpMessage

from rdzv.server.http import listener


def logged(error: Exception, caplog: pytest.LogCaptureFixture) -> logging.LogRecord:
    """Log a failed request as aiohttp does."""
    try:
        raise error
    except type(error):
        text = "Error handling request from %s"
        listener.request_log.error(text, "10.0.0.5", exc_info=sys.exc_info())
    [record] = caplog.records
    return record


def test_what_is_no_http_is_no_fault_of_this_server(caplog: pytest.LogCaptureFixture) -> None:
    record = logged(BadHttpMessage("Pause on PRI/Upgrade"), caplog)
    assert record.getMessage() == (
        "Error handling request from 10.0.0.5, which is not HTTP/1.1; rdzvctl and nodes connect to "
        "--listen, not to --http"
    )
    assert (record.levelno, record.exc_info) == (logging.WARNING, None)


def test_a_fault_of_this_server_keeps_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    record = logged(KeyError("a bug"), caplog)
    assert (record.levelno, record.getMessage()) == (
        logging.ERROR,
        "Error handling request from 10.0.0.5",
    )
    assert record.exc_info
