"""`rdzvctl stacks` says so if no rank waits for another."""

from __future__ import annotations

from datetime import UTC

import pytest

from rdzv.core.evidence.collectives import CollectiveRecord, GroupRecord, HangCause
from rdzv.core.evidence.stacks import SilentNode, WorkerStack
from rdzv.ctl.as_text_stacks import text
from rdzv.ctl.layout import Page
from rdzv.view.answers import StackGroup, StackReport

PAGE = Page(width=100, colour=False, now_s=61, zone=UTC)
NOBODY_WAITS = "\nno rank has waited in a collective for longer than 2 s\n"
DONE = (GroupRecord("0", "default_pg", 7, (CollectiveRecord(7, "all_reduce", "[4]", True, 10),)),)
CAUSE = HangCause("absent", (1,), "0", 7, "all_reduce", (0,), 9_000, "RANK 1 is missing", ())


def shown(
    *records: tuple[GroupRecord, ...],
    cause: HangCause | None = None,
    silent: tuple[SilentNode, ...] = (),
) -> str:
    stacks = tuple(
        WorkerStack(rank, rank, 4711 + rank, "S", node_id="n1", collectives=record)
        for rank, record in enumerate(records)
    )
    groups = (StackGroup(tuple(range(len(records))), "in step at train.py:41"),)
    report = StackReport("a", "r", 0, 10, "asked", "", groups, stacks, 0, silent, cause)
    return text(report, PAGE, raw=False)


def test_nobody_waits() -> None:
    assert NOBODY_WAITS in shown(DONE, DONE)


@pytest.mark.parametrize(
    "told",
    [
        pytest.param(shown(DONE, DONE, cause=CAUSE), id="one is missing"),
        pytest.param(shown(DONE, ()), id="one has no record"),
        pytest.param(shown(DONE, silent=(SilentNode("n2", 1, 1, "away"),)), id="one is silent"),
    ],
)
def test_otherwise_nothing_is_said_of_it(told: str) -> None:
    assert "no rank has waited" not in told
