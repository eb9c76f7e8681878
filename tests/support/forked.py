"""`--forks N`: the files found by one process are collected and run by N processes forked from it.

For thousands of tests of a millisecond pytest-xdist costs more than they do: each of its processes
imports and collects everything for itself, and sends three reports for each test. Here what most
tests import is imported once, a process takes the next file when it has finished one, and for a
passed test only that fact is sent.
"""

from __future__ import annotations

import fcntl
import importlib
import marshal
import os
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import collect_one_node

_SHARED = (
    *("rdzv.server.__main__", "rdzv.agent.__main__", "rdzv.ctl.__main__", "rdzv.worker.link"),
    *("aiohttp", "hypothesis"),
)
"""What most tests import, with all that it imports."""
SLOWEST = (
    "tests/conformance/test_conformance.py",
    "tests/integration/test_copied_snapshots.py",
    "tests/integration/test_web_page.py",
    "tests/integration/test_elastic.py",
    "tests/integration/test_resumed_from_memory.py",
    "tests/integration/test_warm.py",
    "tests/integration/test_hangs_of_torch.py",
    "tests/integration/test_agent_restart.py",
    "tests/integration/test_kept_workers.py",
    "tests/integration/test_c10d_facade.py",
    "tests/integration/test_example_training.py",
    "tests/integration/test_warm_store_host.py",
    "tests/integration/test_torchrun_plugin.py",
    "tests/integration/test_kept_processes.py",
    "tests/integration/test_torchrun_launches.py",
    "tests/integration/test_fencing.py",
    "tests/integration/test_backup.py",
    "tests/integration/test_prometheus.py",
    "tests/integration/test_rdzvd.py",
    "tests/integration/test_command_line.py",
    "tests/integration/test_bad_input.py",
    "tests/integration/test_runner_faults.py",
    "tests/integration/test_warm_restarts.py",
    "tests/integration/test_invisible_server.py",
    "tests/integration/test_kept_shards_processes.py",
    "tests/integration/test_drain.py",
    "tests/integration/test_hangs.py",
    "tests/integration/test_runner.py",
    "tests/integration/test_kept_shards.py",
    "tests/integration/test_daemon.py",
)
"""The slowest files, longest first: they start in this order, so that none of them runs last."""
QUICK = ("tests/unit", "tests/scenarios", "tests/stores")
"""Folders whose files start after all others."""
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


_Files = list[list[pytest.Item | pytest.Collector]]
_STARTED = pytest.StashKey[tuple[list["_Worker"], int]]()
"""The processes, and how many files they share."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> bool | None:
    """Find the files, and start the processes that collect and run them."""
    config = session.config
    if not config.option.forks or config.option.collectonly:
        return None
    finder = _Finder()
    config.pluginmanager.register(finder)
    session.perform_collect(genitems=False)
    config.pluginmanager.unregister(finder)
    files = [list(nodes) for _, nodes in groupby(finder.found, _together)]
    files.sort(key=lambda nodes: _turn(nodes, config.rootpath))
    for name in _SHARED:
        importlib.import_module(name)
    turns, all_turns = os.pipe()
    os.write(all_turns, b"".join(n.to_bytes(_NUMBER, "big") for n in range(len(files))))
    os.close(all_turns)
    config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    sys.stdout.flush()
    workers = [_Worker(session, files, turns) for _ in range(config.option.forks)]
    os.close(turns)
    config.stash[_STARTED] = workers, len(files)
    return True


class _Finder:
    """Finds the files before pytest selects among what it was given, and forgets each conftest."""

    def __init__(self) -> None:
        self.found: list[pytest.Item | pytest.Collector] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item | pytest.Collector]) -> None:
        self.found = [*_below(items)]
        items.clear()


def _below(
    nodes: Iterable[pytest.Item | pytest.Collector],
) -> Iterator[pytest.Item | pytest.Collector]:
    """Yield the files in the folders among these nodes; other nodes are yielded as they are."""
    for node in nodes:
        if isinstance(node, pytest.Directory):
            report = collect_one_node(node)
            node.ihook.pytest_collectreport(report=report)
            yield from _below(report.result or ())
        else:
            yield node


def _together(node: pytest.Item | pytest.Collector) -> Path:
    """Return the file of a test; tests of the whole project go together, to parse sources once."""
    return node.path.parent if node.path.parent.name == "project" else node.path


def _turn(nodes: list[pytest.Item | pytest.Collector], root: Path) -> tuple[int, bool, int]:
    """Sort files by when they start: of the quick ones, the large first."""
    name = nodes[0].path.relative_to(root).as_posix()
    slowest = SLOWEST.index(name) if name in SLOWEST else len(SLOWEST)
    return slowest, name.startswith(QUICK), -sum(node.path.stat().st_size for node in nodes)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Pass on the reports of all processes here."""
    if _STARTED not in session.config.stash:
        return None
    workers, files = session.config.stash[_STARTED]
    try:
        _report(session, workers, files)
    finally:
        for worker in workers:
            worker.end()
    return True


class _Worker:
    """A forked process, and the pipe for its reports, each preceded by its length."""

    def __init__(self, session: pytest.Session, files: _Files, turns: int) -> None:
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
            _run(session, files, turns, reports)
            code = 0
        except KeyboardInterrupt:
            pass
        except BaseException:
            traceback.print_exc()
        finally:
            # pytest's cleanup at its end is not this process's job.
            os._exit(code)

    def read(self) -> list[list[str] | dict[str, Any]] | None:
        """Return what has been collected and reported, and note what runs; None at the end."""
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


def _run(session: pytest.Session, files: _Files, turns: int, reports: int) -> None:
    """Collect and run the remaining tests, in a forked process."""
    config = session.config
    config.pluginmanager.unregister(name="terminalreporter")
    sender = _Sender(config, reports)
    config.pluginmanager.register(sender)
    factory = config._tmp_path_factory  # type: ignore[attr-defined]
    # The next free number is searched among all existing folders.
    factory._basetemp = factory.mktemp("forked")
    items = _items(session, files, turns, sender)
    item = next(items, None)
    while item is not None:
        following = next(items, None)
        config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        item = following


def _items(
    session: pytest.Session, files: _Files, turns: int, sender: _Sender
) -> Iterator[pytest.Item]:
    hook = session.config.hook
    while number := os.read(turns, _NUMBER):
        nodes = files[int.from_bytes(number, "big")]
        items = [item for node in nodes for item in session.genitems(node)]
        hook.pytest_collection_modifyitems(session=session, config=session.config, items=items)
        session.items += items
        sender.send([item.nodeid for item in items])
        yield from items


class _Sender:
    """Reports what was collected, which test starts, and what the terminal should show about it."""

    def __init__(self, config: pytest.Config, reports: int) -> None:
        self._config = config
        self._reports = reports

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            self._send_report(report)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.send(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.passed and report.when != "call":
            return
        self._send_report(report)

    def _send_report(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        self.send(
            self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        )

    def send(self, message: str | list[str] | dict[str, Any]) -> None:
        body = marshal.dumps(message)
        left = len(body).to_bytes(_LENGTH, "big") + body
        while left:
            left = left[os.write(self._reports, left) :]


def _report(session: pytest.Session, workers: list[_Worker], files: int) -> None:
    hook = session.config.hook
    left: set[str] = set()
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
                    if isinstance(data, list):
                        files -= 1
                        left.update(data)
                        session.testscollected += len(data)
                        continue
                    report = hook.pytest_report_from_serializable(config=session.config, data=data)
                    if isinstance(report, pytest.CollectReport):
                        hook.pytest_collectreport(report=report)
                    else:
                        left.discard(report.nodeid)
                        hook.pytest_runtest_logreport(report=report)
                        hook.pytest_runtest_logfinish(
                            nodeid=report.nodeid, location=report.location
                        )
                    if session.shouldfail:
                        raise session.Failed(session.shouldfail)
    if left or files:
        session.shouldfail = (
            f"a process has ended {', '.join(ends)}; tests not run: {len(left)}, "
            f"files not collected: {files}"
        )
        raise session.Failed(session.shouldfail)
