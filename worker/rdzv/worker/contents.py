"""What a state consists of: its entries by kind, images of them at one step, and generators.

An `Image` holds plain tensors, captured from modules and optimizers and put back.
"""

from __future__ import annotations

import copy
import hashlib
import io
import itertools
import json
import math
import pickle
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from .rounds import CannotBroadcastError, UnsupportedError, WorkerError
from .staging import copiers, copy_all, huge, readers


class Contents:
    """A state's entries, divided into modules, optimizers, other objects and plain values."""

    def __init__(self, entries: Mapping[str, Any]) -> None:
        self.modules: dict[str, nn.Module] = {}
        self.optimizers: dict[str, Optimizer] = {}
        self.objects: dict[str, Any] = {}
        self.values: dict[str, Any] = {}
        for name, entry in entries.items():
            if isinstance(entry, DistributedDataParallel):
                raise WorkerError(
                    f"state.{name} is wrapped in DistributedDataParallel: give State the module "
                    "itself, and wrap it inside the function under @elastic, anew in each round"
                )
            if isinstance(entry, torch.nn.Module):
                self.modules[name] = entry
            elif isinstance(entry, torch.optim.Optimizer):
                self.optimizers[name] = entry
            elif hasattr(entry, "state_dict") and hasattr(entry, "load_state_dict"):
                self.objects[name] = entry
            else:
                self.values[name] = entry

    def parameters(self) -> list[tuple[str, Tensor]]:
        """Return the parameters that an optimizer updates, each once."""
        stepped = self._stepped()
        return [(name, one) for name, one in self._all_parameters() if id(one) in stepped]

    def outside(self) -> list[tuple[str, Tensor]]:
        """Return what no optimizer updates but all ranks share.

        That is frozen parameters, and all of a module that no optimizer trains, such as an
        average of the weights.
        """
        stepped = self._stepped()
        found = [(name, one) for name, one in self._all_parameters() if id(one) not in stepped]
        for name, module in self.modules.items():
            if not any(id(one) in stepped for one in module.parameters()):
                found += [(f"{name}.{path}", one) for path, one in module.named_buffers()]
        return found

    def buffers(self) -> list[tuple[str, Tensor]]:
        """Return the buffers of trained modules: each rank has its own (batch norm averages)."""
        stepped = self._stepped()
        return [
            (f"{name}.{path}", one)
            for name, module in self.modules.items()
            if any(id(parameter) in stepped for parameter in module.parameters())
            for path, one in module.named_buffers()
        ]

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Return all but buffers."""
        return [*self.parameters(), *self.outside()]

    def optimizer_state(self) -> list[tuple[tuple[str, int, str], Any]]:
        return [
            ((name, place, str(key)), value)
            for name, optimizer in self.optimizers.items()
            for place, parameter in enumerate(parameters_of(optimizer))
            for key, value in sorted(optimizer.state.get(parameter, {}).items())
        ]

    def manifest(self) -> list[list[str]]:
        kinds = (
            ("module", self.modules),
            ("optimizer", self.optimizers),
            ("object", self.objects),
            ("value", self.values),
        )
        found = [[f"state.{name}", kind] for kind, entries in kinds for name in sorted(entries)]
        for name, tensor in (*self.parameters(), *self.outside(), *self.buffers()):
            found.append([name, f"{list(tensor.shape)} {tensor.dtype}".replace("torch.", "")])
        for name, optimizer in self.optimizers.items():
            sizes = [len(group["params"]) for group in optimizer.param_groups]
            found.append([f"{name}.param_groups", f"with {sizes} parameters"])
        return found

    def described(self, *more: list[str]) -> tuple[list[list[str]], str]:
        """Return a description of everything that must match on all ranks, and its hash."""
        manifest = [*self.manifest(), *more]
        return manifest, hashlib.blake2b(json.dumps(manifest).encode(), digest_size=16).hexdigest()

    def image(
        self,
        step: int,
        small: dict[str, Any],
        tensors: Sequence[tuple[str, Tensor]] | None = None,
    ) -> Image:
        """Return an image that shares the memory of these tensors, or of all."""
        return Image(
            step,
            {name: local(one) for name, one in (self.tensors() if tensors is None else tensors)},
            [
                (key, local(value) if is_tensor(value) else value, is_sharded(value))
                for key, value in self.optimizer_state()
            ],
            small,
        )

    def put_back(
        self,
        image: Image,
        tensors: Sequence[tuple[str, Tensor]] | None = None,
        buffers: Sequence[tuple[str, Tensor]] | None = None,
    ) -> None:
        """Load an image, or only these of its tensors and buffers.

        Its optimizer state is handed over, not copied.
        """
        tensors = self.tensors() if tensors is None else tensors
        with torch.no_grad():
            copy_all(
                [image.parameters[name] for name, _ in tensors],
                [local(one) for _, one in tensors],
                [],
                copiers(),
            )
            for name, one in self.buffers() if buffers is None else buffers:
                local(one).copy_(image.small["buffers"][name])
        for optimizer in self.optimizers.values():
            optimizer.state.clear()
        for (name, place, key), value, sharded in image.optimizers:
            optimizer = self.optimizers[name]
            parameter = parameters_of(optimizer)[place]
            held = _like(parameter, value) if sharded else value
            optimizer.state.setdefault(parameter, {})[key] = held
        self.put_small(image.small)

    def small_with(self, buffers: dict[str, Tensor]) -> dict[str, Any]:
        return {
            "buffers": buffers,
            "groups": {
                name: copy.deepcopy(_groups_of(one)) for name, one in self.optimizers.items()
            },
            "objects": {
                name: _copied(name, one, lambda one: copy.deepcopy(one.state_dict()))
                for name, one in self.objects.items()
            },
            "values": {
                name: _copied(name, one, copy.deepcopy) for name, one in self.values.items()
            },
        }

    def put_small(self, small: Mapping[str, Any]) -> None:
        for name, optimizer in self.optimizers.items():
            for group, held in zip(optimizer.param_groups, copy.deepcopy(small["groups"][name])):
                group.update(held, params=group["params"])
        for name, entry in self.objects.items():
            _load_object(entry, copy.deepcopy(small["objects"][name]))
        for name in self.values:
            self.values[name] = copy.deepcopy(small["values"][name])

    def layout(self) -> Layout:
        """Return what tensors' names and bits do not tell of their places in the whole state."""
        names = {id(one): name for name, one in self._all_parameters()}
        tensors = (*self.tensors(), *self.buffers())
        return Layout(
            {
                name: [names.get(id(one), str(n)) for n, one in enumerate(parameters_of(optimizer))]
                for name, optimizer in self.optimizers.items()
            },
            {name: Chunk.of(one) for name, one in tensors if is_sharded(one)},
        )

    def like(self, held: Image) -> tuple[Image, dict[str, Any]]:
        """Return an image as `held`, one of shapes, in these parameters' memory, and new tensors.

        Also returns its tensors by their names in a checkpoint, all of which are yet to be filled.
        """
        tensors: dict[str, Any] = {name: one.detach() for name, one in self.tensors()}
        parameters = {name: local(one) for name, one in tensors.items()}
        optimizers = []
        paths = [path for path, _, _ in held.placed()][len(held.parameters) :]
        for path, (key, shape, sharded) in zip(paths, held.optimizers):
            value = shape
            if _is_large(shape):
                parameter = parameters_of(self.optimizers[key[0]])[key[1]]
                made = torch.empty_like(parameter, dtype=shape.dtype) if sharded else shape.empty()
                tensors[".".join(path)], value = made, local(made)
            optimizers.append((key, value, sharded))
        small = {**held.small, "layout": self.layout()}
        return replace(held, parameters=parameters, optimizers=optimizers, small=small), tensors

    def refuse_shards(self) -> None:
        for name, parameter in self._all_parameters():
            if type(parameter.data).__name__ == "DTensor" or hasattr(parameter, "device_mesh"):
                raise UnsupportedError(
                    f"{name} is distributed over a device mesh, which ends with its round. Build "
                    "and shard the model inside the function under @elastic, in each round, and "
                    "give it to state.add(model=..., optimizer=...), not to State(...)"
                )

    def _all_parameters(self) -> Iterator[tuple[str, Tensor]]:
        seen: set[int] = set()
        for name, module in self.modules.items():
            for path, parameter in module.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield f"{name}.{path}", parameter

    def _stepped(self) -> set[int]:
        return {
            id(parameter)
            for optimizer in self.optimizers.values()
            for parameter in parameters_of(optimizer)
        }


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _groups_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    numbers = itertools.count()
    return [
        {**group, "params": [next(numbers) for _ in group["params"]]}
        for group in optimizer.param_groups
    ]


def _load_object(entry: Any, state: Any) -> None:
    """Load an entry's state; for a gradient scaler, also discard the interrupted step."""
    # A disabled scaler has an empty state and refuses to load it.
    if state or not hasattr(entry, "_per_optimizer_states"):
        entry.load_state_dict(state)
    # Otherwise its unscale_() would raise, as if it had been called twice in one step.
    if (unfinished := getattr(entry, "_per_optimizer_states", None)) is not None:
        unfinished.clear()


def _copied(name: str, what: Any, copy: Callable[[Any], Any]) -> Any:
    try:
        return copy(what)
    except Exception as error:
        raise cannot_broadcast(name, error) from error


_PICKLE_ERRORS = (pickle.PicklingError, TypeError, AttributeError, RuntimeError)


def packed(**parts: Any) -> bytes:
    """Pickle named parts. `CannotBroadcastError` names the entry that cannot be pickled."""
    try:
        return _pickled(parts)
    except _PICKLE_ERRORS:
        for image in (one for one in parts.values() if isinstance(one, Image)):
            for name, value in {**image.small["objects"], **image.small["values"]}.items():
                try:
                    _pickled(value)
                except _PICKLE_ERRORS as error:
                    raise cannot_broadcast(name, error) from error
        raise


def _pickled(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def unpacked(data: Any) -> dict[str, Any]:
    parts: dict[str, Any] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
    return parts


def cannot_broadcast(name: str, error: Exception) -> CannotBroadcastError:
    if "graph leaves" in str(error):  # Torch's wording; its remedy is for authors of modules.
        return CannotBroadcastError(
            f"state.{name} has a tensor that carries autograd's graph, which cannot be copied: "
            "assign its .item() or .detach()"
        )
    return CannotBroadcastError(
        f"state.{name} cannot be sent to another rank ({type(error).__name__}: {error}). Keep it "
        "out of the state, or give it state_dict and load_state_dict"
    )


@dataclass(frozen=True)
class Chunk:
    """Where a rank's part of a sharded tensor belongs."""

    shape: tuple[int, ...]
    """The whole tensor's."""
    offsets: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Any) -> Chunk:
        (chunk,) = tensor.__create_chunk_list__()
        return cls(tuple(tensor.shape), tuple(chunk.offsets))


@dataclass(frozen=True)
class Layout:
    """How a state's tensors belong together."""

    names: dict[str, list[str]]
    """The parameters of each optimizer, in its order."""
    chunks: dict[str, Chunk]
    """The sharded parameters and buffers."""

    def fqns(self, optimizer: str) -> list[str]:
        """Name an optimizer's parameters as torch does: without its module, if there is one."""
        names = self.names[optimizer]
        is_only = len({name.partition(".")[0] for name in names}) == 1
        return [name.partition(".")[2] for name in names] if is_only else names


@dataclass(frozen=True)
class Shape:
    """Stands for a tensor that is stored or sent separately."""

    shape: tuple[int, ...]
    dtype: Any
    device: str
    """The type of its device."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * int(self.dtype.itemsize)

    def empty(self, device: Any = None) -> Tensor:
        return huge(torch.empty(self.shape, dtype=self.dtype, device=device or self.device))

    def fits(self, tensor: Tensor) -> bool:
        return (
            (tuple(tensor.shape), tensor.dtype) == (self.shape, self.dtype)
            and tensor.device.type == self.device
            and tensor.is_contiguous()
        )


@dataclass(frozen=True)
class Image:
    """A state at one sealed step, or one part of a sharded state, as plain tensors or shapes."""

    step: int
    parameters: dict[str, Any]
    optimizers: list[tuple[tuple[str, int, str], Any, bool]]
    """The optimizers' state, as tuples of the key (optimizer, parameter index, name), the value,
    and whether the value is sharded like its parameter.
    """
    small: dict[str, Any]
    """Buffers, optimizers' groups, states of objects, and plain values, by kind and name; in a
    snapshot, the `layout`, too.
    """

    def tensors(self) -> list[tuple[str, Any]]:
        """List all tensors or shapes, except the small ones, with their names."""
        held = [(_joined(key), value) for key, value, _ in self.optimizers if _is_large(value)]
        return [*self.parameters.items(), *held]

    def optimizer_tensors(self) -> list[Any]:
        return [value for _, value, _ in self.optimizers if _is_large(value)]

    def placed(self) -> Iterator[tuple[tuple[str, ...], Any, Chunk | None]]:
        """List the path in a checkpoint of each tensor and optimizer's value, and chunks' places.

        The image must have its `layout`.
        """
        layout = self.small["layout"]
        for name, one in self.parameters.items():
            yield path_of(name), one, layout.chunks.get(name)
        for (name, place, key), value, sharded in self.optimizers:
            chunk = layout.chunks[layout.names[name][place]] if sharded else None
            yield (name, "state", layout.fqns(name)[place], key), value, chunk

    def mapped(self, make: Callable[[str, Any], Any]) -> Image:
        return replace(
            self,
            parameters={name: make(name, one) for name, one in self.parameters.items()},
            optimizers=[
                (key, make(_joined(key), value) if _is_large(value) else value, sharded)
                for key, value, sharded in self.optimizers
            ],
        )

    def filled(self, tensors: Iterator[Tensor]) -> Image:
        return self.mapped(lambda _, __: next(tensors))

    def shapes(self) -> Image:
        return self.mapped(lambda _, one: Shape(tuple(one.shape), one.dtype, one.device.type))

    def with_optimizers_on(self, devices: Image) -> Image:
        """Copy the optimizers' tensors to the devices that an image of shapes has for them."""
        copies = [shape.empty() for shape in devices.optimizer_tensors()]
        copy_all(self.optimizer_tensors(), copies, [], readers())
        return self.filled(iter([*self.parameters.values(), *copies]))


def path_of(name: str) -> tuple[str, str]:
    entry, _, path = name.partition(".")
    return entry, path


def _joined(key: tuple[str, int, str]) -> str:
    return "/".join(map(str, key))


def _is_large(value: Any) -> bool:
    return isinstance(value, Shape) or is_tensor(value)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, sharing its memory."""
    return tensor.detach().to_local() if is_sharded(tensor) else tensor.detach()  # type: ignore[attr-defined]


def is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def is_sharded(value: Any) -> bool:
    return hasattr(value, "device_mesh") and hasattr(value, "placements")


def _like(parameter: Any, value: Tensor) -> Tensor:
    made: Tensor = type(parameter.detach()).from_local(
        value,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return made


def captured_rng() -> dict[str, Any]:
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    if (numpy := sys.modules.get("numpy")) is not None:
        name, keys, *rest = numpy.random.get_state()
        # Python's own types, which torch.load(weights_only=True) reads.
        states["numpy"] = (name, keys.tolist(), *rest)
    return states


def restore_rng(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
    # If this process has not imported numpy yet, numpy's generator will start from its own seed.
    if "numpy" in states and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.set_state(states["numpy"])


def derive_rng(*of: object, is_frequent: bool = False) -> None:
    """Seed all generators from what their numbers are for, such as (seed, rank, step).

    `is_frequent` leaves out devices that are not in use yet, for which torch records a stack trace.
    """
    digest = hashlib.blake2b("/".join(map(str, of)).encode(), digest_size=8).digest()
    derived = int.from_bytes(digest, "big") >> 1
    random.seed(derived)
    if is_frequent:
        torch.default_generator.manual_seed(derived)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.manual_seed(derived)
    else:
        torch.manual_seed(derived)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(derived & 0xFFFFFFFF)
