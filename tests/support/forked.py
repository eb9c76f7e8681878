"""`--forks N`: the tests collected by one process are run by N processes forked from it.

For thousands of tests of a millisecond pytest-xdist costs more than they do: each of its processes
imports and collects everything for itself, and sends three reports for each test. Here the memory
is shared, a process takes the next file when it has finished one, and for a passed test only that
fact is sent.
"""

from __future__ import annotations

import fcntl
import marshal
import os
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

_NUMBER = 2
"""The size of a file's number, in bytes."""
_LENGTH = 4
"""The size of a report's length, in bytes."""
_PIPE = 1 << 20
"""The size of a pipe, in bytes: no process waits until its reports are read."""
_GATHER_S = 0.1
"""Reports are read so many seconds apart: one at a time, each would cost a change of process."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forks", type=int, default=0, help="run the tests in N forked processes")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run all tests in forked processes, and pass on their reports here."""
    config = session.config
    if not config.option.forks or config.option.collectonly or session.testsfailed:
        return None
    files = [list(items) for _, items in groupby(session.items, _file)]
    # Files with many tests start first, so that no process is left with one at the end.
    files.sort(key=len, reverse=True)
    turns, all_turns = os.pipe()
    os.write(all_turns, b"".join(n.to_bytes(_NUMBER, "big") for n in range(len(files))))
    os.close(all_turns)
    config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    sys.stdout.flush()
    workers = [_Worker(session, files, turns) for _ in range(config.option.forks)]
    try:
        _report(session, workers)
    finally:
        for worker in workers:
            worker.end()
        os.close(turns)
    return True


def _file(item: pytest.Item) -> Path:
    """Return the file of a test; tests of the whole project go together, to parse sources once."""
    return item.path.parent if item.path.parent.name == "project" else item.path


class _Worker:
    """A forked process, and the pipe for its reports, each preceded by its length."""

    def __init__(self, session: pytest.Session, files: list[list[pytest.Item]], turns: int) -> None:
        self.reports, reports = os.pipe()
        fcntl.fcntl(reports, fcntl.F_SETPIPE_SZ, _PIPE)
        self.unread = b""
        self.runs = ""
        """The test that it started last."""
        self.has_ended = False
        if pid := os.fork():
            self.pid = pid
            os.close(reports)
            return
        code = 1
        try:
            _run(session, _items(files, turns), reports)
            code = 0
        except KeyboardInterrupt:
            pass
        except BaseException:
            traceback.print_exc()
        finally:
            # pytest's cleanup at its end is not this process's job.
            os._exit(code)

    def read(self) -> list[dict[str, Any]] | None:
        """Return the reports that have arrived, and note what runs; None at the end."""
        if not (data := os.read(self.reports, _PIPE)):
            return None
        self.unread += data
        found = []
        while len(self.unread) >= (end := _LENGTH + int.from_bytes(self.unread[:_LENGTH], "big")):
            message = marshal.loads(self.unread[_LENGTH:end])
            self.unread = self.unread[end:]
            if isinstance(message, str):
                self.runs = message
            else:
                found.append(message)
        return found

    def wait(self) -> str:
        """Wait for its end; describe how it ended."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.has_ended = True
        return f"exit code {code}" if code >= 0 else signal.Signals(-code).name

    def end(self) -> None:
        if not self.has_ended:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()
        os.close(self.reports)


def _items(files: list[list[pytest.Item]], turns: int) -> Iterator[pytest.Item]:
    while number := os.read(turns, _NUMBER):
        yield from files[int.from_bytes(number, "big")]


def _run(session: pytest.Session, items: Iterator[pytest.Item], reports: int) -> None:
    """Run the remaining tests, in a forked process."""
    config = session.config
    config.pluginmanager.unregister(name="terminalreporter")
    config.pluginmanager.register(_Sender(config, reports))
    factory = config._tmp_path_factory  # type: ignore[attr-defined]
    # The next free number is searched among all existing folders.
    factory._basetemp = factory.mktemp("forked")
    item = next(items, None)
    while item is not None:
        following = next(items, None)
        config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        item = following


class _Sender:
    """Reports which test starts, and what the terminal should show about it."""

    def __init__(self, config: pytest.Config, reports: int) -> None:
        self._config = config
        self._reports = reports

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._send(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.passed and report.when != "call":
            return
        self._send(
            self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        )

    def _send(self, message: str | dict[str, Any]) -> None:
        body = marshal.dumps(message)
        left = len(body).to_bytes(_LENGTH, "big") + body
        while left:
            left = left[os.write(self._reports, left) :]


def _report(session: pytest.Session, workers: list[_Worker]) -> None:
    config = session.config
    left = {item.nodeid for item in session.items}
    ends = []
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            selector.register(worker.reports, selectors.EVENT_READ, worker)
        while selector.get_map():
            time.sleep(_GATHER_S)
            for key, _ in selector.select():
                if (found := key.data.read()) is None:
                    selector.unregister(key.fd)
                    how = key.data.wait()
                    if key.data.runs in left or how != "exit code 0":
                        ends.append(f"by {how} in {key.data.runs}")
                for data in found or ():
                    report = config.hook.pytest_report_from_serializable(config=config, data=data)
                    left.discard(report.nodeid)
                    config.hook.pytest_runtest_logreport(report=report)
                    config.hook.pytest_runtest_logfinish(
                        nodeid=report.nodeid, location=report.location
                    )
                    if session.shouldfail:
                        raise session.Failed(session.shouldfail)
    if left:
        session.shouldfail = f"a process has ended {', '.join(ends)}; tests not run: {len(left)}"
        raise session.Failed(session.shouldfail)
