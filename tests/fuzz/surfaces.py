"""All surfaces, by name."""

from __future__ import annotations

from tests.fuzz.damaged import DAMAGED
from tests.fuzz.jobs import JOBS
from tests.fuzz.raw import RAW
from tests.fuzz.rpc import RPC
from tests.fuzz.shown import SHOWN
from tests.fuzz.store import STORE
from tests.fuzz.surface import Surface

SURFACES: dict[str, Surface] = {one.name: one for one in (RPC, RAW, STORE, JOBS, SHOWN, DAMAGED)}
