"""A worker that writes down what it sees, then executes its arguments in order.

`say=TEXT` writes TEXT to stdout and, with a `!`, to stderr; `read` reads stdin; `error=TEXT` writes
the error file; `exit=N`; `kill=N` sends itself a signal; `fail-before=N` exits with 3 in attempts
before N, `fail-as=R:N` rank R with N; `wait` waits to be ended; `await=R` waits until rank R of
this attempt has been seen, and `await-end=R` until it has ended. After `rank=R` only rank R
continues. `handle` and `deaf`, anywhere, note the signals that come and end with 0, or ignore them.
Other arguments are ignored.
"""

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

SEEN = Path(os.environ["CONFORMANCE_SEEN"])
HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
DEADLINE_S = 240  # Longer than launchers.py waits, which reports hangs.


def main() -> None:
    if {"handle", "deaf"} & set(sys.argv):
        for signum in HANDLED:
            signal.signal(signum, note if "handle" in sys.argv else signal.SIG_IGN)
    write("json", look())
    for word in sys.argv[1:]:
        verb, _, value = word.partition("=")
        if verb == "rank" and value != os.environ["RANK"]:
            return
        if verb in DEEDS:
            DEEDS[verb](value)


def look() -> dict:
    return {
        "env": dict(os.environ),
        "pid": os.getpid(),
        "argv": sys.argv,
        "name": __name__,
        "cwd": str(Path.cwd()),
        "stdin": sys.stdin.read() if "read" in sys.argv else None,
        "stdout": str(Path("/proc/self/fd/1").readlink()),
        "stderr": str(Path("/proc/self/fd/2").readlink()),
        "python": sys.prefix,
        "unbuffered": sys.stdout.write_through,
        "sys.path[0]": sys.path[0],
        "leads its session": os.getsid(0) == os.getpid(),
    }


def write(kind: str, what: object) -> None:
    """Write a file atomically."""
    path = SEEN / f"{attempt()}-{os.environ.get('RANK')}-{os.getpid()}.{kind}"
    path.with_suffix(".tmp").write_text(json.dumps(what))
    path.with_suffix(".tmp").rename(path)


def attempt() -> str:
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def note(signum: int, frame: object) -> None:
    write("signal", signal.Signals(signum).name)
    os._exit(0)


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())
    os.write(2, f"{text}!\n".encode())


def fail_before(value: str) -> None:
    if int(attempt()) < int(value):
        sys.exit(3)


def fail_as(value: str) -> None:
    rank, _, code = value.partition(":")
    if os.environ["RANK"] == rank:
        sys.exit(int(code))


def wait_until(condition: object) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            sys.exit(99)
        time.sleep(0.01)


def seen(rank: str) -> list:
    return [*SEEN.glob(f"{attempt()}-{rank}-*.json")]


def wait_for(rank: str) -> None:
    wait_until(lambda: seen(rank))


def wait_for_end(rank: str) -> None:
    wait_for(rank)
    (path,) = seen(rank)
    pid = path.stem.rpartition("-")[2]
    wait_until(lambda: has_ended(pid))


def has_ended(pid: str) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


DEEDS = {
    "say": say,
    "error": lambda text: Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(text),
    "exit": lambda value: sys.exit(int(value)),
    "kill": lambda value: os.kill(os.getpid(), int(value)),
    "fail-before": fail_before,
    "fail-as": fail_as,
    "wait": lambda _: wait_until(lambda: False),
    "await": wait_for,
    "await-end": wait_for_end,
}

main()
