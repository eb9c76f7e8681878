"""The hook in a worker's interpreter leaves the exception that ends the script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rdzv.agent.observers.collective_records import with_hook
from rdzv.agent.system.error_files import NO_ERROR_FILE, read_error

pytestmark = pytest.mark.slow

RAISE = "def step():\n    raise ValueError('loss is nan')\n\nstep()\n"


def end(folder: Path, script: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a script with the hook to its end."""
    (folder / "train.py").write_text(script)
    return subprocess.run(
        [sys.executable, "train.py"],
        cwd=folder,
        env=with_hook({"TORCHELASTIC_ERROR_FILE": str(folder / "error.json"), **environ}),
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.quick
def test_message_and_traceback_are_those_of_record(tmp_path: Path) -> None:
    done = end(tmp_path, RAISE)
    error = read_error(tmp_path / "error.json", None, 1)
    assert error.message == "ValueError: loss is nan"
    assert error.traceback == done.stderr.strip()
    body = json.loads((tmp_path / "error.json").read_text())["message"]
    assert body.keys() == {"message", "extraInfo"}
    assert body["extraInfo"]["timestamp"].isdecimal()


def test_the_end_of_the_script_is_shown_but_not_that_of_its_children(tmp_path: Path) -> None:
    script = (
        "import os, sys\nos.setsid()\nif os.fork() == 0:\n    sys.exit(0)\nos.wait()\n"
        "print(os.getpid(), os.listdir('shared'))"
    )
    (tmp_path / "shared").mkdir()
    done = end(tmp_path, script, RDZV_PROGRESS_FILE=str(tmp_path / "shared" / "progress"))
    pid, _, before = done.stdout.strip().partition(" ")
    assert before == "[]", done.stderr
    assert [*map(str, (tmp_path / "shared").iterdir())] == [
        str(tmp_path / "shared" / f"collectives.{pid}.exits")
    ]


def test_an_exception_without_a_text_is_written_as_well(tmp_path: Path) -> None:
    fails = "class Odd(Exception):\n    def __str__(self):\n        raise KeyError\n\nraise Odd\n"
    done = end(tmp_path, fails)
    error = read_error(tmp_path / "error.json", None, 1)
    assert error.message == "Odd: <exception str() failed>"
    assert error.traceback == done.stderr.strip()


def test_an_exception_is_written_where_nothing_else_can_be_opened(tmp_path: Path) -> None:
    few = "import resource as r\nr.setrlimit(r.RLIMIT_NOFILE, (32, 32))\n"
    done = end(tmp_path, f"{few}held = []\nwhile True:\n    held.append(open('/dev/null'))\n")
    error = read_error(tmp_path / "error.json", None, 1)
    assert error.message == "OSError: [Errno 24] Too many open files: '/dev/null'"
    assert error.traceback == done.stderr.strip()


def test_a_file_that_the_script_has_written_is_kept(tmp_path: Path) -> None:
    text = json.dumps({"message": "it knows better"})
    done = end(tmp_path, f"open('error.json', 'w').write({text!r})\n{RAISE}")
    assert read_error(tmp_path / "error.json", None, 1).message == "it knows better"
    assert done.stderr.count("Traceback") == 1


@pytest.mark.parametrize(
    "script",
    [
        "import sys\nprint('busy', file=sys.stderr)\nsys.exit('no such data set')",
        "def main():\n    raise SystemExit('no such data set')\nmain()",
        "import runpy\nrunpy.run_path('other.py', run_name='__main__')",
        "import atexit, sys\natexit.register(lambda: 1 / 0)\nsys.exit('no such data set')",
    ],
)
def test_the_text_of_an_exit_is_the_message(tmp_path: Path, script: str) -> None:
    (tmp_path / "other.py").write_text("exit('no such data set')")
    done = end(tmp_path, script)
    assert done.returncode == 1
    error = read_error(tmp_path / "error.json", None, 1)
    assert (error.message, error.traceback) == ("no such data set", "")
    assert done.stderr.count("no such data set\n") == 1


@pytest.mark.parametrize(
    "script",
    [
        pytest.param("raise SystemExit(3)", id="an exit"),
        pytest.param(
            "import sys\ntry:\n    sys.exit('it is caught')\nexcept SystemExit as end:\n"
            "    print(end.code, file=sys.stderr)\nsys.exit(2)",
            id="an exit that is caught",
        ),
        pytest.param(
            "import sys, threading\nthread = threading.Thread(target=sys.exit, args=('of it',))\n"
            "thread.start()\nthread.join()\nsys.exit(2)",
            id="an exit of a thread",
        ),
        pytest.param(
            "import atexit, sys\natexit.register(lambda: 1 / 0)\nsys.exit(2)",
            id="an exception at the exit",
        ),
        pytest.param("raise KeyboardInterrupt", id="an interruption"),
        pytest.param("try:\n    1 / 0\nexcept ArithmeticError:\n    pass", id="a caught exception"),
    ],
)
def test_other_ends_leave_nothing(tmp_path: Path, script: str) -> None:
    end(tmp_path, script)
    assert read_error(tmp_path / "error.json", None, 1).message == NO_ERROR_FILE


@pytest.mark.parametrize("path", [os.devnull, "/nowhere/error.json", ""])
def test_without_a_place_for_the_file_the_script_ends_as_usual(tmp_path: Path, path: str) -> None:
    done = end(tmp_path, RAISE, TORCHELASTIC_ERROR_FILE=path)
    assert done.returncode == 1
    assert done.stderr.endswith("ValueError: loss is nan\n")
    assert done.stderr.count("Traceback") == 1


def test_a_child_with_an_interpreter_of_its_own_leaves_nothing(tmp_path: Path) -> None:
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import nothing_here'])"
    done = end(tmp_path, child)
    assert "No module named 'nothing_here'" in done.stderr
    assert not (tmp_path / "error.json").exists()
