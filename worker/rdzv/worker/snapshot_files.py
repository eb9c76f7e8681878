"""Snapshots on disk: how they are written, found and read.

    DIR/step-000000480.RUN.ROUND/    one step, as torch.distributed.checkpoint (DCP) writes it
        __0_0.distcp                 one file per part, with an index at its end
        .metadata                    DCP's: which chunks of which tensors are where in the files
        manifest.json                which step of which run it is, and the files' digests
        loaded.RUN                   empty: that run has gone on from this step

A part is written under a temporary name, synced and then renamed, so a file with a part's final
name is complete. Each node writes the parts that it holds. The last node to finish writes
`.metadata`, then the manifest, without which the step is not whole, and only then removes older
steps. So an incomplete step never replaces a whole one. Steps of runs that this one has not gone on
from are left alone: it may have been unable to load them.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import shutil
import socket
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .slot_format import Header, SnapshotError

if TYPE_CHECKING:
    from .contents import Contents
    from .rounds import Round
    from .snapshot_slot import Content

FORMAT = 2

_MANIFEST, _METADATA = "manifest.json", ".metadata"
_LOADED = "loaded."
_COMMON = ("step", "shards", "world_size", "state", "part")
"""The fields that are equal in all of a step's parts."""
_STEP = re.compile(r"step-\d{9,}\.[\w-]+\.\d+")
_ABANDONED_S = 60.0
"""How long a temporary file must remain unchanged to count as abandoned."""
_LEFTOVER_S = 3600.0
"""How long an incomplete step must remain unchanged to be removed once another is whole."""
_POLL_S = 0.5
_INDEX_AT = struct.Struct(">Q")
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class WholeStep:
    """A step for which all parts are on disk."""

    folder: Path
    run: str
    header: Header
    """The fields common to all parts; `shard` and `rank` are 0. The lineage is when the step became
    whole: those of different runs cannot be compared, and the newest step is the one written last,
    not the one with the highest number.
    """
    ranks_differ: bool
    """Whether tensors that are not sharded differ between parts (local experts), so that only the
    ranks that saved them can load them.
    """
    files: dict[str, tuple[int, str]]
    """The size and digest of each file."""

    @property
    def bytes(self) -> int:
        return sum(size for size, _ in self.files.values())

    def mark_loaded(self, nonce: str) -> None:
        """Note that the training with this nonce goes on from here; its writer adds its run."""
        with contextlib.suppress(OSError):
            (self.folder / f"{_LOADED}{nonce}").touch()

    def loaded_by(self) -> set[str]:
        names = [one.name for one in self.folder.glob(f"{_LOADED}*")]
        return {name.removeprefix(_LOADED) for name in names}

    def why_not(self, world_size: int) -> str:
        """Return why a round of this size cannot load it, or an empty text."""
        before = self.header.world_size
        if not self.ranks_differ or before == world_size:
            return ""
        return (
            f"tensors that are not sharded differ between the {before} ranks that saved it, but "
            f"this round has {world_size}: start {before}, or load a checkpoint"
        )

    def is_sound(self, header: Header) -> bool:
        """Whether one of `header.shards` equal shares of the files is undamaged."""
        mine = sorted(self.files.items())[header.shard :: header.shards]
        try:
            return all(_digest(self.folder / name, size) == wanted for name, (size, wanted) in mine)
        except OSError:
            return False

    def read(self, round_: Round, **wanted: Contents) -> Content:
        """Read an undamaged step's `state` or `part` into this rank's parameters."""
        from .checkpoints import read  # It imports what scripts without snapshots do not need.

        return read(self.folder, round_.rank, round_.world_size, wanted)


def whole_steps(folder: Path, say: Callable[[str], object] | None = None) -> list[WholeStep]:
    """List the whole steps, newest last, and `say` which ones cannot be read."""
    found = []
    try:
        for path in folder.iterdir():
            if not _STEP.fullmatch(path.name):
                continue
            try:
                found.append(whole_step(path))
            except (FileNotFoundError, NotADirectoryError):
                pass  # Without a manifest, it is not whole.
            except (OSError, ValueError, KeyError, TypeError) as error:
                if say is not None:
                    say(f"cannot read {path / _MANIFEST}, so it is ignored: {error!r:.200}")
    except FileNotFoundError:
        pass  # Nothing has been written yet.
    except OSError as error:
        if say is not None:
            say(f"cannot look for snapshots in {folder}: {error.strerror}")
    return sorted(found, key=lambda one: one.header.mark.time)


def whole_step(folder: Path) -> WholeStep:
    """Read a step's manifest. Raises `FileNotFoundError` if it is not whole."""
    manifest = json.loads((folder / _MANIFEST).read_text())
    if manifest["format"] != FORMAT:
        raise ValueError(f"format {manifest['format']} is not {FORMAT}, which this version reads")
    common = {name: manifest[name] for name in _COMMON}
    header = Header(shard=0, rank=0, lineage=int(manifest["written_ms"]), **common)
    files = {name: (int(size), str(digest)) for name, (size, digest) in manifest["files"].items()}
    return WholeStep(folder, str(manifest["run"]), header, bool(manifest["ranks_differ"]), files)


class StepWriter:
    """Writes the parts of one step that this node holds."""

    def __init__(self, folder: Path, run: str, header: Header) -> None:
        name = f"step-{header.step:09d}.{_short(run)}.{header.round}"
        self.all_steps, self.folder = folder, folder / name
        self._run, self._header = run, header

    def write(
        self, header: Header, content: Content, head: bytes, verify: Callable[[], object]
    ) -> bool:
        """Write a part, unless another node has. `verify` may refuse it before it gets its name."""
        from .checkpoints import write_part

        path = self.folder / _part_name(header.shard)
        self.folder.mkdir(parents=True, exist_ok=True)
        if not _is_left_to_us(path):
            return False
        free = shutil.disk_usage(self.folder).free
        if free < header.bytes:
            raise SnapshotError(
                f"{header.bytes / 1e6:.0f} MB are needed, but only {free / 1e6:.0f} MB are free"
            )
        with _set_aside(path) as part:
            index, plain = write_part(part.parent, header, content, head)
            size = part.stat().st_size
            with part.open("ab") as file:
                pickle.dump((index, plain, _digest(part, size)), file)
                file.write(_INDEX_AT.pack(size))
            verify()
        return True

    def finish(self, keep: int) -> bool:
        """Make the step whole if all parts are there, then remove all but `keep` steps."""
        parts = [self.folder / _part_name(shard) for shard in range(self._header.shards)]
        if not all(part.exists() for part in parts):
            return False
        if not (self.folder / _MANIFEST).exists():
            self._make_whole(parts)
        _tidy(self.all_steps, keep, _short(self._run), self._header.nonce)
        return True

    def _make_whole(self, parts: list[Path]) -> None:
        from .checkpoints import write_metadata

        sizes, indexes, plain, digests = zip(*map(_index_of, parts))
        metadata, manifest = self.folder / _METADATA, self.folder / _MANIFEST
        with _set_aside(metadata) as file:
            write_metadata(file.parent, indexes)
        size = metadata.stat().st_size
        files = {_METADATA: (size, _digest(metadata, size))}
        files |= {part.name: found for part, found in zip(parts, zip(sizes, digests))}
        contents = {
            "format": FORMAT,
            "run": self._run,
            "written_ms": time.time_ns() // 1_000_000,
            **{name: getattr(self._header, name) for name in _COMMON},
            "ranks_differ": len(set(plain)) > 1,
            "files": files,
        }
        with _set_aside(manifest) as file:
            file.write_text(json.dumps(contents, indent=1))
        _sync(self.all_steps)


def _part_name(shard: int) -> str:
    return f"__{shard}_0.distcp"


def _index_of(part: Path) -> tuple[int, Any, str, str]:
    """Return the size of a part's values, and what its writer wrote of them behind them."""
    try:
        with part.open("rb") as file:
            file.seek(-_INDEX_AT.size, os.SEEK_END)
            (size,) = _INDEX_AT.unpack(file.read())
            file.seek(size)
            return size, *pickle.load(file)
    except Exception as error:
        raise SnapshotError(f"{part} is damaged: {error}") from error


def _digest(path: Path, size: int) -> str:
    """Return a CRC of a file's first bytes: four times as fast as a BLAKE2 digest."""
    crc = 0
    with path.open("rb") as file:
        while size > 0 and (piece := file.read(min(size, _PIECE_BYTES))):
            crc = zlib.crc32(piece, crc)
            size -= len(piece)
    return f"{crc:08x}"


@contextmanager
def _set_aside(path: Path) -> Iterator[Path]:
    """Let a file be written elsewhere; then sync it and give it its name.

    If two nodes write it at the same time, the first one's stays, because digests refer to it.
    """
    folder = path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    folder.mkdir(exist_ok=True)
    try:
        file = folder / path.name
        yield file
        _sync(file)
        try:
            os.link(file, path)
        except FileExistsError:
            pass
        except OSError:  # Not all file systems have links.
            if not path.exists():
                file.replace(path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    _sync(path.parent)


def _is_left_to_us(path: Path) -> bool:
    """Wait while another node writes this part, and return whether it is still missing."""
    while not path.exists():
        ages = []
        for other in path.parent.rglob(f"{path.name}*"):
            with contextlib.suppress(OSError):
                ages.append(time.time() - other.stat().st_mtime)
        if not any(age < _ABANDONED_S for age in ages):
            return True
        time.sleep(_POLL_S)
    return False


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _short(run: str) -> str:
    return re.sub(r"[^A-Za-z0-9-]", "-", run)[:16]


def _tidy(folder: Path, keep: int, run: str, nonce: str) -> None:
    """Remove a training's steps: whole ones but the newest `keep`, and old incomplete ones."""
    whole, runs = whole_steps(folder), {run}
    for one in whole:
        with contextlib.suppress(OSError):
            (one.folder / f"{_LOADED}{nonce}").rename(one.folder / f"{_LOADED}{run}")
    # A run that this one has gone on from may itself have gone on from another.
    while found := {_short(one.run) for one in whole if one.loaded_by() & runs} - runs:
        runs |= found
    for one in [one for one in whole if _short(one.run) in runs][:-keep]:
        _remove(one.folder)
    known = {one.folder for one in whole}
    for path in folder.iterdir():
        if (
            _STEP.fullmatch(path.name)
            and path.name.split(".")[1] in runs
            and path not in known
            and not (path / _MANIFEST).exists()
        ):
            with contextlib.suppress(OSError):
                times = [one.stat().st_mtime for one in path.rglob("*")]
                if time.time() - max(times, default=0.0) > _LEFTOVER_S:
                    _remove(path)


def _remove(folder: Path) -> None:
    """Remove a step, deleting its manifest first so that it stops being whole at once."""
    with contextlib.suppress(OSError):
        (folder / _MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(folder)
