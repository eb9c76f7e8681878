"""Snapshots on disk: how they are written, found and read.

    DIR/step-000000480.RUN.ROUND/    one step of a state
        part-00000-of-00002.pt       one file per part, made by torch.save: dicts and tensors
        manifest.json                written last; without it, the step is not whole
        loaded.RUN                   empty: that run has gone on from this step

A part is written under a temporary name, synced and then renamed, so a file with a part's final
name is complete. Each node writes the parts that it holds. The last node to finish writes the
manifest, and only then removes older steps. So an incomplete step never replaces a whole one. Steps
of runs that this one has not gone on from are left alone: it may have been unable to load them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import time
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .contents import Image, is_tensor
from .slot_format import Header, SnapshotError
from .snapshot_slot import Content

FORMAT = 1

_MANIFEST = "manifest.json"
_LOADED = "loaded."
_COMMON = ("step", "lineage", "shards", "world_size", "state", "part")
"""The fields that are equal in all of a step's parts."""
_STEP = re.compile(r"step-\d{9,}\.[\w-]+\.\d+")
_ABANDONED_S = 60.0
"""How long a temporary file must remain unchanged to count as abandoned."""
_LEFTOVER_S = 3600.0
"""How long an incomplete step must remain unchanged to be removed once another is whole."""
_POLL_S = 0.5


@dataclass(frozen=True)
class WholeStep:
    """A step for which all parts are on disk."""

    folder: Path
    written_ms: int
    """When the step became whole. The newest step is the one written last, not the one with the
    highest number.
    """
    run: str
    header: Header
    """The fields common to all parts; `shard` and `rank` are 0."""

    def mark_loaded(self, nonce: str) -> None:
        """Note that the training with this nonce goes on from here; its writer adds its run."""
        with contextlib.suppress(OSError):
            (self.folder / f"{_LOADED}{nonce}").touch()

    def loaded_by(self) -> set[str]:
        names = [one.name for one in self.folder.glob(f"{_LOADED}*")]
        return {name.removeprefix(_LOADED) for name in names}

    def part(self, shard: int) -> Path:
        return self.folder / _part_name(shard, self.header.shards)

    def bytes_of(self, shard: int) -> int:
        try:
            return self.part(shard).stat().st_size
        except OSError:
            return 0

    def is_sound(self, header: Header) -> bool:
        try:
            with zipfile.ZipFile(self.part(header.shard)) as archive:
                return archive.testzip() is None
        except (OSError, zipfile.BadZipFile, EOFError, NotImplementedError, ValueError):
            return False

    def read(self, header: Header) -> Content:
        """Return an undamaged part. Parameters are memory-mapped; optimizer tensors are copied."""
        path = str(self.part(header.shard))
        saved = torch.load(path, map_location="cpu", mmap=True, weights_only=False)
        images = {
            name: _image(saved["step"], saved[name], saved["optimizer_layout"][name])
            for name in ("state", "part")
            if name in saved
        }
        return Content(saved["own"], images)


def whole_steps(folder: Path, say: Callable[[str], object] | None = None) -> list[WholeStep]:
    """List the whole steps, newest last, and `say` which ones cannot be read."""
    found = []
    try:
        for path in folder.iterdir():
            if not _STEP.fullmatch(path.name):
                continue
            try:
                found.append(_whole_step(path))
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
    return sorted(found, key=lambda one: (one.written_ms, one.header.step))


def _whole_step(folder: Path) -> WholeStep:
    said = json.loads((folder / _MANIFEST).read_text())
    if said["format"] != FORMAT:
        raise ValueError(f"format {said['format']} is not {FORMAT}, which this version reads")
    header = Header(shard=0, rank=0, **{name: said[name] for name in _COMMON})
    return WholeStep(folder, int(said["written_ms"]), str(said["run"]), header)


class StepWriter:
    """Writes the parts of one step that this node holds."""

    def __init__(self, folder: Path, run: str, header: Header) -> None:
        name = f"step-{header.step:09d}.{_short(run)}.{header.round}"
        self.all_steps, self.folder = folder, folder / name
        self._run, self._header = run, header

    def write(self, header: Header, content: Content, shapes: Mapping[str, Image]) -> Path | None:
        """Write a part and return its temporary path, or None if another node has written it."""
        path = self.folder / _part_name(header.shard, header.shards)
        self.folder.mkdir(parents=True, exist_ok=True)
        if not _is_left_to_us(path):
            return None
        free = shutil.disk_usage(self.folder).free
        if free < header.bytes:
            raise SnapshotError(
                f"{header.bytes / 1e6:.0f} MB are needed, but only {free / 1e6:.0f} MB are free"
            )
        temporary = path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")
        try:
            with temporary.open("wb") as file:
                torch.save(_saved(header, content, shapes), file)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        return temporary

    def give_name(self, temporary: Path) -> None:
        temporary.replace(temporary.with_name(temporary.name.partition(".pt.")[0] + ".pt"))
        _sync(self.folder)

    def finish(self, keep: int) -> bool:
        """Write the manifest if all parts are there, then remove all but `keep` steps."""
        header = self._header
        names = [_part_name(shard, header.shards) for shard in range(header.shards)]
        try:
            sizes = [(self.folder / name).stat().st_size for name in names]
        except FileNotFoundError:
            return False
        manifest = self.folder / _MANIFEST
        if not manifest.exists():
            said = {
                "format": FORMAT,
                "run": self._run,
                "written_ms": time.time_ns() // 1_000_000,
                **{name: getattr(header, name) for name in _COMMON},
                "parts": [{"file": name, "bytes": size} for name, size in zip(names, sizes)],
            }
            temporary = self.folder / f"{_MANIFEST}.{socket.gethostname()}.{os.getpid()}.tmp"
            with temporary.open("w") as file:
                json.dump(said, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(manifest)
            _sync(self.folder)
            _sync(self.all_steps)
        _tidy(self.all_steps, keep, _short(self._run), header.nonce)
        return True


def _part_name(shard: int, shards: int) -> str:
    return f"part-{shard:05d}-of-{shards:05d}.pt"


def _is_left_to_us(path: Path) -> bool:
    """Wait while another node writes this part, and return whether it is still missing.

    If two nodes begin at the same time, both write it, which does no harm.
    """
    while not path.exists():
        ages = []
        for other in path.parent.glob(f"{path.name}.*.tmp"):
            with contextlib.suppress(OSError):
                ages.append(time.time() - other.stat().st_mtime)
        if not any(age < _ABANDONED_S for age in ages):
            return True
        time.sleep(_POLL_S)
    return False


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
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
                times = [one.stat().st_mtime for one in path.iterdir()]
                if time.time() - max(times, default=0.0) > _LEFTOVER_S:
                    _remove(path)


def _remove(folder: Path) -> None:
    """Remove a step, deleting its manifest first so that it stops being whole at once."""
    with contextlib.suppress(OSError):
        (folder / _MANIFEST).unlink(missing_ok=True)
        for one in folder.iterdir():
            one.unlink()
        folder.rmdir()


# ------------------------------------------------------------------ contents of a part


_OF_THE_PART = ("step", "lineage", "shard", "shards", "rank", "world_size")


def _saved(header: Header, content: Content, shapes: Mapping[str, Image]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        **{name: getattr(header, name) for name in _OF_THE_PART},
        "own": content.own,
        **{name: _dict_of(image) for name, image in content.images.items()},
        "optimizer_layout": {
            name: [
                (list(key), getattr(value, "device", None), sharded)
                for key, value, sharded in image.optimizers
            ]
            for name, image in shapes.items()
        },
    }


def _dict_of(image: Image) -> dict[str, Any]:
    small = image.small
    modules: dict[str, dict[str, Tensor]] = {}
    for name, one in (*image.parameters.items(), *small["buffers"].items()):
        entry, _, path = name.partition(".")
        modules.setdefault(entry, {})[path] = one
    optimizers: dict[str, dict[str, Any]] = {
        name: {"state": {}, "param_groups": groups} for name, groups in small["groups"].items()
    }
    for (name, place, key), value, _ in image.optimizers:
        optimizers[name]["state"].setdefault(place, {})[key] = value
    return {
        "modules": modules,
        "optimizers": optimizers,
        "objects": small["objects"],
        "values": small["values"],
    }


def _image(step: int, saved: Mapping[str, Any], layout: Iterable[tuple[Any, Any, bool]]) -> Image:
    tensors = {
        f"{entry}.{path}": one
        for entry, held in saved["modules"].items()
        for path, one in held.items()
    }
    optimizers = []
    for (name, place, key), device, sharded in layout:
        value = saved["optimizers"][name]["state"][place][key]
        held = value.to(device, copy=True) if is_tensor(value) else value
        optimizers.append(((name, place, key), held, sharded))
    small = {
        "buffers": tensors,
        "groups": {name: one["param_groups"] for name, one in saved["optimizers"].items()},
        "objects": saved["objects"],
        "values": saved["values"],
    }
    return Image(step, tensors, optimizers, small)
