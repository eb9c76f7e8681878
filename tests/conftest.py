"""Shared by all tests: the root on the path, an unchanged log, `--rewrite`, STRICT=1."""

from __future__ import annotations

import functools
import gc
import logging
import os
import signal
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

# It would report on stderr what hostile clients of tests send; it is read at the import.
os.environ["GRPC_VERBOSITY"] = "NONE"

# As in the agent: a fork while gRPC is at work would else write to stderr, which tests read, or
# hang.
from rdzv.transport import grpc_forks  # noqa: F401

ROOT = str(Path(__file__).parents[1])
if ROOT not in sys.path:
    # So that helpers are `tests.support.builders` here and under `python -m tests...` alike.
    sys.path.insert(0, ROOT)


# A Python that may not store byte code compiles all sources again in each of the many programs that
# the tests start.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# The programs that tests start import torch hundreds of times.
os.environ["PYTHONPATH"] = str(Path(__file__).parent / "support" / "quick_torch")
# Jobs restart cold, since each zygote would import torch once more.
os.environ["PET_WARM"] = ""

for _number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    # `make test &` in a script, and nohup, ignore these signals; programs started here would
    # inherit that, and not react to the Ctrl-C that a test sends them.
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(
            _number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL
        )


@pytest.fixture
def restarts_as_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let jobs of this test restart warm, as users' do."""
    monkeypatch.delenv("PET_WARM")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite",
        action="store_true",
        help="write the present answers into tests/scenarios/*.txt; then review the diff",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Without slow tests, do not import files that have no others: torch alone takes a second."""
    if "not slow" not in config.option.markexpr or collection_path.suffix != ".py":
        return None
    text = collection_path.read_text()
    all_slow = "\npytestmark = pytest.mark.slow\n" in text and "@pytest.mark.quick\n" not in text
    return True if all_slow else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    """Let the collector of garbage rest: all that is imported and collected stays."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Let it look at what tests leave, and rarely: most of them leave nothing in cycles."""
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
    gc.enable()


# Fixtures for all tests would take a tenth of the time that a quick test costs.


@functools.cache
def _set_temporary_folder(config: pytest.Config) -> None:
    """Let every program put its temporary files where pytest cleans up."""
    factory = config._tmp_path_factory  # type: ignore[attr-defined]
    os.environ["TMPDIR"] = str(factory.mktemp("tmp"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Keep each test from changing the logging that a later one, in the same process, sees.

    The programs set up their logging when they start, and many a test starts one.
    """
    _set_temporary_folder(item.config)
    before = {
        logger: (logger.level, logger.handlers[:], logger.propagate) for logger in _our_loggers()
    }
    result = yield
    for logger in _our_loggers():
        level, handlers, propagate = before.get(logger, (logging.NOTSET, [], True))
        if logger.level != level:  # Makes every logger drop its cache.
            logger.setLevel(level)
        logger.handlers[:] = handlers
        logger.propagate = propagate
    return result


def _our_loggers() -> list[logging.Logger]:
    return _ours_of(len(logging.root.manager.loggerDict))


@functools.lru_cache(maxsize=1)
def _ours_of(count: int) -> list[logging.Logger]:
    """Return our loggers, while no more than `count` loggers are known; none is ever forgotten."""
    known = logging.root.manager.loggerDict
    names = [name for name in known if name.partition(".")[0] == "rdzv"]
    return [logging.getLogger(), *map(logging.getLogger, names)]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """With STRICT=1, where everything that a test may need is there, a skip is a failure."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter else []
    if skipped and os.environ.get("STRICT") == "1" and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
