"""For pytest, in the copy: record which test runs which line, or run only the chosen tests.

For the first, MUTANTS_LINES is the prefix of a file's name; for the second, MUTANTS_CHOSEN is a
file with the tests and how many seconds each may take.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SOURCES = ("rendezvous/rdzv", "agent/rdzv", "worker/rdzv")
_coverage: Any = None
_failed: set[str] = set()
_seconds: defaultdict[str, float] = defaultdict(float)


def pytest_configure(config: pytest.Config) -> None:
    global _coverage  # noqa: PLW0603 - pytest gives a module of hooks no other place
    if "MUTANTS_LINES" in os.environ and (
        hasattr(config, "workerinput") or not config.getoption("numprocesses", None)
    ):
        import coverage

        root = Path(__file__).parents[2]
        _coverage = coverage.Coverage(
            data_file=None, source=[str(root / each) for each in SOURCES], config_file=False
        )
        _coverage.start()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if _coverage is None:
        return (yield)
    _coverage.switch_context(item.nodeid)
    try:
        return (yield)
    finally:
        _coverage.switch_context("")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if not report.passed:
        _failed.add(report.nodeid)
    _seconds[report.nodeid] += report.duration


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    name = os.environ.get("MUTANTS_CHOSEN")
    if name is None:
        return
    chosen: dict[str, float] = json.loads(Path(name).read_text())
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
    items[:] = [item for item in items if item.nodeid in chosen]
    for item in items:
        item.add_marker(pytest.mark.timeout(chosen[item.nodeid]), append=False)


def pytest_sessionfinish() -> None:
    if _coverage is None:
        return
    _coverage.stop()
    data = _coverage.get_data()
    root = Path(__file__).parents[2]
    ran = [
        (test, Path(file).relative_to(root).as_posix(), str(line))
        for file in data.measured_files()
        for line, tests in data.contexts_by_lineno(file).items()
        for test in tests
        if test
    ]
    part = {"seconds": _seconds, "failed": sorted(_failed), "ran": ran}
    Path(f"{os.environ['MUTANTS_LINES']}.{os.getpid()}").write_text(json.dumps(part))
