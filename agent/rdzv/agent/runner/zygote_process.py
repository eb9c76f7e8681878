"""The job's zygote, from which workers and store hosts are forked: start, read and replace it.

The program is zygote.py, which also lists the messages. A zygote that dies is replaced after a
delay, unless it refused to serve. A zygote for restarts is started when warm_restarts.py requests
it.
"""

from __future__ import annotations

import json
import os
import socket
import time
from functools import partial
from pathlib import Path

from .channel import Channel, MalformedFrameError
from .descriptors import dup_fds
from .requests import RequestError, read_zygote_spec
from .spawn import SIGNALS_FOR_WORKERS, Program, reason_of
from .system import free_bytes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any, Protocol

    from .agent_link import AgentLink
    from .child_exits import Child, Children
    from .loop import Loop
    from .requests import ZygoteSpec

    class ForkReceiver(Protocol):
        """Receives a zygote's reports."""

        def zygote_ready(self) -> None:
            """Start using the zygote, which now accepts fork requests."""

        def forked(self, batch: int, pids: Sequence[int], reason: str) -> None:
            """Handle a batch of forks; `reason` explains any missing ones. May raise `KeyError`."""

        def zygote_lost(self, reason: str) -> None:
            """Continue without the zygote."""


PRELOAD_TIMEOUT_S = 600.0
MAX_MESSAGE_BYTES = 256 << 10
MAX_ZYGOTE_RETRY_S = 60.0

NEEDS_BYTES = 1 << 30
"""The memory that must be free before a zygote for restarts is started. This is several times its
actual need, because it must never cause a worker to run out of memory.
"""

ZYGOTE_HOOK = Path(__file__).parents[1] / "job_programs" / "zygote_hook"
"""A folder whose `sitecustomize` turns an interpreter into a zygote."""


def zygote_environ(env: Mapping[str, str], order: Mapping[str, object]) -> dict[str, str]:
    """Return an environment that makes an interpreter execute an order defined in zygote.py."""
    path = env.get("PYTHONPATH")
    return {
        **env,
        "PYTHONPATH": os.pathsep.join([str(ZYGOTE_HOOK), *([path] if path else [])]),
        "RDZV_ZYGOTE": json.dumps({**order, "path": path}),
    }


class Zygote:
    """A zygote that has not been reaped."""

    child: Child

    def __init__(self, control: socket.socket, spec: ZygoteSpec) -> None:
        # The zygote is the job's own process, so the size of its messages is limited.
        self.control = Channel(control, takes_fds=False, max_bytes=MAX_MESSAGE_BYTES)
        self.spec = spec
        self.ready = False
        self.ready_until: float | None = time.monotonic() + PRELOAD_TIMEOUT_S
        """When the zygote will be given up; None once it is ready or has been given up."""
        self.lost_because = ""
        """Why the zygote is ending, if its exit status will not show that."""
        self.final = False
        """Whether replacing the zygote would not help."""


class ZygoteProcess:
    """Keeps a zygote running once the agent has requested one."""

    def __init__(
        self, loop: Loop, children: Children, agent: AgentLink, receiver: ForkReceiver
    ) -> None:
        self._loop = loop
        self._children = children
        self._agent = agent
        self._receiver = receiver
        self.spec: ZygoteSpec | None = None
        self._zygote: Zygote | None = None
        self._lost = 0
        """The number of zygotes lost since the last fork."""
        self._retry_at: float | None = None
        self._none_because = ""
        self.begun = False
        """Whether a start was attempted."""
        self.given_up = False
        """Whether no further zygote will be started."""

    @property
    def is_ready(self) -> bool:
        """Whether the zygote accepts fork requests."""
        return self._zygote is not None and self._zygote.ready

    @property
    def imports(self) -> bool:
        return self._zygote is not None and not self._zygote.ready

    @property
    def not_ready_because(self) -> str:
        """The reason why nothing can be forked at the moment."""
        if self._zygote is None:
            return self._none_because
        return self._zygote.lost_because or "the zygote is still importing"

    def keep(self, request: Mapping[str, object]) -> None:
        spec = read_zygote_spec(request)
        if self.spec is not None:
            raise RequestError("this job already has a zygote")
        self.spec = spec
        if not spec.after_import:
            self.begin()

    def begin(self) -> None:
        """Start the zygote, unless it has already been started or given up."""
        if not self.begun and not self.given_up:
            self.begun = True
            self._start()

    def give_up_for_good(self, reason: str) -> None:
        """End the zygote for good: all further workers of the job are started cold."""
        self.given_up, self._retry_at = True, None
        if self._zygote is None:
            self._report_lost(reason, final=True)
        else:
            self._zygote.final = True
            self.give_up(reason)

    def ask(self, batch: int, links: Sequence[int]) -> None:
        """Ask the zygote, which is ready, for one fork per link. May raise `OSError`."""
        assert self._zygote is not None
        self._zygote.control.send({"fork": batch, "forks": len(links)}, *dup_fds(*links))
        self._loop.watch_channel(self._zygote.control)

    def give_up(self, reason: str) -> None:
        """Kill a zygote that is not fulfilling requests."""
        zygote = self._zygote
        if zygote is None:
            return
        zygote.ready, zygote.ready_until = False, None
        zygote.lost_because = zygote.lost_because or reason
        self._close_control(zygote)
        zygote.child.kill()
        self._receiver.zygote_lost(reason)

    def has_forked(self) -> None:
        """Record that the zygote works, so that a replacement is started quickly if it is lost."""
        self._lost = 0

    def attach(self, zygote: Zygote) -> None:
        """Use this zygote from now on. Raises `OSError` if its socket cannot be watched."""
        self._loop.watch(zygote.control.fileno(), partial(self.read, zygote))
        self._zygote = zygote

    def wake_times(self) -> Iterator[float | None]:
        yield self._retry_at
        if self._zygote is not None:
            yield self._zygote.ready_until

    def do_due(self, now: float) -> None:
        """Start another zygote when it is time, or give up one whose imports take too long."""
        if self._retry_at is not None and now >= self._retry_at:
            self._retry_at = None
            if not self._loop.shutting_down:
                self._start()
        until = None if self._zygote is None else self._zygote.ready_until
        if until is not None and now >= until:
            self.give_up(f"it has not imported within {PRELOAD_TIMEOUT_S:.0f} s")

    def _start(self) -> None:
        spec = self.spec
        assert spec is not None
        if spec.after_import and (free := free_bytes()) is not None and free < NEEDS_BYTES:
            needed = f"{NEEDS_BYTES >> 20} MiB of memory"
            self._report_lost(f"it is not started with less than {needed} free", final=False)
            return
        try:
            ours, theirs = socket.socketpair()
            zygote = Zygote(ours, spec)
            with theirs:
                try:
                    self.attach(zygote)
                    zygote.child = self._children.start(
                        "the zygote",
                        _program_of(spec, theirs.fileno()),
                        partial(self._end, zygote),
                        spared=True,
                    )
                except OSError:
                    self._close_control(zygote)
                    self._zygote = None
                    raise
        except OSError as error:
            self._report_lost(f"cannot start {spec.argv[0]!r}: {reason_of(error)}", final=False)

    def read(self, zygote: Zygote) -> bool:
        """Read from a zygote. Returns False if nothing more can be read, now or for good."""
        message: Mapping[str, Any] | None = None
        try:
            zygote.control.flush()
            self._loop.watch_channel(zygote.control)
            if not zygote.control.receive():
                return False
            while zygote.control.fileno() >= 0:
                if (message := zygote.control.next_message()) is None:
                    break
                self._take_message(zygote, message)
        except (EOFError, OSError):
            self._close_control(zygote)
            return False
        except MalformedFrameError as error:
            self.give_up(f"it sent something else than a message: {error}")
            return False
        except (ValueError, TypeError, LookupError, OverflowError) as error:
            self.give_up(f"it sent {message!r:.200}: {error!r}")
            return False
        return True

    def _take_message(self, zygote: Zygote, message: Mapping[str, Any]) -> None:
        if "ready" in message:
            readiness = _read_readiness(message["ready"])
            zygote.ready, zygote.ready_until = True, None
            self._receiver.zygote_ready()
            self._agent.emit("zygote_ready", pid=zygote.child.pid, **readiness)
        elif "refused" in message:
            zygote.lost_because, zygote.final = str(message["refused"]), True
            self.given_up = True
        else:
            # The zygote is the user's own process and may send anything.
            pids = [pid for pid in message["pids"] if type(pid) is int]
            self._receiver.forked(message["forked"], pids, str(message["reason"]))

    def _close_control(self, zygote: Zygote) -> None:
        if zygote.control.fileno() >= 0:
            self._loop.unwatch(zygote.control.fileno())
            zygote.control.close()

    def _end(self, zygote: Zygote, child: Child, code: int) -> None:
        while zygote.control.fileno() >= 0 and self.read(zygote):
            pass
        self._close_control(zygote)
        self._zygote = None
        if not self._loop.shutting_down:
            ended = f"it was killed by signal {-code}" if code < 0 else f"it exited with {code}"
            if child.failure:
                ended = f"cannot start {zygote.spec.argv[0]!r}: {child.failure}"
            self._report_lost(zygote.lost_because or ended, final=zygote.final)
        self._receiver.zygote_lost(self._none_because)

    def _report_lost(self, reason: str, *, final: bool) -> None:
        self._none_because = f"there is no zygote: {reason}"
        retry_s = None
        if not final:
            retry_s = min(2.0**self._lost, MAX_ZYGOTE_RETRY_S)
            self._retry_at = time.monotonic() + retry_s
            self._lost += 1
        self._agent.emit("zygote_lost", reason=reason, retry_s=retry_s)


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


def _read_readiness(said: Mapping[str, Any]) -> dict[str, object]:
    """Return a zygote's description of itself, dropping anything else it may send."""
    return {
        "modules": [str(name) for name in said["modules"]],
        "threads": int(said["threads"]),
        "memory_kb": int(said["memory_kb"]),
        "seconds": float(said["seconds"]),
    }
