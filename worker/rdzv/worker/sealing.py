"""Tracks which step a worker's state is at: sealed by a commit, or torn by an unfinished step."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .contents import (
    Contents,
    Image,
    Shape,
    captured_rng,
    parameters_of,
    restore_rng,
)
from .sampler import ElasticBatchSampler
from .shards import Parts, Shards
from .snapshot_slot import Content
from .staging import copiers, copy_all, equal_bits, events

_copier = ThreadPoolExecutor(1, "rdzv verified step")


class Sealing:
    """The state's contents, and a copy of everything that changes outside optimizer steps.

    Parameters and optimizer state change only in an optimizer's step, so they need no copy: they
    are either at the sealed step, or torn. Everything else (buffers, weight averages, the scaler,
    the sampler, random number generators, plain values) may change at any time, and is restored to
    the sealed step before a step is repeated.
    """

    def __init__(self, entries: Mapping[str, Any]) -> None:
        self.contents = Contents(entries)
        self.samplers = {
            name: one
            for name, one in self.contents.objects.items()
            if isinstance(one, ElasticBatchSampler)
        }
        self.step: int | None = None
        """The number of sealed steps, or None before the first."""
        self.torn = False
        """Whether an optimizer has modified the parameters since the last seal."""
        self.is_redo = False
        self.shards = Shards()
        self._sealed: _Copy | None = None
        self._before: _Copy | None = None
        """The copy of the previous step, to which a rank with a sharded state may go back."""
        self._verified: _Verified | None = None
        self._copying: Future[None] | None = None
        self.has_gone_back = False
        """Whether this rank is at its verified step, which may not be the last that it sealed."""
        self._before_step: Callable[[], None] | None = None
        self._place = (0, 1)
        """The rank and world size of the round."""
        self.lineage = 0
        """The last round in which all workers of this training were new."""
        self.nonce = secrets.token_hex(8)
        """Distinguishes this lineage from another with the same number. It is chosen at random by
        RANK 0.
        """
        self.wait_for_copy: Callable[[], object] = lambda: None
        """Blocks while the sealed step's tensors are being copied to a snapshot."""
        for optimizer in self.contents.optimizers.values():
            optimizer.register_step_pre_hook(self._refuse_or_tear)

    @property
    def is_torn(self) -> bool:
        """Whether this rank has no whole state to heal others with."""
        return self.torn or self.shards.is_missing

    @property
    def is_in_step(self) -> bool:
        """Whether an optimizer has changed anything since the last seal."""
        return self.torn or self.shards.is_touched

    @property
    def has_begun(self) -> bool:
        return self._sealed is not None

    def holds(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "torn": self.is_torn,
            "oldest_step": self.shards.oldest_step(self.step),
            **asdict(self.shards.place),
        }

    def content(self, *, with_state: bool) -> Content:
        """Return the sealed step, sharing memory with tensors that the next step changes."""
        sealed, parts = self._sealed, self.shards.parts
        assert sealed is not None
        step, contents = self.step or 0, self.contents
        images = {}
        if with_state or parts is not None:
            tensors = [*contents.parameters(), *sealed.outside()]
            small = {**sealed.small, "layout": contents.layout()}
            images["state"] = contents.image(step, small, tensors)
        if parts is not None:
            images["part"] = parts.image(step, self.shards.small)
        own = {"rng": sealed.rng, "buffers": sealed.small["buffers"], "place": self._place}
        return Content(own, images)

    def image(self, small: dict[str, Any]) -> Image:
        return self.contents.image(self.step or 0, small)

    def load(self, image: Image, *, with_buffers: bool = True) -> None:
        """Load a state; its optimizer tensors are handed over, not copied."""
        self.contents.put_back(image, buffers=None if with_buffers else [])
        self.step = image.step

    def load_own(self, own: Mapping[str, Any]) -> None:
        restore_rng(own["rng"])
        _copy_back(own["buffers"], self.contents.buffers())

    def begin_round(self, rank: int, world_size: int, before_step: Callable[[], None]) -> None:
        """Prepare for a round. `before_step` may refuse a step."""
        self._before_step, self._place = before_step, (rank, world_size)
        for optimizer in self.contents.optimizers.values():
            # An interrupted backward pass may have left gradients.
            for parameter in parameters_of(optimizer):
                parameter.grad = None
        for sampler in self.samplers.values():
            sampler.begin_round(rank, world_size)
            sampler.on_first_batch = self._restore_rng
        self._seal()
        self._before = None

    def end_round(self) -> None:
        self._before_step = None

    def add(self, parts: Parts, *, holds_last: bool) -> None:
        for optimizer in parts.optimizers.values():
            optimizer.register_step_pre_hook(self._refuse_or_hold)
        self.shards.begin(parts, holds_last=holds_last)
        # Building the model has drawn random numbers that an uninterrupted run would not have
        # drawn.
        if self.step:
            self._restore_rng()

    def commit(self) -> None:
        self._refuse_unfinished_step()
        self.shards.commit()
        for sampler in self.samplers.values():
            sampler.commit()
        self._seal()
        self.step = (self.step or 0) + 1
        self.torn = False
        self.is_redo = False

    def hold_verified(self, *, with_tensors: bool) -> None:
        """Copy the sealed step to the CPU, for `go_back`. The next optimizer step waits for it."""
        assert self._sealed is not None
        image = self.contents.image(self.step or 0, {}, self.contents.parameters())
        held = None
        if with_tensors:
            former = self._verified.tensors if self._verified is not None else None
            places = dict(former.tensors()) if former is not None else {}

            def place(name: str, one: Tensor) -> Tensor:
                shape, last = Shape(tuple(one.shape), one.dtype, "cpu"), places.get(name)
                return last if last is not None and shape.fits(last) else shape.empty()

            held = image.mapped(place)
            one, other = ([tensor for _, tensor in of.tensors()] for of in (image, held))
            self._copying = _copier.submit(copy_all, one, other, events(one), copiers())
        self._verified = _Verified(self.step, self._sealed, image.shapes(), held)

    def go_back(self) -> int:
        """Return to the verified step; without its tensors, this rank is torn. Returns the step."""
        if (verified := self._verified) is None:
            return 0  # It has not begun to train.
        self.wait_for_copies()
        if verified.tensors is not None:
            image = verified.tensors.with_optimizers_on(verified.shapes)
            image = replace(image, small=verified.sealed.small)
            self.contents.put_back(image, self.contents.parameters(), [])
        self.step, self._sealed = verified.step, verified.sealed
        self.torn, self.has_gone_back = verified.tensors is None, True
        verified.sealed.put_back(self.contents)
        return verified.step or 0

    def wait_for_copies(self) -> None:
        """Block until the tensors may be changed."""
        self.wait_for_copy()
        if self._copying is not None:
            self._copying.result()

    def roll_back(self) -> None:
        assert self._sealed is not None
        self._sealed.put_back(self.contents)

    def roll_back_local(self) -> None:
        """Restore only this rank's own buffers and generators."""
        assert self._sealed is not None
        self._sealed.put_back_local(self.contents)

    def undo_local(self) -> None:
        """Restore those to the previous step, as other ranks have not sealed this one."""
        assert self._before is not None
        self._sealed = self._before
        self.roll_back_local()

    def _seal(self) -> None:
        last, self.has_gone_back = self._sealed, False
        self._before = last if self.shards.parts is not None else None
        self._sealed = _Copy(self.contents, last)

    def _restore_rng(self) -> None:
        # A new loader draws a number, which an uninterrupted run does not do in the middle of an
        # epoch.
        if self._sealed is not None:
            restore_rng(self._sealed.rng)

    def _refuse_unfinished_step(self) -> None:
        for sampler in self.samplers.values():
            sampler.refuse_unfinished_step()

    def _refuse_or_tear(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._before_step is not None:
            self._refuse_unfinished_step()
            self._before_step()
            self.wait_for_copies()
            self.torn = True

    def _refuse_or_hold(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._before_step is not None:
            self._refuse_unfinished_step()
            self._before_step()
            self.wait_for_copies()
            self.shards.before_step(self.step or 0)


@dataclass(frozen=True)
class _Verified:
    """A step at which all replicas were equal."""

    step: int | None
    sealed: _Copy
    shapes: Image
    tensors: Image | None
    """A copy of the tensors, or None if another rank of the node holds one."""


class _Copy:
    """A copy of all but parameters and optimizer state, which shares what has not changed."""

    def __init__(self, contents: Contents, last: _Copy | None) -> None:
        self.rng = captured_rng()
        buffers, outside = ({}, {}) if last is None else (last._buffers, last._outside)
        self._buffers: dict[str, Tensor] = _cloned(contents.buffers(), buffers)
        self._outside: dict[str, Tensor] = _cloned(contents.outside(), outside)
        self.small = contents.small_with(self._buffers)

    def outside(self) -> list[tuple[str, Tensor]]:
        return list(self._outside.items())

    def put_back(self, contents: Contents) -> None:
        self.put_back_local(contents)
        _copy_back(self._outside, contents.outside())
        contents.put_small(self.small)

    def put_back_local(self, contents: Contents) -> None:
        restore_rng(self.rng)
        _copy_back(self._buffers, contents.buffers())


def _cloned(tensors: list[tuple[str, Tensor]], last: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors. To compare one with its last copy takes a sixth of a copy's time."""
    copies = {}
    for name, tensor in tensors:
        held, now = last.get(name), tensor.detach()
        copies[name] = held if held is not None and equal_bits(held, now) else now.clone()
    return copies


def _copy_back(held: dict[str, Tensor], tensors: list[tuple[str, Tensor]]) -> None:
    with torch.no_grad():
        for name, tensor in tensors:
            if name in held:
                tensor.copy_(held[name])
