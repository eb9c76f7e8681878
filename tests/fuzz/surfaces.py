"""All surfaces, by name."""

from __future__ import annotations

from tests.fuzz.damaged import DAMAGED
from tests.fuzz.jobs import JOBS
from tests.fuzz.raw import RAW
from tests.fuzz.rpc import RPC
from tests.fuzz.shown import SHOWN
from tests.fuzz.store import STORE
from tests.fuzz.surface import Surface
from tests.fuzz.tls import TLS
from tests.fuzz.tokens import TOKENS

SURFACES: dict[str, Surface] = {
    one.name: one for one in (RPC, RAW, TLS, TOKENS, STORE, JOBS, SHOWN, DAMAGED)
}
