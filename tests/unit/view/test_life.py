"""A history is read back into what it was made of: every event that there is, in today's words."""

from __future__ import annotations

import typing

import pytest

from rdzv.core import events
from rdzv.core.model import Cause
from rdzv.server.telemetry import event_lines
from rdzv.view import life
from rdzv.view.answers import Event
from tests.unit.server.test_driver import every_event


def line(event: events.Event) -> Event:
    return Event(0, "run-1", type(event).__name__, event_lines.describe(event))


def test_what_is_read_is_what_there_is() -> None:
    """An event that is not among them is told as it is, in a sentence of its own."""
    assert life._WORDS.keys() <= {kind.__name__ for kind in typing.get_args(events.Event)}


@pytest.mark.parametrize("event", every_event(), ids=lambda event: type(event).__name__)
def test_every_event_is_read_back(event: events.Event) -> None:
    said = life.words(line(event))
    assert bool(said) is (type(event).__name__ in life._WORDS)
    for key, attribute in (("node", "node_id"), ("round", "round"), ("cause", "cause")):
        if key in said and isinstance(wanted := getattr(event, attribute, None), str | int):
            assert said[key] == str(wanted)
    if "reason" in said and isinstance(wanted := getattr(event, "reason", None), str):
        assert said["reason"] == wanted


@pytest.mark.parametrize("cause", Cause)
def test_every_cause_is_read_back(cause: Cause) -> None:
    for spent in (None, 3):
        settled = events.RoundSettled(7, cause, "a (b): c; d", 1, spent)
        said = life.words(line(settled))
        assert (said["round"], said["cause"], said["reason"]) == ("7", cause, "a (b): c; d")
        assert said.get("most") == (None if spent is None else "3")


@pytest.mark.parametrize("node", ["n1", "gpu-7.rack:2", "a@b", "_x", "9"])
def test_names_of_nodes_are_read_back(node: str) -> None:
    assert life.words(line(events.NodeLost(node, "x: y")))["node"] == node
    assert life.words(line(events.NodeStopped(node, 3)))["node"] == node
    place = f"round 3 complete: {node}=0..7 n2=8 and 3 more nodes, world_size 9, MASTER h:1"
    (run,) = life.runs_of([Event(0, "r", "RoundCompleted", place)])
    assert run.round is not None
    assert (run.round.nodes, run.round.more, run.round.workers) == ((node, "n2"), 3, 9)


def test_who_took_part_is_known_by_what_it_says_later() -> None:
    place = "round 0 complete: n1=0 and 2 more nodes, world_size 3, MASTER h:1"
    (run,) = life.runs_of(
        [
            Event(0, "r", "RoundCompleted", place),
            Event(1, "r", "RoundEnded", "round 0 ended (node lost): n3: gone"),
            Event(2, "r", "NodeStopped", "n2 stopped its workers of round 0"),
            Event(3, "r", "NodeLost", "n9 was lost: it was a spare"),
        ]
    )
    assert run.round is not None
    assert (run.round.nodes, run.round.more) == (("n1", "n2"), 1)
    assert run.round.stopped_ms == {"n2": 2}


def test_a_round_whose_beginning_is_forgotten_is_there_all_the_same() -> None:
    (run,) = life.runs_of([Event(5, "r", "RoundEnded", "round 4 ended (operator): why not")])
    assert run.round is not None
    assert (run.round.number, run.round.adopted, run.round.ended_ms) == (4, True, 5)
    assert run.number is None


@pytest.mark.parametrize("name", sorted(life._WORDS))
def test_what_is_not_understood_is_kept_as_its_text(name: str) -> None:
    (run,) = life.runs_of([Event(0, "r", name, "what is this?")])
    assert run.happenings == [(0, name, "what is this?")]
