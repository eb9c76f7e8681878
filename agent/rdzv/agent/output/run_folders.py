"""The folders of submitted jobs on this node, which keep their workers' output until it is too old.

::

    STATE_DIR/runs/RDZV_ID/RUN/round_3/0/{stdout.log,stderr.log,error.json}
    STATE_DIR/runs/RDZV_ID/RUN/attempt_1 -> round_3
    STATE_DIR/runs/RDZV_ID/RUN.rounds.jsonl    a line for each round: its output paths

They make it possible to read logs after the job or the agent has ended. Names come from the server,
and are escaped so that each is a single folder below `runs`, whatever characters it contains. A
run's folder is its account's; the index beside it is the agent's own, so no job can write to it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

from rdzv.agent.launch.launch import NO_FILES
from rdzv.agent.output.run_files import KEPT_ROUNDS, WorkerOutput, Written, WrittenRound
from rdzv.agent.system.accounts import Identity, identity_of_owner
from rdzv.agent.system.folder_trees import Measure, measure, remove_tree

log = logging.getLogger("rdzv.agent")

INDEX = ".rounds.jsonl"
_REMOVED = ".removed-"
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
MAX_INDEX_BYTES = 4 << 20
"""How much of an index is kept, from its end. --logs-specs determines how long its paths are."""
MAX_LINE_BYTES = 256 << 10
"""The longest line of an index; 64 workers with two paths of 2,000 characters each."""


def folder_name(name: str) -> str:
    """Escape a name so that it is a single folder.

    >>> folder_name("job-7"), folder_name("../etc"), folder_name("..")
    ('job-7', '%2E.%2Fetc', '%2E.')
    """
    spelled = quote(name, safe=":@") or "%"
    return f"%2E{spelled[1:]}" if spelled.startswith(".") else spelled


class RunFolder:
    """A run's folder on this node."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.index = path.with_name(path.name + INDEX)
        self._noted: int | None = None

    def note(self, written: Written) -> None:
        if written.last is None or written.last == self._noted:
            return
        found = written.at(written.last)
        assert found is not None
        self._noted = found.number
        try:
            _append(self.index, _as_line(found))
        except OSError as error:
            log.warning(
                "logs of round %d will not be available after the job: %s", found.number, error
            )


class RunFolders:
    """All run folders on this node. What reads or removes files may be called in a thread."""

    def __init__(self, state_dir: Path) -> None:
        self._base = state_dir / "runs"
        self._lock = threading.Lock()
        self._in_use: set[Path] = set()

    def folder(self, rdzv_id: str, run: str) -> RunFolder:
        return RunFolder(self._base / folder_name(rdzv_id) / folder_name(run))

    def open(self, rdzv_id: str, run: str, identity: Identity | None = None) -> RunFolder:
        """Create a run's folder, in use until `release`, which only its `identity` may read."""
        path = self._base / folder_name(rdzv_id) / folder_name(run)
        with self._lock:
            path.parent.mkdir(parents=True, exist_ok=True)
            if identity is None:
                path.mkdir(exist_ok=True)
            else:
                self._make_for(path, identity)
            self._in_use.add(path)
        return RunFolder(path)

    def _make_for(self, path: Path, identity: Identity) -> None:
        """Create a folder for an account, below folders that the account cannot list."""
        for folder in (self._base, path.parent):
            folder.chmod(0o711)
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            pass
        else:
            os.chown(path, identity.uid, identity.gid)
        if (owner := path.lstat().st_uid) != identity.uid:
            raise PermissionError(None, f"it belongs to uid {owner}, not {identity.uid}", path)

    def release(self, folder: RunFolder) -> None:
        """Mark a folder as no longer in use, and remove it if it is empty and has no index."""
        with self._lock:
            self._in_use.discard(folder.path)
            for path in (folder.path, folder.path.parent) if not folder.index.exists() else ():
                try:
                    path.rmdir()
                except OSError:
                    return

    def written(self, rdzv_id: str, runs: Sequence[str]) -> Written | None:
        """Return a job's output, newest run first: if a round number is repeated, that counts."""
        found = (_read_index(self.folder(rdzv_id, run), run) for run in reversed(runs))
        rounds = [round_ for index in found for round_ in index]
        return Written.before(rounds[-KEPT_ROUNDS:]) if rounds else None

    def sweep(self, keep_s: float, keep_bytes: int, now_s: float) -> list[Path]:
        """Remove what is older than `keep_s`, then the oldest over `keep_bytes`; return that."""
        # Complete the removals that a previous agent left unfinished.
        for path in _folders_of(self._base, removed=True):
            _remove_tree(path)
        found = sorted(self._found(now_s), key=lambda run: run[1].changed_s)
        left_bytes = sum(size.size_bytes for _, size in found)
        removed = []
        for path, size in found:
            too_old = size.changed_s < now_s - keep_s
            if (too_old or left_bytes > keep_bytes) and self._remove(path):
                left_bytes -= size.size_bytes
                removed.append(path)
        return removed

    def _found(self, now_s: float) -> Iterator[tuple[Path, Measure]]:
        for job in _folders_of(self._base):
            for run in _folders_of(job):
                with contextlib.suppress(FileNotFoundError):  # The folder has just been released.
                    yield run, measure(run, now_s, identity_of_owner(run, with_groups=False))

    def _remove(self, path: Path) -> bool:
        gone = self._base / f"{_REMOVED}{uuid.uuid4().hex}"
        try:
            with self._lock:
                # From here on, no job may start to use the folder.
                if path in self._in_use:
                    return False
                path.rename(gone)
        except OSError as error:
            log.warning("cannot remove the old logs in %s: %s", path, error)
            return False
        _remove_tree(gone)
        with contextlib.suppress(OSError):  # The job has other runs.
            RunFolder(path).index.unlink(missing_ok=True)
            path.parent.rmdir()
        return True


def _folders_of(path: Path, *, removed: bool = False) -> list[Path]:
    try:
        return [
            Path(entry)
            for entry in os.scandir(path)
            if entry.is_dir(follow_symlinks=False) and entry.name.startswith(_REMOVED) is removed
        ]
    except OSError:
        return []


def _remove_tree(path: Path) -> None:
    try:
        remove_tree(path, identity_of_owner(path, with_groups=False))
    except OSError as error:
        log.warning("cannot remove all of %s; will retry later: %s", path, error)


# ---------------------------------------------------------------------- the index


def _as_line(round_: WrittenRound) -> bytes:
    workers = [
        [None if path is None else os.fspath(path) for path in (worker.stdout, worker.stderr)]
        for worker in round_.workers
    ]
    line = {"round": round_.number, "rank_first": round_.rank_first, "workers": workers}
    return json.dumps(line).encode() + b"\n"


def _append(index: Path, line: bytes) -> None:
    """Append a line to an index, and drop the older half of one that has become too large."""
    if len(line) > MAX_LINE_BYTES:
        raise OSError(None, f"the paths of its logs take {len(line):,} bytes", str(index))
    with os.fdopen(os.open(index, _APPEND, 0o600), "ab") as file:
        file.write(line)
        size = file.tell()
    if size > MAX_INDEX_BYTES:
        kept = _end_of(index, MAX_INDEX_BYTES // 2)
        shorter = index.with_name(f".{index.name}")
        with os.fdopen(os.open(shorter, _APPEND | os.O_TRUNC, 0o600), "wb") as file:
            file.write(kept)
        shorter.replace(index)


def _end_of(index: Path, size: int) -> bytes:
    with index.open("rb") as file:
        start = max(file.seek(0, os.SEEK_END) - size, 0)
        file.seek(start)
        if start:
            file.readline()
        return file.read(size)


def _read_index(folder: RunFolder, run: str) -> list[WrittenRound]:
    try:
        # The folder's owner is the account, because the parent folder is this agent's own.
        identity = identity_of_owner(folder.path)
        lines = _end_of(folder.index, MAX_INDEX_BYTES).splitlines()[-KEPT_ROUNDS:]
    except OSError:
        return []
    read = (_read_line(line, identity, run) for line in lines)
    return [found for found in read if found is not None]


def _read_line(line: bytes, identity: Identity | None, run: str) -> WrittenRound | None:
    """Parse a line; return None if it is truncated, or something else than an agent writes."""
    try:
        found = json.loads(line)
        workers = tuple(
            WorkerOutput(stdout=_path(stdout), stderr=_path(stderr), error=NO_FILES)
            for stdout, stderr in found["workers"]
        )
        number, rank_first = found["round"], found["rank_first"]
        if not (0 <= number < 1 << 32 and 0 <= rank_first < 1 << 32):
            return None
        return WrittenRound(int(number), int(rank_first), workers, identity, run)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)
