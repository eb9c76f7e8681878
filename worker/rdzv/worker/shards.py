"""This rank's part of a sharded state (FSDP2): in a round, and held in memory between rounds.

A sharded model is bound to the process groups of its round, so the script builds it in each round.
Its parameters are held here as plain tensors, and loaded into the next one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .contents import Contents, copied, load_object, parameters_of, put_settings, settings_of
from .errors import UnsupportedError, WorkerError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Place:
    """Which part of the state a rank has, of how many."""

    shard: int = 0
    shards: int = 1


@dataclass(frozen=True)
class Image:
    """One part of a state at one sealed step, in plain tensors."""

    step: int
    parameters: dict[str, Tensor]
    optimizers: list[tuple[tuple[str, int, str], Any, bool]]
    """The state of optimizers: optimizer, parameter's place and name; the value; whether it is
    sharded like its parameter."""
    small: dict[str, Any]

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Name all of its tensors."""
        held = [
            ("/".join(map(str, key)), value)
            for key, value, _ in self.optimizers
            if _is_tensor(value)
        ]
        return [*self.parameters.items(), *held]

    def mapped(self, make: Callable[[Tensor], Tensor]) -> Image:
        """Return an image with other tensors in place of its own, made in their order."""
        return Image(
            self.step,
            {name: make(one) for name, one in self.parameters.items()},
            [
                (key, make(value) if _is_tensor(value) else value, sharded)
                for key, value, sharded in self.optimizers
            ],
            self.small,
        )


class Parts:
    """The modules, optimizers and objects that a script has added to a round."""

    def __init__(self, entries: Mapping[str, Any], rank: int, world_size: int) -> None:
        """Take them before their first step. `WorkerError` for what a round cannot put back."""
        self.contents = Contents(entries)
        if self.contents.values:
            raise WorkerError(
                f"state.add() was given {min(self.contents.values)!r}, which is a plain value: "
                "give it to State(...), which keeps it from round to round"
            )
        # Forward passes put gathered parameters in their place for a while.
        self._tensors = self.contents.parameters() + self.contents.outside()
        self._buffers = self.contents.buffers()
        self.place = _place_of(self._tensors, rank, world_size)

    def small(self) -> dict[str, Any]:
        """Copy what moves outside of the optimizers' steps, and is small."""
        return {
            "buffers": {name: local(one).clone() for name, one in self._buffers},
            "settings": {
                name: copy.deepcopy(settings_of(one))
                for name, one in self.contents.optimizers.items()
            },
            "objects": {
                name: copied(name, one, lambda one: copy.deepcopy(one.state_dict()))
                for name, one in self.contents.objects.items()
            },
        }

    def image(self, step: int, small: dict[str, Any], *, clone: bool) -> Image:
        """Return the part as it is now; without `clone` it shares the memory."""
        image = Image(
            step,
            {name: local(one) for name, one in self._tensors},
            [
                (key, local(value) if _is_tensor(value) else value, _is_sharded(value))
                for key, value in self.contents.optimizer_state()
            ],
            small,
        )
        return image.mapped(lambda one: one.clone()) if clone else image

    def put_back(self, image: Image) -> None:
        """Bring the part to where an image is; the image's memory may be used for it."""
        import torch

        with torch.no_grad():
            for name, one in self._tensors:
                local(one).copy_(image.parameters[name])
            for name, one in self._buffers:
                local(one).copy_(image.small["buffers"][name])
        for optimizer in self.contents.optimizers.values():
            optimizer.state.clear()
        for (name, place, key), value, sharded in image.optimizers:
            optimizer = self.contents.optimizers[name]
            parameter = parameters_of(optimizer)[place]
            held = _like(parameter, value) if sharded else value
            optimizer.state.setdefault(parameter, {})[key] = held
        for name, optimizer in self.contents.optimizers.items():
            put_settings(optimizer, copy.deepcopy(image.small["settings"][name]))
        for name, entry in self.contents.objects.items():
            load_object(name, entry, copy.deepcopy(image.small["objects"][name]))


class Shards:
    """A rank's part of a sharded state. Does nothing if the state is not sharded."""

    def __init__(self) -> None:
        self.parts: Parts | None = None
        """The objects that the script has added in this round."""
        self.place = Place()
        self.is_missing = False
        """Whether others have a sharded state, and this rank does not have its part yet."""
        self._held: dict[int, Image] = {}
        """Between rounds, by step; at most the last two that were sealed."""
        self._last: Image | None = None
        """The part before the latest optimizer step."""
        self._small: dict[str, Any] = {}
        self._touched = False
        self._holds_last = False

    def held(self, step: int | None) -> Image | None:
        """Return the part of a sealed step as it is held between rounds."""
        return self._held.get(step or 0)

    def oldest_step(self, step: int | None) -> int | None:
        """Return the oldest step to which this rank can go back from a sealed one."""
        return max(step - 1, 0) if step and step - 1 in self._held else step

    def begin(self, parts: Parts, *, holds_last: bool) -> None:
        """Load the state of the step that the round resumes at into the added objects."""
        self.parts, self.place = parts, parts.place
        self._holds_last = holds_last
        self._held, self._last, self._touched = {}, None, False
        self._small = parts.small()
        self.is_missing = False

    def before_step(self, step: int) -> None:
        """Hold the part as it is: an optimizer is about to change it."""
        if self.parts is not None and not self._touched:
            self._last = None  # Its memory can be used for the next one.
            if self._holds_last:
                self._last = self.parts.image(step, self._small, clone=True)
            self._touched = True

    def commit(self) -> None:
        """Seal the step that was just done. `WorkerError` if the script has not added its part."""
        if self._held or self.is_missing:
            raise WorkerError(
                "state.commit() was called before state.add() in this round: a sharded model is "
                "built anew in each round, and added before its first step"
            )
        if self.parts is not None:
            self._small = self.parts.small()
            self._touched = False

    def take_out(self, step: int | None) -> None:
        """Hold the part on as plain tensors, and let go of modules, optimizers and meshes."""
        if self.parts is None:
            return
        images = [] if self._last is None else [self._last]
        if not self._touched:
            images.append(self.parts.image(step or 0, self._small, clone=False))
        self._held = {image.step: image for image in images} if step else {}
        self.is_missing = bool(step) and step not in self._held
        self.parts, self._last, self._small = None, None, {}


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, in the same memory; all of it if it is not sharded."""
    return tensor.detach().to_local() if _is_sharded(tensor) else tensor.detach()  # type: ignore[attr-defined]


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _is_sharded(value: Any) -> bool:
    return hasattr(value, "device_mesh") and hasattr(value, "placements")


def _like(parameter: Any, value: Tensor) -> Tensor:
    """Return a sharded tensor with a parameter's layout and this part."""
    made: Tensor = type(parameter.detach()).from_local(
        value,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return made


def _place_of(tensors: list[tuple[str, Tensor]], rank: int, world_size: int) -> Place:
    """Return which part of the state a rank has: ranks with the same part can heal each other.

    Where parameters are on one mesh of all ranks, it is the rank's place in those dimensions of the
    mesh in which a parameter is sharded. Else each rank has a part of its own.
    """
    sharded: list[Any] = [one for _, one in tensors if _is_sharded(one)]
    if not sharded:
        raise UnsupportedError(
            "state.add() was given no sharded parameters (of fully_shard). Give a model that is "
            "the same on all ranks to State(...); FullyShardedDataParallel cannot be kept"
        )
    mesh = sharded[0].device_mesh
    if any(one.device_mesh != mesh for one in sharded) or mesh.size() != world_size:
        return Place(rank, world_size)
    shard, shards = 0, 1
    for dimension, coordinate in enumerate(mesh.get_coordinate()):
        if not all(one.placements[dimension].is_replicate() for one in sharded):
            size = mesh.size(dimension)
            shard, shards = shard * size + coordinate, shards * size
    return Place(shard, shards)
