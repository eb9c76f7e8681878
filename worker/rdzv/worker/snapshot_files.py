"""Snapshots on disk: how they are written, found and read again.

    DIR/step-000000480.RUN.LINEAGE/  one step of a state
        part-00000-of-00002.pt       one for each part, made by torch.save: dicts and tensors
        manifest.json                written last: without it, the step is not whole

A part is written under a name of its own, synced, and then renamed, so what has the name of a part
is complete. Each node writes the parts that it holds; whichever comes last writes the manifest, and
only that removes older steps. So nothing whole goes for something that is not.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import sys
import time
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .images import Image, is_tensor
from .snapshot_slot import Content, Header

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 1

_MANIFEST = "manifest.json"
_COMMON = ("step", "lineage", "shards", "world_size", "state", "part")
"""What parts that belong together have in common."""
_STEP = re.compile(r"step-\d{9,}\.[\w-]+\.\d+")
_ABANDONED_S = 60.0
"""A part that has not grown for this time is not being written any more."""
_LEFTOVER_S = 3600.0
"""Steps that have not become whole for this time are removed once a newer one is whole."""
_POLL_S = 0.5


class NotWrittenError(Exception):
    """A snapshot cannot be written; the message says why."""


@dataclass(frozen=True)
class WholeStep:
    """A step of which all parts are on disk."""

    folder: Path
    written_ms: int
    """When it became whole. The larger one is the newer one, whatever the steps are."""
    run: str
    header: Header
    """What all parts have in common; `shard` and `rank` are 0."""

    def part(self, shard: int) -> Path:
        """Return the file of a part."""
        return self.folder / _part_name(shard, self.header.shards)

    def bytes_of(self, shard: int) -> int:
        """Return the size of a part; 0 if it is missing."""
        try:
            return self.part(shard).stat().st_size
        except OSError:
            return 0

    def is_sound(self, shard: int) -> bool:
        """Whether a part is as it was written; reads all of it once."""
        try:
            with zipfile.ZipFile(self.part(shard)) as archive:
                return archive.testzip() is None
        except (OSError, zipfile.BadZipFile, EOFError, NotImplementedError, ValueError):
            return False

    def read(self, shard: int) -> tuple[Content, int, int]:
        """Return a part, and the rank and world size that it was saved with.

        To be called only if it is sound. Parameters are mapped; what optimizers hold is copied.
        """
        import torch

        path = str(self.part(shard))
        saved = torch.load(path, map_location="cpu", mmap=True, weights_only=False)
        images = {
            name: _image(saved["step"], saved[name], saved["optimizer_layout"][name])
            for name in ("state", "part")
            if name in saved
        }
        return Content(_own(saved["own"]), images), saved["rank"], saved["world_size"]


def whole_steps(folder: Path) -> list[WholeStep]:
    """List the steps that are whole, the newest last; what cannot be read is none."""
    found = []
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if _STEP.fullmatch(path.name) and (one := _whole_step(path)) is not None:
                found.append(one)
    return sorted(found, key=lambda one: (one.written_ms, one.header.step))


def _whole_step(folder: Path) -> WholeStep | None:
    try:
        said = json.loads((folder / _MANIFEST).read_text())
        if said["format"] != FORMAT:
            return None
        header = Header(shard=0, rank=0, **{name: said[name] for name in _COMMON})
        return WholeStep(folder, int(said["written_ms"]), str(said["run"]), header)
    except (OSError, ValueError, KeyError, TypeError):
        return None


class StepWriter:
    """Writes the parts of one step that this node holds."""

    def __init__(self, folder: Path, run: str, header: Header) -> None:
        """Write into a folder for all steps, the step of this run that a header names."""
        name = f"step-{header.step:09d}.{re.sub(r'[^A-Za-z0-9-]', '-', run)[:16]}.{header.lineage}"
        self.all_steps, self.folder = folder, folder / name
        self._run, self._header = run, header

    def write(self, header: Header, content: Content, devices: Mapping[str, Any]) -> Path | None:
        """Write a part, and return its temporary name; None if another has written it.

        `NotWrittenError` if there is no room; `OSError` for other reasons.
        """
        import torch

        path = self.folder / _part_name(header.shard, header.shards)
        self.folder.mkdir(parents=True, exist_ok=True)
        if not _is_left_to_us(path):
            return None
        free = shutil.disk_usage(self.folder).free
        if free < header.bytes:
            raise NotWrittenError(
                f"{header.bytes / 1e6:.0f} MB are needed, and {free / 1e6:.0f} MB are free"
            )
        temporary = path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")
        try:
            with temporary.open("wb") as file:
                torch.save(_saved(header, content, devices), file)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        return temporary

    def give_name(self, temporary: Path) -> None:
        """Rename a complete part to its final name."""
        temporary.replace(temporary.with_name(temporary.name.partition(".pt.")[0] + ".pt"))
        _sync(self.folder)

    def finish(self, keep: int) -> bool:
        """Write the manifest, if all parts are there, and remove older steps but `keep`.

        Returns whether the step is whole.
        """
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
        _tidy(self.all_steps, keep)
        return True


def _part_name(shard: int, shards: int) -> str:
    return f"part-{shard:05d}-of-{shards:05d}.pt"


def _is_left_to_us(path: Path) -> bool:
    """Wait as long as another node writes this part; return whether it is still missing.

    Two that begin at the same time both write it, which does no harm.
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


def _tidy(folder: Path, keep: int) -> None:
    """Remove all whole steps but the newest, and what was left behind long ago."""
    whole = whole_steps(folder)
    for one in whole[:-keep]:
        _remove(one.folder)
    known = {one.folder for one in whole}
    for path in folder.iterdir():
        if _STEP.fullmatch(path.name) and path not in known:
            with contextlib.suppress(OSError):
                times = [one.stat().st_mtime for one in path.iterdir()]
                if time.time() - max(times, default=0.0) > _LEFTOVER_S:
                    _remove(path)


def _remove(folder: Path) -> None:
    """Remove a step; from its first moment on, it is not whole any more."""
    with contextlib.suppress(OSError):
        (folder / _MANIFEST).unlink(missing_ok=True)
        for one in folder.iterdir():
            one.unlink()
        folder.rmdir()


# ------------------------------------------------------------------ what is in a part


def _saved(header: Header, content: Content, devices: Mapping[str, Any]) -> dict[str, Any]:
    """Return a part as plain dicts and tensors, in the shape of torch's state dicts."""
    return {
        "format": FORMAT,
        **{name: getattr(header, name) for name in _OF_THE_PART},
        "own": _plain(content.own),
        **{name: _dict_of(image) for name, image in content.images.items()},
        "optimizer_layout": {
            name: [
                (list(key), devices[name].get(key), sharded) for key, _, sharded in image.optimizers
            ]
            for name, image in content.images.items()
        },
    }


_OF_THE_PART = ("step", "lineage", "shard", "shards", "rank", "world_size")


def _dict_of(image: Image) -> dict[str, Any]:
    small = image.small
    modules: dict[str, dict[str, Tensor]] = {}
    for name, one in (*image.parameters.items(), *small["buffers"].items()):
        entry, _, path = name.partition(".")
        modules.setdefault(entry, {})[path] = one
    optimizers: dict[str, dict[str, Any]] = {
        name: {"state": {}, "param_groups": _groups(settings, small["sizes"][name])}
        for name, settings in small["settings"].items()
    }
    for (name, place, key), value, _ in image.optimizers:
        optimizers[name]["state"].setdefault(place, {})[key] = value
    return {
        "modules": modules,
        "optimizers": optimizers,
        "objects": small["objects"],
        "values": small.get("values", {}),
    }


def _groups(settings: Iterable[Mapping[str, Any]], sizes: Iterable[int]) -> list[dict[str, Any]]:
    """Return an optimizer's groups as in its state dict."""
    begin, groups = 0, []
    for setting, size in zip(settings, sizes):
        groups.append({**setting, "params": list(range(begin, begin + size))})
        begin += size
    return groups


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
    settings = {
        name: [
            {key: value for key, value in group.items() if key != "params"}
            for group in one["param_groups"]
        ]
        for name, one in saved["optimizers"].items()
    }
    small = {
        "buffers": tensors,
        "settings": settings,
        "objects": saved["objects"],
        "values": saved["values"],
    }
    return Image(step, tensors, optimizers, small)


def _plain(own: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is a rank's alone, with tensors in place of numpy's arrays."""
    import torch

    def plain(array: Any) -> Tensor:
        return torch.from_numpy(array.astype("int64"))

    return {**own, "rng": _numpy_state(own["rng"], plain)}


def _own(own: Mapping[str, Any]) -> dict[str, Any]:
    return {**own, "rng": _numpy_state(own["rng"], lambda one: one.numpy().astype("uint32"))}


def _numpy_state(states: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    changed = dict(states)
    if isinstance(states.get("numpy"), tuple):
        name, keys, *rest = states["numpy"]
        changed["numpy"] = (name, change(keys), *rest)
    # Without numpy in this process yet, its generator begins where its own seed is.
    if "numpy" not in sys.modules:
        changed.pop("numpy", None)
    return changed
