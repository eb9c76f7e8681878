"""A state at one step as plain tensors, captured from modules and optimizers and put back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .contents import Contents, load_object, parameters_of, put_settings
from .staging import copiers, copy_all

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Image:
    """A state at one sealed step, or one part of a sharded state, as plain tensors."""

    step: int
    parameters: dict[str, Tensor]
    optimizers: list[tuple[tuple[str, int, str], Any, bool]]
    """The optimizers' state, as tuples of the key (optimizer, parameter index, name), the value,
    and whether the value is sharded like its parameter.
    """
    small: dict[str, Any]
    """Buffers, optimizer settings, states of objects, and plain values, by kind and name."""

    def tensors(self) -> list[tuple[str, Tensor]]:
        """List all tensors except the small ones, with their names."""
        held = [
            ("/".join(map(str, key)), value)
            for key, value, _ in self.optimizers
            if is_tensor(value)
        ]
        return [*self.parameters.items(), *held]

    def mapped(self, make: Callable[[Tensor], Tensor]) -> Image:
        """Return an image with each tensor replaced by `make(tensor)`, called in order."""
        return Image(
            self.step,
            {name: make(one) for name, one in self.parameters.items()},
            [
                (key, make(value) if is_tensor(value) else value, sharded)
                for key, value, sharded in self.optimizers
            ],
            self.small,
        )


def image_of(
    step: int, tensors: Sequence[tuple[str, Tensor]], contents: Contents, small: dict[str, Any]
) -> Image:
    """Return an image of these tensors and the optimizers' state, sharing their memory."""
    return Image(
        step,
        {name: local(one) for name, one in tensors},
        [
            (key, local(value) if is_tensor(value) else value, is_sharded(value))
            for key, value in contents.optimizer_state()
        ],
        small,
    )


def put_back(
    image: Image,
    contents: Contents,
    tensors: Sequence[tuple[str, Tensor]],
    buffers: Sequence[tuple[str, Tensor]],
) -> None:
    """Load an image into contents; its optimizer state is handed over, not copied."""
    import torch

    with torch.no_grad():
        copy_all(
            [image.parameters[name] for name, _ in tensors],
            [local(one) for _, one in tensors],
            [],
            copiers(),
        )
        for name, one in buffers:
            local(one).copy_(image.small["buffers"][name])
    for optimizer in contents.optimizers.values():
        optimizer.state.clear()
    for (name, place, key), value, sharded in image.optimizers:
        optimizer = contents.optimizers[name]
        parameter = parameters_of(optimizer)[place]
        held = _like(parameter, value) if sharded else value
        optimizer.state.setdefault(parameter, {})[key] = held
    for name, optimizer in contents.optimizers.items():
        put_settings(optimizer, copy.deepcopy(image.small["settings"][name]))
    for name, entry in contents.objects.items():
        load_object(name, entry, copy.deepcopy(image.small["objects"][name]))
    for name in contents.values:
        contents.values[name] = copy.deepcopy(image.small["values"][name])


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor (all of it if not sharded), sharing its memory."""
    return tensor.detach().to_local() if is_sharded(tensor) else tensor.detach()  # type: ignore[attr-defined]


def is_tensor(value: Any) -> bool:
    """Whether the value is a tensor of any kind."""
    import torch

    return isinstance(value, torch.Tensor)


def is_sharded(value: Any) -> bool:
    """Whether the value is a tensor distributed over a device mesh."""
    return hasattr(value, "device_mesh") and hasattr(value, "placements")


def _like(parameter: Any, value: Tensor) -> Tensor:
    """Return a sharded tensor with a parameter's layout and the given local part."""
    made: Tensor = type(parameter.detach()).from_local(
        value,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return made
