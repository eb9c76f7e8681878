"""In a copy whose lines are recorded: programs started by tests record which lines they run.

The sources of the copy execute this file when they are imported (`record.py`), because there is no
other way into each program: a runner starts as `python -I -S`, a worker is forked. A line is
written the first time it runs, because many programs are killed.
"""

import os
import sys
import threading

_root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # noqa: PTH100, PTH120
_sources = ("agent/rdzv/", "rendezvous/rdzv/", "worker/rdzv/")
_folders = tuple(os.path.join(_root, each) for each in _sources)  # noqa: PTH118
_seen = set()


def _current_test():
    """Return the test that started this program, or one of its ancestors.

    A worker has only the environment that its job gives it.
    """
    pid = os.getpid()
    while pid > 1:
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123
                words = file.read().split(b"\0")
            with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123
                pid = int(file.read().rpartition(b")")[2].split()[1])
        except OSError:
            return ""
        for word in words:
            if word.startswith(b"PYTEST_CURRENT_TEST="):
                return os.fsdecode(word.partition(b"=")[2]).rpartition(" (")[0]
    return ""


def _call(frame, event, arg):
    return _line if frame.f_code.co_filename.startswith(_folders) else None


def _line(frame, event, arg):
    here = (frame.f_code.co_filename, frame.f_lineno)
    if event == "line" and here not in _seen:
        _seen.add(here)
        text = f"{_test}\t{here[0][len(_root) + 1 :]}\t{here[1]}\n"
        try:
            fd = os.open(os.path.join(_root, "lines-of-programs"), os.O_WRONLY | os.O_APPEND)  # noqa: PTH118
            os.write(fd, text.encode())
            os.close(fd)
        except OSError:  # Another account, or no descriptor is left.
            pass
    return _line


_test = "" if "pytest" in sys.modules or sys.gettrace() else _current_test()
if _test:
    threading.settrace(_call)
    sys.settrace(_call)
