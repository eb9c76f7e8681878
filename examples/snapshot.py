"""Snapshots that a restart can trust: complete, on disk, and never replaced by something older.

A job whose workers come and go has, for moments, two processes that believe they are rank 0: one in
the current round, and a straggler of an earlier round that was cut off, paused, or slow to stop. A
snapshot therefore records its writer (run, round, step), and a process that wants to replace it
first compares that with itself, while it holds a lock. The existing snapshot was written by

* an older round of this run:   replaced, whatever its step: the newer round is the current one
* this round:                   replaced if it is behind
* a newer round of this run:    kept: the process that wants to replace it is the straggler
* another run:                  replaced if this process resumed from a snapshot of that run, as
                                when a job is launched again; otherwise kept, since another job
                                uses the file

The file is written beside its final name, flushed to the disk and then renamed, so that a reader
sees the previous snapshot or the new one, never a part. It must be visible from every node that may
get rank 0, on a file system whose `flock` works between nodes (NFSv4; Lustre with its flock
option).
"""

import contextlib
import fcntl
import glob
import os
import time
import uuid
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch

LOCK_TIMEOUT_S = 30.0


class SnapshotError(RuntimeError):
    """A snapshot could not be read or written; the message says what to do."""


class CorruptSnapshotError(SnapshotError):
    """The file is there and is not a whole snapshot."""


class StaleWriterError(SnapshotError):
    """A newer writer has replaced the snapshot, so this process must stop."""


@dataclass(frozen=True)
class Header:
    """Who wrote a snapshot, and when in the life of the job."""

    run_id: str
    round: int
    step: int


class SnapshotFile:
    """The snapshot of one job, for the one process (rank 0) that reads and writes it.

    `trust_round` says that `round` grows with every round of the run, wherever rank 0 is. If it is
    false, as under torchrun, a process counts as no older than the snapshot it resumed from.
    """

    def __init__(self, path: Path, run_id: str, round: int, *, trust_round: bool = True) -> None:
        self.path = path
        self.run_id = run_id
        self.round = round
        self._trust_round = trust_round
        self._resumed_run_id = run_id

    @classmethod
    def from_environ(cls, path: Path, environ: Mapping[str, str] = os.environ) -> Self:
        """Learn run and round from the launcher.

        rdzvrun provides the round. torchrun does not: its restart count grows with failures only
        and differs between nodes, so it reveals some stragglers but not all.
        """
        run_id = environ.get("TORCHELASTIC_RUN_ID", "none")
        if "RDZV_ROUND" in environ:
            return cls(path, run_id, int(environ["RDZV_ROUND"]))
        restarts = int(environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        return cls(path, run_id, restarts, trust_round=False)

    def load(self) -> tuple[Header, dict[str, Any]] | None:
        """Read the snapshot, or return None if there is none yet.

        Tensors are loaded to the CPU. Raises CorruptSnapshotError for a file that cannot be used,
        StaleWriterError if a newer round of this run wrote it.
        """
        self._remove_leftovers()
        found = _read(self.path)
        if found is None:
            return None
        header, _ = found
        if header.run_id != self.run_id:
            self._resumed_run_id = header.run_id
        elif header.round > self.round:
            if self._trust_round:
                raise self._stale(header)
            self.round = header.round
        return found

    def save(self, state: Mapping[str, Any], step: int) -> bool:
        """Replace the snapshot, unless the existing one is as far or newer.

        Returns False if this round has already saved this step or a later one. Raises
        StaleWriterError if another writer has taken over. Once it returns, the snapshot survives a
        crash of the machine.
        """
        header = Header(self.run_id, self.round, step)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_name(f".{self.path.name}.{uuid.uuid4().hex}.tmp")
        try:
            with temporary.open("xb") as file:
                # Held until the file has its final name: distinguishes it from a dead writer's
                # leftover.
                fcntl.flock(file, fcntl.LOCK_EX)
                # The slow part comes before the lock, so a process paused during the write blocks
                # no other.
                torch.save({"header": asdict(header), "state": dict(state)}, file)
                file.flush()
                os.fsync(file.fileno())
                with self._lock():
                    if not self._may_replace(header):
                        return False
                    temporary.replace(self.path)
                    _fsync_directory(self.path.parent)
        finally:
            temporary.unlink(missing_ok=True)
        self._resumed_run_id = self.run_id
        return True

    def _may_replace(self, header: Header) -> bool:
        found = _read(self.path, header_only=True)
        if found is None:
            return True
        existing, _ = found
        if existing.run_id != header.run_id:
            if existing.run_id != self._resumed_run_id:
                raise self._stale(existing)
            return True
        if existing.round > header.round:
            raise self._stale(existing)
        return existing.round < header.round or existing.step < header.step

    def _stale(self, existing: Header) -> StaleWriterError:
        if existing.run_id != self.run_id:
            return StaleWriterError(
                f"{self.path} was written by run {existing.run_id!r}, this is run {self.run_id!r}: "
                "another job writes to the same file. Give each job a snapshot of its own."
            )
        return StaleWriterError(
            f"{self.path} was written by round {existing.round} of run {self.run_id!r}, this "
            f"process is of round {self.round}: the job has gone on without it, so it stops. If "
            "there is no newer round (the rendezvous server lost its memory), start the job under "
            "another --rdzv-id; it resumes from the same snapshot."
        )

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Hold the lock file. Never remove it: two could hold locks on two files of one name."""
        lock_path = self.path.with_name(f".{self.path.name}.lock")
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        with lock_path.open("a") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise SnapshotError(
                            f"{lock_path} has been held by another process for "
                            f"{LOCK_TIMEOUT_S:.0f} s (see `lslocks`): is a paused worker of a "
                            "former round still there?"
                        ) from None
                    time.sleep(0.05)
            yield  # closing the file releases the lock, and so does the end of the process

    def _remove_leftovers(self) -> None:
        """Remove files of killed writers: a file whose lock is free has no writer any more."""
        for leftover in self.path.parent.glob(f".{glob.escape(self.path.name)}.*.tmp"):
            with (
                contextlib.suppress(FileNotFoundError, BlockingIOError),
                leftover.open("rb+") as file,
            ):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                leftover.unlink()


def _read(path: Path, *, header_only: bool = False) -> tuple[Header, dict[str, Any]] | None:
    try:
        if not header_only:
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()  # torch.load does not verify the checksums
            if damaged:
                raise zipfile.BadZipFile(f"wrong checksum of {damaged}")
        # Mapped, so that unused tensors are not read.
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=header_only)
        return Header(**content["header"]), content["state"]
    except FileNotFoundError:
        return None
    except OSError:
        raise  # the disk or the permissions, which says nothing about the content
    except Exception as error:
        raise CorruptSnapshotError(
            f"{path} is not a whole snapshot ({type(error).__name__}, see above). Put a copy of an "
            "older one in its place, or remove the file to train from the beginning."
        ) from error


def _fsync_directory(directory: Path) -> None:
    """Make the new name as durable as the content."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
