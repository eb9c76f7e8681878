"""The picture of the last restarts: what it says, and that nothing in it is markup."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from past_events import an_event

from rdzv.core import events
from rdzv.core.model import Cause
from rdzv.structs import replace
from rdzv.view import history
from rdzv.view.answers import Event
from rdzv.view.history import NotKept, Place, RoundCompleted, RoundEnded, RoundSettled, WorkerFailed
from rdzv.view.life import Run, runs_of
from rdzv.view.restart_picture import KEPT, LAST, NEW, ROWS, late_node, picture, restarts, ways

FIRST = RoundCompleted(0, 3, 6, tuple(Place(f"n{n}", 2 * n, 2) for n in range(3)), "h", 1)
FAILED = WorkerFailed(0, "n1", 3, 1, 4711, 1, None, "ValueError: <b>")
ENDED = RoundEnded(0, Cause.WORKER_FAILURE, "RANK 3 failed", broken=True)
SETTLED = RoundSettled(0, Cause.WORKER_FAILURE, "RANK 3 failed", 1, 3, None)
NEXT = replace(FIRST, round=1, kept=5, not_kept=(NotKept("failed", 1, (3,)),))
STARTED = events.WorkersStarted(1, 5, 1, 0, (events.NewWorker(3, "n1", "warm", "it failed"),))


def run_of(*kept: tuple[int, history.Kept]) -> Run:
    (run,) = runs_of([an_event(one, at_ms=at_ms) for at_ms, one in kept])
    return run


def stops(*times: int, round_: int = 0) -> list[tuple[int, history.Kept]]:
    return [(at_ms, events.NodeStopped(f"n{n}", round_)) for n, at_ms in enumerate(times)]


def a_failure() -> Run:
    """A worker fails; one node stops late; all others are kept, and train again after 3 s."""
    return run_of(
        (0, FIRST),
        (10_000, FAILED),
        (10_000, ENDED),
        *stops(10_100, 10_200, 12_100),
        (12_100, SETTLED),
        (12_200, NEXT),
        (12_300, STARTED),
        (13_200, events.FirstStepMade(1, "n0", 0, 7, age_ms=200)),
    )


def drawn(run: Run, now_ms: int = 20_000) -> tuple[str, list[ElementTree.Element]]:
    """Parse the picture, strictly, and return its words and all of its shapes."""
    root = ElementTree.fromstring(picture(run, now_ms))
    name = "{http://www.w3.org/2000/svg}"
    words = root.findtext(f"{name}desc")
    assert words is not None
    return words, list(root.iter())


def titles(shapes: list[ElementTree.Element], **attributes: str) -> list[str]:
    """Return what shapes with these attributes are about."""
    found = [one for one in shapes if attributes.items() <= one.attrib.items()]
    return [text for one in found for text in (child.text for child in one) if text]


def test_who_failed_was_kept_is_new_and_was_late() -> None:
    words, shapes = drawn(a_failure())
    assert words == (
        "Round 0 ended (worker failure); rank 3 (local_rank 1) on n1: exit code 1: ValueError: <b>;"
        " n2 stopped last, after 2.1 s; workers of round 1: 5 kept, 1 warm: RANK 3 on n1 is warm "
        "(it failed); stopped after 2.1 s, complete 0.1 s later, first step 0.8 s after that."
    )
    kept = ("0 on n0", "1 on n0", "2 on n1", "4 on n2", "5 on n2")
    assert titles(shapes, fill=KEPT) == [f"RANK {rank}: kept" for rank in kept]
    assert titles(shapes, stroke=NEW) == ["RANK 3 on n1: warm"]
    text = [one.text or (one[-1].tail if len(one) else "") for one in shapes]
    assert "late" in text
    assert text.count("✕") == 2  # One is in the key.


def test_a_lost_node_and_the_one_in_its_place() -> None:
    places = (*FIRST.participants[:2], Place("n9", 4, 2))
    run = run_of(
        (0, FIRST),
        (10_000, RoundEnded(0, Cause.NODE_LOST, "n2: gone", broken=True, cause_node_id="n2")),
        (10_000, events.NodeLost("n2", "its lease expired")),
        *stops(10_100, 10_200),
        (10_200, RoundSettled(0, Cause.NODE_LOST, "n2: gone", 0, 3, None)),
        (10_300, replace(FIRST, round=1, participants=places)),
    )
    words, shapes = drawn(run)
    assert "n2 was lost: its lease expired; n9 is new; stopped after 0.2 s" in words
    assert "n9 is new in round 1" in titles(shapes, fill=NEW)
    assert late_node(run.rounds[0]) is None


@pytest.mark.parametrize(("last_ms", "is_late"), [(10_900, False), (11_100, True)])
def test_late_is_who_lets_the_others_wait(last_ms: int, is_late: bool) -> None:
    run = run_of((0, FIRST), (10_000, ENDED), *stops(10_100, 10_200, last_ms))
    assert (late_node(run.rounds[0]) == "n2") is is_late
    # Where all take long, nobody is late.
    run = run_of((0, FIRST), (10_000, ENDED), *stops(14_000, 15_000, 16_000))
    assert late_node(run.rounds[0]) is None


def test_a_restart_that_still_goes_on_is_drawn_until_now() -> None:
    run = run_of((0, FIRST), (10_000, ENDED), *stops(10_100))
    words, shapes = drawn(run, now_ms=15_000)
    assert words.endswith("no round is complete since.")
    assert [one.text for one in shapes if one.text in ("now", "5.0 s")] == ["now", "5.0 s"]


def test_what_is_not_listed_is_not_claimed_to_be_kept() -> None:
    """History lists the first RANKs of each kind only."""
    many = replace(NEXT, nodes=99, world_size=198, kept=100, not_kept=())
    run = run_of((0, FIRST), (10_000, ENDED), (10_100, SETTLED), (10_200, many))
    before, after = run.rounds
    assert ways("n0", FIRST.participants[0], before, after) == ["", ""]
    assert "96 more nodes" in picture(run, 0)


def test_a_large_or_empty_history_has_a_picture_too() -> None:
    assert "No restart in this run." in picture(run_of((0, FIRST)), 0)
    assert "No restart in this run." in picture(Run("", 0), 0)
    past: list[tuple[int, history.Kept]] = []
    for number in range(50):
        places = tuple(Place(f"n{n}", n, 1) for n in range(8))
        past.append((1_000 * number, RoundCompleted(number, 500, 500, places, "h", 1)))
        past += [(1_000 * number + 1, events.NodeStopped(f"n{n}", number)) for n in range(300)]
        past.append((1_000 * number + 1, replace(ENDED, round=number)))
    run = run_of(*past)
    assert len(restarts(run)) == LAST
    text = picture(run, 10**6)
    assert len(text) < 40_000
    assert f"{500 - ROWS} more nodes" in text


def test_no_name_becomes_markup() -> None:
    evil = "</svg><script>alert(1)</script>\x1b\x00\"'&"
    run = run_of(
        (0, replace(FIRST, participants=(Place(evil, 0, 2),))),
        (1, replace(FAILED, node_id=evil, message=evil)),
        (1, replace(ENDED, reason=evil)),
        (2, events.NodeLost(evil, evil)),
        (2, events.RankStraggles(0, 0, evil)),
        (3, replace(NEXT, participants=(Place(evil, 0, 2),))),
        (4, replace(STARTED, new=(events.NewWorker(0, evil, evil, evil),))),
    )
    words, shapes = drawn(run)
    assert "alert(1)" in words
    known = {"g", "svg", "title", "desc", "text", "rect"}
    assert {one.tag.partition("}")[2] for one in shapes} == known
    # Fields of other types are kept as text, of which nothing is drawn.
    (odd,) = runs_of([Event(0, "r", "RoundCompleted", "?", {"round": "three"})])
    assert "No restart" in picture(odd, 0)
