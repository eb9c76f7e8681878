"""Copies of other nodes' snapshots: their memory, and the process that fetches and sends them.

That process is `python -m rdzv.worker.copy_snapshots`. It runs under the job's account, starts at
the agent's request, outlives its round, and ends with the runner. The runner itself opens no
connections and reads no copies.

All copies belong to one mark. Copies of a newer mark are fetched into separate memory, so a failed
fetch damages no complete copy. The older copies are dropped once the newer ones are complete, or
once a newer mark is whole on all nodes.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial

from .child_exits import start_linked
from .descriptors import close_fds, dup_fds, write_warning
from .frames import RequestError, read_field
from .snapshot_slots import NoSlotsError, memory_file
from .spawn import Program, reason_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from .channel import Link
    from .child_exits import Child
    from .requests import CarryCopies, KeepCopies, Snapshot, StateMark
    from .runner import Runner

MAX_COPIES = 200
"""The maximum number of copies in a fetch, whose descriptors must fit into one message."""
MAX_COPIES_OF_WORKER = 16
"""The maximum number of copies given to a worker; the server asks for three."""


@dataclass(slots=True)
class _Copies:
    """The copies for one mark, either complete or being fetched."""

    mark: StateMark
    fds: dict[Snapshot, int] = field(default_factory=dict)
    """The memory for each copy, in the order in which they are fetched."""
    arrived: set[int] = field(default_factory=set)


class SnapshotCopies:
    """This node's copies of other nodes' snapshots."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._kept: _Copies | None = None
        """The copies for the newest mark whose requested copies are all complete."""
        self._coming: _Copies | None = None
        """The copies for a newer mark, which are being fetched."""
        self._spare: list[int] = []
        self.carrier: Child | None = None
        self._link: Link | None = None
        self._port: int | None = None
        self._given: Mapping[str, str] = {}
        """The token and fingerprint that were last given to the carrier."""
        self._used: Mapping[str, str] = {}
        """Those that it uses."""
        self._fetches = 0
        self._missing: Mapping[str, object] | None = None

    # ------------------------------------------------------------------ for the slots

    def reserved(self) -> int:
        return sum(os.fstat(fd).st_size for fd in self._fds())

    def untouched(self) -> int:
        return self.reserved() - sum(512 * os.fstat(fd).st_blocks for fd in self._fds())

    def free(self) -> bool:
        """Free memory that holds no copy. Returns whether there was any."""
        if not self._spare:
            return False
        close_fds(self._spare)
        self._spare = []
        return True

    def described(self) -> dict[str, object]:
        carrier = None if self._port is None else {"port": self._port, **self._used}
        return {"carrier": carrier, "missing": self._missing}

    def held(self) -> list[Snapshot]:
        return [] if self._kept is None else list(self._kept.fds)

    def for_worker(self, local_rank: int) -> tuple[int, ...]:
        kept = {} if self._kept is None else self._kept.fds
        fds = [fd for one, fd in kept.items() if one.local_rank == local_rank]
        return dup_fds(*fds[:MAX_COPIES_OF_WORKER])

    def send_slots(self, local_rank: int, size: int, fds: list[int]) -> None:
        self._tell({"type": "slots", "local_rank": local_rank, "bytes": size}, *dup_fds(*fds))

    def drop_after(self, step: int) -> None:
        if self._kept is not None and self._kept.mark.step > step:
            self._give_up_kept()
        if self._coming is not None and self._coming.mark.step > step:
            self._give_up_coming()
        self._missing = None

    def close(self) -> None:
        self._give_up_kept()
        self._give_up_coming()
        self.free()
        self._hang_up("")

    # ------------------------------------------------------------------ the agent's requests

    def carry(self, request: CarryCopies) -> None:
        self._given = {"token": request.token, "fingerprint": request.fingerprint}
        if self._link is None and self.carrier is not None:
            return  # It is being killed. The agent is notified once it is gone.
        if self._link is None:
            try:
                self.carrier, self._link = start_linked(
                    self._runner, "the process that copies snapshots",
                    partial(_program_of, request), self._end, self._take, self._lose_link,
                )  # fmt: skip
            except OSError as error:
                write_warning(f"cannot start the process that copies snapshots: {error}")
                return
            for local_rank, size, fds in self._runner.slots.all():
                self.send_slots(local_rank, size, fds)
        self._tell({"type": "credentials", "token": request.token, "pem": request.pem})

    def fetch(self, request: KeepCopies) -> None:
        mark = request.mark
        wanted = [one for source in request.sources for one in source.snapshots]
        if not 0 < len(wanted) == len(set(wanted)) <= MAX_COPIES:
            raise RequestError(f"sources: expected 1 to {MAX_COPIES} snapshots, got {len(wanted)}")
        self._give_up_coming()
        if self._link is None:
            self._lack(mark, "the process that fetches them is not running")
            return
        if self._kept is not None and self._runner.slots.is_outdated(self._kept.mark):
            self._give_up_kept()
        self._coming = _Copies(mark)
        self._missing = None
        try:
            for one in wanted:
                self._coming.fds[one] = self._memory_for(one.bytes)
            fds = dup_fds(*self._coming.fds.values())
        except (NoSlotsError, OSError) as error:
            self._give_up_coming()
            reason = reason_of(error) if isinstance(error, OSError) else str(error)
            self._lack(mark, f"there is no memory for them: {reason}")
            return
        self._fetches += 1
        sources = [asdict(source) for source in request.sources]
        self._tell({"type": "fetch", "id": self._fetches, "sources": sources}, *fds)
        # The remaining memory has sizes that snapshots no longer have.
        self.free()

    def _memory_for(self, size: int) -> int:
        fitting = [fd for fd in self._spare if os.fstat(fd).st_size >= size]
        if fitting:
            fd = min(fitting, key=lambda one: os.fstat(one).st_size)
            self._spare.remove(fd)
            return fd
        larger = size + size // 16 + (1 << 20)  # Plain values may grow.
        self._runner.slots.refuse_too_large("a copy needs", larger)
        return memory_file("rdzv copy", larger)

    # ------------------------------------------------------------------ the carrier

    def _tell(self, message: Mapping[str, object], *fds: int) -> None:
        if self._link is None:
            close_fds(fds)
        else:
            self._link.tell({**message, "fds": len(fds)}, *fds)

    def _take(self, message: Mapping[str, object]) -> None:
        kind = message.get("type")
        if kind == "listening":
            port, token = read_field(message, "port", int), read_field(message, "token", str)
            if not 0 < port < 1 << 16:
                raise RequestError(f"port: expected 1 to 65535, got {port!r:.80}")
            if token == self._given["token"]:
                self._port, self._used = port, self._given
                self._runner.slots.tell()
        elif self._coming is None or message.get("id") != self._fetches:
            return  # It belongs to an earlier fetch.
        elif kind == "fetched":
            number = read_field(message, "number", int)
            if number not in range(len(self._coming.fds)):
                raise RequestError(f"number: there is no copy {number!r:.80}")
            self._coming.arrived.add(number)
        elif kind == "done":
            # JSON may escape what UTF-8 cannot carry.
            self._finish(read_field(message, "reason", str).encode(errors="replace").decode())

    def _finish(self, reason: str) -> None:
        assert self._coming is not None
        if reason or len(self._coming.arrived) < len(self._coming.fds):
            mark = self._coming.mark
            self._give_up_coming()
            self._lack(mark, reason or "not all of them arrived")
            return
        self._give_up_kept()
        self._kept, self._coming = self._coming, None
        self._runner.slots.tell()

    def _end(self, child: Child, code: int) -> None:
        if child is self.carrier:
            self.carrier = None
            how = child.failure or (f"exit code {code}" if code >= 0 else f"signal {-code}")
            self._hang_up(f"the process that fetches them has ended: {how}")

    def _lose_link(self, _error: Exception) -> None:
        self._hang_up("the process that fetches them closed its socket")

    def _hang_up(self, reason: str) -> None:
        """Close the carrier's socket and kill the carrier. A fetch in progress has failed."""
        if self._link is not None:
            if reason:
                write_warning(f"cannot exchange copies of snapshots: {reason}")
            self._link.close()
            self._link = None
        if self.carrier is not None:
            # Otherwise it might still write to memory that another fetch reuses.
            with suppress(OSError):
                self.carrier.kill()
        self._port = None
        if self._coming is not None:
            self._missing = {"mark": asdict(self._coming.mark), "reason": reason}
            self._give_up_coming()
        self._runner.slots.tell()

    # ------------------------------------------------------------------ inside

    def _fds(self) -> list[int]:
        sets = [one for one in (self._kept, self._coming) if one is not None]
        return [*self._spare, *(fd for one in sets for fd in one.fds.values())]

    def _give_up_kept(self) -> None:
        if self._kept is not None:
            self._spare += self._kept.fds.values()
            self._kept = None

    def _give_up_coming(self) -> None:
        if self._coming is not None:
            self._spare += self._coming.fds.values()
            self._coming = None

    def _lack(self, mark: StateMark, reason: str) -> None:
        self._missing = {"mark": asdict(mark), "reason": reason}
        self._runner.slots.tell()


def _program_of(spec: CarryCopies, fd: int) -> Program:
    argv = (*spec.argv, "--fd", str(fd))
    return Program(argv=argv, env=spec.env, cwd=spec.cwd, identity=spec.identity, pass_fds=(fd,))
