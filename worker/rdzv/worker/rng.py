"""Captures, restores and derives the states of this process's random number generators."""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any


def capture() -> dict[str, Any]:
    """Return the generator states of Python, torch, the GPU and, if it is imported, numpy."""
    import torch

    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    if (numpy := sys.modules.get("numpy")) is not None:
        states["numpy"] = numpy.random.get_state()
    return states


def restore(states: dict[str, Any]) -> None:
    """Restore previously captured states."""
    import torch

    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
    if "numpy" in states:
        sys.modules["numpy"].random.set_state(states["numpy"])


def derive(seed: int, rank: int, step: int) -> None:
    """Seed all generators for a rank that enters the job at a given step.

    The same three numbers produce the same states in every process; other numbers produce others.
    """
    import torch

    digest = hashlib.blake2b(f"{seed}/{rank}/{step}".encode(), digest_size=8).digest()
    derived = int.from_bytes(digest, "big") >> 1
    random.seed(derived)
    torch.manual_seed(derived)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(derived & 0xFFFFFFFF)
