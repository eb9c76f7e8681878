"""Events of a job's past, as received by a client."""

from __future__ import annotations

import json

import msgspec

from rdzv.view.answers import Event
from rdzv.view.history import Kept
from rdzv.view.sentences import sentence


def an_event(kept: Kept, run: str | None = "r", at_ms: int = 0) -> Event:
    fields = json.loads(msgspec.json.encode(kept))
    return Event(at_ms, run, type(kept).__name__, sentence(kept), fields)
