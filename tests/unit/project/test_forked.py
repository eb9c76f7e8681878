"""The quick tests' forked processes: what one of them finds, all report."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import os, pytest

@pytest.fixture
def broken():
    raise ValueError("in setup")

@pytest.fixture
def breaks():
    yield
    raise ValueError("in teardown")

def test_passes(tmp_path): pass
def test_fails(): assert 1 == 2, "seen"
def test_errs(broken): pass
def test_leaves_a_mess(breaks): pass
@pytest.mark.skip(reason="not here")
def test_skips(): pass
@pytest.mark.xfail
def test_is_expected_to_fail(): assert 0
"""

pytestmark = pytest.mark.slow


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    plugins = ("no:cacheprovider", "no:xdist", "tests.support.forked")
    words = (*(f"-p{plugin}" for plugin in plugins), "--forks=2", *words)
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-qra",
            "-c/dev/null",
            f"--rootdir={folder}",
            *words,
            folder,
        ],
        cwd=Path(__file__).parents[3],
        check=False,
        text=True,
        capture_output=True,
        timeout=100,
    )


def test_every_outcome_is_reported(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(TESTS)
    (tmp_path / "test_b.py").write_text("def test_other(): pass")
    ended = run(tmp_path)
    assert ended.returncode == pytest.ExitCode.TESTS_FAILED
    assert "1 failed, 3 passed, 1 skipped, 1 xfailed, 2 errors" in ended.stdout
    for words in ("AssertionError: seen", "in setup", "in teardown", "not here"):
        assert words in ended.stdout


@pytest.mark.parametrize(
    ("ends", "how"),
    [("os._exit(0)", "exit code 0"), ("os.kill(os.getpid(), 9)", "SIGKILL")],
)
def test_a_process_that_ends_is_no_success(tmp_path: Path, ends: str, how: str) -> None:
    (tmp_path / "test_a.py").write_text(
        f"import os\ndef test_passes(): pass\ndef test_ends(): {ends}\ndef test_later(): pass"
    )
    (tmp_path / "test_b.py").write_text("def test_other(): pass")
    ended = run(tmp_path)
    assert ended.returncode == pytest.ExitCode.TESTS_FAILED
    assert "2 passed" in ended.stdout
    said = f"a process has ended by {how} in test_a.py::test_ends; tests not run: 2"
    assert said in ended.stdout


def test_a_file_that_can_not_be_imported_is_an_error_beside_the_others(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text("import nowhere_to_be_found")
    (tmp_path / "test_b.py").write_text("def test_other(): pass")
    ended = run(tmp_path)
    assert ended.returncode == pytest.ExitCode.TESTS_FAILED
    assert "No module named 'nowhere_to_be_found'" in ended.stdout
    assert "1 passed, 1 error in" in ended.stdout


def test_a_file_that_ends_its_process_is_no_success(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text("import os; os._exit(0)")
    (tmp_path / "test_b.py").write_text("def test_other(): pass")
    ended = run(tmp_path)
    assert ended.returncode == pytest.ExitCode.TESTS_FAILED
    assert "tests not run: 0, files not collected: 1" in ended.stdout
