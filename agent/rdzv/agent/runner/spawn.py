"""How a worker is spawned: `fork_into` forks a child, which prepares itself and runs its program.

The child opens its own files under its own account, so a hung file system blocks only the child.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import sys
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from .processes import new_mark, set_own_mark
from .system import PR_SET_PDEATHSIG, Identity, become, prctl

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from typing import NoReturn

NOT_STARTED = 127
"""The exit code that a shell returns for a program it cannot start."""

# Schedulers, for instance, send these to every process of a job step. They are intended for the
# workers, which would all die with the runner. Fault signals (such as SIGSEGV) stay fatal.
SIGNALS_FOR_WORKERS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGALRM,
    signal.SIGTSTP,
    signal.SIGTTIN,
    signal.SIGTTOU,
)


class SpawnError(Exception):
    """Raised if a program cannot be run; the message gives the invalid value and the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program for a child to run.

    A stream is one of the runner's descriptors, or a path to append to. None means the runner's own
    stream, or /dev/null with an identity; stdin is empty unless `shares_stdin`. `pass_fds` are
    other descriptors to pass to the program.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str | None = None
    shares_stdin: bool = False
    stdout: str | int | None = None
    stderr: str | int | None = None
    pass_fds: Collection[int] = ()
    cpus: Collection[int] | None = None
    blocked: Collection[int] = ()
    identity: Identity | None = None
    needs: Path | None = None
    """A file that must exist, because the program would do something else without it."""


def own_program(role: str, fd: int) -> Program:
    path = str(Path(__file__).with_name("__main__.py"))
    argv = (sys.executable, "-I", "-S", path, role, str(fd))
    return Program(argv=argv, env={}, pass_fds=(fd,))


def fork_into(program: Program, says: int) -> int:
    """Fork a child that leads its own session and runs a program. Returns its pid.

    The child dies with this process, has only the program's descriptors, ignores no signals, and
    blocks only those in `blocked`. It writes each step it is about to take to `says`, terminated by
    NUL, and the exec closes `says`. Text without a final NUL is the reason why the program is not
    running. Raises `OSError` if the fork fails.
    """
    parent = os.getpid()
    # This process ignores signals intended for its workers. A signal that arrived before the child
    # has its own dispositions would be lost, so signals are blocked until then.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            _become_program(program, parent, says)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return pid


def _become_program(program: Program, parent: int, says: int) -> NoReturn:
    try:
        _prepare_child(program, parent, says)
        _open_streams(program, says)
        if program.cwd is not None:
            with _step(f"cwd {program.cwd!r}", says):
                os.chdir(program.cwd)
        for fd in program.pass_fds:
            os.set_inheritable(fd, True)
        if program.needs is not None:
            with _step(f"file {str(program.needs)!r}", says):
                os.stat(program.needs)  # noqa: PTH116
        with _step(f"argv[0] {program.argv[0]!r}", says):
            _execute(program)
    except SpawnError as error:
        _write_all(says, str(error))
    except BaseException as error:
        _write_all(says, f"{type(error).__name__}: {error}")
    finally:
        os._exit(NOT_STARTED)


def _prepare_child(program: Program, parent: int, says: int) -> None:
    os.setsid()
    signal.set_wakeup_fd(-1)
    keep = {0, 1, 2, says, *program.pass_fds}
    with suppress(OSError):  # The exec also closes them, but may hang before that.
        for fd in {int(name) for name in os.listdir("/proc/self/fd")} - keep:  # noqa: PTH208
            with suppress(OSError):
                os.close(fd)
    for signum in signal.valid_signals():
        if signal.getsignal(signum) is signal.SIG_IGN:
            signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _die_with_parent(parent)
    signal.pthread_sigmask(signal.SIG_SETMASK, program.blocked)
    if program.cpus is not None:
        with _step(f"cpus {program.cpus!r:.80}", says):
            os.sched_setaffinity(0, program.cpus)
    if (mark := program.env.get("RDZV_WORKER_MARK", "")).isdigit():
        set_own_mark(int(mark))
    elif family := program.env.get("RDZV_RUNNER"):
        set_own_mark(new_mark(family))
    drop_oom_protection()
    if program.identity is not None:
        with _step(f"user {program.identity.uid}, with its groups and limits", says):
            become(program.identity)
        # Changing the user has cleared the setting.
        _die_with_parent(parent)


def _open_streams(program: Program, says: int) -> None:
    if not program.shares_stdin:
        stdin = os.open(os.devnull, os.O_RDONLY)
        os.dup2(stdin, 0)
        os.close(stdin)
    for fd, name, stream in ((1, "stdout", program.stdout), (2, "stderr", program.stderr)):
        if isinstance(stream, str):
            with _step(f"{name} {stream!r}", says, path=stream):
                log = _open_log(stream)
            os.dup2(log, fd)
            os.close(log)
        elif stream is not None:
            os.dup2(stream, fd)
        elif program.identity is not None:
            # The runner's own stream is the agent's log, which another account must not write to.
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, fd)
            os.close(null)


def _open_log(path: str) -> int:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    # O_NONBLOCK, because opening a FIFO without a reader would block.
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOCTTY | os.O_NONBLOCK
    fd = os.open(path, flags, 0o666)
    os.set_blocking(fd, True)
    return fd


def _execute(program: Program) -> None:
    try:
        os.execvpe(program.argv[0], program.argv, program.env)
    except FileNotFoundError as error:
        text = os.strerror(errno.ENOENT)
        if Path(program.argv[0]).exists():
            text += "; the file exists, so the interpreter named in its first line is missing"
            with suppress(OSError), Path(program.argv[0]).open("rb") as script:
                if script.readline(256).endswith(b"\r\n"):
                    text += ": its name there ends in a carriage return, as lines do on Windows"
        raise OSError(errno.ENOENT, text) from error


@contextmanager
def _step(what: str, says: int, *, path: str | None = None) -> Iterator[None]:
    """Report a step that a child is about to take. Raises `SpawnError` if the step fails."""
    _write_all(says, f"{what}\0")
    try:
        yield
    except (OSError, ValueError) as error:
        folder = getattr(error, "filename", None)
        where = what if path is None or folder in (None, path) else f"{what}: its folder {folder!r}"
        raise SpawnError(f"{where}: {reason_of(error)}") from error


def _write_all(fd: int, text: str) -> None:
    left = text.encode(errors="replace")
    while left:
        left = left[os.write(fd, left) :]


def _die_with_parent(parent: int) -> None:
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # The parent died before the call.
        os.kill(os.getpid(), signal.SIGKILL)


def drop_oom_protection(score: Path = Path("/proc/self/oom_score_adj")) -> None:
    """Undo the agent's protection from the OOM killer, which workers must not inherit."""
    with suppress(OSError, ValueError):
        if int(score.read_bytes()) < 0:
            score.write_bytes(b"0")


def reason_of(error: OSError | ValueError) -> str:
    """Return an error's text, without its number and file name, and with a limit that was met."""
    text = (isinstance(error, OSError) and error.strerror) or str(error)
    if isinstance(error, OSError) and error.errno == errno.EMFILE:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        text += f" (this process may have {limit}: raise `ulimit -n`, or systemd's LimitNOFILE=)"
    return text
