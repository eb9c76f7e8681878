"""Snapshots as checkpoints of torch.distributed.checkpoint (DCP), which any number of ranks loads.

Each value has the name that DCP gives it in `{"model": model.state_dict(), ...}`; optimizers have
those of `get_optimizer_state_dict`. What these names cannot hold (keys that are numbers, empty
dicts, what belongs to one rank) is in the snapshot's head, which is saved as `rdzv/RANK`.

Parts are written by processes that know nothing of each other, and no group of torch's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from .contents import Chunk, Contents, Image, is_tensor, path_of, unpacked
from .slot_format import Header
from .snapshot_slot import Content
from .staging import digest

_OWN = "rdzv/"

Index = tuple[SavePlan, list[WriteResult]]
"""Where the values of one part are, as DCP describes them."""


class _PartPlanner(DefaultSavePlanner):
    """Plans a part whose tensors may be chunks of larger ones."""

    def __init__(self, chunks: Mapping[str, Chunk]) -> None:
        super().__init__()
        self._chunks = chunks

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        return replace(plan, items=list(self._placed(plan.items)))

    def _placed(self, items: Sequence[WriteItem]) -> Iterator[WriteItem]:
        for item in items:
            name = item.index.fqn
            if (chunk := self._chunks.get(name)) is None:
                yield item
                continue
            tensor = item.tensor_data
            assert tensor is not None
            shape, offsets = torch.Size(chunk.shape), torch.Size(chunk.offsets)
            # Ranks without a row all have the same place, at the tensor's end.
            if tensor.chunk.sizes.numel() or not shape.numel():
                yield replace(
                    item,
                    index=MetadataIndex(name, offsets),
                    type=WriteItemType.SHARD,
                    tensor_data=replace(
                        tensor, chunk=replace(tensor.chunk, offsets=offsets), size=shape
                    ),
                )

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.state_dict[index.fqn]


def write_part(folder: Path, header: Header, content: Content, head: bytes) -> tuple[Index, str]:
    """Write a part as `__SHARD_0.distcp`; return its index, and a digest of its unsharded tensors.

    Those should be equal in all parts.
    """
    values, chunks, plain = _values(header, content, head)
    planner = _PartPlanner(chunks)
    planner.set_up_planner(values, is_coordinator=True)
    writer = FileSystemWriter(folder, sync_files=False)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    # A plan's place in the list is its number in the file's name.
    plan = writer.prepare_global_plan([SavePlan([])] * header.shard + [plan])[-1]
    return (plan, writer.write_data(plan, planner).wait()), digest(sorted(plain.items()))


def write_metadata(folder: Path, indexes: Sequence[Index]) -> None:
    """Write `.metadata`. Raises `ValueError` if the parts' chunks do not add up to the tensors."""
    _, metadata = DefaultSavePlanner().create_global_plan([plan for plan, _ in indexes])
    FileSystemWriter(folder).finish(metadata, [results for _, results in indexes])


def _values(
    header: Header, content: Content, head: bytes
) -> tuple[dict[str, Any], dict[str, Chunk], dict[str, Any]]:
    """Return a part's values, nested as DCP flattens them, its chunks, and its other tensors."""
    own = f"{_OWN}{header.rank}"
    values: dict[str, Any] = {own: head}
    chunks: dict[str, Chunk] = {}
    plain: dict[str, Any] = {}
    for kind, image in content.images.items():
        for path, value, chunk in image.placed():
            name = ".".join(path)
            if chunk is not None:
                chunks[name] = chunk
            elif kind == "part" and is_tensor(value):
                plain[name] = value
            if chunk is not None or not header.shard:
                _put(values, path, value)
            elif name in plain:
                values[f"{own}/{name}"] = value
        if not header.shard:
            _put_small(values, image)
    return values, chunks, plain


def _put_small(values: dict[str, Any], image: Image) -> None:
    small = image.small
    for name, one in small["buffers"].items():
        _put(values, path_of(name), one)
    for name, groups in small["groups"].items():
        fqns = small["layout"].fqns(name)
        named = [{**one, "params": [fqns[place] for place in one["params"]]} for one in groups]
        _put(values, (name, "param_groups"), named)
    values.update({**small["objects"], **small["values"]})


def _put(values: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for name in path[:-1]:
        values = values.setdefault(name, {})
    values[path[-1]] = value


def read(folder: Path, rank: int, world_size: int, wanted: Mapping[str, Contents]) -> Content:
    """Read a whole step into the parameters of `wanted` (`state`, `part`), however divided now.

    The images share the parameters' memory.
    """
    reader = FileSystemReader(folder)
    metadata = reader.read_metadata()
    names = metadata.state_dict_metadata
    ranks = [int(rest) for name in names if (rest := name.removeprefix(_OWN)).isdecimal()]
    own = f"{_OWN}{rank if rank in ranks else min(ranks)}"
    head = unpacked(_load(reader, metadata, {own: b""})[own])
    is_same_place = tuple(head["own"]["place"]) == (rank, world_size)
    tensors: dict[str, Any] = {}
    images = {}
    for kind, contents in wanted.items():
        images[kind], made = contents.like(head[kind])
        tensors |= made
    if is_same_place:
        mine = {name: f"{own}/{name}" for name in tensors if f"{own}/{name}" in names}
        tensors = {mine.get(name, name): one for name, one in tensors.items()}
    _load(reader, metadata, tensors)
    return Content(head["own"], images)


def _load(reader: FileSystemReader, metadata: Metadata, wanted: dict[str, Any]) -> dict[str, Any]:
    """Read values by name, tensors in place, without asking other ranks."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(wanted, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = planner.finish_plan(planner.create_local_plan())
    reader.read_data(plan, planner).wait()
    return wanted
