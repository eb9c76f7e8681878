"""A short run of every surface: what once found something, and the same few new inputs each time.

Long runs are `make fuzz`.
"""

from __future__ import annotations

import pytest

from tests.fuzz.engine import fuzz
from tests.fuzz.surfaces import SURFACES

pytestmark = pytest.mark.slow

INPUTS = {
    **{"rpc": 15, "bytes": 15, "tls": 15, "tokens": 15},
    **{"c10d": 40, "spec": 40, "text": 20, "config": 60},
}
"""Beside the corpus; a second or so of each."""
SECONDS = 120.0
"""No bound that counts, but where a machine can not do even that."""
SEED = 4711


@pytest.mark.parametrize("name", sorted(SURFACES))
def test_hostile_input_is_refused_and_the_rest_goes_on(name: str) -> None:
    result = fuzz(SURFACES[name], SECONDS, first_seed=SEED, most=INPUTS[name])
    assert not result.found
    assert result.inputs > result.replayed
    assert result.lines > 0
