"""No room outgrows its row in ARCHITECTURE.md, and what is small on purpose gives its reason."""

from __future__ import annotations

import re

import pytest

from tests.support.source_tree import MAP
from tests.support.weight import rows, small, weights


def test_no_room_outgrows_its_row() -> None:
    limits = rows()
    weighed = weights(list(limits))
    assert weighed.keys() == limits.keys(), "a folder without a row"
    grown = {room: now for room, now in weighed.items() if now.exceeds(limits[room])}
    assert not grown, f"take something out, or raise the rows {limits} and say what was removed"


@pytest.mark.slow
def test_a_row_follows_what_is_removed() -> None:
    limits = rows()
    far = [room for room, now in weights(list(limits)).items() if now.is_far_below(limits[room])]
    assert far == [], "run `make weight`"


@pytest.mark.slow
def test_what_is_small_gives_its_reason() -> None:
    text = MAP.read_text(encoding="utf-8").split("## Small on purpose\n")[1].split("\n## ")[0]
    listed = re.findall(r"^\* ((?:`[\w/.]+(?::\w+)?`(?:, )?)+): \S", text, re.M)
    reasoned = {name for names in listed for name in re.findall(r"`([^`]+)`", names)}
    at_most = re.search(r"at most (\d+) more", text)
    assert at_most
    found = set(small())
    assert reasoned - found == set(), "no longer small, or gone"
    assert len(found - reasoned) <= int(at_most[1]), sorted(found - reasoned)
