"""The job's zygote, from which workers and store hosts are forked: start, read and replace it.

The program is zygote.py, which also lists the messages. A zygote that dies is replaced after a
delay, unless it refused to serve.

A zygote for restarts is started once workers have imported torch. The first round is cold. Its
workers report over a socket when they have imported torch, and which of the variables that torch
reads on import had been changed by the script (torch_watch.py). A zygote would not see such a
change, so workers then stay cold, as they do after a warm worker has crashed.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from .channel import RECEIVE_BYTES
from .child_exits import start_linked
from .descriptors import SentDescriptorError, close_job_socket, dup_fds, receive_data
from .frames import Number, Text, decode
from .spawn import SIGNALS_FOR_WORKERS, Program, reason_of
from .system import free_bytes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .channel import Link
    from .child_exits import Child
    from .loop import Loop
    from .requests import ZygoteSpec
    from .runner import Runner

PRELOAD_TIMEOUT_S = 600.0
MAX_MESSAGE_BYTES = 256 << 10
MAX_ZYGOTE_RETRY_S = 60.0

NEEDS_BYTES = 1 << 30
"""The memory that must be free before a zygote for restarts is started. This is several times its
actual need, because it must never cause a worker to run out of memory.
"""

ZYGOTE_HOOK = Path(__file__).parents[1] / "job_programs" / "zygote_hook"
"""A folder whose `sitecustomize` turns an interpreter into a zygote."""

WATCH_HOOK = ZYGOTE_HOOK.with_name("watch_hook")
"""A folder whose `sitecustomize` makes an interpreter report its import of torch."""

SETTLE_S = 10.0
"""How long after the first import of torch the CPUs are left to the other workers' imports."""

YOUNG_S = 60.0
"""The age of a job up to which its restarts without a zygote are explained. Later ones are usual:
its workers do not import torch.
"""

STILL_IMPORTING = "the zygote is still importing; later restarts are warm"

CRASH_WITHIN_S = 10.0
"""The time after its start within which a warm worker's crash is blamed on the fork."""

CRASHES = (
    *(signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL),
    *(signal.SIGSEGV, signal.SIGSYS, signal.SIGTRAP),
)
"""Signals that a process causes itself. Other signals are sent to it, and reveal nothing about the
fork.
"""

MAX_REPORTS_PER_WORKER = 64
"""The maximum number of reports per worker, after which no more are received. A worker's forks may
also send reports.
"""

_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class Readiness:
    """A zygote's description of itself."""

    modules: tuple[str, ...]
    threads: int
    memory_kb: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Forked:
    """A zygote's answer to a request: as many pids as it could fork, and why there are no more."""

    forked: Number
    pids: tuple[int, ...]
    reason: Text


def zygote_environ(env: Mapping[str, str], order: Mapping[str, object]) -> dict[str, str]:
    path = env.get("PYTHONPATH")
    return {
        **env,
        "PYTHONPATH": os.pathsep.join([str(ZYGOTE_HOOK), *([path] if path else [])]),
        "RDZV_ZYGOTE": json.dumps({**order, "path": path}),
    }


class ZygoteProcess:
    """Keeps a zygote running once the agent has requested one."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._loop = runner.loop
        self.spec: ZygoteSpec | None = None
        self._zygote: tuple[Child, Link] | None = None
        self.is_ready = False
        self._lost = 0
        """The number of zygotes lost since the last fork."""
        self._lost_because = ""
        """Why the zygote is ending, if its exit status will not show that."""
        self._none_because = ""
        self.begun = False
        self.given_up = False

    @property
    def imports(self) -> bool:
        return self._zygote is not None and not self.is_ready

    @property
    def not_ready_because(self) -> str:
        if self._zygote is None:
            return self._none_because
        return self._lost_because or STILL_IMPORTING

    def keep(self, spec: ZygoteSpec) -> None:
        if self.spec is None:
            self.spec = spec
            if not spec.after_import:
                self.begin()

    def begin(self) -> None:
        if not self.begun and not self.given_up:
            self.begun = True
            self._start()

    def give_up_for_good(self, reason: str) -> None:
        self.given_up = True
        self._loop.call_at(None, self._start)
        if self._zygote is None:
            self._report_lost(reason)
        else:
            self.give_up(reason)

    def ask(self, batch: int, links: Sequence[int]) -> None:
        """Ask the zygote, which is ready, for one fork per link. May raise `OSError`."""
        assert self._zygote is not None
        _, link = self._zygote
        link.send({"fork": batch, "forks": len(links)}, *dup_fds(*links))
        self._loop.watch_channel(link)

    def hurry(self) -> None:
        """Let a zygote that imports have as much CPU as the workers that now wait for it."""
        if self._zygote is not None:
            with suppress(OSError):  # The kernel refuses more than ten changes per second.
                Path(f"/proc/{self._zygote[0].pid}/autogroup").write_text("0")

    def give_up(self, reason: str) -> None:
        """Kill a zygote that is not fulfilling requests."""
        if self._zygote is None:
            return
        child, link = self._zygote
        self.is_ready = False
        self._loop.call_at(None, self._end_imports)
        self._lost_because = self._lost_because or reason
        link.close()
        child.kill()
        self._runner.forks.zygote_lost(reason)

    def has_forked(self) -> None:
        self._lost = 0

    def _end_imports(self) -> None:
        self.give_up(f"it has not imported within {PRELOAD_TIMEOUT_S:.0f} s")

    def _start(self) -> None:
        spec = self.spec
        assert spec is not None
        if self._loop.shutting_down:
            return
        self._lost_because = ""
        if spec.after_import and (free := free_bytes()) is not None and free < NEEDS_BYTES:
            needed = f"{NEEDS_BYTES >> 20} MiB of memory"
            self._report_lost(f"it is not started with less than {needed} free")
            return
        try:
            self._zygote = start_linked(
                self._runner, "the zygote", partial(_program_of, spec), self._end_zygote,
                self._handle_message, self._lose_link, MAX_MESSAGE_BYTES,
            )  # fmt: skip
        except OSError as error:
            self._report_lost(f"cannot start {spec.argv[0]!r}: {reason_of(error)}")
        else:
            self._loop.call_at(time.monotonic() + PRELOAD_TIMEOUT_S, self._end_imports)

    def _handle_message(self, message: Mapping[str, object]) -> None:
        if "ready" in message:
            readiness = decode(Readiness, message["ready"])
            self.is_ready = True
            self._loop.call_at(None, self._end_imports)
            self._runner.forks.zygote_ready()
            assert self._zygote is not None
            pid = self._zygote[0].pid
            self._runner.agent.emit("zygote_ready", pid=pid, **asdict(readiness))
        elif "refused" in message:
            self._lost_because, self.given_up = str(message["refused"]), True
        else:
            self._runner.forks.forked(decode(Forked, message))

    def _lose_link(self, error: Exception) -> None:
        if isinstance(error, ValueError):  # Otherwise it has ended, as its exit is about to show.
            self.give_up(f"it sent something else than a message: {error}")

    def _end_zygote(self, child: Child, code: int) -> None:
        assert self._zygote is not None
        _, link = self._zygote
        while link.read():
            pass
        link.close()
        self._loop.call_at(None, self._end_imports)
        self._zygote, self.is_ready = None, False
        if not self._loop.shutting_down:
            ended = f"it was killed by signal {-code}" if code < 0 else f"it exited with {code}"
            if child.failure:
                assert self.spec is not None
                ended = f"cannot start {self.spec.argv[0]!r}: {child.failure}"
            self._report_lost(self._lost_because or ended)
        self._runner.forks.zygote_lost(self._none_because)

    def _report_lost(self, reason: str) -> None:
        self._none_because = f"there is no zygote: {reason}"
        retry_s = None
        if not self.given_up:
            retry_s = min(2.0**self._lost, MAX_ZYGOTE_RETRY_S)
            self._loop.call_at(time.monotonic() + retry_s, self._start)
            self._lost += 1
        self._runner.agent.emit("zygote_lost", reason=reason, retry_s=retry_s)


def _program_of(spec: ZygoteSpec, control_fd: int) -> Program:
    order = {"argv": spec.argv, "fd": control_fd, "modules": spec.modules}
    order |= {"for_restarts": spec.after_import}
    return Program(
        argv=spec.argv,
        env=zygote_environ(spec.env, order),
        cwd=spec.cwd,
        stdout=2,  # Modules may print on import, which belongs in the log.
        pass_fds=(control_fd,),
        cpus=spec.cpus,
        # Workers should find all signal dispositions as in a fresh interpreter.
        blocked=SIGNALS_FOR_WORKERS,
        identity=spec.identity,
        # An upgrade may have removed or moved it. The user's script would then run instead.
        needs=ZYGOTE_HOOK / "sitecustomize.py",
    )


class WarmRestarts:
    """Watches the workers of a job that should have warm restarts."""

    def __init__(self, loop: Loop, zygote: ZygoteProcess) -> None:
        self._loop = loop
        self._zygote = zygote
        self._socket: socket.socket | None = None
        self._address = ""
        self._workers = 0
        self._reports_left = 0
        self._imported: set[int] = set()
        self._rounds = 0
        self._since = 0.0
        self._round_began_at = 0.0
        self._import_s = 0.0
        """How long this node's workers have taken to import torch; 0 until they have."""
        self._zygote_due_at = 0.0

    @property
    def worth_waiting_s(self) -> float:
        """How long workers wait for the zygote that imports; 0 if a cold start would be sooner."""
        left_s = self._zygote_due_at - time.monotonic()
        return left_s if 0 < left_s <= self._import_s else 0.0

    @property
    def cold_because(self) -> str:
        age_s = time.monotonic() - self._since
        if self._rounds < 2 or age_s >= YOUNG_S or not self._wanted or self._zygote.begun:
            return ""
        return (
            f"this job began {age_s:.0f} s ago on this node; restarts are warm once its workers, "
            "and then the zygote, have imported torch"
        )

    @property
    def _wanted(self) -> bool:
        spec = self._zygote.spec
        return spec is not None and spec.after_import and not self._zygote.given_up

    @property
    def report_to(self) -> str | None:
        return self._address if self._socket is not None else None

    def close(self) -> None:
        if self._socket is not None:
            self._loop.unwatch(self._socket.fileno())
            close_job_socket(self._socket)
            self._socket = None

    def begin_round(self, workers: int) -> None:
        if not self._wanted:
            return
        self._rounds += 1
        self._round_began_at = time.monotonic()
        if self._rounds == 1:
            self._since = self._round_began_at
        self._workers = workers
        self._imported.clear()
        self._reports_left = MAX_REPORTS_PER_WORKER * workers
        try:
            if self._socket is None:
                self._listen()
        except OSError as error:
            self._give_up(f"its workers cannot be watched: {reason_of(error)}")

    def _listen(self) -> None:
        # Uses an abstract address, because scripts could see an inherited descriptor.
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._address = f"rdzv-torch-{os.urandom(16).hex()}"
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind(f"\0{self._address}")
        self._loop.watch(self._socket.fileno(), self._read)

    def watched(self, program: Program) -> Program:
        if self._socket is None:
            return program
        path = program.env.get("PYTHONPATH")
        env = {
            **program.env,
            "PYTHONPATH": os.pathsep.join([str(WATCH_HOOK), *([path] if path else [])]),
            "RDZV_TORCH_WATCH": self._address if path is None else f"{self._address}:{path}",
        }
        return replace(program, env=env)

    def note_exit(self, child: Child, code: int, started_at: float) -> None:
        age_s = time.monotonic() - started_at
        if self._wanted and -code in CRASHES and age_s < CRASH_WITHIN_S:
            name = signal.Signals(-code).name
            self._give_up(
                f"a warm worker, pid {child.pid}, died of {name} {age_s:.1f} s after its start"
            )

    def _begin(self) -> None:
        if self._wanted and not self._loop.shutting_down:
            now = time.monotonic()
            self._import_s = now - self._round_began_at
            # It imports torch._dynamo, too, which takes as much CPU as torch.
            self._zygote_due_at = now + 2 * self._import_s
            self._zygote.begin()

    # ------------------------------------------------------------------ reports

    def _read(self) -> None:
        """Receive a report. The worker is the user's own process and may send anything."""
        assert self._socket is not None
        try:
            data, ancillary = receive_data(
                self._socket, RECEIVE_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size)
            )
        except BlockingIOError:
            return
        except SentDescriptorError:
            self.close()  # Nothing can be received after it.
            return
        self._reports_left -= 1
        try:
            pid, uid, _ = _CREDENTIALS.unpack(ancillary[0][2])
            changed = [str(name) for name in json.loads(data)["changed"]]
        except (ValueError, TypeError, LookupError, RecursionError, struct.error):
            pass
        else:
            if uid == self._uid:  # Any account can see the address.
                self._handle_report(pid, changed)
        if self._reports_left <= 0:
            self.close()

    @property
    def _uid(self) -> int:
        spec = self._zygote.spec
        identity = None if spec is None else spec.identity
        return os.getuid() if identity is None else identity.uid

    def _handle_report(self, pid: int, changed: list[str]) -> None:
        if changed:
            names = ", ".join(f"{name!r:.70}" for name in changed[:8])
            self._give_up(
                f"the script changes {names} before it imports torch, which a fork has "
                "already imported; set it for the launch to have warm restarts"
            )
            return
        self._imported.add(pid)
        if self._zygote.begun:
            return
        now = time.monotonic()
        if len(self._imported) >= self._workers:
            self._loop.call_at(now, self._begin)
        elif self._loop.time_of(self._begin) is None:
            self._loop.call_at(now + SETTLE_S, self._begin)

    def _give_up(self, reason: str) -> None:
        self._loop.call_at(None, self._begin)
        self.close()
        self._zygote.give_up_for_good(reason)
