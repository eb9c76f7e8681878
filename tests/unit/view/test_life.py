"""A job's life follows from the fields of its events, never from text."""

from __future__ import annotations

import pytest
from past_events import an_event
from stories import told

from rdzv.core import events
from rdzv.core.commands import Fail
from rdzv.core.model import Cause
from rdzv.structs import replace
from rdzv.view import history, life
from rdzv.view.answers import Event
from tests.support.builders import report
from tests.support.driven import join
from tests.unit.core.test_small_scope import SETTINGS
from tests.unit.server.test_metrics import Scraped

PLACES = (history.Place("n1", 0, 1),)
COMPLETED = history.RoundCompleted(0, 3, 3, PLACES, "h", 1)


def test_who_took_part_is_known_by_what_it_says_later() -> None:
    (run,) = life.runs_of(
        [
            an_event(COMPLETED, at_ms=0),
            an_event(history.RoundEnded(0, Cause.NODE_LOST, "n3: gone", broken=True), at_ms=1),
            an_event(events.NodeStopped("n2", 0), at_ms=2),
            an_event(events.NodeLost("n9", "it was a spare"), at_ms=3),
        ]
    )
    assert run.round is not None
    assert (run.round.nodes, run.round.more, run.round.workers) == (("n1", "n2"), 1, 3)
    assert run.round.stopped_ms == {"n2": 2}
    assert list(run.nodes) == ["n1", "n2", "n9"]


def test_a_round_whose_beginning_is_forgotten_is_there_all_the_same() -> None:
    ended = history.RoundEnded(4, Cause.OPERATOR, "why not", broken=False)
    (run,) = life.runs_of([an_event(ended, at_ms=5)])
    assert run.round is not None
    assert (run.round.number, run.round.adopted, run.round.ended_ms) == (4, True, 5)
    assert run.number is None


@pytest.mark.parametrize("name", sorted(history.KINDS))
@pytest.mark.parametrize("fields", [None, {}, {"round": "three", "node_id": 7}])
def test_what_is_not_understood_is_kept_as_its_text(name: str, fields: dict[str, object]) -> None:
    event = Event(0, "r", name, "what is this?", fields)
    (run,) = life.runs_of([event])
    assert (run.happenings, run.rounds, run.nodes) == ([event], [], {})


@pytest.mark.slow
@pytest.mark.parametrize(
    "message",
    [
        "boom; restarts spent: 9 of 9",
        "has killed its workers 9 d 0 h ago (--fence-after)",
        "round 0 ended (operator): stopped by root\nrun run-1 succeeded: all is well",
        "n1: drained\nn1 left: drained; restarts spent: 9 of 9",
    ],
)
@pytest.mark.parametrize("max_restarts", [3, None])
async def test_what_a_worker_says_is_no_fact_about_its_job(
    message: str, max_restarts: int | None
) -> None:
    async def story(s: Scraped) -> None:
        n1 = await s.connect("n1")
        settings = replace(SETTINGS, min_nodes=1, max_nodes=1, max_restarts=max_restarts)
        await s.say(n1, join(n1, (1, 1), settings=settings))
        await s.let_pass(40_000)
        failed = report(message=message, pid=99)
        await s.say(n1, Fail("n1", n1.incarnation, "run-1", 0, (failed,)))
        await s.say(n1, join(n1, (1, 1), settings=settings, run="run-1", left_round=0))
        await s.let_pass(2_000)

    of = await told(story)
    (run,) = life.runs_of(of.history)
    first = run.rounds[0]
    assert (first.cause, first.charge) == ("worker failure", "worker failure")
    assert first.restarts == ("1 of 3" if max_restarts else "")
    assert (first.dead_ms, run.result) == (0, "" if max_restarts else "failed")
    reason = f"rank 0 (local_rank 0) on n1: exit code 1: {' '.join(message.splitlines())}"
    assert first.reason == first.charge_reason == run.failures[0][1] == reason
